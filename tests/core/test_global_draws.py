"""With draws="global", all replicas together draw what one device draws for the global batch."""

from __future__ import annotations

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
from tensorflow.python.ops import stateless_random_ops

import keras_dist_ext as kde
from keras_dist_ext.errors import CallbackError, SeedError
from keras_dist_ext.step.global_draws import draw_rows, of_any_number
from keras_dist_ext.step.reducers import RowRange

layers = keras.layers


class Adds(layers.Layer):
    """Adds what a function draws for its input."""

    def __init__(self, draw: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)
        self.draw = draw

    def call(self, x: Any) -> Any:
        return x + self.draw(x, self.seed_generator)


def numbers(*made: Any) -> Callable[[], Any]:
    """A model of some layers after another."""

    def make() -> Any:
        return kde.Sequential([keras.Input((6, 4)), *(one() for one in made), layers.Flatten(), layers.Dense(1)])

    return make


def image() -> Any:
    inputs = keras.Input((6, 4))
    x = layers.Reshape((6, 4, 1))(inputs)
    for layer in (layers.RandomFlip(), layers.RandomContrast(0.3), layers.RandomTranslation(0.2, 0.2)):
        x = layer(x)
    x = layers.SpatialDropout2D(0.3)(layers.Conv2D(3, 2)(x))
    return kde.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))


def attention() -> Any:
    inputs = keras.Input((6, 4))
    x = layers.MultiHeadAttention(2, 3, dropout=0.3)(inputs, inputs)
    x = layers.LSTM(5, dropout=0.3, recurrent_dropout=0.3)(x)
    return kde.Model(inputs, layers.Dense(1)(x))


def raw(x: Any, seed: Any) -> Any:
    key, counter = tf.fill([1], tf.constant(7, tf.uint64)), tf.zeros([2], tf.uint64)
    return tf.raw_ops.StatelessRandomUniformV2(shape=tf.shape(x), key=key, counter=counter, alg=1)


NOISE = numbers(
    functools.partial(layers.Dropout, 0.4),
    functools.partial(layers.GaussianNoise, 0.2),
    functools.partial(layers.GaussianDropout, 0.2),
    functools.partial(layers.AlphaDropout, 0.2),
    functools.partial(layers.SpatialDropout1D, 0.2),
    functools.partial(Adds, lambda x, seed: keras.random.truncated_normal(tf.shape(x), seed=seed)),
    functools.partial(Adds, lambda x, seed: keras.random.normal((6, 4), seed=seed)),  # alike for all examples
    functools.partial(Adds, lambda x, seed: tf.cast(keras.random.randint(tf.shape(x), 0, 5, seed=seed), x.dtype)),
)
RAW = numbers(functools.partial(Adds, raw))


def trained(
    kind: str, make: Callable[[], Any], rows: int = 22, *, draws: str = "global", **arguments: Any
) -> list[Any]:
    """The weights after two epochs; the last batch has 4 of 9 rows, so that replicas have different numbers."""
    rng = np.random.default_rng(0)
    x = rng.random((rows, 6, 4), dtype="float32")
    keras.utils.set_random_seed(1)
    with strategies.get(kind).scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.001), "mse", **arguments)
    callbacks = [kde.ReplicaSeeds(42, draws=draws)]
    for _ in range(2):
        model.fit(x, x.sum((1, 2))[:, None], batch_size=9, verbose=0, shuffle=False, callbacks=callbacks)
    return model.get_weights()  # type: ignore[no-any-return]


@functools.cache
def of_one_device(make: Callable[[], Any], rows: int = 22) -> list[Any]:
    return trained("one_device", make, rows)


# By name: strategy, model, number of rows, arguments of `compile`.
RUNS: dict[str, tuple[str, Callable[[], Any], int, dict[str, Any]]] = {
    "two": ("mirrored2", NOISE, 22, {}),
    "empty": ("mirrored3", NOISE, 19, {}),  # a last batch of one row, so that two replicas have none
    "several_steps": ("mirrored4", NOISE, 22, {"steps_per_execution": 2}),
    "virtual": ("mirrored2", NOISE, 22, {"virtual_replicas": 4}),
    "image": ("mirrored3", image, 22, {}),
    "attention": ("mirrored2", attention, 22, {}),
    "raw": ("mirrored2", RAW, 22, {}),
}


@pytest.mark.parametrize("run", rotating(RUNS, ["two"]))
def test_replicas_draw_what_one_device_draws(run: str) -> None:
    kind, make, rows, arguments = RUNS[run]
    for ours, expected in zip(trained(kind, make, rows, **arguments), of_one_device(make, rows), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.rotating
def test_a_replica_draws_in_the_shape_of_its_rows_and_waits_for_no_other() -> None:
    with strategies.get("mirrored2").scope():
        model = kde.Sequential([keras.Input((8,))])
        for _ in range(2):
            model.add(layers.Dense(8))
            model.add(layers.Dropout(0.5))
        model.compile("sgd", "mse", jit_compile=False)
    x = np.zeros((12, 8), "float32")
    model.fit(x, x, batch_size=4, verbose=0, shuffle=False, callbacks=[kde.ReplicaSeeds(1, draws="global")])
    (graph,) = model.train_function.program.graphs()
    (loop,) = [op for op in graph.get_operations() if op.type == "While"]
    body = graph._get_function(loop.get_attr("body").name).graph
    drawing = [op for op in body.get_operations() if op.type == "StatelessRandomUniformV2"]
    assert [op.outputs[0].shape.rank for op in drawing] == [2] * 4
    waited_for = [{op for op in _before(drawn) if op.type == "StatelessRandomUniformV2"} for drawn in drawing]
    assert [len(others) for others in waited_for] == [0, 1, 0, 1]


def _before(op: tf.Operation) -> set[tf.Operation]:
    found: set[tf.Operation] = set()
    left = [op]
    while left:
        current = left.pop()
        others = {*(value.op for value in current.inputs), *current.control_inputs} - found
        found |= others
        left += others
    return found


@pytest.mark.rotating
def test_draws_by_replica_are_not_those_of_one_device() -> None:
    ours, expected = trained("mirrored2", NOISE, draws="replica"), of_one_device(NOISE)
    assert max(np.abs(one - other).max() for one, other in zip(ours, expected, strict=True)) > 1e-2


@pytest.mark.parametrize("sizes", [(7, 3), (7, 4), (0,), (2,)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", ["uniform", "normal", "truncated_normal"])
def test_rows_have_the_bits_of_the_whole(kind: str, dtype: str, sizes: tuple[int, ...]) -> None:
    ops: Any = stateless_random_ops.gen_stateless_random_ops_v2
    op = getattr(ops, f"stateless_{kind}_v2" if kind == "truncated_normal" else f"stateless_random_{kind}_v2")
    generator = tf.random.Generator.from_seed(5, alg="philox")
    counter, key = tf.cast(generator.state[:2], tf.uint64), tf.cast(generator.state[2:], tf.uint64)

    def draw(shape: Any, counter: Any, name: Any = None) -> Any:
        return op(shape, key, counter, 1, tf.as_dtype(dtype))

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)] * 2)
    def rows(first: Any, count: Any) -> Any:
        shape = tf.stack([count, *sizes])
        return draw_rows(kind, shape, tf.as_dtype(dtype), counter, draw, RowRange(first, count, 4000))

    whole = draw([4000, *sizes], counter)
    for first, count in ((0, 4), (1, 3), (5, 0), (777, 101), (3001, 999)):
        assert np.array_equal(rows(first, count), whole[first : first + count])


# By what is drawn: how, and what the error says of it.
REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "keras gamma": (lambda x, seed: keras.random.gamma(tf.shape(x), 1.0, seed=seed), "StatelessRandomGamma"),
    "keras beta": (lambda x, seed: keras.random.beta(tf.shape(x), 1.0, 2.0, seed=seed), "StatelessRandomGamma"),
    "keras binomial": (lambda x, seed: keras.random.binomial(tf.shape(x), 3.0, 0.5, seed=seed), "Binomial"),
    "keras categorical": (
        lambda x, seed: tf.cast(keras.random.categorical(x[:, 0], 6, seed=seed), x.dtype)[..., None],
        "StatelessMultinomial",
    ),
    "sorted": (
        lambda x, seed: tf.gather(x, tf.argsort(keras.random.uniform(tf.shape(x)[:1], seed=seed))),
        "sorts one random number for each",
    ),
    "square": (
        lambda x, seed: keras.random.uniform((tf.shape(x)[0], tf.shape(x)[0]), seed=seed)[:, :1, None],
        "another that depends on the examples",
    ),
    "keras shuffle": (lambda x, seed: keras.random.shuffle(x, seed=seed), "shuffles its examples"),
    "gamma": (lambda x, seed: tf.random.stateless_gamma(tf.shape(x), [1, 2], 1.0), "StatelessRandomGamma"),
    "binomial": (lambda x, seed: tf.random.stateless_binomial(tf.shape(x), [1, 2], 3.0, 0.5, x.dtype), "Binomial"),
    "categorical": (
        lambda x, seed: tf.cast(tf.random.stateless_categorical(x[:, 0], 6, [1, 2]), x.dtype)[..., None],
        "StatelessMultinomial",
    ),
    "poisson": (lambda x, seed: tf.random.stateless_poisson(tf.shape(x), [1, 2], 3.0, x.dtype), "Poisson"),
    "stateless shuffle": (lambda x, seed: tf.random.experimental.stateless_shuffle(x, [1, 2]), "Shuffle"),
    "truncated": (
        lambda x, seed: tf.random.stateless_parameterized_truncated_normal(tf.shape(x), [1, 2]),
        "StatelessParameterizedTruncatedNormal",
    ),
    "shuffle": (lambda x, seed: tf.random.shuffle(x), "an op of tf.random"),
    "uniform": (lambda x, seed: tf.random.uniform(tf.shape(x)), "an op of tf.random, which keeps its own place"),
    "alike": (lambda x, seed: tf.random.normal([6, 4]), "an op of tf.random"),
    "dropout": (lambda x, seed: tf.nn.dropout(x, 0.3), "an op of tf.random"),
    "raw stateful": (lambda x, seed: tf.raw_ops.RandomUniform(shape=[6, 4], dtype=x.dtype), "keeps its own place"),
    "generator": (lambda x, seed: tf.random.get_global_generator().normal(tf.shape(x)), "Rng|keeps its own place"),
    "second": (lambda x, seed: keras.random.uniform((6, tf.shape(x)[0]), seed=seed)[0, 0], "that is not the first"),
    "constant": (  # which is the number of examples where that is known
        lambda x, seed: keras.random.uniform((x.shape[0] or 1, 6, 4), seed=seed),
        "where the number of rows is known",
    ),
    "loop": (
        lambda x, seed: tf.map_fn(lambda row: row + keras.random.normal((6, 4), seed=seed), x),
        "is in a loop or a branch",
    ),
    "branch": (
        lambda x, seed: tf.cond(x[0, 0, 0] > 0.5, lambda: keras.random.normal((6, 4), seed=seed), lambda: x[0]),
        "is in a loop or a branch",
    ),
}


@pytest.mark.parametrize("drawn", rotating(REFUSED, ["gamma"]))
def test_what_has_an_unknown_place_is_refused_before_the_first_step(drawn: str) -> None:
    draw, message = REFUSED[drawn]
    with pytest.raises(SeedError, match=message):
        trained("mirrored2", numbers(functools.partial(Adds, draw)))


def of_lengths(kind: str, draw: Callable[[Any, Any], Any]) -> list[Any]:
    """The weights after training on sequences of unknown length, which is the number of a replica's rows of two."""
    rng = np.random.default_rng(0)

    def batches() -> Any:
        for length in (4, 4, 3):
            x = rng.random((8, length, 4), dtype="float32")
            yield x, x.sum((1, 2))[:, None]

    specs = tf.TensorSpec([None, None, 4]), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    keras.utils.set_random_seed(1)
    with strategies.get(kind).scope():
        inputs = keras.Input((None, 4))
        x = Adds(draw)(layers.Dropout(0.3)(inputs))
        model = kde.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
        model.compile(keras.optimizers.SGD(0.001), "mse")
    model.fit(data, verbose=0, callbacks=[kde.ReplicaSeeds(42, draws="global")])
    return model.get_weights()  # type: ignore[no-any-return]


# By what is drawn where the length of sequences is unknown, as the number of rows is.
OF_LENGTHS: dict[str, Callable[[Any, Any], Any]] = {
    "rows and time": lambda x, seed: keras.random.normal(tf.shape(x), seed=seed),
    "time": lambda x, seed: keras.random.normal((tf.shape(x)[1], 4), seed=seed),
}
REFUSED_LENGTHS: dict[str, Callable[[Any, Any], Any]] = {
    "time before rows": lambda x, seed: tf.transpose(
        keras.random.normal((tf.shape(x)[1], tf.shape(x)[0], 4), seed=seed), [1, 0, 2]
    ),
    "a limit": lambda x, seed: tf.reduce_mean(keras.random.normal((1, tf.minimum(tf.shape(x)[0], 3)), seed=seed)),
    "as many as are large": lambda x, seed: tf.reduce_mean(
        keras.random.normal((tf.shape(x)[0], tf.shape(tf.where(x > 0.5))[0]), seed=seed)
    ),
}


@pytest.mark.parametrize("drawn", rotating(OF_LENGTHS, ["time"]))
def test_a_length_that_equals_the_number_of_rows_is_not_taken_for_it(drawn: str) -> None:
    draw = OF_LENGTHS[drawn]
    for ours, expected in zip(of_lengths("mirrored2", draw), of_lengths("one_device", draw), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drawn", rotating(REFUSED_LENGTHS, []))
def test_sizes_that_depend_on_the_rows_are_refused_behind_or_beside_them(drawn: str) -> None:
    with pytest.raises(SeedError, match=r"random numbers \(normal\) of the shape .*Put that of examples first"):
        of_lengths("mirrored2", REFUSED_LENGTHS[drawn])


@pytest.mark.rotating
def test_evaluation_and_prediction_draw_as_one_device() -> None:
    def found(kind: str) -> Any:
        with strategies.get(kind).scope():
            keras.utils.set_random_seed(1)
            model = numbers(functools.partial(Adds, lambda x, seed: keras.random.normal(tf.shape(x), seed=seed)))()
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).random((22, 6, 4), dtype="float32")
        seeds = kde.ReplicaSeeds(42, draws="global")
        loss = model.evaluate(x, x.sum((1, 2))[:, None], batch_size=9, verbose=0, callbacks=[seeds])
        return loss, model.predict(x, batch_size=9, verbose=0, callbacks=[seeds])

    for ours, expected in zip(found("mirrored2"), found("one_device"), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


class Augments(kde.Model):
    """A step of one's own that draws with seed=None."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        noise = keras.random.normal(keras.ops.shape(x), stddev=0.1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x + noise, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def augments() -> Any:
    inputs = keras.Input((6, 4))
    return Augments(inputs, layers.Dense(1)(layers.Flatten()(layers.Dropout(0.3)(inputs))))


@pytest.mark.rotating
@pytest.mark.checks_fit
def test_a_step_of_ones_own_draws_as_one_device_and_is_checked_with_what_it_draws() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = trained("mirrored2", augments)
    for one, expected in zip(ours, of_one_device(augments), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.rotating
def test_a_loop_draws_as_one_device() -> None:
    def found(kind: str) -> Any:
        keras.utils.set_random_seed(1)
        with strategies.get(kind).scope():
            model = numbers(functools.partial(layers.Dropout, 0.4))()
            optimizer = keras.optimizers.SGD(0.001)

            def step(replica: Any, batch: Any) -> Any:
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
                return {"loss": loss}

            loop = kde.TrainLoop(step, parts={"model": model, "optimizer": optimizer}, reduce={"loss": "mean"})
        x = np.random.default_rng(0).random((22, 6, 4), dtype="float32")
        data = tf.data.Dataset.from_tensor_slices((x, x.sum((1, 2))[:, None])).batch(9)
        loop.fit(data, epochs=2, verbose=0, callbacks=[kde.ReplicaSeeds(42, draws="global")])
        return model.get_weights()

    for ours, expected in zip(found("mirrored3"), found("one_device"), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_sparse_and_ragged_rows_whose_number_is_fixed_are_refused() -> None:
    with tf.Graph().as_default():
        for batch in (tf.sparse.eye(4), tf.RaggedTensor.from_row_splits(tf.ones([4]), [0, 1, 2, 3, 4])):
            with pytest.raises(SeedError, match="Tensor of 4 rows, which .*batch without drop_remainder"):
                of_any_number((batch, None))


@pytest.mark.slow
def test_eager_steps_are_refused() -> None:
    with pytest.raises(SeedError, match="run_eagerly=False"):
        trained("mirrored2", numbers(functools.partial(layers.Dropout, 0.4)), run_eagerly=True)


def test_draws_are_by_replica_or_global() -> None:
    with pytest.raises(CallbackError, match="draws must be 'replica' or 'global', got 'all'"):
        kde.ReplicaSeeds(1, draws="all")


@pytest.mark.rotating
@pytest.mark.filterwarnings("ignore:The layer '.*' .Equalization. spreads brightness")
def test_layers_that_draw_otherwise_are_refused_by_name() -> None:
    for layer, message in (
        (layers.AugMix, "random numbers of Python or NumPy while it is traced"),
        (layers.RandomElasticTransform, "is a RandomElasticTransform"),
        (layers.MixUp, "draws by StatelessRandomGammaV3"),
    ):
        made = numbers(functools.partial(layers.Reshape, (6, 4, 1)), functools.partial(layer, data_format=None))
        with pytest.raises(SeedError, match=message):
            trained("mirrored2", made)


@pytest.mark.rotating
def test_compiling_by_xla_is_refused() -> None:
    with pytest.raises(SeedError, match="jit_compile=False"):
        trained("mirrored2", numbers(functools.partial(layers.Dropout, 0.4)), jit_compile=True)


@pytest.mark.rotating
def test_a_run_goes_on_drawing_on_other_devices_as_on_one(tmp_path: Any) -> None:
    def resumed(first: str, then: str) -> Any:
        for kind, epochs in ((first, 1), (then, 3)):
            keras.utils.set_random_seed(1)
            with strategies.get(kind).scope():
                model = numbers(functools.partial(layers.Dropout, 0.4))()
                model.compile(keras.optimizers.Adam(0.01), "mse")
            x = np.random.default_rng(0).random((22, 6, 4), dtype="float32")
            callbacks = [kde.ReplicaSeeds(42, draws="global"), kde.Resume(tmp_path / f"{first}_{then}")]
            model.fit(x, x.sum((1, 2))[:, None], batch_size=9, epochs=epochs, verbose=0, callbacks=callbacks)
        return model.get_weights()

    expected = resumed("one_device", "one_device")
    for ours, one in zip(resumed("mirrored2", "mirrored3"), expected, strict=True):
        np.testing.assert_allclose(ours, one, rtol=1e-5, atol=1e-6)
