"""GPUs of one process sum gradients a pack at a time, from the last to the first, while others are computed.

No GPU is needed: two CPU devices send each other what GPUs would, by TensorFlow's ring.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from keras import layers
from strategies import Strategies
from tensorflow.python.distribute import cross_device_utils

import keras_dist_ext as kde
from keras_dist_ext._keras.strategies import make_mirrored
from keras_dist_ext.step import reduce
from keras_dist_ext.strategy.packs import note_bytes_per_pack
from keras_dist_ext.training import xla_rule
from keras_dist_ext.training.xla_rule import uses_xla

random = np.random.default_rng(0)
X, Y = random.normal(size=(23, 12)).astype("float32"), random.integers(3, size=23)
Packs = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def packed() -> tf.distribute.Strategy:
    """Two replicas, whose sums are of 200 bytes and more."""
    Strategies().get("one_device")
    strategy = make_mirrored(["CPU:0", "CPU:1"])
    note_bytes_per_pack(strategy, 200)
    return strategy


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[Packs]:
    """Have replicas send each other what GPUs would; the shapes in the packs of each sum of several values."""
    seen, group = [], cross_device_utils.group_by_size

    def noted(values: Any, bytes_per_pack: int) -> Any:
        grouped = group(values, bytes_per_pack)
        if not tf.executing_eagerly() and len(values) > 1:
            seen.append([[tuple(value.shape) for value in pack] for pack in grouped])
        return grouped

    monkeypatch.setattr(reduce, "shares_memory", lambda _: False)
    monkeypatch.setattr(cross_device_utils, "group_by_size", noted)
    return seen


def trained(library: Any, strategy: tf.distribute.Strategy, *callbacks: Any, layer: Any = None, **given: Any) -> Any:
    keras.utils.set_random_seed(3)
    hidden = [layers.Dense(16, "tanh"), *([layer()] if layer else [])]
    with strategy.scope():
        model = library.Sequential([keras.Input((12,)), *hidden, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01, **given), loss, jit_compile=False)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


GRADIENTS = [[(3,), (16, 3)], [(16,), (12, 16)]]
CASES: dict[str, tuple[dict[str, Any], list[Any], Packs]] = {
    "gradients alone": ({}, [], []),
    "with what a guard has found": ({}, [kde.NonFinite], [[(3, 2)]]),
    "accumulated": ({"gradient_accumulation_steps": 3}, [], []),
    "clipped by their norm": ({"global_clipnorm": 0.5}, [], []),
}


@pytest.mark.parametrize("case", rotating(CASES, ["with what a guard has found"]))
def test_gradients_are_summed_from_the_last_and_what_rides_along_comes_in_the_last_pack(
    case: str, packed: tf.distribute.Strategy, packs: list[Packs], strategies: Strategies
) -> None:
    given, callbacks, rest = CASES[case]
    expected = trained(keras, strategies.get("default"), **given)
    found = trained(kde, packed, *(callback() for callback in callbacks), **given)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    of_steps = [one for one in packs if any((12, 16) in pack for pack in one)]
    assert of_steps
    assert all(one == GRADIENTS + rest for one in of_steps)


class Forgets(layers.Layer):
    """Its kernel's gradient does not know its shape, as it may come out of a loop or a function of the user's."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 16))

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def product(x: Any, kernel: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                of_kernel = tf.matmul(x, upstream, transpose_a=True)
                unknown = tf.raw_ops.PlaceholderWithDefault(input=of_kernel, shape=[None, None])
                return tf.matmul(upstream, kernel, transpose_b=True), unknown

            return tf.matmul(x, kernel), gradient

        return product(inputs, tf.convert_to_tensor(self.kernel))


@pytest.mark.rotating
def test_gradients_that_do_not_know_their_shape_are_packed_too(
    packed: tf.distribute.Strategy, packs: list[Packs], strategies: Strategies
) -> None:
    expected = trained(keras, strategies.get("default"), layer=Forgets)
    for ours, theirs in zip(trained(kde, packed, layer=Forgets), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    of_steps = [one for one in packs if any((12, 16) in pack for pack in one)]
    assert of_steps
    assert all(one == [[(3,), (16, 3)], [(16, 16)], [(16,), (12, 16)]] for one in of_steps)


@pytest.mark.rotating
def test_without_it_there_is_one_sum(packs: list[Packs], strategies: Strategies) -> None:
    trained(kde, strategies.get("mirrored2"))
    of_steps = [one for one in packs if any((12, 16) in pack for pack in one)]
    assert of_steps
    assert all(len(one) == 1 for one in of_steps)


def test_each_pack_waits_for_its_own_gradients_and_the_pack_before_it(
    packed: tf.distribute.Strategy, packs: list[Packs]
) -> None:
    """So a sum begins while other gradients are computed, and all replicas sum in one order."""
    with packed.scope():
        model = kde.Sequential([keras.Input((12,)), layers.Dense(16, "tanh"), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False, steps_per_execution=1)
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    (graph,) = [
        graph
        for graph in model.train_function.program.graphs()
        if any(op.type == "CollectiveReduceV2" for op in graph.get_operations())
    ]
    sums = [op for op in graph.get_operations() if op.type == "CollectiveReduceV2"]
    by_replica = [[op for op in sums if op.device.endswith(f"CPU:{number}")] for number in range(2)]
    for of_replica in by_replica:
        of_last, of_first = [op for op in of_replica if op.inputs[0].shape.num_elements() in (51, 208)]
        assert [op.inputs[0].shape.num_elements() for op in (of_last, of_first)] == [51, 208]
        assert not _needs_product_for_first_layer(of_last)
        assert _needs_product_for_first_layer(of_first)
        assert of_last in of_first.control_inputs


def _needs_product_for_first_layer(op: tf.Operation) -> bool:
    """Whether an op waits for the gradient of the first layer's kernel, of shape (12, 16)."""
    seen, rest = set(), [op]
    while rest:
        one = rest.pop()
        if one.name in seen:
            continue
        seen.add(one.name)
        if one.type == "MatMul" and one.outputs[0].shape.as_list() == [12, 16]:
            return True
        rest.extend(value.op for value in one.inputs)
        rest.extend(control for control in one.control_inputs if control.type != "CollectiveReduceV2")
    return False


def test_sums_in_packs_leave_xla_out_which_gives_all_gradients_at_once(
    packed: tf.distribute.Strategy, strategies: Strategies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_rule, "accelerators", lambda strategy: list(strategy.extended.worker_devices))
    chosen = []
    for strategy in (packed, strategies.get("mirrored2")):
        with strategy.scope():
            model = kde.Sequential([keras.Input((12,)), layers.Dense(3)])
            model.compile("sgd", "mse")
        spec = tf.TensorSpec([None, 12]), tf.TensorSpec([None, 3])
        model.replica_runtime.build("train", spec, spec)
        chosen.append(uses_xla(model, "train"))
    assert chosen == [False, True]
