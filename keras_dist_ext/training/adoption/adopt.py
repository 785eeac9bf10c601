"""Rebuild a Keras model, with all that it has learnt, as one of ours in a strategy's scope.

A variable cannot move to another strategy, so a model is taken over by making it again: each layer from its config,
once, however often the model uses it; then values are copied from layer to layer, and read back.
"""

from __future__ import annotations

import os
from typing import IO

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.saving import saved_variables
from keras_dist_ext.errors import ScopeError
from keras_dist_ext.strategy.virtual import VirtualReplicas
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.adoption.compilation import read_compile_state
from keras_dist_ext.training.adoption.rebuild import rebuild
from keras_dist_ext.training.adoption.take_over import explained, refuse_nesting, scope_of, take_over
from keras_dist_ext.training.compile_config import take_over_own_arguments
from keras_dist_ext.training.model import OWN_CLASSES, Model

__all__ = ["adopt", "clone_model", "load_model"]


def adopt(model: keras.Model, strategy: tf.distribute.Strategy, *, compile: bool = True) -> Model:
    """Rebuild a model in the scope of a strategy, with equal weights, compile state and optimizer state.

    A `keras.Sequential` becomes a `kde.Sequential`, a functional model a functional `kde.Model`. A subclass of
    `keras.Model` is rebuilt by its `get_config` and `from_config`, as an instance of a class of the same name that
    derives from it and from `kde.Model`: `isinstance` holds, its own methods stay in force, and it is saved and
    pickled under the name of the user's class. So `keras.models.load_model` gives back the user's class, and
    `kde.load_model` ours.

    Taken over are weights, the state of seed generators, `tf.Variable`s that layers hold, vocabularies and other
    assets, `trainable` flags, the dtype policy, and what was given to `compile`: the optimizer with its slots,
    iterations and learning rate, the loss (the same object) and the metrics (rebuilt, at zero). The model that was
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
    ours: Model = take_over(model, strategy, OWN_CLASSES, compile=arguments.flag("compile", compile, error=ScopeError))
    return ours


def clone_model(model: keras.Model, strategy: tf.distribute.Strategy | None = None) -> keras.Model:
    """Make a model of the same architecture and compile arguments as ours, with new weights, in a strategy's scope.

    What `keras.models.clone_model` does, for subclassed models too. Keras' own gives a stock `keras.Sequential` for
    every `Sequential`, ours or a subclass, without a word: it names the class in its code (keras/src/models/cloning.py,
    Keras 3.11 to 3.15) and leaves no way to change that. Of functional models it keeps the class.

    Args:
        model: keras.Model Keras model, built or not.
        strategy: The strategy to live under; by default the one whose scope is entered, else the one of `model`.

    Returns:
        The new model.

    Raises:
        ScopeError: The model cannot be made from its config, or another strategy's scope is entered.
        TypeError: `model` is not a Keras model.
    """
    if strategy is None and not tf.distribute.has_strategy() and isinstance(model, keras.Model):
        strategy = model.distribute_strategy
    with explained("kde.clone_model", model, strategy, is_read=False):
        compile_alike = read_compile_state(model) if model.compiled else None
        with scope_of(strategy):
            clone = rebuild(model, OWN_CLASSES).clone
            if compile_alike:
                compile_alike(clone)
    return clone


def load_model(
    path: str | os.PathLike[str] | IO[bytes],
    strategy: tf.distribute.Strategy | None = None,
    *,
    custom_objects: dict[str, object] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Model:
    """Load a model that Keras or we saved, as one of ours, in a strategy's scope, with its optimizer state.

    Args:
        path: A `.keras` file or directory, or a legacy `.h5` file (of which Keras 3 does not restore the optimizer's
            slots).
        strategy: The strategy to live under; by default the one whose scope is entered. Several workers must all load,
            and do so when all have come here, so that one of them may have saved the file just before.
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
    if not hasattr(path, "read") and (not isinstance(path, str | os.PathLike) or not os.fspath(path)):
        arguments.refuse("path", path, "the path of a saved model", ScopeError)
    compile = arguments.flag("compile", compile, error=ScopeError)
    safe_mode = arguments.flag("safe_mode", safe_mode, error=ScopeError)
    if custom_objects is not None:
        wanted = "a dict of classes and functions by name"
        arguments.mapping("custom_objects", custom_objects, wanted=wanted, error=ScopeError)
    # Keras saves classes that are not its own by their bare names. In legacy files, its own have bare names too.
    is_legacy = str(path).endswith((".h5", ".hdf5"))
    ours = {} if is_legacy else {cls.__name__: cls for cls in OWN_CLASSES}
    refuse_nesting("kde.load_model", strategy)
    with scope_of(strategy), keras.saving.custom_object_scope(ours):
        workers = workers_of(tf.distribute.get_strategy())
        if workers is not None:
            workers.sum([])  # one of them may have saved the file just before it came here
        virtual = VirtualReplicas.read_from_file(path) if compile else None
        if virtual is not None:
            virtual.check(tf.distribute.get_strategy())
        model = keras.models.load_model(path, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode)
        if isinstance(model, Model):
            return model
        adopted = adopt(model, tf.distribute.get_strategy(), compile=compile)
        adopted.replica_seeds.load(saved_variables(path, "replica_seeds"))  # where Keras' own class did not look
        adopted.virtual_replicas = virtual
        if compile:
            take_over_own_arguments(adopted, path)
        return adopted
