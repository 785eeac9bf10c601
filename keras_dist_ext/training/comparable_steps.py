"""Leave out of steps what differs by definition, so that they can be compared, and see that they can be made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import clear_losses
from keras_dist_ext._keras.losses import without_parts
from keras_dist_ext._keras.random import intercept_random_ops
from keras_dist_ext.aliases import StepData
from keras_dist_ext.data.split import num_rows
from keras_dist_ext.errors import BackendError
from keras_dist_ext.step.alike_draws import RowsAlike
from keras_dist_ext.step.ancestry import operations
from keras_dist_ext.training.snapshot import kept_random
from keras_dist_ext.training.step_errors import reason_of

__all__ = ["CannotCompare", "FailsOnFew", "comparable", "refuse_python", "unoptimized"]


class CannotCompare(Exception):
    """Whether a step does on replicas what it does on one device cannot be seen; the message says why."""


class FailsOnFew(CannotCompare):
    """A step fails on as few examples."""


@contextlib.contextmanager
def comparable(model: keras.Model, rows: StepData) -> Iterator[None]:
    """Leave out of steps of a model what differs by definition, and see that they can be made.

    Args:
        model: whose steps are made.
        rows: that they are made on.

    Raises:
        CannotCompare: they fail on so few rows, or draw random numbers that cannot be made alike for all rows.
    """
    draws = None if model.replica_seeds.draws == "global" else RowsAlike()  # those are equal on both sides as they are
    runtime = model.replica_runtime
    kept = runtime.recorders, runtime.guard, runtime.compression
    runtime.recorders, runtime.guard, runtime.compression = (), None, None
    try:
        drawing = contextlib.nullcontext() if draws is None else intercept_random_ops(draws)
        without = set() if runtime.batch_statistics == "global" else {"moments"}
        with kept_random(), tf.summary.record_if(False), drawing, without_parts(without):
            yield
    except (CannotCompare, BackendError):
        raise
    except Exception as error:  # the run will end with it, too, or not meet it on whole batches
        first = reason_of(error)[2] if isinstance(error, tf.errors.OpError) else str(error).strip().partition("\n")[0]
        why = f"it fails on {int(num_rows(rows))} examples ({type(error).__name__}: {first[:200]})"
        raise FailsOnFew(why) from error
    finally:
        runtime.recorders, runtime.guard, runtime.compression = kept
        clear_losses(model)
    if draws is not None and draws.unknown:
        names = ", ".join(sorted(draws.unknown))
        raise CannotCompare(f"it draws random numbers that cannot be made alike for all examples ({names})")


def refuse_python(graph: tf.Graph) -> None:
    """See that what was traced calls no Python.

    Raises:
        CannotCompare: it does.
    """
    if any(op.type in _OF_PYTHON for op in operations(graph)):
        raise CannotCompare("it calls Python (tf.py_function, tf.numpy_function), and what that does cannot be undone")


_OF_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Run graphs as they were traced: what runs once is not worth to be optimized."""
    before = bool(tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer"))
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})
