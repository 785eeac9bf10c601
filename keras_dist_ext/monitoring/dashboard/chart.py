"""Return the lines of a chart of one tag: one for each replica, and mean, min, max and total over all."""

import numpy as np
from numpy.typing import NDArray

from keras_dist_ext.aliases import Array, JsonObject
from keras_dist_ext.monitoring.dashboard import wire
from keras_dist_ext.monitoring.dashboard.lines import Bins, Line, bins_of, line_to_wire, over, reduce
from keras_dist_ext.monitoring.dashboard.points import Points, union_of_steps
from keras_dist_ext.monitoring.dashboard.query import Query
from keras_dist_ext.monitoring.dashboard.view import View

__all__ = ["chart"]

_COARSE = 8  # points of each replica in a bin, where TensorBoard kept different steps of each


def chart(view: View, tag: str, query: Query) -> JsonObject:
    """Return the lines of a tag in a part of an experiment, for JSON.

    `steps` and `ends` are the first and the last step of each bin, `walls` and `wall_ends` their times; `start` is the
    time of the experiment's first step. `replicas` has a line for each replica that has the tag. `overall` has lines
    over all replicas, including hidden ones: as recorded in training, or else, with `source` "derived", computed from
    the points of the replicas' lines that TensorBoard kept.
    """
    replicas, recorded, gaps = view.replicas(tag), view.recorded(tag), view.gaps(tag)
    steps = union_of_steps([points.steps for points in (*replicas.values(), *recorded.values())] + list(gaps.values()))
    positions = view.clock.positions(steps, query.axis)
    width = query.width
    has_recorded = {"mean", "min", "max"} <= recorded.keys()
    if not has_recorded and _differ_by_chance(replicas, view.limit):
        # A mean over only the replicas that kept a step would jump between them (and so would the band).
        width = max(1, min(width, min(points.steps.size for points in replicas.values()) // _COARSE))
    bins = bins_of(steps, positions, query.low, query.high, width)
    lines = {replica: reduce(points, bins, *_of(gaps, replica)) for replica, points in replicas.items()}
    overall = over(lines) | {statistic: reduce(points, bins) for statistic, points in recorded.items()}
    return {
        "tag": tag,
        "axis": query.axis,
        "exact": bins.is_exact,
        **_bins_to_wire(bins, view),
        "replicas": [{"id": replica, **line_to_wire(line, bins.is_exact)} for replica, line in lines.items()],
        "overall": {
            statistic: {"source": "recorded" if statistic in recorded else "derived"} | _sent(statistic, line, bins)
            for statistic, line in overall.items()
        },
        "extent": _extent(view, steps),
        "start": _seconds(view, view.clock.steps[:1])[0] if view.clock.steps.size else None,
        "sampled": _sampled(view, [*replicas.values(), *recorded.values()]),
    }


def _differ_by_chance(replicas: dict[int, Points], limit: int) -> bool:
    series = list(replicas.values())
    return any(points.is_sampled(limit) for points in series) and any(
        not np.array_equal(points.steps, series[0].steps) for points in series[1:]
    )


def _of(gaps: dict[int, NDArray[np.int64]], replica: int) -> tuple[NDArray[np.int64], ...]:
    return (gaps[replica],) if replica in gaps else ()


def _sent(statistic: str, line: Line, bins: Bins) -> JsonObject:
    """Return a line over all replicas: of `min` only the lowest value of a bin counts, of `max` the highest."""
    values = {"min": line.low, "max": line.high}.get(statistic)
    if values is not None:
        line = Line(values, values, values, line.known, line.bad)
        return line_to_wire(line, exact=True)
    return line_to_wire(line, bins.is_exact)


def _bins_to_wire(bins: Bins, view: View) -> JsonObject:
    sent = {"steps": bins.first.tolist(), "walls": _seconds(view, bins.first)}
    if not bins.is_exact:
        sent |= {"ends": bins.last.tolist(), "wall_ends": _seconds(view, bins.last)}
    return sent


def _seconds(view: View, steps: Array) -> list[float]:
    seconds: list[float] = np.round(view.clock.wall_at(steps), 4).tolist()
    return seconds


def _extent(view: View, steps: Array) -> dict[str, list[float]] | None:
    """Return the range of the whole series on both axes."""
    if not steps.size:
        return None
    ends = steps[[0, -1]]
    return {"step": ends.tolist(), "wall": _seconds(view, ends)}


def _sampled(view: View, series: list[Points]) -> dict[str, int] | None:
    """Return how TensorBoard has sampled the series, or None where it has kept all points."""
    if not any(points.is_sampled(view.limit) for points in series):
        return None
    last = max(int(points.steps[-1]) for points in series)
    return {"limit": view.limit, "last_step": last, "suggested": wire.round_up(max(last, 2 * view.limit))}
