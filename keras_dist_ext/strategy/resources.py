"""Gather what the choice of a strategy depends on: devices, the cluster, a TPU."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from keras_dist_ext.cluster.slurm import slurm_cluster
from keras_dist_ext.cluster.spec import (
    Cluster,
    cluster_of,
    mpi_cluster,
    mpi_size,
    task_count,
    tf_config_cluster,
)

__all__ = ["Resources", "find_resources", "list_devices", "of_type", "listed", "TPU_VARIABLES"]

TPU_VARIABLES = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "COLAB_TPU_ADDR")


def list_devices() -> tuple[str, ...]:
    """List the logical devices that TensorFlow has, or will have, such as `CPU:0`, without initialising it."""
    count: Counter[str] = Counter()
    names = []
    for physical in tf.config.get_visible_devices():
        for _ in tf.config.get_logical_device_configuration(physical) or [None]:
            names.append(f"{physical.device_type}:{count[physical.device_type]}")
            count[physical.device_type] += 1
    return tuple(names)


@dataclass(frozen=True)
class Resources:
    """What a choice depends on."""

    devices: tuple[str, ...]  # logical devices of this process
    cluster: Cluster | None = None  # None: this process trains by itself
    tpu: str | None = None  # how to reach it: "local", a name, or grpc://host:port
    num_slurm_tasks: int = 0  # tasks of the SLURM allocation, when srun did not start this process; 0: no such thing


def find_resources(
    environ: Mapping[str, str] = os.environ,
    *,
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
    tpu: str | None = None,
    device_lister: Callable[[], Sequence[str]] = list_devices,
) -> Resources:
    """Read what a choice depends on; start and connect nothing.

    Raises:
        ClusterError: TF_CONFIG, MPI, SLURM or the resolver does not describe a cluster that could train.
    """
    devices = tuple(device_lister())
    cluster, num_slurm_tasks = None, 0
    if cluster_resolver is not None:
        cluster = cluster_of(lambda: cluster_resolver, type(cluster_resolver).__name__)
    elif "TF_CONFIG" in environ:
        cluster = tf_config_cluster(environ)
    elif mpi_size(environ) > 1:  # before SLURM: mpirun starts its daemons by srun, whose variables they pass on
        cluster = mpi_cluster(environ)
    elif task_count(environ, "SLURM_STEP_NUM_TASKS") > 1:
        cluster = slurm_cluster(environ)
    elif "SLURM_STEP_NUM_TASKS" not in environ and (num_tasks := task_count(environ, "SLURM_NTASKS")) > 1:
        num_slurm_tasks = num_tasks
    return Resources(devices, cluster, tpu or _tpu_of(environ, devices), num_slurm_tasks)


def _tpu_of(environ: Mapping[str, str], devices: Sequence[str]) -> str | None:
    for variable in TPU_VARIABLES:
        if tpu := environ.get(variable):
            return f"grpc://{tpu}" if variable == "COLAB_TPU_ADDR" and "://" not in tpu else tpu
    return "local" if of_type("TPU", devices) else None


def of_type(kind: str, devices: Sequence[str]) -> tuple[str, ...]:
    """Return the devices of a kind, such as `GPU`."""
    return tuple(device for device in devices if device.startswith(f"{kind}:"))


def listed(devices: Sequence[str]) -> str:
    """Write devices into a sentence."""
    return ", ".join(devices) or "no device"
