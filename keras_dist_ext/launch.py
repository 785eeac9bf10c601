"""Start, watch and end one process per worker of this machine, each with its TF_CONFIG.

    result = launch(2, ["train.py", "--epochs", "3"])       # a command: result.exit_code, as a shell would give it
    values = launch(2, train, args=(3,)).values              # a function: what it returned on worker 0, on worker 1
    launch(2, ["train.py"], num_ps=1)                        # a parameter server, and two workers that serve the chief

Without `num_ps` every process runs the command or function, for tf.distribute.MultiWorkerMirroredStrategy; worker 0 is
the chief. With it, only the chief does, for tf.distribute.ParameterServerStrategy: workers and parameter servers run
`tf.distribute.Server(...).join()`, as TensorFlow's guide has them do, and end with the chief.

The first process that fails ends all others. Nothing outlives a launch: not grandchildren, not after Ctrl-C, and not
when the launcher itself is killed with SIGKILL (each process dies with it on Linux, and a guard process ends what those
have started). A process that should live on, such as a TensorBoard, must be started elsewhere.

Security: TensorFlow's server in each process listens on all network interfaces, whatever address TF_CONFIG says, and
runs what anyone who connects sends, without a password. Launch where nobody else reaches the machine's ports.
"""

import itertools
import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from keras_dist_ext import _worker
from keras_dist_ext.errors import LaunchError

__all__ = ["launch", "LaunchResult", "WorkerRun", "WorkerFailed"]

TIME_LIMIT_CODE = 124  # as timeout(1) has it

_POLL_SECONDS = 0.05
_KILL_SECONDS = 5.0  # SIGKILL takes effect at once, but for a process that the kernel itself holds up
_DRAIN_SECONDS = 1.0  # a grandchild may keep a pipe open: do not wait for its end


@dataclass(frozen=True)
class WorkerRun:
    """What became of one process."""

    name: str  # "worker 0", "chief 0", "ps 1"
    exit_code: int  # as subprocess has it: -9 = killed by SIGKILL
    ended_by_launch: bool  # it did not end by itself: another failed, a limit passed, or it was a server
    seconds: float
    value: Any  # what the function returned; None for commands and servers
    last_lines: tuple[str, ...]
    log: Path | None  # all its output; None without log_dir


@dataclass(frozen=True)
class LaunchResult:
    """What became of all processes."""

    exit_code: int  # 0, or that of the first failure, fit for sys.exit: 128 + n for signal n, 124 for the time limit
    workers: tuple[WorkerRun, ...]  # chief, workers, parameter servers
    seconds: float
    failure: str | None  # what failed, and its last lines

    @property
    def values(self) -> tuple[Any, ...]:
        """Return what the function returned: one value a worker, or the chief's alone."""
        return tuple(run.value for run in self.workers if _runs_the_work(run.name, self.workers[0].name))


class WorkerFailed(LaunchError):
    """A worker's process failed; the others were ended."""

    def __init__(
        self,
        message: str,
        *,
        worker: str = "",
        exit_code: int = 1,
        signal_name: str | None = None,
        last_lines: tuple[str, ...] = (),
    ):
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code  # as subprocess has it
        self.signal_name = signal_name  # "SIGKILL"; None when no signal ended it
        self.last_lines = last_lines


def launch(
    num_workers: int,
    work: Sequence[str] | Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_ps: int = 0,
    timeout: float | None = None,
    grace_seconds: float = 5.0,
    threads_per_worker: int | None = None,
    environ: Mapping[str, str] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    stream: IO[str] | None = None,
) -> LaunchResult:
    """Run a command or a function as the workers of one cluster on this machine, and wait for the end.

    SIGINT and SIGTERM are passed on to the workers, which have `grace_seconds` to end; then they take their usual
    course here (KeyboardInterrupt, the end of this process, or your own handler). This works from the main thread only,
    since Python hands signals to no other.

    Args:
        num_workers: how many workers; with `num_ps` the chief comes on top of them.
        work: a command, as a list of strings (a script that ends in `.py` runs under this Python), or a function that
            other processes can import: defined at the top level of a module or script.
        args: for the function; they and its value are pickled.
        kwargs: for the function.
        num_ps: how many parameter servers. With any, only the chief runs `work`.
        timeout: seconds that the whole may take.
        grace_seconds: how long processes have between SIGTERM (or the signal that came here) and SIGKILL. TensorFlow
            swallows SIGTERM, so its workers often use all of it.
        threads_per_worker: threads of TensorFlow's pools and of OpenMP in each process. None leaves TensorFlow's
            default: every process takes all cores, which several share.
        environ: the environment of the processes instead of `os.environ`. Accelerators are not divided among them: set
            CUDA_VISIBLE_DEVICES inside the workers where that is needed.
        log_dir: where to keep the output of each, as `worker-0.log` and so on.
        quiet: do not show the output as it comes.
        stream: where to show it, each line with the name of its worker; `sys.stdout` if not given.

    Raises:
        LaunchError: the arguments make no launch; or a function ran out of time.
        WorkerFailed: the function failed on a worker (the first one that did). A command that fails raises nothing: see
            `exit_code` and `failure` of the result.
    """
    start = time.monotonic()
    environ = os.environ if environ is None else environ
    _check(num_workers, num_ps, timeout, environ)
    with ExitStack() as stack:
        signals = stack.enter_context(_signals_kept())
        guard = stack.enter_context(_guarded())
        plan = _plan(work, args, kwargs, guard.folder, environ)
        ports = stack.enter_context(_reserved_ports(num_workers + num_ps + (num_ps > 0)))
        shown = None if quiet else (stream or sys.stdout)
        cluster = _cluster(num_workers, num_ps, ports)
        workers = [
            _start(
                task, plan, cluster, guard, _environ(task, cluster, environ, guard, threads_per_worker), log_dir, shown
            )
            for task in cluster
        ]
