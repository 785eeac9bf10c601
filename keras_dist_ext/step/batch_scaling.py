"""Find out from the graph that computes a loss whether it is a mean or a sum over the rows of a batch.

A scalar, such as one given to ``add_loss``, does not say how it was reduced. On one device it is used as it is; with
the batch split over replicas, means must be averaged and sums added. The exponent of a scalar in the batch size says
which it is: it is 0 for a mean, or a value computed from weights only, and 1 for a sum. Where ops do not say what they
do to the rows (loops, branches, functions, sums over segments), values have to be measured (``measured_exponents``).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import tensorflow as tf

__all__ = ["Reading", "additive_terms", "batch_exponent", "read_exponent"]

_SAME = {
    "Abs", "Cast", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "Neg", "PreventGradient", "Relu",
    "Reshape", "Snapshot", "Squeeze", "StopGradient", "Transpose",
}  # fmt: skip
_PARTS = {"GatherV2", "Slice", "StridedSlice", "Unpack"}
_SUMS = {"Add", "AddN", "AddV2", "ConcatV2", "Maximum", "Minimum", "Pack", "SelectV2", "Sub", "Where"}
_SPREAD = {"MirrorPad", "Pad", "PadV2", "Split", "SplitV", "Tile"}
_REDUCTIONS = {"Max", "Mean", "Min", "Sum"}
_PRODUCTS = {"Mul", "MulNoNan"}
_MATRIX_PRODUCTS = {"BatchMatMulV2", "Einsum", "MatMul"}
_BILINEAR = _MATRIX_PRODUCTS | {  # in their last two inputs
    "Conv2D", "Conv2DBackpropInput", "Conv3D", "Conv3DBackpropInputV2", "DepthwiseConv2dNative",
}  # fmt: skip
_HOMOGENEOUS = {
    "AvgPool", "AvgPool3D", "BroadcastTo", "ComplexAbs", "Cumsum", "DepthToSpace", "ExtractImagePatches", "FFT",
    "GatherNd", "IFFT", "IRFFT", "Imag", "LeakyRelu", "MatrixBandPart", "MatrixDiagPartV3", "MaxPool", "MaxPool3D",
    "RFFT", "Real", "ResizeBilinear", "ResizeNearestNeighbor", "ReverseV2", "Roll", "SpaceToDepth", "TopKV2",
}  # fmt: skip
"""Ops that give k times as much for k > 0 times their first input."""
_QUOTIENTS = {"Div", "DivNoNan", "FloorDiv", "RealDiv"}
_POWERS = {
    name: Fraction(power)
    for name, power in {"Square": 2.0, "Sqrt": 0.5, "Rsqrt": -0.5, "Inv": -1.0, "Reciprocal": -1.0}.items()
}
_DEEPEST = 50  # ops from a row on back: more of them would be too many calls in each other for Python


def batch_exponent(value: tf.Tensor, means: Container[int] = ()) -> Fraction:
    """Return the exponent of ``value`` in the batch size: with the batch repeated k times, it is k**exponent times it.

    Args:
        value: a tensor of a graph in which the first dimension of the batch, and of it only, is unknown.
        means: ids of tensors that are known to be means.

    Returns:
        0 where the graph does not tell, so that an unknown value counts as a mean.
    """
    return read_exponent(value, means).exponent or Fraction(0)


class Reading(NamedTuple):
    """What a graph tells of a scalar."""

    exponent: Fraction | None  # in the batch size; None where it does not tell
    unknown: list[tf.Tensor]  # those that the scalar is computed from, and of which it does not tell


def read_exponent(
    value: tf.Tensor, means: Container[int] = (), measured: Mapping[int, Fraction] | None = None
) -> Reading:
    """Read the exponent of ``value`` in the batch size.

    Args:
        value: see ``batch_exponent``.
        means: ...
        measured: exponents of tensors of which the graph does not tell, by id.
    """
    reader = _Reader(means, measured or {})
    exponent = reader.exponent(value)
    return Reading(exponent, [] if exponent is not None else reader.unknown)


def additive_terms(value: tf.Tensor, means: Container[int] = ()) -> Iterator[tuple[tf.Tensor, int]]:
    """Yield the terms that a scalar is the sum of, each with its sign, as far as the graph tells.

    Args:
        value: a scalar.
        means: ids of tensors that are not split.
    """
    parts = [] if id(value) in means else _parts(value.op)
    if not parts or any(part.shape.rank != 0 for part, _ in parts):
        yield value, 1
        return
    for part, sign in parts:
        yield from ((term, sign * inner) for term, inner in additive_terms(part, means))


def _parts(op: tf.Operation) -> list[tuple[tf.Tensor, int]]:
    if op.type == "Sum":
        inner = op.inputs[0]
        return [(part, 1) for part in (inner.op.inputs if inner.op.type == "Pack" else [inner])]
    signs = {"Neg": [-1], "Sub": [1, -1]}.get(op.type, [1] * len(op.inputs))
    is_sum = op.type in ("Add", "AddN", "AddV2", "Identity", "Neg", "Sub")
    return list(zip(op.inputs, signs, strict=True)) if is_sum else []


class _Reader:
    """Reads exponents from a graph; None is an unknown one.

    Attributes:
        unknown: tensors with an unknown one, of shapes that do not depend on the rows.
    """

    def __init__(self, means: Container[int], measured: Mapping[int, Fraction]) -> None:
        self.unknown: list[tf.Tensor] = []
        self._means = means
        self._measured = measured
        self._known: dict[int, Fraction | None] = {}
        self._depth = 0

    def exponent(self, value: tf.Tensor) -> Fraction | None:
        if id(value) in self._means:
            return Fraction(0)
        if id(value) not in self._known:
            self._known[id(value)] = Fraction(0)  # a cycle (a loop in the graph) says nothing
            exponent = self._of_rows(value) if _has_rows(value) else self._of_op(value)
            if exponent is None and _is_static(value) and (value.dtype.is_floating or value.dtype.is_integer):
                exponent = self._measured.get(id(value))
                if exponent is None:
                    self.unknown.append(value)
            self._known[id(value)] = exponent
        return self._known[id(value)]

    def _of_rows(self, value: tf.Tensor) -> Fraction | None:
        """One value a row: more rows do not change it, but for a factor that they share."""
        self._depth += 1
        try:
            return self._factor(value.op) if self._depth <= _DEEPEST else Fraction(0)
        finally:
            self._depth -= 1

    def _factor(self, op: tf.Operation) -> Fraction | None:
        """The exponent of a factor that all rows share, as far as an op of rows hands it on."""
        if op.type in _PRODUCTS | _QUOTIENTS:
            return self._product(op)
        if op.type == "MatMul" and _sums_unknown_dimension(op):
            return None  # of unknown size is what is summed over and what is left: one of them are the rows
        if op.type in _BILINEAR:
            return self._product(op)
        given = op.inputs[1 if op.type == "Split" else 0] if op.inputs else None
        if op.type in _SAME and self.exponent(given) is None:
            return None
        if op.type in _SAME | _PARTS | _SPREAD | _REDUCTIONS | _HOMOGENEOUS and _has_rows(given):
            return self.exponent(given)
        if op.type in _POWERS and _has_rows(given):
            inner = self.exponent(given)
            return inner if inner is None else inner * _POWERS[op.type]
        if op.type in _SUMS | {"SquaredDifference"}:
            found = [self.exponent(i) for i in op.inputs if i.dtype.is_floating and not _is_zero(i)]
            highest = max((one for one in found if one is not None), default=Fraction(0))
            return 2 * highest if op.type == "SquaredDifference" else highest
        return Fraction(0)

    def _of_op(self, value: tf.Tensor) -> Fraction | None:
        op = value.op
        inputs = [i for i in op.inputs if i.dtype != tf.resource]
        entries = self._entries(value)
        if entries is not None:
            return entries[0] if value.shape.rank == 0 else None
        if op.type in ("Sum", "Mean", "Prod", "Max", "Min"):
            of_shape = self._entries(inputs[0])
            if of_shape:
                return sum(of_shape, Fraction(0)) if op.type == "Prod" else max(of_shape)
            inner = self.exponent(inputs[0])
            if op.type == "Sum" and not _has_rows(inputs[0]) and not _is_static(inputs[0]):
                return None  # the rows may be another dimension
            is_sum = op.type == "Sum" and _has_rows(inputs[0]) and _reduces_rows(op)
            return inner if inner is None else inner + int(is_sum)
        if op.type == "Size":
            return Fraction(int(_has_rows(inputs[0])))
        if op.type in _SAME or (op.type in _PARTS and _is_static(inputs[0])):
            return self.exponent(inputs[0])
        if op.type in _SUMS:
            exponents = [self.exponent(i) for i in inputs]
            highest = max((d for d in exponents if d is not None), default=Fraction(0))
            return highest if highest or None not in exponents else None
        if op.type in _PRODUCTS | _QUOTIENTS:
            return self._product(op)
        if op.type in _POWERS:
            inner = self.exponent(inputs[0])
            return inner if inner is None else inner * _POWERS[op.type]
        if op.type == "L2Loss":
            return Fraction(int(_has_rows(inputs[0])))
        if op.type in _MATRIX_PRODUCTS:
            contracted = any(None in i.shape.as_list() for i in inputs if i.shape.rank is not None)
            exponents = [self.exponent(i) for i in inputs]
            known = [exponent for exponent in exponents if exponent is not None]
            is_known = not contracted or _is_static(value)
            return sum(known, Fraction(int(contracted))) if is_known and len(known) == len(exponents) else None
        return Fraction(0) if all(self.exponent(i) == 0 and not _has_rows(i) for i in inputs) else None

    def _product(self, op: tf.Operation) -> Fraction | None:
        one, other = (self.exponent(i) for i in op.inputs[-2:])
        if one is None or other is None:
            return None
        return one - other if op.type in _QUOTIENTS else one + other

    def _entries(self, value: tf.Tensor) -> list[Fraction] | None:
        """The exponents of the entries of a shape, or of one of them; None if the value is neither."""
        op = value.op
        if op.type == "Shape":
            rank = op.inputs[0].shape.rank
            return [Fraction(int(_has_rows(op.inputs[0]) and i == 0)) for i in range(rank)] if rank else None
        if op.type in ("Cast", "Identity"):
            return self._entries(op.inputs[0])
        if op.type not in ("GatherV2", "Slice", "StridedSlice", "Unpack"):
            return None
        entries, numbers = self._entries(op.inputs[0]), [_constant(i) for i in op.inputs[1:]]
        if entries is None or not all(numbers):
            return None
        if op.type == "Unpack":
            return [entries[value.value_index]]
        first = numbers[0] or [0]
        if op.type == "GatherV2":
            return [entries[i] for i in first]
        if op.type == "Slice":
            size = (numbers[1] or [-1])[0]
            return entries[first[0] : None if size < 0 else first[0] + size]
        if op.get_attr("shrink_axis_mask"):
            return [entries[first[0]]]
        begin = None if op.get_attr("begin_mask") else first[0]
        return entries[begin : None if op.get_attr("end_mask") else (numbers[1] or [0])[0]]


def _has_rows(value: tf.Tensor) -> bool:
    return value.shape.rank is not None and value.shape.rank > 0 and value.shape[0] is None


def _is_zero(value: tf.Tensor) -> bool:
    """Whether a value is a constant zero, which has no size that could grow."""
    return value.op.type == "Const" and not np.any(tf.get_static_value(value))


def _is_static(value: tf.Tensor) -> bool:
    return value.shape.rank is not None and None not in value.shape.as_list()


def _sums_unknown_dimension(matmul: tf.Operation) -> bool:
    one, other = (value.shape for value in matmul.inputs)
    summed = one[0 if matmul.get_attr("transpose_a") else 1], other[1 if matmul.get_attr("transpose_b") else 0]
    return summed == (None, None)


def _reduces_rows(op: tf.Operation) -> bool:
    axes = _constant(op.inputs[1])
    rank = op.inputs[0].shape.rank
    return axes is None or any(axis % rank == 0 for axis in axes) if rank else False


def _constant(value: tf.Tensor) -> Sequence[int] | None:
    constant = tf.get_static_value(value)
    return None if constant is None else [int(v) for v in np.ravel(constant)]
