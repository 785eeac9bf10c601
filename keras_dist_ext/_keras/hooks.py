"""Hook Keras' own code, so that it computes what is right for all replicas while the step of one is traced.

A loss divides by the global number of elements, an optimizer sums gradients once. ``intercept(step)`` sends those few
calls of the current thread to ``step`` (see ``step.replica_step``); outside of it, and for models that are not ours,
nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf
from keras.src.losses import loss as loss_module
from keras.src.losses import losses as losses_module
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import cond as cond_module
from tensorflow.python.ops import while_loop as while_module

from keras_dist_ext._keras import (
    creation,  # noqa: F401 - installs hooks
    draw_hooks,  # noqa: F401 - installs them
    keras,
    layer_hooks,  # noqa: F401 - installs them
    tree,
)
from keras_dist_ext._keras.interception import Step, install, thread
from keras_dist_ext._keras.strategies import sum_over_replicas
from keras_dist_ext.aliases import DType, Gradient, Original, SpecNest, TensorNest, TracedFunction, UserFunction

__all__ = ["current_step", "function_arguments", "intercept", "local_updates", "weighs_missed_by_alpha"]

Axis: TypeAlias = int | Sequence[int] | None


@contextlib.contextmanager
def intercept(step: Step | None) -> Iterator[None]:
    """Send this thread's losses, metrics, assignments and optimizer calls to ``step``; ``None`` sends them to Keras."""
    before = getattr(thread, "step", None)
    thread.step = step
    try:
        yield
    finally:
        thread.step = before


def current_step() -> Step | None:
    """The step whose replica this thread is tracing, if any."""
    return getattr(thread, "step", None)


# keras/src/losses/loss.py: losses are local means; the step makes their sum over replicas exact.
@install(loss_module, "scale_loss_for_distribution")
def _(original: Original, step: Step, /, value: tf.Tensor) -> tf.Tensor:
    return value


@install(loss_module, "unscale_loss_for_distribution")
def _(original: Original, step: Step, /, value: tf.Tensor) -> tf.Tensor:
    return value


@install(loss_module, "reduce_weighted_values")
def _(
    original: Original,
    step: Step,
    /,
    values: tf.Tensor,
    sample_weight: TensorNest = None,
    mask: TensorNest = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: DType | None = None,
) -> tf.Tensor:
    local = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    if len(getattr(values, "shape", ())) == 0:
        return step.as_mean(local)
    return step.reduce_loss(local, sample_weight, mask, reduction, dtype)


# keras/src/trainers/trainer.py
@install(keras.Model, "compute_loss")
def _(original: Original, step: Step, /, *args: object, **kwargs: object) -> tf.Tensor:
    step.begin_loss()
    loss = original(*args, **kwargs)
    step.note_loss(loss)
    return loss


# keras/src/metrics/reduction_metrics.py
@install(keras.metrics.Mean, "update_state")
def _(
    original: Original, step: Step, /, metric: keras.Metric, values: tf.Tensor, sample_weight: TensorNest = None
) -> TensorNest:
    values, sample_weight = step.mean_update(metric, values, sample_weight)
    return original(metric, values, sample_weight=sample_weight)


@install(keras.metrics.Sum, "update_state")
def _(
    original: Original, step: Step, /, metric: keras.Metric, values: tf.Tensor, sample_weight: TensorNest = None
) -> TensorNest:
    values, sample_weight = step.sum_update(metric, values, sample_weight)
    return original(metric, values, sample_weight=sample_weight)


# keras/src/optimizers/base_optimizer.py, loss_scale_optimizer.py
for _optimizer_class in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):

    @install(_optimizer_class, "apply")
    def _(
        original: Original,
        step: Step,
        /,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: TensorNest = None,
    ) -> None:
        step.apply(optimizer, grads, trainable_variables, functools.partial(original, optimizer))

    @install(_optimizer_class, "scale_loss")
    def _(original: Original, step: Step, /, optimizer: keras.optimizers.Optimizer, loss: tf.Tensor) -> tf.Tensor:
        return step.scale_loss(optimizer, loss, functools.partial(original, optimizer))


# keras/src/backend/tensorflow/optimizer.py: the step has summed the gradients already.
@install(keras.optimizers.Optimizer, "_all_reduce_sum_gradients")
def _(
    original: Original, step: Step, /, optimizer: keras.optimizers.Optimizer, grads_and_vars: TensorNest
) -> TensorNest:
    return step.all_reduce_gradients(grads_and_vars)


# keras/src/backend/tensorflow/optimizer.py: slices of one row are added up in an order of each replica's own.
for _name in ("assign_add", "assign_sub"):

    @install(keras.optimizers.Optimizer, _name)
    def _(
        original: Original,
        step: Step,
        /,
        optimizer: keras.optimizers.Optimizer,
        variable: keras.Variable,
        value: TensorNest,
    ) -> None:
        original(optimizer, variable, step.sum_duplicates(value) if isinstance(value, tf.IndexedSlices) else value)


# tensorflow/python/framework/indexed_slices.py: so they are where they become a tensor.
def _slices_to_tensor(
    slices: tf.IndexedSlices, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
) -> tf.Tensor:
    step = current_step()
    if step is None or not (dtype is None or tf.as_dtype(dtype).is_compatible_with(slices.dtype)):
        return NotImplemented
    return step.to_dense(slices)


tf.register_tensor_conversion_function(tf.IndexedSlices, _slices_to_tensor, priority=90)  # before TensorFlow's own


# keras/src/backend/tensorflow/core.py
@install(keras.Variable, "_direct_assign")
def _(original: Original, step: Step, /, variable: keras.Variable, value: tf.Tensor) -> None:
    step.assign(variable, value, functools.partial(original, variable))


# tensorflow/python/distribute/distribute_lib.py: BatchNormalization(synchronized=True) calls it in the forward pass.
@install(tf.distribute.ReplicaContext, "all_reduce")
def _(
    original: Original,
    step: Step,
    /,
    context: tf.distribute.ReplicaContext,
    reduce_op: tf.distribute.ReduceOp | str,
    value: tf.Tensor,
    options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> TensorNest:
    return step.all_reduce(reduce_op, value, functools.partial(original, context, options=options))


# tensorflow/python/eager/backprop.py: gradients of what all replicas share are those of the global batch.
@install(tf.GradientTape, "gradient")
def _(
    original: Original,
    step: Step,
    /,
    tape: tf.GradientTape,
    target: TensorNest,
    sources: TensorNest,
    output_gradients: TensorNest = None,
    **kwargs: object,
) -> TensorNest:
    def gradient(target: TensorNest, output_gradients: TensorNest) -> TensorNest:
        before, thread.is_differentiating = is_inner, True
        try:
            return original(tape, target, sources, output_gradients, **kwargs)
        finally:
            thread.is_differentiating = before

    is_inner = getattr(thread, "is_differentiating", False)  # by code of a gradient, as in `tf.recompute_grad`
    differentiate = getattr(step, "differentiate", None)
    if differentiate is None or is_inner:
        return gradient(target, output_gradients)
    caller = sys._getframe(2)
    optimizer = caller.f_locals["self"].optimizer if caller.f_code is _KERAS_STEP else None
    return differentiate(gradient, target, sources, output_gradients, of_keras=optimizer)


# It calls `gradient` in a loop of the graph, where replicas cannot sum anything.
@install(tf.GradientTape, "jacobian")
def _(
    original: Original,
    step: Step,
    /,
    tape: tf.GradientTape,
    target: TensorNest,
    sources: TensorNest,
    *args: object,
    **kwargs: object,
) -> TensorNest:
    def jacobian() -> TensorNest:
        with intercept(None):
            return original(tape, target, sources, *args, **kwargs)

    of_step = getattr(step, "jacobian", None)
    return jacobian() if of_step is None else of_step(jacobian, target, sources)


@install(tf.GradientTape, "batch_jacobian")
def _(
    original: Original,
    step: Step,
    /,
    tape: tf.GradientTape,
    target: tf.Tensor,
    source: tf.Tensor,
    *args: object,
    **kwargs: object,
) -> tf.Tensor:
    def jacobian() -> tf.Tensor:
        return original(tape, target, source, *args, **kwargs)

    with intercept(None):
        of_step = getattr(step, "batch_jacobian", None)
        return jacobian() if of_step is None else of_step(jacobian, target, source)


# keras/src/backend/tensorflow/trainer.py: what it differentiates goes into the optimizer.
_KERAS_STEP = keras.Model.train_step.__code__


# tensorflow/python/ops/nn_impl_distribute.py: these divide by the number of replicas, over which steps here are means.
@install(tf.nn, "compute_average_loss")
def _(
    original: Original,
    step: Step,
    /,
    per_example_loss: tf.Tensor,
    sample_weight: TensorNest = None,
    global_batch_size: int | tf.Tensor | None = None,
) -> tf.Tensor:
    rows = tf.shape(per_example_loss)[0] if global_batch_size is None else global_batch_size
    return original(per_example_loss, sample_weight=sample_weight, global_batch_size=rows)


@install(tf.nn, "scale_regularization_loss")
def _(original: Original, step: Step, /, regularization_loss: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(regularization_loss)


# keras/src/losses/losses.py: Dice and Tversky divide sums over all rows by each other, which is no mean over rows.
@install(losses_module.LossFunctionWrapper, "call")
def _(original: Original, step: Step, /, loss: tf.Tensor, y_true: TensorNest, y_pred: TensorNest) -> tf.Tensor:
    for keras_own, over_all in ((losses_module.dice, _dice), (losses_module.tversky, _tversky)):
        if loss.fn is keras_own:
            loss = losses_module.LossFunctionWrapper(functools.partial(over_all, keras_own), **function_arguments(loss))
            break
    return original(loss, y_true, y_pred)


def function_arguments(one: keras.Loss | keras.Metric) -> dict[str, object]:
    """Return what the function in a loss or metric is given besides targets and outputs, if there is one."""
    return dict(getattr(one, "_fn_kwargs", {}))


def _dice(keras_own: Original, y_true: tf.Tensor, y_pred: tf.Tensor, axis: Axis = None) -> tf.Tensor:
    if not _spans_rows(y_pred, axis):
        return keras_own(y_true, y_pred, axis=axis)
    y_true = tf.cast(y_true, y_pred.dtype)
    both, true, predicted = sum_over_replicas([tf.reduce_sum(v, axis) for v in (y_true * y_pred, y_true, y_pred)])
    return 1 - 2 * both / (true + predicted + keras.backend.epsilon())


def _tversky(
    keras_own: Original, y_true: tf.Tensor, y_pred: tf.Tensor, alpha: float = 0.5, beta: float = 0.5, axis: Axis = None
) -> tf.Tensor:
    if not _spans_rows(y_pred, axis):
        return keras_own(y_true, y_pred, alpha=alpha, beta=beta, axis=axis)
    y_true = tf.cast(y_true, y_pred.dtype)
    parts = y_true * y_pred, (1 - y_pred) * y_true, y_pred * (1 - y_true)
    both, missed, wrong = sum_over_replicas([tf.reduce_sum(part, axis) for part in parts])
    if not weighs_missed_by_alpha(keras_own):
        missed, wrong = wrong, missed
    return 1 - both / (both + alpha * missed + beta * wrong + keras.backend.epsilon())


@functools.cache
def weighs_missed_by_alpha(tversky: Original) -> bool:
    """Whether ``alpha`` weighs what is missed, as up to Keras 3.15, or what is predicted wrongly, as in 3.16.

    Tried with one of two missed and nothing wrong: the loss is 1/2, or 0.
    """
    with tf.init_scope():
        return float(tversky([1.0, 1.0], [1.0, 0.0], alpha=1.0, beta=0.0)) > 0.25


def _spans_rows(y_pred: tf.Tensor, axis: Axis) -> bool:
    return axis is None or any(place % len(y_pred.shape) == 0 for place in tree.flatten(axis))


# tensorflow/python/eager/polymorphic_function/polymorphic_function.py: a trace is used again on the same device.
@install(polymorphic_function.Function, "__call__")
def _(original: Original, step: Step, function: TracedFunction, /, *args: object, **kwargs: object) -> TensorNest:
    return step.call_function(original, function, args, kwargs)


# tensorflow/python/ops/cond.py, while_loop.py: replicas may add up in branches and loops, also in those of AutoGraph.
@install(cond_module, "cond")
def _(
    original: Original,
    step: Step,
    /,
    pred: tf.Tensor,
    true_fn: UserFunction | None = None,
    false_fn: UserFunction | None = None,
    strict: bool = False,
    name: str | None = None,
    **others: object,
) -> TensorNest:
    if others or not hasattr(step, "cond") or not (callable(true_fn) and callable(false_fn)):
        return original(pred, true_fn, false_fn, strict, name, **others)

    def branch(pred: tf.Tensor, true: UserFunction, false: UserFunction) -> TensorNest:
        return original(pred, true, false, strict=strict or true is not true_fn, name=name)

    return step.cond(branch, pred, true_fn, false_fn)


@install(while_module, "while_loop")
def _(
    original: Original,
    step: Step,
    /,
    cond: UserFunction,
    body: UserFunction,
    loop_vars: TensorNest,
    shape_invariants: SpecNest = None,
    *others: object,
    **options: object,
) -> TensorNest:
    if others or not hasattr(step, "while_loop"):
        return original(cond, body, loop_vars, shape_invariants, *others, **options)
    return step.while_loop(original, cond, body, loop_vars, shape_invariants, **options)


@contextlib.contextmanager
def local_updates(strategy: tf.distribute.Strategy, step: Step) -> Iterator[None]:
    """Let each replica update its own copy of mirrored variables, without leaving its thread, by ``step.assign``.

    tensorflow/python/distribute/mirrored_strategy.py and values.py do so when ``extended._use_merge_call()`` is false
    (under XLA on GPUs). All replicas hold the same reduced gradients, so their copies stay equal; and the conditionals
    of Keras' optimizers (loss scale, EMA, accumulation) become ordinary graph code.
    """
    extended = strategy.extended
    if "_use_merge_call" not in vars(extended):  # once, because other threads may train under the strategy too
        of_strategy = extended._use_merge_call
        extended._use_merge_call = lambda: not getattr(thread, "updates_locally", False) and of_strategy()
    thread.updates_locally = True
    try:
        with intercept(step):
            yield
    finally:
        thread.updates_locally = False
