"""Read the clock when a batch is available, before anything is computed from it."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext.aliases import StepData, TensorNest

__all__ = ["after"]


def after(reading: tf.Tensor, batch: StepData) -> StepData:
    """Return the batch, from which nothing is computed before the clock has been read."""
    with tf.control_dependencies([reading]):
        return tf.nest.map_structure(_same, batch, expand_composites=True)


def _same(leaf: TensorNest) -> TensorNest:
    return tf.identity(leaf) if tf.is_tensor(leaf) else leaf
