"""Instances of a model's class are made in the scope of their strategy."""

from __future__ import annotations

import abc
import contextlib
import inspect
from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.hashing import checked_seed
from keras_dist_ext.strategy.given import checked_strategy

__all__ = ["Scoped"]


class Scoped(abc.ABCMeta, type(keras.Model)):  # type: ignore[misc]  # ABCMeta: models may be abstract, as Keras' may
    """Makes ``Class(..., strategy=s, seed=n)`` construct the instance inside ``s.scope()``, to draw from the seed n.

    Where a user's class takes a ``seed`` or a ``strategy`` itself, it is given that, whatever it means there.
    """

    def __call__(cls, *args: object, **kwargs: Any) -> keras.Model:
        """Construct an instance in the scope of its strategy."""
        own = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        seed = kwargs.pop("seed", None) if "seed" not in own else None
        if seed is not None:
            seed = checked_seed(seed)
        strategy = kwargs.get("strategy") if "strategy" in own else kwargs.pop("strategy", None)
        if "strategy" not in own:
            checked_strategy(strategy)
        elif not isinstance(strategy, tf.distribute.Strategy):
            strategy = None
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = super().__call__(*args, **kwargs)
        if seed is not None:
            model.replica_seeds.wanted = seed
        return model

    @property
    def __signature__(cls) -> inspect.Signature:
        init = inspect.signature(cls.__init__)  # type: ignore[misc]
        parameters = list(init.parameters.values())[1:]
        names = [name for name in ("strategy", "seed") if name not in init.parameters]
        ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
        at = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
        return init.replace(parameters=[*parameters[:at], *ours, *parameters[at:]])
