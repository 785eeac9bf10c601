"""What each of two workers does in tests/core/test_loop.py: small runs, whose values the tests compare."""

from __future__ import annotations

from typing import Any

import numpy as np


def run_all() -> dict[str, Any]:
    """Run every case in this worker and return its values."""
    import keras_dist_ext as kde
    from keras_dist_ext.examples import linear_no_keras, sequences

    strategy = kde.pick_strategy("multi_worker").strategy
    memory = kde.MemoryWriter()
    loop, history = sequences.train(
        strategy, epochs=2, num_images=230, callbacks=[kde.ReplicaMonitor(writers=[memory], update_freq=1)]
    )
    values: dict[str, Any] = {
        "sequences": (history.history, [weight.numpy() for weight in loop.reader.weights]),
        "replicas": [(stats.num_replicas, stats.examples.tolist()) for stats in memory.train],
    }
    model, history = linear_no_keras.train(strategy, epochs=2)
    values["linear"] = (history.history, model.weights.numpy())
    values["gathered"] = gathers(strategy)
    return values


def gathers(strategy: Any) -> list[Any]:
    """All rows of uneven batches, in order, by `gather` and by a reduction."""
    import tensorflow as tf

    import keras_dist_ext as kde

    rows = np.arange(7, dtype="float32")
    double = kde.per_replica(lambda batch: 2 * batch, strategy)
    loop = kde.TrainLoop(lambda replica, batch: {"x": batch}, parts={}, reduce={"x": "concat"}, strategy=strategy)
    loop.fit(tf.data.Dataset.from_tensor_slices(rows).batch(3), verbose=0)
    return [kde.gather(double(rows), strategy).numpy().tolist(), loop.rows()["x"].tolist()]
