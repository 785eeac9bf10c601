"""Rebuild a model as one of ours in a strategy's scope, with its values, compile state and optimizer state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.saving import saved_variables
from keras_dist_ext._keras.strategies import is_default_strategy, strategy_of_variable
from keras_dist_ext.errors import ScopeError
from keras_dist_ext.strategy.given import checked_strategy
from keras_dist_ext.strategy.scope import check_scope, describe_strategy, optimizers
from keras_dist_ext.strategy.virtual import VirtualReplicas
from keras_dist_ext.training.adoption.compilation import read_compile_state, take_over_optimizers
from keras_dist_ext.training.adoption.distributed_class import OwnClasses
from keras_dist_ext.training.adoption.rebuild import rebuild
from keras_dist_ext.training.adoption.recipe import CannotRebuildError, label
from keras_dist_ext.training.adoption.variable_pairs import take_over_state
from keras_dist_ext.training.compile_config import take_over_own_arguments
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["explained", "refuse_nesting", "scope_of", "take_over", "take_over_loaded"]


def take_over(model: keras.Model, strategy: tf.distribute.Strategy, own: OwnClasses, *, compile: bool) -> keras.Model:
    """Do what ``kde.adopt`` does.

    Args:
        model: A built model, stock or ours.
        strategy: The strategy to live under.
        own: Our classes of models.
        compile: Whether to take over the compile state and the optimizer.

    Raises:
        ScopeError: as ``kde.adopt``.
        TypeError: ``model`` is not a Keras model.
    """
    with explained("kde.adopt", model, strategy, is_read=True):
        if not model.built and not model.variables:  # a step of its own may never call it
            raise ScopeError(
                f"'{model.name}' is not built, so it has no weights to take over. Call it on a batch first; or make it "
                "inside `with strategy.scope():`; or, for new weights, use `kde.clone_model(model, strategy)`."
            )
        compile_alike = read_compile_state(model) if compile and model.compiled else None
        with scope_of(strategy):
            rebuilt = rebuild(model, own)
            variables = take_over_state(model, rebuilt.pairs())
            if compile_alike:
                compile_alike(rebuilt.clone)
                take_over_optimizers(rebuilt.clone, model, variables)
    check_scope(rebuilt.clone, strategy).raise_if_bad()
    if runtime_of(model) is not None:
        rebuilt.clone.replica_seeds.resume_from(model.replica_seeds)
    return rebuilt.clone


def take_over_loaded(model: keras.Model, file: str | os.PathLike[str] | IO[bytes], own: OwnClasses) -> keras.Model:
    """Take over a stock model that was loaded from a file, in the scope that is entered, with all that is ours there.

    Args:
        model: that was loaded.
        file: that has it.
        own: Our classes of models.

    Raises:
        ScopeError: as ``kde.adopt``.
    """
    adopted = take_over(model, tf.distribute.get_strategy(), own, compile=True)
    adopted.replica_seeds.load(saved_variables(file, "replica_seeds"))
    adopted.virtual_replicas = VirtualReplicas.read_from_file(file)
    take_over_own_arguments(adopted, file)
    return adopted


@contextlib.contextmanager
def explained(
    caller: str, model: keras.Model, strategy: tf.distribute.Strategy | None, *, is_read: bool
) -> Iterator[None]:
    """Refuse what cannot work before anything is made, and say what went wrong where.

    Raises:
        ScopeError: another strategy's scope is entered, or the model cannot be rebuilt.
        TypeError: ``model`` is not a Keras model.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"{caller} takes a Keras model, and got {type(model).__name__}: {arguments.shown(model)}.")
    refuse_nesting(caller, strategy)
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


def refuse_nesting(caller: str, strategy: tf.distribute.Strategy | None) -> None:
    """See that no other strategy's scope is entered.

    Raises:
        ScopeError: one is.
        StrategyError: ``strategy`` is not a tf.distribute.Strategy.
    """
    checked_strategy(strategy)
    here = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and strategy is not None and strategy.extended is not here.extended:
        raise ScopeError(
            f"{caller} was called inside the scope of {describe_strategy(here)} for {describe_strategy(strategy)}. "
            "TensorFlow does not nest scopes of two strategies: leave the first, or give its strategy."
        )


def scope_of(strategy: tf.distribute.Strategy | None) -> contextlib.AbstractContextManager[object]:
    """The strategy's scope, where it has one to enter."""
    if strategy is None or is_default_strategy(strategy):
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[object] = strategy.scope()
    return scope
