"""Tell whether a loss is a mean or a sum over the rows of a batch, from the graph that computes it.

A layer's ``add_loss`` gives a scalar and does not say how it was reduced. One device would add it as it is; with the
batch split over replicas, means must be averaged and sums added. The degree of a scalar is the power of the number of
rows with which it grows: 0 for a mean or a value of weights alone, 1 for a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["degree_in_rows"]

_SAME = {
    "Abs", "Cast", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "Neg", "PreventGradient", "Relu",
    "Reshape", "Squeeze", "StopGradient", "Transpose",
}  # fmt: skip
_SUMS = {"Add", "AddN", "AddV2", "ConcatV2", "Maximum", "Minimum", "Pack", "SelectV2", "Sub", "Where"}
_PRODUCTS = {"Mul", "MulNoNan"}
_QUOTIENTS = {"Div", "DivNoNan", "FloorDiv", "RealDiv"}


def degree_in_rows(value: tf.Tensor) -> Fraction:
    """Return the power of the number of rows with which ``value`` grows when its batch is repeated.

    Args:
        value: a tensor of a graph in which the first dimension of the batch, and of it only, is unknown.

    Returns:
        0 where nothing can be told, so that an unknown value counts as a mean.
    """
    return _degree(value, {})


def _degree(value: Any, known: dict[int, Fraction]) -> Fraction:
    if id(value) not in known:
        known[id(value)] = Fraction(0)  # a cycle (a loop in the graph) says nothing
        known[id(value)] = _degree_of_op(value, known)
    return known[id(value)]


def _degree_of_op(value: tf.Tensor, known: dict[int, Fraction]) -> Fraction:
    if _has_rows(value):
        return Fraction(0)  # one value a row: more rows do not change it
    op = value.op
    inputs = [i for i in op.inputs if i.dtype != tf.resource]
    if op.type in ("Sum", "Mean", "Prod", "Max", "Min"):
        inner = _degree(inputs[0], known)
        if op.type == "Prod" and inputs[0].op.type == "Shape" and _has_rows(inputs[0].op.inputs[0]):
            return Fraction(1)
        return inner + (1 if op.type == "Sum" and _has_rows(inputs[0]) and _reduces_rows(op) else 0)
    if op.type == "Size":
        return Fraction(int(_has_rows(inputs[0])))
    if op.type == "StridedSlice" and inputs[0].op.type == "Shape":
        return Fraction(int(_has_rows(inputs[0].op.inputs[0]) and _constant(inputs[1]) == [0]))
    if op.type in _SAME:
        return _degree(inputs[0], known)
    if op.type in _SUMS:
        return max((_degree(i, known) for i in inputs), default=Fraction(0))
    if op.type in _PRODUCTS:
        return sum((_degree(i, known) for i in inputs), Fraction(0))
    if op.type in _QUOTIENTS:
        return _degree(inputs[0], known) - _degree(inputs[1], known)
    if op.type == "Square":
        return 2 * _degree(inputs[0], known)
    if op.type == "Sqrt":
        return _degree(inputs[0], known) / 2
    if op.type == "L2Loss":
        return Fraction(int(_has_rows(inputs[0])))
    if op.type in ("MatMul", "BatchMatMulV2", "Einsum"):
        contracted = any(None in i.shape.as_list() for i in inputs if i.shape.rank is not None)
        return sum((_degree(i, known) for i in inputs), Fraction(0)) + int(contracted and _is_static(value))
    return Fraction(0)


def _has_rows(value: tf.Tensor) -> bool:
    return value.shape.rank is not None and value.shape.rank > 0 and value.shape[0] is None


def _is_static(value: tf.Tensor) -> bool:
    return value.shape.rank is not None and None not in value.shape.as_list()


def _reduces_rows(op: Any) -> bool:
    axes = _constant(op.inputs[1])
    rank = op.inputs[0].shape.rank
    return axes is None or any(axis % rank == 0 for axis in axes) if rank else False


def _constant(value: tf.Tensor) -> Sequence[int] | None:
    constant = tf.get_static_value(value)
    return None if constant is None else [int(v) for v in np.ravel(constant)]
