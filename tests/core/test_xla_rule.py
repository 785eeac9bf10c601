"""Whether `jit_compile="auto"` has XLA compile what replicas compute. The logical CPUs are taken for GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from strategies import Strategies
from tensorflow.python.framework import config

import keras_dist_ext as kde
from keras_dist_ext.training import distributed_step, xla_rule
from keras_dist_ext.training.xla_rule import uses_xla

X = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")
Y = X @ np.array([[1.0], [2.0], [-1.0]], "float32")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, strategies: Strategies) -> tf.distribute.Strategy:
    """Two replicas on what is taken for GPUs."""
    monkeypatch.setattr(xla_rule, "accelerators", lambda strategy: list(strategy.extended.worker_devices))
    return strategies.get("mirrored2")


def net(
    strategy: Any, layer: Callable[[], Any] = lambda: layers.Dense(1), cls: Any = kde.Sequential, **given: Any
) -> Any:
    with strategy.scope():
        model = cls([keras.Input((3,)), layer()], name="net")
        model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **given})
    return model


def built(model: Any, spec: Any = None) -> Any:
    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])) if spec is None else spec
    model.replica_runtime.build("train", spec, spec)
    return model


def test_keras_own_code_is_compiled_on_gpus(gpus: tf.distribute.Strategy) -> None:
    model = built(net(gpus))
    assert [uses_xla(model, kind) for kind in ("train", "test", "predict")] == [True] * 3


def test_on_one_gpu_under_a_strategy_it_is_what_keras_makes_of_it_without_one(
    gpus: tf.distribute.Strategy, strategies: Strategies
) -> None:
    assert uses_xla(built(net(strategies.get("one_device"))), "train")


def test_nothing_is_compiled_where_a_replica_is_a_cpu(strategies: Strategies) -> None:
    assert not uses_xla(built(net(strategies.get("mirrored2"))), "train")


class OwnStep(kde.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


OTHERS: dict[str, dict[str, Any]] = {
    "asked not to": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "a train_step of the user's": {"cls": OwnStep},
    "a loss of the user's": {"loss": lambda y, p: tf.reduce_mean((y - p) ** 2, axis=-1)},
    "a layer of the user's": {"layer": lambda: layers.Lambda(lambda x: x * 2)},
    "statistics of the global batch": {"batch_statistics": "global"},
    "exact": {"exact": True},
    "virtual replicas": {"virtual_replicas": 2},
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_xla_may_not_compile_or_draws_otherwise_is_left_out(case: str, gpus: tf.distribute.Strategy) -> None:
    assert not uses_xla(built(net(gpus, **OTHERS[case])), "train")


def test_a_step_of_the_users_own_leaves_evaluation_to_xla(gpus: tf.distribute.Strategy) -> None:
    model = built(net(gpus, cls=OwnStep))
    assert [uses_xla(model, kind) for kind in ("train", "test")] == [False, True]


def test_a_layer_that_keras_does_not_compile_is_left_out(gpus: tf.distribute.Strategy) -> None:
    layer = layers.Dense(1)
    layer.supports_jit = False
    assert not uses_xla(built(net(gpus, lambda: layer)), "train")


def test_deterministic_ops_are_left_out_as_in_keras(
    gpus: tf.distribute.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(net(gpus))
    monkeypatch.setattr(config, "is_op_determinism_enabled", lambda: True)  # it cannot be disabled again
    assert not uses_xla(model, "train")


SHAPES = {
    "of one length": (tf.TensorSpec([None, 3]), True),
    "of changing length": (tf.TensorSpec([None, None]), False),
    "of unknown rank": (tf.TensorSpec(None), False),
    "strings": (tf.TensorSpec([None, 3], tf.string), False),
    "ragged": (tf.RaggedTensorSpec([None, None]), False),
    "sparse": (tf.SparseTensorSpec([None, 3]), False),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_batches_have_one_shape_but_for_their_rows(kind: str, gpus: tf.distribute.Strategy) -> None:
    spec, is_compiled = SHAPES[kind]
    model = built(net(gpus))
    model.replica_runtime.batch_spec = ({"x": tf.TensorSpec([32, 3]), "other": spec}, None)
    assert uses_xla(model, "train") is is_compiled


def test_draws_of_the_global_batch_are_left_out(gpus: tf.distribute.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []

    def note(model: Any, kind: str) -> bool:
        kinds.append((kind, uses_xla(model, kind)))
        return False

    monkeypatch.setattr(distributed_step, "uses_xla", note)
    net(gpus).fit(X, Y, verbose=0, callbacks=[kde.ReplicaSeeds(1, draws="global")])
    assert kinds
    assert set(kinds) == {("train", False)}


def test_what_sums_over_replicas_while_it_is_computed_trains_without_xla_and_without_a_word(
    gpus: tf.distribute.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = np.linspace(0, 2, 9)
    mean = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = net(gpus, loss=mean)
        start = model.get_weights()
        model.fit(X, Y, sample_weight=weights, batch_size=4, shuffle=False, verbose=0)
    assert [str(w.message) for w in caught if "XLA" in str(w.message)] == []
    expected = net(tf.distribute.get_strategy(), cls=keras.Sequential, loss=mean, jit_compile=False)
    expected.set_weights(start)
    expected.fit(X, Y, sample_weight=weights, batch_size=4, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
