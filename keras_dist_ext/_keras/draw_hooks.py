"""Hooks by which a step chooses the random numbers that its replica draws: see ``hooks.intercept``."""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.python.framework import op_def_library, random_seed

from keras_dist_ext._keras import backend, keras
from keras_dist_ext._keras.interception import HOOKS, OpSeeds, Step, install
from keras_dist_ext.aliases import Original, TensorNest

__all__ = ["DRAWN_KINDS", "DRAWS"]


# keras/src/random/seed_generator.py: its state is mirrored, so that all replicas would draw the same numbers.
@install(keras.random.SeedGenerator, "next")
def _(original: Original, step: Step, /, generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    return step.next_seed(generator, ordered, functools.partial(original, generator))


# keras/src/backend/tensorflow/random.py: an integer as a seed is a constant. Where only shapes are asked for, Keras
# draws the initial values of weights that are not made yet (backend/common/variables.py, `value`).
@install(backend.random, "draw_seed")
def _(original: Original, step: Step, /, seed: int | keras.random.SeedGenerator | None) -> tf.Tensor:
    if isinstance(seed, int) and not backend.in_symbolic_scope():
        step.constant_seed(seed)
    return original(seed)


# tensorflow/python/framework/random_seed.py: the seeds of tf.random.* ops are alike on all workers, or not set.
@install(random_seed, "get_seed")
def _(original: Original, step: Step, /, op_seed: int | None) -> OpSeeds:
    return step.op_seeds(op_seed, original)


# tensorflow/python/framework/op_def_library.py: all ops of a graph are made here, also those of `tf.raw_ops`.
@install(op_def_library, "_apply_op_helper")
def _(original: Original, step: Step, /, op_type_name: str, name: str | None = None, **given: TensorNest) -> TensorNest:
    kind = DRAWN_KINDS.get(op_type_name)
    if kind is None:
        return original(op_type_name, name, **given)
    made: list[TensorNest] = []

    def draw(shape: TensorNest, counter: tf.Tensor, name: str | None = name) -> tf.Tensor:
        made[:] = original(op_type_name, name, **{**given, "shape": shape, "counter": counter})
        return made[-1][0]

    numbers = step.draw(kind, given, draw)
    if not made:  # the step has others, and what called this asks the op for its attributes
        draw(given["shape"], given["counter"])
    return *made[:-1], [numbers]


DRAWN_KINDS = {
    "StatelessRandomUniformV2": "uniform",
    "StatelessRandomNormalV2": "normal",
    "StatelessTruncatedNormalV2": "truncated_normal",
    "StatelessRandomUniformIntV2": "uniform_int",
    "StatelessRandomUniformFullIntV2": "uniform_full_int",
}
"""What ops draw by a key and a counter (tensorflow/core/ops/stateless_random_ops_v2.cc)."""

DRAWS = str(HOOKS[-1])
"""The hook that answers for them."""
