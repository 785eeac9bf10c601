"""Add up what ``tf.IndexedSlices`` hold for one row of a variable, with the same bits on every replica.

Replicas hold the same slices once gradients are summed, and each brings them into its own copies. Where several belong
to one row, TensorFlow adds them up in an order that depends on its threads: those of CPUs where a variable's rows are
changed (core/kernels/scatter_functor.h), and those of GPUs everywhere (atomic additions). So copies would drift apart.

Nothing is added up earlier than TensorFlow does it: squares and norms of slices are those of all slices, as on one
device.
"""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext._keras import backend
from keras_dist_ext._keras.tracing import in_xla

__all__ = ["sum_duplicates", "to_dense"]


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return one slice for each row that some belong to, of rows in any order.

    On CPUs sums are made one after another (core/kernels/segment_reduction_ops_impl.h). On GPUs only a sum of sorted
    slices that are looked up at once has one order: ``tf.math.segment_sum`` adds up atomically as well. XLA gets slices
    as they are, since it has to know how many rows there are.

    Args:
        slices: several of which may belong to one row.
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
    """Return a tensor with the sum of a row's slices in its place, or ``NotImplemented`` to leave it to TensorFlow.

    On CPUs TensorFlow has one order for it.

    Args:
        slices: several of which may belong to one row.
    """
    if slices.dense_shape is None or not backend.has_gpus() or in_xla():
        return NotImplemented
    unique = sum_duplicates(slices)
    num_rows = tf.cast(slices.dense_shape[:1], unique.indices.dtype)
    shape = tf.concat([num_rows, tf.shape(slices.values, unique.indices.dtype)[1:]], 0)
    dense = tf.scatter_nd(unique.indices[:, tf.newaxis], unique.values, shape)
    dense.set_shape([tf.get_static_value(slices.dense_shape[0]), *slices.values.shape[1:]])
    return dense
