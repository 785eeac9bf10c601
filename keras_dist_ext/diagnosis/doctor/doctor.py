"""A callback that measures a run, finds out why it is not faster, and reports it."""

from __future__ import annotations

import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import Logs
from keras_dist_ext.diagnosis.doctor.comparison import Comparison, since
from keras_dist_ext.diagnosis.doctor.report import Report, as_json
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.diagnosis.doctor.run_trace import RunTrace
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.monitoring.event_files import EventWriter
from keras_dist_ext.monitoring.intervals import StepCounter
from keras_dist_ext.monitoring.manifest import build_manifest, describe_model
from keras_dist_ext.monitoring.writers import CompositeWriter, Run, Writer, checked_writers
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.strategy.given import checked_strategy
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.model import Model
from keras_dist_ext.training.run_callback import RunCallback, RunData
from keras_dist_ext.whole_files import write_whole

__all__ = ["ParallelismDoctor"]


class ParallelismDoctor(RunCallback):
    """Say why a run is not faster, and what to change: findings, most seconds first, none on a healthy run.

        model.fit(train, epochs=5, callbacks=[kde.ParallelismDoctor()])

    It records where the time of steps goes on each replica: input, computing, synchronising, and the host with its
    callbacks, tracing and Python; and it looks at strategy, devices, scope and the data's pipeline. When training ends
    it says what it found, in the terminal, as ``report``, and where it is told to. Steps shorter than 3 ms are recorded
    for the first two seconds alone, since recording would cost more than 1% of them. Of a pipeline that replicas wait
    for it reads some batches once more when training ends, to tell why. With a ``ReplicaMonitor`` in the same run, its
    dashboard shows the findings.

    Of a model of stock Keras it judges the setting: nobody can see into its steps.

    Args:
        log_dir: where TensorBoard looks, for a run without a ``ReplicaMonitor``; the report is written there too, as
            ``doctor.json``, and the next run of the model with the same ``log_dir`` says what has changed since.
        interventions: whether to make experiments when training ends, for some ten seconds: the model trains on with
            its input replaced by one batch, without the sum over replicas, with twice the rows, with more steps an
            execution, and as a copy on one device, and is put back bit for bit. For one process, and data that can be
            read again.
        json: a file for the report, instead of ``doctor.json``; one that is there is compared with, and replaced.
        writers: others to hand findings to.
        show: whether to print the report.
        strategy: the one that the model is meant to live under; None is its own.
        num_steps: after how many steps, about, to stop training; None does not.

    Attributes:
        report: of the last run that was watched; None before.
        comparison: of it with the report that was in its file before; None where there was none of a model with weights
            of these shapes, which is said.

    Raises:
        MonitorError: in the constructor, if an argument is invalid; when a run begins, if findings cannot be written
            where they should be.
        StrategyError: ``strategy`` is not a ``tf.distribute.Strategy``.
    """

    supports_multi_step = True

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        interventions: bool = False,
        json: str | os.PathLike[str] | None = None,
        writers: Sequence[Writer] = (),
        show: bool = True,
        strategy: tf.distribute.Strategy | None = None,
        num_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.report: Report | None = None
        self.comparison: Comparison | None = None
        self._interventions = arguments.flag("interventions", interventions, error=MonitorError)
        event_writers = [] if log_dir is None else [EventWriter(log_dir)]
        report_file = arguments.optional(arguments.path, "json", json, error=MonitorError)
        if report_file is None and log_dir is not None and "://" not in os.fspath(log_dir):
            report_file = os.path.join(log_dir, "doctor.json")
        self._json = None if report_file is None else pathlib.Path(report_file)
        self._show = arguments.flag("show", show, error=MonitorError)
        self._strategy = checked_strategy(strategy)
        self._num_steps = arguments.optional(arguments.integer, "num_steps", num_steps, least=1, error=MonitorError)
        given_writers = checked_writers(writers)
        self._writers = [*event_writers, *given_writers]
        self._recorder = Recorder()
        self._trace: RunTrace | None = None
        self._num_runs = 0  # under way
        self._write_report: Callable[[], None] | None = None
        self.stock_data: tf.data.Dataset | None = None  # which a model of stock Keras does not show
        self.raise_on_error = False  # for nothing but its report: what goes wrong is an error
        self.judges_epochs = True  # which are the user's; else the run's own
        self.report_on_end = True  # when training ends; else when ``write_report`` is called
        self.num_observed = self.num_made = 0  # steps of the last run: in the report; and in all, at least
        self.has_seen_enough = False  # and has therefore ended the last run

    # What models of ours call

    def on_run_prepare(self, model: Model) -> None:
        """Have steps recorded."""
        if not self._num_runs:
            CompositeWriter(self._writers).check("")
        self._num_runs += 1
        if self._num_runs > 1:  # a callback evaluates or predicts in the middle of training
            return
        if not isinstance(model.distribute_strategy, tf.distribute.ParameterServerStrategy):
            self._recorder.fetch("train")
            model.add_recorder(self._recorder)
        self._trace = RunTrace(model, self._recorder)

    def on_run_begin(self, callbacks: Sequence[keras.callbacks.Callback], data: RunData | None) -> None:
        """Have the other callbacks timed, and look at the data."""
        assert self._trace is not None  # since `on_run_prepare`
        self._trace.on_run_begin(callbacks, data, self, times_epochs=self.judges_epochs)

    def on_run_end(self) -> None:
        """Leave everything as it was."""
        self._num_runs = max(0, self._num_runs - 1)
        if self._trace is not None and not self._num_runs:
            self._guarded(self._trace.stop)
            self._trace = None

    # What Keras calls

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin to watch."""
        self._write_report, self.has_seen_enough = None, False
        if self._trace is None or not self._trace.is_ours:  # a model of stock Keras, whose last run may have broken
            if self._trace is not None:
                self._guarded(self._trace.stop)
            self._trace = RunTrace(self.model, None, self.stock_data)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Take note of an execution."""
        if self._trace is None:
            return
        if not self._guarded(self._trace.end_execution):
            self._guarded(self._trace.stop)
        if self._num_steps is not None and (self._trace.num_steps >= self._num_steps or self._trace.is_over):
            self.has_seen_enough = self.model.stop_training = True

    def on_after_epoch_begin(self) -> None:
        """Take note of a new epoch."""
        self._note(RunTrace.begin_epoch)

    def on_after_epoch_end(self, epoch: int) -> None:
        """Take note of the end of an epoch."""
        self._note(RunTrace.end_epoch)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Take note that validation begins."""
        self._note(RunTrace.begin_validation)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Take note that validation has ended, and forget what was recorded of it."""
        self._recorder.fetch("test")
        self._note(RunTrace.end_validation)

    def _note(self, take_note: Callable[[RunTrace], None]) -> None:
        """Have the trace of a run take note, where there is one: not where a model of stock Keras evaluates."""
        trace = self._trace
        if trace is not None:
            self._guarded(lambda: take_note(trace))

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Judge, and write the report."""
        trace = self._trace
        if trace is None:
            return
        if not trace.is_ours:
            self._trace = None

        def judge_and_write() -> None:
            self.num_observed, self.num_made = trace.num_steps, max(trace.num_steps, trace.num_executions)
            self.report = judge(trace.examination(self._strategy, interventions=self._interventions))
            self._prepare_report(trace, self.report)
            if self.report_on_end:
                self.write_report()

        self._guarded(trace.stop)
        self._guarded(judge_and_write)  # also where that failed: every worker participates

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Work, and warn where that fails, since training goes well; return whether it did not."""
        try:
            work()
        except Exception as error:
            if self.raise_on_error:
                raise
            warnings.warn(f"ParallelismDoctor failed: {type(error).__name__}: {error}", stacklevel=3)
            return False
        return True

    def _prepare_report(self, trace: RunTrace, report: Report) -> None:
        """Hand findings to monitors, and prepare the report's writing, while the run is what it was."""
        model = self.model
        counter = StepCounter(model)
        counter.begin()
        step = counter.step(counter.count)
        records = [finding.record(step) for finding in report.findings]
        for monitor in trace.monitors:
            monitor.add_findings("diagnosis", records)
        workers = workers_of(model.distribute_strategy)
        is_chief = workers is None or workers.is_chief
        run = None
        if self._writers and trace.is_ours:
            manifest = build_manifest(model, "")
            run = Run("train", "", manifest, describe_model(model), step, wall_time=time.time(), is_chief=is_chief)

        def write_report() -> None:
            if run is not None:
                writer = CompositeWriter(self._writers)
                writer.begin(run)
                writer.write_findings(records, step=step, wall_time=time.time())
                writer.close()
            if is_chief:
                self._show_and_save(report)

        self._write_report = write_report

    def write_report(self) -> None:
        """Show and write the report of the last run, on the chief alone."""
        if self._write_report is not None:
            self._write_report()
        elif self.report is not None:  # of a run that could not begin
            self._show_and_save(self.report)

    def _show_and_save(self, report: Report) -> None:
        if self._show:
            report.show()
        self.comparison = None
        if self._json is None:
            return
        compared = since(self._json, report.to_dict())
        self.comparison = compared.comparison
        if self._show and str(compared):
            sys.stdout.write(f"{compared}\n")
        try:
            self._json.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._json, as_json(compared.report))
        except OSError as error:
            warnings.warn(f"The doctor's report could not be written to {self._json} ({error}).", stacklevel=2)
