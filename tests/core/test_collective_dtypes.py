"""What TensorFlow's collectives do not carry is sent in a wider dtype, and comes back in its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from strategies import strategies

import keras_dist_ext as kde
from keras_dist_ext.errors import StrategyError
from keras_dist_ext.step import compression, reduce
from keras_dist_ext.step.compression import checked_compression

DTYPES = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64)
FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tf.DType]:
    """Have two CPU devices send each other what GPUs would; return the dtypes that collectives are given."""
    strategy, sent = strategies.get("mirrored2"), []
    plain = type(strategy.extended).batch_reduce_to

    def batch_reduce_to(extended: Any, op: Any, pairs: Any, *given: Any) -> Any:
        sent.extend(strategy.experimental_local_results(value)[0].dtype for value, _ in pairs)
        return plain(extended, op, pairs, *given)

    monkeypatch.setattr(reduce, "shares_memory", lambda _: False)
    monkeypatch.setattr(reduce, "has_gpus", lambda _: True)
    monkeypatch.setattr(type(strategy.extended), "batch_reduce_to", batch_reduce_to)
    return sent


@tf.function
def summed(strategy: tf.distribute.Strategy, dtype: tf.DType, *, is_sparse: bool) -> Any:
    def step() -> Any:
        own = tf.cast(tf.constant([[0.0, 1.0], [3.0, 0.0]]), dtype)
        value = tf.IndexedSlices(own, tf.constant([1, 1]), tf.constant([3, 2])) if is_sparse else own
        (total,) = tf.distribute.get_replica_context().merge_call(reduce.sum_over_replicas, args=([value],))
        return (total.values, total.indices) if is_sparse else total

    return strategy.experimental_local_results(strategy.run(step))


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOATS], ids=lambda dtype: dtype.name)
def test_sums_over_gpus_are_of_what_their_collectives_carry(dtype: tf.DType, gpus: list[tf.DType]) -> None:
    expected = tf.cast(tf.constant([[0.0, 2.0], [2.0 if dtype == tf.bool else 6.0, 0.0]]), dtype)
    for total in summed(strategies.get("mirrored2"), dtype, is_sparse=False):
        assert total.dtype == dtype
        np.testing.assert_array_equal(tf.cast(total, tf.float32), tf.cast(expected, tf.float32))
    assert set(gpus) <= {tf.float16, tf.float32, tf.float64, tf.int64}


def test_slices_are_sent_in_what_collectives_gather(gpus: list[tf.DType]) -> None:
    for values, indices in summed(strategies.get("mirrored2"), tf.bfloat16, is_sparse=True):
        assert values.dtype == tf.bfloat16
        dense = np.zeros((3, 2), "float32")
        np.add.at(dense, indices.numpy(), tf.cast(values, tf.float32).numpy())
        np.testing.assert_array_equal(dense, [[0, 0], [6, 2], [0, 0]])
    assert gpus == [tf.float32]


def test_hosts_send_what_they_can_as_it_is() -> None:
    for dtype in (tf.int32, tf.int64, *FLOATS):
        assert reduce.carried_as(tf.zeros(2, dtype), on_gpus=False) == dtype


def test_a_model_of_16_bits_trains_over_gpus_as_on_one_device(gpus: list[tf.DType]) -> None:
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
    histories = []
    for library, strategy in ((keras, tf.distribute.get_strategy()), (kde, strategies.get("mirrored2"))):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = library.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="bfloat16")])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        histories.append(model.fit(x, x[:, :1], batch_size=6, epochs=3, verbose=0, shuffle=False).history["loss"])
    np.testing.assert_allclose(histories[1], histories[0], rtol=2e-2)
    assert gpus
    assert tf.bfloat16 not in gpus


def test_gradients_are_not_rounded_for_gpus_which_could_not_add_them_up() -> None:
    def strategy(*devices: str) -> Any:
        return SimpleNamespace(num_replicas_in_sync=len(devices), extended=SimpleNamespace(worker_devices=devices))

    two = strategy("/device:GPU:0", "/device:GPU:1")
    with pytest.raises(StrategyError, match=r"'bfloat16' on 2 replicas that are GPUs: .* Compile without it\."):
        checked_compression("bfloat16", two, None, exact=False)
    assert checked_compression(None, two, None, exact=False) is None
    for devices in (("/device:GPU:0",), ("/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0")):
        assert checked_compression("bfloat16", strategy(*devices), None, exact=False) == "bfloat16"
    assert compression.has_gpus(two)
