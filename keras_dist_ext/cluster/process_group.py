"""Run the processes of one launch as one: started together, watched, ended together."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from keras_dist_ext.cluster.failure import Failure
from keras_dist_ext.cluster.host import Host, HostedProcess
from keras_dist_ext.cluster.placing import Placing
from keras_dist_ext.cluster.process import Process
from keras_dist_ext.cluster.worker_count import WorkerCount
from keras_dist_ext.errors import LaunchError

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """All processes of a launch. Leaving the context ends what still runs, and whatever that has started.

    Args:
        host: runs them; not entered yet.
        stream: shows their output; None: nothing does.
        log_dir: keeps their output.
        appends: whether logs keep what they have, from processes that ran before.
    """

    POLL_SECONDS = 0.05
    SETTLE_SECONDS = 0.3  # one that was killed is the cause, though others that fail with it may be seen before it
    DRAIN_SECONDS = 1.0  # for output, after the last process has ended: what it started may hold the pipe open
    STOPPED_SECONDS = 5.0  # by SIGSTOP, while others work: TensorFlow gives up a silent worker after ten
    LOOK_SECONDS = 0.5  # between looks at which are stopped
    PLACES_SECONDS = 1.0  # between looks for places for more workers
    KILL_SECONDS = 5.0  # SIGKILL acts at once, but on a process that is stuck in the kernel

    def __init__(
        self, host: Host, stream: IO[str] | None, log_dir: str | os.PathLike[str] | None, *, appends: bool = False
    ):
        self._host = host
        self.working: list[Process] = []  # those that run the user's command or function
        self.serving: list[Process] = []  # those that run TensorFlow's server
        self._stream = stream
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._appends = appends
        self._speaking: dict[HostedProcess, Process] = {}  # those whose output has not ended
        self._stopped: dict[Process, float] = {}  # and since when
        self._looked = self._looked_for_places = 0.0
        self._is_asked_to_leave = False

    @property
    def processes(self) -> list[Process]:
        """All processes, in the order in which they were started."""
        return self.working + self.serving

    def __enter__(self) -> "ProcessGroup":
        try:
            if self._log_dir:
                self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"log_dir={str(self._log_dir)!r} cannot be made: {error}") from error
        self._host.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._host.__exit__(None, None, None)
        for process in self.processes:
            process.close()

    def reserve(self, workers: WorkerCount, num_ps: int = 0) -> Placing:
        """Begin to give each task of a cluster a place and an address."""
        return Placing(self._host.reserve(workers, num_ps))

    def start(
        self, name: str, work: Sequence[str] | bytes | None, environ: Mapping[str, str], cpus: Sequence[int] = ()
    ) -> None:
        """Start a process that runs a command, a packed call, or (None) TensorFlow's server: see `Host.start`.

        Raises:
            LaunchError: it cannot be started, or its log cannot be written.
        """
        no_colour = "NO_COLOR" in environ or "NO_COLOR" in os.environ  # on Ray, environ is added to that of a node
        in_colour = self._stream is not None and self._stream.isatty() and not no_colour
        process = Process(
            name,
            lambda: self._host.start(name, work, environ, cpus),
            calls=isinstance(work, bytes),
            log=self._log_dir and self._log_dir / f"{name.replace(' ', '-')}.log",
            appends=self._appends,
            stream=self._stream,
            colour=31 + len(self.processes) % 6 if in_colour else 0,
        )
        (self.serving if work is None else self.working).append(process)
        self._speaking[process.hosted] = process

    def watch(
        self, signals: Sequence[int], deadline: float | None, hang_seconds: float | None = None
    ) -> Failure | None:
        """Pass output on until all work is done, or something is wrong.

        Args:
            signals: that have come in; a first one ends the watch, and so do
            deadline: a time of the monotonic clock that passes,
            hang_seconds: for which a process that works has finished no step,
                and a process that fails.
        """
        failed: dict[Process, float] = {}  # and when it was seen, in this order
        while True:
            self.pump()
            if signals:
                return Failure.by_signal(signals[0])
            running = [process for process in self.working if process.exit_code is None]
            for process in self.processes:
                if process.failure_code is not None or (process in self.serving and process.exit_code is not None):
                    failed.setdefault(process, time.monotonic())
            if failed:
                first = min(failed, key=lambda process: (process.exit_code or 0) >= 0)
                is_settled = time.monotonic() - failed[first] > self.SETTLE_SECONDS
                if is_settled or (first.exit_code or 0) < 0 or not running:
                    return Failure.of_process(first, [other for other in self.processes if other is not first])
                continue
            if not running:
                return None
            if deadline is not None and time.monotonic() > deadline:
                return Failure.by_time(running)
            held = self._held(running)
            if held is not None:
                return Failure.by_sigstop(held, self.STOPPED_SECONDS)
            if hang_seconds is not None and any(process.seconds_without_step > hang_seconds for process in running):
                return Failure.by_hang(self.working, hang_seconds)
            self._grow()

    def _held(self, running: Sequence[Process]) -> Process | None:
        """One that has been stopped for too long, while others work or have ended; all together may be a pause."""
        now = time.monotonic()
        if len(self.working) > 1 and now - self._looked > self.LOOK_SECONDS:
            self._looked = now
            self._stopped = {p: self._stopped.get(p, now) for p in running if p.is_stopped}
        some = 0 < len(self._stopped) < len(self.working)
        return next((p for p, since in self._stopped.items() if some and now - since > self.STOPPED_SECONDS), None)

    def _grow(self) -> None:
        """Where there are places for more workers, ask the first one to have all leave at the next checkpoint."""
        now = time.monotonic()
        if not self._is_asked_to_leave and now - self._looked_for_places > self.PLACES_SECONDS:
            self._looked_for_places = now
            first = self.working[0]
            if first.heartbeat.can_leave and self._host.has_more_places():
                self._is_asked_to_leave = first.hosted.ask_to_leave()

    @property
    def has_left(self) -> bool:
        """Whether all have ended well because they were asked to leave, to start again."""
        return self._is_asked_to_leave and all(
            process.exit_code == 0 and process.heartbeat.leaves for process in self.working
        )

    @property
    def has_made_steps(self) -> bool:
        """Whether one of its processes has reported steps that it has finished."""
        return any(process.heartbeat.number for process in self.working)

    def end(self, signals: Sequence[int], grace_seconds: float) -> list[Process]:
        """End what still runs, first the work and then the servers that it may need, and return what it was.

        A process gets the signal that came in, else SIGTERM, and SIGKILL after the grace or at a further signal.
        """
        running = [process for process in self.processes if process.exit_code is None and process.failure_code is None]
        self._host.foresee_end()
        self._end(self.working, signals[0] if signals else signal.SIGTERM, grace_seconds, signals)
        self._end(self.serving, signal.SIGKILL, 0, signals)
        deadline = time.monotonic() + self.DRAIN_SECONDS
        while self._speaking and time.monotonic() < deadline:
            self.pump()
        for process in self.processes:
            process.finish_output()
        return running

    def _end(self, processes: Sequence[Process], signum: int, grace_seconds: float, signals: Sequence[int]) -> None:
        for process in processes:
            if process.exit_code is None and process.failure_code is None:  # one that failed is ending by itself
                process.hosted.ask(signum)
        deadline, num_signals = time.monotonic() + grace_seconds, len(signals)
        while any(process.exit_code is None for process in processes):
            self.pump()
            if time.monotonic() > deadline or len(signals) > num_signals:
                for process in processes:
                    if process.exit_code is None:
                        process.hosted.send(signal.SIGKILL)
            if time.monotonic() > deadline + self.KILL_SECONDS:
                return

    def pump(self, seconds: float = POLL_SECONDS) -> None:
        """Pass on what the processes print, waiting so long for some of it, and see which have ended."""
        for hosted, data in self._host.read(seconds):
            self._speaking[hosted].take(data)
            if not data:
                del self._speaking[hosted]
        for process in self.processes:
            process.poll()
