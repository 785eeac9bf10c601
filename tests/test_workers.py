"""Two real workers agree: each example once an epoch, the same steps, and one writer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from worker_runs import DATA_CASES, NUM_EXAMPLES, ids, run_all

from keras_dist_ext.launch import launch

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("workers")
    values = launch(2, run_all, args=(str(folder),), time_limit=540).values
    assert len(values) == 2
    return values


@pytest.mark.parametrize("name", DATA_CASES)
def test_each_example_is_used_once_an_epoch_over_all_workers(name: str, values: Any) -> None:
    for worker in values:
        assert worker[name] == [[1.0] * NUM_EXAMPLES] * 2


def test_a_wish_to_stop_on_one_worker_ends_all_after_the_same_step(values: Any) -> None:
    assert values[0]["stops from worker 1"] == values[1]["stops from worker 1"] == (3, 1)


def test_a_wish_to_stop_after_an_epoch_ends_all_after_it(values: Any) -> None:
    assert values[0]["stops after an epoch"] == values[1]["stops after an epoch"] == [0, 1]


def test_files_are_written_by_the_chief_alone(values: Any) -> None:
    files = values[0]["writes from the chief"]
    assert {"model-1.keras", "model-2.keras"} <= set(files)
    assert len([f for f in files if "tfevents" in f]) == 1


def test_an_interrupted_run_goes_on_from_the_chiefs_backup_on_all_workers(values: Any) -> None:
    for epochs, resumed, whole in (worker["restores from the chief"] for worker in values):
        assert epochs == [2, 3]
        for a, b in zip(resumed, whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_predictions_come_in_order_and_batches_are_split(values: Any) -> None:
    for predicted, on_batch, train_loss, test_loss in (worker["predicts in order"] for worker in values):
        np.testing.assert_array_equal(predicted, np.arange(NUM_EXAMPLES))
        np.testing.assert_array_equal(on_batch, np.arange(7))
        assert train_loss == pytest.approx(1.0, rel=1e-6)
        assert test_loss == pytest.approx(0.0, abs=1e-6)


def test_accumulated_gradients_are_whole_after_an_epoch(values: Any) -> None:
    stock = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    stock.compile(keras.optimizers.SGD(1e-4, gradient_accumulation_steps=3), "mse")
    stock.fit(ids(), ids(), batch_size=8, epochs=1, shuffle=False, verbose=0)
    expected = [keras.ops.convert_to_numpy(a) for a in stock.optimizer._accumulated_gradients]
    for worker in values:
        for accumulated, one_device in zip(worker["accumulates"], expected, strict=True):
            np.testing.assert_allclose(accumulated, one_device, rtol=1e-6)
