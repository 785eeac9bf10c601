"""Report what this worker does, in a file that its launcher reads; where no launcher reads, report nothing.

A heartbeat is a few numbers in memory that both processes map: what the worker does, the steps it is in, the last one
it has finished, and a count that goes up with each. Writing it takes a microsecond and no system call. A signal has the
worker write its stacks beside it, even while it is stuck in TensorFlow.
"""

import contextlib
import enum
import faulthandler
import mmap
import os
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from keras_dist_ext import arguments
from keras_dist_ext.errors import LaunchError

__all__ = [
    "HEARTBEAT_FILE",
    "STACKS_SIGNAL",
    "Heartbeat",
    "Activity",
    "HeartbeatReader",
    "begin",
    "can_leave",
    "data_ends",
    "heartbeat",
    "is_asked_to_leave",
    "leaves",
    "make_heartbeat_file",
    "running",
    "stacks_path",
    "steps_begin",
    "steps_end",
    "waiting",
]

HEARTBEAT_FILE = "KERAS_DIST_EXT_HEARTBEAT"  # environment variable: the file of the worker that this process belongs to
STACKS_SIGNAL = getattr(signal, "SIGUSR1", 0)

_KINDS = ("train", "test", "predict")
_LAYOUT = struct.Struct("<11q")  # the fields of Heartbeat, which the worker writes
_REQUEST = struct.Struct("<q")  # behind them, which the launcher writes: 1: to leave, see `is_asked_to_leave`


class Activity(enum.IntEnum):
    """What a worker does."""

    STARTS = 0  # it has made no step yet
    STEPS = 1  # it is in the steps `first` to `last`
    BETWEEN = 2  # it has finished some, and has not begun others: callbacks, data, compilation
    NO_MORE_DATA = 3  # its epoch is over
    LEFT = 4  # it has left `fit`
    FAILED = 5  # an exception that nobody caught is about to end it


class Heartbeat(NamedTuple):
    """What a worker has reported last."""

    pid: int = 0  # of the process that writes for the worker; 0 = none has yet
    has_stacks: int = 0  # 1: STACKS_SIGNAL has it write its stacks
    number: int = 0  # goes up with every execution that ends
    activity: int = Activity.STARTS
    kind: int = 0  # of the steps, an index of _KINDS
    first: int = 0  # step of those that are under way, counted from 1 in this fit
    last: int = 0
    finished: int = 0  # steps of training, in this fit
    waits: int = 0  # 1: for numbers that all workers add up between steps
    can_leave: int = 0  # 1: it leaves at its next checkpoint if it is asked to
    leaves: int = 0  # 1: it was asked, has saved, and is about to end with exit code 0

    @property
    def trains(self) -> bool:
        """Whether the steps are of training, not of an evaluation or a prediction."""
        return _KINDS[self.kind] == "train"


def make_heartbeat_file(path: Path) -> None:
    """Make an empty file for a worker to write to.

    Raises:
        OSError: there is no room for it.
    """
    path.write_bytes(bytes(mmap.PAGESIZE))


class HeartbeatReader:
    """The launcher's end of the file that a worker writes to."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def read(self) -> Heartbeat:
        """Return what the worker has reported last."""
        return Heartbeat(*_LAYOUT.unpack_from(self._memory))

    def ask_to_leave(self) -> None:
        """Ask the worker to leave at its next checkpoint."""
        _REQUEST.pack_into(self._memory, _LAYOUT.size, 1)

    def close(self) -> None:
        """Close the file."""
        self._memory.close()


def stacks_path(heartbeat_file: Path) -> Path:
    """Return where the worker with this heartbeat writes its stacks."""
    return heartbeat_file.with_suffix(".stacks")


class HeartbeatWriter:
    """The worker's end."""

    def __init__(self, path: Path):
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.heartbeat = Heartbeat(*_LAYOUT.unpack_from(self._memory))

    def write(self, **changes: int) -> None:
        self.heartbeat = self.heartbeat._replace(**changes)
        _LAYOUT.pack_into(self._memory, 0, *self.heartbeat)

    @property
    def is_asked_to_leave(self) -> bool:
        return bool(*_REQUEST.unpack_from(self._memory, _LAYOUT.size))


_writer: HeartbeatWriter | None = None
_stacks: IO[bytes] | None = None  # kept open: the signal's handler writes to its descriptor
_num_running = 0


def begin() -> None:
    """Write for the worker from here on, if a launcher reads and no other living process of the worker writes."""
    global _writer
    path = os.environ.get(HEARTBEAT_FILE)
    if not path or _writer is not None:
        return
    with contextlib.suppress(OSError, ValueError):  # the launcher is gone, and this process is about to be
        writer = HeartbeatWriter(Path(path))
        other = writer.heartbeat.pid
        if other in (0, os.getpid()) or not _is_alive(other):
            writer.write(pid=os.getpid(), has_stacks=int(_offers_stacks(Path(path))))
            _writer = writer
            _announce_failures()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _offers_stacks(heartbeat_file: Path) -> bool:
    global _stacks
    if not STACKS_SIGNAL or signal.getsignal(STACKS_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
        return False  # the signal is the user's
    _stacks = stacks_path(heartbeat_file).open("ab", buffering=0)
    faulthandler.register(STACKS_SIGNAL, file=_stacks, all_threads=True)
    return True


def _announce_failures() -> None:
    """Report an uncaught exception when it is printed: the process may take many seconds to end.

    On its way out TensorFlow waits for the other workers, who then complain first and hide the cause.
    """
    before = sys.excepthook

    def announce(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        if _writer is not None and not issubclass(kind, KeyboardInterrupt):
            _writer.write(activity=Activity.FAILED)

    sys.excepthook = announce


def steps_begin(kind: str, first: int, num_steps: int) -> None:
    """Report that steps begin.

    Args:
        kind: train, test or predict.
        first: of them, counted from 1.
        num_steps: how many are made at once.
    """
    if _writer is not None:
        _writer.write(activity=Activity.STEPS, kind=_KINDS.index(kind), first=first, last=first + max(num_steps, 1) - 1)


def steps_end(num_made: int) -> None:
    """Report that the steps which were under way are finished.

    Args:
        num_made: how many there were.
    """
    if _writer is not None:
        heartbeat = _writer.heartbeat
        finished = heartbeat.first + num_made - 1 if heartbeat.trains else heartbeat.finished
        _writer.write(activity=Activity.BETWEEN, finished=finished, number=heartbeat.number + 1)


def data_ends() -> None:
    """Report that an epoch has no more steps."""
    if _writer is not None:
        _writer.write(activity=Activity.NO_MORE_DATA)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Report when the outermost of nested runs is over, however it ends."""
    global _num_running
    _num_running += 1
    try:
        yield
    finally:
        _num_running -= 1
        if _writer is not None and not _num_running:
            _writer.write(activity=Activity.LEFT)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Report that this worker waits for the others, between steps."""
    if _writer is None:
        yield
        return
    _writer.write(waits=1)
    try:
        yield
    finally:
        _writer.write(waits=0)


def can_leave(can: bool) -> None:
    """Report whether this worker would leave at its next checkpoint, so that the launcher can ask it to.

    An elastic launch asks when there is a place for one worker more: all save, end and start again with that many.
    """
    if _writer is not None:
        _writer.write(can_leave=int(can))


def is_asked_to_leave() -> bool:
    """Whether the launcher has asked this worker to leave at its next checkpoint."""
    return _writer is not None and _writer.is_asked_to_leave


def leaves() -> None:
    """Report that this worker has saved as it was asked to, and ends."""
    if _writer is not None:
        _writer.write(leaves=1)


def heartbeat(step: int) -> None:
    """Tell `launch` that a step is finished, in a loop that is neither ``fit`` nor ``TrainLoop``.

    ``launch(timeout=...)`` takes a worker that finishes no step for so long for one that hangs. It knows of the steps
    of ``kde.Model`` and ``kde.TrainLoop``; in another loop, call this after each step. Elsewhere it does nothing, and
    it costs next to nothing.

        >>> heartbeat(413)

    Args:
        step: that is finished, counted from 1: an integer, or a variable such as ``optimizer.iterations``.

    Raises:
        LaunchError: it is not an integer >= 0.
    """
    finished = arguments.integer("step", step, least=0, error=LaunchError)
    if _writer is not None:
        heartbeat = _writer.heartbeat
        _writer.write(activity=Activity.BETWEEN, kind=0, finished=finished, number=heartbeat.number + 1)
