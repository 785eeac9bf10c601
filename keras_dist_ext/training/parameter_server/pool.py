"""Add up the metrics of steps that the workers of a ParameterServerStrategy make at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import Array, TensorNest
from keras_dist_ext.step.distributed_model import DistributedModel

__all__ = ["Pool"]


class Pool:
    """The metrics of all finished steps.

    Args:
        variables: the model's metric variables; their values are where the pool begins.
    """

    def __init__(self, variables: Sequence[Variable]) -> None:
        self.variables = list(variables)
        self.is_empty = True
        self._totals = [_wide(variable.numpy()) for variable in variables]
        self._extra: dict[str, TensorNest] = {}

    def add(self, result: tuple[Sequence[tf.Tensor], dict[str, TensorNest]]) -> None:
        """Add what one call returned."""
        state, extra = result
        self.is_empty = False
        for total, part in zip(self._totals, state, strict=True):
            total += _wide(part.numpy())
        self._extra = extra

    def values(self) -> list[Array]:
        """Return the metric variables' values, in their dtypes."""
        dtypes = [tf.as_dtype(variable.dtype).as_numpy_dtype for variable in self.variables]
        return [total.astype(dtype) for total, dtype in zip(self._totals, dtypes, strict=True)]

    def logs(self, model: DistributedModel) -> dict[str, TensorNest]:
        """Compute the metrics' results here, without a word to the parameter server."""
        with keras.StatelessScope(state_mapping=list(zip(self.variables, self.values(), strict=True))):
            return {**self._extra, **model.get_metrics_result()}


def _wide(value: object) -> Array:
    narrow: Array = np.asarray(value)
    return narrow.astype(np.int64 if narrow.dtype.kind in "biu" else np.float64)
