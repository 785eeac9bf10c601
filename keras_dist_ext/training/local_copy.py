"""Copy a model of several workers to one of them, which evaluates and predicts with it by itself."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext.errors import ScopeError
from keras_dist_ext.training.adoption.take_over import take_over
from keras_dist_ext.training.model import OWN_CLASSES, Model
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["local_copy"]


def local_copy(model: Model) -> Model:
    """Return a copy of a model on this worker alone, which needs no other worker.

    Every worker must make the same calls of ``model.fit``, ``evaluate`` and ``predict``. What one worker alone is to
    compute, it computes with a copy:

        if choice.strategy.cluster_resolver.task_id == 0:
            print(kde.local_copy(model).evaluate(x_test, y_test, return_dict=True))

    The copy has this worker's values of the weights and of the random streams, and the same ``compile`` arguments with
    metrics of its own. It lives under no strategy, so its numbers are those of one device, and nothing that it does
    waits for another worker or changes ``model``. It does not follow ``model``: for new weights,
    ``copy.set_weights(model.get_weights())``, which also spares tracing its steps again.

    Args:
        model: a built model of this package, under any strategy.

    Raises:
        ScopeError: the model is not built or cannot be made from its config, or a strategy's scope is entered.
        TypeError: ``model`` is not a model of this package.
    """
    if runtime_of(model) is None:
        raise TypeError(f"model must be a kde.Model, got {type(model).__name__}.")
    if tf.distribute.has_strategy():
        raise ScopeError("kde.local_copy was called inside a strategy's scope, and the copy lives in none. Leave it.")
    copy: Model = take_over(model, tf.distribute.get_strategy(), OWN_CLASSES, compile=True)
    return copy
