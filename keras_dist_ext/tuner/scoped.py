"""Build a trial's model in the scope of its strategy, as one of ours."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext.strategy.scope import check_scope
from keras_dist_ext.training.adoption.adopt import adopt, clone_model
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["ScopedHyperModel", "build_in_scope"]


def build_in_scope(build: Callable[[Any], Any], hp: Any, strategy: tf.distribute.Strategy) -> Any:
    """Build a model in a strategy's scope; one of stock Keras is rebuilt as one of ours.

    Args:
        build: the user's.
        hp: of the trial.
        strategy: of the trial.

    Returns:
        The model; whatever else `build` returns is left to keras-tuner to refuse.

    Raises:
        ScopeError: part of the model was made elsewhere, or a stock model cannot be rebuilt; the message says why.
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
    """A user's hypermodel, whose models are built in scope and trained as the tuner wants it.

    Its other attributes are those of the user's.

    Args:
        inner: the user's.
        build: takes the user's `build` and hyperparameters, and returns the model.
        fit: takes the user's `fit` and its arguments, and returns the results.
    """

    def __init__(self, inner: Any, build: Callable[..., Any], fit: Callable[..., Any]) -> None:
        self.inner = inner
        self._build_with = build
        self._fit_with = fit
        super().__init__(name=inner.name)

    def build(self, hp: Any) -> Any:
        """Build the model of a trial."""
        return self._build_with(self.inner.build, hp)

    def declare_hyperparameters(self, hp: Any) -> None:
        """Add the user's hyperparameters to some."""
        self.inner.declare_hyperparameters(hp)

    def fit(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Train the model of a trial."""
        return self._fit_with(self.train, hp, model, *args, **kwargs)

    def train(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Train a model as the user does. Models that `fit` builds by itself, say one a fold, are in scope, too."""
        if not self.has_own_fit:
            return self.inner.fit(hp, model, *args, **kwargs)
        attributes = vars(self.inner)
        own = attributes.get("build")
        attributes["build"] = functools.partial(self._build_with, self.inner.build)
        try:
            return self.inner.fit(hp, model, *args, **kwargs)
        finally:
            attributes.pop("build") if own is None else attributes.update(build=own)

    @property
    def has_own_fit(self) -> bool:
        """Whether training is the user's own."""
        return type(self.inner).fit is not keras_tuner.HyperModel.fit

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.inner, name)
