"""Replicas whose variables come to differ are found, by the first variable and step; equal ones never are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating

import keras_dist_ext as kde
from keras_dist_ext._keras.variables import components
from keras_dist_ext.training.divergence import Divergence, _hash

X = np.random.default_rng(0).normal(size=(36, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8", "bool"]


def hash_of(value: Any, dtype: str) -> int:
    return int(_hash(tf.cast(value, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hash_tells_values_places_and_lengths_apart(dtype: str) -> None:
    value = np.zeros((3, 4))
    value[1, 2] = 1
    assert hash_of(value, dtype) == hash_of(value.copy(), dtype)
    other = np.roll(value, 1, axis=1)
    assert len({hash_of(v, dtype) for v in (value, other, value[:2], 0 * value, 1 + 0 * value)}) == 5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_hash_tells_the_least_difference_in_any_bit(dtype: str) -> None:
    integers = np.int32 if dtype == "float32" else np.int64
    value = np.random.default_rng(0).normal(size=50).astype(dtype)
    hashes = {hash_of(value, dtype)}
    for bit in range(8 * value.itemsize):
        changed = value.copy()
        changed.view(integers)[bit % 50] ^= integers(1) << bit if bit < 8 * value.itemsize - 1 else integers(-1) << bit
        hashes.add(hash_of(changed, dtype))
    assert len(hashes) == 1 + 8 * value.itemsize


def test_differences_that_cancel_out_in_a_plain_sum_are_found() -> None:
    value = np.zeros(9)
    for place in range(7):
        changed = value.copy()
        changed[place : place + 3] = [1.0, -2.0, 1.0]
        assert hash_of(changed, "float32") != hash_of(value, "float32")


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": keras.optimizers.Adam,
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4),
    "mixed": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
}


def build(strategy: Any, optimizer: str = "adam") -> Any:
    with strategy.scope():
        model = kde.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3, name="first"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1, name="second"),
            ]
        )
        model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
    return model


def fit(model: Any, **given: Any) -> None:
    model.fit(X, Y, batch_size=8, verbose=0, **given)


@pytest.fixture(scope="module")
def trained(strategies: Any) -> Any:
    """A model on three replicas; tests leave it as it was."""
    model = build(strategies.get("mirrored3"))
    fit(model)
    return model


@contextlib.contextmanager
def changed(variable: Any, replica: int, value: float) -> Iterator[None]:
    """Change the first element of a replica's copy for a while."""
    copy = components(variable)[replica]
    before = np.array(copy.numpy())
    after = before.copy()
    after.flat[0] += value
    copy.assign(after)
    yield
    copy.assign(before)


def test_replicas_that_train_as_they_should_stay_equal(trained: Any) -> None:
    divergence = Divergence(trained)
    assert divergence.check(1) is None
    trained.evaluate(X[:5], Y[:5], verbose=0)  # each replica has its part of the metrics
    assert divergence.check(1) is None


@pytest.mark.parametrize("optimizer", rotating(["accumulating", "mixed"], []))
def test_gradients_that_accumulate_and_scaled_losses_make_no_difference(optimizer: str, mirrored: Any) -> None:
    model = build(mirrored, optimizer)
    fit(model)
    assert Divergence(model).check(1) is None


def test_the_first_variable_that_differs_is_named_with_the_replica_and_how_far(trained: Any) -> None:
    divergence = Divergence(trained)
    assert divergence.check(5) is None
    layer = trained.layers[-1]
    with changed(layer.kernel, 2, 0.25), changed(layer.bias, 1, 0.5):
        finding = divergence.check(9)
    assert finding is not None
    assert finding["kind"] == "divergence"
    assert finding["step"] == 9
    num_variables = len(trained.variables) + len(trained.optimizer.variables)
    assert finding["what"] == (
        f"{layer.kernel.path} differs between replica 0 and replica 2 at step 9. "
        f"So does 1 other of {num_variables} variables."
    )
    assert "; all were equal at step 5; up to 0.25 apart" in finding["evidence"]
    assert divergence.check(10) is None


@pytest.mark.parametrize("place", ["moment", "statistic", "rate"])
def test_variables_of_the_optimizer_and_statistics_count_too(place: str, trained: Any) -> None:
    variable = {
        "moment": trained.optimizer.variables[-1],
        "statistic": trained.layers[1].moving_variance,
        "rate": trained.optimizer.learning_rate,
    }[place]
    with changed(variable, 1, 1e-6):
        finding = Divergence(trained).check(1)
    assert finding is not None
    assert variable.path in finding["what"]
    assert "at the first check" in finding["evidence"]


@pytest.mark.rotating
def test_variables_that_are_made_later_are_compared_too(trained: Any) -> None:
    divergence = Divergence(trained)
    assert divergence.check(1) is None
    with trained.distribute_strategy.scope():
        trained.add(keras.layers.Dense(1, name="third"))
        trained.build((None, 4))
    with changed(trained.layers[-1].bias, 1, 0.5):
        finding = divergence.check(2)
    trained.pop()
    assert finding is not None
    assert "third/bias" in finding["what"]


@pytest.mark.slow
def test_steps_after_the_last_check_are_checked_when_training_ends(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []

    def check(_: Divergence, step: int) -> None:
        checked.append(step)

    monkeypatch.setattr(Divergence, "check", check)
    num_steps = -(-len(X) // 8)
    monitor = kde.ReplicaMonitor(writers=[kde.MemoryWriter()], check_divergence_every=num_steps - 1)
    model = build(mirrored)
    model.compile("sgd", "mse", steps_per_execution=1)
    fit(model, callbacks=[monitor])
    assert checked == [num_steps - 1, num_steps]


def test_one_replica_has_nothing_to_differ_from(strategies: Any) -> None:
    model = build(strategies.get("default"))
    assert Divergence(model).check(1) is None
