"""Watch over the processes of a search: who dies is started again, and what kills its process again is given up."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist_ext.cluster.failure import Failure
from keras_dist_ext.tuner.processes.channel import Channel, Unreachable
from keras_dist_ext.tuner.processes.crew import Crew

__all__ = ["Death", "Limits", "Supervisor"]


@dataclass(frozen=True)
class Death:
    """A worker, or the chief, that died in a search."""

    name: str  # "tuner 1"
    trial_id: str | None  # that it was in
    cause: str  # with its last lines
    consequence: str  # what was done about it


@dataclass(frozen=True)
class Limits:
    """How much a search puts up with."""

    max_restarts: int  # of a worker in one trial, or before its first, and of the chief
    deadline: float | None  # of the monotonic clock
    hang_seconds: float | None  # without a step in a trial


class _Chief(enum.Enum):
    STARTS = enum.auto()
    SERVES = enum.auto()
    IS_DONE = enum.auto()  # it serves no more: what follows is the user's


class _Worker:
    """A crew that runs trials, and what is remembered of it."""

    def __init__(self, crew: Crew):
        self.crew = crew
        self.is_given_up = False
        self.has_left = False
        self.cause: str | None = None  # of a death that is still to be dealt with
        self.num_ended = 0  # trials, when it died the last time; what follows counts since then
        self.num_deaths_without_trial = 0
        self.num_closed_in_a_row = 0  # trials that were closed because it died in them

    @property
    def is_gone(self) -> bool:
        return self.is_given_up or self.has_left


class Supervisor:
    """The launcher's part in a search.

    A worker that dies is started again under its own id, and gets the trial that it was in once more. When that has
    killed it more than `max_restarts` times, the trial ends as failed, with the reason. Three trials of one worker in a
    row that end so, or too many deaths outside of trials: the worker is given up, and the others go on.

    Args:
        chief: not started yet.
        workers: not started yet.
        channel: to the chief; asks once.
        limits: how much is put up with.
        signals: that have come in; the first ends the search.
        say: shows a line.
    """

    MOST_CLOSED_IN_A_ROW = 3  # as keras-tuner has it for trials that fail
    ASK_SECONDS = 0.25
    POLL_SECONDS = 0.05
    LEAVE_SECONDS = 10.0  # for workers that were told that there are no more trials

    def __init__(
        self,
        chief: Crew,
        workers: Sequence[Crew],
        channel: Channel,
        limits: Limits,
        signals: Sequence[int],
        say: Callable[[str], None],
    ):
        self.deaths: list[Death] = []
        self._chief, self._workers = chief, [_Worker(crew) for crew in workers]
        self._channel, self._limits, self._signals, self._say = channel, limits, signals, say
        self._state, self._asked = _Chief.STARTS, 0.0
        self._num_deaths: Counter[str] = Counter()  # by trial

    def run(self) -> Failure | None:
        """See the search to its end: the chief's program has ended, or something is amiss.

        Raises:
            LaunchError: a log cannot be written.
        """
        self._chief.begin()
        while True:
            self._pump()
            if self._signals:
                return Failure.by_signal(self._signals[0])
            if self._limits.deadline is not None and time.monotonic() > self._limits.deadline:
                return Failure.by_time([process for crew in self._crews for process in crew.processes])
            if self._chief.has_left:
                return self._chief_left()
            if self._chief.failed is not None:
                failure = self._chief_failed()
                if failure is not None:
                    return failure
            elif self._state is _Chief.STARTS:
                failure = self._ask_whether_it_serves()
                if failure is not None:
                    return failure
            elif self._state is _Chief.SERVES:
                try:
                    self._look_at_workers()
                except Unreachable as error:
                    self._unanswered(error)

    @property
    def _crews(self) -> list[Crew]:
        return [self._chief, *(worker.crew for worker in self._workers)]

    def _pump(self) -> None:
        time.sleep(self.POLL_SECONDS)
        for crew in self._crews:
            crew.pump()

    # The chief

    def _chief_left(self) -> Failure | None:
        if self._state is _Chief.STARTS and self._chief.num_starts == 1:
            return Failure(1, "The chief ended before it searched: its program must call the tuner's `search`.")
        deadline = time.monotonic() + self.LEAVE_SECONDS
        while time.monotonic() < deadline and any(
            process.exit_code is None for worker in self._workers for process in worker.crew.processes
        ):
            self._pump()
        return None

    def _chief_failed(self) -> Failure | None:
        process = self._chief.failed
        assert process is not None
        was_killed = (process.failure_code or 0) < 0
        if not was_killed or self._chief.num_starts > self._limits.max_restarts:
            return Failure.of_process(process, [other for worker in self._workers for other in worker.crew.processes])
        failure = self._chief.end()
        assert failure is not None
        self._note("chief", None, failure.message, "It was started again, and goes on with what it has saved.")
        self._state = _Chief.STARTS
        self._chief.begin()
        return None

    def _ask_whether_it_serves(self) -> Failure | None:
        if time.monotonic() < self._asked + self.ASK_SECONDS:
            return None
        self._asked = time.monotonic()
        try:
            self._channel.call("status")
        except Unreachable:
            return None
        except NotImplementedError:
            return Failure(
                1,
                "The chief serves keras-tuner's own oracle, which waits for ever for a worker that dies. Search with a "
                "tuner of `keras_dist_ext.tuner`, or put `kde.tuner.with_strategies` before the class of your own.",
            )
        self._state = _Chief.SERVES
        for worker in self._workers:
            if worker.crew.has_left:  # while a chief before this one served
                worker.crew.end()
            if not worker.is_given_up and not worker.crew.processes and worker.cause is None:
                worker.has_left = False
                worker.crew.begin()
        return None

    def _unanswered(self, error: Unreachable) -> None:
        """Find out why the chief does not answer: it was killed, is busy, or has no more trials."""
        if error.is_busy:
            return
        self._pump()
        self._pump()
        if self._chief.failed is None:
            self._state = _Chief.IS_DONE

    # The workers

    def _look_at_workers(self) -> None:
        for worker in self._workers:
            if worker.crew.failed is not None:
                failure = worker.crew.end()
                assert failure is not None
                worker.cause = failure.message
            elif worker.crew.has_left:
                worker.crew.end()
                self._left(worker)
            elif self._limits.hang_seconds is not None:
                self._look_for_hang(worker, self._limits.hang_seconds)
            if worker.cause is not None:
                self._died(worker, worker.cause)
        if all(worker.is_gone for worker in self._workers):
            self._nobody_left()

    def _left(self, worker: _Worker) -> None:
        worker.cause = f"{worker.crew.name} ended, with exit code 0, in the middle of a trial."
        if self._state_of(worker)["trial_id"] is None:
            worker.cause = None
            self._channel.call("retire", tuner_id=worker.crew.place.tuner_id)
            worker.has_left = True

    def _state_of(self, worker: _Worker) -> dict[str, Any]:
        return self._channel.call("state_of", tuner_id=worker.crew.place.tuner_id)  # type: ignore[no-any-return]

    def _look_for_hang(self, worker: _Worker, hang_seconds: float) -> None:
        processes = worker.crew.processes
        if not processes or min(process.seconds_without_step for process in processes) <= hang_seconds:
            return
        state = self._state_of(worker)
        if max(state["trial_seconds"], state["first_pass_seconds"]) > hang_seconds:
            worker.cause = Failure.by_hang(processes, hang_seconds).message
            worker.crew.kill()
            worker.crew.end()

    def _died(self, worker: _Worker, cause: str) -> None:
        limit, state = self._limits.max_restarts, self._state_of(worker)
        trial_id = state["trial_id"]
        if state["is_over"]:
            worker.cause, worker.has_left = None, True
            return
        if state["message"]:
            cause = f"{cause}\n{state['message']}"
        if state["num_ended"] != worker.num_ended:  # it has ended trials since it died the last time
            worker.num_ended, worker.num_closed_in_a_row, worker.num_deaths_without_trial = state["num_ended"], 0, 0
        if trial_id is None:
            worker.num_deaths_without_trial += 1
            may_restart = worker.num_deaths_without_trial <= limit
            consequence = "It was started again." if may_restart else self._give_up(worker)
        else:
            self._num_deaths[trial_id] += 1
            if self._num_deaths[trial_id] > limit:
                consequence = self._close_trial(worker, trial_id, cause)
            else:
                consequence = "It was started again, with the same trial."
        worker.cause = None
        self._note(worker.crew.name, trial_id, cause, consequence)
        if not worker.is_given_up:
            worker.crew.begin()

    def _close_trial(self, worker: _Worker, trial_id: str, cause: str) -> str:
        deaths = self._num_deaths[trial_id]
        reason = cause if deaths == 1 else f"The worker died {deaths} times in this trial, the last time so: {cause}"
        self._channel.call("close_trial", tuner_id=worker.crew.place.tuner_id, reason=reason)
        worker.num_closed_in_a_row += 1
        closed = f"Trial {trial_id} was closed as failed"
        if worker.num_closed_in_a_row == self.MOST_CLOSED_IN_A_ROW:
            return f"{closed}, as the {worker.num_closed_in_a_row - 1} before it. {self._give_up(worker)}"
        return f"{closed}, and the worker was started again."

    def _give_up(self, worker: _Worker) -> str:
        worker.is_given_up = True
        self._channel.call("retire", tuner_id=worker.crew.place.tuner_id)
        return "The worker was given up."

    def _nobody_left(self) -> None:
        reasons = "\n".join(death.cause for death in self.deaths[-len(self._workers) :])
        self._channel.call("status")  # raises where the search is over, as it is when all workers were told so
        self._channel.call(
            "abort",
            reason="No worker is left, though trials are. The search goes on where it stands when it is started again."
            + (f"\n{reasons}" if reasons else ""),
        )

    def _note(self, name: str, trial_id: str | None, cause: str, consequence: str) -> None:
        self.deaths.append(Death(name, trial_id, cause, consequence))
        where = "" if trial_id is None else f" in trial {trial_id}"
        self._say(f"{name} died{where}. {consequence}\n{cause}")
