"""Say how many steps to make at once."""

from __future__ import annotations

__all__ = ["Pace"]


class Pace:
    """How many steps one execution makes: fixed, or as many as fit into a share of a second.

    Args:
        fixed: a number of steps, or None to follow the clock.
        seconds: the length of an execution to aim at. Callbacks, the progress bar and requests to stop wait at most
            about twice as long.
    """

    def __init__(self, fixed: int | None = None, *, seconds: float = 0.12) -> None:
        self._fixed = fixed
        self._seconds = seconds
        self._num_steps = fixed or 1
        self._is_warm = False

    @property
    def num_steps(self) -> int:
        """Steps of the next execution."""
        return self._num_steps

    @property
    def follows_clock(self) -> bool:
        """Whether the number of steps is tuned."""
        return self._fixed is None

    def record(self, num_steps: int, seconds: float) -> None:
        """Take note of how long an execution took; the first one was compiled and does not count."""
        if not self.follows_clock or num_steps == 0:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        fitting = int(self._seconds * num_steps / max(seconds, 1e-6))
        self._num_steps = max(1, min(fitting, 8 * self._num_steps))
