"""Have a batch wait until the clock was read that says when it was there."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext.aliases import StepData, TensorNest

__all__ = ["after"]


def after(there: tf.Tensor, batch: StepData) -> StepData:
    """Return the batch, of which nothing is computed before the clock was read that says when it was there."""
    with tf.control_dependencies([there]):
        return tf.nest.map_structure(_same, batch, expand_composites=True)


def _same(leaf: TensorNest) -> TensorNest:
    return tf.identity(leaf) if tf.is_tensor(leaf) else leaf
