"""Start, watch, restart and end one process per worker, on this machine or on Ray, each with its TF_CONFIG.

    result = launch(2, ["train.py", "--epochs", "3"])    # a command: result.exit_code, as a shell would give it
    values = launch(2, train, args=(3,)).values          # a function: what it returned on worker 0, on worker 1
    launch(2, ["train.py"], num_ps=1)                    # a chief that trains on two workers and a parameter server
    launch(2, ["train.py"], max_restarts=3, timeout=300) # all start again when one dies, or hangs for five minutes
    launch(2, ["train.py"], on=RayCluster())             # on the nodes of a Ray cluster, of one CPU each
    launch((2, 4), ["train.py"], max_restarts=3)         # on as many workers as there are places for, from 2 to 4

Without `num_ps` every process runs the command or function, for tf.distribute.MultiWorkerMirroredStrategy; worker 0 is
the chief. With it, only the chief does, for tf.distribute.ParameterServerStrategy: workers and parameter servers run
`tf.distribute.Server(...).join()`, as TensorFlow's guide has them do, and end with the chief.

The first process that fails ends all others, since none of TensorFlow's workers can join the others again. With
`max_restarts` all start again, on new ports; with `Resume` in the script, from the last checkpoint. Nothing outlives
a launch: not grandchildren, not after Ctrl-C, and not when the launcher itself is killed with SIGKILL (on Linux each
process dies with it, and a guard process ends what those have started), and not daemons in sessions of their own with
an empty environment (on Linux, unless other threads run beside; when the launcher itself is killed, those that the
guard has seen, which looks every second). On Ray the same holds on each node that lives. What should live on, such as
a TensorBoard, must be started elsewhere.

Security: TensorFlow's server in each process listens on all network interfaces, whatever address TF_CONFIG says, and
runs what anyone who connects sends, without a password. Launch where nobody else reaches the machine's ports.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from keras_dist_ext import arguments
from keras_dist_ext.aliases import Picklable
from keras_dist_ext.cluster.attempts import Attempt, Outcome, run_attempts
from keras_dist_ext.cluster.command import (
    MOST_THREADS,
    check_counts,
    check_folder,
    check_limits,
    check_output,
    check_waits,
    environment,
    program_for,
)
from keras_dist_ext.cluster.cores import usable_cpus
from keras_dist_ext.cluster.failure import Failure
from keras_dist_ext.cluster.host import Host
from keras_dist_ext.cluster.local_host import LocalHost
from keras_dist_ext.cluster.process import code_text, show
from keras_dist_ext.cluster.ray_cluster import RayCluster, pack_for_ray
from keras_dist_ext.cluster.ray_host import ray_hosts
from keras_dist_ext.cluster.signals import Interrupted, caught_signals
from keras_dist_ext.cluster.worker_count import WorkerCount
from keras_dist_ext.cluster.worker_run import WorkerRun
from keras_dist_ext.errors import LaunchError

__all__ = ["launch", "LaunchResult", "WorkerFailed"]


def launch(
    num_workers: int | tuple[int, int],
    work: Sequence[str] | Callable[..., object],
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_ps: int = 0,
    max_restarts: int = 0,
    timeout: float | None = None,
    time_limit: float | None = None,
    grace_seconds: float = 20.0,
    pause_seconds: float = 1.0,
    threads_per_worker: int | None = None,
    affinity: bool = False,
    environ: Mapping[str, str] | None = None,
    on: RayCluster | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    stream: IO[str] | None = None,
) -> "LaunchResult":
    """Run a command or a function as the workers of one cluster, on this machine or on Ray, and wait for the end.

    SIGINT and SIGTERM are passed on to the workers, which have `grace_seconds` to save and to end, as by
    ``Resume(on_preemption=True)``; a second one ends them at once. Then the signal takes its usual course here:
    KeyboardInterrupt, the end of this process, or a handler of your own. Python hands signals to the main thread alone:
    when `launch` is called in another, they act on this process as they would without it, and the workers end with
    this process.

    Args:
        num_workers: how many workers; with `num_ps` the chief comes on top of them. A pair such as (2, 4) is for an
            elastic launch: as many as there are places for, from the least to the most, at each start. A place is a
            core that this process may use, or as many as `threads_per_worker`; on Ray, room for what a worker gets.
            The least start in any case; on Ray they wait for room. When places have come, all end at the next
            checkpoint of ``Resume``, and start again with more workers; after a failure, or where the system has no
            room for a process, with as many as there are places for then.
        work: a command, as a list of strings (a script that ends in `.py`, and ``["-m", NAME]``, run under this
            Python), or a function that other processes can import: defined at the top level of a module or script,
            whose own call of `launch` stands under ``if __name__ == "__main__":``. It runs in the current folder, and
            has no standard input.
        args: for the function; they and its value are pickled.
        kwargs: for the function.
        num_ps: how many parameter servers. With any, only the chief runs `work`.
        max_restarts: how many times all start again after one has died or hung. The environment variable
            KERAS_DIST_EXT_RESTART counts them, from 0, and with them those of an elastic launch that follow no failure.
        timeout: seconds after which a worker that has finished no step is taken to hang. What it does beside its steps
            counts too: starting, loading data, compiling, saving. Known are the steps of ``kde.Model`` and
            ``kde.TrainLoop``, and those that ``kde.heartbeat`` reports.
        time_limit: seconds that the whole may take, with all restarts.
        grace_seconds: from the signal that came here to SIGKILL. When a worker has failed, the others have 2 seconds
            at most: they wait for it, and TensorFlow's workers swallow SIGTERM.
        pause_seconds: before the first restart; twice as long before each next one up to a minute, unless steps were
            made.
        threads_per_worker: threads of each of TensorFlow's pools, and of OpenMP, in each process. None leaves
            TensorFlow's default, where every process makes as many as there are cores it may use.
        affinity: whether to divide the CPUs among the processes: each is tied to a share of its own, and so are its
            threads. Linux only.
        environ: the environment of the processes, instead of `os.environ`. All of them see the same accelerators. On
            Ray: what is added to the environment of its nodes.
        on: where the processes run, instead of this machine: see `RayCluster`.
        log_dir: where to keep the output of each, as `worker-0.log` and so on; of all restarts. On a full disk the
            workers continue without it.
        quiet: do not show the output as it comes.
        stream: where to show it, each line with the name of its worker; `sys.stdout` if not given.

    Raises:
        LaunchError: the arguments make no launch, a function ran out of time, or there is no such Ray cluster.
        WorkerFailed: a worker, the first one that did, failed to run the function. A command that fails or runs out of
            time raises nothing: see `exit_code` and `failure` of the result.
    """
    started = time.monotonic()
    workers = WorkerCount.of(num_workers)
    check_counts(
        num_ps=(num_ps, 0, arguments.MOST_PROCESSES),
        max_restarts=(max_restarts, 0, arguments.MOST),
        threads_per_worker=(1 if threads_per_worker is None else threads_per_worker, 1, MOST_THREADS),
    )
    if workers.is_elastic and num_ps:
        raise LaunchError(
            f"num_workers is {workers}, and num_ps {num_ps}: with parameter servers it must be one number, since a run "
            "continues on another number of workers by Resume alone, which they do not have."
        )
    check_limits(timeout=timeout, time_limit=time_limit)
    check_waits(grace_seconds=grace_seconds, pause_seconds=pause_seconds)
    if arguments.flag("affinity", affinity, error=LaunchError):
        usable_cpus()
    check_output(log_dir, quiet, stream)
    base = environment(environ)
    check_folder()
    if on is None:
        program = program_for(work, args, kwargs, base)
    else:
        _check_on_ray(on, affinity)
        program = program_for(work, args, kwargs, base, pack_for_ray)
        base = {} if environ is None else base
    base |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **_thread_settings(threads_per_worker)}
    stream = sys.stdout if stream is None else stream
    hosts = _local_hosts(threads_per_worker or 1) if on is None else ray_hosts(on)
    attempt = Attempt(
        program,
        workers,
        num_ps,
        base,
        affinity=affinity,
        deadline=None if time_limit is None else started + time_limit,
        hang_seconds=timeout,
        grace_seconds=grace_seconds,
        log_dir=log_dir,
        stream=None if quiet else stream,
        notices=stream,
    )
    with caught_signals() as signals:
        try:
            with hosts as make_host:
                outcome, restart = run_attempts(attempt, make_host, max_restarts, pause_seconds, signals)
        except Interrupted as error:  # while this process was connected to Ray
            outcome, restart = Outcome(Failure.by_signal(error.signum), (), False), 0
    if signals:
        signal.raise_signal(signals[0])  # every process is gone: now the signal takes its usual course
    failure, seconds = outcome.failure, time.monotonic() - started
    if failure is None:
        return LaunchResult(0, outcome.runs, seconds, None, restart)
    if callable(work):
        raise _error(failure)
    show(f"launch: {failure.message}\n", stream)
    return LaunchResult(failure.exit_code, outcome.runs, seconds, failure.message, restart)


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended."""

    exit_code: int  # 0, or the first failure's, fit for sys.exit: 128 + n for signal n, 124 for a time-out or the limit
    workers: tuple[WorkerRun, ...]  # chief, workers, parameter servers
    seconds: float
    failure: str | None  # what failed last, with its last lines
    num_restarts: int = 0  # how often all started again

    @property
    def values(self) -> tuple[Picklable, ...]:
        """What the function returned: one value a worker, or only the chief's."""
        return tuple(run.value for run in self.workers if not run.served)


class WorkerFailed(LaunchError):
    """A worker could not run the function to its end; all others were ended.

    Attributes:
        worker: its name, such as "worker 1".
        exit_code: as subprocess has it: -9 = SIGKILL.
        signal_name: the signal that ended it, such as "SIGKILL"; None for an exit code.
        last_lines: its traceback, or its last lines.
    """

    def __init__(self, message: str, worker: str, exit_code: int, last_lines: tuple[str, ...]):
        super().__init__(message, worker, exit_code, last_lines)
        self.worker, self.exit_code, self.last_lines = worker, exit_code, last_lines
        self.signal_name = code_text(exit_code) if exit_code < 0 else None

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def _local_hosts(cores_per_worker: int) -> Iterator[Callable[[], Host]]:
    """Yield what makes this machine a host."""
    yield lambda: LocalHost(cores_per_worker=cores_per_worker)


def _check_on_ray(on: object, affinity: bool) -> None:
    arguments.instance("on", on, RayCluster, wanted="a kde.RayCluster, or None for this machine", error=LaunchError)
    if affinity:
        raise LaunchError("affinity=True divides the CPUs of this machine, and on Ray its nodes have others.")


def _error(failure: Failure) -> LaunchError:
    process = failure.process
    if process is None:
        return LaunchError(failure.message)
    return WorkerFailed(failure.message, process.name, process.failure_code or 0, process.last_lines)


def _thread_settings(threads: int | None) -> dict[str, str]:
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
    return {} if threads is None else dict.fromkeys(names, str(threads))
