"""The traced code of one distributed step: what a replica computes, and what all replicas agree on.

User code inside a step (``train_step``, ``compute_loss``, losses, layers, metrics) is written for one device and sees
one replica's rows as if they were the whole batch. ``ReplicaStep`` makes the sum over replicas exact (what the rows
weigh stands in ``weighting``, random numbers in ``draws``):

- a gradient is weighted by the replica's share of the global rows, then summed once, before clipping and updates;
- a loss that does not divide by the rows (sum, mask, sample weights) divides by the count over all replicas;
- an optimizer runs on every replica with the same summed gradient, so no conditional of it spans devices;
- non-trainable state that a layer assigned becomes the mean over replicas, weighted by rows;
- metrics add up on each replica, and results are computed from the pooled state, once an execution.

Letters: n = rows of a replica, N = rows of the global batch, R = replicas in sync, over all workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import intercept, local_updates
from keras_dist_ext._keras.layers import preserve_losses
from keras_dist_ext._keras.optimizers import accumulators_of, ends_accumulation, inner_optimizer, optimized_variables
from keras_dist_ext._keras.strategies import regroup
from keras_dist_ext._keras.tracing import clone_function, in_xla
from keras_dist_ext._keras.variables import is_sync_on_read, local_component
from keras_dist_ext.errors import DataError
from keras_dist_ext.step import pass_through
from keras_dist_ext.step.draws import Draws
from keras_dist_ext.step.logs import Result
from keras_dist_ext.step.means import Degrees
from keras_dist_ext.step.nan_guard import StepGuard
from keras_dist_ext.step.pass_through import LocalUpdate, PassThrough
from keras_dist_ext.step.recorder import StepNote
from keras_dist_ext.step.reduce import parts_of, shares_memory, sum_over_replicas, times
from keras_dist_ext.step.row_weights import Weighting, as_float

__all__ = [
    "CannotCompile",
    "CannotLoop",
    "ReplicaStep",
    "UnbuiltOptimizer",
    "assign_mean",
]


class UnbuiltOptimizer(Exception):
    """An optimizer meets its variables for the first time in a graph, where it can make none of its own.

    Args:
        build: makes them, outside of graphs, in the strategy's scope.
    """

    def __init__(self, build: Callable[[], None]) -> None:
        super().__init__()
        self.build = build


class CannotCompile(Exception):
    """A reduction over replicas is met inside of what XLA compiles."""


class CannotLoop(Exception):
    """Sparse gradients whose length may change from step to step are met in a loop of steps.

    TensorFlow gathers them by a collective, which in one execution takes one shape ("Shape mismatch in the collective
    instance", tensorflow/core/common_runtime/collective_param_resolver_local.cc).
    """


class ReplicaStep(Weighting, Draws):
    """One replica's part of a step, while it is traced (or run eagerly).

    Args:
        model: the Keras model.
        rows: n, an int where static.
        global_rows: N, an int where static.
        kind: "train", "test" or "predict".
        pools_results: whether the results of metrics inside the step are those of all replicas, because the step
            computes with them.
        without_seed: the generator behind ``seed=None``.
        note: takes what is recorded of the step, if anything is.
        guard: leaves the step out if something in it is not finite, if that is wanted.
        loops: whether one execution may make several steps.
        degrees: how numbers grow with the rows, where the graph does not tell; None takes all of them for means.
    """

    turn: int | None = None  # the number of the virtual replica or micro-batch, where replicas make several

    def __init__(
        self,
        model: Any,
        rows: int | tf.Tensor,
        global_rows: int | tf.Tensor,
        *,
        kind: str = "train",
        pools_results: bool = False,
        without_seed: Any = None,
        note: StepNote | None = None,
        guard: StepGuard | None = None,
        loops: bool = False,
        degrees: Degrees | None = None,
    ) -> None:
        context = tf.distribute.get_replica_context()
        num_replicas: int = context.num_replicas_in_sync
        Weighting.__init__(self, model, rows, global_rows, num_replicas, degrees)
        Draws.__init__(self, model, num_replicas, without_seed)
        self.strategy = context.strategy
        self.kind = kind
        # One trace serves all replicas of a TPU: there are no threads to meet, and all is compiled as it is.
        self._is_on_tpu = isinstance(self.strategy, tf.distribute.TPUStrategy)
        self.results: dict[int, Result] = {}  # by the tensor's id
        self._pools_results = pools_results
        self._assigned: dict[int, Any] = {}
        self._functions: dict[int, tuple[Any, Any]] = {}  # by id: a tf.function of the user's, and its copy
        self.note = note
        self.guard = guard
        self.batch: Any = None  # this replica's, where it is guarded
        self._losses: list[Any] = []
        gathers = self.num_replicas > 1 and not self._is_on_tpu and not shares_memory(self.strategy)
        self._must_not_loop = loops and gathers  # with sparse gradients of unknown length

    def sum_over_replicas(self, values: Sequence[Any]) -> list[Any]:
        """Add up each value over all replicas; every replica gets the sums."""
        self.check_loop(values)
        context = tf.distribute.get_replica_context()
        if self._is_on_tpu:
            return list(context.all_reduce(tf.distribute.ReduceOp.SUM, list(values)))
        if in_xla():
            raise CannotCompile
        with preserve_losses(self.model):  # of the layers, which the other replicas call meanwhile
            return list(context.merge_call(sum_over_replicas, args=(list(values),)))

    def check_loop(self, values: Sequence[Any]) -> None:
        """Raise ``CannotLoop`` if these cannot be added up over replicas several times in an execution."""
        if self._must_not_loop and any(isinstance(v, tf.IndexedSlices) and v.values.shape[0] is None for v in values):
            raise CannotLoop

    @property
    def sums_in_layers(self) -> bool:
        """Whether sums inside of a layer are ours to make."""
        return self.num_replicas > 1 and shares_memory(self.strategy)

    # What Keras asks (`_keras.interception.Step`)

    def mean_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Make a scalar that a step gives to a ``Mean`` count once for the global batch, not once a replica."""
        values, sample_weight = super().mean_update(metric, values, sample_weight)
        if self.note is not None and metric.name == "loss" and len(getattr(values, "shape", ())) == 0:
            self.note.loss(self.replica_id, values, is_logged=True)
        return values, sample_weight

    def assign(self, variable: Any, value: Any, original: Callable[[Any], None]) -> None:
        """Note state that a layer assigns, so that the replicas agree on it after the step."""
        if self.guard is not None:
            self.guard.note(variable)
        original(value)
        if self.num_replicas > 1:
            self._note_assigned(variable)

    def _note_assigned(self, variable: Any) -> None:
        dtype = tf.as_dtype(variable.dtype)
        is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
        if is_number and not self._draws_seed and not variable.trainable and not is_sync_on_read(variable):
            self._assigned[id(variable)] = variable

    def apply(self, optimizer: Any, grads: Any, variables: Any, original: Callable[..., None]) -> None:
        """Sum the gradients over replicas, then let every replica run the optimizer on its own copies."""
        grads = list(grads)
        variables = list(optimized_variables(optimizer) if variables is None else variables)
        if self.num_replicas == 1:
            present = [g for g in grads if g is not None]
            self._note_gradients(optimizer, present)
            if self.guard is None:  # and nothing to reduce: TensorFlow's reduction would keep the graph for ever
                with intercept(PassThrough(of_worker=False)):
                    return original(grads, variables)
            self.build(optimizer, variables)
            may_update = self.settle([self._found(optimizer, present)])[1]
            self.update(grads, present, variables, original, may_update)
            return None
        self.build(optimizer, variables)
        gradients, states, values = self.contribution(optimizer, grads)
        trained = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        gradients, values = self.reduce(optimizer, trained, gradients, values)
        values, may_update = self.settle(values)
        self.agree(states, values)
        self.update(grads, gradients, variables, original, may_update)
        return None

    def build(self, optimizer: Any, variables: list[Any]) -> None:
        """Make the variables of an optimizer that has none yet."""
        if not optimizer.built:
            if not tf.executing_eagerly():
                raise UnbuiltOptimizer(functools.partial(optimizer.build, variables))
            with intercept(None):
                optimizer.build(variables)

    def contribution(self, optimizer: Any, grads: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return what this replica adds to the sums: its gradients that are there, and state assigned, with values.

        Where it is guarded, another value comes last: what it has found, see ``settle``.
        """
        present = [g for g in grads if g is not None]
        self._note_gradients(optimizer, present)
        found = [] if self.guard is None else [self._found(optimizer, present)]
        if id(optimizer) not in self._scaled:
            present = [times(g, self.share) for g in present]
        self._scaled.discard(id(optimizer))
        states, values = self.assigned_state()
        return self._zero_if_empty(present), states, values + found

    def _found(self, optimizer: Any, gradients: list[Any]) -> tf.Tensor:
        assert self.guard is not None
        scale = getattr(optimizer, "dynamic_scale", None)
        own = self.replica_id, self.num_replicas, self.rows, self.batch
        return self.guard.found(*own, self._losses, gradients, scale)

    def settle(self, values: list[Any]) -> tuple[list[Any], tf.Tensor | None]:
        """Take from summed values what all replicas have found; return the others, and whether weights may change."""
        if self.guard is None:
            return values, None
        *values, found = values
        may_update = self.guard.may_update(found)
        self.guard.keep(found)
        return values, may_update

    def _note_gradients(self, optimizer: Any, grads: list[Any]) -> None:
        if self.note is None:
            return
        factor: Any = 1.0
        if self.num_replicas > 1 and id(optimizer) in self._scaled:
            factor = self._inverse_share
        if hasattr(optimizer, "dynamic_scale"):
            factor = tf.math.divide_no_nan(tf.cast(factor, tf.float32), tf.convert_to_tensor(optimizer.dynamic_scale))
        self.note.gradients(self.replica_id, grads, factor)

    def note_loss(self, value: Any) -> None:
        """Note what Keras' ``compute_loss`` has returned, a sum of means."""
        self._means.know(value)
        if len(getattr(value, "shape", ())) == 0:
            self._losses.append(value)
            if self.note is not None:
                self.note.loss(self.replica_id, value)

    def reduce(
        self, optimizer: Any, variables: list[Any], grads: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Sum gradients and values over replicas."""
        if inner_optimizer(optimizer).gradient_accumulation_steps:
            values = self.sum_over_replicas(values) if values else []
            may_update = None if self.guard is None else self.guard.may_update(values[-1])
            return self._accumulate(optimizer, grads, variables, may_update), values
        summed = self.sum_over_replicas(grads + values)
        return summed[: len(grads)], summed[len(grads) :]

    def update(
        self,
        grads: list[Any],
        reduced: list[Any],
        variables: list[Any],
        original: Callable[..., None],
        may_update: tf.Tensor | None = None,
    ) -> None:
        """Let every replica run the optimizer on its own copies, if it may."""
        if self.num_replicas == 1:
            update: Any = intercept(None)
        elif self._is_on_tpu:
            update = intercept(PassThrough(of_worker=False))
        else:
            update = local_updates(self.strategy, LocalUpdate())
        rest = iter(reduced)
        summed = [None if g is None else next(rest) for g in grads]

        def run() -> tf.Tensor:
            with update:
                original(summed, variables)
            return tf.constant(True)

        if may_update is None:
            run()
        else:
            tf.cond(may_update, run, lambda: tf.constant(False))

    def _accumulate(
        self, optimizer: Any, grads: list[Any], variables: list[Any], may_update: tf.Tensor | None
    ) -> list[Any]:
        """Sum over replicas at the last micro-batch of an accumulation only; before it, keep each replica's own.

        Keras adds what it is given to its accumulators, and at the update divides the sum of both. So before the
        update the accumulators are emptied into the gradients, which then are summed over replicas.
        """
        is_scaled = inner_optimizer(optimizer) is not optimizer
        scale = tf.convert_to_tensor(optimizer.dynamic_scale) if is_scaled else 1.0
        grads = [tf.convert_to_tensor(g) for g in grads]
        accumulators = accumulators_of(optimizer, variables)
        is_update = ends_accumulation(optimizer)
        if may_update is not None:
            is_update = tf.logical_and(is_update, may_update)
        if is_scaled:
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads])
            (num_bad,) = self.sum_over_replicas([1.0 - tf.cast(finite, tf.float32)])
            is_update = tf.logical_and(is_update, num_bad == 0)
            poison = tf.where(num_bad > 0, float("nan"), 0.0)
            grads = [g + tf.cast(poison, g.dtype) for g in grads]
        totals = [
            tf.cond(is_update, lambda g=g, a=a: g + a.value * scale, lambda g=g: g)
            for g, a in zip(grads, accumulators, strict=True)
        ]

        if self._is_on_tpu:
            # The reduction of a micro-batch before the update is thrown away: XLA takes no collective in a condition.
            totals = [
                tf.where(is_update, total, own)
                for total, own in zip(self.sum_over_replicas(totals), totals, strict=True)
            ]
            self._empty(accumulators, is_update)
            return totals

        def merge(strategy: tf.distribute.Strategy, is_update: Any, totals: list[Any]) -> list[Any]:
            here = strategy.experimental_local_results(is_update)[0]
            summed = tf.cond(
                here,
                lambda: [parts_of(strategy, total) for total in sum_over_replicas(strategy, totals)],
                lambda: [parts_of(strategy, total) for total in totals],
            )
            return [regroup(s) for s in summed]

        summed = tf.distribute.get_replica_context().merge_call(merge, args=(is_update, totals))
        self._empty(accumulators, is_update)
        return list(summed)

    @staticmethod
    def _empty(accumulators: list[Any], when: tf.Tensor) -> None:
        for accumulator in accumulators:
            local = local_component(accumulator)
            local.assign(tf.cond(when, lambda a=local: tf.zeros_like(a), lambda a=local: a.read_value()))

    @property
    def has_assigned(self) -> bool:
        """Whether state was assigned on which the replicas have not agreed yet."""
        return bool(self._assigned)

    def assigned_state(self) -> tuple[list[Any], list[Any]]:
        """Return the variables assigned since this was asked last, and what this replica adds to their mean."""
        variables = list(self._assigned.values())
        self._assigned.clear()
        held = [tf.convert_to_tensor(local_component(v)) for v in variables]
        values = [times(v if v.dtype.is_floating else tf.cast(v, tf.float64), self.share) for v in held]
        return variables, self._zero_if_empty(values)

    def agree(self, variables: list[Any], values: list[Any]) -> None:
        """Assign what the replicas have agreed on."""
        for variable, value in zip(variables, values, strict=True):
            assign_mean(local_component(variable), value)

    def all_reduce_gradients(self, grads_and_vars: Any) -> Any:
        """Leave gradients alone: ``apply`` sums them."""
        return grads_and_vars

    def all_reduce(self, reduce_op: Any, value: Any, original: Callable[..., Any]) -> Any:
        """All-reduce inside a layer by plain additions where replicas share memory, else as TensorFlow does.

        TensorFlow's collectives of several strategies in a process take each other's keys (tensorflow#62790).
        """
        self._has_mixed = True
        if not self.sums_in_layers:
            with intercept(None):
                return original(reduce_op, value)
        factor = 1.0
        if tf.distribute.ReduceOp.MEAN in (reduce_op, getattr(reduce_op, "value", None)) or reduce_op == "MEAN":
            factor = 1.0 / self.num_replicas
        flat = tf.nest.flatten(value)
        summed = self._differentiable_sum(*[tf.convert_to_tensor(v) for v in flat])
        return tf.nest.pack_sequence_as(value, [times(v, factor) if factor != 1.0 else v for v in summed])

    def _differentiable_sum(self, *values: tf.Tensor) -> list[tf.Tensor]:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def total(*values: tf.Tensor) -> Any:
            return self.sum_over_replicas(values), lambda *upstream: self.sum_over_replicas(upstream)

        summed = total(*values)
        return list(summed) if isinstance(summed, (list, tuple)) else [summed]

    def trace_of(self, function: Any) -> Any:
        """Have a tf.function traced for steps, and anew in each: only while it is traced, what it assigns is seen."""
        if self.num_replicas == 1 or tf.executing_eagerly():
            return function
        if id(function) not in self._functions:
            self._functions[id(function)] = (function, clone_function(function))
        return self._functions[id(function)][1]

    # Around the user's step

    def on_rows(self, inputs: Any, op: Callable[[Any], Any]) -> Any:
        """Return what an op gives for each row, where this replica may have none."""
        return op(inputs) if self.num_replicas == 1 else pass_through.on_rows(inputs, op)

    def check_stateful(self, layer: Any) -> None:
        """Refuse a layer that keeps a state for each row of the global batch.

        Raises:
            DataError: there are several replicas.
        """
        if self.num_replicas > 1:
            raise DataError(
                f"'{layer.name}' is stateful: it keeps a state for each row of a batch, and each of the "
                f"{self.num_replicas} replicas has only some of the rows. Run it on one device "
                "(`pick_strategy('one_device')`), or have it return its states (`return_state=True`) and give them "
                "back as inputs (`initial_state=`)."
            )

    def note_result(self, metric: Any, value: Any) -> Any:
        """Remember that ``value`` is the result of ``metric``, to compute it from the pooled state instead."""
        if self._pools_results and self.num_replicas > 1:
            return self.pooled_result(metric)
        for place, leaf in enumerate(tree.flatten(value)):  # a result may be a dict of several
            if tf.is_tensor(leaf):
                self.results[id(leaf)] = Result(metric, place, leaf)
        return value

    def pooled_result(self, metric: Any) -> Any:
        """Compute a metric's result from the state of all replicas."""
        if self.num_replicas == 1:
            return type(metric).result(metric)
        variables = [v for v in metric.variables if is_sync_on_read(v)]
        states = [as_float(local_component(v)) for v in variables]
        sums = self.sum_over_replicas(states)
        mapping = [(v, tf.cast(total, v.dtype)) for v, total in zip(variables, sums, strict=True)]
        with keras.StatelessScope(state_mapping=mapping):
            return type(metric).result(metric)

    def finish(self, logs: Any) -> list[tf.Tensor]:
        """Agree on what is left, and return the leaves of the logs that are not results of metrics."""
        states, values = self.assigned_state()
        if states:
            self.agree(states, self.sum_over_replicas(values))
        local = [leaf for leaf in tree.flatten(logs) if id(leaf) not in self.results]
        if self.num_replicas == 1:
            return [tf.convert_to_tensor(leaf) for leaf in local]
        return self._zero_if_empty([times(as_float(self.as_mean(leaf)), self.share) for leaf in local])


def assign_mean(local: Any, mean: tf.Tensor) -> None:
    """Assign to a variable what its replicas have in the mean; of integers and bools, the nearest."""
    local.assign(tf.cast(mean if local.dtype.is_floating else tf.round(mean), local.dtype))
