"""A real cluster of Ray's on this machine: nodes that are processes, and can be lost."""

import glob
import os
import tempfile

import psutil
import pytest
from launching import processes_with, wait_until

import keras_dist_ext as kde


class Nodes:
    """A cluster of a head, where nothing runs, and of nodes of one CPU each."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = []

    def add(self):
        self.nodes.append(self.cluster.add_node(num_cpus=1, include_dashboard=False))

    def have(self, number):
        """Add or remove nodes, until there are so many that live."""
        self.nodes = [node for node in self.nodes if _raylet(node).poll() is None]
        while len(self.nodes) > number:
            self.cluster.remove_node(self.nodes.pop())
        while len(self.nodes) < number:
            self.add()

    def lose(self, agent):
        """Kill the node on which an agent runs."""
        raylet = psutil.Process(agent).ppid()
        (node,) = (node for node in self.nodes if _raylet(node).pid == raylet)
        self.nodes.remove(node)
        node.kill_raylet()

    @property
    def on(self):
        return kde.RayCluster(self.cluster.address)


def _raylet(node):
    return node.all_processes["raylet"][0].process


@pytest.fixture(scope="session")
def ray_cluster(ray_token):
    """The cluster, in one process of the tests."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="kde") as folder:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        found = Nodes()
        try:
            yield found
        finally:
            found.cluster.shutdown()


@pytest.fixture
def nodes(ray_cluster):
    """The cluster, with two nodes where something can run."""
    ray_cluster.have(2)
    return ray_cluster


def token(name):
    return {"TEST_TOKEN": f"{name} of {os.getpid()}"}


def assert_nothing_is_left(name, nodes):
    import ray

    wait_until(lambda: not processes_with(name))
    wait_until(lambda: not glob.glob(os.path.join(tempfile.gettempdir(), "keras_dist_ext-*")))
    ray.init(nodes.cluster.address, log_to_driver=False)
    try:
        wait_until(lambda: {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"})
        wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))
    finally:
        ray.shutdown()
