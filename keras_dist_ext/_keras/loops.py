"""Count how often the loops of a graph go round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.interception import HOOKS, patched
from keras_dist_ext.aliases import TensorNest, UserFunction

__all__ = ["counted_turns"]

_WHILE = "while_loop.while_loop"  # whose hook all loops of TensorFlow go through


@contextlib.contextmanager
def counted_turns(note: Callable[[], None]) -> Iterator[None]:
    """Have loops that are traced meanwhile call a function at each turn, when they run (ops/while_loop.py)."""
    (hook,) = (hook for hook in HOOKS if str(hook) == _WHILE)
    original = getattr(hook.owner, hook.name)

    def counted() -> Any:
        note()
        return np.int32(0)

    def while_loop(cond: UserFunction, body: UserFunction, *args: object, **options: object) -> TensorNest:
        def counting(*values: TensorNest) -> TensorNest:
            with tf.control_dependencies([tf.numpy_function(counted, [], tf.int32)]):
                return body(*values)

        return original(cond, counting, *args, **options)

    with patched(hook.owner, hook.name, while_loop):
        yield
