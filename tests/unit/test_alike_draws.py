"""Draws whose rows are all alike: of ops that are not drawn row by row, what stands for their numbers."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_array_equal

from keras_dist_ext._keras.random import intercept_random_ops
from keras_dist_ext.step.alike_draws import RowsAlike

X = np.arange(12.0, dtype="float32").reshape(6, 2)
LOGITS = np.float32([[0, 2, 1], [3, 0, 0], [0, 0, 1]])


@pytest.fixture
def alike() -> Any:
    """Have random ops draw alike during the test."""
    rows = RowsAlike()
    with intercept_random_ops(rows):
        yield rows
    assert rows.has_drawn


def test_a_category_is_the_likeliest_of_its_row(alike: RowsAlike) -> None:
    likeliest = np.repeat([[1], [0], [2]], 4, axis=1)
    for found in (keras.random.categorical(LOGITS, 4, seed=1), tf.random.categorical(LOGITS, 4, tf.int32)):
        assert_array_equal(found, likeliest)
        assert found.dtype == tf.int32
    assert tf.random.categorical(LOGITS, 4).dtype == tf.int64
    assert not alike.unknown


def test_what_is_shuffled_keeps_its_order(alike: RowsAlike) -> None:
    assert_array_equal(tf.random.shuffle(X), X)
    assert_array_equal(keras.random.shuffle(X, seed=1), X)


def test_gamma_and_poisson_numbers_are_their_mean(alike: RowsAlike) -> None:
    means = np.float32([1, 2])
    each = np.tile(means, (3, 1))
    assert_array_equal(tf.random.gamma([3], means), each)
    assert_array_equal(tf.random.poisson([3], means), each)
    assert_array_equal(tf.random.stateless_gamma([3, 2], [1, 2], means), each)
    assert_array_equal(tf.random.stateless_poisson([3, 2], [1, 2], means, tf.float16), np.float16(each))
    assert_array_equal(keras.random.gamma([3, 2], 4.0, seed=1), np.full((3, 2), np.float32(4)))
    assert not alike.unknown


def test_ops_that_draw_otherwise_are_left_as_they_are_and_named(alike: RowsAlike) -> None:
    found = keras.random.binomial([5], 30.0, 0.5, seed=1)
    assert alike.unknown == {"stateless_random_binomial"}
    assert np.unique(found).size > 1
