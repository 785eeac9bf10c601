"""Sum the ``tf.IndexedSlices`` that update the same row of a variable, with the same bits on every replica.

Once gradients are summed, all replicas hold the same slices, and each applies them to its own copy of the variable.
Where several slices update one row, TensorFlow sums them in an order that depends on its threads: on CPUs where the
rows of a variable are updated (core/kernels/scatter_functor.h), on GPUs everywhere (atomic additions). So the copies
would drift apart.

Nothing is summed earlier than TensorFlow does it: squares and norms are those of all slices, as on one device.
"""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext._keras import backend
from keras_dist_ext._keras.tracing import in_xla

__all__ = ["sum_duplicates", "to_dense"]


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return one slice for each row that has any, with the rows in any order.

    CPUs sum in sequence (core/kernels/segment_reduction_ops_impl.h). On GPUs only ``tf.sparse.segment_sum`` of sorted
    slices has a fixed order: ``tf.math.segment_sum`` adds atomically, too. Under XLA slices are returned as they are,
    since it must know the number of rows.

    Args:
        slices: may have several for one row.
    """
    if in_xla():
        return slices
    values, indices = slices.values, slices.indices
    if backend.has_gpus():
        order = tf.argsort(indices, stable=True)
        ordered = tf.gather(indices, order)
        is_first = tf.concat([tf.ones_like(ordered[:1], tf.bool), ordered[1:] != ordered[:-1]], 0)
        rows = tf.boolean_mask(ordered, is_first)
        sums = tf.sparse.segment_sum(values, order, tf.cumsum(tf.cast(is_first, tf.int32)) - 1)
    else:
        rows, places = tf.unique(indices)
        sums = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
    return tf.IndexedSlices(sums, rows, slices.dense_shape)


def to_dense(slices: tf.IndexedSlices) -> tf.Tensor:
    """Return a dense tensor in which each row is the sum of its slices, or ``NotImplemented`` for TensorFlow to do it.

    On CPUs TensorFlow itself has a fixed order.

    Args:
        slices: may have several for one row.
    """
    if slices.dense_shape is None or not backend.has_gpus() or in_xla():
        return NotImplemented
    unique = sum_duplicates(slices)
    num_rows = tf.cast(slices.dense_shape[:1], unique.indices.dtype)
    shape = tf.concat([num_rows, tf.shape(slices.values, unique.indices.dtype)[1:]], 0)
    dense = tf.scatter_nd(unique.indices[:, tf.newaxis], unique.values, shape)
    dense.set_shape([tf.get_static_value(slices.dense_shape[0]), *slices.values.shape[1:]])
    return dense
