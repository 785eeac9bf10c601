"""Look into an optimizer: what it trains, counts and accumulates; and keep the gradients that it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import attributes
from keras_dist_ext._keras.variables import components
from keras_dist_ext.aliases import Gradient

__all__ = [
    "inner_optimizer",
    "keeps_gradients",
    "optimized_variables",
    "num_batches_used",
    "ends_accumulation",
    "end_accumulation_next",
    "accumulated_gradients",
    "accumulators_of",
    "slots_by_attribute",
    "slots_of",
    "GradientSlots",
]


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that a LossScaleOptimizer wraps, or the optimizer itself (optimizers/loss_scale_optimizer.py).

    An optimizer of the user's that holds another one is an optimizer like any other.
    """
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def keeps_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer takes gradients as they are: its `apply` is Keras' own (keras/src/optimizers/*.py)."""
    names = ("apply", "apply_gradients")
    return not any(
        name in vars(optimizer) or getattr(type(optimizer), name).__module__.split(".")[0] != "keras" for name in names
    )


def optimized_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for, in its order (keras/src/optimizers/base_optimizer.py, `build`).

    Before Keras 3.12 a LossScaleOptimizer leaves them to the optimizer in it (loss_scale_optimizer.py, `build`).
    """
    return list(inner_optimizer(optimizer)._trainable_variables)


def num_batches_used(optimizer: keras.optimizers.Optimizer) -> int:
    """How many batches an optimizer has used, also those whose gradients it still accumulates.

    Public is `iterations`, which counts updates (keras/src/optimizers/base_optimizer.py). A LossScaleOptimizer leaves
    counting to the optimizer in it (loss_scale_optimizer.py).
    """
    return int(components(inner_optimizer(optimizer)._iterations)[0].numpy())


def ends_accumulation(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Whether the batch of the step that is traced is the last of an accumulation of gradients, and updates weights.

    keras/src/optimizers/base_optimizer.py, `_backend_apply_gradients`; `iterations` counts updates.
    """
    inner = inner_optimizer(optimizer)
    return (inner._iterations.value + 1) % inner.gradient_accumulation_steps == 0


def end_accumulation_next(optimizer: keras.optimizers.Optimizer) -> None:
    """Have the next batch be the last of an accumulation of gradients (see ``ends_accumulation``), and the only one.

    Replicas give the optimizer the sum of all that they have accumulated, one device the last gradient alone.
    """
    inner = inner_optimizer(optimizer)
    steps = inner.gradient_accumulation_steps
    if inner.built and steps:
        for copy in components(inner._iterations):
            copy.assign(copy - copy % steps + steps - 1)
        for accumulator in accumulated_gradients(optimizer):
            for copy in components(accumulator):
                copy.assign(tf.zeros_like(copy))


def accumulated_gradients(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that gradients are accumulated in, of each variable that is optimized (base_optimizer.py, `build`).

    Empty where the optimizer accumulates none, or is not built.
    """
    inner = inner_optimizer(optimizer)
    return list(inner._accumulated_gradients) if inner.built and inner.gradient_accumulation_steps else []


def accumulators_of(optimizer: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Those of ``accumulated_gradients`` that belong to some variables, in their order (base_optimizer.py)."""
    inner = inner_optimizer(optimizer)
    return [inner._accumulated_gradients[inner._get_variable_index(variable)] for variable in variables]


def slots_by_attribute(optimizer: keras.optimizers.Optimizer) -> dict[str, list[keras.Variable]]:
    """The lists of variables that an optimizer keeps, by name, such as "momentums", without what it optimizes.

    An optimizer's class keeps each kind in an attribute of its own (optimizers/adam.py, ...), beside `_variables` and
    `_trainable_variables` of keras/src/optimizers/base_optimizer.py.
    """
    lists = {name: value for name, value in attributes(inner_optimizer(optimizer)) if isinstance(value, list)}
    return {name.strip("_"): kept for name, kept in lists.items() if name not in ("_variables", "_trainable_variables")}


def slots_of(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable, lists: Mapping[str, list[keras.Variable]]
) -> dict[str, keras.Variable]:
    """What an optimizer keeps for a variable, of ``slots_by_attribute``: "momentums", "velocities" (optimizers/*.py).

    Args:
        optimizer: of Keras.
        variable: that it trains; a copy of a mirrored one, too.
        lists: what ``slots_by_attribute`` returned.
    """
    place = optimizer._get_variable_index(variable)
    return {name: lists[name][place] for name in ("momentums", "velocities") if lists.get(name)}


class GradientSlots:
    """The gradient of each variable's last update, which an optimizer keeps from now on.

    keras/src/optimizers/base_optimizer.py: ``build`` makes slots by ``add_variable_from_reference``, and
    ``update_step`` takes each gradient as it is used: summed over replicas, unscaled, clipped.

    Attributes:
        pairs: of each variable and its gradient, once the optimizer is built.
        are_given: set to have the updates that are traced from now on take the gradients kept here for their own.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.pairs: list[tuple[keras.Variable, keras.Variable]] = []
        self.are_given = False
        self._optimizer = inner_optimizer(optimizer)
        self._build_without, self._update_without = self._optimizer.build, self._optimizer.update_step
        if self._optimizer.built:
            self._build(None)
        self._optimizer.build, self._optimizer.update_step = self._build, self._update_step

    def _build(self, variables: list[keras.Variable] | None) -> None:
        optimizer = self._optimizer
        self._build_without(variables)
        if not self.pairs:
            trained = optimizer._trainable_variables
            made = [optimizer.add_variable_from_reference(v, name="kept_gradient") for v in trained]
            self.pairs = list(zip(trained, made, strict=True))

    def _update_step(self, gradient: Gradient, variable: keras.Variable, learning_rate: tf.Tensor) -> None:
        _, kept = self.pairs[self._optimizer._get_variable_index(variable)]
        if self.are_given:
            gradient = kept.value
        else:
            self._optimizer.assign(kept, tf.convert_to_tensor(gradient))
        self._update_without(gradient, variable, learning_rate)
