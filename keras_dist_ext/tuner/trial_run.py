"""Follow one trial while it runs: measure it, log it, and report why it failed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import (
    FatalBackendError,
    FatalTunerError,
    callbacks_with_empty_batch_hooks,
    keras_tuner,
    score_of,
)
from keras_dist_ext.aliases import FitArgument, Logs, UserFunction
from keras_dist_ext.errors import BackendError, TunerError
from keras_dist_ext.messages import counted
from keras_dist_ext.monitoring.monitor import ReplicaMonitor
from keras_dist_ext.strategy.scope import describe_strategy
from keras_dist_ext.training.execution_sizer import allow_multi_step
from keras_dist_ext.training.model import Model
from keras_dist_ext.training.run_callback import RunCallback
from keras_dist_ext.tuner.coupled import CoupledValues, batch_data, check_fixed_batch
from keras_dist_ext.tuner.failures import Failure, InfeasibleError, classify_failure
from keras_dist_ext.tuner.meter import Meter
from keras_dist_ext.tuner.model_builder import Built
from keras_dist_ext.tuner.objectives import MeasuredObjective
from keras_dist_ext.tuner.records import TrialRecord
from keras_dist_ext.tuner.trial_logs import TrialLogs

__all__ = ["ObjectiveLogger", "TrialRun", "fit_with_coupled"]


class TrialRun:
    """One attempt at a trial.

    Args:
        trial: keras-tuner's.
        strategy: the name of its strategy in the search.
        built: what its models are built under; filled in when the first of them is built.
        objectives: the single objectives of the search.
        logs: where to write what replicas do; None: nowhere.
        seconds_before: of training, in the trial that this one continues.
        tuner: whose hooks keras-tuner's callbacks call.
    """

    def __init__(
        self,
        trial: keras_tuner.engine.trial.Trial,
        strategy: str,
        built: Built,
        *,
        objectives: Sequence[keras_tuner.Objective],
        logs: TrialLogs | None,
        seconds_before: float,
        tuner: keras_tuner.Tuner,
    ) -> None:
        self._trial = trial
        self._strategy = strategy
        self._built = built
        self._objectives = objectives
        self._measured = [objective for objective in objectives if isinstance(objective, MeasuredObjective)]
        self._logs = logs
        self._seconds_before = seconds_before
        self._tuner = tuner
        self._meters: list[Meter] = []

    def fit(
        self,
        fit: UserFunction,
        hp: keras_tuner.HyperParameters,
        model: keras.Model,
        *args: FitArgument,
        **kwargs: FitArgument,
    ) -> object:
        """Train a model by the user's `fit`, measured and logged.

        Raises:
            InfeasibleError: the loss, or an objective, was NaN in all epochs.
            TunerError: the objective could not be measured.
        """
        meter = Meter(seconds_before=self._seconds_before)
        callbacks = list(kwargs.pop("callbacks", None) or [])
        for callback in callbacks_with_empty_batch_hooks(callbacks, self._tuner):
            allow_multi_step(callback)
        self._separate_monitors(callbacks)
        first: list[keras.callbacks.Callback] = [ObjectiveLogger(meter, self._measured)]
        if self._logs is not None:
            first.append(self._logs.monitor(self._trial.trial_id, len(self._meters)))
        self._meters.append(meter)
        for objective in self._measured:
            objective.reset()
        values = self._built.values
        results = fit_with_coupled(fit, hp, model, values, *args, callbacks=[*first, *callbacks], **kwargs)
        results = self._add_measurements(results, meter)
        self._check_numbers(results)
        return results

    def _separate_monitors(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Let the user's monitors write each trial into its own folder, as keras-tuner does for TensorBoard."""
        name = f"trial_{self._trial.trial_id}"
        if self._tuner.executions_per_trial > 1:
            name += f"/execution_{len(self._meters)}"
        for callback in callbacks:
            if isinstance(callback, ReplicaMonitor):
                callback.use_subdirectory(name)

    def _check_numbers(self, results: object) -> None:
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
            if name in [objective.name for objective in self._measured if objective.needs_steps]:
                raise TunerError(
                    f"The objective {name} could not be measured: that takes at least three steps of training, by a "
                    "model's own fit. Train longer."
                )
            epochs = f" in {counted(len(numbers), 'epoch')} out of {len(numbers)}" if isinstance(values, list) else ""
            raise InfeasibleError(Failure("NaN loss", f"{name} was NaN{epochs}"))

    def _add_measurements(self, results: object, meter: Meter) -> object:
        """Return the results with what was measured, now that training has ended."""
        if isinstance(results, list):
            return [self._add_measurements(result, meter) for result in results]
        for objective in self._measured:
            if isinstance(results, keras.callbacks.History) and objective.name in results.history:
                results.history[objective.name] = objective.final_values(results.history[objective.name], meter)
            elif isinstance(results, dict) and objective.name not in results:
                results = {**results, objective.name: objective.value(results, meter)}
        return results

    def check(self, results: object) -> None:
        """Check that the results of `run_trial` have a score.

        Raises:
            InfeasibleError: the score is NaN.
            TunerError: the objective was not measured.
        """
        for objective in self._measured:
            if _is_missing(results, objective.name):
                raise TunerError(
                    f"The objective {objective.name} was not measured, because run_trial has trained the model without "
                    f"self.hypermodel.fit. Train it by self.hypermodel.fit(hp, model, ...), or return a dict that has "
                    f"{objective.name!r}."
                )
        batch_size = self._built.values.global_batch_size
        if self._built.choice is not None and not self._meters and batch_size is not None:
            warnings.warn(
                "run_trial has trained the model without self.hypermodel.fit, so the batches are not those of "
                f"batch_size_per_replica, unless it has made batches of {batch_size} examples itself.",
                stacklevel=3,
            )
        score = score_of(results, self._tuner.oracle.objective)
        if score is not None and math.isnan(score):
            raise InfeasibleError(Failure("NaN loss", f"{self._tuner.oracle.objective.name} was NaN"))

    def error_for_tuner(self, error: Exception) -> Exception | None:
        """Return the exception to raise to keras-tuner instead of one that ended the trial; None: that one itself."""
        if isinstance(error, keras_tuner.errors.FatalError | keras_tuner.errors.FailedTrialError):
            return None
        if isinstance(error, TunerError | BackendError):
            kind: type[Exception] = FatalTunerError if isinstance(error, TunerError) else FatalBackendError
            return kind(str(error))
        failure = classify_failure(error)
        if not failure.is_infeasible or failure.is_transient:
            return None  # retried, and counted, as keras-tuner does
        failed: Exception = keras_tuner.errors.FailedTrialError(
            f"This trial cannot run under the strategy {self._strategy!r}. {failure}"
        )
        return failed

    def record(self, error: Exception | None = None) -> TrialRecord:
        """Return what is known of the trial, now that it has ended."""
        strategy = None if self._built.choice is None else self._built.choice.strategy
        return TrialRecord(
            trial_id=self._trial.trial_id,
            strategy=self._strategy,
            description="" if strategy is None else describe_strategy(strategy),
            num_replicas=0 if strategy is None else strategy.num_replicas_in_sync,
            global_batch_size=self._built.values.global_batch_size,
            examples_per_second=tuple(
                meter.examples_per_second for meter in self._meters if math.isfinite(meter.examples_per_second)
            ),
            seconds=tuple(meter.seconds for meter in self._meters),
            failure=None if error is None else classify_failure(error),
            values=dict(self._trial.hyperparameters.values),
        )


def _is_missing(results: object, name: str) -> bool:
    if isinstance(results, list):
        return any(_is_missing(result, name) for result in results)
    results = results.history if isinstance(results, keras.callbacks.History) else results
    return isinstance(results, dict) and name not in results


def fit_with_coupled(
    fit: UserFunction,
    hp: keras_tuner.HyperParameters,
    model: keras.Model,
    values: CoupledValues,
    *args: FitArgument,
    **kwargs: FitArgument,
) -> object:
    """Train a model by the user's `fit`, on data in batches of the size that is coupled to the strategy."""
    given: Sequence[FitArgument] = args
    if values.global_batch_size is not None:
        given, kwargs = batch_data(args, kwargs, values.global_batch_size, model)
    elif "batch_size" in kwargs:
        check_fixed_batch(model, kwargs["batch_size"])
    return fit(hp, model, *given, **kwargs)


class ObjectiveLogger(RunCallback):
    """Adds measured objectives to the logs of each epoch; it comes first, so that other callbacks see them."""

    supports_multi_step = True

    def __init__(self, meter: Meter, measured: Sequence[MeasuredObjective]) -> None:
        super().__init__()
        self._meter = meter
        self._measured = measured

    def on_run_prepare(self, model: Model) -> None:
        """Record the steps of the run."""
        self._meter.on_run_prepare(model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start the meter."""
        self._meter.on_train_begin()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Measure."""
        self._meter.on_train_batch_end(batch)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Measure."""
        self._meter.on_test_begin()

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Measure."""
        self._meter.on_test_batch_end(batch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Measure, and add to the logs."""
        self._meter.on_epoch_end(epoch)
        if logs is not None:
            for objective in self._measured:
                logs[objective.name] = objective.value(logs, self._meter)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Stop the meter."""
        self._meter.on_train_end()
