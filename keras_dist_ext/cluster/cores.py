"""Count the CPUs that a process may use, and divide those of a launch among its processes."""

import os
from collections.abc import Sequence
from pathlib import Path

from keras_dist_ext.errors import LaunchError

__all__ = ["fair_shares", "num_cores", "usable_cpus"]


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux; in a container fewer than the machine has
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def usable_cpus() -> list[int]:
    """Return the CPUs that this process may use, those of a core and of a socket next to each other.

    Raises:
        LaunchError: this system ties no process to CPUs.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise LaunchError("affinity=True pins processes to CPUs, which only Linux supports. Leave it out here.")
    return sorted(
        os.sched_getaffinity(0), key=lambda cpu: (_topology(cpu, "physical_package"), _topology(cpu, "core"), cpu)
    )


def _topology(cpu: int, what: str) -> int:
    """Return the number of a CPU's core or socket; 0 where the kernel does not tell."""
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{what}_id").read_text())
    except (OSError, ValueError):
        return 0


def fair_shares(cpus: Sequence[int], num_processes: int) -> list[list[int]]:
    """Cut CPUs into a share for each process; with fewer CPUs than processes, some have the same one.

    >>> fair_shares([0, 4, 1, 5, 2], 2)
    [[0, 4, 1], [5, 2]]
    >>> fair_shares([0, 1], 3)
    [[0], [1], [0]]
    """
    if len(cpus) < num_processes:
        return [[cpus[process % len(cpus)]] for process in range(num_processes)]
    least, rest = divmod(len(cpus), num_processes)
    shares: list[list[int]] = []
    begin = 0
    for process in range(num_processes):
        end = begin + least + (process < rest)
        shares.append(list(cpus[begin:end]))
        begin = end
    return shares
