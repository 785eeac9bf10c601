"""Suspend a function where it needs something from others, and resume it with their answer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Literal

import tensorflow as tf

from keras_dist_ext.aliases import TensorNest

__all__ = ["SuspendableThread", "SyncPoint"]


@dataclasses.dataclass(frozen=True)
class SyncPoint:
    """Where a virtual replica is suspended: what for, what it adds to a sum, and what the others need to know."""

    kind: Literal["sum", "gather", "assign", "update", "result", "end"]
    values: list[tf.Tensor]
    subject: TensorNest = None


class _Abandoned(BaseException):
    """Ends a thread whose others have failed."""


class SuspendableThread:
    """A function that is suspended where it asks something, and resumed with the answer; one runs at a time."""

    def __init__(self, function: Callable[[], SyncPoint]) -> None:
        self._function = function
        self._goes, self._stops = threading.Semaphore(0), threading.Semaphore(0)
        self._answer: TensorNest = None
        self._point: SyncPoint | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="virtual_replica", daemon=True)

    def resume(self, answer: TensorNest) -> SyncPoint:
        """Answer, and wait until it is suspended again."""
        self._answer = answer
        if self._thread.ident is None:
            self._thread.start()
        self._goes.release()
        self._stops.acquire()
        if self._error is not None:
            raise self._error
        assert self._point is not None
        return self._point

    def suspend(self, point: SyncPoint) -> TensorNest:
        """Suspend this thread, and return the answer."""
        if self._is_abandoned:  # and the user's code has caught that
            raise _Abandoned
        self._point = point
        self._stops.release()
        self._goes.acquire()
        if self._is_abandoned:
            raise _Abandoned
        return self._answer

    def end(self) -> None:
        """Abandon the function where it is suspended, if it has not returned."""
        self._is_abandoned = True
        if self._thread.ident is not None:
            self._goes.release()
            self._thread.join()

    def _run(self) -> None:
        self._goes.acquire()
        try:
            self._point = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._stops.release()
