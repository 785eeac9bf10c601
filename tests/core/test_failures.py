"""Bad input and bad luck: a clear error, in bounded time, and nothing lost."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import failure_runs as runs
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from failure_runs import BATCH, NUM_BATCHES, X, Y, fit, make, state, with_nan, without
from launching import wait_for_saves, wait_until
from tensorflow.python.eager import context as tf_context
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.cluster import rendezvous
from keras_dist_ext.cluster.launch import launch
from keras_dist_ext.cluster.spec import Cluster
from keras_dist_ext.cluster.tasks import cluster
from keras_dist_ext.strategy import deadlock, key_value, presence, prompt_exit
from keras_dist_ext.strategy.consistency import check_consistency, data_fingerprint, differences, run_fingerprint
from keras_dist_ext.training.resume.checkpoints import CheckpointStore, unpack
from keras_dist_ext.training.run_callback import callbacks_of_all_workers

NAN = (5,)  # the batch that has one


def assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Equal in all that a step may change, to the bit."""
    assert expected.keys() - found.keys() <= {"history", "epochs"}
    for name, value in expected.items():
        if name.isdigit():
            np.testing.assert_array_equal(value, found[name], err_msg=name)


def said_while(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    said = [str(warning.message) for warning in caught]
    return result, [text for text in said if "NonFinite" in text or "not finite" in text]


# A replica that is not finite

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "one device": ("default", {"steps_per_execution": 3}),
    "one device, compiled by XLA": ("default", {"steps_per_execution": 3, "jit_compile": True}),
    "2 replicas, one step at a time": ("mirrored2", {"steps_per_execution": 1}),
    "2 replicas, 3 steps at a time": ("mirrored2", {"steps_per_execution": 3}),
    "2 replicas, all steps at once": ("mirrored2", {"steps_per_execution": NUM_BATCHES}),
    "2 replicas, eager": ("mirrored2", {"run_eagerly": True}),
    "4 replicas, auto": ("mirrored4", {}),
    "2 replicas for 4": ("mirrored2", {"steps_per_execution": 3, "virtual_replicas": 4}),
    "2 replicas for 4, fast": (
        "mirrored2",
        {"steps_per_execution": 3, "virtual_replicas": kde.VirtualReplicas(4, "fast")},
    ),
    "momentum, clipped, averaged": (
        "mirrored2",
        {
            "optimizer": lambda: keras.optimizers.SGD(
                0.1, momentum=0.9, global_clipnorm=1.0, use_ema=True, ema_overwrite_frequency=3
            )
        },
    ),
    "accumulated gradients": (
        "mirrored2",
        {
            "steps_per_execution": 3,
            "optimizer": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        },
    ),
}


QUICK = ("2 replicas, 3 steps at a time",)


@pytest.mark.parametrize("name", rotating(CONFIGURATIONS, (), slow=(*QUICK, "accumulated gradients")))
def test_a_step_that_is_skipped_has_never_been_on_any_replica(name: str, strategies: Any) -> None:
    kind, options = CONFIGURATIONS[name]
    strategy = strategies.get(kind)
    expected = fit(make(strategy, **options), without(NAN))
    callback = kde.NonFinite("skip")
    found, said = said_while(lambda: fit(make(strategy, **options), with_nan(NAN), callback))
    assert_same(expected, found)
    for metric, values in expected["history"].items():  # the rows of the step are not counted, either
        np.testing.assert_allclose(found["history"][metric], values, rtol=1e-6)
    num_replicas = options.get("virtual_replicas", 1 if kind == "default" else int(kind[-1]))
    last = getattr(num_replicas, "count", num_replicas) - 1
    assert callback.left_out == [(1, 6, (last,), (last,), (last,))]
    which = f"{'virtual ' if 'virtual_replicas' in options else ''}replica {last}"
    assert said == [
        f"Step 6 of epoch 1: loss and gradients of {which} are not finite, and neither is its data. No replica has "
        "made this update: weights are as they were before. Training continues."
    ]


class Clips(kde.Sequential):
    """A model that does something with its gradients, and assigns a weight by hand."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x, training=True) - y
            loss = tf.reduce_mean(error**2)
        gradients = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 1.0)[0]
        (bias,) = kde.reduce_gradients([tf.reduce_mean(error, axis=0)])
        self.optimizer.apply([*gradients[:-1], bias], self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirrored2", "default"])
def test_a_step_of_ones_own_that_is_skipped_has_never_been(kind: str, strategies: Any) -> None:
    def run(data: Any) -> dict[str, Any]:
        keras.utils.set_random_seed(3)
        with strategies.get(kind).scope():
            model = Clips([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.01), check=False)
        return said_while(lambda: fit(model, data, kde.NonFinite("skip")))[0]

    x, y = with_nan((1,))
    expected, found = run((X[:BATCH], Y[:BATCH])), run((x[: 2 * BATCH], y[: 2 * BATCH]))
    assert_same(expected, found)


class AssignsInFunction(kde.Model):
    """A model whose state is assigned in a tf.function, which keeps its traces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = keras.layers.BatchNormalization(), keras.layers.Dense(1)

    def build(self, shape: Any) -> None:  # or Keras' own would trace the function where nothing is assigned
        self.norm.build(shape)
        self.head.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.normalized(x, training))

    @tf.function
    def normalized(self, x: Any, training: bool) -> Any:
        return self.norm(x, training=training)


@pytest.mark.parametrize(
    ("kind", "is_eager"),
    rotating([("default", True), ("default", False), ("mirrored2", True)], (), slow=[("default", True)]),
)
def test_state_that_a_function_of_a_skipped_step_assigns_is_as_before_it(
    kind: str, is_eager: bool, strategies: Any
) -> None:
    def run(data: Any) -> dict[str, Any]:
        keras.utils.set_random_seed(3)
        with strategies.get(kind).scope():
            model = AssignsInFunction()
            model.build((None, 4))
            model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=is_eager)
        fit(model, (X[:BATCH], Y[:BATCH]))  # so that there is a trace already
        found, _ = said_while(lambda: fit(model, data, kde.NonFinite("skip")))
        return found

    x, y = with_nan((1,))
    expected, found = run((X[:BATCH], Y[:BATCH])), run((x[: 2 * BATCH], y[: 2 * BATCH]))
    assert_same(expected, found)


@pytest.mark.parametrize("steps_per_execution", rotating([1, 3], [3]))
def test_an_error_names_replica_and_step_and_leaves_the_weights_of_the_step_before(
    steps_per_execution: int, mirrored: Any
) -> None:
    options = {"steps_per_execution": steps_per_execution}
    expected = fit(make(mirrored, **options), (X[: 5 * BATCH], Y[: 5 * BATCH]))
    model = make(mirrored, **options)
    message = (
        r"Step 6 of epoch 1: loss and gradients of replica 1 are not finite, and neither is its data\. No replica has "
        r"made this update: weights are as they were before\. Look for NaN and infinity in the data\."
    )
    with pytest.raises(kde.NonFiniteError, match=message):
        fit(model, with_nan(NAN), kde.NonFinite())
    assert_same(expected, state(model))


@pytest.mark.rotating
def test_training_may_stop_there_instead(mirrored: Any) -> None:
    expected = fit(make(mirrored, steps_per_execution=3), (X[: 5 * BATCH], Y[: 5 * BATCH]))
    model = make(mirrored, steps_per_execution=3)
    found, said = said_while(lambda: fit(model, with_nan(NAN), kde.NonFinite("stop"), epochs=3))
    assert_same(expected, found)
    assert found["epochs"] == [0]
    assert len(said) == 1
    assert "replica 1" in said[0]
    assert "Training stops here." in said[0]
    again = fit(model, (X, Y), kde.NonFinite("stop"))  # and may be taken up again
    assert np.isfinite(again["history"]["loss"]).all()


@pytest.mark.rotating
def test_without_it_one_row_ruins_all_replicas(mirrored: Any) -> None:
    found = fit(make(mirrored), with_nan(NAN))
    assert np.isnan(found["0"]).all()


@pytest.mark.rotating
def test_it_costs_nothing_when_it_is_not_asked_for(mirrored: Any) -> None:
    def ops(*callbacks: Any) -> set[str]:
        model = make(mirrored)
        fit(model, (X, Y), *callbacks)
        graphs = [graph.as_graph_def() for graph in model.train_function.program.graphs()]
        functions = [node for graph in graphs for function in graph.library.function for node in function.node_def]
        return {node.op for node in (*functions, *(node for graph in graphs for node in graph.node))}

    assert "IsFinite" in ops(kde.NonFinite())
    assert "IsFinite" not in ops()


@pytest.mark.slow
def test_many_bad_steps_in_a_row_are_no_bad_luck(mirrored: Any) -> None:
    data = with_nan((2, 3, 4, 5))
    skipped, said = said_while(lambda: fit(make(mirrored), data, kde.NonFinite("skip", most_in_a_row=4)))
    assert_same(fit(make(mirrored), without((2, 3, 4, 5))), skipped)
    assert len(said) == 4
    assert "has left out 4 steps of this run in all; the last was step 6 of epoch 1" in said[3]
    model = make(mirrored)
    with pytest.raises(kde.NonFiniteError, match=r"Step 6 of epoch 1.*It is step 4 in a row"):
        said_while(lambda: fit(model, data, kde.NonFinite("skip", most_in_a_row=3)))
    assert_same(fit(make(mirrored), (X[: 2 * BATCH], Y[: 2 * BATCH])), state(model))


@pytest.mark.slow
def test_weights_that_are_not_finite_are_named(mirrored: Any) -> None:
    model = make(mirrored)
    first = model.weights[0]
    first.assign(np.full(first.shape, np.inf, "float32"))
    message = (
        "loss and gradients of all 2 replicas are not finite; their data is finite.*Weights are not finite.*kernel"
    )
    with pytest.raises(kde.NonFiniteError, match=message):
        fit(model, (X, Y), kde.NonFinite())


def test_gradients_alone_may_be_the_fault(mirrored: Any) -> None:
    def loss(y: Any, prediction: Any) -> Any:  # finite, with a slope that is not
        return keras.ops.mean(keras.ops.sqrt(keras.ops.abs(prediction - keras.ops.stop_gradient(prediction))) + 1.0)

    model = make(mirrored)
    model.compile("sgd", loss)
    with pytest.raises(
        kde.NonFiniteError, match=r"gradients of all 2 replicas are not finite; their data is finite.*roots"
    ):
        fit(model, (X, Y), kde.NonFinite())


@pytest.mark.rotating
def test_a_loss_scale_deals_with_overflows_by_itself(mirrored: Any) -> None:
    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**120)

    model = make(mirrored, scaled)
    fit(model, (X * 1e4, Y * 1e10), kde.NonFinite())
    assert keras.ops.convert_to_numpy(model.optimizer.dynamic_scale) < 2.0**120
    callback = kde.NonFinite("skip")
    found, _ = said_while(lambda: fit(make(mirrored, scaled), with_nan(NAN), callback))
    assert callback.left_out == [(1, 6, (1,), (), (1,))]
    assert_same(fit(make(mirrored, scaled), without(NAN)), found)


@pytest.mark.slow
def test_all_optimizers_of_a_step_of_ones_own_are_guarded(mirrored: Any) -> None:
    with mirrored.scope():
        weight = tf.Variable(1.0)
        by_keras = tf.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([by_keras])

    def step(replica: Any, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            by_hand = replica.mean_loss((weight * x[:, 0] - y[:, 0]) ** 2)
            other = replica.mean_loss((by_keras * x[:, 0] - y[:, 0]) ** 2)
        (gradient,) = replica.reduce_gradients([tape.gradient(by_hand, weight)])
        weight.assign_sub(0.1 * gradient)
        optimizer.apply([tape.gradient(other, by_keras)], [by_keras])
        return {"loss": by_hand}

    def run(data: Any) -> list[float]:
        weight.assign(1.0)
        by_keras.assign(1.0)
        loop = kde.TrainLoop(
            step,
            parts={"weight": weight, "by_keras": by_keras, "optimizer": optimizer},
            reduce={"loss": "mean"},
            strategy=mirrored,
            steps_per_execution=3,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop.fit(*data, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[kde.NonFinite("skip")])
        return [float(tf.convert_to_tensor(variable)) for variable in (weight, by_keras)]

    found = run(with_nan(NAN))
    assert np.isfinite(found).all()
    assert found == run(without(NAN))


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: kde.NonFinite("ignore"), "action must be 'raise', 'stop' or 'skip', got 'ignore'"),
        (lambda: kde.NonFinite("skip", most_in_a_row=0), "most_in_a_row must be an integer >= 1, got 0"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(make_it: Callable[[], Any], message: str) -> None:
    with pytest.raises(kde.CallbackError, match=message):
        make_it()


def test_a_model_of_stock_keras_is_refused_with_the_way_out() -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(kde.CallbackError, match="stock Keras, whose steps NonFinite cannot see into. Derive it from"):
        model.fit(X, Y, verbose=0, callbacks=[kde.NonFinite()])


@pytest.mark.parametrize(
    "steps_per_execution",
    [
        pytest.param(1, marks=[pytest.mark.rotating, on_two_workers(runs.guarded, 1)]),
        pytest.param(3, marks=[pytest.mark.slow, on_two_workers(runs.guarded, 3)]),
    ],
)
def test_all_workers_decide_alike(steps_per_execution: int, values: Any) -> None:
    for index, worker in enumerate(values):
        assert_same(worker["reference"], worker["skip"])
        assert_same(worker["before"], worker["stop"])
        assert_same(worker["before"], worker["raise"])
        assert worker["stop"]["epochs"] == [0]
        what = "Step 6 of epoch 1: loss and gradients of replica 1 (worker 1) are not finite, and neither is its data."
        assert worker["raise"]["error"].startswith(what)
        assert [len(worker[action]["said"]) for action in ("skip", "stop")] == ([1, 1] if index == 0 else [0, 0])
        for action in ("skip", "stop", "raise"):
            assert worker[action]["left_out"] == [(1, 6, (1,), (1,), (1,))]


# Workers that do not do the same


class Stores:
    """Stands for what workers store for each other, of all workers in this process."""

    def __init__(self) -> None:
        self.texts: dict[tuple[str, int], str] = {}

    def of(self, index: int, num_workers: int = 2) -> StoreOf:
        return StoreOf(self, index, num_workers)


class StoreOf:
    """One worker's end of it."""

    is_silent = False

    def __init__(self, stores: Stores, index: int, num_workers: int) -> None:
        self._texts, self.index, self.num_workers = stores.texts, index, num_workers
        self.others = [worker for worker in range(num_workers) if worker != index]

    def set(self, topic: str, text: str) -> None:
        if (topic, self.index) in self._texts:
            raise tf.errors.AlreadyExistsError(None, None, topic)  # as TensorFlow does
        self._texts[topic, self.index] = text

    def get(self, topic: str, worker: int, wait_seconds: float) -> str | None:
        return self._texts.get((topic, worker))

    def index_of(self, job: str, number: int) -> int:
        return number

    def silent(self) -> list[int]:
        return []

    def publish_silent(self) -> None:
        pass

    def set_for_all(self, topic: str, text: str) -> None:
        self._texts.setdefault((topic, -1), text)

    def get_for_all(self, topic: str, wait_seconds: float) -> str | None:
        return self._texts.get((topic, -1))

    def delete(self, topic: str) -> None:
        self._texts.pop((topic, self.index), None)


def fingerprint_of(strategy: Any, optimizer: Any = None, *callbacks: Any, **arguments: Any) -> Any:
    return run_fingerprint(make(strategy, optimizer), {"epochs": 1, **arguments}, callbacks_of_all_workers(callbacks))


def test_runs_that_are_alike_have_no_differences_whatever_keras_calls_their_layers(mirrored: Any) -> None:
    first = fingerprint_of(mirrored, None, kde.ReplicaSeeds(3), kde.NonFinite())
    make(mirrored)  # from here on Keras counts on
    second = fingerprint_of(mirrored, None, kde.ReplicaSeeds(3), kde.NonFinite())
    assert first != second
    assert differences([first, second]) == []
    assert differences([json.loads(json.dumps(first)), second]) == []


def test_what_differs_between_workers_is_named_with_both_values(mirrored: Any) -> None:
    found = differences(
        [
            fingerprint_of(mirrored, None, kde.ReplicaSeeds(3)),
            fingerprint_of(mirrored, lambda: keras.optimizers.SGD(0.5), kde.ReplicaSeeds(4), epochs=2),
        ]
    )
    assert "optimizer is SGD on worker 1, and Adam on worker 0" in found
    assert "learning_rate of optimizer is 0.5 on worker 1, and 0.01 on worker 0" in found
    assert "epochs is 2 on worker 1, and 1 on worker 0" in found
    assert "callback of all workers 1 is ReplicaSeeds(4) on worker 1, and ReplicaSeeds(3) on worker 0" in found


def test_workers_may_have_callbacks_of_their_own_that_prepare_no_run(mirrored: Any) -> None:
    class Foreign(keras.callbacks.Callback):
        def prepare(self, model: Any) -> None:
            """Mean something else by the name."""

    class Looks(kde.RunCallback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """Look."""

    class Prepares(kde.RunCallback):
        def on_run_prepare(self, model: Any) -> None:
            """Prepare."""

        def get_run_config(self) -> dict[str, Any]:
            return {"every": 3}

    first = fingerprint_of(mirrored)
    assert differences([first, fingerprint_of(mirrored, None, Foreign(), Looks(), kde.ScopeGuard())]) == []
    assert differences([first, fingerprint_of(mirrored, None, Prepares())]) == [
        "callback of all workers 1 (of 1 and 0) is Prepares(3) on worker 1, and none on worker 0"
    ]


def test_arguments_may_be_of_numpy(mirrored: Any) -> None:
    weights = {np.int64(0): 1.0, np.int64(1): np.float32(2.0)}  # as zip(np.unique(y), ...) gives them
    first = fingerprint_of(mirrored, class_weight=weights, batch_size=np.int64(8))
    assert differences([first, fingerprint_of(mirrored, class_weight={0: 1.0, 1: 2.0}, batch_size=8)]) == []
    assert differences([first, fingerprint_of(mirrored, class_weight=weights, batch_size=np.int64(9))]) == [
        "batch_size is 9 on worker 1, and 8 on worker 0"
    ]


def test_layers_differ_by_the_numbers_in_them_before_there_are_weights() -> None:
    def fingerprint(units: int, rate: float) -> Any:
        model = kde.Sequential([keras.layers.Dense(units), keras.layers.Dropout(rate)])
        model.compile("sgd", "mse")
        return run_fingerprint(model, {}, [])

    assert differences([fingerprint(3, 0.5), fingerprint(3, 0.5)]) == []
    (found,) = differences([fingerprint(3, 0.5), fingerprint(4, 0.5)])
    assert re.fullmatch(r"layer 2 is Dense\(.*units=4, .*\) on worker 1, and Dense\(.*units=3, .*\) on worker 0", found)


def test_metrics_in_another_order_are_named_as_their_state_would_be_mixed_up() -> None:
    def fingerprint(*names: str, of_compile: Any = ("mse", "mae")) -> Any:
        model = kde.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        for name in names:
            setattr(model, name, keras.metrics.Mean(name=name))
        model.noise = keras.metrics.Mean()
        model.compile("sgd", "mse", metrics=list(of_compile))
        return run_fingerprint(model, {}, [])

    first = fingerprint("one", "two")
    assert differences([first, fingerprint("one", "two")]) == []
    (found,) = differences([first, fingerprint("two", "one")])
    assert re.fullmatch(r"metric \d+ is Mean two on worker 1, and Mean one on worker 0", found)
    (found,) = differences([first, fingerprint("one", "two", of_compile=("mae", "mse"))])
    assert found == "metrics is mae, mse on worker 1, and mse, mae on worker 0"


@pytest.mark.parametrize(
    ("argument", "value", "other"),
    [
        ("check", False, True),
        ("batch_statistics", "global", "replica"),
        ("exact", True, False),
        ("gradient_compression", "bfloat16", None),
    ],
)
def test_what_compile_was_given_on_one_worker_only_is_named(argument: str, value: Any, other: Any) -> None:
    def fingerprint(**given: Any) -> Any:
        model = kde.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **given)
        return run_fingerprint(model, {}, [])

    found = differences([fingerprint(**{argument: other}), fingerprint(**{argument: value})])
    assert f"{argument} is {value} on worker 1, and {other} on worker 0" in found


def test_losses_of_several_outputs_are_named_one_by_one() -> None:
    def fingerprint(*losses: Any) -> Any:
        model = kde.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", list(losses))
        return run_fingerprint(model, {}, [])

    found = differences([fingerprint("mse", keras.losses.mean_absolute_error), fingerprint("mse", "mape")])
    assert "loss is mse, mape on worker 1, and mse, mean_absolute_error on worker 0" in found


def test_of_lists_the_first_part_that_differs_is_named() -> None:
    def fingerprint(*weights: str) -> Any:
        return {"weight": list(weights)}

    bias, kernel = "float32 (5,), named d/bias", "float32 (4, 5), named d/kernel"
    assert differences(
        [fingerprint(kernel, bias), fingerprint(kernel, "float32 (6,), named d/bias"), fingerprint(kernel)]
    ) == [
        "weight 2 is float32 (6,), named d/bias on worker 1 (1 other too), and float32 (5,), named d/bias on worker 0"
    ]
    assert differences([fingerprint(kernel, bias), fingerprint(kernel)]) == [
        "weight 2 (of 1 and 2) is none on worker 1, and float32 (5,), named d/bias on worker 0"
    ]


def test_data_of_another_length_or_shape_differs_but_for_rows_of_ones_own() -> None:
    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    other = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
    assert differences([data_fingerprint(s, n, own_rows=False) for s, n in ((spec, 8), (other, 7))]) == [
        "part of a batch 1 is 0: float32 (None, 3) on worker 1, and 0: float32 (None, 4) on worker 0",
        "number of batches is 7 on worker 1, and 8 on worker 0",
    ]
    assert differences([data_fingerprint(spec, n, own_rows=True) for n in (8, 7)]) == []
    assert differences([data_fingerprint((*spec, last), 8, own_rows=False) for last in (None, spec[1])]) == [
        "part of a batch 3 is 2: float32 (None, 1) on worker 1, and 2: none on worker 0"
    ]


def test_workers_that_are_not_alike_all_get_the_same_error() -> None:
    stores = Stores()
    errors: dict[int, str] = {}

    def work(index: int) -> None:
        try:
            check_consistency(stores.of(index), "run/1", {"epochs": str(index)}, what="call fit", wait_seconds=60)
        except kde.WorkersError as error:
            errors[index] = str(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors[0] == errors[1]
    assert "The workers are about to call fit, and disagree" in errors[0]
    assert "epochs is 1 on worker 1, and 0 on worker 0" in errors[0]


def test_a_worker_that_does_not_come_is_named_once_it_is_late_and_in_the_end() -> None:
    now = iter(float(n) for n in range(0, 10_000, 7))
    with (
        pytest.warns(UserWarning, match=r"Worker 0 is about to call fit and waits for workers 1, 2, for \d+ s so far"),
        pytest.raises(kde.WorkersError, match="workers 1, 2 did not arrive within 100 s: .*pick_strategy.wait_seconds"),
    ):
        check_consistency(Stores().of(0, 3), "run/1", {}, what="call fit", wait_seconds=100, clock=lambda: next(now))


def test_only_those_who_have_not_come_yet_are_waited_for() -> None:
    stores = Stores()
    stores.of(1, 3).set("run/1", "{}")
    now = iter(range(100))

    def look() -> None:
        if next(now) == 3:  # the last one comes
            stores.of(2, 3).set("run/1", "{}")

    asked: list[int] = []
    store = stores.of(0, 3)
    get = store.get
    store.get = lambda topic, worker, seconds: (asked.append(worker), get(topic, worker, seconds))[1]  # type: ignore[method-assign]
    check_consistency(store, "run/1", {}, what="call fit", wait_seconds=100, clock=lambda: 0.0, look=look)
    assert asked == [1, 2, 2, 2, 2]


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[str], threading.Event]:
    """Two workers in this process, whose waits are watched twenty times a second; why they end, and that both do."""
    aborted: list[str] = []
    both = threading.Event()

    def abort(text: str) -> None:
        aborted.append(text)
        if len(aborted) == 2:
            both.set()

    monkeypatch.setattr(deadlock, "abort_collectives", abort)
    stores = Stores()
    first, second = (deadlock.DeadlockWatch(stores.of(i), stuck_seconds=0.1, look_seconds=0.05) for i in (0, 1))
    return first, second, aborted, both


def test_workers_that_wait_at_different_places_are_told_where(watches: Any) -> None:
    first, second, aborted, both = watches
    over = threading.Event()

    def evaluate() -> None:
        with second.waiting("a worker sync (feed.evaluate)"):
            over.wait(60)

    other = threading.Thread(target=evaluate)
    other.start()

    def wait_in_vain() -> None:
        with first.waiting("steps 1 to 8 of training"):
            both.wait(60)  # in one line of this program, which the verdicts name
            raise tf.errors.InternalError(None, None, aborted[0])

    with pytest.raises(kde.WorkersError, match="wait for each other in different places, a deadlock: ") as raised:
        wait_in_vain()
    over.set()
    other.join()
    text = str(raised.value)
    assert "worker 0 in steps 1 to 8 of training (test_failures.py:" in text
    assert "worker 1 in a worker sync (feed.evaluate) (test_failures.py:" in text
    assert aborted == [text, text]


def test_a_wait_without_a_collective_ends_by_a_deadlock_too_and_says_whose_data_has_ended(watches: Any) -> None:
    first, second, aborted, both = watches
    over = threading.Event()

    def train() -> None:
        with second.waiting("steps 1 to 8 of training"):
            assert second.note_steps(np.int64(3)) == 3
            over.wait(60)

    other = threading.Thread(target=train)
    other.start()

    def check() -> None:
        with first.waiting("a check that all call fit alike"):
            for _ in range(1000):
                first.check()
                time.sleep(0.05)

    with pytest.raises(kde.WorkersError, match=r"worker 1 in steps 1 to 8 of training, without data after 3 of them"):
        check()
    assert both.wait(60)
    over.set()
    other.join()
    assert aborted[0] == aborted[1]


def test_a_wait_for_a_worker_without_a_sign_of_life_says_so(watches: Any) -> None:
    first, _, aborted, _ = watches
    first._store.silent = lambda: [1]

    def wait_in_vain() -> None:
        with first.waiting("step 1"):
            wait_until(lambda: aborted)
            raise tf.errors.InternalError(None, None, aborted[0])

    with pytest.raises(kde.WorkersError, match=r"cannot continue: worker 1 sends no sign of life\. Look for"):
        wait_in_vain()
    assert first.presence.cause == "worker 1 sends no sign of life"


def test_a_worker_that_waits_long_for_one_that_is_busy_says_where_that_one_is(
    watches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, aborted, _ = watches
    monkeypatch.setattr(deadlock, "_NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(presence, "_ANSWER_SECONDS", 0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with first.waiting("step 1"):  # and the other cannot even answer
            wait_until(lambda: second._store.get_for_all("ask/0", 0.0) and first.presence._round == 1)
            time.sleep(0.2)
    assert not [str(one.message) for one in said if "keeps waiting" in str(one.message)]
    monkeypatch.setattr(presence, "_ANSWER_SECONDS", 60.0)
    answers = threading.Thread(
        target=lambda: wait_until(lambda: second.presence._answer_once() or second.presence._round > 1)
    )
    answers.start()
    busy = r"Worker 0 has waited 0.2 s in step 2 \(.*\): worker 1 is elsewhere in its program.*\. It keeps waiting\."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with first.waiting("step 2"):
            answers.join()
            wait_until(lambda: said)
    assert [str(one.message) for one in said if re.fullmatch(busy, str(one.message))]
    assert aborted == []


def test_workers_that_are_in_the_same_wait_for_long_are_left_to_it(watches: Any) -> None:
    first, second, aborted, _ = watches
    for watch in (first, second):
        watch._publish(json.dumps([1, "step 1", f" (line {watch._store.index})"]))
    first._read_others()
    assert first._find_deadlock() is None
    assert aborted == []


def test_workers_that_meet_in_different_collectives_are_told_where_each_is(
    watches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = watches
    monkeypatch.setattr(deadlock, "_MET_SECONDS", 0.0)
    error = tf.errors.InternalError(None, None, "Shape mismatch in the collective instance 3")
    ours = r"^Worker 0 is in step 1 \(test_failures.py:\d+, .*\)"
    with pytest.raises(kde.WorkersError, match=ours + ", and met another worker that"), first.waiting("step 1"):
        raise error
    second._store.set("met/2", "in a worker sync (main.py:3)")
    both = ours + r", worker 1 is in a worker sync \(main.py:3\), and met another worker that is in another collective"
    with pytest.raises(kde.WorkersError, match=both), first.waiting("step 1"):
        raise error


def test_a_wait_for_a_worker_that_has_ended_says_so(watches: Any) -> None:
    first, second, aborted, _ = watches
    with first.waiting("step 1"), second.waiting("step 1"):
        pass
    second.presence.end()

    def wait_in_vain() -> None:
        with first.waiting("steps 2 to 8 of training"):
            while not aborted:
                time.sleep(0.05)
            raise tf.errors.InternalError(None, None, aborted[0])

    with pytest.raises(
        kde.WorkersError, match=r"^Worker 0 is in steps 2 to 8 of training \(test_failures.py:"
    ) as raised:
        wait_in_vain()
    assert "waits for a worker that never comes: worker 1 has ended. Every worker must make the same" in str(
        raised.value
    )


def left_by_an_error(watch: Any) -> None:
    with pytest.raises(kde.StepError, match="few examples"), watch.running():
        raise kde.StepError("too few examples")


def test_a_wait_for_a_worker_that_has_left_its_run_by_an_error_says_so_though_its_program_goes_on(watches: Any) -> None:
    first, second, aborted, _ = watches
    with first.waiting("step 1"), second.waiting("step 1"):
        pass
    left_by_an_error(second)

    def wait_in_vain() -> None:
        with first.waiting("steps 2 to 8 of training"):
            for _ in range(200):
                if not aborted:
                    time.sleep(0.05)
            raise tf.errors.InternalError(None, None, aborted[0])

    message = r"never comes: worker 1 has left its run with StepError \(test_failures.py:.*\): too few examples\. Every"
    with pytest.raises(kde.WorkersError, match=message):
        wait_in_vain()


def test_workers_that_have_both_left_a_run_and_one_that_begins_another_are_waited_for(watches: Any) -> None:
    first, second, aborted, _ = watches
    left_by_an_error(second)
    left_by_an_error(first)
    with first.waiting("step 1"):
        time.sleep(0.6)
        with second.waiting("step 1"):
            pass
    left_by_an_error(second)
    with second.waiting("step 2"), first.waiting("step 2"):  # once more, after all
        time.sleep(0.6)
    assert aborted == []


def test_a_worker_that_ends_after_the_last_common_step_does_no_harm(watches: Any) -> None:
    first, second, aborted, _ = watches
    with first.waiting("step 1"):
        with second.waiting("step 1"):
            pass
        second.presence.end()
        time.sleep(0.6)
    assert aborted == []


def test_the_last_word_of_a_program_that_has_failed_names_the_error_and_its_line(watches: Any) -> None:
    first, second, *_ = watches
    try:
        int("no number")
    except ValueError as error:
        second.presence.note_failure(type(error), error.__traceback__)
    second.presence.end()
    assert first.presence.end_of(1).what.startswith("has failed with ValueError (test_failures.py:")


@pytest.mark.slow
def test_the_last_word_of_a_worker_that_others_have_failed_says_which(watches: Any) -> None:
    first, second, *_ = watches
    try:
        with first.waiting("step 3"):
            raise tf.errors.UnavailableError(None, None, LOST.replace("task:1", "task:2"))
    except kde.WorkersError as error:
        first.presence.note_failure(type(error), error.__traceback__)
    first.presence.end()
    assert second.presence.end_of(0).what.endswith(", since worker 1 does not answer; worker 2 sends no sign of life")
    second._store.get = None  # the cluster is gone with the first worker, whose last word has been read
    known = pytest.raises(kde.WorkersError, match="worker 0 has failed with WorkersError .*, since worker 1 does not")
    with known, second.waiting("step 3"):
        raise tf.errors.UnavailableError(None, None, "failed to connect to all addresses")


def test_a_first_worker_that_answers_nothing_ends_the_waits_of_others(
    watches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, aborted, _ = watches
    asked = threading.Event()
    monkeypatch.setattr(key_value, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(key_value, "get_key", lambda name, seconds: asked.wait(60) and None)
    second._store = second.presence._store = key_value.KeyValueStore({"worker": 2}, 1)

    def wait_in_vain() -> None:
        with second.waiting("step 3"):
            while not aborted:
                time.sleep(0.05)
            raise tf.errors.InternalError(None, None, aborted[0])

    with pytest.raises(kde.WorkersError, match="Worker 1 is in step 3 .* the first worker, by which all know of each"):
        wait_in_vain()
    with pytest.raises(key_value.StoreSilent, match="The coordination service of the first worker does not answer"):
        second._store.get("place", 0, 0.0)
    asked.set()  # it goes on
    wait_until(lambda: second._store._silent_since is None)
    assert second._store.get("place", 0, 0.0) is None


def test_only_the_first_worker_asks_tensorflow_who_is_silent_and_the_others_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: dict[str, str] = {}
    asked: list[int] = []
    found: list[tuple[str, int]] = []

    def ask(jobs: Any) -> list[tuple[str, int]]:
        asked.append(1)
        return list(found)

    monkeypatch.setattr(key_value, "silent_tasks", ask)
    monkeypatch.setattr(key_value, "set_key", texts.setdefault)
    monkeypatch.setattr(key_value, "get_key", lambda name, seconds: texts.get(name))
    first, second = (key_value.KeyValueStore({"chief": 1, "worker": 2}, index) for index in (0, 1))
    for lost, said in (([], []), ([("worker", 1)], [2]), ([("worker", 0), ("worker", 1)], [1, 2]), ([], [])):
        found[:] = lost
        for _ in range(2):  # what is as before is not stored again
            first.publish_silent()
        assert len(asked) == 2
        assert second.silent() == said
        assert len(asked) == 2
        assert first.silent() == said
        asked.clear()
    assert len(texts) == 3


@pytest.mark.parametrize("seconds", rotating([0.0, 1.5], [0.0]))
def test_a_failed_program_leaves_python_soon_after_its_exit_functions(seconds: float, tmp_path: pathlib.Path) -> None:
    """What takes long is taken down last, as TensorFlow is: without Python's lock, which no thread gets any more."""
    (tmp_path / "lasts.py").write_text(
        "import time\n\nclass Lasts:\n    def __del__(self, sleep=time.sleep):\n        sleep(600)\n\nlasts = Lasts()\n"
    )
    (tmp_path / "program.py").write_text(
        "import atexit, importlib.util, sys, time\n"
        "import lasts\n"
        f"spec = importlib.util.spec_from_file_location('prompt_exit', {prompt_exit.__file__!r})\n"
        "prompt_exit = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(prompt_exit)\n"
        "prompt_exit._LIMIT_SECONDS, prompt_exit._PAUSE_SECONDS = 1.0, 0.05\n"
        f"atexit.register(lambda: (time.sleep({seconds}), print('after a while')))\n"
        "prompt_exit.exit_promptly()\n"
        "raise ArithmeticError('this one')\n"
    )
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == "after a while\n"
    assert ended.stderr.endswith("ArithmeticError: this one\n")


def test_an_answer_that_comes_while_the_wait_for_it_ends_leaves_no_worker_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()

    class Late(threading.Event):
        """The answer comes right after somebody has seen that it has not."""

        def is_set(self) -> bool:
            was = super().is_set()
            answer.set()
            super().wait(0.2)
            return was

    made_up = types.SimpleNamespace(Event=Late, Thread=threading.Thread, Lock=threading.Lock)
    monkeypatch.setattr(key_value, "threading", made_up)
    monkeypatch.setattr(key_value, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(key_value, "get_key", lambda name, seconds: answer.wait(60) and "found")
    store = key_value.KeyValueStore({"worker": 2}, 1, clock=lambda: 0.0)
    with contextlib.suppress(key_value.StoreSilent):
        store.get("place", 0, 0.0)
    wait_until(lambda: store._silent_since is None, seconds=10)
    monkeypatch.setattr(key_value, "_SILENT_SECONDS", 60.0)
    assert store.get("place", 0, 0.0) == "found"


def test_an_answer_that_comes_at_the_last_moment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(threading.Event):
        """A wait that ends in vain, at the moment at which it would not."""

        def wait(self, timeout: float | None = None) -> bool:
            assert super().wait(60)
            return False

    made_up = types.SimpleNamespace(Event=Late, Thread=threading.Thread, Lock=threading.Lock)
    monkeypatch.setattr(key_value, "threading", made_up)
    monkeypatch.setattr(key_value, "get_key", lambda name, seconds: "found")
    assert key_value.KeyValueStore({"worker": 2}, 1).get("place", 0, 0.0) == "found"


def test_a_silent_first_worker_is_asked_again_later_though_one_request_is_never_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, asked, over = [0.0], list[str](), threading.Event()

    def get(name: str, seconds: float) -> str | None:
        asked.append(name)
        return "found" if "found" in name else "" if over.wait(60) else None

    monkeypatch.setattr(key_value, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(key_value, "get_key", get)
    store = key_value.KeyValueStore({"worker": 2}, 1, clock=lambda: now[0])
    for seconds, is_asked in ((0.0, 1), (0.0, 1), (0.02, 2), (0.03, 2), (0.05, 3), (0.06, 3), (0.08, 3)):
        now[0] = seconds
        with pytest.raises(key_value.StoreSilent, match="The coordination service of the first worker does not answer"):
            store.get("lost", 0, 0.0)
        assert len(asked) == is_asked
    now[0] = 0.2
    monkeypatch.setattr(key_value, "_SILENT_SECONDS", 60.0)
    assert [store.get("found", 0, 0.0) for _ in range(2)] == ["found"] * 2
    over.set()


def _have_answers_come_late(store: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Have what is stored be stored, and no answer come until the second event is set; the first is: it was asked."""
    is_asked, is_over, put = threading.Event(), threading.Event(), store.set

    def set_late(topic: str, text: str) -> None:
        put(topic, text)
        if not is_over.is_set():
            is_asked.set()
            is_over.wait(60)
            raise key_value.StoreSilent

    monkeypatch.setattr(store, "set", set_late)
    return is_asked, is_over


def test_a_request_of_a_wait_that_is_over_ends_neither_another_wait_nor_the_watch(
    watches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, aborted, _ = watches
    is_asked, is_over = _have_answers_come_late(second._store, monkeypatch)
    with second.waiting("step 3"):
        assert is_asked.wait(60)
    with second.waiting("step 4"):
        is_over.set()
        wait_until(lambda: aborted or second._store.get("waits/2", 1, 0.0))
    assert aborted == []
    assert second._store.get("waits/1", 1, 0.0) == "-"  # the wait before it is over
    assert json.loads(second._store.get("waits/2", 1, 0.0))[:2] == [2, "step 4"]


def test_a_wait_that_was_stored_late_is_taken_back_when_it_is_over(
    watches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, aborted, _ = watches
    is_asked, is_over = _have_answers_come_late(second._store, monkeypatch)
    with second.waiting("step 3"):
        assert is_asked.wait(60)
    is_over.set()
    wait_until(lambda: second._store.get("waits/1", 1, 0.0) == "-")  # while it does something else
    assert aborted == []


def test_a_program_that_ends_while_the_first_worker_is_silent_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(key_value, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(key_value, "get_key", lambda name, seconds: over.wait(60) and None)
    store = key_value.KeyValueStore({"worker": 2}, 1, clock=itertools.count().__next__)
    with pytest.raises(key_value.StoreSilent):
        store.get("place", 0, 0.0)
    store._try_again_at = 0.0

    def start_no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start_no_more)
    with pytest.raises(key_value.StoreSilent):
        store.get("place", 0, 0.0)
    over.set()


def test_a_program_that_ends_without_threads_still_asks_a_first_worker_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start_no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start_no_more)
    monkeypatch.setattr(key_value, "get_key", lambda name, seconds: f"{name} is known")
    store = key_value.KeyValueStore({"worker": 2}, 1)  # whose first worker has answered all the time
    assert store.get("place", 0, 0.0) == "keras_dist_ext/place/0 is known"


def test_a_worker_whose_answer_was_stored_late_answers_the_next_question(
    watches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = watches
    put = second._store.set

    def set_late(topic: str, text: str) -> None:
        put(topic, text)
        monkeypatch.setattr(second._store, "set", put)
        raise key_value.StoreSilent

    monkeypatch.setattr(second._store, "set", set_late)
    first._store.set_for_all("ask/0", "-")
    with contextlib.suppress(key_value.StoreSilent):
        second.presence._answer_once()
    for number in (0, 1):
        second.presence._answer_once()
        assert second._store.get(f"place/{number}", 1, 0.0).startswith("is elsewhere in its program")
        first._store.set_for_all(f"ask/{number + 1}", "-")


def test_a_worker_that_is_asked_says_where_its_program_is(watches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = watches
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    second.presence.begin()
    assert re.fullmatch(r"is elsewhere in its program \(test_failures.py:\d+, test_.*\)", first.presence.ask([1])[1])
    with second.waiting("step 1"):
        assert re.match(r"is in step 1 \(test_failures.py:", first.presence.ask([1])[1])
    second.presence.end()


def test_a_worker_that_is_asked_while_it_reads_its_data_says_so(watches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = watches
    monkeypatch.setattr(presence, "_READERS", __file__)  # stands for batch_reader.py
    assert re.fullmatch(r"reads its data \(test_failures.py:\d+, test_.*\)", first.presence._place())


def test_a_worker_says_no_last_word_to_a_first_worker_that_is_silent(watches: Any) -> None:
    first, second, *_ = watches
    second._store.is_silent = True
    second.presence.end()
    assert first.presence.end_of(1) is None


def test_an_exception_that_nobody_catches_is_the_last_word_and_ctrl_c_keeps_its_exit_code(
    watches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt: list[bool] = []
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(kind))
    monkeypatch.setattr(presence, "exit_promptly", lambda: prompt.append(True))
    first, second, *_ = watches
    gone = presence.Presence(first._store)
    for one in (gone, second.presence):
        presence._announce_failures(weakref.ref(one))
    del gone, one
    gc.collect()
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert (shown, prompt) == ([KeyboardInterrupt], [])
    assert first.presence.end_of(1).what == "has failed with KeyboardInterrupt"
    sys.excepthook(ValueError, ValueError(), None)
    assert (shown, prompt) == ([KeyboardInterrupt, ValueError], [True])


LOST = (
    "Collective ops is aborted by: Error reported from /job:worker/task:1: The following tasks are unhealthy (stopped "
    "sending heartbeats):\n/job:worker/replica:0/task:1\nThe tasks have crashed."
)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (tf.errors.UnavailableError(None, None, LOST), kde.WorkersError, "and cannot continue: worker 1 sends no sign"),
        pytest.param(
            tf.errors.UnavailableError(None, None, "failed to connect to all addresses"),
            kde.WorkersError,
            "and cannot continue: worker 1 does not answer. Look for the first error among the workers",
            marks=pytest.mark.rotating,
        ),
        (tf.errors.InvalidArgumentError(None, None, "shapes"), tf.errors.InvalidArgumentError, "shapes"),
    ],
)
def test_an_error_of_tensorflow_about_a_lost_worker_is_told_with_its_name(
    watches: Any, error: Exception, expected: type[Exception], message: str
) -> None:
    with pytest.raises(expected, match=message), watches[0].waiting("step 3"):
        raise error


@pytest.mark.rotating
def test_a_worker_that_is_slow_or_busy_is_not_held_for_stuck(watches: Any) -> None:
    first, second, aborted, _ = watches
    with first.waiting("step 1"), second.waiting("step 1"):  # both compute
        time.sleep(0.6)
    with first.waiting("step 2"):  # the other writes a checkpoint, say
        time.sleep(0.6)
        with second.waiting("step 2"):
            pass
    assert aborted == []
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "keras_dist_ext.deadlock"])


# Tasks that do not answer


def cluster_on(*ports: int, index: int = 0) -> Cluster:
    addresses = tuple(f"127.0.0.1:{port}" for port in ports)
    return Cluster("TF_CONFIG", worker=addresses, task_type="worker", task_index=index)


@pytest.fixture
def two_ports() -> Iterator[tuple[int, int]]:
    """Two ports that nobody listens on, and that no other process is handed meanwhile."""
    with cluster(2, 0) as tasks:
        first, second = (int(task.address.rpartition(":")[2]) for task in tasks)
        yield first, second


def test_tasks_whose_ports_stay_closed_are_named_in_time(two_ports: tuple[int, int]) -> None:
    message = (
        f"worker 0 has waited 0.3 s for worker 1 .127.0.0.1:{two_ports[1]}: Connection refused.. Start the program"
    )
    with pytest.raises(kde.ClusterError, match=message):
        rendezvous.wait_for_ports(cluster_on(*two_ports), ["worker 1"], 0.3)


def test_a_task_that_comes_late_is_waited_for_and_said(two_ports: tuple[int, int]) -> None:
    now = iter(range(0, 10_000, 20))
    servers: list[socket.socket] = []

    def clock() -> float:
        seconds = float(next(now))
        if seconds == 60:
            servers.append(socket.create_server(("127.0.0.1", two_ports[1])))
        return seconds

    with pytest.warns(UserWarning, match=r"worker 0 waits for worker 1 .*, for 40 s so far. It gives up after 100 s"):
        rendezvous.wait_for_ports(cluster_on(*two_ports), ["worker 1"], 100.0, clock=clock)
    servers[0].close()


@pytest.mark.parametrize("wait_seconds", [0, -1.0, "10", True, None, float("nan"), float("inf"), 1e12])
def test_a_time_to_wait_is_a_positive_number(wait_seconds: Any) -> None:
    with pytest.raises(kde.StrategyError, match=r"wait_seconds must be a number of seconds > 0( and <= .*)?, got"):
        kde.pick_strategy(wait_seconds=wait_seconds, environ={})


@pytest.fixture
def late_once_probed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock of the first worker by which it is late as soon as it has probed another one that has registered."""
    seconds, probe = 0.0, rendezvous._probe

    def probe_and_be_late(address: str) -> str:
        nonlocal seconds
        why = probe(address)
        seconds = 2000.0
        return why

    monkeypatch.setattr(rendezvous, "_probe", probe_and_be_late)
    return lambda: seconds


def test_all_workers_get_the_first_ones_verdict_when_one_does_not_come(
    two_ports: tuple[int, int], late_once_probed: Callable[[], float]
) -> None:
    with cluster(1, 0) as (third,):
        ports = (*two_ports, int(third.address.rpartition(":")[2]))
        errors = rendezvous_of(ports, [0, 1], 1000.0, clock=late_once_probed)
    assert errors[0] == errors[1]
    assert f"worker 0 has waited 1000 s for worker 2 (127.0.0.1:{ports[2]}). Start the program there" in errors[0]


def test_a_worker_that_comes_and_cannot_be_reached_at_its_address_is_named(
    two_ports: tuple[int, int], late_once_probed: Callable[[], float]
) -> None:
    addresses = f"127.0.0.1:{two_ports[0]}", f"192.0.2.1:{two_ports[1]}"  # the second is nobody's (RFC 5737)
    clusters = [Cluster("TF_CONFIG", worker=addresses, task_type="worker", task_index=index) for index in (0, 1)]
    errors = rendezvous_of((), [], 1000.0, *clusters, clock=late_once_probed)
    assert errors[0] == errors[1]
    assert f"for worker 1 (192.0.2.1:{two_ports[1]}: it has connected, but cannot be reached there: " in errors[0]


def test_a_port_that_another_process_has_opened_meanwhile_is_an_error(two_ports: tuple[int, int]) -> None:
    with socket.create_server(("", two_ports[0])):
        errors = rendezvous_of(two_ports, [0], 1.0)
    assert f"gives worker 0 the address 127.0.0.1:{two_ports[0]}, but its port cannot be opened here" in errors[0]


def rendezvous_of(
    ports: tuple[int, ...],
    indices: list[int],
    wait_seconds: float,
    *others: Cluster,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, str]:
    """Have some workers of a cluster wait for each other, the first one by a clock of its own; return their errors."""
    errors: dict[int, str] = {}

    def come(worker: Cluster) -> None:
        try:
            rendezvous.wait_for_workers(worker, wait_seconds, clock=time.monotonic if worker.task_index else clock)
        except kde.ClusterError as error:
            errors[worker.task_index] = str(error)

    workers = [*(cluster_on(*ports, index=index) for index in indices), *others]
    threads = [threading.Thread(target=come, args=(worker,), daemon=True) for worker in workers]
    for thread in reversed(threads):  # the others find the first one's port closed at first
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(timeout=60)
    assert not [thread for thread in threads if thread.is_alive()]
    return errors


def test_workers_find_each_other_and_the_port_is_free_again(two_ports: tuple[int, int]) -> None:
    assert rendezvous_of(two_ports, [0, 1], 50.0) == {}
    socket.create_server(("", two_ports[0])).close()


def test_workers_of_different_clusters_are_refused(two_ports: tuple[int, int]) -> None:
    other = Cluster(
        "TF_CONFIG",
        worker=(f"127.0.0.1:{two_ports[0]}", f"localhost:{two_ports[1]}"),
        task_type="worker",
        task_index=1,
    )
    errors = rendezvous_of(two_ports, [0], 50.0, other)
    assert errors[0] == errors[1]
    assert "worker 1 has connected to worker 0, but with another cluster. TF_CONFIG must be the same" in errors[0]


def test_programs_without_a_rendezvous_are_not_in_the_way(two_ports: tuple[int, int]) -> None:
    with socket.create_server(("127.0.0.1", two_ports[0])) as server:  # TensorFlow's, on worker 0

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00")  # SETTINGS of HTTP/2
                time.sleep(0.2)

        thread = threading.Thread(target=serve)
        thread.start()
        assert rendezvous_of(two_ports, [1], 50.0) == {}
        thread.join()

    def connect() -> None:  # TensorFlow's client, on worker 1
        found: list[socket.socket] = []

        def is_there() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                found.append(socket.create_connection(("127.0.0.1", two_ports[0])))
            return bool(found)

        wait_until(is_there)
        with found[0] as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(100):
                pass

    client = threading.Thread(target=connect)
    client.start()
    assert rendezvous_of(two_ports, [0], 50.0) == {}
    client.join()


# A disk that fills up


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of its own with 80 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"this user may not mount a small disk: {made.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=60)


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_saves_and_records_and_nothing_else(mirrored: Any, small_disk: pathlib.Path) -> None:
    reference = fit(make(mirrored), (X, Y), epochs=6)
    callbacks = [
        kde.Resume(small_disk / "saves", save_every=4, keep=20),
        kde.ReplicaMonitor(small_disk / "logs", update_freq=1, flush_seconds=0),
        keras.callbacks.LambdaCallback(on_train_batch_begin=wait_for_saves),  # one that is due then is left out
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(make(mirrored), (X, Y), *callbacks, epochs=6)
    said = [str(warning.message) for warning in caught]
    assert_same(reference, found)
    assert found["epochs"] == list(range(6))
    assert any("saves could not be written to: OSError: [Errno 28] No space left on device" in text for text in said)
    assert any("EventWriter failed: OSError: [Errno 28] No space left on device" in text for text in said)
    assert any("EventWriter dropped" in text for text in said)
    newest = CheckpointStore(small_disk / "saves", 20).newest()  # whole, without a warning
    assert newest is not None
    assert unpack(newest)[0]["position"]["num_run_batches"] >= 4
    assert not list((small_disk / "saves").glob("*.tmp"))


# Real workers


@pytest.mark.slow
@on_two_workers(runs.refused)
def test_workers_that_begin_other_runs_are_refused_alike_and_may_go_on(values: Any) -> None:
    first, second = values
    expected = {
        "optimizer": "optimizer is SGD on worker 1, and Adam on worker 0",
        "momentum": "momentum of optimizer is 0.9 on worker 1, and 0.5 on worker 0",
        "epochs": "epochs is 2 on worker 1, and 1 on worker 0",
        "callbacks": "callback of all workers 1 (of 0 and 1) is none on worker 1, and NonFinite(raise, 10) on worker 0",
        "length": "number of batches is 7 on worker 1, and 8 on worker 0",
        "parts of a batch": "part of a batch 3 (of 3 and 2) is 2: float32 (None,) on worker 1, and none on worker 0",
        "nothing": "",
    }
    for name, text in expected.items():
        assert text in first[name]
        assert bool(text) == bool(first[name])
        assert first[name] == second[name]


DIFFERENT_WAYS = [
    ("another length, not known before", "wait for each other in different places, a deadlock: worker 0 in"),
    (
        "one evaluates alone",
        "is in another collective. Every worker must make the same calls of fit, evaluate and predict",
    ),
    ("one predicts alone", "waits for a worker that never comes: worker 1 has ended. Every worker must"),
    ("one builds alone", "in the creation of a variable (failure_runs.py:"),
    ("one does not train", "Worker 0 is about to call fit, and worker 1 did not arrive within 20 s"),
    ("the loss of one fails", "worker 1 has left its run with ArithmeticError (failure_runs.py:"),
]


@pytest.mark.multiworker
@pytest.mark.parametrize(("case", "message"), rotating(DIFFERENT_WAYS, [], slow=DIFFERENT_WAYS[1:3]))
def test_workers_that_go_different_ways_are_told_so(case: str, message: str, tmp_path: pathlib.Path) -> None:
    values = launch(2, runs.parted, args=(case, str(tmp_path)), time_limit=150).values
    assert message in values[0]
    if case not in ("one does not train", "one predicts alone"):
        assert values[1]


@pytest.mark.rotating
@pytest.mark.multiworker
def test_a_worker_that_never_starts_is_named_in_time_and_one_that_is_late_is_waited_for(
    tmp_path: pathlib.Path,
) -> None:
    assert launch(2, runs.late, args=(4.0, 60.0), timeout=100).values == ("", "")
    first, second = launch(2, runs.late, args=(str(tmp_path / "gone"), 1.0), timeout=100).values
    assert "worker 0 has waited 1 s for worker 1 (127.0.0.1:" in first
    assert "worker 1 has waited 1 s for worker 0 (127.0.0.1:" in second


@pytest.mark.multiworker
@pytest.mark.parametrize("lost", rotating([0, 1], [], slow=[1]))
def test_a_worker_that_is_lost_after_all_were_found_is_not_waited_for_without_end(lost: int) -> None:
    fields = tf_context.coordination_config_pb2.CoordinationServiceConfig.DESCRIPTOR.fields_by_name
    if lost == 1 and "cluster_register_with_barrier" not in fields:
        pytest.skip("in this TensorFlow the first worker waits an hour for what the others tell of their devices")
    values = launch(2, runs.lost_before_it_joins, args=(lost, 15.0), time_limit=150).values
    assert "it has found the others, and leaves" in values[lost]
    assert f"worker {1 - lost} and the others had found each other, but not all joined within 15 s" in values[1 - lost]
