"""Reduce series to the number of pixels of a chart, and keep their extremes.

    bins = bins_of(steps, positions, low, high, width)
    line = reduce(points, bins)           # min, mean and max of each bin; the value itself where a bin is one step

All lines of a chart share its bins, so that they can be drawn, stacked and read at the same positions.

Shapes: N = points of a series; U = steps that any line of the chart has; B = bins.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.monitoring.dashboard import wire
from keras_dist_ext.monitoring.dashboard.points import Points

__all__ = ["Bins", "bins_of", "Line", "reduce", "over", "line_to_wire"]

_NO_STEPS = np.empty(0, np.int64)
_DIGITS = 6  # of what was reduced to the pixels of a chart


@dataclass(frozen=True)
class Bins:
    """Ranges of steps, none of them empty."""

    first: NDArray[np.int64]  # [B], first step that some line has
    last: NDArray[np.int64]  # [B], last one

    @property
    def is_exact(self) -> bool:
        """Whether each bin is one step: nothing was reduced."""
        return bool((self.first == self.last).all())

    @property
    def edges(self) -> NDArray[np.int64]:
        """[B + 1], the first steps of bins, and the step after the last."""
        return np.append(self.first, self.last[-1:] + 1)


def bins_of(steps: NDArray[np.int64], positions: NDArray[np.float64], low: float, high: float, width: int) -> Bins:
    """Return the bins of a chart: a bin per step if they fit, else ranges of equal length on the axis.

    Args:
        steps: [U], increasing.
        positions: [U], of the steps on the axis, not decreasing.
        low: the start of the chart on the axis.
        high: its end. The neighbours on both sides are included, so that lines continue to the chart's edges.
        width: the largest number of bins, without the neighbours; a bin is drawn with two points, so twice as many
            steps fit.
    """
    start = max(int(np.searchsorted(positions, low, "left")) - 1, 0)
    end = int(np.searchsorted(positions, high, "right")) + 1
    steps, positions = steps[start:end], positions[start:end]
    if steps.size <= 2 * width:
        return Bins(steps, steps)
    low, high = max(low, positions[0]), min(high, positions[-1])
    length = (high - low) / width or 1.0
    with np.errstate(over="ignore"):  # where the whole axis is shorter than any bin could be
        number = np.floor(np.clip((positions - low) / length, -1.0, width))
    number[positions == high] = width - 1
    starts = np.flatnonzero(np.diff(number, prepend=number[0] - 1))
    ends = np.append(starts[1:], steps.size) - 1
    return Bins(steps[starts], steps[ends])


@dataclass(frozen=True)
class Line:
    """A series in bins; NaN where a bin has no finite value."""

    low: NDArray[np.float64]  # [B]
    mean: NDArray[np.float64]  # [B]
    high: NDArray[np.float64]  # [B]
    known: NDArray[np.bool_]  # [B], the bin has a point, or a gap; elsewhere the line continues
    bad: dict[int, str]  # bins with a value that is not finite, and its name


def reduce(points: Points, bins: Bins, gaps: NDArray[np.int64] = _NO_STEPS) -> Line:
    """Return a series in bins; `gaps` are steps at which the line is interrupted, unless the bin has a point."""
    num_bins = bins.first.size
    low, mean, high = (np.full(num_bins, np.nan) for _ in range(3))
    known = np.zeros(num_bins, np.bool_)
    bad: dict[int, str] = {}
    if not num_bins:
        return Line(low, mean, high, known, bad)
    cuts = np.searchsorted(points.steps, bins.edges)
    known = cuts[1:] > cuts[:-1]
    values = points.values[cuts[0] : cuts[-1]].astype(np.float64)
    if values.size:
        at = (cuts[:-1] - cuts[0])[known]
        is_finite = np.isfinite(values)
        if not is_finite.all():
            bad = _bad(values, is_finite, np.searchsorted(cuts, np.arange(cuts[0], cuts[-1]), "right") - 1)
        low[known] = np.minimum.reduceat(np.where(is_finite, values, np.inf), at)
        high[known] = np.maximum.reduceat(np.where(is_finite, values, -np.inf), at)
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.add.reduceat(np.where(is_finite, values, 0.0), at)
            mean[known] = total / np.add.reduceat(is_finite.astype(np.float64), at)
        nothing = np.isnan(mean)
        low[nothing] = high[nothing] = np.nan
        # Rounding may put the mean outside, where the series has no point.
        mean = np.clip(mean, low, high)
    if gaps.size:
        inside = gaps[(gaps >= bins.first[0]) & (gaps <= bins.last[-1])]
        known[np.searchsorted(bins.first, inside, "right") - 1] = True
    return Line(low, mean, high, known, bad)


def _bad(values: NDArray[np.float64], is_finite: NDArray[np.bool_], bin_of: NDArray[np.int64]) -> dict[int, str]:
    found: dict[int, str] = {}
    for index in np.flatnonzero(~is_finite).tolist():
        word = wire.spelled(values[index])
        if found.setdefault(int(bin_of[index]), word) != "NaN":
            found[int(bin_of[index])] = word
    return found


def over(lines: Mapping[int, Line]) -> dict[str, Line]:
    """Return mean, min, max and total over replicas, for logs without the run `all`, which has exact ones."""
    if not lines:
        return {}
    known = np.logical_or.reduce([line.known for line in lines.values()])
    means, lows, highs = (
        np.stack([getattr(line, name) for line in lines.values()]) for name in ("mean", "low", "high")
    )
    has_any = np.isfinite(means).any(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(has_any, np.nansum(means, axis=0) / np.isfinite(means).sum(axis=0), np.nan)
    found = {
        "mean": mean,
        "min": np.where(has_any, np.fmin.reduce(lows), np.nan),
        "max": np.where(has_any, np.fmax.reduce(highs), np.nan),
        "total": np.where(has_any, np.nansum(means, axis=0), np.nan),
    }
    return {name: Line(values, values, values, known, {}) for name, values in found.items()}


def line_to_wire(line: Line, exact: bool) -> JsonObject:
    """Return a line for JSON.

    `at` lists the bins of the arrays; all bins where it is missing. null in an array is a gap, and at a bin that is not
    listed the line continues without a point. `values` where bins are single steps, else `min`, `mean` and `max`.
    `bad` lists bins with a value that is not finite, and its name.
    """
    sent: JsonObject = {}
    known = line.known
    if not known.all():
        sent["at"] = np.flatnonzero(known).tolist()
    if exact:
        sent["values"] = wire.numbers(line.mean[known])
    else:
        sent |= {
            "min": wire.numbers(line.low[known], _DIGITS),
            "mean": wire.numbers(line.mean[known], _DIGITS),
            "max": wire.numbers(line.high[known], _DIGITS),
        }
    if line.bad:
        sent["bad"] = sorted(line.bad.items())
    return sent
