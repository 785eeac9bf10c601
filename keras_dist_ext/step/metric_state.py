"""Count once what metrics compute from the rows of all replicas, where the parts of replicas are summed.

The first replica takes it. A number that is neither computed from gathered rows nor from a replica's own, such as their
static number, counts as the other numbers of the metric do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import Variable, local_component
from keras_dist_ext.step.all_rows import AllRows
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.reducers import Reducer

__all__ = ["MetricState"]


class MetricState:
    """What metrics are assigned on one replica in a step that has gathered rows.

    Args:
        model: the Keras model.
        reducer: adds up over replicas.
        all_rows: tells what is computed from them.
    """

    def __init__(self, model: DistributedModel, reducer: Reducer, all_rows: AllRows) -> None:
        self._model = model
        self._reducer = reducer
        self._all_rows = all_rows
        self._kinds: dict[int, set[str]] = {}  # by id of the variable
        self._added: dict[int, tf.Tensor] = {}  # by id: what it was changed by, by constants

    def assign(self, variable: Variable, value: tf.Tensor) -> bool:
        """Take note of what is assigned; return whether that is left to the first replica."""
        adds_up = getattr(variable, "synchronization", None) == "on_read"
        if not self._all_rows.is_used or tf.executing_eagerly() or not adds_up or not self._reducer.traces_each_replica:
            return False
        kind = self._all_rows.kind_of(value)
        self._kinds.setdefault(id(variable), set()).add(kind)
        if kind == "constant" and not self._is_first:
            change = tf.cast(value, variable.dtype) - local_component(variable).read_value()
            self._added[id(variable)] = self._added.get(id(variable), 0) + change
        return kind == "replicated" and not self._is_first

    @property
    def _is_first(self) -> bool:
        return bool(self._reducer.replica_id == 0)

    def finish(self) -> None:
        """Take constants back that count as what the first replica has taken."""
        for variables in _by_metric(self._model.metrics) if self._added else ():
            kinds = set().union(*(self._kinds.get(id(variable), set()) for variable in variables))
            if "replicated" in kinds and "own" not in kinds:
                for variable in variables:
                    if id(variable) in self._added:
                        local_component(variable).assign_sub(self._added[id(variable)])


def _by_metric(metrics: Sequence[keras.metrics.Metric]) -> Iterator[list[Variable]]:
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        if isinstance(inner, list | tuple) and inner:
            yield from _by_metric(inner)
        else:
            yield list(metric.variables)
