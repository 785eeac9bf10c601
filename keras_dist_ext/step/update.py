"""Let every replica run an optimizer with the gradients of the global batch.

Letters: R = replicas in sync, over all workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.optimizers import accumulators_of, ends_accumulation, inner_optimizer
from keras_dist_ext._keras.variables import Variable, local_component
from keras_dist_ext.aliases import Gradient
from keras_dist_ext.step.compression import GradientCompression, RoundedGradients
from keras_dist_ext.step.fused_updates import fused_updates
from keras_dist_ext.step.nan_guard import StepGuard

__all__ = [
    "Replicas",
    "UnbuiltOptimizer",
    "Update",
    "assign_mean",
    "assign_reduced",
    "build_optimizer",
    "run_optimizer",
    "run_update",
    "split_flags",
    "sum_terms",
]


class Replicas(Protocol):
    """What adds up over replicas; see ``reducers``."""

    @property
    def compression(self) -> GradientCompression | None:
        """What rounds gradients before they are sent to other replicas, if anything does."""

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up over replicas."""

    def sum_if(self, condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up over replicas if a condition holds."""

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """Let an optimizer assign this replica's copies."""


class UnbuiltOptimizer(Exception):
    """An optimizer is to build its variables in a graph, where it can make none of its own.

    Args:
        build: makes them, outside of graphs, in the strategy's scope.
    """

    def __init__(self, build: Callable[[], None]) -> None:
        super().__init__()
        self.build = build


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What a replica gives an optimizer, and what it adds to the sums that the update needs.

    Attributes:
        optimizer: of Keras.
        gradients: as they were given to it; None where there is none.
        variables: one for each.
        original: runs the optimizer.
        terms: what this replica adds to the gradients that are not None.
        states: variables that layers have assigned, and
        values: what this replica adds to their means; where steps are guarded, what it has found is the last one.
        guard: of the step, if there is one.
        are_global: whether the terms are the gradients of the global batch already, on every replica.
    """

    optimizer: keras.optimizers.Optimizer
    gradients: list[Gradient]
    variables: list[Variable]
    original: Callable[..., None]
    terms: list[tf.Tensor]
    states: list[Variable]
    values: list[tf.Tensor]
    guard: StepGuard | None
    are_global: bool = False

    @property
    def trained(self) -> list[Variable]:
        """The variables that have gradients."""
        return [v for g, v in zip(self.gradients, self.variables, strict=True) if g is not None]


def build_optimizer(optimizer: keras.optimizers.Optimizer, variables: list[Variable]) -> None:
    """Make the variables of an optimizer that has none yet.

    Raises:
        UnbuiltOptimizer: this is traced.
    """
    if not optimizer.built:
        if not tf.executing_eagerly():
            raise UnbuiltOptimizer(functools.partial(optimizer.build, variables))
        with intercept(None):
            optimizer.build(variables)


def run_update(replicas: Replicas, update: Update) -> None:
    """Add up the terms of all replicas, and let every replica run the optimizer on its own copies."""
    if update.are_global:
        run_optimizer(replicas, update, update.terms, None if update.guard is None else update.guard.allows())
        return
    terms, rounded = update.terms, _rounded(replicas, update)
    if rounded is not None:
        terms = rounded.terms
    gradients, values = sum_terms(replicas, update, terms, update.values)
    values, may_update = split_flags(update.guard, values)
    assign_reduced(update.states, values)
    if rounded is not None:
        gradients = rounded.restored(gradients)
        rounded.keep(may_update)
    run_optimizer(replicas, update, gradients, may_update)


def _rounded(replicas: Replicas, update: Update) -> RoundedGradients | None:
    inner = inner_optimizer(update.optimizer)
    if replicas.compression is None or inner.gradient_accumulation_steps:
        return None
    scale = tf.convert_to_tensor(update.optimizer.dynamic_scale) if inner is not update.optimizer else 1.0
    return replicas.compression.round(update.terms, update.trained, scale)


def sum_terms(
    replicas: Replicas, update: Update, gradients: list[Gradient], values: list[tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Add up over replicas, gradients once an accumulation.

    TensorFlow's collectives take dense values from the last to the first, a pack at a time (see ``bytes_per_pack`` of
    ``pick_strategy``): gradients as the backward pass makes them, then the values, which may wait for all gradients
    (CollectiveAllReduce in tensorflow/python/distribute/cross_device_ops.py).

    Args:
        replicas: see above.
        update: that is to be made.
        gradients: what this replica adds to those that are not None.
        values: what it adds to other sums.
    """
    optimizer = update.optimizer
    if inner_optimizer(optimizer).gradient_accumulation_steps:
        values = replicas.sum(values) if values else []
        may_update = None if update.guard is None else update.guard.may_update(values[-1])
        return _accumulate(replicas, optimizer, gradients, update.trained, may_update), values
    for gradient, variable in zip(gradients, update.trained, strict=True):
        if not isinstance(gradient, tf.IndexedSlices):
            gradient.set_shape(variable.shape)  # it may be lost, and TensorFlow packs nothing of unknown size
    summed = replicas.sum(values + gradients)
    return summed[len(values) :], summed[: len(values)]


def split_flags(guard: StepGuard | None, values: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Take from summed values what all replicas have found; return the others, and whether weights may change."""
    if guard is None:
        return values, None
    *values, found = values
    may_update = guard.may_update(found)
    guard.keep(found)
    return values, may_update


def assign_reduced(variables: Sequence[Variable], values: Sequence[tf.Tensor]) -> None:
    """Assign to this replica's copies what the values of all replicas were reduced to."""
    for variable, value in zip(variables, values, strict=True):
        assign_mean(local_component(variable), value)


def assign_mean(local: tf.Tensor, mean: tf.Tensor) -> None:
    """Assign to a variable what its replicas have in the mean; of integers and bools, the nearest."""
    local.assign(tf.cast(mean if local.dtype.is_floating else tf.round(mean), local.dtype))


def run_optimizer(
    replicas: Replicas, update: Update, reduced: Sequence[tf.Tensor], may_update: tf.Tensor | None = None
) -> None:
    """Let every replica run the optimizer on its own copies, if it may.

    Args:
        replicas: see above.
        update: what it was asked for.
        reduced: the gradients of the global batch, of those that are not None.
        may_update: whether weights may change; None if they do.
    """
    rest = iter(reduced)
    gradients = [None if g is None else next(rest) for g in update.gradients]

    def run() -> tf.Tensor:
        with replicas.updating(), fused_updates(inner_optimizer(update.optimizer)):
            update.original(gradients, update.variables)
        return tf.constant(True)

    if may_update is None:
        run()
    else:
        tf.cond(may_update, run, lambda: tf.constant(False))


def _accumulate(
    replicas: Replicas,
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Gradient],
    variables: list[Variable],
    may_update: tf.Tensor | None,
) -> list[tf.Tensor]:
    """Sum over replicas at the last micro-batch of an accumulation only; before it, keep each replica's own.

    Keras adds what it is given to its accumulators, and at the update divides the sum of both. So before the update the
    accumulators are emptied into the gradients, which then are summed over replicas.
    """
    is_scaled = inner_optimizer(optimizer) is not optimizer
    scale = tf.convert_to_tensor(optimizer.dynamic_scale) if is_scaled else 1.0
    gradients = [tf.convert_to_tensor(g) for g in gradients]
    accumulators = accumulators_of(optimizer, variables)
    is_update = ends_accumulation(optimizer)
    if may_update is not None:
        is_update = tf.logical_and(is_update, may_update)
    if is_scaled:
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        (num_bad,) = replicas.sum([1.0 - tf.cast(finite, tf.float32)])
        is_update = tf.logical_and(is_update, num_bad == 0)
        poison = tf.where(num_bad > 0, float("nan"), 0.0)
        gradients = [g + tf.cast(poison, g.dtype) for g in gradients]
    totals = [
        tf.cond(is_update, lambda g=g, a=a: g + a.value * scale, lambda g=g: g)
        for g, a in zip(gradients, accumulators, strict=True)
    ]
    summed = replicas.sum_if(is_update, totals)
    _empty(accumulators, is_update)
    return summed


def _empty(accumulators: list[Variable], when: tf.Tensor) -> None:
    for accumulator in accumulators:
        local = local_component(accumulator)
        local.assign(tf.cond(when, lambda a=local: tf.zeros_like(a), lambda a=local: a.read_value()))
