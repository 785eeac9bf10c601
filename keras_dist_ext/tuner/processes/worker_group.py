"""Start the processes of a search that share a tuner id, watch how they end, and restart them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO

from keras_dist_ext.cluster.failure import Failure, NotPlaced
from keras_dist_ext.cluster.host import Host
from keras_dist_ext.cluster.placing import Placing
from keras_dist_ext.cluster.process import Process
from keras_dist_ext.cluster.process_group import ProcessGroup
from keras_dist_ext.cluster.tasks import Task, tf_config
from keras_dist_ext.cluster.worker_count import WorkerCount
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.processes.process_role import ProcessRole

__all__ = ["WorkerGroup", "Output"]


@dataclass(frozen=True)
class Output:
    """Where the processes' output goes."""

    stream: IO[str] | None  # None: it is not shown
    log_dir: str | os.PathLike[str] | None  # None: it is not kept


class WorkerGroup:
    """The chief of a search, a worker, or the workers that run each trial together: they start and end as one.

    Args:
        name: "chief" or "tuner 0".
        role: of the processes in the search.
        program: a command, or a packed call.
        environs: the environment of each process, without its role.
        output: where their output goes.
        make_host: makes what runs them; each start has one of its own.
    """

    FAILURE_GRACE_SECONDS = 3.0  # for those that may wait in a collective for one that has failed

    def __init__(
        self,
        name: str,
        role: ProcessRole,
        program: Sequence[str] | bytes,
        environs: Sequence[Mapping[str, str]],
        output: Output,
        make_host: Callable[[], Host],
    ):
        self.name, self.role = name, role
        self.address = role.address  # of the chief; "": that of the first of them, once it has a place
        self._program, self._environs, self._output, self._make_host = program, environs, output, make_host
        self._stack = ExitStack()
        self._group: ProcessGroup | None = None
        self._placing: Placing | None = None  # while they wait for a place
        self._not_placed: Failure | None = None

    @property
    def num_starts(self) -> int:
        """How often they were started."""
        return self.role.start

    @property
    def processes(self) -> Sequence[Process]:
        """Those that were started last; none before `begin` and after `end`."""
        return self._group.working if self._group else ()

    @property
    def is_active(self) -> bool:
        """Whether they were started, or wait for a place, and were not ended."""
        return self._group is not None

    @property
    def failed(self) -> Process | None:
        """The one that failed, if one did."""
        return next((process for process in self.processes if process.failure_code is not None), None)

    @property
    def has_failed(self) -> bool:
        """Whether one of them failed, or they got no place."""
        return self._not_placed is not None or self.failed is not None

    @property
    def was_killed(self) -> bool:
        """Whether they failed by no fault of what they run."""
        return self._not_placed is not None or (self.failed is not None and (self.failed.failure_code or 0) < 0)

    @property
    def has_exited(self) -> bool:
        """Whether all have exited with code 0, and their functions have returned."""
        return (
            bool(self.processes) and self.failed is None and all(process.exit_code == 0 for process in self.processes)
        )

    def begin(self) -> None:
        """Start the processes, for the first time or again, as soon as there is a place for all.

        Raises:
            LaunchError: a log cannot be written.
        """
        self.role, self.address = replace(self.role, start=self.role.start + 1), self.role.address
        host, log_dir, appends = self._make_host(), self._output.log_dir, self.num_starts > 1
        self._group = self._stack.enter_context(ProcessGroup(host, self._output.stream, log_dir, appends=appends))
        num_processes = len(self._environs)
        self._placing = self._group.reserve(WorkerCount(num_processes, num_processes))
        self._start_where_there_is_a_place()

    def _start_where_there_is_a_place(self) -> None:
        assert self._group is not None
        assert self._placing is not None
        try:
            tasks = self._placing.tasks()
        except NotPlaced as error:
            self._placing, self._not_placed = None, error.failure
            return
        if tasks is not None:
            self._placing = None
            self._start(self._group, tasks)

    def _start(self, group: ProcessGroup, tasks: Sequence[Task]) -> None:
        self.address = self.role.address or tasks[0].address
        role = replace(self.role, address=self.address)
        for task, environ in zip(tasks, self._environs, strict=True):
            own = {"TF_CONFIG": tf_config(task, tasks)} if len(tasks) > 1 else {}
            name = f"{self.name} worker {task.index}" if len(tasks) > 1 else self.name
            group.start(name, self._program, {**environ, **role.environ(), **own})

    def pump(self) -> None:
        """Start what has a place by now, forward output, and note which processes have ended."""
        if self._group and self._placing:
            self._start_where_there_is_a_place()
        if self._group:
            self._group.pump(0)

    @property
    def waits_for(self) -> str:
        """What they wait for, to be started."""
        return self._placing.waits_for if self._placing else ""

    def missing_place(self) -> str:
        """Return why they have no place, once, when they have waited for it for long."""
        return self._placing.notice() if self._placing else ""

    def kill(self) -> None:
        """Kill them."""
        for process in self.processes:
            process.hosted.send(signal.SIGKILL)

    def end(self, signals: Sequence[int] = (), grace_seconds: float = FAILURE_GRACE_SECONDS) -> Failure | None:
        """End what still runs, and all their children, and return the failure, if one of them failed."""
        if self._group is None:
            return None
        failed, failure = self.failed, self._not_placed
        if failed is not None:
            failure = Failure.of_process(failed, [process for process in self.processes if process is not failed])
        self._group.end(signals, grace_seconds)
        self._stack.close()
        self._group = self._placing = self._not_placed = None
        return failure

    def value(self) -> object:
        """Return what the function returned in the first of them; None for a command.

        Raises:
            LaunchError: the value cannot be read here.
        """
        first = self.processes[0]
        try:
            return first.value() if first.calls else None
        except Exception as error:
            raise LaunchError(
                f"What the function returned in the {self.name} cannot be read here ({error!r}). Return numbers, "
                "strings, arrays, lists or dicts of them."
            ) from error
