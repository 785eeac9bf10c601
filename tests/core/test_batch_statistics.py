"""With batch_statistics="global", every BatchNormalization takes the statistics of the global batch, as one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from strategies import strategies

import keras_dist_ext as kde
from keras_dist_ext.errors import LoopError, StrategyError

layers = keras.layers
X = np.random.default_rng(0).normal(size=(22, 6, 4)).astype("float32")
Normalization = functools.partial(layers.BatchNormalization, momentum=0.8)


def dense(lib: Any, **options: Any) -> Any:
    inputs = keras.Input((6, 4))
    x = layers.Dense(5)(layers.Flatten()(Normalization(**options)(inputs)))
    return lib.Model(inputs, layers.Dense(1)(keras.ops.tanh(Normalization(**options)(x))))


def far(lib: Any) -> Any:
    inputs = keras.Input((6, 4))
    x = Normalization()(layers.Rescaling(1.0, offset=300.0)(inputs))
    return lib.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))


def masked(lib: Any) -> Any:
    inputs = keras.Input((6, 4))
    x = Normalization()(layers.Masking()(inputs))
    return lib.Model(inputs, layers.Dense(1)(layers.LSTM(3)(x)))


def convolutions(lib: Any) -> Any:
    inputs = keras.Input((6, 4))
    x = layers.Reshape((6, 4, 1))(inputs)
    for filters in (3, 1):  # of one channel, too
        x = keras.ops.relu(Normalization()(layers.Conv2D(filters, 2)(x)))
    return lib.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))


def nested(lib: Any) -> Any:
    block = keras.Sequential([keras.Input((6, 4)), Normalization(), layers.Dense(3), Normalization(axis=1)])
    inputs = keras.Input((6, 4))
    return lib.Model(inputs, layers.Dense(1)(layers.Flatten()(block(block(inputs)[..., :1] * tf.ones([4])))))


def mobile(lib: Any) -> Any:
    """Of `keras.applications`, with 27 layers of BatchNormalization."""
    stock = keras.applications.MobileNet((32, 32, 3), alpha=0.25, weights=None, include_top=False, pooling="avg")
    inputs = keras.Input((6, 4))
    x = layers.Reshape((8, 3, 1))(inputs)
    return lib.Model(inputs, layers.Dense(1)(stock(layers.Resizing(32, 32)(layers.Concatenate()([x, x, x])))))


def data(rows: int) -> tuple[Any, Any]:
    x = X[:rows].copy()
    x[::2, 3:] = 0.0  # for masks
    return x, x.sum((1, 2))[:, None]


def trained(
    kind: str | None, make: Callable[[Any], Any], rows: int = 22, *, rate: float = 0.01, **arguments: Any
) -> dict[str, Any]:
    """Weights and moving statistics after two epochs; the last batch has 4 of 9 rows. None is stock Keras."""
    keras.utils.set_random_seed(1)
    lib: Any = keras if kind is None else kde
    with contextlib.nullcontext() if kind is None else strategies.get(kind).scope():
        model = make(lib)
        model.compile(keras.optimizers.SGD(rate), "mse", **arguments)
    model.fit(*data(rows), batch_size=9, epochs=2, verbose=0, shuffle=False)
    return {f"{i} {v.path}": keras.ops.convert_to_numpy(v) for i, v in enumerate(model.weights)}


@functools.cache
def of_one_device(make: Callable[[Any], Any], rows: int) -> dict[str, Any]:
    return trained(None, make, rows)


def check(ours: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-5) -> None:
    for (path, one), other in zip(ours.items(), expected.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * max(np.abs(other).max(), 1e-2), err_msg=path)


# By name: strategy, model, number of rows, arguments of `compile`.
RUNS: dict[str, tuple[str, Callable[[Any], Any], int, dict[str, Any]]] = {
    "two": ("mirrored2", dense, 22, {}),
    "empty": ("mirrored3", dense, 19, {}),  # a last batch of one row, so that two replicas have none
    "several steps": ("mirrored4", dense, 22, {"steps_per_execution": 2}),
    "eager": ("mirrored2", dense, 22, {"run_eagerly": True}),
    "virtual": ("mirrored2", dense, 22, {"virtual_replicas": 4}),
    "virtual on one": ("one_device", dense, 22, {"virtual_replicas": 3}),
    "synchronized": ("mirrored2", functools.partial(dense, synchronized=True), 22, {}),
    "far": ("mirrored3", far, 22, {}),
    "masked": ("mirrored3", masked, 19, {}),
    "convolutions": ("mirrored2", convolutions, 22, {}),
    "nested": ("mirrored3", nested, 22, {}),
}


@pytest.mark.parametrize("run", rotating(RUNS, ["two"]))
def test_replicas_normalize_by_the_statistics_of_one_device(run: str) -> None:
    kind, make, rows, arguments = RUNS[run]
    ours = trained(kind, make, rows, batch_statistics="global", **arguments)
    check(ours, of_one_device(make, rows), rtol=1e-4 if make is far else 1e-5)  # the mean itself is rounded at 300


@pytest.mark.rotating
def test_statistics_of_each_replica_are_not_those_of_one_device() -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(trained("mirrored2", dense), of_one_device(dense, 22), rtol=1e-2)


@pytest.mark.rotating
def test_a_model_of_keras_that_is_taken_over_is_normalized_so_once_it_is_compiled_so(tmp_path: Any) -> None:
    def fit(model: Any) -> None:
        model.fit(*data(22), batch_size=9, verbose=0, shuffle=False)

    keras.utils.set_random_seed(1)
    stock = dense(keras)
    ours = kde.adopt(stock, strategies.get("mirrored2"))
    stock.compile(keras.optimizers.SGD(0.01), "mse")
    ours.compile(keras.optimizers.SGD(0.01), "mse", batch_statistics="global")
    ours.save(tmp_path / "model.keras")
    saved = kde.load_model(tmp_path / "model.keras", strategies.get("mirrored2"))
    adopted = kde.adopt(ours, strategies.get("mirrored3"))
    for model in (stock, ours, saved, adopted):
        fit(model)
        for one, other in zip(model.get_weights(), stock.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.rotating
def test_an_application_of_keras_trains_as_on_one_device() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")  # a new one makes more of rounding than float32 has digits
    try:
        ours = trained("mirrored2", mobile, 9, rate=1e-4, batch_statistics="global")
        check(ours, trained(None, mobile, 9, rate=1e-4))
    finally:
        keras.config.set_dtype_policy(before)


class Nested(layers.Layer):
    """Normalizes inside of what a function makes of it."""

    def __init__(self, nest: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.normal = Normalization()
        self.nest = nest

    def call(self, x: Any, training: bool = False) -> Any:
        return self.nest(lambda x: self.normal(x, training=training), x)


def in_function(lib: Any) -> Any:
    nested = Nested(lambda normal, x: tf.function(normal)(x))
    return lib.Sequential([keras.Input((6, 4)), nested, layers.Flatten(), layers.Dense(1)])


@pytest.mark.rotating
def test_in_a_function_of_tensorflow_they_are_those_of_one_device() -> None:
    check(trained("mirrored2", in_function, batch_statistics="global"), of_one_device(in_function, 22))


# By what runs a function on x.
IN_BRANCHES: dict[str, Callable[[Any, Any], Any]] = {
    "cond": lambda normal, x: tf.cond(tf.size(x) > -1, lambda: normal(x), lambda: x),
    "a function's cond": lambda normal, x: tf.function(
        lambda x: tf.cond(tf.size(x) > -1, lambda: normal(x), lambda: x)
    )(x),
    "while": lambda normal, x: tf.while_loop(lambda i, x: i < 1, lambda i, x: (i + 1, normal(x)), (0, x))[1],
}


@pytest.mark.checks_fit
@pytest.mark.parametrize("nested", rotating(IN_BRANCHES, []))
def test_in_a_branch_of_the_graph_is_an_error_that_says_what_to_do(nested: str) -> None:
    def make(lib: Any) -> Any:
        return lib.Sequential([keras.Input((6, 4)), Nested(IN_BRANCHES[nested]), layers.Flatten(), layers.Dense(1)])

    with pytest.raises(LoopError, match=r"\(BatchNormalization.* inside of a .*branch or loop"):
        trained("mirrored2", make, batch_statistics="global")


class OwnMoments(layers.BatchNormalization):
    """Takes the largest value for the variance."""

    def _moments(self, inputs: Any, mask: Any) -> Any:
        return keras.ops.mean(inputs, (0, 1)), keras.ops.max(inputs, (0, 1))


def test_moments_of_ones_own_are_refused_before_the_first_step() -> None:
    with strategies.get("mirrored2").scope():
        model = kde.Sequential([keras.Input((6, 4)), OwnMoments(name="mine"), layers.Flatten(), layers.Dense(1)])
        model.compile("sgd", "mse", batch_statistics="global")
    with pytest.raises(StrategyError, match="the layer 'mine' \\(OwnMoments\\) is a BatchNormalization that computes"):
        model.fit(*data(4), verbose=0)


def test_statistics_are_of_replicas_or_global() -> None:
    with pytest.raises(StrategyError, match="batch_statistics must be 'replica' or 'global', got 'all'"):
        kde.Sequential([layers.Dense(1)]).compile("sgd", "mse", batch_statistics="all")
