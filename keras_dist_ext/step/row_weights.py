"""The weights of a replica's numbers in those of the global batch: of its losses, means and sums.

User code sees one replica's rows as if they were the whole batch. What it reduces is made a mean over these rows whose
mean over replicas, weighted by their rows, is the number of one device (see ``means``).

Letters: n = rows of a replica, N = rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.losses import apply_mask
from keras_dist_ext._keras.models import tracks_loss
from keras_dist_ext.aliases import Gradient, TensorNest
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.gradient_values import dense_values
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
        reducer: adds up over replicas.
        exponents: how numbers grow with the rows, where the graph does not tell. None takes all of them for means.
        of_rows: the same for what is differentiated for rows, where ``exponents`` is None.
    """

    def __init__(
        self,
        model: DistributedModel,
        rows: int | tf.Tensor,
        global_rows: int | tf.Tensor,
        reducer: Reducer,
        exponents: BatchExponents | None,
        of_rows: BatchExponents | None = None,
    ) -> None:
        self.rows = rows
        self.global_rows = global_rows
        self._model = model
        self._reducer = reducer
        self._num_replicas = reducer.num_replicas
        self._weighted: dict[int, tf.Tensor] = {}  # by id: losses whose parts have had their weight
        self._can_be_empty = not (isinstance(rows, int) and rows > 0)
        self._scaled: dict[
            int, tuple[tf.Tensor, keras.optimizers.Optimizer]
        ] = {}  # by id: losses that an optimizer has scaled, and the optimizer
        self._means = Means(rows, exponents)
        self._of_rows = self._means if exponents is not None or of_rows is None else Means(rows, of_rows)
        self._has_sums = False  # whether a loss was a sum over all rows, and was made a mean

    @property
    def are_examined(self) -> bool:
        """Whether nothing is run: the step is traced to learn how its numbers grow with the rows."""
        return self._means.are_examined

    def note_gathered(self) -> None:
        """Know that the step computes with the rows of all replicas."""
        self._means.has_gathered = self._of_rows.has_gathered = True

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

    def reduce_loss(
        self, local: tf.Tensor, sample_weight: TensorNest, mask: TensorNest, reduction: str | None
    ) -> tf.Tensor:
        """Turn a replica's reduced loss into one whose mean over replicas, weighted by share, is the global loss."""
        if self._num_replicas == 1 or reduction in (None, "none"):
            return local
        return self._means.mark_as_mean(self._mean_loss(local, sample_weight, mask, reduction))

    def _mean_loss(
        self, local: tf.Tensor, sample_weight: TensorNest, mask: TensorNest, reduction: str | None
    ) -> tf.Tensor:
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

    def weigh_gradient(self, local: tf.Tensor) -> tf.Tensor:
        """Return a mean loss as it is, whose gradient has the replica's weight already.

        What scales a loss may overflow, so the weight has to come where one device divides by the rows, and no earlier.
        """
        share = self.share

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def weighted(value: tf.Tensor) -> tf.Tensor:
            return tf.identity(value), lambda upstream: scale(upstream, share)

        return self._means.mark_as_mean(weighted(local))

    def mark_as_weighted(self, value: tf.Tensor) -> None:
        """Remember that all of a loss went through ``weigh_gradient``."""
        self._weighted[id(value)] = value

    def adds_losses_of(self, model: DistributedModel) -> bool:
        """Whether what layers of a model have added to the loss is part of this step, and is made means by it."""
        if model is self._model:
            return True
        return self._means.are_read and any(layer is model for layer in flat_layers(self._model))

    def additional_loss(self, local: tf.Tensor, exponent: Fraction) -> tf.Tensor:
        """Turn what a layer gave to ``add_loss`` into a mean: it grows with the rows to the power ``batch_scaling``."""
        return self._means.mark_as_mean(scale(local, self._factor(exponent)) if exponent else local)

    def _factor(self, exponent: Fraction) -> float | tf.Tensor:
        """What makes a mean of a number that grows with the rows to the power ``batch_scaling``."""
        if exponent < 0:  # a sum over all rows, divided by the rows at hand; else, it is of pairs of rows
            return self.share ** -float(exponent) if self._has_sums else 1.0
        return self.inverse_share ** float(exponent)

    def as_mean(self, value: tf.Tensor) -> tf.Tensor:
        """Turn a scalar of the user's code into one whose mean over replicas, weighted by share, is the global one."""
        if self._num_replicas == 1 or _shape(value).rank:
            return value
        terms = self._means.terms(value)
        if not any(term.exponent for term in terms):
            return value
        return self._means.mark_as_mean(tf.add_n([self._mean_of(term, as_float(term.value)) for term in terms]))

    def mark_as_mean(self, value: tf.Tensor) -> TensorNest:
        """Take a tensor for what ``as_mean`` has returned, and return it."""
        return self._means.mark_as_mean(value)

    def _mean_of(self, term: Term, value: tf.Tensor) -> tf.Tensor:
        factor = self._factor(term.exponent) if term.exponent else 1.0
        return scale(value, factor * term.sign)

    def differentiate(
        self,
        gradient: Callable[[TensorNest, TensorNest], TensorNest],
        target: TensorNest,
        output_gradients: TensorNest = None,
        *,
        of_shared: bool = True,
    ) -> TensorNest:
        """Differentiate losses such that the gradients of all replicas add up to those of the global batch.

        A loss has its weight before it is differentiated: through a sum over replicas come the losses of the others.

        Args:
            gradient: takes a target and what comes from above; returns gradients.
            target: a loss, or several.
            output_gradients: what comes from above, see ``tf.GradientTape.gradient``.
            of_shared: whether some source is the same on all replicas.
        """
        flat = [_values(value) for value in tf.nest.flatten(target)]
        target = tf.nest.pack_sequence_as(target, flat)
        if output_gradients is not None:
            output_gradients = tf.nest.map_structure(_values, output_gradients)
        above = [None] * len(flat) if output_gradients is None else tf.nest.flatten(output_gradients)
        if not all(isinstance(value, tf.Tensor) for value in flat) or len(above) != len(flat):
            found = gradient(target, output_gradients)
            return tf.nest.map_structure(lambda g: None if g is None else scale(g, self.share), found)
        values: list[tf.Tensor] = []
        upstream: list[tf.Tensor] = []
        for value, given in zip(flat, above, strict=True):
            for part, weight in self._weighted_parts(value, given, of_shared=of_shared):
                values.append(part)
                upstream.append(_upstream(part, given, weight))
        if all(part is None for part in upstream):
            return gradient(target, None)
        upstream = [tf.ones_like(v) if part is None else part for v, part in zip(values, upstream, strict=True)]
        if len(values) == len(flat) and all(value is part for value, part in zip(flat, values, strict=True)):
            return gradient(target, tf.nest.pack_sequence_as(target, upstream))
        return gradient(values, upstream)

    def _weighted_parts(
        self, value: tf.Tensor, given: tf.Tensor, *, of_shared: bool
    ) -> list[tuple[tf.Tensor, float | tf.Tensor]]:
        """Split a target into parts, each with what it counts on this replica in the sum over replicas."""
        if id(value) in self._weighted:
            return [(value, 1.0)]
        if not of_shared and not self._of_rows.are_known and value.shape.rank != 0:
            return [(value, 1.0)]  # a vector of rows is a sum
        if given is None and _rank(value) and self._means.has_marked(value):
            return [(value, 1.0)]  # so is a vector of losses
        means = self._means if of_shared else self._of_rows
        if given is not None:
            (term, *_) = means.terms(tf.reduce_sum(value * tf.cast(given, value.dtype)))
            return [(value, self._weight_of(term))]
        return [(term.value, self._weight_of(term)) for term in means.terms(value)]

    def _weight_of(self, term: Term) -> float | tf.Tensor:
        if term.exponent == 1:
            return float(term.sign)
        return self.share * self._factor(term.exponent) * term.sign if term.exponent else self.share * term.sign

    def sum_update(
        self, metric: keras.metrics.Metric, values: tf.Tensor, sample_weight: TensorNest
    ) -> tuple[TensorNest, TensorNest]:
        """Make a scalar that a step gives to a ``Sum`` count once for the global batch, not once a replica."""
        if self._num_replicas == 1 or not self._means.are_read or _rank(values) + _rank(sample_weight) > 0:
            return values, sample_weight
        values = tf.cast(self.as_mean(values), metric.dtype)
        weight = self._weight(metric, 1.0 if sample_weight is None else sample_weight)
        return self.zero_if_empty([values * weight])[0], None

    def _weight(self, metric: keras.metrics.Metric, sample_weight: TensorNest) -> tf.Tensor:
        """What a scalar weighs on this replica, so that all replicas together give it the weight on one device."""
        if isinstance(self.rows, int) and isinstance(sample_weight, int) and sample_weight == self.rows:
            return sample_weight
        return scale(tf.cast(self.as_mean(sample_weight), metric.dtype), self.share)

    def mean_update(
        self, metric: keras.metrics.Metric, values: tf.Tensor, sample_weight: TensorNest
    ) -> tuple[TensorNest, TensorNest]:
        """Make a scalar that a step gives to a ``Mean`` count once for the global batch, not once a replica."""
        if self._num_replicas == 1:
            return values, sample_weight
        is_unknown = _shape(values).rank is None  # as of a sum over a sparse tensor
        if _rank(values) == 0 or (is_unknown and tracks_loss(self._model, metric)):
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

    def scale_loss(
        self, optimizer: keras.optimizers.Optimizer, loss: tf.Tensor, original: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Scale a loss as the optimizer does, made a mean (a vector of losses is a sum)."""
        scaled = original(self.as_mean(loss))
        self._scaled[id(scaled)] = scaled, optimizer
        if id(loss) in self._weighted:
            self.mark_as_weighted(scaled)
        return self._means.mark_as_mean(scaled) if self._means.are_read and not _rank(scaled) else scaled

    def scaled_by(self, target: TensorNest) -> tf.Tensor:
        """Return the optimizer that has scaled a loss; None if none has."""
        return next((self._scaled[id(v)][1] for v in tf.nest.flatten(target) if id(v) in self._scaled), None)

    def as_means(self, gradients: list[Gradient]) -> list[Gradient]:
        """Return what gradients that are taken for means over the rows add to the global ones."""
        return gradients if self._num_replicas == 1 else [scale(g, self.share) for g in gradients]

    def weight_of(self, value: tf.Tensor) -> float | tf.Tensor:
        """Return what a tensor of numbers that are means or sums over the rows counts in the sum over replicas."""
        if isinstance(value, tf.IndexedSlices):
            return self.share
        (term, *_) = self._means.terms(tf.reduce_sum(value))
        return self._weight_of(term)

    def zero_if_empty(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Replace what an empty batch gave (perhaps NaN) by zeros."""
        if not self._can_be_empty or not values:
            return values
        dense = dense_values(values)
        dense = tf.cond(
            tf.cast(self.rows, tf.int32) > 0,
            lambda: [tf.identity(v) for v in dense],
            lambda: [tf.zeros_like(v) for v in dense],
        )
        return [
            tf.IndexedSlices(d, v.indices, v.dense_shape) if isinstance(v, tf.IndexedSlices) else d
            for d, v in zip(dense, values, strict=True)
        ]

    def pass_on_if_filled(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return values to which nothing flows back from above where an empty batch gave that (perhaps NaN)."""
        if not self._can_be_empty:
            return values

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def same(*values: tf.Tensor) -> TensorNest:
            return [tf.identity(value) for value in values], lambda *upstream: self.zero_if_empty(
                [tf.convert_to_tensor(gradient) for gradient in upstream]
            )

        found = same(*values)
        return list(found) if isinstance(found, (list, tuple)) else [found]


def _values(value: tf.Tensor) -> tf.Tensor:
    """Return what is differentiated in a value: in a ragged tensor, the tensor that holds its rows."""
    return value.flat_values if isinstance(value, tf.RaggedTensor) else value


def _upstream(value: tf.Tensor, given: Gradient, weight: float | tf.Tensor) -> Gradient:
    """What comes from above to a value that counts so much: None stands for ones."""
    if isinstance(weight, float) and weight == 1.0:
        return given
    return scale(tf.ones_like(value) if given is None else tf.cast(given, value.dtype), weight)


def _shape(value: tf.Tensor | float) -> tf.TensorShape:
    return tf.TensorShape(getattr(value, "shape", ()))


def _rank(value: tf.Tensor | float) -> int:
    """How many dimensions; some, if that is not known."""
    rank = _shape(value).rank
    return 1 if rank is None else rank
