"""Batches that cannot be split, outputs without rows, and layers adapted outside of the scope, on two workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist_ext as kde

UNEQUAL = {"x": np.ones((4, 1), "float32"), "table": np.arange(10, dtype="float32")}
X = np.random.default_rng(0).normal(3.0, 2.0, (22, 3)).astype("float32")


class Table(kde.Model):
    """Takes a table beside its examples."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, features: Any) -> Any:
        return features["x"] * tf.reduce_sum(features["table"]) + self.offset


class Whole(kde.Model):
    """Gives, beside its examples, a number of all of them."""

    def call(self, x: Any) -> Any:
        return {"x": x, "more": tf.reduce_mean(x)}


def _error(call: Any, *given: Any, **options: Any) -> str:
    try:
        call(*given, **options)
    except kde.DataError as error:
        return str(error)
    return ""


def refusals(strategy: Any, folder: Path, rows: int | None, table: int | None) -> dict[str, str]:
    """What each call says of batches whose numbers of rows, known or not, differ; and of an output of no row."""

    def batches() -> Iterator[Any]:
        for _ in range(2):
            yield UNEQUAL, np.zeros((4, 1), "float32")

    features = {"x": tf.TensorSpec((rows, 1)), "table": tf.TensorSpec((table,))}
    data = tf.data.Dataset.from_generator(batches, output_signature=(features, tf.TensorSpec((rows, 1))))
    with strategy.scope():
        net, whole = Table(), Whole()
        net.compile("sgd", "mse")
        whole.compile()
    return {
        "fit": _error(net.fit, data, verbose=0),
        "evaluate": _error(net.evaluate, data, verbose=0),
        "predict": _error(net.predict, data.map(lambda x, y: x), verbose=0),
        "train_on_batch": _error(net.train_on_batch, UNEQUAL, np.zeros((4, 1), "float32")),
        "an output of no row": _error(whole.predict, np.ones((6, 2), "float32"), batch_size=4, verbose=0),
    }


def adapted(size: int, strategy: Any = None, library: Any = keras) -> list[Any]:
    """What a model learns, and gives, behind a layer that was adapted outside of the scope."""
    normalization = keras.layers.Normalization()
    normalization.adapt(X)
    with (strategy or tf.distribute.get_strategy()).scope():
        net = library.Sequential([keras.Input((3,)), normalization, keras.layers.Dense(1, kernel_initializer="ones")])
        net.compile(keras.optimizers.SGD(0.01), "mse")
    data = tf.data.Dataset.from_tensor_slices((X, X.sum(axis=1, keepdims=True))).batch(size)
    history = net.fit(data, epochs=2, verbose=0).history["loss"]
    return [history, net.predict(data, verbose=0), *net.get_weights()]


def adapted_on_workers(strategy: Any, folder: Path, size: int) -> list[Any]:
    """See ``adapted``."""
    return adapted(size, strategy, kde)
