"""Hand a step what it needs to know of the other replicas: how its rows weigh, and sums over all of them.

Letters: n = rows of a replica; N = rows of the global batch; R = replicas in sync, over all workers.
"""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data import split as data
from keras_dist_ext.step.global_gradients import reduce_gradients
from keras_dist_ext.step.replica_step import ReplicaStep

__all__ = ["Replica"]


class Replica:
    """One replica, as the step of a ``TrainLoop`` sees it.

    A step is written for one device: losses are means over the rows at hand, and nothing is divided by the number of
    replicas. What must hold for the global batch is asked for here.

    Attributes:
        rows: n, an int where it is static; 0 where a batch has fewer rows than there are replicas.
        global_rows: N.

    Args:
        step: what is being traced.
        batch: this replica's rows.
    """

    def __init__(self, step: ReplicaStep, batch: StepData) -> None:
        self._step = step
        self.rows = data.num_rows(batch)
        self.global_rows = self.rows if step.num_replicas == 1 else step.weights.global_rows

    @property
    def index(self) -> int | tf.Tensor:
        """The replica's number over all workers: an int, but on TPUs a tensor."""
        return self._step.replica_id

    @property
    def num_replicas(self) -> int:
        """R."""
        return self._step.num_replicas

    @property
    def weight(self) -> float | tf.Tensor:
        """What this replica's means count in those of the global batch: n / N."""
        share = self._step.weights.share if self.num_replicas > 1 else 1.0
        return share if isinstance(share, float) else tf.cast(share, tf.float32)

    def mean_loss(self, per_example: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
        """Return the loss to differentiate: means of all replicas, times ``weight``, add up to the global mean.

        Args:
            per_example: a loss for each example, ``[n]``, or for each of its elements, ``[n, ...]``, dense or ragged.
            sample_weight: what each counts, of a shape that broadcasts to it: the mean is the sum of the weighted
                losses over the sum of the weights, over all replicas. (Keras' losses divide by the number of rows
                instead, which is ``mean_loss(per_example * sample_weight)``.) A mask is such a weight.

        Returns:
            A scalar; 0 where there are no rows, or no weight.
        """
        step = self._step
        is_ragged = isinstance(per_example, tf.RaggedTensor)
        if not is_ragged:
            per_example = tf.convert_to_tensor(per_example)
        if per_example.dtype in (tf.float16, tf.bfloat16):  # in which a sum of many is none
            per_example = tf.cast(per_example, tf.float32)
        if sample_weight is None and not is_ragged:
            count = tf.cast(tf.size(per_example), per_example.dtype)
            return tf.math.divide_no_nan(tf.reduce_sum(per_example), count)
        if sample_weight is None:
            sample_weight = tf.ones_like(per_example)
        sample_weight = tf.cast(sample_weight, per_example.dtype)
        if not isinstance(sample_weight, tf.RaggedTensor):
            sample_weight = _like(sample_weight, per_example)
            if is_ragged:
                sample_weight = tf.ones_like(per_example) * sample_weight
        weighted = per_example * sample_weight
        total = tf.reduce_sum(weighted.flat_values if isinstance(weighted, tf.RaggedTensor) else weighted)
        weights = (
            sample_weight.flat_values
            if isinstance(sample_weight, tf.RaggedTensor)
            else tf.broadcast_to(sample_weight, tf.shape(weighted))
        )
        weight = tf.reduce_sum(weights)
        if step.num_replicas == 1:
            return tf.math.divide_no_nan(total, weight)
        global_total, global_weight = map(tf.stop_gradient, step.sum_over_replicas([total, weight]))
        # Weights may be trained: what they change in the mean as its denominator is 0 here, but not in the gradient.
        change = tf.math.multiply_no_nan(
            tf.math.divide_no_nan(global_total, global_weight), weight - tf.stop_gradient(weight)
        )
        mean = tf.math.divide_no_nan(total - change, global_weight)
        return mean * tf.cast(step.weights.inverse_share, mean.dtype)

    def reduce_gradients(self, gradients: TensorNest) -> TensorNest:
        """Return the gradients of the global batch, the same on every replica, from this replica's own.

        What a tape returns for weights is global already, and stays as it is; see ``kde.reduce_gradients``, which this
        is.

        Args:
            gradients: of a mean over this replica's rows, a structure in which None may stand for what has none.
        """
        return reduce_gradients(gradients)

    def sum(self, values: TensorNest) -> TensorNest:
        """Add up values over all replicas; no gradient flows through it.

        Args:
            values: a structure of tensors. Of a replica without rows, they count as they are.
        """
        flat = [tf.stop_gradient(tf.convert_to_tensor(value)) for value in tf.nest.flatten(values)]
        if self.num_replicas > 1:
            flat = self._step.sum_over_replicas(flat)
        return tf.nest.pack_sequence_as(values, flat)


def _like(weight: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Let a weight for each row stand for all elements of the row."""
    missing = value.shape.rank - weight.shape.rank
    return (
        tf.reshape(weight, [*tf.unstack(tf.shape(weight)), *[1] * missing])
        if missing > 0 and weight.shape.rank
        else weight
    )
