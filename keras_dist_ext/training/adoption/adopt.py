"""Rebuild a Keras model, with all that it has learnt, as one of ours in a strategy's scope.

A variable cannot move to another strategy, so a model is taken over by making it again: each layer from its config,
once, however often the model uses it; then values are copied from layer to layer, and read back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import is_default_strategy, keras, saved_variables, strategy_of_variable
from keras_dist_ext.errors import ScopeError
from keras_dist_ext.strategy.scope import check_scope, checked_strategy, describe_strategy, optimizers
from keras_dist_ext.strategy.virtual import VirtualReplicas
from keras_dist_ext.training.adoption.compilation import read_compile_state, take_over_optimizers
from keras_dist_ext.training.adoption.rebuild import rebuild
from keras_dist_ext.training.adoption.recipe import CannotRebuildError, label
from keras_dist_ext.training.adoption.twins import take_over_state
from keras_dist_ext.training.model import Functional, Model, Sequential

__all__ = ["adopt", "clone_model", "load_model"]


def adopt(model: Any, strategy: tf.distribute.Strategy, *, compile: bool = True) -> Any:
    """Rebuild a model in the scope of a strategy, with equal weights, compile state and optimizer state.

    A `keras.Sequential` becomes a `kde.Sequential`, a functional model a functional `kde.Model`. A subclass of
    `keras.Model` is made again by its `get_config` and `from_config`, as an instance of a class of the same name that
    derives from it and from `kde.Model`: `isinstance` holds, its own methods stay in force, and it is saved and
    pickled under the name of the user's class. So `keras.models.load_model` gives back the user's class, and
    `kde.load_model` ours.

    Taken over are weights, the state of seed generators, `tf.Variable`s that layers hold, vocabularies and other
    assets, `trainable` flags, the dtype policy, and what was given to `compile`: the optimizer with its slots,
    iterations and learning rate, the loss (the same object) and the metrics (made again, at zero). The model that was
    given stays as it is.

    Args:
        model: A built model, stock or ours, made under any strategy or none.
        strategy: The strategy to live under.
        compile: Whether to take over the compile state and the optimizer.

    Returns:
        The new model.

    Raises:
        ScopeError: The model is not built, cannot be made from its config, or did not come out equal; or another
            strategy's scope is entered.
        TypeError: `model` is not a Keras model.
    """
    with _explained("kde.adopt", model, strategy, is_read=True):
        if not model.built:
            raise ScopeError(
                f"'{model.name}' is not built, so it has no weights to take over. Call it on a batch first; or make it "
                "inside `with strategy.scope():`; or, for new weights, use `kde.clone_model(model, strategy)`."
            )
        compile_alike = read_compile_state(model) if compile and model.compiled else None
        with _scope(strategy):
            rebuilt = rebuild(model)
            variables = take_over_state(model, rebuilt.pairs())
            if compile_alike:
                compile_alike(rebuilt.twin)
                take_over_optimizers(rebuilt.twin, model, variables)
    check_scope(rebuilt.twin, strategy).raise_if_bad()
    if isinstance(model, Model):
        rebuilt.twin.replica_seeds.go_on_from(model.replica_seeds)
    return rebuilt.twin


def clone_model(model: Any, strategy: tf.distribute.Strategy | None = None) -> Any:
    """Make a model of the same architecture and compile arguments as ours, with new weights, in a strategy's scope.

    What `keras.models.clone_model` does, for subclassed models too. Keras' own gives a stock `keras.Sequential` for
    every `Sequential`, ours or a subclass, without a word: it names the class in its code (keras/src/models/cloning.py,
    Keras 3.11 to 3.15) and leaves no way to change that. Of functional models it keeps the class.

    Args:
        model: Any Keras model, built or not.
        strategy: The strategy to live under; by default the one whose scope is entered, else the one of `model`.

    Returns:
        The new model.

    Raises:
        ScopeError: The model cannot be made from its config, or another strategy's scope is entered.
        TypeError: `model` is not a Keras model.
    """
    if strategy is None and not tf.distribute.has_strategy() and isinstance(model, keras.Model):
        strategy = model.distribute_strategy
    with _explained("kde.clone_model", model, strategy, is_read=False):
        compile_alike = read_compile_state(model) if model.compiled else None
        with _scope(strategy):
            twin = rebuild(model).twin
            if compile_alike:
                compile_alike(twin)
    return twin


def load_model(
    path: Any,
    strategy: tf.distribute.Strategy | None = None,
    *,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Any:
    """Load a model that Keras or we saved, as one of ours, in a strategy's scope, with its optimizer state.

    Args:
        path: A `.keras` file or directory, or a legacy `.h5` file (of which Keras 3 does not restore the optimizer's
            slots).
        strategy: The strategy to live under; by default the one whose scope is entered.
        custom_objects: The user's classes and functions by name, as for `keras.models.load_model`.
        compile: Whether to compile the model as it was when it was saved.
        safe_mode: Whether to refuse files that hold code (lambdas).

    Returns:
        The model.

    Raises:
        ScopeError: What was saved cannot be made in the scope, or another strategy's scope is entered.
        StrategyError: The model was compiled for virtual replicas that the strategy's cannot carry.
        ValueError: Keras cannot read the file.
    """
    # Keras saves classes that are not its own by their bare names. In legacy files, its own have bare names too.
    is_legacy = str(path).endswith((".h5", ".hdf5"))
    ours = {} if is_legacy else {cls.__name__: cls for cls in (Model, Functional, Sequential)}
    _refuse_nesting("kde.load_model", strategy)
    with _scope(strategy), keras.saving.custom_object_scope(ours):
        virtual = VirtualReplicas.read_from_file(path) if compile else None
        if virtual is not None:
            virtual.check(tf.distribute.get_strategy())
        model = keras.models.load_model(path, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode)
        if isinstance(model, Model):
            return model
        adopted = adopt(model, tf.distribute.get_strategy(), compile=compile)
        adopted.replica_seeds.load(saved_variables(path, "replica_seeds"))  # where Keras' own class did not look
        adopted.virtual_replicas = virtual
        return adopted


@contextlib.contextmanager
def _explained(caller: str, model: Any, strategy: tf.distribute.Strategy | None, *, is_read: bool) -> Iterator[None]:
    """Refuse what cannot work before anything is made, and say what went wrong where."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"{caller} takes a Keras model, and got {type(model).__name__}: {model!r}.")
    _refuse_nesting(caller, strategy)
    here = tf.distribute.get_strategy()
    variables = [*(model.variables if is_read else ()), *(v for _, o in optimizers(model) for v in o.variables)]
    elsewhere = {
        describe_strategy(own)
        for own in map(strategy_of_variable, variables)
        if own is not None and own.extended is not here.extended
    }
    if tf.distribute.has_strategy() and elsewhere:
        raise ScopeError(
            f"{caller} was called inside the scope of {describe_strategy(here)}, where the variables of "
            f"'{model.name}', which live under {' and '.join(sorted(elsewhere))}, cannot be read. Leave the scope."
        )
    try:
        yield
    except CannotRebuildError as error:
        raise ScopeError(
            f"{caller} cannot make {label(model)} again: {error} Or build the model inside `with strategy.scope():`, "
            "and load its weights there."
        ) from error.__cause__


def _refuse_nesting(caller: str, strategy: tf.distribute.Strategy | None) -> None:
    checked_strategy(strategy)
    here = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and strategy is not None and strategy.extended is not here.extended:
        raise ScopeError(
            f"{caller} was called inside the scope of {describe_strategy(here)} for {describe_strategy(strategy)}. "
            "TensorFlow does not nest scopes of two strategies: leave the first, or give its strategy."
        )


def _scope(strategy: tf.distribute.Strategy | None) -> contextlib.AbstractContextManager[Any]:
    """The strategy's scope, where it has one to enter."""
    if strategy is None or is_default_strategy(strategy):
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = strategy.scope()
    return scope
