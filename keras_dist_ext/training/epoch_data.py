"""Hand the data of an epoch to the compiled loop, some steps at a time.

Keras' ``fit``, ``evaluate`` and ``predict`` ask an epoch iterator for ``(first step, last step, iterator)`` and give
the iterator to the step function. ``EpochData`` gives them an ``Execution`` instead: a reader of batches, and how many
steps to make of it. Nothing is pulled ahead of time: data begins once an epoch, and each element is used once.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.adapters import (
    ArrayDataAdapter,
    CustomEpochIterator,
    TFDatasetAdapter,
)
from keras_dist_ext._keras.py_datasets import seed_py_datasets
from keras_dist_ext.aliases import JsonObject, SpecNest
from keras_dist_ext.cluster import heartbeat
from keras_dist_ext.errors import DataError
from keras_dist_ext.strategy.consistency import data_fingerprint
from keras_dist_ext.strategy.workers import Workers, workers_of
from keras_dist_ext.training.batch_reader import BatchReader
from keras_dist_ext.training.batch_spec import any_number_of_rows, given_spec
from keras_dist_ext.training.data_order import DataOrder
from keras_dist_ext.training.execution import Execution, RunKind
from keras_dist_ext.training.execution_sizer import ExecutionSizer
from keras_dist_ext.training.next_pass import NextPass
from keras_dist_ext.training.resume.position import (
    Position,
    has_resumable_iterator,
    iterate_batches,
    replay_epochs,
    replay_passes,
    sample_checksum,
    seekable_facts,
    skip_to,
    take_seekable,
)
from keras_dist_ext.training.runtime import ReplicaRuntime

__all__ = ["EpochData"]


class EpochData(CustomEpochIterator):
    """Keras' epoch iterator over a dataset that is read as it is: replicas cut their rows in the step.

    Args:
        runtime: of the model that runs.
        kind: what the data is for.
        sizer: how many steps an execution makes.
        arguments: those of Keras' ``EpochIterator``.
    """

    def __init__(self, runtime: ReplicaRuntime, kind: RunKind, sizer: ExecutionSizer, **arguments: object) -> None:
        self._seekable = take_seekable(arguments)
        super().__init__(**arguments)
        self._runtime = runtime
        self._kind: RunKind = kind
        self._stop = runtime.stops[kind]
        self._sizer = sizer
        strategy = runtime.strategy
        workers = self._workers = workers_of(strategy)
        self._own_rows = False
        self._common_seed: int | None = None  # of all workers
        self._has_drawn = True  # whether Python's generator is past it
        dataset = self._given = self.data_adapter.get_tf_dataset()
        if workers is not None:
            dataset, self._own_rows, seed = workers.align_data(dataset, sample_checksum(self.data_adapter))
            seed_py_datasets(seed)
            self._common_seed, self._has_drawn = seed, False
            self._dataset = dataset
            self._check_same_data(workers)
        self._is_on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        if self._is_on_tpu and isinstance(dataset, tf.data.Dataset):
            dataset = strategy.experimental_distribute_dataset(dataset)
        self._dataset = dataset
        self._order = DataOrder(
            self.data_adapter,
            self._given,
            strategy,
            is_seeded=lambda: runtime.seeds.root is not None,
            has_own_rows=self._own_rows,
            workers=workers,
        )
        self._reader: BatchReader | None = None
        self._start: Position | None = None
        self._state: Sequence[bytes] | None = None
        self._saves_iterator: bool | None = None
        self._order_of: Callable[[int], int | None] = lambda number: None
        self.num_passes = 0
        self._num_missed = 0  # passes of an earlier process, to be made up for
        self._first_order: int | None = None
        self._replaying_tests: AbstractContextManager[None] = contextlib.nullcontext()
        self._num_tests_before = 0
        self._makes_unread = self.steps_per_epoch is None and self.pass_length is not None
        self._next_pass = NextPass(is_read=self.steps_per_epoch is not None)
        self._num_batches_used = 0
        self._num_epochs = 0
        self._is_running = False

    plan: Callable[[int], tuple[int, int]] = staticmethod(lambda num_steps: (num_steps, 0))
    """Asked before each execution of so many steps: how many to make, and what is wished to happen after them."""

    count_tests: Callable[[], int] = staticmethod(lambda: 0)
    """Says how many passes evaluation has begun over its data."""

    agreed_wish = 0
    """What is wished to happen after the last execution; of several workers the sum."""

    def _check_same_data(self, workers: Workers) -> None:
        facts = data_fingerprint(self.batch_spec, self.pass_length, own_rows=self._own_rows)
        if not workers.all_equal(zlib.crc32(repr(facts).encode())):
            workers.check_consistency("read its data", facts)

    @property
    def batch_spec(self) -> SpecNest:
        """Specs of a batch: shapes with an unknown number of rows."""
        return tree.map_structure(any_number_of_rows, self.exact_spec)

    @property
    def exact_spec(self) -> SpecNest:
        """Specs of a batch, with the number of its rows where that is known."""
        return tree.map_structure(given_spec, self._dataset.element_spec)

    @property
    def kind(self) -> RunKind:
        """What the data is for."""
        return self._kind

    @property
    def given(self) -> tf.data.Dataset:
        """The dataset that was given, or that Keras has made of what was."""
        return self._given

    @property
    def is_pipeline(self) -> bool:
        """Whether a dataset was given, which Keras reads as it is."""
        return isinstance(self.data_adapter, TFDatasetAdapter)

    @property
    def can_be_read_again(self) -> bool:
        """Whether another iterator takes nothing from this one: not so for generators, and what is split already."""
        plain = isinstance(self._given, tf.data.Dataset) and not self._own_rows
        return plain and (self.is_pipeline or isinstance(self.data_adapter, ArrayDataAdapter))

    @property
    def last_step(self) -> int:
        """The last step that was made, counted from 0 in the epoch."""
        return self._first_step + self._execution.num_made - 1

    def reset(self) -> None:
        """Forget the pass that is under way."""
        super().reset()
        self.close()

    def close(self) -> None:
        """Release the iterator of the pass that is under way, which else is left to Python's collector of garbage."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self._next_pass.release()

    # Where a run is, and how to get there

    def position(self, epoch: int, *, order: int, num_tests: int) -> Position:
        """Return where training is: after the last execution, or between two epochs.

        Args:
            epoch: that is under way, or comes next.
            order: the number of the order that the last pass had.
            num_tests: how many passes evaluation has made over its data.
        """
        made = self._execution.num_made if self._is_running else 0
        in_pass = self._is_running or (self._reader is not None and self.steps_per_epoch is not None)
        is_made = in_pass or self._next_pass.is_made
        return Position(
            epoch=epoch,
            step=self._first_step + made if self._is_running else 0,
            num_epochs=self._num_epochs,
            num_passes=self.num_passes,
            num_pass_batches=self.num_read + made if in_pass else 0,
            num_run_batches=self._num_batches_used + made,
            order=order,
            num_tests=num_tests,
            num_tests_before=self._num_tests_before if is_made else num_tests,
        )

    @property
    def num_batches_used(self) -> int:
        """Batches that were used in this run, up to the last execution."""
        return self._num_batches_used + (self._execution.num_made if self._is_running else 0)

    @property
    def follows_clock(self) -> bool:
        """Whether the number of steps of an execution is tuned."""
        return self._sizer.follows_clock

    @property
    def ends_epoch(self) -> bool:
        """Whether the last execution was the last one of its epoch."""
        reader, made = self._reader, self._execution.num_made
        if reader is None or not reader.has_more or made < self._execution.num_steps:
            return True
        length = self.pass_length if reader.length_is_known else None
        is_used = length is not None and self.num_read + made >= length
        return is_used or self._first_step + made == (self.steps_per_epoch or -1)

    @functools.cached_property
    def data_facts(self) -> JsonObject:
        """What a run's data must have in common with that of an earlier process, for positions to mean the same.

        Raises:
            DataError: nobody can say where in this data a run is.
        """
        facts = seekable_facts(
            self.data_adapter, self._given, self._seekable, self.steps_per_epoch, pass_length=self.pass_length
        )
        num_workers = self._workers.num_workers if self._workers and self._own_rows else 0
        return {**facts, "workers that read rows of their own": num_workers}

    def iterator_state(self) -> list[bytes] | None:
        """What the iterator of the pass that is under way holds.

        None where TensorFlow cannot save it, or is slow to, or where it would not bring back all that comes after it.
        """
        if self._saves_iterator is None:
            self._saves_iterator = has_resumable_iterator(self.data_adapter, self._given)
        if not self._saves_iterator or self._reader is None or not self._is_running:
            return None
        begin = time.perf_counter()
        state = self._reader.iterator_state()
        self._saves_iterator = state is not None and time.perf_counter() - begin < 0.05
        return state

    def seek(
        self,
        position: Position,
        order_of: Callable[[int], int | None],
        state: Sequence[bytes] | None = None,
        replaying_tests: AbstractContextManager[None] | None = None,
    ) -> None:
        """Begin the first epoch at a position.

        Args:
            position: where.
            order_of: gives the seed of the order with a number.
            state: of the iterator that was there.
            replaying_tests: entered to make the iterator of the first pass.
        """
        self._start, self._order_of, self._state = position, order_of, state
        self._replaying_tests = replaying_tests or self._replaying_tests
        self.begin_after(
            position.num_passes - bool(position.num_pass_batches),
            order_of(position.order - position.num_passes + 1),
            position.num_run_batches - position.num_pass_batches,
        )
        self._num_epochs = position.num_epochs
        replay_epochs(self.data_adapter, position)

    def begin_after(self, num_passes: int, first_order: int | None, num_batches: int) -> None:
        """Have the data be as if it had been read so often, the first time in the order of a seed."""
        self.num_passes = self._num_missed = num_passes
        self._first_order, self._num_batches_used = first_order, num_batches

    def executions(self) -> Iterator[tuple[int, int, Execution]]:
        """Yield the executions of an epoch."""
        if self._kind != "predict":
            self.check_built()
        if not self._has_drawn:
            self._has_drawn = True
            random.randrange(2**31)
        length = self.pass_length
        start, self._start = self._start, None
        in_pass = start is not None and start.num_pass_batches > 0
        begins_pass = not in_pass and (self._reader is None or self.steps_per_epoch is None)
        seed = self._runtime.order_seed(self._kind) if begins_pass else None
        if start is not None and in_pass:
            seed = self._order_of(start.order)
        if seed is not None:
            seed_py_datasets(seed)
        self.data_adapter.on_epoch_begin()
        if begins_pass or in_pass:
            self._begin_pass(seed, start)
        step = 0 if start is None else start.step
        known = self._reader is not None and self._reader.length_is_known
        has_begun = False  # an epoch that has begun makes a step, whatever was asked for before
        target = self.steps_per_epoch or (length if known else None)
        while not target or step < target:  # no batch at all is an error too
            reader = self._reader
            assert reader is not None
            num_steps = self._sizer.num_steps if target is None else min(self._sizer.num_steps, target - step)
            if length is not None and reader.length_is_known:
                num_steps = min(num_steps, length - self.num_read)
            if self._stop.is_requested and self._sizer.follows_clock:
                num_steps = 1
            num_steps, self.agreed_wish = self.plan(num_steps)
            if self._workers is not None:
                must_stop, num_steps = self._agree_on_steps(num_steps)
                if must_stop and has_begun:
                    self._stop.request(True)
                    return
            if num_steps == 0 or not reader.has_more:
                if step == 0 and self.num_read == 0:
                    raise DataError("The dataset has no batch: there is nothing to compute.")
                if self.steps_per_epoch:
                    self.warn_of_interruption()
                    self.close()
                break
            execution = self._execution = Execution(reader, num_steps, self._num_batches_used + 1)
            self._first_step = step
            self._is_running = has_begun = True
            if self._workers is not None:
                self._stop.defer()
            yield step, step + num_steps - 1, execution
            self._end_execution()
            self._sizer.record(execution.num_made, execution.seconds)
            step += execution.num_made
        is_whole = length is not None and self.num_read >= length
        if self.steps_per_epoch is None or (is_whole and known):
            self.close()
        if is_whole and (known or self._makes_unread):
            self._next_pass.make()
            self._num_tests_before = self.count_tests()
        self._num_epochs += 1
        self.data_adapter.on_epoch_end()

    def _end_execution(self) -> None:
        """Count the steps of the execution that was under way."""
        self._stop.show()
        if self._is_running:
            self._is_running = False
            self.num_read += self._execution.num_made
            self._num_batches_used += self._execution.num_made

    def _begin_pass(self, seed: int | None, start: Position | None = None) -> None:
        iterator = self._next_pass.take()
        self.close()
        if self._num_missed and self.is_pipeline:
            ordered = None if self._first_order is None else self._order.of_pipeline(self._first_order)
            replay_passes(self._num_missed, self._makes_unread * self._num_missed, self._given, ordered)
        self._num_missed = 0
        if seed is None and self._common_seed is not None and self._order.is_own:
            seed = self._common_seed = self._common_seed + 1
        ordered = self._order.dataset(seed)
        dataset = self._dataset if ordered is None else ordered
        is_anew = ordered is not None and ordered is not self._given
        self._next_pass.of(None if is_anew or self._is_on_tpu or not self.is_pipeline else dataset)
        workers = self._workers if self._own_rows else None
        self.num_passes += 1
        skip = self.num_read = 0 if start is None else start.num_pass_batches
        self._num_batches_used += skip
        if self._seekable is not None:
            self._seekable.seek(self._num_batches_used)
            self.data_adapter.generator = functools.partial(
                iterate_batches, self._seekable
            )  # without the batches that Keras has looked at
            skip = 0
        state, self._state = self._state, None
        entered = skip_to(skip, self.data_adapter, seed)
        if entered is not None:
            dataset, skip = entered, 0
        replaying_tests, self._replaying_tests = self._replaying_tests, contextlib.nullcontext()
        if iterator is None:
            self._num_tests_before = self.count_tests() if start is None else start.num_tests_before
        with replaying_tests:
            self._reader = BatchReader(
                dataset,
                self.pass_length,
                workers,
                on_tpu=self._is_on_tpu,
                skip=skip,
                state=state,
                iterator=iterator,
                one_step=self._sizer.num_steps == 1 and not self._sizer.follows_clock,
            )

    def _agree_on_steps(self, num_steps: int) -> tuple[bool, int]:
        assert self._workers is not None
        stop, wish = float(self._stop.is_requested), float(self.agreed_wish)
        stops, wishes, steps = self._workers.sum([stop, wish, float(num_steps) if self._workers.is_chief else 0.0])
        self.agreed_wish = int(wishes)
        return stops > 0, 1 if stops > 0 and self._sizer.follows_clock else int(steps)

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Let everything through: a pass ends where ``EpochData`` says so. End an epoch however its loop was left."""
        yield
        self._end_execution()
        heartbeat.data_ends()
        self._runtime.end_epoch()
