"""Monitor every replica while Keras trains: a callback that records, evaluates and writes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext.aliases import JsonValue, Logs
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.monitoring.append_file import checked_flush_seconds
from keras_dist_ext.monitoring.event_files import EventWriter
from keras_dist_ext.monitoring.intervals import Intervals, UpdateFreq
from keras_dist_ext.monitoring.stragglers import Stragglers
from keras_dist_ext.monitoring.terminal import TerminalWriter
from keras_dist_ext.monitoring.watch import Watch
from keras_dist_ext.monitoring.writers import CompositeWriter, Writer, checked_experiment, checked_writers
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.strategy.workers import Workers, workers_of
from keras_dist_ext.training.model import Model
from keras_dist_ext.training.run_callback import RunCallback

__all__ = ["ReplicaMonitor"]


class ReplicaMonitor(RunCallback):
    """Show for each replica its loss, examples per second, and the time for input, computing and synchronization.

        model.fit(train, epochs=5, callbacks=[kde.ReplicaMonitor("logs")])

    Then ``tensorboard --logdir logs`` has the tab *Replicas*, and the same numbers in its Scalars tab, one run per
    replica. Steps are those of the optimizer; they continue over several calls to ``fit``, and in a resumed run.
    Evaluation, also inside of ``fit``, is the experiment ``validation`` below this one, with one point each time.

    It also reports stragglers, and on request the first variable whose copies differ between replicas: as findings in
    the dashboard, and as one warning.

    With several workers, give it to each of them: each writes the data of its own replicas.

    Args:
        log_dir: where TensorBoard looks: a path, or a URL such as ``gs://bucket/logs``.
        experiment: a name for the run below ``log_dir``; it may have slashes.
        update_freq: the interval for which numbers are written: a number of optimizer steps, ``"epoch"``, or
            ``"auto"``: at least a second, and long enough that the work at its end takes 0.1% of it; the end of an
            epoch ends an interval too, if that costs no more.
        writers: further writers, such as ``MemoryWriter()`` or ``JsonLinesWriter("replicas.jsonl")``; with these,
            ``log_dir`` may be left out.
        terminal: whether the chief shows a live table in the terminal; best with ``verbose=0``.
        gradient_norm: whether to record the norm of each replica's own gradients.
        check_divergence_every: the number of optimizer steps after which the replicas' copies of all variables are
            compared, which also happens when training ends; None: never.
        straggler_threshold: the score, from 0 to 1, below which a replica is a straggler; see ``stragglers``.
        flush_seconds: how long records may wait before they are in the files, and survive a killed process.

    Raises:
        MonitorError: in the constructor, if an argument is invalid; when a run begins, if the model is not derived from
            ``kde.Model``, or a writer cannot write.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        experiment: str = "",
        update_freq: UpdateFreq = "auto",
        writers: Sequence[Writer] = (),
        terminal: bool = False,
        gradient_norm: bool = False,
        check_divergence_every: int | None = None,
        straggler_threshold: float = 0.75,
        flush_seconds: float = 2.0,
    ) -> None:
        super().__init__()
        self._experiment = checked_experiment(experiment)
        given_writers = checked_writers(writers)
        terminal = arguments.flag("terminal", terminal, error=MonitorError)
        gradient_norm = arguments.flag("gradient_norm", gradient_norm, error=MonitorError)
        flush_seconds = checked_flush_seconds(flush_seconds)
        if log_dir is None and not given_writers and not terminal:
            raise MonitorError("ReplicaMonitor has no writer. Give it a log_dir, or writers=[MemoryWriter()].")
        wanted = "a number of optimizer steps"
        every = arguments.optional(
            arguments.integer,
            "check_divergence_every",
            check_divergence_every,
            least=1,
            wanted=wanted,
            error=MonitorError,
        )
        Intervals(update_freq)  # these two check their arguments
        Stragglers(straggler_threshold)
        self._writers = CompositeWriter(
            [
                *([] if log_dir is None else [EventWriter(log_dir, flush_seconds=flush_seconds)]),
                *given_writers,
                *([TerminalWriter()] if terminal else []),
            ]
        )
        self._recorder = Recorder(gradient_norm=gradient_norm)
        self._options: dict[str, JsonValue] = {
            "experiment": self._experiment,
            "update_freq": update_freq,
            "check_divergence_every": every,
            "straggler_threshold": straggler_threshold,
        }
        self._watch: Watch | None = None

    def use_subdirectory(self, name: str) -> None:
        """Write later runs into a subdirectory, such as that of a trial.

        Args:
            name: of the subdirectory; it may have slashes.

        Raises:
            MonitorError: it is not a valid name for a directory.
        """
        name = arguments.text("name", name, wanted="the name of a directory", error=MonitorError)
        self._experiment = checked_experiment(f"{self._experiment}/{name}".lstrip("/"))
        self._options["experiment"] = self._experiment

    supports_multi_step = True

    def on_run_prepare(self, model: Model) -> None:
        """Check that all writers can write, and record the steps of the run."""
        strategy = model.distribute_strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise MonitorError(
                f"'{model.name}' lives under ParameterServerStrategy, whose workers run their steps asynchronously: "
                "there are no replicas in sync to compare. Leave ReplicaMonitor out."
            )
        _check_on_all(self._writers, self._experiment, workers_of(strategy))
        model.add_recorder(self._recorder)
        if self._watch is None or self._watch.model is not model:
            self._watch = Watch(model, self._recorder, self._writers, **self._options)
        self._watch.prepare()

    def on_run_end(self) -> None:
        """Write what was recorded before an exception."""
        assert self._watch is not None  # since `on_run_prepare`
        self._watch.release()

    def add_findings(self, kind: str, findings: Sequence[FindingRecord]) -> None:
        """Add another callback's findings, to be written with the monitor's own.

        Args:
            kind: such as "diagnosis"; these findings replace earlier ones of this kind.
            findings: all of this kind.

        Raises:
            MonitorError: an argument is invalid, or no run of a model of ours has begun.
        """
        kind = arguments.text("kind", kind, error=MonitorError)
        arguments.instances("findings", findings, dict, wanted="records of findings", error=MonitorError)
        self._watched().add_findings(kind, findings)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Refuse models of stock Keras."""
        self._watched()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Continue at the optimizer's step."""
        self._watched().begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """End intervals that are complete. Our models call it once per execution."""
        assert self._watch is not None
        self._watch.end_execution()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """End the interval."""
        self._watched().end_epoch()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Write what is left."""
        self._watched().end_training()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Refuse models of stock Keras; before a validation, write the records of training."""
        self._watched().begin_test()

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Write the evaluation."""
        self._watched().end_test()

    def _watched(self) -> Watch:
        if self._watch is None or self._watch.model is not self.model:
            raise MonitorError(
                f"'{getattr(self.model, 'name', self.model)}' is a {type(self.model).__name__} of stock Keras, whose "
                "steps ReplicaMonitor cannot record. Derive it from kde.Model, or rebuild it by "
                "kde.adopt(model, strategy)."
            )
        return self._watch


def _check_on_all(writer: Writer, experiment: str, workers: Workers | None) -> None:
    """Raise an error on all workers if one of them cannot write: else they would wait for it."""
    failure: MonitorError | None = None
    try:
        writer.check(experiment)
    except MonitorError as error:
        failure = error
    failed = [failure is not None] if workers is None else _on_each(workers, failure is not None)
    if failure is not None:
        raise failure
    if any(failed):
        listed = ", ".join(str(worker) for worker, has_failed in enumerate(failed) if has_failed)
        raise MonitorError(
            f"log_dir is not writable on worker {listed} (which reports where and why); training was not started. Give "
            "a log_dir that every worker can write."
        )


def _on_each(workers: Workers, flag: bool) -> list[bool]:
    """Return the flag of each worker."""
    return [
        bool(number)
        for number in workers.sum([float(flag and index == workers.index) for index in range(workers.num_workers)])
    ]
