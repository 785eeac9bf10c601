"""Run processes on the nodes of a Ray cluster: each in an actor, in a bundle of one placement group."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from keras_dist_ext.aliases import RayHandle
from keras_dist_ext.cluster.failure import Failure, NotPlaced
from keras_dist_ext.cluster.host import Host
from keras_dist_ext.cluster.placing import PlacingSteps
from keras_dist_ext.cluster.ray_agent import Agent
from keras_dist_ext.cluster.ray_cluster import RayCluster, connected
from keras_dist_ext.cluster.ray_places import RayPlaces
from keras_dist_ext.cluster.ray_process import RayProcess
from keras_dist_ext.cluster.tasks import tasks_at
from keras_dist_ext.cluster.worker_count import WorkerCount

__all__ = ["RayHost", "ray_hosts"]


@contextmanager
def ray_hosts(cluster: RayCluster) -> Iterator[Callable[[], Host]]:
    """Connect this process to the cluster, unless it is, and yield what makes hosts there.

    Raises:
        LaunchError: there is no Ray here, or no such cluster.
    """
    with connected(cluster):
        yield lambda: RayHost(cluster)


class RayHost:
    """Runs processes on nodes of Ray; see `Host`.

    Args:
        cluster: what each gets.
    """

    CLOSE_SECONDS = 15.0  # for all processes to be ended, with all that they have started
    MOST_SECONDS = 1.0  # between two reads: where more have passed, this process itself was held, as by Ctrl-Z

    def __init__(self, cluster: RayCluster):
        self._places = RayPlaces(cluster)
        self._agents: list[RayHandle] = []
        self._nodes: list[str] = []
        self._processes: list[RayProcess] = []
        self._calls: dict[bytes, RayHandle] = {}  # those that all nodes fetch
        self._noted = time.monotonic()

    def __enter__(self) -> "RayHost":
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray.exceptions import RayError

        lost = [process.agent for process in self._processes if process.is_lost]
        with suppress(RayError):
            prepared = self._agents if self._nodes else []
            closing = [agent.close.remote() for agent in prepared if agent not in lost]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=self.CLOSE_SECONDS)
        for agent in self._agents:
            with suppress(RayError):
                ray.kill(agent)
        self._places.close()

    def reserve(self, workers: WorkerCount, num_ps: int) -> PlacingSteps:
        """Give each task a place and an address, when there is room for all."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, bundles, num_workers = yield from self._places.take(workers, num_ps)
        kind = ray.remote(Agent)
        self._agents = [
            kind.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=2,  # one reports, and others come between
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            ).remote()
            for number, bundle in enumerate(bundles)
        ]
        asked = [agent.address.remote() for agent in self._agents]
        while len(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) < len(asked):
            yield "Ray prepares its nodes"
        try:
            addresses = ray.get(asked)
        except RayError as error:
            text = f"Ray could not prepare a node: {error}\nEach node needs Ray and keras_dist_ext, as they are here."
            raise NotPlaced(Failure(1, text)) from error
        self._nodes = [host for host, _ in addresses]
        return tasks_at([f"{host}:{port}" for host, port in addresses], num_workers, num_ps)

    def has_more_places(self) -> bool:
        """Whether there is room for more workers by now, and more are wanted."""
        return self._places.have_come()

    def start(
        self, name: str, work: Sequence[str] | bytes | None, environ: Mapping[str, str], cpus: Sequence[int]
    ) -> "RayProcess":
        """Begin to start a process in the next bundle."""
        import ray

        del cpus
        if isinstance(work, bytes) and work not in self._calls:
            self._calls[work] = ray.put(work)
        sent = self._calls[work] if isinstance(work, bytes) else work
        number = len(self._processes)
        agent = self._agents[number]
        process = RayProcess(agent, self._nodes[number], agent.start.remote(name, sent, environ, sys.executable))
        self._processes.append(process)
        return process

    def read(self, seconds: float) -> list[tuple["RayProcess", bytes]]:
        """Return what processes have printed."""
        import ray

        pending = {process.awaited(): process for process in self._processes if not process.is_done}
        if not pending:
            time.sleep(seconds)
            return []
        ray.wait(list(pending), num_returns=1, timeout=seconds)
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        now = time.monotonic()
        passed, self._noted = min(now - self._noted, self.MOST_SECONDS), now
        found: list[tuple[RayProcess, bytes]] = []
        for ref, process in pending.items():
            found += [(process, data) for data in (process.take() if ref in ready else process.note_silence(passed))]
        return found

    def foresee_end(self) -> None:
        """See what all processes have started."""
        for process in self._processes:
            if not process.is_lost:
                process.agent.foresee_end.remote()
