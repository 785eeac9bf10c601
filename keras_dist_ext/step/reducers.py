"""Add up over the replicas of a step, and assign variables there: each strategy has its own way.

Letters: R = replicas in sync, over all workers.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.hooks import intercept, local_updates
from keras_dist_ext._keras.layers import preserve_losses
from keras_dist_ext._keras.strategies import regroup, replica_id
from keras_dist_ext._keras.tracing import in_xla
from keras_dist_ext._keras.variables import Variable, is_sync_on_read
from keras_dist_ext.aliases import Original
from keras_dist_ext.errors import DataError
from keras_dist_ext.step.compression import GradientCompression
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.logs import pooled_result
from keras_dist_ext.step.pass_through import LocalUpdate, PassThrough
from keras_dist_ext.step.reduce import (
    GATHERED_AS,
    concat_over_replicas,
    local_values,
    scale,
    shares_memory,
    sum_over_replicas,
)
from keras_dist_ext.step.update import (
    Update,
    assign_reduced,
    build_optimizer,
    run_optimizer,
    run_update,
    split_flags,
)

__all__ = [
    "CannotCompile",
    "CannotLoop",
    "MirroredReducer",
    "OneReplica",
    "Reducer",
    "RowRange",
    "TpuReducer",
    "reducer_of",
]


class CannotCompile(Exception):
    """A reduction over replicas is asked for inside of what XLA compiles."""


class CannotLoop(Exception):
    """Sparse gradients, or gathered rows, whose length may change from step to step are summed in a loop of steps.

    TensorFlow exchanges them by a collective, which in one execution takes one shape ("Shape mismatch in the collective
    instance", tensorflow/core/common_runtime/collective_param_resolver_local.cc).
    """


def reducer_of(model: DistributedModel, *, loops: bool = False) -> Reducer:
    """Return what adds up over replicas for the one that is entered.

    Args:
        model: the Keras model.
        loops: whether one execution may make several steps.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return OneReplica()
    if isinstance(context.strategy, tf.distribute.TPUStrategy):
        return TpuReducer(context.num_replicas_in_sync)
    return MirroredReducer(model, context.strategy, loops=loops)


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Where the rows of a replica are in the global batch; each an int where it is static.

    Attributes:
        first: the place of the first one.
        count: n, how many they are.
        total: N, how many the global batch has.
    """

    first: int | tf.Tensor
    count: int | tf.Tensor
    total: int | tf.Tensor


def _placed(value: tf.Tensor, rows: RowRange) -> tf.Tensor:
    """Put a replica's rows into zeros for those of all."""
    around = [[rows.first, rows.total - rows.first - rows.count], *[[0, 0]] * (value.shape.rank - 1)]
    placed = tf.pad(value, around)
    if isinstance(rows.total, int):
        placed.set_shape([rows.total, *value.shape[1:]])
    return placed


class Reducer(abc.ABC):
    """Adds up over replicas, for one of them.

    Attributes:
        num_replicas: R.
        is_single: whether there is nothing to add up, and steps are Keras' own.
        compression: what rounds gradients before they are sent to other replicas, if anything does.
        virtual_replica: the number of the virtual replica, or of the part of a batch, where a replica carries several.
        traces_each_replica: whether each replica is traced by itself.
        merges_branches: whether one branch or loop of the graph can be traced for all replicas of the process.
    """

    num_replicas: int
    is_single = False
    compression: GradientCompression | None = None
    virtual_replica: int | None = None
    traces_each_replica = True
    merges_branches = False

    @property
    def replica_id(self) -> tf.Tensor:
        """The replica's number over all workers: an int but on TPUs."""
        return replica_id()

    @property
    def traces_functions_anew(self) -> bool:
        """Whether a tf.function of the user's must be traced for each step, also for one that runs eagerly.

        A trace holds the weight of the replica's rows, and only while it is traced is seen what it assigns.
        """
        return True

    @property
    @abc.abstractmethod
    def sums_in_layers(self) -> bool:
        """Whether sums inside of a layer are ours to make; else TensorFlow makes them."""

    @abc.abstractmethod
    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up each value over all replicas; every replica gets the sums."""

    @abc.abstractmethod
    def sum_if(self, condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up each value over all replicas if a condition holds, the same on all; else return this replica's own."""

    @abc.abstractmethod
    def updating(self) -> contextlib.AbstractContextManager[None]:
        """Let an optimizer that is run in here assign this replica's copies."""

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: tf.Tensor, original: Original) -> tf.Tensor:
        """All-reduce inside a layer by plain additions where replicas share memory, else as TensorFlow does.

        TensorFlow's collectives of several strategies in a process take each other's keys (tensorflow#62790).
        """
        if not self.sums_in_layers:
            with intercept(None):
                return original(reduce_op, value)
        factor = 1.0
        if tf.distribute.ReduceOp.MEAN in (reduce_op, getattr(reduce_op, "value", None)) or reduce_op == "MEAN":
            factor = 1.0 / self.num_replicas
        flat = tf.nest.flatten(value)
        summed = self.differentiable_sum([tf.convert_to_tensor(v) for v in flat])
        return tf.nest.pack_sequence_as(value, [scale(v, factor) if factor != 1.0 else v for v in summed])

    def differentiable_sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up each value over all replicas; its gradient is the sum of what comes from above on all, and so on."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def total(*values: tf.Tensor) -> tf.Tensor:
            return self.sum(values), lambda *upstream: self.differentiable_sum(upstream)

        summed = total(*values)
        return list(summed) if isinstance(summed, (list, tuple)) else [summed]

    def gather(self, values: Sequence[tf.Tensor], rows: RowRange) -> list[tf.Tensor]:
        """Return each value with the rows of all replicas, in their order: sums of rows among zeros.

        Args:
            values: with this replica's rows, one or more of them.
            rows: which ones they are.

        Raises:
            DataError: there are strings among them.
        """
        if any(value.dtype == tf.string for value in values):
            raise DataError(
                "gather_rows was given strings, and between workers or GPUs only numbers can be gathered. Gather their "
                "numbers in a list of all of them (keras.layers.StringLookup), and look them up afterwards."
            )
        placed = [_placed(tf.cast(value, GATHERED_AS.get(value.dtype, value.dtype)), rows) for value in values]
        sums = self.sum(placed)
        return [tf.cast(total, value.dtype) for total, value in zip(sums, values, strict=True)]

    def prepare(self, optimizer: keras.optimizers.Optimizer, variables: list[Variable], *, guards: bool) -> None:
        """See that an optimizer has its variables before its gradients are looked at.

        Args:
            optimizer: of Keras.
            variables: that it trains.
            guards: whether the update may be left out.
        """
        build_optimizer(optimizer, variables)

    def update(self, update: Update) -> None:
        """Add up the terms of all replicas, and let every replica run the optimizer."""
        run_update(self, update)

    def assign(self, variable: Variable, value: tf.Tensor, original: Callable[[tf.Tensor], None]) -> bool:
        """Assign to a variable on this replica; return whether all replicas are to agree on what it holds then."""
        original(value)
        return self.num_replicas > 1 and not is_sync_on_read(variable)

    def assign_mean(self, variables: list[Variable], terms: list[tf.Tensor]) -> None:
        """Assign to variables the sum over replicas of what each adds to it."""
        assign_reduced(variables, self.sum(terms))

    def pooled_result(self, metric: keras.metrics.Metric) -> tf.Tensor:
        """Compute a metric's result from the state of all replicas."""
        return pooled_result(metric, self.sum)


class OneReplica(Reducer):
    """The only replica: there is nothing to add up."""

    num_replicas = 1
    is_single = True

    @property
    def traces_functions_anew(self) -> bool:
        """See ``Reducer``."""
        return False

    @property
    def sums_in_layers(self) -> bool:
        """See ``Reducer``."""
        return False

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return them."""
        return list(values)

    def sum_if(self, condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return them."""
        return list(values)

    def gather(self, values: Sequence[tf.Tensor], rows: RowRange) -> list[tf.Tensor]:
        """Return them."""
        return list(values)

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """See ``Reducer``."""
        return intercept(None)

    def prepare(self, optimizer: keras.optimizers.Optimizer, variables: list[Variable], *, guards: bool) -> None:
        """See ``Reducer``; Keras does it where the update is not in a branch of the graph."""
        if guards:
            build_optimizer(optimizer, variables)

    def update(self, update: Update) -> None:
        """Run the optimizer, if the step is not left out."""
        if update.guard is None:  # and nothing to reduce: TensorFlow's reduction would keep the graph for ever
            with intercept(PassThrough(of_worker=False)):
                update.original(update.gradients, update.variables)
            return
        split_flags(update.guard, update.values)
        run_optimizer(self, update, update.terms, update.guard.allows())  # terms may be zeros for what was found before

    def pooled_result(self, metric: keras.metrics.Metric) -> tf.Tensor:
        """Compute a metric's result."""
        return type(metric).result(metric)


class MirroredReducer(Reducer):
    """Replicas are devices, on one worker or several, whose threads wait for each other while they are traced.

    Args:
        model: the Keras model.
        strategy: of the replicas.
        loops: whether one execution may make several steps.
    """

    merges_branches = True

    def __init__(self, model: DistributedModel, strategy: tf.distribute.Strategy, *, loops: bool) -> None:
        self.num_replicas = strategy.num_replicas_in_sync
        self._model = model
        self._strategy = strategy
        self._shares_memory = shares_memory(strategy)
        self.compression = None if self._shares_memory else model.replica_runtime.compression
        self._must_not_loop = loops and not self._shares_memory  # with sparse gradients of unknown length

    @property
    def sums_in_layers(self) -> bool:
        """See ``Reducer``."""
        return self._shares_memory

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up each value over all replicas; every replica gets the sums."""
        self.check_loop(values)
        if in_xla():
            raise CannotCompile
        with preserve_losses(self._model):  # of the layers, which the other replicas call meanwhile
            context = tf.distribute.get_replica_context()
            return list(context.merge_call(sum_over_replicas, args=(list(values),)))

    def gather(self, values: Sequence[tf.Tensor], rows: RowRange) -> list[tf.Tensor]:
        """See ``Reducer``; in one memory, by a concatenation."""
        if not self._shares_memory:
            self.check_loop(values, rows)
            return super().gather(values, rows)
        with preserve_losses(self._model):
            context = tf.distribute.get_replica_context()
            return list(context.merge_call(concat_over_replicas, args=(list(values),)))

    def check_loop(self, values: Sequence[tf.Tensor], rows: RowRange | None = None) -> None:
        """Raise ``CannotLoop`` if these cannot be added up over replicas several times in an execution.

        Args:
            values: to be added up, or
            rows: to be gathered.
        """
        if not self._must_not_loop:
            return
        if rows is not None and not isinstance(rows.total, int):
            raise CannotLoop
        if any(isinstance(v, tf.IndexedSlices) and v.values.shape[0] is None for v in values):
            raise CannotLoop

    def sum_if(self, condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See ``Reducer``."""

        def merge(strategy: tf.distribute.Strategy, condition: tf.Tensor, values: list[tf.Tensor]) -> list[tf.Tensor]:
            here = strategy.experimental_local_results(condition)[0]
            summed = tf.cond(
                here,
                lambda: [local_values(strategy, total) for total in sum_over_replicas(strategy, values)],
                lambda: [local_values(strategy, value) for value in values],
            )
            return [regroup(s) for s in summed]

        return list(tf.distribute.get_replica_context().merge_call(merge, args=(condition, list(values))))

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """See ``Reducer``."""
        return local_updates(self._strategy, LocalUpdate())


class TpuReducer(Reducer):
    """One trace serves all replicas of a TPU: there are no threads to wait for, and all is compiled as it is.

    Args:
        num_replicas: R.
    """

    traces_each_replica = False

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas

    @property
    def sums_in_layers(self) -> bool:
        """See ``Reducer``."""
        return False

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See ``Reducer``."""
        return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, list(values)))

    def sum_if(self, condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up, and throw the sums away where they are not wanted: XLA takes no collective in a condition."""
        return [tf.where(condition, total, own) for total, own in zip(self.sum(values), values, strict=True)]

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """See ``Reducer``."""
        return intercept(PassThrough(of_worker=False))
