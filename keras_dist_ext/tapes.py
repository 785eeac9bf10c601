"""Keep what steps have recorded beside each replica, until somebody wants it.

Letters: n = steps; L = replicas of this worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext import _keras

__all__ = ["MOST_ROWS", "Cut", "Row", "Tapes", "cpu_beside"]

# A row is of one step. It has a tuple of scalars for each replica: when it was over, when it had computed, how many
# rows it had, its loss, and the norm of its gradients if that is wanted; the first tuple ends with when the step began
# and when its batch was there. A table is what a replica has in several rows.
Row = list[tuple[Any, ...]]
Table = npt.NDArray[np.float64]  # [n, 4 or more]
MOST_ROWS = 4096  # that there is room for on tapes; if there are more, they are fetched before they are asked for


def cpu_beside(device: str) -> str:
    """Return the CPU device beside a device: itself, if it is one."""
    spec = tf.DeviceSpec.from_string(device)
    return device if spec.device_type == "CPU" else spec.replace(device_type="CPU", device_index=0).to_string()


class Tapes:
    """Hold the rows of a program's steps, each replica's on its own host, until somebody wants them.

    So nothing is sent to another device in a step, and nothing is read by an execution. They are variables: what a loop
    carries goes through the first device (python/ops/while_v2.py makes an Identity of it there), a queue's ops hand
    over to another thread, and to read a staging area takes some 7 µs a row.

    Args:
        devices: of the L replicas of this worker.
        gradient_norm: whether rows have the norm of gradients.
    """

    def __init__(self, devices: Sequence[str], *, gradient_norm: bool) -> None:
        self._tapes: list[tuple[str, Any, Any]] = []
        for index, device in enumerate(devices):
            host, num_columns = cpu_beside(device), 4 + gradient_norm + 2 * (index == 0)
            with tf.init_scope(), tf.device(host):
                table = _keras.variable_of_no_strategy(tf.zeros([MOST_ROWS, num_columns], tf.float64))
                self._tapes.append((host, table, _keras.variable_of_no_strategy(tf.constant(0))))
        self._reading = _Reading()  # the next one
        self._num_rows = 0  # of executions that went well
        self._first_unread = 0
        self._is_torn = False  # whether there may be rows of an execution that failed

    def begin(self, num_rows: int) -> None:
        """Make room for the rows of an execution that is about to begin: so many at most, and not over MOST_ROWS."""
        if self._is_torn or self._num_rows + num_rows > MOST_ROWS:
            self._rewind()
        self._is_torn = True

    def end(self, num_rows: int) -> Cut:
        """Say that it has gone well, and left so many rows; return what they can be had from."""
        self._is_torn = False
        cut = Cut(self, self._reading, self._num_rows - self._first_unread, num_rows)
        self._num_rows += num_rows
        return cut

    def write(self, row: Row) -> None:
        """Add the row of a step.

        Nothing of it is done before the replica is over with the step: where something short can be done beside
        something long, TensorFlow's executor hands one of them to another thread, and that one contends for the cores
        for a while.
        """
        for (host, table, count), numbers in zip(self._tapes, row, strict=True):
            with tf.device(host), tf.control_dependencies([numbers[0]]):
                of_step = tf.stack([tf.cast(number, tf.float64) for number in numbers])
                index = tf.raw_ops.ResourceCountUpTo(resource=count.handle, limit=MOST_ROWS, T=tf.int32)
                tf.raw_ops.ResourceScatterUpdate(resource=table.handle, indices=index, updates=of_step)

    def read(self) -> None:
        """Take off the rows of the executions that went well, but for those that were taken off before.

        Raises:
            RuntimeError: there are not as many as there were steps.
        """
        reading, self._reading = self._reading, _Reading()
        unread, self._first_unread = slice(self._first_unread, self._num_rows), self._num_rows
        with tf.init_scope():
            counts = [int(_value_of(count)) for _, _, count in self._tapes]
            if min(counts) < self._num_rows:
                self._is_torn = True
                raise RuntimeError(
                    f"Of {self._num_rows} steps, replicas have left the records of {counts}: what ReplicaMonitor and "
                    "others would say is wrong. This is a fault of keras_dist_ext, please report it. Without these "
                    "callbacks nothing is recorded, and training goes on."
                )
            reading.tables = [_value_of(table)[unread] for _, table, _ in self._tapes]

    def _rewind(self) -> None:
        """Begin anew, with no rows."""
        if self._first_unread < self._num_rows:
            self.read()
        self._num_rows = self._first_unread = 0
        with tf.init_scope():
            for host, _, count in self._tapes:
                with tf.device(host):
                    tf.raw_ops.AssignVariableOp(resource=count.handle, value=np.int32(0))


def _value_of(variable: Any) -> Any:
    """Return the value as an array, eagerly; methods of variables take several times as long."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype).numpy()


class _Reading:
    """What is read off tapes at once, if it is read already: what each of the L replicas has."""

    __slots__ = ("tables",)

    def __init__(self) -> None:
        self.tables: list[Table] | None = None


class Cut:
    """The rows of an execution, on tapes or taken off.

    Attributes:
        num_rows: n.

    Args:
        tapes: where they are.
        reading: what they are read with.
        first: their first row in that.
        num_rows: see above.
    """

    __slots__ = ("_first", "_reading", "_tapes", "num_rows")

    def __init__(self, tapes: Tapes, reading: _Reading, first: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self._tapes = tapes
        self._reading = reading
        self._first = first

    def followed_by(self, other: Cut) -> Cut | None:
        """Return the rows of both, if the other's lie right behind."""
        if other._reading is not self._reading or other._first != self._first + self.num_rows:
            return None
        return Cut(self._tapes, self._reading, self._first, self.num_rows + other.num_rows)

    @property
    def tables(self) -> list[Table]:
        """What each of the L replicas has in them."""
        if self._reading.tables is None:
            self._tapes.read()
        assert self._reading.tables is not None
        return [table[self._first : self._first + self.num_rows] for table in self._reading.tables]
