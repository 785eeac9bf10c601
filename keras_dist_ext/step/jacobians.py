"""Jacobians on a replica without examples, of which TensorFlow cannot make one.

It divides by their number, and reshapes what it vectorizes to it (python/eager/backprop.py, python/ops/parallel_for).
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext.aliases import TensorNest

__all__ = ["batch_jacobian_of_any_rows", "jacobian_of_any_rows"]


def jacobian_of_any_rows(
    jacobian: Callable[[], TensorNest], target: tf.Tensor, sources: TensorNest, rows: int | tf.Tensor
) -> TensorNest:
    """Return a jacobian, and zeros where there are no rows to compute it from.

    Args:
        jacobian: computes it.
        target: what is differentiated.
        sources: what for.
        rows: of the replica.
    """
    flat = tf.nest.flatten(sources)
    if (isinstance(rows, int) and rows) or tf.executing_eagerly():
        return jacobian()
    if all(isinstance(source, tf.Variable | keras.Variable) for source in flat):
        has_rows = tf.cast(rows, tf.int32) > 0
    else:  # they may be of all rows, which a replica without its own has, too
        has_rows = tf.reduce_all([tf.size(tensor) > 0 for tensor in (target, *flat)])
    shapes = [tf.concat([tf.shape(target), tf.shape(source)], 0) for source in flat]
    return _unless_empty(has_rows, jacobian, shapes, target.dtype)


def batch_jacobian_of_any_rows(jacobian: Callable[[], tf.Tensor], target: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Return a jacobian of each row, of which there may be none; see ``jacobian_of_any_rows``."""
    rank = target.shape.rank
    if not rank or target.shape[0] or (tf.executing_eagerly() and int(tf.shape(target)[0])):
        return jacobian()
    shape = tf.concat([tf.shape(target), tf.shape(source)[1:]], 0)
    if target.shape[0] == 0:
        return tf.zeros(shape, target.dtype)
    found = _unless_empty(tf.shape(target)[0] > 0, jacobian, [shape], target.dtype)
    return tf.ensure_shape(found, target.shape.concatenate(source.shape[1:]))


def _unless_empty(
    has_rows: tf.Tensor, jacobian: Callable[[], TensorNest], shapes: list[tf.Tensor], dtype: tf.DType
) -> TensorNest:
    found: TensorNest = None
    present: list[int] = []

    def compute() -> list[tf.Tensor]:
        nonlocal found
        found = jacobian()
        flat = tf.nest.flatten(found)
        present.extend(place for place, value in enumerate(flat) if value is not None)
        return [flat[place] for place in present]

    def nothing() -> list[tf.Tensor]:
        return [tf.zeros(shapes[place], dtype) for place in present]

    with intercept(None):  # it is no branch that replicas take alike
        values = tf.nest.flatten(tf.cond(has_rows, compute, nothing))
    flat = tf.nest.flatten(found)
    for place, value in zip(present, values, strict=True):
        flat[place] = value
    return tf.nest.pack_sequence_as(found, flat)
