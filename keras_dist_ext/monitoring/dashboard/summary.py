"""Summarize each replica in numbers: for the table, the bars, and the comparison of experiments.

`score` was recorded in training: a replica compared with its own best. `relative` is computed here: a replica compared
with the fastest one, by its busy time, in which it waits for input and computes; in the rest of a step it waits for the
slowest replica. Both are 1 at best (the two scores of NVIDIA's resiliency-ext).

Points are of intervals that may differ in length. A mean is over their steps; that of a rate or of a share is over
their time: all examples by all seconds, consistent with the mean seconds of a step.
"""

import numpy as np
from numpy.typing import NDArray

from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.monitoring.dashboard import wire
from keras_dist_ext.monitoring.dashboard.metadata import (
    ALL_EXAMPLES_PER_SECOND,
    ALL_LOSS,
    COMPUTE_SECONDS,
    EXAMPLES,
    EXAMPLES_PER_SECOND,
    INPUT_SECONDS,
    INPUT_SHARE,
    LOSS,
    REPLICA_TAGS,
    SCALING_EFFICIENCY,
    SCORE,
    STEP_SECONDS,
    over_replicas,
)
from keras_dist_ext.monitoring.dashboard.points import Points
from keras_dist_ext.monitoring.dashboard.query import Query
from keras_dist_ext.monitoring.dashboard.view import View

__all__ = ["summary"]

_OVERALL = (ALL_LOSS, ALL_EXAMPLES_PER_SECOND, SCALING_EFFICIENCY, INPUT_SHARE)
_OVER_TIME = {EXAMPLES_PER_SECOND, ALL_EXAMPLES_PER_SECOND, SCALING_EFFICIENCY, INPUT_SHARE}


def summary(view: View, query: Query) -> JsonObject:
    """Return the numbers of a part of an experiment, for JSON."""
    first, last = view.clock.steps_between(query.axis, query.low, query.high)
    inside = view.clock.steps[(view.clock.steps >= first) & (view.clock.steps <= last)]
    series = {tag: view.replicas(tag) for tag in REPLICA_TAGS}
    seconds = series[STEP_SECONDS]
    numbers = {
        replica: {
            tag: found
            for tag, by_replica in series.items()
            if replica in by_replica
            and (found := _numbers(view, tag, by_replica[replica], seconds.get(replica), first, last)) is not None
        }
        for replica in sorted(view.experiment.runs)
    }
    relative = _relative({replica: _busy_seconds(tags) for replica, tags in numbers.items()})
    examples = series[EXAMPLES]
    return {
        "replicas": [
            {
                "id": replica,
                "numbers": {tag: _to_wire(found) for tag, found in tags.items()},
                "examples": wire.number(tags[EXAMPLES]["sum"]) if EXAMPLES in tags else None,
                "examples_sampled": replica in examples and examples[replica].is_sampled(view.limit),
                "score": wire.number(tags[SCORE]["last"]) if SCORE in tags else None,
                "relative": wire.number(relative.get(replica)),
            }
            for replica, tags in numbers.items()
        ],
        "overall": _overall(view, numbers, first, last),
        "steps": [int(inside[0]), int(inside[-1])] if inside.size else None,
        "seconds": float(np.ptp(view.clock.wall_at(inside[[0, -1]]))) if inside.size else None,
    }


def _numbers(
    view: View, tag: str, points: Points, seconds: Points | None, first: float, last: float
) -> dict[str, float] | None:
    """Return the numbers of a series between two steps, given the seconds of a step; None where it has no point."""
    inside = (points.steps >= first) & (points.steps <= last)
    steps, values = points.steps[inside], points.values[inside].astype(np.float64)
    if not steps.size:
        return None
    finite = np.isfinite(values)
    found = {"count": float(steps.size), "bad": float(steps.size - finite.sum())}
    found |= {"last": float(values[-1]), "last_step": float(steps[-1])}
    steps, values = steps[finite], values[finite]
    if values.size:
        lowest, highest = int(values.argmin()), int(values.argmax())
        weights = _weights(view, tag, steps, seconds)
        mean = np.average(values, weights=weights)
        std = np.sqrt(np.average((values - mean) ** 2, weights=weights))
        found |= {"mean": float(mean), "std": float(std), "sum": float(values.sum())}
        found |= {"min": float(values[lowest]), "min_step": float(steps[lowest])}
        found |= {"max": float(values[highest]), "max_step": float(steps[highest])}
    else:
        found["sum"] = 0.0
    return found


def _weights(view: View, tag: str, steps: NDArray[np.int64], seconds: Points | None) -> NDArray[np.float64]:
    """Return the weight of each point: the steps of its interval, or their seconds."""
    spans = view.clock.span_at(steps)
    known = None if tag not in _OVER_TIME or seconds is None else np.isfinite(seconds.values) & (seconds.values > 0)
    if known is None or seconds is None or not known.any():
        return spans
    return spans * np.interp(steps, seconds.steps[known], seconds.values[known].astype(np.float64))


def _to_wire(numbers: dict[str, float]) -> JsonObject:
    return {
        name: int(value) if name in _WHOLE else wire.number(value) for name, value in numbers.items() if name != "sum"
    }


_WHOLE = {"count", "bad", "last_step", "min_step", "max_step"}


def _busy_seconds(numbers: dict[str, dict[str, float]]) -> float | None:
    """Return the busy seconds of a replica in a step; of the whole step where they are not recorded."""
    busy = [numbers[tag]["mean"] for tag in (COMPUTE_SECONDS, INPUT_SECONDS) if "mean" in numbers.get(tag, {})]
    if COMPUTE_SECONDS not in numbers:
        busy = [numbers[STEP_SECONDS]["mean"]] if "mean" in numbers.get(STEP_SECONDS, {}) else []
    return sum(busy) if busy else None


def _relative(busy_seconds: dict[int, float | None]) -> dict[int, float]:
    known = {replica: seconds for replica, seconds in busy_seconds.items() if seconds is not None and seconds > 0}
    fastest = min(known.values(), default=0.0)
    return {replica: fastest / seconds for replica, seconds in known.items()}


def _overall(view: View, numbers: dict[int, dict[str, dict[str, float]]], first: float, last: float) -> JsonObject:
    """Return numbers over all replicas: as recorded, else from the replicas' means."""
    found: JsonObject = {}
    seconds = view.overall(over_replicas(STEP_SECONDS, "mean"))
    for tag in _OVERALL:
        points = view.overall(tag)
        if points is None:
            continue
        held = _numbers(view, tag, points, seconds, first, last)
        if held is not None:
            found[tag] = _to_wire(held) | {"source": "recorded"}
    for tag, value in _derived(numbers).items():
        if value is not None:
            found.setdefault(tag, {"mean": wire.number(value), "source": "derived"})
    return found


def _derived(numbers: dict[int, dict[str, dict[str, float]]]) -> dict[str, float | None]:
    means = {
        tag: [tags[tag]["mean"] for tags in numbers.values() if "mean" in tags.get(tag, {})]
        for tag in (LOSS, EXAMPLES_PER_SECOND, STEP_SECONDS, INPUT_SECONDS)
    }
    step, waiting = sum(means[STEP_SECONDS]), sum(means[INPUT_SECONDS])
    return {
        ALL_LOSS: float(np.mean(means[LOSS])) if means[LOSS] else None,
        ALL_EXAMPLES_PER_SECOND: sum(means[EXAMPLES_PER_SECOND]) if means[EXAMPLES_PER_SECOND] else None,
        INPUT_SHARE: waiting / step if step > 0 and means[INPUT_SECONDS] else None,
        STEP_SECONDS: float(np.mean(means[STEP_SECONDS])) if means[STEP_SECONDS] else None,
    }
