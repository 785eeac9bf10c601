"""What TensorFlow says of functions that are traced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from tensorflow.python.eager.polymorphic_function import polymorphic_function

import keras_dist_ext as kde
from keras_dist_ext.step.graphs import in_graph

X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(name="warnings_of_retracing")
def _warnings_of_retracing(caplog, monkeypatch):
    manager = polymorphic_function._FrequentTracingDetectorManager()  # it warns twice in a process at most
    monkeypatch.setattr(polymorphic_function, "_frequent_tracing_detector_manager", manager)
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if "triggered tf.function retracing" in r.getMessage()]


@pytest.mark.parametrize("jit_compile", rotating([False, True], []))
def test_models_one_after_another_are_not_taken_for_one_that_is_traced_again(
    strategies, warnings_of_retracing, jit_compile
):
    for _ in range(7):
        with strategies.get("one_device" if jit_compile else "mirrored2").scope():
            model = kde.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=jit_compile)
        watch = kde.ReplicaMonitor(writers=[kde.MemoryWriter()], check_divergence_every=1)
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[watch])
        model.evaluate(X, Y, batch_size=4, verbose=0)
        model.predict(X, batch_size=4, verbose=0)
        model.train_on_batch(X, Y)
        kde.per_replica(model, model.distribute_strategy)(X)
    assert warnings_of_retracing() == []


def test_a_function_that_is_traced_again_and_again_is_still_said(warnings_of_retracing):
    double = in_graph(lambda number: 2 * number)
    assert [int(double(number)) for number in range(7)] == [2 * number for number in range(7)]
    assert warnings_of_retracing()


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_xla_for_every_function_is_refused_before_the_first_step(method, mirrored, monkeypatch):
    with mirrored.scope():
        model = kde.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    monkeypatch.setenv("TF_FUNCTION_JIT_COMPILE_DEFAULT", "1")
    x = np.ones((4, 1), "float32")
    with pytest.raises(kde.BackendError, match="TF_FUNCTION_JIT_COMPILE_DEFAULT=1 has TensorFlow.*Nothing was trained"):
        model.fit(x, x, verbose=0) if method == "fit" else model.predict(x, verbose=0)
