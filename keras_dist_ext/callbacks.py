"""Keras callbacks that carry values from a run to checks, and back."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.errors import ScopeError
from keras_dist_ext.scope import check_scope, is_default_strategy

__all__ = ["ScopeGuard"]


class ScopeGuard(keras.callbacks.Callback):  # type: ignore[misc]
    """Stop training, evaluation and prediction before the first step if anything lives outside the strategy.

    Works with stock Keras models too. A stock model whose optimizer keeps slots, such as Adam, and was made elsewhere
    fails inside Keras before any callback is asked: `check_scope(model, strategy)` before `fit` names it.

    Args:
        strategy: The strategy that everything must live under. None is the one that the model was made under, or the
            one whose scope is entered; `tf.distribute.get_strategy()`, called outside of all scopes, is none at all.

    Raises:
        ScopeError: When training, evaluation or prediction begins, if something lives elsewhere, or if no strategy is
            given and the model was made under none.
    """

    def __init__(self, strategy: tf.distribute.Strategy | None = None) -> None:
        super().__init__()
        self._strategy = strategy

    def on_train_begin(self, logs: Any = None) -> None:
        """Check before the first step of `fit`."""
        self._check("fit")

    def on_test_begin(self, logs: Any = None) -> None:
        """Check before the first step of `evaluate`, or of a validation."""
        self._check("evaluate")

    def on_predict_begin(self, logs: Any = None) -> None:
        """Check before the first step of `predict`."""
        self._check("predict")

    def _check(self, method: str) -> None:
        model = self.model
        strategy = self._strategy or model.distribute_strategy
        if self._strategy is None and is_default_strategy(strategy):
            raise ScopeError(
                f"'{model.name}' was made under no strategy, so `{method}` would run it on one device. "
                "Build the model inside `with strategy.scope():`. `kde.adopt(model, strategy)` rebuilds one that "
                "exists there, with equal weights. If one device is what you want, say so: "
                "`ScopeGuard(tf.distribute.get_strategy())`."
            )
        check_scope(model, strategy).raise_if_bad()
