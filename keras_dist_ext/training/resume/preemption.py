"""Notice that this process is asked to exit, so that training can end with a checkpoint."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable
from typing import TypeAlias

from keras_dist_ext.errors import ResumeError

__all__ = ["Preemption"]

_Handler: TypeAlias = Callable[[int, types.FrameType | None], object] | int | signal.Handlers | None

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Handles SIGTERM and SIGINT. The first sets `is_requested`; a second one has its previous effect.

    Without this, TensorFlow swallows SIGTERM in a process that is one of several workers.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: dict[int, _Handler] = {}

    def install(self) -> None:
        """Install the handlers.

        Raises:
            ResumeError: this is not the main thread, the only one in which Python handles signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ResumeError(
                "Resume(on_preemption=True) in a thread: Python handles signals only in the main thread, so none would "
                "be noticed. Call fit in the main thread, or leave on_preemption out."
            )
        self.is_requested = False
        for number in _SIGNALS:
            self._previous.setdefault(number, signal.signal(number, self._handle))

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by C code

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        self.is_requested = True
        self.uninstall()
