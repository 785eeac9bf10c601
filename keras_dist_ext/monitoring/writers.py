"""Write the records of replicas: the base class of writers, one that keeps them in memory, and several at once.

The others are in `monitoring`: `event_files` (TensorBoard), `json_lines` and `terminal`. Letters: R = replicas in sync,
over all workers.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from keras_dist_ext import arguments
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.messages import counted
from keras_dist_ext.monitoring.append_file import RecordsLost
from keras_dist_ext.monitoring.dashboard.metadata import Manifest
from keras_dist_ext.step.stats import Kind, ReplicaStats

__all__ = ["MemoryWriter", "Run", "CompositeWriter", "Writer", "checked_experiment", "checked_writers"]

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run is, beside its records."""

    kind: Kind
    experiment: str
    manifest: Manifest
    details: Mapping[str, str] = dataclasses.field(default_factory=dict)  # settings, to be read by people
    step: int = 0  # the optimizer step at its start
    wall_time: float = 0.0  # seconds since 1970
    replicas: range = range(1)  # those of this worker, by global id
    is_chief: bool = True  # whether this worker writes what is about all replicas


class Writer:
    """Writes the records of runs, in order.

    Subclasses implement ``write``; the other methods do nothing by default. With several workers each has its writers,
    which get the records of all R replicas; ``Run.replicas`` and ``Run.is_chief`` say which of them to write.
    """

    def check(self, experiment: str) -> None:
        """Check, before the first step, that the writer can write.

        Args:
            experiment: a name, or several with slashes between; "" is the writer's own folder.

        Raises:
            MonitorError: it cannot.
        """

    def begin(self, run: Run) -> None:
        """Start a run of a kind; called again when more is known of it.

        Args:
            run: its kind, experiment, devices and replicas.
        """

    def write(self, stats: ReplicaStats, scores: Floats | None) -> None:
        """Write the records of all replicas in an interval.

        Args:
            stats: of R replicas.
            scores: of each against its own best, 1 = as fast as ever, NaN = unknown, [R]; None in evaluation.
        """
        raise NotImplementedError

    def write_findings(self, findings: Sequence[FindingRecord], *, step: int, wall_time: float) -> None:
        """Write all findings about the training run so far.

        Args:
            findings: all of them, including those of earlier calls.
            step: of the optimizer, now.
            wall_time: now, in seconds since 1970.
        """

    def flush(self) -> None:
        """Write everything that is buffered."""

    def close(self) -> None:
        """End the run. Another one may begin."""


def checked_writers(writers: object) -> list[Writer]:
    """Return writers.

    Raises:
        MonitorError: something else was given.
    """
    if not isinstance(writers, list | tuple):
        arguments.refuse("writers", writers, "a list of Writers such as [MemoryWriter()]", MonitorError)
    for writer in writers:
        if not isinstance(writer, Writer):
            raise MonitorError(
                f"writers has {arguments.shown(writer)}, which is not a Writer. Derive it from "
                "keras_dist_ext.monitoring.writers.Writer."
            )
    return list(writers)


class MemoryWriter(Writer):
    """Keeps everything in memory, to be read in Python.

    Attributes:
        train: the records of training, one per interval.
        test: those of evaluation, one per evaluation.
        scores: for each entry of ``train``, the replicas' scores against their own best, [R].
        findings: all findings.
        runs: the last run of each kind.
    """

    def __init__(self) -> None:
        self.train: list[ReplicaStats] = []
        self.test: list[ReplicaStats] = []
        self.scores: list[Floats | None] = []
        self.findings: list[FindingRecord] = []
        self.runs: dict[Kind, Run] = {}

    def begin(self, run: Run) -> None:
        """See ``Writer.begin``."""
        self.runs[run.kind] = run

    def write(self, stats: ReplicaStats, scores: Floats | None) -> None:
        """See ``Writer.write``."""
        if stats.kind == "test":
            self.test.append(stats)
        else:
            self.train.append(stats)
            self.scores.append(scores)

    def write_findings(self, findings: Sequence[FindingRecord], *, step: int, wall_time: float) -> None:
        """See ``Writer.write_findings``."""
        self.findings = list(findings)


class CompositeWriter(Writer):
    """Passes everything to several writers. If one fails, the others and training continue.

    The first failure of a writer is a warning with the cause and the number of dropped records; when the run ends,
    another one has the total. A writer that failed is tried again: a full disk may have been cleared.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)
        self._dropped = [0] * len(self._writers)
        self._reported: list[int | None] = [None] * len(self._writers)  # dropped records in the first warning

    def check(self, experiment: str) -> None:
        """See ``Writer.check``."""
        for writer in self._writers:
            writer.check(experiment)

    def begin(self, run: Run) -> None:
        """See ``Writer.begin``."""
        self._each(lambda writer: writer.begin(run))

    def write(self, stats: ReplicaStats, scores: Floats | None) -> None:
        """See ``Writer.write``."""
        self._each(lambda writer: writer.write(stats, scores))

    def write_findings(self, findings: Sequence[FindingRecord], *, step: int, wall_time: float) -> None:
        """See ``Writer.write_findings``."""
        self._each(lambda writer: writer.write_findings(findings, step=step, wall_time=wall_time))

    def flush(self) -> None:
        """See ``Writer.flush``."""
        self._each(lambda writer: writer.flush(), takes_record=False)

    def close(self) -> None:
        """See ``Writer.close``."""
        self._each(lambda writer: writer.close(), takes_record=False)
        for index, writer in enumerate(self._writers):
            reported, dropped = self._reported[index], self._dropped[index]
            if reported is not None and dropped > reported:
                warnings.warn(
                    f"{type(writer).__name__} dropped {counted(dropped, 'record')} of this run in total.", stacklevel=2
                )
            self._reported[index], self._dropped[index] = None, 0

    def _each(self, call: Callable[[Writer], None], *, takes_record: bool = True) -> None:
        for index, writer in enumerate(self._writers):
            try:
                call(writer)
            except Exception as error:
                self._dropped[index] += error.num_records if isinstance(error, RecordsLost) else int(takes_record)
                if self._reported[index] is None:
                    self._reported[index] = self._dropped[index]
                    warnings.warn(self._warning(index, error), stacklevel=2)

    def _warning(self, index: int, error: Exception) -> str:
        cause = error.__cause__ if isinstance(error, RecordsLost) and error.__cause__ is not None else error
        return (
            f"{type(self._writers[index]).__name__} failed: {type(cause).__name__}: {cause}. "
            f"{counted(self._dropped[index], 'record')} dropped so far; training and other writers continue. "
            "The total will be reported when the run ends."
        )


def checked_experiment(name: str) -> str:
    """Return the name of an experiment.

    Raises:
        MonitorError: it is no name for a directory below another one.
    """
    parts = name.split("/") if isinstance(name, str) and name else []
    if not isinstance(name, str) or any(part in ("", ".", "..") for part in parts) or "\\" in name or ":" in name:
        raise MonitorError(
            "experiment must be a name for a directory below log_dir, such as 'mirrored' or 'night/3', got "
            f"{arguments.shown(name)}."
        )
    return name
