"""Measure how long a CPU takes for convolutions whose channels come first, and for the same with channels last."""

from __future__ import annotations

import math
import time

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers, own_variables
from keras_dist_ext.diagnosis.doctor.dtype_speed import num_positions
from keras_dist_ext.diagnosis.doctor.parts import Layout

__all__ = ["measure_layout"]

_ROUNDS = 5
_EXAMPLES, _MOST_PLACES = 16, 32  # of a side of an image: what differs shows on small ones, too


def measure_layout(model: keras.Model, device: str) -> Layout | None:
    """Time the largest convolution of the model whose channels come first; None where there is none, or no CPU.

    Args:
        model: a built model.
        device: of a replica, such as "CPU:0".
    """
    sizes = {layer: _size(layer) for layer in flat_layers(model)}
    first = [layer for layer in sizes if isinstance(layer, keras.layers.Conv2D) and layer.built]
    first = [layer for layer in first if layer.data_format == "channels_first" and layer.groups == 1]
    largest = max(first, key=lambda layer: sizes[layer], default=None)
    if largest is None or not device.startswith("CPU"):
        return None
    return Layout(
        largest.name,
        device,
        _seconds(largest, device, "channels_first"),
        _seconds(largest, device, "channels_last"),
        sum(sizes[layer] for layer in first) / max(1, sum(sizes.values())),
    )


def _size(layer: keras.Layer) -> int:
    """Return about how many products a layer makes of an example."""
    weights = sum(math.prod(variable.shape) for variable in own_variables(layer) if variable.trainable)
    return int(weights * num_positions(layer))


def _seconds(layer: keras.layers.Conv2D, device: str, data_format: str) -> float:
    """Return the least seconds of some rounds of a convolution like a layer's, with its gradients."""
    places = min(_MOST_PLACES, max(max(layer.kernel_size), math.isqrt(num_positions(layer))))
    channels = int(layer.kernel.shape[-2])
    sides = [places, places]
    shape = [_EXAMPLES, channels, *sides] if data_format == "channels_first" else [_EXAMPLES, *sides, channels]

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def work(x: tf.Tensor, kernel: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            value = keras.ops.conv(x, kernel, 1, "same", data_format=data_format)
        return [tf.reduce_max(gradient) for gradient in tape.gradient(value, [x, kernel])]

    with tf.device(device):
        x, kernel = tf.ones(shape), tf.ones(layer.kernel.shape)
        work(x, kernel)
        taken = []
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            for gradient in work(x, kernel):
                gradient.numpy()
            taken.append(time.perf_counter() - begin)
    return min(taken)
