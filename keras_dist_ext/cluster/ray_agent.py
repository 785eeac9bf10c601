"""Run one process of a launch on a node of Ray's: an actor that is a host of this one process there.

When the launcher, its node, the actor or the actor's node ends, Ray ends the actor, and with it goes the process.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keras_dist_ext.aliases import Picklable
from keras_dist_ext.cluster.host import State
from keras_dist_ext.cluster.local_host import LocalHost
from keras_dist_ext.cluster.placing import Placing
from keras_dist_ext.cluster.worker_count import WorkerCount

__all__ = ["Agent", "Report"]


class Report(NamedTuple):
    """What has become of a process since the last report."""

    data: bytes  # what it has printed
    is_at_end: bool  # of its output
    state: State
    is_stopped: bool


class Agent:
    """The actor."""

    MOST_BYTES = 1 << 15  # after which a report reads no more: with a last read of twice as much it still is small
    # enough to come with Ray's answer (100 KiB), instead of an object that is fetched

    def __init__(self) -> None:
        self._host = LocalHost(owns_process=True)
        self._host.__enter__()
        self._is_at_end = False
        self._reported = State()

    def address(self) -> tuple[str, int]:
        """Return this node's address, and a port that stays the process' own."""
        import ray

        tasks = Placing(self._host.reserve(WorkerCount(1, 1), 0)).tasks()
        assert tasks
        return ray.util.get_node_ip_address(), int(tasks[0].address.rpartition(":")[2])

    def start(self, name: str, work: Sequence[str] | bytes | None, environ: Mapping[str, str], python: str) -> None:
        """Start the process, in the environment that Ray gives to this actor.

        Args:
            name: of the process.
            work: a command, a packed call, or None: see `Host.start`.
            environ: is added to the environment.
            python: the launcher's interpreter, instead of which this node's is used.
        """
        if work is not None and not isinstance(work, bytes) and work[0] == python:
            work = [sys.executable, *work[1:]]
        self._process = self._host.start(name, work, {**os.environ, **environ}, ())

    def report(self, seconds: float) -> Report:
        """Wait so long for something to report."""
        data, deadline = b"", time.monotonic() + seconds
        while not self._is_at_end and len(data) < self.MOST_BYTES:
            found = self._host.read(0.0 if data else max(0.0, deadline - time.monotonic()))
            if not found:
                break
            data += found[0][1]
            self._is_at_end = not found[0][1]
        if self._is_at_end and not data:
            self._wait_for_end(deadline)
        self._reported = self._process.poll()
        return Report(data, self._is_at_end, self._reported, self._process.is_stopped)

    def _wait_for_end(self, deadline: float) -> None:
        """Wait until the process that prints no more has ended, or failed since the last report."""
        while time.monotonic() < deadline:
            state = self._process.poll()
            if state.exit_code is not None or state.failure_code != self._reported.failure_code:
                return
            time.sleep(0.01)

    def call(self, method: str, *args: Picklable) -> Picklable:
        """Call a method of the process."""
        return getattr(self._process, method)(*args)

    def foresee_end(self) -> None:
        """See what the process has started."""
        self._host.foresee_end()

    def close(self) -> None:
        """End the process, and whatever it has started."""
        self._host.__exit__()
