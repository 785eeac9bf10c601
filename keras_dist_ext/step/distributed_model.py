"""What a step needs of a model of this package: to type checkers, Keras' own classes have no attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Protocol

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import TensorNest, UserFunction
from keras_dist_ext.step.compression import GradientCompression
from keras_dist_ext.step.seeds import Seeds
from keras_dist_ext.step.step_plan import StepPlan
from keras_dist_ext.strategy.virtual import VirtualReplicas

__all__ = ["DistributedModel", "PlacedParts", "StepRuntime"]


class PlacedParts(Protocol):
    """Parts of a model on several devices; see ``kde.place``."""

    def place_new_variables(self) -> None:
        """Put each part where it belongs, once it is built."""

    def virtual(self, virtual: VirtualReplicas | None, num_replicas: int) -> VirtualReplicas | None:
        """Return for how many replicas a step runs, given what the model was compiled for."""

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Have parts run where they are, while a step is traced."""


class StepRuntime(Protocol):
    """What a model holds for its steps."""

    @property
    def batch_statistics(self) -> str:
        """Of whose examples BatchNormalization takes them: of each "replica", or of the "global" batch."""

    @property
    def exact(self) -> bool:
        """Whether all replicas together do what one device does, random numbers included."""

    @property
    def compression(self) -> GradientCompression | None:
        """What rounds gradients before they are sent to other replicas, if anything does."""

    @property
    def loss_exponents(self) -> Mapping[str, Mapping[int, Sequence[Fraction]]]:
        """Exponents in the batch size of losses given to ``add_loss``, by the kind of step and the layer's id."""

    @property
    def plans(self) -> dict[str, StepPlan]:
        """What is known of its steps, by their kind."""

    def in_scope(self) -> contextlib.AbstractContextManager[None]:
        """Enter the strategy's scope, unless one is entered already."""


class DistributedModel(Protocol):
    """A model of this package; see ``keras.Model``, and ``kde.Model`` for what it adds."""

    name: str
    optimizer: keras.optimizers.Optimizer
    run_eagerly: bool
    jit_compile: bool
    train_function: UserFunction | None
    test_function: UserFunction | None
    predict_function: UserFunction | None
    placement: PlacedParts | None

    @property
    def losses(self) -> Sequence[tf.Tensor]:
        """What its layers have added to the loss."""

    @property
    def distribute_strategy(self) -> tf.distribute.Strategy:
        """The strategy that it lives under."""

    @property
    def virtual_replicas(self) -> VirtualReplicas | None:
        """For how many replicas it was compiled, if not for those of the strategy."""

    @property
    def replica_seeds(self) -> Seeds:
        """The seeds of its random generators."""

    @property
    def replica_runtime(self) -> StepRuntime:
        """What it holds for its runs."""

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """Its metrics."""

    @property
    def metrics_variables(self) -> list[Variable]:
        """Their variables."""

    @property
    def variables(self) -> list[Variable]:
        """Its variables, without those of metrics."""

    @property
    def weights(self) -> list[Variable]:
        """These without the state of random generators."""

    @property
    def trainable_weights(self) -> list[Variable]:
        """Those that are trained."""

    def get_metrics_result(self) -> dict[str, TensorNest]:
        """Compute the results of its metrics."""

    def compute_metrics(
        self, x: TensorNest, y: TensorNest, y_pred: TensorNest, sample_weight: TensorNest = None
    ) -> dict[str, TensorNest]:
        """Update its metrics, and compute their results."""
