"""Refuse models and host code whose random numbers several replicas cannot draw as one device does.

Ops of a step's graph are refused by ``global_draws``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.errors import SeedError

__all__ = ["FIX", "HostDraws", "refuse_model"]

FIX = 'Or draw by replica: ReplicaSeeds(seed) without draws="global", and compile without exact=True.'


def refuse_model(model: keras.Model, layers: Sequence[keras.layers.Layer]) -> None:
    """Refuse layers that draw differently if the number of rows is unknown, XLA, and parameter servers.

    Raises:
        SeedError: the model has such a layer, is compiled by XLA, or is under a ParameterServerStrategy.
    """
    strategy = model.distribute_strategy
    if getattr(model, "jit_compile", False) is True and strategy.num_replicas_in_sync > 1:
        raise SeedError(
            'draws="global" was asked for with jit_compile=True, and XLA does not draw by rows. Compile the model with '
            "jit_compile=False. " + FIX
        )
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise SeedError(
            'draws="global" was asked for under a ParameterServerStrategy, whose workers make steps of their own, so '
            "that there is no global batch. " + FIX
        )
    elastic = getattr(keras.layers, "RandomElasticTransform", ())  # keras/src/backend/tensorflow/image.py
    for layer in layers:
        if isinstance(layer, elastic):
            raise SeedError(
                f"draws=\"global\": the layer '{layer.name}' is a RandomElasticTransform, which distorts all images of "
                "a batch alike where the number of rows is unknown, and each by itself elsewhere. " + FIX
            )


class HostDraws:
    """Detects whether random numbers of Python or NumPy are drawn after it is made."""

    def __init__(self) -> None:
        self._state = self._now()

    def refuse(self, name: str) -> None:
        """Refuse numbers that were drawn while a step of a model was traced: they differ between replicas.

        Raises:
            SeedError: some were drawn.
        """
        if self._now() != self._state:
            raise SeedError(
                f"draws=\"global\": a step of '{name}' draws random numbers of Python or NumPy while it is traced (as "
                "keras.layers.AugMix does), which differ between replicas. Use keras.random. " + FIX
            )

    @staticmethod
    def _now() -> tuple[object, ...]:
        return random.getstate(), repr(np.random.get_state(legacy=False))  # it may be no Mersenne Twister
