"""Make the passes of a run over its data, one after the other: each has an iterator, which is read once."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext.step.seeds import Seeds
from keras_dist_ext.training.batch_reader import BatchReader
from keras_dist_ext.training.data_order import DataOrder
from keras_dist_ext.training.evaluation_passes import EvaluationPasses
from keras_dist_ext.training.next_pass import NextPass
from keras_dist_ext.training.resume.position import (
    Position,
    has_resumable_iterator,
    iterate_batches,
    replay_passes,
    skip_to,
)
from keras_dist_ext.training.resume.tests_before import TestsBefore
from keras_dist_ext.training.run_dataset import RunDataset

__all__ = ["Passes"]


class Passes:
    """The passes over a dataset, and how many batches they have read.

    Args:
        dataset: that is read.
        strategy: that reads it.
        seeds: of the run.
        evaluation: counts the passes of evaluation.
        span_epochs: whether a pass goes on in the next epoch (``steps_per_epoch``).
        makes_unread: whether Keras makes another iterator when a pass is over, and does not read it.

    Attributes:
        reader: of the pass that is under way; None between two passes.
        num_read: how many batches of that pass were read, and
        num_used: how many of the run, up to the execution that is under way.
        num_tests_before: passes of evaluation that had begun when the iterator of the last, or next, pass was made.
    """

    def __init__(
        self,
        dataset: RunDataset,
        strategy: tf.distribute.Strategy,
        seeds: Seeds,
        evaluation: EvaluationPasses,
        *,
        span_epochs: bool,
        makes_unread: bool,
    ) -> None:
        self.reader: BatchReader | None = None
        self.num_read = 0
        self.num_used = 0
        self.num_tests_before = 0
        self._dataset = dataset
        self._evaluation = evaluation
        self._span_epochs = span_epochs
        self._makes_unread = makes_unread
        adapter, own_rows = dataset.data_adapter, dataset.has_own_rows
        self._order = DataOrder(adapter, dataset.given, strategy, seeds, has_own_rows=own_rows, workers=dataset.workers)
        self._common_seed = dataset.common_seed
        self._next = NextPass(is_read=span_epochs)
        self._num_missed = 0  # passes of an earlier process, to be made up for
        self._first_order: int | None = None
        self._state: Sequence[bytes] | None = None
        self._tests_before: TestsBefore | None = None
        self._saves_iterator: bool | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the next epoch goes on with a pass."""
        return self.reader is not None and self._span_epochs

    @property
    def has_iterator(self) -> bool:
        """Whether the iterator of the pass that comes, or goes on, was made."""
        return self.is_under_way or self._next.is_made

    def seek(
        self, position: Position, first_order: int | None, state: Sequence[bytes] | None, tests: TestsBefore | None
    ) -> None:
        """Have the next pass be the one at a position.

        Args:
            position: where.
            first_order: seed of the order of the first pass.
            state: of the iterator that was there.
            tests: passes of evaluation in the earlier process.
        """
        self._state, self._tests_before = state, tests
        self.begin_after(
            position.num_passes - bool(position.num_pass_batches),
            first_order,
            position.num_run_batches - position.num_pass_batches,
        )

    def begin_after(self, num_passes: int, first_order: int | None, num_batches: int) -> None:
        """Have the data be as if it had been read so often, the first time in the order of a seed."""
        self._dataset.num_passes = self._num_missed = num_passes
        self._first_order, self.num_used = first_order, num_batches

    def begin(self, length: int | None, seed: int | None, start: Position | None, *, one_step: bool) -> None:
        """Begin a pass.

        Args:
            length: its number of batches, if that is known.
            seed: of its order; None leaves that to chance.
            start: where it begins, in the middle of an epoch that an earlier process has begun.
            one_step: whether all executions have one step.
        """
        dataset, adapter = self._dataset, self._dataset.data_adapter
        iterator = self._next.take()
        self.close()
        self._replay_missed()
        if seed is None and self._common_seed is not None and self._order.is_own:
            seed = self._common_seed = self._common_seed + 1
        ordered = self._order.dataset(seed)
        read = dataset.read if ordered is None else ordered
        is_anew = ordered is not None and ordered is not dataset.given
        self._next.of(None if is_anew or dataset.is_on_tpu or not dataset.is_pipeline else read)
        dataset.num_passes += 1
        skip = self.num_read = 0 if start is None else start.num_pass_batches
        self.num_used += skip
        if dataset.seekable is not None:
            dataset.seekable.seek(self.num_used)
            adapter.generator = functools.partial(
                iterate_batches, dataset.seekable
            )  # without the batches that Keras has looked at
            skip = 0
        state, self._state = self._state, None
        entered = skip_to(skip, adapter, seed)
        if entered is not None:
            read, skip = entered, 0
        tests, self._tests_before = self._tests_before, None
        if iterator is None:
            self.num_tests_before = self._evaluation.num_begun if start is None else start.num_tests_before
        with contextlib.nullcontext() if tests is None else tests.replaying():
            self.reader = BatchReader(
                read,
                length,
                dataset.workers if dataset.has_own_rows else None,
                on_tpu=dataset.is_on_tpu,
                skip=skip,
                state=state,
                iterator=iterator,
                one_step=one_step,
            )

    def _replay_missed(self) -> None:
        """Make up for the passes of an earlier process."""
        if self._num_missed and self._dataset.is_pipeline:
            ordered = None if self._first_order is None else self._order.of_pipeline(self._first_order)
            replay_passes(self._num_missed, self._makes_unread * self._num_missed, self._dataset.given, ordered)
        self._num_missed = 0

    def add(self, num_batches: int) -> None:
        """Count batches that were used."""
        self.num_read += num_batches
        self.num_used += num_batches

    def end_epoch(self, length: int | None, *, is_known: bool) -> None:
        """End the pass with its epoch, or where all of it was read.

        Args:
            length: its number of batches, if anybody knows.
            is_known: whether they were counted by it.
        """
        is_whole = length is not None and self.num_read >= length
        if not self._span_epochs or (is_whole and is_known):
            self.close()
        if is_whole and (is_known or self._makes_unread):
            self._next.make()
            self.num_tests_before = self._evaluation.num_begun

    def close(self) -> None:
        """Release the iterator of the pass that is under way, which else is left to Python's collector of garbage."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()
        self._next.release()

    def iterator_state(self) -> list[bytes] | None:
        """What the iterator of the pass that is under way holds.

        None where TensorFlow cannot save it, or is slow to, or where it would not bring back all that comes after it.
        """
        if self._saves_iterator is None:
            self._saves_iterator = has_resumable_iterator(self._dataset.data_adapter, self._dataset.given)
        if not self._saves_iterator or self.reader is None:
            return None
        begin = time.perf_counter()
        state = self.reader.iterator_state()
        self._saves_iterator = state is not None and time.perf_counter() - begin < 0.05
        return state
