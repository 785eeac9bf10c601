"""Check what `compile(exact=True)` cannot be combined with."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext.errors import StrategyError

__all__ = ["checked_exact"]


def checked_exact(
    exact: object, *, batch_statistics: object, jit_compile: object, strategy: tf.distribute.Strategy
) -> bool:
    """Return what was given as ``exact``.

    Args:
        exact: that was given.
        batch_statistics: likewise.
        jit_compile: likewise.
        strategy: of the model.

    Raises:
        StrategyError: it is neither True nor False, or True beside what makes replicas compute other numbers.
    """
    if not arguments.flag("exact", exact, error=StrategyError):
        return False
    if batch_statistics == "replica":
        raise StrategyError(
            'exact=True and batch_statistics="replica" contradict each other: normalized by the statistics of each '
            "replica, a model does not train as on one device. Leave out one of them."
        )
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise StrategyError(
            "exact=True under a ParameterServerStrategy, whose workers make steps of their own, so that there is no "
            "global batch. Compile without exact=True, or under a mirrored strategy."
        )
    if jit_compile is True and strategy.num_replicas_in_sync > 1:
        raise StrategyError(
            f"exact=True and jit_compile=True on {strategy.num_replicas_in_sync} replicas: XLA draws other random "
            "numbers than TensorFlow without it, and not by rows. Leave out one of them."
        )
    return True
