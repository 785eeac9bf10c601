"""Logistic regression of plain ``tf.Variable``s, with an optimizer written by hand, under any strategy.

python -m keras_dist_ext.examples.linear_no_keras    # its data come with scikit-learn: pip install scikit-learn
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

import keras_dist_ext as kde
from keras_dist_ext._keras import keras

__all__ = ["Linear", "data", "train"]

Batch: TypeAlias = tuple[tf.Tensor, tf.Tensor]
"""Measurements, and whether a cell is malignant."""


class Linear(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    """A score from 30 measurements of a cell, and how fast it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = tf.Variable(tf.zeros([30, 1]))
        self.bias = tf.Variable(tf.zeros([1]))
        self.speeds = [tf.Variable(tf.zeros_like(v), trainable=False) for v in (self.weights, self.bias)]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Return a logit for each row."""
        return (x @ self.weights + self.bias)[:, 0]

    def update(self, gradients: Sequence[tf.Tensor]) -> None:
        """Make a step of gradient descent with momentum."""
        for variable, speed, gradient in zip((self.weights, self.bias), self.speeds, gradients, strict=True):
            speed.assign(0.9 * speed - 0.1 * gradient)
            variable.assign_add(speed)


def data(batch_size: int = 64) -> tf.data.Dataset:
    """Return 569 examples, of which 57 are left for the last batch."""
    x, y = load_breast_cancer(return_X_y=True)
    return tf.data.Dataset.from_tensor_slices((scale(x).astype("float32"), y.astype("float32"))).batch(batch_size)


def train(
    strategy: tf.distribute.Strategy, *, epochs: int = 5, callbacks: Sequence[keras.callbacks.Callback] = ()
) -> tuple[Linear, keras.callbacks.History]:
    """Train, and return the model and Keras' history."""
    with strategy.scope():
        model = Linear()

    def losses(batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        x, y = batch
        logits = model(x)
        return tf.nn.sigmoid_cross_entropy_with_logits(y, logits), tf.equal(logits > 0, y > 0)

    def step(replica: kde.Replica, batch: Batch) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            per_example, correct = losses(batch)
            loss = replica.mean_loss(per_example)
        gradients = replica.reduce_gradients(tape.gradient(loss, [model.weights, model.bias]))
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)  # that of the global batch: after the reduction
        model.update(gradients)
        return {"loss": loss, "correct": correct, "norm": norm}

    def test(replica: kde.Replica, batch: Batch) -> dict[str, tf.Tensor]:
        per_example, correct = losses(batch)
        return {"loss": replica.mean_loss(per_example), "correct": correct}

    loop = kde.TrainLoop(
        step,
        test=test,
        parts={"linear": model},
        reduce={"loss": "mean", "correct": "sum", "norm": "max"},
        strategy=strategy,
    )
    history = loop.fit(data(), epochs=epochs, validation_data=data(), callbacks=list(callbacks), verbose=0)
    return model, history


if __name__ == "__main__":
    _, history = train(kde.pick_strategy().strategy, callbacks=[kde.ReplicaMonitor("logs")])
    for name, values in history.history.items():
        print(f"{name:12}", " ".join(f"{value:.4g}" for value in values))
