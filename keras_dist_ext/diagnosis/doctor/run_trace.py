"""Note what happens in one run, and put together what is known of it when it is over."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.strategies import first_replica
from keras_dist_ext.data.pipeline import inspect, mixing_of
from keras_dist_ext.diagnosis.doctor.dtype_speed import measure_dtype
from keras_dist_ext.diagnosis.doctor.epoch_clock import EpochClock
from keras_dist_ext.diagnosis.doctor.examination import BetweenEpochs, Examination, Times, Trials
from keras_dist_ext.diagnosis.doctor.host_clock import CallbackClock, TraceWatch
from keras_dist_ext.diagnosis.doctor.interventions import experiment
from keras_dist_ext.diagnosis.doctor.map_loops import find_map_loops
from keras_dist_ext.diagnosis.doctor.part_trials import measure_parts
from keras_dist_ext.diagnosis.doctor.parts import Parts
from keras_dist_ext.diagnosis.doctor.python_clock import PythonClock
from keras_dist_ext.diagnosis.doctor.python_data import look_into
from keras_dist_ext.diagnosis.doctor.python_data_rules import explains_wait, judge_python_data
from keras_dist_ext.diagnosis.doctor.setting import read_setting
from keras_dist_ext.diagnosis.doctor.shape_trials import measure_padding, measure_recompilation, read_padding
from keras_dist_ext.diagnosis.doctor.shapes import Padding, Recompilation
from keras_dist_ext.diagnosis.doctor.step_blocks import StepBlocks
from keras_dist_ext.errors import KerasDistError
from keras_dist_ext.findings import SLOWS_PIPELINES, Finding
from keras_dist_ext.monitoring.exchange import gather_intervals
from keras_dist_ext.monitoring.monitor import ReplicaMonitor
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.execution_sizer import looks_at_batches
from keras_dist_ext.training.run_callback import RunCallback, RunData
from keras_dist_ext.training.snapshot import kept_pass
from keras_dist_ext.training.worker_sync import own_callback

__all__ = ["RunTrace"]

_LEAST_STEPS, _LEAST_BLOCKS = 8, 3  # fewer prove nothing
_LEAST_EPOCHS = 3  # times between two
_LEAST_COMPUTING = 0.3  # of the time, for shapes of batches to matter


class RunTrace:
    """What is noted in one run.

    Attributes:
        num_executions: that were made.
        is_over: whether nothing more is noted; so too before the end, where steps are short and enough were seen.

    Args:
        model: any Keras model.
        recorder: of its steps; None for stock Keras.
        data: what a model of stock Keras is trained on, where that is known and can be read again.
    """

    def __init__(self, model: keras.Model, recorder: Recorder | None, data: tf.data.Dataset | None = None) -> None:
        self.model = model
        self.is_ours = recorder is not None
        self.monitors: list[ReplicaMonitor] = []
        self._recorder = recorder
        self._blocks = None if recorder is None else StepBlocks(recorder)
        self._clock: CallbackClock | None = None
        self._epochs: EpochClock | None = None
        self._traces = TraceWatch()
        self._python = PythonClock()
        self._run_data: RunData | None = None
        self._data = data
        self._second_end = self._last_end = 0.0  # of the steps of stock Keras
        self._step_watchers: tuple[str, ...] = ()
        self.is_over = False
        self._graphs: list[tf.Graph] = []
        self._others_cores: float | None = None
        self.num_executions = 0
        self._num_passes = 0

    @property
    def num_steps(self) -> int:
        """Steps that were watched so far, about."""
        return self.num_executions if self._blocks is None else self._blocks.num_steps

    def on_run_begin(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        data: RunData | None,
        doctor: RunCallback,
        *,
        times_epochs: bool = True,
    ) -> None:
        """Take note of the other callbacks, and of the data."""
        self._run_data = data
        self.monitors = [other for other in callbacks if isinstance(other, ReplicaMonitor)]
        self._step_watchers = tuple(type(own_callback(c)).__name__ for c in callbacks if looks_at_batches([c], "train"))
        self._clock = CallbackClock(callbacks, but=doctor)
        self._epochs = EpochClock(callbacks, but=doctor) if times_epochs else None

    def end_execution(self) -> None:
        """Take note of an execution."""
        self.num_executions += 1
        self._traces.execution += 1
        if self._blocks is None:
            self._last_end = time.perf_counter()
            if self.num_executions == 2:
                self._second_end = self._last_end
        if self._blocks is None or self.is_over:
            return
        if self._epochs is not None:
            self._epochs.end_execution()
        num_passes = getattr(self._run_data, "num_passes", 0)
        begins_pass, self._num_passes = num_passes != self._num_passes, num_passes
        if self._blocks.end_execution(begins_pass=begins_pass):
            self._traces.reset()
            self._python.reset()
            if self._clock is not None:
                self._clock.reset()
        elif self._blocks.is_enough and workers_of(self.model.distribute_strategy) is None:
            self.stop()
            self.model.drop_recorder(self._recorder)

    def end_epoch(self) -> None:
        """Take note that all callbacks know that an epoch has ended."""
        if self._epochs is not None and not self.is_over:
            self._epochs.end_epoch()
            self._traces.forget_execution()  # what was traced since its last step

    def begin_epoch(self) -> None:
        """Take note that all callbacks know of a new epoch."""
        if self._epochs is not None and not self.is_over:
            self._epochs.begin_epoch()
            self._traces.forget_execution()

    def begin_validation(self) -> None:
        """Take note that validation begins."""
        if self._epochs is not None and not self.is_over:
            self._epochs.begin_validation()

    def end_validation(self) -> None:
        """Take note that validation has ended."""
        if self._epochs is not None and not self.is_over:
            self._epochs.end_validation()

    def stop(self) -> None:
        """Watch no longer."""
        if self.is_over:
            return
        self.is_over = True
        with contextlib.ExitStack() as stack:  # where one fails, the others still stop
            if self._clock is not None:
                stack.callback(self._clock.stop)
            if self._epochs is not None:
                stack.callback(self._epochs.stop)
            stack.callback(self._python.stop)
            stack.callback(self._traces.stop)
        if self._blocks is not None:
            with contextlib.suppress(tf.errors.OpError):  # of a run that was broken off
                self._blocks.end()
            self._others_cores = self._blocks.others_cores
        program = getattr(self.model.train_function, "program", None) if self.is_ours else None
        self._graphs = [] if program is None or not hasattr(program, "graphs") else program.graphs()

    def examination(self, strategy: tf.distribute.Strategy | None, *, interventions: bool) -> Examination:
        """Return all that is known of the run. Every worker must call it."""
        setting = read_setting(self.model, strategy=strategy, step_watchers=self._step_watchers, graphs=self._graphs)
        times = self._times()
        data = self._run_data
        mixing = mixing_of(data.given if data is not None and data.is_pipeline else self._data)
        if times is None:
            steps = self._stock_steps()
            padding = None if self._data is None or steps is None else read_padding(self._data)
            pipeline = self._stock_findings()
            return Examination(setting, pipeline=tuple(pipeline), mixing=mixing, stock_steps=steps, padding=padding)
        with kept_pass(None if self._run_data is None else self._run_data.given):
            trials = self._trials(times) if interventions else None
            slow, batch_seconds = self._data_findings(times)
            padding, recompilation = self._shapes(times)
            parts = self._parts(times, setting.devices[0])
            return Examination(
                setting,
                times,
                trials,
                tuple(slow),
                mixing,
                batch_seconds=batch_seconds,
                between=self._between(),
                dtype=measure_dtype(self.model, setting.devices[0]),
                map_loops=find_map_loops(
                    self._graphs,
                    [layer.name for layer in flat_layers(self.model)],
                    setting.devices[0],
                    round(float(times.examples.mean()) / times.num_steps),
                ),
                padding=padding,
                recompilation=recompilation,
                parts=parts,
            )

    def _shapes(self, times: Times) -> tuple[Padding | None, Recompilation | None]:
        """Say what the shapes of batches cost, where steps compute for long."""
        data, computing = self._run_data, times.compute() * times.num_steps
        is_one_process = workers_of(self.model.distribute_strategy) is None
        if data is None or not data.can_be_read_again or not is_one_process or self.model.run_eagerly:
            return None, None
        if self._blocks is None or times.shares()["computing"] < _LEAST_COMPUTING:
            return None, None
        return (
            measure_padding(self.model, data.given, computing / times.num_steps),
            measure_recompilation(self.model, data.given, self._blocks.compute_seconds),
        )

    def _parts(self, times: Times, device: str) -> Parts:
        """Say what metrics, single layers and summaries cost, where steps call no Python."""
        data, shares = self._run_data, times.shares()
        is_one_process = workers_of(self.model.distribute_strategy) is None
        if data is None or not data.can_be_read_again or not is_one_process or times.python:
            return Parts()
        if self.model.run_eagerly:
            return Parts()
        num_steps = max(1, round(times.num_steps / max(1, times.num_executions)))
        computes = shares["computing"] + shares["synchronising"] >= _LEAST_COMPUTING
        return measure_parts(self.model, data.given, self._graphs, num_steps, device, computes=computes)

    def _stock_steps(self) -> tuple[int, float] | None:
        """How many steps stock Keras has made after the first two, which trace, and their seconds."""
        num_steps = self.num_executions - 2
        return (num_steps, self._last_end - self._second_end) if num_steps >= _LEAST_STEPS else None

    def _stock_findings(self) -> list[Finding]:
        """Say why the data of a model of stock Keras is slow, if it is."""
        steps = self._stock_steps()
        if self._data is None or steps is None:
            return []
        num_steps, seconds = steps
        return [
            dataclasses.replace(
                finding,
                seconds=None if finding.seconds is None else min(seconds, finding.seconds * num_steps),
                evidence=f"{finding.evidence}; a step of stock Keras took {1e3 * seconds / num_steps:.3g} ms",
            )
            for finding in _inspected(self._data, least_seconds=0.1 * seconds / num_steps)[0]
        ]

    def _times(self) -> Times | None:
        blocks = [] if self._blocks is None else self._blocks.blocks
        strategy = self.model.distribute_strategy
        if len(blocks) < _LEAST_BLOCKS or sum(block.num_steps for block in blocks) < _LEAST_STEPS:
            return None
        assert self._blocks is not None
        whole, _, _ = gather_intervals(
            blocks,
            workers_of(strategy),
            first=first_replica(strategy),
            num_replicas=strategy.num_replicas_in_sync,
        )
        return Times(
            blocks=tuple(whole),
            num_executions=self._blocks.num_executions,
            calls=() if self._clock is None else self._clock.calls(),
            traces=self._traces.traces(),
            tracing_seconds=self._traces.seconds,
            others_cores=self._others_cores,
            python=self._python.calls(self._graphs),
            start_seconds=tuple(self._blocks.start_seconds),
        )

    def _between(self) -> BetweenEpochs | None:
        between = None if self._epochs is None else self._epochs.between()
        return None if between is None or between.num_times < _LEAST_EPOCHS else between

    def _trials(self, times: Times) -> Trials:
        model, data = self.model, self._run_data
        if workers_of(model.distribute_strategy) is not None:
            return Trials(skipped={"all": "there are several workers"})
        if data is None or not data.can_be_read_again:
            return Trials(skipped={"all": "the data can be read once only"})
        steps = round(times.num_steps / max(1, times.num_executions))
        return experiment(model, data.given, steps_per_execution=steps)

    def _data_findings(self, times: Times) -> tuple[list[Finding], float | None]:
        """Say why data is slow, if it is, and the seconds of a batch that nothing else is done beside, if known."""
        waited, starting = times.input_seconds, sum(times.start_seconds)
        if self._run_data is None or waited + starting < 0.1 * (times.seconds + starting):
            return [], None
        if not self._run_data.can_be_read_again:
            spare = max(0.0, times.seconds - times.input_seconds) / times.num_steps
            made = look_into(self._run_data.data_adapter)
            if not explains_wait(made, (waited + starting) / times.num_steps):
                return [], made.seconds
            return [judge_python_data(made, spare)], None
        if not self._run_data.is_pipeline:
            return [], None
        return _inspected(self._run_data.given)


def _inspected(dataset: tf.data.Dataset, least_seconds: float = 0.0) -> tuple[list[Finding], float | None]:
    """Return what `inspect` says of a pipeline that costs time; the rest is no matter of parallelism.

    Args:
        dataset: to look into.
        least_seconds: that a batch must take to be worth a word.

    Returns:
        Findings with the seconds that each loses a batch; and the seconds that a batch takes, if known.
    """
    try:
        seen = inspect(dataset, seconds=1.0)
    except (KerasDistError, tf.errors.OpError):
        return [], None  # that it is slow is known all the same
    if (seen.times.batch_seconds or 0.0) < least_seconds:
        return [], seen.times.batch_seconds
    found = [
        dataclasses.replace(f, seconds=None if f.seconds is None else f.seconds / max(1, seen.times.num_batches))
        for f in seen.findings
        if f.code in SLOWS_PIPELINES
    ]
    return found, seen.times.batch_seconds
