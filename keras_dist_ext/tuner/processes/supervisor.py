"""Supervise the processes of a search: restart those that die, and end a trial that kills its process again."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from keras_dist_ext.aliases import JsonValue
from keras_dist_ext.cluster.failure import Failure
from keras_dist_ext.tuner.processes.channel import Channel, Unreachable, WorkerState
from keras_dist_ext.tuner.processes.worker_group import WorkerGroup

__all__ = ["Death", "Limits", "Supervisor"]


@dataclass(frozen=True)
class Death:
    """The death of a worker, or of the chief, in a search."""

    name: str  # "tuner 1"
    trial_id: str | None  # the trial that it was running
    cause: str  # with the last lines of its output
    action: str  # what the supervisor did


@dataclass(frozen=True)
class Limits:
    """When a search gives up on its processes."""

    max_restarts: int  # of a worker in one trial, or before its first trial, and of the chief
    deadline: float | None  # of the whole search, by the monotonic clock
    hang_seconds: float | None  # after which a trial without a step hangs


class _Chief(enum.Enum):
    STARTING = enum.auto()
    SERVING = enum.auto()
    DONE = enum.auto()  # it has stopped serving, and runs the rest of the user's program


class _Worker:
    """A group that runs trials, and its history."""

    def __init__(self, group: WorkerGroup):
        self.group = group
        self.is_removed = False
        self.has_exited = False
        self.cause: str | None = None  # of a death that was not handled yet
        self.num_ended = 0  # trials, when it died the last time; the next two count since then
        self.num_deaths_without_trial = 0
        self.num_consecutive_failed_trials = 0  # trials that ended as failed because it died in them

    @property
    def is_inactive(self) -> bool:
        return self.is_removed or self.has_exited


class Supervisor:
    """Runs the processes of a search in the launcher.

    A worker that dies is restarted under its own id, and gets its trial again. When the trial has killed it more than
    `max_restarts` times, the trial ends as failed, with the reason. After three such trials of one worker in a row, or
    too many deaths outside of trials, the worker is removed, and the others continue.

    Args:
        chief: not started yet.
        workers: not started yet.
        limits: when to give up.
        signals: that this process has received; the first ends the search.
        show_line: prints a message.
    """

    MAX_CONSECUTIVE_FAILED_TRIALS = 3  # as in keras-tuner
    STATUS_SECONDS = 0.25
    POLL_SECONDS = 0.05
    EXIT_SECONDS = 10.0  # for workers to exit when there are no more trials

    def __init__(
        self,
        chief: WorkerGroup,
        workers: Sequence[WorkerGroup],
        limits: Limits,
        signals: Sequence[int],
        show_line: Callable[[str], None],
    ):
        self.deaths: list[Death] = []
        self._chief, self._workers = chief, [_Worker(group) for group in workers]
        self._limits, self._signals, self._show_line = limits, signals, show_line
        self._channel: Channel | None = None
        self._state, self._last_poll = _Chief.STARTING, 0.0
        self._num_deaths: Counter[str] = Counter()  # by trial

    def run(self) -> Failure | None:
        """Run the search until the chief's program has ended, or it has failed; then return the failure.

        Raises:
            LaunchError: a log cannot be written.
        """
        try:
            return self._run()
        finally:
            if self._channel is not None:
                self._channel.close()

    def _run(self) -> Failure | None:
        self._chief.begin()
        while True:
            self._pump()
            if self._signals:
                return Failure.by_signal(self._signals[0])
            if self._limits.deadline is not None and time.monotonic() > self._limits.deadline:
                if self._chief.waits_for:
                    return Failure.by_time_without_places(self._chief.waits_for)
                return Failure.by_time([process for group in self._groups for process in group.processes])
            if self._chief.has_exited:
                return self._handle_chief_exit()
            if self._chief.has_failed:
                failure = self._handle_chief_failure()
                if failure is not None:
                    return failure
            elif self._state is _Chief.STARTING:
                failure = self._poll_chief()
                if failure is not None:
                    return failure
            elif self._state is _Chief.SERVING:
                try:
                    self._check_workers()
                except Unreachable as error:
                    if not error.is_busy:  # it has no more trials; or it was killed, which the next look shows
                        self._state = _Chief.DONE

    @property
    def _groups(self) -> list[WorkerGroup]:
        return [self._chief, *(worker.group for worker in self._workers)]

    def _pump(self) -> None:
        time.sleep(self.POLL_SECONDS)
        for group in self._groups:
            group.pump()
            if missing := group.missing_place():
                self._show_line(f"{group.name} has no place yet. {missing}.")
                if group is not self._chief and self._state is _Chief.SERVING:
                    self._give_trial_away(group)

    def _give_trial_away(self, group: WorkerGroup) -> None:
        """Have others run the trial of a worker that waits for a place: in some searches they wait for that trial."""
        with suppress(Unreachable):
            self._ask("release_trial", tuner_id=group.role.tuner_id)

    def _ask(self, method: str, **request: JsonValue) -> JsonValue:
        """Call a method of the chief where it is now, without retries; see `Channel.call`."""
        if self._channel is not None and self._channel.address != self._chief.address:
            self._channel.close()
            self._channel = None
        self._channel = self._channel or Channel(self._chief.address)
        return self._channel.call(method, **request)

    # The chief

    def _handle_chief_exit(self) -> Failure | None:
        if self._state is _Chief.STARTING and self._chief.num_starts == 1:
            return Failure(1, "The chief exited without a search: its program must call the tuner's `search`.")
        deadline = time.monotonic() + self.EXIT_SECONDS
        while time.monotonic() < deadline and any(
            process.exit_code is None for worker in self._workers for process in worker.group.processes
        ):
            self._pump()
        return None

    def _handle_chief_failure(self) -> Failure | None:
        process = self._chief.failed
        if not self._chief.was_killed or self._chief.num_starts > self._limits.max_restarts:
            others = [other for worker in self._workers for other in worker.group.processes]
            return self._chief.end() if process is None else Failure.of_process(process, others)
        failure = self._chief.end()
        assert failure is not None
        if not self._chief.role.address:
            self._end_workers()
        self._record("chief", None, failure.message, "It was restarted, and continues from what it has saved.")
        self._state = _Chief.STARTING
        self._chief.begin()
        return None

    def _end_workers(self) -> None:
        """End all, since the chief comes to a new address, perhaps in the place of one of them."""
        for worker in self._workers:
            failure = worker.group.end(grace_seconds=0.0)
            if failure is not None:
                worker.cause = failure.message

    def _poll_chief(self) -> Failure | None:
        if not self._chief.address or time.monotonic() < self._last_poll + self.STATUS_SECONDS:
            return None
        self._last_poll = time.monotonic()
        try:
            self._ask("status")
        except Unreachable:
            return None
        except NotImplementedError:
            return Failure(
                1,
                "The chief serves keras-tuner's own oracle, which waits forever for a worker that dies. Search with a "
                "tuner of `keras_dist_ext.tuner`, or decorate your own class with `@kde.tuner.with_strategies`.",
            )
        self._state = _Chief.SERVING
        for worker in self._workers:
            worker.group.role = replace(worker.group.role, address=self._chief.address)
            if worker.group.has_exited:  # while an earlier chief served
                worker.group.end()
            if not worker.is_removed and not worker.group.is_active and worker.cause is None:
                worker.has_exited = False
                worker.group.begin()
        return None

    # The workers

    def _check_workers(self) -> None:
        for worker in self._workers:
            if worker.group.has_failed:
                failure = worker.group.end()
                assert failure is not None
                worker.cause = failure.message
            elif worker.group.has_exited:
                worker.group.end()
                self._handle_exit(worker)
            elif self._limits.hang_seconds is not None:
                self._check_hang(worker, self._limits.hang_seconds)
            if worker.cause is not None:
                self._handle_death(worker, worker.cause)
        if all(worker.is_inactive for worker in self._workers):
            self._abort_without_workers()

    def _handle_exit(self, worker: _Worker) -> None:
        worker.cause = f"{worker.group.name} exited with code 0 in the middle of a trial."
        if self._worker_state(worker)["trial_id"] is None:
            worker.cause = None
            self._ask("remove_worker", tuner_id=worker.group.role.tuner_id)
            worker.has_exited = True

    def _worker_state(self, worker: _Worker) -> WorkerState:
        return self._ask("worker_state", tuner_id=worker.group.role.tuner_id)  # type: ignore[no-any-return]

    def _check_hang(self, worker: _Worker, hang_seconds: float) -> None:
        processes = worker.group.processes
        if not processes or min(process.seconds_without_step for process in processes) <= hang_seconds:
            return
        state = self._worker_state(worker)
        if max(state["trial_seconds"], state["screening_seconds"]) > hang_seconds:
            worker.cause = Failure.by_hang(processes, hang_seconds).message
            worker.group.kill()
            worker.group.end()

    def _handle_death(self, worker: _Worker, cause: str) -> None:
        limit, state = self._limits.max_restarts, self._worker_state(worker)
        trial_id = state["trial_id"]
        if state["is_finished"]:
            worker.cause, worker.has_exited = None, True
            return
        if state["message"]:
            cause = f"{cause}\n{state['message']}"
        if state["num_ended"] != worker.num_ended:  # it has ended trials since it died the last time
            worker.num_ended, worker.num_consecutive_failed_trials, worker.num_deaths_without_trial = (
                state["num_ended"],
                0,
                0,
            )
        if trial_id is None:
            worker.num_deaths_without_trial += 1
            may_restart = worker.num_deaths_without_trial <= limit
            action = "It was restarted." if may_restart else self._remove(worker)
        else:
            self._num_deaths[trial_id] += 1
            if self._num_deaths[trial_id] > limit:
                action = self._fail_trial(worker, trial_id, cause)
            else:
                action = "It was restarted, with the same trial."
        worker.cause = None
        self._record(worker.group.name, trial_id, cause, action)
        if not worker.is_removed:
            worker.group.begin()

    def _fail_trial(self, worker: _Worker, trial_id: str, cause: str) -> str:
        deaths = self._num_deaths[trial_id]
        reason = cause if deaths == 1 else f"The worker died {deaths} times in this trial, the last time: {cause}"
        self._ask("fail_trial", tuner_id=worker.group.role.tuner_id, reason=reason)
        worker.num_consecutive_failed_trials += 1
        ended = f"Trial {trial_id} ended as failed"
        if worker.num_consecutive_failed_trials == self.MAX_CONSECUTIVE_FAILED_TRIALS:
            return f"{ended}, like the {worker.num_consecutive_failed_trials - 1} before it. {self._remove(worker)}"
        return f"{ended}, and the worker was restarted."

    def _remove(self, worker: _Worker) -> str:
        worker.is_removed = True
        self._ask("remove_worker", tuner_id=worker.group.role.tuner_id)
        return "The worker was removed."

    def _abort_without_workers(self) -> None:
        reasons = "\n".join(death.cause for death in self.deaths[-len(self._workers) :])
        self._ask("status")  # raises if the search has finished, as when all workers have exited
        self._ask(
            "abort",
            reason="No worker is left to run the remaining trials. The search continues from here when restarted."
            + (f"\n{reasons}" if reasons else ""),
        )

    def _record(self, name: str, trial_id: str | None, cause: str, action: str) -> None:
        self.deaths.append(Death(name, trial_id, cause, action))
        where = "" if trial_id is None else f" in trial {trial_id}"
        self._show_line(f"{name} died{where}. {action}\n{cause}")
