"""See what the tapes of a thread record, and keep from them what nobody can differentiate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.eager import record

from keras_dist_ext.aliases import TensorNest

__all__ = ["is_differentiated", "may_be_differentiated", "unrecorded", "unrecorded_loop"]


def is_differentiated(values: Sequence[tf.Tensor]) -> bool:
    """Whether a tape of this thread records what is computed from some values (python/eager/record.py)."""
    dense = [value.values if isinstance(value, tf.IndexedSlices) else value for value in values]
    return bool(record.should_record_backprop(dense))


def may_be_differentiated() -> bool:
    """Whether a tape of this thread records at all (python/eager/record.py)."""
    return bool(record.could_possibly_record())


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Have no tape of this thread record what is computed meanwhile (python/eager/record.py)."""
    return record.stop_recording() if record.could_possibly_record() else contextlib.nullcontext()


def unrecorded_loop(
    condition: Callable[..., tf.Tensor],
    body: Callable[..., TensorNest],
    variables: Sequence[TensorNest],
    **options: object,
) -> TensorNest:
    """Make a ``tf.while_loop`` that no tape records; in its body tapes record as before.

    Names in its body do not tell of the loop: summaries are called by them (ops/summary_ops_v2.py).

    A tape that is persistent, or in another one, has a loop differentiated while it is made
    (``run_as_function_for_tape_gradients`` in ops/control_flow_util_v2.py). One over an iterator cannot be.

    Args:
        condition: as TensorFlow takes it.
        body: likewise.
        variables: likewise.
        options: likewise.
    """
    stopped = contextlib.ExitStack()

    def recorded_body(*values: TensorNest) -> TensorNest:
        stopped.close()
        try:
            with tf.name_scope(""):
                return body(*values)
        finally:
            stopped.enter_context(unrecorded())

    with stopped:
        stopped.enter_context(unrecorded())
        return tf.while_loop(condition, recorded_body, variables, **options)
