"""One worker evaluates and predicts by itself, with a copy of the model of all."""

import keras
import local_copy_runs as runs
import numpy as np
import pytest
import tensorflow as tf
from two_workers import on_two_workers

import keras_dist_ext as kde


def assert_close(value, expected):
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@on_two_workers(runs.of_chief)
def test_the_chief_alone_gets_the_numbers_of_one_device_and_training_goes_on(values):
    reference = runs.make(keras)
    reference.fit(runs.X, runs.Y, **runs.FIT)
    expected = [
        reference.evaluate(runs.X[:9], runs.Y[:9], verbose=0),
        reference.predict(runs.X[:7], verbose=0),
        reference.evaluate(runs.X[:5], runs.Y[:5], verbose=0),
    ]
    history = reference.fit(runs.X, runs.Y, **runs.FIT).history
    for one, other in zip(values[0][0], expected, strict=True):
        assert_close(one, other)
    assert values[1][0] == []
    for _, found, evaluated in values:
        for name, losses in history.items():
            assert_close(found[name], losses)
        assert_close(evaluated, reference.evaluate(runs.X, runs.Y, batch_size=4, verbose=0))


def test_a_copy_is_apart_from_the_model(mirrored):
    model = runs.make(kde, mirrored)
    model.fit(runs.X, runs.Y, **runs.FIT)
    before, metrics = model.get_weights(), model.get_metrics_result()
    copy = kde.local_copy(model)
    copy.evaluate(runs.X[:5], runs.Y[:5], verbose=0)
    copy.fit(runs.X, runs.Y, **runs.FIT)
    for name, value in metrics.items():
        assert float(value) == float(model.get_metrics_result()[name])
    for value, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_what_cannot_be_copied_is_named(mirrored):
    with pytest.raises(TypeError, match=r"model must be a kde.Model, got Sequential\."):
        kde.local_copy(keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)]))
    model = runs.make(kde, mirrored)
    with mirrored.scope(), pytest.raises(kde.ScopeError, match="was called inside a strategy's scope"):
        kde.local_copy(model)
    assert tf.distribute.get_strategy() is not mirrored
