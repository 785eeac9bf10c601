"""Watch what every replica does while Keras trains: a callback that records, judges and writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext.errors import MonitorError
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.monitoring.event_files import EventWriter
from keras_dist_ext.monitoring.intervals import Intervals, UpdateFreq
from keras_dist_ext.monitoring.stragglers import Stragglers
from keras_dist_ext.monitoring.terminal import TerminalWriter
from keras_dist_ext.monitoring.watch import Watch
from keras_dist_ext.monitoring.writers import CompositeWriter, Writer
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.strategy.workers import Workers, workers_of
from keras_dist_ext.training.run_callback import RunCallback

__all__ = ["ReplicaMonitor"]


class ReplicaMonitor(RunCallback):
    """Show what each replica does: its loss, examples a second, and the time for input, computing and waiting.

        model.fit(train, epochs=5, callbacks=[kde.ReplicaMonitor("logs")])

    Then ``tensorboard --logdir logs`` has the tab *Replicas*, and the same numbers in its Scalars tab, a run a replica.
    Steps are those of the optimizer; they go on over several calls to ``fit``, and where a resumed run does.
    Evaluation, also inside of ``fit``, is the experiment ``validation`` below this one, with one point each time.

    It also names replicas that hold the others up, and on request the first variable of which replicas hold different
    values; as findings in the dashboard, and as one warning.

    With several workers, give it to each of them: each writes what its own replicas did.

    Args:
        log_dir: where TensorBoard looks: a path, or a URL such as ``gs://bucket/logs``.
        experiment: a name for the run below ``log_dir``; it may have slashes.
        update_freq: an interval for which numbers are written: so many optimizer steps, ``"epoch"``, or ``"auto"``:
            a second or a few, so long that what is done at its end costs a tenth of 1% of it; an epoch ends one too,
            where that costs no more than this.
        writers: others to hand everything to, say ``MemoryWriter()`` or ``JsonLinesWriter("replicas.jsonl")``; with
            these, ``log_dir`` may be left out.
        terminal: whether the chief shows a live table in the terminal; best with ``verbose=0``.
        gradient_norm: whether to record the norm of each replica's own gradients.
        check_divergence_every: after how many optimizer steps to compare the replicas' copies of all variables, and
            when training ends; None never does.
        straggler_threshold: the score, from 0 to 1, below which a replica is named a straggler; see ``stragglers``.
        flush_seconds: how long records may wait before they are in the files, and outlive a process that is killed.

    Raises:
        MonitorError: when it is made, if an argument is not what it can be; when a run begins, if the model is not one
            of ours, or there is nowhere to write.
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
        self._experiment = _checked_experiment(experiment)
        if log_dir is None and not writers and not terminal:
            raise MonitorError("ReplicaMonitor has nowhere to write. Give it a log_dir, or writers=[MemoryWriter()].")
        every = check_divergence_every
        if every is not None and (type(every) is not int or every < 1):
            raise MonitorError(
                f"check_divergence_every is {every!r}; it is a number of optimizer steps, at least 1, or None."
            )
        Intervals(update_freq)  # these two check what they get
        Stragglers(straggler_threshold)
        self._writers = CompositeWriter(
            [
                *([] if log_dir is None else [EventWriter(log_dir, flush_seconds=flush_seconds)]),
                *_checked_writers(writers),
                *([TerminalWriter()] if terminal else []),
            ]
        )
        self._recorder = Recorder(gradient_norm=gradient_norm)
        self._options: dict[str, Any] = {
            "experiment": self._experiment,
            "update_freq": update_freq,
            "check_divergence_every": every,
            "straggler_threshold": straggler_threshold,
        }
        self._watch: Watch | None = None

    def write_below(self, name: str) -> None:
        """Write the runs to come into a folder below, say one of a trial.

        Args:
            name: of the folder; slashes make several.

        Raises:
            MonitorError: it is no name for a folder.
        """
        self._experiment = _checked_experiment(f"{self._experiment}/{name}".lstrip("/"))
        self._options["experiment"] = self._experiment

    supports_multi_step = True

    def on_run_prepare(self, model: Any) -> None:
        """See whether there is somewhere to write, and have steps recorded."""
        strategy = model.distribute_strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise MonitorError(
                f"'{model.name}' lives under ParameterServerStrategy, whose workers make steps of their own, each at "
                "its pace: there are no replicas to compare. Leave ReplicaMonitor out."
            )
        _check_on_all(self._writers, self._experiment, workers_of(strategy))
        model.add_recorder(self._recorder)
        if self._watch is None or self._watch.model is not model:
            self._watch = Watch(model, self._recorder, self._writers, **self._options)
        self._watch.prepare()

    def on_run_end(self) -> None:
        """Keep what there is of a run that an exception has broken off."""
        if self._watch is not None:
            self._watch.release()

    def add_findings(self, kind: str, findings: Sequence[FindingRecord]) -> None:
        """Take what another callback has found out, to be written with the monitor's own findings.

        Args:
            kind: replaces what was found of this kind before, such as "diagnosis".
            findings: all of that kind.
        """
        self._watched().add_findings(kind, findings)

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse models of stock Keras."""
        self._watched()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Take over where the optimizer is."""
        self._watched().begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End intervals that are over. A model of ours calls it once an execution."""
        assert self._watch is not None
        self._watch.end_execution()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End the interval."""
        self._watched().end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        """Write what is left."""
        self._watched().end_training()

    def on_test_begin(self, logs: Any = None) -> None:
        """Refuse models of stock Keras; before a validation, write what training did."""
        self._watched().begin_test()

    def on_test_end(self, logs: Any = None) -> None:
        """Write the evaluation."""
        self._watched().end_test()

    def _watched(self) -> Watch:
        if self._watch is None or self._watch.model is not self.model:
            raise MonitorError(
                f"'{getattr(self.model, 'name', self.model)}' is a {type(self.model).__name__} of stock Keras, whose "
                "steps ReplicaMonitor cannot see into. Derive it from kde.Model, or rebuild it by "
                "kde.adopt(model, strategy)."
            )
        return self._watch


def _checked_experiment(name: str) -> str:
    parts = name.split("/") if isinstance(name, str) and name else []
    if not isinstance(name, str) or any(part in ("", ".", "..") for part in parts) or "\\" in name or ":" in name:
        raise MonitorError(
            f"experiment is {name!r}; it is a name for a folder below log_dir, such as 'mirrored' or 'night/3'."
        )
    return name


def _checked_writers(writers: Sequence[Writer]) -> Sequence[Writer]:
    for writer in writers:
        if not isinstance(writer, Writer):
            raise MonitorError(
                f"writers holds {writer!r}, which is no writer. "
                "Derive it from keras_dist_ext.monitoring.writers.Writer."
            )
    return writers


def _check_on_all(writer: Writer, experiment: str, workers: Workers | None) -> None:
    """Raise on all workers what one of them finds: they would wait for it."""
    failure: MonitorError | None = None
    try:
        writer.check(experiment)
    except MonitorError as error:
        failure = error
    num_failed = 0 if workers is None else int(workers.sum([float(failure is not None)])[0])
    if failure is not None:
        raise failure
    if num_failed:
        raise MonitorError(
            "Another worker has nowhere to write what its replicas do (it says where and why), so none begins. Give a "
            "log_dir that every worker can write."
        )
