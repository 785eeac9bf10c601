"""Restore a model bit for bit: weights, optimizer, metrics, seeds, and the host's generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.models import initial_epoch, set_initial_epoch
from keras_dist_ext._keras.optimizers import inner_optimizer, optimized_variables
from keras_dist_ext._keras.strategies import strategy_of_optimizer
from keras_dist_ext._keras.variables import components
from keras_dist_ext.data.buckets import BucketedDataset
from keras_dist_ext.step.logs import leaf_metrics
from keras_dist_ext.strategy.scope import optimizers, raw_variables
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["kept_numbers", "kept_pass", "kept_random", "kept_state"]

_MISSING = object()


@contextlib.contextmanager
def kept_state(model: keras.Model) -> Iterator[None]:
    """Undo in the end what is done to a built model in between.

    Each replica's own copy of each variable is kept; an optimizer's variables that are made meanwhile get the values
    that new ones begin with, where its config can make another one. Out of reach are the places of ``tf.random`` ops in
    graphs, which TensorFlow keeps to itself.
    """
    runtime = runtime_of(model)
    kept = [(copy, copy.numpy()) for copy in _copies(model)]
    unbuilt = [optimizer for optimizer in _optimizers(model) if not optimizer.built]
    attributes = [
        (owner, name, vars(owner).get(name, _MISSING))
        for owner, names in (
            (model, ("history",)),
            *(() if runtime is None else runtime.changing_attributes()),
        )
        for name in names
    ]
    epoch = initial_epoch(model)
    try:
        with kept_random():
            yield
    finally:
        for optimizer in unbuilt:
            if optimizer.built:
                with contextlib.suppress(TypeError, ValueError, NotImplementedError):  # of a config of the user's own
                    _begin_anew(optimizer)
        for copy, value in kept:
            copy.assign(value)
        for owner, name, value in attributes:
            if value is not _MISSING:
                object.__setattr__(owner, name, value)
            elif name in vars(owner):
                object.__delattr__(owner, name)
        set_initial_epoch(model, epoch)


@contextlib.contextmanager
def kept_random() -> Iterator[None]:
    """Undo in the end what is drawn in between from the generators of Python and NumPy."""
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def kept_numbers(model: keras.Model) -> Iterator[None]:
    """Undo in the end what Python counts meanwhile in attributes of a model and its layers: plain numbers and words."""
    layers = flat_layers(model)
    kept = [_numbers(layer) for layer in layers]
    try:
        yield
    finally:
        for layer, before in zip(layers, kept, strict=True):
            for name in _numbers(layer).keys() - before.keys():
                object.__delattr__(layer, name)
            for name, value in before.items():
                object.__setattr__(layer, name, value)


def _numbers(layer: keras.Layer) -> dict[str, int | float | str]:
    return {
        name: value
        for name, value in vars(layer).items()
        if isinstance(value, int | float | str) and name != "built" and not name.startswith("_")
    }


@contextlib.contextmanager
def kept_pass(data: tf.data.Dataset | None) -> Iterator[None]:
    """Have data that numbers its passes go on with the number that it had."""
    buckets = data if isinstance(data, BucketedDataset) else None
    number = 0 if buckets is None else buckets.epoch
    try:
        yield
    finally:
        if buckets is not None:
            buckets.epoch = number


def _copies(model: keras.Model) -> list[tf.Variable]:
    """Return all copies of all variables that a step may change, each once."""
    metrics = leaf_metrics(model)
    variables = [*model.variables, *(variable for metric in metrics for variable in metric.variables)]
    for optimizer in _optimizers(model):
        variables += [*optimizer.variables, *getattr(getattr(optimizer, "inner_optimizer", None), "variables", ())]
    variables += [variable for holder in (*flat_layers(model), *metrics) for _, variable in raw_variables(holder)]
    runtime = runtime_of(model)
    if runtime is not None:
        variables += [generator.state for generator in runtime.seeds.generators(with_global=True)]
    return list({id(copy): copy for variable in variables for copy in components(variable)}.values())


def _optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that a model and its parts hold, each once."""
    held = (optimizer for layer in flat_layers(model) for _, optimizer in optimizers(layer))
    return list({id(optimizer): optimizer for optimizer in held}.values())


def _begin_anew(optimizer: keras.optimizers.Optimizer) -> None:
    """Give an optimizer's variables the values of one that was built just now."""
    strategy = strategy_of_optimizer(inner_optimizer(optimizer))
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        new = type(optimizer).from_config(optimizer.get_config())
        new.build(optimized_variables(optimizer))
    for variable, first in zip(optimizer.variables, new.variables, strict=True):
        value = np.asarray(components(first)[0])
        for copy in components(variable):
            copy.assign(value)
