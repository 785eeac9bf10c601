"""Steps that take some of the examples, such as the hardest ones, on replicas that may have fewer, or none."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from keras.optimizers import SGD
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.errors import StepError

X = np.random.default_rng(0).normal(size=(21, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(21, 3)).astype("float32")
Loss = Callable[[Any, Any], Any]


def losses(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y - p), axis=-1)


def hardest_half(y: Any, p: Any) -> Any:
    found = losses(y, p)
    return tf.reduce_mean(tf.math.top_k(found, tf.maximum(1, tf.shape(found)[0] // 2)).values)


def two_hardest(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.sort(losses(y, p))[-2:])


def worst(y: Any, p: Any) -> Any:
    return tf.gather(losses(y, p), tf.argmax(losses(y, p)))


def median(y: Any, p: Any) -> Any:
    return tf.sort(losses(y, p))[tf.shape(y)[0] // 2]


def first(y: Any, p: Any) -> Any:
    return tf.reduce_mean(losses(y, p)) + losses(y, p)[0]


def three_hardest(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.math.top_k(losses(y, p), 3).values)


def of_all(loss: Loss) -> Loss:
    def gathered(y: Any, p: Any) -> Any:
        return loss(*kde.gather_rows((y, p)))

    return gathered


def in_a_step(library: Any, loss: Loss) -> Any:
    class Net(library.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                value = loss(y, self(x, training=True))
            self.optimizer.apply(tape.gradient(value, self.trainable_variables), self.trainable_variables)
            return {"value": value}

    return Net, "mse"


def in_compute_loss(library: Any, loss: Loss) -> Any:
    class Net(library.Sequential):
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = True
        ) -> Any:
            return loss(y, y_pred)

    return Net, "mse"


def compiled(library: Any, loss: Loss) -> Any:
    return library.Sequential, loss


WAYS = [in_a_step, in_compute_loss, compiled]
TAKING = [hardest_half, two_hardest, worst, median, first]
FAILING = [loss for loss in TAKING if loss is not two_hardest]  # which takes what there is


def made(library: Any, strategy: Any, way: Any, loss: Loss, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        cls, of_compile = way(library, loss)
        net = cls([keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)], name="net")
        net.compile(SGD(0.1), of_compile, **options)
    return net


def trained(library: Any, strategy: Any, way: Any, loss: Loss, size: int) -> Any:
    """Return the weights after batches of 4, 8 or 7, of which the last has one, five or all examples."""
    net = made(library, strategy, way, of_all(loss))
    net.fit(X, Y, batch_size=size, shuffle=False, verbose=0)
    return net.get_weights()


def trained_on_workers(strategy: Any, folder: Any, way: str, loss: str, size: int) -> Any:
    return trained(kde, strategy, globals()[way], globals()[loss], size)


@functools.cache
def on_one_device(way: Any, loss: Loss, size: int) -> Any:
    return trained(keras, tf.distribute.get_strategy(), way, loss, size)


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], ["mirrored2"]))
@pytest.mark.parametrize("size", rotating([4, 8, 7], [4]))
@pytest.mark.parametrize("loss", rotating(TAKING, [hardest_half]))
@pytest.mark.parametrize("way", rotating(WAYS, [in_compute_loss]))
def test_of_gathered_rows_they_are_those_of_one_device(strategies, way, loss, size, kind):
    assert_close(trained(kde, strategies.get(kind), way, loss, size), on_one_device(way, loss, size))


@pytest.mark.parametrize(
    ("way", "loss", "size"),
    [
        pytest.param(
            way,
            loss,
            size,
            marks=[
                on_two_workers(trained_on_workers, way.__name__, loss.__name__, size),
                pytest.mark.rotating,
            ],
        )
        for i, loss in enumerate(TAKING)
        for size in (4, 8)
        for way in [WAYS[i % len(WAYS)]]
    ],
)
def test_so_they_are_on_two_workers(values, way, loss, size):
    for found in values:
        assert_close(found, on_one_device(way, loss, size))


@pytest.mark.parametrize("loss", rotating(FAILING, [worst]))
@pytest.mark.parametrize("way", rotating(WAYS, [in_a_step]))
def test_a_replica_without_examples_is_an_error_that_names_step_line_and_fix(mirrored, way, loss):
    net = made(kde, mirrored, way, loss, check=False)
    message = r"'net\.train_step' needs more examples than a replica.* on a batch of 1, .* have none.*kde\.gather_rows"
    with pytest.raises(StepError, match=message):
        net.fit(X, Y, batch_size=4, shuffle=False, verbose=0)


@pytest.mark.slow
def test_a_replica_with_too_few_examples_is_that_error_too_and_leaves_the_weights(mirrored):
    net = made(kde, mirrored, in_a_step, three_hardest, check=False)
    before = net.get_weights()
    message = r"test_hardest_examples\.py, line \d+\): input must have at least k columns.*batch of 4.* have 2 each"
    with pytest.raises(StepError, match=message):
        net.fit(X[:4], Y[:4], verbose=0)
    assert all(map(np.array_equal, before, net.get_weights()))


def four(values: Any) -> Any:
    """Values of the first four examples, of which replicas have two each."""
    return tf.ensure_shape(values[:4], (4, *values.shape[1:]))


def stepping(kind: str) -> Any:
    class Net(kde.Sequential):
        def test_step(self, data: Any) -> Any:
            if kind != "test":
                return super().test_step(data)
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"value": tf.reduce_mean(four(losses(y, self(x))))}

        def predict_step(self, data: Any) -> Any:
            found = super().predict_step(data)
            return found + tf.reduce_max(four(found)) if kind == "predict" else found

        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            found = super().call(inputs, training=training, mask=mask)
            may = kind == "call" and (inputs.shape[0] is None or inputs.shape[0] < 5)
            return found + tf.reduce_max(four(found)) if may else found

    return Net


RUNS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda net: net.fit(X[:4], Y[:4], verbose=0),
    "evaluate": lambda net: net.evaluate(X[:4], Y[:4], verbose=0),
    "predict": lambda net: net.predict(X[:4], verbose=0),
    "train_on_batch": lambda net: net.train_on_batch(X[:4], Y[:4]),
    "test_on_batch": lambda net: net.test_on_batch(X[:4], Y[:4]),
    "predict_on_batch": lambda net: net.predict_on_batch(X[:4]),
}
FEW = [(kind, run) for run in RUNS for kind in ("test", "predict", "call") if kind in run or kind == "call"]


@pytest.mark.parametrize("eager", rotating([False, True], [False]))
@pytest.mark.parametrize(("kind", "run"), rotating(FEW, [("predict", "predict")], slow=[("call", "train_on_batch")]))
def test_whatever_runs_it_a_step_of_too_few_examples_is_that_error(mirrored, kind, run, eager):
    keras.utils.set_random_seed(1)
    with mirrored.scope():
        net = stepping(kind)([keras.Input((5,)), keras.layers.Dense(3)], name="net")
        net.compile(SGD(0.1), "mse", run_eagerly=eager, check=False)
    message = r"'net\.\w+_step' needs more .*test_hardest_examples\.py, line \d+\).*batch of 4, .*have 2 each"
    with pytest.raises(StepError, match=message):
        RUNS[run](net)


@pytest.mark.rotating
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("run", ["fit", "evaluate"])
def test_so_is_one_of_a_loop(mirrored, run, eager):
    keras.utils.set_random_seed(1)
    with mirrored.scope():
        head, optimizer = keras.layers.Dense(3), SGD(0.1)
        head.build((None, 5))
        optimizer.build(head.trainable_variables)

    def test(replica: Any, data: Any) -> Any:
        return {"value": tf.reduce_mean(four(losses(data[1], head(data[0]))))}

    def step(replica: Any, data: Any) -> Any:
        with tf.GradientTape() as tape:
            value = test(replica, data)["value"]
        optimizer.apply(tape.gradient(value, head.trainable_variables), head.trainable_variables)
        return {"value": value}

    parts = {"head": head, "optimizer": optimizer}
    loop = kde.TrainLoop(
        step=step, test=test, parts=parts, reduce={"value": "mean"}, strategy=mirrored, run_eagerly=eager, check=False
    )
    data = tf.data.Dataset.from_tensor_slices((X[:4], Y[:4])).batch(4)
    with pytest.raises(StepError, match=r"needs more .*, line \d+\).*batch of 4, .*have 2 each"):
        getattr(loop, run)(data, verbose=0)


@pytest.mark.rotating
def test_a_step_that_fails_of_something_else_fails_as_it_does_on_one_device(mirrored):
    def loss(y: Any, p: Any) -> Any:
        return tf.reduce_mean(tf.debugging.check_numerics(y / 0.0, "here") - p)

    net = made(kde, mirrored, in_a_step, loss, check=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="here"):
        net.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.checks_fit
@pytest.mark.parametrize("way", rotating(WAYS, [compiled]))
def test_what_needs_more_than_a_few_examples_is_checked_on_more(mirrored, way):
    with pytest.warns(UserWarning, match=r"does not train on 2 replicas.* on 16 examples.*the hardest ones\), gather"):
        made(kde, mirrored, way, three_hardest).fit(X[:16], Y[:16], batch_size=16, verbose=0)
