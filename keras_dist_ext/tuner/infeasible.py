"""Keep an oracle away from points that cannot run: those that failed before, and unavailable strategies."""

from __future__ import annotations

import math
from collections.abc import Mapping

from keras_dist_ext._keras.keras_tuner import keras_tuner, objectives_of
from keras_dist_ext._keras.keras_tuner_oracles import count_failures, learn_from_failures, redraw
from keras_dist_ext._keras.oracle_checks import check_oracle
from keras_dist_ext.tuner.objectives import UNREACHED, SecondsTo
from keras_dist_ext.tuner.records import ProjectRecords, TrialRecord
from keras_dist_ext.tuner.strategies import HYPERPARAMETER

__all__ = ["avoid_infeasible"]


def avoid_infeasible(oracle: keras_tuner.Oracle, records: ProjectRecords, executions_per_trial: int = 1) -> None:
    """Let an oracle learn from infeasible trials, and continue after them.

    It draws again where it has drawn a point that failed before; BayesianOptimization's model counts failures as bad;
    and only user errors count for `max_consecutive_failed_trials`.

    Args:
        oracle: of the process that proposes trials.
        records: of its project, with the reason why a trial failed.
        executions_per_trial: over which a trial's score is averaged.
    """
    check_oracle(oracle)
    known = _FailedTrials(oracle, records)
    redraw(oracle, known.is_known_infeasible)
    may_not_reach = any(isinstance(objective, SecondsTo) for objective in objectives_of(oracle.objective))
    learn_from_failures(oracle, unreached=UNREACHED / executions_per_trial if may_not_reach else math.inf)
    count_failures(oracle, known.is_user_error)


class _FailedTrials:
    """The records of failed trials."""

    def __init__(self, oracle: keras_tuner.Oracle, records: ProjectRecords) -> None:
        self._oracle = oracle
        self._records = records
        self._of_failed: dict[str, TrialRecord | None] = {}  # which do not change anymore

    def is_known_infeasible(self, values: Mapping[str, object]) -> bool:
        """Whether a trial with these values is known to fail."""
        return any(_matches(record, values) for record in self._infeasible())

    def is_user_error(self, trial: keras_tuner.engine.trial.Trial) -> bool:
        """Whether a failed trial failed by an error in the user's code."""
        record = self._record(trial)
        return record is None or record.failure is None or not record.failure.is_infeasible

    def _infeasible(self) -> list[TrialRecord]:
        failed = [trial for trial in self._oracle.trials.values() if trial.status == "FAILED"]
        records = [self._record(trial) for trial in failed]
        return [record for record in records if record and record.failure and record.failure.is_infeasible]

    def _record(self, trial: keras_tuner.engine.trial.Trial) -> TrialRecord | None:
        if trial.trial_id not in self._of_failed:
            self._of_failed[trial.trial_id] = self._records.of_trial(trial.trial_id)
        return self._of_failed[trial.trial_id]


def _matches(record: TrialRecord, values: Mapping[str, object]) -> bool:
    assert record.failure is not None
    if record.failure.kind == "missing device" and record.num_replicas == 0:  # the strategy was unavailable
        return values.get(HYPERPARAMETER) == record.strategy
    return {k: v for k, v in values.items() if not k.startswith("tuner/")} == {
        k: v for k, v in record.values.items() if not k.startswith("tuner/")
    }
