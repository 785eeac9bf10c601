"""Give a replica the rows of the global batch while its step is traced, and find out what is computed from them alone.

Letters: n = rows of a replica, N = rows of the global batch, R = replicas in sync, over all workers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Literal

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.tracing import in_branch
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.data.graph_checks import require
from keras_dist_ext.errors import DataError
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.step.origins import Origins
from keras_dist_ext.step.reducers import Reducer, RowRange
from keras_dist_ext.step.row_weights import RowWeights

__all__ = ["AllRows", "is_examined", "rows_of_no_batch", "stands_for_all"]

_ANY_NUMBER = 1021  # of rows, in a scratch graph


class AllRows:
    """The rows of the global batch, for one replica's step.

    Attributes:
        is_used: whether the step has asked for them.
        are_of_one_batch: whether they were one batch before they were split.

    Args:
        weights: of the replica's rows.
        reducer: adds up over replicas.
        first_row: where its rows begin in the global batch; None: that is asked of the others.
        observer: is called with what is gathered.
    """

    def __init__(
        self, weights: RowWeights, reducer: Reducer, first_row: int | tf.Tensor | None, observer: StepObserver
    ) -> None:
        self.is_used = False
        self.are_of_one_batch = first_row is not None
        self._weights = weights
        self._reducer = reducer
        self._range = None if first_row is None else RowRange(first_row, weights.rows, weights.global_rows)
        self._observer = observer
        self._origins = Origins()
        self._batch: TensorNest = None
        self._graph: tf.Graph | None = None

    def begin(self, batch: TensorNest) -> None:
        """Know the replica's own rows."""
        self._batch = batch
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @property
    def range(self) -> RowRange:
        """Where the replica's rows are in the global batch."""
        if self._range is None:
            replica, num_replicas = self._reducer.replica_id, self._reducer.num_replicas
            own = tf.one_hot(replica, num_replicas) * tf.cast(self._weights.rows, tf.float32)
            counts = tf.cast(self._reducer.sum([own])[0], tf.int32)
            before = tf.cumsum(counts, exclusive=True)
            found = RowRange(before[replica], self._weights.rows, tf.reduce_sum(counts))
            if in_branch(self._graph):
                return found  # which is not there outside of it
            self._range, self._weights.global_rows = found, found.total
        return self._range

    def gather(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return values with the rows of all replicas, in the order of the global batch.

        Args:
            values: each with one row for each of the replica's.

        Raises:
            DataError: one has another number of rows.
        """
        values = [self._checked(value) for value in values]
        self._use()
        if self._weights.are_examined:
            found = [self._weights.mark_as_mean(stands_for_all(value)) for value in values]
            for value in found:
                self._observer.on_gather(value)
            return found
        smooth = [place for place, value in enumerate(values) if value.dtype.is_floating or value.dtype.is_complex]
        other = [place for place in range(len(values)) if place not in smooth]
        gathered: list[tf.Tensor] = list(values)
        for places, gather in ((smooth, self._differentiable), (other, self._of_all)):
            if places:
                for place, value in zip(places, gather([values[p] for p in places]), strict=True):
                    gathered[place] = self._origins.note_replicated(value)
                    self._observer.on_gather(value)
        return gathered

    def indices(self, value: tf.Tensor) -> tf.Tensor:
        """Return which rows of the global batch are the replica's, ``[n]`` int32."""
        count = tf.shape(self._checked(value))[0]
        if self._reducer.num_replicas == 1 or self._weights.are_examined:
            return tf.range(count)
        self._use()
        return self._origins.note_own(tf.range(count) + self.range.first, self._reducer.replica_id)

    def note_own(self, value: TensorNest) -> TensorNest:
        """Know that a tensor is the replica's own, as numbers that it has drawn are."""
        return self._origins.note_own(value, self._reducer.replica_id) if tf.is_tensor(value) else value

    def as_own(self, value: TensorNest) -> TensorNest:
        """Return a scalar that each replica gives to a metric with a weight of its own, as one that is its own."""
        is_scalar = self.is_used and tf.is_tensor(value) and value.shape.rank == 0
        return self.note_own(tf.identity(value)) if is_scalar else value

    def kind_of(self, value: TensorNest) -> Literal["own", "replicated", "constant"]:
        """Whether a value is computed from this replica's own rows or numbers, or else from gathered rows, or neither.

        What is computed from gathered rows, and from nothing of one's own, is equal on all replicas. Where a graph does
        not tell, values count as one's own: in eager steps and in branches of the graph.
        """
        if not self.is_used or tf.executing_eagerly() or in_branch(self._graph):
            return "own"
        return self._origins.kind_of(value)

    def _use(self) -> None:
        """Losses are added up over replicas through gathered rows, and numbers computed from these are of all rows."""
        if not self.is_used:
            self.is_used = True
            self._weights.note_gathered()
            for leaf in tree.flatten(self._batch):
                self.note_own(leaf)

    def _of_all(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._reducer.gather(values, self.range)

    def _differentiable(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gather; to the rows of a replica flows back what comes from above on all replicas."""

        def back(*upstream: tf.Tensor) -> list[tf.Tensor]:
            own = self._weights.zero_if_empty([tf.convert_to_tensor(gradient) for gradient in upstream])
            first, count = self.range.first, self.range.count
            return [total[first : first + count] for total in self._reducer.differentiable_sum(own)]

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def gathered(*values: tf.Tensor) -> TensorNest:
            return self._of_all(values), back

        found = gathered(*values)
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def _checked(self, value: tf.Tensor) -> tf.Tensor:
        if value.shape.rank is None or not value.shape.rank:
            raise DataError(
                f"gather_rows was given a tensor of the shape {value.shape}, which has no rows. Give it a tensor with "
                "one row for each example of the batch, whose number of dimensions is known (tf.ensure_shape)."
            )
        rows, found = self._weights.rows, value.shape[0]
        if self._reducer.num_replicas == 1:
            return value
        message = (
            f"gather_rows was given a tensor of the shape {value.shape}, which has not one row for each example of the "
            "batch, so the order of the rows of all replicas would not be that of one device. Gather parts of that "
            "many rows each by themselves, as tf.concat(kde.gather_rows(tf.split(x, 2)), 0) does; give several rows "
            "of an example a dimension of their own; select rows after they are gathered."
        )
        if isinstance(rows, int) and found is not None:
            if rows != found:
                raise DataError(message)
            return value
        check = require(tf.equal(tf.shape(value)[0], rows), message)
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(value)


def stands_for_all(value: tf.Tensor) -> tf.Tensor:
    """Return what stands for the rows of all replicas in a scratch graph: those at hand, again and again.

    Their number is known there, and the same whatever that of the replica's own is, so that sums over them do not grow
    with these.
    """
    rows = tf.maximum(tf.shape(value)[0], 1)
    return tf.ensure_shape(tf.gather(value, tf.range(_ANY_NUMBER) % rows), [_ANY_NUMBER, *value.shape[1:]])


_thread = threading.local()


@contextlib.contextmanager
def rows_of_no_batch() -> Iterator[None]:
    """Outside of a step, trace in a scratch graph: what is gathered has a known number of rows meanwhile."""
    _thread.is_examined = True
    try:
        yield
    finally:
        _thread.is_examined = False


def is_examined() -> bool:
    """Whether this is in ``rows_of_no_batch``."""
    return getattr(_thread, "is_examined", False)
