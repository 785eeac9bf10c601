"""One series of numbers over steps: sorted, each step once.

Shapes: N = points of the series.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Points", "newest", "union_of_steps"]


@dataclass(frozen=True)
class Points:
    """A series as TensorBoard has it; steps increase strictly."""

    steps: NDArray[np.int64]  # [N], optimizer steps
    walls: NDArray[np.float64]  # [N], seconds since 1970
    values: NDArray[np.float32]  # [N], may be NaN or infinite
    num_read: int  # points that TensorBoard returned, including those of abandoned steps

    def is_sampled(self, limit: int) -> bool:
        """Whether TensorBoard dropped points: it keeps `limit` of a series (0: all), chosen at random.

        A series of exactly that many points that are evenly spaced is complete: a random choice would not be.
        """
        if not limit or self.num_read < limit:
            return False
        gaps = np.diff(self.steps)
        return bool(gaps.size and (gaps != gaps[0]).any())


def newest(steps: ArrayLike, walls: ArrayLike, values: ArrayLike) -> Points:
    """Return the series after the last restart, from points in the order in which they were written.

    Where steps go back, training resumed from an earlier checkpoint: earlier points at that step and after it are
    abandoned. TensorBoard's fast loader drops them in the same way, its other loader keeps them.

    >>> newest([1, 2, 3, 2], [10, 11, 12, 13], [0.1, 0.2, 0.3, 0.4]).steps
    array([1, 2])
    """
    steps_ = np.asarray(steps, dtype=np.int64)
    walls_ = np.asarray(walls, dtype=np.float64)
    walls_ = np.where(np.isfinite(walls_), walls_, 0.0)  # a file may have any value
    values_ = np.asarray(values, dtype=np.float32)
    num_read = len(steps_)
    if num_read > 1 and (np.diff(steps_) <= 0).any():
        smallest_from = np.minimum.accumulate(steps_[::-1])[::-1]
        keep = np.append(steps_[:-1] < smallest_from[1:], True)
        steps_, walls_, values_ = steps_[keep], walls_[keep], values_[keep]
    return Points(steps_, walls_, values_, num_read)


def union_of_steps(series: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return every step that occurs, sorted; fast where most series have the same steps, as replicas do."""
    distinct: list[NDArray[np.int64]] = []
    for steps in series:
        if steps.size and not any(np.array_equal(steps, other) for other in distinct[:8]):
            distinct.append(steps)
    if not distinct:
        return np.empty(0, np.int64)
    return distinct[0] if len(distinct) == 1 else np.unique(np.concatenate(distinct))
