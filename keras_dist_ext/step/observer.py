"""Hooks that are called with what a step does while it is traced."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import Gradient, TensorNest
from keras_dist_ext.step.branches import Place
from keras_dist_ext.step.step_plan import GradientCall

__all__ = ["StepObserver"]


class StepObserver:
    """Is called with what a step does while it is traced; these hooks do nothing.

    Attributes:
        examines: whether the step is traced in a scratch graph, to learn what becomes of its gradients.
        nested: the branches, loops and functions that are being traced, the outermost first; where it examines.
    """

    examines = False
    nested: list[Place]

    def on_draw(self, own: tf.Tensor) -> tf.Tensor:
        """Return a seed, or random numbers, that no other replica has, or another tensor in its place."""
        return own

    def on_numbers(self, kind: str, shape: tf.TensorShape) -> None:
        """Take note of random numbers that are drawn by a key."""

    def on_variable(self, name: str) -> None:
        """Take note of a variable of Keras that the step makes."""

    def on_write(self, variable: Variable) -> None:
        """Take note of a variable of Keras that the step assigns."""

    def on_assign(self, variable: Variable) -> None:
        """Take note of state of a layer whose mean over replicas is taken after the step."""

    def on_gather(self, value: tf.Tensor) -> None:
        """Take note of a tensor with the rows of all replicas."""

    def on_differentiate(self, target: TensorNest, sources: Sequence[TensorNest]) -> GradientCall | None:
        """Take note of losses, and what they are differentiated for; say what becomes of the gradients, if it is so."""

    def on_gradient(self, value: tf.Tensor) -> tf.Tensor:
        """Return what a step gets for the gradient that it has asked for."""
        return value

    def on_apply(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> None:
        """Take note of gradients that are given to an optimizer."""

    def on_unknown_losses(self) -> bool:
        """Take note that a layer adds a loss of which is not known yet how it grows; say whether to go on without."""
        return False

    def on_result(self) -> None:
        """Take note that the result of a metric is computed."""

    def on_end(self, gradients: TensorNest, returned: Sequence[tf.Tensor]) -> None:
        """Take note of a replica's gradients when its step is over, and of what it returns."""

    def on_reduce(self, gradients: Sequence[Gradient]) -> Sequence[bool] | None:
        """Take note of gradients that are made global by hand; say which of them are this replica's own, if known."""

    def on_update(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
        """Take note of the gradients of the global batch that an optimizer runs with."""
