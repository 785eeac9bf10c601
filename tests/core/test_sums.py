"""A sum over examples is a sum on replicas however it is written, and its mean a mean."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from keras import layers, ops
from keras.optimizers import SGD

import keras_dist_ext as kde
from keras_dist_ext.training.batch_reader import BatchReader


@tf.custom_gradient
def summed_with_gradient(values: Any) -> Any:
    return tf.reduce_sum(values), lambda upstream: upstream * tf.ones_like(values)


@tf.function(autograph=False)
def summed_in_function(values: Any) -> Any:
    return tf.reduce_sum(values)


@tf.function
def summed_in_python(values: Any) -> Any:
    total = tf.constant(0.0)
    for value in values:
        total = total + value
    return total


def summed_in_loop(values: Any) -> Any:
    start = (tf.constant(0), tf.constant(0.0))
    return tf.while_loop(lambda i, _: i < tf.shape(values)[0], lambda i, t: (i + 1, t + values[i]), start)[1]


def zeros(values: Any) -> Any:
    return tf.zeros_like(values, tf.int32)


SUMS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": tf.reduce_sum,
    "ops.sum": ops.sum,
    "einsum": lambda v: tf.einsum("i->", v),
    "matmul": lambda v: tf.matmul(tf.ones_like(v)[None], v[:, None])[0, 0],
    "tensordot": lambda v: tf.tensordot(v, tf.ones_like(v), 1),
    "ops.dot": lambda v: ops.dot(v, ops.ones_like(v)),
    "ops.vdot": lambda v: ops.vdot(v, ops.ones_like(v)),
    "matvec": lambda v: tf.linalg.matvec(v[None], tf.ones_like(v))[0],
    "segment_sum": lambda v: tf.math.segment_sum(v, zeros(v))[0],
    "unsorted_segment_sum": lambda v: tf.math.unsorted_segment_sum(v, zeros(v), 1)[0],
    "ops.segment_sum": lambda v: ops.segment_sum(v, zeros(v), 1)[0],
    "tensor_scatter_nd_add": lambda v: tf.tensor_scatter_nd_add(tf.zeros([1]), zeros(v)[:, None], v)[0],
    "foldl": lambda v: tf.foldl(lambda total, value: total + value, v),
    "scan": lambda v: tf.scan(lambda total, value: total + value, v)[-1],
    "while_loop": summed_in_loop,
    "ops.fori_loop": lambda v: ops.fori_loop(0, ops.shape(v)[0], lambda i, total: total + v[i], 0.0),
    "cumsum": lambda v: tf.cumsum(v)[-1],
    "custom_gradient": summed_with_gradient,
    "tf.function": summed_in_function,
    "a loop of Python in a tf.function": summed_in_python,
    "cond": lambda v: tf.cond(tf.shape(v)[0] > 0, lambda: tf.reduce_sum(v), lambda: 0.0),
    "switch_case": lambda v: tf.switch_case(tf.constant(1), [lambda: 0.0, lambda: tf.reduce_sum(v)]),
    "map_fn": lambda v: tf.reduce_sum(tf.map_fn(lambda value: value, v)),
    "ragged": lambda v: tf.reduce_sum(tf.RaggedTensor.from_uniform_row_length(v, 1)),
    "sparse.reduce_sum": lambda v: tf.sparse.reduce_sum(tf.sparse.from_dense(tf.ones_like(v)).with_values(v)),
    "recompute_grad": lambda v: tf.recompute_grad(tf.reduce_sum)(v),
}
NEED_ROWS = ("segment_sum", "foldl", "scan", "cumsum")  # of no rows, TensorFlow itself makes an error of them
PLACES = ("train_step", "compute_loss", "a compiled loss", "add_loss")
X = np.random.default_rng(0).normal(size=(15, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(15, 3)).astype("float32")
DATA = {
    "unknown rows": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(6),  # 6, 6 and 3
    "an empty replica": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(7),  # 7, 7 and 1
    "static rows": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(5, drop_remainder=True),
}


def squares(y: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


def with_train_step(lib: Any, reduce: Callable[[Any], Any]) -> type:
    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = reduce(squares(y, self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

        def test_step(self, data: Any) -> dict[str, Any]:
            return {"loss": reduce(squares(data[1], self(data[0])))}

    return Net


def with_compute_loss(lib: Any, reduce: Callable[[Any], Any]) -> type:
    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:  # type: ignore[no-untyped-def]
            return reduce(squares(y, y_pred))

    return Net


def adding(reduce: Callable[[Any], Any]) -> Any:
    class Adds(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(reduce(tf.reduce_mean(tf.square(x), axis=-1)))
            return x

    return Adds()


def made(lib: Any, place: str, reduce: Callable[[Any], Any], **compiled: Any) -> Any:
    classes = {"train_step": with_train_step, "compute_loss": with_compute_loss}
    inputs = layers.Input((5,))
    outputs = layers.Dense(3, kernel_initializer=keras.initializers.Constant(0.1))(inputs)
    if place == "add_loss":
        outputs = adding(reduce)(outputs)
    model = (classes[place](lib, reduce) if place in classes else lib.Model)(inputs, outputs)
    loss = {"a compiled loss": lambda y, p: reduce(squares(y, p)), "add_loss": "mse"}.get(place)
    model.compile(SGD(0.01), loss=loss, **compiled)
    return model


def trained(model: Any, data: tf.data.Dataset) -> list[Any]:
    history = model.fit(data, epochs=2, verbose=0).history
    return [history["loss"], model.evaluate(data, verbose=0, return_dict=True)["loss"], *model.get_weights()]


def assert_as_on_one_device(strategy: Any, place: str, form: str, rows: str, is_mean: bool, **compiled: Any) -> None:
    def reduce(values: Any) -> Any:
        total = SUMS[form](values)
        return total / tf.cast(tf.shape(values)[0], total.dtype) if is_mean else total

    expected = trained(made(keras, place, reduce, **compiled), DATA[rows]())
    with strategy.scope():
        model = made(kde, place, reduce, **compiled)
    for one, other in zip(expected, trained(model, DATA[rows]()), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


CASES = [
    (place, form, rows, is_mean)
    for form in SUMS
    for place in PLACES
    for rows in DATA
    for is_mean in (False, True)
    if rows != "an empty replica" or form not in NEED_ROWS
    if form != "sparse.reduce_sum" or place in ("train_step", "add_loss") or rows == "static rows"  # or Keras fails
]
QUICK = [
    ("train_step", "tensordot", "an empty replica", False),
    ("a compiled loss", "cond", "unknown rows", False),
    ("add_loss", "tf.function", "static rows", False),
]


@pytest.mark.parametrize(("place", "form", "rows", "is_mean"), rotating(CASES, QUICK))
def test_a_sum_however_written_and_its_mean_train_as_on_one_device(strategies, place, form, rows, is_mean):
    assert_as_on_one_device(strategies.get("mirrored2"), place, form, rows, is_mean)


@pytest.mark.parametrize("form", rotating([form for form in SUMS if form not in NEED_ROWS], []))
def test_so_it_does_on_four_replicas_of_which_some_are_empty(strategies, form):
    assert_as_on_one_device(strategies.get("mirrored4"), "train_step", form, "an empty replica", False)


@pytest.mark.parametrize("form", rotating(SUMS, []))
def test_so_it_does_on_virtual_replicas(strategies, form):
    def reduce(values: Any) -> Any:
        return SUMS[form](values)

    expected = trained(made(keras, "train_step", reduce), DATA["static rows"]())
    with strategies.get("mirrored2").scope():
        model = made(kde, "train_step", reduce, virtual_replicas=4)
    for one, other in zip(expected, trained(model, DATA["static rows"]()), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("form", rotating(SUMS, []))
def test_so_it_does_eagerly(strategies, form):
    assert_as_on_one_device(strategies.get("mirrored2"), "train_step", form, "static rows", False, run_eagerly=True)


OF_COUNTED_ROWS: dict[str, Callable[[Any], Any]] = {
    "a mean times the rows": lambda v: tf.reduce_mean(v) * v.shape[0],
    "a mean times the rows, and a mean": lambda v: tf.reduce_mean(v) * v.shape[0] + tf.reduce_mean(v**2),
    "a sum by the rows": lambda v: tf.reduce_sum(v) / v.shape[0],
    "a sum of a shape with the rows": lambda v: tf.reduce_sum(tf.reshape(v, [v.shape[0], 1])),
}


@pytest.mark.parametrize("place", rotating(["train_step", "compute_loss", "a compiled loss"], ["train_step"]))
@pytest.mark.parametrize("form", rotating(OF_COUNTED_ROWS, ["a mean times the rows"]))
def test_a_loss_that_asks_python_for_the_rows_trains_as_on_one_device(strategies, place, form):
    expected = trained(made(keras, place, OF_COUNTED_ROWS[form]), DATA["static rows"]())
    with strategies.get("mirrored2").scope():
        model = made(kde, place, OF_COUNTED_ROWS[form])
    for one, other in zip(expected, trained(model, DATA["static rows"]()), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("form", [form for form in OF_COUNTED_ROWS if "and" not in form])
def test_so_it_does_eagerly_whatever_the_rows(strategies, form):
    given = ("train_step", OF_COUNTED_ROWS[form])
    expected = trained(made(keras, *given, run_eagerly=True), DATA["unknown rows"]())
    with strategies.get("mirrored2").scope():
        model = made(kde, *given, run_eagerly=True)
    for one, other in zip(expected, trained(model, DATA["unknown rows"]()), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_a_sum_beside_a_factor_that_is_zero_when_training_begins_is_a_sum(mirrored):
    """As a warm-up has it: what is measured is the sum, and not its product with the factor."""

    def make(lib: Any) -> Any:
        class Net(lib.Model):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                self.dense = layers.Dense(3, kernel_initializer="ones")
                self.dense.build((None, 5))
                self.factor = self.add_weight(shape=(), initializer="zeros", trainable=False)

            def call(self, x: Any) -> Any:
                return self.dense(x)

            def train_step(self, data: Any) -> dict[str, Any]:
                x, y = data
                with tf.GradientTape() as tape:
                    losses = squares(y, self(x))
                    loss = tf.reduce_mean(losses) + self.factor * summed_in_loop(losses)
                self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
                return {"loss": loss}

        model = Net()
        model.compile(SGD(0.01))
        return model

    def results(model: Any) -> list[Any]:
        losses = []
        for factor in (0.0, 1.0):
            model.factor.assign(factor)
            losses += model.fit(DATA["unknown rows"](), verbose=0).history["loss"]
        return [losses, *model.get_weights()]

    expected = results(make(keras))
    with mirrored.scope():
        model = make(kde)
    for one, other in zip(expected, results(model), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


def test_a_batch_that_was_looked_at_comes_next_nevertheless():
    pulled = []

    def batches() -> Any:
        for number in range(4):
            pulled.append(number)
            yield np.full([2], number, "float32")

    data = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([None], tf.float32))
    known = data.apply(tf.data.experimental.assert_cardinality(4))
    for length, dataset in ((None, data), (4, known)):
        pulled.clear()
        reader = BatchReader(dataset, length)
        assert reader.peek().numpy().tolist() == [0.0, 0.0]
        assert reader.iterator.element_spec == dataset.element_spec  # or steps would be traced anew
        assert [float(reader.next_batch()[0]) for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]
        assert pulled == [0, 1, 2, 3]
        reader.close()


@pytest.mark.rotating
@pytest.mark.checks_fit  # and the check of its step raises no alarm
def test_a_loss_whose_rank_replicas_do_not_know_is_a_sum_in_training_and_evaluation(strategies):
    given = ("compute_loss", SUMS["sparse.reduce_sum"])
    expected = trained(made(keras, *given), DATA["static rows"]())  # one device knows it of batches of one size
    with strategies.get("mirrored2").scope():
        model = made(kde, *given)
    for one, other in zip(expected, trained(model, DATA["static rows"]()), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)
