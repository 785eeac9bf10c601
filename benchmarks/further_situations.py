"""More training programs that are slower than they need be, of public questions whose answer is one change each."""

from __future__ import annotations

import itertools
import pathlib
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from situations import (
    AUTOTUNE,
    WIDTH,
    L,
    Program,
    X,
    Y,
    batches,
    compute,
    mlp,
    new_folder,
    python_map,
    situation,
    slices,
    with_threads,
)

import keras_dist_ext as kde

__all__: list[str] = []

# Pipelines

SERIES = np.tile(X[:, :1], (2, 1))
LENGTH = 24  # time steps of a window


@situation("windows of a series, by `window` and `flat_map`", "window-by-window", "`tf.gather` of a batch of windows")
def windows(kind: str) -> Program:
    num_windows = len(SERIES) - LENGTH
    if kind == "sick":
        data = tf.data.Dataset.from_tensor_slices(SERIES)
        data = data.window(LENGTH + 1, shift=1, drop_remainder=True).flat_map(lambda w: w.batch(LENGTH + 1))
        data = data.map(lambda w: (w[:-1], w[-1])).batch(64)
    else:

        def gathered(i: Any) -> Any:
            rows = tf.gather(SERIES, i[:, None] + tf.range(LENGTH + 1, dtype=tf.int64))
            return rows[:, :-1], rows[:, -1]

        data = tf.data.Dataset.range(num_windows).batch(64).map(gathered, num_parallel_calls=AUTOTUNE)
    return Program(
        data.prefetch(2),
        num_windows,
        lambda: [keras.Input((LENGTH, 1)), L.Flatten(), L.Dense(32, "relu"), L.Dense(1)],
        passes=2,
    )


@situation("`unbatch().batch(n)`", "unbatch-then-batch", "`rebatch(n)`")
def unbatched(kind: str) -> Program:
    data = slices(4096).repeat(2).batch(8192).cache()
    data = data.unbatch().batch(4096) if kind == "sick" else data.rebatch(4096)
    return Program(data.prefetch(2), 8192, lambda: [keras.Input((WIDTH,)), L.Dense(1)], passes=40)


@situation("`decode_csv` of each line", "map-before-batch", "`batch` first, `decode_csv` of whole batches")
def csv_lines(kind: str) -> Program:
    path = new_folder() / "x.csv"
    path.write_text("\n".join(",".join(f"{v:.4f}" for v in row) for row in np.concatenate([X, Y], axis=1)))

    def parse(lines: Any) -> Any:
        fields = tf.io.decode_csv(lines, [0.0] * (WIDTH + 1))
        return tf.stack(fields[:-1], axis=-1), tf.stack(fields[-1:], axis=-1)

    data = tf.data.TextLineDataset(str(path))
    data = data.map(parse).batch(128) if kind == "sick" else data.batch(128).map(parse, num_parallel_calls=AUTOTUNE)
    return Program(data.prefetch(2), 4096, mlp, passes=4)


@situation("`map(...).skip(n)`", "skip-after-map", "`skip` before `map`")
def skip_after_map(kind: str) -> Program:
    load = python_map(lambda: compute(0.3))
    data = slices(1600)
    data = data.map(load).skip(1200) if kind == "sick" else data.skip(1200).map(load)
    return Program(data.batch(16).prefetch(2), 400, mlp, passes=3)


def records(directory: pathlib.Path, num_files: int, examples: int) -> list[str]:
    """Write files of examples."""
    names = []
    for i in range(num_files):
        names.append(str(directory / f"{i}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for j in range(examples):
                writer.write(X[(i * examples + j) % len(X)].tobytes())
    return names


@situation("files read one at a time, each after a wait", "sequential-interleave", "16 at once, with threads")
def files_in_a_row(kind: str) -> Program:
    names = records(new_folder(), 32, 32)

    def waited(name: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(lambda n: (time.sleep(0.02), n)[1], [name], tf.string), [])

    def file(name: Any) -> Any:
        return tf.data.Dataset.from_tensors(name).map(waited).flat_map(tf.data.TFRecordDataset)

    data = tf.data.Dataset.from_tensor_slices(names)
    if kind == "sick":
        data = data.flat_map(file)
    else:
        data = with_threads(data.interleave(file, cycle_length=16, num_parallel_calls=16))

    def parse(record: Any) -> Any:
        x = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [None, WIDTH])
        return x, tf.reduce_sum(x, axis=1, keepdims=True)

    return Program(data.batch(32).map(parse, num_parallel_calls=AUTOTUNE).prefetch(2), 1024, mlp, passes=3)


@situation("images decoded anew in each epoch", "input-bound", "`.cache()`")
def decoded(kind: str) -> Program:
    pixels = np.random.default_rng(0).integers(256, size=(64, 96, 96, 3)).astype("uint8")
    encoded = [tf.io.encode_jpeg(image).numpy() for image in pixels]

    def decode(image: Any, y: Any) -> Any:
        image = tf.image.resize(tf.io.decode_jpeg(image, channels=3), [32, 32])
        return tf.ensure_shape(image, [32, 32, 3]), y

    data = tf.data.Dataset.from_tensor_slices((encoded * 16, Y[:1024])).map(decode, num_parallel_calls=AUTOTUNE)
    data = data.batch(32)
    data = data if kind == "sick" else data.cache()
    layers = lambda: [keras.Input((32, 32, 3)), L.Flatten(), L.Dense(8, "relu"), L.Dense(1)]  # noqa: E731
    return Program(data.prefetch(2), 1024, layers, passes=3)


# Python that makes batches


@situation("`use_multiprocessing=True` for batches that cost little", "generator-bound", "without it")
def needless_processes(kind: str) -> Program:
    more = {"workers": 2, "use_multiprocessing": True} if kind == "sick" else {"workers": 1}
    layers = lambda: [keras.Input((WIDE,)), L.Dense(8, "relu"), L.Dense(1)]  # noqa: E731
    return Program(Rows(**more), 160 * 64, layers)


WIDE = 4096
ROWS = np.random.default_rng(0).normal(size=(1024, WIDE)).astype("float32")


class Rows(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of 1 MB that are there already."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        begin = index % 16 * 64
        return ROWS[begin : begin + 64], Y[:64]


# Steps


@situation('`dtype="float64"`', "slow-dtype", "`float32`")
def float64(kind: str) -> Program:
    dtype = "float64" if kind == "sick" else "float32"

    def layers() -> list[Any]:
        return [
            keras.Input((WIDTH,), dtype=dtype),
            *(L.Dense(1024, "relu", dtype=dtype) for _ in range(3)),
            L.Dense(1, dtype=dtype),
        ]

    return Program(batches(256), 2048, layers, passes=2)


@situation("`mixed_float16` on a CPU", "slow-dtype", "`float32`")
def float16(kind: str) -> Program:
    dtype = "mixed_float16" if kind == "sick" else "float32"

    def layers() -> list[Any]:
        return [
            keras.Input((20, 20, 1)),
            L.Conv2D(16, 3, activation="relu", dtype=dtype),
            L.Conv2D(16, 3, activation="relu", dtype=dtype),
            L.Flatten(dtype=dtype),
            L.Dense(1, dtype="float32"),
        ]

    images = np.random.default_rng(0).normal(size=(512, 20, 20, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((images, Y[:512])).batch(64).cache().prefetch(2)
    return Program(data, 512, layers, passes=4)


@situation("`tf.map_fn` over the examples in a layer", "loop-in-step", "`tf.vectorized_map`", "ops of whole batches")
def mapped(kind: str) -> Program:
    def unit(row: Any) -> Any:
        return row / (1e-6 + tf.norm(row))

    class Each(L.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            if kind == "sick":
                return tf.map_fn(unit, x)
            if kind == "fix":
                return tf.vectorized_map(unit, x)
            return x / (1e-6 + tf.norm(x, axis=1, keepdims=True))

    layers = lambda: [keras.Input((WIDTH,)), L.Dense(64, "relu"), Each(), L.Dense(1)]  # noqa: E731
    return Program(batches(256), 2048, layers, passes=4)


# Shapes of batches

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3.0, 1.0, 4096).astype(int), 4, 600)


def sequences(examples: int) -> tf.data.Dataset:
    """Return sequences of numbers, few of which are long."""
    rows = tf.RaggedTensor.from_row_lengths(tf.range(LENGTHS[:examples].sum()) % 999 + 1, LENGTHS[:examples])
    data = tf.data.Dataset.from_tensor_slices((rows, Y[:examples]))
    return data.map(lambda x, y: (x.to_tensor() if isinstance(x, tf.RaggedTensor) else x, y)).cache()


def convolving() -> list[Any]:
    """Return the layers of a model of sequences of any length."""
    return [
        keras.Input((None,), dtype="int32"),
        L.Embedding(1000, 64),
        L.Conv1D(128, 5, padding="same", activation="relu"),
        L.Conv1D(128, 5, padding="same", activation="relu"),
        L.GlobalMaxPooling1D(),
        L.Dense(1),
    ]


@situation(
    "`padded_batch` of sequences, few of which are long", "mostly-padding", "`kde.bucket_by_length(dataset, ...)`"
)
def padded(kind: str) -> Program:
    data = sequences(4096)
    data = data.padded_batch(32).prefetch(2) if kind == "sick" else kde.bucket_by_length(data, batch_size=32, seed=0)
    return Program(data, 4096, convolving)


@situation("text padded to one length, as arrays", "mostly-padding", "`kde.bucket_by_length((sequences, y), ...)`")
def padded_arrays(kind: str) -> Program:
    rows = [np.arange(length) % 999 + 1 for length in LENGTHS[:2048]]
    if kind == "sick":
        x = keras.utils.pad_sequences(rows, maxlen=600)
        return Program((x, Y[:2048]), 2048, convolving, fitted={"batch_size": 32})
    return Program(kde.bucket_by_length((rows, Y[:2048]), batch_size=32, seed=0), 2048, convolving)


def short_text() -> list[Any]:
    return [keras.Input((None,), dtype="int32"), L.Embedding(1000, 16), L.GlobalMaxPooling1D(), L.Dense(1)]


@situation(
    "`jit_compile=True` and batches of many lengths",
    "recompiling",
    "`jit_compile=False`",
    "few lengths, `pad_to_bucket_boundary=True`",
)
def recompiled(kind: str) -> Program:
    data = sequences(1024).shuffle(1024)  # so that each epoch has shapes of its own
    if kind == "best":
        ends = [17, 65, 257, 601]
        data = data.bucket_by_sequence_length(
            lambda x, y: tf.shape(x)[0], ends, [16] * 5, pad_to_bucket_boundary=True, drop_remainder=True
        )
    else:
        data = data.padded_batch(16)
    return Program(data.prefetch(2), 1024, short_text, compiled={"jit_compile": kind != "fix"})


@situation("`jit_compile=True` and batches of many sizes", "recompiling", "`jit_compile=False`")
def recompiled_rows(kind: str) -> Program:
    def some(drawn: Any) -> Any:
        size = 8 + drawn % 992
        return tf.constant(X)[:size], tf.constant(Y)[:size]

    sizes = tf.data.Dataset.random(seed=1, rerandomize_each_iteration=True).take(25)
    return Program(sizes.map(some), 12500, mlp, compiled={"jit_compile": kind == "sick"})


@situation("a `tf.function` given batches of many lengths", "retracing", "`reduce_retracing=True`")
def retraced_shapes(kind: str) -> Program:
    @tf.function(reduce_retracing=kind != "sick")
    def record(values: Any) -> Any:
        for _ in range(30):
            values = values + 1.0
        return values

    steps = itertools.count(1)

    class Records(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            record(tf.ones([next(steps)]))

    return Program(batches(64), 2048, mlp, lambda: [Records()], passes=2)


@situation("a `tf.function` made anew at each batch", "retracing", "made once")
def made_anew(kind: str) -> Program:
    def double(values: Any) -> Any:
        for _ in range(30):
            values = values + 1.0
        return values

    once = tf.function(double)

    class Records(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            (tf.function(double) if kind == "sick" else once)(tf.ones([3]))

    return Program(batches(64), 2048, mlp, lambda: [Records()], passes=2)


# What is done between epochs


@situation("validation after each short epoch", "long-validation", "`validation_freq=20`")
def validated(kind: str) -> Program:
    data = batches(64, 1024)
    validation = batches(16, 4096)
    fitted = {"epochs": 41, "validation_data": validation, "validation_freq": 1 if kind == "sick" else 20}
    return Program(data, 1024, mlp, fitted=fitted)


@situation("a callback that predicts all data at each epoch's end", "slow-epoch-end", "after every 20 epochs")
def predicting(kind: str) -> Program:
    every = 1 if kind == "sick" else 20

    class Predicts(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch % every == 0:
                self.model.predict(X, batch_size=16, verbose=0)

    return Program(batches(64, 1024), 1024, mlp, lambda: [Predicts()], fitted={"epochs": 41})


@situation("epochs of two steps", "short-epochs", "`repeat(100)`, fewer epochs")
def short_epochs(kind: str) -> Program:
    epochs = 60 if kind == "sick" else 6
    data = batches(32, 64)
    data = data if kind == "sick" else data.repeat(100)
    return Program(data, 64 if kind == "sick" else 6400, mlp, fitted={"epochs": epochs})
