"""Sums over examples, written in each way that TensorFlow and Keras have, and models that train on one."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from keras.optimizers import SGD

__all__ = [
    "DATA", "NEED_ROWS", "PLACES", "SUMS", "made", "on_workers", "reduced", "squares", "summed_in_loop", "trained",
]  # fmt: skip


@tf.custom_gradient
def summed_with_gradient(values: Any) -> Any:
    return tf.reduce_sum(values), lambda upstream: upstream * tf.ones_like(values)


@tf.function(autograph=False)
def summed_in_function(values: Any) -> Any:
    return tf.reduce_sum(values)


@tf.function
def summed_in_python(values: Any) -> Any:
    total = tf.constant(0.0)
    for value in values:
        total = total + value
    return total


def summed_in_loop(values: Any) -> Any:
    start = (tf.constant(0), tf.constant(0.0))
    return tf.while_loop(lambda i, _: i < tf.shape(values)[0], lambda i, t: (i + 1, t + values[i]), start)[1]


def zeros(values: Any) -> Any:
    return tf.zeros_like(values, tf.int32)


SUMS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": tf.reduce_sum,
    "ops.sum": ops.sum,
    "einsum": lambda v: tf.einsum("i->", v),
    "matmul": lambda v: tf.matmul(tf.ones_like(v)[None], v[:, None])[0, 0],
    "tensordot": lambda v: tf.tensordot(v, tf.ones_like(v), 1),
    "ops.dot": lambda v: ops.dot(v, ops.ones_like(v)),
    "ops.vdot": lambda v: ops.vdot(v, ops.ones_like(v)),
    "matvec": lambda v: tf.linalg.matvec(v[None], tf.ones_like(v))[0],
    "segment_sum": lambda v: tf.math.segment_sum(v, zeros(v))[0],
    "unsorted_segment_sum": lambda v: tf.math.unsorted_segment_sum(v, zeros(v), 1)[0],
    "ops.segment_sum": lambda v: ops.segment_sum(v, zeros(v), 1)[0],
    "tensor_scatter_nd_add": lambda v: tf.tensor_scatter_nd_add(tf.zeros([1]), zeros(v)[:, None], v)[0],
    "foldl": lambda v: tf.foldl(lambda total, value: total + value, v),
    "scan": lambda v: tf.scan(lambda total, value: total + value, v)[-1],
    "while_loop": summed_in_loop,
    "ops.fori_loop": lambda v: ops.fori_loop(0, ops.shape(v)[0], lambda i, total: total + v[i], 0.0),
    "cumsum": lambda v: tf.cumsum(v)[-1],
    "custom_gradient": summed_with_gradient,
    "tf.function": summed_in_function,
    "a loop of Python in a tf.function": summed_in_python,
    "cond": lambda v: tf.cond(tf.shape(v)[0] > 0, lambda: tf.reduce_sum(v), lambda: 0.0),
    "switch_case": lambda v: tf.switch_case(tf.constant(1), [lambda: 0.0, lambda: tf.reduce_sum(v)]),
    "map_fn": lambda v: tf.reduce_sum(tf.map_fn(lambda value: value, v)),
    "ragged": lambda v: tf.reduce_sum(tf.RaggedTensor.from_uniform_row_length(v, 1)),
    "sparse.reduce_sum": lambda v: tf.sparse.reduce_sum(tf.sparse.from_dense(tf.ones_like(v)).with_values(v)),
    "recompute_grad": lambda v: tf.recompute_grad(tf.reduce_sum)(v),
}
NEED_ROWS = ("segment_sum", "foldl", "scan", "cumsum")  # of no rows, TensorFlow itself makes an error of them
PLACES = ("train_step", "compute_loss", "a compiled loss", "add_loss")
X = np.random.default_rng(0).normal(size=(15, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(15, 3)).astype("float32")
DATA = {
    "unknown rows": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(6),  # 6, 6 and 3
    "an empty replica": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(7),  # 7, 7 and 1
    "an even rest": lambda: tf.data.Dataset.from_tensor_slices((X[:12], Y[:12])).batch(8),  # 8 and 4
    "static rows": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(5, drop_remainder=True),
}


def squares(y: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


def with_train_step(lib: Any, reduce: Callable[[Any], Any]) -> type:
    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = reduce(squares(y, self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

        def test_step(self, data: Any) -> dict[str, Any]:
            return {"loss": reduce(squares(data[1], self(data[0])))}

    return Net


def with_compute_loss(lib: Any, reduce: Callable[[Any], Any]) -> type:
    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:  # type: ignore[no-untyped-def]
            return reduce(squares(y, y_pred))

    return Net


def adding(reduce: Callable[[Any], Any]) -> Any:
    class Adds(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(reduce(tf.reduce_mean(tf.square(x), axis=-1)))
            return x

    return Adds()


def made(lib: Any, place: str, reduce: Callable[[Any], Any], **compiled: Any) -> Any:
    classes = {"train_step": with_train_step, "compute_loss": with_compute_loss}
    inputs = layers.Input((5,))
    outputs = layers.Dense(3, kernel_initializer=keras.initializers.Constant(0.1))(inputs)
    if place == "add_loss":
        outputs = adding(reduce)(outputs)
    model = (classes[place](lib, reduce) if place in classes else lib.Model)(inputs, outputs)
    loss = {"a compiled loss": lambda y, p: reduce(squares(y, p)), "add_loss": "mse"}.get(place)
    model.compile(SGD(0.01), loss=loss, **compiled)
    return model


def trained(model: Any, data: tf.data.Dataset) -> list[Any]:
    history = model.fit(data, epochs=2, verbose=0).history
    return [history["loss"], model.evaluate(data, verbose=0, return_dict=True)["loss"], *model.get_weights()]


def reduced(form: str, is_mean: bool) -> Callable[[Any], Any]:
    """Return what makes one number of those of the rows."""

    def reduce(values: Any) -> Any:
        total = SUMS[form](values)
        return total / tf.cast(tf.shape(values)[0], total.dtype) if is_mean else total

    return reduce


def on_workers(strategy: Any, folder: pathlib.Path, place: str, form: str, rows: str, is_mean: bool) -> list[Any]:
    """What a model comes to on two workers."""
    import keras_dist_ext as kde

    with strategy.scope():
        model = made(kde, place, reduced(form, is_mean))
    return trained(model, DATA[rows]())
