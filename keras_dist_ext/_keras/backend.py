"""Find the parts of Keras' TensorFlow backend, which change place from one release of Keras to the next."""

from __future__ import annotations

from keras.src import backend

__all__ = ["nn", "numpy", "random", "global_state", "masking"]

_ops = getattr(backend, "ops", backend)  # keras/src/backend/tensorflow/ops, from Keras 3.16 on
nn = _ops.nn
numpy = _ops.numpy
random = backend.random
global_state = backend.common.global_state
masking = backend.common.masking
