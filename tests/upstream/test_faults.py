"""Show each fault of stock Keras that README numbers, so that we notice when upstream mends it, and ours right.

Where stock Keras and ours train the same, the fault is a row as those of the conformance table: one device is right.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from conformance import feeds, models
from conformance.feeds import arrays, batches
from conformance.rows import binary, mse
from conformance.run import Outcome, Row, differences, fit_only, fit_with_batch_logs, run, run_on_one_device
from conformance.workers import faults_of_parameter_servers, faults_of_several_workers
from keras import layers, losses, metrics
from keras.optimizers import SGD, Adam
from versions import KERAS_VERSION

import keras_dist_ext as kde
from keras_dist_ext.cluster.launch import WorkerFailed
from keras_dist_ext.data.iterators import release_iterator

Strategy = tf.distribute.Strategy
InvalidArgument = tf.errors.InvalidArgumentError

# Faults at which stock Keras dies: its error, and words of it.
DIES = {
    "3, 15 rows for 2 replicas": (
        Row("3", models.dense, mse, arrays(num_rows=15, batch=16)),
        InvalidArgument,
        "AddN must have the same size and shape",
    ),
    "3, one row": (Row("3", models.dense, mse, arrays(num_rows=1)), InvalidArgument, "same size and shape"),
    "3, strings and bools": (
        Row("3", models.words_and_flags, mse, batches(8, 8, make=feeds.words_and_flags)),
        InvalidArgument,
        "AddN",
    ),
    "5, steps_per_execution": (
        Row("5", models.dense, lambda: mse(steps_per_execution=2), arrays()),
        InvalidArgument,
        "You must feed a value for placeholder",
    ),
    "6, gradient accumulation": (
        Row("6", models.dense, lambda: mse(SGD(0.05, gradient_accumulation_steps=2)), arrays()),
        RuntimeError,
        "called while defining a new graph",
    ),
    "6, EMA that overwrites": (
        Row("6", models.dense, lambda: mse(SGD(0.05, use_ema=True, ema_overwrite_frequency=2)), arrays()),
        RuntimeError,
        "called while defining a new graph",
    ),
    "7, jit_compile": (
        Row("7", models.dense, lambda: mse(jit_compile=True), arrays(), warns=".*jit_compile"),
        InvalidArgument,
        "located in device .*CPU:1 from device .*CPU:0",
    ),
}

if KERAS_VERSION >= (3, 16):  # which gives what one device gives
    del DIES["6, EMA that overwrites"]


@pytest.mark.parametrize("fault", rotating(DIES, ["3, 15 rows for 2 replicas"]))
def test_stock_dies_and_ours_gives_what_one_device_gives(fault: str, mirrored: Strategy) -> None:
    row, error, words = DIES[fault]
    with pytest.raises(error, match=words):
        run(row, keras, mirrored)
    assert differences(run_on_one_device(row), run(row, kde, mirrored), row.tolerance) == []


class RowsSeen(metrics.Metric):
    """Counts the rows that the model was given."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.rows = self.add_variable(shape=(), initializer="zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

    def result(self) -> Any:
        return self.rows + 0.0


def last_loss(outcome: Outcome) -> float:
    return float(outcome["history"]["loss"][-1])


def weights(outcome: Outcome) -> np.ndarray:
    return np.concatenate([np.ravel(weight) for weight in outcome["weights"].values()])


def farthest(one: Outcome, other: Outcome) -> float:
    """Return the largest difference between weights."""
    return float(np.abs(weights(one) - weights(other)).max())


# Faults that stock Keras does not notice: how far from one device it ends.
DIFFERS: dict[str, tuple[Row, Callable[[Outcome, Outcome], float], float]] = {
    "4, a generator's first batch is lost": (
        Row(
            "4",
            models.dense,
            lambda: mse(metrics=[RowsSeen()]),
            feeds.generator(8, 8, 8, 8),
            act=fit_only,
            on_one_device={"serve": batches(8, 8, 8, 8, epochs=1)},
        ),
        lambda one, stock: one["history"]["rows"][0] - stock["history"]["rows"][0],
        8.0,
    ),
    "4, a pipeline starts twice": (
        Row("4", models.dense, mse, feeds.counted_starts(), act=fit_only),
        lambda one, stock: stock["starts"] - one["starts"],
        1.0,
    ),
    "8, a partial last batch": (Row("8", models.dense, mse, arrays(num_rows=9)), farthest, 1e-3),
    "9, masks": (Row("9", models.masked_steps, mse, arrays(feeds.padded_steps, num_rows=48)), farthest, 1e-3),
    "9, mean_with_sample_weight": (
        Row(
            "9",
            models.dense,
            lambda: mse(loss=losses.MeanSquaredError(reduction="mean_with_sample_weight")),
            arrays(num_rows=48, weights=feeds.row_weights),
        ),
        farthest,
        1e-3,
    ),
    "14, AUC of a batch": (
        Row(
            "14",
            models.binary_classifier,
            lambda: binary(metrics.AUC(20, name="auc")),
            arrays(feeds.binary_labels, num_rows=48, epochs=1),
            act=fit_with_batch_logs,
        ),
        lambda one, stock: max(
            abs(a["auc"] - b["auc"]) for a, b in zip(one["train logs"], stock["train logs"], strict=True)
        ),
        1e-3,
    ),
}


def outcomes_of_stock() -> dict[str, Outcome]:
    """What stock Keras comes to on two replicas."""
    from strategies import strategies

    return {fault: run(row, keras, strategies.get("mirrored2")) for fault, (row, _, _) in DIFFERS.items()}


@pytest.fixture(scope="module")
def of_stock() -> dict[str, Outcome]:
    """Run stock Keras in a process of its own: its iterators crash TensorFlow once in a while, on busy machines."""
    for _ in range(3):
        try:
            (outcomes,) = kde.launch(1, outcomes_of_stock, time_limit=200, quiet=True).values
        except WorkerFailed as failure:
            if failure.signal_name is None:
                raise
            continue
        return outcomes
    raise AssertionError("stock Keras crashed three times")


@pytest.mark.parametrize("fault", DIFFERS)
@pytest.mark.slow
def test_stock_is_off_and_ours_gives_what_one_device_gives(
    fault: str, mirrored: Strategy, of_stock: dict[str, Outcome]
) -> None:
    row, distance, at_least = DIFFERS[fault]
    expected = run_on_one_device(row)
    assert distance(expected, of_stock[fault]) >= at_least
    assert differences(expected, run(row, kde, mirrored), row.tolerance) == []


@pytest.mark.multiworker
@pytest.mark.slow
def test_several_workers_train_where_stock_dies_in_fit_and_behind_it() -> None:
    """Show faults 1 and 2."""
    first, second = kde.launch(2, faults_of_several_workers, time_limit=180, quiet=True).values
    assert "PerReplica" in first["1"]
    assert "Invalid reduction dimension 0" in first["2"]

    keras.utils.set_random_seed(1)
    one = models.dense(keras)
    one.compile(SGD(0.05), "mse")
    x, y = feeds.regression(45, 1)
    one.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for worker in (first, second):
        assert differences(one.get_weights(), worker["weights"], 1e-5) == []
        assert differences(one.evaluate(x, y, verbose=0), worker["loss"], 1e-5) == []
        assert differences(one.predict(x, verbose=0), worker["predictions"], 1e-5) == []


@pytest.mark.slow
@pytest.mark.multiworker
def test_parameter_servers_train_where_stock_dies() -> None:
    """Show fault 17."""
    (found,) = kde.launch(2, faults_of_parameter_servers, num_ps=1, time_limit=180, quiet=True).values
    assert "create_per_worker_dataset" in found["17"]
    assert found["losses"][-1] < 0.7 * found["losses"][0]


def starved_batch_norm(library: models.Library, strategy: Strategy) -> keras.Model:
    """Train on 49 rows in batches of 16: the last row leaves one of 2 replicas without any."""
    with strategy.scope():
        model = models.batch_norm_first(library)
        model.compile(SGD(0.05), "mse")
    x, y = feeds.regression(49, 1)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return model


@pytest.mark.slow
def test_batch_normalization_survives_an_empty_replica(mirrored: Strategy) -> None:
    """Show fault 10."""
    assert any(np.isnan(weight).any() for weight in starved_batch_norm(keras, mirrored).get_weights())
    assert all(np.isfinite(weight).all() for weight in starved_batch_norm(kde, mirrored).get_weights())


def drifted(library: models.Library, strategy: Strategy) -> tuple[list[np.ndarray], np.ndarray]:
    """Train replicas on rows of other sizes; return each one's moving mean, and predictions of 8 equal rows."""
    with strategy.scope():
        model = models.batch_norm_first(library)
        model.compile(SGD(0.0), "mse")
    x, y = feeds.regression(48, 1)
    x[np.arange(48) % 16 >= 8] += 10.0
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, epochs=3)
    moving_mean = model.layers[0].moving_mean
    means = [copy.numpy() for copy in strategy.experimental_local_results(moving_mean.value)]
    return means, model.predict(np.ones((8, 5), "float32"), verbose=0)


@pytest.mark.slow
def test_moving_statistics_are_the_same_on_all_replicas(mirrored: Strategy) -> None:
    """Show fault 11."""
    means, predictions = drifted(keras, mirrored)
    assert np.abs(means[0] - means[1]).min() > 1
    assert np.abs(predictions[0] - predictions[-1]).max() > 0.1

    means, predictions = drifted(kde, mirrored)
    assert all(np.array_equal(means[0], copy) for copy in means)
    assert np.ptp(predictions, axis=0).max() < 1e-6


class AlwaysDrops(layers.Layer):
    """Drops half of the units, in predict too, so that they can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def call(self, x: Any) -> Any:
        return self.dropout(x, training=True)


def dropped(library: models.Library, strategy: Strategy) -> np.ndarray:
    with strategy.scope():
        model = library.Sequential([layers.Input((200,)), AlwaysDrops()])
    return model.predict(np.ones((4, 200), "float32"), batch_size=4, verbose=0) > 0


def test_replicas_drop_different_units(mirrored: Strategy) -> None:
    """Show fault 12."""
    stock, ours = dropped(keras, mirrored), dropped(kde, mirrored)
    assert np.array_equal(stock[:2], stock[2:])
    # 2 replicas of 2 rows: equal in half of the units by chance, give or take 5 standard deviations of 1/40.
    assert abs(np.mean(ours[:2] == ours[2:]) - 0.5) < 0.125


def test_a_batch_is_split_over_the_replicas(mirrored: Strategy) -> None:
    """Show fault 13."""
    x, y = feeds.regression(16, 1)
    seen = {}
    for library in (keras, kde):
        with mirrored.scope():
            model = models.dense(library)
            model.compile(SGD(0.05), "mse", metrics=[RowsSeen()])
        trained = []
        for _ in range(2):
            model.reset_metrics()  # which Keras does by itself since 3.15
            trained.append(model.train_on_batch(x, y, return_dict=True)["rows"])
        seen[library] = [*trained, len(model.predict_on_batch(x))]
    assert seen[keras][-1] == 32
    assert seen[kde] == [16, 16, 16]


def test_a_model_made_outside_of_the_scope_is_refused(mirrored: Strategy) -> None:
    """Show fault 15, silent: a stock model trains on one device though a strategy was meant."""
    x, y = feeds.regression(16, 1)
    model = models.dense(keras)
    model.compile(SGD(0.05), "mse")
    model.fit(x, y, verbose=0)
    assert model.distribute_strategy.num_replicas_in_sync == 1
    with pytest.raises(kde.ScopeError, match=r"outside MirroredStrategy.*with strategy\.scope\(\)"):
        model.fit(x, y, verbose=0, callbacks=[kde.ScopeGuard(mirrored)])


@pytest.mark.parametrize(
    ("optimizer", "error", "words"),
    [
        (Adam, ValueError, "`colocate_vars_with` must only be passed a variable"),
        (SGD, AssertionError, "^$"),
    ],
)
def test_a_layer_made_outside_of_the_scope_is_named(
    mirrored: Strategy, optimizer: type[keras.Optimizer], error: type[Exception], words: str
) -> None:
    """Show fault 15, obscure."""
    x, y = feeds.regression(16, 1)

    def half_outside(library: models.Library) -> keras.Model:
        backbone = layers.Dense(6, name="backbone")
        backbone.build((None, 5))
        with mirrored.scope():
            model = library.Sequential([layers.Input((5,)), backbone, layers.Dense(3)])
            model.compile(optimizer(0.01), "mse")
        return model

    with pytest.raises(error, match=words):
        half_outside(keras).fit(x, y, verbose=0)
    with pytest.raises(kde.ScopeError, match=r"backbone/kernel.*with strategy\.scope\(\)"):
        half_outside(kde).fit(x, y, verbose=0)


def test_a_loaded_model_lives_under_the_strategy_given(mirrored: Strategy, tmp_path: Path) -> None:
    """Show fault 15, silent: `load_model` and `clone_model` outside of the scope give one replica."""
    path = tmp_path / "model.keras"
    models.dense(keras).save(path)
    assert keras.saving.load_model(path).distribute_strategy.num_replicas_in_sync == 1

    with mirrored.scope():
        stock, ours = models.dense(keras), models.dense(kde)
    assert keras.models.clone_model(stock).distribute_strategy.num_replicas_in_sync == 1
    ours.save(path)
    assert kde.load_model(path, strategy=mirrored).distribute_strategy is mirrored
    with mirrored.scope():
        assert kde.clone_model(ours).distribute_strategy is mirrored


@pytest.mark.slow
def test_an_optimizer_made_outside_of_the_scope_is_refused(mirrored: Strategy) -> None:
    """Show fault 16: SGD works, Adam dies."""
    x, y = feeds.regression(16, 1)

    def with_optimizer(library: models.Library, optimizer: keras.Optimizer) -> keras.Model:
        with mirrored.scope():
            model = models.dense(library)
            model.compile(optimizer, "mse")
        return model

    with_optimizer(keras, SGD(0.01)).fit(x, y, verbose=0)
    with pytest.raises(RuntimeError, match=r"Mixing different tf\.distribute\.Strategy objects"):
        with_optimizer(keras, Adam(0.01)).fit(x, y, verbose=0)
    for optimizer in (SGD(0.01), Adam(0.01)):
        with pytest.raises(kde.ScopeError, match=r"optimizer.*with strategy\.scope\(\)"):
            with_optimizer(kde, optimizer).fit(x, y, verbose=0)


def test_iterations_count_steps_of_data_of_unknown_length(mirrored: Strategy) -> None:
    """Show fault 18: before Keras 3.16, stock Keras counts one too many an epoch, on one device already."""
    data = feeds.forgetting_length(tf.data.Dataset.from_tensor_slices(feeds.regression(40, 1)).batch(8))

    def iterations(model: keras.Model) -> int:
        model.fit(data, epochs=2, verbose=0)
        return int(model.optimizer.iterations.numpy())

    def compiled(library: models.Library) -> keras.Model:
        model = models.dense(library)
        model.compile(SGD(0.01), "mse")
        return model

    assert iterations(compiled(keras)) == 10 + 2 * (KERAS_VERSION < (3, 16))
    assert iterations(compiled(kde)) == 10
    with mirrored.scope():
        ours = compiled(kde)
    assert iterations(ours) == 10


@pytest.mark.slow
def test_nobody_waits_for_what_tunes_the_data(mirrored: Strategy) -> None:
    """Show fault 19: TensorFlow does, here until 0.63 s after the first batch."""
    data = mirrored.experimental_distribute_dataset(tf.data.Dataset.from_tensors(feeds.regression(8, 1)).repeat())

    other = iter(data)

    def used() -> list[Any]:
        iterator = iter(data)
        began = time.perf_counter()
        while time.perf_counter() < began + 0.35:  # until the thread that tunes it sleeps for long
            next(iterator)
        return [iterator]

    def num_batches_meanwhile() -> int:
        release_iterator(used())
        dropping = [thread for thread in threading.enumerate() if thread.name == "dropped iterator"]
        num_batches = 0
        while any(thread.is_alive() for thread in dropping):
            next(other)
            num_batches += 1
        return num_batches

    # Two times in three it takes as long as hundreds of batches; else the thread has ended already.
    assert any(num_batches_meanwhile() > 20 for _ in range(60))


def test_what_takes_long_to_drop_is_dropped_while_others_go_on() -> None:
    class Held(list[Any]):
        def clear(self) -> None:
            allowed.wait(60)
            super().clear()
            dropped.set()

    allowed, dropped = threading.Event(), threading.Event()
    held = Held(["an iterator"])
    release_iterator(held)
    assert held == ["an iterator"]
    allowed.set()
    assert dropped.wait(60)
    assert held == []
