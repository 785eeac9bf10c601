"""Models that trace in a fraction of a second, one a kind of layer or of construction.

Each takes `lib`, the module whose `Model` and `Sequential` it is made of: `keras` for the one device that is right by
definition, `keras_dist_ext` for ours. Nothing draws random numbers after the initial weights.
"""

from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras import layers, ops


class Library(Protocol):
    """What `keras` and `keras_dist_ext` have in common."""

    Model: type[keras.Model]
    Sequential: type[keras.Sequential]


Build = Callable[[Library], keras.Model]


# Ways to construct


def dense(lib: Library) -> keras.Model:
    inputs = layers.Input((5,))
    return lib.Model(inputs, layers.Dense(3)(layers.Dense(6, activation="tanh")(inputs)))


def sequential(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(3)])


def lazy_sequential(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Dense(6, activation="tanh"), layers.Dense(3)])


def subclassed(lib: Library) -> keras.Model:
    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = layers.Dense(6, activation="tanh")
            self.head = layers.Dense(3)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.head(self.hidden(x))

    return Net()


def functional_subclass(lib: Library) -> keras.Model:
    class Net(lib.Model):  # type: ignore[name-defined, misc]
        pass

    inputs = layers.Input((5,))
    return Net(inputs, layers.Dense(3)(inputs))


def nested(lib: Library) -> keras.Model:
    inputs = layers.Input((5,))
    body = lib.Sequential([layers.Input((5,)), layers.Dense(6, activation="tanh")])
    neck = lib.Model(inputs, layers.Dense(4)(inputs))

    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.neck, self.head = body, neck, layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.head(ops.concatenate([self.body(x), self.neck(x)], axis=-1))

    return Net()


def shared_layers(lib: Library) -> keras.Model:
    left, right = layers.Input((5,), name="left"), layers.Input((5,), name="right")
    tower = layers.Dense(4, activation="tanh")
    return lib.Model([left, right], layers.Dense(3)(tower(left) - tower(right)))


def several_inputs_and_outputs(lib: Library) -> keras.Model:
    wide, deep = layers.Input((5,), name="wide"), layers.Input((2,), name="deep")
    both = layers.Concatenate()([wide, layers.Dense(4, activation="tanh")(deep)])
    outputs = {"value": layers.Dense(3, name="value")(both), "label": layers.Dense(4, name="label")(both)}
    return lib.Model({"wide": wide, "deep": deep}, outputs)


class AddIfGiven(layers.Layer):
    def call(self, one: Any, other: Any = None) -> Any:
        return one if other is None else one + other

    def compute_output_spec(self, one: Any, other: Any = None) -> Any:
        return keras.KerasTensor(one.shape, one.dtype)


def optional_input(lib: Library) -> keras.Model:
    one, other = layers.Input((5,), name="one"), layers.Input((5,), name="other", optional=True)
    return lib.Model({"one": one, "other": other}, layers.Dense(3)(AddIfGiven()(one, other)))


def frozen_layer(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((5,)), layers.Dense(6, activation="tanh", trainable=False), layers.Dense(3)])


# Kinds of layers


def classifier(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((5,)), layers.Dense(4, activation="softmax")])


def several_flags(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((5,)), layers.Dense(3, activation="sigmoid")])


def binary_classifier(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((5,)), layers.Dense(1, activation="sigmoid")])


def cnn(lib: Library) -> keras.Model:
    return lib.Sequential(
        [
            layers.Input((6, 6, 1)),
            layers.Conv2D(3, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def convolutions_in_time(lib: Library) -> keras.Model:
    """All that slides along an axis: some of it in TensorFlow fails on no rows, or ends the process."""
    return lib.Sequential(
        [
            layers.Input((4, 3)),
            layers.Conv1D(4, 2, padding="causal", dilation_rate=2, activation="tanh"),
            layers.SeparableConv1D(4, 2, padding="same"),
            layers.DepthwiseConv1D(2, padding="same"),
            layers.MaxPooling1D(2, strides=1, padding="same"),
            layers.Conv1DTranspose(3, 2, activation="tanh"),
            layers.AveragePooling1D(2),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def conv_lstm(lib: Library) -> keras.Model:
    inputs = layers.Input((4, 3))
    lines = layers.ConvLSTM1D(2, 2)(layers.Reshape((4, 3, 1))(inputs))
    return lib.Model(inputs, layers.Dense(3)(layers.Flatten()(lines)))


def speech(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((4, 3)), layers.Dense(4)])


def lstm(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((4, 3)), layers.LSTM(4), layers.Dense(3)])


def gru(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((4, 3)), layers.GRU(4), layers.Dense(3)])


def masked_lstm(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((4, 3)), layers.Masking(), layers.LSTM(4), layers.Dense(3)])


def masked_steps(lib: Library) -> keras.Model:
    """A value for each time step; the mask of the input reaches the loss."""
    return lib.Sequential([layers.Input((4, 3)), layers.Masking(), layers.Dense(4, activation="tanh"), layers.Dense(2)])


def unmasked_steps(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((4, 3)), layers.Dense(4, activation="tanh"), layers.Dense(2)])


def embedding(lib: Library) -> keras.Model:
    return lib.Sequential(
        [layers.Input((4,), dtype="int32"), layers.Embedding(12, 4), layers.GlobalAveragePooling1D(), layers.Dense(3)]
    )


def embedding_with_mask(lib: Library) -> keras.Model:
    return lib.Sequential(
        [layers.Input((4,), dtype="int32"), layers.Embedding(12, 4, mask_zero=True), layers.GRU(3), layers.Dense(3)]
    )


def tagger(lib: Library) -> keras.Model:
    """A class for each token; padding (0) does not count."""
    return lib.Sequential([layers.Input((4,), dtype="int32"), layers.Embedding(12, 4, mask_zero=True), layers.Dense(4)])


def attention(lib: Library) -> keras.Model:
    inputs = layers.Input((4, 3))
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=2)(inputs, inputs)
    normed = layers.LayerNormalization()(inputs + attended)
    return lib.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(normed)))


def synchronized_batch_norm(lib: Library) -> keras.Model:
    return lib.Sequential(
        [
            layers.Input((5,)),
            layers.Dense(6, activation="tanh"),
            layers.BatchNormalization(synchronized=True, momentum=0.8),
            layers.Dense(3),
        ]
    )


def masked_batch_norm(lib: Library) -> keras.Model:
    normalize = layers.BatchNormalization(synchronized=True, momentum=0.8)
    return lib.Sequential([layers.Input((4, 3)), layers.Masking(), normalize, layers.LSTM(3), layers.Dense(3)])


def batch_norm_first(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((5,)), layers.BatchNormalization(momentum=0.8), layers.Dense(3)])


class RunningMean(keras.layers.Layer):
    """Assigns non-trainable state in `call`: the mean of what it saw, and the number of calls."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.mean = self.add_weight(shape=(input_shape[-1],), initializer="zeros", trainable=False, name="mean")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.8 * self.mean + 0.2 * ops.mean(x, axis=0))
            self.calls.assign_add(1.0)
        return x - self.mean if not training else x


def running_mean(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((5,)), RunningMean(), layers.Dense(3)])


def words_and_flags(lib: Library) -> keras.Model:
    """Strings and bools as they come, counted inside the model."""

    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = layers.Dense(3)

        def call(self, x: dict[str, Any]) -> Any:
            length = tf.cast(tf.strings.length(x["word"]), tf.float32)
            return self.head(tf.stack([length, tf.cast(x["flag"], tf.float32)], axis=-1))

    return Net()


def looked_up_words(lib: Library) -> keras.Model:
    words = layers.Input((), dtype="string")
    index = layers.StringLookup(vocabulary=["a", "bb", "ccc", "dddd"])(words)
    return lib.Model(words, layers.Dense(3)(layers.Flatten()(layers.Embedding(6, 4)(index))))


# Losses that the model adds


def regularized(lib: Library) -> keras.Model:
    l2 = keras.regularizers.L2(0.05)
    return lib.Sequential(
        [layers.Input((5,)), layers.Dense(6, activation="tanh", kernel_regularizer=l2), layers.Dense(3)]
    )


def activity_regularized(lib: Library) -> keras.Model:
    """`activity_regularizer` is a sum over the batch (keras/src/layers/layer.py)."""
    return lib.Sequential(
        [layers.Input((5,)), layers.Dense(6, activation="tanh", activity_regularizer="l2"), layers.Dense(3)]
    )


class AddsLoss(keras.layers.Layer):
    """Adds `reduce` of what passes through to the loss, and a penalty on its weight."""

    def __init__(self, reduce: Callable[[Any], Any]) -> None:
        super().__init__()
        self.reduce = reduce

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        self.add_loss(0.05 * self.reduce(ops.square(x * self.scale)))
        self.add_loss(0.01 * ops.sum(ops.square(self.scale)))
        return x * self.scale


class AddsLossInEvaluation(keras.layers.Layer):
    """Adds a sum over the rows to the loss, but not while training."""

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            self.add_loss(0.05 * ops.sum(ops.square(x)))
        return x


def adds_loss_in_evaluation(lib: Library) -> keras.Model:
    return lib.Sequential([layers.Input((5,)), AddsLossInEvaluation(), layers.Dense(3)])


def adds_loss(reduce: Callable[[Any], Any]) -> Build:
    def build(lib: Library) -> keras.Model:
        return lib.Sequential([layers.Input((5,)), AddsLoss(reduce), layers.Dense(3)])

    return build


# Steps of the user's own


def custom_train_step(lib: Library) -> keras.Model:
    """The example of Keras' guide on customising `fit`."""

    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    inputs = layers.Input((5,))
    return Net(inputs, layers.Dense(3)(layers.Dense(6, activation="tanh")(inputs)))


def sums_losses(lib: Library) -> keras.Model:
    """The guides' `sum(self.losses)`, of a sum over rows and of a weight's penalty."""

    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
                loss += sum(self.losses)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    inputs = layers.Input((5,))
    return Net(inputs, layers.Dense(3, kernel_regularizer="l2")(AddsLoss(ops.sum)(inputs)))


def from_scratch(lib: Library) -> keras.Model:
    """A lower-level step: its own loss, its own trackers, `reset_metrics` through `metrics`."""

    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.mae = keras.metrics.MeanAbsoluteError(name="mae")

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = tf.reduce_mean(tf.square(y - y_pred))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.loss_tracker.update_state(loss)
            self.mae.update_state(y, y_pred)
            return {"loss": self.loss_tracker.result(), "mae": self.mae.result()}

        def test_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            y_pred = self(x, training=False)
            self.loss_tracker.update_state(keras.losses.MeanSquaredError()(y, y_pred))
            self.mae.update_state(y, y_pred)
            return {"loss": self.loss_tracker.result(), "mae": self.mae.result()}

        @property
        def metrics(self) -> list[keras.Metric]:
            return [self.loss_tracker, self.mae]

    inputs = layers.Input((5,))
    return Net(inputs, layers.Dense(3)(inputs))


def plain_scalar_logs(lib: Library) -> keras.Model:
    """Returns numbers of the batch and no metric: the logs of an epoch are those of its last batch."""

    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.losses.MeanSquaredError()(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"mine": loss, "input_mean": tf.reduce_mean(x)}

    inputs = layers.Input((5,))
    return Net(inputs, layers.Dense(3)(inputs))


def overridden_parts(lib: Library) -> keras.Model:
    """Every documented method of a step but `train_step`: losses, metrics, `test_step` and `predict_step`."""

    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.extra = keras.metrics.Mean(name="extra")

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            base = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
            extra = ops.mean(ops.abs(y_pred))
            self.extra.update_state(extra)
            return base + 0.1 * extra

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**results, "twice_mae": 2.0 * results["mae"]}

        def test_step(self, data: Any) -> dict[str, Any]:
            return super().test_step(data)

        def predict_step(self, data: Any) -> Any:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"prediction": super().predict_step(data), "rows": ops.sum(x, axis=-1)}

    inputs = layers.Input((5,))
    return Net(inputs, layers.Dense(3)(inputs))


def old_compute_loss(lib: Library) -> keras.Model:
    """`compute_loss` as it was written before Keras 3.3: without `training`."""

    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
            return ops.mean(ops.square(y - y_pred))

    inputs = layers.Input((5,))
    return Net(inputs, layers.Dense(3)(inputs))


def tracker_in_call(lib: Library) -> keras.Model:
    """A metric that a layer updates in `call`: what `add_metric` was."""

    class Tracked(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.size = keras.metrics.Mean(name="activation_size")

        def call(self, x: Any) -> Any:
            self.size.update_state(ops.abs(x))
            return x

    return lib.Sequential([layers.Input((5,)), layers.Dense(6, activation="tanh"), Tracked(), layers.Dense(3)])


def gan(lib: Library) -> keras.Model:
    """Two models, two optimizers, two losses; its noise comes with the data."""

    class Gan(lib.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.Sequential([layers.Input((2,)), layers.Dense(5)])
            self.discriminator = keras.Sequential(
                [layers.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(1)]
            )
            self.d_tracker = keras.metrics.Mean(name="d_loss")
            self.g_tracker = keras.metrics.Mean(name="g_loss")

        def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
            super().compile()
            self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

        def call(self, noise: Any) -> Any:
            return self.discriminator(self.generator(noise))

        @property
        def metrics(self) -> list[keras.Metric]:
            return [self.d_tracker, self.g_tracker]

        def train_step(self, data: Any) -> dict[str, Any]:
            noise, real = data
            with tf.GradientTape() as tape:
                verdicts = self.discriminator(tf.concat([self.generator(noise), real], axis=0))
                labels = tf.concat([tf.ones((tf.shape(noise)[0], 1)), tf.zeros((tf.shape(real)[0], 1))], axis=0)
                d_loss = self.loss_fn(labels, verdicts)
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                verdicts = self.discriminator(self.generator(noise))
                g_loss = self.loss_fn(tf.zeros_like(verdicts), verdicts)
            weights = self.generator.trainable_weights
            self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
            self.d_tracker.update_state(d_loss)
            self.g_tracker.update_state(g_loss)
            return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}

    return Gan()


def alternating(lib: Library) -> keras.Model:
    """Two optimizers for two parts of one model, from one tape."""

    class Net(lib.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = layers.Dense(6, activation="tanh"), layers.Dense(3)
            self.body_optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)

        def call(self, x: Any) -> Any:
            return self.head(self.body(x))

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred, sample_weight)
            body, head = self.body.trainable_weights, self.head.trainable_weights
            gradients = tape.gradient(loss, [*body, *head])
            self.body_optimizer.apply(gradients[: len(body)], body)
            self.optimizer.apply(gradients[len(body) :], head)
            return self.compute_metrics(x, y, y_pred, sample_weight)

    return Net()


def mixed(policy: str, build: Build) -> Build:
    """Build under a dtype policy."""

    def build_mixed(lib: Library) -> keras.Model:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            return build(lib)
        finally:
            keras.config.set_dtype_policy(before)

    return build_mixed
