"""Two real workers agree: each example once an epoch, the same steps, and one writer."""

from __future__ import annotations

import functools
import operator
import re
import types
import zlib
from typing import Any

import keras
import numpy as np
import own_steps
import pytest
import tensorflow as tf
from two_workers import on_two_workers
from worker_runs import (
    BROADCAST_SIZES,
    DATA_CASES,
    NUM_EXAMPLES,
    ids,
    run_cases,
    total_loss,
    trained_by,
    trained_in_16_bits,
    trained_with_draws,
)

import keras_dist_ext as kde
from keras_dist_ext.strategy.workers import Workers, checksum_of
from keras_dist_ext.training import worker_sync
from keras_dist_ext.training.worker_sync import callbacks_of_worker, own_callback


def of(name: str) -> pytest.MarkDecorator:
    """Have a test look at one case, each worker's value of which is its `values[worker][name]`."""
    return on_two_workers(run_cases, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[of(name), *([] if name == "numpy, shuffled" else [pytest.mark.rotating])])
        for name in DATA_CASES
    ],
)
def test_each_example_is_used_once_an_epoch_over_all_workers(name: str, values: Any) -> None:
    for worker in values:
        assert worker[name] == [[1.0] * NUM_EXAMPLES] * 2


@pytest.mark.rotating
@of("counts from five")
def test_a_sum_over_workers_begins_and_is_assigned_as_on_one_device(values: Any) -> None:
    for worker in values:
        assert worker["counts from five"] == [5, 5 + NUM_EXAMPLES, 7, 11, 11 + NUM_EXAMPLES]


@of("stops from worker 1")
def test_a_wish_to_stop_on_one_worker_ends_all_after_the_same_step(values: Any) -> None:
    assert values[0]["stops from worker 1"] == values[1]["stops from worker 1"] == (3, 1)


@pytest.mark.slow
@of("measures and checks")
def test_workers_measure_sums_and_check_steps_alike(values: Any) -> None:
    expected = trained_by(total_loss, keras)
    for weights, said, of_largest in (worker["measures and checks"] for worker in values):
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
        assert said == []
        assert len(of_largest) == 1
        assert "does not train on 2 replicas as on one device" in of_largest[0]


@pytest.mark.slow
@of("sums in 16 bits")
def test_gradients_in_16_bits_train_as_on_one_device_but_for_rounding(values: Any) -> None:
    _, expected = trained_in_16_bits(keras, None)
    found = [worker["sums in 16 bits"] for worker in values]
    for whole, rounded, kinds, saved in found:
        assert kinds == [True] * 3
        for of_32, of_16, of_one, of_save, of_first in zip(whole, rounded, expected, saved, found[0][1], strict=True):
            np.testing.assert_allclose(of_32, of_one, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(of_16, of_first)  # on all workers
            np.testing.assert_array_equal(of_16, of_save)
            assert 1e-6 < np.abs(of_16 - of_one).max() < 2**-8 * np.abs(of_one).max()


@pytest.mark.slow
@of("stops after an epoch")
def test_a_wish_to_stop_after_an_epoch_ends_all_after_it(values: Any) -> None:
    assert values[0]["stops after an epoch"] == values[1]["stops after an epoch"] == [0, 1]


@of("writes from the chief")
def test_files_are_written_by_the_chief_alone(values: Any) -> None:
    files = values[0]["writes from the chief"]
    assert {"model-1.keras", "model-2.keras", "by hand.keras"} <= set(files)
    assert len([f for f in files if "tfevents" in f]) == 1


@pytest.mark.slow
@of("restores from the chief")
def test_an_interrupted_run_goes_on_from_the_chiefs_backup_on_all_workers(values: Any) -> None:
    for epochs, resumed, whole in (worker["restores from the chief"] for worker in values):
        assert epochs == [2, 3]
        for a, b in zip(resumed, whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@of("broadcasts bytes")
def test_bytes_of_the_chief_come_to_all_workers(values: Any) -> None:
    of_chief = {size: zlib.crc32(np.random.default_rng([size, 0]).bytes(size)) for size in BROADCAST_SIZES}
    for worker in values:
        assert worker["broadcasts bytes"] == of_chief


@pytest.mark.slow
@pytest.mark.slow
@of("sums in packs")
def test_gradients_are_summed_a_pack_at_a_time_from_the_last_and_what_rides_along_comes_in_the_last(
    values: Any,
) -> None:
    _, expected = trained_in_16_bits(keras, None)
    gradients = [[(3,), (16, 3)], [(16,), (12, 16)]]
    for trained in (worker["sums in packs"] for worker in values):
        for (weights, packs), rest in zip(trained, ([], [[(3, 2)]]), strict=True):  # (3, 2): what a guard has found
            assert packs == [gradients + rest]
            for ours, theirs in zip(weights, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@of("predicts in order")
def test_predictions_come_in_order_and_batches_are_split(values: Any) -> None:
    for predicted, on_batch, train_loss, test_loss in (worker["predicts in order"] for worker in values):
        np.testing.assert_array_equal(predicted, np.arange(NUM_EXAMPLES))
        np.testing.assert_array_equal(on_batch, np.arange(7))
        assert train_loss == pytest.approx(1.0, rel=1e-6)
        assert test_loss == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@of("accumulates")
def test_accumulated_gradients_are_whole_after_an_epoch(values: Any) -> None:
    stock = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    stock.compile(keras.optimizers.SGD(1e-4, gradient_accumulation_steps=3), "mse")
    stock.fit(ids(), ids(), batch_size=8, epochs=1, shuffle=False, verbose=0)
    expected = [keras.ops.convert_to_numpy(a) for a in stock.optimizer._accumulated_gradients]
    for worker in values:
        for accumulated, one_device in zip(worker["accumulates"], expected, strict=True):
            np.testing.assert_allclose(accumulated, one_device, rtol=1e-6)


@pytest.mark.slow
@of("draws globally")
def test_workers_draw_together_what_one_device_draws(values: Any) -> None:
    expected = trained_with_draws(tf.distribute.get_strategy())
    for worker in values:
        for ours, one_device in zip(worker["draws globally"], expected, strict=True):
            np.testing.assert_allclose(ours, one_device, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@of("warns of other data")
def test_data_that_differs_between_workers_is_warned_of(values: Any) -> None:
    chiefs, others = (worker["warns of other data"] for worker in values)
    assert chiefs == {"arrays": 1, "tf.data": 1, "files": 0, "generator": 1, "a batch": 1, "the same": 0}
    assert set(others.values()) == {0}


@pytest.mark.slow
@of("takes over values")
def test_a_run_begins_with_the_values_of_the_first_worker_everywhere(values: Any) -> None:
    (said, weights), (nothing, others) = (worker["takes over values"] for worker in values)
    assert weights == others
    (text,) = said
    assert re.search("dense.*/kernel differs between replica 0 and replica 1 .* continue with the values of the", text)
    assert nothing == []


@pytest.mark.slow
@of("rates part")
def test_learning_rates_that_part_are_an_error_on_all_workers(values: Any) -> None:
    for worker in values:
        assert "learning rate of optimizer is 0.2 on worker 1 and 0.1 on worker 0 after epoch 2" in worker["rates part"]


@pytest.mark.slow
@of("every batch")
def test_a_callback_gets_every_batch_on_whatever_worker_it_is(values: Any) -> None:
    assert [worker["every batch"] for worker in values] == [[], list(range(15))]


@pytest.mark.slow
@of("steps at once")
def test_a_checkpoint_an_epoch_does_not_slow_the_steps_down(values: Any) -> None:
    for worker in values:
        assert worker["steps at once"] > 1


# One process is enough for these


@pytest.mark.parametrize("num_workers", [2, 33, 64, 1000])
def test_any_number_of_workers_find_that_they_agree(num_workers: int) -> None:
    def agree(checksums: list[int]) -> bool:
        shares: list[Any] = []

        def sums(workers: Any, values: Any) -> Any:
            shares.append(values)
            if len(shares) < len(checksums):
                return [0.0] * len(values)
            return np.asarray([functools.reduce(operator.add, column) for column in zip(*shares, strict=True)])

        for checksum in checksums:
            workers = object.__new__(Workers)
            workers.num_workers = num_workers
            workers.sum = sums.__get__(workers)  # type: ignore[method-assign]
            found = workers.all_equal(checksum)
        return found

    for checksum in (0, 1, 0xFFFFFF, 0xFFFFFFFF, 0xDEADBEEF, 0x00C0FFEE):
        assert agree([checksum] * num_workers)
        assert not agree([checksum] * (num_workers - 1) + [checksum ^ 1])
        assert not agree([checksum] * (num_workers - 1) + [checksum ^ 1 << 31])


def test_checksums_are_of_values_whatever_holds_them() -> None:
    def batches() -> list[Any]:
        return [
            {"x": tf.constant(["a", "bc"]), "y": None},
            {"x": tf.constant(["a", "bd"]), "y": None},
            tf.ragged.constant([[1, 2], [3]]),
            tf.ragged.constant([[1], [2, 3]]),
            tf.sparse.from_dense([[0, 1]]),
            tf.sparse.from_dense([[1, 0]]),
            None,
        ]

    checksums = [checksum_of(batch) for batch in batches()]
    assert checksums == [checksum_of(batch) for batch in batches()]
    assert len(set(checksums)) == len(checksums)


def test_callbacks_that_write_are_for_the_chief() -> None:
    writers = [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.RemoteMonitor()]
    others = [keras.callbacks.EarlyStopping(), kde.ScopeGuard()]
    chief, other = (types.SimpleNamespace(is_chief=is_chief) for is_chief in (True, False))
    assert [own_callback(c) for c in callbacks_of_worker([*writers, *others], chief)] == [*writers, *others]
    assert callbacks_of_worker([*writers, *others], other) == others


class Orbax(keras.callbacks.Callback):
    """In place of Keras' OrbaxCheckpoint, which asks for Orbax, and which older versions of Keras do not have."""


def test_a_callback_that_can_run_on_no_part_of_the_workers_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(keras.callbacks, "OrbaxCheckpoint", ()) == worker_sync._ORBAX
    monkeypatch.setattr(worker_sync, "_ORBAX", Orbax)
    for is_chief in (True, False):
        with pytest.raises(kde.WorkersError, match="would write into one folder .* Save with ModelCheckpoint, or with"):
            callbacks_of_worker([Orbax()], types.SimpleNamespace(is_chief=is_chief))


@pytest.mark.slow
@of("makes parts in the step")
def test_parts_that_a_step_makes_are_those_of_one_device_on_two_workers(values: Any) -> None:
    for worker in values:
        results, complaint = worker["makes parts in the step"]
        for name, result in results.items():
            own_steps.compare(own_steps.run(name, own_steps.Base()), result)
        assert "layer that was adapted 1 is Normalization" in complaint
