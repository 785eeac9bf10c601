"""Give times to steps whose clocks were not read, from those around them whose were.

To read when a GPU has computed, the host waits for it. So in an execution of several steps it is read in some only
(``training.step_loops``): in pairs, of which the first says when the second could begin. How long a step's batch was
waited for is known of all. But for that, steps between two moments that were read took as long as each other; the
shares of computing and synchronising are those of the next step that was timed.

Letters: n = steps; L = replicas of this worker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from keras_dist_ext.step.step_buffer import BufferedSteps

__all__ = ["with_all_clocks"]

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class _Shares(NamedTuple):
    """Of a step's time, without the wait for its batch once it had begun, from 0 to 1."""

    before: float  # until it began: its batch was being read ahead
    computing: Floats  # [L]


def with_all_clocks(steps: BufferedSteps, first: npt.ArrayLike, last: npt.ArrayLike, ends: Floats) -> BufferedSteps:
    """Return steps with the times of those that have none, whose ``end`` is NaN.

    Args:
        steps: of some executions.
        first: the place of the first step of each execution.
        last: of its last.
        ends: when each was over; NaN where that is unknown.
    """
    is_known: Flags = np.isfinite(steps.end.max(axis=1))
    if is_known.all():
        return steps
    names = ("begin", "batch_ready", "computed", "end")
    steps = steps._replace(**{name: getattr(steps, name).copy() for name in names})
    shares = _Shares(0.0, np.ones(steps.end.shape[1]))  # all of it is computing, unless a step says otherwise
    for place, last_place, end in zip(np.asarray(first), np.asarray(last), ends, strict=True):
        shares = _fill(steps, is_known, int(place), int(last_place) + 1, float(end), shares)
    return steps


def _fill(steps: BufferedSteps, is_known: Flags, first: int, stop: int, end: float, shares: _Shares) -> _Shares:
    """Give times to the steps of an execution; return the shares of the last step that was timed, here or before."""
    begin, since = first, float(steps.begin[first])
    waiting: list[tuple[int, int, float, float]] = []  # stretches, until a step says what their shares are
    for place in range(first, stop):
        if not is_known[place]:
            continue
        until = float(steps.end[place].max())
        if place > begin:
            waiting.append((begin, place + 1, since, until))
        else:
            shares = _shares(steps, place, since, until)
            for stretch in waiting:
                _spread(steps, *stretch, shares)
            waiting = []
        begin, since = place + 1, until
    if begin < stop:
        waiting.append((begin, stop, since, max(since, float(steps.begin[stop - 1]) if np.isnan(end) else end)))
    for stretch in waiting:
        _spread(steps, *stretch, shares)
    return shares


def _shares(steps: BufferedSteps, place: int, since: float, until: float) -> _Shares:
    """Return the shares of a step that was timed, and could begin at a known time."""
    begin = min(max(float(steps.begin[place]), since), until)
    batch_ready = min(max(float(steps.batch_ready[place]), begin), until)
    seconds = until - since - (batch_ready - begin)
    if seconds <= 0:
        return _Shares(0.0, np.ones(steps.end.shape[1]))
    before = min((begin - since) / seconds, 1.0)
    return _Shares(before, np.clip((steps.computed[place] - batch_ready) / seconds, 0.0, 1.0 - before))


def _spread(steps: BufferedSteps, begin: int, stop: int, since: float, until: float, shares: _Shares) -> None:
    """Give some steps the time from one moment to another."""
    part = slice(begin, stop)
    waits = np.maximum(steps.batch_ready[part] - steps.begin[part], 0.0)
    waits *= min(1.0, (until - since) / max(waits.sum(), 1e-9))
    others = max(until - since - waits.sum(), 0.0) / (stop - begin)  # seconds of each step
    over = since + np.cumsum(waits + others)
    over[-1] = until
    steps.begin[part] = np.append(since, over[:-1])
    steps.batch_ready[part] = steps.begin[part] + waits + shares.before * others
    steps.computed[part] = steps.batch_ready[part][:, None] + shares.computing * others
    steps.end[part] = over[:, None]
