"""Have one worker of a search make the first pass, while the others wait for what comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_dist_ext.tuner.first_pass import Outcome

__all__ = ["Turnstile", "measured_by_one"]


class Turnstile:
    """The chief's part: it lets one worker measure, another if that one falls silent, and keeps what comes out.

    Args:
        project: the folder of the search.
        on_outcome: called once, with what came out.
        workers_live: whether a worker may be measuring for a chief before this one: then it is waited for.
    """

    LEASE_SECONDS = 30.0  # without a word from who measures

    def __init__(
        self, project: str | os.PathLike[str], on_outcome: Callable[[Outcome], None], *, workers_live: bool
    ) -> None:
        self._project, self._on_outcome = project, on_outcome
        self._outcome = Outcome.load(project)
        self._holder: str | None = None
        self._since = time.monotonic()
        self._until = self._since + self.LEASE_SECONDS if workers_live else self._since

    def ask(self, tuner_id: str, *, measures: bool) -> dict[str, Any]:
        """Return what came out, or whether a worker may measure.

        Args:
            tuner_id: the worker's.
            measures: whether it does so already.
        """
        if self._outcome is not None:
            return {"outcome": dataclasses.asdict(self._outcome)}
        now = time.monotonic()
        is_free = (self._holder is None and measures) or now >= self._until
        if self._holder != tuner_id and not is_free:
            return {"may_measure": False}
        if self._holder != tuner_id or not measures:
            self._holder, self._since = tuner_id, now
        self._until = now + self.LEASE_SECONDS
        return {"may_measure": True}

    def end(self, outcome: dict[str, Any]) -> None:
        """Take what came out; the first counts."""
        if self._outcome is None:
            self._outcome = Outcome.of(outcome)
            self._outcome.save(self._project)
            self._on_outcome(self._outcome)

    def release(self, tuner_id: str) -> None:
        """Let another worker measure, as this one is given up."""
        if self._holder == tuner_id:
            self._holder, self._until = None, time.monotonic()

    def seconds_of(self, tuner_id: str) -> float:
        """Return how long a worker has been measuring."""
        return time.monotonic() - self._since if self._holder == tuner_id and self._outcome is None else 0.0


def measured_by_one(oracle: Any, measure: Callable[[], Outcome]) -> None:
    """Measure, if the chief wants this worker to, or else wait until one has.

    Args:
        oracle: a worker's `RemoteOracle`.
        measure: makes the first pass.
    """
    while "outcome" not in (reply := oracle.ask_first_pass(measures=False)):
        if reply["may_measure"]:
            with _heard_of(oracle):
                outcome = measure()
            oracle.end_first_pass(dataclasses.asdict(outcome))
        else:
            time.sleep(oracle.POLL_SECONDS)


_WORD_SECONDS = 5.0


@contextlib.contextmanager
def _heard_of(oracle: Any) -> Iterator[None]:
    """Let the chief hear, for as long as a `with` lasts, that this worker measures."""
    over = threading.Event()

    def speak() -> None:
        while not over.wait(_WORD_SECONDS):
            oracle.ask_first_pass(measures=True, once=True)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
