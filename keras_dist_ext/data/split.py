"""Cut a global batch into the rows of each replica.

Letters: N = rows of the global batch, R = replicas in sync, over all workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext.aliases import Array, TensorNest
from keras_dist_ext.data.graph_checks import require
from keras_dist_ext.errors import DataError

__all__ = ["bounds_of_replica", "num_rows", "replica_rows", "take_rows", "without_optionals"]


def num_rows(data: TensorNest) -> int | tf.Tensor:
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
    return _count(leaves[0])


def _count(leaf: tf.Tensor) -> int | tf.Tensor:
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def _has_rows(leaf: tf.Tensor) -> bool:
    return getattr(leaf, "shape", None) is not None and leaf.shape.rank is not None and leaf.shape.rank > 0


def replica_rows(data: TensorNest, replica: int, num_replicas: int) -> TensorNest:
    """Return the contiguous rows of ``data`` that belong to ``replica``.

    Rows are split as evenly as possible: replica r has rows [r N // R, (r + 1) N // R). With fewer rows than replicas
    some have none. Scalars go to every replica unchanged.

    Raises:
        DataError: the tensors have different numbers of rows.
    """
    if num_replicas == 1:
        return data
    rows = _rows_of_all(data)
    start, stop = bounds_of_replica(rows, replica, num_replicas)

    def cut(leaf: tf.Tensor) -> tf.Tensor:
        if not _has_rows(leaf):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            shape = tf.cast(leaf.dense_shape, tf.int64)
            begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(shape[1:])], 0)
            size = tf.concat([[tf.cast(stop - start, tf.int64)], shape[1:]], 0)
            return tf.sparse.slice(leaf, begin, size)
        return leaf[start:stop]

    return tree.map_structure(cut, data)


def bounds_of_replica(
    rows: int | tf.Tensor, replica: int, num_replicas: int
) -> tuple[int | tf.Tensor, int | tf.Tensor]:
    """Return where the rows of ``replica`` begin and end in a batch of so many: r N // R and (r + 1) N // R."""
    return replica * rows // num_replicas, (replica + 1) * rows // num_replicas


def _rows_of_all(data: TensorNest) -> int | tf.Tensor:
    """Count the rows, and see that all tensors have as many: now, or when their values are available."""
    named = [(name, leaf) for name, leaf in _named_leaves(data) if _has_rows(leaf)]
    counts = [_count(leaf) for _, leaf in named]
    static = {count for count in counts if isinstance(count, int)}
    if len(static) > 1:
        raise DataError(_unequal(named, [count if isinstance(count, int) else "an unknown number" for count in counts]))
    if len(counts) == len(static) or all(isinstance(count, int) for count in counts):
        return num_rows(data)
    rows = num_rows(data)
    are_equal = tf.reduce_all(tf.equal(tf.stack(counts), rows))
    check = require(are_equal, _unequal(named, ["{}"] * len(counts)), *counts)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(rows)


def _unequal(named: list[tuple[str, tf.Tensor]], counts: Sequence[int | str]) -> str:
    found = ", ".join(f"{name} {count}" for (name, _), count in zip(named, counts, strict=True))
    return (
        f"A batch holds tensors of different numbers of rows ({found}), so it cannot be split over the replicas. "
        "Repeat for each row what belongs to all of them, or have the model hold it (as a constant, or as a weight "
        "that is not trained)."
    )


def _named_leaves(data: TensorNest) -> list[tuple[str, tf.Tensor]]:
    """The leaves of a batch with their names, as ``x/nodes``: by place, or as Keras knows them."""
    is_keras = isinstance(data, tuple | list) and len(data) <= len(_OF_KERAS)
    named = []
    for path, leaf in tree.flatten_with_path(data):
        first, *rest = path or ("x",)
        names = [_OF_KERAS[first] if is_keras and isinstance(first, int) else first, *rest]
        named.append(("/".join(map(str, names)), leaf))
    return named


_OF_KERAS = ("x", "y", "sample_weight")


def take_rows(data: TensorNest, rows: Sequence[int] | Array) -> TensorNest:
    """Take rows of a batch by their numbers, in that order; what has no rows stays.

    Raises:
        DataError: tensors have different numbers of rows.
    """
    _rows_of_all(data)
    index = tf.constant(rows, tf.int64)

    def take(leaf: tf.Tensor) -> tf.Tensor:
        if not _has_rows(leaf):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.concat(
                0, [tf.sparse.slice(leaf, [i, *[0] * (leaf.shape.rank - 1)], [1, *leaf.shape[1:]]) for i in rows]
            )
        return tf.gather(leaf, index)

    return tree.map_structure(take, data)


def without_optionals(data: TensorNest) -> TensorNest:
    """Turn the ``tf.experimental.Optional`` that Keras' adapters write for a missing leaf back into ``None``."""
    return tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
