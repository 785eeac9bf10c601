"""What a replica's numbers count in the sums over replicas."""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist_ext.step.means import BatchExponents
from keras_dist_ext.step.row_weights import RowWeights

X = np.float32([[1, 2], [3, 4], [5, 6], [7, 8]])
PARTS = X[:1], X[1:]  # of two replicas


def weights_of(part: Any, *exponents: list[int]) -> RowWeights:
    """Those of a replica, of a step of which the exponents of scalars were learned, if they are given."""
    learned = BatchExponents() if exponents else None
    if learned is not None:
        learned.store([[Fraction(power) for power in powers] for powers in exponents])
    return RowWeights(
        keras.Sequential([keras.layers.Dense(1)]), len(part), len(X), SimpleNamespace(num_replicas=2), learned
    )


def gradient(part: Any, loss: Any, above: Any = None, *exponents: list[int]) -> Any:
    """What a replica adds to the gradient of a scale, by which its rows are multiplied."""
    with tf.GradientTape() as tape:
        factor = tf.Variable(1.0)
        target = loss(factor * part, factor)
    found = weights_of(part, *exponents).differentiate(
        lambda target, above: tape.gradient(target, factor, above), target, above
    )
    return float(found)


def sums_of_squares(x: Any, _: Any) -> Any:
    return tf.reduce_sum(x * x, 1)


def test_replicas_add_up_to_the_gradient_of_one_device_whatever_comes_from_above() -> None:
    above = np.float32([1, 2, 3, 4])
    expected = gradient(X, sums_of_squares, tf.constant(above))
    found = [
        gradient(p, sums_of_squares, tf.constant(a), [1]) for p, a in zip(PARTS, (above[:1], above[1:]), strict=True)
    ]
    np.testing.assert_allclose(sum(found), expected)


def test_ragged_losses_are_a_sum_as_those_in_a_tensor_are() -> None:
    def ragged(x: Any, factor: Any) -> Any:
        return tf.RaggedTensor.from_row_lengths(sums_of_squares(x, factor), [len(x), 0])

    expected = gradient(X, sums_of_squares)
    assert gradient(X, ragged) == expected
    np.testing.assert_allclose(sum(gradient(part, ragged, None, [1]) for part in PARTS), expected)
    above = tf.ragged.constant([[2.0] * 3, []])
    assert gradient(X[1:], ragged, above, [1]) == 2 * gradient(X[1:], ragged, None, [1])


def test_a_weight_that_is_a_loss_itself_counts_once_for_all_replicas() -> None:
    assert [gradient(part, lambda x, factor: factor) for part in PARTS] == [0.25, 0.75]


def test_slices_count_as_a_mean() -> None:
    assert weights_of(PARTS[0]).weight_of(tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]))) == 0.25


def test_a_loss_that_a_metric_weighs_by_the_rows_at_hand_weighs_all_rows_in_the_end() -> None:
    mean, total = keras.metrics.Mean(), keras.metrics.Sum()
    means, sums = [], []
    for part in PARTS:
        loss = tf.reduce_mean(part)
        weights = weights_of(part, [0], [0])
        means.append(weights.mean_update(mean, loss, len(part)))
        sums.append(weights.sum_update(total, loss, len(part)))
    assert [weight for _, weight in means] == [1, 3]
    np.testing.assert_allclose(sum(float(value) * weight for value, weight in means), 4 * X.mean())
    np.testing.assert_allclose(sum(float(value) for value, _ in sums), 4 * X.mean())
