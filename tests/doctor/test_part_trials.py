"""Single parts of a step, metrics and layers that loop, are timed by leaving them out."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext.diagnosis.doctor.part_trials import measure_loops, measure_metrics

L = keras.layers


class Scan(L.Layer):  # type: ignore[misc]
    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x: Any) -> Any:
        return tf.scan(lambda h, v: tf.tanh(v + h @ self.kernel), tf.transpose(x, [1, 0, 2]), x[:, 0])[-1]


class Own(keras.metrics.Mean):  # type: ignore[misc]
    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        super().update_state(tf.abs(y - predicted))


@pytest.mark.slow
def test_metrics_with_much_state_and_loops_of_layers_are_timed_and_the_model_stays_as_it_was(mirrored: Any) -> None:
    x = np.random.default_rng(0).random((32, 7, 3), dtype="float32")
    with mirrored.scope():
        model = kde.Sequential(
            [keras.Input((7, 3)), Scan(name="scan"), L.Reshape((3, 1)), L.LSTM(2), L.Dense(1, "sigmoid")]
        )
        metrics = ["mae", Own("own"), keras.metrics.AUC(num_thresholds=3000, name="area")]
        model.compile("adam", "mse", metrics=metrics, check=False)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0, :1])).batch(8)
    model.fit(data, verbose=0)
    before, iterations = model.get_weights(), int(model.optimizer.iterations)
    found = measure_metrics(model, data, 2)
    assert [(each.name, each.argument, each.better) for each in found] == [
        ("area", "num_thresholds=3000", "num_thresholds=200"),
        ("own", "", ""),
    ]
    assert all(each.trials.has("as it was", "without") for each in found), found
    (loop,) = measure_loops(model, data, model.train_function.program.graphs(), 2, "CPU:0")
    assert (loop.layer, loop.num_turns) == ("scan", 7)
    assert loop.trials.has("as it was", "without"), loop
    assert not loop.trials.has("compiled")  # XLA cannot for several CPUs of one process
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(model.optimizer.iterations) == iterations
