"""Small layers and functions as steps use them, each with the hooks that Keras or TensorFlow has to call in it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.draw_hooks import DRAWS
from keras_dist_ext._keras.interception import definer
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.step.pass_through import PassThrough

__all__ = ["TriedStep", "Use", "uses_of_hooks"]


class TriedStep(PassThrough):
    """Records which hooks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called_hooks: set[str] = set()
        self.drawn: set[str] = set()
        self.skips_ops = False  # of `on_rows`
        self.converts_slices = False

    def draw(self, kind: str, given: Mapping[str, TensorNest], draw: Callable[..., tf.Tensor]) -> tf.Tensor:
        """Record the kind of numbers: its hook is called for nearly all ops, not only for those that draw."""
        self.drawn.add(kind)
        return super().draw(kind, given, draw)

    def to_dense(self, slices: tf.IndexedSlices) -> tf.Tensor:
        """Record that slices are converted to a tensor."""
        self.converts_slices = True
        return super().to_dense(slices)

    def on_rows(self, inputs: TensorNest, op: Callable[[tf.Tensor], TensorNest]) -> TensorNest:
        """Return the outputs of an op."""
        return inputs if self.skips_ops else super().on_rows(inputs, op)


class Use(NamedTuple):
    """Something that steps do.

    Attributes:
        what: its name, as users write it.
        run: does it, in a scratch graph.
        hooks: that it calls, in all tested versions of Keras and TensorFlow.
        draws: the kind of numbers that it draws, if `DRAWS` is one of the hooks.
    """

    what: str
    run: Callable[[], object]
    hooks: tuple[str, ...]
    draws: str | None = None


def uses_of_hooks(step: TriedStep) -> list[Use]:
    """Return all uses that are tried; together they call every hook.

    All that draw are given a seed: without one they would take it from Python's generator, which users draw from.
    """
    return [*_uses_of_models(), *_uses_of_layers(), *_uses_of_losses(step), *_uses_of_draws(), *_uses_of_tensorflow()]


class _Net(keras.Model):  # type: ignore[misc]
    """A model whose step calls what the steps of most models call."""

    def __init__(self) -> None:
        super().__init__(name="hook_checks")
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

    def build(self, shape: TensorNest) -> None:
        self.dense.build(shape)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)


_OF_TEST = (
    "Model.compute_loss",
    "LossFunctionWrapper.call",
    "loss.reduce_weighted_values",
    "loss.scale_loss_for_distribution",
    "loss.unscale_loss_for_distribution",
    "Mean.update_state",
    "Variable._direct_assign",
)
_OF_TRAINING = (*_OF_TEST, "GradientTape.gradient", "Optimizer.apply", "Optimizer._all_reduce_sum_gradients")


def _uses_of_models() -> list[Use]:
    data = tf.ones((2, 2)), tf.ones((2, 1))
    plain, scaled = keras.optimizers.SGD(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    nets = []
    for optimizer in (plain, scaled):
        net = _Net()
        net.build((None, 2))
        net.compile(optimizer, "mse")
        optimizer.build(net.trainable_variables)
        nets.append(net)
    of_scaled = ("LossScaleOptimizer.apply", "LossScaleOptimizer.scale_loss")
    table, slices = tf.Variable([1.0, 2.0]), tf.IndexedSlices(tf.ones((1,)), tf.constant([0]))
    total, mean = keras.metrics.Sum(), keras.metrics.MeanSquaredError()
    return [
        Use("train_step", lambda: nets[0].train_step(data), (*_OF_TRAINING, "Optimizer.scale_loss")),
        Use("train_step with a LossScaleOptimizer", lambda: nets[1].train_step(data), (*_OF_TRAINING, *of_scaled)),
        Use("test_step", lambda: nets[0].test_step(data), _OF_TEST),
        Use("Sum", lambda: total.update_state(data[1]), ("Sum.update_state", "Variable._direct_assign")),
        Use(
            "MeanSquaredError",
            lambda: mean.update_state(data[1], data[1]),
            ("Mean.update_state", "Variable._direct_assign"),
        ),
        Use("sparse updates", lambda: plain.assign_add(table, slices), ("Optimizer.assign_add",)),
        Use("sparse updates", lambda: plain.assign_sub(table, slices), ("Optimizer.assign_sub",)),
        Use("a Variable", lambda: keras.Variable(1.0), ("Variable._initialize",)),
    ]


def _uses_of_layers() -> list[Use]:
    of_layers, plain = keras.layers, {"data_format": "channels_last"}
    kernel = {**plain, "kernel_initializer": "zeros"}
    depth = {**plain, "depthwise_initializer": "zeros"}
    both = {**depth, "pointwise_initializer": "zeros"}
    image, sequence = (2, 4, 4, 1), (2, 4, 1)
    recurrent = of_layers.SimpleRNN(1, kernel_initializer="zeros", recurrent_initializer="zeros", seed=1)
    moments = ("BatchNormalization._moments", "ReplicaContext.all_reduce", "Variable._direct_assign")
    given: list[tuple[keras.Layer, tuple[int, ...], tuple[str, ...]]] = [
        (of_layers.Conv2D(1, 2, **kernel), image, ("nn.conv",)),
        (of_layers.Conv2DTranspose(1, 2, **kernel), image, ("nn.conv_transpose",)),
        (of_layers.DepthwiseConv2D(2, **depth), image, ("nn.depthwise_conv",)),
        (of_layers.SeparableConv2D(1, 2, **both), image, ("nn.separable_conv",)),
        (of_layers.MaxPooling2D(**plain), image, ("nn.max_pool",)),
        (of_layers.AveragePooling2D(2, **plain), image, ()),
        (of_layers.Conv1D(1, 2, **kernel), sequence, ("nn.conv",)),
        (of_layers.BatchNormalization(synchronized=True), image, moments),
        (of_layers.Dropout(0.5, seed=1), image, ("SeedGenerator.next", "random.draw_seed", DRAWS)),
        (recurrent, sequence, ()),
    ]
    return [
        Use(
            type(layer).__name__,
            lambda layer=layer, shape=shape: layer(tf.ones(shape), training=True),  # type: ignore[misc]
            (f"{definer(type(layer), 'call').__name__}.call", *hooks),
            "uniform" if DRAWS in hooks else None,
        )
        for layer, shape, hooks in given
    ] + [Use("keras.ops.add", lambda: keras.ops.add(tf.ones((2,)), tf.ones((2,))), ("numpy.add",))]


def _uses_of_losses(step: TriedStep) -> list[Use]:
    values = tf.ones((2, 2))
    over_all = ("LossFunctionWrapper.call", "loss.reduce_weighted_values", "ReplicaContext.all_reduce")

    def ctc() -> None:
        step.skips_ops = True  # its graph is large
        keras.ops.ctc_loss(tf.ones((2, 2), tf.int32), tf.ones((2, 4, 3)), tf.constant([2, 2]), tf.constant([4, 4]))
        step.skips_ops = False

    return [
        Use("Dice", lambda: keras.losses.Dice()(values, values), over_all),
        Use("Tversky", lambda: keras.losses.Tversky()(values, values), over_all),
        Use("keras.ops.ctc_loss", ctc, ("ctc_ops.ctc_loss_dense",)),
        Use(
            "tf.nn.compute_average_loss",
            lambda: tf.nn.compute_average_loss(tf.ones((2,))),
            ("nn.compute_average_loss",),
        ),
        Use(
            "tf.nn.scale_regularization_loss",
            lambda: tf.nn.scale_regularization_loss(tf.ones(())),
            ("nn.scale_regularization_loss",),
        ),
    ]


def _uses_of_draws() -> list[Use]:
    seed, drawing = keras.random.SeedGenerator(1), keras.random
    by_key: list[tuple[str, Callable[[], object], str | None]] = [
        ("uniform", lambda: drawing.uniform((2,), seed=seed), "uniform"),
        ("normal", lambda: drawing.normal((2,), seed=seed), "normal"),
        ("truncated_normal", lambda: drawing.truncated_normal((2,), seed=seed), "truncated_normal"),
        ("randint", lambda: drawing.randint((2,), 0, 5, seed=seed), "uniform_int"),
        ("categorical", lambda: drawing.categorical(tf.ones((2, 2)), 2, seed=seed), None),
        ("binomial", lambda: drawing.binomial((2,), 3.0, 0.5, seed=seed), None),
    ]
    of_keras = ("SeedGenerator.next", "random.draw_seed")
    return [
        Use(f"keras.random.{name}", run, of_keras if draws is None else (*of_keras, DRAWS), draws)
        for name, run, draws in by_key
    ] + [
        Use("tf.random.split", lambda: tf.random.split([1, 2], 2), (DRAWS,), "uniform_full_int"),
        # Without a seed it fails where ops are to be deterministic.
        Use("tf.random.uniform", lambda: tf.random.uniform((2,), seed=1), ("random_seed.get_seed",)),
        Use("tf.nn.dropout", lambda: tf.nn.dropout(tf.ones((2,)), 0.5, seed=1), ("random_seed.get_seed",)),
    ]


def _uses_of_tensorflow() -> list[Use]:
    state = tf.Variable(1.0)
    squared = tf.function(lambda x: x * x, autograph=False)
    watched: dict[str, TensorNest] = {}

    def watch() -> None:
        with tf.GradientTape() as tape:
            x = tf.ones((2, 2))
            tape.watch(x)
            y = squared(x)
        watched.update(tape=tape, x=x, y=y)

    def differentiate(name: str) -> None:
        getattr(watched["tape"], name)(watched["y"], watched["x"])

    def refuse(name: str) -> None:
        """Ask for a jacobian from a tape that is used up, which loads nothing: their code takes longest to load."""
        with contextlib.suppress(RuntimeError):
            differentiate(name)

    return [
        Use("a tf.function", watch, ("Function.__call__",)),
        Use("GradientTape.gradient", lambda: differentiate("gradient"), ("GradientTape.gradient",)),
        Use("GradientTape.jacobian", lambda: refuse("jacobian"), ("GradientTape.jacobian",)),
        Use("GradientTape.batch_jacobian", lambda: refuse("batch_jacobian"), ("GradientTape.batch_jacobian",)),
        Use("tf.cond", lambda: tf.cond(state > 0, lambda: 1.0, lambda: 2.0), ("cond.cond",)),
        Use("tf.case", lambda: tf.case([(state > 0, lambda: 1.0)], default=lambda: 2.0), ("cond.cond",)),
        Use(
            "tf.while_loop",
            lambda: tf.while_loop(lambda n: n < 2, lambda n: n + 1, (tf.constant(0),)),
            ("while_loop.while_loop",),
        ),
        *_uses_of_autograph(),
    ]


def _uses_of_autograph() -> list[Use]:
    with contextlib.suppress(OSError):  # without its source it is not converted
        inspect.getsource(_branch_and_loop)
        run = tf.autograph.to_graph(_branch_and_loop)
        return [Use("AutoGraph", lambda: run(tf.constant(1.0)), ("cond.cond", "while_loop.while_loop"))]
    return []


def _branch_and_loop(x: tf.Tensor) -> tf.Tensor:
    if x > 0:  # noqa: SIM108 - a statement, which is converted
        y = x
    else:
        y = -x
    while y < 2:
        y += 1
    return y
