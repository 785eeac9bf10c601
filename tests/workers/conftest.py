"""The cluster of Ray's that tests of several files share."""

from ray_nodes import nodes, ray_cluster

__all__ = ["nodes", "ray_cluster"]
