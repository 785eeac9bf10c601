"""Hooks for a step where there is nothing to share between replicas: they do what Keras does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.interception import OpSeeds
from keras_dist_ext._keras.variables import Variable, components, local_component
from keras_dist_ext.aliases import Gradient, Original, TensorNest, TracedFunction
from keras_dist_ext.step.slices import sum_duplicates, to_dense

__all__ = ["LocalUpdate", "PassThrough", "on_rows"]


class PassThrough:
    """Hooks that do what Keras would, but assign to this worker's copies of a variable only.

    Args:
        of_worker: False assigns as Keras does, too.
    """

    has_global_statistics = False

    def __init__(self, *, of_worker: bool = True) -> None:
        self._of_worker = of_worker

    def reduce_loss(self, local: tf.Tensor, *_: TensorNest) -> tf.Tensor:
        """Return the loss as it is."""
        return local

    def begin_loss(self) -> None:
        """Do nothing."""

    def note_loss(self, value: tf.Tensor) -> None:
        """Take no note."""

    def mean_update(
        self, metric: keras.metrics.Metric, values: tf.Tensor, sample_weight: TensorNest
    ) -> tuple[TensorNest, TensorNest]:
        """Return what the metric was given."""
        return values, sample_weight

    def sum_update(
        self, metric: keras.metrics.Metric, values: tf.Tensor, sample_weight: TensorNest
    ) -> tuple[TensorNest, TensorNest]:
        """Return what the metric was given."""
        return values, sample_weight

    def as_mean(self, value: tf.Tensor) -> tf.Tensor:
        """Return the number as it is."""
        return value

    def scale_loss(
        self, optimizer: keras.optimizers.Optimizer, loss: tf.Tensor, original: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Scale as the optimizer does."""
        return original(loss)

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Gradient],
        variables: Sequence[Variable],
        original: Callable[..., None],
    ) -> None:
        """Apply as the optimizer does."""
        original(grads, variables)

    def all_reduce_gradients(self, grads_and_vars: TensorNest) -> TensorNest:
        """Leave gradients alone."""
        return grads_and_vars

    def sum_duplicates(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Leave slices as they are."""
        return slices

    def to_dense(self, slices: tf.IndexedSlices) -> tf.Tensor:
        """Leave it to TensorFlow."""
        return NotImplemented

    def next_seed(
        self, generator: keras.random.SeedGenerator, ordered: bool, original: Callable[[bool], tf.Tensor]
    ) -> tf.Tensor:
        """Draw what Keras draws."""
        return original(ordered)

    def op_seeds(self, op_seed: int | None, original: Callable[[int | None], OpSeeds]) -> OpSeeds:
        """Seed as TensorFlow does."""
        return original(op_seed)

    def constant_seed(self, seed: int) -> None:
        """Take a constant as it is."""

    def draw(self, kind: str, given: Mapping[str, TensorNest], draw: Callable[..., tf.Tensor]) -> tf.Tensor:
        """Draw what TensorFlow draws."""
        return draw(given["shape"], given["counter"])

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: tf.Tensor, original: Original) -> tf.Tensor:
        """Reduce as TensorFlow does."""
        return original(reduce_op, value)

    def call_function(
        self, original: Original, function: TracedFunction, args: TensorNest, kwargs: TensorNest
    ) -> TensorNest:
        """Call a tf.function as it is."""
        return original(function, *args, **kwargs)

    def assign(self, variable: Variable, value: tf.Tensor, original: Callable[[tf.Tensor], None]) -> None:
        """Assign to every copy on this worker, without a collective."""
        if not self._of_worker:
            original(value)
            return
        for copy in components(variable):
            copy.assign(tf.cast(value, copy.dtype))

    def on_rows(self, inputs: TensorNest, op: Callable[[tf.Tensor], TensorNest]) -> TensorNest:
        """Return what an op gives for each row."""
        return on_rows(inputs, op)

    def check_stateful(self, layer: keras.layers.Layer) -> None:
        """Let a layer keep a state for each row."""


class LocalUpdate(PassThrough):
    """The inside of an optimizer, run by each replica on its own copies of the variables."""

    def assign(self, variable: Variable, value: tf.Tensor, original: Callable[[tf.Tensor], None]) -> None:
        """Assign to the replica's own copy."""
        local = local_component(variable)
        local.assign(tf.cast(value, local.dtype))

    def sum_duplicates(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Add up slices of one row as the other replicas do."""
        return sum_duplicates(slices)

    def to_dense(self, slices: tf.IndexedSlices) -> tf.Tensor:
        """Add up slices of one row as the other replicas do."""
        return to_dense(slices)


_guarded = threading.local()  # whether what this thread runs has rows already


def on_rows(inputs: TensorNest, op: Callable[[tf.Tensor], TensorNest]) -> TensorNest:
    """Run an op that fails on no rows on a row of zeros where there are none, and return none for it.

    Convolutions and max pooling do on CPUs (oneDNN's in the forward pass or in the gradient), recurrent layers on GPUs
    (cuDNN's). Where there are rows, nothing is copied: TensorFlow's kernels hand on a tensor that a Pad or a Slice
    leaves as it is.
    """
    inputs = tf.convert_to_tensor(inputs)
    if getattr(_guarded, "now", False) or inputs.shape.rank is None or inputs.shape[0]:
        return op(inputs)
    rows = tf.shape(inputs)[0]
    missing = [[0, tf.maximum(1 - rows, 0)], *[[0, 0]] * (inputs.shape.rank - 1)]
    padded = tf.ensure_shape(tf.pad(inputs, missing), [None, *inputs.shape[1:]])  # or oneDNN fuses Pad and convolution
    _guarded.now = True
    try:
        outputs = op(padded)
    finally:
        _guarded.now = False

    def kept(output: tf.Tensor) -> tf.Tensor:
        own = tf.slice(output, [0] * output.shape.rank, [rows, *[-1] * (output.shape.rank - 1)])
        own.set_shape([inputs.shape[0], *output.shape[1:]])
        return own

    return tree.map_structure(kept, outputs)
