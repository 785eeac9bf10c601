"""Split a batch over replicas, in a step."""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeAlias

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.strategies import replica_id
from keras_dist_ext.aliases import StepData
from keras_dist_ext.data import split as data
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.global_draws import of_any_number
from keras_dist_ext.step.reduce import sum_over_replicas

__all__ = [
    "Dealt",
    "HowSplit",
    "Split",
    "first_row",
    "global_rows",
    "is_per_replica",
    "own_rows",
    "rows_on_host",
    "rows_of_replica",
    "split_for",
    "split_of",
    "split_rows",
]


class Split(enum.Enum):
    """What a batch is split from before a replica's step."""

    NONE = "none"  # it is the replica's own already
    WORKER = "worker"  # the rows of this worker
    GLOBAL = "global"  # the global batch


@dataclasses.dataclass(frozen=True, eq=False)
class Dealt:
    """A global batch of which each local replica has its rows already.

    Attributes:
        rows: per replica.
        total: N, how many rows the global batch has.
        num_replicas: R.
    """

    rows: StepData
    total: int | tf.Tensor
    num_replicas: int


HowSplit: TypeAlias = Split | Dealt
"""What a batch is split from, or the split batch itself."""


def split_of(batch: StepData | Dealt, *, of_worker: bool) -> HowSplit:
    """Return how a batch is to be split, given whether its rows are this worker's own."""
    if isinstance(batch, Dealt):
        return batch
    return Split.NONE if is_per_replica(batch) else Split.WORKER if of_worker else Split.GLOBAL


def is_per_replica(batch: StepData) -> bool:
    """Whether a batch comes from a distributed iterator, split already."""
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tree.flatten(batch))


def split_rows(
    batch: StepData, split: HowSplit, strategy: tf.distribute.Strategy, num_parts: int = 1
) -> tuple[list[StepData], int | tf.Tensor]:
    """Return this replica's rows of a batch, in as many parts, and the number of those of the global batch.

    A batch that is ``Dealt`` has one part.
    """
    if isinstance(split, Dealt):
        return [batch], split.total
    parts = [
        data.replica_rows(batch, part, num_parts)
        if split is Split.NONE
        else rows_of_replica(batch, strategy, of_worker=split is Split.WORKER, part=part, num_parts=num_parts)
        for part in range(num_parts)
    ]
    if split is Split.GLOBAL:
        return parts, rows_on_host(batch)
    rows = data.num_rows(batch) if split is Split.NONE else sum(data.num_rows(part) for part in parts)
    return parts, global_rows(rows, strategy.num_replicas_in_sync, is_even=split is Split.NONE)


def rows_on_host(batch: StepData) -> int | tf.Tensor:
    """Count the rows of a batch that is on the host: on a GPU, TensorFlow would send all of it there to count."""
    with tf.device("/device:CPU:0"):
        return data.num_rows(batch)


def split_for(
    model: DistributedModel, batch: StepData, split: HowSplit, num_parts: int = 1
) -> tuple[list[StepData], int | tf.Tensor]:
    """Split as ``split_rows`` for a model's step, which may have to tell what has a dimension of examples."""
    parts, num_global = split_rows(batch, split, model.distribute_strategy, num_parts)
    is_global = model.replica_seeds.draws == "global"
    return [of_any_number(part) for part in parts] if is_global else parts, num_global


def own_rows(split: HowSplit, batch: StepData) -> int | tf.Tensor:
    """Count this replica's rows, of a ``Dealt`` batch without looking at what is on a GPU.

    No device is named: on a GPU, too, TensorFlow computes int32 on the host, and from an op that is placed there a GPU
    would be stopped (see "How steps on a GPU are recorded" in docs/ARCHITECTURE.md).
    """
    if not isinstance(split, Dealt):
        return data.num_rows(batch)
    start, stop = data.bounds_of_replica(split.total, replica_id(), split.num_replicas)
    return stop - start


def first_row(
    split: HowSplit, strategy: tf.distribute.Strategy, num_global: int | tf.Tensor, part: int = 0, num_parts: int = 1
) -> int | tf.Tensor | None:
    """Return where this replica's rows, or those of one of several parts of them, begin in the global batch.

    None where the batch was split elsewhere, so that replicas have to tell each other how many they have.
    """
    if split is not Split.GLOBAL and not isinstance(split, Dealt):
        return None
    return (replica_id() * num_parts + part) * num_global // (strategy.num_replicas_in_sync * num_parts)


def global_rows(rows: int | tf.Tensor, num_replicas: int, *, is_even: bool) -> int | tf.Tensor:
    """Return the number of rows of all replicas.

    Args:
        rows: of this one.
        num_replicas: see above.
        is_even: whether all have as many where the number is static.
    """
    if is_even and isinstance(rows, int) and not tf.executing_eagerly():
        return rows * num_replicas  # TensorFlow makes a static batch dimension only where all replicas have it
    context = tf.distribute.get_replica_context()
    (total,) = context.merge_call(sum_over_replicas, args=([tf.cast(rows, tf.float32)],))
    return tf.cast(total, tf.int32)


def rows_of_replica(
    batch: StepData, strategy: tf.distribute.Strategy, *, of_worker: bool = False, part: int = 0, num_parts: int = 1
) -> StepData:
    """Cut this replica's rows, or one of several parts of them, out of the global batch, or out of its worker's."""
    replica, num_replicas = replica_id(), strategy.num_replicas_in_sync
    if of_worker:
        num_replicas = len(strategy.extended.worker_devices)
        replica = replica % num_replicas
    with tf.device("/device:CPU:0"):
        return data.replica_rows(batch, replica * num_parts + part, num_replicas * num_parts)
