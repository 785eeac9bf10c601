"""Talk to the coordination service of a cluster, to its workers, and to their collectives.

What is private is imported where it is used, so that a strategy can be picked where a part of it has moved.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext import versions

__all__ = [
    "per_worker_values",
    "set_cluster_timeout",
    "is_initialized",
    "set_key",
    "get_key",
    "delete_key",
    "abort_collectives",
    "is_collective_mismatch",
    "lost_tasks",
    "silent_tasks",
]


@versions.naming("Several workers")
def _context() -> Any:
    from tensorflow.python.eager import context

    return context.context()


@versions.naming("parameter_server")
def per_worker_values(
    strategy: tf.distribute.Strategy, values: Sequence[tf.Tensor | tf.data.Dataset]
) -> tf.distribute.coordinator.PerWorkerValue:
    """Put one value on each worker of a ParameterServerStrategy: a tensor, or an iterator over a dataset.

    TensorFlow's ``create_per_worker_dataset`` (coordinator/values.py, cluster_coordinator.py) gives all workers the
    same dataset; here each has its own, sent as a graph just as there. A worker that comes back makes its value again.
    """
    from tensorflow.python.distribute import input_lib
    from tensorflow.python.distribute.coordinator import values as coordinator_values

    workers = tf.distribute.coordinator.ClusterCoordinator(strategy)._cluster.workers
    made = []
    for worker, value in zip(workers, values, strict=True):
        if isinstance(value, tf.data.Dataset):
            graph, spec = coordinator_values.serialize_dataset_to_graph(value), value.element_spec
            make = tf.function(functools.partial(coordinator_values.deserialize_dataset_from_graph, graph, spec))
            traced = make.get_concrete_function()
            remote = worker.create_resource(lambda dataset=traced: iter(dataset()))
            remote._type_spec = input_lib.get_iterator_spec_from_dataset(strategy, traced.structured_outputs)
        else:
            remote = worker.create_resource(tf.function(functools.partial(tf.constant, value)).get_concrete_function())
        made.append(remote)
    return tf.distribute.coordinator.PerWorkerValue(made)


@versions.naming("multi_worker")
def set_cluster_timeout(jobs: dict[str, int], wait_seconds: float) -> None:
    """Have the strategy of several workers that is made next wait so long for its cluster, instead of an hour.

    tensorflow/python/distribute/collective_all_reduce_strategy.py configures the coordination service the same way, but
    for the time (python/eager/context.py), and leaves one alone that is configured already. The task that leads it
    would wait an hour for what the others tell of their devices, whatever the time is; where all register at a barrier,
    it waits for them there (xla/tsl/distributed_runtime/coordination/coordination_service.cc; not in TensorFlow 2.18).

    Args:
        jobs: how many tasks "chief" and "worker" have.
        wait_seconds: see above.
    """
    from tensorflow.python.eager.context import coordination_config_pb2

    leader = "chief" if jobs.get("chief") else "worker"
    context = _context()
    context.configure_coordination_service(
        "standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        cluster_register_timeout_in_ms=max(1, round(1000 * wait_seconds)),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=count) for job, count in jobs.items() if count
        ],
    )
    config = context.coordination_service
    if "cluster_register_with_barrier" in config.DESCRIPTOR.fields_by_name:
        config.cluster_register_with_barrier = True


def is_initialized() -> bool:
    """Whether TensorFlow has begun to work, so that devices and clusters are settled (python/eager/context.py)."""
    return _context()._context_handle is not None


def set_key(key: str, text: str) -> None:
    """Store a text for all workers under a key that has none yet (python/eager/context.py)."""
    _context().set_config_key_value(key, text)


def get_key(key: str, wait_seconds: float) -> str | None:
    """Return what a worker has stored under a key, or None if nobody has after so long (python/eager/context.py)."""
    try:
        return str(_context().get_config_key_value(key, max(1, round(1000 * wait_seconds))))
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return None


def delete_key(key: str) -> None:
    """Forget what was stored under a key (python/eager/context.py)."""
    _context().delete_config_key_value(key)


def abort_collectives(message: str) -> None:
    """End all collectives that this worker waits in, and all to come, by an error (python/eager/context.py)."""
    _context().abort_collective_ops(tf.errors.INTERNAL, message)


def is_collective_mismatch(error: Exception) -> bool:
    """Whether workers have met in a collective with values of different shapes, types or purposes.

    tensorflow/core/common_runtime/collective_param_resolver_local.cc says so in these words.
    """
    text = str(error)
    return isinstance(error, tf.errors.OpError) and (
        "mismatch in the collective instance" in text or ("Collective instance" in text and "expected" in text)
    )


def lost_tasks(error: Exception) -> list[tuple[str, int]] | None:
    """Return the tasks that an error says are lost, by job and number; None where it is about no lost task.

    The coordination service (xla/tsl/distributed_runtime/coordination/coordination_service.cc) lists tasks that have
    stopped sending heartbeats, and collectives (tensorflow/core/common_runtime/collective_rma_local.cc, gRPC) say
    which connection is gone.
    """
    text = str(error)
    if not isinstance(error, tf.errors.OpError) or not any(phrase in text for phrase in _LOST):
        return None
    return list(dict.fromkeys((job, int(number)) for job, number in re.findall(_TASK, text.partition(_UNHEALTHY)[2])))


def silent_tasks(jobs: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the tasks from which the coordination service has no heartbeat any more (python/eager/context.py).

    These come from a thread of TensorFlow's own, whatever Python does in the task. It holds Python's lock until the
    service answers (python/tfe_wrapper.cc), so only the task that has the service may call it.

    Args:
        jobs: how many tasks each has.
    """
    tasks = [(job, number) for job, count in jobs.items() for number in range(count)]
    states = _context().get_task_states([(job, count) for job, count in jobs.items() if count])
    return [task for task, state in zip(tasks, states, strict=True) if state is not None]


_UNHEALTHY = "stopped sending heartbeats"
_LOST = (
    _UNHEALTHY,
    "Collective ops is aborted",
    "Socket closed",
    "Connection refused",
    "Connection reset",
    "failed to connect",
    "coordination service",
    "Coordination service",
    "CoordinationService",
    "heartbeat",
)
_TASK = r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)"
