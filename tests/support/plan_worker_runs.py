"""What each of two workers does in tests/workers/test_plan_workers.py: a plan over a link that was made slow."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import numpy as np

__all__ = ["GRADIENT_BYTES", "SLOW", "plan_on_both"]

WIDTH, UNITS = 16, 512
GRADIENT_BYTES = 4 * (WIDTH * UNITS + UNITS + UNITS + 1)
SLOW = 0.1  # seconds of a sum


def slow_sum(strategy: Any, values: list[Any]) -> list[Any]:
    """Add up as steps do, over a slow link."""
    import tensorflow as tf

    from keras_dist_ext.step.reduce import sum_over_replicas

    def wait(value: Any) -> Any:
        time.sleep(SLOW)
        return value

    first, *others = sum_over_replicas(strategy, values)
    (there,) = tf.numpy_function(wait, [first], [first.dtype])
    there.set_shape(first.shape)
    return [there, *others]


def plan_on_both() -> dict[str, Any]:
    """Plan in this worker, and return what is to be judged, as plain values."""
    import keras

    import keras_dist_ext as kde
    from keras_dist_ext.step import reducers

    strategy = kde.pick_strategy("multi_worker").strategy
    x = np.random.default_rng(0).random((64, WIDTH), dtype="float32")
    model = kde.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(UNITS, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    before = model.get_weights()
    with mock.patch.object(reducers, "sum_over_replicas", slow_sum):
        plan = kde.plan(model, x, x[:, :1], batch_size=16, replicas=[1, 2, 4], network=strategy)
    two = plan.curve("fixed global batch").points[1]
    assert plan.measured.sums is not None
    return {
        "unchanged": all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)),
        "sums": dict(plan.measured.sums.seconds),
        "bound": two.bound,
        "communication": two.parts.communication,
        "text": str(plan),
    }
