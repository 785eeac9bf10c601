"""Hand the data of an epoch to the compiled loop, some steps at a time.

Keras' ``fit``, ``evaluate`` and ``predict`` ask an epoch iterator for ``(first step, last step, iterator)`` and give
the iterator to the step function. ``EpochData`` gives them an ``Execution`` instead: a reader of batches, and how many
steps to make of it. Nothing is pulled ahead of time: data begins once an epoch, and each element is used once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence

from keras_dist_ext._keras.adapters import CustomEpochIterator
from keras_dist_ext._keras.py_datasets import seed_py_datasets
from keras_dist_ext.cluster import heartbeat
from keras_dist_ext.errors import DataError
from keras_dist_ext.training.batch_reader import BatchReader
from keras_dist_ext.training.evaluation_passes import EvaluationPasses
from keras_dist_ext.training.execution import Execution, RunKind
from keras_dist_ext.training.execution_planner import ExecutionPlanner
from keras_dist_ext.training.execution_sizer import ExecutionSizer
from keras_dist_ext.training.passes import Passes
from keras_dist_ext.training.resume.position import Position, replay_epochs, take_seekable
from keras_dist_ext.training.resume.tests_before import TestsBefore
from keras_dist_ext.training.run_dataset import RunDataset
from keras_dist_ext.training.runtime import ReplicaRuntime

__all__ = ["EpochData"]


class EpochData(CustomEpochIterator):
    """Keras' epoch iterator: the executions of each epoch of a run.

    Args:
        runtime: of the model that runs.
        kind: what the data is for.
        sizer: how many steps an execution makes.
        evaluation: counts the passes of evaluation beside; None where this is one.
        arguments: those of Keras' ``EpochIterator``.

    Attributes:
        kind: see above.
        dataset: that is read, and
        passes: over it.
        planner: of the executions.
    """

    def __init__(
        self,
        runtime: ReplicaRuntime,
        kind: RunKind,
        sizer: ExecutionSizer,
        evaluation: EvaluationPasses | None = None,
        **arguments: object,
    ) -> None:
        seekable = take_seekable(arguments)
        super().__init__(**arguments)
        self.kind: RunKind = kind
        self._runtime = runtime
        self._stop = runtime.stops[kind]
        self._evaluation = EvaluationPasses() if evaluation is None else evaluation
        self.dataset = RunDataset(self.data_adapter, runtime.strategy, seekable, self.steps_per_epoch)
        self.passes = Passes(
            self.dataset,
            runtime.strategy,
            runtime.seeds,
            self._evaluation,
            span_epochs=self.steps_per_epoch is not None,
            makes_unread=self.steps_per_epoch is None and self.pass_length is not None,
        )
        self.planner = ExecutionPlanner(sizer, self._stop, self.dataset.workers)
        self._start: Position | None = None  # of the first epoch
        self._num_epochs = 0
        self._first_step = 0  # of the last execution, counted from 0 in the epoch
        self._execution: Execution | None = None  # the last one
        self._is_running = False  # whether its steps are still to be counted

    @property
    def last_step(self) -> int:
        """The last step that was made, counted from 0 in the epoch."""
        assert self._execution is not None
        return self._first_step + self._execution.num_made - 1

    @property
    def num_batches_used(self) -> int:
        """Batches that were used in this run, up to the last execution."""
        return self.passes.num_used + self._num_uncounted

    @property
    def _num_uncounted(self) -> int:
        return self._execution.num_made if self._is_running and self._execution is not None else 0

    @property
    def ends_epoch(self) -> bool:
        """Whether the last execution was the last one of its epoch."""
        assert self._execution is not None
        reader, made = self.passes.reader, self._execution.num_made
        if reader is None or not reader.has_more or made < self._execution.num_steps:
            return True
        length = self.pass_length if reader.length_is_known else None
        is_used = length is not None and self.passes.num_read + made >= length
        return is_used or self._first_step + made == (self.steps_per_epoch or -1)

    def reset(self) -> None:
        """Forget the pass that is under way."""
        super().reset()
        self.passes.close()

    # Where a run is, and how to get there

    def position(self, epoch: int) -> Position:
        """Return where training is: after the last execution, or between two epochs.

        Args:
            epoch: that is under way, or comes next.
        """
        passes, made = self.passes, self._num_uncounted
        in_pass = self._is_running or passes.is_under_way
        has_iterator = self._is_running or passes.has_iterator
        num_tests = self._evaluation.num_begun
        return Position(
            epoch=epoch,
            step=self._first_step + made if self._is_running else 0,
            num_epochs=self._num_epochs,
            num_passes=self.dataset.num_passes,
            num_pass_batches=passes.num_read + made if in_pass else 0,
            num_run_batches=passes.num_used + made,
            order=self._runtime.seeds.num_passes,
            num_tests=num_tests,
            num_tests_before=passes.num_tests_before if has_iterator else num_tests,
        )

    def iterator_state(self) -> list[bytes] | None:
        """What the iterator holds after the last execution of an epoch that is under way; see ``Passes``."""
        return self.passes.iterator_state() if self._is_running else None

    def seek(
        self, position: Position, state: Sequence[bytes] | None = None, tests_before: TestsBefore | None = None
    ) -> None:
        """Begin the first epoch at a position.

        Args:
            position: where.
            state: of the iterator that was there.
            tests_before: passes of evaluation in the earlier process.
        """
        self._start = position
        first_order = self._runtime.seeds.order_of_pass(position.order - position.num_passes + 1)
        self.passes.seek(position, first_order, state, tests_before)
        self._num_epochs = position.num_epochs
        replay_epochs(self.data_adapter, position)

    # An epoch

    def executions(self) -> Iterator[tuple[int, int, Execution]]:
        """Yield the executions of an epoch."""
        if self.kind != "predict":
            self.check_built()
        self.dataset.begin_epoch()
        length = self.pass_length
        start, self._start = self._start, None
        reader = self._begin(length, start)
        known = reader.length_is_known
        ends = yield from self._executions_of(reader, length, 0 if start is None else start.step)
        if ends:
            self.passes.end_epoch(length, is_known=known)
            self._num_epochs += 1
            self.data_adapter.on_epoch_end()

    def _begin(self, length: int | None, start: Position | None) -> BatchReader:
        """Begin a pass, unless one goes on; return what reads it."""
        passes, seeds = self.passes, self._runtime.seeds
        in_pass = start is not None and start.num_pass_batches > 0
        begins_pass = not in_pass and not passes.is_under_way
        seed = self._runtime.order_seed(self.kind) if begins_pass else None
        if start is not None and in_pass:
            seed = seeds.order_of_pass(start.order)
        if seed is not None:
            seed_py_datasets(seed)
        self.data_adapter.on_epoch_begin()
        if begins_pass or in_pass:
            passes.begin(length, seed, start, one_step=self.planner.makes_one_step)
        assert passes.reader is not None
        return passes.reader

    def _executions_of(
        self, reader: BatchReader, length: int | None, step: int
    ) -> Generator[tuple[int, int, Execution], None, bool]:
        """Yield the executions of an epoch on the batches of a reader; return whether it ends with them.

        Args:
            reader: see above.
            length: of the pass, if anybody knows.
            step: the first one.
        """
        passes, has_workers = self.passes, self.dataset.workers is not None
        has_begun = False  # an epoch that has begun makes a step, whatever was asked for before
        target = self.steps_per_epoch or (length if reader.length_is_known else None)
        while not target or step < target:  # no batch at all is an error too
            left = [] if target is None else [target - step]
            if length is not None and reader.length_is_known:
                left.append(length - passes.num_read)
            num_steps, must_stop = self.planner.next(min(left, default=None), passes.num_used)
            if must_stop and has_begun:
                self._stop.request(True)
                return False
            if num_steps == 0 or not reader.has_more:
                if step == 0 and passes.num_read == 0:
                    raise DataError("The dataset has no batch: there is nothing to compute.")
                if self.steps_per_epoch:
                    self.warn_of_interruption()
                    passes.close()
                break
            execution = self._execution = Execution(reader, num_steps, passes.num_used + 1)
            self._first_step = step
            self._is_running = has_begun = True
            if has_workers:
                self._stop.defer()
            yield step, step + num_steps - 1, execution
            self._end_execution()
            self.planner.record(execution)
            step += execution.num_made
        return True

    def _end_execution(self) -> None:
        """Count the steps of the execution that was under way."""
        self._stop.show()
        made, self._is_running = self._num_uncounted, False
        self.passes.add(made)

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Let everything through: a pass ends where ``EpochData`` says so. End an epoch however its loop was left."""
        yield
        self._end_execution()
        heartbeat.data_ends()
        self._runtime.end_epoch()
