"""Let one worker of a search screen the strategies, while the others wait for the result."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator

from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.tuner.processes.channel import ScreeningReply
from keras_dist_ext.tuner.processes.remote_oracle import RemoteOracle
from keras_dist_ext.tuner.screening import ScreeningResult

__all__ = ["ScreeningLease", "screen_on_one_worker"]


class ScreeningLease:
    """The chief's lease on the screening: one worker holds it, another if that one stops renewing it.

    Args:
        project: the folder of the search.
        on_result: called once, with the result.
        workers_live: whether a worker may still hold a lease of an earlier chief; then it is waited for.
    """

    LEASE_SECONDS = 30.0  # after which a lease that was not renewed is free

    def __init__(
        self, project: str | os.PathLike[str], on_result: Callable[[ScreeningResult], None], *, workers_live: bool
    ) -> None:
        self._project, self._on_result = project, on_result
        self._result = ScreeningResult.load(project)
        self._holder: str | None = None
        self._since = time.monotonic()
        self._until = self._since + self.LEASE_SECONDS if workers_live else self._since

    def request(self, tuner_id: str, *, measures: bool) -> ScreeningReply:
        """Return the result, or whether a worker may measure.

        Args:
            tuner_id: the worker's.
            measures: whether it is measuring already, and so renews the lease.
        """
        if self._result is not None:
            return {"result": dataclasses.asdict(self._result)}
        now = time.monotonic()
        is_free = (self._holder is None and measures) or now >= self._until
        if self._holder != tuner_id and not is_free:
            return {"may_measure": False}
        if self._holder != tuner_id or not measures:
            self._holder, self._since = tuner_id, now
        self._until = now + self.LEASE_SECONDS
        return {"may_measure": True}

    def finish(self, result: JsonObject) -> None:
        """Take a result; only the first counts."""
        if self._result is None:
            self._result = ScreeningResult.of(result)
            self._result.save(self._project)
            self._on_result(self._result)

    def release(self, tuner_id: str) -> None:
        """Let another worker measure, because this one was removed."""
        if self._holder == tuner_id:
            self._holder, self._until = None, time.monotonic()

    def elapsed_seconds(self, tuner_id: str) -> float:
        """Return how long a worker has been measuring."""
        return time.monotonic() - self._since if self._holder == tuner_id and self._result is None else 0.0


def screen_on_one_worker(oracle: RemoteOracle, measure: Callable[[], ScreeningResult]) -> None:
    """Measure if the chief gives this worker the lease, or else wait until another worker has.

    Args:
        oracle: of this worker.
        measure: screens the strategies.
    """
    while "result" not in (reply := oracle.request_screening(measures=False)):
        if reply["may_measure"]:
            with _renewed_lease(oracle):
                result = measure()
            oracle.finish_screening(dataclasses.asdict(result))
        else:
            time.sleep(oracle.POLL_SECONDS)


_RENEW_SECONDS = 5.0


@contextlib.contextmanager
def _renewed_lease(oracle: RemoteOracle) -> Iterator[None]:
    """Renew the lease, as long as a `with` lasts."""
    finished = threading.Event()

    def renew() -> None:
        while not finished.wait(_RENEW_SECONDS):
            oracle.request_screening(measures=True, once=True)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
