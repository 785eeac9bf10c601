"""What each of two workers does in tests/workers/test_monitor_workers.py: small runs, whose values tests compare."""

from __future__ import annotations

import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) + 1).astype("float32")


def run_case(strategy: Any, folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Run a case in this worker and return its value, and the folder for files."""
    case = {case.__name__: case for case in CASES}[name]
    return {"folder": folder, name: case(strategy, strategy.cluster_resolver.task_id, folder)}


def build(strategy: Any, **compiled: Any) -> Any:
    import keras

    import keras_dist_ext as kde

    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", **compiled)
    return model


def fit(model: Any, *callbacks: Any, **given: Any) -> Any:
    data = () if "x" in given else (X, Y)
    arguments = {"epochs": 2, "verbose": 0, "callbacks": list(callbacks), **given}
    return model.fit(*data, **arguments)


def writes(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Events, lines and memory of a run with validation; paths are shared."""
    import keras_dist_ext as kde

    memory = kde.MemoryWriter()
    lines = kde.JsonLinesWriter(folder / "replicas.jsonl")
    monitor = kde.ReplicaMonitor(
        folder / "logs", experiment="two", update_freq=3, gradient_norm=True, writers=[memory, lines]
    )
    history = fit(build(strategy), monitor, batch_size=8, shuffle=False, validation_data=(X[:9], Y[:9])).history
    return memory, history


def agrees_on_intervals(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Automatic intervals, whose length the chief decides."""
    import keras_dist_ext as kde

    memory = kde.MemoryWriter()
    fit(build(strategy), kde.ReplicaMonitor(writers=[memory]), batch_size=2, epochs=8)
    return [(stats.step, stats.num_steps) for stats in memory.train]


def has_a_slow_worker(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Worker 1 waits for its own rows."""
    import tensorflow as tf

    import keras_dist_ext as kde

    def slowly(x: Any, y: Any) -> Any:
        def wait(value: Any) -> Any:
            time.sleep(0.06 * worker)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), [None, 4]), y

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = tf.data.Dataset.from_tensor_slices((X + worker, Y)).batch(5).map(slowly).with_options(options)
    memory = kde.MemoryWriter()
    fit(build(strategy), kde.ReplicaMonitor(writers=[memory], update_freq="epoch"), x=data, epochs=9)
    return memory.findings, memory.train


def diverges(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Worker 1 changes a variable of its own."""
    import keras

    import keras_dist_ext as kde
    from keras_dist_ext._keras.variables import components

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5 and worker == 1:
                (copy,) = components(self.model.layers[0].bias)
                copy.assign(copy + 1.0)

    memory = kde.MemoryWriter()
    monitor = kde.ReplicaMonitor(writers=[memory], check_divergence_every=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(build(strategy), monitor, Change(), batch_size=8, epochs=2)
    said = [str(warning.message) for warning in caught if "differs" in str(warning.message)]
    return [f for f in memory.findings if f["kind"] == "divergence"], said


def cannot_write(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Worker 1 has no directory to write to; the other must not wait for it."""
    import keras_dist_ext as kde

    (folder / "file").write_text("")
    log_dir = folder / "file" / "logs" if worker == 1 else folder / "fine"
    try:
        fit(build(strategy), kde.ReplicaMonitor(log_dir))
    except kde.MonitorError as error:
        return str(error)
    return None


def evaluates(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """An evaluation by itself."""
    import keras_dist_ext as kde

    memory = kde.MemoryWriter()
    model = build(strategy)
    loss = model.evaluate(X[:9], Y[:9], verbose=0, callbacks=[kde.ReplicaMonitor(writers=[memory])])
    return loss, memory.test


CASES: list[Callable[[Any, int, pathlib.Path], Any]] = [
    writes,
    agrees_on_intervals,
    has_a_slow_worker,
    diverges,
    cannot_write,
    evaluates,
]
