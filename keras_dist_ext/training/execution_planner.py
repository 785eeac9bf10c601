"""Plan the next execution of an epoch: how many steps it makes, and what is wished to happen after it."""

from __future__ import annotations

from typing import Protocol

from keras_dist_ext.strategy.workers import Workers
from keras_dist_ext.training.execution import Execution
from keras_dist_ext.training.execution_sizer import ExecutionSizer
from keras_dist_ext.training.stop_signal import StopSignal

__all__ = ["ExecutionPlanner", "Wishes"]


class Wishes(Protocol):
    """What a callback wishes to happen between executions, such as a save."""

    def plan(self, num_steps: int, num_batches_used: int, *, follows_clock: bool) -> tuple[int, int]:
        """Return how many of the next steps to make, and what is wished to happen after them.

        Args:
            num_steps: of the next execution.
            num_batches_used: in the run, up to now.
            follows_clock: whether fewer steps may be made.
        """


class ExecutionPlanner:
    """Plans executions, alike on all workers.

    Args:
        sizer: how many steps an execution makes.
        stop: what asks for the end of the run.
        workers: that must make as many steps; None on one.

    Attributes:
        wishes: asked before each execution; None where nothing is wished.
        agreed_wish: what is wished to happen after the last execution; of several workers the sum.
    """

    def __init__(self, sizer: ExecutionSizer, stop: StopSignal, workers: Workers | None) -> None:
        self.wishes: Wishes | None = None
        self.agreed_wish = 0
        self._sizer = sizer
        self._stop = stop
        self._workers = workers

    @property
    def makes_one_step(self) -> bool:
        """Whether all executions have one step."""
        return self._sizer.num_steps == 1 and not self._sizer.follows_clock

    def next(self, most: int | None, num_batches_used: int) -> tuple[int, bool]:
        """Return how many steps to make, and whether a worker has asked for the end.

        Args:
            most: as many as there may be; None where that is not known.
            num_batches_used: in the run, up to now.
        """
        follows_clock = self._sizer.follows_clock
        num_steps = self._sizer.num_steps if most is None else min(self._sizer.num_steps, most)
        if self._stop.is_requested and follows_clock:
            num_steps = 1
        self.agreed_wish = 0
        if self.wishes is not None:
            num_steps, self.agreed_wish = self.wishes.plan(num_steps, num_batches_used, follows_clock=follows_clock)
        return (num_steps, False) if self._workers is None else self._agreed(num_steps, self._workers)

    def record(self, execution: Execution) -> None:
        """Take note of an execution that was made."""
        self._sizer.record(execution.num_made, execution.seconds)

    def _agreed(self, num_steps: int, workers: Workers) -> tuple[int, bool]:
        stop, wish = float(self._stop.is_requested), float(self.agreed_wish)
        stops, wishes, steps = workers.sum([stop, wish, float(num_steps) if workers.is_chief else 0.0])
        self.agreed_wish = int(wishes)
        return 1 if stops > 0 and self._sizer.follows_clock else int(steps), stops > 0
