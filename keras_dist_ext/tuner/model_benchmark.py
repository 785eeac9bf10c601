"""Benchmark one model on a search's data: train it for some seconds, and return the examples per second."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.aliases import FitArgument, Logs, UserFunction
from keras_dist_ext.errors import TunerError
from keras_dist_ext.training.run_callback import RunCallback
from keras_dist_ext.tuner.coupled import CoupledValues
from keras_dist_ext.tuner.meter import Meter
from keras_dist_ext.tuner.trial_run import ObjectiveLogger, fit_with_coupled

__all__ = ["ModelBenchmark"]


class ModelBenchmark:
    """A model that trains on a search's data, for the seconds given to `run`.

    Args:
        model: of the default hyperparameters, under a strategy.
        fit: the user's, taking hyperparameters and model.
        hp: the hyperparameters.
        values: what was coupled to the strategy.
        args: of `search`.
        kwargs: of `search`.
        has_own_fit: whether `fit` is the user's own, which decides how long to train.
    """

    def __init__(
        self,
        model: keras.Model,
        fit: UserFunction,
        hp: keras_tuner.HyperParameters,
        values: CoupledValues,
        args: Sequence[FitArgument],
        kwargs: Mapping[str, FitArgument],
        *,
        has_own_fit: bool,
    ) -> None:
        self._model, self._fit, self._hp, self._values, self._args = model, fit, hp, values, args
        if not has_own_fit and len(args) > 2:  # epochs are set below, also where they were given by position
            bound = inspect.signature(keras.Model.fit).bind(model, *args, **kwargs).arguments
            self._args = [bound.pop(name) for name in ("x", "y")]
            kwargs = {name: value for name, value in bound.items() if name != "self"}
        left_out = {"callbacks"} if has_own_fit else {"callbacks", "epochs", "verbose", "initial_epoch"}
        self._kwargs = {
            name: value
            for name, value in kwargs.items()
            if name not in left_out and (has_own_fit or not name.startswith("validation_"))
        }
        if not has_own_fit:
            self._kwargs |= {"epochs": 10**9, "verbose": 0}

    def run(self, seconds: float) -> float:
        """Train for some seconds after the first step, and return the examples per second.

        Raises:
            TunerError: they could not be measured.
        """
        meter = Meter()
        callbacks = [ObjectiveLogger(meter, ()), _StopAfter(meter, seconds)]
        fit_with_coupled(
            self._fit, self._hp, self._model, self._values, *self._args, callbacks=callbacks, **self._kwargs
        )
        rate = meter.examples_per_second
        if not math.isfinite(rate):
            raise TunerError(
                f"Screening could not measure how fast '{self._model.name}' trains: that takes at least three steps, "
                "and a HyperModel.fit that passes its callbacks to the model's fit."
            )
        return rate


class _StopAfter(RunCallback):
    supports_multi_step = True

    def __init__(self, meter: Meter, seconds: float) -> None:
        super().__init__()
        self._meter, self._seconds = meter, seconds

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._meter.seconds >= self._seconds:
            self.model.stop_training = True
