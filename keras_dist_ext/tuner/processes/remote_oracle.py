"""Stand, in a worker, for the oracle of the chief."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.processes.channel import Channel, Unreachable
from keras_dist_ext.tuner.processes.place import Place

__all__ = ["RemoteOracle"]

Trial, TrialStatus = keras_tuner.engine.trial.Trial, keras_tuner.engine.trial.TrialStatus


class RemoteOracle:
    """What a worker's tuner asks of its oracle, asked of the chief.

    Where several workers run each trial together, all get the same one, the next begins when all have ended the last,
    and only the first of them reports.

    Args:
        oracle: of this process, for what all processes know alike.
        place: of this process.
    """

    POLL_SECONDS = 0.2
    TEAM_SECONDS = 20.0  # from one worker's failure until the others must have failed too, or are stuck
    PATIENCE_SECONDS = 120.0  # with a chief that is being started again by our launcher
    PATIENCE_ALONE_SECONDS = 3600.0  # keras-tuner's: a cluster may start the chief long after its workers

    def __init__(self, oracle: Any, place: Place):
        self._oracle, self._place = oracle, place
        patience_seconds = self.PATIENCE_SECONDS if place.is_launched else self.PATIENCE_ALONE_SECONDS
        self._channel = Channel(place.address, patience_seconds)
        self._turn = 0
        self._trial: Any = None
        self.tuner_id = place.tuner_id
        self.multi_worker = place.num_members > 1
        self.should_report = place.member == 0

    @property
    def objective(self) -> Any:
        """What trials are judged by."""
        return self._oracle.objective

    @property
    def max_trials(self) -> int | None:
        """How many trials there are at most."""
        return self._oracle.max_trials  # type: ignore[no-any-return]

    @property
    def allow_new_entries(self) -> bool:
        """Whether models may ask for hyperparameters that nobody has declared."""
        return self._oracle.allow_new_entries  # type: ignore[no-any-return]

    @property
    def tune_new_entries(self) -> bool:
        """Whether those are searched too."""
        return self._oracle.tune_new_entries  # type: ignore[no-any-return]

    def get_space(self) -> Any:
        """Return the hyperparameters known so far."""
        return keras_tuner.HyperParameters.from_config(self._channel.call("get_space"))

    def update_space(self, hyperparameters: Any) -> None:
        """Add hyperparameters that a model has asked for."""
        if self.should_report:
            self._channel.call("update_space", space=hyperparameters.get_config())

    def ask_first_pass(self, *, measures: bool, once: bool = False) -> Any:
        """Return what came out of the first pass, or whether this worker may make it.

        Args:
            measures: whether it does so already.
            once: whether to go without a reply where the chief does not answer.
        """
        asking = {"tuner_id": self.tuner_id, "measures": measures}
        if not once:
            return self._channel.call("ask_first_pass", **asking)
        channel = Channel(self._place.address)
        try:
            return channel.call("ask_first_pass", **asking)
        except (LaunchError, RuntimeError):
            return None
        finally:
            channel.close()

    def end_first_pass(self, outcome: Mapping[str, Any]) -> None:
        """Report what came out of the first pass."""
        self._channel.call("end_first_pass", outcome=outcome)

    def create_trial(self, tuner_id: str) -> Any:
        """Wait for a trial and return it."""
        self._turn += 1
        while True:
            state = self._channel.call("create_trial", **self._asking(tuner_id))
            if state is not None:
                self._trial = Trial.from_state(state)
                return self._trial
            time.sleep(self.POLL_SECONDS)

    def _asking(self, tuner_id: str) -> dict[str, Any]:
        """Say who asks, and for which trial."""
        place = self._place
        who = {"member": place.member, "num_members": place.num_members}
        return {"tuner_id": tuner_id, "start": place.start, "turn": self._turn, **who}

    def update_trial(self, trial_id: str, metrics: Mapping[str, float], step: int = 0) -> Any:
        """Report what a trial has reached."""
        if not self.should_report:
            return self._trial
        return Trial.from_state(self._channel.call("update_trial", trial_id=trial_id, metrics=metrics, step=step))

    def end_trial(self, trial: Any) -> None:
        """Report the end of a trial, and wait until all who run it have ended it."""
        begin = time.monotonic()
        while not self._channel.call("end_trial", **self._asking(self.tuner_id), trial=trial.get_state()):
            if trial.status != TrialStatus.COMPLETED and time.monotonic() - begin > self.TEAM_SECONDS:
                self._leave_team(trial)
            time.sleep(self.POLL_SECONDS)

    def _leave_team(self, trial: Any) -> None:
        """End this process, so that all of the team are ended and begin anew: the others wait in a collective."""
        sys.stderr.write(
            f"{trial.message}\nTrial {trial.trial_id} has failed here, but not on the other workers that run it: they "
            "wait for this one. All of them must begin anew, so this process ends.\n"
        )
        sys.stderr.flush()
        os._exit(os.EX_TEMPFAIL)  # an orderly end would wait for the others

    def get_trial(self, trial_id: str) -> Any:
        """Return a trial as the chief knows it."""
        if not self.should_report:
            return self._trial  # without what the first worker may have reported by now
        return Trial.from_state(self._channel.call("get_trial", trial_id=trial_id))

    def get_best_trials(self, num_trials: int = 1) -> list[Any]:
        """Return the best trials so far."""
        return [Trial.from_state(state) for state in self._channel.call("get_best_trials", num_trials=num_trials)]

    def remaining_trials(self) -> int | None:
        """Return how many trials are not begun yet."""
        return self.max_trials and self.max_trials - int(self._channel.call("status")["trials"])

    def abort(self, reason: str) -> None:
        """End the search on all workers."""
        self._channel.call("abort", reason=reason)

    def local(self) -> Any:
        """Wait until the chief has ended, and return this process' oracle with what the chief has saved."""
        once = Channel(self._place.address)
        while True:
            try:
                once.call("status")
            except Unreachable as error:
                if not error.is_busy:
                    break
            time.sleep(self.POLL_SECONDS)
        self._oracle.reload()
        return self._oracle
