"""Updates by TensorFlow's fused ops are those of Keras to rounding, and made where they are known to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from keras import optimizers
from tensorflow.python.framework import kernels
from update_runs import FUSED, NUM_STEPS, OPTIONS, Run, equal_to_rounding, make

import keras_dist_ext as kde
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext.step import fused_updates as module
from keras_dist_ext.step.fused_updates import KERAS_UPDATES, fused_updates, is_close_to_one_minus, update_for
from keras_dist_ext.step.pass_through import LocalUpdate


@pytest.mark.parametrize(
    ("name", "option"),
    rotating(
        [(name, option) for name in FUSED for option in OPTIONS],
        quick=[("Adam", "plain"), ("RMSprop with momentum", "plain")],
        slow=[("SGD", "plain"), ("Nesterov", "plain"), ("RMSprop", "plain")],
    ),
)
def test_a_hundred_updates_by_fused_ops_are_those_of_keras(name: str, option: str) -> None:
    ours, theirs = Run(make(name, option)), Run(make(name, option))
    ours.steps(0, NUM_STEPS, is_fused=True)
    theirs.steps(0, NUM_STEPS, is_fused=False)
    assert FUSED[name][1] in ours.kinds
    assert not [kind for kind in theirs.kinds if kind.startswith("ResourceApply")]
    equal_to_rounding(ours.state(), theirs.state())
    assert "update_step" not in vars(ours.optimizer)


@keras.saving.register_keras_serializable("test_fused_updates")
def product(y_true: Any, y_pred: Any) -> Any:
    """A loss whose gradients do not depend on the weights, so that differences do not grow."""
    return keras.ops.mean(y_true * y_pred, axis=-1)


def trained(lib: Any, make_optimizer: Callable[[], Any]) -> tuple[Any, np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x = random.uniform(0.5, 1.5, size=(8 * NUM_STEPS, 6)).astype("float32")
    y = np.repeat(random.normal(size=(NUM_STEPS, 3)), 8, axis=0).astype("float32")
    keras.utils.set_random_seed(2)
    model = lib.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(make_optimizer(), product)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model, x, y


def state(model: Any) -> list[Any]:
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


@pytest.mark.parametrize(
    ("name", "option"),
    rotating(
        [(name, option) for name in FUSED for option in OPTIONS],
        quick=[],
        slow=[("AdamW", "average"), ("Adam", "accumulation"), ("Nesterov", "loss scale")],
    ),
)
def test_two_replicas_train_by_them_as_one_device_and_leave_checkpoints_that_are_keras_own(
    name: str, option: str, mirrored: Any, tmp_path: Any
) -> None:
    theirs, x, y = trained(keras, lambda: make(name, option))
    with mirrored.scope():
        ours, *_ = trained(kde, lambda: make(name, option))
    equal_to_rounding(state(ours), state(theirs))
    path = tmp_path / "model.keras"
    ours.save(path)
    loaded = keras.saving.load_model(path)
    for one, other in zip(state(loaded), state(ours), strict=True):
        np.testing.assert_array_equal(one, other)
    for model in (loaded, kde.load_model(path, mirrored), ours):
        model.fit(x, y, batch_size=8, steps_per_epoch=20, shuffle=False, verbose=0)
        equal_to_rounding(state(model), state(loaded))


def ops_of_updates(optimizer: Any, variable: Any, gradient: Any, **function: Any) -> list[str]:
    """Return the fused ops that an update of a variable is made of, in the graph of a tf.function."""
    optimizer.build([variable])

    @tf.function(autograph=False, **function)
    def step() -> None:
        with intercept(LocalUpdate()), fused_updates(optimizer):
            optimizer.apply([gradient], [variable])

    graph = step.get_concrete_function().graph
    return [op.type for op in graph.get_operations() if op.type.startswith("ResourceApply")]


class Own(optimizers.Adam):
    """A subclass, which may do what it likes."""


def test_what_is_not_known_to_be_equal_is_as_keras_wrote_it() -> None:
    def fused(optimizer: Any, dtype: str = "float32", gradient: Any = None, **function: Any) -> list[str]:
        given = tf.ones([4]) if gradient is None else gradient
        return ops_of_updates(optimizer, keras.Variable(np.ones(4), dtype=dtype), given, **function)

    assert fused(optimizers.Adam()) == ["ResourceApplyGradientDescent", "ResourceApplyAdam"]
    assert fused(optimizers.Adam(), gradient=tf.ones([4], "float64")) == []
    assert fused(optimizers.Adam(), dtype="float16") == []
    assert fused(optimizers.Adam(), gradient=tf.IndexedSlices(tf.ones([1]), tf.constant([2]), tf.constant([4]))) == []
    assert fused(optimizers.Adam(), jit_compile=True) == []
    assert fused(optimizers.SGD(), dtype="float64") == []
    for optimizer in (
        Own(),
        optimizers.Adam(amsgrad=True),
        optimizers.Adam(beta_1=0.999),
        optimizers.RMSprop(rho=0.9999),
        optimizers.RMSprop(centered=True),
        optimizers.Adagrad(),
        optimizers.Lion(),
        optimizers.Nadam(),
    ):
        assert update_for(optimizer) is None
        assert fused(optimizer) == []
    patched = optimizers.SGD()
    patched.update_step = lambda gradient, variable, learning_rate: None
    assert update_for(patched) is None
    with patch.dict(KERAS_UPDATES, clear=True):
        assert update_for(optimizers.Adam()) is None


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 0.9])
def test_a_rate_is_fused_where_float32_keeps_what_it_leaves(rate: float) -> None:
    assert is_close_to_one_minus(rate)


@pytest.mark.parametrize("rate", [0.99, 0.999, 0.9999])
def test_a_rate_near_1_is_not(rate: float) -> None:
    assert not is_close_to_one_minus(rate)


def test_an_optimizer_may_be_built_by_the_update() -> None:
    weight = keras.Variable(np.ones(4), dtype="float32")
    optimizer = optimizers.Adam()
    with intercept(LocalUpdate()), fused_updates(optimizer):
        optimizer.apply([tf.ones([4])], [weight])
    np.testing.assert_allclose(weight.numpy(), 0.999, rtol=1e-6)


def test_one_device_updates_as_keras_does_to_the_bit() -> None:
    theirs, *_ = trained(keras, optimizers.Adam)
    ours, *_ = trained(kde, optimizers.Adam)
    for one, other in zip(state(ours), state(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("op", sorted({op for _, op in FUSED.values()}))
def test_the_fused_ops_have_kernels_for_gpus(op: str) -> None:
    """Known without one: TensorFlow registers all that it was built with; Keras' own updates run where these do."""
    registered = kernels.get_registered_kernels_for_op(op).kernel
    devices = {
        kernel.device_type
        for kernel in registered
        if any(tf.float32.as_datatype_enum in one.allowed_values.list.type for one in kernel.constraint)
    }
    assert {"CPU", "GPU"} <= devices or not tf.test.is_built_with_cuda()


def test_updates_are_fused_on_gpus_too_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def ops_on(kind: str) -> list[str]:
        monkeypatch.setattr(module, "_device_type", lambda device: kind)
        return ops_of_updates(optimizers.Adam(), keras.Variable(np.ones(4), dtype="float32"), tf.ones([4]))

    assert ops_on("GPU") == ops_on("CPU") == ["ResourceApplyGradientDescent", "ResourceApplyAdam"]
    assert ops_on("TPU") == []
