"""keras-tuner's tuners with a strategy for each trial, and a decorator that makes one of any other tuner."""

from __future__ import annotations

from typing import TypeVar

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.errors import TunerError
from keras_dist_ext.tuner.search import StrategySearch

__all__ = ["BayesianOptimization", "GridSearch", "Hyperband", "RandomSearch", "with_strategies"]


class RandomSearch(StrategySearch, keras_tuner.RandomSearch):  # type: ignore[misc]
    """keras-tuner's RandomSearch with a strategy for each trial; see `StrategySearch`."""


class BayesianOptimization(StrategySearch, keras_tuner.BayesianOptimization):  # type: ignore[misc]
    """keras-tuner's BayesianOptimization with a strategy for each trial; see `StrategySearch`."""


class Hyperband(StrategySearch, keras_tuner.Hyperband):  # type: ignore[misc]
    """keras-tuner's Hyperband with a strategy for each trial; see `StrategySearch`."""


class GridSearch(StrategySearch, keras_tuner.GridSearch):  # type: ignore[misc]
    """keras-tuner's GridSearch, which tries all strategies before it changes another value; see `StrategySearch`."""


_Tuner = TypeVar("_Tuner", bound=type)


def with_strategies(cls: _Tuner) -> _Tuner:
    """Make a custom tuner search strategies, too; for use as a decorator.

        @kde.tuner.with_strategies
        class Mine(keras_tuner.RandomSearch): ...

    Args:
        cls: a class derived from `keras_tuner.Tuner`.

    Returns:
        A class of the same name, whose constructor also takes what `RandomSearch` here takes; ``cls`` itself where it
        does already.

    Raises:
        TunerError: the class is not a `keras_tuner.Tuner`.
    """
    if isinstance(cls, type) and issubclass(cls, StrategySearch):
        return cls
    if not (isinstance(cls, type) and issubclass(cls, keras_tuner.Tuner)):
        raise TunerError(
            f"Expected a keras_tuner.Tuner, got {getattr(cls, '__name__', repr(cls))}, which does not build Keras "
            "models for trials. (SklearnTuner searches scikit-learn models, which no strategy distributes.)"
        )
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (StrategySearch, cls), body)  # type: ignore[return-value]
