"""Give each process of a cluster on this machine its part, and an address with a port that stays its own."""

import json
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from keras_dist_ext.errors import LaunchError

__all__ = ["Task", "cluster", "tf_config"]


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
    kinds = ["chief"] * (num_ps > 0) + ["worker"] * num_workers + ["ps"] * num_ps
    indices = dict.fromkeys(kinds, 0)
    with ExitStack() as held:
        tasks: list[Task] = []
        for kind in kinds:
            # On Linux a socket that is bound, but does not listen, keeps the kernel from handing its port to others,
            # and TensorFlow's server (SO_REUSEADDR, all interfaces) can listen on it all the same.
            try:
                held_socket = held.enter_context(socket.socket())
                held_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held_socket.bind(("", 0))
            except OSError as error:
                raise LaunchError(
                    f"{len(kinds)} processes need a port each, and this one could get {len(tasks)} ({error.strerror}). "
                    "Start fewer, or raise the limit of open files (ulimit -n)."
                ) from error
            index = indices[kind]
            indices[kind] += 1
            address = f"127.0.0.1:{held_socket.getsockname()[1]}"
            tasks.append(Task(kind, index, address, serves=num_ps > 0 and kind != "chief"))
        if sys.platform != "linux":
            held.close()  # elsewhere the port can only be chosen, not kept
        yield tasks


def tf_config(task: Task, tasks: Sequence[Task]) -> str:
    """Return what a task finds in its TF_CONFIG."""
    jobs = {kind: [other.address for other in tasks if other.kind == kind] for kind in ("chief", "worker", "ps")}
    return json.dumps(
        {
            "cluster": {kind: addresses for kind, addresses in jobs.items() if addresses},
            "task": {"type": task.kind, "index": task.index},
        }
    )
