"""Map steps to times: one time for each step of an experiment, that of the replica that wrote it first.

Shapes: M = steps that are known.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keras_dist_ext.monitoring.dashboard.points import Points, union_of_steps

__all__ = ["Clock", "clock_of"]


@dataclass(frozen=True)
class Clock:
    """Steps and their times; both increase, so that either can be the axis of a chart."""

    steps: NDArray[np.int64]  # [M]
    walls: NDArray[np.float64]  # [M], seconds since 1970

    def wall_at(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the times of steps, interpolated between known ones."""
        return np.interp(steps, self.steps, self.walls) if self.steps.size else np.zeros(len(steps))

    @cached_property
    def spans(self) -> NDArray[np.float64]:
        """The number of steps since the previous known one, for each, [M]."""
        steps = self.steps.astype(np.float64)
        gaps = np.maximum(np.diff(steps), 1)
        first = np.clip(steps[:1], 1, gaps[0] if gaps.size else 1)
        return np.concatenate([first, gaps])

    def span_at(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number of steps that each of these represents."""
        if np.array_equal(steps, self.steps):
            return self.spans
        at = np.searchsorted(self.steps, steps).clip(max=self.steps.size - 1)
        return np.take(self.spans, at)

    def positions(self, steps: NDArray[np.int64], axis: str) -> NDArray[np.float64]:
        """Return the positions of steps on an axis, step or wall."""
        return self.wall_at(steps) if axis == "wall" else steps.astype(np.float64)

    def steps_between(self, axis: str, low: float, high: float) -> tuple[float, float]:
        """Return the first and the last step of a part of an axis; the first is above the last where it is empty."""
        if axis == "step":
            return low, high
        inside = self.steps[(self.walls >= low) & (self.walls <= high)]
        return (float(inside[0]), float(inside[-1])) if inside.size else (math.inf, -math.inf)


def clock_of(series: Iterable[Points]) -> Clock:
    """Return the clock of an experiment, from one series of each of its replicas."""
    series = list(series)
    steps = union_of_steps(points.steps for points in series)
    walls = np.full(steps.size, np.inf)
    for points in series:
        at = np.searchsorted(steps, points.steps)
        walls[at] = np.minimum(walls[at], points.walls)
    return Clock(steps, np.maximum.accumulate(walls))
