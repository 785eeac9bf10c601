"""Slices that belong to one row are added up alike on all replicas."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from numpy.testing import assert_allclose

import keras_dist_ext as kde
from keras_dist_ext._keras import backend
from keras_dist_ext.step import slices

RANDOM = np.random.default_rng(0)
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.5),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "Adam, clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.01),
    "Adagrad, accumulated": lambda: keras.optimizers.Adagrad(0.05, gradient_accumulation_steps=2),
    "of 16 bits": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
}


def trained(library: Any, strategy: tf.distribute.Strategy, optimizer: str, words: Any, **given: Any) -> Any:
    """A model whose embedding gets many slices for each row."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        embedding = keras.layers.Embedding(int(words.max()) + 1, 64)
        model = library.Sequential(
            [
                keras.Input(words.shape[1:], dtype="int32"),
                embedding,
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(OPTIMIZERS[optimizer](), "mse", **given)
    targets = np.random.default_rng(1).normal(size=(len(words), 2)).astype("float32")
    model.fit(words, targets, batch_size=len(words) // 2, epochs=2, verbose=0, shuffle=False)
    return model


def copies_differ(model: Any) -> list[str]:
    variables = [*model.variables, *model.optimizer.variables]
    copies = {v.path: [copy.numpy().tobytes() for copy in v.value.values] for v in variables}
    return [name for name, values in copies.items() if len(set(values)) > 1]


@pytest.mark.parametrize("optimizer", rotating(["SGD", "Adagrad", "Adam"], ["SGD"]))
def test_copies_of_a_large_embedding_stay_equal_to_the_bit(optimizer: str, mirrored: Any) -> None:
    words = RANDOM.integers(0, 100, (128, 400)).astype("int32")
    assert copies_differ(trained(kde, mirrored, optimizer, words)) == []


@pytest.mark.parametrize("gpus", [pytest.param(True, marks=pytest.mark.slow), False], ids=["as on GPUs", "on CPUs"])
@pytest.mark.parametrize("optimizer", rotating(OPTIMIZERS, ["Adam, clipped"]))
def test_duplicates_are_added_up_where_one_device_adds_them_up(
    optimizer: str, gpus: bool, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(backend, "has_gpus", lambda: asked.append(gpus) or gpus)
    words = RANDOM.integers(0, 5, (12, 9)).astype("int32")
    model = trained(kde, mirrored, optimizer, words)
    expected = trained(keras, tf.distribute.get_strategy(), optimizer, words)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        assert_allclose(ours, theirs, rtol=2e-6, atol=1e-7)
    assert asked
    assert copies_differ(model) == []


@pytest.mark.parametrize("gpus", [True, False], ids=["as on GPUs", "on CPUs"])
def test_one_slice_a_row_holds_the_sum_of_all(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_gpus", lambda: gpus)
    for num, shape, dtype, of in (
        (50, (3,), "float32", "int32"),
        (0, (2, 2), "float16", "int64"),
        (9, (), "float64", "int64"),
    ):
        values = RANDOM.normal(size=(num, *shape)).astype(dtype)
        indices = RANDOM.integers(0, 7, num).astype(of)
        given = tf.IndexedSlices(values, indices, tf.constant([8, *shape]))
        expected = np.zeros((8, *shape), dtype)
        np.add.at(expected, indices, values)
        found = slices.sum_duplicates(given)
        assert sorted(found.indices.numpy()) == sorted(set(indices))
        assert_allclose(tf.convert_to_tensor(found), expected, rtol=1e-6, atol=1e-6)
        dense = slices.to_dense(given)
        assert (dense is NotImplemented) is not gpus
        if gpus:
            assert_allclose(dense, expected, rtol=1e-6, atol=1e-6)


def test_a_sum_has_the_static_shape_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_gpus", lambda: True)

    @tf.function(input_signature=[tf.TensorSpec((None, 3)), tf.TensorSpec((None,), tf.int32)])
    def shapes(values: Any, indices: Any) -> tf.Tensor:
        known, unknown = (slices.to_dense(tf.IndexedSlices(values, indices, of)) for of in ([8, 3], tf.shape(values)))
        assert known.shape == (8, 3)
        assert unknown.shape.as_list() == [None, 3]
        return known

    assert shapes(tf.ones((2, 3)), [1, 1]).numpy()[1].tolist() == [2, 2, 2]


def test_what_xla_compiles_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus in (True, False):
        monkeypatch.setattr(backend, "has_gpus", lambda gpus=gpus: gpus)

        @tf.function(jit_compile=True, autograph=False)
        def dense(values: Any, indices: Any) -> tf.Tensor:
            given = tf.IndexedSlices(values, indices, tf.constant([4, 2]))
            assert slices.to_dense(given) is NotImplemented
            return tf.convert_to_tensor(slices.sum_duplicates(given))

        assert dense(tf.ones((3, 2)), tf.constant([1, 3, 1])).numpy()[:, 0].tolist() == [0, 2, 0, 1]
