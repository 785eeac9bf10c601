"""An LSTM that reads digits line by line, batched by length, under any strategy or several workers.

python -m keras_dist_ext.examples.sequences
keras-dist-ext launch --workers 2 -- python -m keras_dist_ext.examples.sequences
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext._keras import keras

__all__ = ["data", "train"]

Batch: TypeAlias = tuple[tf.Tensor, tf.Tensor]
"""Lines of digits, and labels."""

PADDING = -1.0


def data(strategy: tf.distribute.Strategy, num_images: int = 1797) -> tf.data.Dataset:
    """Return batches of digits without their blank lines: 3 to 8 lines of 8 pixels, and labels."""
    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        images, labels = digits["images"][:num_images], digits["labels"][:num_images]
    lines = [image[image.any(axis=1)] / 16 for image in images]
    x = tf.RaggedTensor.from_row_lengths(np.concatenate(lines).astype("float32"), [len(image) for image in lines])
    y = labels.astype("int32")
    return kde.bucket_by_length((x, y), strategy=strategy, batch_size=50, padding_value=PADDING, seed=1)


def train(
    strategy: tf.distribute.Strategy,
    *,
    epochs: int = 3,
    num_images: int = 1797,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> tuple[kde.TrainLoop, keras.callbacks.History]:
    """Train, and return the loop and Keras' history."""
    layers = keras.layers
    with strategy.scope():
        keras.utils.set_random_seed(1)
        reader = keras.Sequential(
            [layers.Input((None, 8)), layers.Masking(PADDING), layers.LSTM(24), layers.Dense(10)], name="reader"
        )
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=1.0)

    def step(replica: kde.Replica, batch: Batch) -> dict[str, tf.Tensor]:
        x, y = batch
        with tf.GradientTape() as tape:
            logits = reader(x, training=True)
            loss = replica.mean_loss(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        optimizer.apply(tape.gradient(loss, reader.trainable_variables), reader.trainable_variables)
        return {"loss": loss, "correct": tf.equal(tf.argmax(logits, -1, tf.int32), y), "examples": tf.size(y)}

    loop = kde.TrainLoop(
        step,
        parts={"reader": reader, "optimizer": optimizer},
        reduce={"loss": "mean", "correct": "sum", "examples": "sum"},
        strategy=strategy,
    )
    history = loop.fit(data(strategy, num_images), epochs=epochs, callbacks=list(callbacks), verbose=0)
    return loop, history


if __name__ == "__main__":
    _, history = train(kde.pick_strategy().strategy, callbacks=[kde.ReplicaMonitor("logs")])
    for name, values in history.history.items():
        print(f"{name:12}", " ".join(f"{value:.4g}" for value in values))
