"""Notice that this process is asked to end, so that training can end in good order."""

from __future__ import annotations

import signal
import threading
from typing import Any

from keras_dist_ext.errors import ResumeError

__all__ = ["Preemption"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Watches for SIGTERM and SIGINT. The first is noted, a second one does what it did before.

    Without this, TensorFlow keeps SIGTERM to itself in a process that is one of several workers.
    """

    def __init__(self) -> None:
        self.is_near = False
        self._before: dict[int, Any] = {}

    def watch(self) -> None:
        """Begin to watch.

        Raises:
            ResumeError: this is not the main thread, which alone is told of signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ResumeError(
                "Resume(on_preemption=True) in a thread: Python tells of signals in the main thread alone, so none "
                "would be noticed. Call fit in the main thread, or leave on_preemption out."
            )
        self.is_near = False
        for number in _SIGNALS:
            self._before.setdefault(number, signal.signal(number, self._note))

    def forget(self) -> None:
        """Let signals do what they did before."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by C code

    def _note(self, number: int, frame: Any) -> None:
        self.is_near = True
        self.forget()
