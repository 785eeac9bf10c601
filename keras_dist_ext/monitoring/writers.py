"""Write what replicas did: what writers have in common, one that keeps it in memory, and several at once.

The others are in `monitoring`: `event_files` (TensorBoard), `json_lines` and `terminal`. Letters: R = replicas in sync,
over all workers.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.messages import counted
from keras_dist_ext.monitoring.append_file import RecordsLost
from keras_dist_ext.monitoring.dashboard.metadata import Manifest
from keras_dist_ext.step.stats import Kind, ReplicaStats

__all__ = ["MemoryWriter", "Run", "CompositeWriter", "Writer"]

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Run:
    """What is known of a run beside its records."""

    kind: Kind
    experiment: str
    manifest: Manifest
    details: Mapping[str, str] = dataclasses.field(default_factory=dict)  # hyperparameters, for people
    step: int = 0  # the optimizer step that it begins at
    wall_time: float = 0.0  # seconds since 1970
    replicas: range = range(1)  # those of this worker, by global id
    is_chief: bool = True  # which writes what is about all replicas


class Writer:
    """Takes the records of runs, in order.

    Derive from it and write ``write``; the rest does nothing by default. With several workers each has its writers,
    which get the records of all R replicas; see ``Run.replicas`` and ``Run.is_chief`` for who writes what.
    """

    def check(self, experiment: str) -> None:
        """See, before the first step, whether there is somewhere to write.

        Args:
            experiment: a name, or several with slashes between; "" is the writer's own folder.

        Raises:
            MonitorError: there is not.
        """

    def begin(self, run: Run) -> None:
        """Take note that records of a kind belong to this run; called again when more is known of it.

        Args:
            run: its kind, experiment, devices and replicas.
        """

    def write(self, stats: ReplicaStats, scores: Floats | None) -> None:
        """Take what all replicas did in an interval.

        Args:
            stats: of R replicas.
            scores: of each against its own best, 1 = as fast as it ever was, NaN = unknown, [R]; None in evaluation.
        """
        raise NotImplementedError

    def write_findings(self, findings: Sequence[FindingRecord], *, step: int, wall_time: float) -> None:
        """Take the list of all that was found out about the run of training so far.

        Args:
            findings: all of them, those of earlier calls too.
            step: of the optimizer, now.
            wall_time: now, in seconds since 1970.
        """

    def flush(self) -> None:
        """Bring everything that was taken to where it belongs."""

    def close(self) -> None:
        """End: everything has been taken. Another run may begin."""


class MemoryWriter(Writer):
    """Keeps everything, to be read in Python.

    Attributes:
        train: what replicas did in training, an entry an interval.
        test: the same in evaluation, an entry an evaluation.
        scores: for each entry of ``train``, the replicas' scores against their own best, [R].
        findings: what was found out.
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
    """Hands everything to several writers. One that fails is no reason to stop, for the others or the training.

    The first failure of a writer is a warning that names the cause and the records dropped; when the run ends, another
    says how many there were in all. A writer that failed is asked again: a full disk may have been cleared.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)
        self._dropped = [0] * len(self._writers)
        self._said: list[int | None] = [None] * len(self._writers)  # as many were named when it was warned of last

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
        for place, writer in enumerate(self._writers):
            said, dropped = self._said[place], self._dropped[place]
            if said is not None and dropped > said:
                warnings.warn(
                    f"{type(writer).__name__} dropped {counted(dropped, 'record')} of this run in all.", stacklevel=2
                )
            self._said[place], self._dropped[place] = None, 0

    def _each(self, call: Callable[[Writer], None], *, takes_record: bool = True) -> None:
        for place, writer in enumerate(self._writers):
            try:
                call(writer)
            except Exception as error:
                self._dropped[place] += error.num_records if isinstance(error, RecordsLost) else int(takes_record)
                if self._said[place] is None:
                    self._said[place] = self._dropped[place]
                    warnings.warn(self._sentence(place, error), stacklevel=2)

    def _sentence(self, place: int, error: Exception) -> str:
        cause = error.__cause__ if isinstance(error, RecordsLost) and error.__cause__ is not None else error
        return (
            f"{type(self._writers[place]).__name__} failed: {type(cause).__name__}: {cause}. "
            f"{counted(self._dropped[place], 'record')} dropped so far; training goes on, and so do other writers. "
            "How many there were in all will be said when the run ends."
        )
