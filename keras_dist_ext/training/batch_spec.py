"""Describe batches of any number of rows."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.strategies import spec_of_replica
from keras_dist_ext.aliases import Array, SpecNest, StepData, TensorNest
from keras_dist_ext.errors import DataError

__all__ = ["any_number_of_rows", "given_spec", "has_static_rows", "rows_of_one", "specs_of_arrays"]

_HasShape: TypeAlias = "tf.Tensor | tf.TypeSpec | Array"


def any_number_of_rows(spec: _HasShape | None) -> tf.TypeSpec | None:
    """Return a spec like that of a tensor, or like that of a sparse or a ragged one, with an unknown first dimension.

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
    return _like(spec, shape)


def given_spec(spec: tf.TypeSpec) -> tf.TypeSpec | None:
    """Return the spec of what a replica gets of a dataset's component; None where that is None.

    Raises:
        DataError: it is a dataset itself.
    """
    if isinstance(spec, tf.data.DatasetSpec):
        raise DataError(
            "The elements of the dataset are datasets, as window() makes them, and no tensors. Make batches of them: "
            "`data.flat_map(lambda window: window.batch(size))`."
        )
    spec = spec_of_replica(spec)
    is_none = isinstance(spec, tf.OptionalSpec) or not hasattr(spec, "shape")
    return None if is_none else spec


def has_static_rows(spec: SpecNest) -> bool:
    """Whether batches of a spec have as many rows each, so that this is known where a step is traced."""
    shapes = [tf.TensorShape(leaf.shape) for leaf in tree.flatten(spec) if leaf is not None]
    return all(shape.rank is not None and (shape.rank == 0 or shape[0] is not None) for shape in shapes)


def _like(spec: _HasShape, shape: tf.TensorShape) -> tf.TypeSpec:
    """Return the spec of another shape."""
    if isinstance(spec, (tf.SparseTensor, tf.RaggedTensor)):
        spec = tf.type_spec_from_value(spec)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, tf.as_dtype(spec.dtype))


def rows_of_one(spec: _HasShape | None, num_replicas: int) -> tf.TypeSpec | None:
    """Return the spec of the most rows that one of so many replicas gets of a tensor with this spec."""
    if spec is None:
        return None
    shape = tf.TensorShape(spec.shape)
    if not shape.rank or shape[0] is None or num_replicas == 1:
        return _like(spec, shape)
    return _like(spec, tf.TensorShape([-(-shape[0] // num_replicas)]).concatenate(shape[1:]))


def specs_of_arrays(batch: StepData) -> tuple[SpecNest, SpecNest]:
    """Return the specs of arrays of any number of rows, and those of just these arrays."""
    given = tree.map_structure(_with_shape, batch)
    return tree.map_structure(any_number_of_rows, given), tree.map_structure(lambda leaf: rows_of_one(leaf, 1), given)


def _with_shape(value: TensorNest) -> TensorNest:
    return value if value is None or hasattr(value, "shape") else np.asarray(value)
