"""Check data while a graph runs, with the errors that the same check has in Python."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from keras_dist_ext._keras.tracing import run_independently
from keras_dist_ext.errors import DataError

__all__ = ["as_data_errors", "require"]


def require(condition: tf.Tensor, message: str, *numbers: tf.Tensor) -> tf.Operation | None:
    """Fail with a message where a condition does not hold when it is computed.

    Args:
        condition: a scalar.
        message: with ``{}`` for each of the numbers.
        numbers: scalars.

    Returns:
        An op for what has to wait for the check, None when it has been made already.

    Raises:
        DataError: it is computed now, and does not hold; in a graph, when the graph runs within ``as_data_errors``.
    """
    if not tf.executing_eagerly():
        check = tf.debugging.Assert(condition, [f"DataError: {message}", *(numbers or [0])])
        run_independently(check)  # or a replica's checks wait for those of the replicas before it
        return check
    if not condition:
        raise DataError(message.format(*map(int, numbers)))
    return None


@contextlib.contextmanager
def as_data_errors() -> Iterator[None]:
    """Raise as ``DataError`` what ``require`` has found in a graph.

    Raises:
        DataError: it has found something.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _FOUND.search(error.message)
        if found is None:
            raise
        message, numbers = found.groups()
        raise DataError(message.format(*re.findall(r"-?\d+", numbers))) from error


_FOUND = re.compile(r"\[DataError: (.*?)\]((?: \[-?\d+\])+)", re.DOTALL)
