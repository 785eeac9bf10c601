"""Judge which replica holds the others up: against the fastest one, and against its own best.

The two scores of NVIDIA's resiliency-ext (straggler_det/usage_guide), 1 at best and 0 at worst, over the seconds of a
step that a replica spends on its own, waiting for input and computing. For the rest it waits for the slowest:

    relative     seconds of the fastest replica / its own
    individual   its own seconds at its best so far / its own now

A straggler is below the threshold for some time, and not one of the most: if most replicas are slower than one, that
one is fast. More examples take longer, so a replica is compared with those, and with the times, that had at least 9/10
as many.

Letters: R = replicas in sync, over all workers; W = workers, each with R / W replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_dist_ext.errors import MonitorError
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.step.stats import ReplicaStats

__all__ = ["Scores", "Stragglers", "own_seconds"]

Floats = npt.NDArray[np.float64]

_AS_MANY = 0.9  # of another's examples: a fair comparison
_WINDOW_STEPS = 10  # are judged together: the best of single steps would be luck
_MIN_WINDOWS = 3  # below the threshold, one after another: a hiccup is no straggler


@dataclasses.dataclass(frozen=True)
class Scores:
    """How fast each replica was in an interval; NaN where it had no examples, or nothing could be timed."""

    relative: Floats  # [R]
    individual: Floats  # [R]


class Stragglers:
    """Scores intervals as they come, and remembers who was too slow for too long.

    Args:
        threshold: below which a score is too low, from 0 to 1.
        num_workers: W.
        take_turns: whether replicas share so few cores that they wait for each other: who comes last is no straggler.

    Raises:
        MonitorError: the threshold is no such number.
    """

    def __init__(self, threshold: float = 0.75, *, num_workers: int = 1, take_turns: bool = False) -> None:
        if not 0 <= threshold <= 1:
            raise MonitorError(
                f"straggler_threshold is {threshold!r}; scores are from 0 to 1. With 0.75, the default, a replica that "
                "takes a third longer than the fastest is named; with 0 none ever is."
            )
        self._threshold = threshold
        self._num_workers = num_workers
        self._take_turns = take_turns
        self._num_replicas = 0
        self._window: list[ReplicaStats] = []
        self._most: Floats = np.zeros(0)  # examples a step that each replica has had, [R]
        self._best: Floats = np.zeros(0)  # its seconds a step at best, with at least 9/10 of them, [R]
        self._streaks = (_Streaks("slow-replica"), _Streaks("slower-than-before"))

    def score(self, stats: ReplicaStats) -> Scores:
        """Return the scores of an interval of training, and take note of who straggles."""
        if not self._num_replicas:
            self._num_replicas = stats.num_replicas
            self._most, self._best = np.zeros(stats.num_replicas), np.full(stats.num_replicas, np.inf)
        self._window.append(stats)
        num_steps = sum(held.num_steps for held in self._window)
        if num_steps >= _WINDOW_STEPS:
            window = _Window(
                own=sum((own_seconds(held) * held.num_steps for held in self._window), _NONE) / num_steps,
                waiting=sum((held.input_seconds * held.num_steps for held in self._window), _NONE) / num_steps,
                examples=sum((held.examples for held in self._window), _NONE) / num_steps,
                num_steps=num_steps,
                step=stats.step,
            )
            self._window = []
            self._judge(window)
        own = own_seconds(stats)
        return Scores(_fastest(own, stats.examples) / own, np.minimum(1.0, self._best / own))

    def _judge(self, window: _Window) -> None:
        own, examples = window.own, window.examples
        has_more = _AS_MANY * examples > self._most
        self._best = np.where(has_more, np.inf, self._best)  # what was done with fewer examples is no measure
        self._most = np.maximum(self._most, examples)
        self._best = np.where(examples >= _AS_MANY * self._most, np.fmin(self._best, own), self._best)
        fastest = _fastest(own, examples)
        is_slow = (fastest / own < self._threshold) & (_lower_median(own) / own < self._threshold)
        others = max([0.0, *own[~is_slow & ~np.isnan(own)]])  # a step's length were it not for the slow ones
        slow, slower = self._streaks
        if not self._take_turns:
            slow.add(window, is_slow, by=fastest, lost=own - others)
        slower.add(window, self._best / own < self._threshold, by=self._best, lost=own - self._best)

    @property
    def findings(self) -> list[FindingRecord]:
        """What was found so far, at most one of a code."""
        return [s.finding(self._name(sorted(s.replicas))) for s in self._streaks if s.replicas]

    def _name(self, replicas: Sequence[int]) -> str:
        """Name replicas, as all of a worker or of the run where they are that."""
        if len(replicas) == self._num_replicas > 1:
            return "All replicas"
        local = self._num_replicas // self._num_workers
        workers = sorted({replica // local for replica in replicas})
        names = _listed("replica", replicas)
        if self._num_workers == 1:
            return _capital(names)
        if len(replicas) == local * len(workers):
            return f"{_capital(_listed('worker', workers))} ({names})"
        return f"{_capital(names)} (of {_listed('worker', workers)})"


def own_seconds(stats: ReplicaStats) -> Floats:
    """Return the seconds of a step that replicas spend on their own, [R]; NaN where nothing is to be compared."""
    own: Floats = stats.input_seconds + stats.compute_seconds
    return np.where((stats.examples > 0) & (own > 0), own, np.nan)


def _fastest(own: Floats, examples: npt.NDArray[Any]) -> Floats:
    """Return for each replica the seconds of the fastest one that had at least 9/10 as many examples, [R]."""
    peers = np.where(examples[None, :] >= _AS_MANY * examples[:, None], own[None, :], np.inf)
    return np.where(np.isnan(own), np.nan, np.fmin.reduce(peers, axis=1))


def _lower_median(values: Floats) -> float:
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else float("nan")


@dataclasses.dataclass(frozen=True)
class _Window:
    """Some intervals together."""

    own: Floats  # seconds of a step that replicas spend on their own, [R]
    waiting: Floats  # of these, for input, [R]
    examples: Floats  # of a step, [R]
    num_steps: int
    step: int  # that it ends with


_NONE: Floats = np.zeros(1)


@dataclasses.dataclass(frozen=True)
class _Streak:
    """Windows of one replica below the threshold, one after another; seconds are sums over their steps."""

    windows: int = 0
    steps: int = 0
    own: float = 0.0
    waiting: float = 0.0
    measure: float = 0.0  # that it would have taken
    lost: float = 0.0

    def longer(self, num_steps: int, own: float, waiting: float, measure: float, lost: float) -> _Streak:
        """Return the streak with one more window, of which the seconds of a step are given."""
        return _Streak(
            self.windows + 1,
            self.steps + num_steps,
            self.own + num_steps * own,
            self.waiting + num_steps * waiting,
            self.measure + num_steps * measure,
            self.lost + num_steps * max(lost, 0.0),
        )


class _Streaks:
    """Who stays below a threshold, for how long, and what that cost."""

    def __init__(self, code: str) -> None:
        self.replicas: set[int] = set()  # found
        self._code = code
        self._step = 0  # when the first one was
        self._running: dict[int, _Streak] = {}  # by replica
        self._seconds_lost = 0.0
        self._worst = (0, _Streak())  # replica, and the streak that has cost most

    def add(self, window: _Window, is_low: npt.NDArray[np.bool_], *, by: Floats, lost: Floats) -> None:
        """Take note of a window: who was below, the seconds that each is measured by, and those lost in a step."""
        before = self._running
        self._running = {
            replica: before.get(replica, _Streak()).longer(
                window.num_steps, *(float(values[replica]) for values in (window.own, window.waiting, by, lost))
            )
            for replica in np.flatnonzero(is_low).tolist()
        }
        sure = {replica: streak for replica, streak in self._running.items() if streak.windows >= _MIN_WINDOWS}
        if not sure:
            return
        self._step = self._step or window.step
        self.replicas |= set(sure)
        uncounted = [
            streak.lost - (before[replica].lost if streak.windows > _MIN_WINDOWS else 0.0)
            for replica, streak in sure.items()
        ]
        self._seconds_lost += max(uncounted)  # all wait for the slowest at once
        self._worst = max(self._worst, *sure.items(), key=lambda item: (item[1].lost, item[1].steps, item[0]))

    def finding(self, who: str) -> FindingRecord:
        """Return what is to be said of them."""
        replica, streak = self._worst
        own, waiting, measure = (seconds / streak.steps for seconds in (streak.own, streak.waiting, streak.measure))
        times = own / measure
        worst = "" if len(self.replicas) == 1 else f" (the worst, replica {replica})"
        if self._code == "slow-replica":
            verb = "is" if len(self.replicas) == 1 or who.startswith("Worker ") else "are"
            what = f"{who} {verb} slow: {times:.2f} times as long a step as the fastest{worst}."
            against, fix = "the fastest", "Look at what else runs on that device or machine, or give it fewer examples."
        else:
            what = f"{who} got slower: {times:.2f} times as long a step as at best{worst}."
            against, fix = "at best", "Look for heat, another process on that device or machine, or slower storage."
        return FindingRecord(
            step=self._step,
            kind="straggler",
            code=self._code,
            what=what,
            evidence=f"{1e3 * (own - waiting):.3g} ms computing and {1e3 * waiting:.3g} ms waiting for input in a "
            f"step, {against} {1e3 * measure:.3g} ms together; {streak.steps} steps in a row",
            fix=fix,
            seconds=round(self._seconds_lost, 3),
        )


def _listed(noun: str, numbers: Sequence[int]) -> str:
    """Put numbers after their noun: `replica 3`, `replicas 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    shown = [str(number) for number in numbers[:8]] + ([f"{len(numbers) - 8} more"] if len(numbers) > 8 else [])
    return f"{noun}s {', '.join(shown[:-1])} and {shown[-1]}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
