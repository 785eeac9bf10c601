"""Collect the signals that ask a launch to end, so that it can end its processes first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["caught_signals"]


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of acting on them, where this thread may."""
    caught: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # a parent such as nohup wants it ignored
                before[signum] = signal.signal(signum, lambda number, _: caught.append(number))
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
