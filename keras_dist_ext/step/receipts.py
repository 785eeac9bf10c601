"""See that Keras and TensorFlow still call what this package answers in a step, before a first step is made.

A newer release may stop to call one of the functions that ``_keras`` replaces. Nothing would fail then: a loss, a
gradient or a draw would be that of one replica. So each of these hooks is tried once in a process, on a small stock
model that is traced aside, and while a step of Keras' own is traced, the hooks that it must call are noted. On one
replica nothing of this matters, and nothing is tried.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import tensorflow as tf

from keras_dist_ext import versions
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.draw_hooks import DRAWN_KINDS, DRAWS
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.interception import HOOKS
from keras_dist_ext._keras.optimizers import keeps_gradients
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext.errors import BackendError
from keras_dist_ext.step.pass_through import PassThrough
from keras_dist_ext.step.save_receipts import uncalled_save_hooks

__all__ = ["check_hooks", "check_step", "uncalled_hooks"]

_T = TypeVar("_T")


@functools.cache
def check_hooks() -> None:
    """Try all hooks, once a process, outside of anything that replaces functions for a while.

    Raises:
        BackendError: Keras or TensorFlow does not call one of them.
    """
    _refuse(uncalled_hooks(), "a small stock model", " Nothing was trained.")
    unasked = _in_thread(uncalled_save_hooks)
    if unasked:
        named = ", ".join(f"{hook} ({hook.file})" for hook in unasked)
        raise BackendError(
            _advised(
                f"what saves a small model no longer calls {named}, by which keras_dist_ext has files whole, of one "
                "worker each, and with the seeds of replicas: they would not be, without an error. Nothing was trained."
            )
        )


def uncalled_hooks() -> list[str]:
    """Return the hooks that are not called by what should call them.

    Raises:
        BackendError: what should call them fails.
    """
    step = _TriedStep()

    def use_all() -> None:
        with intercept(step):
            _use_all(step)

    _in_thread(use_all)
    if not step.drawn >= set(DRAWN_KINDS.values()):
        step.receipts.discard(DRAWS)
    return [str(hook) for hook in HOOKS if str(hook) not in step.receipts]


def _in_thread(use: Callable[[], _T]) -> _T:
    """Return what a function does in a thread of its own: in no graph, strategy or tape, with names of its own."""
    found: list[_T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            with warnings.catch_warnings(), tf.device("CPU:0"):
                warnings.simplefilter("ignore")  # of a model that nobody has made
                found.append(use())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="hook_receipts")
    thread.start()
    thread.join()
    if failed:
        raise BackendError(_advised(f"A small stock model fails with {type(failed[0]).__name__}: {failed[0]}."))
    return found[0]


class _TriedStep(PassThrough):
    """Notes which hooks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.receipts: set[str] = set()
        self.drawn: set[str] = set()
        self.leaves_out = False  # what a hook would compute with rows

    def draw(self, kind: str, given: Mapping[str, Any], draw: Callable[..., Any]) -> tf.Tensor:
        """Note what is drawn: nearly all ops that are made call its hook."""
        self.drawn.add(kind)
        return super().draw(kind, given, draw)

    def on_rows(self, inputs: Any, op: Callable[[Any], Any]) -> Any:
        """Return what an op gives for each row."""
        return inputs if self.leaves_out else super().on_rows(inputs, op)


class _Net(keras.Model):  # type: ignore[misc]
    """A model whose step calls what the steps of most models call."""

    def __init__(self) -> None:
        super().__init__(name="hook_receipts")
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def _use_all(step: _TriedStep) -> None:
    """Have Keras and TensorFlow call each hook as they do in steps; nothing of it runs but the making of variables.

    All that draws is given a seed: layers without one take a random number of Python's, which others draw from.
    """
    seed = keras.random.SeedGenerator(1)
    state = tf.Variable(1.0)
    table = tf.Variable([1.0, 2.0])
    total = keras.metrics.Sum()
    nets = []
    for optimizer in (keras.optimizers.SGD(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())):
        net = _Net()
        net.build((None, 2))
        net.compile(optimizer, "mse")
        optimizer.build(net.trainable_variables)
        nets.append(net)
    options: dict[str, Any] = {"kernel_initializer": "zeros", "data_format": "channels_last"}
    layers = [
        keras.layers.Conv2D(1, 2, **options),
        keras.layers.Conv2DTranspose(1, 2, **options),
        keras.layers.DepthwiseConv2D(2, depthwise_initializer="zeros", data_format="channels_last"),
        keras.layers.SeparableConv2D(
            1, 2, depthwise_initializer="zeros", pointwise_initializer="zeros", data_format="channels_last"
        ),
        keras.layers.MaxPooling2D(data_format="channels_last"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=1),
    ]
    sequence_layers = [
        keras.layers.Conv1D(1, 2, **options),
        keras.layers.SimpleRNN(1, kernel_initializer="zeros", recurrent_initializer="zeros", seed=1),
    ]

    squared = tf.function(lambda x: x * x, autograph=False)
    with scratch_graph("hook_receipts"):
        for net in nets:
            net.train_step((tf.ones((2, 2)), tf.ones((2, 1))))
        for layer in layers:
            layer(tf.ones((2, 4, 4, 1)), training=True)
        for layer in sequence_layers:
            layer(tf.ones((2, 4, 1)), training=True)
        total.update_state(tf.ones((2,)))
        keras.losses.Dice()(tf.ones((2, 2)), tf.ones((2, 2)))
        for update in (optimizer.inner_optimizer.assign_add, optimizer.inner_optimizer.assign_sub):
            update(table, tf.IndexedSlices(tf.ones((1,)), tf.constant([0])))
        step.leaves_out = True  # its graph is large
        keras.ops.ctc_loss(tf.ones((2, 2), tf.int32), tf.ones((2, 4, 3)), tf.constant([2, 2]), tf.constant([4, 4]))
        for draw in (keras.random.uniform, keras.random.normal, keras.random.truncated_normal):
            draw((2,), seed=seed)
        keras.random.randint((2,), 0, 5, seed=seed)
        tf.random.split([1, 2], 2)
        tf.random.uniform((2,), seed=1)  # without one it fails where ops are to be deterministic
        tf.cond(state > 0, lambda: 1.0, lambda: 2.0)
        tf.while_loop(lambda n: n < 2, lambda n: n + 1, (tf.constant(0),))
        with tf.GradientTape(persistent=True) as tape:
            x = tf.ones((2, 2))
            tape.watch(x)
            y = squared(x)
        tape.jacobian(y, x, experimental_use_pfor=False)
        tape.batch_jacobian(y, x, experimental_use_pfor=False)
        tf.nn.compute_average_loss(tf.ones((2,)))
        tf.nn.scale_regularization_loss(tf.ones(()))
        tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.ones(()))


def check_step(model: Any, kind: str, receipts: Collection[str]) -> None:
    """See that the hooks that a step of Keras' own must call were called while it was traced.

    Args:
        model: whose step it is.
        kind: "train", "test" or "predict".
        receipts: the hooks that steps of this kind of the model have called.

    Raises:
        BackendError: one of them was not.
    """
    _refuse(
        [hook for hook in _expected(model, kind) if hook not in receipts],
        f"the {kind} step of '{model.name}', which is Keras' own,",
    )


def _expected(model: Any, kind: str) -> list[str]:
    if kind not in ("train", "test") or not isinstance(model, keras.Model) or not _is_keras(model, f"{kind}_step"):
        return []
    expected = ["Mean.update_state", "Variable._direct_assign"]
    if _is_keras(model, "compute_loss"):
        expected.append("Model.compute_loss")
    if kind == "train" and model.trainable_weights and model.optimizer is not None:
        expected.append("GradientTape.gradient")
        if keeps_gradients(model.optimizer):
            is_wrapped = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            expected.append("LossScaleOptimizer.apply" if is_wrapped else "Optimizer.apply")
    calls_layers = isinstance(model, keras.Sequential) and _is_keras(model, "call")
    if kind == "train" and calls_layers and any(map(_draws, model.layers)):
        expected.append("SeedGenerator.next")
    return expected


def _is_keras(thing: Any, name: str) -> bool:
    """Whether a method is that of Keras, neither the user's nor, as a loop's, of this package."""
    return name not in vars(thing) and getattr(type(thing), name).__module__.split(".")[0] == "keras"


def _draws(layer: Any) -> bool:
    return type(layer) is keras.layers.Dropout and layer.rate > 0 and _is_keras(layer, "call")


def _refuse(missing: Collection[str], caller: str, consequence: str = "") -> None:
    if missing:
        files = {str(hook): hook.file for hook in HOOKS}
        named = ", ".join(f"{name} ({files.get(name, 'which it no longer has')})" for name in missing)
        raise BackendError(
            _advised(
                f"{caller} no longer calls {named}, by which keras_dist_ext makes the numbers of several replicas "
                f"those of one device: they would be wrong without an error.{consequence}"
            )
        )


def _advised(found: str) -> str:
    installed = f"TensorFlow {tf.__version__} and Keras {keras.__version__}"
    return f"With {installed}: {found} {versions.advice()}"
