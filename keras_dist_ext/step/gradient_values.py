"""The values of gradients, whether they are dense or ``tf.IndexedSlices``."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext.aliases import Gradient

__all__ = ["copied", "dense_values", "parts", "zero_unless"]


def copied(gradient: Gradient) -> Gradient:
    """Return the same value as a new tensor."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), tf.identity(gradient.indices), gradient.dense_shape)
    return tf.identity(gradient)


def parts(gradient: Gradient) -> tuple[tf.Tensor, ...]:
    """Return the tensors that a gradient is made of."""
    return (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else (gradient,)


def dense_values(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """Return the numbers of gradients: of sparse ones, those of the rows that they have."""
    return [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]


def zero_unless(condition: tf.Tensor | None, gradients: list[Gradient]) -> list[Gradient]:
    """Replace gradients by zeros where a condition does not hold; None holds always."""
    if condition is None:
        return gradients
    return [
        tf.IndexedSlices(zero_unless(condition, [g.values])[0], g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else tf.where(condition, g, tf.zeros_like(g))
        for g in gradients
    ]
