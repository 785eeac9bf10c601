"""Programs that need no change: with metrics, loops and summaries that cost little, or that compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from situations import L, Program, X, Y, batches, heavy, new_folder

import keras_dist_ext as kde

__all__ = ["STEP_HEALTHY"]

IDS = np.random.default_rng(0).integers(50, size=(4096, 4))
TRUTH = (Y > 0).astype("float32")


class Near(keras.metrics.Metric):  # type: ignore[misc]
    """How many predictions are near."""

    def __init__(self) -> None:
        super().__init__(name="near")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.cast(tf.abs(y - predicted) < 0.5, tf.float32)))
        self.count.assign_add(tf.cast(tf.size(y), tf.float32))

    def result(self) -> Any:
        return self.total / self.count


class Iterated(L.Layer):  # type: ignore[misc]
    """A few turns, each of which computes for long."""

    def call(self, x: Any) -> Any:
        weights = tf.fill([x.shape[-1], x.shape[-1]], 1.0 / x.shape[-1])
        _, scale = tf.while_loop(lambda i, _: i < 5, lambda i, v: (i + 1, tf.nn.tanh(v @ weights)), (0, x))
        return x * scale


class Residual(L.Layer):  # type: ignore[misc]
    """A block of layers."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first, self.second, self.norm = L.Dense(units, "gelu"), L.Dense(units), L.LayerNormalization()

    def call(self, x: Any) -> Any:
        return self.norm(x + self.second(self.first(x)))


def _seldom_written(layers: list[Any]) -> Any:
    written = tf.summary.create_file_writer(str(new_folder()))

    class Net(kde.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            step = self.optimizer.iterations
            with written.as_default(step=step), tf.summary.record_if(step % 100 == 0):
                tf.summary.histogram("batch", data[0])
            return logs

    return Net(layers)


def _classified() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, TRUTH)).batch(256).cache().prefetch(2)


def _of_ids() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((IDS, Y)).batch(256).cache().prefetch(2)


STEP_HEALTHY: dict[str, Callable[[], Program]] = {
    "a metric of one's own": lambda: Program(batches(256, 4096), 4096, heavy, compiled={"metrics": [Near()]}, passes=4),
    "AUC, precision and recall": lambda: Program(
        _classified(),
        4096,
        lambda: [*heavy()[:-1], L.Dense(1, "sigmoid")],
        compiled={
            "loss": "binary_crossentropy",
            "metrics": [keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.Recall()],
        },
        passes=4,
    ),
    "a loop of few turns that compute": lambda: Program(
        batches(512, 4096), 4096, lambda: [*heavy()[:-1], Iterated(), L.Dense(1)], passes=4
    ),
    "residual blocks": lambda: Program(
        batches(256, 4096), 4096, lambda: [*heavy()[:2], *(Residual(512) for _ in range(3)), L.Dense(1)], passes=2
    ),
    "a short multi-hot vector": lambda: Program(
        _of_ids(),
        4096,
        lambda: [keras.Input((4,), dtype="int64"), L.CategoryEncoding(50, "multi_hot"), *heavy()[1:]],
        passes=4,
    ),
    "summaries at each 100th step": lambda: Program(batches(256, 4096), 4096, heavy, model=_seldom_written, passes=4),
}
