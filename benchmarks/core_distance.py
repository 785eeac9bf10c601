"""Notice when a virtual machine's cores are moved far from each other, where threads that work together are slow.

A host may run two cores of a guest on one chip, and a second later on two. What one core writes the other then sees in
400 ns there and back instead of 90 (AMD EPYC, measured in C), and a step of an LSTM on four replicas takes 4.6 ms
instead of 2.7, for seconds to a minute; what one core does by itself takes as long as before, and no counter of the
guest shows it. So the way there and back is measured, between two processes that are held on a core each.
"""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
import tempfile
import time

__all__ = ["CoreDistance"]

_SAYS, _ANSWERS = 0, 128  # bytes on cache lines of their own
_OVER = 255
_BATCHES, _TRIPS = 5, 300
_MOST_LOOKS = 20_000_000  # 0.4 s or more: then the other one is not there any more
_FARTHER = 1.6  # times the least distance seen: 0.2 µs are 0.5 µs with far cores, as Python measures it


class CoreDistance:
    """The way between the first and the last core that this process may run on; always near if that cannot be told.

    A process that answers runs until this one ends. It sleeps but for the millisecond that a measurement takes.
    """

    def __init__(self) -> None:
        self._least = math.inf
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]  # Linux has it
        self._core = cores[0]
        self._answerer: subprocess.Popen[bytes] | None = None
        if len(cores) > 1:
            with tempfile.NamedTemporaryFile() as file:
                file.truncate(mmap.PAGESIZE)
                self._board = mmap.mmap(file.fileno(), mmap.PAGESIZE)
                command = [sys.executable, __file__, file.name, str(cores[-1])]
                self._answerer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert self._answerer.stdout is not None
                self._answerer.stdout.read(1)  # it has the file

    def are_near(self) -> bool:
        """Whether the cores are about as near to each other as they were at best since this was made.

        Raises:
            RuntimeError: the process that answers was ended, or had no time on its core for long.
        """
        if self._answerer is None:
            return True
        try:
            seconds = self._measure(self._answerer)
        except (BrokenPipeError, TimeoutError) as error:
            raise RuntimeError(
                f"{__file__}, which runs as a process of its own to measure how far cores are from each other, does "
                "not answer: it was ended, or others use its core all the time. Run the benchmark again, on an idle "
                "machine."
            ) from error
        self._least = min(self._least, seconds)
        return seconds < _FARTHER * self._least

    def wait_until_near(self, most_seconds: float) -> bool:
        """Do nothing until the cores are near, or for so long; say whether they are.

        Raises:
            RuntimeError: see ``are_near``.
        """
        until = time.perf_counter() + most_seconds
        while not (are_near := self.are_near()) and time.perf_counter() < until:
            time.sleep(0.02)
        return are_near

    def _measure(self, answerer: subprocess.Popen[bytes]) -> float:
        """Return the seconds there and back, of the fastest of some batches."""
        assert answerer.stdin is not None
        allowed = os.sched_getaffinity(0)  # of this thread
        os.sched_setaffinity(0, [self._core])
        try:
            self._board[_SAYS] = 0
            answerer.stdin.write(b"x")
            answerer.stdin.flush()
            self._ask(1)
            fastest = math.inf
            for _ in range(_BATCHES):
                began = time.perf_counter()
                for trip in range(_TRIPS):
                    self._ask(2 + trip % 100)
                fastest = min(fastest, (time.perf_counter() - began) / _TRIPS)
            self._ask(_OVER)
            return fastest
        finally:
            os.sched_setaffinity(0, allowed)

    def _ask(self, number: int) -> None:
        board = self._board
        board[_SAYS] = number
        for _ in range(_MOST_LOOKS):
            if board[_ANSWERS] == number:
                return
        raise TimeoutError


def _answer(path: str, core: int) -> None:
    """Say what is said, whenever a byte of standard input asks for it, until that ends."""
    os.sched_setaffinity(0, [core])
    with open(path, "r+b") as file:
        board = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    os.write(1, b"x")
    while os.read(0, 1):
        last = 0
        for _ in range(_MOST_LOOKS):
            if board[_SAYS] != last:
                last = board[_SAYS]
                board[_ANSWERS] = last
                if last == _OVER:
                    break


if __name__ == "__main__":
    _answer(sys.argv[1], int(sys.argv[2]))
