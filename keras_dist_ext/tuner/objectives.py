"""Objectives for speed, for the time to a quality, and for quality and time together."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from keras_dist_ext import arguments
from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.aliases import Logs
from keras_dist_ext.errors import TunerError

__all__ = ["UNREACHED", "MeasuredObjective", "SecondsTo", "Timing", "cost", "examples_per_second", "seconds_to"]

UNREACHED = 1e6  # seconds, at least, of a trial that never reaches a quality; more than one that reaches it takes


class Timing(Protocol):
    """What is measured of an execution; a `Meter` has it."""

    @property
    def seconds(self) -> float:
        """Of training, so far."""

    @property
    def examples_per_second(self) -> float:
        """Of all replicas."""


class MeasuredObjective(keras_tuner.Objective):  # type: ignore[misc]
    """An objective that is not in Keras' logs: its value is added to them at the end of each epoch."""

    needs_steps = False  # whether it is NaN until some steps were made

    def reset(self) -> None:
        """Start another execution."""

    def value(self, logs: Logs, timing: Timing) -> float:
        """Return the value after an epoch.

        Args:
            logs: of the epoch.
            timing: of the execution so far.
        """
        raise NotImplementedError

    def final_values(self, values: list[float], timing: Timing) -> list[float]:
        """Return the values of all epochs, after training has ended."""
        del timing
        return values


def examples_per_second() -> MeasuredObjective:
    """Return the objective throughput: steady examples per second of all replicas, without compilation and first steps.

    Give `batch_size_per_replica` (see `Coupled`) to let each strategy work on equally many examples per replica.
    """
    return _Throughput("examples_per_second", "max")


class _Throughput(MeasuredObjective):
    needs_steps = True

    def value(self, logs: Logs, timing: Timing) -> float:
        return timing.examples_per_second

    def final_values(self, values: list[float], timing: Timing) -> list[float]:
        return [timing.examples_per_second] * len(values)  # the best epoch would be the luckiest one


def seconds_to(metric: str, value: float, *, direction: str | None = None) -> MeasuredObjective:
    """Return the objective seconds of training, validation included, until a metric reaches a value at an epoch's end.

    The first executions of training and of validation, which compile, do not count. A trial that never reaches the
    value scores a million seconds or more, the more the farther it stayed away.

    Args:
        metric: as in Keras' logs, such as ``"val_accuracy"``.
        value: to be reached.
        direction: ``"max"`` or ``"min"``; by default what keras-tuner knows of the metric.

    Raises:
        TunerError: the direction is not known, or an argument is invalid.
    """
    metric = arguments.text("metric", metric, wanted="the name of a metric", error=TunerError)
    value = arguments.number("value", value, error=TunerError)
    return SecondsTo(metric, value, _direction_of(metric, direction))


class SecondsTo(MeasuredObjective):
    """What `seconds_to` returns."""

    def __init__(self, metric: str, target: float, direction: str) -> None:
        super().__init__(f"seconds_to_{metric}_{target:g}", "min")
        self._metric, self._target, self._sign = metric, target, 1.0 if direction == "max" else -1.0
        self.reset()

    def reset(self) -> None:
        """Forget the execution before."""
        self._reached: float | None = None
        self._gap = float("inf")

    def value(self, logs: Logs, timing: Timing) -> float:
        """Return the seconds, or how far the metric has stayed away."""
        gap = self._sign * (self._target - _logged(logs, self._metric, self.name))
        if self._reached is None and gap <= 0:
            self._reached = timing.seconds
        if np.isfinite(gap):
            self._gap = min(self._gap, gap)
        if self._reached is not None:
            return self._reached
        return UNREACHED * (1.0 + min(self._gap / max(abs(self._target), 1e-9), 1e3))


def cost(quality: str, seconds: float, *, direction: str | None = None) -> MeasuredObjective:
    """Return an objective of quality and time: the metric plus a price for each second of training, to be minimized.

    A metric that is to be maximized is subtracted. The seconds are those of `seconds_to`.

    Args:
        quality: a metric as in Keras' logs, such as ``"val_loss"``.
        seconds: what a second costs, in units of the metric.
        direction: ``"max"`` or ``"min"``; by default what keras-tuner knows of the metric.

    Raises:
        TunerError: the direction is not known, or the price is not positive.
    """
    quality = arguments.text("quality", quality, wanted="the name of a metric", error=TunerError)
    seconds = arguments.number("seconds", seconds, above=0.0, wanted="what a second costs, a number", error=TunerError)
    return _Cost(quality, seconds, _direction_of(quality, direction))


class _Cost(MeasuredObjective):
    def __init__(self, quality: str, price: float, direction: str) -> None:
        super().__init__(f"cost_{quality}_{price:g}", "min")
        self._quality, self._price, self._sign = quality, price, -1.0 if direction == "max" else 1.0

    def value(self, logs: Logs, timing: Timing) -> float:
        return self._sign * _logged(logs, self._quality, self.name) + self._price * timing.seconds


def _logged(logs: Logs, metric: str, objective: str) -> float:
    if metric not in logs:
        raise TunerError(
            f"The objective {objective} needs {metric!r}, which is not logged; logged are {', '.join(logs)}. Compile "
            "the model with the metric, and give search validation_data if its name begins with val_."
        )
    return float(logs[metric])


def _direction_of(metric: str, direction: str | None) -> str:
    if direction is not None:
        return arguments.one_of("direction", direction, ("min", "max"), or_none=", or None", error=TunerError)
    known: str | None = keras_tuner.engine.metrics_tracking.infer_metric_direction(metric)
    if known is None:
        raise TunerError(f"Whether to maximize or to minimize {metric!r} is not known. Give direction='max' or 'min'.")
    return known
