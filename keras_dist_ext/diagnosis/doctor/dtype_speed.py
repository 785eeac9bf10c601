"""Measure how long a device takes in one dtype for what it does in float32."""

from __future__ import annotations

import math
import time

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers, own_variables
from keras_dist_ext.diagnosis.doctor.examination import DtypeSpeed

__all__ = ["measure_dtype", "num_positions"]

_ROUNDS = 5
_SECONDS = 0.2  # that the rounds of a dtype may take


def measure_dtype(model: keras.Model, device: str) -> DtypeSpeed | None:
    """Time the dtype that most of a model is computed in; None where that is float32.

    What is timed is a convolution with its gradients, where the model has some, or else a matrix product.

    Args:
        model: a built model.
        device: of a replica, such as "CPU:0".
    """
    sizes: dict[str, int] = {}
    for layer in flat_layers(model):
        size = sum(math.prod(variable.shape) for variable in own_variables(layer) if variable.trainable)
        sizes[layer.compute_dtype] = sizes.get(layer.compute_dtype, 0) + size * num_positions(layer)
    dtype = max(sizes, key=lambda name: sizes[name], default="float32")
    if dtype in ("float32", None) or not tf.as_dtype(dtype).is_floating:
        return None
    convolves = any(isinstance(layer, _CONVOLUTIONS) for layer in flat_layers(model))
    return DtypeSpeed(
        dtype=dtype,
        device=device,
        operation="convolution" if convolves else "matrix product",
        seconds=_seconds(dtype, device, convolves=convolves),
        float32_seconds=_seconds("float32", device, convolves=convolves),
        share=sizes[dtype] / sum(sizes.values()),
    )


_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


def num_positions(layer: keras.Layer) -> int:
    """Return how often a layer multiplies by its weights for an example, as at each place of an image; 1 if unknown."""
    try:
        shape = tuple(layer.output.shape)
        places = shape[2:] if getattr(layer, "data_format", "") == "channels_first" else shape[1:-1]
    except (AttributeError, ValueError):  # it was called in no graph of layers, or gives several tensors
        return 1
    return math.prod(place or 1 for place in places)


def _seconds(dtype: str, device: str, *, convolves: bool) -> float:
    """Return the least seconds of some rounds, after one that does not count."""
    with tf.device(device):
        x = tf.ones([8, 24, 24, 16] if convolves else [256, 256], dtype)
        kernel = tf.ones([3, 3, 16, 16] if convolves else [256, 256], dtype)

        def work() -> float:
            begin = time.perf_counter()
            with tf.GradientTape() as tape:
                tape.watch([x, kernel])
                value = tf.nn.conv2d(x, kernel, 1, "SAME") if convolves else x @ kernel
            for gradient in tape.gradient(value, [x, kernel]):
                tf.reduce_max(gradient).numpy()  # the device has to be done
            return time.perf_counter() - begin

        taken, least = work(), float("inf")
        for _ in range(_ROUNDS):
            if taken > _SECONDS and least < float("inf"):
                break
            least = min(least, work())
            taken += least
    return least
