"""Construct models in the scope of their strategy."""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
from collections.abc import Callable

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.hashing import checked_seed
from keras_dist_ext.strategy.given import checked_strategy
from keras_dist_ext.training.adoption.distributed_class import OwnClasses

__all__ = ["Scoped", "in_scope_of", "make_functional"]


class Scoped(abc.ABCMeta, type(keras.Model)):  # type: ignore[misc]  # ABCMeta: models may be abstract, as Keras' may
    """Makes ``Class(..., strategy=s, seed=n)`` construct the instance inside ``s.scope()``, to draw from the seed n.

    Where a user's class takes a ``seed`` or a ``strategy`` itself, it is given that, whatever it means there.
    """

    def __call__(cls, *args: object, **kwargs: object) -> keras.Model:
        """Construct an instance in the scope of its strategy."""
        own = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        seed = kwargs.pop("seed", None) if "seed" not in own else None
        if seed is not None:
            seed = checked_seed(seed)
        if "strategy" not in own:
            strategy = checked_strategy(kwargs.pop("strategy", None))
        else:
            given = kwargs.get("strategy")
            strategy = given if isinstance(given, tf.distribute.Strategy) else None
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


def in_scope_of(model: keras.Model, build: Callable[..., None]) -> Callable[..., None]:
    """Return a model's ``build``, perhaps one of a user's class, as it makes variables in scope.

    Keras has put it into the model's attributes (layers/layer.py).
    """

    @functools.wraps(build)
    def build_in_scope(*args: object, **kwargs: object) -> None:
        with model.replica_runtime.in_scope():
            build(*args, **kwargs)

    return build_in_scope


def make_functional(cls: type, own: OwnClasses) -> None:
    """Put our functional model below a user's subclass of our ``Model`` (Keras does the same to its own)."""
    if cls is own.model or not issubclass(cls, own.model):
        return
    cls.__bases__ = tuple(own.functional if base is own.model else base for base in cls.__bases__)
    for base in cls.__bases__:
        if base is not own.functional:
            make_functional(base, own)
