"""Run the processes of one launch as one: started together, watched, ended together."""

import os
import selectors
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from keras_dist_ext.errors import LaunchError
from keras_dist_ext.processes import worker
from keras_dist_ext.processes.process import Process, code_text

__all__ = ["Generation", "Failure"]


class Generation:
    """All processes of a launch. Leaving the context ends what still runs, and whatever that has started.

    Args:
        stream: shows their output; None: nothing does.
        log_dir: keeps their output.
    """

    POLL_SECONDS = 0.05
    DRAIN_SECONDS = 1.0  # for output, after the last process has ended: what it started may hold the pipe open
    KILL_SECONDS = 5.0  # SIGKILL acts at once, but on a process that is stuck in the kernel

    def __init__(self, stream: IO[str] | None, log_dir: str | os.PathLike[str] | None):
        self.working: list[Process] = []  # those that run the user's command or function
        self.serving: list[Process] = []  # those that run TensorFlow's server
        self._stream = stream
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._selector = selectors.DefaultSelector()

    @property
    def processes(self) -> list[Process]:
        """All processes, in the order in which they were started."""
        return self.working + self.serving

    def __enter__(self) -> "Generation":
        try:
            if self._log_dir:
                self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"log_dir={str(self._log_dir)!r} cannot be made: {error}") from error
        self._guard = _Guard()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.close()
        self._selector.close()
        self._guard.close()

    def start(self, name: str, work: Sequence[str] | bytes | None, environ: Mapping[str, str]) -> None:
        """Start a process that runs a command, a packed call, or (None) TensorFlow's server.

        Raises:
            LaunchError: its log cannot be written.
        """
        file_name, outcome = name.replace(" ", "-"), None
        if work is None:
            program = worker.command_line("serve")
        elif isinstance(work, bytes):
            outcome = self._guard.folder / f"{file_name}.value"
            program = worker.command_line("call", self._guard.file(work), str(outcome))
        else:
            program = worker.command_line("exec", *work)
        in_colour = self._stream is not None and self._stream.isatty() and "NO_COLOR" not in environ
        process = Process(
            name,
            program,
            self._guard.marked(environ),
            outcome=outcome,
            log=self._log_dir and self._log_dir / f"{file_name}.log",
            stream=self._stream,
            colour=31 + len(self.processes) % 6 if in_colour else 0,
        )
        (self.serving if work is None else self.working).append(process)
        self._guard.watch(process.pid)
        self._selector.register(process, selectors.EVENT_READ)

    def watch(self, signals: Sequence[int], deadline: float | None) -> "Failure | None":
        """Pass output on until all work is done, or a process fails, the time limit passes or a signal comes in."""
        while True:
            self._pump()
            if signals:
                return Failure.by_signal(signals[0])
            for process in self.processes:
                if process.failure_code is not None or (process in self.serving and process.exit_code is not None):
                    return Failure.of_process(process, len(self.processes) - 1)
            running = [process for process in self.working if process.exit_code is None]
            if not running:
                return None
            if deadline is not None and time.monotonic() > deadline:
                return Failure.by_time(running)

    def end(self, signals: Sequence[int], grace_seconds: float) -> list[Process]:
        """End what still runs, first the work and then the servers that it may need, and return what it was.

        A process gets the signal that came in, else SIGTERM, and SIGKILL after the grace or at a further signal.
        """
        running = [process for process in self.processes if process.exit_code is None and process.failure_code is None]
        self._end(self.working, signals[0] if signals else signal.SIGTERM, grace_seconds, signals)
        self._end(self.serving, signal.SIGKILL, 0, signals)
        deadline = time.monotonic() + self.DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < deadline:
            self._pump()
        for process in self.processes:
            process.finish_output()
        return running

    def _end(self, processes: Sequence[Process], signum: int, grace_seconds: float, signals: Sequence[int]) -> None:
        for process in processes:
            if process.failure_code is None:  # one that failed is ending by itself
                process.send(signum)
        deadline, num_signals = time.monotonic() + grace_seconds, len(signals)
        while any(process.exit_code is None for process in processes):
            self._pump()
            if time.monotonic() > deadline or len(signals) > num_signals:
                for process in processes:
                    process.send(signal.SIGKILL)
            if time.monotonic() > deadline + self.KILL_SECONDS:
                return

    def _pump(self) -> None:
        for key, _ in self._selector.select(self.POLL_SECONDS):
            if isinstance(key.fileobj, Process) and not key.fileobj.read():
                self._selector.unregister(key.fileobj)
        for process in self.processes:
            process.poll()


class _Guard:
    """A process that ends what is left of a launch, and its temporary folder, when the launcher is done or dead."""

    def __init__(self) -> None:
        self._launch_id = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="keras_dist_ext-"))  # what passes between launcher and workers
        self._process = subprocess.Popen(
            worker.command_line("guard", self._launch_id, str(self.folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def file(self, call: bytes) -> str:
        """Put a packed call where the workers find it."""
        path = self.folder / "call"
        if not path.exists():
            path.write_bytes(call)
        return str(path)

    def marked(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment by which a process is found that leaves its session."""
        outer = environ.get(worker.LAUNCH_IDS, "")
        return {**environ, worker.LAUNCH_IDS: f"{outer} {self._launch_id}".strip()}

    def watch(self, session: int) -> None:
        """Have all processes of a session ended."""
        self._pipe.write(f"{session}\n".encode())

    def close(self) -> None:
        """Have all ended now, and wait for it."""
        self._pipe.close()
        self._process.wait()


@dataclass(frozen=True)
class Failure:
    """Why a launch did not come to its end."""

    exit_code: int  # of the launch: positive, 128 + n for signal n
    reason: str
    process: Process | None = None  # the one that failed first

    @classmethod
    def by_signal(cls, signum: int) -> "Failure":
        """A signal came to the launcher."""
        return cls(128 + signum, f"{signal.Signals(signum).name} ended the launch.")

    @classmethod
    def by_time(cls, running: Sequence[Process]) -> "Failure":
        """The time limit passed while these worked."""
        doing = "".join(f"\n  {process.doing}" for process in running)
        return cls(
            124,  # as timeout(1) has it
            f"The time limit passed, and the launch ended what still ran:{doing}\n"
            "Give more time if they were busy. If all were silent, they wait for one another.",
        )

    @classmethod
    def of_process(cls, process: Process, num_others: int) -> "Failure":
        """A process failed, or a server ended before the work did."""
        code = process.failure_code or 0
        reason = f"{process.name} failed with {code_text(code)}"
        if code == -signal.SIGKILL:
            reason += ", which the launch did not send; often it means that memory ran out (see dmesg)"
        elif process.exit_code == 0:
            reason = f"{process.name} ended before {'its function returned' if process.outcome else 'the chief did'}"
        others = {0: "", 1: " The launch ended the other process."}
        return cls(
            max(code, 1) if code >= 0 else 128 - code,
            f"{reason}." + others.get(num_others, f" The launch ended the other {num_others} processes."),
            process,
        )

    @property
    def message(self) -> str:
        """The reason and the last lines of the process; complete once it has ended."""
        if self.process is None:
            return self.reason
        if not self.process.last_lines:
            return f"{self.reason} It printed nothing."
        log = f" (all of them are in {self.process.log})" if self.process.log else ""
        lines = "".join(f"\n  [{self.process.name}] {line}" for line in self.process.last_lines)
        return f"{self.reason} Its last lines{log}:{lines}"
