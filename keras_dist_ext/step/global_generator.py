"""The generator behind ``seed=None`` in a step: one for each strategy."""

from __future__ import annotations

import contextlib
import weakref

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.random import clone_seed_generator, global_seed_generator
from keras_dist_ext._keras.strategies import is_default_strategy, strategy_of_variable

__all__ = ["global_generator_of"]


def global_generator_of(strategy: tf.distribute.Strategy, *, is_seeded: bool = False) -> keras.random.SeedGenerator:
    """The generator behind ``seed=None`` for the steps of a strategy.

    Keras has a single one, whose variable belongs to the strategy in whose scope it was first used: TensorFlow refuses
    it under another strategy, or has all replicas change it. So this is a copy of it, made in the strategy's scope when
    it is first needed, and anew after ``keras.utils.set_random_seed``. On one device it is Keras' own.

    Args:
        strategy: of the steps that draw.
        is_seeded: whether it has a stream of a global seed, which draws outside of steps do not advance.
    """
    stock = global_seed_generator()
    is_default = is_default_strategy(strategy)
    if is_default and not is_seeded and strategy_of_variable(stock.state) is None:
        return stock
    copies = _copies.setdefault(strategy, {})
    copied_from, copy = copies.get(is_seeded, (None, None))
    if copied_from is not stock:
        with contextlib.nullcontext() if is_default else strategy.scope():
            copy = clone_seed_generator(stock)
        copies[is_seeded] = (stock, copy)
    return copy


_copies: weakref.WeakKeyDictionary[
    tf.distribute.Strategy, dict[bool, tuple[keras.random.SeedGenerator, keras.random.SeedGenerator]]
] = weakref.WeakKeyDictionary()
