"""The places of a launch on a Ray cluster: bundles of a placement group, and others that are asked for."""

import time
from collections.abc import Generator, Mapping
from contextlib import suppress

from keras_dist_ext.aliases import RayHandle
from keras_dist_ext.cluster.ray_cluster import RayCluster
from keras_dist_ext.cluster.tasks import kinds
from keras_dist_ext.cluster.worker_count import WorkerCount

__all__ = ["RayPlaces"]


class RayPlaces:
    """Those that the processes of a launch have, and those that more workers would have.

    Args:
        cluster: what each process gets.
    """

    TRY_SECONDS = 5.0  # for a number of workers that there should be room for: the last ones may just be leaving
    NEXT_SECONDS = 1.0  # for each number below

    def __init__(self, cluster: RayCluster):
        self._cluster = cluster
        self._groups: list[RayHandle] = []
        self._num_missing = 0
        self._spare: list[RayHandle] = []  # groups of a bundle each, for workers that could be more

    def take(
        self, workers: WorkerCount, num_ps: int
    ) -> Generator[str, None, tuple[RayHandle, list[dict[str, float]], int]]:
        """Return a placement group, when there is one, what its bundles have, and for how many workers it is.

        Yields what it waits for; see `Host.reserve`.

        Args:
            workers: how many: as many as there is room for.
            num_ps: how many parameter servers.
        """
        number = workers.fit(self._room()) if workers.is_elastic else workers.least
        seconds = self.TRY_SECONDS
        while number > workers.least:
            group, bundles = self._ask(number, num_ps)
            if (yield from self._comes(group, number, seconds)):
                break
            self._remove(group)
            number, seconds = workers.fit(min(number - 1, self._room(free=True))), self.NEXT_SECONDS
        else:
            group, bundles = self._ask(number, num_ps)
            missing = self._missing(bundles, num_ps)
            while not is_there(group):
                yield missing
        self._num_missing = workers.most - number
        return group, bundles, number

    def _ask(self, num_workers: int, num_ps: int) -> tuple[RayHandle, list[dict[str, float]]]:
        import ray

        bundles = self._bundles(num_workers, num_ps)
        group = ray.util.placement_group(bundles, strategy="SPREAD")
        self._groups.append(group)
        return group, bundles

    def _bundles(self, num_workers: int, num_ps: int) -> list[dict[str, float]]:
        """Return the resources of each process."""
        cpus = {"CPU": self._cluster.cpus_per_worker}
        gpus = {"GPU": self._cluster.gpus_per_worker} if self._cluster.gpus_per_worker else {}
        return [cpus | (gpus if kind == "worker" else {}) for kind in kinds(num_workers, num_ps)]

    def _room(self, *, free: bool = False) -> int:
        """Return how many workers, at most, all nodes together have room for; or have room for beside others."""
        import ray

        if free:
            return self._num_that_fit(ray.available_resources())
        return sum(self._num_that_fit(node["Resources"]) for node in ray.nodes() if node["Alive"])

    def _num_that_fit(self, amounts: Mapping[str, float]) -> int:
        (bundle,) = self._bundles(1, 0)
        return min(int(amounts.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items())

    @staticmethod
    def _comes(group: RayHandle, number: int, seconds: float) -> Generator[str, None, bool]:
        """Whether a group is there within so many seconds."""
        deadline = time.monotonic() + seconds
        while not is_there(group):
            yield f"Ray looks for room for {number} workers"
            if time.monotonic() > deadline:
                return False
        return True

    @staticmethod
    def _missing(bundles: list[dict[str, float]], num_ps: int) -> str:
        import ray

        processes = "1 process" if len(bundles) == 1 else f"{len(bundles)} processes"
        each = f"{_resources(bundles[-num_ps - 1])}{' each' if len(bundles) > 1 else ''}"
        return f"Ray has no room for {processes} of {each}; all that it has is {_resources(ray.cluster_resources())}"

    def have_come(self) -> bool:
        """Whether there is room for more workers; it is kept for them, and until it comes Ray knows that it is wanted.

        A cluster that grows on demand then does.
        """
        from ray.exceptions import RayError

        try:
            if not self._spare:
                self._spare = [self._ask(1, 0)[0] for _ in range(self._num_missing)]
            return any(is_there(group) for group in self._spare)
        except RayError:  # the head does not answer: whether the workers can go on without, they show
            return False

    def close(self) -> None:
        """Give all back."""
        for group in self._groups[:]:
            self._remove(group)

    def _remove(self, group: RayHandle) -> None:
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            ray.util.remove_placement_group(group)
        self._groups.remove(group)


def is_there(group: RayHandle) -> bool:
    """Whether a placement group has its bundles."""
    return bool(group.wait(0))


def _resources(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts[name]:g} {name}" for name in ("CPU", "GPU") if amounts.get(name)) or "no CPU"
