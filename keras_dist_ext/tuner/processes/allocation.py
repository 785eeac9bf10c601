"""Allocate the GPUs of a machine, or else its cores, to the trials that run at once; or have Ray do so."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from keras_dist_ext import arguments
from keras_dist_ext.cluster.ray_cluster import RayCluster
from keras_dist_ext.errors import LaunchError

__all__ = ["Allocation", "Machine", "allocate", "allocate_on_ray", "detect_machine"]


@dataclass(frozen=True)
class Machine:
    """The resources of a machine."""

    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    num_cores: int
    memory_bytes: int  # that is free


@dataclass(frozen=True)
class Allocation:
    """For each trial that runs at once, the environment of each of its worker processes."""

    environs: tuple[tuple[Mapping[str, str], ...], ...]  # [trial][worker]
    reason: str

    @property
    def num_trials(self) -> int:
        """The number of trials that run at once."""
        return len(self.environs)


def detect_machine(environ: Mapping[str, str]) -> Machine:
    """Return the resources of this machine, without importing TensorFlow.

    Args:
        environ: the environment that processes will have; its CUDA_VISIBLE_DEVICES limits their GPUs.
    """
    import psutil

    listed = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = _installed_gpus(environ) if listed is None else [name.strip() for name in listed.split(",") if name.strip()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # CUDA ignores the list from the first invalid name on, such as -1.
    known = gpus[: gpus.index("-1")] if "-1" in gpus else gpus
    return Machine(tuple(known), cores, psutil.virtual_memory().available)


def _installed_gpus(environ: Mapping[str, str]) -> list[str]:
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return []
    try:
        found = subprocess.run(
            [program, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


_BYTES_PER_PROCESS = 1 << 30  # TensorFlow and a small model take 0.6 GB


def allocate(
    machine: Machine,
    trials_in_parallel: int | Literal["auto"] = "auto",
    *,
    gpus_per_trial: int | None = None,
    workers_per_trial: int = 1,
) -> Allocation:
    """Allocate a machine to the trials that run at once.

    With GPUs, each trial gets its own, and sees no others. Without, cores are divided.

        >>> machine = Machine(gpus=("0", "1", "2"), num_cores=8, memory_bytes=32 << 30)
        >>> allocation = allocate(machine)
        >>> allocation.reason
        '3 trials at once, each on 1 of 3 GPUs'
        >>> [environ["CUDA_VISIBLE_DEVICES"] for (environ,) in allocation.environs]
        ['0', '1', '2']

    Args:
        machine: the resources.
        trials_in_parallel: how many trials run at once; "auto": as many as there are GPUs for, or else cores.
        gpus_per_trial: one per worker if not given.
        workers_per_trial: processes that run each trial together; its GPUs or cores are divided among them.

    Raises:
        LaunchError: the machine has less than was asked for.
    """
    trials_in_parallel, workers_per_trial = _checked(trials_in_parallel, workers_per_trial)
    gpus_per_trial = arguments.optional(_count, "gpus_per_trial", gpus_per_trial)
    if machine.gpus:
        return _allocate_gpus(machine, trials_in_parallel, gpus_per_trial or workers_per_trial, workers_per_trial)
    if gpus_per_trial:
        raise LaunchError(
            f"gpus_per_trial={gpus_per_trial}, but this machine has no GPU. Leave it out to allocate cores."
        )
    return _allocate_cores(machine, trials_in_parallel, workers_per_trial)


def allocate_on_ray(
    cluster: RayCluster,
    trials_in_parallel: int | Literal["auto"],
    *,
    gpus_per_trial: int | None = None,
    workers_per_trial: int = 1,
) -> Allocation:
    """Allocate to each worker what the cluster gives to a process; Ray finds the nodes.

        >>> allocation = allocate_on_ray(RayCluster(cpus_per_worker=4, gpus_per_worker=1), 8)
        >>> allocation.reason
        '8 trials at once, as far as Ray has room, each on 4 CPU and 1 GPU'

    Args:
        cluster: the resources of each worker.
        trials_in_parallel: how many trials run at once, if there is room.
        gpus_per_trial: None.
        workers_per_trial: processes that run each trial together.

    Raises:
        LaunchError: a number is missing, or one is given that the cluster has.
    """
    trials, workers_per_trial = _checked(trials_in_parallel, workers_per_trial)
    if trials == "auto":
        raise LaunchError(
            "On Ray, trials_in_parallel (--workers) must be a number: as many as there may be at once. Those without "
            "room wait for it, and a cluster that grows on demand grows for them."
        )
    if gpus_per_trial is not None:
        raise LaunchError(
            "gpus_per_trial divides the GPUs of one machine. On Ray, give the GPUs of each worker: --gpus-per-worker, "
            "or RayCluster(gpus_per_worker=...)."
        )
    threads = max(1, int(cluster.cpus_per_worker))
    has = f"{cluster.cpus_per_worker:g} CPU" + (f" and {cluster.gpus_per_worker:g} GPU" * bool(cluster.gpus_per_worker))
    each = f"on {has}" if workers_per_trial == 1 else f"by {workers_per_trial} workers of {has}"
    return Allocation(
        ((dict(_threads(threads)),) * workers_per_trial,) * trials,
        f"{_counted(trials, 'trial')} at once, as far as Ray has room, each {each}",
    )


def _checked(trials_in_parallel: int | Literal["auto"], workers_per_trial: int) -> tuple[int | Literal["auto"], int]:
    if not isinstance(trials_in_parallel, str) or trials_in_parallel != "auto":
        trials_in_parallel = _count("trials_in_parallel", trials_in_parallel, or_none=", or 'auto'")
    workers_per_trial = _count("workers_per_trial", workers_per_trial)
    num_processes = workers_per_trial * (1 if trials_in_parallel == "auto" else trials_in_parallel)
    if num_processes > arguments.MOST_PROCESSES:
        raise LaunchError(
            f"trials_in_parallel={trials_in_parallel} and workers_per_trial={workers_per_trial} make {num_processes} "
            f"processes, and a machine has ports for {arguments.MOST_PROCESSES}. Give fewer."
        )
    return trials_in_parallel, workers_per_trial


def _count(name: str, value: object, *, or_none: str = "") -> int:
    return arguments.integer(name, value, least=1, most=arguments.MOST_PROCESSES, or_none=or_none, error=LaunchError)


def _allocate_gpus(
    machine: Machine, trials_in_parallel: int | Literal["auto"], per_trial: int, workers_per_trial: int
) -> Allocation:
    gpus, has = machine.gpus, f"This machine has {_counted(len(machine.gpus), 'GPU')} ({', '.join(machine.gpus)})"
    if per_trial % workers_per_trial:
        raise LaunchError(
            f"gpus_per_trial={per_trial} cannot be divided among {workers_per_trial} workers of a trial: each must "
            f"get equally many. Give a multiple of {workers_per_trial}."
        )
    most = len(gpus) // per_trial
    num_trials = most if trials_in_parallel == "auto" else trials_in_parallel
    if not 1 <= num_trials <= most:
        raise LaunchError(
            f"{has}, and {_counted(max(num_trials, 1), 'trial')} at once with {per_trial} each would need "
            f"{max(num_trials, 1) * per_trial}. Trials cannot share the memory of one GPU, so give "
            + (f"{most} or fewer trials at once." if most else f"gpus_per_trial={len(gpus)} or less.")
        )
    each = per_trial // workers_per_trial
    threads = max(1, machine.num_cores // (num_trials * workers_per_trial))
    shares = iter(gpus[begin : begin + each] for begin in range(0, len(gpus), each))

    def environs() -> tuple[Mapping[str, str], ...]:
        return tuple(
            {"CUDA_VISIBLE_DEVICES": ",".join(next(shares)), **_threads(threads)} for _ in range(workers_per_trial)
        )

    return Allocation(
        tuple(environs() for _ in range(num_trials)),
        f"{_counted(num_trials, 'trial')} at once, each on {per_trial} of {_counted(len(gpus), 'GPU')}",
    )


def _allocate_cores(machine: Machine, trials_in_parallel: int | Literal["auto"], workers_per_trial: int) -> Allocation:
    cores = machine.num_cores
    if trials_in_parallel == "auto":
        num_processes = max(1, min(cores, machine.memory_bytes // _BYTES_PER_PROCESS))
        num_trials = max(1, num_processes // workers_per_trial)
    else:
        num_trials = trials_in_parallel
    threads = max(1, cores // (num_trials * workers_per_trial))
    return Allocation(
        ((dict(_threads(threads)),) * workers_per_trial,) * num_trials,
        f"{_counted(num_trials, 'trial')} at once on {_counted(cores, 'core')}, {threads} for each process",
    )


def _threads(number: int) -> Mapping[str, str]:
    names: Sequence[str] = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
    return dict.fromkeys(names, str(number))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
