"""Save and set the ``tf.Variable``s among a loop's parts, which Keras does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.variables import Variable, components, hold_sum, is_sync_on_read
from keras_dist_ext.aliases import Array

__all__ = ["load", "save", "set_value", "split_weights", "value_of", "without"]


def save(variables: Iterable[tuple[str, tf.Variable]], store: MutableMapping[str, Array]) -> None:
    """Save variables, with their names, into the part of a Keras file where Keras saves its own."""
    for name, variable in variables:
        store[_key(name)] = value_of(variable)


def load(variables: Iterable[tuple[str, tf.Variable]], store: Mapping[str, Array]) -> None:
    """Load what ``save`` has saved."""
    for name, variable in variables:
        set_value(variable, np.asarray(store[_key(name)]))


def _key(name: str) -> str:
    return f"tf.{name.replace('/', '.')}"


def without(store: Mapping[str, Array]) -> dict[str, Array]:
    """Return what is in a store beside these."""
    return {key: store[key] for key in store.keys() if not key.startswith("tf.")}  # noqa: SIM118 (of h5py)


def value_of(variable: Variable) -> Array:
    """Return the value of a ``tf.Variable``: that of the first replica, or the sum where each has a part."""
    whole = variable if is_sync_on_read(variable) else components(variable)[0]
    return np.asarray(whole.numpy())


def set_value(variable: Variable, value: Array) -> None:
    """Set the value of a ``tf.Variable``, on all replicas; where each has a part, the first gets the sum."""
    hold_sum(variable)
    for whole in (variable,) if is_sync_on_read(variable) else components(variable):
        whole.assign(value)


def split_weights(
    name: str, weights: Sequence[Array], num_of_keras: int, num_plain: int
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Return the arrays for the weights of Keras, and those for ``tf.Variable``s.

    Args:
        name: of the loop.
        weights: what ``set_weights`` was given.
        num_of_keras: weights of Keras, which come first.
        num_plain: ``tf.Variable``s.

    Raises:
        ValueError: they are not as many.
    """
    if len(weights) != num_of_keras + num_plain:
        raise ValueError(
            f"set_weights was given {len(weights)} arrays, and '{name}' has {num_of_keras} weights of Keras "
            f"and {num_plain} tf.Variables. Give what get_weights returns."
        )
    return weights[:num_of_keras], weights[num_of_keras:]
