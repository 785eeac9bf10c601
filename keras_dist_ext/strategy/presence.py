"""Answer other workers that ask where this one is, and tell them when its program has ended.

A worker that waits for the others sees no more of them than that they do not come: whether they compute, read slow
data or have ended. So each has a thread that answers where its program is, and stores a last word when that ends. The
first worker holds what all store, so it stays, at its end, until the others have read its last word, two seconds at
most.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import tensorflow as tf

from keras_dist_ext.errors import WorkersError
from keras_dist_ext.strategy.key_value import KeyValueStore, StoreSilent
from keras_dist_ext.strategy.prompt_exit import exit_promptly

__all__ = ["ExitNotice", "Presence", "line_of"]

_LOOK_SECONDS = 0.5
_LINGER_SECONDS = 2.0
_ANSWER_SECONDS = 3.0
_LEADER = 0  # the worker whose process holds what all store
_ENDED, _HEARD, _ASK, _PLACE, _FAILED = "ended", "ended-heard", "ask", "place", "failed"


class ExitNotice(NamedTuple):
    """What a worker has stored when its program ended, or one of its runs by an error."""

    number: int  # of waits in which all the others have come
    what: str  # "has ended", or how it has failed


class Presence:
    """What this worker tells others of itself, and what it knows of them.

    Args:
        store: of the workers.

    Attributes:
        num_waits: how many waits of this worker are over.
        wait: what it waits in now, such as "step 5 of training"; empty where it does not wait.
        cause: which workers were lost, if this one has found that: what its own failure is due to.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._round = 0
        self._ended: dict[int, ExitNotice] = {}
        self._has_ended = False
        self._failure = ""
        self._failed: dict[int, tuple[int, ExitNotice | None]] = {}  # how much others have told, and the last
        self._num_told = 0  # failures of runs, and that another run has begun
        self._failed_after = -1  # so many waits, by the last failure
        self._is_to_recover = False
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.num_waits = 0
        self.wait = ""
        self.cause = ""

    def begin(self) -> None:
        """Answer from here on until the program ends, and say so then."""
        threading.Thread(target=self._answer, daemon=True, name="keras_dist_ext.presence").start()
        atexit.register(_end, weakref.ref(self))
        _announce_failures(weakref.ref(self))

    def end(self) -> None:
        """Store the last word of this worker."""
        self._over.set()
        if self._has_ended:
            return
        self._has_ended = True
        if self._store.is_silent:  # nobody would hear it
            return
        with contextlib.suppress(Exception):  # the cluster is gone
            self._store.set(_ENDED, json.dumps([self.num_waits, self._failure or "has ended"]))
            deadline = time.monotonic() + _LINGER_SECONDS
            left = list(self._store.others) if self._store.index == _LEADER else []
            while left and time.monotonic() < deadline:
                left = [worker for worker in left if not self._has_heard(worker)]
                time.sleep(0.02)

    def note_failure(self, kind: type[BaseException], trace: TracebackType | None) -> None:
        """Note the exception that ends this worker's program."""
        self._failure = f"has failed with {kind.__name__}{_line_in(traceback.extract_tb(trace))}"
        if issubclass(kind, WorkersError) and self.cause:
            self._failure += f", since {self.cause}"

    def leave_run(self, error: Exception) -> None:
        """Tell the others that this worker has left a run by an error, whatever its program does then."""
        if self._is_to_recover:  # a run within a run has told
            return
        what = f"has left its run with {type(error).__name__}{_line_in(traceback.extract_tb(error.__traceback__))}"
        first_line = str(error).strip().partition("\n")[0]
        self._failed_after, self._is_to_recover = self.num_waits, True
        self._tell(json.dumps([self.num_waits, f"{what}: {first_line[:300]}" if first_line else what]))

    def begin_wait(self) -> None:
        """Tell the others, if it had left a run, that it waits for them again."""
        if self._is_to_recover:
            self._is_to_recover = False
            self._tell("-")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception):  # the cluster is gone
            self._store.set(f"{_FAILED}/{self._num_told}", text)
        self._num_told += 1

    def failure_of(self, worker: int) -> ExitNotice | None:
        """Return how another worker has left its run; None where it has not, or this one has as well."""
        number, last = self._failed.get(worker, (0, None))
        while (text := self._store.get(f"{_FAILED}/{number}", worker, 0.01)) is not None:
            number, last = number + 1, None if text == "-" else ExitNotice(*json.loads(text))
        self._failed[worker] = number, last
        return None if last is None or last.number <= self._failed_after else last

    def end_of(self, worker: int) -> ExitNotice | None:
        """Return the last word of another worker; None where it has stored none."""
        if worker not in self._ended:
            text = self._store.get(_ENDED, worker, 0.01)
            if text is not None:
                self._ended[worker] = ExitNotice(*json.loads(text))
        return self._ended.get(worker)

    def ask(self, workers: list[int]) -> dict[int, str]:
        """Return where the programs of some workers are, of those that answer in time."""
        number = self._round
        self._store.set_for_all(f"{_ASK}/{number}", "-")
        self._say(number)  # in this round others may ask, too
        deadline = time.monotonic() + _ANSWER_SECONDS
        found: dict[int, str] = {}
        while len(found) < len(workers) and time.monotonic() < deadline:
            for worker in workers:
                if worker not in found:
                    place = self._store.get(f"{_PLACE}/{number}", worker, 0.01)
                    if place is not None:
                        found[worker] = place
            time.sleep(0.02)
        return found

    def _has_heard(self, worker: int) -> bool:
        return self.end_of(worker) is not None or self._store.get(_HEARD, worker, 0.01) is not None

    def _answer(self) -> None:
        """Look now and then whether somebody asks, whether the first worker has ended, and, on it, who is silent."""
        with contextlib.suppress(Exception):  # the cluster is gone
            while not self._over.wait(_LOOK_SECONDS):
                with contextlib.suppress(StoreSilent):
                    self._answer_once()

    def _answer_once(self) -> None:
        if self._store.index == _LEADER:
            with contextlib.suppress(tf.errors.OpError):
                self._store.publish_silent()
        elif _LEADER not in self._ended and self.end_of(_LEADER) is not None:
            self._store.set(_HEARD, "-")
        if self._store.get_for_all(f"{_ASK}/{self._round}", 0.01) is not None:
            self._say(self._round)

    def _say(self, number: int) -> None:
        """Answer in a round of questions, and await the next one."""
        with self._lock:
            if self._round == number:
                with contextlib.suppress(tf.errors.AlreadyExistsError):  # by a request whose answer came too late
                    self._store.set(f"{_PLACE}/{number}", self._place())
                self._round += 1

    def _place(self) -> str:
        """Say where the main thread of this worker's program is."""
        thread = threading.main_thread().ident or 0
        line, wait = line_of(thread), self.wait
        if wait:
            return f"is in {wait}{line}"
        frames = _outwards(sys._current_frames().get(thread))
        if any(frame.f_code.co_filename.startswith(_READERS) for frame in frames):
            return f"reads its data{line}"
        return f"is elsewhere in its program{line}"


def _outwards(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def line_of(thread: int) -> str:
    """Name the line of the user's program that a thread is in; empty where there is none."""
    frame = sys._current_frames().get(thread)
    return _line_in(traceback.extract_stack(frame) if frame is not None else ())


def _line_in(calls: Sequence[traceback.FrameSummary]) -> str:
    for summary in reversed(calls):
        if not summary.filename.startswith(_NOT_USERS) and f"{os.sep}site-packages{os.sep}" not in summary.filename:
            return f" ({os.path.basename(summary.filename)}:{summary.lineno}, {summary.name})"
    return ""


_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_NOT_USERS = (_OURS, os.path.dirname(os.path.abspath(os.__file__)) + os.sep, "<")
_READERS = _OURS + os.path.join("training", "batch_reader")


def _end(presence: weakref.ref[Presence]) -> None:
    living = presence()
    if living is not None:
        living.end()


def _announce_failures(presence: weakref.ref[Presence]) -> None:
    """Have an exception that nobody caught be the last word, before the process ends: that may take a while."""
    before = sys.excepthook

    def announce(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        living = presence()
        if living is not None:
            if issubclass(kind, Exception):  # and no Ctrl-C, which has an exit code of its own
                exit_promptly()
            living.note_failure(kind, trace)
            living.end()

    sys.excepthook = announce
