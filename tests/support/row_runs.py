"""Steps that compute with the rows of all replicas, and the same of one device."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist_ext as kde

RANDOM = np.random.default_rng(0)
VIEWS = tuple(RANDOM.normal(size=(22, 5)).astype("float32") for _ in range(2))


def nt_xent(z: tf.Tensor, other: tf.Tensor, reduce: Any = tf.reduce_mean) -> tf.Tensor:
    """SimCLR's loss of two views of all examples."""
    rows = tf.shape(z)[0]
    both = tf.math.l2_normalize(tf.concat([z, other], 0), 1)
    logits = 2.0 * both @ tf.transpose(both) - 1e9 * tf.eye(2 * rows)
    labels = tf.concat([tf.range(rows) + rows, tf.range(rows)], 0)
    return reduce(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def in_batch(z: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """For each example at hand, how well it is told from those of all."""
    logits = tf.math.l2_normalize(z, 1) @ tf.transpose(kde.gather_rows(tf.math.l2_normalize(other, 1)))
    return tf.nn.sparse_softmax_cross_entropy_with_logits(kde.row_indices(z), logits)


def of_all_and_own(z: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Sums over the rows at hand, sums over all, and a mean."""
    everyone = kde.gather_rows(z)
    spread = tf.reduce_sum(tf.math.reduce_variance(everyone, 0))
    return tf.reduce_sum(in_batch(z, other)) + 0.1 * spread + 0.3 * tf.reduce_mean(other**2)


def divided_by_all(z: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """A sum over the rows at hand, divided by the number of all."""
    return tf.reduce_sum(in_batch(z, other)) / tf.cast(tf.shape(kde.gather_rows(z))[0], tf.float32)


LOSSES: dict[str, Any] = {
    "mean of all": lambda z, other: nt_xent(*kde.gather_rows((z, other))),
    "sum of all": lambda z, other: nt_xent(*kde.gather_rows((z, other)), tf.reduce_sum),
    "mean of own": lambda z, other: tf.reduce_mean(in_batch(z, other)),
    "sum of own": lambda z, other: tf.reduce_sum(in_batch(z, other)),
    "vector of own": in_batch,
    "loop over own": lambda z, other: tf.foldl(lambda total, one: total + one, in_batch(z, other), 0.0),
    "both": of_all_and_own,
    "divided by all": divided_by_all,
}


class Pairs(keras.metrics.Metric):  # type: ignore[misc]
    """How many pairs of all examples are in order, and how many pairs there are."""

    def __init__(self) -> None:
        super().__init__(name="pairs")
        self.ordered = self.add_weight(shape=(), initializer="zeros", name="ordered")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, one: Any, other: Any) -> None:
        """Compare all with all."""
        one, other = kde.gather_rows((one, other))
        agree = tf.sign(one[:, None] - one) * tf.sign(other[:, None] - other) > 0
        self.ordered.assign_add(tf.reduce_sum(tf.cast(agree, tf.float32)))
        self.count.assign_add(tf.cast(tf.shape(one)[0], tf.float32))

    def result(self) -> Any:
        """Both."""
        return self.ordered + 1000.0 * self.count


def make(
    lib: Any, strategy: tf.distribute.Strategy, *, losses: Any = tuple(LOSSES), scales: bool = False, **arguments: Any
) -> Any:
    """Return a model that has an encoder for each loss, a memory bank, a queue and metrics over all rows."""

    class Encoders(lib.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="encoders")
            self.encoders = {
                name: keras.layers.Dense(3, activation="tanh", name=f"encoder_{place}")
                for place, name in enumerate(losses)
            }
            state = {"initializer": "zeros", "trainable": False}
            self.bank = self.add_weight(shape=(6, 3), name="bank", **state)
            self.queue = self.add_weight(shape=(5, 5), name="queue", **state)
            self.place = self.add_weight(shape=(), dtype="int32", name="place", **state)
            self.widest = self.add_weight(shape=(5,), name="widest", **state)
            self.pairs, self.spread = Pairs(), keras.metrics.Mean(name="spread")
            self.total, self.norms = keras.metrics.Sum(name="total"), keras.metrics.Mean(name="norms")

        def call(self, x: Any) -> Any:
            return [encoder(x) for encoder in self.encoders.values()]

        def train_step(self, data: Any) -> Any:
            x, other = data
            values = {}
            for name, encoder in self.encoders.items():
                with tf.GradientTape() as tape:
                    z = encoder(x)
                    loss = LOSSES[name](z, encoder(other))
                    scaled = self.optimizer.scale_loss(loss) if scales and not loss.shape.rank else loss
                weights = encoder.trainable_variables
                self.optimizer.apply(tape.gradient(scaled, weights), weights)
                values[name] = tf.reduce_sum(loss) if loss.shape.rank else loss
            self.keep(*kde.gather_rows((x, z)))
            self.pairs.update_state(x[:, 0], other[:, 0])
            return {**values, **{metric.name: metric.result() for metric in self.metrics}}

        def keep(self, x: Any, z: Any) -> None:
            rows = tf.shape(x)[0]
            self.bank.assign(tf.concat([z, self.bank], 0)[:6])
            places = ((tf.range(rows) + self.place) % 5)[-5:, None]
            self.queue.assign(tf.tensor_scatter_nd_update(self.queue, places, x[-5:]))
            self.place.assign((self.place + rows) % 5)
            self.widest.assign(tf.maximum(self.widest, tf.reduce_max(tf.abs(x), 0)))
            self.spread.update_state(tf.math.reduce_std(x))
            self.total.update_state(x)
            self.norms.update_state(tf.norm(x, axis=1))

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Encoders()
        model(VIEWS[0])
        model.compile(keras.optimizers.SGD(0.03), **arguments)
        model.optimizer.build(model.trainable_variables)
    return model


def batches(size: int = 7, *, static: bool = False) -> tf.data.Dataset:
    """Batches of 7, 7, 7 and 1 examples."""
    return tf.data.Dataset.from_tensor_slices(VIEWS).batch(size, drop_remainder=static)


def train(model: Any, *, splits: bool = False, **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a model has logged and become in two epochs."""
    data = batches(**given)
    if splits:
        data = model.distribute_strategy.experimental_distribute_dataset(data)
    history = model.fit(data, epochs=2, verbose=0).history
    return history, {variable.path: np.asarray(variable) for variable in model.weights}


OF_WORKERS: dict[str, Any] = {
    "dynamic": {"size": 7},
    "static": {"size": 7, "static": True},
    "even": {"size": 6, "static": True},
}
OF_WORKERS_LOSSES = ("sum of all", "both")


def train_on_workers(strategy: Any, folder: pathlib.Path, data: str) -> Any:
    """See ``train``; on a worker."""
    return train(make(kde, strategy, losses=OF_WORKERS_LOSSES), **OF_WORKERS[data])


class Spread(keras.layers.Layer):
    """Adds to the loss how little the examples of a batch differ, and keeps how much they do."""

    def build(self, input_shape: Any) -> None:
        self.seen = self.add_weight(shape=(input_shape[-1],), initializer="zeros", trainable=False, name="seen")

    def call(self, x: Any, training: bool = False) -> Any:
        deviation = tf.math.reduce_std(kde.gather_rows(x), 0)
        self.add_loss(0.1 * tf.reduce_sum(tf.nn.relu(2.0 - deviation)))
        if training:
            self.seen.assign(0.9 * self.seen + 0.1 * deviation)
        return x / (deviation + 1.0)


def ranking(y_true: Any, y_pred: Any) -> Any:
    """How far from each other the predictions of all are, against how far they should be."""
    y_true, y_pred = kde.gather_rows((y_true, y_pred))
    return tf.reduce_mean((y_pred - tf.transpose(y_pred) - y_true + tf.transpose(y_true)) ** 2)


def ranking_of_own(y_true: Any, y_pred: Any) -> Any:
    """The same, for each of the examples at hand."""
    return against((y_true, y_pred), kde.gather_rows((y_true, y_pred)))


def against(one: Any, other: Any) -> Any:
    (y_true, y_pred), (others, predicted) = one, map(tf.transpose, other)
    return tf.reduce_mean((y_pred - predicted - y_true + others) ** 2, axis=1)


def ranking_of_all(y_true: Any, y_pred: Any) -> Any:
    """The same, for each of all examples."""
    everyone = kde.gather_rows((y_true, y_pred))
    return against(everyone, everyone)


class OfFunction(keras.losses.Loss):
    def __init__(self, function: Any, reduction: str) -> None:
        super().__init__(reduction=reduction)
        self.call = function


def compiled(
    lib: Any, strategy: tf.distribute.Strategy, loss: Any, reduction: str = "sum_over_batch_size", **arguments: Any
) -> Any:
    """Return a model whose loss, layer and metrics see all rows."""
    keras.utils.set_random_seed(2)
    with strategy.scope():
        net = lib.Sequential([keras.Input((5,)), keras.layers.Dense(4), Spread(), keras.layers.Dense(1)])
        net.compile(
            keras.optimizers.SGD(0.02),
            OfFunction(loss, reduction),
            metrics=[ranking, ranking_of_own, ranking_of_all],
            **arguments,
        )
    return net


COMPILED: dict[str, Any] = {
    "a mean of all": {"loss": ranking},
    "a mean of own": {"loss": ranking_of_own},
    "a sum of own": {"loss": ranking_of_own, "reduction": "sum"},
    "a mean of a vector of all": {"loss": ranking_of_all},
}


def train_compiled(lib: Any, strategy: tf.distribute.Strategy, case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a compiled model has logged and become in two epochs."""
    net = compiled(lib, strategy, **COMPILED[case])
    y = VIEWS[0].sum(axis=1, keepdims=True)
    history = net.fit(VIEWS[0], y, batch_size=7, epochs=2, shuffle=False, verbose=0).history
    return history, {str(place): weight for place, weight in enumerate(net.get_weights())}


def train_compiled_on_workers(strategy: Any, folder: pathlib.Path, case: str) -> Any:
    """See ``train_compiled``; on a worker."""
    return train_compiled(kde, strategy, case)
