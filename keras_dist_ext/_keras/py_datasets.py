"""Read a PyDataset in an order that can be repeated, from a batch on, as Keras' own adapter reads it.

keras/src/trainers/data_adapters/py_dataset_adapter.py shuffles batches by the module `random`, which is replaced here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import types
from collections.abc import Generator, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import py_dataset_adapter

from keras_dist_ext import versions
from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import Array, TensorNest
from keras_dist_ext.errors import BackendError

__all__ = ["preserve_py_dataset_order", "py_dataset_batches", "resume_py_dataset", "seed_py_datasets"]


PyDatasetAdapter: TypeAlias = py_dataset_adapter.PyDatasetAdapter


class _Shuffles(Protocol):
    def shuffle(self, indices: list[int], /) -> None: ...


class _PyDatasetOrder(types.ModuleType):
    """The module `random` as Keras sees it where it shuffles the batches of a PyDataset: only that is another."""

    def __init__(self) -> None:
        super().__init__(random.__name__, random.__doc__)
        self.generator: _Shuffles = random

    def __getattr__(self, name: str) -> object:
        if name == "Random" and self.generator is not random:  # by which Keras 3.16 shuffles, seeded by the epoch
            return lambda *seed: self
        return getattr(random, name)

    def shuffle(self, indices: list[int]) -> None:
        """Shuffle in place."""
        self.generator.shuffle(indices)


_py_dataset_order = _PyDatasetOrder()


py_dataset_adapter.random = _py_dataset_order


def seed_py_datasets(seed: int | None) -> None:
    """Shuffle the batches of a PyDataset by this seed; None by Python's generator, as Keras does.

    keras/src/trainers/data_adapters/py_dataset_adapter.py shuffles by `random`, also in its own thread.

    Raises:
        BackendError: it shuffles in another way.
    """
    if seed is not None:
        _check_py_dataset_order()
    _py_dataset_order.generator = random if seed is None else random.Random(seed)


@functools.cache
def _check_py_dataset_order() -> None:
    """Have Keras shuffle small PyDatasets, once a process, and see that it asks for their order."""
    for workers in (1, 2):  # in this thread, and in Keras' own
        order = _NotedOrder()
        with preserve_py_dataset_order():
            _py_dataset_order.generator = order
            adapter = PyDatasetAdapter(_SmallPyDataset(workers=workers), shuffle=True)
            with contextlib.closing(py_dataset_batches(adapter)) as batches:
                next(batches)
        if not order.is_asked:
            raise BackendError(
                versions.changed(
                    "a PyDataset is no longer shuffled by Python's random.shuffle or random.Random "
                    "(keras/src/trainers/data_adapters/py_dataset_adapter.py), so its order would follow no seed"
                )
            )


class _NotedOrder:
    is_asked = False

    def shuffle(self, indices: list[int]) -> None:
        """Leave them as they are."""
        self.is_asked = True


class _SmallPyDataset(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Array:
        return np.zeros((1, 1))


@contextlib.contextmanager
def preserve_py_dataset_order() -> Iterator[None]:
    """Afterwards, shuffle the batches of a PyDataset as before."""
    before = _py_dataset_order.generator
    try:
        yield
    finally:
        _py_dataset_order.generator = before


def resume_py_dataset(adapter: PyDatasetAdapter, batch: int, seed: int | None) -> tf.data.Dataset:
    """The rest of a pass over a PyDataset, from a batch on; those before it are not asked for.

    keras/src/trainers/data_adapters/py_dataset_adapter.py makes a dataset of what `_get_iterator` gives.

    Raises:
        BackendError: it makes it of something else.
    """
    _check_py_dataset_rest()
    return _rest_of_py_dataset(adapter, batch, seed)


@functools.cache
def _check_py_dataset_rest() -> None:
    for workers in (1, 2):
        adapter = PyDatasetAdapter(_SmallPyDataset(workers=workers), shuffle=False)
        if len(list(_rest_of_py_dataset(adapter, 1, None))) != 1:
            raise BackendError(
                versions.changed(
                    "the dataset of a PyDataset is no longer made of what PyDatasetAdapter._get_iterator gives "
                    "(keras/src/trainers/data_adapters/py_dataset_adapter.py), so that a run would not continue at the "
                    "batch at which it was interrupted. No step was made"
                )
            )


def _rest_of_py_dataset(adapter: PyDatasetAdapter, batch: int, seed: int | None) -> tf.data.Dataset:
    def rest() -> Iterator[TensorNest]:
        length = adapter.num_batches
        numbers: Any = itertools.count() if length is None else list(range(length))
        if adapter.shuffle and length is not None:
            (random if seed is None else random.Random(seed)).shuffle(numbers)
        for number in itertools.islice(numbers, batch, None):
            yield adapter._standardize_batch(adapter.py_dataset[number])

    adapter._get_iterator = rest
    try:
        return adapter.get_tf_dataset()
    finally:
        del adapter._get_iterator


def py_dataset_batches(adapter: PyDatasetAdapter) -> Generator[TensorNest, None, None]:
    """One pass over a PyDataset, begun and ended as `fit` does an epoch, also when it is left early.

    keras/src/trainers/data_adapters/py_dataset_adapter.py.
    """
    adapter.on_epoch_begin()
    try:
        yield from adapter._get_iterator()
    finally:
        adapter.on_epoch_end()
