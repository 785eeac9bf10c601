"""What a launch needs of the place where its processes run: this machine, or a cluster."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

from keras_dist_ext.cluster.heartbeat import Heartbeat
from keras_dist_ext.cluster.placing import PlacingSteps
from keras_dist_ext.cluster.worker_count import WorkerCount
from keras_dist_ext.errors import LaunchError

__all__ = ["Host", "HostedProcess", "NotStarted", "State", "ValueLost"]


class NotStarted(LaunchError):
    """A process cannot be started, of which others might run: the system has no room for it."""


class ValueLost(Exception):
    """What a function returned was lost with the place where it ran; the text says why."""


class State(NamedTuple):
    """What is known of a process without asking it."""

    exit_code: int | None = None  # as subprocess has it, -n for signal n; None while it runs
    failure_code: int | None = None  # known before the end where a function fails, or a script by an exception
    heartbeat: Heartbeat = Heartbeat()  # what it has reported last
    lost: str = ""  # why it was lost with the place where it ran
    silent_seconds: float = 0.0  # since that place has not answered, where it should have


class HostedProcess(Protocol):
    """One process, in a session of its own."""

    def poll(self) -> State:
        """Return its state."""

    @property
    def is_stopped(self) -> bool:
        """Whether it is held by a signal such as SIGSTOP, as far as is known without asking."""

    def cpu_seconds(self) -> float:
        """Return how much of the CPU it has used."""

    def ask(self, signum: int) -> None:
        """Ask it to end: the process that trains, so that it can save, or else all of its session."""

    def send(self, signum: int) -> None:
        """Send a signal to all of its session, unless it has ended."""

    def ask_to_leave(self) -> bool:
        """Have it save and end at its next checkpoint; False if it could not be asked."""

    def ask_for_stacks(self) -> bool:
        """Have it write its stacks; False if it cannot."""

    def stacks(self) -> str:
        """Return those that it has written so far."""

    def value(self) -> bytes:
        """Return what its function returned, pickled.

        Raises:
            FileNotFoundError: it ended before the function returned.
            ValueLost: the place where it ran has died since, or does not answer.
        """


class Host(Protocol):
    """Runs the processes that start and end together. Leaving its context ends them, and whatever they have started."""

    def __enter__(self) -> "Host": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def reserve(self, workers: WorkerCount, num_ps: int) -> PlacingSteps:
        """Give each task of a cluster a place, and an address that stays its own.

        Yields what is missing, in words, as long as there is no place for all; clusters grow. Whoever asks waits
        between two looks, or gives up.

        Args:
            workers: how many: as many as there are places for, the least of them in any case.
            num_ps: how many parameter servers.

        Raises:
            LaunchError: there is not enough for all, on this machine.
            NotPlaced: a place is none, such as a node without this package (see `failure`).
        """

    def has_more_places(self) -> bool:
        """Whether there are places for more workers by now, and more are wanted."""

    def start(
        self, name: str, work: Sequence[str] | bytes | None, environ: Mapping[str, str], cpus: Sequence[int]
    ) -> HostedProcess:
        """Start a process that runs a command, a packed call, or (None) TensorFlow's server; or begin to.

        Args:
            name: such as "worker 0".
            work: see above.
            environ: its environment.
            cpus: that it may use; none for all.

        Raises:
            NotStarted: the system starts no further one now.
            LaunchError: it cannot be started.
        """

    def read(self, seconds: float) -> Sequence[tuple[HostedProcess, bytes]]:
        """Wait so long for output, and return what processes have printed; nothing at its end.

        Raises:
            LaunchError: one cannot be started.
        """

    def foresee_end(self) -> None:
        """See what all processes have started, before they end."""
