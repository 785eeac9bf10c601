"""Move into a strategy's scope what layers have learnt outside of it: by ``adapt``, or as frozen weights.

People adapt a ``Normalization`` or a ``TextVectorization`` to their data before they build a model of it, and load a
pretrained backbone before they freeze it. None of these variables is trained, so the same layer can hold them again in
the scope, with the same values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers, own_variables, seed_generators
from keras_dist_ext._keras.strategies import is_default_strategy, strategy_of_variable
from keras_dist_ext._keras.variables import components, initialize_again
from keras_dist_ext.strategy.scope import raw_variables, report_scope

__all__ = ["adapted_fingerprint", "take_into_scope"]

_Movable: TypeAlias = "tuple[keras.Layer, str, keras.Variable | tf.Variable]"  # the variable, and who holds it as what


def take_into_scope(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """See that all of a model lives under a strategy, and take there what layers were adapted or frozen under none.

    They stay the same objects. Refused is what is trained, what lives under another strategy, and all under a
    ``ParameterServerStrategy``, whose workers cannot look into tables that were made elsewhere.

    Raises:
        ScopeError: names what is refused; nothing was moved.
    """
    found = _movable(model, strategy)
    report_scope(model, strategy, movable={id(variable) for _, _, variable in found}).raise_if_bad()
    if not found:
        return
    with strategy.scope():
        for layer, name, variable in found:
            if isinstance(variable, keras.Variable):
                initialize_again(variable)
            else:
                setattr(layer, name, tf.Variable(variable.numpy(), trainable=False, dtype=variable.dtype, name=name))


def adapted_fingerprint(model: keras.Model) -> dict[str, list[str]]:
    """Describe what the layers in a model have learnt before, which must be the same on all workers."""
    adapted = _adapted(model)
    frozen = [
        layer for layer in _frozen(model, adapted) if any(strategy_of_variable(w) is None for w in _weights(layer))
    ]
    found = {"layer that was adapted": adapted, "frozen layer": frozen}
    return {what: [f"{type(layer).__name__} {_digest(layer)}" for layer in layers] for what, layers in found.items()}


def _movable(model: keras.Model, strategy: tf.distribute.Strategy) -> list[_Movable]:
    """Return what can be moved under a strategy."""
    if is_default_strategy(strategy) or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return []
    adapted = _adapted(model)
    found: list[_Movable] = [(layer, *named) for layer in adapted for named in _outside(layer)]
    frozen = _frozen(model, adapted)
    return found + [(layer, variable.name, variable) for layer in frozen for variable in _outside_weights(layer)]


def _adapted(model: keras.Model) -> list[keras.Layer]:
    """Return the layers in a model that can be adapted, and those in these."""
    layers = [layer for layer in flat_layers(model) if callable(getattr(layer, "adapt", None)) and layer is not model]
    return list({id(part): part for layer in layers for part in flat_layers(layer)}.values())


def _frozen(model: keras.Model, adapted: Sequence[keras.Layer]) -> list[keras.Layer]:
    """Return the layers in a model that train nothing, without those that were adapted."""
    known = {id(layer) for layer in adapted}
    layers = [layer for layer in flat_layers(model) if id(layer) not in known]
    return [layer for layer in layers if not any(variable.trainable for variable in own_variables(layer))]


def _outside_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Return the weights and seeds of a layer that live under no strategy."""
    return [variable for variable in own_variables(layer) if strategy_of_variable(variable) is None]


def _weights(layer: keras.Layer) -> list[keras.Variable]:
    """Return the variables of a layer that are no seeds, which may be others on each worker."""
    seeds = {id(generator.state) for generator in seed_generators(layer)}
    return [variable for variable in own_variables(layer) if id(variable) not in seeds]


def _outside(layer: keras.Layer) -> list[tuple[str, keras.Variable | tf.Variable]]:
    """Return what a layer itself holds that no step changes and that lives under no strategy, by name."""
    raw = [(name, variable) for name, variable in raw_variables(layer) if getattr(layer, name, None) is variable]
    variables = [*((variable.name, variable) for variable in own_variables(layer)), *raw]
    return [(name, v) for name, v in variables if not v.trainable and strategy_of_variable(v) is None]


def _digest(layer: keras.Layer) -> str:
    digest = hashlib.sha256()
    for variable in [*_weights(layer), *(variable for _, variable in raw_variables(layer))]:
        digest.update(np.asarray(components(variable)[0]).tobytes())
    vocabulary = getattr(layer, "get_vocabulary", None)
    if callable(vocabulary):
        digest.update(repr(vocabulary()).encode())
    return digest.hexdigest()[:8]
