"""Keras callbacks that carry values from a run to checks, and back."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import is_default_strategy, keras
from keras_dist_ext.errors import ScopeError
from keras_dist_ext.scope import check_scope

__all__ = ["ScopeGuard", "StepCallbacks"]


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


class StepCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of a run, told which batch was really the last one of an execution.

    Keras names the last batch before an execution is made, when the end of data of unknown length is not in sight.
    They are set up when the run begins: the model is built then, and the number of its batches may be known.
    """

    def __init__(self, callbacks: Any, model: Any, *, verbose: Any, epochs: int, add_history: bool) -> None:
        self._arguments = {"callbacks": callbacks, "model": model, "verbose": verbose, "epochs": epochs}
        self._arguments |= {"add_history": add_history, "add_progbar": verbose != 0}
        self._is_set_up = False
        self.feed: Any = None  # the one of training, or of evaluation where nothing is trained
        self.test_feed: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Set up, and begin training."""
        self._set_up()
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End an execution of training at the batch that was its last."""
        super().on_train_batch_end(min(batch, self.feed.last_step), logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Set up where nothing is trained, and begin evaluation."""
        self._set_up()
        super().on_test_begin(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """End an execution of evaluation at the batch that was its last."""
        super().on_test_batch_end(min(batch, (self.test_feed or self.feed).last_step), logs)

    def _set_up(self) -> None:
        if not self._is_set_up:
            self._is_set_up = True
            super().__init__(**self._arguments, steps=self.feed.num_batches)
