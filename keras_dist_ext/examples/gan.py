"""A generator of handwritten digits against a critic, with an optimizer each, under any strategy.

python -m keras_dist_ext.examples.gan
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
"""Images, and noise."""

NOISE = 16


def data(num_images: int = 1797, batch_size: int = 64) -> tf.data.Dataset:
    """Return batches of images, and of noise to make others from: the same whatever the number of replicas."""
    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        images = (digits["images"][:num_images].reshape(-1, 64) / 8 - 1).astype("float32")
    noise = tf.random.stateless_normal([num_images, NOISE], seed=[1, 2])
    return tf.data.Dataset.from_tensor_slices((images, noise)).batch(batch_size)


def train(
    strategy: tf.distribute.Strategy,
    *,
    epochs: int = 5,
    num_images: int = 1797,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> tuple[kde.TrainLoop, keras.callbacks.History]:
    """Train, and return the loop and Keras' history."""
    layers = keras.layers
    with strategy.scope():
        keras.utils.set_random_seed(1)
        generator = keras.Sequential(
            [layers.Input((NOISE,)), layers.Dense(64, "relu"), layers.Dense(64, "tanh")], name="generator"
        )
        critic = keras.Sequential([layers.Input((64,)), layers.Dense(64, "leaky_relu"), layers.Dense(1)], name="critic")
        # A large epsilon: else a gradient of nothing but rounding makes a step as large as any other.
        generator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5, epsilon=1e-4)
        critic_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5, epsilon=1e-4)

    def cross_entropy(is_real: float, logits: tf.Tensor) -> tf.Tensor:
        return keras.losses.binary_crossentropy(is_real * tf.ones_like(logits), logits, from_logits=True)

    def step(replica: kde.Replica, batch: Batch) -> dict[str, tf.Tensor]:
        images, noise = batch
        with tf.GradientTape() as tape:
            fake = critic(generator(noise))
            loss = replica.mean_loss(cross_entropy(1.0, critic(images)) + cross_entropy(0.0, fake))
        critic_optimizer.apply(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables)
        with tf.GradientTape() as tape:
            generator_loss = replica.mean_loss(cross_entropy(1.0, critic(generator(noise))))
        gradients = tape.gradient(generator_loss, generator.trainable_variables)
        generator_optimizer.apply(gradients, generator.trainable_variables)
        return {"loss": loss, "generator_loss": generator_loss, "fooled": fake[:, 0] > 0}

    loop = kde.TrainLoop(
        step,
        parts={
            "generator": generator,
            "critic": critic,
            "critic_optimizer": critic_optimizer,
            "generator_optimizer": generator_optimizer,
        },
        reduce={"loss": "mean", "generator_loss": "mean", "fooled": "sum"},
        predict=lambda batch: generator(batch[1]),
        strategy=strategy,
    )
    history = loop.fit(data(num_images), epochs=epochs, callbacks=list(callbacks), verbose=0)
    return loop, history


if __name__ == "__main__":
    _, history = train(kde.pick_strategy().strategy, epochs=30, callbacks=[kde.ReplicaMonitor("logs")])
    for name, values in history.history.items():
        print(f"{name:16}", " ".join(f"{value:.4g}" for value in values[::5]))
