"""Collect the signals that ask a launch to end, so that it can end its processes first."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "caught_signals", "interrupting_signals"]


class Interrupted(BaseException):
    """A signal that is collected came in the context of `interrupting_signals`; no handler of Exception stops it."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signum = signum


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


@contextmanager
def interrupting_signals() -> Iterator[None]:
    """Have the signals that are collected end what may take minutes, too, and has started nothing yet.

    Raises:
        Interrupted: one came.
    """
    before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def interrupt(signum: int, frame: FrameType | None) -> None:
        handler = before[signum]
        if callable(handler):
            handler(signum, frame)  # collects it
        raise Interrupted(signum)

    if threading.current_thread() is threading.main_thread():
        before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
