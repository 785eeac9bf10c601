"""Run a step on one replica without the others: as one device with all rows, or as if all others had its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras.hooks import intercept, local_updates
from keras_dist_ext._keras.strategies import local_replica_id
from keras_dist_ext.step.pass_through import LocalUpdate, PassThrough
from keras_dist_ext.step.reduce import scale
from keras_dist_ext.step.reducers import Reducer, RowRange
from keras_dist_ext.step.update import Update, assign_reduced, run_optimizer, run_update, split_flags

__all__ = ["LoneReplica", "is_first_of_worker"]


def is_first_of_worker() -> bool:
    """Whether the replica that is entered is this worker's first."""
    return local_replica_id() == 0


class LoneReplica(Reducer):
    """Reduces for one replica without the others: each of these is assumed to hold what it holds.

    Args:
        strategy: whose replica it is.
        num_replicas: how many there seem to be; 1 makes it the one device.
    """

    def __init__(self, strategy: tf.distribute.Strategy, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._strategy = strategy
        self._is_distributed = strategy.num_replicas_in_sync > 1

    @property
    def replica_id(self) -> int:
        """The first."""
        return 0

    @property
    def sums_in_layers(self) -> bool:
        """Always: TensorFlow would wait for the others."""
        return True

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up each value over replicas that all have the same."""
        if self.num_replicas == 1:
            return list(values)
        return [scale(value, float(self.num_replicas)) for value in values]

    def sum_if(self, condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See ``Reducer``."""
        return [
            tf.cond(condition, lambda t=t: tf.identity(t), lambda o=o: tf.identity(o))
            for t, o in zip(self.sum(values), values, strict=True)
        ]

    def gather(self, values: Sequence[tf.Tensor], rows: RowRange) -> list[tf.Tensor]:
        """Return each value as often as there are replicas."""
        return [tf.concat([value] * self.num_replicas, 0) for value in values]

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """See ``Reducer``."""
        if self._is_distributed:
            return local_updates(self._strategy, LocalUpdate())
        return intercept(PassThrough(of_worker=False))

    def update(self, update: Update) -> None:
        """Run the optimizer; gradients that it accumulates are all this replica's own."""
        if update.are_global:
            run_update(self, update)
            return
        gradients, values = self.sum(update.terms), self.sum(update.values)
        values, may_update = split_flags(update.guard, values)
        assign_reduced(update.states, values)
        run_optimizer(self, update, gradients, may_update)
