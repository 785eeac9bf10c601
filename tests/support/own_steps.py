"""Models with steps of their own, as people write them: what they are given, and what exists, only their steps know.

Each function trains one of a base class and returns what came out, for another base class to be compared with.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist_ext as kde

__all__ = ["ON_WORKERS", "PROGRAMS", "Base", "compare", "on_workers", "run"]

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(22, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
TEXT = np.array(["a b c", "b c", "d a", "c c d", "a"] * 4 + ["b", "d d"])
PROGRAMS: dict[str, Any] = {}
ON_WORKERS = ("a gan of parts made in the step", "sparse and ragged batches")


class Base:
    """The classes and the strategy that a program is written for; by default those of stock Keras on one device.

    Args:
        size: of a batch, of 22 examples in all: 8 leaves a rest of 6, which is even on two replicas and not on four, 7
            one of a single example, by which replicas are empty.
    """

    def __init__(self, lib: Any = keras, strategy: Any = None, size: int = 8) -> None:
        self.Model, self.Sequential = lib.Model, lib.Sequential
        self.strategy, self.size = strategy, size

    def scope(self) -> Any:
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    def batches(self, *data: Any) -> tf.data.Dataset:
        return batches(*data, size=self.size)


def run(name: str, base: Base) -> dict[str, Any]:
    keras.utils.set_random_seed(7)
    return PROGRAMS[name](base)


def on_workers(strategy: Any, folder: pathlib.Path, name: str, size: int) -> dict[str, Any]:
    """What a program comes to on two workers."""
    return run(name, Base(kde, strategy, size))


def compare(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_equal(np.shape(other[key]), np.shape(one[key]), err_msg=key)
        np.testing.assert_allclose(other[key], one[key], rtol=2e-5, atol=1e-6, err_msg=key)


def program(function: Any) -> Any:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def batches(*data: Any, size: int = 8) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data[0] if len(data) == 1 else data).batch(size)


def descend(tape: tf.GradientTape, loss: Any, variables: list[Any], optimizer: Any) -> None:
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def outcome(model: Any, history: Any = None, optimizers: Any = (), **more: Any) -> dict[str, Any]:
    values = dict(more) if history is None else {**history.history, **more}
    values |= {f"weight {i}": w.numpy() for i, w in enumerate(model.weights)}
    return values | {
        f"optimizer {i}, {j}": v.numpy() for i, o in enumerate(optimizers) for j, v in enumerate(o.variables)
    }


@program
def no_call(base: Base) -> Any:
    class Autoencoder(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = base.Sequential([keras.layers.Dense(4, activation="relu")])
            self.decoder = keras.layers.Dense(6)

        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.decoder(self.encoder(x, training=True)) - x) ** 2)
            descend(tape, loss, self.trainable_variables, self.optimizer)
            return {"error": loss}

        def test_step(self, x: Any) -> Any:
            return {"error": tf.reduce_mean((self.decoder(self.encoder(x)) - x) ** 2)}

        def predict_step(self, x: Any) -> Any:
            return self.encoder(x)

    with base.scope():
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(0.01))
    first = model.predict(base.batches(X), verbose=0)
    history = model.fit(base.batches(X), validation_data=base.batches(X[:13]), epochs=2, verbose=0)
    error = model.evaluate(base.batches(X[:5]), verbose=0, return_dict=True)["error"]
    return outcome(model, history, [model.optimizer], first=first, error_=error)


@program
def evaluated_before_it_is_trained(base: Base) -> Any:
    class Encoder(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            descend(tape, loss, self.first.trainable_variables, self.optimizer)
            return {"error": loss}

    with base.scope():
        model = Encoder()
        model.compile(keras.optimizers.Adam(0.1), loss="mse")
    before = model.evaluate(base.batches(X, Y), verbose=0)
    return outcome(model, model.fit(base.batches(X, Y), verbose=0), [model.optimizer], before=before)


@program
def results_of_before_an_update(base: Base) -> Any:
    class Net(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.loss_tracker, self.of_batch = keras.metrics.Mean(name="loss"), keras.metrics.MeanAbsoluteError()

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, batch: Any) -> Any:
            x, y = batch[:2]
            with tf.GradientTape() as tape:
                y_pred = self(x)
                loss = self.compute_loss(x, y, y_pred)
            descend(tape, loss, self.trainable_variables, self.optimizer)
            return self.logs(y, y_pred, loss)

        def test_step(self, batch: Any) -> Any:
            x, y = batch[:2]
            y_pred = self(x)
            return self.logs(y, y_pred, self.compute_loss(x, y, y_pred))

        def logs(self, y: Any, y_pred: Any, loss: Any) -> Any:
            before = self.loss_tracker.result()
            self.loss_tracker.update_state(loss)
            self.of_batch.update_state(y, y_pred)
            of_batch = self.of_batch.result()
            self.of_batch.reset_state()
            return {"loss": self.loss_tracker.result(), "before": before, "of_batch": of_batch}

    with base.scope():
        model = Net()
        model.compile(keras.optimizers.Adam(0.1), loss="mse")
    history = model.fit(base.batches(X, Y), validation_data=base.batches(X[:13], Y[:13]), epochs=2, verbose=0)
    return outcome(
        model, history, [model.optimizer], again=model.train_on_batch(X[:7], Y[:7], return_dict=True)["before"]
    )


@program
def batches_by_themselves(base: Base) -> Any:
    class Net(base.Model):  # type: ignore[misc, name-defined]
        def train_step(self, batch: Any) -> Any:
            x, y, weights = batch
            if not hasattr(self, "dense"):
                self.dense = keras.layers.Dense(1)
            with tf.GradientTape() as tape:
                loss = keras.losses.MeanSquaredError()(y, self.dense(x), weights)
            descend(tape, loss, self.trainable_variables, self.optimizer)
            return {"error": loss}

        def test_step(self, batch: Any) -> Any:
            return {"error": tf.reduce_mean((self.dense(batch[0]) - batch[1]) ** 2)}

    with base.scope():
        model = Net()
        model.compile("adam")
    losses = [model.train_on_batch(X[:n], Y[:n], Y[:n, 0] ** 2) for n in (8, 5, 1)]
    return outcome(model, losses=losses, tested=model.test_on_batch(X[:7], Y[:7]))


@program
def functions_of_a_step_that_runs_eagerly(base: Base) -> Any:
    """Their arguments have the same shapes whatever the rows, so that TensorFlow would keep what it has traced."""

    class Mean(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")

        @tf.function
        def note(self, mean: Any) -> None:
            self.mean.assign(0.5 * self.mean + 0.5 * mean)

        def call(self, x: Any) -> Any:
            self.note(tf.reduce_mean(x))
            return x

    class Net(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.noted, self.dense = Mean(), keras.layers.Dense(1)
            self.error = keras.metrics.Mean(name="error")

        @property
        def metrics(self) -> Any:
            return [self.error]

        @tf.function
        def track(self, error: Any) -> None:
            self.error.update_state(error)

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                error = tf.reduce_mean((self.dense(self.noted(x)) - y) ** 2)
            descend(tape, error, self.dense.trainable_variables, self.optimizer)
            self.track(error)
            return {"error": self.error.result()}

    with base.scope():
        model = Net()
        model.compile("sgd", run_eagerly=True)
    return outcome(model, model.fit(base.batches(X[:21], Y[:21]), epochs=2, shuffle=False, verbose=0))


@program
def a_gan_of_parts_made_in_the_step(base: Base) -> Any:
    class Gan(base.Model):  # type: ignore[misc, name-defined]
        discriminator: Any = None

        def compile(self, d: Any, g: Any) -> None:
            super().compile()
            self.d_optimizer, self.g_optimizer = d, g
            self.d_loss = keras.metrics.Mean(name="d")

        @property
        def metrics(self) -> Any:
            return [self.d_loss]

        def train_step(self, real: Any) -> Any:
            if self.discriminator is None:
                self.discriminator = keras.Sequential([keras.layers.Dense(5, "relu"), keras.layers.Dense(1)])
                self.generator = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(6)])
                self.g_loss = keras.metrics.Mean(name="g")
            latent = real[:, :3] * 2
            with tf.GradientTape() as tape:
                fake = self.discriminator(self.generator(latent))
                d = tf.reduce_mean(tf.nn.softplus(fake) + tf.nn.softplus(-self.discriminator(real)))
            descend(tape, d, self.discriminator.trainable_weights, self.d_optimizer)
            with tf.GradientTape() as tape:
                g = tf.reduce_mean(tf.nn.softplus(-self.discriminator(self.generator(latent))))
            descend(tape, g, self.generator.trainable_weights, self.g_optimizer)
            self.d_loss.update_state(d)
            self.g_loss.update_state(g)
            return {"d": self.d_loss.result(), "g": self.g_loss.result()}

    with base.scope():
        model = Gan()
        model.compile(keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-2))
    history = model.fit(base.batches(X), epochs=2, verbose=0)
    return outcome(model, history, [model.d_optimizer, model.g_optimizer])


@program
def two_views_and_a_probe(base: Base) -> Any:
    class Contrastive(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = base.Sequential([keras.layers.Dense(5, activation="relu")])
            self.head, self.probe = keras.layers.Dense(3), base.Sequential([keras.layers.Dense(2)])
            self.auc = keras.metrics.AUC(multi_label=True, num_thresholds=20, name="auc")

        def compile(self, optimizer: Any) -> None:
            super().compile()
            self.own = optimizer
            self.probe.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

        def train_step(self, batch: Any) -> Any:
            (one, other), (x, y) = batch
            self.steps.assign_add(1.0)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.head(self.encoder(one)) - self.head(self.encoder(other))) ** 2)
            descend(tape, loss, self.encoder.trainable_weights + self.head.trainable_weights, self.own)
            with tf.GradientTape() as tape:
                guess = self.probe(self.encoder(x))
                of_probe = self.probe.compute_loss(x, y, guess)
            descend(tape, of_probe, self.probe.trainable_weights, self.probe.optimizer)
            self.auc.update_state(y > 0, tf.sigmoid(guess))
            self.probe.compute_metrics(x, y, guess)
            return {"contrast": loss, "auc": self.auc.result(), "mae": self.probe.get_metrics_result()["mae"]}

    with base.scope():
        model = Contrastive()
        model.compile(keras.optimizers.Adam(0.01))
    data = tf.data.Dataset.zip((base.batches(X, X * 1.1), base.batches(X, X[:, :2])))
    return outcome(model, model.fit(data, epochs=2, verbose=0), [model.own, model.probe.optimizer])


@program
def dicts_of_strings_and_more(base: Base) -> Any:
    class Masked(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.ids = keras.layers.TextVectorization(output_sequence_length=4)
            self.table, self.out = keras.layers.Embedding(8, 4), keras.layers.Dense(8)

        def train_step(self, batch: Any) -> Any:
            ids = self.ids(batch["text"])
            with tf.GradientTape() as tape:
                guess = self.out(self.table(tf.where(ids > 3, tf.ones_like(ids), ids)))
                loss = self.compute_loss(None, ids, guess, batch["weight"])
            descend(tape, loss, self.trainable_weights, self.optimizer)
            return {"error": loss}

    with base.scope():
        model = Masked()
        model.ids.adapt(TEXT)
        model.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = base.batches({"text": TEXT, "weight": np.abs(X[:, :4]) + 0.1, "number": np.arange(22)})
    return outcome(model, model.fit(data, epochs=2, verbose=0))


@program
def sparse_and_ragged_batches(base: Base) -> Any:
    class Net(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.kernel = self.add_weight(shape=(6, 1), initializer="ones", name="kernel")
            self.table = keras.layers.Embedding(8, 1)

        def guess(self, sparse: Any, ragged: Any) -> Any:
            found = tf.RaggedTensor.from_row_splits(self.table(ragged.flat_values), ragged.row_splits)
            return tf.sparse.sparse_dense_matmul(sparse, self.kernel) + tf.reduce_sum(found, axis=1)

        def train_step(self, batch: Any) -> Any:
            sparse, ragged, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.guess(sparse, ragged) - y) ** 2)
            descend(tape, loss, self.trainable_variables, self.optimizer)
            return {"error": loss}

        def predict_step(self, batch: Any) -> Any:
            return self.guess(*batch[:2])

    with base.scope():
        model = Net()
        model.compile(keras.optimizers.SGD(0.1))
    words = tf.ragged.constant([[1, 2, 3], [4], [5, 6], [1], [2, 7, 3, 4]] * 4 + [[3], [2, 2]])
    data = base.batches(tf.sparse.from_dense(X * (X > 0.5)), words, Y)
    history = model.fit(data, epochs=2, verbose=0)
    return outcome(model, history, guesses=model.predict(data, verbose=0))


@program
def sparse_batches_for_keras_own_step(base: Base) -> Any:
    class SparseDense(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(6, 1), initializer="ones", name="kernel")

        def call(self, x: Any) -> Any:
            return tf.sparse.sparse_dense_matmul(x, self.kernel)

    class Net(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = SparseDense(), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

    with base.scope():
        model = Net()
        model.compile("sgd", "mse", metrics=["mae"])
    data = base.batches(tf.sparse.from_dense(X * (X > 0.5)), Y)
    return outcome(model, model.fit(data, epochs=2, verbose=0), guesses=model.predict(data, verbose=0))


@program
def a_teacher_that_only_the_loss_knows(base: Base) -> Any:
    class Distiller(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = keras.layers.Dense(2), keras.layers.Dense(2)

        def compile(self, divergence: Any, **arguments: Any) -> None:
            super().compile(**arguments)
            self.divergence = divergence

        def call(self, x: Any) -> Any:
            return self.student(x)

        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
            teacher = tf.nn.softmax(self.teacher(x, training=False))
            return self.divergence(teacher, tf.nn.softmax(y_pred)) + tf.reduce_mean((y_pred - y) ** 2)

    with base.scope():
        model = Distiller()
        model.compile(keras.losses.KLDivergence(), optimizer=keras.optimizers.Adam(0.01), metrics=["mae"])
    data = base.batches(X, X[:, :2])
    return outcome(model, model.fit(data, validation_data=data, epochs=2, verbose=0), [model.optimizer])


@program
def variables_of_tensorflow_made_in_the_step(base: Base) -> Any:
    class Net(base.Model):  # type: ignore[misc, name-defined]
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            if not hasattr(self, "scale"):
                self.scale = tf.Variable(lambda: tf.ones([1]) * 2.0, trainable=False)
                self.shift = tf.Variable(tf.zeros([1]), trainable=False)
                self.dense = keras.layers.Dense(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.dense(x) * self.scale + self.shift - y) ** 2)
            descend(tape, loss, self.dense.trainable_variables, self.optimizer)
            return {"error": loss}

    with base.scope():
        model = Net()
        model.compile("sgd")
    return outcome(model, model.fit(base.batches(X, Y), epochs=2, verbose=0))


@program
def a_step_that_runs_eagerly_only(base: Base) -> Any:
    class Net(base.Model):  # type: ignore[misc, name-defined]
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            if not hasattr(self, "dense"):
                self.dense = keras.layers.Dense(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.dense(x) - y) ** 2)
            if float(kde.reduce_gradients(loss).numpy()) >= 0:
                descend(tape, loss, self.trainable_variables, self.optimizer)
            return {"error": loss}

    with base.scope():
        model = Net()
        model.compile(keras.optimizers.Adam(0.01), run_eagerly=True)
    return outcome(model, model.fit(base.batches(X[:16], Y[:16]), epochs=2, verbose=0), [model.optimizer])


@program
def losses_that_layers_add_in_a_batch_of_four(base: Base) -> Any:
    class Adds(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            y = self.dense(x)
            self.add_loss(0.1 * tf.reduce_sum(y**2))
            return y

    class Net(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.adds, self.out = Adds(), keras.layers.Dense(1)

        def train_step(self, batch: Any) -> Any:
            _, x, y, _ = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.out(self.adds(x)) - y) ** 2) + sum(self.losses)
            descend(tape, loss, self.trainable_weights, self.optimizer)
            return {"error": loss}

    with base.scope():
        model = Net()
        model.compile(keras.optimizers.SGD(0.01))
    return outcome(model, model.fit(base.batches(TEXT, X, Y, Y), epochs=2, verbose=0))


@program
def a_batch_size_that_the_step_asks_for(base: Base) -> Any:
    class Net(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], 6), name="kernel")

        def call(self, x: Any) -> Any:
            return self.dense(x @ self.kernel)

        def train_step(self, batch: Any) -> Any:
            x, y = batch["x"], batch["y"]
            with tf.GradientTape() as tape:
                halves = tf.reshape(self(x), [int(x.shape[0]), 2, 2])
                loss = tf.reduce_mean((halves[:, 0] - y) ** 2)
            descend(tape, loss, self.trainable_weights, self.optimizer)
            return {"error": loss}

    with base.scope():
        model = Net()
        model.compile("sgd")
    data = tf.data.Dataset.from_tensor_slices({"y": Y, "x": X}).batch(8, drop_remainder=True)
    return outcome(model, model.fit(data, epochs=2, verbose=0))


@program
def a_step_that_is_a_function_with_a_branch(base: Base) -> Any:
    class Follows(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = (keras.Sequential([keras.layers.Dense(3)]) for _ in range(2))

        @tf.function
        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.online(x) - tf.stop_gradient(self.target(x)) - 1.0) ** 2)
            descend(tape, loss, self.online.trainable_variables, self.optimizer)
            if self.optimizer.iterations % 2 == 0:
                for follower, variable in zip(self.target.variables, self.online.variables, strict=True):
                    follower.assign(variable)
            return {"error": loss}

    with base.scope():
        model = Follows()
        model.compile(keras.optimizers.Adam(0.01))
    return outcome(model, model.fit(base.batches(X), epochs=2, verbose=0), [model.optimizer])


@program
def gradients_that_are_summed_in_variables_and_applied_from_there(base: Base) -> Any:
    class Net(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def build(self, shape: Any) -> None:
            self.dense.build(shape)
            self.sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.dense.trainable_variables]
            self.count = tf.Variable(0, trainable=False)
            self.built = True

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
                total.assign_add(gradient)
            self.count.assign_add(1)
            tf.cond(tf.equal(self.count, 2), self.update, lambda: None)
            return {"loss": loss}

        def update(self) -> None:
            self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))
            self.count.assign(0)
            for total in self.sums:
                total.assign(tf.zeros_like(total))

    with base.scope():
        model = Net()
        model.build((None, X.shape[1]))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    return outcome(model, model.fit(base.batches(X, Y), epochs=2, verbose=0), [model.optimizer])


@program
def a_loss_of_tensorflow_that_takes_no_empty_batch(base: Base) -> Any:
    class Reader(base.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def train_step(self, batch: Any) -> Any:
            x, labels = batch
            ones = tf.ones_like(labels[:, 0])
            with tf.GradientTape() as tape:
                logits = tf.transpose(self.dense(tf.reshape(x, [-1, 3, 2])), [1, 0, 2])
                losses = tf.nn.ctc_loss(labels, logits, ones, 3 * ones, blank_index=0)
                loss = tf.reduce_mean(losses)
            descend(tape, loss, self.trainable_variables, self.optimizer)
            return {"error": loss}

    with base.scope():
        model = Reader()
        model.compile(keras.optimizers.SGD(0.1))
    data = tf.data.Dataset.from_tensor_slices((X, np.arange(22)[:, None] % 3 + 1)).batch(7)
    return outcome(model, model.fit(data, verbose=0))
