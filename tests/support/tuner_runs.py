"""What the tests of searches search: small models on scikit-learn's data, and tuners that train nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import keras_tuner
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_iris

import keras_dist_ext as kde

_X, _Y = load_iris(return_X_y=True)
_ORDER = np.random.default_rng(0).permutation(len(_X))
X, Y = _X[_ORDER].astype("float32"), _Y[_ORDER].astype("int32")
TRAIN, HELD_OUT = (X[:120], Y[:120]), (X[120:], Y[120:])
TWO = ("one_device", "mirrored(2)")


def compiled(model: Any, learning_rate: float = 0.05) -> Any:
    model.compile(keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def stock_model(hp: Any) -> Any:
    """A stock model, built with its inputs."""
    units = hp.Int("units", 4, 32, step=4)
    return compiled(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(3, "softmax")])
    )


def lazy_model(hp: Any) -> Any:
    """A stock model that is built when it sees data."""
    return compiled(
        keras.Sequential([keras.layers.Dense(hp.Int("units", 4, 32, step=4)), keras.layers.Dense(3, "softmax")])
    )


@keras.saving.register_keras_serializable(package="tuner_runs")
class Layers(keras.Model):
    """A stock subclass, which is built when it sees data."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.hidden, self.out = keras.layers.Dense(units, "relu"), keras.layers.Dense(3, "softmax")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def subclassed_model(hp: Any) -> Any:
    return compiled(Layers(hp.Int("units", 4, 32, step=4)))


def our_model(hp: Any) -> Any:
    units = hp.Int("units", 4, 32, step=4)
    return compiled(
        kde.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(3, "softmax")])
    )


class Slow(keras.layers.Layer):
    """Sleeps in each training step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x

        def sleep() -> None:
            time.sleep(self.seconds)

        with tf.control_dependencies([tf.py_function(sleep, [], [])]):
            return tf.identity(x)

    def get_config(self) -> dict[str, Any]:
        return {"seconds": self.seconds}


def slowed(strategy: str, seconds: float = 0.03) -> Callable[[Any], Any]:
    """Return what builds a model that is slow under one strategy."""

    def build(hp: Any) -> Any:
        delay = [Slow(seconds)] if hp.get("distribution_strategy") == strategy else []
        return compiled(kde.Sequential([keras.Input((4,)), *delay, keras.layers.Dense(3, "softmax")]))

    return build


def judged(tuner: type, judge: Callable[[Any], float]) -> type:
    """Return a tuner whose trials train nothing: `judge` takes the hyperparameters and returns the score, or raises."""

    class Judged(tuner):  # type: ignore[misc]
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            return judge(trial.hyperparameters)

    return kde.tuner.with_strategies(Judged)


def of_trials(tuner: Any, what: Callable[[Any], Any]) -> list[Any]:
    """Return something of each trial, in order."""
    return [what(trial) for _, trial in sorted(tuner.oracle.trials.items())]


def strategy_of(trial: Any) -> str:
    return str(trial.hyperparameters.get("distribution_strategy"))


def space(*strategies: str, **choices: list[Any]) -> keras_tuner.HyperParameters:
    """Return hyperparameters to be searched, each a choice."""
    hp = keras_tuner.HyperParameters()
    for name, values in choices.items():
        hp.Choice(name, values)
    return hp
