"""More programs that need no change, of other sources of data and other parts of a training program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from further_situations import convolving, records
from situations import AUTOTUNE, WIDTH, L, Program, X, Y, batches, heavy, new_folder, slices

__all__ = ["FURTHER_HEALTHY"]

SERIES = np.random.default_rng(0).normal(size=(1024, 24, 4)).astype("float32")
SPEC = (tf.TensorSpec([128, WIDTH]), tf.TensorSpec([128, 1]))


class Cheap(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches that threads cut out of arrays."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        begin = index % 16 * 256
        return X[begin : begin + 256], Y[begin : begin + 256]


def _parse(record: Any) -> Any:
    x = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [None, WIDTH])
    return x, tf.reduce_sum(x, axis=1, keepdims=True)


def _files() -> tf.data.Dataset:
    names = tf.data.Dataset.from_tensor_slices(records(new_folder(), 8, 512)).shuffle(8)
    data = names.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=AUTOTUNE)
    return data.shuffle(512).batch(128).map(_parse, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)


def _cached_file() -> tf.data.Dataset:
    return slices(4096).batch(128).cache(str(new_folder() / "cache")).prefetch(AUTOTUNE)


def _generated() -> tf.data.Dataset:
    def elements() -> Any:
        for i in [*range(0, 4096, 128)] * 4:
            yield X[i : i + 128], Y[i : i + 128]

    return tf.data.Dataset.from_generator(elements, output_signature=SPEC).prefetch(AUTOTUNE)


def _buckets() -> tf.data.Dataset:
    rows = tf.ragged.constant([list(range(1, 8 + i % 24)) for i in range(1024)], dtype=tf.int32)
    data = tf.data.Dataset.from_tensor_slices((rows, Y[:1024])).map(lambda x, y: (tf.convert_to_tensor(x), y))
    return (
        data.bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], [12, 18, 24], [32] * 4, padded_shapes=([None], [1]))
        .cache()
        .prefetch(2)
    )


def _alike() -> tf.data.Dataset:
    """Sequences of 40 to 60 places, padded to the longest of a batch."""
    lengths = tf.constant(np.random.default_rng(0).integers(40, 61, 1024))
    data = tf.data.Dataset.from_tensor_slices((lengths, Y[:1024])).map(lambda n, y: (tf.range(1, n + 1), y))
    return data.cache().shuffle(1024).padded_batch(32).prefetch(2)


def _masked() -> list[Any]:
    return [keras.Input((None,), dtype="int32"), L.Embedding(100, 16, mask_zero=True), L.LSTM(32), L.Dense(1)]


IDS = np.random.default_rng(0).integers(1, 100, size=(2048, 64)) * (np.arange(64) < 20)


def _of_fixed_length() -> list[Any]:
    """A model that takes but one length."""
    return [keras.Input((64,), dtype="int64"), L.Embedding(100, 16), L.Flatten(), L.Dense(256), L.Dense(1)]


def _lstm() -> list[Any]:
    return [keras.Input((24, 4)), L.LSTM(64), L.Dense(1)]


def _half() -> list[Any]:
    """A model whose policy is bfloat16 in its head alone."""
    return [*heavy()[:-1], L.Dense(1, dtype="mixed_bfloat16")]


def _logged() -> list[Any]:
    where = new_folder()
    return [
        keras.callbacks.ModelCheckpoint(where / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(where / "log.csv"),
        keras.callbacks.TensorBoard(where, histogram_freq=0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
    ]


FURTHER_HEALTHY: dict[str, Callable[[], Program]] = {
    "a PyDataset with four threads": lambda: Program(Cheap(workers=4), 0, heavy, fitted={"epochs": 3}),
    "tf.data of a generator, with prefetch": lambda: Program(_generated(), 0, heavy, fitted={"epochs": 3}),
    "TFRecord files, interleaved": lambda: Program(_files(), 4096, heavy, passes=3, fitted={"epochs": 3}),
    "a cache in a file": lambda: Program(_cached_file(), 4096, heavy, passes=3, fitted={"epochs": 3}),
    "validation data": lambda: Program(
        batches(128, 4096), 4096, heavy, passes=3, fitted={"epochs": 4, "validation_data": batches(256, 1024)}
    ),
    "validation of a part of arrays": lambda: Program(
        (X, Y), 0, heavy, fitted={"batch_size": 128, "epochs": 5, "validation_split": 0.2}
    ),
    "weights of examples and classes": lambda: Program(
        slices(4096).map(lambda x, y: (x, y, tf.abs(y))).batch(128).cache().prefetch(2), 4096, heavy, passes=3
    ),
    "files written at each epoch's end": lambda: Program(
        batches(128, 4096), 4096, heavy, _logged, passes=8, fitted={"epochs": 5}
    ),
    "steps_per_execution=16": lambda: Program(
        batches(128, 4096), 4096, heavy, compiled={"steps_per_execution": 16}, passes=4
    ),
    "an LSTM of 24 time steps": lambda: Program(
        tf.data.Dataset.from_tensor_slices((SERIES, Y[:1024])).batch(64).cache().prefetch(2), 1024, _lstm, passes=4
    ),
    "sequences in buckets": lambda: Program(_buckets(), 1024, _masked, passes=3, fitted={"epochs": 3}),
    "sequences of similar lengths, padded": lambda: Program(_alike(), 1024, convolving, passes=2, fitted={"epochs": 3}),
    "ids of a fixed length that end in zeros": lambda: Program(
        (IDS, Y[:2048]), 2048, _of_fixed_length, fitted={"batch_size": 64, "epochs": 4}
    ),
    "compiled by XLA, with a last batch of fewer examples": lambda: Program(
        batches(96, 4096), 4096, heavy, compiled={"jit_compile": True}, passes=2, fitted={"epochs": 3}
    ),
    "metrics and a schedule": lambda: Program(
        batches(256, 4096),
        4096,
        heavy,
        compiled={
            "metrics": ["mae", keras.metrics.R2Score()],
            "optimizer": keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(1e-3, 1000)),
        },
        passes=4,
    ),
    "compiled by XLA": lambda: Program(
        batches(256, 4096), 4096, heavy, compiled={"jit_compile": True}, passes=4, fitted={"epochs": 3}
    ),
    "a head of 16 bits": lambda: Program(batches(256, 4096), 4096, _half, passes=3),
    "gradients accumulated": lambda: Program(
        batches(128, 4096),
        4096,
        heavy,
        compiled={"optimizer": keras.optimizers.Adam(gradient_accumulation_steps=4)},
        passes=3,
    ),
    "an LSTM on two replicas": lambda: Program(
        tf.data.Dataset.from_tensor_slices((SERIES, Y[:1024])).batch(128).cache().prefetch(2),
        1024,
        _lstm,
        num_replicas=2,
        passes=4,
    ),
}
