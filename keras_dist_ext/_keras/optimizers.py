"""Ask an optimizer what it trains, and keep the gradients that it is given."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist_ext._keras.variables import components

__all__ = ["optimized_variables", "num_batches_used", "GradientSlots"]


def optimized_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for, in its order (keras/src/optimizers/base_optimizer.py, `build`).

    Before Keras 3.12 a LossScaleOptimizer leaves them to the optimizer in it (loss_scale_optimizer.py, `build`).
    """
    return list(getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables)


def num_batches_used(optimizer: Any) -> int:
    """How many batches an optimizer has used, also those whose gradients it still accumulates.

    Public is `iterations`, which counts updates (keras/src/optimizers/base_optimizer.py). A LossScaleOptimizer leaves
    counting to the optimizer in it (loss_scale_optimizer.py).
    """
    return int(components(getattr(optimizer, "inner_optimizer", optimizer)._iterations)[0].numpy())


class GradientSlots:
    """The gradient of each variable's last update, which an optimizer keeps from now on.

    keras/src/optimizers/base_optimizer.py: ``build`` makes slots by ``add_variable_from_reference``, and
    ``update_step`` takes each gradient as it is used: summed over replicas, unscaled, clipped.

    Attributes:
        pairs: of each variable and its gradient, once the optimizer is built.
        are_given: set to have the updates that are traced from now on take the gradients kept here for their own.
    """

    def __init__(self, optimizer: Any) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.are_given = False
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._build_without, self._update_without = self._optimizer.build, self._optimizer.update_step
        if self._optimizer.built:
            self._build(None)
        self._optimizer.build, self._optimizer.update_step = self._build, self._update_step

    def _build(self, variables: Any) -> None:
        optimizer = self._optimizer
        self._build_without(variables)
        if not self.pairs:
            trained = optimizer._trainable_variables
            made = [optimizer.add_variable_from_reference(v, name="kept_gradient") for v in trained]
            self.pairs = list(zip(trained, made, strict=True))

    def _update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        _, kept = self.pairs[self._optimizer._get_variable_index(variable)]
        if self.are_given:
            gradient = kept.value
        else:
            self._optimizer.assign(kept, tf.convert_to_tensor(gradient))
        self._update_without(gradient, variable, learning_rate)
