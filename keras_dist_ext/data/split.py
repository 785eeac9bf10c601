"""Cut a global batch into the rows of each replica.

Letters: N = rows of the global batch, R = replicas in sync, over all workers.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext.errors import DataError

__all__ = ["num_rows", "replica_rows", "without_optionals"]


def num_rows(data: Any) -> int | tf.Tensor:
    """Count the rows of a batch: an int where the shape is static, else a scalar int32 tensor.

    Raises:
        DataError: nothing in the batch has a first dimension.
    """
    leaves = [leaf for leaf in tree.flatten(data) if _has_rows(leaf)]
    if not leaves:
        raise DataError("The batch holds no tensor with a batch dimension, so it cannot be split over the replicas.")
    for leaf in leaves:
        if leaf.shape[0] is not None:
            return int(leaf.shape[0])
    first = leaves[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]


def _has_rows(leaf: Any) -> bool:
    return getattr(leaf, "shape", None) is not None and leaf.shape.rank is not None and leaf.shape.rank > 0


def replica_rows(data: Any, replica: int, num_replicas: int) -> Any:
    """Return the contiguous rows of ``data`` that belong to ``replica``.

    Rows are dealt as evenly as they go: replica r has rows [r N // R, (r + 1) N // R). With fewer rows than replicas
    some have none. Scalars go to every replica unchanged.

    Raises:
        DataError: the tensors have different numbers of rows.
    """
    if num_replicas == 1:
        return data
    rows = _rows_of_all(data)
    start, stop = replica * rows // num_replicas, (replica + 1) * rows // num_replicas

    def cut(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            shape = tf.cast(leaf.dense_shape, tf.int64)
            begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(shape[1:])], 0)
            size = tf.concat([[tf.cast(stop - start, tf.int64)], shape[1:]], 0)
            return tf.sparse.slice(leaf, begin, size)
        return leaf[start:stop]

    return tree.map_structure(cut, data)


def _rows_of_all(data: Any) -> int | tf.Tensor:
    """Count the rows, and see that all tensors have as many: now, or when they are there."""
    leaves = [leaf for leaf in tree.flatten(data) if _has_rows(leaf)]
    static = {int(leaf.shape[0]) for leaf in leaves if leaf.shape[0] is not None}
    others = [leaf for leaf in leaves if leaf.shape[0] is None]
    shapes = ", ".join(str(leaf.shape) for leaf in leaves)
    message = (
        f"A batch holds tensors of different numbers of rows, of the shapes {shapes}, so it cannot be split over the "
        "replicas. Repeat for each row what belongs to all of them, or have the model hold it (as a constant, or as a "
        "weight that is not trained)."
    )
    if len(static) > 1:
        raise DataError(message)
    if static and others:
        (expected,), rows = static, num_rows(others[0])
        with tf.control_dependencies([tf.debugging.assert_equal(rows, expected, message)]):
            return tf.identity(rows)
    return num_rows(data)


def without_optionals(data: Any) -> Any:
    """Turn the ``tf.experimental.Optional`` that Keras' adapters write for a missing leaf back into ``None``."""
    return tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
