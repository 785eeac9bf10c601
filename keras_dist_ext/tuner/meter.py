"""Measure how fast a model trains in steady state: compilation and first steps do not count."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.strategies import num_local_replicas
from keras_dist_ext.aliases import Logs
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.step.stats import StepRecords
from keras_dist_ext.training.model import Model
from keras_dist_ext.training.run_callback import RunCallback

__all__ = ["Meter", "quartiles"]

_FIRST_EXECUTIONS = 2  # which trace, compile, and choose the steps per execution


class Meter(RunCallback):
    """Counts examples and time of one call to `fit`.

    Time is that of steps and of what happens between them, without validation and other work between epochs.

    Args:
        seconds_before: spent on the same trial in earlier calls; `seconds` includes them.
        clock: in seconds.
    """

    supports_multi_step = True

    def __init__(self, *, seconds_before: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._recorder = Recorder()
        self._clock = clock
        self._seconds_before = seconds_before
        self._train_start: float | None = None
        self._train_end: float | None = None
        self._test_start: float | None = None
        self._compile_seconds: float | None = None  # of the first execution of validation
        self._num_executions = 0
        self._first: list[StepRecords] = []  # the first executions, one by one
        self._num_examples = 0
        self._busy_seconds = 0.0
        self._local_share = 1.0  # of all replicas, those of this process

    def on_run_prepare(self, model: Model) -> None:
        """Record the steps of the run."""
        strategy = model.distribute_strategy
        if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
            model.add_recorder(self._recorder)
            self._local_share = num_local_replicas(strategy) / strategy.num_replicas_in_sync

    @property
    def seconds(self) -> float:
        """Of training, validation and callbacks after the first execution, without the first of validation."""
        if self._train_start is None:
            return self._seconds_before
        now = self._train_end or self._clock()
        return self._seconds_before + now - self._train_start - (self._compile_seconds or 0.0)

    @property
    def examples_per_second(self) -> float:
        """Of all replicas together; NaN before the third step, or where steps cannot be recorded."""
        if self._busy_seconds > 0:
            return self._num_examples / self._busy_seconds / self._local_share
        for records in reversed(self._first):
            steps = records.steps(1 if records is self._first[0] else 0, len(records))
            if len(steps):
                return float(steps.examples.sum() / max(steps.step_seconds.sum(), 1e-9)) / self._local_share
        return float("nan")

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Continue, if it is not the first training of the model."""
        self._train_end = None

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Keep the first executions apart. Our models call it once per execution."""
        self._num_executions += 1
        if self._num_executions <= _FIRST_EXECUTIONS:
            if self._train_start is None:
                self._train_start = self._clock()
            records = self._recorder.fetch("train")
            if records is not None:
                self._first.append(records)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Start to time the first execution of validation."""
        self._test_start = self._clock()

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Time the first execution of validation."""
        if self._compile_seconds is None and self._train_start is not None and self._test_start is not None:
            self._compile_seconds = self._clock() - self._test_start

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Count what the epoch has done."""
        self._count()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Count the rest, and stop the clock."""
        self._count()
        self._train_end = self._clock()

    def _count(self) -> None:
        records = self._recorder.fetch("train")
        if records is not None:
            self._num_examples += int(records.examples.sum())
            self._busy_seconds += float(records.step_seconds.sum()) + records.host_seconds


def quartiles(samples: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the first quartile, the median and the third quartile of the finite samples; None where there are none."""
    known = [sample for sample in samples if np.isfinite(sample)]
    if not known:
        return None
    low, middle, high = np.quantile(known, [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)
