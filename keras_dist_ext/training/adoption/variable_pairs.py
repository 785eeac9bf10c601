"""Pair what a layer and its clone hold, and copy the values over.

A clone is the layer that the same code makes again under another strategy. Weights are paired by their order, and read
back: bit for bit they must be what the old layer has.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from operator import itemgetter

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers, own_variables
from keras_dist_ext._keras.variables import Variable, components, is_sync_on_read
from keras_dist_ext.aliases import Array
from keras_dist_ext.strategy.scope import raw_variables
from keras_dist_ext.training.adoption.recipe import CannotRebuildError, label, refuse_lost_arguments

__all__ = ["side_by_side", "variable_pairs", "take_over_trainable", "take_over_state", "assign", "in_pairs", "named"]


def side_by_side(old: keras.Layer, new: keras.Layer) -> Iterator[tuple[keras.Layer, keras.Layer]]:
    """Pair the layers in two layers that the same code made.

    Raises:
        CannotRebuildError: The new one holds others, or was made with other arguments.
    """
    olds, news = flat_layers(old), flat_layers(new)
    names = [[type(layer).__name__ for layer in layers[1:]] for layers in (olds, news)]
    if names[0] != names[1]:
        raise CannotRebuildError(
            f"'{old.name}' holds {len(names[0])} layers ({', '.join(names[0])}), and what its config makes holds "
            f"{len(names[1])} ({', '.join(names[1])}). Make all layers in its constructor or in `build`, from what "
            "`get_config` returns."
        )
    for one, other in zip(olds, news, strict=True):
        refuse_lost_arguments(one, other)
        yield one, other


def variable_pairs(old: keras.layers.Layer, new: keras.layers.Layer) -> Iterator[tuple[Variable, Variable]]:
    """Pair the weights and seed states of a layer and its clone, without those of layers in it.

    Raises:
        CannotRebuildError: They are not alike.
    """
    has = f"{label(old)} has the weights"
    advice = "Make them all in `__init__` or `build`, or give the class `get_build_config` and `build_from_config`."
    yield from in_pairs(named(own_variables(old)), named(own_variables(new)), has, advice)


def named(variables: Iterable[Variable]) -> list[tuple[str, Variable]]:
    """Put its name before each variable."""
    return [(variable.name, variable) for variable in variables]


def in_pairs(
    olds: list[tuple[str, Variable]], news: list[tuple[str, Variable]], has: str, advice: str
) -> Iterator[tuple[Variable, Variable]]:
    """Pair variables by their order.

    Args:
        olds: (name, variable) of the old ones.
        news: (name, variable) of the new ones.
        has: The beginning of the sentence that says what has the old ones, where they are not alike.
        advice: What to do then, in full sentences.

    Raises:
        CannotRebuildError: There are more or fewer, or other shapes.
    """
    if [tuple(v.shape) for _, v in olds] != [tuple(v.shape) for _, v in news]:
        raise CannotRebuildError(f"{has} {_listed(olds)}, and what its config makes has {_listed(news)}. {advice}")
    for (_, old), (_, new) in zip(olds, news, strict=True):
        yield old, new


def _listed(variables: Iterable[tuple[str, Variable]]) -> str:
    return ", ".join(f"{name} {tuple(v.shape)}" for name, v in variables) or "none"


def take_over_trainable(pairs: list[tuple[keras.Layer, keras.Layer]]) -> None:
    """Set the flags from the outside in; a flag goes down to all layers inside, so shared ones need another round."""
    for _ in pairs:
        wrong = [(old, new) for old, new in pairs if old.trainable != new.trainable]
        if not wrong:
            break
        for old, new in wrong:
            new.trainable = old.trainable
    for old, new in pairs:
        for one, other in zip(own_variables(old), own_variables(new), strict=False):
            if one.trainable != other.trainable:
                other.trainable = one.trainable


def take_over_state(model: keras.Model, pairs: Iterable[tuple[keras.Layer, keras.Layer]]) -> dict[int, Variable]:
    """Copy the values of all layers, and read them back.

    Args:
        model: The old model.
        pairs: (old, new) for every layer of it.

    Returns:
        The new variables by the ids of the old ones.

    Raises:
        CannotRebuildError: A layer and its clone hold other variables, a value was not kept, or the model has variables
            that belong to none of the layers.
    """
    variables: dict[int, Variable] = {}
    for old, new in pairs:
        weights = list(variable_pairs(old, new))
        if type(old).load_own_variables is not keras.Layer.load_own_variables and old.built:
            store = _Store()
            old.save_own_variables(store)
            if store:
                new.load_own_variables(store)  # where it does more than assign, such as Normalization
        if hasattr(old, "save_assets"):
            with tempfile.TemporaryDirectory() as directory:
                old.save_assets(directory)
                new.load_assets(directory)
        for one, other in weights:
            assign(other, one)
            variables[id(one)] = other
        olds, news = (sorted(raw_variables(layer), key=itemgetter(0)) for layer in (old, new))
        has, advice = f"{label(old)} has the tf.Variables", "Make them in its constructor or in `build`."
        for one, other in in_pairs(olds, news, has, advice):
            other.assign(_read(one))
    left = [variable for variable in model.variables if id(variable) not in variables]
    if left:
        raise CannotRebuildError(
            f"{_listed(named(left))} belong to layers that were attached to it beside its graph. Take them off, and "
            "attach such layers to the new model."
        )
    return variables


class _Store(dict[str, Array]):
    """What `save_own_variables` writes to: keeps values, not variables."""

    def __setitem__(self, key: str, value: Array) -> None:
        super().__setitem__(key, _read(value) if isinstance(value, keras.Variable) else value)


def _read(variable: Variable) -> Array:
    """The value of a variable that may live under another strategy than the one whose scope is entered."""
    if is_sync_on_read(variable):
        return np.asarray(variable.numpy())
    parts = components(variable)  # copies, unless a ShardedVariable
    return np.asarray(tf.convert_to_tensor(parts[0]).numpy())


def assign(new: Variable, old: Variable) -> None:
    """Copy the value of a variable, and read it back.

    Raises:
        CannotRebuildError: The value was not kept.
    """
    value = _read(old)
    if _has_value(new, value):  # half of the time to assign to a mirrored variable is saved
        return
    new.assign(value)
    if not _has_value(new, value):
        raise CannotRebuildError(f"the variable '{old.path}' did not keep its value of dtype {old.dtype}.")


def _has_value(variable: Variable, value: Array) -> bool:
    """Whether it holds just these bytes: NaN must be equal to itself."""
    held = _read(variable)
    return bool(held.dtype == value.dtype and held.tobytes() == value.tobytes())
