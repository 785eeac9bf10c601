"""The compiled loops over a model's steps, in training and in evaluation.

Steps loop in the graph, so that Python is met once an execution and not once a step; logs are computed at its end,
from the state of the metrics pooled over replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from keras_dist_ext._keras.tracing import IteratorFunction, traced_graphs
from keras_dist_ext.aliases import SpecNest, StepData, TensorNest, TracedFunction
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.step.step_buffer import MAX_STEPS
from keras_dist_ext.training.batch_devices import BatchDevices, BatchTargets, device_of_iterator
from keras_dist_ext.training.batch_reader import BatchReader, WaitTimes
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.step_loops import EagerLoops, StepLoops

__all__ = ["StepProgram"]

_Loop: TypeAlias = Callable[..., TensorNest]  # what it takes differs: a batch, or an iterator and more


class _CompiledLoops(NamedTuple):
    one_of_iterator: _Loop
    one_of_optional: _Loop
    on_iterator: _Loop
    on_optional: _Loop


class StepProgram:
    """Runs one kind of step of a model, one or several at once.

    Args:
        step: that it runs.
    """

    def __init__(self, step: DistributedStep) -> None:
        self.step = step
        self.model = step.model
        self.kind: Kind = step.kind
        self.strategy = step.strategy
        self.is_eager = step.is_eager
        self._has_one_step = False
        self.waited = WaitTimes()  # for the first batch of the next execution
        loops = self._loops(BatchDevices())
        self._of_batch = self._compiled(loops.on_batch)
        self._of_rows = self._compiled(loops.on_rows_of_worker)
        self._over: dict[str, _CompiledLoops] = {}  # by the device of an iterator

    def _compiled(self, loop: _Loop) -> TracedFunction:
        return loop if self.is_eager else in_graph(loop, reduce_retracing=True)

    def _loops(self, devices: BatchDevices) -> StepLoops:
        return (EagerLoops if self.is_eager else StepLoops)(self.step, devices)

    def _loops_over(self, iterator: tf.data.Iterator) -> _CompiledLoops:
        """Return the compiled loops over an iterator, which on GPUs depend on its device."""
        device = ""
        if self.step.gpus and not self.is_eager and isinstance(iterator, tf.data.Iterator):
            device = device_of_iterator(iterator)
        if device not in self._over:
            sends = device and self.step.sends_ahead
            ahead = BatchTargets.of(self.strategy, self.step.gpus) if sends else None
            loops = self._loops(BatchDevices(device or None, ahead))
            functions = loops.one_of_iterator, loops.one_of_optional, loops.on_iterator, loops.on_optional
            compiled = functions if self.is_eager else [IteratorFunction(self._compiled(one)) for one in functions]
            self._over[device] = _CompiledLoops(*compiled)
        return self._over[device]

    def make_single_steps(self) -> None:
        """Make one step an execution from here on."""
        self._has_one_step = True

    def graphs(self) -> list[tf.Graph]:
        """Return the graphs that its loops were traced to so far."""
        reading = [function for loops in self._over.values() for function in loops]
        return [graph for run in (self._of_batch, self._of_rows, *reading) for graph in traced_graphs(run)]

    # Entry points

    def run(self, reader: BatchReader, num_steps: int) -> tuple[int, TensorNest]:
        """Run up to ``num_steps`` steps on the batches of a reader; return how many were made, and the logs."""
        if reader.is_read_by_host:
            made, logs = 0, None
            run = self.on_batches_like(reader.spec, of_worker=reader.is_of_worker)
            while made < num_steps and reader.has_more:
                batch = reader.next_batch()
                self.waited = reader.take_waited()
                logs = run(batch)
                made += 1
            return made, logs
        if reader.length_is_known:
            return num_steps, self.on_iterator(reader.iterator, num_steps, one_step=reader.one_step)
        self.waited = reader.take_waited()
        made, ahead, has_more, logs = self.on_optional(
            reader.ahead, reader.iterator, num_steps, one_step=reader.one_step
        )
        reader.advance(ahead, has_more=has_more)
        return made, logs

    def on_batch(self, batch: StepData) -> TensorNest:
        """Run one step on a batch (global, or per replica) and return its logs."""
        return self._run(1, self._of_batch, batch)

    def on_batches_like(self, spec: SpecNest, *, of_worker: bool) -> Callable[[StepData], TensorNest]:
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

    def on_iterator(self, iterator: tf.data.Iterator, num_steps: int, *, one_step: bool = False) -> TensorNest:
        """Run exactly ``num_steps`` steps in the graph and return the logs of the last.

        Args:
            iterator: over batches.
            num_steps: see above.
            one_step: whether all executions have one step, for which there is a graph without a loop.
        """
        logs = None
        loops = self._loops_over(iterator)
        if self._has_one_step or one_step:
            for _ in range(num_steps):
                logs = self._run(1, loops.one_of_iterator, iterator)
            return logs
        for made in range(0, num_steps, MAX_STEPS):
            count = min(MAX_STEPS, num_steps - made)
            logs = self._run(count, loops.on_iterator, iterator, tf.constant(count))
        return logs

    def on_optional(
        self, optional: tf.experimental.Optional, iterator: tf.data.Iterator, num_steps: int, *, one_step: bool = False
    ) -> tuple[int, tf.experimental.Optional, bool, TensorNest]:
        """Run up to ``num_steps`` steps; return how many were made, the batch after them, if there is one, and logs.

        Args:
            optional: the first batch.
            iterator: over those that follow.
            num_steps: see above.
            one_step: see ``on_iterator``.
        """
        total, has_more, logs = 0, True, None
        loops = self._loops_over(iterator)
        while total < num_steps and has_more:
            if self._has_one_step or one_step:
                self._begin(1)
                optional, more, logs = loops.one_of_optional(iterator, optional)
                made, end = 1, None  # its record says when it ended
            else:
                count = min(MAX_STEPS, num_steps - total)
                self._begin(count)
                num_made, optional, more, end, logs = loops.on_optional(iterator, optional, tf.constant(count))
                made = int(num_made)
            self._end(made, end)
            total += made
            has_more = bool(more)
        return total, optional, has_more, logs

    def _run(self, num_steps: int, function: _Loop, *arguments: object) -> TensorNest:
        """Call what makes so many steps, and return their logs."""
        self._begin(num_steps)
        logs = function(*arguments)
        self._end(num_steps)
        return logs

    def _begin(self, num_steps: int) -> None:
        """Make room for the records of an execution of so many steps at most."""
        if self.step.buffer is not None:
            self.step.buffer.begin(num_steps)

    def _end(self, num_steps: int, end: tf.Tensor | None = None) -> None:
        """Hand the records of an execution to who wants them; for its end see ``Recorder.add``."""
        buffer = self.step.buffer
        if buffer is not None:
            waited, self.waited = self.waited, WaitTimes()
            buffer.end(num_steps)
            for recorder in self.model.replica_runtime.recorders:
                recorder.add(self.kind, buffer, num_steps, end, waited.own, waited.for_others)
