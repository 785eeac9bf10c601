"""Well-known structures with steps of their own, written for one device: ``structure(base)`` makes one of a base class.

What is random in them (noise, mixtures, times) comes with the data, so that it does not depend on the replica.
"""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext.examples.digits import digits

ROWS = 29
RANDOM = np.random.default_rng(0)
IMAGES, LABELS = digits()[0].reshape(-1, 64)[:ROWS], digits()[2].reshape(-1)[:ROWS].astype("int32")
VIEWS = tuple(IMAGES + RANDOM.normal(0, 0.3, IMAGES.shape).astype("float32") for _ in range(2))
NOISE = RANDOM.normal(size=(ROWS, 4)).astype("float32")
PIXELS = RANDOM.normal(size=IMAGES.shape).astype("float32")
TIMES = RANDOM.uniform(size=(ROWS, 1)).astype("float32")
LINES = tuple(RANDOM.normal(size=(ROWS, width)).astype("float32") for width in (3, 1, 3, 1))


def dense(*widths: int, **arguments: Any) -> Any:
    return keras.Sequential(
        [*(keras.layers.Dense(width, "tanh") for width in widths[:-1]), keras.layers.Dense(widths[-1])], **arguments
    )


def wgan_gp(base: Any) -> Any:
    """The critic's gradient with respect to its inputs is differentiated for its weights."""

    class WganGp(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.critic, self.generator = dense(8, 1), dense(8, 64)

        def compile(self) -> None:
            super().compile()
            self.of_critic, self.of_generator = keras.optimizers.SGD(0.02), keras.optimizers.SGD(0.05)

        def train_step(self, data: Any) -> Any:
            real, noise, mix = data
            with tf.GradientTape() as tape:
                fake = self.generator(noise)
                mixed = real + mix * (fake - real)
                with tf.GradientTape() as inner:
                    inner.watch(mixed)
                    scores = self.critic(mixed)
                slopes = tf.norm(inner.gradient(scores, mixed), axis=1)
                gap = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
                loss = gap + 10.0 * tf.reduce_mean((slopes - 1.0) ** 2)
            weights = self.critic.trainable_variables
            self.of_critic.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                of_generator = -tf.reduce_mean(self.critic(self.generator(noise)))
            weights = self.generator.trainable_variables
            self.of_generator.apply_gradients(zip(tape.gradient(of_generator, weights), weights, strict=True))
            return {"critic": loss, "generator": of_generator}

    model = WganGp()
    model.compile()
    return model


def dcgan(base: Any) -> Any:
    """Two networks, none of which is built before the first step."""

    class Dcgan(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers = keras.layers
            self.discriminator = keras.Sequential(
                [
                    layers.Reshape((8, 8, 1)),
                    layers.Conv2D(3, 3, 2),
                    layers.LeakyReLU(),
                    layers.Flatten(),
                    layers.Dense(1),
                ]
            )
            self.generator = keras.Sequential(
                [layers.Dense(32), layers.Reshape((4, 4, 2)), layers.Conv2DTranspose(1, 4, 2, "same"), layers.Flatten()]
            )

        def compile(self, of_discriminator: Any, of_generator: Any, loss: Any) -> None:
            super().compile()
            self.of_discriminator, self.of_generator, self.loss_fn = of_discriminator, of_generator, loss
            self.followed = [keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")]

        @property
        def metrics(self) -> Any:
            return self.followed

        def train_step(self, data: Any) -> Any:
            real, noise = data
            both = tf.concat([self.generator(noise), real], 0)
            labels = tf.concat([tf.ones((tf.shape(real)[0], 1)), tf.zeros((tf.shape(real)[0], 1))], 0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.discriminator(both))
            weights = self.discriminator.trainable_weights
            self.of_discriminator.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                fooled = self.discriminator(self.generator(noise))
                g_loss = self.loss_fn(tf.zeros_like(fooled), fooled)
            weights = self.generator.trainable_weights
            self.of_generator.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
            for metric, value in zip(self.followed, (d_loss, g_loss), strict=True):
                metric.update_state(value)
            return {metric.name: metric.result() for metric in self.followed}

    model = Dcgan()
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def vae(base: Any) -> Any:
    """A sum over pixels, a mean over examples, and trackers of each term."""

    class Vae(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = dense(8, 8), dense(8, 64)
            self.trackers = {name: keras.metrics.Mean(name=name) for name in ("total", "pixels", "kl")}

        @property
        def metrics(self) -> Any:
            return list(self.trackers.values())

        def train_step(self, data: Any) -> Any:
            x, noise = data
            with tf.GradientTape() as tape:
                mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
                decoded = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
                pixels = tf.reduce_mean(tf.reduce_sum((decoded - x) ** 2, axis=1))
                kl = -0.5 * (1 + log_variance - tf.square(mean) - tf.exp(log_variance))
                kl = tf.reduce_mean(tf.reduce_sum(kl, axis=1))
                total = pixels + kl
            gradients = tape.gradient(total, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            for name, value in (("total", total), ("pixels", pixels), ("kl", kl)):
                self.trackers[name].update_state(value)
            return {name: metric.result() for name, metric in self.trackers.items()}

    model = Vae()
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3))
    return model


def ddim(base: Any) -> Any:
    """A network that is trained, and one that is a moving average of it."""

    class Ddim(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.normalizer = keras.layers.Normalization(axis=None)
            self.normalizer.adapt(IMAGES)
            self.network, self.average = dense(16, 64), dense(16, 64)
            for network in (self.network, self.average):
                network.build((None, 65))
            self.average.set_weights(self.network.get_weights())
            self.noise_loss = keras.metrics.Mean(name="n_loss")

        @property
        def metrics(self) -> Any:
            return [self.noise_loss]

        def denoise(self, network: Any, data: Any) -> Any:
            images, noises, times = data
            angles = 0.1 + 1.3 * times
            noisy = tf.cos(angles) * self.normalizer(images) + tf.sin(angles) * noises
            return network(tf.concat([noisy, tf.sin(angles) ** 2], 1))

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss(data[1], self.denoise(self.network, data))
            weights = self.network.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.noise_loss.update_state(loss)
            for weight, average in zip(self.network.weights, self.average.weights, strict=True):
                average.assign(0.9 * average + 0.1 * weight)
            return {metric.name: metric.result() for metric in self.metrics}

        def test_step(self, data: Any) -> Any:
            self.noise_loss.update_state(self.loss(data[1], self.denoise(self.average, data)))
            return {metric.name: metric.result() for metric in self.metrics}

    model = Ddim()
    model.compile(keras.optimizers.AdamW(0.01, epsilon=1e-3), keras.losses.MeanAbsoluteError())
    return model


def simclr(base: Any) -> Any:
    """Every example is told from all others of both views."""

    class Simclr(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = dense(16, 8), dense(8, 8)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

        @property
        def metrics(self) -> Any:
            return [self.accuracy]

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                one, other = (tf.math.l2_normalize(self.head(self.encoder(view)), 1) for view in data)
                own = kde.row_indices(one)
                one, other = kde.gather_rows((one, other))
                rows = tf.shape(one)[0]
                both = tf.concat([one, other], 0)
                logits = both @ tf.transpose(both) / 0.2 - 1e9 * tf.eye(2 * rows)
                labels = tf.concat([tf.range(rows) + rows, tf.range(rows)], 0)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.accuracy.update_state(tf.gather(labels, own), tf.gather(logits, own))
            return {"loss": loss, "accuracy": self.accuracy.result()}

    model = Simclr()
    model.compile(keras.optimizers.SGD(0.2))
    return model


def nnclr(base: Any) -> Any:
    """The nearest neighbour of each example in a queue of examples seen before is its positive."""

    class Nnclr(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = dense(16, 8)
            queue = tf.math.l2_normalize(tf.constant(np.random.default_rng(1).normal(size=(40, 8)), tf.float32), 1)
            self.queue = self.add_weight(
                shape=(40, 8), initializer=lambda *_, **__: queue, trainable=False, name="queue"
            )

        def nearest(self, z: Any) -> Any:
            found = tf.gather(self.queue, tf.argmax(z @ tf.transpose(self.queue), axis=1))
            return z + tf.stop_gradient(found - z)

        def loss_of(self, one: Any, other: Any) -> Any:
            logits = self.nearest(one) @ tf.transpose(kde.gather_rows(other)) / 0.2
            return tf.nn.sparse_softmax_cross_entropy_with_logits(kde.row_indices(one), logits)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                one, other = (tf.math.l2_normalize(self.encoder(view), 1) for view in data)
                loss = tf.reduce_mean(self.loss_of(one, other) + self.loss_of(other, one))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.queue.assign(tf.concat([kde.gather_rows(one), self.queue], 0)[:40])
            return {"loss": loss}

    model = Nnclr()
    model.compile(keras.optimizers.SGD(0.2))
    return model


def distillation(base: Any) -> Any:
    """A student learns from labels, by the compiled loss, and from a teacher, by another."""

    class Distiller(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = dense(16, 10), dense(10)
            self.teacher.trainable = False
            self.divergence = keras.losses.KLDivergence()

        def call(self, x: Any) -> Any:
            return self.student(x)

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            of_labels = super().compute_loss(x, y, y_pred, sample_weight)
            teacher = self.teacher(x, training=False)
            of_teacher = self.divergence(tf.nn.softmax(teacher / 3.0), tf.nn.softmax(y_pred / 3.0)) * 9.0
            return 0.3 * of_labels + 0.7 * of_teacher

    model = Distiller()
    model.teacher.build((None, 64))
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def sam(base: Any) -> Any:
    """Sharpness-aware minimization: the gradient is taken where the loss is highest nearby."""

    class Sam(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = dense(8, 10)

        def call(self, x: Any) -> Any:
            return self.network(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            norm = tf.linalg.global_norm(gradients)
            steps = [0.1 * gradient / (norm + 1e-12) for gradient in gradients]
            for weight, step in zip(weights, steps, strict=True):
                weight.assign_add(step)
            with tf.GradientTape() as tape:
                uphill = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(uphill, weights)
            for weight, step in zip(weights, steps, strict=True):
                weight.assign_sub(step)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss, "norm": norm, "uphill": uphill}

    model = Sam()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def maml(base: Any) -> Any:
    """The loss after a step of gradient descent is differentiated for the weights before it."""

    class Maml(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.kernel = self.add_weight(shape=(3, 4), initializer="glorot_uniform", name="kernel")
            self.head = self.add_weight(shape=(4, 1), initializer="glorot_uniform", name="head")

        def train_step(self, data: Any) -> Any:
            x, y, query, wanted = data
            weights = [self.kernel, self.head]

            def loss_of(kernel: Any, head: Any, x: Any, y: Any) -> Any:
                return tf.reduce_mean((tf.tanh(x @ kernel) @ head - y) ** 2)

            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    before = loss_of(*weights, x, y)
                gradients = inner.gradient(before, weights)
                adapted = [weight - 0.3 * gradient for weight, gradient in zip(weights, gradients, strict=True)]
                after = loss_of(*adapted, query, wanted)
            self.optimizer.apply_gradients(zip(outer.gradient(after, weights), weights, strict=True))
            return {"before": before, "after": after}

    model = Maml()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def accumulation(base: Any) -> Any:
    """Gradients of three batches are added up in variables before they are applied."""

    class Accumulating(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = dense(8, 10)
            self.network.build((None, 64))
            self.sums = [
                self.add_weight(shape=w.shape, initializer="zeros", trainable=False, name=f"sum_{i}")
                for i, w in enumerate(self.network.trainable_variables)
            ]
            self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

        def call(self, x: Any) -> Any:
            return self.network(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.network.trainable_variables
            self.count.assign_add(1)
            for total, gradient in zip(self.sums, tape.gradient(loss, weights), strict=True):
                total.assign_add(gradient / 3.0)
            tf.cond(self.count % 3 == 0, self.update, lambda: None)
            return {"loss": loss}

        def update(self) -> None:
            self.optimizer.apply([tf.convert_to_tensor(total) for total in self.sums], self.network.trainable_variables)
            for total in self.sums:
                total.assign(tf.zeros_like(total))

    model = Accumulating()
    model.compile(
        keras.optimizers.Adam(0.05, epsilon=1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.optimizer.build(model.network.trainable_variables)
    return model


STRUCTURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "WGAN-GP": (wgan_gp, (IMAGES, NOISE, TIMES)),
    "DCGAN": (dcgan, (IMAGES, NOISE)),
    "VAE": (vae, (IMAGES, NOISE)),
    "DDIM": (ddim, (IMAGES, PIXELS, TIMES)),
    "SimCLR": (simclr, VIEWS),
    "NNCLR": (nnclr, VIEWS),
    "distillation": (distillation, (IMAGES, LABELS)),
    "SAM": (sam, (IMAGES, LABELS)),
    "MAML": (maml, LINES),
    "accumulation": (accumulation, (IMAGES, LABELS)),
}


def train(name: str, base: Any, strategy: tf.distribute.Strategy, size: int = 8) -> tuple[Any, list[Any]]:
    """Return the logs of two epochs, and the weights after them; batches of 8, 8, 8 and 5 examples."""
    make, data = STRUCTURES[name]
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make(base)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(size)
    history = model.fit(batches, epochs=2, verbose=0).history
    return history, model.get_weights()


def train_on_workers(strategy: Any, folder: pathlib.Path, name: str, size: int) -> Any:
    """See ``train``; on a worker."""
    return train(name, kde.Model, strategy, size)
