"""Release an iterator over a dataset without waiting for its threads."""

import contextlib
import threading
from typing import Any

__all__ = ["release_iterator"]


def release_iterator(held: list[Any]) -> None:
    """Drop an iterator without waiting for the thread that tunes its dataset.

    That sleeps for 10 ms, then for twice as long each time, up to a minute. What is to end its sleep comes too early
    now and then: it looks whether it has to stop, is not told so yet, and sleeps on (``OptimizeLoop`` in
    tensorflow/core/framework/model.cc; cancellation.cc calls back before it says that it is cancelled). An iterator's
    destructor waits for it, and so would an epoch, for up to as long as it took.

    Args:
        held: the only reference to the iterator.
    """
    thread = threading.Thread(target=held.clear, name="dropped iterator")
    with contextlib.suppress(RuntimeError):  # no thread can be started
        thread.start()
        thread.join(_WAIT_SECONDS)


_WAIT_SECONDS = 0.01  # enough for nearly all else that an iterator does in the end
