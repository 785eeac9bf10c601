"""Monitor one model's runs: fetch the records, split them into intervals, score these, and pass them to writers.

Every worker does the same at the same points of its program, so that they can use collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

from keras_dist_ext._keras.strategies import first_replica
from keras_dist_ext.cluster.cores import num_cores
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.messages import warn
from keras_dist_ext.monitoring.exchange import gather_intervals
from keras_dist_ext.monitoring.intervals import Intervals, StepCounter, UpdateFreq
from keras_dist_ext.monitoring.manifest import build_manifest, describe_model, replica_devices
from keras_dist_ext.monitoring.stragglers import Stragglers
from keras_dist_ext.monitoring.writers import Run, Writer
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.step.stats import Kind, ReplicaStats, StepRecords, join_records, summarize
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.divergence import Divergence
from keras_dist_ext.training.model import Model

__all__ = ["Watch"]


class Watch:
    """The monitoring of a model's runs.

    Attributes:
        model: the monitored model.

    Args:
        model: see above.
        recorder: of its steps.
        writer: gets the intervals and findings.
        experiment: the name of the runs.
        update_freq: see ``Intervals``.
        check_divergence_every: the number of optimizer steps between comparisons of the replicas' variables, or None.
        straggler_threshold: see ``Stragglers``.
    """

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        writer: Writer,
        *,
        experiment: str,
        update_freq: UpdateFreq,
        check_divergence_every: int | None,
        straggler_threshold: float,
    ) -> None:
        self.model = model
        self._recorder = recorder
        self._writer = writer
        self._experiment = experiment
        self._workers = workers_of(model.distribute_strategy)
        self._is_chief = self._workers is None or self._workers.is_chief
        self._num_replicas: int = model.distribute_strategy.num_replicas_in_sync
        self._first_replica = first_replica(model.distribute_strategy)
        self._counter = StepCounter(model)
        self._intervals = Intervals(update_freq)
        self._num_workers = 1 if self._workers is None else self._workers.num_workers
        num_local = self._num_replicas // self._num_workers
        self._replicas = range(self._first_replica, self._first_replica + num_local)
        on_cpu = "CPU" in replica_devices(model.distribute_strategy)[0]
        self._stragglers = Stragglers(
            straggler_threshold,
            num_workers=self._num_workers,
            shares_cores=on_cpu and num_local > num_cores(),
            on_cpu=on_cpu,
        )
        self._divergence = None if check_divergence_every is None else Divergence(model)
        self._check_every = check_divergence_every or 0
        self._findings: list[FindingRecord] = []
        self._reported: list[FindingRecord] = []
        self._cost_seconds = 0.0
        self._num_runs = 0  # nested: a callback may evaluate in the middle of training
        self._is_training = False
        self._described: set[Kind] = set()
        self._started: set[Kind] = set()  # in any run
        self._remainder: StepRecords | None = None  # fetched, of the present interval
        self._num_missing: float = 0.0  # batches until the interval ends
        self._num_unchecked = 0  # batches that were fetched since variables were compared
        self._batch_size: int | None = None

    def prepare(self) -> None:
        """Start a run."""
        self._num_runs += 1
        if self._num_runs == 1:
            for kind in ("train", "test"):
                self._recorder.fetch(kind)  # steps after the last run
            self._described = set()
            self._remainder = None
            self._num_unchecked = 0
            self._batch_size = None

    def release(self) -> None:
        """End a run, and if an exception has interrupted it, write the remaining records.

        Only for a single worker: others may have failed, and would be waited for.
        """
        self._num_runs -= 1
        if self._num_runs == 0 and self._is_training:
            self._is_training = False
            if self._workers is None:
                with contextlib.suppress(Exception):  # the first exception matters more
                    self._end_intervals(is_last=True)
            self._writer.close()

    def begin_epoch(self) -> None:
        """Continue at the optimizer's step when the first epoch begins: callbacks may have restored it."""
        if not self._is_training:
            self._is_training = True
            self._counter.begin()
            self._begin("train")
            self._count_missing()

    def end_execution(self) -> None:
        """End intervals that are complete, and compare variables when it is due."""
        if self._recorder.num_pending("train") >= self._num_missing:
            self._end_intervals()
        if self._divergence is not None:
            num_batches = self._num_unchecked + self._recorder.num_pending("train")
            if num_batches >= self._check_every * self._counter.batches_per_step:
                self._compare(self._divergence)

    def end_epoch(self) -> None:
        """End the interval with the epoch, and write it."""
        if self._num_pending and self._intervals.is_worthwhile(self._num_pending):
            self._end_intervals(is_last=True)
            began = time.perf_counter()
            self._writer.flush()
            self._cost_seconds += time.perf_counter() - began

    def end_training(self) -> None:
        """Write the remaining records."""
        self._end_intervals(is_last=True)
        if self._divergence is not None and self._num_unchecked:
            self._compare(self._divergence)
        self._report_findings(self._counter.step(self._counter.count), is_last=True)
        self._is_training = False
        self._writer.close()

    def begin_test(self) -> None:
        """In ``fit``, end the interval: a validation takes time of its own."""
        if self._is_training:
            self.end_epoch()
        else:
            self._counter.begin()

    def end_test(self) -> None:
        """Write an evaluation."""
        records = self._recorder.fetch("test")
        if records is not None:
            step = self._counter.latest(self._num_pending)
            self._write([summarize(records, step=step, wall_time=time.time())], records)
        if self._is_training:
            self._writer.flush()
        else:
            self._writer.close()

    @property
    def _num_pending(self) -> int:
        """Batches since ``StepCounter.count``."""
        return self._recorder.num_pending("train") + (0 if self._remainder is None else len(self._remainder))

    def _count_missing(self) -> None:
        self._num_missing = self._intervals.length(self._counter) - (
            0 if self._remainder is None else len(self._remainder)
        )

    def _end_intervals(self, *, is_last: bool = False) -> None:
        began = time.perf_counter()
        fetched = self._recorder.fetch("train")
        parts = [part for part in (self._remainder, fetched) if part is not None]
        if not parts:
            return
        self._num_unchecked += 0 if fetched is None else len(fetched)
        records = join_records(parts)
        counts = self._counter.after(len(records))
        ends = self._intervals.ends(self._counter, counts, is_last=is_last)
        if ends:
            stats = [
                summarize(records.steps(begin, end), step=self._counter.step(int(counts[end - 1])), wall_time=0.0)
                for begin, end in zip([0, *ends], ends, strict=False)
            ]
            exchange_seconds = self._write(_stamped(stats, time.time()), records)
            self._counter.count = int(counts[ends[-1] - 1])
            self._cost_seconds = time.perf_counter() - began - exchange_seconds
        self._remainder = records.steps(ends[-1] if ends else 0, len(records))
        self._count_missing()

    def _write(self, local: Sequence[ReplicaStats], records: StepRecords) -> float:
        """Write intervals of one kind; return the seconds spent in collectives."""
        kind = local[0].kind
        last = local[-1]
        began = time.perf_counter()
        intervals, lengths, (batch_size,) = gather_intervals(
            local,
            self._workers,
            first=self._first_replica,
            num_replicas=self._num_replicas,
            broadcast=self._intervals.lengths(last.seconds / last.num_steps, self._cost_seconds),
            to_sum=[float(records.examples.sum(axis=1).max())],
        )
        exchange_seconds = time.perf_counter() - began
        if kind == "train":
            self._intervals.set_lengths(*map(int, lengths))
        if kind not in self._described:  # now the model is built, and the batch size is known
            self._described.add(kind)
            self._batch_size = self._batch_size or int(batch_size)
            self._begin(kind)
        for stats in intervals:
            scores = self._stragglers.score(stats).individual if kind == "train" else None
            self._writer.write(stats, scores)
        if kind == "train":
            self._report_findings(last.step)
        return exchange_seconds

    def _begin(self, kind: Kind) -> None:
        self._started.add(kind)
        experiment = self._experiment
        if kind == "test":
            experiment = f"{experiment}/validation" if experiment else "validation"
        self._writer.begin(
            Run(
                kind=kind,
                experiment=experiment,
                manifest=build_manifest(self.model, experiment, batch_size=self._batch_size),
                details=describe_model(self.model),
                step=self._counter.step(self._counter.count),
                wall_time=time.time(),
                replicas=self._replicas,
                is_chief=self._is_chief,
            )
        )

    def _compare(self, divergence: Divergence) -> None:
        self._num_unchecked = -self._recorder.num_pending("train")
        step = self._counter.latest(self._num_pending)
        finding = divergence.check(step)
        if finding is not None:
            self._divergence = None  # they differ from here on
            self._findings.append(finding)
            self._report_findings(step)
            if self._is_chief:
                warn(f"{finding['what']} ({finding['evidence']}) {finding['fix']}")

    def add_findings(self, kind: str, findings: Sequence[FindingRecord]) -> None:
        """Add findings of other callbacks, in place of their earlier ones of this kind."""
        self._findings = [finding for finding in self._findings if finding["kind"] != kind] + list(findings)
        self._report_findings(self._counter.latest(self._num_pending), is_last=True)
        self._writer.flush()

    def _report_findings(self, step: int, *, is_last: bool = False) -> None:
        """Write the findings if one is new, or has become clearly worse."""
        findings = [*self._findings, *self._stragglers.findings]
        reported = {finding["code"]: finding.get("seconds", 0.0) for finding in self._reported}
        worse = 1.0 if is_last else 1.5
        if any(f["code"] not in reported or f.get("seconds", 0.0) > worse * reported[f["code"]] for f in findings):
            self._reported = findings
            if "train" not in self._started:  # findings before the first step
                self._begin("train")
            self._writer.write_findings(findings, step=step, wall_time=time.time())


def _stamped(stats: Sequence[ReplicaStats], now: float) -> list[ReplicaStats]:
    """Return intervals with the time when each ended, the last of them now."""
    stamped: list[ReplicaStats] = []
    for interval in reversed(stats):
        stamped.append(dataclasses.replace(interval, wall_time=now))
        now -= interval.seconds
    return stamped[::-1]
