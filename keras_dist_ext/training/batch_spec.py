"""Describe batches of any number of rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist_ext.errors import DataError

__all__ = ["any_number_of_rows"]


def any_number_of_rows(spec: Any) -> Any:
    """Return a dense ``TensorSpec`` like ``spec`` with an unknown first dimension.

    Raises:
        DataError: it does not say how many dimensions there are.
    """
    if spec is None:
        return None
    shape = tf.TensorShape(spec.shape)
    if shape.rank is None:
        raise DataError(
            f"The dataset gives a tensor of {tf.as_dtype(spec.dtype).name} whose number of dimensions is unknown, so "
            "that no model can be built for it, nor rows be cut. Say its shape where it is made, as after "
            "tf.py_function: `tf.ensure_shape(tensor, [None, ...])`."
        )
    if shape.rank > 0:
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    return tf.TensorSpec(shape, tf.as_dtype(spec.dtype))
