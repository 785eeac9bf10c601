"""Add up or average, over replicas, what layers give to ``add_loss``.

Where the batch size is a constant of the graph, a loss does not tell its exponent in it (see ``batch_scaling``). So the
model is traced once on batches of unknown size, and run, on a few rows, only where that graph does not tell either.
That works for more models than tracing the whole step does, because a custom ``train_step`` may need a static batch
size.
"""

from __future__ import annotations

from fractions import Fraction

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import current_step, intercept
from keras_dist_ext._keras.layers import call_with_training, clear_losses, flat_layers, layer_losses
from keras_dist_ext._keras.tracing import ScratchTrace
from keras_dist_ext.aliases import SpecNest, TensorNest
from keras_dist_ext.step.all_rows import rows_of_no_batch
from keras_dist_ext.step.batch_scaling import read_exponent
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.measured_exponents import measure_exponents
from keras_dist_ext.step.replica_step import ReplicaStep

__all__ = ["UnknownLossExponents", "find_exponents", "losses_as_means", "placeholders"]


class UnknownLossExponents(Exception):
    """A layer has called ``add_loss``, and the exponents of such losses in the batch size are not known yet."""


def losses_as_means(model: DistributedModel, losses: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the losses of a model; in a step, each as a mean whose mean over replicas is that of one device.

    Raises:
        UnknownLossExponents: ``find_exponents`` is to be called before.
    """
    step = current_step()
    if not isinstance(step, ReplicaStep) or step.num_replicas == 1 or not step.weights.adds_losses_of(model):
        return losses
    added = {id(loss): (layer, i) for layer in flat_layers(model) for i, loss in enumerate(layer_losses(layer))}
    if not any(id(loss) in added for loss in losses):
        return losses  # weights' regularizers: the same on every replica
    known = step.model.replica_runtime.loss_exponents
    if step.kind not in known:
        if step.assumes_means_of_losses():
            return [step.weights.additional_loss(loss, Fraction(0)) for loss in losses]
        raise UnknownLossExponents

    def exact(loss: tf.Tensor) -> tf.Tensor:
        layer, place = added.get(id(loss), (None, 0))
        exponents = known[step.kind].get(id(layer), [])
        # A loss that the trace of the model did not have is read from the graph of the step.
        return step.weights.additional_loss(loss, exponents[place]) if place < len(exponents) else step.as_mean(loss)

    return [exact(loss) for loss in losses]


def find_exponents(
    model: DistributedModel, batch_spec: SpecNest, *, training: bool, rows: TensorNest = None
) -> dict[int, list[Fraction]]:
    """Trace a model without running it; return the exponents of the losses that each layer adds, by the layer's id.

    Args:
        model: the Keras model.
        batch_spec: of a batch of any number of rows.
        training: as which it is called.
        rows: to measure with what the graph does not tell; without, that counts as a mean.
    """
    added: dict[int, list[tf.Tensor]] = {}

    def call(batch: TensorNest) -> None:
        with intercept(None), rows_of_no_batch():
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            call_with_training(model, x, training=training)
            for layer in flat_layers(model):
                losses = [tf.reduce_sum(tf.convert_to_tensor(loss)) for loss in layer_losses(layer)]
                added.update({id(layer): losses} if losses else {})

    try:
        trace = ScratchTrace(call, batch_spec)
    finally:
        clear_losses(model)
    readings = {id(loss): read_exponent(loss) for losses in added.values() for loss in losses}
    unknown = [tensor for reading in readings.values() for tensor in reading.unknown]
    measured = measure_exponents(trace, unknown, rows) if unknown and rows is not None else {}
    return {
        layer: [read_exponent(loss, (), measured).exponent or Fraction(0) for loss in losses]
        for layer, losses in added.items()
    }


def placeholders(batch_spec: SpecNest) -> TensorNest:
    """Return placeholders for a batch, in the graph that is entered."""
    return tree.map_structure(_placeholder, batch_spec)


def _placeholder(spec: SpecNest) -> tf.Tensor:
    if spec is None:
        return None
    if isinstance(spec, tf.TensorSpec):
        return tf.compat.v1.placeholder(spec.dtype, spec.shape)
    anything = tf.compat.v1.placeholder(tf.variant, [])  # of several tensors, which a dataset of one element may hold
    return tf.data.experimental.from_variant(anything, structure=spec).get_single_element()
