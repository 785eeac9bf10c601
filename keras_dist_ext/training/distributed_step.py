"""One step over all replicas: the user's step on the rows of each, what is recorded of it, and its logs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.models import overrides
from keras_dist_ext._keras.random import use_global_seed_generator
from keras_dist_ext._keras.row_wise import has_code_to_check
from keras_dist_ext._keras.strategies import is_default_strategy, replica_id, seen_as_one_replica
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext._keras.variables import without_aggregation
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data import split as data
from keras_dist_ext.step.global_generator import global_generator_of
from keras_dist_ext.step.graphs import once_read
from keras_dist_ext.step.hook_checks import check_hooks, check_step
from keras_dist_ext.step.logs import VALUE, ComputesWithResults, computes_with, leaf_metrics
from keras_dist_ext.step.lone_replica import LoneReplica, is_first_of_worker
from keras_dist_ext.step.means import BatchExponents
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.step.plain_calls import noted_calls
from keras_dist_ext.step.recorder import StepNote
from keras_dist_ext.step.reducers import Reducer, reducer_of
from keras_dist_ext.step.replica_step import ReplicaStep
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.step.step_buffer import ReplicaRecord, StepBuffer, StepRecord
from keras_dist_ext.step.step_clocks import sampled_clocks, when_updated
from keras_dist_ext.step.step_options import StepOptions
from keras_dist_ext.step.step_plan import StepPlan
from keras_dist_ext.step.virtual_replicas import run_virtual_replicas
from keras_dist_ext.step.xla import check_default, compiled_step
from keras_dist_ext.training.batch_clock import after
from keras_dist_ext.training.batch_devices import accelerators
from keras_dist_ext.training.batch_split import Dealt, HowSplit, Split, first_row, own_rows, split_for, split_of
from keras_dist_ext.training.runtime import ReplicaRuntime
from keras_dist_ext.training.step_examination import StepExamination
from keras_dist_ext.training.step_logs import StepLogs, zeros_like
from keras_dist_ext.training.xla_rule import uses_xla

__all__ = ["DistributedStep"]


class DistributedStep:
    """One kind of step of a model, over all replicas.

    Args:
        model: the Keras model; its strategy, ``run_eagerly`` and ``jit_compile`` are read here.
        kind: "train" or "test".

    Attributes:
        is_eager: whether it runs as Python.
        loops: whether what is traced makes several steps.
        exponents: in the batch size, of its numbers; None where all that it differentiates is a mean.
        first_batch: returns the batch that comes next, without taking it; None where there is none to look at.
        observer: is called with what steps do while they are traced.
        buffer: takes the records of steps, if they are recorded.
        devices: of this worker's replicas.
        gpus: those of them that are GPUs; without a strategy, the one that TensorFlow takes.
    """

    def __init__(self, model: keras.Model, kind: Kind) -> None:
        self.model = model
        self.kind = kind
        self.strategy: tf.distribute.Strategy = model.distribute_strategy
        self.num_replicas: int = self.strategy.num_replicas_in_sync
        self._runtime: ReplicaRuntime = model.replica_runtime
        self._global_generator = global_generator_of(self.strategy, is_seeded=self._runtime.seeds.root is not None)
        self.is_eager: bool = model.run_eagerly or tf.config.functions_run_eagerly()
        self._user_step = getattr(model, f"{kind}_step")
        virtual = model.virtual_replicas
        if model.placement is not None:
            virtual = model.placement.virtual(virtual, self.num_replicas)
        self._virtual = virtual
        self._num_turns: int = 0 if virtual is None else virtual.num_turns(self.strategy)
        is_compiled = uses_xla(model, kind)
        if is_compiled:
            self._user_step = compiled_step(model, kind)
        self._logs = StepLogs(model, kind)
        self._records_norm = any(recorder.gradient_norm for recorder in self._runtime.recorders)
        self.devices = (
            ["/device:CPU:0"] if is_default_strategy(self.strategy) else list(self.strategy.extended.worker_devices)
        )
        self.gpus = accelerators(self.strategy)
        self.buffer = StepBuffer(self.devices, self._records_norm, self.gpus) if self._runtime.recorders else None
        self._guard = self._runtime.guard if kind == "train" else None
        self.loops = False  # whether what is traced makes several steps
        self._is_received = is_compiled  # or whether it was seen that it calls the hooks of Keras' own steps
        self.first_batch: Callable[[], StepData] | None = None
        self.observer = StepObserver()
        self._plan: StepPlan = self._runtime.plans.setdefault(kind, StepPlan())
        self._pools_results = self.is_eager or self._plan.pools_results
        self.exponents: BatchExponents | None = self._plan.exponents
        if self.is_split:
            check_default(os.environ)
            check_hooks()

    adds_own_losses = False
    """Whether its code takes the losses of layers itself, and adds them up."""
    takes_check = "compile"
    """Is called with whether steps are checked."""
    logs_are_compared = True
    """Whether logs tell if replicas do what one device does."""

    @property
    def has_code_to_check(self) -> bool:
        """Whether it runs code that is neither Keras' nor of this package, or joins examples of a batch."""
        return has_code_to_check(self.model, self.kind)

    def untraced_copy(self) -> DistributedStep:
        """Return a new step of the same kind, not traced yet."""
        return DistributedStep(self.model, self.kind)

    def with_xla(self) -> None:
        """Have XLA compile it from now on."""
        self._user_step = compiled_step(self.model, self.kind)
        self._is_received = True

    def without_xla(self) -> None:
        """Run it without XLA from now on."""
        self._user_step = getattr(self.model, f"{self.kind}_step")
        self._is_received = False

    @property
    def num_step_replicas(self) -> int:
        """How many replicas a step is made on, virtual ones where there are such."""
        return self.num_replicas if self._virtual is None else self._virtual.count

    def run_examined(self, batch: StepData, examination: StepExamination) -> list[tf.Tensor]:
        """Trace the user's step on all replicas, each on its own batch, without running it.

        Args:
            batch: of any number of rows.
            examination: sees what the step does.

        Returns:
            Each local replica's leaves of the logs that no metric holds.
        """
        loops, self.loops = self.loops, False
        try:
            with self._logs.noted_results():
                extra = self.strategy.run(self._examined, args=(batch, examination))
        finally:
            self.loops = loops
        return [part for value in extra for part in self.strategy.experimental_local_results(value)]

    def _examined(self, batch: StepData, examination: StepExamination) -> list[tf.Tensor]:
        """Run the user's step in a scratch graph, on as many rows as there may be."""

        def own(leaf: TensorNest) -> TensorNest:
            is_same = leaf is None or leaf.shape.rank == 0
            return leaf if is_same else examination.origins.mark_per_replica(leaf, replica_id())

        batch = tree.map_structure(own, batch)
        rows = data.num_rows(batch)
        options = dataclasses.replace(self._options(), plan=self._plan, observer=examination)
        reducer = examination.reducer(reducer_of(self.model))
        step = ReplicaStep(self.model, rows, examination.origins.mark_replicated(rows), options, reducer, first_row=0)
        step.begin(batch)
        with use_global_seed_generator(self._global_generator), self._on_devices(), intercept(step):
            _, extra = self.run_user_step(step, batch)
        return extra

    def _options(self) -> StepOptions:
        """Return what holds for all of its steps, of one that is not recorded and has no plan."""
        return StepOptions(
            kind=self.kind,
            pools_results=self._pools_results,
            global_generator=self._global_generator,
            exponents=self.exponents,
            observer=self.observer,
        )

    @property
    def plan(self) -> StepPlan:
        """What is known of the step."""
        return self._plan

    @property
    def is_split(self) -> bool:
        """Whether a batch is, over replicas or over parts of a replica's rows."""
        return self.num_replicas > 1 or self._virtual is not None

    @property
    def sends_ahead(self) -> bool:
        """Whether a device gets its rows at once, so that they may be sent there before they are needed."""
        return self._virtual is None and self.model.placement is None

    @property
    def is_of_user(self) -> bool:
        """Whether the step is not that of Keras' own code."""
        return overrides(self.model, f"{self.kind}_step")

    def run_on_first_replica(self, rows: StepData, num_replicas: int = 1) -> list[tf.Tensor]:
        """Run the user's step on the first replica of this worker, by itself.

        Args:
            rows: that it gets, all of them.
            num_replicas: how many there seem to be, which all have these rows; 1 makes it the one device.

        Returns:
            The leaves of the logs that no metric holds.
        """
        extra: list[tf.Tensor] = []
        options = self._options()

        def replica(rows: StepData) -> None:
            if not is_first_of_worker():
                return
            reducer = LoneReplica(self.strategy, num_replicas)
            num_rows = data.num_rows(rows) if num_replicas > 1 else 1
            step = ReplicaStep(self.model, num_rows, num_rows * num_replicas, options, reducer, first_row=0)
            step.begin(rows)
            seen = contextlib.nullcontext() if num_replicas > 1 else seen_as_one_replica()
            with (
                use_global_seed_generator(self._global_generator),
                self._on_devices(),
                intercept(step),
                seen,
                without_aggregation(),
            ):
                logs = getattr(self.model, f"{self.kind}_step")(rows)
                self._logs.plan, values = self._finish(step, logs, rows)
            extra.extend(values)

        with self._logs.noted_results():
            self.strategy.run(replica, args=(rows,))
        return extra

    def pool_results(self) -> None:
        """Have the results of metrics in the step be those of all replicas, because it computes with them."""
        self._pools_results = self._plan.pools_results = True

    @property
    def samples_clocks(self) -> bool:
        """Whether the clocks of a step that is traced now are read in some steps only."""
        return self.loops and self.buffer is not None and self.buffer.is_sampled

    def run(
        self,
        batch: StepData | Dealt,
        times: tuple[tf.Tensor, tf.Tensor] | None = None,
        *,
        of_worker: bool = False,
        is_timed: tf.Tensor | None = None,
    ) -> tuple[list[tf.Tensor], StepRecord | None]:
        """Run one step over all replicas.

        Args:
            batch: global, per replica, or dealt to the replicas already.
            times: when the step began and when its batch was there, if it is recorded.
            of_worker: whether the rows are this worker's own.
            is_timed: where clocks are sampled, whether they are read in this step.

        Returns:
            Each local replica's leaves of the logs that no metric holds, and the step's record if there is one.
        """
        split = split_of(batch, of_worker=of_worker)
        batch = data.without_optionals(batch.rows if isinstance(batch, Dealt) else batch)
        num_ops = 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())
        with self._logs.noted_results(), noted_calls(self.model) if self._plan.is_plain else contextlib.nullcontext():
            extra, noted, computed = self.strategy.run(self._replica, args=(batch, split, times and times[1]))
        local = self.strategy.experimental_local_results
        of_logs = [part for value in extra for part in local(value)]
        if self.loops:
            self._plan.expect(of_logs)
        record = None
        if times is not None:
            replicas = [ReplicaRecord(*numbers) for numbers in zip(*map(local, noted), strict=True)]
            if is_timed is None:
                record = StepRecord(replicas, when_updated(num_ops, self.devices, replicas), *times)
            else:
                clocks = sampled_clocks(num_ops, self.gpus, replicas, [*map(local, computed)], is_timed)
                record = StepRecord(replicas, (), *times, sampled=clocks)
        return of_logs, record

    def _replica(
        self, batch: StepData, split: HowSplit, there: tf.Tensor | None = None
    ) -> tuple[list[tf.Tensor], tuple[tf.Tensor, ...], list[tf.Tensor]]:
        """Run the user's step on this replica's rows.

        Args:
            batch: of rows.
            split: what it is split from.
            there: when the batch was there, if the step is recorded.
        """
        if there is not None and split is Split.NONE and not self.samples_clocks:
            batch = after(there, batch)
        note = None
        if self.buffer is not None:
            on_tpu = isinstance(self.strategy, tf.distribute.TPUStrategy)
            note = StepNote(self._records_norm, on_tpu=on_tpu, is_sampled=self.samples_clocks)
        guard = None if self._guard is None else self._guard.step()
        options = dataclasses.replace(self._options(), note=note, guard=guard, plan=self._plan, draws=self._plan.draws)
        with once_read(batch) if self.is_split else contextlib.nullcontext():
            extra = self._extra_of_replica(batch, split, options)
        if guard is not None:
            guard.end()
        return extra, *(((), []) if note is None else (note.record().present, note.last_computed))

    def _extra_of_replica(self, batch: StepData, split: HowSplit, options: StepOptions) -> list[tf.Tensor]:
        with use_global_seed_generator(self._global_generator), self._on_devices():
            if self._num_turns:
                parts, num_global = split_for(self.model, batch, split, self._num_turns)
                self._logs.plan, extra = run_virtual_replicas(
                    self._virtual,
                    self.model,
                    parts,
                    num_global,
                    self.run_user_step,
                    options,
                    first_rows=[
                        first_row(split, self.strategy, num_global, part, self._num_turns)
                        for part in range(self._num_turns)
                    ],
                    loops=self.loops,
                    side_by_side=self.model.virtual_replicas is None,
                )
                return extra
            if self.num_replicas == 1:
                rows: int | tf.Tensor = 1
                num_global = 1
                first: int | tf.Tensor | None = 0
            else:
                (batch,), num_global = split_for(self.model, batch, split)
                first = first_row(split, self.strategy, num_global)
                rows = own_rows(split, batch)
            step = ReplicaStep(self.model, rows, num_global, options, self.reducer(), first_row=first)
            step.begin(batch)
            with intercept(step):
                self._logs.plan, extra = self.run_user_step(step, batch)
        return extra

    def _on_devices(self) -> contextlib.AbstractContextManager[None]:
        """Have the parts of a placed model run where they are."""
        return contextlib.nullcontext() if self.model.placement is None else self.model.placement.step()

    def reducer(self) -> Reducer:
        """Return what adds up over replicas for the one that is entered."""
        return reducer_of(self.model, loops=self.loops)

    def run_user_step(self, step: ReplicaStep, batch: StepData) -> tuple[TensorNest, list[tf.Tensor]]:
        """Run the user's step; return what its logs are, and its part of those that no metric holds."""
        calls = step.plain_calls
        given = self._user_step(batch) if calls is None else calls.follow(self._user_step, batch, step.results)
        return self._finish(step, given, batch)

    def _finish(self, step: ReplicaStep, logs: TensorNest, batch: StepData) -> tuple[TensorNest, list[tf.Tensor]]:
        """End a step that has given logs; see ``run_user_step``."""
        if step.note is not None:
            step.note.end(step.replica_id, step.weights.rows if self.is_split else data.num_rows(batch), logs)
        if self.is_split and not self._is_received:
            check_step(self.model, self.kind, step.called_hooks)
            self._is_received = True
        returned = tree.flatten(logs)
        if self._logs.are_plain:
            logs = {}
        if not self._pools_results and computes_with(step.results, step.assigned, logs):
            raise ComputesWithResults
        extra = step.finish(logs)
        step.end(returned)
        return tree.map_structure(lambda leaf: step.results.get(id(leaf), VALUE), logs), extra

    def expect_logs(self, next_batch: Callable[[], StepData], *, of_worker: bool = False) -> None:
        """Know what the logs hold that no metric does; on one device a loop is traced again where it is more."""
        if self._logs.are_plain or tf.executing_eagerly():
            return
        if self._plan.extra is None and not self.is_split:
            self._plan.extra = []
        while self._plan.extra is None:
            known = leaf_metrics(self.model)
            try:
                with scratch_graph("logs_of_a_step"):
                    extra, _ = self.run(next_batch(), of_worker=of_worker)
            except ComputesWithResults:
                self.pool_results()
                continue
            if len(leaf_metrics(self.model)) == len(known):  # else it has made some: their results were not known
                self._plan.extra = [tf.TensorSpec(value.shape, value.dtype) for value in extra]

    def expected_logs(self) -> list[tf.Tensor]:
        """Zeros for a loop to carry, shaped like what the logs hold that no metric does."""
        return [zeros_like(spec) for spec in self._plan.extra or ()]

    def logs(self, extra: Sequence[tf.Tensor]) -> TensorNest:
        """Compute the logs from the state pooled over replicas."""
        return self._logs.pooled(self.strategy, extra, len(self.devices))

    def logs_of_first_replica(self, extra: Sequence[tf.Tensor]) -> TensorNest:
        """Compute the logs of ``run_on_first_replica`` from what it has returned, and the state that it has left."""
        return self._logs.of_first(extra)
