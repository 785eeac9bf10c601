"""Data that fails in the middle of an epoch: training ends with its error, after the last whole step."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating

import keras_dist_ext as kde
from keras_dist_ext._keras.variables import components
from keras_dist_ext.strategy.pick import pick_strategy
from keras_dist_ext.training import batch_devices

ROWS, WHOLE = 9, 4  # of a batch; batches before the one that fails
X = np.random.default_rng(0).normal(size=(10 * ROWS, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(10 * ROWS, 2)).astype("float32")


def batch(number: int) -> tuple[Any, Any]:
    if number == WHOLE:
        raise ArithmeticError("a file that is damaged")
    return X[number * ROWS : (number + 1) * ROWS], Y[number * ROWS : (number + 1) * ROWS]


def generator(strategy: Any) -> Iterator[Any]:
    yield from map(batch, range(10))


def pipeline(strategy: Any) -> tf.data.Dataset:
    def read(number: tf.Tensor) -> Any:
        x, y = tf.numpy_function(batch, [number], [tf.float32, tf.float32])
        return tf.ensure_shape(x, [None, 6]), tf.ensure_shape(y, [None, 2])

    return tf.data.Dataset.range(10).map(read)


def of_unknown_length(strategy: Any) -> tf.data.Dataset:
    return pipeline(strategy).filter(lambda x, y: True)


def distributed(strategy: Any) -> Any:
    return pipeline(strategy) if strategy is None else strategy.experimental_distribute_dataset(pipeline(strategy))


class Files(keras.utils.PyDataset):
    def __init__(self, strategy: Any) -> None:
        super().__init__()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        return batch(number)


def left(library: Any, strategy: Any, data: Callable[[Any], Any], times: int = 1, **compiled: Any) -> Iterator[Any]:
    """Yield what all variables are after the error, on each replica, of several runs from the same weights."""
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        layers = [keras.Input((6,)), keras.layers.Dense(256, activation="tanh"), keras.layers.Dense(2)]
        model = library.Sequential(layers)
        model.compile("sgd", "mse", **compiled)
    variables = [model.optimizer.iterations, *model.weights]
    begin = [components(variable)[0].numpy() for variable in variables]
    for _ in range(times):
        for variable, value in zip(variables, begin, strict=True):
            for copy in components(variable):
                copy.assign(value)
        with pytest.raises(Exception, match="a file that is damaged"):
            model.fit(data(strategy), shuffle=False, verbose=0)
        yield [[copy.numpy() for copy in components(variable)] for variable in variables]


@pytest.mark.parametrize(
    ("data", "steps_per_execution"),
    rotating(
        [
            (of_unknown_length, "auto"),
            (of_unknown_length, 1),
            (pipeline, "auto"),
            (pipeline, 1),
            (generator, "auto"),
            (distributed, "auto"),
            (Files, "auto"),
        ],
        [],
        slow=[(of_unknown_length, "auto")],
    ),
)
def test_training_has_made_all_steps_before_what_fails_and_nothing_of_the_next(mirrored, data, steps_per_execution):
    ((_, *expected),) = left(keras, None, data)
    for iterations, *found in left(kde, mirrored, data, 5, steps_per_execution=steps_per_execution):
        assert iterations == [WHOLE, WHOLE]
        for (one,), copies in zip(expected, found, strict=True):
            np.testing.assert_array_equal(copies[0], copies[1])
            np.testing.assert_allclose(copies[0], one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "steps_per_execution"),
    rotating(
        [(data, steps) for data in (of_unknown_length, pipeline, Files) for steps in ("auto", 3)], [(pipeline, 3)]
    ),
)
def test_where_each_gpu_is_sent_its_rows_ahead_a_step_is_whole_on_all_and_one_may_be_lost(
    data: Callable[[Any], Any], steps_per_execution: Any, strategies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU:1 and CPU:2 are taken for GPUs. A batch is read two steps before it is used."""
    strategies.get("one_device")
    monkeypatch.setattr(batch_devices, "_is_gpu", lambda device: device.endswith(("CPU:1", "CPU:2")))
    monkeypatch.setattr(batch_devices, "LEAST_BYTES", 0)
    two_gpus = pick_strategy("mirrored", devices=["CPU:1", "CPU:2"], environ={}).strategy
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "WHOLE", WHOLE - 1)
        ((_, *expected),) = left(keras, None, data)
    for iterations, *found in left(kde, two_gpus, data, 5, steps_per_execution=steps_per_execution):
        assert iterations == [WHOLE - 1] * 2
        for (one,), copies in zip(expected, found, strict=True):
            np.testing.assert_array_equal(copies[0], copies[1])
            np.testing.assert_allclose(copies[0], one, rtol=1e-5, atol=1e-6)
