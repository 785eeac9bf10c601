"""Weigh and mask losses as Keras does, and leave parts of a step out."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import tensorflow as tf
from keras.src.losses import loss as loss_module
from keras.src.trainers import compile_utils

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.interception import patched
from keras_dist_ext.aliases import DType, TensorNest

__all__ = ["apply_mask", "without_parts"]


def apply_mask(sample_weight: TensorNest, mask: TensorNest, dtype: DType, reduction: str | None) -> TensorNest:
    """Merge a mask into sample weights as keras/src/losses/loss.py does."""
    return loss_module.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


@contextlib.contextmanager
def without_parts(parts: Collection[str]) -> Iterator[None]:
    """Have what all threads trace go without some parts of a step; what was traced before stays as it is.

    Args:
        parts: "weights" and "masks" that losses take (keras/src/losses/loss.py, ``reduce_weighted_values``), "moments"
            that BatchNormalization takes of a batch (batch_normalization.py, ``_moments``; its moving statistics
            instead), the "loss" of ``compile`` (trainers/compile_utils.py; the mean square of the outputs instead).
    """
    reduce_values = loss_module.reduce_weighted_values

    def reduce_all_alike(
        values: tf.Tensor, sample_weight: TensorNest = None, mask: TensorNest = None, *args: object, **kwargs: object
    ) -> tf.Tensor:
        kept = (None if "weights" in parts else sample_weight, None if "masks" in parts else mask)
        return reduce_values(values, *kept, *args, **kwargs)

    def moving(layer: keras.Layer, inputs: TensorNest, mask: TensorNest) -> tuple[tf.Tensor, tf.Tensor]:
        return tuple(tf.cast(v.value, inputs.dtype) for v in (layer.moving_mean, layer.moving_variance))

    def mean_square(_: object, y_true: TensorNest, y_pred: TensorNest, sample_weight: TensorNest = None) -> tf.Tensor:
        outputs = [tf.cast(y, tf.float32) for y in tree.flatten(y_pred) if tf.as_dtype(y.dtype).is_floating]
        means = [tf.math.divide_no_nan(tf.reduce_sum(y * y), tf.cast(tf.size(y), tf.float32)) for y in outputs]
        return loss_module.scale_loss_for_distribution(tf.add_n(means))

    with contextlib.ExitStack() as stack:
        if {"weights", "masks"} & set(parts):
            stack.enter_context(patched(loss_module, "reduce_weighted_values", reduce_all_alike))
        if "moments" in parts:
            stack.enter_context(patched(keras.layers.BatchNormalization, "_moments", moving))
        if "loss" in parts:
            stack.enter_context(patched(compile_utils.CompileLoss, "__call__", mean_square))
        yield
