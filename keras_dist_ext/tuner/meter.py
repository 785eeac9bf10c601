"""Measure how fast a model trains once it runs: compilation and first steps left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.strategies import num_local_replicas
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.step.stats import StepRecords
from keras_dist_ext.training.run_callback import RunCallback

__all__ = ["Meter", "quartiles"]

_FIRST_EXECUTIONS = 2  # which trace, compile, and find out how many steps to make at once


class Meter(RunCallback):
    """Counts examples and time of one call to `fit`.

    Time is that of steps and of what happens between them, without validation and what else comes between epochs.

    Args:
        seconds_before: spent on the same trial in earlier calls, which `seconds` goes on from.
        clock: in seconds.
    """

    supports_multi_step = True

    def __init__(self, *, seconds_before: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._recorder = Recorder()
        self._clock = clock
        self._seconds_before = seconds_before
        self._began: float | None = None
        self._ended: float | None = None
        self._test_began: float | None = None
        self._compiling_seconds: float | None = None  # of the first execution of validation
        self._num_executions = 0
        self._first: list[StepRecords] = []  # the first executions, one by one
        self._examples = 0
        self._busy_seconds = 0.0
        self._share = 1.0  # of all replicas, which this process sees

    def on_run_prepare(self, model: Any) -> None:
        """Have steps recorded."""
        strategy = model.distribute_strategy
        if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
            model.add_recorder(self._recorder)
            self._share = num_local_replicas(strategy) / strategy.num_replicas_in_sync

    @property
    def seconds(self) -> float:
        """Of training, validation and callbacks, from the end of the first execution on; that of validation is out."""
        if self._began is None:
            return self._seconds_before
        now = self._ended or self._clock()
        return self._seconds_before + now - self._began - (self._compiling_seconds or 0.0)

    @property
    def examples_per_second(self) -> float:
        """Of all replicas together; NaN until three steps are made, or where steps cannot be recorded."""
        if self._busy_seconds > 0:
            return self._examples / self._busy_seconds / self._share
        for records in reversed(self._first):
            steps = records.steps(1 if records is self._first[0] else 0, len(records))
            if len(steps):
                return float(steps.examples.sum() / max(steps.step_seconds.sum(), 1e-9)) / self._share
        return float("nan")

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on, where it is not the first training of the model."""
        self._ended = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set the first executions apart. A model of ours calls it once an execution."""
        self._num_executions += 1
        if self._num_executions <= _FIRST_EXECUTIONS:
            if self._began is None:
                self._began = self._clock()
            records = self._recorder.fetch("train")
            if records is not None:
                self._first.append(records)

    def on_test_begin(self, logs: Any = None) -> None:
        """Begin to time the first execution of validation."""
        self._test_began = self._clock()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set the first execution of validation apart."""
        if self._compiling_seconds is None and self._began is not None and self._test_began is not None:
            self._compiling_seconds = self._clock() - self._test_began

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count what the epoch has done."""
        self._count()

    def on_train_end(self, logs: Any = None) -> None:
        """Count the rest, and stop the clock."""
        self._count()
        self._ended = self._clock()

    def _count(self) -> None:
        records = self._recorder.fetch("train")
        if records is not None:
            self._examples += int(records.examples.sum())
            self._busy_seconds += float(records.step_seconds.sum()) + records.host_seconds


def quartiles(samples: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the first quartile, the median and the third of what is a number among some samples."""
    known = [sample for sample in samples if np.isfinite(sample)]
    if not known:
        return None
    low, middle, high = np.quantile(known, [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)
