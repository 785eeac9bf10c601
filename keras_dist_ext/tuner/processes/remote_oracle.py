"""Forward a worker's calls to the oracle of the chief."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TypeAlias

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.aliases import JsonObject, JsonValue
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.processes.channel import Channel, Unreachable
from keras_dist_ext.tuner.processes.process_role import ProcessRole

__all__ = ["RemoteOracle"]

Trial: TypeAlias = keras_tuner.engine.trial.Trial
TrialStatus = keras_tuner.engine.trial.TrialStatus


class RemoteOracle:
    """The oracle of a worker's tuner, which asks the chief.

    Where several workers run each trial together, all get the same one, the next starts when all have ended the last,
    and only worker 0 reports.

    Args:
        oracle: of this process, for what is the same in all processes.
        role: of this process.
    """

    POLL_SECONDS = 0.2
    GROUP_FAILURE_SECONDS = 20.0  # after one worker's failure, the others of its group have failed too, or hang
    RETRY_SECONDS = 120.0  # while our launcher restarts the chief
    UNMANAGED_RETRY_SECONDS = 3600.0  # keras-tuner's: a cluster may start the chief long after its workers

    def __init__(self, oracle: keras_tuner.Oracle, role: ProcessRole):
        self._oracle, self._role = oracle, role
        retry_seconds = self.RETRY_SECONDS if role.is_managed else self.UNMANAGED_RETRY_SECONDS
        self._channel = Channel(role.address, retry_seconds)
        self._trial_number = 0
        self._trial: Trial | None = None
        self.tuner_id = role.tuner_id
        self.multi_worker = role.num_workers > 1
        self.should_report = role.worker_index == 0

    @property
    def objective(self) -> keras_tuner.Objective:
        """The objective of the search."""
        return self._oracle.objective

    @property
    def max_trials(self) -> int | None:
        """The largest number of trials."""
        return self._oracle.max_trials  # type: ignore[no-any-return]

    @property
    def allow_new_entries(self) -> bool:
        """Whether models may ask for hyperparameters that were not declared."""
        return self._oracle.allow_new_entries  # type: ignore[no-any-return]

    @property
    def tune_new_entries(self) -> bool:
        """Whether such hyperparameters are searched, too."""
        return self._oracle.tune_new_entries  # type: ignore[no-any-return]

    def get_space(self) -> keras_tuner.HyperParameters:
        """Return the hyperparameters known so far."""
        return keras_tuner.HyperParameters.from_config(self._channel.call("get_space"))

    def update_space(self, hyperparameters: keras_tuner.HyperParameters) -> None:
        """Add hyperparameters that a model has asked for."""
        if self.should_report:
            self._channel.call("update_space", space=hyperparameters.get_config())

    def request_screening(self, *, measures: bool, once: bool = False) -> JsonValue:
        """Return the result of the screening, or whether this worker may measure; see `ScreeningLease.request`.

        Args:
            measures: whether this worker is measuring already.
            once: whether to return None where the chief does not answer.
        """
        request = {"tuner_id": self.tuner_id, "measures": measures}
        if not once:
            return self._channel.call("request_screening", **request)
        channel = Channel(self._role.address)
        try:
            return channel.call("request_screening", **request)
        except (LaunchError, RuntimeError):
            return None
        finally:
            channel.close()

    def finish_screening(self, result: JsonObject) -> None:
        """Report the result of the screening."""
        self._channel.call("finish_screening", result=result)

    def create_trial(self, tuner_id: str) -> Trial:
        """Wait for a trial and return it."""
        self._trial_number += 1
        while True:
            state = self._channel.call("create_trial", **self._request(tuner_id))
            if state is not None:
                self._trial = Trial.from_state(state)
                return self._trial
            time.sleep(self.POLL_SECONDS)

    def _request(self, tuner_id: str) -> JsonObject:
        """Return which worker asks, and for which trial."""
        role = self._role
        worker = {"worker_index": role.worker_index, "num_workers": role.num_workers}
        return {"tuner_id": tuner_id, "start": role.start, "trial_number": self._trial_number, **worker}

    def update_trial(self, trial_id: str, metrics: Mapping[str, float], step: int = 0) -> Trial | None:
        """Report the metrics of a trial."""
        if not self.should_report:
            return self._trial
        return Trial.from_state(self._channel.call("update_trial", trial_id=trial_id, metrics=metrics, step=step))

    def end_trial(self, trial: Trial) -> None:
        """Report the end of a trial, and wait until all workers that run it have ended it."""
        begin = time.monotonic()
        while not self._channel.call("end_trial", **self._request(self.tuner_id), trial=trial.get_state()):
            if trial.status != TrialStatus.COMPLETED and time.monotonic() - begin > self.GROUP_FAILURE_SECONDS:
                self._abandon_group(trial)
            time.sleep(self.POLL_SECONDS)

    def _abandon_group(self, trial: Trial) -> None:
        """End this process, so that its whole group is restarted: the others wait in a collective."""
        sys.stderr.write(
            f"{trial.message}\nTrial {trial.trial_id} has failed here, but not on the other workers that run it: they "
            "wait for this one. All of them must be restarted, so this process exits.\n"
        )
        sys.stderr.flush()
        os._exit(os.EX_TEMPFAIL)  # a normal exit would wait for the others

    def get_trial(self, trial_id: str) -> Trial | None:
        """Return a trial as the chief knows it."""
        if not self.should_report:
            return self._trial  # without what the first worker may have reported by now
        return Trial.from_state(self._channel.call("get_trial", trial_id=trial_id))

    def get_best_trials(self, num_trials: int = 1) -> list[Trial]:
        """Return the best trials so far."""
        return [Trial.from_state(state) for state in self._channel.call("get_best_trials", num_trials=num_trials)]

    def remaining_trials(self) -> int | None:
        """Return the number of trials that have not started yet."""
        return self.max_trials and self.max_trials - int(self._channel.call("status")["trials"])

    def abort(self, reason: str) -> None:
        """End the search on all workers."""
        self._channel.call("abort", reason=reason)

    def local(self) -> keras_tuner.Oracle:
        """Wait until the chief has ended, and return this process' oracle with what the chief has saved."""
        once = Channel(self._role.address)
        while True:
            try:
                once.call("status")
            except Unreachable as error:
                if not error.is_busy:
                    break
            time.sleep(self.POLL_SECONDS)
        self._oracle.reload()
        return self._oracle
