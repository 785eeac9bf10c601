"""Build the model of some hyperparameters under their strategy, with what is coupled to the strategy."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.errors import StrategyError
from keras_dist_ext.strategy.pick import StrategyChoice
from keras_dist_ext.tuner.coupled import Coupled, CoupledValues, apply_coupled
from keras_dist_ext.tuner.global_state import capture_keras_settings
from keras_dist_ext.tuner.processes.process_role import ProcessRole
from keras_dist_ext.tuner.scoped import Build, build_in_scope
from keras_dist_ext.tuner.strategies import Strategies

__all__ = ["Built", "ModelBuilder", "Purpose"]


class Purpose(enum.Enum):
    """What a model is built for."""

    TRAIN = enum.auto()
    DISCOVER = enum.auto()  # to find the hyperparameters that `build` asks for
    LOAD = enum.auto()  # to get the weights of a trial that has ended


@dataclass
class Built:
    """What a model was built under; of several executions of a trial, all are built under the same."""

    choice: StrategyChoice | None = None  # None: not built yet
    values: CoupledValues = field(default_factory=CoupledValues)


class ModelBuilder:
    """Builds models, each under the strategy of its hyperparameters.

    Args:
        strategies: of the search.
        coupled: hyperparameters that belong to the strategy.
        role: of this process in the search.

    Attributes:
        built: what the last model was built under.
    """

    def __init__(self, strategies: Strategies, coupled: Coupled, role: ProcessRole) -> None:
        self._strategies = strategies
        self._coupled = coupled
        self._role = role
        self._purpose = Purpose.TRAIN
        self._restore_settings: Callable[[], None] = lambda: None
        self.built = Built()

    @contextlib.contextmanager
    def purpose(self, purpose: Purpose) -> Iterator[None]:
        """Build for a purpose, as long as a `with` lasts."""
        self._purpose = purpose
        try:
            yield
        finally:
            self._purpose = Purpose.TRAIN

    @contextlib.contextmanager
    def kept_settings(self) -> Iterator[None]:
        """Let builds within a `with` start with Keras' present settings: keras-tuner calls `clear_session` before."""
        self._restore_settings = capture_keras_settings()
        try:
            yield
        finally:
            self._restore_settings = lambda: None

    def start_trial(self) -> Built:
        """Return what the models of the next trial are built under, to be filled in by `build`."""
        self.built = Built()
        return self.built

    def build(self, build: Build, hp: keras_tuner.HyperParameters) -> keras.Model:
        """Return the model of some hyperparameters, to which `couple` has not been applied yet.

        Args:
            build: the user's.
            hp: the hyperparameters; the strategy is one of them.

        Raises:
            StrategyError: the strategy is not available here.
            ScopeError: the model cannot live under it.
        """
        self._restore_settings()
        choice = self._choice(hp)
        self.built.choice = choice
        self._coupled.declare(hp)
        model = build_in_scope(build, hp, choice.strategy)
        if isinstance(model, keras.Model) and self._purpose is not Purpose.DISCOVER:
            self.built.values = self.values(hp, choice.strategy)
        return model

    def couple(self, model: keras.Model) -> None:
        """Set on a model that is to be trained what is coupled to its strategy.

        Raises:
            TunerError: the model has no optimizer on which it can be set.
            InfeasibleError: the model takes batches of a size that its replicas do not get.
        """
        if isinstance(model, keras.Model) and self._purpose is not Purpose.DISCOVER:
            apply_coupled(model, self.built.values)

    def values(self, hp: keras_tuner.HyperParameters, strategy: tf.distribute.Strategy) -> CoupledValues:
        """Return what is coupled to a strategy."""
        return self._coupled.values(hp, strategy.num_replicas_in_sync)

    def _choice(self, hp: keras_tuner.HyperParameters) -> StrategyChoice:
        name = self._strategies.declare(hp)
        no_strategy = StrategyChoice(tf.distribute.get_strategy(), "none", "no trial runs in this process")
        if self._purpose is Purpose.DISCOVER and self._role.is_chief:
            return no_strategy
        try:
            return self._strategies.get(name)
        except StrategyError:
            if self._purpose is Purpose.LOAD and not self._role.is_single:
                return no_strategy
            # The hyperparameters that `build` asks for do not depend on the strategy that it is called under.
            other = self._strategies.first_available() if self._purpose is Purpose.DISCOVER else None
            if other is None:
                raise
            return other
