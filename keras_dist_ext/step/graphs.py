"""Functions that TensorFlow runs as graphs."""

from __future__ import annotations

import functools

import tensorflow as tf

from keras_dist_ext.aliases import TracedFunction, UserFunction

__all__ = ["in_graph"]


def in_graph(function: UserFunction, **options: object) -> TracedFunction:
    """Return a `tf.function` whose traces TensorFlow counts by themselves.

    It warns of retracing where 5 of the last 10 or so calls traced, but counts by the Python code: the same method of
    several models, each traced once and called a few times, as in a search, is one function to it
    (``_get_key_for_call_stats`` in tensorflow/python/eager/polymorphic_function). A partial is counted by itself.

    Args:
        function: without Python's loops and branches on tensors, which are not translated.
        options: of `tf.function`.
    """
    own = functools.partial(function)
    own.__name__ = getattr(function, "__name__", "function")  # type: ignore[attr-defined]  # what profiles call it
    return tf.function(own, autograph=False, **options)
