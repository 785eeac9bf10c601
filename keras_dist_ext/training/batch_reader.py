"""Give out the batches of one pass over a dataset."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.datasets import iterator_state, set_iterator_state
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data.iterators import preceded_by, release_iterator
from keras_dist_ext.messages import warn
from keras_dist_ext.strategy.workers import Workers

__all__ = ["BatchReader", "WaitTimes"]


class WaitTimes(NamedTuple):
    """Seconds until batches were available."""

    own: float = 0.0  # until this worker had its own
    for_others: float = 0.0  # from then until the other workers had theirs


class BatchReader:
    """Batches of one pass over a dataset, one ahead where the end cannot be foreseen.

    Args:
        dataset: a ``tf.data.Dataset``, or one that TensorFlow has distributed.
        length: its number of batches, or None.
        workers: given where each worker reads its own examples; they participate in a step until none has any left.
        skip: how many of the first batches were used before.
        state: what an iterator held after these, to be restored instead of reading up to there.
        iterator: over the dataset, if it was made before.
        one_step: whether all executions have one step, for which there is a graph without a loop.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        length: int | None,
        workers: Workers | None = None,
        *,
        on_tpu: bool = False,
        skip: int = 0,
        state: Sequence[bytes] | None = None,
        iterator: tf.data.Iterator | None = None,
        one_step: bool = False,
    ) -> None:
        self.one_step = one_step
        if state is not None:
            self.iterator = iter(dataset)
            if not set_iterator_state(self.iterator, state):
                warn(
                    "This TensorFlow cannot restore the state that the data's iterator had when the run was saved (is "
                    "it another version, or the data another pipeline?). The data is read up to there instead."
                )
                state = None
        if iterator is not None:
            self.iterator = iterator
        elif state is None:
            self.iterator = iter(dataset.skip(skip) if skip and isinstance(dataset, tf.data.Dataset) else dataset)
            if not isinstance(dataset, tf.data.Dataset):
                for _ in range(skip):
                    next(self.iterator)
        self._is_plain = isinstance(dataset, tf.data.Dataset)
        self._is_on_tpu = on_tpu
        # What TensorFlow has distributed does not know its length for sure; on a TPU it must, to loop there.
        self._looks_ahead = length is None or workers is not None or not (self._is_plain or on_tpu)
        self._workers = workers
        self.spec = dataset.element_spec
        if workers is not None:
            self.spec = tree.map_structure(_any_rows, self.spec)
        self._source: tf.data.Iterator | None = None  # what the iterator reads from, where a batch was put back
        self.ahead: TensorNest = None  # a batch, or an optional of TensorFlow
        self._has_more = True
        self._waited = WaitTimes()
        self._failure: Exception | None = None  # of reading ahead
        if self._looks_ahead:
            self._look_ahead()
            if self._failure is not None:
                raise self._failure

    @property
    def length_is_known(self) -> bool:
        """Whether the caller counts the batches."""
        return not self._looks_ahead

    def iterator_state(self) -> list[bytes] | None:
        """What the iterator holds; None where TensorFlow cannot save it, or a batch was taken ahead."""
        if self._looks_ahead or not self._is_plain:
            return None
        return iterator_state(self.iterator if self._source is None else self._source)

    @property
    def is_of_worker(self) -> bool:
        """Whether the rows are this worker's own."""
        return self._workers is not None

    @property
    def has_more(self) -> bool:
        """Whether another batch is available; True where the length is known and the caller counts."""
        return self._has_more

    @property
    def is_read_by_host(self) -> bool:
        """Whether each batch is read by Python before its step, because the graph cannot."""
        return self._workers is not None or not (self._is_plain or self._is_on_tpu)

    def advance(self, ahead: tf.experimental.Optional, *, has_more: bool) -> None:
        """Go on after steps that have read for themselves.

        Args:
            ahead: the batch that they have read ahead, an optional.
            has_more: whether it is available.
        """
        self.ahead, self._has_more = ahead, has_more

    def take_waited(self) -> WaitTimes:
        """Return once how many seconds batches have taken that were read ahead."""
        waited, self._waited = self._waited, WaitTimes()
        return waited

    def __iter__(self) -> Iterator[StepData]:
        """Yield the batches that are left."""
        while self.has_more:
            try:
                yield self.next_batch()
            except StopIteration:
                return

    def next_batch(self) -> StepData:
        """Return the next batch; without rows, where only other workers have some left.

        What fails when it is read ahead is raised when it is asked for, so that the step before is made.
        """
        if not self._looks_ahead:
            return next(self.iterator)
        if self._failure is not None:
            raise self._failure
        if not self._is_plain:
            batch = self.ahead
        elif self.ahead.has_value():
            batch = self.ahead.get_value()
        else:
            batch = tree.map_structure(_no_rows, self.spec)
        self._look_ahead()
        return batch

    def peek(self) -> StepData:
        """Return the next batch without taking it; None where there is none, or it cannot be looked at."""
        if self._failure is not None or (self._looks_ahead and not self._is_plain):
            return self.ahead
        if self._looks_ahead:
            return self.ahead.get_value() if self.ahead.has_value() else None
        if not self._is_plain:
            return None
        batch = next(self.iterator, None)
        if batch is not None:
            self._source = self.iterator
            self.iterator = iter(preceded_by(batch, self.iterator))
        return batch

    def close(self) -> None:
        """Release the iterator: no more batches are asked for."""
        held = [self.iterator, *([] if self._source is None else [self._source])]
        self._source = None
        del self.iterator
        self.ahead, self._has_more = None, False
        release_iterator(held)

    def _look_ahead(self) -> None:
        begin = time.perf_counter()
        try:
            if self._is_plain:
                self.ahead = self.iterator.get_next_as_optional()
                self._has_more = bool(self.ahead.has_value())
            else:
                self.ahead = next(self.iterator, None)
                self._has_more = self.ahead is not None
        except Exception as error:  # by what is read
            self.ahead, self._has_more, self._failure = None, True, error
        is_here = time.perf_counter()
        if self._workers is not None:
            self._has_more = self._workers.sum([float(self._has_more)])[0] > 0
        own, for_others = is_here - begin, time.perf_counter() - is_here
        self._waited = WaitTimes(self._waited.own + own, self._waited.for_others + for_others)


def _any_rows(spec: tf.TypeSpec | None) -> tf.TypeSpec | None:
    if not hasattr(spec, "shape") and not isinstance(spec, tf.OptionalSpec):
        return None
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _no_rows(spec: tf.TypeSpec | None) -> TensorNest:
    if spec is None:
        return None
    if not hasattr(spec, "shape") or isinstance(spec, tf.OptionalSpec):
        return tf.experimental.Optional.empty(None)
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *spec.shape[spec.ragged_rank + 1 :]], spec.dtype)
        splits = tf.zeros([1], spec.row_splits_dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, [splits] * spec.ragged_rank)
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *[d or 0 for d in spec.shape[1:]]]
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    return tf.zeros([0, *[d or 0 for d in spec.shape[1:]]], spec.dtype)
