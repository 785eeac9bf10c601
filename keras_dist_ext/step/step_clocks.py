"""Read the host's clock for what a step does.

To see when a GPU has done something, one number is copied to the host, and its clock is read there.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras.tracing import run_independently
from keras_dist_ext.step.graphs import assigning
from keras_dist_ext.step.sampled_table import SampledClocks
from keras_dist_ext.step.step_buffer import ReplicaRecord, cpu_beside

__all__ = ["as_soon_as", "last_of", "now", "on_host", "sampled_clocks", "when_updated"]


def now(after: tf.Tensor = (), *, independent: bool = False) -> tf.Tensor:
    """Read the host's clock once ``after`` is available, in seconds since 1970, float64.

    Args:
        after: what has to be there.
        independent: whether that is all. Else TensorFlow keeps the order in which this and other ops with effects were
            traced, for which steps with loops inside, such as an LSTM's, may pay some 20 µs.
    """
    values = [value for value in tf.nest.flatten(after) if tf.is_tensor(value)]
    with tf.control_dependencies(values), tf.device(_host_of(values)):
        clock = tf.timestamp()
    if independent:
        run_independently(clock)
    return clock


def _host_of(values: Sequence[tf.Tensor]) -> str:
    """The values' own device, if it is a CPU: what is on another one has to be sent to it."""
    device = getattr(values[0], "device", "") if values else ""
    return device if "CPU" in device.upper() else "/device:CPU:0"


def as_soon_as(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Read the clock once values are available, whatever other replicas do."""
    return now(values, independent=bool(values))


def last_of(values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Return those of a step's values that are there last; a GPU does its work in order, beginning with any of them."""
    return (*values[:1], *values[1:][-1:])


def on_host(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors that are available only when ``values`` are computed, not just enqueued."""
    if not values or all("CPU" in getattr(value, "device", "CPU").upper() or not value.device for value in values):
        return list(values)
    # Work of a GPU is done in order: the last value waits for all before it. One number of each is sent to the host.
    last = [tf.reshape(value, [-1])[:1] for value in last_of(values)]
    with tf.device("/device:CPU:0"):
        return [tf.identity(value) for value in last]


def when_updated(since: int, devices: Sequence[str], records: Sequence[ReplicaRecord]) -> list[tf.Tensor]:
    """Read the clock of each replica's host once what a step assigns on the replica's device is assigned.

    Args:
        since: how many ops the graph had before the step was traced.
        devices: of the L replicas. What is assigned elsewhere counts as the first one's.
        records: of each, which count where nothing is assigned.
    """
    if tf.executing_eagerly():
        return [now()] * len(records)
    clocks = []
    for ops, device, record in zip(_updates(since, devices), devices, records, strict=True):
        with (
            tf.control_dependencies(ops or record.present),
            tf.device(cpu_beside(device)),
        ):
            clocks.append(tf.timestamp())
        run_independently(clocks[-1])
    return clocks


def sampled_clocks(
    since: int,
    gpus: Sequence[str],
    records: Sequence[ReplicaRecord],
    computed: Sequence[Sequence[tf.Tensor]],
    is_read: tf.Tensor,
) -> list[SampledClocks]:
    """Return what to read clocks after, in those steps of a loop in which they are read.

    Args:
        since: how many ops the graph had before the step was traced.
        gpus: of the L replicas.
        records: of each.
        computed: what they have computed last, each value of all replicas.
        is_read: whether clocks are read in this step.
    """
    sampled = []
    for index, (ops, gpu) in enumerate(zip(_updates(since, gpus), gpus, strict=True)):
        with tf.device(gpu), tf.control_dependencies(ops):
            over = tf.identity(records[index].loss)
        sampled.append(SampledClocks(is_read, [values[index] for values in computed], over))
    return sampled


def _updates(since: int, devices: Sequence[str]) -> list[list[tf.Operation]]:
    """Return the ops of the graph, but for the first so many, that assign on each device, or else on the first."""
    updates: list[list[tf.Operation]] = [[] for _ in devices]
    index_of = {_place(device): index for index, device in enumerate(devices)}
    for op in assigning(tf.compat.v1.get_default_graph(), since):
        updates[index_of.get(_place(op.device), 0)].append(op)
    return updates


def _place(device: str) -> tuple[str | None, int | None]:
    """Type and number of a device; names in a graph may be shorter than those of a strategy."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type, spec.device_index
