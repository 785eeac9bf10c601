"""What the numbers of one replica count in those of the global batch: its losses, means and sums.

User code sees one replica's rows as if they were the whole batch. What it reduces is made a mean over these rows whose
mean over replicas, weighted by their rows, is the number of one device (see ``means``).

Letters: n = rows of a replica, N = rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.losses import apply_mask
from keras_dist_ext._keras.models import tracks_loss
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.means import BatchExponents, Means, Term
from keras_dist_ext.step.reduce import as_float, of_dtype, scale
from keras_dist_ext.step.reducers import Reducer

__all__ = ["RowWeights"]


class RowWeights:
    """One replica's weight in a step, and what of its numbers are means over its rows.

    Args:
        model: the Keras model.
        rows: n, an int where static.
        global_rows: N, an int where static.
        reducer: how the replica meets the others.
        exponents: how numbers grow with the rows, where the graph does not tell. None takes all of them for means, and
            leaves losses that an optimizer scales as they are: gradients are weighted when they are summed.
    """

    def __init__(
        self,
        model: DistributedModel,
        rows: int | tf.Tensor,
        global_rows: int | tf.Tensor,
        reducer: Reducer,
        exponents: BatchExponents | None,
    ) -> None:
        self.rows = rows
        self.global_rows = global_rows
        self._model = model
        self._reducer = reducer
        self._num_replicas = reducer.num_replicas
        self._can_be_empty = not (isinstance(rows, int) and rows > 0)
        self._scaled: set[int] = set()  # ids of optimizers that have scaled the loss by the share
        self._weighted: dict[int, Any] = {}  # by id: losses that were
        self._means = Means(rows, exponents)
        self._has_sums = False  # whether a loss was a sum over all rows, and was made a mean

    @property
    def are_examined(self) -> bool:
        """Whether nothing is run: the step is traced to learn how its numbers grow with the rows."""
        return self._means.are_examined

    @property
    def has_gathered(self) -> bool:
        """Whether the step computes with the rows of all replicas."""
        return self._means.has_gathered

    @has_gathered.setter
    def has_gathered(self, value: bool) -> None:
        self._means.has_gathered = value

    @property
    def is_uneven(self) -> bool:
        """Whether replicas have numbers of rows that are constants of their graphs, and differ."""
        return isinstance(self.rows, int) and self.rows * self._num_replicas != self.global_rows

    @property
    def share(self) -> float | tf.Tensor:
        """The fraction n / N, a float where both are static, else a float64 tensor."""
        if isinstance(self.rows, int) and isinstance(self.global_rows, int):
            return self.rows / self.global_rows if self.global_rows else 0.0
        return tf.math.divide_no_nan(tf.cast(self.rows, tf.float64), tf.cast(self.global_rows, tf.float64))

    @property
    def inverse_share(self) -> float | tf.Tensor:
        """N / n, and 0 for an empty replica."""
        if isinstance(self.rows, int) and isinstance(self.global_rows, int):
            return self.global_rows / self.rows if self.rows else 0.0
        return tf.math.divide_no_nan(tf.cast(self.global_rows, tf.float64), tf.cast(self.rows, tf.float64))

    def reduce_loss(self, local: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
        """Turn a replica's reduced loss into one whose mean over replicas, weighted by share, is the global loss."""
        if self._num_replicas == 1 or reduction in (None, "none"):
            return local
        return self._means.mark_as_mean(self._mean_loss(local, sample_weight, mask, reduction))

    def _mean_loss(self, local: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
        if tuple(local.shape) == (0,):
            local = tf.reduce_sum(local)  # Keras leaves the losses of no rows as they are (losses/loss.py)
        weighted = reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None)
        if reduction == "sum" or (weighted and mask is None and not _rank(sample_weight)):
            self._has_sums = True
            return scale(local, self.inverse_share)
        if mask is None and not weighted:
            return local
        elements = tf.convert_to_tensor(apply_mask(sample_weight, mask, local.dtype, reduction)) if weighted else mask
        count = tf.reduce_sum(tf.cast(elements, tf.float64 if local.dtype == tf.float64 else tf.float32))
        (global_count,) = self._reducer.sum([count])
        factor = tf.math.divide_no_nan(count, global_count) * of_dtype(self.inverse_share, count.dtype)
        return local * tf.cast(tf.stop_gradient(factor), local.dtype)

    def adds_losses_of(self, model: DistributedModel) -> bool:
        """Whether what layers of a model have added to the loss is part of this step, and is made means by it."""
        if model is self._model:
            return True
        return self._means.are_read and any(layer is model for layer in flat_layers(self._model))

    def additional_loss(self, local: tf.Tensor, exponent: Any) -> tf.Tensor:
        """Turn what a layer gave to ``add_loss`` into a mean: it grows with the rows to the power ``batch_scaling``."""
        return self._means.mark_as_mean(scale(local, self._factor(exponent)) if exponent else local)

    def _factor(self, exponent: Any) -> float | tf.Tensor:
        """What makes a mean of a number that grows with the rows to the power ``batch_scaling``."""
        if exponent < 0:  # a sum over all rows, divided by the rows at hand; else, it is of pairs of rows
            return self.share ** -float(exponent) if self._has_sums else 1.0
        return self.inverse_share ** float(exponent)

    def as_mean(self, value: Any) -> Any:
        """Turn a scalar of the user's code into one whose mean over replicas, weighted by share, is the global one."""
        if self._num_replicas == 1 or _rank(value) > 0:
            return value
        if id(value) in self._weighted:  # it is logged, too
            return self._means.mark_as_mean(scale(value, self.inverse_share))
        terms = self._means.terms(value)
        if not any(term.exponent for term in terms):
            return value
        return self._means.mark_as_mean(tf.add_n([self._mean_of(term, as_float(term.value)) for term in terms]))

    def mark_as_mean(self, value: Any) -> Any:
        """Take a tensor for what ``as_mean`` has returned, and return it."""
        return self._means.mark_as_mean(value)

    def _mean_of(self, term: Term, value: tf.Tensor) -> tf.Tensor:
        factor = self._factor(term.exponent) if term.exponent else 1.0
        return scale(value, factor * term.sign)

    def differentiate(self, gradient: Callable[[Any, Any], Any], target: Any, sources: Any) -> Any:
        """Differentiate losses of a step of the user's own as means.

        Through a sum over replicas in a layer come the losses of the others, so each must have its weight by then. What
        the step gets is that of a replica by itself nevertheless, and is weighted when it is summed.

        Args:
            gradient: takes a target and what comes from above; returns gradients.
            target: a loss, or several.
            sources: what it is differentiated for; where these are no variables, nothing is done.
        """
        flat = tf.nest.flatten(target)
        of_variables = all(isinstance(source, tf.Variable | keras.Variable) for source in tf.nest.flatten(sources))
        if self._num_replicas == 1 or not of_variables or not all(isinstance(value, tf.Tensor) for value in flat):
            return gradient(target, None)
        terms = [term for value in flat for term in self._means.terms(value)]
        must_weigh = self._reducer.has_mixed and not any(id(value) in self._weighted for value in flat)
        if not must_weigh and not any(term.exponent for term in terms):
            return gradient(target, None)
        values = [term.value for term in terms]
        factors = [self._mean_of(term, tf.ones_like(term.value)) for term in terms]
        if not must_weigh:
            return gradient(values, factors)
        gradients = gradient(values, [scale(factor, self.share) for factor in factors])
        return tf.nest.map_structure(lambda g: None if g is None else scale(g, self.inverse_share), gradients)

    def sum_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Make a scalar that a step gives to a ``Sum`` count once for the global batch, not once a replica."""
        if self._num_replicas == 1 or not self._means.are_read or _rank(values) + _rank(sample_weight) > 0:
            return values, sample_weight
        values = tf.cast(self.as_mean(values), metric.dtype)
        weight = self._weight(metric, 1.0 if sample_weight is None else sample_weight)
        return self.zero_if_empty([values * weight])[0], None

    def _weight(self, metric: Any, sample_weight: Any) -> Any:
        """What a scalar weighs on this replica, so that all replicas together give it the weight on one device."""
        if isinstance(self.rows, int) and isinstance(sample_weight, int) and sample_weight == self.rows:
            return sample_weight
        return scale(tf.cast(self.as_mean(sample_weight), metric.dtype), self.share)

    def mean_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Make a scalar that a step gives to a ``Mean`` count once for the global batch, not once a replica."""
        if self._num_replicas == 1:
            return values, sample_weight
        if _rank(values) == 0:
            values = self.as_mean(values)
        elif sample_weight is None or _rank(sample_weight) > 0:
            return values, sample_weight
        if sample_weight is None:
            sample_weight = of_dtype(self.share, metric.dtype)
        elif self._means.are_read and not _rank(sample_weight) and not tracks_loss(self._model, metric):
            sample_weight = self._weight(metric, sample_weight)  # what Keras tracks, it weighs by rows
        if self._can_be_empty:  # the mean of nothing is not a number, and weighs nothing
            values = tf.convert_to_tensor(values)
            mean = tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype))
            values = tf.where(tf.cast(self.rows, tf.int32) > 0, mean, tf.zeros_like(mean))
        return values, sample_weight

    def scale_loss(self, optimizer: Any, loss: Any, original: Callable[[Any], Any]) -> Any:
        """Weight the loss by the replica's share (a vector of losses is a sum: its weight is 1)."""
        if self._num_replicas == 1 or not self._means.are_read:
            return original(loss)
        scaled = original(self.as_mean(loss))
        self._scaled.add(id(optimizer))
        weighted = scale(scaled, self.share) if scaled.shape.rank == 0 else scaled
        self._weighted[id(weighted)] = weighted
        return self._means.mark_as_mean(weighted)

    def is_weighted(self, optimizer: Any) -> bool:
        """Whether the loss that an optimizer has scaled was weighted, and with it its gradients."""
        return id(optimizer) in self._scaled

    def terms(self, optimizer: Any, gradients: list[Any]) -> list[Any]:
        """Return what this replica's gradients add to those of the global batch, those given to an optimizer."""
        if not self.is_weighted(optimizer):
            gradients = [scale(g, self.share) for g in gradients]
        self._scaled.discard(id(optimizer))
        return self.zero_if_empty(gradients)

    def zero_if_empty(self, values: list[Any]) -> list[Any]:
        """Replace what an empty batch gave (perhaps NaN) by zeros."""
        if not self._can_be_empty or not values:
            return values
        dense = [v.values if isinstance(v, tf.IndexedSlices) else v for v in values]
        dense = tf.cond(
            tf.cast(self.rows, tf.int32) > 0,
            lambda: [tf.identity(v) for v in dense],
            lambda: [tf.zeros_like(v) for v in dense],
        )
        return [
            tf.IndexedSlices(d, v.indices, v.dense_shape) if isinstance(v, tf.IndexedSlices) else d
            for d, v in zip(dense, values, strict=True)
        ]


def _rank(value: Any) -> int:
    """How many dimensions; some, if that is not known."""
    shape = tf.TensorShape(getattr(value, "shape", ()))
    return 1 if shape.rank is None else shape.rank
