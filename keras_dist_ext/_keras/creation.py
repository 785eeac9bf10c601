"""Make variables outside of the graph that is being traced, in the scope of the strategy whose step it is.

In stock Keras the first call of a step may make variables: TensorFlow then traces it twice, and lifts their initial
values out of the first trace. Here several replicas are traced, in loops, more than once, so each variable is made at
once, in a separate thread, where nothing is traced; graphs see a variable that existed before. So are those that Keras
makes on one device, whose step is then traced once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import tensorflow as tf
from tensorflow.python.eager import lift_to_graph
from tensorflow.python.framework import errors_impl

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.backend import global_state
from keras_dist_ext._keras.interception import Step, install, thread
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext.aliases import Original, TensorNest
from keras_dist_ext.errors import ScopeError

__all__ = ["call_outside", "keep_constants", "make_variables_outside", "one_replica"]

T = TypeVar("T")
InitialValue: TypeAlias = TensorNest  # also a function that computes it


# keras/src/backend/tensorflow/core.py: all that Keras makes goes through it. Initial values are drawn alike on all
# replicas, and by Keras' own code.
@install(keras.Variable, "_initialize")
def _(original: Original, step: Step, /, variable: keras.Variable, value: InitialValue) -> None:
    def make(value: InitialValue) -> None:
        original(variable, value)

    def make_here() -> None:
        before, thread.step = thread.step, None
        try:
            make(value)
        finally:
            thread.step = before

    if tf.executing_eagerly() and tf.distribute.in_cross_replica_context():
        make_here()
        return
    note = getattr(step, "note_variable", None)
    if note is not None:
        note(variable.name)
    try:
        _make_outside(variable.path, value, make)
    except ScopeError:
        if tf.distribute.has_strategy():
            raise
        make_here()  # as in Keras: TensorFlow makes it when the step first runs


def make_variables_outside() -> contextlib.AbstractContextManager[None]:
    """Make what is a plain ``tf.Variable`` outside of the graph that is traced, too."""

    def create(next_creator: Original, **given: TensorNest) -> tf.Variable:
        if tf.executing_eagerly():
            return next_creator(**given)
        arguments = {name: value for name, value in given.items() if name in _ARGUMENTS and value is not None}
        value = arguments.pop("initial_value", None)
        name = arguments.get("name") or "Variable"
        return _make_outside(name, value, lambda value: tf.Variable(value, **arguments))

    creating: contextlib.AbstractContextManager[None] = tf.variable_creator_scope(create)
    return creating


# What a user can give to `tf.Variable`; what strategies and functions add is theirs (ops/variables.py).
_ARGUMENTS = (
    "initial_value",
    "trainable",
    "validate_shape",
    "name",
    "dtype",
    "constraint",
    "synchronization",
    "aggregation",
    "shape",
)


def _make_outside(name: str, value: InitialValue, make: Callable[[InitialValue], T]) -> T:
    """Make a variable of an initial value, or of a function that computes it.

    Raises:
        ScopeError: the value is computed from the batch, or from variables.
    """
    strategy = tf.distribute.get_strategy()
    try:
        if tf.is_tensor(value) and not hasattr(value, "numpy"):
            value = _value_outside(value)
        return call_outside(functools.partial(make, value), strategy)
    except (lift_to_graph.UnliftableError, errors_impl.InaccessibleTensorError, _OutOfScope) as error:
        raise ScopeError(
            f"The step makes the variable '{name}' when it first runs, of a value that it computes from the batch or "
            "from other variables, so it cannot be made before. Make it in `__init__` or `build`, or give it an "
            "initial value that is known without a batch, and assign to it in the step."
        ) from error


class _OutOfScope(TypeError):
    """A tensor of a graph was used outside of it."""


def _value_outside(tensor: tf.Tensor) -> TensorNest:
    """Compute a tensor of the graph that is traced, if it depends on nothing that only its call brings.

    TensorFlow does so with the initial values that a function has computed (polymorphic_function.py).
    """
    static = tf.get_static_value(tensor)
    if static is not None:
        return static

    def lifted() -> tf.Tensor:
        return lift_to_graph.lift_to_graph([tensor], tf.compat.v1.get_default_graph())[tensor]

    return call_outside(tf.function(lifted, autograph=False), None)


def keep_constants(layer: keras.Layer) -> None:
    """Have a layer that was built in the graph that is traced hold constants that other graphs can use, too.

    Such are the mean of a ``Normalization`` and the tokens of a ``TextVectorization``, which they make when they are
    built (keras/src/layers/preprocessing/normalization.py, text_vectorization.py).
    """
    graph = tf.compat.v1.get_default_graph()
    for name, value in list(vars(layer).items()):
        if isinstance(value, tf.Tensor) and not hasattr(value, "numpy") and value.graph is graph:
            try:
                constant = _value_outside(value)
            except (lift_to_graph.UnliftableError, errors_impl.InaccessibleTensorError, TypeError):
                continue  # it is of the batch, and the next step makes another one
            vars(layer)[name] = call_outside(functools.partial(tf.constant, constant), None)


def call_outside(function: Callable[[], T], strategy: tf.distribute.Strategy | None) -> T:
    """Call a function in a separate thread: it is in no graph, no replica, no tape, but a strategy's scope.

    Keras' globals belong to a thread (keras/src/backend/common/global_state.py).
    """
    of_caller = vars(global_state.GLOBAL_STATE_TRACKER)
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        own = vars(global_state.GLOBAL_STATE_TRACKER)
        own.update(of_caller)
        try:
            no_scope = strategy is None or is_default_strategy(strategy)
            with contextlib.nullcontext() if no_scope else strategy.scope():  # type: ignore[union-attr]
                done.append(function())
        except BaseException as error:
            failed.append(error)
        finally:
            kept.update(own)

    kept: dict[str, object] = {}
    outside = threading.Thread(target=run, name="variables_of_a_step")
    outside.start()
    outside.join()
    of_caller.update(kept)
    if failed:
        error = failed[0]
        if isinstance(error, TypeError) and "out of scope" in str(error).lower():
            raise _OutOfScope(str(error)) from error
        raise error
    return done[0]


def one_replica(strategy: tf.distribute.Strategy, number: int) -> contextlib.AbstractContextManager[object]:
    """Be one replica of a strategy, in this thread, while something is traced that nothing runs.

    Collectives do not wait for other replicas (tensorflow/python/distribute/distribute_lib.py, `ReplicaContext`).
    """
    if is_default_strategy(strategy):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = tf.distribute.ReplicaContext(strategy, number)
    return context
