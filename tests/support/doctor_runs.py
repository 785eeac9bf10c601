"""Real runs for tests/doctor/test_doctor.py: one with a fault that was planted, and its reference without."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from made_up_clock import MadeUpClock

import keras_dist_ext as kde
from keras_dist_ext.diagnosis.doctor.report import Report

L = keras.layers
WIDTH, ROWS = 64, 256
X = np.random.default_rng(0).normal(size=(8 * ROWS, WIDTH)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def train(
    strategy: Any,
    layers: Callable[[], list[Any]],
    data: Any,
    *callbacks: Any,
    doctor: kde.ParallelismDoctor | None = None,
    num_steps: int = 40,
    loss: Any = "mse",
    optimizer: str = "adam",
    **compiled: Any,
) -> Report:
    """Train for two epochs and return what the doctor says."""
    doctor = doctor or kde.ParallelismDoctor(show=False)
    with strategy.scope():
        model = kde.Sequential(layers())
        model.compile(optimizer, loss, **compiled)
    is_endless = not isinstance(data, tuple)
    arguments: dict[str, Any] = {"steps_per_epoch": num_steps} if is_endless else {"batch_size": ROWS}
    x, y = (data, None) if is_endless else data
    model.fit(
        x,
        y,
        epochs=2 if is_endless else 10,
        verbose=0,
        shuffle=not is_endless,
        callbacks=[*callbacks, doctor],
        **arguments,
    )
    assert doctor.report is not None
    return doctor.report


def mlp() -> list[Any]:
    return [keras.Input((WIDTH,)), L.Dense(256, "relu"), L.Dense(256, "relu"), L.Dense(1)]


def tiny() -> list[Any]:
    return [keras.Input((WIDTH,)), L.Dense(8, "relu"), L.Dense(1)]


def wide() -> list[Any]:
    return [keras.Input((WIDTH,)), L.Dense(1024, "relu"), L.Dense(512, "relu"), L.Dense(1)]


def heavy() -> list[Any]:
    """Steps so long that starting each from Python does not count."""
    return [keras.Input((WIDTH,)), L.Dense(1024, "relu"), L.Dense(1024, "relu"), L.Dense(1)]


def pipeline(x: Any = X, y: Any = Y, rows: int = ROWS) -> tf.data.Dataset:
    """Return batches that cost nothing."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(rows).cache().repeat().prefetch(2)


def sleeping(seconds: float) -> Callable[[Any, Any], Any]:
    """Return a function for `map` that takes its time, as storage does."""

    def wait(value: Any) -> Any:
        time.sleep(seconds)
        return value

    def function(x: Any, y: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), [None, WIDTH]), y

    return function


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(ROWS)


class LooksAtBatches(kde.RunCallback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


def by_a_made_up_clock(strategy: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Train for 80 steps by a clock that nothing else moves, with one fault, or with none if that is "".

    Two replicas compute one after the other, as on one core: for 1/8 s each. A step reads the clock six times: when it
    began, when its batch was there, when each replica has computed, and when it has updated; where the end of data
    cannot be foreseen, not when its batch was there but the next one.
    """
    host = ("training.batch_reader", "diagnosis.doctor.host_clock", "diagnosis.doctor.epoch_clock")
    clock = MadeUpClock(monkeypatch, host)
    is_ahead = fault == "generator-bound"
    num_calls = itertools.count()

    class Computes(L.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            context = tf.distribute.get_replica_context()
            if context is None:  # when the model is built
                return x
            replica = context.replica_id_in_sync_group
            return tf.ensure_shape(tf.numpy_function(compute, [x, replica], tf.float32), x.shape)

    def compute(value: Any, replica: int) -> Any:
        num_steps = next(num_calls) // 2
        clock.advance(1 / 8, after_reads=6 * num_steps + (1 if is_ahead else 2) + replica)
        clock.advance(1 / 4 if fault == "straggler" and replica == 1 else 0.0)
        return value

    class Callback(LooksAtBatches):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            clock.advance(1 / 8 if fault == "slow-callback" else 0.0)

    def elements() -> Any:
        for batch in itertools.count():
            clock.advance(1 / 4, after_reads=6 * batch - 1 if batch > 1 else 0)  # Keras looks at two before the run
            yield X[:ROWS], Y[:ROWS]

    def layers() -> list[Any]:
        return [keras.Input((WIDTH,)), Computes(), L.Dense(1)]

    return train(strategy, layers, elements() if is_ahead else (X, Y), Callback(), steps_per_execution=1)


# Faults: each takes a strategy of two replicas and whether the fault is there.


def sequential_map(strategy: Any, is_planted: bool) -> Report:
    return train(strategy, mlp, batches().map(sleeping(0.03 if is_planted else 0.0)).repeat().prefetch(2))


def no_prefetch(strategy: Any, is_planted: bool) -> Report:
    """Storage is slow, and faster than the model: what is read ahead costs nothing.

    Where the length of data is not known, steps read one batch ahead, whatever the pipeline does.
    """
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(512)
    step = train(strategy, heavy, rows.cache().repeat().prefetch(2), num_steps=15).examination.times
    assert step is not None
    data = rows.map(sleeping(0.6 * step.seconds / step.num_steps)).repeat(100)
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    data = data if is_planted else data.prefetch(2)
    return train(strategy, heavy, data.with_options(options), num_steps=15)


def generator_bound(strategy: Any, is_planted: bool) -> Report:
    def elements() -> Any:
        while True:
            time.sleep(0.03 if is_planted else 0.0)
            yield X[:ROWS], Y[:ROWS]

    spec = (tf.TensorSpec([ROWS, WIDTH]), tf.TensorSpec([ROWS, 1]))
    return train(strategy, mlp, tf.data.Dataset.from_generator(elements, output_signature=spec).prefetch(2))


def python_generator(strategy: Any, is_planted: bool) -> Report:
    def elements() -> Any:
        while True:
            time.sleep(0.03 if is_planted else 0.0)
            yield X[:ROWS], Y[:ROWS]

    return train(strategy, mlp, elements())


def input_bound(strategy: Any, is_planted: bool) -> Report:
    """The pipeline is as parallel as it can be, and slow."""

    def heavy(x: Any, y: Any) -> Any:
        square = tf.linalg.matmul(x, x, transpose_b=True)
        for _ in range(30 if is_planted else 0):
            square = tf.linalg.matmul(square, square) * 1e-6
        return x + 0.0 * square[:, :WIDTH], y

    data = batches().repeat().map(heavy, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return train(strategy, tiny if is_planted else mlp, data)


def batch_too_small(strategy: Any, is_planted: bool) -> Report:
    return train(strategy, wide, pipeline(rows=4 if is_planted else ROWS))


def starved(strategy: Any, is_planted: bool) -> Report:
    return train(strategy, mlp, pipeline(rows=1 if is_planted else ROWS))


def host_bound(strategy: Any, is_planted: bool) -> Report:
    return train(strategy, tiny, pipeline(), num_steps=150, steps_per_execution=1 if is_planted else "auto")


def watched_steps(strategy: Any, is_planted: bool) -> Report:
    callbacks = [LooksAtBatches()] if is_planted else []
    return train(strategy, tiny, pipeline(), *callbacks, num_steps=150)


def eager(strategy: Any, is_planted: bool) -> Report:
    return train(strategy, mlp, pipeline(), num_steps=15 if is_planted else 40, run_eagerly=is_planted)


def python_step(strategy: Any, is_planted: bool) -> Report:
    class Measured(keras.metrics.Mean):  # type: ignore[misc]
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            value = tf.numpy_function(quality, [y_pred], tf.float32) if is_planted else tf.reduce_mean(y_pred)
            super().update_state(tf.ensure_shape(value, []))

    def quality(value: Any) -> Any:
        time.sleep(0.01)
        return value.mean()

    with strategy.scope():
        metrics = [Measured()]
    return train(strategy, mlp, pipeline(), metrics=metrics)


def retracing(strategy: Any, is_planted: bool) -> Report:
    @tf.function
    def record(step: Any, value: Any) -> Any:
        for _ in range(100):
            value = value + tf.cast(step, tf.float32)
        return value

    class Record(LooksAtBatches):
        supports_multi_step = True
        step = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            record(self.step if is_planted else tf.constant(self.step), tf.constant(1.0))

    return train(strategy, heavy, pipeline(), Record(), num_steps=15, steps_per_execution=1)


def fetching_callback(strategy: Any, is_planted: bool) -> Report:
    class Weights(LooksAtBatches):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for _ in range(20 if is_planted else 0):
                self.model.get_weights()

    return train(strategy, heavy, pipeline(), Weights(), num_steps=15)


def slow_callback(strategy: Any, is_planted: bool) -> Report:
    class Slow(LooksAtBatches):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.02 if is_planted else 0.0)

    return train(strategy, heavy, pipeline(), Slow(), num_steps=15)


class Dense(L.Layer):  # type: ignore[misc]
    """A layer that may insist on a device."""

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self.device, self.dense = device, L.Dense(256, "relu")

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        if self.device is None:
            return self.dense(x)
        with tf.device(self.device):
            return self.dense(x)


def pinned_device(strategy: Any, is_planted: bool) -> Report:
    device = "/device:CPU:0" if is_planted else None
    return train(strategy, lambda: [keras.Input((WIDTH,)), Dense(device), Dense(device), L.Dense(1)], pipeline())


def straggler(strategy: Any, is_planted: bool) -> Report:
    class Slow(L.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            context = tf.distribute.get_replica_context()
            if context is None:  # when the model is built
                return x
            replica = context.replica_id_in_sync_group
            return tf.ensure_shape(tf.numpy_function(wait, [x, replica], tf.float32), x.shape)

    def wait(value: Any, replica: int) -> Any:
        if is_planted and replica == 1:
            time.sleep(0.025)
        return value

    return train(strategy, lambda: [keras.Input((WIDTH,)), Slow(), L.Dense(256, "relu"), L.Dense(1)], pipeline())


def unequal_shards(strategy: Any, is_planted: bool) -> Report:
    sizes = (384, 64) if is_planted else (224, 224)

    def of_worker(context: Any) -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).repeat()
        shards = [rows.batch(size) for size in sizes]
        return tf.data.Dataset.choose_from_datasets(shards, tf.data.Dataset.range(2).repeat()).prefetch(4)

    return train(strategy, wide, strategy.distribute_datasets_from_function(of_worker))


def sequential_model(strategy: Any, is_planted: bool) -> Report:
    length = 160 if is_planted else 16
    x = np.random.default_rng(0).normal(size=(64, length, 4)).astype("float32")
    data = pipeline(x, x[:, 0, :1], 32)
    return train(strategy, lambda: [keras.Input((length, 4)), L.LSTM(8), L.Dense(1)], data, num_steps=20)
