"""Read the data of ``fit`` through Keras' own adapters, in an order that can be repeated."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.trainers import data_adapters

from keras_dist_ext import versions
from keras_dist_ext._keras import tree
from keras_dist_ext._keras.interception import put
from keras_dist_ext.aliases import Array, StepData, TensorNest
from keras_dist_ext.errors import BackendError

__all__ = [
    "DataAdapter",
    "CustomEpochIterator",
    "ArrayDataAdapter",
    "GeneratorDataAdapter",
    "TFDatasetAdapter",
    "use_epoch_iterator",
    "check_epoch_iterator",
    "first_batch_of_generator",
    "num_array_examples",
    "array_shuffle",
    "take_examples",
    "seed_array_shuffles",
    "make_data_adapter",
]

DataAdapter: TypeAlias = data_adapters.data_adapter.DataAdapter
ArrayDataAdapter = data_adapters.ArrayDataAdapter
GeneratorDataAdapter = data_adapters.GeneratorDataAdapter
TFDatasetAdapter = data_adapters.TFDatasetAdapter

EpochIterator: Any = tf_trainer.TFEpochIterator.__base__  # keras/src/trainers/epoch_iterator.py

_thread = threading.local()


class _TFEpochIterator(tf_trainer.TFEpochIterator):  # type: ignore[misc]
    """Keras' iterator over an epoch, or what this thread is to have instead of it."""

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        make = getattr(_thread, "epoch_iterator", None)
        _thread.is_asked = True
        return super().__new__(cls) if make is None else make(*args, **kwargs)


functools.update_wrapper(_TFEpochIterator, tf_trainer.TFEpochIterator, updated=())
tf_trainer.TFEpochIterator = _TFEpochIterator


@contextlib.contextmanager
def use_epoch_iterator(make: Callable[..., object]) -> Iterator[None]:
    """Have ``fit``, ``evaluate`` and ``predict`` of this thread read their data through ``make(**kwargs)``.

    keras/src/backend/tensorflow/trainer.py builds a ``TFEpochIterator`` by name in each of them; where it is used,
    `check_epoch_iterator` sees that it did.
    """
    before = getattr(_thread, "epoch_iterator", None)
    _thread.epoch_iterator = make
    if before is None:
        _thread.is_asked = False
    try:
        yield
    finally:
        _thread.epoch_iterator = before


def check_epoch_iterator() -> None:
    """See, inside of `use_epoch_iterator`, that Keras has asked for one.

    Raises:
        BackendError: Keras reads the data in another way.
    """
    if getattr(_thread, "epoch_iterator", None) is not None and not _thread.is_asked:
        raise BackendError(
            versions.changed(
                "fit, evaluate and predict no longer read their data through TFEpochIterator "
                "(keras/src/backend/tensorflow/trainer.py), by which keras_dist_ext gives each replica its examples. "
                "No step was made"
            )
        )


class CustomEpochIterator(EpochIterator):  # type: ignore[misc]
    """Keras' iterator over the executions of an epoch, for a subclass that makes them itself.

    keras/src/trainers/epoch_iterator.py: ``fit`` begins each epoch by ``iter``, and reads ``num_batches``.

    Attributes:
        pass_length: how many batches a pass over the data has, if that is known.
        is_built_for: whether the model was asked to build itself for it.
    """

    is_built_for = False
    _num_batches: int | None

    def executions(self) -> Iterator[tuple[int, int, StepData]]:
        """Yield the first step, the last step and the batches of each execution of an epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[int, int, StepData]]:
        """Begin an epoch."""
        self._executions = self.executions()
        return self

    def __next__(self) -> tuple[int, int, StepData]:
        """Return what ``executions`` yields, as it is."""
        return next(self._executions)

    @property
    def pass_length(self) -> int | None:
        """See above."""
        return self._num_batches

    def check_built(self) -> None:
        """See that Keras has asked the model to build itself for this iterator, as it does before a run's first step.

        Raises:
            BackendError: it has not (keras/src/backend/tensorflow/trainer.py, `_maybe_symbolic_build`).
        """
        if not self.is_built_for:
            raise BackendError(
                versions.changed(
                    "fit and evaluate no longer call Trainer._maybe_symbolic_build "
                    "(keras/src/backend/tensorflow/trainer.py), by which keras_dist_ext builds a model and begins the "
                    "seeds of its replicas. No step was made"
                )
            )

    def warn_of_interruption(self) -> None:
        """Warn that the data has ended before the epoch, as Keras does."""
        self._interrupted_warning()


def first_batch_of_generator(adapter: DataAdapter) -> list[TensorNest]:
    """The arrays of a generator's first batch, which Keras has looked at (data_adapters/generator_data_adapter.py)."""
    return [part for part in tree.flatten(adapter._first_batches[0]) if isinstance(part, np.ndarray | tf.Tensor)]


def num_array_examples(adapter: DataAdapter) -> int:
    """How many examples there are in the arrays that `fit` was given (data_adapters/array_data_adapter.py)."""
    return int(next(array for array in tree.flatten(adapter._inputs) if array is not None).shape[0])


def array_shuffle(adapter: DataAdapter) -> bool | str:
    """The `shuffle` that `fit` was given with arrays: True, False or "batch" (data_adapters/array_data_adapter.py)."""
    return adapter._shuffle  # type: ignore[no-any-return]


def take_examples(adapter: DataAdapter, rows: Array) -> list[Array]:
    """Some rows of each of the arrays that `fit` was given (trainers/data_adapters/array_data_adapter.py).

    Raises:
        TypeError: one is neither of NumPy nor of pandas nor of TensorFlow, as Keras takes them too.
    """
    given = [array for array in tree.flatten(adapter._inputs) if array is not None]
    taken = []
    for array in given:
        if hasattr(array, "iloc"):
            taken.append(array.iloc[rows].to_numpy())
        elif isinstance(array, np.ndarray):
            taken.append(array[rows])
        elif isinstance(array, tf.Tensor):
            taken.append(tf.gather(array, rows).numpy())
        else:
            raise TypeError(type(array).__name__)
    return taken


@contextlib.contextmanager
def seed_array_shuffles(seed: Callable[[], int]) -> Iterator[None]:
    """Have the array dataset that is made inside shuffle by ``seed()``, asked when a pass begins.

    keras/src/trainers/data_adapters/array_data_adapter.py shuffles all indices at once, or those of each batch
    (shuffle="batch"), by `tf.random.shuffle`, from Keras 3.16 on by `tf.random.experimental.stateless_shuffle`. Its
    order could be seeded only by making the dataset anew for each pass.

    Raises:
        BackendError: it shuffles in another way.
    """
    _thread.order, _thread.is_ordered = seed, False
    try:
        yield
    finally:
        del _thread.order
    if not _thread.is_ordered:
        raise BackendError(
            versions.changed(
                "arrays are no longer shuffled by tf.random.shuffle or tf.random.experimental.stateless_shuffle "
                "(keras/src/trainers/data_adapters/array_data_adapter.py), so their order would follow no seed"
            )
        )


_stock_shuffle, _stock_stateless_shuffle = tf.random.shuffle, tf.random.experimental.stateless_shuffle


@functools.wraps(_stock_shuffle)
def _shuffle(value: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
    return _stock_shuffle(value, *args, **kwargs) if _order() is None else _in_order(value)


@functools.wraps(_stock_stateless_shuffle)
def _stateless_shuffle(value: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
    return _stock_stateless_shuffle(value, *args, **kwargs) if _order() is None else _in_order(value)


def _order() -> Callable[[], int] | None:
    return getattr(_thread, "order", None)


def _in_order(value: tf.Tensor) -> tf.Tensor:
    order = _thread.order
    _thread.is_ordered = True
    of_pass = tf.numpy_function(lambda: np.int64(order()), [], tf.int64)
    return _stock_stateless_shuffle(value, tf.stack([of_pass, tf.cast(value[0], tf.int64)]))


put(tf.random, "shuffle", _shuffle)
put(tf.random.experimental, "stateless_shuffle", _stateless_shuffle)


def make_data_adapter(
    x: TensorNest,
    y: TensorNest,
    sample_weight: TensorNest,
    *,
    batch_size: int | None,
    shuffle: bool,
    class_weight: Mapping[int, float] | None = None,
) -> DataAdapter:
    """What `fit` makes of its data (keras/src/trainers/data_adapters/__init__.py)."""
    return data_adapters.get_data_adapter(
        x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, class_weight=class_weight
    )
