"""Start one process in a session of its own, read what it prints line by line, and end it."""

import codecs
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from keras_dist_ext.cluster.heartbeat import Activity, Heartbeat, HeartbeatReader
from keras_dist_ext.cluster.worker import failed_code
from keras_dist_ext.errors import LaunchError

__all__ = ["Process", "show", "code_text"]


class Process:
    """One process of a launch. It has a `fileno`, so that selectors can wait for its output.

    Args:
        name: "worker 0"; each line that is shown starts with it.
        command: what to run.
        environ: its whole environment.
        outcome: where a function leaves its value, see `worker`; None for other commands.
        log: keeps the output, byte for byte.
        appends: whether the log keeps what it has.
        stream: shows the output.
        colour: an ANSI colour for the name, 0 for none.
        heartbeat_file: where the process reports what it does, see `heartbeat`; None where nobody reads it.

    Raises:
        LaunchError: it cannot be started, or the log cannot be opened.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        outcome: Path | None = None,
        log: Path | None = None,
        appends: bool = False,
        stream: IO[str] | None = None,
        colour: int = 0,
        heartbeat_file: Path | None = None,
    ):
        self.name, self.outcome, self.log, self.heartbeat_file = name, outcome, log, heartbeat_file
        self.exit_code: int | None = None  # as subprocess has it, -n for signal n; None while it runs
        self.failure_code: int | None = None  # known before the end where a function fails
        self.seconds = 0.0
        self.heartbeat = Heartbeat()  # what it has reported last
        self._reader = HeartbeatReader(heartbeat_file) if heartbeat_file else None
        self._log = _Log(log, appends) if log else None
        self._lines = _Lines(f"\x1b[{colour}m[{name}]\x1b[0m " if colour else f"[{name}] ", stream)
        self._started = self._spoke = self._last_step = time.monotonic()
        try:
            self._popen = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # too long, no more processes or files, a NUL in it
            raise LaunchError(f"{name} cannot be started: {error}") from error
        assert self._popen.stdout is not None
        self._pipe = self._popen.stdout

    @property
    def pid(self) -> int:
        """The process, its group and its session."""
        return self._popen.pid

    def fileno(self) -> int:
        """Return the descriptor of its output."""
        return self._pipe.fileno()

    def read(self) -> bool:
        """Take what it has printed; False when its output has ended."""
        data = os.read(self.fileno(), 1 << 16)
        if data:
            self._spoke = time.monotonic()
        if self._log:
            self._log.write(data)
        self._lines.add(data)
        return bool(data)

    def poll(self) -> None:
        """See whether it has ended or failed."""
        if self.exit_code is not None:
            return
        self.exit_code = self._popen.poll()
        self.seconds = time.monotonic() - self._started
        self._read_heartbeat()
        if self.failure_code is None and self.outcome is not None:
            self.failure_code = failed_code(self.outcome)
            if self.exit_code == 0 and not self.outcome.exists():
                self.failure_code = 1  # os._exit(0): the function never returned
        if self.failure_code is None and self.heartbeat.activity == Activity.FAILED and self.heartbeat.pid == self.pid:
            self.failure_code = 1  # an exception that nobody caught, of a script
        self.failure_code = self.failure_code or self.exit_code or None

    def _read_heartbeat(self) -> None:
        if self._reader is not None:
            heartbeat, self.heartbeat = self.heartbeat, self._reader.read()
            if heartbeat.number != self.heartbeat.number:
                self._last_step = time.monotonic()

    @property
    def seconds_without_step(self) -> float:
        """How long ago it finished a step, or began."""
        return time.monotonic() - self._last_step

    def ask(self, signum: int) -> None:
        """Ask it to end: the process that trains, so that it can save, or else all of its group.

        What that process has started, such as workers that load its data, is needed until it has saved.
        """
        pid = self.heartbeat.pid
        with suppress(OSError):
            if pid and self.exit_code is None and os.getsid(pid) == self.pid:
                os.kill(pid, signum)
                return
        self.send(signum)

    def send(self, signum: int) -> None:
        """Send a signal to the process and those of its group, unless it has ended."""
        if self.exit_code is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses where Linux finds nothing
                os.killpg(self.pid, signum)

    @property
    def doing(self) -> str:
        """Say what it did last: its last line and how long ago that was."""
        if not self._lines.last:
            return f"{self.name} printed nothing"
        return f"{self.name}, silent for {time.monotonic() - self._spoke:.1f} s, last printed: {self._lines.last}"

    @property
    def last_lines(self) -> tuple[str, ...]:
        """Its last traceback and what came after, or its last lines."""
        return self._lines.tail()

    def close(self) -> None:
        """End the process if need be, and close what belongs to it."""
        self.send(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nothing more can be done
            self._popen.wait(5)
        self._pipe.close()
        if self._reader:
            self._reader.close()
            self._reader = None
        if self._log:
            self._log.close()

    def finish_output(self) -> None:
        """Show a last line that has no newline."""
        self._lines.end()


class _Log:
    """A file that takes what it is given; when it can no longer, it says so once, naming the log."""

    def __init__(self, path: Path, appends: bool):
        self._fails = False
        try:
            self._file = path.open("ab" if appends else "wb", buffering=0)
        except OSError as error:
            raise LaunchError(f"The log {path} cannot be written: {error.strerror}") from error

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            if not self._fails:
                self._fails = True
                _notice(
                    f"The log {self._file.name} cannot be written ({error.strerror}). The workers continue, and "
                    "their output is missing in the log until there is room."
                )

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


class _Lines:
    """Cut bytes into lines, show each with a prefix, and remember the last."""

    LONGEST = 1 << 16  # characters; a longer line is shown in pieces
    KEPT = 200

    def __init__(self, prefix: str, stream: IO[str] | None):
        self._prefix, self._stream = prefix, stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""
        self._kept: deque[str] = deque(maxlen=self.KEPT)

    def add(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + self._decode(data)).split("\n")
        if len(self._rest) > self.LONGEST:
            lines, self._rest = [*lines, self._rest], ""
        self._show(lines)

    def end(self) -> None:
        rest, self._rest = self._rest + self._decode(b"", True), ""
        self._show([rest] if rest else [])

    def _show(self, lines: list[str]) -> None:
        # A progress bar writes one line many times over: its last state counts.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        self._kept.extend(lines)
        if self._stream and lines:
            show("".join(f"{self._prefix}{line}\n" for line in lines), self._stream)

    @property
    def last(self) -> str:
        return next((line.strip() for line in (self._rest, *reversed(self._kept)) if line.strip()), "")

    def tail(self) -> tuple[str, ...]:
        """Return the last traceback, with those it came from, to the end; without one, the last 20 lines."""
        lines = list(self._kept)
        first = len(lines)
        for i in reversed(range(len(lines))):
            if lines[i].startswith("Traceback (most recent call last)"):
                first = i
                if not any("exception" in line and line.endswith(":") for line in lines[max(0, i - 2) : i]):
                    break
        return tuple(lines[first:] or lines[-20:])


def show(text: str, stream: IO[str]) -> None:
    """Write text to a stream now, with escapes for what its encoding lacks.

    A stream that cannot be written, as on a full disk, does not end a launch: the text is lost, and it is said once.

    Raises:
        BrokenPipeError: nobody reads it any more.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if id(stream) not in _failing:
            _failing.add(id(stream))
            _notice(
                f"The output cannot be shown ({error.strerror}). The workers continue, and their output is lost until "
                "there is room; --log-dir keeps it on another disk."
            )


_failing: set[int] = set()  # streams of which it was said


def _notice(text: str) -> None:
    with suppress(OSError, ValueError):
        print(f"launch: {text}", file=sys.stderr, flush=True)  # noqa: T201 - where users look when output fails


def code_text(code: int) -> str:
    """Name an exit code as subprocess has it: "exit code 3", "SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
