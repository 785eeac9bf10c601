"""Replicas without rows, where a kernel refuses to run on none."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from numpy.testing import assert_allclose

import keras_dist_ext as kde
from keras_dist_ext._keras import backend

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(5, 6, 4)).astype("float32")
X[1, 3:] = 0.0  # masked
Y = RANDOM.normal(size=(5, 2)).astype("float32")


def of_states(masked: Any) -> Any:
    _, *states = keras.layers.LSTM(3, return_state=True)(masked)
    return keras.layers.GRU(3)(masked, initial_state=states[0])


LAYERS = {
    "a masked LSTM": lambda masked: keras.layers.LSTM(3)(masked),
    "a GRU of sequences": lambda masked: keras.layers.Flatten()(keras.layers.GRU(3, return_sequences=True)(masked)),
    "in both directions": lambda masked: keras.layers.Bidirectional(keras.layers.LSTM(3))(masked),
    "states": of_states,
}


def trained(library: Any, strategy: Any, layer: str) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = keras.Input(X.shape[1:])
        outputs = keras.layers.Dense(2)(LAYERS[layer](keras.layers.Masking()(inputs)))
        model = library.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False)  # the second batch has one row
    return model


def asserting_rows(original: Any) -> Any:
    """The loop of a layer, which fails as cuDNN's does."""

    def inner_loop(layer: Any, sequences: Any, initial_state: Any, mask: Any, training: bool = False) -> Any:
        given = [sequences, *initial_state, *([] if mask is None else [mask])]
        needed = [tf.debugging.assert_positive(tf.shape(one)[0]) for one in given]
        needed += [tf.debugging.assert_equal(tf.shape(one)[0], tf.shape(sequences)[0]) for one in given]
        if mask is not None:
            needed.append(tf.debugging.assert_positive(tf.reduce_sum(tf.cast(mask, tf.int32), 1)))
        with tf.control_dependencies(needed):
            return original(layer, tf.identity(sequences), initial_state, mask, training=training)

    return inner_loop


@pytest.mark.parametrize("layer", rotating(LAYERS, []))
def test_a_recurrent_layer_of_cudnn_gets_a_row_on_every_gpu(
    layer: str, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(keras, tf.distribute.get_strategy(), layer)
    monkeypatch.setattr(backend, "has_gpus", lambda: True)
    for cls in (keras.layers.LSTM, keras.layers.GRU):
        monkeypatch.setattr(cls, "inner_loop", asserting_rows(cls.inner_loop))
    model = trained(kde, mirrored, layer)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_allclose(model.predict(X[:1], verbose=0), expected.predict(X[:1], verbose=0), rtol=1e-5, atol=1e-6)
