"""Have Keras' layers do what is right for all replicas, and for no examples at all, while a step is traced."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import ctc_ops

from keras_dist_ext._keras import backend, keras, tree
from keras_dist_ext._keras.interception import Step, definer, install
from keras_dist_ext._keras.strategies import sum_over_replicas
from keras_dist_ext.aliases import Original, TensorNest

__all__ = ["has_own_moments"]


def has_own_moments(layer: keras.Layer) -> bool:
    """Whether a BatchNormalization computes the statistics of a batch by itself, past ours."""
    stock = keras.layers.BatchNormalization
    return isinstance(layer, stock) and type(layer)._moments is not stock._moments


# keras/src/backend/tensorflow/nn.py: TensorFlow's kernels fail on no rows, and some end the process.
for _op_name in ("conv", "conv_transpose", "depthwise_conv", "separable_conv", "max_pool"):

    @install(backend.nn, _op_name)
    def _(original: Original, step: Step, /, inputs: TensorNest, *args: object, **kwargs: object) -> TensorNest:
        return step.on_rows(inputs, lambda rows: original(rows, *args, **kwargs))


# keras/src/layers/convolutional, pooling: around the whole layer, so that TensorFlow still fuses it with its bias. That
# it does not for Conv1D, whose outputs are reshaped before, nor for a transposed convolution.
for _layer_class in (
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.AveragePooling1D,
    keras.layers.AveragePooling2D,
    keras.layers.AveragePooling3D,
):

    @install(definer(_layer_class, "call"), "call")
    def _(original: Original, step: Step, /, layer: keras.Layer, inputs: TensorNest) -> TensorNest:
        return step.on_rows(inputs, lambda rows: original(layer, rows))


# tensorflow/python/ops/ctc_ops.py: Keras' loss and `tf.nn.ctc_loss` end here, and its kernels fail on no rows too.
@install(ctc_ops, "ctc_loss_dense")
def _(
    original: Original,
    step: Step,
    /,
    labels: TensorNest,
    logits: TensorNest,
    label_length: TensorNest,
    logit_length: TensorNest,
    logits_time_major: bool = True,
    unique: TensorNest = None,
    blank_index: int = 0,
    name: str | None = None,
) -> tf.Tensor:
    labels, *others = [tf.convert_to_tensor(value) for value in (labels, logits, label_length, logit_length)]

    def of_as_many(rows: tf.Tensor) -> tf.Tensor:
        missing = tf.shape(rows)[0] - tf.shape(labels)[0]

        def padded(value: tf.Tensor, axis: int = 0) -> tf.Tensor:
            return tf.pad(value, [[0, missing if i == axis else 0] for i in range(value.shape.rank)])

        own_logits, *lengths = others
        given = [padded(own_logits, int(logits_time_major)), *map(padded, lengths)]
        # Without `unique`, which makes it faster on a TPU: its rows are those of the labels as they were.
        return original(rows, *given, logits_time_major, None, blank_index, name)

    return step.on_rows(labels, of_as_many)


# keras/src/layers/normalization/batch_normalization.py: Keras' moments are of a replica's own rows if there is a mask,
# or the layer is not synchronized; where it is, they lose digits of inputs far from 0.
@install(keras.layers.BatchNormalization, "_moments")
def _(original: Original, step: Step, /, layer: keras.Layer, inputs: TensorNest, mask: TensorNest) -> TensorNest:
    if not step.has_global_statistics and (mask is None or not layer.synchronized):
        return original(layer, inputs, mask)
    rank = len(inputs.shape)
    axes = [axis for axis in range(rank) if axis != layer.axis % rank]

    def sums(*values: tf.Tensor) -> list[tf.Tensor]:
        return sum_over_replicas([tf.reduce_sum(value, axes, keepdims=True) for value in values])

    if mask is None:
        total, count = sums(inputs, tf.ones_like(inputs))
        mean = tf.math.divide_no_nan(total, count)
        (squares,) = sums(tf.math.squared_difference(inputs, tf.stop_gradient(mean)))
        return tf.squeeze(mean, axes), tf.squeeze(tf.math.divide_no_nan(squares, count), axes)
    is_valid = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), tf.bool), tf.shape(inputs))
    total, count = sums(tf.where(is_valid, inputs, 0), tf.cast(is_valid, inputs.dtype))
    count += keras.backend.epsilon()
    mean = total / count
    (squares,) = sums(tf.square(tf.where(is_valid, inputs - mean, 0)))
    return tf.squeeze(mean), tf.squeeze(squares / count)


# keras/src/layers/rnn/rnn.py: `states` has a row for each of the whole batch. cuDNN's kernels fail on no rows
# (backend/tensorflow/rnn.py), and on one that is masked from its first step on.
@install(keras.layers.RNN, "call")
def _(
    original: Original,
    step: Step,
    /,
    layer: keras.Layer,
    sequences: TensorNest,
    initial_state: TensorNest = None,
    mask: TensorNest = None,
    training: bool = False,
) -> TensorNest:
    if layer.stateful:
        step.check_stateful(layer)
    if not (isinstance(layer, keras.layers.LSTM | keras.layers.GRU) and backend.has_gpus()):
        return original(layer, sequences, initial_state=initial_state, mask=mask, training=training)

    def of_as_many(rows: tf.Tensor) -> TensorNest:
        missing = tf.shape(rows)[0] - tf.shape(sequences)[0]

        def filled(value: TensorNest, fill: int) -> TensorNest:
            if value is None:
                return None
            value = tf.convert_to_tensor(value)
            more = tf.fill(tf.concat([[missing], tf.shape(value)[1:]], 0), tf.cast(fill, value.dtype))
            return tf.concat([value, more], 0)

        states = tree.map_structure(lambda state: filled(state, 0), initial_state)
        masks = tree.map_structure(lambda own: filled(own, 1), mask)
        return original(layer, rows, initial_state=states, mask=masks, training=training)

    return step.on_rows(sequences, of_as_many)


# keras/src/backend/tensorflow/numpy.py: takes what has no rows for the vector of a bias, since 0 is no more than 1.
@install(backend.numpy, "add")
def _(original: Original, step: Step, /, x1: tf.Tensor, x2: tf.Tensor) -> tf.Tensor:
    if 0 not in (getattr(x2, "shape", None) or ()):
        return original(x1, x2)
    dtype = keras.backend.result_type(*(getattr(x, "dtype", type(x)) for x in (x1, x2)))
    return tf.add(*(tf.cast(keras.ops.convert_to_tensor(x), dtype) for x in (x1, x2)))
