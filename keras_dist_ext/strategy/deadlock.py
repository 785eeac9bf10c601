"""Detect that workers wait for each other in different places of their programs, say where, and end the wait.

A collective waits for ever for a worker that is elsewhere: its data ended earlier, or only it evaluates. Each
worker's thread looks every few seconds whether this one still waits in the same place. If so it says where, with the
line of the user's program; and if all workers have waited in places that cannot meet, each ends its own wait by an
error that names all places. A worker that computes, or is busy in Python, is never held for stuck.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from collections.abc import Iterator
from typing import NamedTuple, SupportsInt, TypeVar

import tensorflow as tf

from keras_dist_ext._keras.cluster import abort_collectives, is_collective_mismatch, lost_tasks
from keras_dist_ext.errors import WorkersError
from keras_dist_ext.strategy.key_value import KeyValueStore, StoreSilent
from keras_dist_ext.strategy.presence import Presence, line_of

__all__ = ["DeadlockWatch"]

_LOOK_SECONDS = 2.0
_STUCK_SECONDS = 14.0
_NOTICE_SECONDS = 30.0  # of a wait for a worker that is busy elsewhere
_TOPIC, _MET = "waits", "met"
_Count = TypeVar("_Count", bound=SupportsInt)


class _Wait(NamedTuple):
    """Where a worker waits."""

    number: int  # of waits, in its program
    what: str
    line: str = ""  # of the user's program


class DeadlockWatch:
    """Watches the waits of this worker, and reads what others publish of theirs.

    Waits are counted, in the same order on all workers. One that has passed its k-th wait has had what it waited for
    from all the others, so a worker still in its k-th does not wait for that one. If nobody moves, and the numbers
    differ, or the kinds of wait, nobody ever will. Nor will one that has ended before it has begun the wait.

    Args:
        store: of the workers.
        stuck_seconds: how long a wait takes before it is looked at.
        look_seconds: between two looks.
    """

    def __init__(
        self, store: KeyValueStore, *, stuck_seconds: float = _STUCK_SECONDS, look_seconds: float = _LOOK_SECONDS
    ) -> None:
        self._store = store
        self.presence = Presence(store)
        self._num_looks = max(1, round(stuck_seconds / look_seconds))
        self._look_seconds = look_seconds
        self._number = 0
        self._here: _Wait | None = None
        self._looked_at: _Wait | None = None  # at the last look
        self._data_ended = ""
        self._waiting_thread = 0
        self._deadlock: str | None = None
        self._published: list[str] = []  # what this worker has published so far, JSON of a wait or empty
        self._is_unsure = False  # whether an earlier request may have come through, though it was not answered
        self._read: dict[int, tuple[int, str]] = dict.fromkeys(store.others, (0, ""))  # how much, and the last
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note that this worker waits for the others now.

        Args:
            what: such as "step 5 of training"; workers at the same place say the same.

        Raises:
            WorkersError: instead of TensorFlow's error, when the wait was found to be a deadlock.
        """
        if self._here is not None:  # a wait within a wait is that one's
            yield
            return
        self._number += 1
        self.presence.begin_wait()
        self.presence.wait = what
        self._data_ended = ""
        self._waiting_thread = threading.get_ident()
        with self._lock:
            self._here = _Wait(self._number, what)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True, name="keras_dist_ext.deadlock")
                self._thread.start()
        try:
            yield
            self.presence.num_waits = self._number
        except Exception as error:
            if self._deadlock is not None:
                raise WorkersError(self._deadlock) from error
            if is_collective_mismatch(error):
                raise WorkersError(self.mismatch_message(what)) from error
            tasks = lost_tasks(error)
            if tasks is not None:
                raise WorkersError(self._lost_message(what, [self._store.index_of(*task) for task in tasks])) from error
            raise
        finally:
            self._here = None
            self.presence.wait = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Have an error that leaves it end the waits of the others, which it would not end by itself."""
        try:
            yield
        except (StopIteration, tf.errors.OutOfRangeError):  # the data has ended
            raise
        except Exception as error:
            self.presence.leave_run(error)
            raise

    def note_steps(self, num_made: _Count) -> _Count:
        """Note, while this worker waits, that its data had so many of the steps that it waits in."""
        self._data_ended = f", without data after {int(num_made)} of them"
        return num_made

    def check(self) -> None:
        """End a wait that no collective would end.

        Raises:
            WorkersError: it was found to be a deadlock.
        """
        if self._deadlock is not None:
            raise WorkersError(self._deadlock)

    def mismatch_message(self, what: str) -> str:
        """Say that another worker was met that is in another collective, and in which, if it says so in time.

        Args:
            what: this worker is in.
        """
        places = {self._store.index: f"in {what}{line_of(threading.get_ident())}"}
        with contextlib.suppress(Exception):  # it has said so before, or the cluster is gone
            self._store.set(f"{_MET}/{self._number}", places[self._store.index])
            for worker in self._store.others:
                place = self._store.get(f"{_MET}/{self._number}", worker, _MET_SECONDS / len(self._store.others))
                if place is not None:
                    places[worker] = place
        where = ", ".join(f"{'Worker' if not n else 'worker'} {w} is {p}" for n, (w, p) in enumerate(places.items()))
        return f"{where}, and met another worker that is in another collective. {_ADVICE}"

    def _lost_message(self, what: str, lost: list[int]) -> str:
        """Say which workers were lost while this one waited, and where the others are.

        Args:
            what: this worker is in.
            lost: workers that TensorFlow has named.
        """
        here = f"Worker {self._store.index} is in {what}{line_of(self._waiting_thread)}"
        found: dict[int, str] = dict.fromkeys(lost, _SILENT)
        reached = False
        with contextlib.suppress(Exception):  # the cluster is gone
            found |= dict.fromkeys(self._store.silent(), _SILENT)
        for worker in self._store.others:
            with contextlib.suppress(Exception):  # the same, but it may have been read before
                end = self.presence.end_of(worker)
                found |= {worker: end.what} if end is not None else {}
        answers: dict[int, str] = {}
        with contextlib.suppress(Exception):
            left = [worker for worker in self._store.others if worker not in found]
            answers = self.presence.ask(left)
            found |= dict.fromkeys(left, "does not answer") | answers
            reached = True
        gone = {worker: text for worker, text in sorted(found.items()) if worker not in answers}
        self.presence.cause = "; ".join(f"worker {worker} {text}" for worker, text in gone.items())
        said = [f"worker {worker} {text}" for worker, text in sorted(found.items())]
        if not reached and not said:
            said = ["the first worker, by which all know of each other, or its machine, cannot be reached"]
        return f"{here}, and cannot continue: {'; '.join(said)}. {_LOST_ADVICE}"

    def _watch(self) -> None:
        """Look every few seconds, until there was no wait for some time."""
        with contextlib.suppress(Exception):  # the cluster is gone: what waits for it raises
            while self._deadlock is None:
                try:
                    self._look()
                    return
                except StoreSilent:
                    here = self._looked_at
                    if here is not None and here is self._here:  # a wait that does not end without the first worker
                        self._deadlock = self._lost_message(here.what, [])
                        abort_collectives(self._deadlock)

    def _look(self) -> None:
        """Look until a wait was found to be in vain, or there was none for some time."""
        pause = threading.Event()
        before, num_looks, suspected = None, 0, None
        began, noticed = time.monotonic(), 0
        while self._deadlock is None:
            pause.wait(self._look_seconds)
            here = self._looked_at = self._here
            if here is not before:
                began = time.monotonic()
            num_looks = num_looks + 1 if here is before else 0
            before = here
            if here is not None and num_looks and self._ended_before(here):
                num_looks = max(num_looks, self._num_looks)
            if num_looks < self._num_looks:
                suspected = None
                self._publish("")
            elif here is None:
                with self._lock:
                    if self._here is None:
                        self._thread = None
                        return
            else:
                what = here.what + self._data_ended
                self._publish(json.dumps(here._replace(what=what, line=line_of(self._waiting_thread))))
                self._read_others()
                found = self._find_deadlock()
                if found and found == suspected and self._here is here:  # and nobody has moved since the last look
                    self._deadlock = found
                    pause.wait(self._look_seconds)  # until the others have found it, too
                    abort_collectives(found)
                suspected = found
                if not found and noticed != here.number and time.monotonic() - began > _NOTICE_SECONDS:
                    noticed = here.number
                    self._warn_of_busy(here)

    def _publish(self, text: str) -> None:
        last = self._published[-1] if self._published else ""
        while text != last or self._is_unsure:
            self._is_unsure = True  # until this is answered
            try:
                self._store.set(f"{_TOPIC}/{len(self._published)}", text or "-")
                self._is_unsure, last = False, text
            except tf.errors.AlreadyExistsError:  # an earlier request came through, and its answer came too late
                last = ""
            self._published.append(last)

    def _read_others(self) -> None:
        for worker, (number, last) in self._read.items():
            while (text := self._store.get(f"{_TOPIC}/{number}", worker, 0.01)) is not None:
                number, last = number + 1, "" if text == "-" else text
            self._read[worker] = number, last

    def _find_deadlock(self) -> str | None:
        """Say where all workers wait, if they do and cannot meet, or that one has ended or is lost."""
        texts = {worker: last for worker, (_, last) in self._read.items()}
        texts[self._store.index] = self._published[-1]
        here = _Wait(*json.loads(self._published[-1]))
        failed = {worker: self.presence.failure_of(worker) for worker in self._store.others}
        # One may have passed this wait without the others, as a check that it cannot make.
        left = {worker: notice.what for worker, notice in failed.items() if notice and notice.number <= here.number}
        ended = left | self._ended_before(here)
        if ended:
            others = [worker for worker in self._store.others if worker not in ended]
            busy = self.presence.ask([worker for worker in others if not texts[worker]])
            waits = {worker: _Wait(*json.loads(texts[worker])) for worker in others if texts[worker]}
            said = [f"worker {worker} {what}" for worker, what in ended.items()]
            self.presence.cause = "; ".join(said)
            said += [f"worker {worker} is in {wait.what}{wait.line}" for worker, wait in waits.items()]
            said += [f"worker {worker} {place}" for worker, place in busy.items()]
            place = f"Worker {self._store.index} is in {here.what}{here.line}"
            return f"{place}, and waits for a worker that never comes: {'; '.join(said)}. {_ADVICE}"
        silent = [worker for worker in self._store.silent() if self.presence.end_of(worker) is None]
        if silent:
            place = f"Worker {self._store.index} is in {here.what}{here.line}"
            who = self.presence.cause = "; ".join(f"worker {worker} {_SILENT}" for worker in silent)
            return f"{place}, and cannot continue: {who}. {_LOST_ADVICE}"
        if not all(texts.values()):
            return None
        places = {worker: _Wait(*json.loads(texts[worker])) for worker in sorted(texts)}
        if len({(place.number, place.what) for place in places.values()}) == 1:
            return None
        where = "; ".join(f"worker {worker} in {place.what}{place.line}" for worker, place in places.items())
        return f"The workers wait for each other in different places, a deadlock: {where}. {_ADVICE}"

    def _ended_before(self, here: _Wait) -> dict[int, str]:
        """Return the workers that have ended before they began a wait, with their last words."""
        ends = {worker: self.presence.end_of(worker) for worker in self._store.others}
        return {worker: end.what for worker, end in ends.items() if end is not None and end.number < here.number}

    def _warn_of_busy(self, here: _Wait) -> None:
        """Say for whom this worker waits, where these are busy in another place."""
        busy = self.presence.ask([worker for worker, (_, last) in self._read.items() if not last])
        if busy and self._here is here:
            warnings.warn(
                f"Worker {self._store.index} has waited {_NOTICE_SECONDS:g} s in {here.what}"
                f"{line_of(self._waiting_thread)}: {'; '.join(f'worker {w} {place}' for w, place in busy.items())}. "
                "It keeps waiting.",
                stacklevel=2,
            )


_MET_SECONDS = 3.0
_SILENT = "sends no sign of life"
_LOST_ADVICE = (
    "Look for the first error among the workers, and start all of them again; every worker must make the same calls."
)
_ADVICE = (
    "Every worker must make the same calls of fit, evaluate and predict, in the same order, on as many batches, also "
    "in callbacks, and build the same models in the strategy's scope."
)
