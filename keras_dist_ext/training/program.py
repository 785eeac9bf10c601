"""The compiled loops over a model's steps, in training and in evaluation.

Steps loop in the graph, so that Python is met once an execution and not once a step; logs are computed at its end,
from the state of the metrics pooled over replicas.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.models import overrides
from keras_dist_ext._keras.random import use_global_seed_generator
from keras_dist_ext._keras.strategies import is_default_strategy, regroup, replica_id
from keras_dist_ext._keras.tracing import IteratorFunction, scratch_graph, traced_graphs
from keras_dist_ext.data import split as data
from keras_dist_ext.step.added_losses import UnknownLossExponents, find_exponents, placeholders
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.step.logs import VALUE, ComputesWithResults, computes_with, noted_results, pooled_state
from keras_dist_ext.step.means import BatchExponents
from keras_dist_ext.step.recorder import StepNote, now, when_updated
from keras_dist_ext.step.reduce import sum_over_replicas
from keras_dist_ext.step.reducers import Reducer, reducer_of
from keras_dist_ext.step.replica_step import ReplicaStep, StepOptions
from keras_dist_ext.step.seeds import generator_without_seed
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.step.step_buffer import MAX_STEPS, ReplicaRecord, StepBuffer, StepRecord
from keras_dist_ext.step.update import UnbuiltOptimizer
from keras_dist_ext.step.virtual_replicas import run_virtual_replicas
from keras_dist_ext.step.xla import can_compile, compiled_step
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.batch_reader import BatchReader
from keras_dist_ext.training.runtime import ReplicaRuntime

__all__ = ["StepProgram", "is_per_replica", "rows_of_replica"]


class StepProgram:
    """The compiled loop of one kind of step over a model.

    Args:
        model: the Keras model; its strategy, ``run_eagerly`` and ``jit_compile`` are read here.
        kind: "train" or "test".
    """

    def __init__(self, model: Any, kind: Kind) -> None:
        self.model = model
        self.kind = kind
        self.strategy: tf.distribute.Strategy = model.distribute_strategy
        self.num_replicas: int = self.strategy.num_replicas_in_sync
        self._runtime: ReplicaRuntime = model.replica_runtime
        self._without_seed = generator_without_seed(self.strategy, is_seeded=self._runtime.seeds.root is not None)
        self._log_plan: Any = None
        self.is_eager: bool = model.run_eagerly or tf.config.functions_run_eagerly()
        self._pools_results: bool = self.is_eager
        self._user_step = getattr(model, f"{kind}_step")
        virtual = model.virtual_replicas
        if model.placement is not None:
            virtual = model.placement.virtual(virtual, self.num_replicas)
        self._virtual = virtual
        self._num_turns: int = 0 if virtual is None else virtual.num_turns(self.strategy)
        if model.jit_compile and model.placement is None and not self.is_eager and can_compile(self.strategy):
            self._user_step = compiled_step(model, kind)
        self._plain_logs = not any(
            overrides(model, name) for name in (f"{kind}_step", "compute_metrics", "get_metrics_result")
        )
        wrap: Callable[[Any], Any] = (
            (lambda f: f) if self.is_eager else functools.partial(in_graph, reduce_retracing=True)
        )
        self._records_norm = any(recorder.gradient_norm for recorder in self._runtime.recorders)
        self._devices = (
            ["/device:CPU:0"] if is_default_strategy(self.strategy) else list(self.strategy.extended.worker_devices)
        )
        self._buffer = StepBuffer(self._devices, gradient_norm=self._records_norm) if self._runtime.recorders else None
        self._guard = self._runtime.guard if kind == "train" else None
        self._has_one_step = False
        self._loops = False  # whether what is traced makes several steps
        self._exponents: BatchExponents | None = self._runtime.exponents.setdefault(kind, BatchExponents())
        self.waited_seconds = 0.0  # for the first batch of the next execution
        self._of_batch = wrap(self._on_batch)
        self._of_rows = wrap(self._on_rows_of_worker)
        read: Callable[[Any], Any] = (lambda f: f) if self.is_eager else (lambda f: IteratorFunction(wrap(f)))
        self._of_iterator_alone = read(self._on_iterator_alone)
        self._of_optional_alone = read(self._on_optional_alone)
        self._of_iterator = read(self._on_iterator_eagerly if self.is_eager else self._on_iterator)
        self._of_optional = read(self._on_optional_eagerly if self.is_eager else self._on_optional)

    def without_xla(self) -> None:
        """Go on uncompiled."""
        self._user_step = getattr(self.model, f"{self.kind}_step")

    def make_single_steps(self) -> None:
        """Make every step in an execution of its own from here on."""
        self._has_one_step = True

    def learn_exponents(self) -> None:
        """Trace a step aside, on batches of any size, to learn how its numbers grow with the rows.

        What a step of the user's own computes counts as means where it cannot be traced so.
        """
        if self._exponents is None:
            return
        loops, self._loops = self._loops, False
        spec = self._runtime.batch_spec
        try:
            with self._exponents.learn(), scratch_graph("exponents_of_a_step"):
                self._one(placeholders(spec))
        except ComputesWithResults:
            self._pools_results = True
            self.learn_exponents()
        except (UnbuiltOptimizer, UnknownLossExponents):
            raise
        except Exception:  # code that needs a number of rows, or runs eagerly only
            return
        finally:
            self._loops = loops

    def learn_loss_exponents(self) -> None:
        """Trace the model aside, to learn which losses given to ``add_loss`` are sums over the rows."""
        spec = self._runtime.batch_spec
        self._runtime.loss_exponents[self.kind] = find_exponents(self.model, spec, training=self.kind == "train")

    def graphs(self) -> list[Any]:
        """Return the graphs that its loops were traced to so far."""
        alone = (self._of_batch, self._of_rows, self._of_iterator_alone, self._of_optional_alone)
        return [graph for run in (*alone, self._of_iterator, self._of_optional) for graph in traced_graphs(run)]

    # Entry points

    def run(self, reader: BatchReader, num_steps: int) -> tuple[int, Any]:
        """Run up to ``num_steps`` steps on the batches of a reader; return how many were made, and the logs."""
        if reader.is_read_by_host:
            made, logs = 0, None
            run = self.on_batches_like(reader.spec, of_worker=reader.is_of_worker)
            while made < num_steps and reader.has_more:
                batch = reader.next_batch()
                self.waited_seconds = reader.take_waited()
                logs = run(batch)
                made += 1
            return made, logs
        if reader.length_is_known:
            return num_steps, self.on_iterator(reader.iterator, num_steps, one_step=reader.one_step)
        self.waited_seconds = reader.take_waited()
        made, ahead, has_more, logs = self.on_optional(
            reader.ahead, reader.iterator, num_steps, one_step=reader.one_step
        )
        reader.advance(ahead, has_more=has_more)
        return made, logs

    def on_batch(self, batch: Any) -> Any:
        """Run one step on a batch (global, or per replica) and return its logs."""
        return self._run(1, self._of_batch, batch)

    def on_batches_like(self, spec: Any, *, of_worker: bool) -> Callable[[Any], Any]:
        """Return a function that runs one step on a batch of that spec.

        It is traced once, whatever the rows: collectives are numbered as they are traced, so all workers must trace
        the same functions in the same order, and the number of rows may differ between workers.

        Args:
            spec: of a batch, its rows unknown where they may vary.
            of_worker: whether the rows are this worker's own.
        """
        run = self._of_rows if of_worker else self._of_batch
        if not self.is_eager:
            run = run.get_concrete_function(spec)
        return lambda batch: self._run(1, run, batch)

    def on_iterator(self, iterator: Any, num_steps: int, *, one_step: bool = False) -> Any:
        """Run exactly ``num_steps`` steps in the graph and return the logs of the last.

        Args:
            iterator: over batches.
            num_steps: see above.
            one_step: whether all executions have one step, for which there is a graph without a loop.
        """
        logs = None
        if self._has_one_step or one_step:
            for _ in range(num_steps):
                logs = self._run(1, self._of_iterator_alone, iterator)
            return logs
        for made in range(0, num_steps, MAX_STEPS):
            count = min(MAX_STEPS, num_steps - made)
            logs = self._run(count, self._of_iterator, iterator, tf.constant(count))
        return logs

    def on_optional(
        self, optional: Any, iterator: Any, num_steps: int, *, one_step: bool = False
    ) -> tuple[int, Any, bool, Any]:
        """Run up to ``num_steps`` steps; return how many were made, the batch after them, if it is there, and logs.

        Args:
            optional: the first batch.
            iterator: over those that follow.
            num_steps: see above.
            one_step: see ``on_iterator``.
        """
        total, has_more, logs = 0, True, None
        while total < num_steps and has_more:
            if self._has_one_step or one_step:
                self._begin(1)
                optional, more, logs = self._of_optional_alone(iterator, optional)
                made, end = 1, None  # its record says when it ended
            else:
                count = min(MAX_STEPS, num_steps - total)
                self._begin(count)
                num_made, optional, more, end, logs = self._of_optional(iterator, optional, tf.constant(count))
                made = int(num_made)
            self._end(made, end)
            total += made
            has_more = bool(more)
        return total, optional, has_more, logs

    def _run(self, num_steps: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call what makes so many steps, and return their logs."""
        self._begin(num_steps)
        logs = function(*arguments)
        self._end(num_steps)
        return logs

    def _begin(self, num_steps: int) -> None:
        """Make room for the records of an execution of so many steps at most."""
        if self._buffer is not None:
            self._buffer.begin(num_steps)

    def _end(self, num_steps: int, end: Any = None) -> None:
        """Hand the records of an execution to who wants them; for its end see ``Recorder.add``."""
        buffer = self._buffer
        if buffer is not None:
            waited, self.waited_seconds = self.waited_seconds, 0.0
            buffer.end(num_steps)
            for recorder in self._runtime.recorders:
                recorder.add(self.kind, buffer, num_steps, end, waited)

    # Loops

    # These two take nothing but the batch: a concrete function of TensorFlow 2.16 misses arguments that have defaults.

    def _on_batch(self, batch: Any) -> Any:
        return self._on_one(batch, of_worker=False)

    def _on_rows_of_worker(self, batch: Any) -> Any:
        """Run one step on rows that this worker alone has read."""
        return self._on_one(batch, of_worker=True)

    def _on_one(self, batch: Any, *, of_worker: bool) -> Any:
        extra, record = self._alone(lambda: batch, of_worker=of_worker)
        self._write(record)
        return self._logs(extra)

    def _on_iterator_alone(self, iterator: Any) -> Any:
        extra, record = self._alone(iterator.get_next)
        self._write(record)
        return self._logs(extra)

    def _on_optional_alone(self, iterator: Any, optional: Any) -> Any:
        extra, record = self._alone(optional.get_value, is_ahead=True)
        following = iterator.get_next_as_optional()
        has_more = following.has_value()
        if record is not None:
            self._write(record._replace(execution_end=now(has_more, in_any_order=True)))
        return following, has_more, self._logs(extra)

    def _alone(
        self, pull: Callable[[], Any], *, of_worker: bool = False, is_ahead: bool = False
    ) -> tuple[list[tf.Tensor], StepRecord | None]:
        """Run the one step of an execution; return what ``_one`` does."""
        self._loops = False
        self._initial_extra(pull, of_worker=of_worker)
        return self._one(*self._timed(pull, is_ahead=is_ahead), of_worker=of_worker)

    def _on_iterator(self, iterator: Any, num_steps: tf.Tensor) -> Any:
        self._loops = True

        def body(i: tf.Tensor, *_: Any) -> tuple[Any, ...]:
            return (i + 1, *self._recorded(iterator.get_next))

        extra = self._initial_extra(iterator.get_next)
        _, *extra = tf.while_loop(
            lambda i, *_: i < num_steps,
            body,
            (tf.constant(0), *extra),
            parallel_iterations=1,
            shape_invariants=(tf.TensorShape([]), *(tf.TensorShape(None) for _ in extra)),
        )
        return self._logs(extra)

    def _on_optional(self, iterator: Any, optional: Any, num_steps: tf.Tensor) -> Any:
        self._loops = True

        def body(i: tf.Tensor, optional: Any, *_: Any) -> tuple[Any, ...]:
            extra = self._recorded(optional.get_value, is_ahead=True)
            return (i + 1, iterator.get_next_as_optional(), *extra)

        extra = self._initial_extra(lambda: optional.get_value())
        i, optional, *extra = tf.while_loop(
            lambda i, optional, *_: tf.logical_and(i < num_steps, optional.has_value()),
            body,
            (tf.constant(0), optional, *extra),
            parallel_iterations=1,
            shape_invariants=(
                tf.TensorShape([]),
                tf.OptionalSpec.from_value(optional),
                *(tf.TensorShape(None) for _ in extra),
            ),
        )
        return self._told(i), optional, optional.has_value(), self._when(i), self._logs(extra)

    def _told(self, num_made: tf.Tensor) -> tf.Tensor:
        """Have it known how many steps this worker's data has had, while others may wait for it in one more."""
        workers = workers_of(self.strategy) if self.kind == "train" else None
        if workers is None:
            return num_made
        told = tf.numpy_function(workers.watch.note_steps, [num_made], num_made.dtype)
        told.set_shape([])
        return told

    def _on_iterator_eagerly(self, iterator: Any, num_steps: tf.Tensor) -> Any:
        extra: list[tf.Tensor] = []
        for _ in range(int(num_steps)):
            extra = self._recorded(lambda: next(iterator))
        return self._logs(extra)

    def _on_optional_eagerly(self, iterator: Any, optional: Any, num_steps: tf.Tensor) -> Any:
        num_made, extra = 0, []
        while num_made < int(num_steps) and optional.has_value():
            extra = self._recorded(optional.get_value, is_ahead=True)
            optional = iterator.get_next_as_optional()
            num_made += 1
        return num_made, optional, optional.has_value(), self._when(extra), self._logs(extra)

    def _recorded(self, pull: Callable[[], Any], *, is_ahead: bool = False) -> list[tf.Tensor]:
        """Run a step, leave its record in the buffer, and return its part of the logs, see ``_one``."""
        extra, record = self._one(*self._timed(pull, is_ahead=is_ahead))
        self._write(record)
        return extra

    def _write(self, record: StepRecord | None) -> None:
        """Leave the record of a step in the buffer, if there is one."""
        if self._buffer is not None and record is not None:
            self._buffer.write(record, loops=self._loops)

    def _when(self, there: Any) -> tf.Tensor | None:
        """When something was there, if steps are recorded."""
        return None if self._buffer is None else now(there)

    def _timed(self, pull: Callable[[], Any], *, is_ahead: bool = False) -> tuple[Any, Any]:
        """Pull a batch; return it with when that began, and when it was there: at once, if it was read ahead."""
        if self._buffer is None:
            return pull(), None
        begin = now(in_any_order=True)
        with tf.control_dependencies([begin]):
            batch = pull()
        if is_ahead:
            return batch, (begin, begin)
        batch_there = now(batch, in_any_order=True)
        return batch if is_per_replica(batch) else _once(batch_there, batch), (begin, batch_there)

    # One step

    def _one(
        self, batch: Any, times: Any = None, *, of_worker: bool = False
    ) -> tuple[list[tf.Tensor], StepRecord | None]:
        """Run one step over all replicas.

        Args:
            batch: global, or per replica.
            times: when the step began and when its batch was there, if it is recorded.
            of_worker: whether the rows are this worker's own.

        Returns:
            Each local replica's leaves of the logs that no metric holds, and the step's record if there is one.
        """
        batch = data.without_optionals(batch)
        cut = "not" if is_per_replica(batch) else "worker" if of_worker else "global"
        num_ops = 0 if tf.executing_eagerly() else len(_graph().get_operations())
        with contextlib.nullcontext() if self._plain_logs else noted_results(self.model.metrics):
            there = None if times is None else times[1]
            extra, noted = self.strategy.run(self._replica, args=(batch, cut, there))
        local = self.strategy.experimental_local_results
        record = None
        if times is not None:
            replicas = [ReplicaRecord(*numbers) for numbers in zip(*map(local, noted), strict=True)]
            eagerly = tf.executing_eagerly()
            ends = [now()] * len(replicas) if eagerly else when_updated(_graph(), num_ops, self._devices, replicas)
            record = StepRecord(replicas, ends, *times)
        return [part for value in extra for part in local(value)], record

    def _replica(self, batch: Any, cut: str, there: Any = None) -> tuple[list[tf.Tensor], Any]:
        """Run the user's step on this replica's rows.

        Args:
            batch: of rows.
            cut: what the batch is: the "global" one, the rows of this "worker", or "not" to be cut any more.
            there: when the batch was there, if the step is recorded.
        """
        if there is not None and cut == "not":
            batch = _once(there, batch)
        note = (
            None
            if self._buffer is None
            else StepNote(gradient_norm=self._records_norm, on_tpu=isinstance(self.strategy, tf.distribute.TPUStrategy))
        )
        guard = None if self._guard is None else self._guard.step()
        options = StepOptions(
            kind=self.kind,
            pools_results=self._pools_results,
            without_seed=self._without_seed,
            note=note,
            guard=guard,
            exponents=self._exponents,
        )
        extra = self._extra_of_replica(batch, cut, options)
        if guard is not None:
            guard.end()
        return extra, () if note is None else note.record().present

    def _extra_of_replica(self, batch: Any, cut: str, options: StepOptions) -> list[tf.Tensor]:
        placement = self.model.placement
        on_devices = contextlib.nullcontext() if placement is None else placement.step()
        with use_global_seed_generator(self._without_seed), on_devices:
            if self._num_turns:
                parts, global_rows = self._cut(batch, cut, self._num_turns)
                self._log_plan, extra = run_virtual_replicas(
                    self._virtual,
                    self.model,
                    parts,
                    global_rows,
                    self._step_of_replica,
                    options,
                    loops=self._loops,
                    side_by_side=self.model.virtual_replicas is None,
                )
                return extra
            if self.num_replicas == 1:
                rows: Any = 1
                global_rows = 1
            else:
                (batch,), global_rows = self._cut(batch, cut)
                rows = data.num_rows(batch)
            step = ReplicaStep(self.model, rows, global_rows, options, self._reducer())
            step.guard_batch(batch)
            with intercept(step):
                self._log_plan, extra = self._step_of_replica(step, batch)
        return extra

    def _reducer(self) -> Reducer:
        return reducer_of(self.model, loops=self._loops)

    def _step_of_replica(self, step: ReplicaStep, batch: Any) -> tuple[Any, list[tf.Tensor]]:
        """Run the user's step; return what its logs are, and its part of those that no metric holds."""
        logs = self._user_step(batch)
        if step.note is not None:
            step.note.end(step.replica_id, data.num_rows(batch), logs)
        if self._plain_logs:
            logs = {}
        if not self._pools_results and computes_with(step.results, logs):
            raise ComputesWithResults
        extra = step.finish(logs)
        return tree.map_structure(lambda leaf: step.results.get(id(leaf), VALUE), logs), extra

    def _cut(self, batch: Any, cut: str, num_parts: int = 1) -> tuple[list[Any], int | tf.Tensor]:
        """Cut this replica's rows out of a batch, in as many parts, and count those of the global batch."""
        parts = [
            data.replica_rows(batch, part, num_parts)
            if cut == "not"
            else rows_of_replica(batch, self.strategy, of_worker=cut == "worker", part=part, num_parts=num_parts)
            for part in range(num_parts)
        ]
        if cut == "global":
            return parts, data.num_rows(batch)
        rows = data.num_rows(batch) if cut == "not" else sum(data.num_rows(part) for part in parts)
        return parts, self._global_rows(rows, self.num_replicas, is_even=cut == "not")

    def _global_rows(self, rows: int | tf.Tensor, num_replicas: int, *, is_even: bool) -> int | tf.Tensor:
        if is_even and isinstance(rows, int) and not tf.executing_eagerly():
            return rows * num_replicas  # TensorFlow makes a static batch dimension only where all replicas have it
        total = tf.distribute.get_replica_context().merge_call(sum_over_replicas, args=([tf.cast(rows, tf.float32)],))[
            0
        ]
        return tf.cast(total, tf.int32)

    def _initial_extra(self, next_batch: Callable[[], Any], *, of_worker: bool = False) -> list[tf.Tensor]:
        """Zeros shaped like the leaves of the logs that a loop must carry, found by tracing a step aside."""
        if self._plain_logs or tf.executing_eagerly():
            return []
        try:
            with scratch_graph("logs_of_a_step"):
                extra, _ = self._one(next_batch(), of_worker=of_worker)
        except ComputesWithResults:
            self._pools_results = True
            return self._initial_extra(next_batch, of_worker=of_worker)
        return [tf.zeros([d or 0 for d in e.shape] if e.shape.rank is not None else [], e.dtype) for e in extra]

    # Logs

    def _logs(self, extra: Sequence[tf.Tensor]) -> Any:
        """Compute the logs from the state pooled over replicas."""
        num_local = len(self._devices)
        values = [tuple(extra[i : i + num_local]) for i in range(0, len(extra), num_local)]
        if self.num_replicas > 1 and values:
            sums = sum_over_replicas(self.strategy, [regroup(v) for v in values])
            values = [self.strategy.experimental_local_results(s) for s in sums]
        local = iter([v[0] for v in values])
        with pooled_state(self.model, self.strategy):
            if self._plain_logs:
                return self.model.get_metrics_result()
            return tree.map_structure(lambda leaf: leaf.now() if leaf is not VALUE else next(local), self._log_plan)


def rows_of_replica(
    batch: Any, strategy: tf.distribute.Strategy, *, of_worker: bool = False, part: int = 0, num_parts: int = 1
) -> Any:
    """Cut this replica's rows, or one of several parts of them, out of the global batch, or out of its worker's."""
    replica, num_replicas = replica_id(), strategy.num_replicas_in_sync
    if of_worker:
        num_replicas = len(strategy.extended.worker_devices)
        replica = replica % num_replicas
    with tf.device("/device:CPU:0"):
        return data.replica_rows(batch, replica * num_parts + part, num_replicas * num_parts)


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()


def _once(there: tf.Tensor, batch: Any) -> Any:
    """The batch, of which nothing is computed before the clock was read that says when it was there."""
    with tf.control_dependencies([there]):
        return tf.nest.map_structure(_same, batch, expand_composites=True)


def _same(leaf: Any) -> Any:
    return tf.identity(leaf) if tf.is_tensor(leaf) else leaf


def is_per_replica(batch: Any) -> bool:
    """Whether a batch comes from a distributed iterator, split already."""
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tree.flatten(batch))
