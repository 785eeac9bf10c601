"""Name what a step takes and gives, for signatures."""

from typing import TypeAlias

__all__ = ["StepData"]

StepData: TypeAlias = object
"""Tensors (dense, ragged or sparse) and arrays, or None; or tuples, lists and dictionaries of these, as ``tf.nest``
knows them. Those with a first dimension have equally many rows."""
