"""Check seeds, and derive others from them that are the same on every platform."""

import hashlib
import operator
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext.errors import SeedError

__all__ = ["MODULUS", "checked_seed", "fold_in", "replica_offset"]

MODULUS = 2**31 - 2
_GOLDEN = 0x9E3779B1 % MODULUS  # no common divisor with the modulus: i * _GOLDEN meets no number twice


def checked_seed(seed: object) -> int:
    """Return the seed as an int.

    Raises:
        SeedError: it is not an integer from 0 to 2**31 - 3.
    """
    try:
        number = operator.index(seed) if isinstance(seed, SupportsIndex) else None
    except TypeError:  # an array of several, which only looks like an index
        number = None
    if number is None or isinstance(seed, bool):
        raise SeedError(f"A seed must be an integer, got {seed!r} of type {type(seed).__name__}.")
    if not 0 <= number < MODULUS:
        raise SeedError(
            f"The seed is {number}. Keras takes seeds modulo {MODULUS} (2**31 - 2), so seeds outside of 0 to "
            f"{MODULUS - 1} would repeat others. Choose one in this range."
        )
    return number


def fold_in(root: int, *ids: int | str) -> int:
    """Fold identities into a seed: the same 62-bit number on every platform, another one for any other arguments.

    The BLAKE2b hash of the arguments, written out with their types and lengths. Among a million results, two are equal
    with a chance of 1e-7.

    Args:
        root: a seed, any integer.
        ids: what to tell apart: integers and names. ``1`` and ``"1"`` differ, so do ``("ab", "c")`` and
            ``("a", "bc")``.

    Returns:
        A number from 0 to 2**62 - 1.

    Raises:
        TypeError: an argument is neither an integer nor a string.

    >>> fold_in(42, 3, "dropout") == fold_in(42, 3, "dropout") != fold_in(42, 4, "dropout")
    True
    """
    text = b"".join(_written(part) for part in (operator.index(root), *ids))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


def _written(part: int | str) -> bytes:
    kind, text = ("s", part) if isinstance(part, str) else ("i", str(operator.index(part)))
    data = text.encode()
    return f"{kind}{len(data)}:".encode() + data


def replica_offset(replica: int | tf.Tensor) -> npt.NDArray[np.int64] | tf.Tensor:
    """What replica i adds to a generator's ``[seed, counter]``: ``[i, i * 0x9E3779B1 mod (2**31 - 2)]``.

    Args:
        replica: i, an int, or an int64 scalar in a graph that serves all replicas (TPU).
    """
    if isinstance(replica, int):
        return np.array([replica, replica * _GOLDEN % MODULUS], np.int64)
    return tf.stack([replica, replica * _GOLDEN % MODULUS])
