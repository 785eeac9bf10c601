"""Check what is given as a strategy; nothing here needs a private part of Keras or TensorFlow."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext.errors import StrategyError

__all__ = ["checked_strategy", "given_strategy"]


def checked_strategy(strategy: object, name: str = "strategy") -> tf.distribute.Strategy | None:
    """Return a strategy, or None.

    Args:
        strategy: that was given.
        name: of the argument.

    Raises:
        StrategyError: it is neither, such as what `pick_strategy` returns, or the class of a strategy.
    """
    if strategy is None or (hasattr(strategy, "extended") and not isinstance(strategy, type)):
        return strategy
    hint = ""
    if isinstance(strategy, type):
        hint = f"; make one of this class: `{strategy.__name__}(...)`"
    elif hasattr(strategy, "strategy"):
        hint = f"; it has one: `{type(strategy).__name__}.strategy`"
    raise StrategyError(f"{name} must be a tf.distribute.Strategy, got {arguments.shown(strategy)}{hint}.")


def given_strategy(strategy: object) -> tf.distribute.Strategy:
    """Return a strategy; for None the one whose scope is entered, or TensorFlow's default.

    Raises:
        StrategyError: it is neither a strategy nor None.
    """
    given = checked_strategy(strategy)
    return tf.distribute.get_strategy() if given is None else given
