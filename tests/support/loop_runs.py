"""What each of two workers does in tests/core/test_loop.py: small runs, whose values the tests compare."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np


def train_sequences(strategy: Any, folder: pathlib.Path) -> dict[str, Any]:
    """The example of sequences: its history, its weights, and how many examples each replica had in each step."""
    import keras_dist_ext as kde
    from keras_dist_ext.examples import sequences

    memory = kde.MemoryWriter()
    loop, history = sequences.train(
        strategy, epochs=2, num_images=230, callbacks=[kde.ReplicaMonitor(writers=[memory], update_freq=1)]
    )
    return {
        "history": history.history,
        "weights": [weight.numpy() for weight in loop.reader.weights],
        "replicas": [(stats.num_replicas, stats.examples.tolist()) for stats in memory.train],
    }


def train_without_keras(strategy: Any, folder: pathlib.Path) -> tuple[Any, np.ndarray]:
    """The example without Keras: its history and its weights."""
    from keras_dist_ext.examples import linear_no_keras

    model, history = linear_no_keras.train(strategy, epochs=2)
    return history.history, model.weights.numpy()


def gathers(strategy: Any, folder: pathlib.Path) -> list[Any]:
    """All rows of uneven batches, in order, by `gather` and by a reduction."""
    import tensorflow as tf

    import keras_dist_ext as kde

    rows = np.arange(7, dtype="float32")
    double = kde.per_replica(lambda batch: 2 * batch, strategy)
    loop = kde.TrainLoop(lambda replica, batch: {"x": batch}, parts={}, reduce={"x": "concat"}, strategy=strategy)
    loop.fit(tf.data.Dataset.from_tensor_slices(rows).batch(3), verbose=0)
    return [kde.gather(double(rows), strategy).numpy().tolist(), loop.rows()["x"].tolist()]
