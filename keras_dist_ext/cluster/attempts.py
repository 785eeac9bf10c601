"""Start the processes of a launch, and start them again after a failure."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

from keras_dist_ext.aliases import Picklable
from keras_dist_ext.cluster.cores import fair_shares, usable_cpus
from keras_dist_ext.cluster.failure import Failure, NotPlaced
from keras_dist_ext.cluster.host import Host, NotStarted, ValueLost
from keras_dist_ext.cluster.placing import Placing
from keras_dist_ext.cluster.process import Process, show
from keras_dist_ext.cluster.process_group import ProcessGroup
from keras_dist_ext.cluster.tasks import Task, tf_config
from keras_dist_ext.cluster.worker_count import WorkerCount
from keras_dist_ext.cluster.worker_run import WorkerRun
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.messages import counted

__all__ = ["Attempt", "Outcome", "run_attempts"]

RESTART = "KERAS_DIST_EXT_RESTART"  # environment variable: how often all have started again, from 0
_FAILURE_GRACE_SECONDS = 2.0  # for workers that may wait in a collective for one that is gone
_LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended."""

    failure: Failure | None
    runs: tuple[WorkerRun, ...]
    has_made_steps: bool
    again: str = ""  # why all start again, though none has failed
    workers: WorkerCount | None = None  # how many then


@dataclass(frozen=True)
class Attempt:
    """All that it takes to start the processes, as often as need be."""

    program: list[str] | bytes
    workers: WorkerCount
    num_ps: int
    environ: Mapping[str, str]
    affinity: bool  # whether each process has CPUs of its own
    deadline: float | None
    hang_seconds: float | None
    grace_seconds: float
    log_dir: str | os.PathLike[str] | None
    stream: IO[str] | None  # for output
    notices: IO[str]

    def run(self, make_host: Callable[[], Host], restart: int, signals: Sequence[int]) -> Outcome:
        """Start all processes, and see them to their end."""
        with ProcessGroup(make_host(), self.stream, self.log_dir, appends=restart > 0) as group:
            try:
                self._start(group, restart, signals)
            except NotPlaced as error:
                return Outcome(error.failure, (), False)
            except NotStarted as error:
                return self._with_fewer(len(group.processes), error)
            return self._watch(group, signals)

    def _start(self, group: ProcessGroup, restart: int, signals: Sequence[int]) -> None:
        tasks = self._wait_for(group.reserve(self.workers, self.num_ps), signals)
        if self.workers.is_elastic:
            show(f"launch: {counted(len(tasks), 'worker')} of {self.workers}.\n", self.notices)
        shares = fair_shares(usable_cpus(), len(tasks)) if self.affinity else [()] * len(tasks)
        for task, share in zip(tasks, shares, strict=True):
            own = {"TF_CONFIG": tf_config(task, tasks), RESTART: str(restart)}
            group.start(str(task), None if task.serves else self.program, {**self.environ, **own}, share)

    def _wait_for(self, placing: Placing, signals: Sequence[int]) -> list[Task]:
        """Wait for places, say once what is missing, and give up when a signal comes or the time is over."""
        while (tasks := placing.tasks()) is None:
            if signals:
                raise NotPlaced(Failure.by_signal(signals[0]))
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise NotPlaced(Failure.by_time_without_places(placing.waits_for))
            if notice := placing.notice():
                hint = "" if self.deadline else " It waits on; --time-limit or time_limit ends that."
                show(f"launch: {notice}.{hint}\n", self.notices)
            time.sleep(ProcessGroup.POLL_SECONDS)
        return tasks

    def _with_fewer(self, number: int, error: NotStarted) -> Outcome:
        """Have all start again with as many as could be started, if these are enough."""
        if not self.workers.is_elastic or number < self.workers.least:
            raise error
        why = f"{error}. The launch starts again with {counted(number, 'worker')}, and no more from here on."
        return Outcome(None, (), False, why, WorkerCount(self.workers.least, number))

    def _watch(self, group: ProcessGroup, signals: Sequence[int]) -> Outcome:
        failure = group.watch(signals, self.deadline, self.hang_seconds)
        grace = self.grace_seconds if signals else min(self.grace_seconds, _FAILURE_GRACE_SECONDS)
        ended = group.end(signals, grace)
        if signals and all(process.exit_code == 0 for process in group.working):
            failure = Failure.by_signal(signals[0], ended_well=True)
        if failure is None and group.has_left:
            again = "There are places for more workers: all have saved and ended, and start again."
            return Outcome(None, (), True, again, self.workers)
        values: dict[Process, Picklable] = {}
        if failure is None:
            try:
                values = {process: _value(process) for process in group.working if process.calls}
            except ValueLost as error:
                failure = Failure(1, str(error))
        runs = tuple(_run(process, group, process in ended, values.get(process)) for process in group.processes)
        return Outcome(failure, runs, group.has_made_steps)


def run_attempts(
    attempt: Attempt,
    make_host: Callable[[], Host],
    max_restarts: int,
    pause_seconds: float,
    signals: Sequence[int],
) -> tuple[Outcome, int]:
    """Start all, again after a failure, and return how the last attempt ended, and how often all started again."""
    num_failures = num_changes = 0
    while True:
        restart = num_failures + num_changes
        outcome = attempt.run(make_host, restart, signals)
        if outcome.workers is not None:
            num_changes += 1
            attempt = replace(attempt, workers=outcome.workers)
            show(f"launch: {outcome.again}\n", attempt.notices)
            continue
        if outcome.failure is None or outcome.failure.is_final or num_failures == max_restarts:
            return outcome, restart
        longer = 1.0 if outcome.has_made_steps else 2.0**num_failures
        num_failures += 1
        pause = min(longer * pause_seconds, _LONGEST_PAUSE_SECONDS)
        if attempt.deadline is not None:
            pause = min(pause, max(attempt.deadline - time.monotonic(), 0.0))
        notice = f"launch: restart {num_failures} of {max_restarts} in {pause:.3g} s.\n"
        show(f"launch: {outcome.failure.message}\n{notice}", attempt.notices)
        if _signal_came(signals, pause):
            return replace(outcome, failure=Failure.by_signal(signals[0])), restart


def _signal_came(signals: Sequence[int], seconds: float) -> bool:
    """Wait for some seconds, or for a signal."""
    deadline = time.monotonic() + seconds
    while not signals and time.monotonic() < deadline:
        time.sleep(ProcessGroup.POLL_SECONDS)
    return bool(signals)


def _value(process: Process) -> Picklable:
    """Return what the function returned."""
    try:
        return process.value()
    except ValueLost as error:
        raise ValueLost(f"What the function returned on {process.name} was lost: {error}.") from error
    except Exception as error:
        raise LaunchError(
            f"What the function returned on {process.name} cannot be read here ({error!r}). Return numbers, "
            "strings, arrays, lists or dicts of them."
        ) from error


def _run(process: Process, group: ProcessGroup, ended_by_launch: bool, value: object) -> WorkerRun:
    return WorkerRun(
        name=process.name,
        served=process in group.serving,
        exit_code=process.failure_code or 0,
        ended_by_launch=ended_by_launch,
        seconds=process.seconds,
        value=value,
        last_lines=process.last_lines,
        log=process.log,
    )
