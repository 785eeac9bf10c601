"""How much of what replicas add up goes into one sum: ``bytes_per_pack`` of ``pick_strategy``."""

from __future__ import annotations

import weakref

import tensorflow as tf

__all__ = ["bytes_per_pack_of", "note_bytes_per_pack"]


def note_bytes_per_pack(strategy: tf.distribute.Strategy, num_bytes: int) -> None:
    """Have the sums of a strategy's steps be made of so many bytes at a time; 0 leaves it to TensorFlow."""
    _PACKS[strategy] = num_bytes


def bytes_per_pack_of(strategy: tf.distribute.Strategy) -> int:
    """Return what was noted of a strategy; 0 where nothing was."""
    return _PACKS.get(strategy, 0)


_PACKS: weakref.WeakKeyDictionary[tf.distribute.Strategy, int] = weakref.WeakKeyDictionary()
