"""Ask for the rows of all replicas inside of a step: ``kde.gather_rows`` and ``kde.row_indices``."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.hooks import current_step
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.errors import DataError
from keras_dist_ext.step.all_rows import is_examined, stands_for_all
from keras_dist_ext.step.replica_step import ReplicaStep

__all__ = ["gather_rows", "row_indices"]

_plainly = tf.autograph.experimental.do_not_convert  # in a tf.function of the user's AutoGraph would convert our code


def gather_rows(values: TensorNest) -> TensorNest:
    """Return the rows of the whole global batch, in its order, on every replica.

    For code inside of a step that compares examples with each other, or keeps them: contrastive losses, memory banks,
    queues, statistics of a batch. It works in a ``train_step``, in losses, layers and metrics, and in the step of a
    ``TrainLoop``. On one device, and outside of steps, it returns what it was given.

        z = kde.gather_rows(encoder(x))  # [N, ...] of [n, ...]

    It is differentiable: gradients of a loss that is computed from gathered rows, on every replica alike, are those of
    one device, also where replicas have different numbers of rows, or none. What a layer or a step assigns to a weight
    that is not trained, from gathered rows and weights alone, is equal on all replicas and stays as it is.

    Args:
        values: a tensor with one row for each example of the batch that the step was given, or a structure of such
            tensors; None may stand for what is not there. Strings can be gathered where all replicas are CPUs of one
            process.

    Raises:
        DataError: a tensor has another number of rows, none at all, or is ragged or sparse; it holds strings, which
            cannot be gathered here.
    """
    return _plainly(_gather)(values)


def _gather(values: TensorNest) -> TensorNest:
    step = current_step()
    if isinstance(step, ReplicaStep):
        if step.num_replicas == 1:
            return values
        flat = tree.flatten(values)
        places = [place for place, leaf in enumerate(flat) if leaf is not None]
        gathered = step.all_rows.gather([_dense(flat[place]) for place in places])
        for place, value in zip(places, gathered, strict=True):
            flat[place] = value
        return tree.pack_sequence_as(values, flat)
    if is_examined():
        return tree.map_structure(lambda leaf: leaf if leaf is None else stands_for_all(_dense(leaf)), values)
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return values
    return tree.map_structure(lambda leaf: leaf if leaf is None else context.all_gather(_dense(leaf), 0), values)


def row_indices(value: TensorNest) -> tf.Tensor:
    """Return where a replica's rows are in what ``gather_rows`` returns: ``[n]`` int32, on one device 0 to n - 1.

    They are the labels of in-batch negatives, where each example is to find its own among those of all:

        logits = z @ tf.transpose(kde.gather_rows(others))  # [n, N]
        loss = keras.losses.sparse_categorical_crossentropy(kde.row_indices(z), logits, from_logits=True)

    Args:
        value: a tensor with one row for each example of the batch that the step was given.

    Raises:
        DataError: it has another number of rows, or none at all.
    """
    return _plainly(_indices)(value)


def _indices(value: tf.Tensor) -> tf.Tensor:
    step = current_step()
    value = _dense(value)
    if isinstance(step, ReplicaStep):
        return step.all_rows.indices(value)
    rows = tf.shape(value)[0]
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tf.range(rows)
    counts = context.all_gather(rows[None], 0)
    return tf.range(rows) + tf.cumsum(counts, exclusive=True)[context.replica_id_in_sync_group]


def _dense(value: TensorNest) -> tf.Tensor:
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
        raise DataError(
            f"gather_rows was given a {type(value).__name__}, and gathers dense tensors. Make it dense, with a width "
            "that is the same on all replicas: x.to_tensor(shape=[None, width]), tf.sparse.to_dense(x)."
        )
    return tf.convert_to_tensor(value)
