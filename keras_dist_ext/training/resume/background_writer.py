"""Write while training continues: one job at a time, in a thread."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Runs one writing job at a time in a thread. A job that fails is a warning, and the next one is tried.

    Warnings come from the thread that calls these methods, some time after the failure.

    Args:
        target: what is written to, for messages.
        outlook: says what becomes of the target after a failure.
    """

    def __init__(self, target: str, outlook: Callable[[BaseException], str]) -> None:
        self._target = target
        self._outlook = outlook
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._num_failed = 0

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], object]) -> None:
        """Run a job after the one before has ended."""
        self.wait()

        def run() -> None:
            try:
                job()
            except BaseException as error:  # reported by `wait`, in the thread that calls it
                self._error = error

        self._thread = threading.Thread(target=run, name="keras_dist_ext.save")
        self._thread.start()

    def wait(self) -> bool:
        """Wait for the running job; return whether the last one has succeeded."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            error, self._error = self._error, None
            if error is None:
                self._num_failed = 0
            else:
                self._num_failed += 1
                if self._num_failed == 1:
                    warnings.warn(
                        f"{self._target} could not be written to: {type(error).__name__}: {error}. "
                        f"{self._outlook(error)}",
                        stacklevel=2,
                    )
        return self._num_failed == 0

    def close(self) -> None:
        """Wait for the running job, and warn of how many have failed in a row at the end."""
        if not self.wait() and self._num_failed > 1:
            warnings.warn(
                f"{self._target} could not be written to: the last {self._num_failed} checkpoints of this run have "
                "failed.",
                stacklevel=2,
            )
        self._num_failed = 0
