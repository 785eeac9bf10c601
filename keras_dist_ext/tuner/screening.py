"""Screen strategies before a search: drop those that train slower than others, by successive halving on throughput."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from keras_dist_ext import arguments
from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.errors import TunerError
from keras_dist_ext.tuner.benchmark_log import BenchmarkLog
from keras_dist_ext.tuner.failures import classify_failure
from keras_dist_ext.tuner.strategies import HYPERPARAMETER
from keras_dist_ext.whole_files import write_whole

__all__ = ["Screening", "ScreeningResult", "StrategyBenchmark", "find_slow", "screen_strategies"]

_FILE = "screening.json"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Screening:
    """A benchmark of the strategies before a search: successive halving on measured throughput.

    The model of the default hyperparameters trains under each strategy in turn, `samples` times. A strategy that was
    slower than the fastest in each of these rounds, by more than `tolerance`, is dropped; the others continue with
    twice the time, up to `rungs` times. The search then has the strategies that remain; what was dropped is in the
    report. The result is kept in the project.

    Args:
        seconds: of training in a sample, in the first rung.
        samples: of each strategy in a rung.
        rungs: the largest number of rungs.
        tolerance: a share of the throughput; smaller differences do not count.

    Raises:
        TunerError: a value is invalid.
    """

    seconds: float = 0.5
    samples: int = 5
    rungs: int = 3
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        """Check each value."""
        arguments.seconds("seconds", self.seconds, error=TunerError)
        arguments.integer("samples", self.samples, least=3, most=10_000, error=TunerError)  # fewer are noise
        arguments.integer("rungs", self.rungs, least=1, most=20, error=TunerError)  # each takes twice as long
        arguments.number("tolerance", self.tolerance, least=0.0, most=0.99, wanted="a share", error=TunerError)


@dataclass(frozen=True)
class ScreeningResult:
    """What a screening has found."""

    survivors: tuple[str, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)  # name -> why
    examples_per_second: Mapping[str, float] = field(default_factory=dict)  # medians of the last rung that each ran

    def save(self, project: str | os.PathLike[str]) -> None:
        """Write it into a project's folder."""
        write_whole(Path(project) / _FILE, json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def load(project: str | os.PathLike[str]) -> ScreeningResult | None:
        """Return the result in a project's folder; None where no screening was made."""
        path = Path(project) / _FILE
        if not path.exists():
            return None
        return ScreeningResult.of(json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def of(state: JsonObject) -> ScreeningResult:
        """Return the result from what `dataclasses.asdict` returned for it."""
        return ScreeningResult(tuple(state["survivors"]), state["dropped"], state["examples_per_second"])

    def narrowed(
        self, space: list[keras_tuner.engine.hyperparameters.HyperParameter]
    ) -> list[keras_tuner.engine.hyperparameters.HyperParameter]:
        """Return a search's hyperparameters with only the strategies that remain."""
        hp = keras_tuner.engine.hyperparameters
        remaining: keras_tuner.engine.hyperparameters.HyperParameter = (
            hp.Fixed(HYPERPARAMETER, self.survivors[0])
            if len(self.survivors) == 1
            else hp.Choice(HYPERPARAMETER, list(self.survivors))
        )
        return [remaining if one.name == HYPERPARAMETER else one for one in space]


class StrategyBenchmark(Protocol):
    """A model under one strategy."""

    def run(self, seconds: float) -> float:
        """Train for some seconds after the first step, and return the examples per second."""


def screen_strategies(
    screening: Screening,
    names: Sequence[str],
    start: Callable[[str], StrategyBenchmark],
    log: BenchmarkLog | None = None,
) -> ScreeningResult:
    """Benchmark strategies, and drop the slow ones.

    Args:
        screening: how long to measure, and what is slow.
        names: of the strategies.
        start: returns the benchmark of a strategy.
        log: where to note which of them runs.

    Raises:
        TunerError: none of them can run.
        Exception: the user's own, from `build` or `fit`.
    """
    benchmarks: dict[str, StrategyBenchmark] = {}
    dropped = {} if log is None else log.crashing
    medians: dict[str, float] = {}

    def attempt(name: str, call: Callable[[], _T]) -> _T | None:
        try:
            with contextlib.nullcontext() if log is None else log.running(name):
                return call()
        except Exception as error:
            failure = classify_failure(error)
            if not failure.is_infeasible:
                raise
            benchmarks.pop(name, None)
            dropped[name] = str(failure)
        return None

    for name in [name for name in names if name not in dropped]:
        benchmark = attempt(name, lambda: start(name))  # noqa: B023 - called at once
        if benchmark is not None:
            benchmarks[name] = benchmark
    for rung in range(screening.rungs):
        if len(benchmarks) < 2:
            break
        rates: dict[str, list[float]] = {name: [] for name in benchmarks}
        seconds = screening.seconds * 2**rung
        for sample in range(screening.samples):
            order = list(benchmarks)
            first = sample % max(1, len(order))  # another one begins each time
            for name in order[first:] + order[:first]:
                rate = attempt(name, lambda: benchmarks[name].run(seconds))  # noqa: B023 - called at once
                if rate is not None:
                    rates[name].append(rate)
        complete = {name: samples for name, samples in rates.items() if name in benchmarks}
        medians |= {name: statistics.median(samples) for name, samples in complete.items()}
        for name, why in find_slow(complete, screening.tolerance).items():
            dropped[name] = why
            del benchmarks[name]
    if not benchmarks:
        reasons = "; ".join(f"{name}: {why}" for name, why in dropped.items())
        raise TunerError(f"None of the strategies can train the model of the default hyperparameters. {reasons}")
    return ScreeningResult(tuple(benchmarks), dropped, medians)


def find_slow(rates: Mapping[str, Sequence[float]], tolerance: float) -> dict[str, str]:
    """Return which strategies were slower than the fastest in each round, and by how much.

        >>> find_slow({"a": [100, 104, 98], "b": [80, 99, 81], "c": [50, 51, 49]}, tolerance=0.05)
        {'c': '2.0 times slower than a, in each of 3 rounds'}

    Args:
        rates: samples of each, taken in rounds.
        tolerance: a share of the rate; smaller differences do not count.
    """
    if len(rates) < 2:
        return {}
    best = max(rates, key=lambda name: statistics.median(rates[name]))
    found = {}
    for name, samples in rates.items():
        ratios = [own / fastest for own, fastest in zip(samples, rates[best], strict=True)]
        if name != best and all(ratio < 1.0 - tolerance for ratio in ratios):
            times = 1.0 / max(statistics.median(ratios), 1e-9)
            found[name] = f"{times:.1f} times slower than {best}, in each of {len(ratios)} rounds"
    return found
