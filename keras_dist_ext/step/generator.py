"""A source of random numbers of a model: its state, and the first key of its stream on each replica; see ``seeds``."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import Variable, components
from keras_dist_ext.aliases import Array
from keras_dist_ext.hashing import MODULUS, fold_in, replica_offset

__all__ = ["Generator", "stream"]


def stream(seed: int, replica: int, generator: str) -> tuple[int, int]:
    """Return the key of a generator's first draw on a replica; the k-th has the second number k higher.

    Args:
        seed: the global seed S.
        replica: i, the number of the replica over all workers.
        generator: the generator's name, see ``Seeds``.

    Returns:
        Two numbers from 0 to 2**31 - 3.
    """
    state = _initial_state(seed, generator) + replica_offset(replica)
    return int(state[0] % MODULUS), int(state[1] % MODULUS)


def _initial_state(seed: int, generator: str) -> Array:
    first, second = divmod(fold_in(0, generator), 2**31)
    return np.array([(seed + first) % MODULUS, second % MODULUS], np.int64)


class Generator:
    """A source of random numbers of a model, and its state on all of this worker's replicas.

    Args:
        name: stable for a model, whatever was made before it: its streams depend on it.
        label: for people.
        state: the variable that holds ``[seed, counter]``, or the state of a ``tf.random.Generator``.
    """

    def __init__(self, name: str, label: str, state: Variable) -> None:
        self.name = name
        self.label = label
        self.state = state
        self.is_keras = isinstance(state, keras.Variable)

    def read(self) -> Array:
        """Return the state, an int64 array: ``[seed, counter]``, or ``[counter, counter, key]`` of TensorFlow's."""
        return np.asarray(components(self.state)[0].numpy(), np.int64)

    def write(self, state: Array) -> None:
        """Set the state on all of this worker's replicas."""
        for copy in components(self.state):
            copy.assign(tf.cast(np.asarray(state, np.int64), copy.dtype))

    def initial_state(self, seed: int) -> Array:
        """The state before the first draw. TensorFlow's generators hash a replica's number into the key themselves."""
        if self.is_keras:
            return _initial_state(seed, self.name)
        return np.array([0] * (self.state.shape[0] - 1) + [fold_in(seed, self.name)], np.int64)

    def num_draws(self, seed: int) -> int | None:
        """How many draws lie between the first state of a seed and the present one; None if that has another seed."""
        start, state = self.initial_state(seed), self.read()
        if self.is_keras:
            same, drawn = state[0] % MODULUS == start[0], int(state[1] - start[1])
        else:
            same, drawn = state[-1] == start[-1], int(state[0])
        return drawn if same and drawn >= 0 else None
