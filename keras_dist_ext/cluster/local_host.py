"""Run processes on this machine, and leave none of them behind."""

import os
import selectors
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from keras_dist_ext.cluster import worker
from keras_dist_ext.cluster.cores import num_cores
from keras_dist_ext.cluster.heartbeat import (
    STACKS_SIGNAL,
    Activity,
    Heartbeat,
    HeartbeatReader,
    make_heartbeat_file,
    stacks_path,
)
from keras_dist_ext.cluster.host import NotStarted, State
from keras_dist_ext.cluster.orphans import Orphans
from keras_dist_ext.cluster.placing import PlacingSteps
from keras_dist_ext.cluster.tasks import cluster
from keras_dist_ext.cluster.worker_count import WorkerCount
from keras_dist_ext.errors import LaunchError

__all__ = ["LocalHost"]


class LocalHost:
    """Runs processes on this machine; see `Host`.

    A place for a worker is as many of the cores that this process may use as the worker has threads: where their number
    changes, as that of a container may, so does that of the places.

    Args:
        cores_per_worker: of a place.
        owns_process: whether this process does nothing else: all that it has started and not ended is the processes'.
    """

    BURY_SECONDS = 1.0  # between looks at which orphans have ended

    def __init__(self, *, cores_per_worker: int = 1, owns_process: bool = False) -> None:
        self._cores_per_worker, self._owns_process = cores_per_worker, owns_process
        self._workers, self._num_workers = WorkerCount(1, 1), 1  # that are wanted, and that have a place
        self._processes: list[LocalProcess] = []
        self._ports = ExitStack()
        self._selector = selectors.DefaultSelector()
        self._buried = 0.0

    def __enter__(self) -> "LocalHost":
        self._guard = _Guard(owns_process=self._owns_process)
        self._orphans = Orphans(owns_process=self._owns_process)
        self._orphans.add(self._guard.pid)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()
        self._selector.close()
        self._guard.close()
        self._orphans.end()
        self._ports.close()

    def reserve(self, workers: WorkerCount, num_ps: int) -> PlacingSteps:
        """Give each task a port of this machine, at once."""
        yield from ()
        self._workers, self._num_workers = workers, self._num_that_fit(workers)
        return self._ports.enter_context(cluster(self._num_workers, num_ps))

    def has_more_places(self) -> bool:
        """Whether there are cores for more workers by now, and more are wanted."""
        return self._num_that_fit(self._workers) > self._num_workers

    def _num_that_fit(self, workers: WorkerCount) -> int:
        return workers.fit(num_cores() // self._cores_per_worker)

    def start(
        self, name: str, work: Sequence[str] | bytes | None, environ: Mapping[str, str], cpus: Sequence[int]
    ) -> "LocalProcess":
        """Start a process."""
        file_name, outcome, heartbeat_file = name.replace(" ", "-"), None, None
        if work is None:
            program = worker.command_line("serve", cpus=cpus, owns_process=self._owns_process)
        else:
            heartbeat_file = self._guard.folder / f"{file_name}.heartbeat"
            if isinstance(work, bytes):
                outcome = self._guard.folder / f"{file_name}.value"
                mode, words = "call", [self._guard.file(work), str(outcome)]
            else:
                mode, words = "exec", [*work]
            program = worker.command_line(
                mode, *words, heartbeat_file=str(heartbeat_file), cpus=cpus, owns_process=self._owns_process
            )
            try:
                make_heartbeat_file(heartbeat_file)
            except OSError as error:
                raise _no_room(error, self._guard.folder.parent) from error
        try:
            process = LocalProcess(program, self._guard.marked(environ), outcome, heartbeat_file)
        except (OSError, ValueError) as error:  # too long, no more processes or files, a NUL in it
            kind = NotStarted if isinstance(error, OSError) else LaunchError
            raise kind(f"{name} cannot be started: {error}") from error
        self._processes.append(process)
        self._orphans.add(process.pid)
        self._guard.watch(process.pid)
        self._selector.register(process, selectors.EVENT_READ)
        return process

    def read(self, seconds: float) -> list[tuple["LocalProcess", bytes]]:
        """Return what processes have printed."""
        found = []
        for key, _ in self._selector.select(seconds):
            assert isinstance(key.fileobj, LocalProcess)
            found.append((key.fileobj, os.read(key.fd, 1 << 16)))
            if not found[-1][1]:
                self._selector.unregister(key.fileobj)
        if time.monotonic() - self._buried > self.BURY_SECONDS:
            self._buried = time.monotonic()
            self._orphans.reap()
        return found

    def foresee_end(self) -> None:
        """Have the guard see what all processes have started."""
        self._guard.look()


class LocalProcess:
    """One process of this machine; see `HostedProcess`. It has a `fileno`, so that selectors can wait for its output.

    Args:
        command: what to run.
        environ: its whole environment.
        outcome: where a function leaves its value, see `worker`; None for other commands.
        heartbeat_file: where it reports what it does, see `heartbeat`; None where nobody reads it.

    Raises:
        OSError: it cannot be started.
        ValueError: it cannot have this environment.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], outcome: Path | None, heartbeat_file: Path | None
    ):
        self._outcome, self._heartbeat_file = outcome, heartbeat_file
        self._state = State()
        self._reader = HeartbeatReader(heartbeat_file) if heartbeat_file else None
        self._popen = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._popen.stdout is not None
        self._pipe = self._popen.stdout

    @property
    def pid(self) -> int:
        """The process, its group and its session."""
        return self._popen.pid

    def fileno(self) -> int:
        """Return the descriptor of its output."""
        return self._pipe.fileno()

    def poll(self) -> State:
        """See whether it has ended or failed."""
        exit_code, failure_code, heartbeat, *_ = self._state
        if exit_code is not None:
            return self._state
        exit_code = self._popen.poll()
        if self._reader is not None:
            heartbeat = self._reader.read()
        if failure_code is None and self._outcome is not None:
            failure_code = worker.failed_code(self._outcome)
            if exit_code == 0 and not self._outcome.exists():
                failure_code = 1  # os._exit(0): the function never returned
        if failure_code is None and heartbeat.activity == Activity.FAILED and heartbeat.pid == self.pid:
            failure_code = 1  # an exception that nobody caught, of a script
        self._state = State(exit_code, failure_code or exit_code or None, heartbeat)
        return self._state

    @property
    def _heartbeat(self) -> Heartbeat:
        return self._state.heartbeat

    @property
    def _has_ended(self) -> bool:
        return self._state.exit_code is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it is held by a signal such as SIGSTOP."""
        import psutil

        try:
            return not self._has_ended and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def cpu_seconds(self) -> float:
        """Return how much of the CPU it has used."""
        import psutil

        try:
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        except psutil.Error:
            return 0.0

    def ask(self, signum: int) -> None:
        """Ask it to end: the process that trains, so that it can save, or else all of its group.

        What that process has started, such as workers that load its data, is needed until it has saved.
        """
        if not self._signal_trainer(signum):
            self.send(signum)

    def _signal_trainer(self, signum: int) -> bool:
        """Send a signal to the process that trains; whoever else has its process number by now is left alone."""
        pid = self._heartbeat.pid
        with suppress(OSError):
            if pid and not self._has_ended and os.getsid(pid) == self.pid:
                os.kill(pid, signum)
                return True
        return False

    def send(self, signum: int) -> None:
        """Send a signal to the process and those of its group, unless it has ended."""
        if not self._has_ended:
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses where Linux finds nothing
                os.killpg(self.pid, signum)

    def ask_to_leave(self) -> bool:
        """Have it save and end at its next checkpoint."""
        if self._reader is not None:
            self._reader.ask_to_leave()
        return self._reader is not None

    def ask_for_stacks(self) -> bool:
        """Have it write its stacks, if it can."""
        return bool(self._heartbeat.has_stacks) and not self.is_stopped and self._signal_trainer(STACKS_SIGNAL)

    def stacks(self) -> str:
        """Return those that it has written so far."""
        if self._heartbeat_file is None:
            return ""
        try:
            return stacks_path(self._heartbeat_file).read_text(errors="replace")
        except OSError:
            return ""

    def value(self) -> bytes:
        """Return what its function returned, pickled."""
        if self._outcome is None:
            raise FileNotFoundError
        return self._outcome.read_bytes()

    def close(self) -> None:
        """End the process if need be, and close what belongs to it."""
        self.send(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nothing more can be done
            self._popen.wait(5)
        self._pipe.close()
        if self._reader:
            self._reader.close()
            self._reader = None


def _no_room(error: OSError, folder: Path | None = None) -> LaunchError:
    """Say that the temporary folder cannot be used, or that there is none."""
    where = f" in {folder}" if folder else ""
    return LaunchError(
        f"The launch needs a small temporary folder for what passes between it and the workers, and cannot write one"
        f"{where}: {error.strerror or error}. Make room there, or set TMPDIR to another folder."
    )


class _Guard:
    """A process that ends what is left of a launch, and its temporary folder, when the launcher is done or dead.

    Attributes:
        folder: holds what passes between launcher and workers.
        pid: of the process.
    """

    def __init__(self, *, owns_process: bool) -> None:
        self._launch_id = uuid.uuid4().hex
        try:
            self.folder = Path(tempfile.gettempdir(), f"keras_dist_ext-{self._launch_id}")
        except OSError as error:
            raise _no_room(error) from error
        self._process = subprocess.Popen(
            worker.command_line("guard", self._launch_id, str(self.folder), owns_process=owns_process),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # it prints nothing, and its end is seen there
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe, self._end = self._process.stdin, self._process.stdout
        if owns_process:
            self._process.wait()
        try:
            self.folder.mkdir(mode=0o700)  # only now: if all ends before, as with a node of Ray's, nothing is left
        except OSError as error:
            self.close()
            raise _no_room(error, self.folder.parent) from error

    def file(self, call: bytes) -> str:
        """Put a packed call where the workers find it."""
        path = self.folder / "call"
        if not path.exists():
            try:
                path.write_bytes(call)
            except OSError as error:
                raise _no_room(error, self.folder.parent) from error
        return str(path)

    def marked(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment by which a process is found that leaves its session."""
        outer = environ.get(worker.LAUNCH_IDS, "")
        return {**environ, worker.LAUNCH_IDS: f"{outer} {self._launch_id}".strip()}

    def watch(self, session: int) -> None:
        """Have all processes of a session ended."""
        self._pipe.write(f"{session}\n".encode())

    def look(self) -> None:
        """Have it see what all processes have started, before they end."""
        with suppress(OSError):
            self._pipe.write(b"\n")

    def close(self) -> None:
        """Have all ended now, and wait for it."""
        self._pipe.close()
        with self._end:
            self._end.read()
        self._process.wait()
