"""Gradients that are sent in 16 bits lose nothing in the end, and who cannot send them so is told."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext.step.compression import GradientCompression


def rounding(variable: Any) -> GradientCompression:
    compression = GradientCompression()
    compression.prepare([variable])
    return compression


def test_what_rounding_leaves_is_sent_later():
    gradient = tf.constant([1.0 + 2.0**-11, -3e-4, 7e20, 0.0])
    variable = tf.Variable(tf.zeros(4))
    compression = rounding(variable)
    sent = np.zeros(4)
    for _ in range(2000):
        rounded = compression.round([gradient], [variable])
        assert rounded.terms[0].dtype == tf.bfloat16
        rounded.keep(None)
        sent += tf.cast(rounded.terms[0], tf.float64).numpy()
    np.testing.assert_allclose(sent, 2000 * gradient.numpy().astype("float64"), rtol=2.0**-8 / 2000)
    plain = 2000 * tf.cast(tf.cast(gradient, tf.bfloat16), tf.float64).numpy()
    assert abs(plain[0] / sent[0] - 1) > 4e-4


def test_a_step_that_is_left_out_leaves_nothing():
    variable = tf.Variable(tf.zeros(2))
    compression = rounding(variable)
    compression.round([tf.constant([float("inf"), 1.0 + 2.0**-10])], [variable]).keep(tf.constant(False))
    rounded = compression.round([tf.constant([1.0, 1.0])], [variable])
    np.testing.assert_array_equal(tf.cast(rounded.terms[0], tf.float32), [1.0, 1.0])
    compression.round([tf.constant([float("inf"), 1.0])], [variable]).keep(None)
    np.testing.assert_array_equal([left for _, left in compression.round([tf.ones(2)], [variable]).left], [[0.0, 0.0]])


def test_a_scaled_loss_leaves_what_is_not_scaled():
    variable = tf.Variable(tf.zeros(1))
    compression = rounding(variable)
    compression.round([tf.constant([1024.0 + 1.0])], [variable], scale=1024.0).keep(None)
    rounded = compression.round([tf.constant([2048.0])], [variable], scale=2048.0)
    assert [float(left[0]) for _, left in rounded.left] == pytest.approx([1 / 1024])


def test_what_is_not_of_32_bits_or_sparse_stays_as_it_is():
    variables = [tf.Variable(tf.zeros((3, 2), dtype)) for dtype in (tf.float64, tf.float16, tf.float32, tf.float32)]
    compression = GradientCompression()
    compression.prepare(variables[:3])
    sparse = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([3, 2]))
    given = [tf.ones((3, 2), tf.float64), tf.ones((3, 2), tf.float16), sparse, tf.ones((3, 2))]
    rounded = compression.round(given, variables)
    assert all(term is gradient for term, gradient in zip(rounded.terms, given, strict=True))
    assert rounded.left == []
    assert all(total is term for total, term in zip(rounded.restored(rounded.terms), given, strict=True))


def compiled(strategy: tf.distribute.Strategy, **arguments: Any) -> kde.Sequential:
    with strategy.scope():
        model = kde.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **arguments)
    return model


@pytest.mark.parametrize("value", ["float16", "", True, 16, tf.bfloat16])
def test_another_kind_is_refused(value, mirrored):
    with pytest.raises(kde.StrategyError, match="gradient_compression must be 'bfloat16', or None, got "):
        compiled(mirrored, gradient_compression=value)


def test_virtual_replicas_are_refused(mirrored):
    with pytest.raises(kde.StrategyError, match="gradient_compression='bfloat16' with virtual_replicas=2, whose sums"):
        compiled(mirrored, gradient_compression="bfloat16", virtual_replicas=2)


def test_exactness_is_refused(mirrored):
    with pytest.raises(kde.StrategyError, match="gradient_compression='bfloat16' with exact=True: what replicas send"):
        compiled(mirrored, gradient_compression="bfloat16", exact=True)


def test_replicas_that_share_memory_send_nothing(mirrored):
    x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
    weights = []
    for kind in ("bfloat16", None):
        keras.utils.set_random_seed(1)
        model = compiled(mirrored, gradient_compression=kind)
        model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_resume_says_what_checkpoints_do_not_hold(mirrored, tmp_path, monkeypatch):
    model = compiled(mirrored, gradient_compression="bfloat16")
    x = np.ones((4, 2), "float32")
    model.fit(x, x[:, :1], verbose=0, callbacks=[kde.Resume(tmp_path / "in memory")])
    monkeypatch.setattr("keras_dist_ext.step.compression.shares_memory", lambda strategy: False)  # as for workers
    with pytest.warns(UserWarning, match="gradient_compression keeps on each replica what rounding has left"):
        model.fit(x, x[:, :1], verbose=0, callbacks=[kde.Resume(tmp_path / "sent")])
