"""A monitor shows what Keras logs, replica by replica, at the optimizer's steps, and never gets in the way."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from made_up_clock import MadeUpClock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import keras_dist_ext as kde
from keras_dist_ext._keras.optimizers import num_batches_used
from keras_dist_ext._keras.variables import components
from keras_dist_ext.monitoring.dashboard import metadata as names
from keras_dist_ext.monitoring.intervals import Intervals
from keras_dist_ext.step.stats import ReplicaStats

X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) + 1).astype("float32")
BATCHES = 7  # of 8 rows, the last of 2


class OwnStep(kde.Model):
    """A train_step of its own, with optimizers of its own."""

    def __init__(self, *, num_updates: int = 1) -> None:
        super().__init__()
        self.head = keras.layers.Dense(1)
        self.num_updates = num_updates
        self.own = [keras.optimizers.SGD(0.01)]  # in a list, where nobody looks

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        optimizer = self.own[0] if self.num_updates == 0 else self.optimizer
        for _ in range(max(1, self.num_updates)):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def build(strategy: Any, optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.01), **compiled: Any) -> Any:
    with strategy.scope():
        model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse", **compiled)
    return model


def fit(model: Any, monitor: Any, **given: Any) -> Any:
    arguments = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False, "callbacks": [monitor], **given}
    return model.fit(X, Y, **arguments)


def remembered(**given: Any) -> tuple[kde.ReplicaMonitor, kde.MemoryWriter]:
    memory = kde.MemoryWriter()
    return kde.ReplicaMonitor(writers=[memory], **given), memory


def mean_loss(intervals: list[ReplicaStats]) -> float:
    """The mean over intervals and replicas weighted by examples."""
    counts = np.concatenate([stats.examples for stats in intervals])
    losses = np.concatenate([stats.loss for stats in intervals])
    return float((losses[counts > 0] * counts[counts > 0]).sum() / counts.sum())


def scalars(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


# What it shows is what Keras logs

WAYS: dict[str, dict[str, Any]] = {
    "one step an execution": {"steps_per_execution": 1},
    "five steps an execution": {"steps_per_execution": 5},
    "as many as fit": {"steps_per_execution": "auto"},
    "eagerly": {"run_eagerly": True},
}


@pytest.mark.parametrize("way", rotating(WAYS, ["as many as fit"]))
def test_losses_of_replicas_are_those_of_history_whatever_runs_a_step(way: str, mirrored: Any) -> None:
    model = build(mirrored, **WAYS[way])
    monitor, memory = remembered(update_freq=3)
    history = fit(model, monitor, validation_data=(X[:9], Y[:9])).history
    assert [stats.step for stats in memory.train] == [3, 6, 7, 9, 12, 14]  # ends of epochs are ends of intervals
    assert [stats.num_steps for stats in memory.train] == [3, 3, 1, 2, 3, 2]
    assert [stats.examples.tolist() for stats in memory.train[:3]] == [[12, 12], [12, 12], [1, 1]]
    for epoch in (0, 1):
        assert mean_loss(memory.train[3 * epoch : 3 * epoch + 3]) == pytest.approx(history["loss"][epoch], rel=1e-5)
        assert memory.test[epoch].mean_loss == pytest.approx(history["val_loss"][epoch], rel=1e-5)
    assert [stats.step for stats in memory.test] == [7, 14]
    assert [stats.examples.tolist() for stats in memory.test] == [[4, 5]] * 2
    assert not np.array_equal(memory.train[0].loss[0], memory.train[0].loss[1])
    assert memory.runs["train"].manifest["batch_size"] == 8


def test_compiled_by_xla_it_shows_the_same(strategies: Any) -> None:
    model = build(strategies.get("default"), jit_compile=True)
    monitor, memory = remembered(update_freq="epoch")
    history = fit(model, monitor).history
    assert [stats.mean_loss for stats in memory.train] == pytest.approx(history["loss"], rel=1e-5)
    assert [stats.step for stats in memory.train] == [7, 14]


def test_a_replica_without_examples_has_none_and_no_loss(strategies: Any) -> None:
    model = build(strategies.get("mirrored4"))
    monitor, memory = remembered(update_freq="epoch", gradient_norm=True)
    history = fit(model, monitor, batch_size=49, epochs=1).history  # the second batch has one row
    (stats,) = memory.train
    assert stats.examples.tolist() == [12, 12, 12, 14]
    assert stats.mean_loss == pytest.approx(history["loss"][0], rel=1e-5)
    monitor, memory = remembered(update_freq=1, gradient_norm=True)
    fit(model, monitor, batch_size=49, epochs=1)
    starved = memory.train[1]
    assert starved.examples.tolist() == [0, 0, 0, 1]
    assert starved.gradient_norm is not None
    for values in (starved.loss, starved.gradient_norm):
        assert np.isfinite(values).tolist() == [False, False, False, True]


@pytest.mark.slow
def test_steps_are_updates_where_gradients_accumulate(mirrored: Any) -> None:
    model = build(mirrored, lambda: keras.optimizers.SGD(0.01, gradient_accumulation_steps=3))
    monitor, memory = remembered(update_freq=1)
    history = fit(model, monitor, epochs=3).history
    # 7, 14 and 21 batches, 3 of which make a step; an epoch may end in the middle of one
    assert [stats.num_steps for stats in memory.train] == [3, 3, 1, 2, 3, 2, 1, 3, 3]
    assert [stats.step for stats in memory.train] == [1, 2, 2, 3, 4, 4, 5, 6, 7]
    assert mean_loss(memory.train[:3]) == pytest.approx(history["loss"][0], rel=1e-5)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 7


@pytest.mark.rotating
def test_an_automatic_interval_is_neither_a_step_nor_the_whole_run(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(mirrored)
    monitor, memory = remembered()
    executions: list[int] = []
    on_train_batch_end = kde.ReplicaMonitor.on_train_batch_end

    def counting(self: Any, batch: int, logs: Any = None) -> None:
        executions.append(batch)
        on_train_batch_end(self, batch, logs)

    monkeypatch.setattr(kde.ReplicaMonitor, "on_train_batch_end", counting)
    model.fit(X, Y, batch_size=2, epochs=40, verbose=0, callbacks=[monitor])
    assert sum(stats.num_steps for stats in memory.train) == 1000
    assert memory.train[-1].step == 1000
    assert memory.train[0].step == 1  # something to see at once
    assert 3 <= len(memory.train) < 100
    assert len(executions) < 500  # steps_per_execution="auto" goes on to make many steps at once


@pytest.mark.parametrize(
    ("cost_seconds", "fitting", "least"),
    [(4e-3, 400, 400), (0.0, 100, 0), (1e-4, 100, 10)],  # of steps of 10 ms; what ends costs 0.1%
)
def test_automatic_intervals_are_as_long_as_their_end_costs(cost_seconds: float, fitting: int, least: int) -> None:
    intervals = Intervals()
    for _ in range(5):  # each has at most 8 times as many batches as the one before
        intervals.set_lengths(*intervals.lengths(1e-2, cost_seconds))
    assert intervals.lengths(1e-2, cost_seconds) == (fitting, least)
    assert intervals.is_worthwhile(least)
    assert not intervals.is_worthwhile(least - 1)


# Steps continue


@pytest.mark.slow
def test_steps_continue_over_calls_and_after_a_resume(mirrored: Any, tmp_path: pathlib.Path) -> None:
    model = build(mirrored)
    monitor, memory = remembered(update_freq=np.int64(5))
    fit(model, monitor, epochs=1)
    fit(model, monitor, epochs=1)
    assert [stats.step for stats in memory.train] == [5, 7, 10, 14]
    model.evaluate(X, Y, verbose=0, callbacks=[monitor])
    assert [stats.step for stats in memory.test] == [14]
    model.save(tmp_path / "model.keras")
    with mirrored.scope():
        loaded = kde.load_model(tmp_path / "model.keras")
    again, resumed = remembered(update_freq=5)
    fit(loaded, again, epochs=1)
    assert [stats.step for stats in resumed.train] == [15, 20, 21]
    assert resumed.runs["train"].step == 14


@pytest.mark.rotating
def test_steps_continue_from_a_backup_that_another_callback_restores(mirrored: Any, tmp_path: pathlib.Path) -> None:
    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise RuntimeError("interrupted")

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    monitor, memory = remembered(update_freq=5)
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(build(mirrored), monitor, callbacks=[monitor, backup(), Fail()])
    again, resumed = remembered(update_freq=5)
    fit(build(mirrored), again, callbacks=[again, backup()])
    assert [stats.step for stats in memory.train + resumed.train] == [5, 7, 10, 14]


@pytest.mark.parametrize(
    ("num_updates", "steps"), rotating([(0, [7, 14]), (1, [7, 14]), (2, [14, 28])], [(2, [14, 28])])
)
def test_a_custom_train_step_may_update_as_it_likes(num_updates: int, steps: list[int], mirrored: Any) -> None:
    with mirrored.scope():
        model = OwnStep(num_updates=num_updates)
        model(X)
        for optimizer in model.own:
            optimizer.build(model.trainable_variables)
        model.compile("sgd", "mse")
    monitor, memory = remembered(update_freq="epoch")
    for _ in range(2):
        fit(model, monitor, epochs=1)
    assert [stats.step for stats in memory.train] == steps


def test_updates_that_are_left_out_are_not_counted(mirrored: Any) -> None:
    def optimizer() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**127)

    model = build(mirrored, optimizer)  # the scale falls by half until gradients are finite
    monitor, memory = remembered(update_freq="epoch")
    fit(model, monitor)
    updates = num_batches_used(model.optimizer)
    assert 0 < updates < 14
    assert memory.train[-1].step == updates


@pytest.mark.rotating
def test_other_runs_in_the_middle_of_training_are_neither_shown_nor_disturb(mirrored: Any) -> None:
    class Looks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.predict(X, verbose=0)
            self.model.evaluate(X, Y, verbose=0)
            self.model.evaluate(X[:5], Y[:5], verbose=0, callbacks=[monitor])

    model = build(mirrored)
    monitor, memory = remembered(update_freq="epoch")
    fit(model, monitor, callbacks=[Looks(), monitor], validation_data=(X[:9], Y[:9]))
    assert [(stats.step, stats.examples.sum()) for stats in memory.train] == [(7, 50), (14, 50)]
    assert [(stats.step, stats.examples.sum()) for stats in memory.test] == [(7, 9), (7, 5), (14, 9), (14, 5)]
    assert model.replica_runtime.recorders == ()


@pytest.mark.rotating
def test_runs_with_and_without_a_monitor_are_traced_once_each(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    program = kde.Model._program

    def counting(self: Any, kind: str) -> Any:
        made.append(kind)
        return program(self, kind)

    monkeypatch.setattr(kde.Model, "_program", counting)
    model = build(mirrored)
    monitor, memory = remembered()
    for _ in range(2):
        fit(model, monitor, epochs=1)
        fit(model, keras.callbacks.Callback(), epochs=1)
        model.train_on_batch(X, Y)
    assert made == ["train", "train"]
    assert memory.train[-1].step == 22  # after two runs of 7 batches, and one batch


# Files


def test_with_only_a_directory_tensorboard_has_a_run_per_replica_and_one_for_all(
    mirrored: Any, tmp_path: pathlib.Path
) -> None:
    model = build(mirrored, metrics=["mae"])
    monitor = kde.ReplicaMonitor(tmp_path, experiment="a/b", update_freq=5)
    seeds = kde.ReplicaSeeds(7)
    history = fit(model, monitor, validation_data=(X[:9], Y[:9]), callbacks=[monitor, seeds]).history
    for name in ("replica_0", "replica_1", "all", "validation/replica_0", "validation/replica_1", "validation/all"):
        assert len(list((tmp_path / "a" / "b" / name).glob("*tfevents*"))) == 1, name
    held = [scalars(tmp_path / "a" / "b" / f"replica_{i}") for i in (0, 1)]
    assert set(held[0]) == {*names.REPLICA_TAGS} - {names.GRADIENT_NORM}
    assert [step for step, _ in held[0][names.LOSS]] == [5, 7, 10, 14]
    both = np.array([[value for _, value in of[names.LOSS]] for of in held])
    counts = np.array([[value for _, value in of[names.EXAMPLES]] for of in held])
    for epoch, part in enumerate([slice(0, 2), slice(2, 4)]):
        mean = (both[:, part] * counts[:, part]).sum() / counts[:, part].sum()
        assert mean == pytest.approx(history["loss"][epoch], rel=1e-5)
    validation = scalars(tmp_path / "a" / "b" / "validation" / "all")
    assert [value for _, value in validation[names.ALL_LOSS]] == pytest.approx(history["val_loss"], rel=1e-5)
    assert [step for step, _ in validation[names.ALL_LOSS]] == [7, 14]


def test_the_manifest_has_strategy_devices_and_reason(mirrored: Any) -> None:
    choice = kde.pick_strategy("mirrored", devices=["CPU:0", "CPU:1"], environ={})
    assert choice.strategy is mirrored
    model = build(mirrored, lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)))
    monitor, memory = remembered(experiment="night")
    fit(model, monitor, callbacks=[kde.ReplicaSeeds(7), monitor])
    manifest = memory.runs["train"].manifest
    assert manifest["strategy"] == {
        "name": "MirroredStrategy",
        "reason": "2 CPU devices, asked for by name",
        "num_replicas": 2,
        "num_workers": 1,
    }
    assert [device[-5:] for device in manifest["devices"]] == ["CPU:0", "CPU:1"]
    assert manifest["seeds"] == {"global": 7, "replicas": [7, 8]}
    assert manifest["versions"]["keras"] == keras.__version__
    assert manifest["batch_size"] == 8
    assert manifest["experiment"] == "night"
    details = memory.runs["train"].details
    assert details["optimizer"] == "Adam"
    assert details["learning rate"].startswith("ExponentialDecay")
    assert details["steps per execution"] == "auto"
    json.dumps([manifest, dict(details)])


@pytest.mark.rotating
def test_sixteen_replicas_are_monitored_and_seeded() -> None:
    code = """
import json
import numpy as np, keras
import keras_dist_ext as kde
with kde.pick_strategy("mirrored", num_replicas=16, environ={}).strategy.scope():
    model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(100, 4)).astype("float32")
memory = kde.MemoryWriter()
callbacks = [kde.ReplicaMonitor(writers=[memory], update_freq="epoch"), kde.ReplicaSeeds(1)]
history = model.fit(x, x[:, :1], batch_size=30, epochs=2, verbose=0, callbacks=callbacks).history
print(json.dumps([history["loss"], *[[s.examples.tolist(), s.loss.tolist()] for s in memory.train]]))
"""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    losses, *intervals = json.loads(ended.stdout)
    assert len(intervals) == len(losses) == 2
    for loss, (examples, of_replicas) in zip(losses, intervals, strict=True):
        assert len(examples) == 16
        assert sum(examples) == 100  # in batches of 30, 30, 30 and 10, which leaves some without any
        assert np.average(of_replicas, weights=examples) == pytest.approx(loss, rel=1e-6)


@pytest.mark.rotating
def test_a_killed_run_leaves_events_up_to_the_last_flush(tmp_path: pathlib.Path) -> None:
    code = f"""
import os, signal, time
import numpy as np, keras, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras_dist_ext as kde
strategy = kde.pick_strategy("mirrored", num_replicas=2, environ={{}}).strategy
with strategy.scope():
    model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=1)
class Kill(kde.RunCallback):
    supports_multi_step = True
    def on_train_batch_end(self, batch, logs=None):
        if batch == 30:
            time.sleep(0.3)  # so that the next record comes when it is time to flush
        if batch == 40:
            os.kill(os.getpid(), signal.SIGKILL)
x = np.ones((4000, 4), "float32")
monitor = kde.ReplicaMonitor({str(tmp_path)!r}, update_freq=1, flush_seconds=0.2)
model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[monitor, Kill()])
"""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=240)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    steps = [[step for step, _ in scalars(tmp_path / f"replica_{i}")[names.LOSS]] for i in (0, 1)]
    assert steps[0] == steps[1] == list(range(1, len(steps[0]) + 1))
    assert len(steps[0]) >= 30


def test_a_writer_that_fails_stops_neither_training_nor_the_others(mirrored: Any, tmp_path: pathlib.Path) -> None:
    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                file.unlink()
                file.symlink_to("/dev/full")

    file = tmp_path / "r.jsonl"
    memory = kde.MemoryWriter()
    monitor = kde.ReplicaMonitor(update_freq=3, writers=[kde.JsonLinesWriter(file, flush_seconds=0.0), memory])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit(build(mirrored), monitor, epochs=3, callbacks=[monitor, Break()])
    said = [str(warning.message) for warning in caught if "JsonLinesWriter" in str(warning.message)]
    assert len(said) == 2
    assert "No space left on device. 1 record dropped so far" in said[0]
    assert said[1] == "JsonLinesWriter dropped 6 records of this run in total."
    assert len(history.history["loss"]) == 3
    assert len(memory.train) == 9


def test_findings_of_a_run_without_a_step_are_written_too(mirrored: Any, tmp_path: pathlib.Path) -> None:
    model, monitor = build(mirrored, run_eagerly=True), kde.ReplicaMonitor(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(model, monitor, epochs=0, callbacks=[monitor, kde.ParallelismDoctor(show=False)])
    events = EventAccumulator(str(tmp_path / "all"))
    events.Reload()
    (event,) = events.Tensors(names.FINDINGS_TAG)
    assert b'"code": "eager"' in event.tensor_proto.string_val[0]


def test_an_interrupted_run_leaves_its_records(mirrored: Any, tmp_path: pathlib.Path) -> None:
    class Interrupt(kde.RunCallback):
        supports_multi_step = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 4:
                raise KeyboardInterrupt

    model = build(mirrored, steps_per_execution=1)
    monitor = kde.ReplicaMonitor(tmp_path, update_freq=3, flush_seconds=1000.0)
    with pytest.raises(KeyboardInterrupt):
        fit(model, monitor, callbacks=[monitor, Interrupt()])
    assert [step for step, _ in scalars(tmp_path / "replica_1")[names.LOSS]] == [3, 5]
    fit(model, monitor, epochs=1)
    assert [step for step, _ in scalars(tmp_path / "replica_1")[names.LOSS]] == [3, 5, 6, 9, 12]


# Findings


def test_the_first_variable_that_differs_is_named_with_its_step(mirrored: Any) -> None:
    class Change(kde.RunCallback):
        supports_multi_step = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                copies = components(self.model.layers[0].bias)
                copies[1].assign(copies[1] + 1.0)

    model = build(mirrored, steps_per_execution=1)
    monitor, memory = remembered(check_divergence_every=2)
    with pytest.warns(UserWarning, match=r"bias differs between replica 0 and replica 1 at step 8"):
        fit(model, monitor, callbacks=[monitor, Change()])
    (finding,) = [f for f in memory.findings if f["kind"] == "divergence"]
    assert finding["step"] == 8  # changed after the sixth step was checked
    assert "all were equal at step 6; up to 1 apart" in finding["evidence"]


@pytest.mark.rotating
def test_equal_replicas_give_no_finding(mirrored: Any) -> None:
    monitor, memory = remembered(check_divergence_every=1, straggler_threshold=0.0)
    fit(build(mirrored), monitor)
    assert memory.findings == []


def test_a_slow_replica_is_a_finding(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, num_calls = MadeUpClock(monkeypatch), itertools.count()

    class Slow(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            context = tf.distribute.get_replica_context()
            if context is None:  # when the model is built
                return x
            return tf.ensure_shape(
                tf.numpy_function(slowly, [x, context.replica_id_in_sync_group], tf.float32), x.shape
            )

    def slowly(value: Any, replica: int) -> Any:  # of a step's six times, two are when it began and had its batch
        num_steps, _ = divmod(next(num_calls), 2)
        clock.advance(0.25 + replica, after_reads=6 * num_steps + 2 + replica)
        return value

    with mirrored.scope():
        model = kde.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    monitor, memory = remembered(update_freq=7)
    fit(model, monitor, epochs=6)  # three windows of 10 steps or more
    (finding,) = memory.findings
    assert finding["code"] == "slow-replica"
    assert finding["what"].startswith("Replica 1 is slow: ")
    assert finding["seconds"] == 42 * (1.25 + 0.25 - 0.25)
    assert memory.scores[-1] is not None


# Invalid use is refused


def test_a_model_of_stock_keras_is_refused_with_the_alternatives(mirrored: Any, tmp_path: pathlib.Path) -> None:
    with mirrored.scope():
        stock = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        stock.compile("sgd", "mse")
    monitor = kde.ReplicaMonitor(tmp_path)
    message = "is a Sequential of stock Keras, whose steps ReplicaMonitor .* Derive it from kde.Model, .* by kde.adopt"
    with pytest.raises(kde.MonitorError, match=message):
        stock.fit(X, Y, batch_size=10, verbose=0, callbacks=[monitor])
    with pytest.raises(kde.MonitorError, match=message):
        stock.evaluate(X, Y, batch_size=10, verbose=0, callbacks=[monitor])
    adopted = kde.adopt(stock, mirrored)
    adopted.fit(X, Y, batch_size=10, verbose=0, callbacks=[monitor])
    assert scalars(tmp_path / "replica_0")[names.LOSS][-1][0] == 5


def test_a_directory_that_cannot_be_written_is_an_error_before_the_first_step(
    mirrored: Any, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("")
    model = build(mirrored)
    with pytest.raises(kde.MonitorError, match="TensorBoard's events cannot be written to .*file/logs"):
        fit(model, kde.ReplicaMonitor(tmp_path / "file" / "logs"))
    assert num_batches_used(model.optimizer) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"log_dir": "logs", "experiment": 5},
            "experiment must be a name for a directory below log_dir, such as 'mirrored' or 'night/3', got 5",
        ),
        ({}, "ReplicaMonitor has no writer. Give it a log_dir, or writers="),
        (
            {"log_dir": "x", "update_freq": 0},
            "update_freq must be a number of optimizer steps >= 1, 'epoch' or 'auto', got 0",
        ),
        ({"log_dir": "x", "update_freq": "batch"}, "'epoch' or 'auto', got 'batch'"),
        ({"log_dir": "x", "update_freq": True}, "'epoch' or 'auto', got True"),
        (
            {"log_dir": "x", "experiment": "../y"},
            "experiment must be a name for a directory below log_dir, such as 'mirrored' or 'night/3', got '../y'",
        ),
        ({"log_dir": "x", "experiment": "/y"}, "'night/3', got '/y'"),
        ({"log_dir": "x", "straggler_threshold": 2}, "straggler_threshold must be from 0 to 1, got 2"),
        (
            {"log_dir": "x", "check_divergence_every": 0},
            "check_divergence_every must be a number of optimizer steps >= 1, or None, got 0",
        ),
        ({"writers": [print]}, "writers has <built-in function print>, which is not a Writer"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(kde.MonitorError) as caught:
        kde.ReplicaMonitor(**arguments)
    assert message in str(caught.value)


def test_a_parameter_server_has_no_replicas_to_compare() -> None:
    class Model:
        name = "net"
        distribute_strategy = object.__new__(tf.distribute.ParameterServerStrategy)

    with pytest.raises(kde.MonitorError, match="'net' lives under ParameterServerStrategy, whose workers"):
        kde.ReplicaMonitor("x").on_run_prepare(Model())


@pytest.mark.slow
def test_a_monitor_can_be_copied_for_each_trial_and_serve_one_model_after_another(mirrored: Any) -> None:
    original, _ = remembered(terminal=True)
    monitor = copy.deepcopy(original)
    memory = monitor._writers._writers[0]
    for _ in range(2):
        fit(build(mirrored), monitor, epochs=1)
    assert [stats.step for stats in memory.train if stats.num_steps > 1][-1] == 7
    assert sum(stats.num_steps for stats in memory.train) == 14
