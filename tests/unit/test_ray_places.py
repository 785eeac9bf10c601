"""How many workers of an elastic launch find places on a Ray cluster, here one that is made up."""

import sys
import types

import pytest

from keras_dist_ext.cluster.failure import Failure, NotPlaced
from keras_dist_ext.cluster.ray_cluster import RayCluster
from keras_dist_ext.cluster.ray_host import RayHost
from keras_dist_ext.cluster.ray_places import RayPlaces
from keras_dist_ext.cluster.worker_count import WorkerCount


class Group:
    """A placement group of a made-up cluster: it gets its bundles, all of them at once, when there is room."""

    def __init__(self, cluster, bundles):
        self._cluster, self.bundles, self.nodes = cluster, bundles, []

    def wait(self, seconds):
        assert isinstance(seconds, int), "Ray waits for whole seconds alone"
        if not self.nodes:
            self.nodes = self._cluster.place(self.bundles)
        return bool(self.nodes)


class Cluster:
    """A made-up cluster: nodes with resources, some of which others use."""

    def __init__(self, *nodes):
        self.all, self.dead, self.asked = [dict(node) for node in nodes], [], []
        self.free = [dict(node) for node in nodes]
        self.living_groups = []

    def place(self, bundles):
        before, found = [dict(node) for node in self.free], []
        for bundle in bundles:
            node = next((n for n in self.free if all(n.get(k, 0) >= v for k, v in bundle.items())), None)
            if node is None:
                self.free = before
                return []
            for name, amount in bundle.items():
                node[name] -= amount
            found.append((node, bundle))
        return found

    def placement_group(self, bundles, strategy):
        assert strategy == "SPREAD"
        self.asked.append(len(bundles))
        self.living_groups.append(Group(self, bundles))
        return self.living_groups[-1]

    def remove_placement_group(self, group):
        self.living_groups.remove(group)
        for node, bundle in group.nodes:
            for name, amount in bundle.items():
                node[name] += amount

    def sums(self, nodes):
        return {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}


@pytest.fixture
def made_up(monkeypatch):
    """Return what makes a cluster that `import ray` connects to, and the places on it."""

    def make(*nodes, **options):
        cluster = Cluster(*nodes)
        ray = types.ModuleType("ray")
        ray.exceptions = types.ModuleType("ray.exceptions")
        ray.exceptions.RayError = type("RayError", (Exception,), {})
        ray.util = types.SimpleNamespace(
            placement_group=cluster.placement_group, remove_placement_group=cluster.remove_placement_group
        )
        ray.nodes = lambda: [{"Alive": node not in cluster.dead, "Resources": node} for node in cluster.all]
        ray.available_resources = lambda: cluster.sums(cluster.free)
        ray.cluster_resources = lambda: cluster.sums(cluster.all)
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
        return cluster, RayPlaces(RayCluster(**options))

    monkeypatch.setattr(RayPlaces, "TRY_SECONDS", 0.0)
    monkeypatch.setattr(RayPlaces, "NEXT_SECONDS", 0.0)
    return make


def taken(places, *args):
    """Look for places until there are some."""
    steps = places.take(*args)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_as_many_workers_get_places_as_the_living_nodes_have_room_for(made_up):
    cluster, places = made_up({"CPU": 4.0}, {"CPU": 2.0}, {"CPU": 9.0, "GPU": 1.0}, cpus_per_worker=2)
    cluster.dead.append(cluster.all.pop())
    cluster.free.pop()
    group, bundles, number = taken(places, WorkerCount(2, 9), 0)
    assert (number, bundles, cluster.asked) == (3, [{"CPU": 2}] * 3, [3])
    assert group.nodes
    places.close()
    assert cluster.living_groups == []
    assert cluster.free == cluster.all


def test_what_others_use_is_no_place(made_up):
    cluster, places = made_up({"CPU": 4.0}, {"CPU": 4.0})
    cluster.free[0]["CPU"] = 0.5
    cluster.free[1]["CPU"] = 3.5
    assert taken(places, WorkerCount(1, 9), 0)[2] == 3
    assert cluster.asked == [8, 4, 3], "what is free on two nodes together may be no place on either"
    assert len(cluster.living_groups) == 1


def test_the_resource_that_is_scarcest_decides(made_up):
    cluster, places = made_up({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0}, gpus_per_worker=0.5)
    assert taken(places, WorkerCount(1, 9), 0)[2] == 4
    assert cluster.asked == [4]


def test_the_least_are_waited_for_and_named(made_up):
    cluster, places = made_up({"CPU": 1.0}, cpus_per_worker=2)
    steps = places.take(WorkerCount(2, 3), 0)
    said = {next(steps) for _ in range(3)}
    assert cluster.asked == [2]
    assert said == {"Ray has no room for 2 processes of 2 CPU each; all that it has is 1 CPU"}
    places.close()
    assert cluster.living_groups == []


def test_a_fixed_number_with_servers_asks_once(made_up):
    cluster, places = made_up({"CPU": 9.0, "GPU": 2.0}, gpus_per_worker=1)
    _, bundles, number = taken(places, WorkerCount(2, 2), 1)
    assert (number, cluster.asked) == (2, [4])
    assert bundles == [{"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1}]
    assert not places.have_come()


def test_a_node_that_joins_is_noticed_and_kept_for_the_launch(made_up):
    cluster, places = made_up({"CPU": 2.0})
    assert taken(places, WorkerCount(1, 4), 0)[2] == 2
    assert not places.have_come()
    assert cluster.asked == [2, 1, 1], "the cluster knows what is wanted"
    cluster.all.append({"CPU": 1.0})
    cluster.free.append({"CPU": 1.0})
    assert places.have_come()
    assert cluster.free[-1] == {"CPU": 0.0}
    assert cluster.asked == [2, 1, 1]
    places.close()
    assert cluster.free[-1] == {"CPU": 1.0}


def test_a_head_that_does_not_answer_has_no_more_places(made_up):
    cluster, places = made_up({"CPU": 2.0})
    assert taken(places, WorkerCount(1, 4), 0)[2] == 2

    def silent(*_, **__):
        raise sys.modules["ray.exceptions"].RayError

    sys.modules["ray"].util.placement_group = silent
    assert not places.have_come()
    assert cluster.asked == [2]


def test_a_node_that_cannot_run_an_agent_is_no_place_and_the_launch_says_what_it_lacks(made_up, monkeypatch):
    _, places = made_up({"CPU": 2.0})
    ray = sys.modules["ray"]
    scheduling = types.ModuleType("ray.util.scheduling_strategies")
    scheduling.PlacementGroupSchedulingStrategy = lambda group, number: number
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", scheduling)
    agent = types.SimpleNamespace(address=types.SimpleNamespace(remote=lambda: "an answer"))
    made = types.SimpleNamespace(remote=lambda: agent)
    answers = iter([[], ["an answer", "an answer"]])
    ray.remote = lambda kind: types.SimpleNamespace(options=lambda **_: made)
    ray.wait = lambda asked, num_returns, timeout: (next(answers), [])

    def get(asked):
        raise ray.exceptions.RayError("No module named 'keras_dist_ext'")

    ray.get = get
    host = RayHost(RayCluster())
    host._places = places
    steps = host.reserve(WorkerCount(2, 2), 0)
    assert next(steps) == "Ray prepares its nodes"
    with pytest.raises(NotPlaced) as caught:
        next(steps)
    assert caught.value.failure == Failure(
        1,
        "Ray could not prepare a node: No module named 'keras_dist_ext'\nEach node needs Ray and keras_dist_ext, as "
        "they are here.",
    )
