"""Build a trial's model in the scope of its strategy, as a distributed one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext.aliases import UserFunction
from keras_dist_ext.strategy.scope import check_scope
from keras_dist_ext.training.adoption.adopt import adopt, clone_model
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["Build", "ScopedHyperModel", "build_in_scope"]

Build: TypeAlias = Callable[[keras_tuner.HyperParameters], keras.Model]  # a user's `build`


def build_in_scope(build: Build, hp: keras_tuner.HyperParameters, strategy: tf.distribute.Strategy) -> keras.Model:
    """Build a model in a strategy's scope; a model of stock Keras is rebuilt as a distributed one.

    Args:
        build: the user's.
        hp: of the trial.
        strategy: of the trial.

    Returns:
        The model; anything else that `build` returns is left for keras-tuner to refuse.

    Raises:
        ScopeError: part of the model was created outside the scope, or a stock model cannot be rebuilt.
    """
    with contextlib.nullcontext() if is_default_strategy(strategy) else strategy.scope():
        model = build(hp)
    if not isinstance(model, keras.Model):
        return model
    if runtime_of(model) is not None:
        check_scope(model, strategy).raise_if_bad()
        return model
    return adopt(model, strategy) if model.built else clone_model(model, strategy)


class ScopedHyperModel(keras_tuner.HyperModel):  # type: ignore[misc]
    """A user's hypermodel, whose models are built and trained through the tuner's functions.

    Its other attributes are those of the user's hypermodel.

    Args:
        inner: the user's.
        build: takes the user's `build` and hyperparameters, and returns the model.
        fit: takes the user's `fit` and its arguments, and returns the results.
    """

    def __init__(
        self,
        inner: keras_tuner.HyperModel,
        build: Callable[[Build, keras_tuner.HyperParameters], keras.Model],
        fit: UserFunction,
    ) -> None:
        self.inner = inner
        self._build_with = build
        self._fit_with = fit
        super().__init__(name=inner.name)

    def build(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        """Build the model of a trial."""
        return self._build_with(self.inner.build, hp)

    def declare_hyperparameters(self, hp: keras_tuner.HyperParameters) -> None:
        """Add the user's hyperparameters."""
        self.inner.declare_hyperparameters(hp)

    def fit(self, hp: keras_tuner.HyperParameters, model: keras.Model, *args: object, **kwargs: object) -> object:
        """Train the model of a trial."""
        return self._fit_with(self.train, hp, model, *args, **kwargs)

    def train(self, hp: keras_tuner.HyperParameters, model: keras.Model, *args: object, **kwargs: object) -> object:
        """Train a model by the user's `fit`. Models that it builds itself, such as one per fold, are in scope, too."""
        if not self.has_own_fit:
            return self.inner.fit(hp, model, *args, **kwargs)
        attributes = vars(self.inner)
        instance_build = attributes.get("build")
        attributes["build"] = functools.partial(self._build_with, self.inner.build)
        try:
            return self.inner.fit(hp, model, *args, **kwargs)
        finally:
            attributes.pop("build") if instance_build is None else attributes.update(build=instance_build)

    @property
    def has_own_fit(self) -> bool:
        """Whether training is the user's own."""
        return type(self.inner).fit is not keras_tuner.HyperModel.fit

    def __getattr__(self, name: str) -> object:
        if name == "inner":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.inner, name)
