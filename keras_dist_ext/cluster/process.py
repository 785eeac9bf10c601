"""One process of a launch: what it prints, line by line, and what is known of it."""

import codecs
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from keras_dist_ext.aliases import Picklable
from keras_dist_ext.cluster import worker
from keras_dist_ext.cluster.heartbeat import Heartbeat
from keras_dist_ext.cluster.host import HostedProcess, State
from keras_dist_ext.errors import LaunchError

__all__ = ["Process", "show", "code_text"]


class Process:
    """One process of a launch, wherever it runs: what it has printed and done, and since when.

    Args:
        name: "worker 0"; each line that is shown starts with it.
        start: starts it.
        calls: whether it runs a function.
        log: keeps the output, byte for byte.
        appends: whether the log keeps what it has.
        stream: shows the output.
        colour: an ANSI colour for the name, 0 for none.

    Raises:
        LaunchError: it cannot be started, or the log cannot be opened.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], HostedProcess],
        *,
        calls: bool = False,
        log: Path | None = None,
        appends: bool = False,
        stream: IO[str] | None = None,
        colour: int = 0,
    ):
        self.name, self.calls, self.log = name, calls, log
        self.seconds = 0.0
        self._state = State()
        self._log = _Log(log, appends) if log else None
        self._lines = _Lines(f"\x1b[{colour}m[{name}]\x1b[0m " if colour else f"[{name}] ", stream)
        self._started = self._spoke = self._last_step = time.monotonic()
        self.hosted = start()

    @property
    def exit_code(self) -> int | None:
        """As subprocess has it, -n for signal n; None while it runs."""
        return self._state.exit_code

    @property
    def failure_code(self) -> int | None:
        """The exit code of a failure; known before the end where a function fails."""
        return self._state.failure_code

    @property
    def heartbeat(self) -> Heartbeat:
        """What it has reported last."""
        return self._state.heartbeat

    @property
    def lost(self) -> str:
        """Why it was lost with the place where it ran; nothing if it was not."""
        return self._state.lost

    @property
    def silent_seconds(self) -> float:
        """For how long the place where it runs has not answered."""
        return self._state.silent_seconds

    def take(self, data: bytes) -> None:
        """Take what it has printed; nothing at the end of its output."""
        if data:
            self._spoke = time.monotonic()
        if self._log:
            self._log.write(data)
        self._lines.add(data)

    def poll(self) -> None:
        """See whether it has ended or failed."""
        if self.exit_code is not None:
            return
        before, self._state = self._state, self.hosted.poll()
        self.seconds = time.monotonic() - self._started
        if before.heartbeat.number != self.heartbeat.number:
            self._last_step = time.monotonic()

    @property
    def seconds_without_step(self) -> float:
        """How long ago it finished a step, or began."""
        return time.monotonic() - self._last_step

    @property
    def is_stopped(self) -> bool:
        """Whether it is held by a signal such as SIGSTOP: the others see no more of it than that it is silent."""
        return self.exit_code is None and self.hosted.is_stopped

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

    def value(self) -> Picklable:
        """Return what its function returned.

        Raises:
            FileNotFoundError: it ended before the function returned.
            ValueLost: the place where it ran has died since, or does not answer.
        """
        return worker.read_value(self.hosted.value())

    def close(self) -> None:
        """Close what is here of it."""
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
    LONGEST_KEPT = 4000  # characters; a message that shows last lines is to be read

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
        self._kept.extend(self._shortened(line) for line in lines)
        if self._stream and lines:
            show("".join(f"{self._prefix}{line}\n" for line in lines), self._stream)

    def _shortened(self, line: str) -> str:
        left = len(line) - self.LONGEST_KEPT
        return line if left <= 0 else f"{line[: self.LONGEST_KEPT]}... ({left} characters more)"

    @property
    def last(self) -> str:
        return next((line.strip() for line in (self._shortened(self._rest), *reversed(self._kept)) if line.strip()), "")

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
