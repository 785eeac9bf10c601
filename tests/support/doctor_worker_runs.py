"""What each of two workers does in tests/workers/test_doctor_workers.py: real runs, with and without a fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np


def run_all() -> dict[str, Any]:
    """Run every case in this worker and return what is to be judged of its report, as plain values."""
    import keras_dist_ext as kde

    strategy = kde.pick_strategy("multi_worker").strategy
    reports = {case.__name__: case(strategy, strategy.cluster_resolver.task_id) for case in CASES}
    return {name: of_report(name, report) for name, report in reports.items()}


def of_report(case: str, report: Any) -> dict[str, Any]:
    from healthy_runs import alarms, judge_on_exact_times, share

    return {
        "text": str(report),
        "alarms": alarms(report, PLANTED[case]),
        "on exact times": judge_on_exact_times(report.examination).codes,
        "claimed": {finding.code: share(report, finding) for finding in report.findings},
        "synchronising": report.shares["synchronising"],
        "report": report.to_dict(),
    }


def train(strategy: Any, layers: list[Any], x: Any, y: Any, rows: int, num_steps: int, **given: Any) -> Any:
    import keras
    import tensorflow as tf

    import keras_dist_ext as kde

    with strategy.scope():
        model = kde.Sequential([keras.Input(x.shape[1:]), *layers])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows).cache().repeat().prefetch(2)
    doctor = kde.ParallelismDoctor(show=False, **given)
    model.fit(data, steps_per_epoch=num_steps, epochs=2, verbose=0, shuffle=False, callbacks=[doctor])
    return doctor.report


def convolutions() -> list[Any]:
    from keras import layers

    return [
        layers.Conv2D(24, 3, activation="relu"),
        layers.Conv2D(24, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1),
    ]


def images(num: int = 256) -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(num, 24, 24, 3)).astype("float32")
    return x, x[:, 0, 0, :1]


def is_clean(strategy: Any, worker: int) -> Any:
    """Workers that compute for much longer than they synchronise; experiments are asked for, and not made."""
    return train(strategy, convolutions(), *images(), 128, 20, interventions=True)


def synchronises(strategy: Any, worker: int) -> Any:
    """Many weights, and few rows."""
    from keras import layers

    x = np.random.default_rng(0).normal(size=(256, 64)).astype("float32")
    widths = [layers.Dense(2048, "relu"), layers.Dense(2048, "relu"), layers.Dense(1)]
    return train(strategy, widths, x, x[:, :1], 24, 15)


def has_a_slow_worker(strategy: Any, worker: int) -> Any:
    """Worker 1 takes its time in each step."""
    import keras
    import tensorflow as tf

    class Slow(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            if tf.distribute.get_replica_context() is None:  # when the model is built
                return x
            return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)

    def wait(value: Any) -> Any:
        time.sleep(0.15 * worker)
        return value

    return train(strategy, [Slow(), *convolutions()], *images(), 64, 15)


CASES: list[Callable[[Any, int], Any]] = [is_clean, synchronises, has_a_slow_worker]
PLANTED = {"is_clean": "", "synchronises": "sync-bound", "has_a_slow_worker": "straggler"}
