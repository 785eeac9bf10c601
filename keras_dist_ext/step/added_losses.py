"""What layers give to ``add_loss`` in a step of several replicas: sums are added up, and means averaged.

Where the rows of a batch are a constant of the graph, a loss no longer tells how it grows with them (see ``degree``).
So the model alone is traced aside once, on batches of any size; that succeeds for more models than a trace of the
whole step does, which a ``train_step`` of the user's own may forbid.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import current_step, intercept
from keras_dist_ext._keras.layers import call_with_training, clear_losses, flat_layers, layer_losses
from keras_dist_ext.step.batch_scaling import degree_in_rows
from keras_dist_ext.step.replica_step import ReplicaStep

__all__ = ["UnknownLossDegrees", "find_degrees", "losses_as_means", "placeholders"]


class UnknownLossDegrees(Exception):
    """A layer's additional loss is met before it is known how it grows with the rows of a batch."""


def losses_as_means(model: Any, losses: list[Any]) -> list[Any]:
    """Return the losses of a model; in a step, each as a mean whose mean over replicas is that of one device.

    Raises:
        UnknownLossDegrees: ``find_degrees`` is to be called before.
    """
    step = current_step()
    if not isinstance(step, ReplicaStep) or step.num_replicas == 1 or not step.weights.adds_losses_of(model):
        return losses
    added = {id(loss): (layer, i) for layer in flat_layers(model) for i, loss in enumerate(layer_losses(layer))}
    if not any(id(loss) in added for loss in losses):
        return losses  # weights' regularizers: the same on every replica
    known = step.model.replica_runtime.loss_exponents
    if step.kind not in known:
        raise UnknownLossDegrees

    def exact(loss: Any) -> Any:
        layer, place = added.get(id(loss), (None, 0))
        degrees = known[step.kind].get(id(layer), [])
        # One that was not met when the model was traced says by itself how it grows, if anything does.
        return step.weights.additional_loss(loss, degrees[place]) if place < len(degrees) else step.as_mean(loss)

    return [exact(loss) for loss in losses]


def find_degrees(model: Any, batch_spec: Any, *, training: bool) -> dict[int, list[Any]]:
    """Trace a model aside; return how the losses that each layer adds grow with the rows, by the layer's id."""
    with tf.__internal__.FuncGraph("additional_losses").as_default(), intercept(None):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(placeholders(batch_spec))
        call_with_training(model, x, training=training)
        degrees = {
            id(layer): [degree_in_rows(tf.reduce_sum(tf.convert_to_tensor(loss))) for loss in layer_losses(layer)]
            for layer in flat_layers(model)
            if layer_losses(layer)
        }
    clear_losses(model)
    return degrees


def placeholders(batch_spec: Any) -> Any:
    """Return placeholders for a batch, in the graph that is entered."""
    return tree.map_structure(
        lambda spec: None if spec is None else tf.compat.v1.placeholder(spec.dtype, spec.shape), batch_spec
    )
