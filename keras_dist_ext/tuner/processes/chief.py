"""Serve a search's oracle to its workers, and come to an end whatever becomes of them.

keras-tuner's own chief waits for ever for a worker that has died, and for each exception in its oracle.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc

from keras_dist_ext._keras.keras_tuner import keras_tuner, release_lock
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.processes.channel import handlers
from keras_dist_ext.tuner.processes.measuring import Turnstile

__all__ = ["OracleServer", "SearchEnded"]

Trial, TrialStatus = keras_tuner.engine.trial.Trial, keras_tuner.engine.trial.TrialStatus


class SearchEnded(LaunchError):
    """A search ended before its last trial: a worker's own error, or no worker left."""


class OracleServer:
    """An oracle that answers the workers of a search.

    All calls run one after another in one thread. They may be repeated: a worker that got no reply asks again.

    Args:
        oracle: of the chief's tuner.
        address: where to listen, host:port; nowhere else.
        on_close: called with a trial that the supervisor closes, before the oracle hears of it, and with the reason.
        turnstile: of the first pass, if there is to be one.

    Raises:
        LaunchError: the address cannot be listened on.
    """

    GRACE_SECONDS = 1.0  # for replies that are under way when the search is over

    def __init__(
        self, oracle: Any, address: str, on_close: Callable[[Any, str], None], turnstile: Turnstile | None = None
    ):
        self._oracle, self._on_close, self._turnstile = oracle, on_close, turnstile
        self._teams: dict[str, _Team] = {}  # by tuner id
        self._num_ended: Counter[str] = Counter()  # trials, by tuner id
        self._stops = False  # a worker was told that there are no more trials
        self._error: Exception | None = None
        self._over = threading.Event()
        # Without the option, a second server could listen on the same port and get half of the calls.
        self._server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        methods = {
            name: getattr(self, name)
            for name in (
                *("get_space", "update_space", "create_trial", "update_trial", "end_trial"),
                *(
                    "ask_first_pass",
                    "end_first_pass",
                    "get_trial",
                    "get_best_trials",
                    "status",
                    "state_of",
                    "close_trial",
                    "retire",
                    "abort",
                ),
            )
        }
        self._server.add_generic_rpc_handlers((handlers(methods, self._look_whether_over),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise _cannot_listen(address, str(error)) from error
        if not port:
            raise _cannot_listen(address, "gRPC does not say why")

    def run(self) -> None:
        """Serve until all trials have ended and all workers know, or the search fails.

        Raises:
            SearchEnded: a worker's own error ended the search, or no worker is left.
            RuntimeError: keras-tuner ended it: too many trials in a row have failed.
        """
        self._server.start()
        try:
            while not self._over.wait(1.0):  # with a time limit, signals are handled in between
                pass
        finally:
            self._server.stop(self.GRACE_SECONDS).wait()
        self._oracle.save()  # keras-tuner's last save counts the last trial as under way
        if self._error is not None:
            raise self._error

    def _look_whether_over(self) -> None:
        untold = self._oracle.tuner_ids or any(team.is_stopped and not team.is_told for team in self._teams.values())
        if self._error or (self._stops and not self._oracle.ongoing_trials and not untold):
            self._over.set()

    # What keras-tuner's workers ask for

    def get_space(self) -> Any:
        """Return the hyperparameters known so far."""
        return self._oracle.get_space().get_config()

    def update_space(self, space: Any) -> None:
        """Add hyperparameters that a worker has met."""
        self._oracle.update_space(keras_tuner.HyperParameters.from_config(space))

    def update_trial(self, trial_id: str, metrics: Mapping[str, float], step: int) -> Any:
        """Take what a trial has reached."""
        try:
            return self._oracle.update_trial(trial_id, metrics, step).get_state()
        finally:
            release_lock(self._oracle)

    def get_trial(self, trial_id: str) -> Any:
        """Return a trial."""
        return self._oracle.get_trial(trial_id).get_state()

    def get_best_trials(self, num_trials: int) -> list[Any]:
        """Return the best trials."""
        return [trial.get_state() for trial in self._oracle.get_best_trials(num_trials)]

    def ask_first_pass(self, tuner_id: str, measures: bool) -> Any:
        """Return what came out of the first pass, or whether a worker may make it."""
        if self._turnstile is None:
            raise LaunchError("A worker asks for the first pass, and the chief was given none: their programs differ.")
        return self._turnstile.ask(tuner_id, measures=measures)

    def end_first_pass(self, outcome: Any) -> None:
        """Take what came out of the first pass."""
        if self._turnstile is not None:
            self._turnstile.end(outcome)

    def create_trial(self, tuner_id: str, start: int, turn: int, member: int, num_members: int) -> Any:
        """Return a worker's trial, the same for all members of its team; None: ask again later.

        Args:
            tuner_id: the team's.
            start: which start of its processes it is.
            turn: which trial they ask for, counted from 1 since their start.
            member: who asks.
            num_members: of the team.
        """
        team = self._teams.get(tuner_id)
        if team is None or start > team.start or turn < team.turn:  # begun anew, or the chief was
            team = self._teams[tuner_id] = _Team(start, turn - 1, num_members)
            if tuner_id in self._oracle.ongoing_trials:
                team.deal(turn, self._oracle.ongoing_trials[tuner_id])
        if start < team.start:
            return None  # to a process that is being ended
        if turn > team.turn:
            trial = self._propose(tuner_id)
            if trial.status == TrialStatus.IDLE:
                return None
            team.deal(turn, trial)
        team.told.add(member)
        return team.trial.get_state()

    def _propose(self, tuner_id: str) -> Any:
        if self._error is None:
            try:
                trial = self._oracle.create_trial(tuner_id)
            except Exception as error:
                self._fail(error)
            else:
                self._stops |= trial.status == TrialStatus.STOPPED
                return trial
        return Trial(self._oracle.get_space(), status=TrialStatus.STOPPED)

    def end_trial(self, tuner_id: str, start: int, turn: int, member: int, num_members: int, trial: Any) -> bool:
        """Take a member's end of a trial, and return whether all have ended it."""
        team, ongoing = self._teams.get(tuner_id), self._oracle.ongoing_trials.get(tuner_id)
        is_stale = team is not None and (start, turn) < (team.start, team.turn)
        if ongoing is None or ongoing.trial_id != trial["trial_id"] or is_stale:
            return True  # said before
        if team is None or start > team.start:
            team = self._teams[tuner_id] = _Team(start, turn, num_members, ongoing)  # the chief has begun anew
        team.ends[member] = trial
        if len(team.ends) < num_members:
            return False
        failed = [end for _, end in sorted(team.ends.items()) if end["status"] != TrialStatus.COMPLETED]
        self._end(Trial.from_state(failed[0] if failed else team.ends[0]))
        self._num_ended[tuner_id] += 1
        return True

    def _end(self, trial: Any) -> None:
        try:
            self._oracle.end_trial(trial)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        release_lock(self._oracle)
        if not self._over.is_set():
            self._error = self._error or error

    # What the supervisor asks for

    def status(self) -> dict[str, int]:
        """Return how many trials there are, and how many of them have ended."""
        return {"trials": len(self._oracle.trials), "ended": len(self._oracle.end_order)}

    def state_of(self, tuner_id: str) -> dict[str, Any]:
        """Return a worker's trial, how many it has ended, and what one of its team says of a failure."""
        trial, team = self._oracle.ongoing_trials.get(tuner_id), self._teams.get(tuner_id)
        messages = [end["message"] for end in (team.ends.values() if team and trial else ()) if end["message"]]
        return {
            "trial_id": trial and trial.trial_id,
            "trial_seconds": time.monotonic() - team.dealt if team and trial else 0.0,
            "first_pass_seconds": self._turnstile.seconds_of(tuner_id) if self._turnstile else 0.0,
            "num_ended": self._num_ended[tuner_id],
            "message": messages[0] if messages else None,
            "is_over": self._over.is_set(),
        }

    def close_trial(self, tuner_id: str, reason: str) -> None:
        """End a worker's trial as failed; it is not tried again."""
        trial = self._oracle.ongoing_trials.get(tuner_id)
        if trial is not None:
            self._on_close(trial, reason)
            self._end(Trial.from_state({**trial.get_state(), "status": TrialStatus.FAILED, "message": reason}))

    def retire(self, tuner_id: str) -> None:
        """Wait no longer for a worker."""
        if self._turnstile is not None:
            self._turnstile.release(tuner_id)
        self._oracle.tuner_ids.discard(tuner_id)
        self._teams.pop(tuner_id, None)

    def abort(self, reason: str) -> None:
        """End the search."""
        self._fail(SearchEnded(reason))


def _cannot_listen(address: str, cause: str) -> LaunchError:
    return LaunchError(
        f"The chief of the search cannot listen on {address} ({cause}), so no worker would get a trial. Give a free "
        "port as KERASTUNER_ORACLE_PORT and an address of this machine as KERASTUNER_ORACLE_IP."
    )


@dataclass
class _Team:
    """The processes that share a tuner id: one, or the workers that run each trial together."""

    start: int
    turn: int  # of the trial that was dealt last
    num_members: int
    trial: Any = None
    told: set[int] = field(default_factory=set)  # the members that have it
    ends: dict[int, Any] = field(default_factory=dict)  # of that trial, by member
    dealt: float = field(default_factory=time.monotonic)

    def deal(self, turn: int, trial: Any) -> None:
        """Give a trial to all members."""
        if trial.status != TrialStatus.STOPPED:
            trial.status = TrialStatus.RUNNING
            trial.metrics = type(trial.metrics)()  # what an earlier attempt left would count half
        self.turn, self.trial, self.told, self.ends, self.dealt = turn, trial, set(), {}, time.monotonic()

    @property
    def is_stopped(self) -> bool:
        """Whether there are no more trials for it."""
        return self.trial is not None and self.trial.status == TrialStatus.STOPPED

    @property
    def is_told(self) -> bool:
        """Whether all members have what was dealt last."""
        return len(self.told) == self.num_members
