"""Adopt the processes that a launch's workers leave behind, in whatever session or environment, and end them.

Linux gives a process whose parent has ended to the nearest ancestor that has asked for it, a "subreaper" (prctl(2)).
"""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["Orphans", "children_of"]

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


class _Shared:
    """What the launches of this process share, of which several may run at a time, as those of a search do."""

    def __init__(self) -> None:
        self.started: set[int] = set()  # by launches, also by those that take in nobody
        self.num_taking = 0  # launches that take in orphans
        self._before: set[int] = set()  # children that were there before the first of these
        self._was = ctypes.c_int(0)

    def begin(self) -> bool:
        """Have this process take in orphans for one launch more, and return whether it can."""
        libc = ctypes.CDLL(None)
        if not self.num_taking:
            self._before, new = set(), [os.getpid()]
            while new:
                found = children_of(new.pop())
                self._before.update(found)
                new += found
            libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(self._was), 0, 0, 0)
            if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
                return False
        self.num_taking += 1
        return True

    def end(self) -> None:
        """Take in none for one launch."""
        self.num_taking -= 1
        if not self.num_taking:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, self._was.value, 0, 0, 0)

    def living(self) -> list[int]:
        """Bury the orphans that have ended, and return the others."""
        living = []
        for pid in children_of(os.getpid()):
            if pid not in self.started and pid not in self._before:
                with suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0] == 0:
                        living.append(pid)
        return living


_shared = _Shared()


class Orphans:
    """The children that this process gets while a launch runs, and has not started.

    Where other threads run, they may start processes of their own, which cannot be told from orphans: then none are
    taken in, and the guard alone ends what it finds. So it is elsewhere than on Linux. Whose orphans they are is not
    known where several launches run at a time: they are ended with the last of these.

    Args:
        owns_process: whether nothing else runs in this process, whatever threads it has.
    """

    END_SECONDS = 5.0

    def __init__(self, *, owns_process: bool) -> None:
        self._started: set[int] = set()
        may_take_in = sys.platform == "linux" and (owns_process or threading.active_count() == 1)
        self.are_taken_in = may_take_in and _shared.begin()

    def add(self, pid: int) -> None:
        """Note a process that the launch has started: it is nobody's orphan."""
        self._started.add(pid)
        _shared.started.add(pid)

    def reap(self) -> None:
        """Reap those that have ended."""
        if self.are_taken_in:
            _shared.living()

    def end(self) -> None:
        """End all, unless another launch takes some in, and take in no more."""
        if self.are_taken_in:
            deadline = time.monotonic() + self.END_SECONDS
            while (living := _shared.living()) and _shared.num_taking == 1 and time.monotonic() < deadline:
                for pid in living:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)  # its own children come here next
                time.sleep(0.01)
            _shared.end()
        _shared.started -= self._started


def children_of(pid: int) -> list[int]:
    """Return the children of a process, on Linux."""
    found: list[int] = []
    with suppress(OSError):  # listing its threads fails, too, where it ends meanwhile
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, path.read_text().split())
    return found
