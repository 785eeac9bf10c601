"""Place the batches of a training loop: next to their iterator until they are needed, and on GPUs before their step.

TensorFlow places ops without a device on a GPU if it can (tensorflow/core/common_runtime/placer.cc), also the Identity
of each loop variable and the `and` in a loop's condition. So a batch that was read ahead would be copied to the GPU and
back in each step, and each step would wait until the GPU has finished the one before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_dist_ext._keras.strategies import first_replica, is_default_strategy, num_local_replicas, regroup
from keras_dist_ext._keras.tracing import return_in_place
from keras_dist_ext.aliases import SpecNest, StepData
from keras_dist_ext.data.split import bounds_of_replica, num_rows, replica_rows
from keras_dist_ext.training.batch_split import Dealt

__all__ = ["BatchDevices", "BatchTargets", "accelerators", "device_of_iterator"]


def accelerators(strategy: tf.distribute.Strategy) -> list[str]:
    """Return the GPUs of this worker's replicas; without a strategy, the GPU on which TensorFlow places ops, if any."""
    with tf.init_scope():
        used = [tf.zeros([]).device] if is_default_strategy(strategy) else strategy.extended.worker_devices
    return [device for device in used if _is_gpu(device)]


def _is_gpu(device: str) -> bool:
    """Whether a device is a GPU."""
    return bool(tf.DeviceSpec.from_string(device).device_type == "GPU")


def device_of_iterator(iterator: tf.data.Iterator) -> str:
    """Return the device that an iterator gives its batches on."""
    return str(tf.nest.flatten(iterator, expand_composites=True)[0].device)


class BatchTargets(NamedTuple):
    """The GPUs to which a batch is sent.

    Attributes:
        devices: of this worker's replicas.
        first: the number of the first of these replicas.
        num_replicas: over which a batch is split, of all workers; 1 if it goes to the only device as a whole.
    """

    devices: Sequence[str]
    first: int = 0
    num_replicas: int = 1

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy, devices: Sequence[str]) -> BatchTargets | None:
        """Return the targets under a strategy; None where a replica has no GPU.

        Args:
            strategy: that trains.
            devices: its ``accelerators``.
        """
        if len(devices) < num_local_replicas(strategy):
            return None
        return cls(devices, first_replica(strategy), strategy.num_replicas_in_sync)


class BatchDevices:
    """The devices on which the batches of an iterator are.

    Args:
        data: the device of the iterator; None places nothing.
        ahead: where batches are sent one step ahead, if they are on the host; None sends none ahead.
    """

    def __init__(self, data: str | None = None, ahead: BatchTargets | None = None) -> None:
        self._data = data
        self._ahead = None if data is None or _is_gpu(data) else ahead

    def beside_data(self, optional: tf.experimental.Optional) -> tf.experimental.Optional:
        """Return an optional that is kept on the iterator's device, and so are the ops on it."""
        if self._data is None:
            return optional
        with tf.device(self._data):
            return tf.nest.map_structure(tf.identity, optional, expand_composites=True)

    def read_if(self, is_wanted: Callable[[], tf.Tensor], iterator: tf.data.Iterator) -> tf.experimental.Optional:
        """Return the next batch, or none if it is not wanted, and then do not read it."""

        def read() -> tf.experimental.Optional:
            optional = self.beside_data(iterator.get_next_as_optional())
            return_in_place()
            return optional

        def nothing() -> tf.experimental.Optional:
            optional = self.beside_data(tf.experimental.Optional.empty(iterator.element_spec))
            return_in_place()
            return optional

        with tf.device(self._data):
            return self.beside_data(tf.cond(is_wanted(), read, nothing))

    def both(self, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        """Return whether both are true, computed on the host, which reads it without waiting for a GPU."""
        with contextlib.nullcontext() if self._data is None else tf.device("/device:CPU:0"):
            return tf.logical_and(first, second)

    @property
    def are_of_gpu(self) -> bool:
        """Whether the iterator gives its batches on a GPU."""
        return self._data is not None and _is_gpu(self._data)

    def end_trace(self) -> None:
        """Keep the outputs of the function that is traced on their devices; called right before it returns."""
        if self._data is not None:
            return_in_place()

    def sent_ahead(self, spec: SpecNest) -> BatchesAhead:
        """Return what sends batches of a spec ahead, or reads small ones and some types in their step."""
        leaves = tf.nest.flatten(spec)
        if self._ahead is None or self._data is None or not all(map(_can_be_sent, leaves)):
            return BatchesAhead()
        if sum(map(_num_bytes, leaves)) < LEAST_BYTES * self._ahead.num_replicas:
            return BatchesAhead()
        return _SentAhead(spec, self._data, self._ahead)


LEAST_BYTES = 64 * 1024
"""If a device gets less of a batch, it is not sent ahead. On one H200 a step on 1 KB took 467 us if sent ahead, and 384
us if not; one on 3 MB 1184 and 1578 us (benchmarks/results/2026-11-27-h200.md)."""
_USUAL_ROWS = 32  # Keras' default


def _num_bytes(spec: tf.TypeSpec) -> int:
    """Bytes of a leaf that a GPU computes with; unknown rows count as Keras' default batch size."""
    if not isinstance(spec, tf.TensorSpec) or not _is_computed_with(spec.dtype):
        return 0
    rows, *others = spec.shape if spec.shape.rank else (1,)
    return int(spec.dtype.size * (rows or _USUAL_ROWS) * math.prod(size or 1 for size in others))


def _is_computed_with(dtype: tf.DType) -> bool:
    """Whether tensors of a type are sent to a GPU; TensorFlow keeps int32 on the host."""
    return bool(dtype.is_floating or dtype.is_complex or dtype == tf.uint8)


def _can_be_sent(spec: tf.TypeSpec) -> bool:
    """Whether a leaf is a tensor of a type that ``tf.zeros`` knows, or stands for a missing one."""
    if isinstance(spec, tf.TensorSpec):
        kind = spec.dtype
        is_plain = kind.is_floating or kind.is_complex or kind.is_integer or kind in (tf.bool, tf.string)
        return bool(is_plain and spec.shape.rank is not None)
    return isinstance(spec, tf.OptionalSpec) or bool(spec == tf.type_spec_from_value(None))


class BatchesAhead:
    """Batches that are read in their step.

    Attributes:
        shapes: of the loop variables that it needs.
        read_shapes: of those for the next batch, where it is read before it is sent.
        replicas: the devices of replicas that share a batch, of which none may be a step ahead of another.
    """

    shapes: Sequence[tf.TensorShape] = ()
    read_shapes: Sequence[tf.TensorShape] = ()
    replicas: Sequence[str] = ()

    def first(self, pull: Callable[[], StepData]) -> list[tf.Tensor]:
        """Return the loop variables for the first step, its ``carried``."""
        return []

    def following(self, is_wanted: Callable[[], tf.Tensor], pull: Callable[[], StepData]) -> list[tf.Tensor]:
        """Return the loop variables for the next step, if there is one."""
        return []

    def read(self, is_wanted: Callable[[], tf.Tensor], pull: Callable[[], StepData]) -> list[tf.Tensor]:
        """Return the loop variables for a batch that is not sent yet, if it is wanted."""
        return []

    def sent(self, read: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Send a batch that was read."""
        return []

    def batch(self, carried: Sequence[tf.Tensor], pull: Callable[[], StepData]) -> StepData | Dealt:
        """Return the batch of a step."""
        return pull()


class _SentAhead(BatchesAhead):
    """Batches that are sent to the devices of replicas one step ahead, while these compute.

    Their tensors are loop variables, of each replica those of its rows. Integers and strings stay on the host:
    TensorFlow keeps int32 there, and ops on strings may have no kernel for a GPU. A missing leaf, which Keras writes as
    an optional, is None.

    Where replicas share a batch, one more is read ahead, and sent while they compute: it can be read only when they
    were given a whole step, which is after their sums, and that may be late for sending it.
    """

    def __init__(self, spec: SpecNest, data: str, targets: BatchTargets) -> None:
        self._spec = spec
        self._specs = [leaf for leaf in tf.nest.flatten(spec) if isinstance(leaf, tf.TensorSpec)]
        self._data = data
        self._targets = targets
        if targets.num_replicas > 1:
            self.replicas = targets.devices
            self.read_shapes = [leaf.shape for leaf in self._specs]
        known = [leaf.shape[0] for leaf in self._specs if leaf.shape.rank and leaf.shape[0] is not None]
        self._num_rows = known[0] if known else None
        self.shapes = [_of_part(leaf.shape, *part) for part in self._parts() for leaf in self._specs]
        if self._carries_rows:
            self.shapes.append(tf.TensorShape([]))

    def first(self, pull: Callable[[], StepData]) -> list[tf.Tensor]:
        return self.sent(self._leaves(pull()))

    def following(self, is_wanted: Callable[[], tf.Tensor], pull: Callable[[], StepData]) -> list[tf.Tensor]:
        return self.sent(self.read(is_wanted, pull))

    def read(self, is_wanted: Callable[[], tf.Tensor], pull: Callable[[], StepData]) -> list[tf.Tensor]:
        def pulled() -> list[tf.Tensor]:
            return self._kept(self._leaves(pull()))

        def nothing() -> list[tf.Tensor]:
            return self._kept([tf.zeros(self._of_nothing(leaf.shape), leaf.dtype) for leaf in self._specs])

        with tf.device(self._data):
            leaves = tf.cond(is_wanted(), pulled, nothing)
            return [tf.identity(leaf) for leaf in leaves]

    def batch(self, carried: Sequence[tf.Tensor], pull: Callable[[], StepData]) -> StepData | Dealt:
        leaves = iter(carried)
        parts = [self._in_order(self._shaped(leaves, *part)) for part in self._parts()]
        if self._targets.num_replicas == 1:
            return parts[0]
        total = next(leaves) if self._carries_rows else self._num_rows
        return Dealt(tf.nest.map_structure(_regrouped, self._spec, *parts), total, self._targets.num_replicas)

    @property
    def _carries_rows(self) -> bool:
        """Whether the number of rows of a batch that is split is known in its step only."""
        return self._targets.num_replicas > 1 and self._num_rows is None

    def _parts(self) -> list[tuple[int, int]]:
        """The number of each of this worker's replicas, and how many there are of all workers."""
        first, num_replicas = self._targets.first, self._targets.num_replicas
        return [(first + index, num_replicas) for index in range(len(self._targets.devices))]

    def _shaped(self, leaves: Iterable[tf.Tensor], *part: int) -> Iterable[tf.Tensor]:
        for spec, leaf in zip(self._specs, leaves, strict=False):  # the shorter one first: it takes no leaf too many
            leaf.set_shape(_of_part(spec.shape, *part) if part else spec.shape)
            yield leaf

    def _in_order(self, leaves: Iterable[tf.Tensor]) -> StepData:
        """Return leaves as a batch has them."""
        rest = iter(leaves)
        return tf.nest.map_structure(lambda spec: next(rest) if isinstance(spec, tf.TensorSpec) else None, self._spec)

    def _leaves(self, batch: StepData) -> list[tf.Tensor]:
        pairs = zip(tf.nest.flatten(self._spec), tf.nest.flatten(batch), strict=True)
        return [leaf for spec, leaf in pairs if isinstance(spec, tf.TensorSpec)]

    def _of_nothing(self, shape: tf.TensorShape) -> list[int]:
        """Return the shape of a leaf where there is no batch: all have as many rows."""
        rows, *others = shape if shape.rank else (None,)
        size = [self._num_rows or 0 if rows is None else rows, *(size or 0 for size in others)]
        return size if shape.rank else []

    def _kept(self, leaves: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return leaves on the iterator's device, out of a branch, whose graph does not inherit a device."""
        with tf.device(self._data):
            kept = [tf.identity(leaf) for leaf in leaves]
        return_in_place()
        return kept

    def sent(self, read: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device(self._data):
            batch = self._in_order(self._shaped(read))
            parts = [self._leaves(replica_rows(batch, *part)) for part in self._parts()]
            num_global = num_rows(batch)
        sent = []
        for device, part in zip(self._targets.devices, parts, strict=True):
            for leaf in part:
                with tf.device(device if _is_computed_with(leaf.dtype) else self._data):
                    sent.append(tf.identity(leaf))
        return [*sent, tf.identity(num_global)] if self._carries_rows else sent


def _of_part(shape: tf.TensorShape, replica: int, num_replicas: int) -> tf.TensorShape:
    """The shape of a replica's rows."""
    if not shape.rank or shape[0] is None:
        return shape
    start, stop = bounds_of_replica(shape[0], replica, num_replicas)
    return tf.TensorShape([stop - start, *shape[1:]])


def _regrouped(spec: tf.TypeSpec, *values: tf.Tensor | None) -> tf.distribute.DistributedValues | None:
    """What the replicas have of a leaf, or None where it is missing."""
    return regroup(values) if isinstance(spec, tf.TensorSpec) else None
