"""Judge trials by speed, by the time to a quality, or by quality and time together."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.errors import TunerError

__all__ = ["UNREACHED", "Measured", "SecondsTo", "cost", "examples_per_second", "seconds_to"]

UNREACHED = 1e6  # seconds; more than those that a trial takes to a quality, for one that never gets there


class _Times(Protocol):
    @property
    def seconds(self) -> float: ...

    @property
    def examples_per_second(self) -> float: ...


class Measured(keras_tuner.Objective):  # type: ignore[misc]
    """An objective whose value is not in Keras' logs: it is added to them at the end of each epoch."""

    is_of_steps = False  # whether it is NaN until some steps were made

    def begin(self) -> None:
        """Take note that another execution begins."""

    def value(self, logs: dict[str, Any], times: _Times) -> float:
        """Return the value after an epoch.

        Args:
            logs: of the epoch.
            times: of the execution so far.
        """
        raise NotImplementedError

    def settled(self, values: list[float], times: _Times) -> list[float]:
        """Return the values of all epochs, now that training has ended."""
        del times
        return values


def examples_per_second() -> Measured:
    """Judge by throughput: examples a second of all replicas, once it runs steadily (compilation and first steps out).

    Give `batch_size_per_replica` (see `Coupled`) to have each strategy work on as many rows a replica.
    """
    return _Throughput("examples_per_second", "max")


class _Throughput(Measured):
    is_of_steps = True

    def value(self, logs: dict[str, Any], times: _Times) -> float:
        return times.examples_per_second

    def settled(self, values: list[float], times: _Times) -> list[float]:
        return [times.examples_per_second] * len(values)  # the best epoch would be the luckiest one


def seconds_to(metric: str, value: float, *, direction: str | None = None) -> Measured:
    """Judge by the seconds of training, validation included, until a metric has reached a value at an epoch's end.

    The first executions of training and of validation, which compile, are left out of the time. A trial that never
    gets there scores a million seconds and more, the more the farther it stayed away.

    Args:
        metric: as in Keras' logs, say ``"val_accuracy"``.
        value: to be reached.
        direction: ``"max"`` or ``"min"``; by default what keras-tuner knows of the metric.

    Raises:
        TunerError: the direction is not known.
    """
    return SecondsTo(metric, float(value), _direction_of(metric, direction))


class SecondsTo(Measured):
    """What `seconds_to` returns."""

    def __init__(self, metric: str, target: float, direction: str) -> None:
        super().__init__(f"seconds_to_{metric}_{target:g}", "min")
        self._metric, self._target, self._sign = metric, target, 1.0 if direction == "max" else -1.0
        self.begin()

    def begin(self) -> None:
        """Forget the execution before."""
        self._reached: float | None = None
        self._gap = float("inf")

    def value(self, logs: dict[str, Any], times: _Times) -> float:
        """Return the seconds, or how far the metric has stayed away."""
        gap = self._sign * (self._target - _logged(logs, self._metric, self.name))
        if self._reached is None and gap <= 0:
            self._reached = times.seconds
        if np.isfinite(gap):
            self._gap = min(self._gap, gap)
        if self._reached is not None:
            return self._reached
        return UNREACHED * (1.0 + min(self._gap / max(abs(self._target), 1e-9), 1e3))


def cost(quality: str, seconds: float, *, direction: str | None = None) -> Measured:
    """Judge by quality and time together: the metric plus a price for each second of training, the less the better.

    A metric that is the better the greater counts with a minus. The clock is that of `seconds_to`.

    Args:
        quality: a metric as in Keras' logs, say ``"val_loss"``.
        seconds: what a second costs, in units of the metric.
        direction: ``"max"`` or ``"min"``; by default what keras-tuner knows of the metric.

    Raises:
        TunerError: the direction is not known, or a second costs nothing.
    """
    if not seconds > 0:
        raise TunerError(f"cost({quality!r}, seconds={seconds!r}): give what a second costs, a positive number.")
    return _Cost(quality, float(seconds), _direction_of(quality, direction))


class _Cost(Measured):
    def __init__(self, quality: str, price: float, direction: str) -> None:
        super().__init__(f"cost_{quality}_{price:g}", "min")
        self._quality, self._price, self._sign = quality, price, -1.0 if direction == "max" else 1.0

    def value(self, logs: dict[str, Any], times: _Times) -> float:
        return self._sign * _logged(logs, self._quality, self.name) + self._price * times.seconds


def _logged(logs: dict[str, Any], metric: str, objective: str) -> float:
    if metric not in logs:
        raise TunerError(
            f"The objective {objective} looks at {metric!r}, which is not logged; there are {', '.join(logs)}. Compile "
            "the model with the metric, and give search validation_data where its name begins with val_."
        )
    return float(logs[metric])


def _direction_of(metric: str, direction: str | None) -> str:
    direction = direction or keras_tuner.engine.metrics_tracking.infer_metric_direction(metric)
    if direction not in ("min", "max"):
        raise TunerError(
            f"Whether {metric!r} is the better the greater or the less is not known. Give direction='max' or 'min'."
        )
    return direction
