"""What a tape returns inside a step is the gradient of the global batch, whatever the step does with it."""

from __future__ import annotations

import functools
from typing import Any

import gradient_steps as steps
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from gradient_steps import DATA, STEPS, batches, network, sgd, trained
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.errors import LoopError, StrategyError
from keras_dist_ext.step import reducers

OF_WORKERS = (
    "clipped_by_norm", "straight", "accumulated_by_hand", "tape_in_a_branch", "a_function_with_a_loop",
    "sharpness_aware", "learnt_to_learn", "jacobian", "by_no_tape",
)  # fmt: skip


@functools.cache
def on_one_device(name: str, rows: str = "uneven") -> dict[str, Any]:
    return trained(keras, None, STEPS[name], DATA[rows]())


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, rtol: float = 2e-5) -> None:
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=rtol, err_msg=name)
    for weight, one in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, one, rtol=rtol, atol=1e-6)
    for first, *others in found["copies"]:
        assert all(np.array_equal(first, other) for other in others)


QUICK = ["accumulated_by_hand", "tape_in_a_branch", "learnt_to_learn"]


@pytest.mark.parametrize(
    "name",
    rotating(
        STEPS,
        QUICK,
        slow=["jacobian", "losses_in_ragged_rows", "a_loss_of_gathered_rows", "branches_that_give_an_op_or_one_number"],
    ),
)
def test_a_step_does_with_its_gradients_what_it_does_on_one_device(name: str, mirrored: Any) -> None:
    assert_same(trained(kde, mirrored, STEPS[name]), on_one_device(name))


@pytest.mark.parametrize("name", rotating(STEPS, [], slow=["penalty_on_jacobians_of_inputs", "sharpness_aware"]))
def test_so_it_does_on_four_replicas_of_which_some_are_empty(name: str, strategies: Any) -> None:
    assert_same(trained(kde, strategies.get("mirrored4"), STEPS[name]), on_one_device(name))


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "rows"), [("mirrored2", "even"), ("mirrored4", "even"), ("mirrored2", "one in the last")]
)
@pytest.mark.parametrize("name", STEPS)
def test_so_it_does_where_the_rows_are_known_and_even_or_one_is_left(
    name: str, kind: str, rows: str, strategies: Any
) -> None:
    assert_same(trained(kde, strategies.get(kind), STEPS[name], DATA[rows]()), on_one_device(name, rows))


@pytest.mark.parametrize("name", rotating(STEPS, [], slow=["jacobians_of_rows"]))
def test_so_it_does_eagerly(name: str, mirrored: Any) -> None:
    assert_same(trained(kde, mirrored, STEPS[name], run_eagerly=True), on_one_device(name))


@pytest.mark.parametrize(
    "name",
    rotating(
        [
            *("assigned_by_hand", "sharpness_aware", "clipped_by_norm", "learnt_to_learn", "straight"),
            "noted_after_the_update",
        ],
        [],
        slow=["noted_after_the_update"],
    ),
)
def test_so_it_does_on_virtual_replicas(name: str, mirrored: Any) -> None:
    found = trained(kde, mirrored, STEPS[name], virtual_replicas=4)
    assert_same(found, on_one_device(name))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(
            name,
            rows,
            marks=[
                on_two_workers(steps.on_workers, name, rows),
                pytest.mark.slow if (name, rows) == ("clipped_by_norm", "uneven") else pytest.mark.rotating,
            ],
        )
        for name in STEPS
        for rows in DATA
        if rows == "one in the last" or name in OF_WORKERS
    ],
)
def test_so_it_does_on_two_workers(values: Any, name: str, rows: str) -> None:
    for of_worker in values:
        assert_same(of_worker, on_one_device(name, rows))


@pytest.mark.parametrize(
    "name", rotating(["clipped_by_norm", "straight", "two_optimizers"], [], slow=["clipped_by_norm"])
)
def test_an_optimizer_that_accumulates_may_be_given_either(name: str, mirrored: Any) -> None:
    accumulates = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)  # noqa: E731
    expected = trained(keras, None, STEPS[name], make_optimizer=accumulates)
    assert_same(trained(kde, mirrored, STEPS[name], make_optimizer=accumulates), expected)


@pytest.mark.rotating
def test_a_loss_scale_is_that_of_one_device(mirrored: Any) -> None:
    scales = lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)  # noqa: E731
    expected = trained(keras, None, STEPS["of_a_scaled_loss"], make_optimizer=scales)
    assert_same(trained(kde, mirrored, STEPS["of_a_scaled_loss"], make_optimizer=scales), expected)


@pytest.mark.slow
def test_so_it_is_where_an_optimizer_accumulates_under_it_and_one_replica_overflows(mirrored: Any) -> None:
    def scales() -> Any:
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)

    x = np.concatenate([steps.X[:24], steps.X[:8]])
    x[15] = 1e38  # of the second batch: half of its rows
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] > 0)).batch(8)
    found = []
    for lib, strategy in ((keras, tf.distribute.get_strategy()), (kde, mirrored)):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            net = lib.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            net.compile(scales(), "mse")
        net.fit(data, epochs=3, verbose=0)
        found.append([*net.get_weights(), *(keras.ops.convert_to_numpy(v) for v in net.optimizer.variables)])
    assert found[0][-1] < 8.0 or 1.0 in [float(np.max(one)) for one in found[0]]  # it has overflowed
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)


ELSEWHERE: dict[str, Any] = {  # where gradients go in the trace that runs, and did not when the step was planned
    "changed first": lambda gradients: (tf.clip_by_global_norm(gradients, 0.05)[0], 0.0),
    "returned, too": lambda gradients: (gradients, gradients[-1]),
    "beside others": lambda gradients: ([*gradients[:3], tf.clip_by_norm(gradients[3], 0.01)], 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", ELSEWHERE)
def test_gradients_that_go_elsewhere_where_rows_are_known_are_those_of_one_device(where: str, mirrored: Any) -> None:
    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        loss, gradients = steps.gradients_of(model, x, y)
        given, returned = (gradients, 0.0) if x.shape[0] is None else ELSEWHERE[where](gradients)
        steps.update(model, given)
        return {"l": loss, "g": tf.reduce_sum(returned)}

    expected = trained(keras, None, step, DATA["even"]())
    assert_same(trained(kde, mirrored, step, DATA["even"]()), expected)


def test_an_optimizer_of_the_users_own_gets_gradients_of_the_global_batch(mirrored: Any) -> None:
    class Clips(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply([None if g is None else tf.clip_by_norm(g, 0.05) for g in grads], trainable_variables)

    weights = []
    for lib, strategy in ((keras, tf.distribute.get_strategy()), (kde, mirrored)):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            net = lib.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            net.compile(Clips(0.5), "mse")
        net.fit(batches(), epochs=2, verbose=0)
        weights.append(np.concatenate([np.ravel(w) for w in net.get_weights()]))
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-5)


@pytest.mark.slow
def test_a_prediction_may_give_gradients_and_jacobians_of_its_rows(strategies: Any) -> None:
    class Explains(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(2, "tanh")

        def call(self, x: Any) -> Any:
            return self.head(x)

        def predict_step(self, data: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(data)
                found = self(data)
                total = tf.reduce_sum(found, 0)
            of_weights = tape.jacobian(total, self.head.bias)  # of the rows at hand
            return (
                tape.gradient(found, data),
                tape.batch_jacobian(found, data),
                0.0 * found + tf.cast(tf.shape(of_weights)[0], tf.float32),
            )

    found = []
    for kind in ("default", "mirrored2"):
        keras.utils.set_random_seed(3)
        with strategies.get(kind).scope():
            net = Explains()
        found.append(net.predict(steps.X, batch_size=9, verbose=0))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.mark.slow
def test_gradients_that_go_straight_into_an_optimizer_are_summed_once(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[int] = []
    original = reducers.sum_over_replicas
    monkeypatch.setattr(
        reducers, "sum_over_replicas", lambda strategy, values: sums.append(len(values)) or original(strategy, values)
    )
    trained(kde, mirrored, STEPS["straight"])
    assert set(sums) == {4}  # all of them at once
    num_traces = len(sums)
    sums.clear()
    trained(kde, mirrored, STEPS["clipped_by_norm"])
    assert sums == [4] * num_traces
    sums.clear()
    trained(kde, mirrored, STEPS["two_optimizers"])
    assert sums == [2] * (2 * num_traces)


def by_hand(model: Any, x: Any, y: Any) -> dict[str, Any]:
    error = tf.reduce_mean(model(x) - y)
    model.head.bias.assign_sub([0.1 * error])
    return {"l": error}


def without_a_tape(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss = steps.loss_of(model, x, y)
    model.optimizer.apply([tf.reduce_mean(model(x) - y, axis=0)], [model.head.bias])
    return {"l": loss}


OWN = {
    "by_hand": (by_hand, r"train_step' assigns to \w+/bias \(1,\) what each replica computes from its own rows"),
    "an_optimizer": (
        without_a_tape,
        r"gives sgd\w* gradients of bias \(1,\) that each replica has computed.*reduce_grad",
    ),
}


@pytest.mark.parametrize("how", OWN)
def test_what_no_tape_has_made_is_refused(how: str, mirrored: Any) -> None:
    step, message = OWN[how]
    with mirrored.scope():
        net = network(kde, step, sgd)
    before = net.get_weights()
    with pytest.raises(LoopError, match=message):
        net.fit(batches(), verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(before, net.get_weights(), strict=True))


def test_a_branch_that_another_tape_should_see_through_is_refused(mirrored: Any) -> None:
    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as outer:
            loss = tf.cond(
                model.count < 1, lambda: tf.linalg.global_norm(steps.gradients_of(model, x, y)[1]), lambda: 0.0
            )
        steps.update(model, outer.gradient(loss, model.trainable_variables))
        return {"l": loss}

    with mirrored.scope():
        net = network(kde, step, sgd)
    with pytest.raises(LoopError, match=r"inside of another GradientTape.*such as for _ in range\(5\)"):
        net.fit(batches(), verbose=0)


def test_variables_without_keras_are_not_assigned_by_virtual_replicas(mirrored: Any) -> None:
    with mirrored.scope():
        net = network(kde, STEPS["accumulated_by_hand"], sgd)
        net.compile(net.optimizer, virtual_replicas=4)
    with pytest.raises(StrategyError, match=r"assigns to .*, which are tf.Variables.*add_weight"):
        net.fit(batches(), verbose=0)
