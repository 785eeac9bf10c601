"""The first rows of a batch, to try a step with; of one, too, that TensorFlow has split over replicas already."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data.split import num_rows, take_rows, without_optionals
from keras_dist_ext.strategy.workers import Workers
from keras_dist_ext.training.batch_split import is_per_replica

__all__ = ["first_rows", "parts_of", "rows_of_chief"]


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
