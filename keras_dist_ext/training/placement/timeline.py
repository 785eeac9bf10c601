"""Measure when each part works: steps under TensorFlow's profiler, and the hand-over between devices."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.interception import patched
from keras_dist_ext._keras.models import build_as_fit
from keras_dist_ext._keras.profiles import op_spans
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.errors import PlacementError
from keras_dist_ext.findings import Finding
from keras_dist_ext.training.placement.parts import Part
from keras_dist_ext.training.placement.trace import Handover, Trace, part_of_op
from keras_dist_ext.training.snapshot import kept_state

__all__ = ["PartTimes", "Timeline", "Transfer", "measure"]

Span = tuple[float, float]  # begin and end, in seconds
_OPTIONS = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0, device_tracer_level=1)


@dataclasses.dataclass(frozen=True)
class PartTimes:
    """How long a part of one replica has worked in a step, on average: at least one of its ops ran."""

    name: str
    replica: int
    device: str
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.forward_seconds + self.backward_seconds


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What a part is handed from another device in a step, and hands back as gradients."""

    part: str
    source: str
    target: str
    num_bytes: int  # one way
    seconds: float  # both ways, by copying as much, apart from training


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When the parts of a placed model have worked."""

    num_steps: int
    step_seconds: float
    micro_batches: int
    num_busy: float  # devices at once, of a replica, on average while any of its parts works: 1 if they take turns
    parts: tuple[PartTimes, ...]
    transfers: tuple[Transfer, ...]
    findings: tuple[Finding, ...] = ()  # what keeps the placement from helping

    @property
    def seconds_by_device(self) -> dict[str, float]:
        """How long the parts of replica 0 work in a step, by device."""
        total: dict[str, float] = {}
        for part in self.parts:
            if part.replica == 0:
                total[part.device] = total.get(part.device, 0.0) + part.seconds
        return total

    def __str__(self) -> str:
        lines = [
            f"{1e3 * self.step_seconds:.3g} ms a step; {self.num_busy:.2f} of {len(self.seconds_by_device)} devices "
            "work at once"
        ]
        lines += [
            f"  {part.name}, replica {part.replica}, {part.device}: forward {1e3 * part.forward_seconds:.3g} ms, "
            f"backward {1e3 * part.backward_seconds:.3g} ms"
            for part in self.parts
        ]
        return "\n".join([*lines, *map(str, self.findings)])


def measure(
    model: keras.Model,
    parts: Sequence[Part],
    trace: Trace,
    batch: tuple[TensorNest, TensorNest],
    num_steps: int,
    micro_batches: int,
) -> Timeline:
    """Make steps on a batch, put everything back, and return when each part has worked.

    Raises:
        PlacementError: the profiler has seen no op of a part.
    """
    given = tuple(value for value in batch if value is not None)
    build_as_fit(model, given if len(given) > 1 else given[0])
    unchecked = patched(model.replica_runtime, "check", False)  # until training begins
    with kept_state(model), unchecked, tempfile.TemporaryDirectory() as directory:
        for _ in range(2):
            model.train_on_batch(*given)
        tf.profiler.experimental.start(directory, _OPTIONS)
        began = time.perf_counter()
        try:
            for _ in range(num_steps):
                model.train_on_batch(*given)
            seconds = (time.perf_counter() - began) / num_steps
        finally:
            tf.profiler.experimental.stop()
        spans = _spans_of_parts(op_spans(directory), trace)
    if not spans:
        raise PlacementError(
            "TensorFlow's profiler has recorded no op of a part, so there is nothing to measure. Its TraceMe events "
            "are missing where steps run eagerly: compile without run_eagerly. On a GPU the kernels are missing where "
            "CUPTI is not installed or this user may not profile: see the warnings that TensorFlow has printed."
        )
    devices = {(part.name, replica): device for part in parts for replica, device in enumerate(part.devices)}
    times = [
        PartTimes(
            name, replica, device, *(length(union(spans.get((name, replica, way), ()))) / num_steps for way in (0, 1))
        )
        for (name, replica), device in devices.items()
    ]
    rows = len(tf.nest.flatten(given)[0]) // (model.distribute_strategy.num_replicas_in_sync * micro_batches)
    transfers = [_transfer(h, max(1, rows), micro_batches) for h in trace.handovers]
    return Timeline(num_steps, seconds, micro_batches, _num_busy(spans, devices), tuple(times), tuple(transfers))


def _spans_of_parts(spans: Iterable[tuple[str, float, float]], trace: Trace) -> dict[tuple[str, int, int], list[Span]]:
    """Spans by part, replica, and 0 for the way forward or 1 for the way back."""
    scopes = trace.scopes
    found: dict[tuple[str, int, int], list[Span]] = {}
    known: dict[str, tuple[str, int, int] | None] = {}
    for name, begin, end in spans:
        if name not in known:
            known[name] = part_of_op(name, scopes)
        part = known[name]
        if part is not None:
            found.setdefault(part, []).append((begin, end))
    return found


def _num_busy(spans: dict[tuple[str, int, int], list[Span]], devices: dict[tuple[str, int], str]) -> float:
    by_replica: dict[int, dict[str, list[Span]]] = {}
    for (part, replica, _), own in spans.items():
        by_replica.setdefault(replica, {}).setdefault(devices[part, replica], []).extend(own)
    busy = math.fsum(length(union(own)) for of in by_replica.values() for own in of.values())
    any_busy = math.fsum(length(union([s for own in of.values() for s in own])) for of in by_replica.values())
    return busy / any_busy if any_busy else 0.0


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap, in order.

    >>> union([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Add up how long spans are that do not overlap."""
    return math.fsum(end - begin for begin, end in spans)


def _transfer(handover: Handover, rows: int, micro_batches: int) -> Transfer:
    """Copy as much as a part is handed for a micro-batch, there and back."""
    num_bytes = sum(
        dtype.size * int(np.prod([rows if d is None else d for d in shape])) for shape, dtype in handover.specs
    )
    seconds = min(_copy_seconds(num_bytes, handover.source, handover.target) for _ in range(5))
    return Transfer(
        handover.part, handover.source, handover.target, num_bytes * micro_batches, 2 * micro_batches * seconds
    )


def _copy_seconds(num_bytes: int, source: str, target: str) -> float:
    with tf.device(source):
        value = tf.zeros([max(1, num_bytes // 4)])
    began = time.perf_counter()
    with tf.device(target):
        tf.identity(value)
    if "GPU" in source + target:
        tf.test.experimental.sync_devices()
    return time.perf_counter() - began
