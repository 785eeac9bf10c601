"""Run a search in several processes, here or on Ray: a chief that proposes trials, and workers that run them.

    run = launch_search(["search.py"], trials_in_parallel=2)    # run.exit_code, as a shell would give it
    best = launch_search(find_best, args=(data_file,)).value    # what the function returned in the chief
    run = launch_search(["search.py"], 8, on=RayCluster())      # on the nodes of a Ray cluster, of one CPU each

Every process runs the same program. A worker exits inside of the tuner's `search`; so the code after `search` runs
once, in the chief, when all trials have ended: there `get_best_models` and `strategy_report` need no other process.

No process outlives a search, as with `keras_dist_ext.cluster.launch`. The chief listens on 127.0.0.1, unless
KERASTUNER_ORACLE_IP is set to another address; on Ray, on the address of its node. Anyone who can connect to it can
participate, without a password.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import IO, Literal

from keras_dist_ext import arguments
from keras_dist_ext.cluster.command import (
    check_counts,
    check_folder,
    check_limits,
    check_output,
    check_waits,
    environment,
    program_for,
)
from keras_dist_ext.cluster.failure import Failure
from keras_dist_ext.cluster.host import Host
from keras_dist_ext.cluster.local_host import LocalHost
from keras_dist_ext.cluster.process import show
from keras_dist_ext.cluster.ray_cluster import RayCluster, pack_for_ray
from keras_dist_ext.cluster.ray_host import RayHost, ray_hosts
from keras_dist_ext.cluster.signals import Interrupted, caught_signals
from keras_dist_ext.cluster.tasks import cluster
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.processes.allocation import Allocation, allocate, allocate_on_ray, detect_machine
from keras_dist_ext.tuner.processes.process_role import ProcessRole
from keras_dist_ext.tuner.processes.supervisor import Death, Limits, Supervisor
from keras_dist_ext.tuner.processes.worker_group import Output, WorkerGroup

__all__ = ["Death", "SearchRun", "launch_search"]


@dataclass(frozen=True)
class SearchRun:
    """The result of a search in several processes."""

    exit_code: int  # for sys.exit: 0, or that of the failure; 128 + n for signal n, 124 for the time limit
    seconds: float  # from the start of the first process to the end of the last
    failure: str | None  # what ended it early, with the last lines of the output
    deaths: tuple[Death, ...]  # of processes, and what was done after each
    allocation: str  # how cores and GPUs were allocated to trials
    value: object = None  # what the function returned in the chief; None for a command


def launch_search(
    work: Sequence[str] | Callable[..., object],
    trials_in_parallel: int | Literal["auto"] = "auto",
    *,
    workers_per_trial: int = 1,
    gpus_per_trial: int | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    max_restarts: int = 2,
    timeout: float | None = None,
    time_limit: float | None = None,
    grace_seconds: float = 5.0,
    environ: Mapping[str, str] | None = None,
    on: RayCluster | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    stream: IO[str] | None = None,
) -> SearchRun:
    """Run a program that searches with a tuner of `keras_dist_ext.tuner` in several processes, and wait for the end.

    A worker that dies is restarted and gets its trial again; a trial that kills its worker repeatedly ends as failed,
    with the reason. A chief that is killed is restarted, and continues from what it has saved. Signals are handled as
    by `keras_dist_ext.cluster.launch`.

    Args:
        work: a command, as a list of strings (a script that ends in `.py` runs under this Python), or a function that
            other processes can import.
        trials_in_parallel: how many trials run at once. "auto": as many as there are GPUs for; without GPUs one per
            core, as far as memory allows. GPUs and threads are divided among them. On Ray it is a number: as many as
            may run at once; those without room wait for it.
        workers_per_trial: processes that run each trial together, each with its TF_CONFIG, for
            tf.distribute.MultiWorkerMirroredStrategy.
        gpus_per_trial: one per worker if not given. On Ray `RayCluster` has those of each worker.
        args: for the function; they and its value are pickled.
        kwargs: for the function.
        max_restarts: how many times a worker is restarted with the same trial, or outside of trials, and how many
            times the chief is.
        timeout: seconds after which a trial that has not finished a step counts as hanging, and its worker is killed.
            Steps are reported by ``kde.Model``, which trials train, and by ``kde.heartbeat``.
        time_limit: seconds that the whole search may take.
        grace_seconds: from a signal to this process, or the end of the search, to SIGKILL.
        environ: the environment of the processes, instead of `os.environ`. On Ray: what is added to the environment
            of its nodes.
        on: where the processes run, instead of this machine: see `RayCluster`. The chief gets one CPU and no GPU. The
            tuner's directory must be on a path that all nodes share.
        log_dir: where to write the output of each, as `chief.log`, `tuner-0.log` and so on.
        quiet: whether not to show the output.
        stream: where to show it, each line with the name of its process; `sys.stdout` if not given.

    Raises:
        LaunchError: the arguments are invalid, or a function's search has failed. A command whose search fails raises
            no error: see `exit_code` and `failure` of the result.
    """
    started = time.monotonic()
    check_counts(max_restarts=(max_restarts, 0, arguments.MOST))
    check_limits(timeout=timeout, time_limit=time_limit)
    check_waits(grace_seconds=grace_seconds)
    check_output(log_dir, quiet, stream)
    base = environment(environ)
    _check_no_search(base)
    check_folder()
    if on is None:
        program = program_for(work, args, kwargs, base)
        allocation = allocate(
            detect_machine(base), trials_in_parallel, gpus_per_trial=gpus_per_trial, workers_per_trial=workers_per_trial
        )
        places = _local_places(base)
    else:
        _check_on_ray(on, base)
        program = program_for(work, args, kwargs, base, pack_for_ray)
        allocation = allocate_on_ray(
            on, trials_in_parallel, gpus_per_trial=gpus_per_trial, workers_per_trial=workers_per_trial
        )
        base = {} if environ is None else base
        places = _ray_places(on)
    stream = sys.stdout if stream is None else stream
    limits = Limits(max_restarts, None if time_limit is None else started + time_limit, timeout)
    supervisor, value = None, None
    with ExitStack() as stack:
        signals = stack.enter_context(caught_signals())
        try:
            chief, workers = _groups(
                program, allocation, base, stack.enter_context(places), Output(None if quiet else stream, log_dir)
            )
        except Interrupted as error:  # while this process was connected to Ray
            failure: Failure | None = Failure.by_signal(error.signum)
        else:
            for group in (chief, *workers):
                stack.callback(group.end, grace_seconds=0.0)  # does nothing after it has ended
            supervisor = Supervisor(chief, workers, limits, signals, lambda text: show(f"launch: {text}\n", stream))
            show(f"launch: {allocation.reason}.\n", stream)
            failure = supervisor.run()
            value = chief.value() if failure is None else None
            deadline = time.monotonic() + grace_seconds
            for group in (*workers, chief):
                group.end(signals, max(0.0, deadline - time.monotonic()))
        message = None if failure is None else failure.message  # with the last lines of the process that failed
    if signals:
        signal.raise_signal(signals[0])  # all processes have ended: now the signal has its usual effect
    if message is not None and callable(work):
        raise LaunchError(message)
    if message is not None:
        show(f"launch: {message}\n", stream)
    return SearchRun(
        0 if failure is None else failure.exit_code,
        time.monotonic() - started,
        message,
        tuple(supervisor.deaths) if supervisor else (),
        allocation.reason,
        value,
    )


def _check_no_search(environ: Mapping[str, str]) -> None:
    if "KERASTUNER_TUNER_ID" in environ:
        raise LaunchError(
            f"KERASTUNER_TUNER_ID is already set ({environ['KERASTUNER_TUNER_ID']}): this process is part of a search, "
            "and cannot start another one. Run the program itself, or unset the KERASTUNER_ variables."
        )


def _check_on_ray(on: object, environ: Mapping[str, str]) -> None:
    wanted = "a kde.RayCluster, or None for this machine"
    cluster = arguments.instance("on", on, RayCluster, wanted=wanted, error=LaunchError)
    if cluster.address.startswith("ray://"):
        raise LaunchError(
            f"on has the address {cluster.address!r} of a Ray client, and the launcher of a search must reach the "
            "nodes: launch on one of them, or as a Ray job."
        )
    given = [name for name in ("KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT") if name in environ]
    if given:
        raise LaunchError(
            f"{' and '.join(given)} cannot be set on Ray, where the chief listens on the address of its node."
        )


@dataclass(frozen=True)
class _Places:
    """Where the processes run, and where the chief listens."""

    chief: Callable[[], Host]
    worker: Callable[[], Host]
    address: str  # "": that of the chief's place


@contextmanager
def _local_places(environ: Mapping[str, str]) -> Iterator[_Places]:
    """Reserve an address for the chief: on loopback, with a free port, unless the environment has another."""
    ip, port = environ.get("KERASTUNER_ORACLE_IP", "127.0.0.1"), environ.get("KERASTUNER_ORACLE_PORT")
    with cluster(1, 0) as (task,):
        yield _Places(LocalHost, LocalHost, f"{ip}:{port or task.address.rpartition(':')[2]}")


@contextmanager
def _ray_places(on: RayCluster) -> Iterator[_Places]:
    """Connect this process to the cluster, unless it is."""
    with ray_hosts(on) as worker:
        yield _Places(lambda: RayHost(replace(on, cpus_per_worker=1, gpus_per_worker=0)), worker, "")


def _groups(
    program: Sequence[str] | bytes, allocation: Allocation, base: Mapping[str, str], places: _Places, output: Output
) -> tuple[WorkerGroup, list[WorkerGroup]]:
    base = {**base, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    # The chief builds models, but trains none until the search is over.
    own = {**base, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    chief = WorkerGroup("chief", ProcessRole("chief", places.address), program, [own], output, places.chief)
    workers = [
        WorkerGroup(
            f"tuner {number}",
            ProcessRole(f"tuner{number}", places.address),
            program,
            [{**base, **own} for own in environs],
            output,
            places.worker,
        )
        for number, environs in enumerate(allocation.environs)
    ]
    return chief, workers
