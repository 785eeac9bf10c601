"""Put a model back bit for bit where it was: weights, optimizer, metrics, seeds, and the host's generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_dist_ext import _keras
from keras_dist_ext.scope import optimizers, raw_variables

__all__ = ["kept_state"]

_MISSING = object()


@contextlib.contextmanager
def kept_state(model: Any) -> Iterator[None]:
    """Undo in the end what is done to a built model in between.

    Each replica's own copy of each variable is kept. What a model makes meanwhile stays, such as an optimizer's slots.
    Out of reach are the places of ``tf.random`` ops in graphs, which TensorFlow keeps to itself.
    """
    seeds = getattr(model, "replica_seeds", None)
    kept = [(copy, copy.numpy()) for copy in _copies(model)]
    attributes = [
        (owner, name, vars(owner).get(name, _MISSING))
        for owner, names in (
            (model, ("history", "_gradients_are_parts", "replica_recorders", "_initial_epoch")),
            (seeds, ("num_passes", "_is_to_begin", "wanted")),
            (getattr(model, "_stop", None), ("is_requested", "is_agreed")),
        )
        if owner is not None
        for name in names
    ]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for copy, value in kept:
            copy.assign(value)
        for owner, name, value in attributes:
            if value is not _MISSING:
                object.__setattr__(owner, name, value)
            elif name in vars(owner):
                object.__delattr__(owner, name)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _copies(model: Any) -> list[Any]:
    """Return all copies of all variables that a step may change, each once."""
    variables = [*model.variables, *getattr(model, "metrics_variables", ())]
    for _, optimizer in optimizers(model):
        variables += [*optimizer.variables, *getattr(getattr(optimizer, "inner_optimizer", None), "variables", ())]
    variables += [variable for layer in _keras.flat_layers(model) for _, variable in raw_variables(layer)]
    seeds = getattr(model, "replica_seeds", None)
    if seeds is not None:
        variables += [generator.state for generator in seeds.generators(with_global=True)]
    return list({id(copy): copy for variable in variables for copy in _keras.components(variable)}.values())
