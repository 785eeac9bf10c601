"""Single parts of a step, metrics and layers that loop, are timed by leaving them out."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext.diagnosis.doctor.part_trials import measure_parts
from keras_dist_ext.diagnosis.doctor.parts import Parts

L = keras.layers


class Scan(L.Layer):  # type: ignore[misc]
    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x: Any) -> Any:
        return tf.scan(lambda h, v: tf.tanh(v + h @ self.kernel), tf.transpose(x, [1, 0, 2]), x[:, 0])[-1]


class Own(keras.metrics.Mean):  # type: ignore[misc]
    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        super().update_state(tf.abs(y - predicted))


@pytest.mark.rotating(turns=2)
def test_parts_that_may_cost_much_are_timed_and_the_model_stays_as_it_was(mirrored: Any) -> None:
    x = np.random.default_rng(0).integers(1000, size=(32, 7))
    with mirrored.scope():
        layers = [L.CategoryEncoding(1000, "one_hot"), L.Dense(3, name="first"), Scan(name="scan"), L.Reshape((3, 1))]
        layers += [L.LSTM(2, recurrent_dropout=0.5, name="rnn"), L.Dense(1, "sigmoid")]
        model = kde.Sequential([keras.Input((7,), dtype="int64"), *layers])
        metrics = ["mae", Own("own"), keras.metrics.AUC(num_thresholds=3000, name="area")]
        model.compile("adam", "mse", metrics=metrics, check=False)
    data = tf.data.Dataset.from_tensor_slices((x, (x[:, :1] > 500).astype("float32"))).batch(8)
    model.fit(data, verbose=0)
    before, iterations = model.get_weights(), int(model.optimizer.iterations)
    found = measure_parts(model, data, model.train_function.program.graphs(), 2, "CPU:0")
    assert [(each.name, each.argument, each.better) for each in found.metrics] == [
        ("area", "num_thresholds=3000", "num_thresholds=200"),
        ("own", "", ""),
    ]
    (loop,), (one_hot,), (dropout,) = found.loops, found.one_hots, found.recurrent_dropouts
    assert (loop.layer, loop.num_turns) == ("scan", 7)
    assert not loop.trials.has("compiled")  # XLA cannot for several CPUs of one process
    assert (one_hot.layer, one_hot.num_rows, one_hot.num_columns) == ("first", 1000, 3)
    assert (dropout.layer, dropout.kind, dropout.rate) == ("rnn", "LSTM", 0.5)
    for part in (*found.metrics, loop, one_hot, dropout):
        assert part.trials.has("as it was", "without"), part
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(model.optimizer.iterations) == iterations
    assert model.get_layer("rnn").recurrent_dropout == 0.5


@pytest.mark.slow
def test_summaries_of_a_step_are_timed_where_it_asks_for_them_itself(tmp_path: Any) -> None:
    written = tf.summary.create_file_writer(str(tmp_path))

    class Net(kde.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            with written.as_default(step=self.optimizer.iterations), tf.summary.record_if(True):
                tf.summary.histogram("batch", data[0])
            tf.summary.scalar("nowhere", 1.0, step=0)
            return super().train_step(data)

    model = Net([L.Dense(1)])
    model.compile("adam", "mse", metrics=[Own("own")])
    x = np.random.default_rng(0).random((32, 7), dtype="float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
    model.fit(data, verbose=0)
    graphs = model.train_function.program.graphs()
    parts = measure_parts(model, data, graphs, 2, "CPU:0", computes=False)
    summaries = parts.summaries
    assert parts == Parts(summaries=summaries)
    assert summaries is not None
    assert (summaries.tags, summaries.num_written) == (("batch",), 1)
    assert summaries.trials.has("as it was", "without")


@pytest.mark.slow
def test_a_loop_of_the_loss_is_timed_and_counted() -> None:
    def pairs(y: Any, predicted: Any) -> Any:
        rows = tf.shape(y)[0]

        def turn(i: Any, total: Any) -> Any:
            return i + 1, total + tf.reduce_mean(tf.abs(predicted[i] - predicted - y[i] + y))

        return tf.while_loop(lambda i, _: i < rows, turn, (0, 0.0))[1] / tf.cast(rows, tf.float32)

    model = kde.Sequential([L.Dense(1)])
    model.compile("adam", pairs)
    x = np.random.default_rng(0).random((32, 7), dtype="float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
    model.fit(data, verbose=0)
    (loop,) = measure_parts(model, data, model.train_function.program.graphs(), 2, "CPU:0").loops
    assert (loop.layer, loop.num_turns) == ("", 8)
    assert loop.trials.has("as it was", "without")
