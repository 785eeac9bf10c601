"""Find the parts of Keras' TensorFlow backend, which change place from one release of Keras to the next; and GPUs."""

from __future__ import annotations

import tensorflow as tf
from keras.src import backend

__all__ = ["nn", "numpy", "random", "global_state", "masking", "in_symbolic_scope", "has_gpus"]

_ops = getattr(backend, "ops", backend)  # keras/src/backend/tensorflow/ops, from Keras 3.16 on
nn = _ops.nn
numpy = _ops.numpy
random = backend.random
global_state = backend.common.global_state
masking = backend.common.masking
in_symbolic_scope = backend.in_symbolic_scope


def has_gpus() -> bool:
    """Whether TensorFlow uses GPUs here."""
    return bool(tf.config.list_logical_devices("GPU"))
