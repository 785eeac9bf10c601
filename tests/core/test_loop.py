"""Training loops of the user's own: what one device gives, on all replicas, and mistakes told before the first step."""

from __future__ import annotations

import os
import pathlib
import random
import signal
from typing import Any

import keras
import loop_runs
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext._keras.variables import components
from keras_dist_ext.examples import gan, linear_no_keras, sequences
from keras_dist_ext.strategy.scope import raw_variables

LoopError, TrainLoop = kde.LoopError, kde.TrainLoop
DEFAULT = tf.distribute.get_strategy()
X = np.random.default_rng(0).normal(size=(29, 3)).astype("float32")
Y = (X.sum(axis=1) + 0.5).astype("float32")
WEIGHT = np.arange(29, dtype="float32") % 4


def batches(*arrays: np.ndarray, size: int = 9, length_is_known: bool = True) -> tf.data.Dataset:
    """Batches of 9, 9, 9 and 2 rows: with 4 replicas, some of them empty."""
    data = tf.data.Dataset.from_tensor_slices(arrays or (X, Y)).batch(size)
    return data if length_is_known else data.filter(lambda *_: True)


class Line(tf.Module):
    """A linear model without Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = tf.Variable(tf.zeros([3, 1]), name="slope")
        self.offset = tf.Variable(0.0, name="offset")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return (x @ self.slope)[:, 0] + self.offset

    @property
    def trained(self) -> list[tf.Variable]:
        return [self.slope, self.offset]


def line_loop(strategy: tf.distribute.Strategy, **arguments: Any) -> tuple[TrainLoop, Line]:
    with strategy.scope():
        line = Line()

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        x, y, *weight = batch
        with tf.GradientTape() as tape:
            errors = line(x) - y
            loss = replica.mean_loss(errors**2, *weight)
        gradients = replica.reduce_gradients(tape.gradient(loss, line.trained))
        for variable, gradient in zip(line.trained, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return {
            "loss": loss,
            "error": errors,
            "rows": tf.size(errors),
            "largest": errors,
            "smallest": errors,
            "norm": tf.linalg.global_norm(gradients),
        }

    given: dict[str, Any] = {
        "parts": {"line": line},
        "reduce": {
            "loss": "mean",
            "error": "mean",
            "rows": "sum",
            "largest": "max",
            "smallest": "min",
            "norm": "max",
        },
    }
    return TrainLoop(step, strategy=strategy, **{**given, **arguments}), line


def small_loop(strategy: tf.distribute.Strategy, step: Any, parts: Any = None, **reduce: Any) -> TrainLoop:
    return TrainLoop(step, parts=parts or {}, reduce=reduce or {"loss": "mean"}, strategy=strategy)


# What one device gives


@pytest.mark.parametrize("kind", rotating(["one_device", "mirrored2", "mirrored4"], ["mirrored4"]))
@pytest.mark.parametrize("length_is_known", rotating([True, False], [False]))
@pytest.mark.parametrize("is_weighted", rotating([False, True], [True]))
def test_a_module_without_keras_trains_as_on_one_device(
    strategies: Any, kind: str, length_is_known: bool, is_weighted: bool
) -> None:
    data = batches(*([X, Y, WEIGHT] if is_weighted else [X, Y]), length_is_known=length_is_known)
    expected_loop, expected = line_loop(DEFAULT)
    history = expected_loop.fit(data, epochs=3, verbose=0).history
    loop, line = line_loop(strategies.get(kind))
    ours = loop.fit(data, epochs=3, verbose=0).history
    assert set(ours) == {"loss", "error", "rows", "largest", "smallest", "norm"}
    assert [int(n) for n in ours["rows"]] == [29, 29, 29]
    for name, values in history.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(line.slope.numpy(), expected.slope.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(line.offset.numpy(), expected.offset.numpy(), rtol=1e-5, atol=1e-6)


def test_one_device_gives_what_plain_numpy_gives() -> None:
    loop, line = line_loop(DEFAULT)
    history = loop.fit(batches(X, Y, WEIGHT), epochs=1, verbose=0).history
    slope, offset, sum_of_losses, errors_seen = np.zeros(3), 0.0, 0.0, []
    for begin in range(0, 29, 9):
        x, y, weight = (a[begin : begin + 9] for a in (X, Y, WEIGHT))
        errors = x @ slope + offset - y
        errors_seen.append(errors)
        sum_of_losses += len(x) * np.sum(weight * errors**2) / weight.sum()
        gradient = 2 * weight * errors / weight.sum()
        slope, offset = slope - 0.1 * x.T @ gradient, offset - 0.1 * gradient.sum()
    np.testing.assert_allclose(line.slope.numpy()[:, 0], slope, rtol=1e-4)
    np.testing.assert_allclose(line.offset.numpy(), offset, rtol=1e-4)
    every_error = np.concatenate(errors_seen)
    assert history["loss"][0] == pytest.approx(sum_of_losses / 29, rel=1e-5)
    assert history["error"][0] == pytest.approx(every_error.mean(), rel=1e-4)
    assert history["largest"][0] == pytest.approx(every_error.max(), rel=1e-5)
    assert history["smallest"][0] == pytest.approx(every_error.min(), rel=1e-5)


def keras_loop(strategy: tf.distribute.Strategy, optimizer: Any, *, scaled: bool = False) -> TrainLoop:
    with strategy.scope():
        keras.utils.set_random_seed(3)
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)], name="net")

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y[:, None], net(x, training=True))
            scaled_loss = loop.opt.scale_loss(loss) if scaled else loss
        loop.opt.apply(tape.gradient(scaled_loss, net.trainable_variables), net.trainable_variables)
        return {"loss": loss}

    loop = TrainLoop(step, parts={"net": net, "opt": optimizer()}, reduce={"loss": "mean"}, strategy=strategy)
    return loop


OPTIMIZERS = {
    "clipping after the reduction": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "slots": lambda: keras.optimizers.Adam(0.05, epsilon=1e-3),
    "accumulation": lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=3),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.2), initial_scale=64.0),
}


@pytest.mark.parametrize("name", rotating(OPTIMIZERS, ["clipping after the reduction"]))
def test_keras_optimizers_give_what_they_give_on_one_device(strategies: Any, name: str) -> None:
    results = []
    for strategy in (DEFAULT, strategies.get("mirrored4")):
        loop = keras_loop(strategy, OPTIMIZERS[name], scaled=name == "loss scaling")
        history = loop.fit(batches(), epochs=2, verbose=0).history
        results.append((history["loss"], [w.numpy() for w in loop.net.weights]))
    (expected, expected_weights), (losses, weights) = results
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert expected[1] < 0.99 * expected[0]
    for ours, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_gradients_reduced_by_hand_may_be_clipped_and_given_to_a_keras_optimizer(mirrored: Any) -> None:
    slopes = []
    for strategy in (DEFAULT, mirrored):
        with strategy.scope():
            line, optimizer = Line(), keras.optimizers.SGD(1.0)
            variables = [keras.Variable(np.zeros((3, 1), "float32")), keras.Variable(0.0)]

        class Net(keras.Layer):
            def __init__(self, variables: Any) -> None:
                super().__init__()
                self.slope, self.offset = variables
                self.built = True

        def step(replica: Any, batch: Any, variables: Any = variables, optimizer: Any = optimizer) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = replica.mean_loss(((x @ variables[0].value)[:, 0] + variables[1].value - y) ** 2)
            gradients = replica.reduce_gradients(tape.gradient(loss, [v.value for v in variables]))
            gradients, _ = tf.clip_by_global_norm(gradients, 0.3)
            optimizer.apply(gradients, variables)
            return {"loss": loss}

        with strategy.scope():
            net = Net(variables)
        small_loop(strategy, step, {"net": net, "optimizer": optimizer, "line": line}).fit(batches(), verbose=0)
        slopes.append(variables[0].numpy())
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=1e-5)
    assert np.abs(slopes[0]).max() > 0.1


def test_several_steps_are_made_in_one_call_of_the_graph(mirrored: Any) -> None:
    calls = []
    loop, line = line_loop(mirrored, steps_per_execution=3)
    once, alone = line_loop(mirrored, steps_per_execution=1)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: calls.append(batch))
    loop.fit(batches(), epochs=2, verbose=0, callbacks=[note])
    once.fit(batches(), epochs=2, verbose=0)
    assert calls == [2, 3, 2, 3]
    np.testing.assert_array_equal(line.slope.numpy(), alone.slope.numpy())


@pytest.mark.slow
def test_a_ragged_loss_is_the_mean_over_all_elements(strategies: Any) -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0, 10.0], [], [4.0, 5.0], [6.0]])
    data = tf.data.Dataset.from_tensors(ragged)

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": replica.mean_loss(batch), "dense": replica.mean_loss(batch.to_tensor(), batch.to_tensor() > 0)}

    for kind in ("default", "mirrored2", "mirrored4"):
        loop = small_loop(strategies.get(kind), step, loss="mean", dense="mean")
        assert loop.fit(data, verbose=0).history == {
            "loss": [pytest.approx(31 / 7)],
            "dense": [pytest.approx(31 / 7)],
        }


@pytest.mark.slow
def test_arrays_and_single_batches_train_as_datasets_do(mirrored: Any) -> None:
    slopes = []
    for is_array in (False, True):
        loop, line = line_loop(mirrored)
        if is_array:
            loop.fit(X, Y, batch_size=9, verbose=0, shuffle=False)
        else:
            loop.fit(batches(), verbose=0, shuffle=False)
        loss = loop.train_on_batch(X[:5], Y[:5], return_dict=True)["loss"]
        slopes.append([*line.slope.numpy()[:, 0], float(loss)])
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=1e-6)


def test_a_replica_knows_its_place(mirrored: Any) -> None:
    def step(replica: Any, batch: Any) -> dict[str, Any]:
        return {
            "index": tf.constant(replica.index),
            "rows": replica.rows,
            "weight": replica.weight,
            "total": replica.sum(tf.reduce_sum(batch)),
            "global_rows": replica.global_rows,
        }

    loop = small_loop(mirrored, step, index="sum", rows="max", weight="sum", total="max", global_rows="min")
    values = loop.fit(tf.data.Dataset.range(5).map(lambda i: tf.cast(i, tf.float32)).batch(5), verbose=0).history
    assert values == {"index": [1], "rows": [3.0], "weight": [1.0], "total": [10.0], "global_rows": [5.0]}


# Examples


@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], ["mirrored2"]))
def test_example_without_keras_equals_its_single_device_reference(strategies: Any, kind: str) -> None:
    memory = kde.MemoryWriter()
    expected, single = linear_no_keras.train(DEFAULT, epochs=3)
    model, history = linear_no_keras.train(
        strategies.get(kind), epochs=3, callbacks=[kde.ReplicaMonitor(writers=[memory], gradient_norm=True)]
    )
    for name, values in single.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(model.weights.numpy(), expected.weights.numpy(), rtol=1e-3, atol=1e-5)
    assert history.history["val_correct"][-1] > 0.96 * 569
    assert sum(int(stats.examples.sum()) for stats in memory.train) == 3 * 569
    total = sum((stats.loss * stats.examples).sum() for stats in memory.train)
    assert total / (3 * 569) == pytest.approx(np.mean(history.history["loss"]), rel=1e-4)
    assert memory.train[0].gradient_norm is not None
    assert (memory.train[0].gradient_norm > 0).all()


@pytest.mark.slow
def test_example_with_two_optimizers_equals_its_single_device_reference(mirrored: Any) -> None:
    memory = kde.MemoryWriter()
    expected, single = gan.train(DEFAULT, epochs=2, num_images=200)
    loop, history = gan.train(mirrored, epochs=2, num_images=200, callbacks=[kde.ReplicaMonitor(writers=[memory])])
    for name in ("loss", "generator_loss"):
        np.testing.assert_allclose(history.history[name], single.history[name], rtol=1e-5, err_msg=name)
    for ours, theirs in zip(loop.generator.weights, expected.generator.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-6)
    assert history.history["loss"][1] < history.history["loss"][0]
    assert loop.critic_optimizer.iterations.numpy() == loop.generator_optimizer.iterations.numpy() == 8
    assert memory.train[-1].step == 8
    images = loop.predict(gan.data(200), verbose=0)
    np.testing.assert_allclose(images, expected.predict(gan.data(200), verbose=0), rtol=1e-3, atol=1e-5)


# Workers


@pytest.mark.slow
@on_two_workers(loop_runs.train_sequences)
def test_example_of_sequences_on_two_workers_equals_its_single_device_reference(values: Any) -> None:
    loop, single = sequences.train(DEFAULT, epochs=2, num_images=230)
    for worker in values:
        history, weights = worker["history"], worker["weights"]
        assert [int(n) for n in history["examples"]] == [230, 230]
        np.testing.assert_allclose(history["loss"], single.history["loss"], rtol=1e-4)
        assert history["correct"][-1] == pytest.approx(single.history["correct"][-1], abs=1)
        for ours, theirs in zip(weights, loop.reader.weights, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-3, atol=1e-4)
        assert all(num_replicas == 2 for num_replicas, _ in worker["replicas"])
        assert sum(sum(examples) for _, examples in worker["replicas"]) == 460


@pytest.mark.rotating
@on_two_workers(loop_runs.train_without_keras)
def test_example_without_keras_on_two_workers_equals_its_single_device_reference(values: Any) -> None:
    model, single = linear_no_keras.train(DEFAULT, epochs=2)
    for history, weights in values:
        for name, expected in single.history.items():
            np.testing.assert_allclose(history[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(weights, model.weights.numpy(), rtol=1e-3, atol=1e-5)


@on_two_workers(loop_runs.gathers)
def test_rows_of_all_workers_are_gathered_in_order(values: Any) -> None:
    for gathered, kept in values:
        assert gathered == [2.0 * i for i in range(7)]
        assert kept == [float(i) for i in range(7)]


# Evaluation


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_results_of_uneven_shards_are_gathered_in_order(strategies: Any, num_rows: int) -> None:
    strategy = strategies.get("mirrored3")
    rows = np.arange(num_rows, dtype="float32")
    values = kde.per_replica(lambda batch: {"twice": 2 * batch, "pair": tf.stack([batch, batch], 1)}, strategy)(rows)
    assert len(strategy.experimental_local_results(values["twice"])) == 3
    gathered = kde.gather(values, strategy)
    np.testing.assert_array_equal(gathered["twice"], 2 * rows)
    np.testing.assert_array_equal(gathered["pair"], np.stack([rows, rows], 1))


@pytest.mark.parametrize("length_is_known", rotating([True, False], [False]))
def test_values_for_all_rows_are_kept_in_order_of_the_last_epoch_and_evaluation(
    strategies: Any, length_is_known: bool
) -> None:
    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"x": batch[0], "rows": replica.rows}

    loop = TrainLoop(
        step, test=step, parts={}, reduce={"x": "concat", "rows": "sum"}, strategy=strategies.get("mirrored4")
    )
    data = batches(length_is_known=length_is_known)
    history = loop.fit(data, epochs=2, verbose=0, validation_data=batches(X[:5], Y[:5])).history
    np.testing.assert_array_equal(loop.rows()["x"], X)
    np.testing.assert_array_equal(loop.rows("test")["x"], X[:5])
    assert {name: [int(n) for n in values] for name, values in history.items()} == {
        "rows": [29, 29],
        "val_rows": [5, 5],
    }
    loop.evaluate(batches(X[3:7], Y[3:7]), verbose=0)
    np.testing.assert_array_equal(loop.rows("test")["x"], X[3:7])


def test_results_of_one_device_are_gathered_too_and_those_of_several_need_their_strategy(mirrored: Any) -> None:
    rows = np.arange(5, dtype="float32")
    gathered = kde.gather(kde.per_replica(lambda batch: {"twice": 2 * batch, "none": None})(rows))
    np.testing.assert_array_equal(gathered["twice"], 2 * rows)
    assert gathered["none"] is None
    with pytest.raises(
        kde.DataError, match=r"gather was given rows of the shapes \(2,\), \(3,\) by different replicas"
    ):
        kde.gather(kde.per_replica(lambda x: tf.tile(x[:, None], [1, tf.shape(x)[0]]), mirrored)(rows), mirrored)
    constants = kde.per_replica(lambda batch: 3, mirrored)(rows)
    assert kde.gather(constants, mirrored).numpy().tolist() == [3, 3]
    with pytest.raises(kde.StrategyError, match=r"several replicas, and no strategy.*gather\(values, strategy\)"):
        kde.gather(kde.per_replica(lambda batch: batch, mirrored)(rows))


@pytest.mark.slow
def test_results_are_gathered_in_a_graph_too(mirrored: Any) -> None:
    def twice(batch: tf.Tensor) -> tf.Tensor:
        return kde.gather(kde.per_replica(lambda rows: 2 * rows, mirrored)(batch), mirrored)

    rows = tf.range(5.0)
    np.testing.assert_array_equal(tf.function(twice, autograph=False)(rows), 2 * rows)


def test_without_a_step_for_it_a_loop_does_not_evaluate_or_predict() -> None:
    loop, _ = line_loop(DEFAULT)
    with pytest.raises(LoopError, match="evaluate and validation_data need to know what to do with a batch"):
        loop.evaluate(batches(), verbose=0)
    with pytest.raises(LoopError, match="test_on_batch needs to know what to do with a batch"):
        loop.test_on_batch(X, Y)
    with pytest.raises(LoopError, match="Give TrainLoop a function predict="):
        loop.predict(batches(), verbose=0)


# What works on it


def test_weights_of_all_parts_are_saved_and_loaded(mirrored: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "loop.weights.h5"
    loop, line = line_loop(mirrored)
    loop.fit(
        batches(), verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(path, save_weights_only=True, monitor="loss")]
    )
    other, fresh = line_loop(mirrored)
    other.load_weights(path)
    np.testing.assert_array_equal(fresh.slope.numpy(), line.slope.numpy())
    assert fresh.offset.numpy() == line.offset.numpy() != 0.0
    assert loop.count_params() == 4


class Nested(tf.Module):
    """A module whose variables have no names of their own, and one that adds up over replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [{"kernel": tf.Variable(1.0)}, [tf.Variable(2.0), tf.Variable(3.0)]]
        self.rows = tf.Variable(
            0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )


def test_variables_of_a_module_are_saved_by_where_they_are(mirrored: Any, tmp_path: pathlib.Path) -> None:
    with mirrored.scope():
        module = Nested()

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        module.rows.assign_add(replica.rows)
        return {"loss": replica.mean_loss(batch[1] * module.blocks[0]["kernel"])}

    loop = small_loop(mirrored, step, {"module": module})
    loop.fit(batches(), verbose=0)
    loop.save_weights(tmp_path / "loop.weights.h5")
    for variable in module.variables:
        variable.assign(tf.zeros_like(variable))
    loop.load_weights(tmp_path / "loop.weights.h5")
    assert [float(variable.numpy()) for variable in module.variables] == [1.0, 2.0, 3.0, 29.0]
    assert [name for name, _ in raw_variables(loop)] == [
        "module/blocks/0/kernel",
        "module/blocks/1/0",
        "module/blocks/1/1",
        "module/rows",
    ]


def test_a_loop_is_not_saved_whole(mirrored: Any, tmp_path: pathlib.Path) -> None:
    loop, line = line_loop(mirrored)
    with pytest.raises(LoopError, match=r"'loop' is a TrainLoop, .* Save the weights of all parts, loop.save_weights"):
        loop.save(tmp_path / "loop.keras")
    with pytest.raises(LoopError, match="save_weights_only=True"):
        loop.fit(batches(), verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "loop.keras")])
    assert line.offset.numpy() == 0.0, "before the first step"


def test_replica_seeds_gives_replicas_numbers_of_their_own(mirrored: Any) -> None:
    def draws(seed: int) -> np.ndarray:
        with mirrored.scope():
            noise = keras.layers.GaussianNoise(1.0)
            noise.build((None,))

        def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
            return {"x": noise(0.0 * batch, training=True)}

        loop = small_loop(mirrored, step, {"noise": noise}, x="concat")
        data = tf.data.Dataset.from_tensor_slices(np.ones(8, "float32")).batch(4)
        loop.fit(data, verbose=0, callbacks=[kde.ReplicaSeeds(seed)])
        return loop.rows()["x"]

    first = draws(1)
    assert len(set(first.tolist())) == 8
    np.testing.assert_array_equal(first, draws(1))
    assert (first != draws(2)).all()


def test_early_stopping_and_schedules_of_keras_act_on_the_first_optimizer(mirrored: Any) -> None:
    loop = keras_loop(mirrored, lambda: keras.optimizers.SGD(0.1))
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100.0)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01)
    history = loop.fit(batches(), epochs=9, verbose=0, callbacks=[stop, schedule])
    assert len(history.history["loss"]) == 2
    assert loop.opt.learning_rate.numpy() == pytest.approx(0.01)


@pytest.mark.parametrize("kind", rotating(["without Keras", "with Keras"], [], slow=["with Keras"]))
def test_a_run_that_was_broken_off_in_an_epoch_goes_on_by_resume(
    kind: str, mirrored: Any, tmp_path: pathlib.Path
) -> None:
    def run(*callbacks: Any) -> dict[str, list[float]]:
        loop = line_loop(mirrored)[0] if kind == "without Keras" else keras_loop(mirrored, OPTIMIZERS["slots"])
        history = loop.fit(batches(), epochs=3, verbose=0, shuffle=False, callbacks=list(callbacks))
        return {name: [float(value) for value in values] for name, values in history.history.items()}

    class Break(keras.callbacks.Callback):
        num_left = 6

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.num_left -= 1
            if self.num_left == 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(kde.Resume(tmp_path, save_every=1), Break())
    assert run(kde.Resume(tmp_path, save_every=1)) == run()


def test_the_doctor_looks_at_a_loop(mirrored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    line_loop(mirrored)[0].fit(batches(), epochs=9, verbose=0, shuffle=False, callbacks=[kde.ParallelismDoctor()])
    assert "about 'loop' in" in capsys.readouterr().out


def test_a_variable_without_keras_that_differs_between_replicas_is_named(mirrored: Any) -> None:
    memory = kde.MemoryWriter()
    loop, line = line_loop(mirrored)
    change = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: components(line.slope)[1].assign_add([[1.0], [0.0], [0.0]])
    )
    monitor = kde.ReplicaMonitor(writers=[memory], check_divergence_every=4)
    with pytest.warns(UserWarning, match="loop/line/slope differs between replica 0 and replica 1 at step 8"):
        loop.fit(batches(), epochs=2, verbose=0, shuffle=False, callbacks=[monitor, change])
    assert "all were equal at step 4" in memory.findings[0]["evidence"]


def test_actions_are_called_at_their_conditions(mirrored: Any) -> None:
    seen: list[Any] = []
    loop, _ = line_loop(mirrored, steps_per_execution=2)
    loop.fit(
        batches(),
        epochs=3,
        verbose=0,
        callbacks=[
            kde.every(6, lambda model: seen.append("six steps")),
            kde.on_improvement("loss", lambda model: seen.append(("better", model is loop))),
            kde.on_improvement("loss", lambda model: seen.append("larger"), mode="max"),
        ],
    )
    assert seen.count("six steps") == 2
    assert seen.count(("better", True)) == 3
    assert seen.count("larger") == 1
    with pytest.raises(kde.CallbackError, match=r"an epoch has the values \['error', 'largest'"):
        loop.fit(batches(), verbose=0, callbacks=[kde.on_improvement("lost", print)])
    with pytest.raises(kde.CallbackError, match="num_steps must be an integer >= 1"):
        kde.every(0, print)


def test_a_preempted_run_acts_and_ends_between_two_steps(mirrored: Any) -> None:
    seen: list[Any] = []
    loop, _ = line_loop(mirrored, steps_per_execution=1)
    before = signal.getsignal(signal.SIGTERM)
    preempt = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: os.kill(os.getpid(), signal.SIGTERM) if batch == 1 else None
    )
    loop.fit(batches(), epochs=3, verbose=0, callbacks=[preempt, kde.on_preemption(seen.append)])
    assert seen == [loop]
    assert len(loop.history.epoch) == 1
    assert signal.getsignal(signal.SIGTERM) == before


# Mistakes


def test_variables_of_a_part_made_outside_the_scope_are_named(mirrored: Any) -> None:
    line = Line()
    loop = small_loop(mirrored, lambda replica, batch: {}, {"line": line})
    with pytest.raises(kde.ScopeError, match=r"2 of 2 tf.Variables of 'loop' were created outside MirroredStrategy"):
        loop.fit(batches(), verbose=0)


def test_variables_outside_the_scope_that_only_the_step_knows_are_named(mirrored: Any) -> None:
    line = Line()
    loop = small_loop(mirrored, lambda replica, batch: {"loss": replica.mean_loss(line(batch[0]))})
    with pytest.raises(kde.ScopeError, match=r"created outside MirroredStrategy \(2 replicas\): .*slope \(3, 1\)"):
        loop.fit(batches(), verbose=0)


def test_variables_that_no_part_holds_are_named(mirrored: Any) -> None:
    with mirrored.scope():
        line = Line()
    loop = small_loop(mirrored, lambda replica, batch: {"loss": replica.mean_loss(line(batch[0]))})
    with pytest.raises(LoopError, match=r"trains with, or changes, variables that no part holds: .*slope"):
        loop.fit(batches(), verbose=0)


def test_random_generators_and_counters_that_no_part_holds_are_named(mirrored: Any) -> None:
    with mirrored.scope():
        generator, count = keras.random.SeedGenerator(3), tf.Variable(0, name="count")
    noise = small_loop(
        mirrored, lambda r, batch: {"loss": r.mean_loss(batch[1]) + keras.random.normal((), seed=generator)}
    )
    with pytest.raises(
        LoopError, match=r"variables that no part holds: .*seed_generator_state \(2,\).* seeded or comp"
    ):
        noise.fit(batches(), verbose=0)
    counts = small_loop(
        mirrored, lambda r, batch: {"loss": r.mean_loss(batch[1]) + 0.0 * float_of(count.assign_add(1))}
    )
    with pytest.raises(LoopError, match=r"variables that no part holds: count \(\)"):
        counts.fit(batches(), verbose=0)


def float_of(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float32)


def metric_loop(strategy: tf.distribute.Strategy, *, returns: bool = False, **names: str) -> TrainLoop:
    """A loop that rates the sign of sums, by a metric that is no mean of those of replicas."""
    with strategy.scope():
        auc = keras.metrics.AUC(name=names.get("metric", "auc"))

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        loss = replica.mean_loss(batch[1])
        auc.update_state(batch[1] > 0.5, tf.sigmoid(batch[0][:, 0]))
        return {"loss": loss, "auc": auc.result()} if returns else {"loss": loss}

    reduce: Any = {"loss": "mean", "auc": "mean"}
    return TrainLoop(step, test=step, parts={"area": auc}, reduce=reduce, strategy=strategy)


@pytest.mark.rotating
def test_a_metric_among_the_parts_is_that_of_all_replicas_and_begins_anew_each_epoch(strategies: Any) -> None:
    logs = []
    for kind in ("default", "mirrored4"):
        loop = metric_loop(strategies.get(kind))
        history = loop.fit(batches(), epochs=2, verbose=0, validation_data=batches(X[:11], Y[:11])).history
        logs.append(history | {"evaluated": loop.evaluate(batches(), verbose=0, return_dict=True)["auc"]})
    expected = keras.metrics.AUC()
    expected.update_state(Y > 0.5, 1 / (1 + np.exp(-X[:, 0])))
    assert set(logs[1]) == {"loss", "auc", "val_loss", "val_auc", "evaluated"}
    assert logs[1] == {name: pytest.approx(value, rel=1e-5) for name, value in logs[0].items()}
    assert logs[0]["auc"] == [pytest.approx(float(expected.result()))] * 2
    assert logs[0]["evaluated"] == logs[0]["auc"][0] != logs[0]["val_auc"][0]


@pytest.mark.parametrize("kind", ["default", "mirrored2"])
def test_the_result_of_a_metric_for_one_replica_is_not_returned(kind: str, strategies: Any) -> None:
    with pytest.raises(LoopError, match=r"returns 'auc', computed from auc/\w+ \(200,\), .* logged under its own name"):
        metric_loop(strategies.get(kind), returns=True).fit(batches(), verbose=0)
    with pytest.raises(LoopError, match="updates the metric 'loss', and something else is logged by this name"):
        metric_loop(strategies.get(kind), metric="loss").fit(batches(), verbose=0)


def test_virtual_replicas_of_a_loop_are_refused(mirrored: Any) -> None:
    loop, _ = line_loop(mirrored)
    with pytest.raises(kde.StrategyError, match="virtual_replicas=4 for 'loop', a TrainLoop, whose step is a function"):
        loop.compile(virtual_replicas=4)


def test_values_without_a_declared_reduction_are_refused(mirrored: Any) -> None:
    loop = small_loop(mirrored, lambda replica, batch: {"loss": tf.reduce_mean(batch[1]), "extra": batch[1]})
    with pytest.raises(LoopError, match=r"returns extra \(None,\), without a declared reduction"):
        loop.fit(batches(), verbose=0)


def test_what_is_no_dict_is_refused(mirrored: Any) -> None:
    with pytest.raises(LoopError, match="returns SymbolicTensor; it returns a dict of values by name"):
        small_loop(mirrored, lambda replica, batch: tf.reduce_mean(batch[1])).fit(batches(), verbose=0)


def test_a_loss_divided_by_the_global_batch_is_refused(mirrored: Any) -> None:
    loop = small_loop(mirrored, lambda replica, batch: {"loss": tf.reduce_sum(batch[1]) / 9})
    with pytest.raises(LoopError, match="'loss' is declared a mean, but grows with the number of rows"):
        loop.fit(batches(), verbose=0)


def test_a_loss_scaled_by_the_number_of_replicas_is_refused(mirrored: Any) -> None:
    def average(loss: Any) -> Any:
        return tf.nn.compute_average_loss(loss)

    with pytest.raises(LoopError, match="uses compute_average_loss: .* gradients would be scaled a second time"):
        small_loop(mirrored, lambda replica, batch: {"loss": average(batch[1])}).fit(batches(), verbose=0)
    with pytest.raises(LoopError, match=r"'loss' is declared a mean, but is scaled by the number of replicas \(2\)"):
        small_loop(
            mirrored, lambda replica, batch: {"loss": tf.reduce_mean(batch[1]) / mirrored.num_replicas_in_sync}
        ).fit(batches(), verbose=0)


def test_gradients_and_values_that_are_reduced_twice_are_refused(mirrored: Any) -> None:
    with mirrored.scope():
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = replica.mean_loss((net(batch[0])[:, 0] - batch[1]) ** 2)
        gradients = tape.gradient(loss, net.trainable_variables)
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        optimizer.apply(gradients, net.trainable_variables)
        return {"loss": loss}

    with pytest.raises(LoopError, match="gradients given to .* were reduced over replicas before"):
        small_loop(mirrored, step, {"net": net, "optimizer": optimizer}).fit(batches(), verbose=0)

    def reduces(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        loss = tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_mean(batch[1]))
        return {"loss": loss / 2}

    with pytest.raises(LoopError, match="values returned as 'loss' were reduced over replicas before"):
        small_loop(mirrored, reduces).fit(batches(), verbose=0)


def scaling_loop(strategy: tf.distribute.Strategy, scale: Any) -> tuple[TrainLoop, Any]:
    """A loop that asks for the number of replicas, and what it trains."""
    with strategy.scope():
        slope = tf.Variable(tf.ones([3]), name="slope")

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = replica.mean_loss((tf.linalg.matvec(batch[0], slope) - batch[1]) ** 2)
        gradient, _ = replica.reduce_gradients([scale(tape.gradient(loss, slope), replica.num_replicas), None])
        slope.assign_sub(0.1 * gradient)
        return {"loss": loss}

    return small_loop(strategy, step, {"slope": slope}), slope


def test_gradients_that_are_scaled_by_the_number_of_replicas_are_refused(mirrored: Any) -> None:
    loop, slope = scaling_loop(mirrored, lambda gradient, count: gradient / count)
    with pytest.raises(
        LoopError, match=r"One of the gradients given to reduce_gradients is scaled by .* replicas \(2\)"
    ):
        loop.fit(batches(), verbose=0)
    np.testing.assert_array_equal(slope, np.ones(3))


@pytest.mark.slow
def test_a_number_of_replicas_that_scales_no_gradient_is_no_matter(mirrored: Any) -> None:
    found = []
    for strategy in (mirrored, DEFAULT):
        loop, slope = scaling_loop(strategy, lambda gradient, count: gradient + 0.0 * tf.cast(count, tf.float32))
        found.append([*loop.fit(batches(), verbose=0).history["loss"], *slope.numpy()])
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.slow
def test_synchronized_batch_normalization_is_no_double_reduction(strategies: Any) -> None:
    weights = []
    for strategy in (strategies.get("mirrored4"), tf.distribute.get_strategy()):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            normalization = keras.layers.BatchNormalization(synchronized=True)
            net = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(3, "tanh"), normalization, keras.layers.Dense(1)]
            )
            optimizer = keras.optimizers.SGD(0.01)

        def step(replica: Any, batch: Any, net: Any = net, optimizer: Any = optimizer) -> dict[str, tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = replica.mean_loss((net(batch[0], training=True)[:, 0] - batch[1]) ** 2)
            optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
            return {"loss": loss}

        small_loop(strategy, step, {"net": net, "optimizer": optimizer}).fit(batches(), epochs=2, verbose=0)
        weights.append(net.get_weights())
    for value, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


SCALED = {
    "divided by the rows of all replicas": (
        lambda replica, errors: tf.reduce_sum(errors) / tf.cast(replica.global_rows, tf.float32),
        "grows with the number of rows",
    ),
    "divided by a constant": (lambda replica, errors: tf.reduce_sum(errors) / 9, "grows with the number of rows"),
    "one for each row": (lambda replica, errors: errors, "grows with the number of rows"),
    "times the weight": (lambda replica, errors: replica.mean_loss(errors) * replica.weight, "grows with the number"),
    "divided by the number of replicas": (
        lambda replica, errors: replica.mean_loss(errors) / replica.num_replicas,
        r"is scaled by the number of replicas \(2\)",
    ),
    "times one over it": (
        lambda replica, errors: tf.reduce_mean(errors) * (1 / replica.num_replicas),
        r"is scaled by the number of replicas \(2\)",
    ),
}


@pytest.mark.parametrize("how", SCALED)
def test_a_loss_that_is_differentiated_and_scaled_is_refused_though_it_is_not_returned(how: str, mirrored: Any) -> None:
    scaled, message = SCALED[how]
    with mirrored.scope():
        line = Line()

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = scaled(replica, (line(batch[0]) - batch[1]) ** 2)
        for variable, gradient in zip(
            line.trained, replica.reduce_gradients(tape.gradient(loss, line.trained)), strict=True
        ):
            variable.assign_sub(gradient)
        return {}

    with pytest.raises(LoopError, match=f"The loss that the step 'step' differentiates {message}"):
        small_loop(mirrored, step, {"line": line}).fit(batches(), verbose=0)


def test_a_sum_may_be_differentiated_for_rows_and_a_number_of_replicas_be_used(mirrored: Any) -> None:
    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(batch[0])
            squares = tf.reduce_sum(batch[0] ** 2)
        return {"norm": tf.norm(tape.gradient(squares, batch[0]), axis=1), "places": 0.5 * replica.num_replicas}

    history = small_loop(mirrored, step, norm="mean", places="max").fit(batches(), verbose=0).history
    assert history["norm"][0] == pytest.approx(2 * np.linalg.norm(X, axis=1).mean(), rel=1e-5)
    assert history["places"] == [1.0]


def own_gradients(line: Any, replica: Any, batch: Any) -> None:
    line.offset.assign_sub(tf.reduce_mean(line(batch[0]) - batch[1]))


OWN = {
    "gradients that no tape has made": own_gradients,
    "a count of rows": lambda line, replica, batch: line.offset.assign_add(tf.cast(replica.rows, tf.float32)),
    "noise of TensorFlow's": lambda line, replica, batch: line.offset.assign_add(tf.random.normal([])),
    "noise of Keras'": lambda line, replica, batch: line.offset.assign_add(keras.random.normal(())),
}


@pytest.mark.parametrize("what", OWN)
def test_what_one_replica_has_computed_is_not_assigned(what: str, mirrored: Any) -> None:
    with mirrored.scope():
        line = Line()

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        OWN[what](line, replica, batch)
        return {"loss": replica.mean_loss(batch[1])}

    with pytest.raises(
        LoopError, match=r"assigns to offset \(\) what each replica computes from its own rows or random"
    ):
        small_loop(mirrored, step, {"line": line}).fit(batches(), verbose=0)


@pytest.mark.checks_fit
def test_what_all_replicas_share_may_be_assigned(mirrored: Any) -> None:
    values = []
    for strategy in (DEFAULT, mirrored):
        with strategy.scope():
            line, slow = Line(), Line()
            rows = tf.Variable(
                0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
            )
            mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
            count = tf.Variable(0.0)

        def step(replica: Any, batch: Any, variables: Any = (line, slow, rows, mean, count)) -> dict[str, tf.Tensor]:
            line, slow, rows, mean, count = variables
            with tf.GradientTape() as tape:
                loss = replica.mean_loss((line(batch[0]) - batch[1]) ** 2)
            for variable, gradient in zip(
                line.trained, replica.reduce_gradients(tape.gradient(loss, line.trained)), strict=True
            ):
                variable.assign_sub(0.1 * gradient)
            for old, new in zip(slow.trained, line.trained, strict=True):
                old.assign(0.9 * old + 0.1 * new)  # of the weights alone
            rows.assign_add(replica.rows)
            mean.assign(replica.sum(loss * replica.weight))
            count.assign_add(tf.cast(replica.global_rows, tf.float32))
            return {"loss": loss}

        parts = {"line": line, "slow": slow, "seen": rows, "mean": mean, "count": count}
        loop = TrainLoop(step, parts=parts, reduce={"loss": "mean"}, check="raise", strategy=strategy)
        loop.fit(batches(), verbose=0, shuffle=False)
        values.append([slow.offset.numpy(), rows.numpy(), mean.numpy(), count.numpy()])
    np.testing.assert_allclose(values[1], values[0], rtol=1e-5)
    assert values[0][1] == values[0][3] == 29


@pytest.mark.slow
def test_a_batch_by_itself_is_evaluated_as_in_evaluate(mirrored: Any) -> None:
    def errors(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": replica.mean_loss(tf.square(tf.reduce_sum(batch[0], axis=1) - batch[1]))}

    loop = TrainLoop(errors, test=errors, parts={}, reduce={"loss": "mean"}, strategy=mirrored)
    expected = np.mean((X.sum(axis=1) - Y) ** 2)
    np.testing.assert_allclose(loop.test_on_batch(X, Y), expected, rtol=1e-5)
    np.testing.assert_allclose(loop.evaluate(X, Y, verbose=0), expected, rtol=1e-5)


def test_a_step_of_evaluation_does_not_train(mirrored: Any) -> None:
    loop = keras_loop(mirrored, keras.optimizers.SGD)
    both = TrainLoop(
        loop._steps["train"],
        test=loop._steps["train"],
        parts={"net": loop.net, "opt": loop.opt},
        reduce={"loss": "mean"},
        strategy=mirrored,
    )
    loop.opt.build(loop.net.trainable_variables)
    with pytest.raises(
        LoopError, match=r"The step 'step' is for evaluation, and changes net/dense_\d+/kernel \(3, 5\)"
    ):
        both.evaluate(batches(), verbose=0)


def sums_in(where: str, decides: Any, total: Any) -> Any:
    if where == "a branch":
        return tf.cond(decides > 0, total, lambda: 0.0)
    if where == "a loop":
        _, value = tf.while_loop(lambda i, value: i < decides, lambda i, value: (i + 1, value + total()), (0, 0.0))
        return value
    if where == "a function":
        return tf.function(total, autograph=False)()
    return tf.switch_case(tf.cast(decides > 0, tf.int32), [total, total])


@pytest.mark.parametrize("where", ["a branch", "a loop", "a function"])
def test_replicas_add_up_in_branches_that_all_take_alike(where: str, mirrored: Any) -> None:
    with mirrored.scope():
        count = tf.Variable(2)

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": sums_in(where, count + 0, lambda: replica.sum(tf.reduce_sum(batch[1])))}

    history = small_loop(mirrored, step, {"count": count}, loss="max").fit(batches(), verbose=0).history
    times = 2 if where == "a loop" else 1
    assert history["loss"] == [pytest.approx(times * max(Y[i : i + 9].sum() for i in range(0, 29, 9)), rel=1e-5)]


@pytest.mark.parametrize("where", ["a branch", "a loop"])
def test_sums_in_branches_that_each_replica_takes_by_itself_are_refused(where: str, mirrored: Any) -> None:
    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        own = tf.cast(tf.reduce_sum(batch[1]), tf.int32)
        return {"loss": sums_in(where, own, lambda: replica.sum(tf.reduce_sum(batch[1])))}

    with pytest.raises(LoopError, match="adds up over replicas .* that each replica takes by its own rows"):
        small_loop(mirrored, step, loss="max").fit(batches(), verbose=0)


def test_sums_where_replicas_cannot_meet_are_refused(mirrored: Any) -> None:
    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": sums_in("one of several", tf.constant(1), lambda: replica.sum(tf.reduce_sum(batch[1])))}

    with pytest.raises(LoopError, match=r"adds up over replicas .* inside of a tf\.function, or of a branch or loop"):
        small_loop(mirrored, step, loss="max").fit(batches(), verbose=0)


@pytest.mark.parametrize("kind", ["default", "mirrored2"])
def test_variables_made_in_a_step_are_refused(kind: str, strategies: Any) -> None:
    strategy = strategies.get(kind)

    def makes(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": replica.mean_loss(batch[1]) * tf.Variable(1.0, name="factor")}

    with pytest.raises(LoopError, match=r"The step 'makes' makes a variable \(factor\)"):
        small_loop(strategy, makes).fit(batches(), verbose=0)
    with strategy.scope():
        dense = keras.layers.Dense(1)
    with pytest.raises(LoopError, match=r"makes a variable \(kernel\), .*build layers by an Input or a call there"):
        small_loop(strategy, lambda replica, batch: {"loss": tf.reduce_mean(dense(batch[0]))}).fit(batches(), verbose=0)


ASKED: dict[str, Any] = {
    ".numpy()": lambda value: value.numpy(),
    "float": float,
    "int": lambda value: int(tf.cast(value, tf.int32)),
    "a function of NumPy": np.asarray,
    "a function of Keras": keras.ops.convert_to_numpy,
}


@pytest.mark.parametrize("how", ASKED)
def test_a_step_that_asks_for_the_value_of_a_tensor_is_told_what_to_do_instead(how: str, mirrored: Any) -> None:
    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        loss = replica.mean_loss(batch[1])
        ASKED[how](loss)
        return {"loss": loss}

    message = r"asks for the value of a tensor, by \.numpy\(\), .*return what you want to see, .* it by tf\.print"
    with pytest.raises(LoopError, match=message):
        small_loop(mirrored, step).fit(batches(), verbose=0)


@pytest.mark.parametrize("kind", [keras.metrics.R2Score, keras.metrics.F1Score])
def test_a_metric_that_a_step_is_the_first_to_use_is_to_be_used_once_before(kind: Any, mirrored: Any) -> None:
    with mirrored.scope():
        metric = kind()

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        metric.update_state(batch[1][:, None], tf.reduce_sum(batch[0], 1, keepdims=True))
        return {"loss": replica.mean_loss(batch[1])}

    def loop() -> TrainLoop:
        return TrainLoop(step, parts={"metric": metric}, reduce={"loss": "mean"}, strategy=mirrored)

    message = rf"the first to use the metric '{metric.name}' \({kind.__name__}\), .*Use it once before, with values of"
    with pytest.raises(LoopError, match=message):
        loop().fit(batches(), verbose=0)
    with mirrored.scope():
        metric.update_state(np.ones((1, 1)), np.ones((1, 1)))
        metric.reset_state()
    history = loop().fit(batches(), verbose=0).history
    alone = kind()
    alone.update_state(Y[:, None], X.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(history[metric.name][0], alone.result(), rtol=1e-5)


def test_a_replay_buffer_written_by_what_replicas_lack_is_told_how_to_and_holds_what_one_device_puts_in(
    mirrored: Any,
) -> None:
    def stored(strategy: Any, *, is_ours: bool) -> Any:
        with strategy.scope():
            buffer = tf.Variable(tf.zeros([32]), trainable=False, name="buffer")
            place = tf.Variable(0, trainable=False, name="place")

        def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
            rows = kde.gather_rows(batch[1]) if is_ours else batch[1]
            places = (place + tf.range(tf.shape(rows)[0]))[:, None]
            if is_ours:
                buffer.assign(tf.tensor_scatter_nd_update(buffer, places, rows))
            else:
                buffer.scatter_nd_update(places, rows)
            place.assign_add(tf.shape(rows)[0])
            return {"loss": replica.mean_loss(batch[1])}

        parts = {"buffer": buffer, "place": place}
        TrainLoop(step, parts=parts, reduce={"loss": "mean"}, strategy=strategy).fit(batches(), verbose=0)
        return buffer.numpy()

    message = r"calls scatter_nd_update of a variable, .*kde\.gather_rows\(rows\)`, then `variable\.assign\(tf\.tensor"
    with pytest.raises(LoopError, match=message):
        stored(mirrored, is_ours=False)
    np.testing.assert_array_equal(stored(mirrored, is_ours=True), stored(DEFAULT, is_ours=False))


def _advantages(x: tf.Tensor, y: tf.Tensor, slope: tf.Variable) -> tf.Tensor:
    advantages = (y - tf.reduce_mean(y)) / (tf.math.reduce_std(y) + 1e-6)
    return -advantages * (x @ slope)[:, 0]


def _contrastive(x: tf.Tensor, y: tf.Tensor, slope: tf.Variable) -> tf.Tensor:
    views = tf.math.l2_normalize(x * (1.0 + slope[:, 0]), 1)
    labels = tf.range(tf.shape(x)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.matmul(views, views, transpose_b=True))


@pytest.mark.checks_fit
@pytest.mark.parametrize("loss", rotating([_advantages, _contrastive], [_advantages]))
def test_a_loop_warns_of_examples_that_interact_and_names_what_gathers_them(loss: Any, mirrored: Any) -> None:
    with mirrored.scope():
        slope = tf.Variable(tf.ones([3, 1]), name="slope")

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            value = replica.mean_loss(loss(*batch, slope))
        slope.assign_sub(0.1 * tape.gradient(value, slope))
        return {"loss": value}

    loop = TrainLoop(step, parts={"slope": slope}, reduce={"loss": "mean"}, strategy=mirrored, check="raise")
    with pytest.raises(kde.StepError, match=r"'loop' does not train on 2 replicas .*by kde\.gather_rows"):
        loop.fit(batches(), verbose=0)


@pytest.mark.parametrize(
    ("value", "reduction", "message"),
    [
        (lambda y: {"inner": y}, "mean", "returns dict as 'value', which is not a tensor"),
        (lambda y: None, "mean", "returns NoneType as 'value', which is not a tensor"),
        (lambda y: tf.RaggedTensor.from_tensor(y[:, None]), "concat", "returns RaggedTensor as 'value'"),
        (lambda y: tf.complex(y, y), "mean", "'value' is complex64, of which there is no 'mean'"),
        (lambda y: tf.strings.as_string(y), "sum", "'value' is string, of which there is no 'sum'"),
        (
            tf.reduce_sum,
            "concat",
            r"'value' has the shape \(\), and is declared \"concat\", which keeps a value for each",
        ),
        (
            lambda y: tf.ones(3) * y[0],
            "max",
            r"'value' has the shape \(3,\); a 'max' is over rows, so it takes a scalar",
        ),
    ],
)
def test_what_cannot_be_reduced_is_refused(value: Any, reduction: str, message: str, mirrored: Any) -> None:
    with pytest.raises(LoopError, match=message):
        small_loop(mirrored, lambda replica, batch: {"value": value(batch[1])}, value=reduction).fit(
            batches(), verbose=0
        )


def test_strategy_run_inside_of_a_step_is_refused(mirrored: Any) -> None:
    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": mirrored.run(tf.reduce_mean, args=(batch[1],))}

    with pytest.raises(LoopError, match=r"calls a method of the strategy \(run, reduce, gather\)"):
        small_loop(mirrored, step).fit(batches(), verbose=0)


def test_data_that_is_not_the_batch_is_refused(mirrored: Any) -> None:
    with pytest.raises(LoopError, match="computes nothing from its batch, so every replica would compute the same"):
        small_loop(mirrored, lambda replica, batch: {"loss": replica.mean_loss(tf.constant(Y))}).fit(
            batches(), verbose=0
        )


class Counter:
    """What a step may count with, once."""

    def __init__(self) -> None:
        self.count = 0


def test_python_that_would_run_once_is_refused(mirrored: Any) -> None:
    history: list[Any] = []
    counter = Counter()

    def appends(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        history.append(1)
        return {"loss": replica.mean_loss(batch[1])}

    def counts(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        counter.count += 1
        return {"loss": replica.mean_loss(batch[1])}

    def draws(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": replica.mean_loss(batch[1]) * np.random.rand()}

    for step, what in ((appends, "'history'"), (counts, "'counter.count'"), (draws, "the random numbers of NumPy")):
        with pytest.raises(LoopError, match=f"has changed {what} while it was traced. Python runs once"):
            small_loop(mirrored, step).fit(batches(), verbose=0)
    loop = TrainLoop(counts, parts={}, reduce={"loss": "mean"}, strategy=mirrored, run_eagerly=True)
    counter.count = 0
    loop.fit(batches(), verbose=0)
    assert counter.count >= 8


def test_a_tensor_that_python_keeps_from_the_first_trace_is_refused(mirrored: Any) -> None:
    kept: list[Any] = []

    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        kept.append(batch[1])
        if kept[0].graph is not batch[1].graph:
            raise ValueError("it is of another graph")
        return {"loss": replica.mean_loss(kept[0] + batch[1])}

    with pytest.raises(LoopError, match="has changed 'kept' while it was traced. Python runs once"):
        small_loop(mirrored, step).fit(batches(), verbose=0)


@pytest.mark.parametrize("generator", [np.random.default_rng(1), random.Random(1)], ids=lambda g: type(g).__name__)
def test_generators_of_python_are_seen_to_go_on(generator: Any, mirrored: Any) -> None:
    def step(replica: Any, batch: Any) -> dict[str, tf.Tensor]:
        return {"loss": replica.mean_loss(batch[1]) + generator.random()}

    with pytest.raises(LoopError, match="has changed 'generator' while it was traced"):
        small_loop(mirrored, step).fit(batches(), verbose=0)


@pytest.mark.slow
def test_a_function_of_tensorflow_in_a_step_is_no_side_effect(mirrored: Any) -> None:
    losses = []
    for strategy in (DEFAULT, mirrored):
        with strategy.scope():
            line = Line()

        @tf.function
        def forward(x: Any, y: Any, line: Any = line) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((line(x) - y) ** 2)
            return loss, tape.gradient(loss, line.trained)

        @tf.function
        def step(replica: Any, batch: Any, line: Any = line, forward: Any = forward) -> dict[str, tf.Tensor]:
            loss, gradients = forward(*batch)
            for variable, gradient in zip(line.trained, replica.reduce_gradients(gradients), strict=True):
                variable.assign_sub(0.1 * gradient)
            return {"loss": loss}

        losses.append(small_loop(strategy, step, {"line": line}).fit(batches(), epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_a_model_that_is_not_built_is_refused(mirrored: Any) -> None:
    with mirrored.scope():
        net = keras.Sequential([keras.layers.Dense(1)], name="net")
    with pytest.raises(LoopError, match="'net'.*: not built"):
        small_loop(mirrored, lambda replica, batch: {"loss": replica.mean_loss(net(batch[0]))}, {"net": net}).fit(
            batches(), verbose=0
        )


@pytest.mark.parametrize("reduction", ["max", "min", "concat"])
def test_what_does_not_add_up_is_refused_under_a_parameter_server(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch, reduction: str
) -> None:
    monkeypatch.setattr(tf.distribute, "ParameterServerStrategy", tf.distribute.MirroredStrategy)
    with pytest.raises(kde.StrategyError, match=rf"'loss' by '{reduction}', but workers of ParameterServerStrategy"):
        small_loop(mirrored, lambda replica, batch: {}, loss=reduction)


def test_reductions_and_names_are_checked_when_a_loop_is_made() -> None:
    with pytest.raises(LoopError, match=r"Invalid reduce\['loss'\]='meen'.* did you mean 'mean'\?"):
        small_loop(DEFAULT, lambda replica, batch: {}, loss="meen")
    with pytest.raises(LoopError, match="Invalid name 'weights' of a part.* Rename it, for example to 'my_weights'"):
        small_loop(DEFAULT, lambda replica, batch: {}, {"weights": tf.Variable(1.0)})
    with pytest.raises(LoopError, match="reduce must be a dict by name, .* got list"):
        TrainLoop(lambda replica, batch: {}, parts={}, reduce=["loss"])  # type: ignore[arg-type]
    with pytest.raises(LoopError, match="parts must be a dict by name, .* got NoneType"):
        TrainLoop(lambda replica, batch: {}, parts=None, reduce={})  # type: ignore[arg-type]
    with pytest.raises(LoopError, match=r"step must be a function of \(replica, batch\)"):
        TrainLoop({}, parts={}, reduce={})  # type: ignore[arg-type]
