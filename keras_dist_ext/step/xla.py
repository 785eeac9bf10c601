"""Compile by XLA what a replica computes without the others, if that is possible."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Protocol, cast

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.hooks import current_step, intercept
from keras_dist_ext._keras.layers import call_with_training
from keras_dist_ext._keras.models import compute_loss, overrides, update_loss_tracker
from keras_dist_ext.aliases import BatchFunction, Gradient, TensorNest, TracedFunction, UserFunction
from keras_dist_ext.data import split as data
from keras_dist_ext.errors import BackendError
from keras_dist_ext.messages import warn_once
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.gradients import Gradients
from keras_dist_ext.step.recorder import StepNote
from keras_dist_ext.step.row_weights import RowWeights

__all__ = ["can_compile", "check_default", "compiled", "compiled_step", "draw_as_uncompiled"]


def can_compile(strategy: tf.distribute.Strategy) -> bool:
    """Whether XLA can compile what a replica computes. If not, warn once.

    XLA runs the programs of all logical CPUs of a process on the first one.
    """
    if strategy.num_replicas_in_sync == 1:
        return True
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return False  # compiled already
    devices = strategy.extended.worker_devices
    if len(devices) == 1 or all("GPU" in device for device in devices):
        return True
    warn_once(
        f"jit_compile=True: XLA cannot compile for {len(devices)} replicas that are CPUs of one process; the step runs "
        "without XLA."
    )
    return False


def check_default(environ: Mapping[str, str]) -> None:
    """See that TensorFlow does not have XLA compile each function for which nothing else is said.

    Args:
        environ: of the process.

    Raises:
        BackendError: it does.
    """
    name = "TF_FUNCTION_JIT_COMPILE_DEFAULT"
    if environ.get(name, "").lower() in ("1", "true"):
        raise BackendError(
            f"{name}={environ[name]} has TensorFlow compile every tf.function by XLA, also the step over all replicas, "
            "which is on several devices, so that XLA cannot compile it. Nothing was trained. Unset it before "
            "TensorFlow is imported, and say compile(jit_compile=True), by which each replica's part is compiled."
        )


def compiled(function: UserFunction) -> TracedFunction:
    """Compile a function by XLA."""
    return tf.function(function, jit_compile=True, autograph=False, reduce_retracing=True)


def compiled_step(model: DistributedModel, kind: str) -> BatchFunction:
    """Return ``train_step`` or ``test_step``, compiled: all of it on one device, else what each replica computes."""
    name, num_replicas = f"{kind}_step", model.distribute_strategy.num_replicas_in_sync
    if num_replicas == 1:
        return _noting(getattr(model, name))
    if overrides(model, name):
        warn_once(
            f"jit_compile=True: '{model.name}' has its own {name}, and XLA cannot compile the reductions over "
            f"{num_replicas} replicas in it; the step runs without XLA."
        )
        own_step: BatchFunction = getattr(model, name)
        return own_step
    return functools.partial(_STEPS[kind], model, compiled(functools.partial(_forward, model, kind == "train")))


def _noting(step: BatchFunction) -> BatchFunction:
    """Compile a step as a whole; what is recorded of it is returned with its logs."""

    def inside(batch: TensorNest) -> tuple[TensorNest, tuple[tf.Tensor, ...]]:
        with _step().gradients.noted_here():
            logs, note = step(batch), _note()
        return logs, () if note is None else note.from_compiled()

    function = compiled(inside)

    def run(batch: TensorNest) -> TensorNest:
        (logs, noted), note = function(batch), _note()
        if note is not None:
            note.put_back(0, noted)
        return logs

    return run


def _note() -> StepNote | None:
    return getattr(_step(), "note", None)


def _forward(
    model: DistributedModel, training: bool, x: TensorNest, y: TensorNest, sample_weight: TensorNest
) -> tuple[TensorNest, tf.Tensor, list[Gradient]]:
    """What a replica computes by itself: prediction, loss and, to train, gradients of its own rows.

    With ``_train`` and ``_test`` this is ``train_step`` and ``test_step`` of keras/src/backend/tensorflow/trainer.py,
    which cannot be compiled in one piece when the optimizer in it waits for other replicas.
    """
    with tf.GradientTape() if training else contextlib.nullcontext() as tape:
        y_pred = call_with_training(model, x, training=training)
        loss = compute_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        loss = _step().as_mean(loss)
        scaled = model.optimizer.scale_loss(loss) if training else loss
    if tape is None:
        return y_pred, loss, []

    def gradient(target: TensorNest, above: tf.Tensor) -> TensorNest:
        with intercept(None):
            return tape.gradient(target, model.trainable_weights, above)

    return y_pred, loss, _step().weights.differentiate(gradient, scaled)


class _Step(Protocol):
    """What is asked of the step whose replica is traced."""

    weights: RowWeights
    gradients: Gradients
    note: StepNote | None

    def as_mean(self, value: tf.Tensor) -> tf.Tensor: ...


def _step() -> _Step:
    return cast(_Step, current_step())


def _train(model: DistributedModel, forward: UserFunction, batch: TensorNest) -> TensorNest:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    y_pred, loss, gradients = forward(x, y, sample_weight)
    _step().weights.mark_as_mean(loss)
    update_loss_tracker(model, loss, data.num_rows(x))
    _step().gradients.keep_straight(gradients)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _test(model: DistributedModel, forward: UserFunction, batch: TensorNest) -> TensorNest:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    y_pred, loss, _ = forward(x, y, sample_weight)
    _step().weights.mark_as_mean(loss)
    update_loss_tracker(model, loss, data.num_rows(x))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


_STEPS = {"train": _train, "test": _test}


def draw_as_uncompiled(kind: str, shape: TensorNest, dtype: tf.DType, **key: tf.Tensor) -> tf.Tensor:
    """Draw under XLA what TensorFlow draws without it, or None where that is not known how.

    Both take the same random bits. TensorFlow makes a float of the lowest bits (lib/random/random_distributions.h),
    XLA of the highest, and by another formula for normal numbers.

    Args:
        kind: "uniform", in [0, 1), or "normal", equal to rounding.
        shape: of the result.
        dtype: of the result; float64 and truncated normals are not covered.
        key: ``key``, ``counter`` and ``alg`` of the op.
    """
    if dtype not in _MANTISSA or (kind == "normal" and not isinstance(tf.get_static_value(shape), np.ndarray)):
        return None
    if kind == "uniform":
        bits = tf.raw_ops.StatelessRandomUniformFullIntV2(shape=shape, dtype=tf.uint32, **key)
        return _as_float(bits, dtype)
    static = [int(n) for n in tf.get_static_value(shape)]
    num_pairs = (int(np.prod(static)) + 1) // 2
    bits = tf.raw_ops.StatelessRandomUniformFullIntV2(shape=[num_pairs, 2], dtype=tf.uint32, **key)
    uniform = _as_float(bits, tf.float32)
    radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(uniform[:, 0], 1e-7)))
    angle = 2.0 * np.float32(np.pi) * uniform[:, 1]
    pairs = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1)
    return tf.cast(tf.reshape(tf.reshape(pairs, [-1])[: int(np.prod(static))], static), dtype)


# Bits of the mantissa, and the integer type that holds the whole.
_MANTISSA = {tf.float32: (23, tf.uint32), tf.float16: (10, tf.uint16), tf.bfloat16: (7, tf.uint16)}


def _as_float(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Make of the lowest bits a float from 1 to 2, less 1."""
    num_bits, holder = _MANTISSA[dtype]
    mantissa = tf.cast(tf.bitwise.bitwise_and(bits, tf.constant(2**num_bits - 1, tf.uint32)), holder)
    one = tf.bitcast(tf.constant(1.0, dtype), holder)
    return tf.bitcast(tf.bitwise.bitwise_or(mantissa, one), dtype) - tf.constant(1.0, dtype)
