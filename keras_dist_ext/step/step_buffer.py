"""Keep what steps have recorded, on the CPU of each replica's host, until it is read.

What a GPU has computed in a loop stays on it (``sampled_table``).

Letters: n = steps; L = replicas of this worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext._keras.variables import NamedVariable
from keras_dist_ext.step.sampled_table import SampledClocks, SampledTable

__all__ = [
    "MAX_STEPS",
    "BufferSlice",
    "BufferedSteps",
    "ReplicaRecord",
    "StepBuffer",
    "StepRecord",
    "cpu_beside",
]

Table = npt.NDArray[np.float64]  # [n, columns], what a replica has recorded of several steps
MAX_STEPS = 4096  # that there is room for in a buffer; if there are more, they are fetched before they are asked for


class ReplicaRecord(NamedTuple):
    """What a replica notes of its step, scalars. Times are in seconds since 1970."""

    computed: tf.Tensor  # when its gradients, or its loss, were computed; infinity if that is unknown
    examples: tf.Tensor
    loss: tf.Tensor
    gradient_norm: tf.Tensor = None  # None where it is not wanted

    @property
    def present(self) -> tuple[tf.Tensor, ...]:
        """What it has, in order."""
        return tuple(number for number in self if number is not None)

    @property
    def of_gpu(self) -> tuple[tf.Tensor, ...]:
        """Of these, what a GPU computes."""
        return self.present[2:]


class StepRecord(NamedTuple):
    """What is recorded of a step."""

    replicas: Sequence[ReplicaRecord]  # [L]
    ends: Sequence[tf.Tensor]  # [L], when each was over with the step
    begin: tf.Tensor
    batch_ready: tf.Tensor
    execution_end: tf.Tensor = np.float64("nan")  # when the execution was over, where its only step says so
    sampled: Sequence[SampledClocks] = ()  # [L], in place of the replicas' clocks


class BufferedSteps(NamedTuple):
    """What was recorded of some steps; see ``ReplicaRecord`` and ``StepRecord``."""

    end: Table  # [n, L]
    computed: Table  # [n, L]
    examples: Table  # [n, L]
    loss: Table  # [n, L]
    gradient_norm: Table | None  # [n, L]
    begin: Table  # [n]
    batch_ready: Table  # [n]
    execution_end: Table  # [n]


# Columns of a table. The norm is there only where it is wanted; the step's are in the first replica's table alone.
_OF_REPLICA = ("end", *ReplicaRecord._fields)
_OF_HOST = ("end", "computed", "examples")  # of these, what is not left on a GPU
_OF_STEP = ("begin", "batch_ready", "execution_end")


def cpu_beside(device: str) -> str:
    """Return the CPU device of a device's host: itself, if it is one."""
    spec = tf.DeviceSpec.from_string(device)
    return device if spec.device_type == "CPU" else spec.replace(device_type="CPU", device_index=0).to_string()


class StepBuffer:
    """Holds the records of a program's steps, each replica's on its own host, until somebody wants them.

    So nothing is sent to another device in a step, and nothing is read by an execution. They are variables: what a loop
    carries goes through the first device (python/ops/while_v2.py makes an Identity of it there), a queue's ops hand
    over to another thread, and to read a staging area takes some 7 µs a step.

    Args:
        devices: of the L replicas of this worker.
        gradient_norm: whether the norm of gradients is recorded.
        gpus: of the replicas; where some have none, all is left on the host.

    Attributes:
        is_sampled: whether steps in loops leave their numbers on GPUs, and clocks are read in some of them only.
    """

    def __init__(self, devices: Sequence[str], gradient_norm: bool, gpus: Sequence[str] = ()) -> None:
        self.is_sampled = len(gpus) == len(devices)
        self._columns = _OF_REPLICA if gradient_norm else _OF_REPLICA[:-1]
        self._replicas: list[_ReplicaTable] = []
        for index, device in enumerate(devices):
            host, num_columns = cpu_beside(device), len(self._columns) + (len(_OF_STEP) if index == 0 else 0)
            with tf.init_scope(), tf.device(host):
                table = NamedVariable(tf.zeros([MAX_STEPS, num_columns], tf.float64))
                length = NamedVariable(tf.constant(0))
                num_numbers = len(self._columns) - len(_OF_HOST)
                sampled = SampledTable(gpus[index], host, MAX_STEPS, num_numbers) if self.is_sampled else None
                self._replicas.append(_ReplicaTable(host, table, length, sampled))
        self._reading = _Reading()  # the next one
        self._num_steps = 0  # of executions that went well
        self._first_unread = 0
        self._is_torn = False  # whether there may be records of an execution that failed

    def begin(self, max_steps: int) -> None:
        """Make room for the records of an execution that is about to begin, of so many steps at most."""
        if self._is_torn or self._num_steps + max_steps > MAX_STEPS:
            self._rewind()
        self._is_torn = True

    def end(self, num_steps: int) -> None:
        """Say that it has gone well, and made so many steps."""
        self._is_torn = False
        self._num_steps += num_steps

    def last(self, num_steps: int) -> BufferSlice:
        """Return the slice of the last steps, those of the last execution."""
        return BufferSlice(self, self._reading, self._num_steps - num_steps - self._first_unread, num_steps)

    def write(self, record: StepRecord, *, loops: bool) -> None:
        """Add the record of a step.

        Nothing of it is done before the replica is over with the step: where something short can be done beside
        something long, TensorFlow's executor hands one of them to another thread, and that one contends for the cores
        for a while.

        Args:
            record: see above.
            loops: whether this is traced inside of a loop.
        """
        of_step = [record.begin, record.batch_ready, record.execution_end]
        for replica, noted, end in zip(self._replicas, record.replicas, record.ends, strict=True):
            _write_row(replica, [end, *noted.present, *of_step], [end], loops=loops)
            of_step = []

    def write_sampled(self, record: StepRecord) -> None:
        """Add the record of a step of a loop on GPUs, for which the host waits in some steps only.

        What it records of its own is read before the step, or is known: the next step waits for nothing else of it.
        """
        of_step = [record.begin, record.batch_ready, record.execution_end]
        for replica, noted, clocks in zip(self._replicas, record.replicas, record.sampled, strict=True):
            assert replica.sampled is not None
            unknown = [_UNKNOWN] * (len(self._columns) - len(_OF_HOST))
            place = _write_row(replica, [_UNKNOWN, _UNKNOWN, noted.examples, *unknown, *of_step], (), loops=True)
            replica.sampled.write(place, noted.of_gpu, clocks)
            of_step = []

    def read(self) -> None:
        """Read the records of the executions that went well, but for those that were read before.

        Raises:
            RuntimeError: there are not as many as there were steps.
        """
        reading, self._reading = self._reading, _Reading()
        unread, self._first_unread = slice(self._first_unread, self._num_steps), self._num_steps
        with tf.init_scope():
            counts = [int(replica.length.value()) for replica in self._replicas]
            if min(counts) < self._num_steps:
                self._is_torn = True
                raise RuntimeError(
                    f"Of {self._num_steps} steps, replicas have left the records of {counts}: what ReplicaMonitor and "
                    "others would say is wrong. This is a fault of keras_dist_ext, please report it. Without these "
                    "callbacks nothing is recorded, and training continues."
                )
            reading.tables = [replica.read(unread) for replica in self._replicas]

    def named(self, tables: Sequence[Table]) -> BufferedSteps:
        """Return what tables of this buffer's replicas hold, [L][n, columns], by name."""
        of_replicas = np.stack([table[:, : len(self._columns)] for table in tables], axis=1)
        values = dict(zip(self._columns, np.moveaxis(of_replicas, 2, 0), strict=True))
        of_step = dict(zip(_OF_STEP, tables[0][:, len(self._columns) :].T, strict=True))
        return BufferedSteps(**{"gradient_norm": None, **values, **of_step})

    def _rewind(self) -> None:
        """Begin anew, with no records."""
        if self._first_unread < self._num_steps:
            self.read()
        self._num_steps = self._first_unread = 0
        with tf.init_scope():
            for replica in self._replicas:
                with tf.device(replica.host):
                    replica.length.assign(np.int32(0))
                if replica.sampled is not None:
                    replica.sampled.forget()


class _ReplicaTable(NamedTuple):
    """Where a replica's records are, on a device."""

    host: str
    table: NamedVariable
    length: NamedVariable  # how many there are
    sampled: SampledTable | None

    def read(self, part: slice) -> Table:
        """Read some of its records."""
        table: Table = self.table.value().numpy()[part]
        if self.sampled is not None:
            self.sampled.fill(table, part, len(_OF_HOST))
        return table


def _write_row(
    replica: _ReplicaTable, numbers: Sequence[tf.Tensor], after: Sequence[tf.Tensor], *, loops: bool
) -> tf.Tensor:
    """Add a row to a replica's table, after something; return its place."""
    with tf.device(replica.host), tf.control_dependencies(after):
        row = tf.stack([tf.cast(number, tf.float64) for number in numbers])
        table, length = (
            variable.handle if loops or tf.executing_eagerly() else variable.handle_in_graph()
            for variable in (replica.table, replica.length)
        )
        place = tf.raw_ops.ResourceCountUpTo(resource=length, limit=MAX_STEPS, T=tf.int32)
        tf.raw_ops.ResourceScatterUpdate(resource=table, indices=place, updates=row)
    return place


_UNKNOWN = np.float64("nan")


class _Reading:
    """What is read of a buffer at once, if it is read already: the tables of the L replicas."""

    __slots__ = ("tables",)

    def __init__(self) -> None:
        self.tables: list[Table] | None = None


class BufferSlice:
    """The records of executions, in the buffer or read.

    Args:
        buffer: where they are.

    Attributes:
        reading: what they are read with.
        first: the place of their first step in that.
        num_steps: n.
    """

    __slots__ = ("_buffer", "first", "num_steps", "reading")

    def __init__(self, buffer: StepBuffer, reading: _Reading, first: int, num_steps: int) -> None:
        self.num_steps = num_steps
        self._buffer = buffer
        self.reading = reading
        self.first = first

    def extend(self, buffer: StepBuffer, num_steps: int) -> bool:
        """Take in the last steps of a buffer, those of the last execution, if they follow directly; say whether."""
        last = buffer.last(num_steps)
        follows = self.reading is last.reading and self.first + self.num_steps == last.first
        if follows:
            self.num_steps += num_steps
        return follows

    @property
    def steps(self) -> BufferedSteps:
        """What is recorded of them."""
        if self.reading.tables is None:
            self._buffer.read()
        assert self.reading.tables is not None
        return self._buffer.named([table[self.first : self.first + self.num_steps] for table in self.reading.tables])
