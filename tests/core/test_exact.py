"""With exact=True, all replicas together train as stock Keras does on one device, random numbers included."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from strategies import strategies

import keras_dist_ext as kde
from keras_dist_ext.errors import CallbackError, LoopError, SeedError, StepError, StrategyError

layers = keras.layers
X = np.random.default_rng(0).normal(size=(22, 6, 4)).astype("float32")


def functional(lib: Any) -> Any:
    inputs = keras.Input((6, 4))
    x = layers.Flatten()(layers.BatchNormalization(momentum=0.8)(inputs))
    x = layers.Dropout(0.3)(layers.Dense(8, activation="tanh")(x))
    return lib.Model(inputs, layers.Dense(1)(layers.GaussianNoise(0.2)(x)))


def sequential(lib: Any) -> Any:
    return lib.Sequential(
        [layers.SpatialDropout1D(0.3), layers.LSTM(4, dropout=0.2), layers.BatchNormalization(), layers.Dense(1)]
    )


def taken_over(lib: Any) -> Any:
    stock = functional(keras)
    return stock if lib is keras else kde.adopt(stock, tf.distribute.get_strategy())


def augmented(lib: Any) -> Any:
    class Net(lib.Model):  # type: ignore[misc]
        """Draws in its step with seed=None, and in a layer."""

        def __init__(self) -> None:
            super().__init__()
            self.rest = keras.Sequential([layers.Flatten(), layers.Dropout(0.3), layers.Dense(1)])

        def call(self, x: Any, training: bool = False) -> Any:
            return self.rest(x, training=training)

        def train_step(self, data: Any) -> Any:
            x, y = data
            return super().train_step((x + keras.random.normal(keras.ops.shape(x), stddev=0.1), y))

    return Net()


def noisy(lib: Any) -> Any:
    class Net(lib.Model):  # type: ignore[misc]
        """Draws for its gradients and weights, which have no dimension of examples."""

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred)
            weights = self.trainable_variables
            noise = [keras.random.normal(w.shape, stddev=0.01) for w in weights]
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply([g + n for g, n in zip(gradients, noise, strict=True)], weights)
            weights[0].assign_add(0.1 * noise[0])
            return {**self.compute_metrics(x, y, y_pred), "loss": loss}

    inputs = keras.Input((6, 4))
    return Net(inputs, layers.Dense(1)(layers.Dropout(0.3)(layers.Flatten()(inputs))))


def trained(kind: str | None, make: Callable[[Any], Any], *, seed: int | None = None, **arguments: Any) -> Any:
    """The model after two epochs of shuffled batches, the last of 4 of 9 rows. None is stock Keras."""
    keras.utils.set_random_seed(42)
    lib: Any = keras if kind is None else kde
    with contextlib.nullcontext() if kind is None else strategies.get(kind).scope():
        model = make(lib)
        model.compile(keras.optimizers.Adam(0.005), "mse", metrics=["mae"], **arguments)
    callbacks = [] if seed is None else [kde.ReplicaSeeds(seed)]
    model.history_of_fit = model.fit(
        X, X.sum((1, 2))[:, None], batch_size=9, epochs=2, verbose=0, callbacks=callbacks
    ).history
    return model


def check(ours: Any, expected: Any) -> None:
    for one, other in zip(ours.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * max(np.abs(other).max(), 1e-2))
    for name, values in expected.history_of_fit.items():
        np.testing.assert_allclose(ours.history_of_fit[name], values, rtol=1e-5)


# By name: strategy, model, arguments of `compile`.
RUNS: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "two": ("mirrored2", functional, {}),
    "three": ("mirrored3", functional, {}),
    "four, sequential": ("mirrored4", sequential, {}),
    "taken over": ("mirrored2", taken_over, {}),
    "own step": ("mirrored3", augmented, {}),
    "own noise": ("mirrored3", noisy, {}),
    "virtual": ("mirrored2", functional, {"virtual_replicas": 4}),
    "several steps": ("mirrored2", functional, {"steps_per_execution": 2}),
    "says so twice": ("mirrored2", functional, {"batch_statistics": "global", "check": False}),
    "one device": ("one_device", functional, {}),
    "no strategy": ("default", functional, {}),
}


@functools.cache
def of_stock(make: Callable[[Any], Any]) -> Any:
    return trained(None, make)


@pytest.mark.parametrize("run", rotating(RUNS, ["two"]))
def test_replicas_train_as_stock_keras_after_set_random_seed(run: str) -> None:
    kind, make, arguments = RUNS[run]
    check(trained(kind, make, exact=True, **arguments), of_stock(make))


@pytest.mark.rotating
def test_the_seed_of_the_callback_is_drawn_from_as_on_one_device() -> None:
    ours, expected = (trained(kind, functional, seed=7, exact=True) for kind in ("mirrored3", "one_device"))
    check(ours, expected)
    other = trained("one_device", functional, seed=8, exact=True)
    assert np.abs(other.get_weights()[0] - expected.get_weights()[0]).max() > 1e-4


@pytest.mark.rotating
def test_models_that_are_saved_or_taken_over_stay_exact_until_they_are_compiled_otherwise(tmp_path: Any) -> None:
    ours = trained("mirrored2", functional, exact=True)
    ours.save(tmp_path / "model.keras")
    stock = keras.models.load_model(tmp_path / "model.keras")  # by stock Keras, as any model
    for model in (
        kde.load_model(tmp_path / "model.keras", strategies.get("mirrored3")),
        kde.adopt(ours, strategies.get("mirrored3")),
    ):
        assert model.replica_seeds.draws == "global"
        assert model.replica_runtime.batch_statistics == "global"
        np.testing.assert_allclose(model.predict(X, verbose=0), stock.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    ours.compile("sgd", "mse")
    assert (ours.replica_seeds.draws, ours.replica_runtime.batch_statistics) == ("replica", "replica")


def looped(kind: str | None) -> list[Any]:
    """Weights and losses of a step that draws, with layers that draw and normalize; None is stock Keras by hand."""
    keras.utils.set_random_seed(42)
    with contextlib.nullcontext() if kind is None else strategies.get(kind).scope():
        model, optimizer = functional(keras), keras.optimizers.SGD(0.005, momentum=0.9)
        optimizer.build(model.trainable_variables)

        def step(replica: Any, batch: Any) -> Any:
            x, y = batch
            x = x + keras.random.normal(tf.shape(x), stddev=0.1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return {"loss": loss}

        data = tf.data.Dataset.from_tensor_slices((X, X.sum((1, 2))[:, None])).batch(9)
        if kind is None:
            compiled = tf.function(step, reduce_retracing=True)
            losses = [sum(compiled(None, b)["loss"] * len(b[0]) for b in data) / len(X) for _ in range(2)]
        else:
            parts = {"net": model, "optimizer": optimizer}
            loop = kde.TrainLoop(step, parts=parts, reduce={"loss": "mean"}, exact=True)
            losses = loop.fit(data, epochs=2, verbose=0).history["loss"]
    return [np.array(losses), *model.get_weights()]


@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored3", "one_device"], []))
def test_a_loop_trains_as_its_step_does_on_one_device(kind: str) -> None:
    for one, other in zip(looped(kind), looped(None), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * max(np.abs(other).max(), 1e-2))


@pytest.mark.rotating
@pytest.mark.checks_fit
def test_what_cannot_be_exact_in_a_loop_is_an_error_before_its_first_step() -> None:
    with strategies.get("mirrored2").scope():
        equalizing = keras.Sequential(
            [keras.Input((6, 4, 1)), layers.Equalization(), layers.Flatten(), layers.Dense(1)]
        )
        plain = keras.Sequential([keras.Input((6, 4)), layers.Flatten(), layers.Dense(1)])

        def loop_of(net: Any, largest: Any, **arguments: Any) -> kde.TrainLoop:
            optimizer = keras.optimizers.SGD(0.01)

            def step(replica: Any, batch: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(largest(net(batch[0], training=True)) - batch[1]))
                optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
                return {"loss": loss}

            return kde.TrainLoop(step, parts={"net": net, "by": optimizer}, reduce={"loss": "mean"}, **arguments)

        loops = loop_of(equalizing, tf.identity, exact=True), loop_of(plain, lambda p: p - tf.reduce_max(p), exact=True)
        with pytest.raises(StrategyError, match="exact must be True or False, got 'yes'"):
            loop_of(plain, tf.identity, exact="yes")
    data = tf.data.Dataset.from_tensor_slices((X, X[:, 0, :1])).batch(9)
    for loop, message in zip(loops, ("The layer '.*' .Equalization. spreads", "`TrainLoop.check=False.`"), strict=True):
        with pytest.raises(StepError, match=message):
            loop.fit(data, verbose=0)


CONTRADICTIONS = {
    "statistics": ({"batch_statistics": "replica"}, 'exact=True and batch_statistics="replica" contradict each other'),
    "xla": ({"jit_compile": True}, "exact=True and jit_compile=True on 2 replicas: XLA draws other random numbers"),
    "text": ({"exact": "yes"}, "exact must be True or False, got 'yes'"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_arguments_that_contradict_it_change_nothing(name: str) -> None:
    arguments, message = CONTRADICTIONS[name]
    with strategies.get("mirrored2").scope():
        model = kde.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        before = model.optimizer
        with pytest.raises(StrategyError, match=message):
            model.compile("adam", "mae", **{"exact": True, **arguments})
    assert model.optimizer is before
    assert model.loss == "mse"


@pytest.mark.rotating
def test_seeds_by_which_each_replica_draws_for_itself_contradict_it_before_the_first_step() -> None:
    with strategies.get("mirrored2").scope():
        model = functional(kde)
        model.compile("sgd", "mse", exact=True)
    before = model.get_weights()
    with pytest.raises(CallbackError, match="and 'functional.*' is compiled with exact=True"):
        model.fit(X, X[:, 0, :1], verbose=0, callbacks=[kde.ReplicaSeeds(1, draws="replica")])
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), before, strict=True))


@pytest.mark.rotating
def test_what_is_drawn_for_examples_is_refused_where_all_replicas_must_have_the_same() -> None:
    class Net(kde.Model):
        def train_step(self, data: Any) -> Any:
            noise = keras.random.normal(keras.ops.shape(data[0])[:1])
            self.trainable_variables[-1].assign_add(keras.ops.mean(noise)[None])
            return super().train_step(data)

    with strategies.get("mirrored2").scope():
        inputs = keras.Input((4,))
        model = Net(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse", exact=True)
    with pytest.raises(LoopError, match="what each replica computes from its own rows or random numbers"):
        model.fit(X[:, 0], X[:, 0, :1], batch_size=11, verbose=0)


def gamma(x: Any) -> Any:
    return x * keras.random.gamma(keras.ops.shape(x), 2.0)


def centered(x: Any) -> Any:
    return x - keras.ops.mean(x, axis=0)


REFUSED: dict[str, tuple[Callable[[], Any], Any, type[Exception], str]] = {
    "draws": (lambda: layers.Lambda(gamma), "mse", SeedError, "draws by StatelessRandomGammaV3"),
    "rows that interact": (lambda: layers.Lambda(centered), "mse", StepError, "does not train on 2 replicas as on one"),
    "a loss of pairs": (layers.UnitNormalization, keras.losses.Circle(), StepError, "differs in the gradient of head"),
    "a histogram": (
        lambda: keras.Sequential([layers.Reshape((2, 2, 1)), layers.RandAugment(), layers.Flatten()]),
        "mse",
        StepError,
        "The layer '.*' .Equalization. spreads brightness by a histogram of all images of a batch",
    ),
    "a limit": (
        lambda: keras.Sequential(
            [
                layers.MelSpectrogram(fft_length=2, sequence_stride=1, num_mel_bins=2, name="mel"),
                layers.GlobalAveragePooling1D(data_format="channels_first"),
            ]
        ),
        "mse",
        StepError,
        "The layer '.*mel' .MelSpectrogram. limits all numbers by the largest one",
    ),
    "images distorted": (
        lambda: keras.Sequential([layers.Reshape((2, 2, 1)), layers.RandomElasticTransform(), layers.Flatten()]),
        "mse",
        SeedError,
        "is a RandomElasticTransform",
    ),
}


@pytest.mark.rotating
def test_layers_that_look_at_whole_batches_are_warned_of_where_they_do() -> None:
    with strategies.get("mirrored2").scope():
        model = kde.Sequential([keras.Input((2, 2, 1)), layers.RandAugment(), layers.Flatten(), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4, 2, 2, 1), "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(x, verbose=0)  # in which it changes nothing
    with pytest.warns(UserWarning, match="Equalization. spreads brightness by a histogram .* Apply it in the dataset"):
        model.fit(x, x[:, 0, 0], verbose=0)


@pytest.mark.checks_fit
@pytest.mark.parametrize("name", rotating(REFUSED, []))
def test_what_cannot_be_exact_is_an_error_before_the_first_step(name: str) -> None:
    make, loss, error, message = REFUSED[name]
    with strategies.get("mirrored2").scope():
        inputs = keras.Input((4,))
        model = kde.Model(inputs, layers.Dense(4, name="head")(make()(inputs)))
        model.compile("sgd", loss, exact=True)
    before = model.get_weights()
    y = np.arange(22) % 3 if isinstance(loss, keras.losses.Circle) else X[:, 0]
    with pytest.raises(error, match=message):
        model.fit(X[:, 0], y, batch_size=11, verbose=0)
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), before, strict=True))
