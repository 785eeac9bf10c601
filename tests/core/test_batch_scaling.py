"""How a loss given to `add_loss` grows with the rows of its batch is read from its graph."""

from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from versions import KERAS_VERSION

from keras_dist_ext.step.batch_scaling import batch_exponent

ROWS = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
KERNEL = tf.Variable(np.random.default_rng(1).normal(size=(5, 3)).astype("float32"))
HALF = Fraction(1, 2)


def in_graph(function):
    """Trace a function of a batch of unknown rows and return its exponent."""
    with tf.__internal__.FuncGraph("losses").as_default():
        return batch_exponent(tf.reduce_sum(function(tf.compat.v1.placeholder(tf.float32, [None, 5]))))


def num_rows(x):
    return ops.cast(ops.shape(x)[0], "float32")


def regularized_by(regularizer):
    def losses(x):
        layer = keras.layers.Dense(3, kernel_initializer="ones", activity_regularizer=regularizer)
        layer(x)
        (loss,) = layer.losses
        return loss

    return losses


MEANS = {
    "a mean": ops.mean,
    "a tf mean": tf.reduce_mean,
    "a mean of sums over features": lambda x: ops.mean(ops.sum(x, axis=1)),
    "a sum over features of means over rows": lambda x: ops.sum(ops.mean(x, axis=0)),
    "a sum of squared means": lambda x: ops.sum(ops.square(ops.mean(x, axis=0))),
    "a sum divided by the rows": lambda x: ops.sum(x) / num_rows(x),
    "a sum divided by tf.shape": lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32),
    "a sum divided by an unpacked size": lambda x: tf.reduce_sum(x) / tf.cast(tf.unstack(tf.shape(x))[0], tf.float32),
    "a sum divided by a gathered size": lambda x: tf.reduce_sum(x) / tf.cast(tf.gather(tf.shape(x), 0), tf.float32),
    "a sum divided by sliced sizes": lambda x: (
        tf.reduce_sum(x) / tf.cast(tf.reduce_prod(tf.slice(tf.shape(x), [0], [-1])), tf.float32)
    ),
    "a mean divided by the size of a row": lambda x: (
        tf.reduce_mean(x) / tf.cast(tf.reduce_prod(tf.slice(tf.shape(x), [1], [1])), tf.float32)
    ),
    "a sum divided by the size": lambda x: ops.sum(x) / ops.cast(ops.size(x), "float32"),
    "a sum divided by tf.size": lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
    "a sum times a mean, divided by the rows": lambda x: ops.sum(x) * ops.mean(x) / num_rows(x),
    "a weighted mean": lambda x: tf.math.divide_no_nan(ops.sum(x * x[:, :1]), ops.sum(ops.abs(x[:, 0]))),
    "a maximum": ops.max,
    "a variance": ops.var,
    "a root of a mean": lambda x: ops.sqrt(ops.mean(x * x)),
    "a mean squared error": lambda x: keras.losses.MeanSquaredError()(x, 2 * x),
    "a mean Kullback-Leibler divergence": lambda x: -0.5 * ops.mean(1 + x - ops.square(x) - ops.exp(x)),
    "a Kullback-Leibler divergence summed over features": lambda x: (
        -0.5 * ops.mean(ops.sum(1 + x - ops.square(x) - ops.exp(x), axis=1))
    ),
    "a Gram matrix divided by the rows": lambda x: ops.sum(ops.matmul(ops.transpose(x), x)) / num_rows(x),
    "a mean of a product with weights": lambda x: ops.mean(ops.matmul(x, KERNEL)),
    "a constant": lambda x: ops.convert_to_tensor(2.0),
    "a norm of weights": lambda x: ops.sum(ops.square(KERNEL)),
    "an L2 regularizer of weights": lambda x: keras.regularizers.L2(0.1)(KERNEL),
}
# A factor that all rows share stays one, whatever is done with the rows before they are summed.
SHARE_A_FACTOR = {
    "a part": lambda x: x[:, 0],
    "the others by a mask": lambda x: tf.boolean_mask(x, x > -9.0),
    "gathered features": lambda x: tf.gather(x, [0, 1], axis=1),
    "gathered rows": lambda x: tf.gather(x, tf.range(tf.shape(x)[0])),
    "unpacked features": lambda x: tf.unstack(x, axis=1)[2],
    "split features": lambda x: tf.split(x, 5, axis=1)[2],
    "split unevenly": lambda x: tf.split(x, [2, 3], axis=1)[1],
    "joined": lambda x: tf.concat([x, x], 1),
    "packed": lambda x: tf.stack([x, x], 1),
    "padded": lambda x: tf.pad(x, [[0, 0], [0, 1]]),
    "tiled": lambda x: tf.tile(x, [1, 2]),
    "chosen, or 0": lambda x: tf.where(x > 0, x, 0.0),
    "positive parts": lambda x: tf.maximum(x, 0.0),
    "sums over features": lambda x: tf.reduce_sum(x, axis=1),
    "means over features": lambda x: tf.reduce_mean(x, axis=1),
    "maxima over features": lambda x: tf.reduce_max(x, axis=1),
    "sums and differences": lambda x: x + 3.0 * x - x[:, :1],
    "a product with weights": lambda x: tf.matmul(x, KERNEL),
    "a product by einsum": lambda x: tf.einsum("ni,io->no", x, KERNEL),
    "a product by tensordot": lambda x: tf.tensordot(x, KERNEL, 1),
    "products of their own": lambda x: tf.matmul(x[:, None, :], tf.ones_like(x)[:, :, None]),
    "a convolution": lambda x: tf.nn.conv1d(x[:, :, None], KERNEL[:2, None, :], 1, "SAME"),
    "a transposed convolution": lambda x: tf.nn.conv2d_transpose(
        x[:, None, :, None], KERNEL[None, :2, None, :1], [tf.shape(x)[0], 1, 10, 1], [1, 2]
    ),
    "a spectrum": lambda x: tf.abs(tf.signal.rfft(x)),
    "patches": lambda x: tf.image.extract_patches(x[:, :, None, None], [1, 2, 1, 1], [1] * 4, [1] * 4, "VALID"),
    "bands": lambda x: tf.linalg.band_part(x[:, :, None] * tf.ones([5]), 1, 1),
    "leaky positive parts": tf.nn.leaky_relu,
    "pooled features": lambda x: tf.nn.max_pool1d(x[:, :, None], 2, 2, "VALID"),
    "running sums over features": lambda x: tf.cumsum(x, axis=1),
    "features in another order": lambda x: tf.reverse(tf.roll(x, 1, 1), [1]),
    "the highest features": lambda x: tf.math.top_k(x, 2).values,
}
MEANS |= {
    f"a sum of {name}, of rows divided by their number": lambda x, of=of: tf.reduce_sum(of(x / num_rows(x)))
    for name, of in SHARE_A_FACTOR.items()
}
SUMS = {
    "a sum": ops.sum,
    "a scaled sum of squares": lambda x: 0.1 * ops.sum(x * x),
    "a tf sum in two steps": lambda x: tf.reduce_sum(tf.reduce_sum(x, 1)),
    "a sum over rows, then features": lambda x: ops.sum(ops.sum(x, axis=0)),
    "a sum over rows, mean over features": lambda x: ops.mean(ops.sum(x, axis=0)),
    "a sum over the last but one axis": lambda x: ops.sum(ops.sum(x, axis=-2)),
    "a sum over both axes": lambda x: ops.sum(x, axis=(0, 1)),
    "an activation's L2 regularizer": lambda x: keras.regularizers.L2(0.1)(x),
    "an activation's L1 regularizer": lambda x: keras.regularizers.L1(0.1)(x),
    "a tf L2 loss": tf.nn.l2_loss,
    "a sum of flattened rows": lambda x: ops.sum(ops.reshape(x, (-1,))),
    "a summed Kullback-Leibler divergence": lambda x: -0.5 * ops.sum(1 + x - ops.square(x) - ops.exp(x)),
    "a Gram matrix": lambda x: ops.sum(ops.matmul(ops.transpose(x), x)),
    "a Gram matrix by einsum": lambda x: ops.sum(ops.einsum("ni,nj->ij", x, x)),
    "a sum of a product with weights": lambda x: ops.sum(ops.matmul(x, KERNEL)),
    "a sum times a mean": lambda x: ops.sum(x) * ops.mean(x),
    "minus a sum, stopped": lambda x: -ops.stop_gradient(ops.sum(x)),
    "the rows": num_rows,
    "the size": lambda x: ops.cast(ops.size(x), "float32"),
    "a sum of sums": lambda x: ops.sum(x) + ops.sum(x * x),
    "a sum in float64": lambda x: ops.sum(ops.cast(x, "float64")),
}
# Keras divides it by the rows since 3.14 (keras/src/layers/layer.py).
(MEANS if KERAS_VERSION >= (3, 14) else SUMS)["an activity regularizer"] = regularized_by("l2")
OTHERS = {
    "a root of a sum": (HALF, lambda x: ops.sqrt(ops.sum(x * x))),
    "a squared sum": (2, lambda x: ops.square(ops.sum(x))),
    "a product of sums": (2, lambda x: ops.sum(x) * ops.sum(x * x)),
    "a squared Gram matrix": (2, lambda x: ops.sum(ops.square(ops.matmul(ops.transpose(x), x)))),
    "a mean divided by the rows": (-1, lambda x: ops.mean(x) / num_rows(x)),
    "squares of rows divided by their number": (-1, lambda x: ops.sum(ops.square(x / num_rows(x)))),
    "squared differences of such": (
        -1,
        lambda x: ops.sum(tf.math.squared_difference(x / num_rows(x), 2 * x / num_rows(x))),
    ),
    "products of such": (-1, lambda x: ops.sum(tf.einsum("ni,ni->n", x / num_rows(x), x / num_rows(x)))),
    "roots of such": (HALF, lambda x: ops.sum(ops.sqrt(ops.abs(x) / num_rows(x)))),
}
CASES = {
    **{name: (0, function) for name, function in MEANS.items()},
    **{name: (1, function) for name, function in SUMS.items()},
    **OTHERS,
}


@pytest.mark.parametrize("name", CASES)
def test_the_exponent_is_the_power_of_the_rows_with_which_a_value_grows(name):
    exponent, function = CASES[name]
    assert in_graph(function) == exponent
    once, thrice = (float(ops.sum(function(tf.constant(np.tile(ROWS, (k, 1)))))) for k in (1, 3))
    assert thrice == pytest.approx(once * 3 ** float(exponent), rel=1e-4)  # what the word "exponent" means


def test_a_sum_and_a_constant_count_as_a_sum():
    assert in_graph(lambda x: ops.sum(x) + 1.0) == 1


def test_what_cannot_be_told_counts_as_a_mean():
    assert in_graph(lambda x: tf.numpy_function(np.sum, [x], tf.float32)) == 0
    assert in_graph(lambda x: tf.while_loop(lambda i: i < 3.0, lambda i: i + 1.0, [tf.constant(0.0)])[0]) == 0
    assert (
        in_graph(
            lambda x: ops.sum(
                tf.identity(tf.matmul(*[tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, None])] * 2))
            )
        )
        == 0
    )


def test_a_deep_network_of_sums_is_read_as_far_as_python_goes():
    def deep(x):
        total = x
        for _ in range(600):
            total = total + x
        return total

    assert in_graph(lambda x: ops.sum(deep(x))) == 1
    assert in_graph(lambda x: ops.sum(deep(x)) / num_rows(x)) == 0
