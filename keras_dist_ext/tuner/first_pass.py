"""Drop strategies that are slower than others, by a race before the search."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.errors import TunerError
from keras_dist_ext.training.run_callback import RunCallback
from keras_dist_ext.tuner.coupled import CoupledValues
from keras_dist_ext.tuner.failures import Failure, failure_of
from keras_dist_ext.tuner.meter import Meter
from keras_dist_ext.tuner.strategies import HYPERPARAMETER
from keras_dist_ext.tuner.trial_run import Gauge, fit_coupled

__all__ = ["FirstPass", "ModelRacer", "Outcome", "RaceDiary", "Racer", "race"]

_FILE = "first_pass.json"


@dataclass(frozen=True)
class FirstPass:
    """A race of the strategies before a search: successive halving on measured throughput.

    The model of the default hyperparameters trains under each strategy in turn, `samples` times. Who was slower than
    the fastest in each of these turns, by more than `tolerance`, is dropped; those that are left go on with twice the
    time, up to `rungs` times. All that are left then are searched; what was dropped is in the report. The outcome is
    kept in the project.

    Args:
        seconds: of training in a sample, in the first rung.
        samples: of each strategy in a rung.
        rungs: how many there are.
        tolerance: a share of the throughput, below which a difference is none.

    Raises:
        TunerError: a value is none that it can be.
    """

    seconds: float = 0.5
    samples: int = 5
    rungs: int = 3
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        """Check each value."""
        if not (self.seconds > 0 and self.samples >= 3 and self.rungs >= 1 and 0 <= self.tolerance < 1):
            raise TunerError(
                f"{self!r} cannot tell the slow from the noise: seconds are positive, samples 3 or more, rungs 1 or "
                "more, and tolerance is from 0 to below 1."
            )


@dataclass(frozen=True)
class Outcome:
    """What a first pass has found."""

    survivors: tuple[str, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)  # name -> why
    examples_per_second: Mapping[str, float] = field(default_factory=dict)  # medians of the last rung that each ran

    def save(self, project: str | os.PathLike[str]) -> None:
        """Keep it in a project."""
        aside = Path(project) / f"{_FILE}.{os.getpid()}"
        aside.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        aside.replace(Path(project) / _FILE)

    @staticmethod
    def load(project: str | os.PathLike[str]) -> Outcome | None:
        """Return the outcome in a project; None where no first pass was made."""
        path = Path(project) / _FILE
        if not path.exists():
            return None
        return Outcome.of(json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def of(state: Mapping[str, Any]) -> Outcome:
        """Return the outcome that `dataclasses.asdict` was made of."""
        return Outcome(tuple(state["survivors"]), state["dropped"], state["examples_per_second"])

    def narrowed(self, space: list[Any]) -> list[Any]:
        """Return a search's hyperparameters with those strategies alone that are left."""
        hp = keras_tuner.engine.hyperparameters
        left: Any = (
            hp.Fixed(HYPERPARAMETER, self.survivors[0])
            if len(self.survivors) == 1
            else hp.Choice(HYPERPARAMETER, list(self.survivors))
        )
        return [left if one.name == HYPERPARAMETER else one for one in space]


class Racer(Protocol):
    """A model under one strategy."""

    def run(self, seconds: float) -> float:
        """Train for some seconds after the first step, and return the examples a second."""


class RaceDiary:
    """What is noted of a race while it runs, so that a strategy that kills its process does not do so for ever.

    Args:
        project: the folder of the search.
    """

    MOST_DEATHS = 2  # of the process, under one strategy

    def __init__(self, project: str | os.PathLike[str]) -> None:
        self._path = Path(project) / "first_pass_race.json"
        state = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        self._deaths: dict[str, int] = state.get("deaths", {})
        if state.get("under_way"):  # when the process ended without a word
            self._deaths[state["under_way"]] = self._deaths.get(state["under_way"], 0) + 1

    @property
    def deadly(self) -> dict[str, str]:
        """The strategies that have killed their process, and what to say of each."""
        failed = {name: number for name, number in self._deaths.items() if number >= self.MOST_DEATHS}
        return {
            name: str(Failure("worker lost", f"the process died {number} times while it trained under this strategy"))
            for name, number in failed.items()
        }

    @contextlib.contextmanager
    def under_way(self, name: str) -> Iterator[None]:
        """Note, for as long as a `with` lasts, which strategy runs."""
        self._write(name)
        try:
            yield
        finally:
            self._write(None)

    def _write(self, name: str | None) -> None:
        aside = self._path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps({"under_way": name, "deaths": self._deaths}), encoding="utf-8")
        aside.replace(self._path)


def race(
    rules: FirstPass, names: Sequence[str], start: Callable[[str], Racer], diary: RaceDiary | None = None
) -> Outcome:
    """Let strategies race, and drop the slow ones.

    Args:
        rules: of the race.
        names: of the strategies.
        start: makes the racer of a strategy.
        diary: where to note which of them runs.

    Raises:
        TunerError: none of them can run.
        Exception: the user's own, from `build` or `fit`.
    """
    racers: dict[str, Racer] = {}
    dropped = {} if diary is None else diary.deadly
    medians: dict[str, float] = {}

    def attempt(name: str, call: Callable[..., Any], argument: Any) -> Any:
        try:
            with contextlib.nullcontext() if diary is None else diary.under_way(name):
                return call(argument)
        except Exception as error:
            failure = failure_of(error)
            if not failure.is_infeasible:
                raise
            racers.pop(name, None)
            dropped[name] = str(failure)
        return None

    for name in [name for name in names if name not in dropped]:
        racer = attempt(name, start, name)
        if racer is not None:
            racers[name] = racer
    for rung in range(rules.rungs):
        if len(racers) < 2:
            break
        rates: dict[str, list[float]] = {name: [] for name in racers}
        for turn in range(rules.samples):
            order = list(racers)
            first = turn % max(1, len(order))
            for name in order[first:] + order[:first]:
                rate = attempt(name, racers[name].run, rules.seconds * 2**rung)
                if rate is not None:
                    rates[name].append(rate)
        whole = {name: samples for name, samples in rates.items() if name in racers}
        medians |= {name: statistics.median(samples) for name, samples in whole.items()}
        for name, why in slow(whole, rules.tolerance).items():
            dropped[name] = why
            del racers[name]
    if not racers:
        reasons = "; ".join(f"{name}: {why}" for name, why in dropped.items())
        raise TunerError(f"None of the strategies can train the model of the default hyperparameters. {reasons}")
    return Outcome(tuple(racers), dropped, medians)


def slow(rates: Mapping[str, Sequence[float]], tolerance: float) -> dict[str, str]:
    """Say who was slower than the fastest in each turn, and by how much.

        >>> slow({"a": [100, 104, 98], "b": [80, 99, 81], "c": [50, 51, 49]}, tolerance=0.05)
        {'c': '2.0 times slower than a, in each of 3 turns'}

    Args:
        rates: samples of each, taken in turn.
        tolerance: a share, below which a difference is none.
    """
    if len(rates) < 2:
        return {}
    best = max(rates, key=lambda name: statistics.median(rates[name]))
    found = {}
    for name, samples in rates.items():
        ratios = [own / fastest for own, fastest in zip(samples, rates[best], strict=True)]
        if name != best and all(ratio < 1.0 - tolerance for ratio in ratios):
            times = 1.0 / max(statistics.median(ratios), 1e-9)
            found[name] = f"{times:.1f} times slower than {best}, in each of {len(ratios)} turns"
    return found


class ModelRacer:
    """A model that trains on a search's data, for as long as it is told.

    Args:
        model: of the default hyperparameters, under a strategy.
        fit: the user's, taking hyperparameters and model.
        hp: the hyperparameters.
        values: what was coupled to the strategy.
        args: of `search`.
        kwargs: of `search`.
        is_own_fit: whether `fit` decides by itself how long to train.
    """

    def __init__(
        self,
        model: Any,
        fit: Callable[..., Any],
        hp: Any,
        values: CoupledValues,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        is_own_fit: bool,
    ) -> None:
        self._model, self._fit, self._hp, self._values, self._args = model, fit, hp, values, args
        if not is_own_fit and len(args) > 2:  # epochs are to be ours, also where they were given by position
            bound = inspect.signature(keras.Model.fit).bind(model, *args, **kwargs).arguments
            self._args = [bound.pop(name) for name in ("x", "y")]
            kwargs = {name: value for name, value in bound.items() if name != "self"}
        left_out = {"callbacks"} if is_own_fit else {"callbacks", "epochs", "verbose", "initial_epoch"}
        self._kwargs = {
            name: value
            for name, value in kwargs.items()
            if name not in left_out and (is_own_fit or not name.startswith("validation_"))
        }
        if not is_own_fit:
            self._kwargs |= {"epochs": 10**9, "verbose": 0}

    def run(self, seconds: float) -> float:
        """Train for some seconds after the first step, and return the examples a second.

        Raises:
            TunerError: they could not be measured.
        """
        meter = Meter()
        callbacks = [Gauge(meter, ()), _StopAfter(meter, seconds)]
        fit_coupled(self._fit, self._hp, self._model, self._values, *self._args, callbacks=callbacks, **self._kwargs)
        rate = meter.examples_per_second
        if not math.isfinite(rate):
            raise TunerError(
                f"The first pass could not measure how fast '{self._model.name}' trains: that takes three steps at "
                "least, and a HyperModel.fit that gives its callbacks to the model's fit."
            )
        return rate


class _StopAfter(RunCallback):
    supports_multi_step = True

    def __init__(self, meter: Meter, seconds: float) -> None:
        super().__init__()
        self._meter, self._seconds = meter, seconds

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._meter.seconds >= self._seconds:
            self.model.stop_training = True
