"""A sum over examples is a sum on replicas however it is written, and its mean a mean."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import sum_runs
import tensorflow as tf
from cases import rotating
from keras import layers
from keras.optimizers import SGD
from sum_runs import DATA, NEED_ROWS, PLACES, SUMS, made, reduced, squares, summed_in_loop, trained
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.training.batch_reader import BatchReader


def assert_as_on_one_device(strategy: Any, place: str, form: str, rows: str, is_mean: bool, **compiled: Any) -> None:
    with strategy.scope():
        model = made(kde, place, reduced(form, is_mean), **compiled)
    assert_close(trained(model, DATA[rows]()), on_one_device(place, form, rows, is_mean, **compiled))


@functools.cache
def on_one_device(place: str, form: str, rows: str, is_mean: bool, **compiled: Any) -> list[Any]:
    return trained(made(keras, place, reduced(form, is_mean), **compiled), DATA[rows]())


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


CASES = [
    (place, form, rows, is_mean)
    for form in SUMS
    for place in PLACES
    for rows in ("unknown rows", "an empty replica", "static rows")
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


OF_FOUR = [
    (place, form, rows)
    for form in SUMS
    for place in PLACES
    for rows in ("an empty replica", "an even rest")
    if (place, form, "an empty replica", False) in CASES or (rows == "an even rest" and form in NEED_ROWS)
]


@pytest.mark.parametrize(("place", "form", "rows"), rotating(OF_FOUR, []))
def test_so_it_does_on_four_replicas_of_which_some_are_empty_or_none(strategies, place, form, rows):
    assert_as_on_one_device(strategies.get("mirrored4"), place, form, rows, False)


# Of each form its sum or its mean, in one of the places.
OF_WORKERS = [
    (PLACES[i % len(PLACES)], form, rows, i % 3 == 0)
    for i, form in enumerate(SUMS)
    for rows in ("an empty replica", "an even rest")
    if (PLACES[i % len(PLACES)], form, rows) in OF_FOUR
]


@pytest.mark.parametrize(
    ("place", "form", "rows", "is_mean"),
    [
        pytest.param(*case, marks=[on_two_workers(sum_runs.on_workers, *case), pytest.mark.rotating])
        for case in OF_WORKERS
    ],
)
def test_so_it_does_on_two_workers(values, place, form, rows, is_mean):
    for found in values:
        assert_close(found, on_one_device(place, form, rows, is_mean))


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
