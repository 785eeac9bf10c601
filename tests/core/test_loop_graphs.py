"""Branches, loops and functions of TensorFlow in a step: allowed where replicas stay alike, else told beforehand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating

import keras_dist_ext as kde
from keras_dist_ext._keras.variables import components

LoopError, TrainLoop = kde.LoopError, kde.TrainLoop
DEFAULT = tf.distribute.get_strategy()
X = np.random.default_rng(0).normal(size=(29, 3)).astype("float32")
Y = (X.sum(axis=1) + 0.5).astype("float32")


def batches(*arrays: np.ndarray, size: int = 9) -> tf.data.Dataset:
    """Batches of 9, 9, 9 and 2 rows: two replicas get 4 and 5."""
    return tf.data.Dataset.from_tensor_slices(arrays or (X, Y)).batch(size)


def line_net(strategy: tf.distribute.Strategy, **layers: Any) -> Any:
    with strategy.scope():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, **layers)], name="net")


def run(strategy: tf.distribute.Strategy, step: Any, parts: Any, epochs: int = 2, **reduce: Any) -> Any:
    loop = TrainLoop(step, parts=parts, reduce=reduce or {"loss": "mean"}, strategy=strategy)
    return loop.fit(batches(), epochs=epochs, verbose=0, shuffle=False).history


def in_a_branch(do: Callable[[], Any]) -> None:
    tf.cond(tf.constant(True), lambda: (do(), tf.constant(True))[1], lambda: tf.constant(False))


def in_a_loop(do: Callable[[], Any]) -> None:
    tf.while_loop(lambda i: i < 1, lambda i: (do(), (i + 1,))[1], (tf.constant(0),))


def in_a_function(do: Callable[[], Any]) -> None:
    tf.function(do)()


PLACES = {"a branch": in_a_branch, "a loop": in_a_loop, "a function": in_a_function}


# What one replica alone has computed


@pytest.mark.parametrize("place", PLACES)
def test_what_one_replica_has_computed_is_not_assigned_there_either(place: str, mirrored: Any) -> None:
    with mirrored.scope():
        weight = tf.Variable(1.0, name="weight")

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        loss = replica.mean_loss(weight * batch[1])
        gradient = tf.reduce_mean(batch[1])
        PLACES[place](lambda: weight.assign_sub(0.1 * gradient))
        return {"loss": loss}

    with pytest.raises(LoopError, match=r"assigns to weight \(\) what each replica computes from its own rows"):
        run(mirrored, step, {"weight": weight})


OWN: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a branch of its own": lambda count, replica, y: tf.cond(
        tf.reduce_sum(y) > 0, lambda: count.assign_add(1.0), lambda: count.read_value()
    ),
    "as often as it has rows": lambda count, replica, y: tf.while_loop(
        lambda i: i < tf.shape(y)[0], lambda i: (count.assign_add(1.0), (i + 1,))[1], (tf.constant(0),)
    ),
    "numbers that a function draws": lambda count, replica, y: count.assign_add(
        tf.function(lambda: tf.random.normal([]))()
    ),
}


@pytest.mark.parametrize("how", OWN)
def test_what_decides_whether_to_assign_is_to_be_alike_too(how: str, mirrored: Any) -> None:
    with mirrored.scope():
        count = tf.Variable(0.0, name="count")

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        OWN[how](count, replica, batch[1])
        return {"loss": replica.mean_loss(batch[1])}

    with pytest.raises(LoopError, match=r"assigns to count \(\) what each replica computes"):
        run(mirrored, step, {"count": count})


def test_one_replica_does_not_assign_alone(mirrored: Any) -> None:
    with mirrored.scope():
        count = tf.Variable(0.0, name="count")

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        if replica.index == 0:
            count.assign_add(1.0)
        return {"loss": replica.mean_loss(batch[1])}

    with pytest.raises(LoopError, match=r"assigns to count \(\) on some replicas only"):
        run(mirrored, step, {"count": count})


# What is right


@pytest.mark.slow
def test_functions_of_tensorflow_may_compute_and_assign_what_all_share(mirrored: Any) -> None:
    results = []
    for strategy in (DEFAULT, mirrored):
        net = line_net(strategy)
        with strategy.scope():
            state = [tf.Variable(0.0, name=name) for name in ("steps", "slow", "even")]
            error, mean = keras.metrics.MeanAbsoluteError(name="error"), keras.metrics.Mean(name="mean")

        @tf.function
        def forward(x: Any, y: Any, net: Any = net, error: Any = error, mean: Any = mean) -> Any:
            with tf.GradientTape() as tape:
                outputs = net(x)[:, 0]
                loss = tf.reduce_mean((outputs - y) ** 2)
            error.update_state(y, outputs)
            mean.update_state(loss)
            return loss, tape.gradient(loss, net.trainable_variables)

        def step(
            replica: Any, batch: Any, net: Any = net, forward: Any = forward, state: Any = state
        ) -> dict[str, tf.Tensor]:
            steps, slow, even = state
            loss, own = forward(*batch)
            gradients = replica.reduce_gradients(own)

            def update() -> tf.Tensor:
                for variable, gradient in zip(net.trainable_variables, gradients, strict=True):
                    variable.assign_sub(0.1 * gradient)
                return tf.constant(True)

            tf.function(update)()
            steps.assign_add(1.0)
            size = tf.while_loop(  # what goes along in the loop is no matter
                lambda i, norm, own: i < 3,
                lambda i, norm, own: (i + 1, norm + tf.linalg.global_norm(gradients), own + tf.reduce_sum(batch[1])),
                (0, 0.0, 0.0),
            )[1]
            slow.assign(0.9 * slow + 0.1 * size)
            tf.cond(steps % 2 == 0, lambda: even.assign_add(size), lambda: even.read_value())
            return {"loss": loss}

        parts = {"net": net, "state": state, "error": error, "mean": mean}
        results.append({**run(strategy, step, parts), "state": [float(v.numpy()) for v in state]})
    assert set(results[1]) == {"loss", "error", "mean", "state"}
    assert results[1] == {name: pytest.approx(values, rel=1e-5) for name, values in results[0].items()}
    assert results[0]["mean"] != [0.0, 0.0] != results[0]["state"][1:]


@pytest.mark.parametrize("clips", rotating([False, True], []))
def test_optimizers_update_at_different_rates(clips: bool, mirrored: Any) -> None:
    results = []
    for strategy in (DEFAULT, mirrored):
        often, seldom = line_net(strategy), line_net(strategy, kernel_initializer="ones")
        with strategy.scope():
            fast, slow = keras.optimizers.Adam(0.1, epsilon=1e-3), keras.optimizers.Adam(0.1, epsilon=1e-3)

        def step(replica: Any, batch: Any, all_of_it: Any = (often, seldom, fast, slow)) -> dict[str, tf.Tensor]:
            often, seldom, fast, slow = all_of_it
            x, y = batch
            with tf.GradientTape(persistent=True) as tape:
                loss = replica.mean_loss((often(x)[:, 0] - y) ** 2)
                other = replica.mean_loss((seldom(x)[:, 0] + y) ** 2)
            fast.apply(tape.gradient(loss, often.trainable_variables), often.trainable_variables)
            gradients = replica.reduce_gradients(tape.gradient(other, seldom.trainable_variables))
            if clips:
                gradients, _ = tf.clip_by_global_norm(gradients, 0.5)

            def update() -> tf.Tensor:
                slow.apply(gradients, seldom.trainable_variables)
                return tf.constant(True)

            tf.cond(fast.iterations % 3 == 0, update, lambda: tf.constant(False))
            return {"loss": loss, "other": other}

        parts = {"often": often, "seldom": seldom, "fast": fast, "slow": slow}
        history = run(strategy, step, parts, loss="mean", other="mean")
        results.append({**history, "weights": np.concatenate([w.numpy().ravel() for w in seldom.weights])})
        assert (int(fast.iterations.numpy()), int(slow.iterations.numpy())) == (8, 2)
        assert all(len({c.numpy().tobytes() for c in components(w)}) == 1 for w in seldom.weights)
    assert results[1].keys() == results[0].keys()
    for name, values in results[0].items():
        np.testing.assert_allclose(results[1][name], values, rtol=1e-4, err_msg=name)


def test_gradients_of_a_scaled_loss_are_reduced_by_hand_exactly(mirrored: Any) -> None:
    weights = []
    for strategy in (DEFAULT, mirrored):
        net = line_net(strategy)
        with strategy.scope():
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)

        def step(replica: Any, batch: Any, net: Any = net, optimizer: Any = optimizer) -> dict[str, tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = replica.mean_loss((net(batch[0])[:, 0] - batch[1]) ** 3)
                scaled = optimizer.scale_loss(loss)
            gradients = replica.reduce_gradients(tape.gradient(scaled, net.trainable_variables))
            gradients, _ = tf.clip_by_global_norm(gradients, 64.0)
            optimizer.apply(gradients, net.trainable_variables)
            return {"loss": loss}

        run(strategy, step, {"net": net, "optimizer": optimizer})
        weights.append(np.concatenate([w.numpy().ravel() for w in net.weights]))
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-5)


def test_weights_of_a_loss_may_be_trained(mirrored: Any) -> None:
    slopes = []
    for strategy in (DEFAULT, mirrored):
        net = line_net(strategy)

        def step(replica: Any, batch: Any, net: Any = net) -> dict[str, tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = replica.mean_loss(batch[1] ** 2, tf.exp(net(batch[0])[:, 0]))
            gradients = replica.reduce_gradients(tape.gradient(loss, net.trainable_variables))
            for variable, gradient in zip(net.trainable_variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
            return {"loss": loss}

        losses = run(strategy, step, {"net": net})["loss"]
        slopes.append([*losses, *net.weights[0].numpy().ravel()])
        assert losses[1] < losses[0]
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=1e-5)


def test_the_mean_of_many_small_floats_is_one(mirrored: Any) -> None:
    rows = tf.ones([70_000], tf.float16)

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": replica.mean_loss(batch), "weighted": replica.mean_loss(batch, tf.ones_like(batch))}

    for strategy in (DEFAULT, mirrored):
        loop = TrainLoop(step, parts={}, reduce={"loss": "mean", "weighted": "mean"}, strategy=strategy)
        assert loop.fit(tf.data.Dataset.from_tensors(rows), verbose=0).history == {"loss": [1.0], "weighted": [1.0]}


@pytest.mark.slow
def test_a_weight_of_a_row_counts_for_all_its_elements(mirrored: Any) -> None:
    rows = tf.ragged.constant([[1.0], [2.0, 3.0, 10.0], [], [4.0, 5.0], [6.0]])
    data = tf.data.Dataset.from_tensors((rows, tf.constant([1.0, 0.0, 5.0, 2.0, 3.0])))

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": replica.mean_loss(*batch)}

    for strategy in (DEFAULT, mirrored):
        loop = TrainLoop(step, parts={}, reduce={"loss": "mean"}, strategy=strategy)
        assert loop.fit(data, verbose=0).history == {"loss": [pytest.approx((1 + 2 * 4 + 2 * 5 + 3 * 6) / 8)]}


def test_training_and_evaluation_may_return_values_of_other_shapes(mirrored: Any) -> None:
    def train(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": batch[1], "total": replica.rows}

    def test(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": tf.reduce_mean(batch[1]), "total": 0.5 * batch[1], "own": batch[1]}

    reduce = {"loss": "mean", "total": "sum", "own": "max"}
    for strategy in (DEFAULT, mirrored):
        loop = TrainLoop(train, test=test, parts={}, reduce=reduce, strategy=strategy)  # type: ignore[arg-type]
        history = loop.fit(batches(), epochs=2, verbose=0, validation_data=batches()).history
        assert history["loss"] == [pytest.approx(Y.mean(), rel=1e-5)] * 2
        assert history["val_loss"] == [pytest.approx(Y.mean(), rel=1e-5)] * 2
        assert history["total"] == [29, 29]
        assert history["val_total"] == [pytest.approx(0.5 * Y.sum(), rel=1e-5)] * 2
        assert loop.evaluate(batches(), verbose=0) == [
            pytest.approx(v, rel=1e-5) for v in (Y.mean(), 0.5 * Y.sum(), Y.max())
        ]


def test_a_second_run_may_have_other_data(mirrored: Any) -> None:
    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        _, y, *weight = batch
        return {"loss": tf.reduce_mean(y), "weight": weight[0]} if weight else {"loss": y}

    loop = TrainLoop(step, parts={}, reduce={"loss": "mean", "weight": "mean"}, strategy=mirrored)
    for data in (batches(), batches(X, Y, 2 * Y), batches()):
        history = loop.fit(data, verbose=0).history
        expected = {"loss": Y.mean(), "weight": 2 * Y.mean()} if len(data.element_spec) == 3 else {"loss": Y.mean()}
        assert history == {name: [pytest.approx(value, rel=1e-5)] for name, value in expected.items()}


def test_early_stopping_puts_back_variables_without_keras(mirrored: Any) -> None:
    with mirrored.scope():
        weight = tf.Variable(0.0, name="weight")
        net = line_net(mirrored)

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        net.weights[1].assign_add([1.0])
        return {"loss": replica.mean_loss(0.0 * batch[1]) + weight.assign_add(1.0)}

    loop = TrainLoop(step, parts={"weight": weight, "net": net}, reduce={"loss": "mean"}, strategy=mirrored)
    stop = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    loop.fit(batches(), epochs=9, verbose=0, callbacks=[stop])
    assert len(loop.history.epoch) == 2
    assert weight.numpy() == net.weights[1].numpy()[0] == 4.0  # after the first epoch
    assert [copy.numpy() for copy in components(weight)] == [4.0, 4.0]
    with pytest.raises(ValueError, match="was given 1 arrays, and 'loop' has 2 weights of Keras and 1 tf.Variables"):
        loop.set_weights([1.0])
    with pytest.raises(LoopError, match="ReduceLROnPlateau sets the learning rate of the first optimizer"):
        loop.fit(batches(), verbose=0, callbacks=[keras.callbacks.ReduceLROnPlateau("loss")])


# No false alarms


class Net(keras.Model):
    """A model of the user's own, whose layers are built without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def test_right_steps_are_no_mistakes(mirrored: Any) -> None:
    with mirrored.scope():
        net = Net()
        net.dense.build((None, 3))
        dropout = keras.layers.Dropout(0.5)
    rate = tf.Variable(2, trainable=False)  # a constant of no strategy
    memo: dict[str, Any] = {}

    def step(replica: Any, batch: Any) -> dict[str, Any]:
        memo.setdefault("factor", np.float32(2.0))  # once is enough
        loss = replica.mean_loss(dropout(net(batch[0]), training=True)[:, 0] * memo["factor"])
        places = mirrored.num_replicas_in_sync + (1 if mirrored.num_replicas_in_sync > 1 else 0)
        return {"loss": loss, "places": places, "rate": rate.read_value()}

    history = run(mirrored, step, {"net": net, "dropout": dropout}, 1, loss="mean", places="max", rate="max")
    assert history["places"] == [3.0]
    assert history["rate"] == [2.0]


def test_a_simulation_needs_of_its_batch_no_more_than_its_rows(mirrored: Any) -> None:
    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": tf.random.normal([replica.rows]), "games": replica.rows}

    loop = TrainLoop(step, parts={}, reduce={"loss": "mean", "games": "sum"}, strategy=mirrored)
    assert loop.fit(tf.data.Dataset.range(29).batch(9), verbose=0).history["games"] == [29]


@pytest.mark.parametrize("kind", ["divided by its weights", "of selected rows", "Keras' of selected rows", "right"])
def test_a_mean_that_is_not_over_the_rows_is_warned_about(kind: str, mirrored: Any) -> None:
    net = line_net(mirrored)

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        x, y = batch
        mask = tf.cast(y > 0, tf.float32)
        with tf.GradientTape() as tape:
            errors = (net(x)[:, 0] - y) ** 2
            if kind == "divided by its weights":
                loss = 2.0 * tf.reduce_sum(errors * mask) / tf.maximum(tf.reduce_sum(mask), 1.0)
            elif kind == "of selected rows":
                loss = 1.0 + replica.mean_loss(tf.boolean_mask(errors, y > 0))
            elif kind == "Keras' of selected rows":
                loss = keras.losses.MeanSquaredError()(
                    tf.boolean_mask(y, y > 0)[:, None], tf.boolean_mask(net(x), y > 0)
                )
            else:
                loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")(y[:, None], net(x), mask)
                loss += tf.reduce_sum(errors) / tf.cast(tf.size(errors), tf.float32) + replica.mean_loss(errors, mask)
        replica.reduce_gradients(tape.gradient(loss, net.trainable_variables))
        return {"loss": loss}

    step.__name__ = kind  # each is told once
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(mirrored, step, {"net": net}, 1)
    told = [m for m in (str(w.message) for w in caught) if "replica.mean_loss(per_example, weights) divides" in m]
    assert len(told) == int(kind != "right"), told


# What cannot be


def test_what_cannot_be_put_together_says_so(mirrored: Any) -> None:
    wide = tf.data.Dataset.from_tensor_slices(X).batch(9).enumerate().map(lambda i, x: x[:, : tf.cast(i, tf.int32) + 1])

    def kept(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"x": batch}

    loop = TrainLoop(kept, parts={}, reduce={"x": "concat"}, strategy=mirrored)
    loop.fit(wide, verbose=0, shuffle=False)
    with pytest.raises(LoopError, match=r"'x' is kept for all rows, and .* the shapes \(1,\), \(2,\), \(3,\)"):
        loop.rows()

    def uneven(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"x": batch[:, : replica.rows - 1]}

    unevenly = TrainLoop(uneven, parts={}, reduce={"x": "concat"}, strategy=mirrored)
    with pytest.raises(LoopError, match="'x' is kept for all rows, and rows of different replicas"):
        unevenly.fit(X[:5], batch_size=5, verbose=0)
    of_any_size = tf.data.Dataset.from_tensor_slices(X).batch(5)  # 2 and 3 rows
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="x.* is kept for all rows, and rows of different replicas"
    ):
        unevenly.fit(of_any_size, verbose=0)
    with pytest.raises(LoopError, match=r"'x' has the shape \(None, None\), and a \"sum\" is over rows"):
        TrainLoop(kept, parts={}, reduce={"x": "sum"}, strategy=mirrored).fit(wide, verbose=0)

    def unknown(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"x": tf.numpy_function(lambda x: x, [batch], tf.float32)}

    with pytest.raises(LoopError, match=r"The shape of 'x' is not known, .* tf.ensure_shape"):
        TrainLoop(unknown, parts={}, reduce={"x": "mean"}, strategy=mirrored).fit(wide, verbose=0)


def test_python_that_needs_values_is_told_what_to_use(mirrored: Any) -> None:
    def asks(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        loss = replica.mean_loss(batch[1])
        return {"loss": loss if loss > 0 else -loss}

    with pytest.raises(LoopError, match=r"asks Python for the value of a tensor, by an if.* Use tf.where, tf.cond"):
        run(mirrored, asks, {})

    def looks(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        loss = replica.mean_loss(batch[1])
        if tf.executing_eagerly() or not asks_first:
            seen.append(float(loss.numpy()))
        return {"loss": loss}

    seen: list[float] = []
    for asks_first in (False, True):
        loop = TrainLoop(looks, parts={}, reduce={"loss": "mean"}, strategy=mirrored, run_eagerly=True, check=False)
        if asks_first:
            loop.fit(batches(), verbose=0)
            assert len(seen) == 8
        else:
            with pytest.raises(LoopError, match=r"cannot be traced .* Ask tf.executing_eagerly\(\) before"):
                loop.fit(batches(), verbose=0)


def test_two_parts_have_two_names() -> None:
    with pytest.raises(LoopError, match="Two parts have the name 'a_b'"):
        TrainLoop(lambda replica, batch: {}, parts={"a": {"b": 1}, "a_b": 2}, reduce={})


def test_a_run_that_is_to_go_on_is_not_ended_as_if_it_were_over(tmp_path: Any) -> None:
    loop = TrainLoop(lambda r, batch: {"loss": r.mean_loss(batch[1])}, parts={}, reduce={"loss": "mean"})
    with pytest.raises(
        kde.CallbackError, match=r"would save the run as one that is over.*Resume\(\.\.\., on_preemption=True\)"
    ):
        loop.fit(batches(), verbose=0, callbacks=[kde.on_preemption(print), kde.Resume(tmp_path)])
