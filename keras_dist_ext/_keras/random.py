"""Reach the generators that Keras draws from, and the ops that draw."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator

import tensorflow as tf
from keras.src.utils import rng_utils
from tensorflow.python.ops import gen_random_ops, gen_stateless_random_ops, gen_stateless_random_ops_v2

from keras_dist_ext._keras import backend, keras
from keras_dist_ext._keras.backend import global_state
from keras_dist_ext._keras.interception import patched
from keras_dist_ext._keras.variables import components

__all__ = [
    "random_seed",
    "global_seed_generator",
    "use_global_seed_generator",
    "clone_seed_generator",
    "intercept_random_ops",
    "intercept_dropout",
    "stateless_random_ops",
]


def random_seed() -> int | None:
    """The seed of this thread's last ``keras.utils.set_random_seed``, if any (keras/src/utils/rng_utils.py)."""
    seed: int | None = global_state.get_global_attribute(rng_utils.GLOBAL_RANDOM_SEED)
    return seed


def global_seed_generator() -> keras.random.SeedGenerator:
    """The generator behind ``seed=None``, made here and now if there is none (random/seed_generator.py).

    It is the thread's, and TensorFlow runs each replica in its own thread.
    """
    generator = global_state.get_global_attribute("global_seed_generator")
    if generator is None:
        state = random.getstate()
        generator = keras.random.SeedGenerator()
        random.setstate(state)
        global_state.set_global_attribute("global_seed_generator", generator)
    return generator


@contextlib.contextmanager
def use_global_seed_generator(generator: keras.random.SeedGenerator) -> Iterator[None]:
    """Have ``seed=None`` of this thread draw from ``generator`` (random/seed_generator.py, a global of the thread)."""
    before = global_state.get_global_attribute("global_seed_generator")
    global_state.set_global_attribute("global_seed_generator", generator)
    try:
        yield
    finally:
        global_state.set_global_attribute("global_seed_generator", before)


def clone_seed_generator(generator: keras.random.SeedGenerator) -> keras.random.SeedGenerator:
    """A generator in the same state, made in the scope that is entered (random/seed_generator.py).

    Of several workers all get the chief's seed, which TensorFlow hands out when the variable is made.
    """
    seed, counter = (int(n) for n in components(generator.state)[0].numpy())
    copy = keras.random.SeedGenerator(seed)
    for state in components(copy.state):
        state.assign([state[0], counter])
    return copy


@contextlib.contextmanager
def intercept_random_ops(draw: Callable[..., tf.Tensor]) -> Iterator[None]:
    """Send the random ops that all threads make to ``draw(name, original, *args, **kwargs)``, also those of Keras.

    tensorflow/python/ops: random_ops.py, stateless_random_ops.py and stateful_random_ops.py call these by module.
    """
    with contextlib.ExitStack() as stack:
        for module, names in _RANDOM_FUNCTIONS.items():
            for name in names:
                stack.enter_context(patched(module, name, functools.partial(draw, name, getattr(module, name))))
        yield


_RANDOM_FUNCTIONS = {
    gen_stateless_random_ops_v2: (
        "stateless_random_uniform_v2",
        "stateless_random_normal_v2",
        "stateless_truncated_normal_v2",
        "stateless_random_uniform_int_v2",
        "stateless_random_gamma_v3",
        "stateless_shuffle",
    ),
    gen_stateless_random_ops: (
        "stateless_multinomial",
        "stateless_random_binomial",
        "stateless_random_poisson",
        "stateless_parameterized_truncated_normal",
    ),
    gen_random_ops: (
        "random_uniform",
        "random_standard_normal",
        "truncated_normal",
        "random_uniform_int",
        "multinomial",
        "random_gamma",
        "random_poisson_v2",
        "random_shuffle",
        "parameterized_truncated_normal",
    ),
}


@contextlib.contextmanager
def intercept_dropout(dropout: Callable[..., tf.Tensor]) -> Iterator[None]:
    """Send Keras' dropout of all threads to ``dropout(original, inputs, rate, ...)`` (backend/tensorflow/random.py)."""
    with patched(backend.random, "dropout", functools.partial(dropout, backend.random.dropout)):
        yield


def stateless_random_ops() -> tuple[Callable[..., tf.Tensor], ...]:
    """The ops that draw uniform, normal, truncated normal and integer numbers by a key (stateless_random_ops.py)."""
    ops = gen_stateless_random_ops_v2
    return (
        ops.stateless_random_uniform_v2,
        ops.stateless_random_normal_v2,
        ops.stateless_truncated_normal_v2,
        ops.stateless_random_uniform_int_v2,
    )
