"""Make the iterator over a dataset that Keras makes when a pass ends, for each has another order of a shuffle."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext.data.iterators import release_iterator

__all__ = ["NextPass"]


class NextPass:
    """The iterator that Keras makes after a pass whose length it knows (``_enumerate_iterator``, epoch_iterator.py).

    Where ``steps_per_epoch`` is given, the next pass reads it; otherwise none does, and the next pass has one of its
    own. It is made at that moment, since a validation that comes before the next pass may read the same dataset.

    Args:
        is_read: whether the next pass reads it.
    """

    def __init__(self, *, is_read: bool) -> None:
        self._is_read = is_read
        self._dataset: tf.data.Dataset | None = None
        self._iterator: tf.data.Iterator | None = None

    def of(self, dataset: tf.data.Dataset | None) -> None:
        """Say what all passes read; None where each pass has an order that is not TensorFlow's own."""
        self._dataset = dataset

    def make(self) -> None:
        """Make the iterator: a pass has ended."""
        if self._dataset is not None:
            self._iterator = iter(self._dataset)
        if not self._is_read:
            self.release()

    @property
    def is_made(self) -> bool:
        """Whether there is one that the next pass reads."""
        return self._iterator is not None

    def take(self) -> tf.data.Iterator | None:
        """Return once the iterator that the next pass reads; None if it has to make one."""
        iterator, self._iterator = self._iterator, None
        return iterator

    def release(self) -> None:
        """Release the iterator that was made."""
        held = [] if self._iterator is None else [self._iterator]
        self._iterator = None
        if held:
            release_iterator(held)
