"""Follow one trial while it runs: measure it, log it, and say why it failed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import (
    FatalTunerError,
    callbacks_with_empty_batch_hooks,
    keras_tuner,
    score_of,
)
from keras_dist_ext.errors import TunerError
from keras_dist_ext.messages import counted
from keras_dist_ext.monitoring.monitor import ReplicaMonitor
from keras_dist_ext.strategy.pick import StrategyChoice
from keras_dist_ext.strategy.scope import describe_strategy
from keras_dist_ext.training.execution_sizer import allow_multi_step
from keras_dist_ext.training.run_callback import RunCallback
from keras_dist_ext.tuner.coupled import CoupledValues, batched, check_fixed_batch
from keras_dist_ext.tuner.failures import Failure, Infeasible, failure_of
from keras_dist_ext.tuner.meter import Meter
from keras_dist_ext.tuner.objectives import Measured
from keras_dist_ext.tuner.records import TrialRecord
from keras_dist_ext.tuner.trial_logs import TrialLogs

__all__ = ["Gauge", "TrialRun", "fit_coupled"]


class TrialRun:
    """One attempt at a trial.

    Args:
        trial: keras-tuner's.
        strategy: the name of its strategy in the search.
        objectives: of the search, one by one.
        logs: where to write what replicas do; None: nowhere.
        seconds_before: of training, in the trial that this one continues.
        tuner: whose hooks keras-tuner's callbacks call.

    Attributes:
        choice: the strategy, once a model is built under it.
        values: what was coupled to it.
    """

    def __init__(
        self,
        trial: Any,
        strategy: str,
        *,
        objectives: Sequence[Any],
        logs: TrialLogs | None,
        seconds_before: float,
        tuner: Any,
    ) -> None:
        self._trial = trial
        self._strategy = strategy
        self._objectives = objectives
        self._measured = [objective for objective in objectives if isinstance(objective, Measured)]
        self._logs = logs
        self._seconds_before = seconds_before
        self._tuner = tuner
        self.choice: StrategyChoice | None = None
        self.values = CoupledValues()
        self._meters: list[Meter] = []

    def fit(self, fit: Callable[..., Any], hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Train a model by the user's `fit`, measured and logged.

        Raises:
            Infeasible: the loss, or an objective, never was a number.
            TunerError: the objective could not be measured.
        """
        meter = Meter(seconds_before=self._seconds_before)
        callbacks = list(kwargs.pop("callbacks", None) or [])
        for callback in callbacks_with_empty_batch_hooks(callbacks, self._tuner):
            allow_multi_step(callback)
        self._part_monitors(callbacks)
        first: list[Any] = [Gauge(meter, self._measured)]
        if self._logs is not None:
            first.append(self._logs.monitor(self._trial.trial_id, len(self._meters)))
        self._meters.append(meter)
        for objective in self._measured:
            objective.begin()
        results = fit_coupled(fit, hp, model, self.values, *args, callbacks=[*first, *callbacks], **kwargs)
        results = self._settle(results, meter)
        self._check_numbers(results)
        return results

    def _part_monitors(self, callbacks: Sequence[Any]) -> None:
        """Have the user's own monitors write each trial into a folder of its own, as keras-tuner does TensorBoard's."""
        name = f"trial_{self._trial.trial_id}"
        if self._tuner.executions_per_trial > 1:
            name += f"/execution_{len(self._meters)}"
        for callback in callbacks:
            if isinstance(callback, ReplicaMonitor):
                callback.write_below(name)

    def _check_numbers(self, results: Any) -> None:
        if isinstance(results, list):
            for result in results:
                self._check_numbers(result)
            return
        history = results.history if isinstance(results, keras.callbacks.History) else results
        history = history if isinstance(history, dict) else {"the objective": history}
        for name in ("the objective", "loss", *(objective.name for objective in self._objectives)):
            values = history.get(name, [])
            numbers = values if isinstance(values, list) else [values]
            if not numbers or not all(isinstance(n, float | np.floating) and np.isnan(n) for n in numbers):
                continue
            if name in [objective.name for objective in self._measured if objective.is_of_steps]:
                raise TunerError(
                    f"The objective {name} could not be measured: it takes three steps of training at least, by a "
                    "model's own fit. Train longer."
                )
            epochs = f" in {counted(len(numbers), 'epoch')} out of {len(numbers)}" if isinstance(values, list) else ""
            raise Infeasible(Failure("NaN loss", f"{name} was NaN{epochs}"))

    def _settle(self, results: Any, meter: Meter) -> Any:
        """Return the results with what was measured, now that training has ended."""
        if isinstance(results, list):
            return [self._settle(result, meter) for result in results]
        for objective in self._measured:
            if isinstance(results, keras.callbacks.History) and objective.name in results.history:
                results.history[objective.name] = objective.settled(results.history[objective.name], meter)
            elif isinstance(results, dict) and objective.name not in results:
                results = {**results, objective.name: objective.value(results, meter)}
        return results

    def check(self, results: Any) -> None:
        """See whether a score can be made of what `run_trial` has returned.

        Raises:
            Infeasible: it would be NaN.
            TunerError: nobody has measured what the trial is judged by.
        """
        for objective in self._measured:
            if _lacks(results, objective.name):
                raise TunerError(
                    f"Nobody has measured {objective.name}: run_trial has trained the model by itself. Train it by "
                    f"self.hypermodel.fit(hp, model, ...), or return a dict that has {objective.name!r}."
                )
        if self.choice is not None and not self._meters and self.values.global_batch_size is not None:
            warnings.warn(
                "run_trial has trained the model without self.hypermodel.fit, so the batches are not those of "
                f"batch_size_per_replica, unless it has made batches of {self.values.global_batch_size} rows itself.",
                stacklevel=3,
            )
        score = score_of(results, self._tuner.oracle.objective)
        if score is not None and math.isnan(score):
            raise Infeasible(Failure("NaN loss", f"{self._tuner.oracle.objective.name} was NaN"))

    def failed(self, error: Exception) -> Exception | None:
        """Return what keras-tuner is to be told instead of an exception; None: the exception itself."""
        if isinstance(error, keras_tuner.errors.FatalError | keras_tuner.errors.FailedTrialError):
            return None
        if isinstance(error, TunerError):
            fatal: Exception = FatalTunerError(str(error))
            return fatal
        failure = failure_of(error)
        if not failure.is_infeasible or failure.may_pass:
            return None  # retried, and counted, as keras-tuner does
        told: Exception = keras_tuner.errors.FailedTrialError(
            f"Under the strategy {self._strategy!r} this trial cannot run. {failure}"
        )
        return told

    def record(self, error: Exception | None = None) -> TrialRecord:
        """Return what is known of the trial, now that it has ended."""
        strategy = None if self.choice is None else self.choice.strategy
        return TrialRecord(
            trial_id=self._trial.trial_id,
            strategy=self._strategy,
            description="" if strategy is None else describe_strategy(strategy),
            num_replicas=0 if strategy is None else strategy.num_replicas_in_sync,
            global_batch_size=self.values.global_batch_size,
            examples_per_second=tuple(
                meter.examples_per_second for meter in self._meters if math.isfinite(meter.examples_per_second)
            ),
            seconds=tuple(meter.seconds for meter in self._meters),
            failure=None if error is None else failure_of(error),
            values=dict(self._trial.hyperparameters.values),
        )


def _lacks(results: Any, name: str) -> bool:
    if isinstance(results, list):
        return any(_lacks(result, name) for result in results)
    results = results.history if isinstance(results, keras.callbacks.History) else results
    return isinstance(results, dict) and name not in results


def fit_coupled(fit: Callable[..., Any], hp: Any, model: Any, values: CoupledValues, *args: Any, **kwargs: Any) -> Any:
    """Train a model by the user's `fit`, on data in batches of the size that goes with the strategy."""
    given: Sequence[Any] = args
    if values.global_batch_size is not None:
        given, kwargs = batched(args, kwargs, values.global_batch_size, model)
    elif "batch_size" in kwargs:
        check_fixed_batch(model, kwargs["batch_size"])
    return fit(hp, model, *given, **kwargs)


class Gauge(RunCallback):
    """Adds what is measured to the logs of each epoch; it comes first, so that other callbacks see it."""

    supports_multi_step = True

    def __init__(self, meter: Meter, measured: Sequence[Measured]) -> None:
        super().__init__()
        self._meter = meter
        self._measured = measured

    def on_run_prepare(self, model: Any) -> None:
        """Have steps recorded."""
        self._meter.on_run_prepare(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin."""
        self._meter.on_train_begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self._meter.on_train_batch_end(batch)

    def on_test_begin(self, logs: Any = None) -> None:
        """Count."""
        self._meter.on_test_begin()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self._meter.on_test_batch_end(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count, and add to the logs."""
        self._meter.on_epoch_end(epoch)
        if logs is not None:
            for objective in self._measured:
                logs[objective.name] = objective.value(logs, self._meter)

    def on_train_end(self, logs: Any = None) -> None:
        """End."""
        self._meter.on_train_end()
