"""Training programs that are slower than they need be, each with its fix: what people ask about in public.

A situation makes three programs: "sick"; "fix", which is what the doctor's first finding says, word for word; and
"best", the best change known, where that is another one. What waits in reality sleeps here, what computes computes.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

import keras_dist_ext as kde

__all__ = ["AUTOTUNE", "SITUATIONS", "Program", "Situation", "batches", "heavy", "mlp", "names", "slices", "wide"]

L = keras.layers
WIDTH = 16
X = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@dataclasses.dataclass
class Program:
    """What is trained.

    Args:
        data: what `fit` takes as x; or (x, y) of arrays.
        examples: of a pass over the data.
        layers: of the model.
        callbacks: makes them.
        compiled: what `compile` takes.
        fitted: what `fit` takes.
        num_replicas: 1 is no strategy.
        is_stock: whether the model is one of stock Keras.
        model: makes it of its layers; None is `Sequential`.
        passes: over the data in an epoch.
    """

    data: Any
    examples: int
    layers: Callable[[], list[Any]]
    callbacks: Callable[[], list[Any]] = list
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)
    fitted: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_replicas: int = 1
    is_stock: bool = False
    model: Callable[..., Any] | None = None
    passes: int = 1


@dataclasses.dataclass(frozen=True)
class Situation:
    """A question that people ask.

    Args:
        title: for the table.
        code: of the finding that is right; several, with | between, where they say the same.
        change: the fix as the finding words it, in short.
        make: returns the program: "sick", "fix" or "best".
        best: what the best known change is; "" where it is the fix.
    """

    title: str
    code: str
    change: str
    make: Callable[[str], Program]
    best: str = ""
    interventions: bool = False


SITUATIONS: dict[str, Situation] = {}


def situation(title: str, code: str, change: str, best: str = "", **more: Any) -> Callable[[Any], Any]:
    """Add one under the name of its function."""

    def add(make: Callable[[str], Program]) -> Callable[[str], Program]:
        SITUATIONS[make.__name__] = Situation(title, code, change, make, best, **more)
        return make

    return add


def mlp(width: int = WIDTH) -> list[Any]:
    """Return the layers of a small model."""
    return [keras.Input((width,)), L.Dense(64, "relu"), L.Dense(1)]


def heavy() -> list[Any]:
    """Return the layers of a model of 0.3 million weights."""
    return [keras.Input((WIDTH,)), L.Dense(512, "relu"), L.Dense(512, "relu"), L.Dense(1)]


def wide() -> list[Any]:
    """Return the layers of a model of 4.2 million weights, 16.8 MB."""
    return [keras.Input((WIDTH,)), L.Dense(2048, "relu"), L.Dense(2048, "relu"), L.Dense(1)]


def batches(rows: int = 64, examples: int = 2048) -> tf.data.Dataset:
    """Return data that costs nothing."""
    return tf.data.Dataset.from_tensor_slices((X[:examples], Y[:examples])).batch(rows).cache().prefetch(2)


def compute(milliseconds: float) -> None:
    """Keep Python busy."""
    end = time.thread_time() + 1e-3 * milliseconds
    while time.thread_time() < end:
        sum(range(50))


def python_map(function: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    """Return what calls a function of Python for each element."""

    def made(value: Any) -> Any:
        function()
        return value

    def mapped(x: Any, y: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(made, [x], tf.float32), x.shape), y

    return mapped


def slices(examples: int) -> tf.data.Dataset:
    """Return examples one by one."""
    return tf.data.Dataset.from_tensor_slices((X[:examples], Y[:examples]))


def with_threads(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Give a pipeline threads for calls that wait."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 16
    return dataset.with_options(options)


AUTOTUNE = tf.data.AUTOTUNE

# Pipelines

WORDS = [f"word{i}" for i in range(300)]
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, 200)) for i in range(2000)]
VOCABULARY = {word: number for number, word in enumerate(WORDS)}


@situation("a tokeniser in Python, in `map`", "python-map", "the function with TensorFlow ops, of whole batches")
def tokeniser(kind: str) -> Program:
    def tokens(text: bytes) -> Any:
        return np.array([VOCABULARY.get(word, 0) for word in re.findall(r"\w+", text.decode().lower())], np.int64)

    def in_python(text: Any, y: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(tokens, [text], tf.int64), [200]), y

    def of_batches(text: Any, y: Any) -> Any:
        words = tf.strings.split(tf.strings.lower(text)).to_tensor(shape=[None, 200])
        return tf.strings.to_hash_bucket_fast(words, 1000), y

    data = tf.data.Dataset.from_tensor_slices((TEXTS, Y[: len(TEXTS)]))
    if kind == "sick":
        data = data.map(in_python).batch(20)
    else:
        data = data.batch(20).map(of_batches, num_parallel_calls=AUTOTUNE)
    return Program(
        data.prefetch(2),
        len(TEXTS),
        lambda: [keras.Input((200,), dtype="int64"), L.Embedding(1000, 4), L.GlobalAveragePooling1D(), L.Dense(1)],
        passes=4,
    )


@situation("a `map` that waits for storage, one call at a time", "sequential-map", "16 parallel calls, with threads")
def waiting_map(kind: str) -> Program:
    load = python_map(lambda: time.sleep(2e-3))
    data = slices(240).map(load) if kind == "sick" else with_threads(slices(240).map(load, num_parallel_calls=16))
    return Program(data.batch(8).prefetch(2), 240, mlp, passes=3)


@situation("a parallel `map` that waits, on 2 cores", "python-map", "16 parallel calls, with threads")
def few_threads(kind: str) -> Program:
    load = python_map(lambda: time.sleep(4e-3))
    data = slices(240).map(load, num_parallel_calls=AUTOTUNE)
    data = data if kind == "sick" else with_threads(slices(240).map(load, num_parallel_calls=16))
    return Program(data.batch(8).prefetch(2), 240, mlp, passes=3)


@situation("`map(...).shard(4, 0)`", "shard-after-map", "`shard` right after the source")
def shard_after_map(kind: str) -> Program:
    load = python_map(lambda: compute(0.3))
    data = slices(1600).map(load).shard(4, 0) if kind == "sick" else slices(1600).shard(4, 0).map(load)
    return Program(data.batch(16).prefetch(2), 400, mlp, passes=3)


@situation("`cache().take(n)`", "cache-never-fills", "`take(n).cache()`")
def cache_never_fills(kind: str) -> Program:
    data = slices(800).map(python_map(lambda: compute(0.3)))
    data = data.cache().take(400) if kind == "sick" else data.take(400).cache()
    return Program(data.batch(16).prefetch(2), 400, mlp, passes=6)


@situation("a cheap `map` before `batch`", "map-before-batch", "`batch(...).map(...)`")
def map_before_batch(kind: str) -> Program:
    x = np.tile((X * 10).astype("uint8"), (6, 1))
    data = tf.data.Dataset.from_tensor_slices((x, np.tile(Y, (6, 1))))

    def scale(x: Any, y: Any) -> Any:
        return tf.cast(x, tf.float32) / 255.0 - 0.5, y

    data = data.map(scale).batch(256) if kind == "sick" else data.batch(256).map(scale, num_parallel_calls=AUTOTUNE)
    return Program(data.prefetch(2), len(x), mlp, passes=8)


@situation("`parse_single_example` before `batch`", "map-before-batch", "`batch` first, `parse_example`")
def parse_single(kind: str) -> Program:
    def example(x: Any, y: Any) -> bytes:
        features = {
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=x)),
            "y": tf.train.Feature(float_list=tf.train.FloatList(value=y)),
        }
        return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()

    spec = {"x": tf.io.FixedLenFeature([WIDTH], tf.float32), "y": tf.io.FixedLenFeature([1], tf.float32)}
    records = [example(x, y) for x, y in zip(X, Y, strict=True)]
    data = tf.data.Dataset.from_tensor_slices(records)

    def pair(parsed: Any) -> Any:
        return parsed["x"], parsed["y"]

    if kind == "sick":
        data = data.map(lambda record: pair(tf.io.parse_single_example(record, spec))).batch(256)
    else:
        data = data.batch(256).map(lambda r: pair(tf.io.parse_example(r, spec)), num_parallel_calls=AUTOTUNE)
    return Program(data.prefetch(2), len(records), mlp, passes=10)


@situation("a costly `map` after `cache()` that draws nothing at random", "map-after-cache", "`map(...).cache()`")
def map_after_cache(kind: str) -> Program:
    def costly(x: Any, y: Any) -> Any:
        square = tf.linalg.matmul(x, x, transpose_b=True)
        for _ in range(6):
            square = tf.linalg.matmul(square, square) * 1e-6
        return x + 0.0 * square[:, :WIDTH], y

    data = slices(2048).batch(256)
    data = data.cache().map(costly, num_parallel_calls=AUTOTUNE) if kind == "sick" else data.map(costly).cache()
    return Program(data.prefetch(2), 2048, mlp, passes=30)


@situation("a `filter` through `py_function`", "python-map", "the function with TensorFlow ops")
def python_filter(kind: str) -> Program:
    def keep(x: Any, y: Any) -> Any:
        if kind != "sick":
            return tf.reduce_sum(x) > -100.0
        return tf.ensure_shape(tf.numpy_function(lambda v: np.bool_(v.sum() > -100.0), [x], tf.bool), [])

    return Program(slices(1600).filter(keep).batch(32).prefetch(2), 1600, mlp, passes=8)


@situation("no prefetch, with autotune off", "no-prefetch", "`prefetch(AUTOTUNE)` at the end")
def no_prefetch(kind: str) -> Program:
    data = slices(2048).batch(256).map(python_map(lambda: time.sleep(5e-3))).repeat(10)
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    data = data if kind == "sick" else data.prefetch(2)
    return Program(data.with_options(options), 80 * 256, heavy)


@situation("a `shuffle` buffer that each epoch fills anew, slowly", "slow-start-of-epochs", "`.cache()` before it")
def slow_start(kind: str) -> Program:
    data = slices(640).map(python_map(lambda: compute(0.3)))
    data = data if kind == "sick" else data.cache()
    return Program(data.shuffle(640).batch(64), 640, mlp, fitted={"epochs": 6})


# Python that makes batches


@situation("`Dataset.from_generator` that waits", "generator-bound", "`map(load)`, 16 parallel calls, with threads")
def waiting_generator(kind: str) -> Program:
    def elements() -> Any:
        for i in [*range(0, 2048, 64)] * 5:
            time.sleep(8e-3)
            yield X[i : i + 64], Y[i : i + 64]

    if kind == "sick":
        spec = (tf.TensorSpec([64, WIDTH]), tf.TensorSpec([64, 1]))
        return Program(tf.data.Dataset.from_generator(elements, output_signature=spec).prefetch(2), 5 * 2048, mlp)
    data = with_threads(slices(2048).batch(64).map(python_map(lambda: time.sleep(8e-3)), num_parallel_calls=16))
    return Program(data.prefetch(2), 2048, mlp, passes=5)


@situation("`Dataset.from_generator` that computes", "generator-bound", "`map` with TensorFlow ops")
def computing_generator(kind: str) -> Program:
    def elements() -> Any:
        for x, y in zip(np.tile(X, (4, 1)), np.tile(Y, (4, 1)), strict=True):
            yield np.array([float(v) / 255.0 - 0.5 for v in x], "float32"), y

    if kind == "sick":
        spec = (tf.TensorSpec([WIDTH]), tf.TensorSpec([1]))
        return Program(tf.data.Dataset.from_generator(elements, output_signature=spec).batch(32), 4 * 4096, mlp)
    data = slices(4096).map(lambda x, y: (x / 255.0 - 0.5, y), num_parallel_calls=AUTOTUNE).batch(32)
    return Program(data, 4096, mlp, passes=4)


@situation("a Python generator given to `fit`", "generator-bound", "a `PyDataset`, `workers=16`")
def python_generator(kind: str) -> Program:
    def elements() -> Any:
        for i in itertools.cycle(range(0, 2048, 64)):
            time.sleep(8e-3)
            yield X[i : i + 64], Y[i : i + 64]

    fitted = {"steps_per_epoch": 160}
    if kind == "sick":
        return Program(elements(), 160 * 64, mlp, fitted=fitted)
    return Program(Batches(waits=8e-3, workers=16), 160 * 64, mlp)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of arrays, each after some waiting or computing."""

    def __init__(self, waits: float = 0.0, computes: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.waits, self.computes = waits, computes

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        index %= 32
        time.sleep(self.waits)
        compute(1e3 * self.computes)
        return X[index * 64 : (index + 1) * 64], Y[index * 64 : (index + 1) * 64]


@situation("a `PyDataset` that waits for storage", "generator-bound", "`workers=16`")
def waiting_py_dataset(kind: str) -> Program:
    return Program(Batches(waits=8e-3, **({} if kind == "sick" else {"workers": 16})), 160 * 64, mlp)


@situation("a `PyDataset` that computes", "generator-bound", "`workers=4, use_multiprocessing=True`")
def computing_py_dataset(kind: str) -> Program:
    more = {} if kind == "sick" else {"workers": 4, "use_multiprocessing": True}
    return Program(Batches(computes=8e-3, **more), 160 * 64, mlp)


class Rows(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of an HDF5 file, read row by row or at once."""

    def __init__(self, file: str, kind: str) -> None:
        super().__init__(workers=4)
        self.x, self.kind = h5py.File(file)["x"], kind

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        begin = index * 32
        if self.kind == "sick":
            x = np.stack([self.x[begin + (7 * i) % 32] for i in range(32)])
        else:
            x = self.x[begin : begin + 32]
        return x, x[:, :1]


@situation("HDF5 read row by row in a `PyDataset`", "unaligned-reads", "`x[i * 32:(i + 1) * 32]`")
def hdf5_rows(kind: str) -> Program:
    folder = new_folder()
    with h5py.File(folder / "x.h5", "w") as file:
        rows = np.tile(X[:1280], (1, 16))  # chunks are larger than what h5py keeps of them, 1 MB
        file.create_dataset("x", data=rows, chunks=(1280, 256), compression="gzip", compression_opts=1)
    return Program(Rows(str(folder / "x.h5"), kind), 640, lambda: mlp(256))


# Steps


class PythonStep(kde.Sequential):  # type: ignore[misc]
    """Looks at its batch in Python."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)

        def quality(value: Any) -> Any:
            time.sleep(5e-3)
            return np.float32(value.mean())

        value = tf.numpy_function(quality, [data[0]], tf.float32)
        return {**logs, "quality": tf.ensure_shape(value, [])}


@situation("`numpy_function` of 5 ms in `train_step`", "python-in-step", "called outside of the step")
def python_step(kind: str) -> Program:
    return Program(batches(), 2048, mlp, model=PythonStep if kind == "sick" else None, passes=4)


class PythonMetric(keras.metrics.Mean):  # type: ignore[misc]
    """A metric that Python computes."""

    def __init__(self, *, in_python: bool) -> None:
        super().__init__("error")
        self.in_python = in_python

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        def error(y: Any, predicted: Any) -> Any:
            return np.float32(np.mean([abs(a.item() - b.item()) for a, b in zip(y, predicted, strict=True)] * 10))

        if self.in_python:
            value = tf.ensure_shape(tf.numpy_function(error, [y, predicted], tf.float32), [])
        else:
            value = tf.reduce_mean(tf.abs(y - predicted))
        super().update_state(value)


@situation("a metric that Python computes", "python-in-step", "with TensorFlow ops")
def python_metric(kind: str) -> Program:
    return Program(batches(256), 2048, mlp, compiled={"metrics": [PythonMetric(in_python=kind == "sick")]}, passes=16)


@situation("`run_eagerly=True`", "eager", "without it")
def eager(kind: str) -> Program:
    return Program(batches(), 2048, mlp, compiled={"run_eagerly": kind == "sick"}, passes=2)


@situation("a small model, `steps_per_execution=1`", "host-bound", "`steps_per_execution=n`, as said")
def host_bound(kind: str) -> Program:
    return Program(batches(16), 2048, mlp, compiled={"steps_per_execution": 1 if kind == "sick" else 30}, passes=6)


@situation("`TerminateOnNaN` on a small model", "host-bound", "without looking at each batch")
def watched_steps(kind: str) -> Program:
    callbacks = (lambda: [keras.callbacks.TerminateOnNaN()]) if kind == "sick" else list
    return Program(batches(16), 2048, mlp, callbacks, passes=6)


@situation("a table of 200,000 x 64 under Adam", "update-bound", "`SGD` without momentum")
def large_table(kind: str) -> Program:
    ids = np.random.default_rng(0).integers(200_000, size=(2400, 8))
    rows, optimizer = 60, "adam" if kind == "sick" else "sgd"
    data = tf.data.Dataset.from_tensor_slices((ids, Y[: len(ids)])).batch(rows).cache().prefetch(2)
    return Program(
        data,
        len(ids),
        lambda: [keras.Input((8,), dtype="int64"), L.Embedding(200_000, 64), L.GlobalAveragePooling1D(), L.Dense(1)],
        compiled={"optimizer": optimizer},
        fitted={"epochs": 2 if kind == "sick" else 5},
    )


@situation("16.8 MB of weights, 8 examples a step", "update-bound", "16 times the batch, as said", "32 times the batch")
def wide_model(kind: str) -> Program:
    rows = {"sick": 8, "fix": 128, "best": 256}[kind]
    return Program(batches(rows, 512), 512, wide, fitted={"epochs": 2})


@situation("4 examples for 2 replicas", "batch-too-small", "256 examples, as said", interventions=True)
def small_batch(kind: str) -> Program:
    rows = 4 if kind == "sick" else 256
    return Program(batches(rows, 512), 512, heavy, num_replicas=2, passes=3)


@situation("an LSTM of 160 time steps, 8 examples", "sequential-model", "more examples a replica")
def sequential(kind: str) -> Program:
    rows = 8 if kind == "sick" else 64
    x = np.random.default_rng(0).normal(size=(256, 160, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, Y[:256])).batch(rows).cache().prefetch(2)
    return Program(data, 256, lambda: [keras.Input((160, 4)), L.LSTM(8), L.Dense(1)], passes=2)


# Callbacks


class _Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """Does something at every so manieth batch."""

    def __init__(self, work: Callable[[Any], Any], every: int = 1) -> None:
        super().__init__()
        self.work, self.every = work, every

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch % self.every == 0:
            self.work(self)


class EpochCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Does something at the end of epochs."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        super().__init__()
        self.work = work

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.work(self)


def _with_callback(kind: str, work: Callable[[Any], Any], every: int = 1, **more: Any) -> Program:
    callbacks = {
        "sick": lambda: [_Callback(work, every)],
        "fix": lambda: [EpochCallback(work)],
    }
    return Program(batches(32), 2048, mlp, callbacks[kind], **{"passes": 2, **more})


@situation("a callback that sleeps 10 ms a batch", "slow-callback", "`on_epoch_end`")
def slow_callback(kind: str) -> Program:
    return _with_callback(kind, lambda _: time.sleep(0.01))


@situation("a callback that sleeps 100 ms at every tenth batch", "slow-callback", "`on_epoch_end`")
def every_tenth(kind: str) -> Program:
    return _with_callback(kind, lambda _: time.sleep(0.1), 10)


@situation("a callback that calls `get_weights` at every batch", "fetching-callback|host-bound", "`on_epoch_end`")
def fetching(kind: str) -> Program:
    return _with_callback(kind, lambda callback: [callback.model.get_weights() for _ in range(20)], passes=3)


@situation("a callback that evaluates at every 20th batch", "slow-callback", "`on_epoch_end`")
def evaluating(kind: str) -> Program:
    return _with_callback(kind, lambda callback: callback.model.predict(X[:512], verbose=0), 20)


@situation("a `tf.function` given a Python number", "retracing", "`tf.constant(...)`")
def retracing(kind: str) -> Program:
    @tf.function(reduce_retracing=False)
    def record(step: Any, value: Any) -> Any:
        for _ in range(30):
            value = value + tf.cast(step, tf.float32)
        return value

    steps = itertools.count()

    def work(_: Any) -> None:
        step = next(steps)
        record(step if kind == "sick" else tf.constant(step), tf.constant(1.0))

    return Program(batches(64), 2048, mlp, lambda: [_Callback(work)], passes=2)


def new_folder() -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp(prefix="situations-"))


@situation("`ModelCheckpoint(save_freq=1)`", "slow-callback", '`save_freq="epoch"`')
def checkpoint(kind: str) -> Program:
    often = 1 if kind == "sick" else "epoch"
    return Program(
        batches(32, 1024),
        1024,
        mlp,
        lambda: [keras.callbacks.ModelCheckpoint(new_folder() / "m.keras", save_freq=often)],
        passes=2,
    )


@situation("`TensorBoard(update_freq=1)`", "slow-callback|host-bound", '`update_freq="epoch"`')
def tensorboard(kind: str) -> Program:
    often = 1 if kind == "sick" else "epoch"
    return Program(
        batches(32), 2048, mlp, lambda: [keras.callbacks.TensorBoard(new_folder(), update_freq=often)], passes=6
    )


@situation("`BackupAndRestore(save_freq=1)`", "slow-callback", '`save_freq="epoch"`')
def backup(kind: str) -> Program:
    often = 1 if kind == "sick" else "epoch"
    return Program(
        batches(32, 1024), 1024, mlp, lambda: [keras.callbacks.BackupAndRestore(new_folder(), save_freq=often)]
    )


# Replicas, and models of stock Keras


class Straggler(L.Layer):  # type: ignore[misc]
    """Sleeps on the second replica."""

    def call(self, x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        replica = 0 if context is None else context.replica_id_in_sync_group

        def wait(value: Any, replica: Any) -> Any:
            time.sleep(0.02 if replica == 1 else 0.0)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [x, replica], tf.float32), x.shape)


@situation("a replica on a slow device", "straggler", "taken out")
def straggler(kind: str) -> Program:
    layers = (lambda: [*heavy()[:-1], Straggler(), L.Dense(1)]) if kind == "sick" else heavy
    return Program(batches(128), 2048, layers, num_replicas=2, passes=4)


@situation("a stock Keras script: a `map` that waits", "sequential-map", "16 parallel calls, with threads")
def stock_script(kind: str) -> Program:
    return dataclasses.replace(waiting_map(kind), is_stock=True)


def names(only: Sequence[str]) -> list[str]:
    """Return the situations that are asked for; all by default.

    Raises:
        ValueError: one is none of them.
    """
    unknown = [name for name in only if name not in SITUATIONS]
    if unknown:
        raise ValueError(f"no such situations: {', '.join(unknown)}; there are {', '.join(SITUATIONS)}")
    return [name for name in SITUATIONS if not only or name in only]
