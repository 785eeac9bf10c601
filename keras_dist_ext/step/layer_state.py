"""Agree on non-trainable state that layers assign in a step: it becomes the mean over replicas, weighted by rows.

What is computed from the rows of all replicas is equal on them already.
"""

from __future__ import annotations

from collections.abc import Container

import tensorflow as tf

from keras_dist_ext._keras.variables import Variable, local_component, tf_variable
from keras_dist_ext.step.all_rows import AllRows
from keras_dist_ext.step.reduce import scale
from keras_dist_ext.step.row_weights import RowWeights

__all__ = ["LayerState"]


class LayerState:
    """State that was assigned on one replica in a step, and on which the replicas have not agreed yet.

    Args:
        weights: of the replica's rows.
        all_rows: what is computed from these is equal on all replicas, and stays as it is.
        shared: ids of distributed variables to which all replicas assign the same.
    """

    def __init__(self, weights: RowWeights, all_rows: AllRows, shared: Container[int] = ()) -> None:
        self._weights = weights
        self._all_rows = all_rows
        self._shared = shared
        self._assigned: dict[int, tf.Tensor] = {}
        self._differing: set[int] = set()  # ids of those that may have other values on other replicas

    def __bool__(self) -> bool:
        return bool(self._assigned)

    def note(self, variable: Variable, value: tf.Tensor) -> bool:
        """Note that a value was assigned to a variable; return whether the replicas will agree on it."""
        dtype = tf.as_dtype(variable.dtype)
        is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
        if is_number and not variable.trainable and id(tf_variable(variable)) not in self._shared:
            self._assigned[id(variable)] = variable
            if self._weights.is_uneven or self._all_rows.kind_of(value) != "replicated":
                self._differing.add(id(variable))
        return id(variable) in self._assigned

    def take_terms(self) -> tuple[list[Variable], list[tf.Tensor]]:
        """Return the variables assigned since this was asked last, and what this replica adds to their means."""
        variables = [variable for key, variable in self._assigned.items() if key in self._differing]
        self._assigned.clear()
        self._differing.clear()
        held = [tf.convert_to_tensor(local_component(v)) for v in variables]
        values = [scale(v if v.dtype.is_floating else tf.cast(v, tf.float64), self._weights.share) for v in held]
        return variables, self._weights.zero_if_empty(values)
