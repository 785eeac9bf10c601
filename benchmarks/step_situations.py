"""Training programs whose steps compute more than they need, each with its fix, of public questions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from situations import WIDTH, L, Program, X, Y, batches, mlp, new_folder, situation

import keras_dist_ext as kde

__all__: list[str] = []

SERIES = np.random.default_rng(0).normal(size=(640, 60, 8)).astype("float32")


def series() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((SERIES, Y[:640])).batch(32).cache().prefetch(2)


@situation("`AUC(num_thresholds=200000)`", "costly-metric", "`AUC(num_thresholds=200)`")
def thresholds(kind: str) -> Program:
    data = tf.data.Dataset.from_tensor_slices((X[:2048], (Y[:2048] > 0).astype("float32"))).batch(32).cache()
    metric = keras.metrics.AUC(num_thresholds=200_000 if kind == "sick" else 200)
    compiled = {"loss": "binary_crossentropy", "metrics": [metric]}
    layers = lambda: [*mlp()[:-1], L.Dense(1, "sigmoid")]  # noqa: E731
    return Program(data.prefetch(2), 2048, layers, compiled=compiled, passes=4)


class Pairs(keras.metrics.Mean):  # type: ignore[misc]
    """A metric of all pairs, which costs more than the model."""

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        truth, found = tf.abs(y - tf.transpose(y)), tf.abs(predicted - tf.transpose(predicted))
        for _ in range(30):
            found = found @ truth * 1e-2
        super().update_state(tf.reduce_mean(found))


@situation("a metric of one's own that costs more than the model", "costly-metric", "left out of `compile`")
def own_metric(kind: str) -> Program:
    return Program(batches(256), 2048, mlp, compiled={"metrics": [Pairs()] if kind == "sick" else []}, passes=6)


class Recurrence(L.Layer):  # type: ignore[misc]
    """A recurrence of one's own."""

    def __init__(self, *, scans: bool) -> None:
        super().__init__()
        self.scans = scans

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 16))
        self.recurrent = self.add_weight(shape=(16, 16))

    def call(self, x: Any) -> Any:
        begin = tf.zeros([tf.shape(x)[0], 16])

        def turn(h: Any, v: Any) -> Any:
            return tf.tanh(v @ self.kernel + h @ self.recurrent)

        if self.scans:
            return tf.scan(turn, tf.transpose(x, [1, 0, 2]), begin)[-1]
        length = tf.shape(x)[1]
        return tf.while_loop(lambda i, _: i < length, lambda i, h: (i + 1, turn(h, x[:, i])), (0, begin))[1]


class Unrolled(Recurrence):
    """The same, in a loop of Python."""

    def call(self, x: Any) -> Any:
        h = tf.zeros([tf.shape(x)[0], 16])
        for i in range(x.shape[1]):
            h = tf.tanh(x[:, i] @ self.kernel + h @ self.recurrent)
        return h


@situation("`tf.scan` over time steps in a layer", "loop-in-step", "`jit_compile=True`")
def scanned(kind: str) -> Program:
    layers = lambda: [keras.Input((60, 8)), Recurrence(scans=True), L.Dense(1)]  # noqa: E731
    return Program(series(), 640, layers, compiled={"jit_compile": kind != "sick"}, passes=4)


@situation("`tf.while_loop` of no known length in a layer", "loop-in-step", "a Python loop, `for i in range(n)`")
def looped(kind: str) -> Program:
    def layers() -> list[Any]:
        return [keras.Input((60, 8)), (Recurrence if kind == "sick" else Unrolled)(scans=False), L.Dense(1)]

    return Program(series(), 640, layers, passes=4)


@situation("a loss that goes through its pairs in `tf.while_loop`", "loop-in-step", "ops of all pairs at once")
def looped_loss(kind: str) -> Program:
    def one_by_one(y: Any, predicted: Any) -> Any:
        rows = tf.shape(y)[0]

        def turn(i: Any, total: Any) -> Any:
            ordered = tf.sign(y[i, 0] - y[:, 0]) * (predicted[i, 0] - predicted[:, 0])
            return i + 1, total + tf.reduce_mean(tf.nn.relu(0.1 - ordered))

        return tf.while_loop(lambda i, _: i < rows, turn, (0, 0.0))[1] / tf.cast(rows, tf.float32)

    def at_once(y: Any, predicted: Any) -> Any:
        return tf.reduce_mean(tf.nn.relu(0.1 - tf.sign(y - tf.transpose(y)) * (predicted - tf.transpose(predicted))))

    return Program(batches(128), 2048, mlp, compiled={"loss": one_by_one if kind == "sick" else at_once}, passes=4)


@situation("one-hot vectors of 20,000 into `Dense`", "one-hot-product", "`Embedding(20000, 32)`")
def one_hot(kind: str) -> Program:
    ids = np.random.default_rng(0).integers(20_000, size=(640, 10))
    data = tf.data.Dataset.from_tensor_slices((ids, Y[:640])).batch(32).cache().prefetch(2)

    def layers() -> list[Any]:
        first = [L.CategoryEncoding(20_000, "one_hot"), L.Dense(32)] if kind == "sick" else [L.Embedding(20_000, 32)]
        return [keras.Input((10,), dtype="int64"), *first, L.Flatten(), L.Dense(1)]

    return Program(data, 640, layers, passes=2)


@situation("`LSTM(recurrent_dropout=0.2)`", "recurrent-dropout", "`dropout=0.2` instead")
def recurrent_dropout(kind: str) -> Program:
    given = {"recurrent_dropout" if kind == "sick" else "dropout": 0.2}
    return Program(series(), 640, lambda: [keras.Input((60, 8)), L.LSTM(32, **given), L.Dense(1)], passes=2)


@situation("`tf.summary.histogram` of all weights at each step", "summaries-in-step", "`tf.summary.record_if(...)`")
def summaries(kind: str) -> Program:
    written = tf.summary.create_file_writer(str(new_folder()))

    class Net(kde.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            some = True if kind == "sick" else self.optimizer.iterations % 100 == 0
            with written.as_default(step=self.optimizer.iterations), tf.summary.record_if(some):
                for variable in self.trainable_variables:
                    tf.summary.histogram(variable.path, variable.value)
            return logs

    layers = lambda: [keras.Input((WIDTH,)), L.Dense(256, "relu"), L.Dense(256, "relu"), L.Dense(1)]  # noqa: E731
    return Program(batches(32), 2048, layers, model=Net, passes=4)


@situation('`data_format="channels_first"` on a CPU', "slow-layout", '`data_format="channels_last"`')
def channels_first(kind: str) -> Program:
    images = np.random.default_rng(0).normal(size=(192, 24, 24, 3)).astype("float32")
    given = {"data_format": "channels_first" if kind == "sick" else "channels_last"}
    if kind == "sick":
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    def layers() -> list[Any]:
        convolutions = [L.Conv2D(64, 3, activation="relu", **given) for _ in range(3)]
        return [keras.Input(images.shape[1:]), *convolutions, L.GlobalAveragePooling2D(**given), L.Dense(1)]

    data = tf.data.Dataset.from_tensor_slices((images, Y[:192])).batch(32).cache().prefetch(2)
    return Program(data, 192, layers, passes=3)
