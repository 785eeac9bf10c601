"""Functions that TensorFlow runs as graphs."""

from __future__ import annotations

import contextlib
import functools

import tensorflow as tf

from keras_dist_ext.aliases import StepData, TracedFunction, UserFunction

__all__ = ["assigning", "in_graph", "once_read"]


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


def assigning(graph: tf.Graph, since: int) -> list[tf.Operation]:
    """Return the ops of a graph that assign, or may, but for the first so many."""
    return [op for op in graph.get_operations()[since:] if op.type.startswith(_ASSIGNING)]


_ASSIGNING = ("Assign", "Resource", "If", "While", "StatefulPartitionedCall", "CollectiveReduce")


def once_read(batch: StepData) -> contextlib.AbstractContextManager[None]:
    """Have nothing be done before a batch was read, not even what needs none of it, such as a count of steps.

    Where reading fails, a step has then done all that it does, or nothing.
    """
    leaves = [] if tf.executing_eagerly() else tf.nest.flatten(batch, expand_composites=True)
    read = next((leaf for leaf in leaves if tf.is_tensor(leaf)), None)
    return contextlib.nullcontext() if read is None else tf.control_dependencies([read])
