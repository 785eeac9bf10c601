"""More training programs that are slower than they need be, of public questions whose answer is one change each."""

from __future__ import annotations

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
