"""Names for types of values that travel, for signatures.

TensorFlow and Keras ship no type information, so ``tf.Tensor`` is ``Any`` to a type checker, and says to a reader what
is meant. What has no name there, such as a nest of tensors, has one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import os
    import typing
    from typing import IO

    import numpy
    import numpy.typing

__all__ = [
    "Array",
    "BatchFunction",
    "BatchIterator",
    "CompileArgument",
    "Config",
    "DType",
    "FitArgument",
    "FitData",
    "Gradient",
    "JsonObject",
    "JsonValue",
    "Logs",
    "LossNest",
    "MetricNest",
    "Original",
    "Picklable",
    "RayHandle",
    "SavePath",
    "Scores",
    "SpecNest",
    "StepData",
    "TensorNest",
    "TracedFunction",
    "UserFunction",
]

TensorNest: TypeAlias = Any
"""Tensors (dense, ragged or sparse), arrays and variables, or None; or tuples, lists and dictionaries of these, as
``tf.nest`` knows them."""

StepData: TypeAlias = object
"""What a step takes: such a nest of which nothing is asked but its leaves. Those with a first dimension have equally
many rows."""

FitData: TypeAlias = Any
"""Data as ``fit`` takes it: arrays, alone or as (x, y) or (x, y, sample_weight), a tf.data.Dataset, a generator or a
PyDataset."""

FitArgument: TypeAlias = Any
"""An argument of ``fit``, handed on to it."""

UserFunction: TypeAlias = Callable[..., TensorNest]
"""A function of the user's that a step calls, or that is one."""

Original: TypeAlias = Callable[..., TensorNest]
"""A function of Keras or TensorFlow that one of this package replaces, and may call."""

TracedFunction: TypeAlias = Any
"""A ``tf.function``."""

BatchFunction: TypeAlias = Callable[[TensorNest], TensorNest]
"""A function of a batch."""

BatchIterator: TypeAlias = Any
"""What ``fit`` reads the batches of an epoch from, such as an ``EpochIterator`` of Keras."""

CompileArgument: TypeAlias = Any
"""An argument of ``compile``."""

LossNest: TypeAlias = Any
"""Losses as ``compile`` takes them, or weights of them: one, or a nest with one for each output."""

MetricNest: TypeAlias = Any
"""Metrics as ``compile`` takes them: a list, or a nest with one for each output."""

SavePath: TypeAlias = "str | os.PathLike[str] | IO[bytes]"
"""Where Keras and TensorFlow save to: a path, a URL or an open file."""

Scores: TypeAlias = Any
"""What ``evaluate`` returns: a number, a list of them, or, with ``return_dict=True``, numbers by name."""

SpecNest: TypeAlias = Any
"""A nest of the ``tf.TypeSpec`` of such leaves."""

Gradient: TypeAlias = Any
"""A dense gradient, or one of some rows (``tf.IndexedSlices``); None where a variable has none."""

Array: TypeAlias = "numpy.typing.NDArray[typing.Any]"  # whole names, which pdoc imports wherever this is used
"""A NumPy array of any type of numbers."""

DType: TypeAlias = "numpy.dtype[typing.Any]"
"""The type of its numbers."""

Logs: TypeAlias = dict[str, float]
"""What Keras tells callbacks: metrics by their names."""

Config: TypeAlias = dict[str, Any]
"""What ``get_config`` of a layer, an optimizer or a model returns: values that JSON can represent."""

JsonValue: TypeAlias = Any
"""What JSON can represent: None, a bool, a number, a string, or a list or dictionary of these."""

JsonObject: TypeAlias = dict[str, JsonValue]
"""Any other dictionary of values that JSON can represent."""

Picklable: TypeAlias = Any
"""What a function of the user's takes or returns in another process: anything that can be pickled."""

RayHandle: TypeAlias = Any
"""An actor, a placement group or an object reference of Ray."""
