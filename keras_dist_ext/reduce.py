"""Add up values over the replicas of a strategy, in cross-replica context.

Letters: R = replicas in sync, over all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext import _keras

__all__ = ["keep_first_part", "parts_of", "shares_memory", "sum_over_replicas", "sum_parts", "times"]


def sum_over_replicas(strategy: tf.distribute.Strategy, values: list[Any]) -> list[Any]:
    """Add up each per-replica value, in cross-replica context."""
    parts = [parts_of(strategy, value) for value in values]
    if shares_memory(strategy):
        return [_add(part) for part in parts]
    values = [_keras.regroup(part) for part in parts]
    sums: list[Any] = [None] * len(values)
    by_dtype: dict[tf.DType, list[int]] = {}
    for i, part in enumerate(parts):
        by_dtype.setdefault(part[0].dtype, []).append(i)
    for indices in by_dtype.values():
        pairs = [(values[i], values[i]) for i in indices]
        for i, total in zip(indices, strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs), strict=True):
            sums[i] = total
    return sums


def parts_of(strategy: tf.distribute.Strategy, value: Any) -> tuple[Any, ...]:
    """One part a local replica; a value that all of them share is repeated."""
    parts: tuple[Any, ...] = strategy.experimental_local_results(value)
    return parts * len(strategy.extended.worker_devices) if len(parts) == 1 else parts


def shares_memory(strategy: tf.distribute.Strategy) -> bool:
    """Whether all replicas are CPUs of this process."""
    devices = strategy.extended.worker_devices
    return len(devices) == strategy.num_replicas_in_sync and all("CPU" in device for device in devices)


def _add(parts: Sequence[Any]) -> Any:
    if any(isinstance(part, tf.IndexedSlices) for part in parts):
        values = tf.concat([part.values for part in parts], 0)
        return tf.IndexedSlices(values, tf.concat([part.indices for part in parts], 0), parts[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])


def times(value: Any, factor: float | tf.Tensor) -> Any:
    """Multiply a tensor or ``IndexedSlices`` by a scalar."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(times(value.values, factor), value.indices, value.dense_shape)
    return value * tf.cast(factor, value.dtype)


def sum_parts(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> None:
    """Give every replica the sum of what all replicas hold, in cross-replica context."""
    for variable in variables:
        copies = _keras.components(variable)
        (total,) = sum_over_replicas(strategy, [_keras.regroup([copy.read_value() for copy in copies])])
        for copy, value in zip(copies, parts_of(strategy, total), strict=True):
            copy.assign(value)


def keep_first_part(variable: Any, *, is_chief: bool) -> None:
    """Leave a mirrored variable's value to the first replica of the chief, and set all others to 0."""
    for copy in _keras.components(variable)[1 if is_chief else 0 :]:
        copy.assign(tf.zeros_like(copy))
