"""Train with two workers and a parameter server, all of them processes, and compare with one device.

One launch serves all tests that need no accident: the chief runs every scenario and hands back what it saw.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import stop_runs
import tensorflow as tf

from keras_dist_ext.cluster.launch import launch
from keras_dist_ext.errors import DataError, LoopError, StrategyError
from keras_dist_ext.strategy.pick import pick_strategy
from keras_dist_ext.training.loop.train_loop import TrainLoop
from keras_dist_ext.training.model import Sequential
from keras_dist_ext.training.parameter_server.coordinator import Coordinator, check_asynchronous

pytestmark = [pytest.mark.multiworker, pytest.mark.slow]

NUM_ROWS = 203  # 13 batches of 16, the last of 11
BATCH = 16
NUM_BATCHES = 13

Scenario = Callable[[tf.distribute.Strategy], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def chief() -> dict[str, tuple[str, Any]]:
    """Run every scenario; return for each what it returned, or its traceback."""
    strategy = pick_strategy("parameter_server").strategy
    results: dict[str, tuple[str, Any]] = {}
    for name, run in SCENARIOS.items():
        keras.utils.set_random_seed(1337)
        try:
            results[name] = ("ok", run(strategy))
        except Exception:
            results[name] = ("failed", traceback.format_exc())
    return results


@pytest.fixture(scope="module")
def seen() -> Callable[[str], Any]:
    """What the chief saw in a scenario."""
    results = launch(2, chief, num_ps=1, time_limit=280, quiet=True).values[0]

    def look(name: str) -> Any:
        state, value = results[name]
        assert state == "ok", value
        return value

    return look


def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 8)).astype("float32")
    return x, (x @ rng.normal(size=(8, 1)) > 0).astype("float32")


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(rows()).batch(BATCH)


def make_model(optimizer: Any = None, **compile_arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(0.001)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1, seed=3),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    model.compile(optimizer or keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=metrics, **compile_arguments)
    return model


def built(strategy: tf.distribute.Strategy, make: Callable[[], keras.Model], spec: Any = None) -> keras.Model:
    with strategy.scope():
        model = make()
        model._symbolic_build(data_batch=dataset().element_spec if spec is None else spec)
    return model


@contextlib.contextmanager
def coordinating(model: keras.Model, **arguments: Any) -> Iterator[Coordinator]:
    coordinator = Coordinator(model, **arguments)
    yield coordinator
    coordinator.close()


def floats(logs: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items()}


def share_of(context: tf.distribute.InputContext) -> tf.data.Dataset:
    return dataset().shard(context.num_input_pipelines, context.input_pipeline_id)


# Training


@scenario
def train_epochs(strategy: tf.distribute.Strategy) -> Any:
    model = built(strategy, make_model)
    epochs = []
    with coordinating(model) as coordinator:
        for epoch in range(8):
            model.reset_metrics()
            batches = iter(dataset())
            while coordinator.train(batches, 1 if epoch % 2 else 6):
                early = floats(coordinator.logs())
            epochs.append(floats(coordinator.join()))
        pooled = floats(model.get_metrics_result())
    return {"epochs": epochs, "early": early, "pooled": pooled, "iterations": int(model.optimizer.iterations)}


def test_training_converges_with_two_workers(seen: Any) -> None:
    epochs = seen("train_epochs")["epochs"]
    assert epochs[-1]["loss"] < 0.5 * epochs[0]["loss"]
    assert epochs[-1]["auc"] > 0.97


def test_optimizer_counts_every_step_of_every_worker(seen: Any) -> None:
    assert seen("train_epochs")["iterations"] == 8 * NUM_BATCHES


def test_join_leaves_the_pooled_metrics_in_the_variables_of_the_model(seen: Any) -> None:
    saw = seen("train_epochs")
    assert saw["pooled"] == saw["epochs"][-1]
    assert saw["early"].keys() == saw["pooled"].keys()


@scenario
def steps_in_turn(strategy: tf.distribute.Strategy) -> Any:
    def make() -> keras.Model:
        return make_model(keras.optimizers.AdamW(0.01, weight_decay=0.01, clipnorm=0.5))

    model, alone = built(strategy, make), make()
    alone.set_weights(model.get_weights())
    alone.fit(dataset(), epochs=2, verbose=0)
    with coordinating(model) as coordinator:
        for _ in range(2):
            batches = iter(dataset())
            while coordinator.train(batches):
                coordinator.join()
    return [(a, b) for a, b in zip(model.get_weights(), alone.get_weights(), strict=True)]


def test_steps_made_one_after_the_other_give_the_weights_of_one_device(seen: Any) -> None:
    for ours, theirs in seen("steps_in_turn"):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class Seen(keras.metrics.Metric):
    """Count how often each example came by; its id is the first feature."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.counts = self.add_variable((NUM_ROWS,), "zeros", dtype="int32", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(ids, NUM_ROWS, dtype=tf.int32), axis=0))

    def result(self) -> Any:
        return tf.reduce_sum(self.counts)


def make_counter() -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Seen(name="seen")])
    return model


@scenario
def count_examples(strategy: tf.distribute.Strategy) -> Any:
    ids = np.arange(NUM_ROWS, dtype="float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((ids, ids)).shuffle(NUM_ROWS, seed=1).batch(4)
    model = built(strategy, make_counter, data.element_spec)

    def generated() -> Iterator[Any]:
        for start in range(0, NUM_ROWS, 7):
            yield ids[start : start + 7], ids[start : start + 7], None

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        mine = ids[: 3 * NUM_ROWS // 4] if context.input_pipeline_id == 0 else ids[3 * NUM_ROWS // 4 :]
        return tf.data.Dataset.from_tensor_slices((mine, mine)).batch(4)

    counts = {}
    with coordinating(model) as coordinator:
        for kind, hand_out in (("train", coordinator.train), ("test", coordinator.test)):
            for name, num_steps, make in (
                ("one by one", 1, lambda: iter(data)),
                ("in bundles", 9, lambda: iter(data)),
                ("generator", 2, generated),
                ("workers' own", 5, lambda: coordinator.worker_data(share)),
            ):
                model.reset_metrics()
                batches = make()
                while hand_out(batches, num_steps):
                    pass
                coordinator.join()
                counts[f"{kind} {name}"] = model.metrics[-1].metrics[0].counts.numpy().tolist()
    return {"counts": counts, "iterations": int(model.optimizer.iterations)}


@pytest.mark.parametrize("source", ["one by one", "in bundles", "generator", "workers' own"])
@pytest.mark.parametrize("kind", ["train", "test"])
def test_every_example_is_used_exactly_once(seen: Any, kind: str, source: str) -> None:
    assert seen("count_examples")["counts"][f"{kind} {source}"] == [1] * NUM_ROWS


def test_optimizer_counts_the_batches_that_workers_read_themselves(seen: Any) -> None:
    num_chief, num_generated = -(-NUM_ROWS // 4), -(-NUM_ROWS // 7)
    assert seen("count_examples")["iterations"] == 2 * num_chief + num_generated + -(-152 // 4) + -(-51 // 4)


class OwnStep(keras.Model):
    """Return something that no metric holds."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.rows = keras.metrics.Sum(name="rows")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs["left"]) + self.dense(inputs["right"])

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.rows.update_state(tf.ones([tf.shape(y)[0]]))
        return {"rows": self.rows.result(), "largest": tf.reduce_max(tf.abs(y))}


@scenario
def own_train_step(strategy: tf.distribute.Strategy) -> Any:
    x, y = rows()
    data = tf.data.Dataset.from_tensor_slices(({"left": x, "right": -x}, y)).batch(BATCH)

    def make() -> keras.Model:
        model = OwnStep()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True))
        return model

    model = built(strategy, make, data.element_spec)
    with coordinating(model) as coordinator:
        batches = iter(data)
        while coordinator.train(batches, 4):
            pass
        return floats(coordinator.join())


def test_logs_of_an_own_train_step_hold_pooled_metrics_and_the_rest_of_a_step(seen: Any) -> None:
    assert seen("own_train_step") == {"loss": 0.0, "rows": NUM_ROWS, "largest": 1.0}


# Keras' own loops


@scenario
def keras_loops(strategy: tf.distribute.Strategy) -> Any:
    x, y = rows()

    seen: list[int] = []
    every_batch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))

    def make(sequential: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1, activation="sigmoid")])
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
        return model

    with strategy.scope():
        model = make(Sequential)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/best.keras"
        best = keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True)
        # Not EarlyStopping: no two asynchronous runs are equal, and when it stops depends on the losses.
        stop = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", epoch == 5)
        )
        history = model.fit(
            x, y, batch_size=BATCH, epochs=20, validation_data=(x[:50], y[:50]), callbacks=[best, stop], verbose=0
        ).history
        saved = keras.models.load_model(path).evaluate(x[:50], y[:50], return_dict=True, verbose=0)
    model.fit(((x[i : i + 20], y[i : i + 20]) for i in range(0, NUM_ROWS, 20)), callbacks=[every_batch], verbose=0)
    alone = make(keras.Sequential)
    alone.build((None, 8))
    alone.set_weights(model.get_weights())
    return {
        "history": history,
        "saved": saved["loss"],
        "batches": seen,
        "iterations": int(model.optimizer.iterations),
        "evaluated": [m.evaluate(x, y, batch_size=BATCH, return_dict=True, verbose=0) for m in (model, alone)],
        "predicted": [m.predict(x, batch_size=BATCH, verbose=0) for m in (model, alone)],
        "on batch": [m.test_on_batch(x[:10], y[:10], return_dict=True) for m in (model, alone)],
        "trained on batch": model.train_on_batch(x[:10], y[:10], return_dict=True),
    }


STOPS = [
    ("on_train_begin", None, "stop_training"),
    ("on_epoch_begin", 1, "stop_training"),
    ("on_train_batch_end", 2, "stop_training"),
    ("on_test_begin", None, "stop_training"),
    ("on_test_batch_end", 1, "stop_training"),
    ("on_test_batch_end", 1, "stop_evaluating"),
]


def stop_at_each_place(make: Callable[[], Any]) -> list[Any]:
    x, y = rows()
    model, found = make(), []
    options = {"batch_size": BATCH, "validation_data": (x, y), "verbose": 0}
    for place in STOPS:
        calls = stop_runs.Calls(place)
        before = int(model.optimizer.iterations)
        history = model.fit(x, y, epochs=2, callbacks=[calls], **options)
        whole = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)["loss"]
        found.append(
            {
                "history": {name: len(values) for name, values in history.history.items()},
                "steps": int(model.optimizer.iterations) - before,
                "epochs": [call[:2] for call in calls.calls if "epoch" in call[0]],
                "tests": [call[:2] for call in calls.calls if "test_batch_end" in call[0]],
                "stops": bool(model.stop_training),
                "whole": bool(np.isclose(history.history["val_loss"][-1], whole, rtol=1e-5)),
            }
        )
    return found


@scenario
def stops(strategy: tf.distribute.Strategy) -> Any:
    def make() -> Any:
        with strategy.scope():
            model = Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        return model

    return stop_at_each_place(make)


def test_a_stop_anywhere_ends_as_on_one_device(seen: Any) -> None:
    def make() -> Any:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    for place, found, expected in zip(STOPS, seen("stops"), stop_at_each_place(make), strict=True):
        assert found == expected, place


def test_fit_converges_under_keras_callbacks(seen: Any) -> None:
    saw = seen("keras_loops")
    assert len(saw["history"]["loss"]) == 6  # of 20: a callback stopped it
    assert saw["history"]["loss"][-1] < 0.8 * saw["history"]["loss"][0]
    assert saw["saved"] == pytest.approx(min(saw["history"]["val_loss"]), rel=1e-5)


def test_fit_gives_every_batch_to_a_callback_that_wants_them(seen: Any) -> None:
    saw = seen("keras_loops")
    assert saw["batches"] == list(range(11))
    assert saw["iterations"] == 6 * NUM_BATCHES + 11


def test_evaluate_predict_and_on_batch_equal_one_device(seen: Any) -> None:
    saw = seen("keras_loops")
    for ours, theirs in (saw["evaluated"], saw["on batch"]):
        assert ours == pytest.approx(theirs, rel=1e-6)
    np.testing.assert_allclose(*saw["predicted"], rtol=1e-6, atol=1e-7)
    assert saw["trained on batch"] == pytest.approx(saw["on batch"][1], rel=1e-6)


# Evaluation, prediction, saving


@scenario
def compare_results(strategy: tf.distribute.Strategy) -> Any:
    x, y = rows()
    weights = np.linspace(0, 2, NUM_ROWS, dtype="float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(BATCH)
    model = built(strategy, make_model)
    found = {}
    with coordinating(model) as coordinator:
        batches = iter(dataset())
        while coordinator.train(batches):
            pass
        coordinator.join()
        for num_steps in (1, 7, 100):
            model.reset_metrics()
            batches = iter(data)
            while coordinator.test(batches, num_steps):
                pass
            found[str(num_steps)] = floats(coordinator.join())
        outputs = np.concatenate([out.numpy() for out in coordinator.predict(dataset().map(lambda x, y: x))])
        uneven = [np.tile(x, (300, 1)), *x[:12, None]]  # others overtake the first one
        overtaken = [out.numpy() for out in coordinator.predict(uneven)]
        some = coordinator.predict(iter(dataset()))  # with targets, and left half read
        first = next(some).numpy()
    alone = make_model()
    alone.set_weights(model.get_weights())
    return {
        "found": found,
        "expected": alone.evaluate(data, return_dict=True, verbose=0),
        "outputs": outputs,
        "first": first,
        "overtaken": [out[-1] for out in overtaken],
        "expected outputs": alone.predict(x, verbose=0),
    }


def test_evaluation_equals_one_device_whatever_travels_in_a_call(seen: Any) -> None:
    saw = seen("compare_results")
    for found in saw["found"].values():
        assert found == pytest.approx(saw["expected"], rel=1e-6)


def test_predictions_come_in_order(seen: Any) -> None:
    saw = seen("compare_results")
    assert saw["outputs"].shape == (NUM_ROWS, 1)
    np.testing.assert_allclose(saw["outputs"], saw["expected outputs"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(saw["first"], saw["expected outputs"][:BATCH], rtol=1e-6, atol=1e-7)
    expected = np.concatenate([saw["expected outputs"][-1:], saw["expected outputs"][:12]])
    np.testing.assert_allclose(saw["overtaken"], expected, rtol=1e-6, atol=1e-7)


@scenario
def save_and_load(strategy: tf.distribute.Strategy) -> Any:
    model = built(strategy, make_model)
    with coordinating(model) as coordinator:
        coordinator.train(iter(dataset()), 4)
        coordinator.join()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
    return list(zip(model.get_weights(), loaded.get_weights(), strict=True))


def test_chief_saves_what_the_parameter_server_holds(seen: Any) -> None:
    for saved, loaded in seen("save_and_load"):
        np.testing.assert_array_equal(saved, loaded)


# What cannot be


@scenario
def refusals(strategy: tf.distribute.Strategy) -> Any:
    def refused(act: Callable[[], Any]) -> tuple[str, str]:
        try:
            act()
        except Exception as error:
            return type(error).__name__, str(error)
        return "", ""

    def of(optimizer: Any = None, **arguments: Any) -> Callable[[], Any]:
        def act() -> None:
            with strategy.scope():
                model = make_model(optimizer() if optimizer else None, **arguments)
                model._symbolic_build(data_batch=dataset().element_spec)
            coordinator = Coordinator(model)
            coordinator.test(iter(dataset()))  # there the optimizer does not matter
            coordinator.join()
            coordinator.train(iter(dataset()))

        return act

    def unbuilt() -> None:
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        Coordinator(model).train(iter(dataset()))

    def compiled() -> str:
        with strategy.scope():
            model = make_model(jit_compile=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_asynchronous(model)
        return str(caught[-1].message)

    def whole_dataset() -> None:
        Coordinator(built(strategy, make_model)).train(dataset())

    sgd = keras.optimizers.SGD
    return {
        "accumulation": refused(of(lambda: sgd(gradient_accumulation_steps=4))),
        "ema": refused(of(lambda: sgd(use_ema=True, ema_overwrite_frequency=5))),
        "loss scale": refused(of(lambda: keras.optimizers.LossScaleOptimizer(sgd()))),
        "eager": refused(of(run_eagerly=True)),
        "unbuilt": refused(unbuilt),
        "whole dataset": refused(whole_dataset),
        "jit warning": compiled(),
    }


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("accumulation", ["gradient_accumulation_steps=4", "use larger batches"]),
        ("ema", ["ema_overwrite_frequency=5", "use_ema alone works"]),
        ("loss scale", ["LossScaleOptimizer", "mixed_bfloat16"]),
        ("eager", ["run_eagerly=True", "Compile the model without it"]),
        ("unbuilt", ["Not built: the model 'sequential", "its optimizer", "strategy's scope"]),
    ],
)
def test_what_workers_cannot_do_at_the_same_time_is_refused(seen: Any, case: str, words: list[str]) -> None:
    kind, message = seen("refusals")[case]
    assert kind == "StrategyError"
    for word in words:
        assert word in message


def test_data_that_would_begin_anew_at_every_call_is_refused(seen: Any) -> None:
    kind, message = seen("refusals")["whole dataset"]
    assert kind == "DataError"
    assert message.startswith("The data is a _BatchDataset, which begins anew at every call: its end would never")
    assert "Give an iterator over it, iter(data)" in message


def test_jit_compile_goes_on_uncompiled_and_says_why(seen: Any) -> None:
    assert "XLA cannot compile a step whose variables are on other machines" in seen("refusals")["jit warning"]


def test_other_strategies_have_no_coordinator(mirrored: tf.distribute.Strategy) -> None:
    with mirrored.scope():
        model = make_model()
    with pytest.raises(StrategyError, match="strategy is MirroredStrategy; only models made in the scope of a Param"):
        Coordinator(model)


@scenario
def failing_step(strategy: tf.distribute.Strategy) -> Any:
    x, y = rows()
    x[100] = np.nan

    class Checked(keras.Sequential):
        def test_step(self, data: Any) -> Any:
            with tf.control_dependencies([tf.debugging.assert_all_finite(data[0], "row with a hole")]):
                return super().test_step(data)

    def make() -> keras.Model:
        model = Checked([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    model = built(strategy, make)
    coordinator = Coordinator(model)
    batches = iter(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    message = ""
    try:
        while coordinator.test(batches):
            pass
        coordinator.join()
    except tf.errors.InvalidArgumentError as error:
        message = str(error)
    model.reset_metrics()
    batches = iter(dataset())
    while coordinator.test(batches):
        pass
    after = floats(coordinator.join())
    alone = make()
    alone.set_weights(model.get_weights())
    return {"message": message, "after": after, "expected": alone.evaluate(dataset(), return_dict=True, verbose=0)}


def test_error_of_a_worker_is_raised_on_the_chief_and_the_next_pass_is_whole(seen: Any) -> None:
    saw = seen("failing_step")
    assert "row with a hole" in saw["message"]
    assert saw["after"] == pytest.approx(saw["expected"], rel=1e-6)


@scenario
def distributed_iterator(strategy: tf.distribute.Strategy) -> Any:
    chief_alone = tf.distribute.OneDeviceStrategy("/job:chief/replica:0/task:0/device:CPU:0")
    model = built(strategy, make_model)
    try:
        Coordinator(model).train(iter(chief_alone.experimental_distribute_dataset(dataset())))
    except DataError as error:
        return str(error)
    return "nothing was raised"


def test_distributed_iterators_are_refused(seen: Any) -> None:
    assert "give the dataset itself, without experimental_distribute_dataset, as iter(dataset)" in seen(
        "distributed_iterator"
    )


# Loops of one's own


def _loop(strategy: tf.distribute.Strategy) -> tuple[TrainLoop, dict[str, Any]]:
    """A linear model by hand beside a Keras model, with two optimizers, which learn the same labels."""
    with strategy.scope():
        weights, bias = tf.Variable(tf.zeros([8, 1])), tf.Variable(0.0)
        net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
        fast, slow = keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.0)
    by_hand = [weights, bias]
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits

    def train(replica: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            linear = replica.mean_loss(cross_entropy(y, x @ weights + bias))
            deep = replica.mean_loss(cross_entropy(y, net(x, training=True)))
        for variable, gradient in zip(by_hand, replica.reduce_gradients(tape.gradient(linear, by_hand)), strict=True):
            variable.assign_sub(0.5 * gradient)
        gradients = tape.gradient(deep, net.trainable_variables)
        fast.apply(gradients, net.trainable_variables)
        slow.apply(gradients, net.trainable_variables)
        return {"linear": linear, "deep": deep, "rows": replica.global_rows}

    def test(replica: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {
            "linear": replica.mean_loss(cross_entropy(y, x @ weights + bias)),
            "right": tf.equal(net(x) > 0, y > 0.5),
        }

    loop = TrainLoop(
        train,
        parts={"by_hand": by_hand, "net": net, "optimizers": [fast, slow]},
        reduce={"linear": "mean", "deep": "mean", "rows": "sum", "right": "sum"},
        test=test,
        predict=lambda batch: net(batch[0] if isinstance(batch, tuple) else batch),
        strategy=strategy,
    )
    return loop, {"by_hand": by_hand, "net": net, "optimizers": [fast, slow]}


@scenario
def loop_of_ones_own(strategy: tf.distribute.Strategy) -> Any:
    loop, parts = _loop(strategy)
    history = loop.fit(dataset(), epochs=6, verbose=0, shuffle=False).history
    return {
        "history": {name: [float(value) for value in values] for name, values in history.items()},
        "logs": floats(loop.evaluate(dataset(), verbose=0, return_dict=True)),
        "outputs": loop.predict(dataset(), verbose=0),
        "by_hand": [variable.numpy() for variable in parts["by_hand"]],
        "net": parts["net"].get_weights(),
        "iterations": [int(optimizer.iterations) for optimizer in parts["optimizers"]],
    }


def test_a_loop_of_ones_own_converges(seen: Any) -> None:
    history = seen("loop_of_ones_own")["history"]
    for name in ("linear", "deep"):
        assert history[name][-1] < 0.6 * history[name][0]


def test_every_step_and_row_of_a_loop_counts_once(seen: Any) -> None:
    seen_here = seen("loop_of_ones_own")
    assert seen_here["history"]["rows"] == [NUM_ROWS] * 6
    assert seen_here["iterations"] == [6 * NUM_BATCHES] * 2  # of both optimizers


def test_evaluate_and_predict_of_a_loop_are_exact(seen: Any) -> None:
    seen_here = seen("loop_of_ones_own")
    x, y = rows()
    net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    net.set_weights(seen_here["net"])
    outputs = net.predict(x, verbose=0)
    np.testing.assert_allclose(seen_here["outputs"], outputs, rtol=1e-5, atol=1e-6)
    weights, bias = seen_here["by_hand"]
    losses = tf.nn.sigmoid_cross_entropy_with_logits(y, x @ weights + bias)
    assert seen_here["logs"]["linear"] == pytest.approx(float(tf.reduce_mean(losses)), rel=1e-5)
    assert seen_here["logs"]["right"] == int(((outputs > 0) == (y > 0.5)).sum())


@scenario
def loop_with_an_undeclared_value(strategy: tf.distribute.Strategy) -> Any:
    with strategy.scope():
        weight = tf.Variable(0.0)

    def step(replica: Any, batch: Any) -> dict[str, Any]:
        return {"loss": replica.mean_loss(batch[1] * weight), "undeclared": batch[1]}

    with pytest.raises(LoopError) as raised:
        TrainLoop(step, parts={"weight": weight}, reduce={"loss": "mean"}, strategy=strategy).fit(dataset(), verbose=0)
    return str(raised.value)


def test_mistakes_in_the_step_of_a_loop_are_found_before_it_is_handed_out(seen: Any) -> None:
    assert "undeclared (None, 1), without a declared reduction" in seen("loop_with_an_undeclared_value")


# Accidents


def survive() -> dict[str, Any]:
    """Be the chief of a cluster of our own, kill a worker in the middle of each pass, and start it again."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(4)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    cluster = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    servers: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def serve(kind: str, index: int) -> None:
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        code = "from keras_dist_ext.cluster import worker; worker._serve()"
        servers[kind, index] = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TF_CONFIG": config})

    def kill(kind: str, index: int) -> None:
        servers[kind, index].send_signal(signal.SIGKILL)
        servers[kind, index].wait()

    try:
        serve("ps", 0)
        serve("worker", 0)
        serve("worker", 1)
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        return _passes_with_accidents(serve, kill)
    finally:
        for server in servers.values():
            server.kill()
            server.wait()


def _passes_with_accidents(serve: Callable[[str, int], None], kill: Callable[[str, int], None]) -> dict[str, Any]:
    strategy = pick_strategy("parameter_server").strategy  # first of all: what is older lives on a device that is gone
    ids = np.arange(NUM_ROWS, dtype="float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((ids, ids)).batch(4)
    model = built(strategy, make_counter, data.element_spec)
    found: dict[str, Any] = {}
    with coordinating(model) as coordinator:
        # The second pass ends only if the worker that died in the first one has come back.
        for index, (kind, hand_out) in enumerate((("train", coordinator.train), ("test", coordinator.test))):
            model.reset_metrics()
            for number, batch in enumerate(data):
                hand_out(iter([batch]))
                if number == 20:
                    kill("worker", index)
                    serve("worker", index)
            coordinator.join()
            found[kind] = model.metrics[-1].metrics[0].counts.numpy().tolist()
        found["iterations"] = int(model.optimizer.iterations)
        kill("ps", 0)
        try:
            for batch in data:
                coordinator.train(iter([batch]))
            coordinator.join()
        except Exception as error:
            found["lost"] = (type(error).__name__, str(error))
        coordinator._calls.close()
    return found


@pytest.fixture(scope="module")
def accidents() -> dict[str, Any]:
    found: dict[str, Any] = launch(1, survive, time_limit=200, quiet=True).values[0]
    return found


@pytest.mark.parametrize("kind", ["test", "train"])
def test_metrics_count_every_example_once_although_a_worker_was_killed(accidents: Any, kind: str) -> None:
    assert accidents[kind] == [1] * NUM_ROWS


def test_killed_worker_may_repeat_its_training_step_but_loses_none(accidents: Any) -> None:
    assert -(-NUM_ROWS // 4) <= accidents["iterations"] <= -(-NUM_ROWS // 4) + 1


def test_lost_parameter_server_is_named(accidents: Any) -> None:
    kind, message = accidents["lost"]
    assert kind == "ClusterError"
    assert "A parameter server is lost" in message
    assert "from its last checkpoint" in message
