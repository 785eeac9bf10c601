"""Export every point of a chart as CSV: a row per step, a column per replica.

Unlike the chart, nothing is reduced: these are all points that TensorBoard kept. A cell is empty where there is no
point; NaN and Infinity are written as such. Numbers have as many digits as a float32 needs.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from keras_dist_ext.monitoring.dashboard.points import Points, union_of_steps
from keras_dist_ext.monitoring.dashboard.query import Query
from keras_dist_ext.monitoring.dashboard.view import View
from keras_dist_ext.monitoring.dashboard.wire import spelled

__all__ = ["csv_of", "file_name"]

_STATISTICS = ("mean", "min", "max", "total")


def csv_of(view: View, tag: str, query: Query, hidden: Collection[int] = ()) -> str:
    """Return step, wall_time (seconds since 1970), replica_<id>..., and recorded mean, min, max and total."""
    columns = {f"replica_{replica}": points for replica, points in view.replicas(tag).items() if replica not in hidden}
    recorded = view.recorded(tag)
    columns |= {statistic: recorded[statistic] for statistic in _STATISTICS if statistic in recorded}
    steps = union_of_steps(points.steps for points in columns.values())
    positions = view.clock.positions(steps, query.axis)
    steps = steps[(positions >= query.low) & (positions <= query.high)]
    cells = [list(map(str, steps.tolist())), [f"{wall:.3f}" for wall in view.clock.wall_at(steps).tolist()]]
    cells += [_column(points, steps) for points in columns.values()]
    rows = [",".join(("step", "wall_time", *columns)), *map(",".join, zip(*cells, strict=True))]
    return "\r\n".join(rows) + "\r\n"


def _column(points: Points, steps: NDArray[np.int64]) -> list[str]:
    column = [""] * steps.size
    if not steps.size:
        return column
    inside = (points.steps >= steps[0]) & (points.steps <= steps[-1])
    at = np.searchsorted(steps, points.steps[inside])
    for index, value in zip(at.tolist(), points.values[inside], strict=True):
        column[index] = str(value) if np.isfinite(value) else spelled(float(value))
    return column


def file_name(experiment: str, tag: str) -> str:
    """Return a name for the file: letters, digits, dots and dashes only, as it goes into a header.

    >>> file_name('night/3 "x"', "replica/loss")
    'night-3-x-loss.csv'
    """
    words = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in experiment).split()
    return "-".join([*words[:12], tag.removeprefix("replica/").replace("_", "-")])[-120:] + ".csv"
