"""Training programs that need no change: the doctor is to find nothing in them, also beside busy processes."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from situations import AUTOTUNE, WIDTH, L, Program, X, Y, batches, heavy, mlp, slices, wide

__all__ = ["HEALTHY"]

IMAGES = np.random.default_rng(0).normal(size=(1024, 20, 20, 1)).astype("float32")
IDS = np.random.default_rng(0).integers(2000, size=(2048, 20))


def _generator() -> Any:
    while True:
        yield X[:256], Y[:256]


class _Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches that cost nothing."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return X[:256], Y[:256]


def _of_images() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((IMAGES, Y[:1024])).shuffle(1024).batch(64).prefetch(2)


def _of_ids() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((IDS, Y[:2048])).batch(64).cache().prefetch(2)


def _cnn() -> list[Any]:
    return [keras.Input((20, 20, 1)), L.Conv2D(16, 3, activation="relu"), L.MaxPooling2D(), L.Flatten(), L.Dense(1)]


def _normalized() -> list[Any]:
    return [keras.Input((WIDTH,)), L.Dense(256), L.BatchNormalization(), L.ReLU(), L.Dropout(0.3), L.Dense(1)]


def _text() -> list[Any]:
    return [keras.Input((20,), dtype="int64"), L.Embedding(2000, 16), L.GlobalAveragePooling1D(), L.Dense(1)]


def _recurrent() -> list[Any]:
    return [keras.Input((20,), dtype="int64"), L.Embedding(2000, 16), L.GRU(16), L.Dense(1)]


def _saved() -> list[Any]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="healthy-"))
    return [keras.callbacks.ModelCheckpoint(folder / "m.keras"), keras.callbacks.TensorBoard(folder)]


def _stopped() -> list[Any]:
    return [keras.callbacks.EarlyStopping("loss", patience=9), keras.callbacks.ReduceLROnPlateau("loss", patience=9)]


def _augmented() -> tf.data.Dataset:
    data = slices(4096).cache().shuffle(4096).batch(256)
    return data.map(lambda x, y: (x + tf.random.normal(tf.shape(x)), y), num_parallel_calls=AUTOTUNE).prefetch(2)


HEALTHY: dict[str, Callable[[], Program]] = {
    "a perceptron on tf.data": lambda: Program(batches(), 2048, heavy, passes=4),
    "arrays": lambda: Program((X, Y), 4096, heavy, fitted={"batch_size": 128, "epochs": 4}),
    "convolutions": lambda: Program(_of_images(), 1024, _cnn, passes=3),
    "normalization and dropout": lambda: Program(batches(256, 4096), 4096, _normalized, passes=6),
    "text": lambda: Program(_of_ids(), 2048, _text, passes=4),
    "recurrent": lambda: Program(_of_ids(), 2048, _recurrent, passes=2),
    "a large table under SGD": lambda: Program(
        _of_ids(),
        2048,
        lambda: [keras.Input((20,), dtype="int64"), L.Embedding(100_000, 64), L.GlobalAveragePooling1D(), L.Dense(1)],
        compiled={"optimizer": "sgd"},
        passes=4,
    ),
    "a wide model, 512 examples a step": lambda: Program(batches(512, 4096), 4096, wide, passes=2),
    "a Python generator": lambda: Program(_generator(), 0, heavy, fitted={"steps_per_epoch": 60}),
    "a PyDataset": lambda: Program(_Batches(), 0, heavy),
    "checkpoints and TensorBoard once an epoch": lambda: Program(batches(), 2048, heavy, _saved, passes=4),
    "early stopping": lambda: Program(batches(), 2048, heavy, _stopped, passes=4),
    "augmentation after the cache": lambda: Program(_augmented(), 4096, heavy, passes=3),
    "a small model": lambda: Program(batches(), 2048, mlp, passes=8),
    "a perceptron on two replicas": lambda: Program(batches(256, 4096), 4096, heavy, num_replicas=2, passes=4),
    "convolutions on two replicas": lambda: Program(_of_images(), 1024, _cnn, num_replicas=2, passes=3),
}
