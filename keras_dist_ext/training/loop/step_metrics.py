"""Add up what steps return, by the reduction that was declared for it, over rows, replicas and the steps of an epoch.

Letters: n = rows of a replica; R = replicas in sync, over all workers.
"""

from __future__ import annotations

from typing import Literal

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.training.loop.replica import Replica

__all__ = ["REDUCTIONS", "Extreme", "Mean", "Reduction", "Sum", "StepMetric", "metric_of"]

Reduction = Literal["mean", "sum", "max", "min", "concat"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "max", "min", "concat")


class StepMetric(keras.metrics.Metric):  # type: ignore[misc]
    """What one of a step's values adds up to; each replica holds a part, and the parts add up.

    Args:
        name: of the value.
        has_rows: whether it has one entry for each row, ``[n, ...]``, or is one for all of them.
    """

    def __init__(self, name: str, *, has_rows: bool) -> None:
        super().__init__(name=name)
        self.has_rows = has_rows

    def update_state(self, value: tf.Tensor, replica: Replica) -> None:
        """Take this replica's value of a step."""
        raise NotImplementedError


class Mean(StepMetric):
    """The mean over all rows: a value for each row counts once, a scalar as often as the replica has rows."""

    def __init__(self, name: str, *, has_rows: bool) -> None:
        super().__init__(name, has_rows=has_rows)
        self.total_and_count = self.add_weight(initializer="zeros", shape=(2,), dtype="float64", name="total_and_count")

    def update_state(self, value: tf.Tensor, replica: Replica) -> None:
        """See ``StepMetric``."""
        value = tf.cast(value, tf.float64)
        count = tf.cast(tf.size(value) if self.has_rows else replica.rows, tf.float64)
        total = tf.reduce_sum(value) if self.has_rows else value * count
        if not self.has_rows:
            total = tf.where(count > 0, total, 0.0)  # the mean of nothing may be no number
        self.total_and_count.assign_add(tf.stack([total, count]))

    def result(self) -> tf.Tensor:
        """The mean so far, 0 where there was nothing."""
        total, count = tf.unstack(tf.convert_to_tensor(self.total_and_count))
        return tf.cast(tf.math.divide_no_nan(total, count), tf.float32)


class Sum(StepMetric):
    """The sum over replicas and steps, and over rows where there is a value for each."""

    def __init__(self, name: str, spec: tf.TensorSpec, *, has_rows: bool) -> None:
        super().__init__(name, has_rows=has_rows)
        shape = [size for size in spec.shape[1:] if size != 1] if has_rows else spec.shape
        is_exact = spec.dtype.is_integer or spec.dtype.is_bool
        self.total = self.add_weight(
            initializer="zeros", shape=tuple(shape), dtype="int64" if is_exact else "float64", name="total"
        )

    def update_state(self, value: tf.Tensor, replica: Replica) -> None:
        """See ``StepMetric``."""
        value = tf.cast(value, self.total.dtype)
        if self.has_rows:
            value = tf.reshape(tf.reduce_sum(value, axis=0), self.total.shape)
        self.total.assign_add(tf.where(tf.cast(replica.rows, tf.int32) > 0, value, tf.zeros_like(value)))

    def result(self) -> tf.Tensor:
        """The sum so far."""
        total = tf.convert_to_tensor(self.total)
        return total if total.dtype.is_integer else tf.cast(total, tf.float32)


class Extreme(StepMetric):
    """The largest or the smallest value of all rows, replicas and steps.

    Parts of replicas add up, so each replica writes a place of its own: (whether there was a value, and which), [R, 2].
    """

    def __init__(self, name: str, *, has_rows: bool, largest: bool) -> None:
        super().__init__(name, has_rows=has_rows)
        self._sign = 1.0 if largest else -1.0
        num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self.places = self.add_weight(initializer="zeros", shape=(num_replicas, 2), dtype="float64", name="places")

    def update_state(self, value: tf.Tensor, replica: Replica) -> None:
        """See ``StepMetric``."""
        places = tf.convert_to_tensor(self.places)
        seen, before = tf.unstack(places[replica.index])
        value = self._sign * tf.cast(value, tf.float64)
        if self.has_rows:
            value = tf.reduce_max(value)  # of nothing: minus infinity, and not looked at
        value = tf.where(seen > 0, tf.maximum(before, value), value)
        new = tf.tensor_scatter_nd_update(places, [[replica.index]], [tf.stack([tf.ones_like(value), value])])
        self.places.assign(tf.where(tf.cast(replica.rows, tf.int32) > 0, new, places))

    def result(self) -> tf.Tensor:
        """The value so far; NaN where there was none."""
        seen, values = tf.unstack(tf.convert_to_tensor(self.places), axis=1)
        largest = tf.reduce_max(tf.where(seen > 0, values, tf.cast(-float("inf"), values.dtype)))
        is_bad = tf.reduce_all(seen == 0) | tf.reduce_any(tf.math.is_nan(values))
        return tf.cast(tf.where(is_bad, tf.cast(float("nan"), largest.dtype), self._sign * largest), tf.float32)


def metric_of(name: str, reduction: Reduction, spec: tf.TensorSpec, *, has_rows: bool) -> StepMetric:
    """Make the metric of a value, in the scope that is entered.

    Args:
        name: of the value.
        reduction: declared for it; "concat" has none.
        spec: of the value on one replica.
        has_rows: see ``StepMetric``.
    """
    if reduction == "mean":
        return Mean(name, has_rows=has_rows)
    if reduction == "sum":
        return Sum(name, spec, has_rows=has_rows)
    return Extreme(name, has_rows=has_rows, largest=reduction == "max")
