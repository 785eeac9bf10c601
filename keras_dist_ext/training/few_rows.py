"""Some rows of a batch, to try a step with; of one, too, that TensorFlow has split over replicas already."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data.split import num_rows, take_rows, without_optionals
from keras_dist_ext.strategy.workers import Workers
from keras_dist_ext.training.batch_split import is_per_replica

__all__ = ["first_rows", "parts_of", "rows_of_chief", "unlike_rows"]

Floats = npt.NDArray[np.float64]  # [n]
_CANDIDATES = 8  # for each row that is taken


def first_rows(batch: StepData, count: int, strategy: tf.distribute.Strategy) -> StepData:
    """Return the first rows of a batch, or of what this worker's replicas have of it, in their order.

    Args:
        batch: global, or per replica; None where there is none.
        count: the most rows to take.
        strategy: whose replicas may have it.

    Returns:
        A batch; None where there are no rows.
    """
    if batch is None:
        return None
    parts = [without_optionals(part) for part in parts_of(batch, strategy)]
    taken = []
    for part in parts:
        found = min(int(num_rows(part)), count)
        if found:
            taken.append(take_rows(part, np.arange(found)))
        count -= found
    if not taken:
        return None
    return taken[0] if len(taken) == 1 else tree.map_structure(_joined, *taken)


def unlike_rows(batch: StepData, count: int, strategy: tf.distribute.Strategy) -> StepData:
    """Return the first rows of a batch, or others from its beginning where replicas would have the like of each other.

    What depends on rows that meet is the same on replicas as on one device where rows are alike, or happen to be so on
    average over those of each replica, such as masks of equal lengths. Rows are ordered then so that replicas' differ.

    Args:
        batch: see ``first_rows``.
        count: the most rows to take.
        strategy: see ``first_rows``.
    """
    rows = first_rows(batch, _CANDIDATES * count, strategy)
    if rows is None:
        return None
    sizes = [size for leaf in tf.nest.flatten(rows) for size in _sizes(leaf) if len(size) == int(num_rows(rows))]
    order = np.arange(int(num_rows(rows)))
    if any(_is_alike(size[:count], strategy.num_replicas_in_sync) for size in sizes):
        total = np.zeros(len(order))
        for size in sizes:
            total = total / 2 + size  # follows the last tensors the most: those are targets, masks and weights
        order = np.argsort(total, kind="stable")
        order = order[np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)]
    return take_rows(rows, order[:count])


def _is_alike(size: Floats, num_replicas: int) -> bool:
    """Whether the parts of replicas have the same mean."""
    bounds = np.arange(num_replicas + 1) * len(size) // num_replicas
    means = [size[begin:end].mean() for begin, end in itertools.pairwise(bounds) if begin < end]
    return bool(np.ptp(means) < _ALIKE)


_ALIKE = 1e-6  # of the standard deviation


def _sizes(leaf: TensorNest) -> list[Floats]:
    """Return a number for each row of a tensor, of mean 0 and deviation 1; nothing where all are the same."""
    found = _size(leaf)
    if found is None or not np.isfinite(found).all() or not found.std():
        return []
    return [(found - found.mean()) / found.std()]


def _size(leaf: TensorNest) -> Floats | None:
    if isinstance(leaf, tf.RaggedTensor):
        return np.asarray(leaf.row_lengths(), "float64")
    if not tf.is_tensor(leaf) or isinstance(leaf, tf.SparseTensor) or not leaf.shape.rank:
        return None
    values = tf.strings.length(leaf) if leaf.dtype == tf.string else leaf
    if not (values.dtype.is_floating or values.dtype.is_integer or values.dtype.is_bool):
        return None
    return np.asarray(tf.reduce_mean(tf.cast(values, tf.float64), axis=range(1, values.shape.rank)))


def rows_of_chief(rows: StepData, workers: Workers) -> StepData:
    """Return, on all workers, the rows that the chief has; all give rows of the same structure."""
    leaves = tf.nest.flatten(rows, expand_composites=True)
    parts = tf.stack([tf.io.serialize_tensor(leaf) for leaf in leaves if leaf is not None])
    of_chief = workers.broadcast_bytes(tf.io.serialize_tensor(parts).numpy())
    given = iter(tf.unstack(tf.io.parse_tensor(of_chief, tf.string)))
    leaves = [None if leaf is None else tf.io.parse_tensor(next(given), leaf.dtype) for leaf in leaves]
    return tf.nest.pack_sequence_as(rows, leaves, expand_composites=True)


def parts_of(batch: StepData, strategy: tf.distribute.Strategy) -> list[StepData]:
    """Return a batch as it is, or what each replica of this worker has of it."""
    if not is_per_replica(batch):
        return [batch]

    def of_replica(leaf: TensorNest, replica: int) -> TensorNest:
        is_split = isinstance(leaf, tf.distribute.DistributedValues)
        return strategy.experimental_local_results(leaf)[replica] if is_split else leaf

    replicas = range(len(strategy.extended.worker_devices))
    return [tree.map_structure(lambda leaf, r=replica: of_replica(leaf, r), batch) for replica in replicas]


def _joined(*leaves: tf.Tensor) -> tf.Tensor:
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(leaves), expand_nonconcat_dims=True)
    return tf.concat(leaves, 0) if getattr(leaves[0], "shape", None) else leaves[0]
