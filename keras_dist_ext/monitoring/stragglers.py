"""Score replicas to find stragglers: against the fastest one, and against their own best.

The two scores of NVIDIA's resiliency-ext (straggler_det/usage_guide), 1 at best and 0 at worst, of the busy seconds of
a step, in which a replica waits for input and computes; for the rest of the step it waits for the slowest replica:

    relative     busy seconds of the fastest replica / its own
    individual   its busy seconds at its best so far / now

A straggler is below the threshold for several windows, and not in the majority: if most replicas are slower than one,
that one is fast. More examples take longer, so a replica is compared with replicas, and with windows, that had at least
9/10 as many.

CPU devices share their processor with each other and with all other programs, which may take a core from one replica
for a moment, or make all of them slower. So there a replica is a straggler only after a second, and against its own
best only where it became slower than the others did.

Letters: R = replicas in sync, over all workers; W = workers, each with R / W replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keras_dist_ext import arguments
from keras_dist_ext.aliases import Array
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.step.stats import ReplicaStats

__all__ = ["Scores", "Stragglers", "busy_seconds"]

Floats = npt.NDArray[np.float64]

_COMPARABLE = 0.9  # of the other's examples, at least
_WINDOW_STEPS = 10  # scored together: the best single step would be chance
_MIN_WINDOWS = 3  # consecutive ones below the threshold: a single outlier is not a straggler
_MIN_SECONDS_ON_CPU = 1.0  # of them, where other programs run on the same device


@dataclasses.dataclass(frozen=True)
class Scores:
    """The speed of each replica in an interval; NaN where it had no examples, or was not timed."""

    relative: Floats  # [R]
    individual: Floats  # [R]


class Stragglers:
    """Scores intervals one after another, and collects the stragglers.

    Args:
        threshold: below which a score is too low, from 0 to 1.
        num_workers: W.
        shares_cores: whether replicas share so few cores that they wait for each other: then the last is no straggler.
        on_cpu: whether replicas are CPU devices, which other programs use too.

    Raises:
        MonitorError: the threshold is not from 0 to 1.
    """

    def __init__(
        self, threshold: float = 0.75, *, num_workers: int = 1, shares_cores: bool = False, on_cpu: bool = False
    ) -> None:
        try:
            self._threshold = arguments.number("", threshold, least=0.0, most=1.0, error=MonitorError)
        except MonitorError:
            raise MonitorError(
                f"straggler_threshold must be from 0 to 1, got {arguments.shown(threshold)}. With 0.75, the default, a "
                "replica that takes a third longer than the fastest is a straggler; with 0 none is."
            ) from None
        self._num_workers = num_workers
        self._shares_cores = shares_cores
        self._on_cpu = on_cpu
        self._num_replicas = 0
        self._window: list[ReplicaStats] = []
        self._most: Floats = np.zeros(0)  # the most examples per step of each replica, [R]
        self._best: Floats = np.zeros(0)  # its least busy seconds per step, with at least 9/10 of them, [R]
        seconds = _MIN_SECONDS_ON_CPU if on_cpu else 0.0
        self._streaks = (_Streaks("slow-replica", seconds), _Streaks("slower-than-before", seconds))

    def score(self, stats: ReplicaStats) -> Scores:
        """Return the scores of an interval of training, and look for stragglers."""
        if not self._num_replicas:
            self._num_replicas = stats.num_replicas
            self._most, self._best = np.zeros(stats.num_replicas), np.full(stats.num_replicas, np.inf)
        self._window.append(stats)
        num_steps = sum(held.num_steps for held in self._window)
        if num_steps >= _WINDOW_STEPS:
            window = _Window(
                busy=sum((busy_seconds(held) * held.num_steps for held in self._window), _NONE) / num_steps,
                waiting=sum((held.input_seconds * held.num_steps for held in self._window), _NONE) / num_steps,
                examples=sum((held.examples for held in self._window), _NONE) / num_steps,
                num_steps=num_steps,
                step=stats.step,
            )
            self._window = []
            self._judge(window)
        busy = busy_seconds(stats)
        return Scores(_fastest(busy, stats.examples) / busy, np.minimum(1.0, self._best / busy))

    def _judge(self, window: _Window) -> None:
        busy, examples = window.busy, window.examples
        has_more = _COMPARABLE * examples > self._most
        self._best = np.where(has_more, np.inf, self._best)  # times with fewer examples are not comparable
        self._most = np.maximum(self._most, examples)
        self._best = np.where(examples >= _COMPARABLE * self._most, np.fmin(self._best, busy), self._best)
        fastest = _fastest(busy, examples)
        is_slow = (fastest / busy < self._threshold) & (_lower_median(busy) / busy < self._threshold)
        others = max([0.0, *busy[~is_slow & ~np.isnan(busy)]])  # the length of a step without the slow ones
        slow, slower = self._streaks
        if not self._shares_cores:
            slow.add(window, is_slow, by=fastest, lost=busy - others)
        expected = self._best * self._slowdown_of_all(busy)
        slower.add(window, expected / busy < self._threshold, by=self._best, lost=busy - expected)

    def _slowdown_of_all(self, busy: Floats) -> float:
        """Return how many times as long as at best half of the replicas take at least, where the machine does that."""
        if not self._on_cpu:
            return 1.0
        slowdown = _lower_median(busy / self._best)
        return slowdown if slowdown > 1.0 else 1.0

    @property
    def findings(self) -> list[FindingRecord]:
        """The findings so far, at most one per code."""
        return [s.finding(self._name(sorted(s.replicas))) for s in self._streaks if s.replicas]

    def _name(self, replicas: Sequence[int]) -> str:
        """Name replicas; all of a worker, or of the run, by that."""
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


def busy_seconds(stats: ReplicaStats) -> Floats:
    """Return the busy seconds of replicas in a step, for input and computing, [R]; NaN where there are none."""
    busy: Floats = stats.input_seconds + stats.compute_seconds
    return np.where((stats.examples > 0) & (busy > 0), busy, np.nan)


def _fastest(busy: Floats, examples: Array) -> Floats:
    """Return for each replica the busy seconds of the fastest one with at least 9/10 as many examples, [R]."""
    peers = np.where(examples[None, :] >= _COMPARABLE * examples[:, None], busy[None, :], np.inf)
    return np.where(np.isnan(busy), np.nan, np.fmin.reduce(peers, axis=1))


def _lower_median(values: Floats) -> float:
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else float("nan")


@dataclasses.dataclass(frozen=True)
class _Window:
    """Some intervals together."""

    busy: Floats  # busy seconds per step, [R]
    waiting: Floats  # of these, for input, [R]
    examples: Floats  # per step, [R]
    num_steps: int
    step: int  # the last one


_NONE: Floats = np.zeros(1)


@dataclasses.dataclass(frozen=True)
class _Streak:
    """Consecutive windows of one replica below the threshold; seconds are sums over their steps."""

    windows: int = 0
    steps: int = 0
    busy: float = 0.0
    waiting: float = 0.0
    reference: float = 0.0  # what it is compared with
    lost: float = 0.0

    def extend(self, num_steps: int, busy: float, waiting: float, reference: float, lost: float) -> _Streak:
        """Return the streak with one more window, given its seconds per step."""
        return _Streak(
            self.windows + 1,
            self.steps + num_steps,
            self.busy + num_steps * busy,
            self.waiting + num_steps * waiting,
            self.reference + num_steps * reference,
            self.lost + num_steps * max(lost, 0.0),
        )


class _Streaks:
    """The replicas that stay below a threshold, for how long, and the seconds lost by that."""

    def __init__(self, code: str, min_seconds: float = 0.0) -> None:
        self.replicas: set[int] = set()  # found
        self._code = code
        self._min_seconds = min_seconds
        self._step = 0  # when the first one was found
        self._running: dict[int, _Streak] = {}  # by replica
        self._seconds_lost = 0.0
        self._worst = (0, _Streak())  # replica, and its streak with the most lost seconds

    def add(self, window: _Window, is_low: npt.NDArray[np.bool_], *, by: Floats, lost: Floats) -> None:
        """Add a window: which replicas were below, the busy seconds that each is compared with, those lost per step."""
        before = self._running
        self._running = {
            replica: before.get(replica, _Streak()).extend(
                window.num_steps, *(float(values[replica]) for values in (window.busy, window.waiting, by, lost))
            )
            for replica in np.flatnonzero(is_low).tolist()
        }
        stragglers = {replica: streak for replica, streak in self._running.items() if self._is_long(streak)}
        if not stragglers:
            return
        self._step = self._step or window.step
        self.replicas |= set(stragglers)
        uncounted = [
            streak.lost - (before[replica].lost if self._is_long(before.get(replica, _Streak())) else 0.0)
            for replica, streak in stragglers.items()
        ]
        self._seconds_lost += max(uncounted)  # all wait for the slowest at the same time
        self._worst = max(self._worst, *stragglers.items(), key=lambda item: (item[1].lost, item[1].steps, item[0]))

    def _is_long(self, streak: _Streak) -> bool:
        return streak.windows >= _MIN_WINDOWS and streak.busy >= self._min_seconds

    def finding(self, names: str) -> FindingRecord:
        """Return the finding about these replicas."""
        replica, streak = self._worst
        sums = (streak.busy, streak.waiting, streak.reference)
        busy, waiting, reference = (seconds / streak.steps for seconds in sums)
        times = busy / reference
        worst = "" if len(self.replicas) == 1 else f" (the worst, replica {replica})"
        if self._code == "slow-replica":
            verb = "is" if len(self.replicas) == 1 or names.startswith("Worker ") else "are"
            what = f"{names} {verb} slow: a step takes {times:.2f} times as long as on the fastest replica{worst}."
            against, fix = "the fastest", "Check what else runs on that device or machine, or give it fewer examples."
        else:
            what = f"{names} became slower: a step takes {times:.2f} times as long as at best{worst}."
            against, fix = "at best", "Check for heat, other processes on that device or machine, or slower storage."
        return FindingRecord(
            step=self._step,
            kind="straggler",
            code=self._code,
            what=what,
            evidence=f"{1e3 * (busy - waiting):.3g} ms computing and {1e3 * waiting:.3g} ms waiting for input per "
            f"step, {against} {1e3 * reference:.3g} ms together; {streak.steps} steps in a row",
            fix=fix,
            seconds=round(self._seconds_lost, 3),
        )


def _listed(noun: str, numbers: Sequence[int]) -> str:
    """List numbers after their noun: `replica 3`, `replicas 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    shown = [str(number) for number in numbers[:8]] + ([f"{len(numbers) - 8} more"] if len(numbers) > 8 else [])
    return f"{noun}s {', '.join(shown[:-1])} and {shown[-1]}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
