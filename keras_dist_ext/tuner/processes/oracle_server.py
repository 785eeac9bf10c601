"""Serve a search's oracle to its workers, and end even if workers die.

keras-tuner's own chief waits forever for a worker that has died, and after an exception in its oracle.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext._keras.keras_tuner_oracles import release_lock, run_again
from keras_dist_ext.aliases import Config, JsonObject
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.processes.channel import ScreeningReply, SearchStatus, WorkerState, handlers
from keras_dist_ext.tuner.processes.screening_lease import ScreeningLease

__all__ = ["OracleServer", "SearchEnded"]

Trial: TypeAlias = keras_tuner.engine.trial.Trial
TrialStatus = keras_tuner.engine.trial.TrialStatus


class SearchEnded(LaunchError):
    """A search ended before its last trial: an error on a worker, or no worker is left."""


class OracleServer:
    """An oracle that answers the workers of a search.

    All calls run one after another in one thread. They are idempotent: a worker that got no reply repeats its call.

    Args:
        oracle: of the chief's tuner.
        address: where to listen, host:port; nowhere else.
        on_trial_failed: called with a trial that the supervisor ends as failed, and the reason, before the oracle.
        lease: for the screening, if there is to be one.

    Raises:
        LaunchError: the address cannot be listened on.
    """

    GRACE_SECONDS = 1.0  # to send the last replies when the search has finished

    def __init__(
        self,
        oracle: keras_tuner.Oracle,
        address: str,
        on_trial_failed: Callable[[Trial, str], None],
        lease: ScreeningLease | None = None,
    ):
        self._oracle, self._on_trial_failed, self._lease = oracle, on_trial_failed, lease
        self._groups: dict[str, _GroupState] = {}  # by tuner id
        self._num_ended: Counter[str] = Counter()  # trials, by tuner id
        self._has_stopped = False  # a worker was sent the reply that there are no more trials
        self._error: Exception | None = None
        self._finished = threading.Event()
        # Without the option, a second server could listen on the same port and get half of the calls.
        self._server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        methods = {
            name: getattr(self, name)
            for name in (
                *("get_space", "update_space", "create_trial", "update_trial", "end_trial"),
                *(
                    "request_screening",
                    "finish_screening",
                    "get_trial",
                    "get_best_trials",
                    "status",
                    "worker_state",
                    "fail_trial",
                    "release_trial",
                    "remove_worker",
                    "abort",
                ),
            )
        }
        self._server.add_generic_rpc_handlers((handlers(methods, self._check_finished),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise _cannot_listen(address, str(error)) from error
        if not port:
            raise _cannot_listen(address, "gRPC gives no reason")

    def run(self) -> None:
        """Serve until all trials have ended and all workers know, or the search fails.

        Raises:
            SearchEnded: an error on a worker ended the search, or no worker is left.
            RuntimeError: keras-tuner ended it after too many consecutive failed trials.
        """
        self._server.start()
        try:
            while not self._finished.wait(1.0):  # with a timeout, so that signals are handled
                pass
        finally:
            self._server.stop(self.GRACE_SECONDS).wait()
        self._oracle.save()  # keras-tuner's last save has the last trial as ongoing
        if self._error is not None:
            raise self._error

    def _check_finished(self) -> None:
        is_waited_for = self._oracle.tuner_ids or any(
            group.is_stopped and not group.all_received for group in self._groups.values()
        )
        if self._error or (self._has_stopped and not self._oracle.ongoing_trials and not is_waited_for):
            self._finished.set()

    # Calls of keras-tuner's workers

    def get_space(self) -> Config:
        """Return the config of the hyperparameters known so far."""
        config: Config = self._oracle.get_space().get_config()
        return config

    def update_space(self, space: Config) -> None:
        """Add hyperparameters that a worker has found, given as their config."""
        self._oracle.update_space(keras_tuner.HyperParameters.from_config(space))

    def update_trial(self, trial_id: str, metrics: Mapping[str, float], step: int) -> JsonObject:
        """Take the metrics of a trial, and return its state."""
        try:
            return _state(self._oracle.update_trial(trial_id, metrics, step))
        finally:
            release_lock(self._oracle)

    def get_trial(self, trial_id: str) -> JsonObject:
        """Return the state of a trial."""
        return _state(self._oracle.get_trial(trial_id))

    def get_best_trials(self, num_trials: int) -> list[JsonObject]:
        """Return the states of the best trials."""
        return [_state(trial) for trial in self._oracle.get_best_trials(num_trials)]

    def request_screening(self, tuner_id: str, measures: bool) -> ScreeningReply:
        """Return the result of the screening, or whether a worker may measure; see `ScreeningLease.request`."""
        if self._lease is None:
            raise LaunchError("A worker asks for a screening, and the chief has none: their programs differ.")
        return self._lease.request(tuner_id, measures=measures)

    def finish_screening(self, result: JsonObject) -> None:
        """Take the result of the screening, of a worker that was told to measure."""
        assert self._lease is not None
        self._lease.finish(result)

    def create_trial(
        self, tuner_id: str, start: int, trial_number: int, worker_index: int, num_workers: int
    ) -> JsonObject | None:
        """Return the state of a trial, the same for all workers of a group; None: ask again later.

        Args:
            tuner_id: of the group.
            start: how often its processes were started.
            trial_number: which trial they ask for, counted from 1 since that start.
            worker_index: which of them asks.
            num_workers: in the group.
        """
        group = self._groups.get(tuner_id)
        if group is None or start > group.start or trial_number < group.trial_number:  # it, or the chief, was restarted
            group = self._groups[tuner_id] = _GroupState(start, trial_number - 1, num_workers)
            if tuner_id in self._oracle.ongoing_trials:
                group.assign(trial_number, self._oracle.ongoing_trials[tuner_id])
        if start < group.start:
            return None  # to a process that is being terminated
        if trial_number > group.trial_number:
            trial = self._propose(tuner_id)
            if trial.status == TrialStatus.IDLE:
                return None
            group.assign(trial_number, trial)
        group.received_by.add(worker_index)
        assert group.trial is not None
        return _state(group.trial)

    def _propose(self, tuner_id: str) -> Trial:
        if self._error is None:
            try:
                trial = self._oracle.create_trial(tuner_id)
            except Exception as error:
                self._fail(error)
            else:
                self._has_stopped |= trial.status == TrialStatus.STOPPED
                return trial
        return Trial(self._oracle.get_space(), status=TrialStatus.STOPPED)

    def end_trial(
        self, tuner_id: str, start: int, trial_number: int, worker_index: int, num_workers: int, trial: JsonObject
    ) -> bool:
        """Take the state in which a worker ended a trial; return whether all workers of its group have ended it."""
        group, ongoing = self._groups.get(tuner_id), self._oracle.ongoing_trials.get(tuner_id)
        is_stale = group is not None and (start, trial_number) < (group.start, group.trial_number)
        if ongoing is None or ongoing.trial_id != trial["trial_id"] or is_stale:
            return True  # a repeated call
        if group is None or start > group.start:  # the chief was restarted
            group = self._groups[tuner_id] = _GroupState(start, trial_number, num_workers, ongoing)
        group.reports[worker_index] = trial
        if len(group.reports) < num_workers:
            return False
        failed = [end for _, end in sorted(group.reports.items()) if end["status"] != TrialStatus.COMPLETED]
        self._end(Trial.from_state(failed[0] if failed else group.reports[0]))
        self._num_ended[tuner_id] += 1
        return True

    def _end(self, trial: Trial) -> None:
        try:
            self._oracle.end_trial(trial)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        release_lock(self._oracle)
        if not self._finished.is_set():
            self._error = self._error or error

    # Calls of the supervisor

    def status(self) -> SearchStatus:
        """Return the number of trials, and how many of them have ended."""
        return {"trials": len(self._oracle.trials), "ended": len(self._oracle.end_order)}

    def worker_state(self, tuner_id: str) -> WorkerState:
        """Return the trial of a worker group, how many it has ended, and the message of a worker that failed."""
        trial, group = self._oracle.ongoing_trials.get(tuner_id), self._groups.get(tuner_id)
        messages = [end["message"] for end in (group.reports.values() if group and trial else ()) if end["message"]]
        return {
            "trial_id": trial and trial.trial_id,
            "trial_seconds": time.monotonic() - group.assigned_at if group and trial else 0.0,
            "screening_seconds": self._lease.elapsed_seconds(tuner_id) if self._lease else 0.0,
            "num_ended": self._num_ended[tuner_id],
            "message": messages[0] if messages else None,
            "is_finished": self._finished.is_set(),
        }

    def fail_trial(self, tuner_id: str, reason: str) -> None:
        """End a worker's trial as failed; it is not retried."""
        trial = self._oracle.ongoing_trials.get(tuner_id)
        if trial is not None:
            self._on_trial_failed(trial, reason)
            self._end(Trial.from_state({**_state(trial), "status": TrialStatus.FAILED, "message": reason}))

    def release_trial(self, tuner_id: str) -> None:
        """Give the trial of a worker that cannot go on for now to the next worker that asks for one.

        Once a worker was told that there are no more, others may not ask again, and the worker keeps its trial.
        """
        if not self._has_stopped:
            run_again(self._oracle, tuner_id)
            self.remove_worker(tuner_id)

    def remove_worker(self, tuner_id: str) -> None:
        """Stop waiting for a worker."""
        if self._lease is not None:
            self._lease.release(tuner_id)
        self._oracle.tuner_ids.discard(tuner_id)
        self._groups.pop(tuner_id, None)

    def abort(self, reason: str) -> None:
        """End the search."""
        self._fail(SearchEnded(reason))


def _state(trial: Trial) -> JsonObject:
    state: JsonObject = trial.get_state()
    return state


def _cannot_listen(address: str, cause: str) -> LaunchError:
    return LaunchError(
        f"The chief of the search cannot listen on {address} ({cause}), so no worker would get a trial. Set "
        "KERASTUNER_ORACLE_PORT to a free port and KERASTUNER_ORACLE_IP to an address of this machine."
    )


@dataclass
class _GroupState:
    """The state of the processes that share a tuner id: one, or the workers that run each trial together."""

    start: int
    trial_number: int  # of the trial that was assigned last
    num_workers: int
    trial: Trial | None = None
    received_by: set[int] = field(default_factory=set)  # the workers that have it
    reports: dict[int, JsonObject] = field(default_factory=dict)  # its state at its end, by worker
    assigned_at: float = field(default_factory=time.monotonic)

    def assign(self, trial_number: int, trial: Trial) -> None:
        """Assign a trial to all workers."""
        if trial.status != TrialStatus.STOPPED:
            trial.status = TrialStatus.RUNNING
            trial.metrics = type(trial.metrics)()  # else averaged with an earlier attempt's
        self.trial_number, self.trial = trial_number, trial
        self.received_by, self.reports, self.assigned_at = set(), {}, time.monotonic()

    @property
    def is_stopped(self) -> bool:
        """Whether there are no more trials for this group."""
        return self.trial is not None and self.trial.status == TrialStatus.STOPPED

    @property
    def all_received(self) -> bool:
        """Whether all workers have the trial that was assigned last."""
        return len(self.received_by) == self.num_workers
