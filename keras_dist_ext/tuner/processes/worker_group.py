"""Start the processes of a search that share a tuner id, watch how they end, and restart them."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO

from keras_dist_ext.cluster.failure import Failure
from keras_dist_ext.cluster.local_host import LocalHost
from keras_dist_ext.cluster.process import Process
from keras_dist_ext.cluster.process_group import ProcessGroup
from keras_dist_ext.cluster.tasks import tf_config
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
    """

    FAILURE_GRACE_SECONDS = 3.0  # for those that may wait in a collective for one that has failed

    def __init__(
        self,
        name: str,
        role: ProcessRole,
        program: Sequence[str] | bytes,
        environs: Sequence[Mapping[str, str]],
        output: Output,
    ):
        self.name, self.role = name, role
        self._program, self._environs, self._output = program, environs, output
        self._stack = ExitStack()
        self._group: ProcessGroup | None = None

    @property
    def num_starts(self) -> int:
        """How often they were started."""
        return self.role.start

    @property
    def processes(self) -> Sequence[Process]:
        """Those that were started last; none before `begin` and after `end`."""
        return self._group.working if self._group else ()

    @property
    def failed(self) -> Process | None:
        """The one that failed, if one did."""
        return next((process for process in self.processes if process.failure_code is not None), None)

    @property
    def has_exited(self) -> bool:
        """Whether all have exited with code 0, and their functions have returned."""
        return (
            bool(self.processes) and self.failed is None and all(process.exit_code == 0 for process in self.processes)
        )

    def begin(self) -> None:
        """Start the processes, for the first time or again.

        Raises:
            LaunchError: a log cannot be written.
        """
        self.role = replace(self.role, start=self.role.start + 1)
        log_dir, appends = self._output.log_dir, self.num_starts > 1
        num_processes = len(self._environs)
        with ExitStack() as stack:
            group = stack.enter_context(ProcessGroup(LocalHost(), self._output.stream, log_dir, appends=appends))
            tasks = group.reserve(WorkerCount(num_processes, num_processes)) if num_processes > 1 else []
            for number, environ in enumerate(self._environs):
                own = {"TF_CONFIG": tf_config(tasks[number], tasks)} if tasks else {}
                name = f"{self.name} worker {number}" if tasks else self.name
                group.start(name, self._program, {**environ, **self.role.environ(), **own})
            self._stack, self._group = stack.pop_all(), group

    def pump(self) -> None:
        """Forward their output, and note which have ended."""
        if self._group:
            self._group.pump(0)

    def kill(self) -> None:
        """Kill them."""
        for process in self.processes:
            process.hosted.send(signal.SIGKILL)

    def end(self, signals: Sequence[int] = (), grace_seconds: float = FAILURE_GRACE_SECONDS) -> Failure | None:
        """End what still runs, and all their children, and return the failure, if one of them failed."""
        if self._group is None:
            return None
        failed = self.failed
        others = [process for process in self.processes if process is not failed]
        failure = None if failed is None else Failure.of_process(failed, others)
        self._group.end(signals, grace_seconds)
        self._stack.close()
        self._group = None
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
