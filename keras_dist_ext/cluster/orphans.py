"""Take in the processes that a launch's workers leave behind, whatever session or environment they have, and end them.

Linux gives a process whose parent has ended to the nearest ancestor that has asked for it, a "subreaper" (prctl(2)).
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["Orphans", "children_of"]

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


class Orphans:
    """The children that this process gets while a launch runs, and has not started.

    Where other threads run, they may start processes of their own, which cannot be told from orphans: then none are
    taken in, and the guard alone ends what it finds. So it is elsewhere than on Linux.

    Args:
        owns_process: whether nothing else runs in this process, whatever threads it has.
    """

    END_SECONDS = 5.0

    def __init__(self, *, owns_process: bool) -> None:
        self._was = ctypes.c_int(0)
        self._before: set[int] = set()
        self.are_taken_in = sys.platform == "linux" and (owns_process or threading.active_count() == 1)
        if self.are_taken_in:
            new = [os.getpid()]
            while new:
                found = children_of(new.pop())
                self._before.update(found)
                new += found
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(self._was), 0, 0, 0)
            self.are_taken_in = libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0

    def _living(self, own: Collection[int]) -> list[int]:
        """Bury those that have ended, and return the others.

        Args:
            own: the processes that the launch has started.
        """
        living = []
        for pid in children_of(os.getpid()):
            if pid not in own and pid not in self._before:
                with suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0] == 0:
                        living.append(pid)
        return living

    def bury(self, own: Collection[int]) -> None:
        """Bury those that have ended."""
        if self.are_taken_in:
            self._living(own)

    def end(self, own: Collection[int]) -> None:
        """End all, and take in no more."""
        if not self.are_taken_in:
            return
        deadline = time.monotonic() + self.END_SECONDS
        while (living := self._living(own)) and time.monotonic() < deadline:
            for pid in living:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)  # its own children come here next
            time.sleep(0.01)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, self._was.value, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """Return the children of a process, on Linux."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found
