"""The logs of a step over all replicas: results of metrics, and what else each replica returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.models import overrides
from keras_dist_ext._keras.strategies import regroup
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.step.logs import VALUE, leaf_metrics, noted_results, pooled_state, state_of_first
from keras_dist_ext.step.reduce import sum_over_replicas
from keras_dist_ext.step.stats import Kind

__all__ = ["StepLogs", "zeros_like"]


class StepLogs:
    """What the logs of a step are, and how they are computed.

    Args:
        model: whose step it is.
        kind: of the step.

    Attributes:
        are_plain: whether they are the results of metrics, and nothing else.
        plan: the logs of a step that was traced, with metrics in place of their results, and ``VALUE`` in place of what
            each replica returns.
    """

    def __init__(self, model: keras.Model, kind: Kind) -> None:
        self._model = model
        self.are_plain = not any(
            overrides(model, name) for name in (f"{kind}_step", "compute_metrics", "get_metrics_result")
        )
        self.plan: TensorNest = None

    def noted_results(self) -> contextlib.AbstractContextManager[None]:
        """Have metrics tell which tensors are their results, where the logs may have others."""
        return contextlib.nullcontext() if self.are_plain else noted_results(leaf_metrics(self._model))

    def pooled(self, strategy: tf.distribute.Strategy, extra: Sequence[tf.Tensor], num_local: int) -> TensorNest:
        """Compute the logs from the state pooled over replicas.

        Args:
            strategy: of the replicas.
            extra: each local replica's leaves that no metric holds.
            num_local: how many replicas are this worker's.
        """
        values = [tuple(extra[i : i + num_local]) for i in range(0, len(extra), num_local)]
        if strategy.num_replicas_in_sync > 1 and values:
            sums = sum_over_replicas(strategy, [regroup(v) for v in values])
            values = [strategy.experimental_local_results(s) for s in sums]
        with pooled_state(self._model, strategy):
            return self._now(v[0] for v in values)

    def of_first(self, extra: Sequence[tf.Tensor]) -> TensorNest:
        """Compute the logs of the first replica from its state."""
        with state_of_first(self._model):
            return self._now(iter(extra))

    def _now(self, values: Iterator[tf.Tensor]) -> TensorNest:
        if self.are_plain:
            return self._model.get_metrics_result()
        return tree.map_structure(lambda leaf: leaf.now() if leaf is not VALUE else next(values), self.plan)


def zeros_like(value: tf.Tensor | tf.TensorSpec) -> tf.Tensor:
    """Return zeros of a shape, of which unknown dimensions are 0; one where the rank is unknown."""
    return tf.zeros([d or 0 for d in value.shape] if value.shape.rank is not None else [], value.dtype)
