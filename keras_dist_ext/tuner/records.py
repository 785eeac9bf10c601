"""Record in a trial's folder what keras-tuner does not: its strategy, its speed, and why it failed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_dist_ext.tuner.failures import Failure
from keras_dist_ext.whole_files import write_whole

__all__ = ["ProjectRecords", "TrialRecord"]

_FILE = "strategy.json"


@dataclass(frozen=True)
class TrialRecord:
    """What is known of a trial; written when it ends, and read by the report and by the oracle's process."""

    trial_id: str
    strategy: str  # the name in the search
    description: str = ""  # such as "MirroredStrategy (2 replicas)"
    num_replicas: int = 0  # 0: the strategy was not available
    global_batch_size: int | None = None  # None: not set by the tuner
    examples_per_second: tuple[float, ...] = ()  # steady, of each execution that was measured
    seconds: tuple[float, ...] = ()  # of training after the first step, of each execution
    failure: Failure | None = None
    values: Mapping[str, object] = dataclasses.field(default_factory=dict)  # of the hyperparameters

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it into a trial's folder."""
        write_whole(Path(folder) / _FILE, json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> TrialRecord | None:
        """Read it from a trial's folder; None where there is none."""
        try:
            state = json.loads((Path(folder) / _FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        failure = state.pop("failure", None)
        return TrialRecord(
            **{
                **state,
                "examples_per_second": tuple(state["examples_per_second"]),
                "seconds": tuple(state["seconds"]),
                "failure": None if failure is None else Failure(**failure),
            }
        )


class ProjectRecords:
    """The records of a project, by trial.

    Args:
        folder: the project's.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def of_trial(self, trial_id: str) -> TrialRecord | None:
        """Return what is known of a trial; it is read each time, because other processes write it."""
        return TrialRecord.load(self.folder / f"trial_{trial_id}")

    def seconds_of(self, trial_id: str | None) -> float:
        """Return how long a trial has trained, of several executions the longest; 0 where nothing is known."""
        record = self.of_trial(trial_id) if trial_id else None
        return max(record.seconds, default=0.0) if record else 0.0

    def all(self) -> dict[str, TrialRecord]:
        """Return all records, in the order of the trials."""
        records = {path.name.removeprefix("trial_"): TrialRecord.load(path) for path in self.folder.glob("trial_*")}
        return {trial_id: record for trial_id, record in sorted(records.items()) if record is not None}
