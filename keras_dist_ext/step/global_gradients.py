"""Turn gradients that no GradientTape has computed into those of the global batch."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext._keras.hooks import current_step
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.step.replica_step import ReplicaStep

__all__ = ["reduce_gradients"]


def reduce_gradients(gradients: TensorNest) -> TensorNest:
    """Return gradients of the global batch, the same on every replica, from those of a replica's own examples.

    Inside a step (``train_step`` of a ``Model``, the step of a ``TrainLoop``) what ``tf.GradientTape`` returns for
    weights is global already, and stays as it is. This is for what no tape has made: gradients written by hand,
    ``tf.gradients``, means over the examples that are assigned to weights, and a loss or another mean that scales
    gradients, sets a learning rate or decides. It is differentiable, for losses that are computed from several sums or
    means, such as a root or a quotient.

    Outside of a step, and on one replica, nothing is changed.

    Args:
        gradients: a structure of tensors or ``tf.IndexedSlices``, each a mean or a sum over this replica's examples,
            of any shape but without a dimension of examples; None may stand for what has none.

    Returns:
        The same structure: the mean, or the sum, over the examples of all replicas.
    """
    step = current_step()
    if not isinstance(step, ReplicaStep):
        return gradients
    flat = tf.nest.flatten(gradients)
    places = [i for i, gradient in enumerate(flat) if gradient is not None]
    reduced = step.gradients.reduce([flat[i] for i in places])
    for place, gradient in zip(places, reduced, strict=True):
        flat[place] = gradient
    return tf.nest.pack_sequence_as(gradients, flat)
