"""Keys and values that all workers of a cluster can read at any time, without a collective."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import tensorflow as tf

from keras_dist_ext._keras.cluster import delete_key, get_key, set_key, silent_tasks

__all__ = ["KeyValueStore", "StoreSilent"]

_T = TypeVar("_T")
_SILENT = "silent"
_SILENT_SECONDS = 15.0  # an answer takes milliseconds


class StoreSilent(tf.errors.UnavailableError):  # type: ignore[misc]
    """The first worker, whose process holds what all store, does not answer: it was stopped, or its machine is gone."""

    def __init__(self) -> None:
        super().__init__(None, None, "The coordination service of the first worker does not answer.")


class KeyValueStore:
    """What the workers of a cluster have stored, by topic and worker. A value that is set stays as it is.

    Each method raises StoreSilent where the first worker does not answer; TensorFlow would wait without end. Once it is
    silent, all raise that at once, until a request is answered; one tries again now and then, ever more seldom.

    Args:
        jobs: how many tasks "chief" and "worker" have, of which all are workers, in this order.
        index: of this one.
        clock: seconds that only go forward.
    """

    def __init__(self, jobs: Mapping[str, int], index: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._jobs = jobs
        self.num_workers = sum(jobs.values())
        self.index = index
        self._clock = clock
        self._silent: tuple[int, list[int]] = 0, []  # how many lists of workers were read or stored, and the last
        self._silent_since: float | None = None
        self._try_again_at = 0.0  # where it is silent
        self._lock = threading.Lock()  # over both, and over whether a request has been answered

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [worker for worker in range(self.num_workers) if worker != self.index]

    @property
    def is_silent(self) -> bool:
        """Whether the first worker has left the last request without an answer."""
        return self._silent_since is not None

    def index_of(self, job: str, number: int) -> int:
        """Return the number of the worker that is a task of a job."""
        return number if job == "chief" else self._jobs.get("chief", 0) + number

    def silent(self) -> list[int]:
        """Return the workers that send no sign of life any more, as the first worker has found."""
        if self.index == 0:
            return self._find_silent()
        number, found = self._silent
        while (text := self.get(f"{_SILENT}/{number}", 0, 0.01)) is not None:
            number, found = number + 1, json.loads(text)
        self._silent = number, found  # at once: two threads may ask
        return found

    def publish_silent(self) -> None:
        """Store which workers send no sign of life any more; the first worker does so now and then.

        The others cannot ask TensorFlow themselves: if the first worker is stopped, the call would hold Python's lock
        without end.
        """
        number, published = self._silent
        found = self._find_silent()
        if found != published:
            self.set(f"{_SILENT}/{number}", json.dumps(found))
            self._silent = number + 1, found

    def _find_silent(self) -> list[int]:
        return [self.index_of(job, number) for job, number in silent_tasks(self._jobs)]

    def set(self, topic: str, text: str) -> None:
        """Store a text on a topic, for all workers to read."""
        self._ask(lambda: set_key(_name(topic, self.index), text))

    def get(self, topic: str, worker: int, wait_seconds: float) -> str | None:
        """Return what a worker has stored on a topic; None where it has stored nothing for so long."""
        return self._ask(lambda: get_key(_name(topic, worker), wait_seconds), wait_seconds)

    def set_for_all(self, topic: str, text: str) -> None:
        """Store a text on a topic of all workers, unless one of them has."""
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self._ask(lambda: set_key(_name(topic, "all"), text))

    def get_for_all(self, topic: str, wait_seconds: float) -> str | None:
        """Return what one of the workers has stored on a topic of all."""
        return self._ask(lambda: get_key(_name(topic, "all"), wait_seconds), wait_seconds)

    def delete(self, topic: str) -> None:
        """Delete what this worker has stored."""
        self._ask(lambda: delete_key(_name(topic, self.index)))

    def _ask(self, ask: Callable[[], _T], wait_seconds: float = 0.0) -> _T:
        """Ask the first worker's process, and wait for its answer so long, and what an answer takes at most."""
        if self.index == 0:  # it is this one
            return ask()
        limit = wait_seconds + _SILENT_SECONDS
        self._check_silence(limit)
        answers: list[_T] = []
        errors: list[Exception] = []
        over = threading.Event()

        def run() -> None:
            try:
                answers.append(ask())
            except Exception as error:
                errors.append(error)
            finally:
                with self._lock:
                    self._silent_since = None
                    over.set()

        try:
            threading.Thread(target=run, daemon=True, name="keras_dist_ext.key_value").start()
        except RuntimeError:  # the program ends: from Python 3.12 on it starts no more threads
            if self._silent_since is not None:
                raise StoreSilent from None
            return ask()
        if not over.wait(limit):
            self._note_silence(over)
        if errors:
            raise errors[0]
        return answers[0]

    def _check_silence(self, limit: float) -> None:
        """Ask nothing of a worker that is silent, but for one request now and then.

        Args:
            limit: how long this request would wait.
        """
        with self._lock:
            if self._silent_since is None:
                return
            if self._clock() < self._try_again_at:
                raise StoreSilent
            self._try_again_at = self._clock() + limit  # this one does, and no other meanwhile

    def _note_silence(self, over: threading.Event) -> None:
        """Note that a request has waited long enough, unless its answer has come at the last moment."""
        with self._lock:
            if over.is_set():
                return
            now = self._clock()
            if self._silent_since is None:
                self._silent_since = now
            # Each request that is never answered keeps a thread: the pauses get longer.
            self._try_again_at = now + max(_SILENT_SECONDS, now - self._silent_since)
        raise StoreSilent


def _name(topic: str, worker: int | str) -> str:
    return f"keras_dist_ext/{topic}/{worker}"
