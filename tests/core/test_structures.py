"""Well-known structures, written for one device, train the same on several: only the base class changes."""

import functools

import keras
import numpy as np
import pytest
import structure_runs
import tensorflow as tf
from cases import rotating
from structure_runs import STRUCTURES
from two_workers import on_two_workers

import keras_dist_ext as kde


@functools.cache
def on_one_device(name, size=8):
    return structure_runs.train(name, keras.Model, tf.distribute.get_strategy(), size)


def assert_close(found, expected):
    logs, weights = found
    assert logs.keys() == expected[0].keys()
    for key, values in logs.items():
        np.testing.assert_allclose(values, expected[0][key], rtol=2e-5, atol=1e-6, err_msg=key)
    for one, other in zip(weights, expected[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)


# Batches of 8 and a rest of 5; of 7 and a rest of 1, by which replicas are empty; of 3, on 4 replicas.
OTHERS = [
    (name, kind, size) for name in STRUCTURES for kind, size in (("mirrored2", 7), ("mirrored4", 8), ("mirrored4", 3))
]
QUICK = ["SAM"]


@pytest.mark.parametrize("name", rotating(STRUCTURES, QUICK, slow=["SimCLR"]))
def test_a_structure_trains_as_on_one_device(mirrored, name):
    assert_close(structure_runs.train(name, kde.Model, mirrored), on_one_device(name))


@pytest.mark.parametrize(("name", "kind", "size"), rotating(OTHERS, []))
def test_a_structure_trains_as_on_one_device_whatever_the_batch(strategies, name, kind, size):
    assert_close(structure_runs.train(name, kde.Model, strategies.get(kind), size), on_one_device(name, size))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(
            name, size, marks=[on_two_workers(structure_runs.train_on_workers, name, size), pytest.mark.rotating]
        )
        for name in STRUCTURES
        for size in (8, 7)
    ],
)
def test_a_structure_trains_as_on_one_device_on_two_workers(values, name, size):
    for found in values:
        assert_close(found, on_one_device(name, size))
