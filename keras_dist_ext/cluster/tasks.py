"""Give each process of a cluster on this machine its task, and an address with a port that stays its own."""

import json
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from keras_dist_ext.errors import LaunchError

__all__ = ["Task", "cluster", "kinds", "tasks_at", "tf_config"]


@dataclass(frozen=True)
class Task:
    """One line of the cluster."""

    kind: str  # chief, worker or ps
    index: int
    address: str
    serves: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


@contextmanager
def cluster(num_workers: int, num_ps: int) -> Iterator[list[Task]]:
    """Give each task an address with a port that stays ours: no other program is handed it while the cluster lives.

    Raises:
        LaunchError: there are not enough ports.
    """
    num_tasks = len(kinds(num_workers, num_ps))
    with ExitStack() as held:
        addresses: list[str] = []
        for _ in range(num_tasks):
            # On Linux a socket that is bound, but does not listen, keeps the kernel from handing its port to others,
            # and TensorFlow's server (SO_REUSEADDR, all interfaces) can listen on it all the same.
            try:
                held_socket = held.enter_context(socket.socket())
                held_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held_socket.bind(("", 0))
            except OSError as error:
                raise LaunchError(
                    f"{num_tasks} processes need a port each, and this one could get {len(addresses)} "
                    f"({error.strerror}). Start fewer, or raise the limit of open files (ulimit -n)."
                ) from error
            addresses.append(f"127.0.0.1:{held_socket.getsockname()[1]}")
        if sys.platform != "linux":
            held.close()  # elsewhere the port can only be chosen, not kept
        yield tasks_at(addresses, num_workers, num_ps)


def kinds(num_workers: int, num_ps: int) -> list[str]:
    """Return the kind of each task."""
    return ["chief"] * (num_ps > 0) + ["worker"] * num_workers + ["ps"] * num_ps


def tasks_at(addresses: Sequence[str], num_workers: int, num_ps: int) -> list[Task]:
    """Return the tasks of a cluster, one for each address."""
    indices: Counter[str] = Counter()
    tasks: list[Task] = []
    for kind, address in zip(kinds(num_workers, num_ps), addresses, strict=True):
        tasks.append(Task(kind, indices[kind], address, serves=num_ps > 0 and kind != "chief"))
        indices[kind] += 1
    return tasks


def tf_config(task: Task, tasks: Sequence[Task]) -> str:
    """Return what a task finds in its TF_CONFIG."""
    jobs = {kind: [other.address for other in tasks if other.kind == kind] for kind in ("chief", "worker", "ps")}
    return json.dumps(
        {
            "cluster": {kind: addresses for kind, addresses in jobs.items() if addresses},
            "task": {"type": task.kind, "index": task.index},
        }
    )
