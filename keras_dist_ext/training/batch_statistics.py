"""Choose the examples whose statistics BatchNormalization takes: those of each replica, or of the global batch."""

from __future__ import annotations

from typing import Literal, TypeAlias

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layer_hooks import has_own_moments
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext.errors import StrategyError

__all__ = ["BatchStatistics", "check_layers", "checked_statistics"]

BatchStatistics: TypeAlias = Literal["replica", "global"]


def checked_statistics(value: object, strategy: tf.distribute.Strategy) -> BatchStatistics:
    """Return what was given as ``batch_statistics``; None is "replica".

    Raises:
        StrategyError: it is neither "replica" nor "global", or "global" under parameter servers.
    """
    value = "replica" if value is None else value
    given = arguments.one_of("batch_statistics", value, ("replica", "global"), error=StrategyError)
    if given == "global" and isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise StrategyError(
            'batch_statistics="global" under a ParameterServerStrategy, whose workers make steps of their own, so that '
            "there is no global batch. Compile without batch_statistics, or under a mirrored strategy."
        )
    return given  # type: ignore[return-value]


def check_layers(model: keras.Model) -> None:
    """Refuse layers whose statistics cannot be those of the global batch.

    Raises:
        StrategyError: a subclass of BatchNormalization overrides `_moments`.
    """
    for layer in flat_layers(model):
        if has_own_moments(layer):
            raise StrategyError(
                f"batch_statistics=\"global\": the layer '{layer.name}' ({type(layer).__name__}) is a "
                "BatchNormalization that computes moments by itself, of one replica's examples. Have it sum them over "
                "replicas (tf.distribute.get_replica_context().all_reduce), and leave out batch_statistics and exact."
            )
