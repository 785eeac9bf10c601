"""How numbers grow with the rows of a batch is measured where their graph does not tell."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.tracing import ScratchTrace
from keras_dist_ext.step.means import BatchExponents, Means
from keras_dist_ext.step.measured_exponents import learn_exponents, learn_exponents_of_sizes, measure_exponents

X = tf.constant([[1.0], [2.0], [4.0], [5.0]])
SPEC = tf.TensorSpec([None, 1])


def by_python(function: Callable[..., Any], *values: Any) -> Any:
    """Compute a scalar by an op of which the graph tells nothing."""
    found = tf.numpy_function(lambda *given: np.float32(function(*given)), values, tf.float32)
    found.set_shape([])
    return found


def measured(*functions: Callable[[Any], Any], batch: Any = X) -> list[Fraction | None]:
    """The exponents of functions of a batch."""
    values: list[Any] = []
    trace = ScratchTrace(lambda x: values.extend(function(x) for function in functions), SPEC)
    found = measure_exponents(trace, values, batch)
    return [found.get(id(value)) for value in values]


def num_rows(x: Any) -> Any:
    return tf.cast(tf.shape(x)[0], tf.float32)


def test_a_power_of_the_rows_has_its_exponent_and_other_growth_has_none() -> None:
    assert measured(
        tf.reduce_mean,
        tf.reduce_sum,
        lambda x: tf.reduce_sum(x) ** 2,
        lambda x: tf.sqrt(num_rows(x)),
        lambda x: -1.0 / num_rows(x),
    ) == [0, 1, 2, Fraction(1, 2), -1]
    assert (
        measured(
            lambda x: num_rows(x) + 5.0,
            lambda x: 6.0 - num_rows(x),  # whose sign depends on the rows
            lambda x: num_rows(x) * 0.0,
            lambda x: tf.math.log(-num_rows(x)),
            lambda x: 1.0 / (num_rows(x) - 8.0),
        )
        == [None] * 5
    )


def test_a_number_that_asks_for_rows_which_are_not_there_is_left_out_by_itself() -> None:
    assert measured(tf.reduce_sum, lambda x: tf.raw_ops.GatherV2(params=x, indices=20, axis=0)[0], tf.reduce_mean) == [
        1,
        None,
        0,
    ]


def test_nothing_is_measured_on_no_rows() -> None:
    assert measured(tf.reduce_sum, batch=X[:0]) == [None]


def asked(exponents: BatchExponents, x: Any, value: Any, *, rows: Any = None) -> Any:
    """Ask for a scalar as a mean, as a step does."""
    rows = tf.shape(x)[0] if rows is None else rows
    (term,) = Means(rows, exponents).terms(value)
    return term.value / num_rows(x) ** float(term.exponent)


def test_what_is_computed_with_an_exponent_is_measured_once_that_is_known() -> None:
    exponents, num_traces = BatchExponents(), 0

    def step(x: Any) -> None:
        nonlocal num_traces
        num_traces += 1
        mean = asked(exponents, x, by_python(np.sum, x))
        asked(exponents, x, by_python(lambda m: m * 2 if m == 3 else np.nan, mean))  # finite for the mean alone

    learn_exponents(exponents, step, SPEC, X)
    assert [exponents.answer(place) for place in (0, 1)] == [[1], [0]]
    assert num_traces == 2


def test_what_stays_unknown_counts_as_a_mean_after_three_traces() -> None:
    exponents, num_traces = BatchExponents(), 0

    def step(x: Any) -> None:
        nonlocal num_traces
        num_traces += 1
        asked(exponents, x, by_python(np.sum, x))
        asked(exponents, x, by_python(lambda _: np.nan, x))

    learn_exponents(exponents, step, SPEC, X)
    assert [exponents.answer(place) for place in (0, 1)] == [[1], [0]]
    assert num_traces == 3


def of_sizes(step: Callable[[BatchExponents, Any], None]) -> BatchExponents:
    exponents = BatchExponents()
    learn_exponents_of_sizes(
        exponents, lambda x: step(exponents, x), lambda rows: tf.TensorSpec(rows.shape, rows.dtype), X
    )
    return exponents


def test_a_step_that_knows_its_rows_is_measured_on_several_numbers_of_them() -> None:
    found = of_sizes(lambda exponents, x: asked(exponents, x, tf.reduce_sum(x), rows=int(x.shape[0])))
    assert found.answer(0) == [1]


def test_nothing_is_learned_of_scalars_in_a_branch_or_of_another_number_of_them() -> None:
    def in_function(exponents: BatchExponents, x: Any) -> None:
        tf.function(lambda: asked(exponents, x, tf.reduce_sum(x), rows=int(x.shape[0])), autograph=False)()

    def as_many_as_rows(exponents: BatchExponents, x: Any) -> None:
        for _ in range(int(x.shape[0]) // 4):
            asked(exponents, x, tf.reduce_sum(x), rows=int(x.shape[0]))

    assert of_sizes(in_function).answer(0) is None
    assert of_sizes(as_many_as_rows).answer(0) is None
