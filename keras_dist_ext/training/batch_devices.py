"""Place the batches of a training loop: next to their iterator until they are needed, and on the GPU before their step.

TensorFlow places ops without a device on a GPU if it can (tensorflow/core/common_runtime/placer.cc), also the Identity
of each loop variable and the `and` in a loop's condition. So a batch that was read ahead would be copied to the GPU and
back in each step, and each step would wait until the GPU has finished the one before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext._keras.tracing import return_in_place
from keras_dist_ext.aliases import SpecNest, StepData

__all__ = ["BatchDevices", "accelerators", "device_of_iterator"]


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


class BatchDevices:
    """The devices on which the batches of an iterator are.

    Args:
        data: the device of the iterator; None places nothing.
        ahead: the device to which batches are sent one step ahead, if they are on the host; None sends none ahead.
    """

    def __init__(self, data: str | None = None, ahead: str | None = None) -> None:
        self._data = data
        self._ahead = None if data is None or _is_gpu(data) else ahead

    def beside_data(self, optional: tf.experimental.Optional) -> tf.experimental.Optional:
        """Return an optional that is kept on the iterator's device, and so are the ops on it."""
        if self._data is None:
            return optional
        with tf.device(self._data):
            return tf.nest.map_structure(tf.identity, optional, expand_composites=True)

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
        if sum(map(_num_bytes, leaves)) < LEAST_BYTES:
            return BatchesAhead()
        return _SentAhead(spec, self._data, self._ahead)


LEAST_BYTES = 64 * 1024
"""Smaller batches are not sent ahead. On one H200 a step on 1 KB took 467 us if sent ahead, and 384 us if not; one on
3 MB 1184 and 1578 us (benchmarks/results/2026-11-27-h200.md)."""
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
    """

    shapes: Sequence[tf.TensorShape] = ()

    def first(self, pull: Callable[[], StepData]) -> list[tf.Tensor]:
        """Return the loop variables for the first step, its ``carried``."""
        return []

    def following(self, is_wanted: Callable[[], tf.Tensor], pull: Callable[[], StepData]) -> list[tf.Tensor]:
        """Return the loop variables for the next step, if there is one."""
        return []

    def batch(self, carried: Sequence[tf.Tensor], pull: Callable[[], StepData]) -> StepData:
        """Return the batch of a step."""
        return pull()


class _SentAhead(BatchesAhead):
    """Batches that are sent to a device one step ahead, while it computes.

    Their tensors are loop variables. Integers and strings stay on the host: TensorFlow keeps int32 there, and ops on
    strings may have no kernel for a GPU. A missing leaf, which Keras writes as an optional, is None.
    """

    def __init__(self, spec: SpecNest, data: str, device: str) -> None:
        self._spec = spec
        self._specs = [leaf for leaf in tf.nest.flatten(spec) if isinstance(leaf, tf.TensorSpec)]
        self._data = data
        self._device = device
        self.shapes = [leaf.shape for leaf in self._specs]

    def first(self, pull: Callable[[], StepData]) -> list[tf.Tensor]:
        return self._sent(self._leaves(pull()))

    def following(self, is_wanted: Callable[[], tf.Tensor], pull: Callable[[], StepData]) -> list[tf.Tensor]:
        def pulled() -> list[tf.Tensor]:
            return self._kept(self._leaves(pull()))

        def nothing() -> list[tf.Tensor]:
            return self._kept([tf.zeros([size or 0 for size in leaf.shape], leaf.dtype) for leaf in self._specs])

        with tf.device(self._data):
            leaves = tf.cond(is_wanted(), pulled, nothing)
        return self._sent(leaves)

    def batch(self, carried: Sequence[tf.Tensor], pull: Callable[[], StepData]) -> StepData:
        leaves = iter(carried)

        def leaf_of(spec: tf.TypeSpec) -> tf.Tensor | None:
            if not isinstance(spec, tf.TensorSpec):
                return None
            leaf = next(leaves)
            leaf.set_shape(spec.shape)
            return leaf

        return tf.nest.map_structure(leaf_of, self._spec)

    def _leaves(self, batch: StepData) -> list[tf.Tensor]:
        pairs = zip(tf.nest.flatten(self._spec), tf.nest.flatten(batch), strict=True)
        return [leaf for spec, leaf in pairs if isinstance(spec, tf.TensorSpec)]

    def _kept(self, leaves: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return leaves on the iterator's device, out of a branch, whose graph does not inherit a device."""
        with tf.device(self._data):
            kept = [tf.identity(leaf) for leaf in leaves]
        return_in_place()
        return kept

    def _sent(self, leaves: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        sent = []
        for leaf in leaves:
            with tf.device(self._device if _is_computed_with(leaf.dtype) else self._data):
                sent.append(tf.identity(leaf))
        return sent
