"""What a loop's values are of is read from their graph, and only what may be wrong is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext import messages
from keras_dist_ext.training.loop.declared_values import spec_of_rows
from keras_dist_ext.training.loop.losses import warn_of_own_divisor


def said(value_of: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of a scalar that is computed from the errors and the weights of any number of rows."""
    warned: list[str] = []
    monkeypatch.setattr(messages, "_warned", set())
    monkeypatch.setattr("keras_dist_ext.training.loop.losses.warn_once", warned.append)
    with tf.Graph().as_default():
        errors, weights = (tf.compat.v1.placeholder(tf.float32, [None]) for _ in range(2))
        warn_of_own_divisor("It", value_of(errors, weights), frozenset())
    return warned


def test_a_sum_divided_by_weights_and_a_mean_over_rows_that_a_mask_selects_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def weighted(errors: Any, weights: Any) -> Any:
        return tf.reduce_sum(errors * weights) / tf.reduce_sum(weights)

    def masked(errors: Any, weights: Any) -> Any:
        return tf.reduce_mean(tf.boolean_mask(errors, weights > 0))

    for value in (weighted, lambda errors, weights: 0.5 * weighted(errors, weights) + 1.0):
        (warning,) = said(value, monkeypatch)
        assert "It is a sum over the rows at hand, divided by another one (of weights, or of a mask)" in warning
    (warning,) = said(masked, monkeypatch)
    assert "It is a mean over some of the rows at hand, which a mask has selected" in warning


@pytest.mark.parametrize(
    "value_of",
    [
        lambda errors, weights: tf.reduce_mean(errors),
        lambda errors, weights: tf.reduce_mean(errors) + 2.0 * tf.constant(3.0),
        lambda errors, weights: tf.reduce_mean(tf.gather(errors, [0, 1])),
        lambda errors, weights: tf.reduce_mean(tf.gather(errors, tf.argsort(weights))),
        lambda errors, weights: errors + weights,
    ],
    ids=["a mean", "and constants", "some rows by number", "rows in another order", "one for each row"],
)
def test_of_other_values_nothing_is_said(value_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(value_of, monkeypatch) == []


def test_numbers_that_have_no_rows_keep_their_form() -> None:
    specs: Any = spec_of_rows((tf.TensorSpec([4, 3]), tf.TensorSpec([], tf.int32), tf.SparseTensorSpec([4, 3])))
    assert specs == (tf.TensorSpec([None, 3]), tf.TensorSpec([], tf.int32), tf.SparseTensorSpec([None, 3]))
    assert np.dtype(specs[1].dtype.as_numpy_dtype) == np.int32
