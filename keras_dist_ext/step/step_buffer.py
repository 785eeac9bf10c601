"""Keep what steps have recorded beside each replica, until somebody wants it.

Letters: n = steps; L = replicas of this worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext import _keras

__all__ = ["MOST_ROWS", "Cut", "Row", "Tapes", "cpu_beside"]

# A row is of one step. It has a tuple of scalars for each replica: when it was over, when it had computed, how many
# rows it had, its loss, and the norm of its gradients if that is wanted; the first tuple ends with when the step began
# and when its batch was there, or the next one (`ON_TAPE` in `recorder.py`). A table is what a replica has in several
# rows.
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
        self._tapes: list[_Tape] = []
        for index, device in enumerate(devices):
            host, num_columns = cpu_beside(device), 4 + gradient_norm + 2 * (index == 0)
            with tf.init_scope(), tf.device(host):
                table = _keras.NamedVariable(tf.zeros([MOST_ROWS, num_columns], tf.float64))
                self._tapes.append(_Tape(host, table, _keras.NamedVariable(tf.constant(0))))
        self._reading = _Reading()  # the next one
        self._num_rows = 0  # of executions that went well
        self._first_unread = 0
        self._is_torn = False  # whether there may be rows of an execution that failed

    def begin(self, num_rows: int) -> None:
        """Make room for the rows of an execution that is about to begin: so many at most, and not over MOST_ROWS."""
        if self._is_torn or self._num_rows + num_rows > MOST_ROWS:
            self._rewind()
        self._is_torn = True

    def end(self, num_rows: int) -> None:
        """Say that it has gone well, and left so many rows."""
        self._is_torn = False
        self._num_rows += num_rows

    def last(self, num_rows: int) -> Cut:
        """Return what the last rows can be had from, those of the last execution."""
        return Cut(self, self._reading, self._num_rows - num_rows - self._first_unread, num_rows)

    def write(self, row: Row, *, loops: bool) -> None:
        """Add the row of a step.

        Nothing of it is done before the replica is over with the step: where something short can be done beside
        something long, TensorFlow's executor hands one of them to another thread, and that one contends for the cores
        for a while.

        Args:
            row: see above.
            loops: whether this is traced inside of a loop.
        """
        for tape, numbers in zip(self._tapes, row, strict=True):
            with tf.device(tape.host), tf.control_dependencies([numbers[0]]):
                of_step = tf.stack([tf.cast(number, tf.float64) for number in numbers])
                table, length = (
                    variable.handle if loops or tf.executing_eagerly() else variable.handle_in_graph()
                    for variable in (tape.table, tape.length)
                )
                index = tf.raw_ops.ResourceCountUpTo(resource=length, limit=MOST_ROWS, T=tf.int32)
                tf.raw_ops.ResourceScatterUpdate(resource=table, indices=index, updates=of_step)

    def read(self) -> None:
        """Take off the rows of the executions that went well, but for those that were taken off before.

        Raises:
            RuntimeError: there are not as many as there were steps.
        """
        reading, self._reading = self._reading, _Reading()
        unread, self._first_unread = slice(self._first_unread, self._num_rows), self._num_rows
        with tf.init_scope():
            counts = [int(tape.length.value()) for tape in self._tapes]
            if min(counts) < self._num_rows:
                self._is_torn = True
                raise RuntimeError(
                    f"Of {self._num_rows} steps, replicas have left the records of {counts}: what ReplicaMonitor and "
                    "others would say is wrong. This is a fault of keras_dist_ext, please report it. Without these "
                    "callbacks nothing is recorded, and training goes on."
                )
            reading.tables = [tape.table.value().numpy()[unread] for tape in self._tapes]

    def _rewind(self) -> None:
        """Begin anew, with no rows."""
        if self._first_unread < self._num_rows:
            self.read()
        self._num_rows = self._first_unread = 0
        with tf.init_scope():
            for tape in self._tapes:
                with tf.device(tape.host):
                    tape.length.assign(np.int32(0))


class _Tape(NamedTuple):
    """What there is of a replica's rows, on a device."""

    host: str
    table: _keras.NamedVariable
    length: _keras.NamedVariable  # how many there are


class _Reading:
    """What is read off tapes at once, if it is read already: what each of the L replicas has."""

    __slots__ = ("tables",)

    def __init__(self) -> None:
        self.tables: list[Table] | None = None


class Cut:
    """Rows of executions, on tapes or taken off.

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

    def takes_in(self, tapes: Tapes, num_rows: int) -> bool:
        """Have the last rows of tapes as well, those of the last execution, if they lie right behind; say whether."""
        is_next = (
            self._reading is tapes._reading
            and self._first + self.num_rows + num_rows == tapes._num_rows - tapes._first_unread
        )
        if is_next:
            self.num_rows += num_rows
        return is_next

    @property
    def tables(self) -> list[Table]:
        """What each of the L replicas has in them."""
        if self._reading.tables is None:
            self._tapes.read()
        assert self._reading.tables is not None
        return [table[self._first : self._first + self.num_rows] for table in self._reading.tables]
