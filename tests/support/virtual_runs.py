"""Runs for virtual replicas that tests/core/test_virtual.py makes on several numbers of devices, and in two workers."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

RANDOM = np.random.default_rng(0)
NUM_EXAMPLES = 21  # in batches of 8, 8 and 5, of which four virtual replicas have 1, 1, 1 and 2 rows
X = RANDOM.normal(size=(NUM_EXAMPLES, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WEIGHTS = np.linspace(0, 2, NUM_EXAMPLES).astype("float32")
WORDS = RANDOM.integers(0, 7, size=(NUM_EXAMPLES, 4))
IMAGES = RANDOM.normal(size=(NUM_EXAMPLES, 8, 8, 3)).astype("float32")
SENTENCES = np.where(np.abs(X) > 0.7, X, 0)[..., None]  # zeros are masked
FIT: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its data, and what `compile` is given; callables make what must be made in scope."""

    layers: Callable[[], list[Any]]
    x: Any = None  # X, unless given
    y: Any = None  # Y, unless given
    is_weighted: bool = False
    cls: Callable[[], Any] | None = None
    num_examples: int = NUM_EXAMPLES
    is_evaluated: bool = False
    compile: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def data(self) -> dict[str, Any]:
        """Arguments of `fit` and `evaluate`."""
        n = self.num_examples
        x, y = X if self.x is None else self.x, Y if self.y is None else self.y
        return {"x": x[:n], "y": y[:n], "sample_weight": WEIGHTS[:n] if self.is_weighted else None}

    def build(self, strategy: Any, virtual_replicas: Any) -> Any:
        """Build and compile the model in scope."""
        import keras

        import keras_dist_ext as kde

        keras.utils.set_random_seed(3)
        x = self.data["x"]
        with strategy.scope():
            inputs = keras.Input(x.shape[1:], dtype="int32" if x.dtype == int else "float32")
            cls = self.cls() if self.cls else kde.Sequential
            net = cls([inputs, *self.layers(), keras.layers.Dense(1)], name="net")
            arguments = {"optimizer": lambda: keras.optimizers.SGD(0.05), "loss": "mse", **self.compile}
            made = {name: value() if callable(value) else value for name, value in arguments.items()}
            net.compile(**made, virtual_replicas=virtual_replicas)
        return net

    def run(self, strategy: Any, virtual_replicas: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Train; return what the model has come to, and what was logged."""
        net = self.build(strategy, virtual_replicas)
        logs = dict(net.fit(**self.data, **FIT).history)
        if self.is_evaluated:
            logs["evaluated"] = net.evaluate(**self.data, batch_size=8, verbose=0)
        return state_of(net), logs


def state_of(net: Any) -> dict[str, Any]:
    """Weights, moving statistics, slots and counters."""
    variables = enumerate([*net.weights, *net.optimizer.variables])
    return {f"{i} {re.sub('_[0-9]+', '', v.path)}": np.asarray(v) for i, v in variables}  # Keras' names count on


def randomized() -> list[Any]:
    from keras import layers

    return [layers.Dense(8, activation="tanh"), layers.BatchNormalization(), layers.Dropout(0.3)]


def convolutional() -> list[Any]:
    from keras import layers

    return [
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.SpatialDropout2D(0.2),
        layers.Flatten(),
    ]


def deep() -> list[Any]:
    from keras import layers

    recurrent = [layers.Reshape((36, 4)), layers.LSTM(4, recurrent_dropout=0.2), layers.Dropout(0.3)]
    return [*convolutional()[:-1], *recurrent]


def masked() -> list[Any]:
    from keras import layers

    return [layers.Masking(), layers.Dense(4, activation="tanh"), layers.Dropout(0.2)]


def penalized() -> list[Any]:
    from keras import layers

    return [layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2"), layers.Dropout(0.3)]


def embedded() -> list[Any]:
    from keras import layers

    return [layers.Embedding(7, 3), layers.Flatten(), layers.Dropout(0.3)]


def synchronized() -> list[Any]:
    from keras import layers

    return [layers.Dense(4), layers.BatchNormalization(synchronized=True)]


def normalized_kernels() -> list[Any]:
    from keras import layers

    return [layers.SpectralNormalization(layers.Dense(4))]


def stateful() -> list[Any]:
    """A layer that draws, counts, keeps a mean and adds a loss that is a sum."""
    import keras

    class Stateful(keras.Layer):
        def build(self, shape: Any) -> None:
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="count")
            self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")

        def call(self, x: Any) -> Any:
            self.count.assign_add(1)
            self.mean.assign(0.5 * self.mean + keras.ops.mean(x))
            self.add_loss(1e-3 * keras.ops.sum(x * x))
            return x + 0.1 * keras.random.normal(keras.ops.shape(x))

    return [keras.layers.Dense(4), Stateful()]


def weighted_loss() -> Any:
    import keras

    return keras.losses.MeanSquaredError("mean_with_sample_weight")


def summed_loss() -> Any:
    import keras

    return keras.losses.MeanSquaredError("sum")


def adam() -> Any:
    import keras

    # An epsilon of 1e-7 would make whole steps of what rounding leaves of gradients that are zero.
    return keras.optimizers.Adam(0.02, epsilon=0.01)


def clipped() -> Any:
    import keras

    return keras.optimizers.SGD(0.01, momentum=0.9, clipnorm=0.5)


def accumulating() -> Any:
    import keras

    return keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)


def scaled() -> Any:
    import keras

    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), initial_scale=64
    )


def twice_a_step() -> Any:
    """A model whose step draws numbers and updates twice."""
    import keras
    import tensorflow as tf

    import keras_dist_ext as kde

    class Twice(kde.Sequential):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.noise = keras.random.SeedGenerator(5)
            self.tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

        def train_step(self, data: Any) -> Any:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            for _ in range(2):
                with tf.GradientTape() as tape:
                    noisy = x + 0.1 * keras.random.normal(tf.shape(x), seed=self.noise)
                    loss = self.compute_loss(x=x, y=y, y_pred=self(noisy, training=True), sample_weight=weights)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result(), "last": loss}

    return Twice


def computing_logs() -> Any:
    """A model whose step computes with the results of metrics."""

    class Computes(twice_a_step()):  # type: ignore[misc]  # a class made here
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            return {**logs, "doubled": 2 * logs["loss"]}

    return Computes


def metrics() -> list[Any]:
    import keras

    return ["mae", keras.metrics.R2Score()]


WEIGHTED: dict[str, Any] = {"loss": weighted_loss, "weighted_metrics": lambda: ["mse"], "metrics": metrics}

CASES: dict[str, Case] = {
    "batch normalization and dropout": Case(
        randomized, is_evaluated=True, compile={"optimizer": adam, "metrics": metrics}
    ),
    "a convolution": Case(convolutional, x=IMAGES, compile={"optimizer": adam}),
    "a mask": Case(masked, x=SENTENCES, y=np.repeat(Y[:, None], 6, axis=1)),
    "sample weights and additional losses": Case(penalized, is_weighted=True, is_evaluated=True, compile=WEIGHTED),
    "a step of its own": Case(penalized, is_weighted=True, cls=twice_a_step, compile={"loss": weighted_loss}),
    "accumulation of gradients": Case(randomized, compile={"optimizer": accumulating}),
    "sparse gradients": Case(embedded, x=WORDS, compile={"optimizer": adam}),
    "a layer that sums over replicas": Case(synchronized),
    "a layer with state": Case(stateful),
    "virtual replicas without rows": Case(randomized, is_weighted=True, num_examples=18),
    "an eager run": Case(penalized, is_weighted=True, compile={**WEIGHTED, "run_eagerly": True}),
    "a sum as loss, and clipping": Case(randomized, compile={"loss": summed_loss, "optimizer": clipped}),
    "logs computed from results": Case(penalized, cls=computing_logs),
    "a loss scale": Case(randomized, compile={"optimizer": scaled}),
    "a kernel that is assigned": Case(normalized_kernels),
    "steps per execution": Case(randomized, compile={"steps_per_execution": 2}),
    "convolution, LSTM and dropout": Case(deep, x=IMAGES, compile={"optimizer": adam}),
}
OF_WORKERS = ("a convolution", "sample weights and additional losses", "sparse gradients")


def rows_of_worker(worker: int) -> Any:
    """Batches of 4 that one of two workers reads itself: every second example."""
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).shard(2, worker).batch(4)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def run_on_both(strategy: Any, folder: pathlib.Path, name: str, reduction: str) -> Any:
    """What a case comes to with four virtual replicas, two of them on each of two workers, and by ordered sums on one.

    Both in the same process: the bits of a convolution depend on its number of threads.
    """
    import tensorflow as tf

    import keras_dist_ext as kde

    on_workers = CASES[name].run(strategy, kde.VirtualReplicas(4, reduction=reduction))
    return on_workers, CASES[name].run(tf.distribute.get_strategy(), kde.VirtualReplicas(4))


def train_on_rows_of_their_own(strategy: Any, folder: pathlib.Path) -> Any:
    """What a model holds whose workers read every second example each; three virtual replicas are refused before."""
    import keras_dist_ext as kde

    with pytest.raises(kde.StrategyError):
        CASES[OF_WORKERS[0]].build(strategy, 3)
    net = CASES["accumulation of gradients"].build(strategy, 4)
    net.fit(rows_of_worker(strategy.cluster_resolver.task_id), epochs=1, verbose=0)
    return state_of(net)
