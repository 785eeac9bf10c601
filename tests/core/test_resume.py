"""A run that was interrupted anywhere ends with the bits of one that never was; saves are whole or not there."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import resume_runs as runs
import tensorflow as tf
from cases import rotating
from launching import wait_for_saves
from resume_runs import BATCH, DATA, Crash, X, Y, assert_same, run
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.cluster.launch import WorkerFailed, launch
from keras_dist_ext.training.resume import checkpoints as checkpoints_module
from keras_dist_ext.training.resume.checkpoints import CheckpointStore, InvalidCheckpoint, check, unpack

pytestmark = [
    # Keras says so of everything but arrays; and one kind of data here ends with an epoch
    pytest.mark.filterwarnings("ignore:.*shuffle=True.*was passed, but will be ignored"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

KINDS = ["arrays", "shuffled by a seed", "longer than an epoch", "seekable"]
NUM_BATCHES = {name: 11 if name == "longer than an epoch" else 15 if "steps_per_epoch" in make() else 18
               for name, make in DATA.items()}  # fmt: skip


def crash(strategy: Any, folder: pathlib.Path, after: int, **options: Any) -> None:
    """Run until a crash after so many batches."""
    with pytest.raises(Crash):
        run(strategy, folder, crash_after=after, **options)


def check_goes_on(strategy: Any, folder: pathlib.Path, after: int, **options: Any) -> Any:
    """See that a run that crashed goes on as one that did not; return from where."""
    reference = run(strategy, folder / "reference", **options)
    crash(strategy, folder / "crashed", after, **options)
    resumed = run(strategy, folder / "crashed", **options)
    assert reference["resumed"] is None
    assert resumed["resumed"] is not None
    assert_same(reference, resumed)
    return resumed["resumed"]


# Any data, any step


@pytest.mark.parametrize("data", rotating(KINDS, ["arrays"]))
def test_a_run_that_crashed_ends_as_one_that_did_not(data: str, strategies: Any, tmp_path: pathlib.Path) -> None:
    after = random.Random(data).randrange(4, NUM_BATCHES[data])
    check_goes_on(strategies.get("one_device"), tmp_path, after, data=data)


@pytest.mark.parametrize("kind", rotating(["default", "mirrored2"], [], slow=["mirrored2"]))
@pytest.mark.parametrize("data", rotating(DATA, [], slow=["PyDataset with threads"]))
def test_a_run_over_any_data_resumes_from_any_step(
    data: str, kind: str, strategies: Any, tmp_path: pathlib.Path
) -> None:
    generator = random.Random(f"{data} {kind}")
    for after in generator.sample(range(3, NUM_BATCHES[data]), 3):
        every = generator.choice([1, 2, "epoch"] if after > 6 else [1, 2])  # the first epoch has 5 or 6 batches
        check_goes_on(strategies.get(kind), tmp_path / str(after), after, data=data, save_every=every)


@pytest.mark.parametrize("optimizer", rotating(["accumulating", "averaging", "scaled"], []))
def test_the_whole_state_of_an_optimizer_is_restored(optimizer: str, mirrored: Any, tmp_path: pathlib.Path) -> None:
    check_goes_on(mirrored, tmp_path, 10, optimizer=optimizer)


def shuffled_parts(shared: str) -> dict[str, Any]:
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    data = (data.cache() if shared == "a cache" else data).shuffle(44, seed=3)
    if shared == "parts":
        return {"x": data.skip(12).batch(BATCH), "validation_data": data.take(12).batch(BATCH)}
    if shared == "all steps of the validation":
        return {"x": data.batch(BATCH), "validation_data": data.take(12).batch(BATCH), "validation_steps": 2}
    batches = data.batch(BATCH)
    return {"x": batches, "validation_data": batches} | (
        {"steps_per_epoch": 3} if shared == "two epochs a pass" else {}
    )


@pytest.mark.parametrize("save_every", [1, "epoch"])
@pytest.mark.parametrize(
    "shared",
    rotating(["the dataset", "a cache", "parts", "all steps of the validation", "two epochs a pass"], ["parts"]),
)
def test_data_that_shares_its_shuffle_with_the_validation_resumes_in_the_same_order(
    shared: str, save_every: Any, tmp_path: pathlib.Path
) -> None:
    def train(folder: str, *callbacks: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        resume = kde.Resume(tmp_path / folder, save_every)
        fit = model.fit(**shuffled_parts(shared), epochs=4, verbose=0, callbacks=[resume, *callbacks])
        return model.get_weights(), fit.history["val_loss"]

    weights, losses = train("reference")
    with pytest.raises(Crash):
        train("crashed", runs.crash_at(8, kill=False))
    resumed, resumed_losses = train("crashed")
    assert all(np.array_equal(one, other) for one, other in zip(weights, resumed, strict=True))
    assert resumed_losses == losses


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["PyDataset", "seekable"])
def test_the_validation_continues_with_its_data(kind: str, strategies: Any, tmp_path: pathlib.Path) -> None:
    def train(folder: str, *callbacks: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        data = runs.py_dataset() if kind == "PyDataset" else runs.Endless()
        given: dict[str, Any] = {"validation_data": data, "validation_steps": 2, "verbose": 0, "epochs": 4}
        resume = kde.Resume(tmp_path / folder)
        return model.fit(X, Y, batch_size=BATCH, callbacks=[resume, *callbacks], **given).history

    reference = train("reference")
    with pytest.raises(Crash):
        train("crashed", runs.crash_at(14, kill=False))
    assert train("crashed") == reference


class TwoOptimizers(kde.Model):
    """Trains by optimizers in a list, and by that of a model in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = kde.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        self.inner.compile(keras.optimizers.Adam(0.05), "mse")
        self.head = keras.layers.Dense(1)
        self.optimizers = [keras.optimizers.SGD(0.05, momentum=0.9)]

    def call(self, x: Any) -> Any:
        return self.head(self.inner(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        of_inner = self.inner.trainable_variables
        gradients = tape.gradient(loss, [*of_inner, *self.head.trainable_variables])
        self.inner.optimizer.apply(gradients[: len(of_inner)], of_inner)
        self.optimizers[0].apply(gradients[len(of_inner) :], self.head.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
def test_optimizers_in_lists_and_in_submodels_are_restored(mirrored: Any, tmp_path: pathlib.Path) -> None:
    def train(folder: pathlib.Path, *callbacks: Any) -> Any:
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = TwoOptimizers()
            model.compile(loss="mse")
        fit = model.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[kde.Resume(folder, 2), *callbacks])
        return model.get_weights(), fit.history

    reference, history = train(tmp_path / "reference")
    with pytest.raises(Crash):
        train(tmp_path / "run", runs.crash_at(11, kill=False))
    resumed, resumed_history = train(tmp_path / "run")
    assert all(np.array_equal(a, b) for a, b in zip(reference, resumed, strict=True))
    assert history["loss"][-1] == resumed_history["loss"][-1]


@pytest.mark.rotating
def test_a_run_that_crashes_repeatedly_resumes(strategies: Any, tmp_path: pathlib.Path) -> None:
    strategy = strategies.get("default")
    reference = run(strategy, tmp_path / "reference")
    for after in (4, 5, 3):
        crash(strategy, tmp_path / "crashed", after, save_every=1)
    assert_same(reference, run(strategy, tmp_path / "crashed", save_every=1))


@pytest.mark.rotating
def test_with_a_global_seed_saving_changes_nothing(mirrored: Any, tmp_path: pathlib.Path) -> None:
    assert_same(run(mirrored, None, replica_seeds=5), run(mirrored, tmp_path, replica_seeds=5, save_every=1))


def test_an_execution_ends_where_a_checkpoint_is_due(strategies: Any, tmp_path: pathlib.Path) -> None:
    numbers: list[int] = []

    class Count(kde.RunCallback):
        supports_multi_step = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            numbers.append(batch)

    data = {"data": "endless", "more": [Count()]}
    run(strategies.get("default"), tmp_path, save_every=4, epochs=1, **data)
    assert 3 in numbers


# Killed processes


def process(folder: pathlib.Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Begin a run in a process of its own."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, runs.__file__, str(folder), *arguments, "--options", json.dumps(options)]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_of(running: subprocess.Popen[str]) -> int:
    """Wait for the end of a process and return its code."""
    try:
        said, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert "Traceback" not in said, said
    return running.returncode


@pytest.mark.slow
def test_another_process_resumes_after_one_that_was_killed(tmp_path: pathlib.Path) -> None:
    options = {"optimizer": "accumulating", "replica_seeds": 5, "data": "shuffled"}
    reference = process(tmp_path / "reference", "--without-resume", "--devices=2", **options)
    killed = process(tmp_path / "run", "--devices=2", crash_after=11, kill=True, save_every=3, **options)
    assert end_of(killed) == -signal.SIGKILL
    assert end_of(reference) == 0
    assert not (tmp_path / "run" / "ended.npz").exists()
    assert end_of(process(tmp_path / "run", "--devices=2", save_every=3, **options)) == 0
    one, other = runs.read_ended(tmp_path / "reference"), runs.read_ended(tmp_path / "run")
    assert other["resumed"] is not None
    assert_same(one, other)


@pytest.mark.parametrize("data", rotating(["arrays", "shuffled by a seed", "noisy", "PyDataset with threads"], []))
def test_a_process_that_was_killed_three_times_ends_as_one_that_was_not(data: str, tmp_path: pathlib.Path) -> None:
    reference = process(tmp_path / "reference", data=data)
    for after in random.Random(data).sample(range(2, 7), 3):
        killed = process(tmp_path / "run", data=data, crash_after=after, kill=True, save_every=1)
        assert end_of(killed) == -signal.SIGKILL
    assert end_of(reference) == 0
    assert end_of(process(tmp_path / "run", data=data, save_every=1)) == 0
    assert_same(runs.read_ended(tmp_path / "reference"), runs.read_ended(tmp_path / "run"))


# Other devices


@pytest.mark.parametrize(
    ("count", "first", "second"),
    rotating([(2, "mirrored2", "default"), (4, "mirrored4", "mirrored2")], [], slow=[(2, "mirrored2", "default")]),
)
def test_with_virtual_replicas_a_run_resumes_on_other_devices_bit_for_bit(
    count: int, first: str, second: str, strategies: Any, tmp_path: pathlib.Path
) -> None:
    options = {"virtual_replicas": count, "replica_seeds": 3}
    reference = run(strategies.get(first), tmp_path / "reference", **options)
    crash(strategies.get(first), tmp_path / "crashed", 9, **options)
    other = run(strategies.get(second), tmp_path / "crashed", **options)
    for name in ("seeds", "epochs", *(name for name in reference if name.startswith(("weight", "optimizer")))):
        np.testing.assert_array_equal(reference[name], other[name], err_msg=name)
    for name, values in reference["history"].items():  # metrics are added up by replicas as they are
        np.testing.assert_allclose(values, other["history"][name], rtol=1e-5)


@pytest.mark.parametrize(
    ("first", "second"),
    rotating([("default", "mirrored2"), ("mirrored2", "default")], []),
)
def test_a_run_resumes_on_other_devices_in_the_middle_of_an_epoch_and_of_an_accumulation(
    first: str, second: str, strategies: Any, tmp_path: pathlib.Path
) -> None:
    options = {"optimizer": "accumulating", "dropout": 0.0, "normalizes": False, "save_every": 1, "data": "shuffled"}
    reference = run(strategies.get(first), tmp_path / "reference", **options)
    crash(strategies.get(first), tmp_path / "crashed", 10, **options)
    other = run(strategies.get(second), tmp_path / "crashed", **options)
    for name, values in reference["history"].items():
        np.testing.assert_allclose(values, other["history"][name], rtol=1e-3, err_msg=name)
    for name in (name for name in reference if name.startswith("weight")):
        np.testing.assert_allclose(reference[name], other[name], rtol=1e-3, atol=1e-4, err_msg=name)


# A finished run


@pytest.mark.parametrize("optimizer", rotating(["adam", "averaging"], ["averaging"]))
def test_a_finished_run_returns_its_history_and_its_model_at_once(
    optimizer: str, strategies: Any, tmp_path: pathlib.Path
) -> None:
    batches: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    options = {"optimizer": optimizer, "more": [count]}
    first = run(strategies.get("default"), tmp_path, **options)
    assert len(batches) == 18
    assert_same(first, run(strategies.get("default"), tmp_path, **options))
    assert len(batches) == 18


@pytest.mark.rotating
def test_a_finished_run_continues_with_more_epochs(strategies: Any, tmp_path: pathlib.Path) -> None:
    strategy, options = strategies.get("default"), {"replica_seeds": 5, "optimizer": "averaging"}
    run(strategy, tmp_path, epochs=2, **options)
    longer = run(strategy, tmp_path, epochs=3, **options)
    assert longer["resumed"] == (2, 0)
    assert_same(run(strategy, None, epochs=3, **options), longer)


@pytest.mark.rotating
def test_a_run_that_a_callback_has_stopped_stays_so(strategies: Any, tmp_path: pathlib.Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                self.model.stop_training = True

    first = run(strategies.get("default"), tmp_path, save_every=1, more=[Stop()])
    assert first["epochs"] == [0]
    assert_same(first, run(strategies.get("default"), tmp_path, save_every=1, more=[Stop()], epochs=9))


def test_the_model_is_free_for_other_runs_afterwards(strategies: Any, tmp_path: pathlib.Path) -> None:
    model = small(strategies.get("default"))
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[kde.Resume(tmp_path)])
    assert model.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]
    assert model.replica_seeds.order_root is None


# Callbacks


def small(strategy: Any, units: int = 1) -> Any:
    with strategy.scope():
        model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(units, name="head")], name="net")
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def fit_small(folder: Any, *callbacks: Any, resume: Any = None, **arguments: Any) -> Any:
    model = small(tf.distribute.get_strategy())
    resume = kde.Resume(folder, 1) if resume is None else resume
    given = {"x": X, "y": Y, "batch_size": BATCH, "epochs": 2, "verbose": 0, **arguments}
    return model.fit(**given, callbacks=[resume, *callbacks])


@pytest.mark.slow
def test_the_same_objects_resume_in_the_same_process(strategies: Any, tmp_path: pathlib.Path) -> None:
    def again(folder: pathlib.Path, crashes: bool) -> Any:
        keras.utils.set_random_seed(1)
        model = small(strategies.get("default"))
        best = keras.callbacks.ModelCheckpoint(folder / "m.keras", "loss", save_best_only=True)
        count, resume = runs.counting_callback(), kde.Resume(folder / "saves", 3)
        given = {"epochs": 3, "batch_size": BATCH, "verbose": 0, "validation_data": (X, Y)}
        if crashes:
            with pytest.raises(Crash):
                model.fit(X, Y, callbacks=[best, count, resume, runs.crash_at(14, kill=False)], **given)
        history = model.fit(X, Y, callbacks=[best, count, resume], **given).history
        return history, model.get_weights(), best.best, sorted(count.by_epoch.items())

    assert repr(again(tmp_path / "one", crashes=False)) == repr(again(tmp_path / "other", crashes=True))


@pytest.mark.rotating
def test_backups_checkpoints_and_logs_of_keras_may_be_used_beside(strategies: Any, tmp_path: pathlib.Path) -> None:
    def beside(folder: pathlib.Path) -> list[Any]:
        return [
            keras.callbacks.BackupAndRestore(folder / "backup"),
            keras.callbacks.ModelCheckpoint(folder / "best.keras", "val_loss", save_best_only=True),
            keras.callbacks.ModelCheckpoint(folder / "step-{epoch}-{batch}.weights.h5", save_weights_only=True,
                                            save_freq=5),
            keras.callbacks.CSVLogger(str(folder / "log.csv"), append=True),
        ]  # fmt: skip

    strategy = strategies.get("default")
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    reference = run(strategy, one / "saves", more=beside(one), save_every="epoch")
    of_crash = beside(other)
    crash(strategy, other / "saves", 9, more=of_crash, save_every="epoch")
    of_crash[-1].csv_file.close()  # as the end of a process does, where Keras has no time to
    assert_same(reference, run(strategy, other / "saves", more=beside(other), save_every="epoch"))
    assert (one / "log.csv").read_text() == (other / "log.csv").read_text()
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
    assert not (one / "backup").exists()


class Keeps(keras.callbacks.Callback):
    """Keeps what cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.opened = threading.Lock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.thread = threading.Lock()


def test_attributes_of_a_callback_that_cannot_be_saved_are_named_once(tmp_path: pathlib.Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_small(tmp_path, Keeps(), epochs=3)
    (said,) = [str(w.message) for w in caught if "Resume" in str(w.message)]
    assert said == (
        "Resume cannot save these attributes of the callback Keeps: thread (lock). A resumed run starts without them. "
        "Use numbers, strings, lists, dicts or arrays, or give the callback methods get_state() and set_state(state)."
    )


def test_variables_and_metrics_of_a_callback_are_restored(tmp_path: pathlib.Path) -> None:
    class Counts(kde.RunCallback):
        supports_multi_step = True

        def __init__(self) -> None:
            super().__init__()
            self.epochs = tf.Variable(0)
            self.mean = keras.metrics.Mean()
            self.last = keras.Variable([0.0, 0.0])
            self.rate: Any = None

        def on_train_begin(self, logs: Any = None) -> None:
            self.rate = self.model.optimizer.learning_rate  # is the model's

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs.assign_add(1)
            self.mean.update_state(epoch)
            self.last.assign_add([1.0, epoch])

        def told(self) -> Any:
            return int(self.epochs), float(self.mean.result()), keras.ops.convert_to_numpy(self.last).tolist()

    reference, counts = Counts(), Counts()
    fit_small(tmp_path / "reference", reference, epochs=4)
    with pytest.raises(Crash):
        fit_small(tmp_path / "run", Counts(), runs.crash_at(16, kill=False), epochs=4)
    fit_small(tmp_path / "run", counts, epochs=4)
    assert counts.told() == reference.told()
    content = CheckpointStore(tmp_path / "run", 3).newest()
    assert content is not None
    assert "rate" not in unpack(content)[0]["callbacks"][f"{__name__}.{Counts.__qualname__}[0]"]


def test_an_object_of_a_callback_that_changes_and_cannot_be_saved_is_named(tmp_path: pathlib.Path) -> None:
    class Tracker:
        def __init__(self) -> None:
            self.seen: list[int] = []

    class Tracks(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.tracker, self.other = Tracker(), Tracker()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.tracker.seen.append(epoch)

    with pytest.warns(
        UserWarning, match=r"these attributes of the callback Tracks: tracker \(Tracker\). A resumed run"
    ):
        fit_small(tmp_path, Tracks(), epochs=2)


def test_a_callback_may_define_its_state(tmp_path: pathlib.Path) -> None:
    class Mine(Keeps):
        given: Any = None

        def get_state(self) -> Any:
            return {"numbers": [1, 2.5], "array": np.arange(3)}

        def set_state(self, state: Any) -> None:
            self.given = state

    with pytest.raises(Crash):
        fit_small(tmp_path, Mine(), runs.crash_at(8, kill=False))
    mine = Mine()
    fit_small(tmp_path, mine)
    assert mine.given["numbers"] == [1, 2.5]
    np.testing.assert_array_equal(mine.given["array"], np.arange(3))

    class Wrong(Mine):
        def get_state(self) -> Any:
            return {"lock": threading.Lock()}

    with pytest.raises(TypeError, match=r"Wrong\[0\].get_state\(\) has a lock, which Resume cannot save"):
        fit_small(tmp_path / "other", Wrong())


class Gathers(keras.callbacks.Callback):
    """Puts what it learns into containers of the user's."""

    def __init__(self, losses: list[float], by_epoch: dict[int, float], seen: set[int]) -> None:
        super().__init__()
        self.losses, self.by_epoch, self.seen = losses, by_epoch, seen

    def get_state(self) -> str:
        return "of something else"  # without a set_state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        self.by_epoch[epoch] = logs["loss"]
        self.seen.add(epoch)


@pytest.mark.slow
def test_containers_that_a_callback_shares_with_the_script_are_restored_in_place(tmp_path: pathlib.Path) -> None:
    def run_script(*crash: Any) -> Any:
        keras.utils.set_random_seed(1)
        shared: Any = ([], {}, set())
        fit_small(tmp_path / ("reference" if not crash else "run"), Gathers(*shared), *crash, epochs=4)
        return shared

    reference = run_script()
    with pytest.raises(Crash):
        run_script(runs.crash_at(15, kill=False))
    again = run_script(runs.crash_at(100, kill=False))
    assert again == reference
    assert reference[2] == {0, 1, 2, 3}


def test_data_that_a_callback_reads_is_not_copied(tmp_path: pathlib.Path) -> None:
    class Looks(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.data = np.zeros(1_000_000)

    fit_small(tmp_path, Looks())
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 100_000


def test_a_large_array_that_a_callback_changes_is_restored(tmp_path: pathlib.Path) -> None:
    class Counts(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.table = np.zeros([400, 400])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.table[epoch, 7] += 1

    with pytest.raises(Crash):
        fit_small(tmp_path, Counts(), runs.crash_at(15, kill=False), epochs=3)
    counts = Counts()
    fit_small(tmp_path, counts, epochs=3)
    assert counts.table[:4, 7].tolist() == [1, 1, 1, 0]


# Data


def test_a_py_dataset_is_not_asked_for_batches_that_were_used(strategies: Any, tmp_path: pathlib.Path) -> None:
    data = runs.py_dataset()
    with pytest.raises(Crash):
        fit_small(tmp_path, runs.crash_at(4, kill=False), x=data, y=None, batch_size=None, epochs=1, shuffle=False)
    resume, again = kde.Resume(tmp_path, 1), runs.py_dataset()
    fit_small(tmp_path, resume=resume, x=again, y=None, batch_size=None, epochs=1, shuffle=False)
    assert resume.resumed_from is not None
    step = resume.resumed_from.step
    assert step >= 1
    assert again.asked == [0, 1, *range(step, 6)]  # Keras looks at the first two


def test_small_pipelines_resume_without_being_read_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = types.SimpleNamespace(perf_counter=lambda: 0.0)  # TensorFlow is quick to save it
    monkeypatch.setattr("keras_dist_ext.training.passes.time", clock)
    reads = tf.data.Dataset.range(1000).map(lambda i: (tf.fill([4], tf.cast(i, tf.float32)), tf.ones([1]))).batch(8)
    with pytest.raises(Crash):
        fit_small(tmp_path, runs.crash_at(90, kill=False), x=reads, y=None, batch_size=None, epochs=1)
    content = CheckpointStore(tmp_path, 3).newest()
    assert content is not None
    assert "iterator" in unpack(content)[1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: runs.batches(), "The data is a generator, which cannot start in the middle, .* seek"),
        (
            lambda: runs.py_dataset(workers=2),
            "PyDataset with 2 workers, .* after 2 of its 6 batches: .* Leave steps_per_epoch out, or set workers=1",
        ),
        (
            lambda: tf.distribute.get_strategy().experimental_distribute_dataset(runs.tf_data(lambda d: d.batch(8))),
            None,
        ),
    ],
)
def test_data_that_cannot_start_in_the_middle_is_refused_before_the_first_step(
    data: Any, message: str | None, tmp_path: pathlib.Path
) -> None:
    if message is None:  # the default strategy gives the dataset back
        fit_small(tmp_path, x=data(), y=None, batch_size=None, epochs=1)
    else:
        with pytest.raises(kde.DataError, match=message):
            fit_small(tmp_path, x=data(), y=None, batch_size=None, epochs=1, steps_per_epoch=2)


def test_a_distributed_dataset_is_refused(mirrored: Any, tmp_path: pathlib.Path) -> None:
    data = mirrored.experimental_distribute_dataset(runs.tf_data(lambda d: d.batch(8)))
    with pytest.raises(kde.DataError, match="DistributedDataset, whose batches .* Give fit the dataset itself"):
        small(mirrored).fit(data, verbose=0, callbacks=[kde.Resume(tmp_path)])


# Another run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with what a run of `fit_small` has left; to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    keras.utils.set_random_seed(1337)  # as each test has it (conftest.py)
    fit_small(folder)
    return folder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"units": 2}, r"weight/0 \(net/head/kernel\) is float32 \(4, 2\), was float32 \(4, 1\); .* another dir"),
        ({"optimizer": "adam"}, "optimizer is Adam, was SGD; of optimizer/2 .* is new"),
        ({"metrics": ["mae"]}, r"metric/2 \(.*/total, .*\) is new"),
        ({"seed": 3}, "the seed is 3, was none"),
        ({"batch_size": 5}, "over other data, .* batch_size: 5, was 8; batches of a pass: 9, was 6"),
        ({"steps_per_epoch": 2}, "steps_per_epoch: 2, was None"),
        ({"shuffle": False}, "shuffle: False, was True"),
        ({"rows": 43}, r"rows: 43, was 44\. Give fit the same data"),  # as many batches
        ({"loss": "mae"}, "not of this run of 'net': loss is mae, was mse. Build and compile"),
        ({"activation": "tanh"}, r"layer \d is Dense\(.*activation=tanh.*, was Dense\(.*=linear"),
        ({"optimizer": keras.optimizers.SGD(0.02)}, "learning_rate of optimizer is 0.02, was 0.01"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(
    changed: Any, message: str, finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    model = small(tf.distribute.get_strategy(), changed.get("units", 1))
    model.layers[0].activation = keras.activations.get(changed.get("activation"))
    model.compile(changed.get("optimizer", "sgd"), changed.get("loss", "mse"), metrics=changed.get("metrics"))
    seeds = [kde.ReplicaSeeds(changed["seed"])] if "seed" in changed else []
    rest = {name: changed[name] for name in ("batch_size", "steps_per_epoch", "shuffle") if name in changed}
    rows = changed.get("rows", len(X))
    targets = np.repeat(Y, changed.get("units", 1), axis=1)
    before = model.get_weights()
    with pytest.raises(kde.ResumeError, match=message):
        model.fit(
            X[:rows], targets[:rows], **{"batch_size": 8, **rest}, verbose=0, callbacks=[kde.Resume(tmp_path), *seeds]
        )
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


def test_another_seed_of_keras_is_named(tmp_path: pathlib.Path) -> None:
    keras.utils.set_random_seed(3)
    fit_small(tmp_path, epochs=1)
    keras.utils.set_random_seed(3)
    fit_small(tmp_path, epochs=2)
    keras.utils.set_random_seed(4)
    with pytest.raises(
        kde.ResumeError, match=r"another seed: that of keras.utils.set_random_seed is 4, was 3. Call it with the same"
    ):
        fit_small(tmp_path, epochs=3)


POSITION = {"epoch": 2, "step": 0, "num_epochs": 2, "num_passes": 2, "num_pass_batches": 0, "num_run_batches": 12,
            "order": 2, "num_tests": 0, "num_tests_before": 0}  # fmt: skip
HISTORY = "keras.src.callbacks.history.History[0]"


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": []}, r"position is \[\]"),
        ({"position": {**POSITION, "step": "3"}}, "step of the position is '3'"),
        ({"position": {**POSITION, "epoch": -1}}, "epoch of the position is -1"),
        ({"position": {**POSITION, "epoch": True}}, "epoch of the position is True"),
        ({"position": {**POSITION, "epoch": 10**30}}, "epoch of the position is 1000"),
        ({"position": {**POSITION, "step": 7}}, "step of the position is 7, of at most 6"),
        ({"position": {**POSITION, "num_epochs": 10**12}}, "num_epochs of the position is 1000000000000, of at most 2"),
        ({"position": {**POSITION, "num_passes": 10**12}}, "num_passes of the position is 1000000000000, of at most 3"),
        ({"position": {**POSITION, "num_tests_before": 1}}, "num_tests_before of the position is 1, of at most 0"),
        ({"position": {**POSITION, "num_tests": 10**12}}, "num_tests of the position is 1000000000000, of at most 3"),
        ({"position": {**POSITION, "num_run_batches": 19}}, "num_run_batches of the position is 19, of at most 18"),
        ({"position": {**POSITION, "num_pass_batches": 7}}, "num_pass_batches of the position is 7, of at most 6"),
        ({"position": {"epoch": 1}}, "position has num_epochs, num_pass_batches, .* or lacks it"),
        ({"version": "1"}, "has checkpoints of version 1; this package"),
        ({"version": None}, "has checkpoints of version None; this package"),
        ({"stopped": 3}, "stopped is 3"),
        ({"order_root": -5}, "order_root is -5"),
        ({"order_root": float("nan")}, "order_root is nan"),
        ({"data": {"batches of a pass": "6"}}, "the length of the data is '6'"),
        ({"fingerprint": [1]}, r"fingerprint is \[1\]"),
        ({"seeds": {"run": [1]}}, "not enough values"),
        ({"seeds": {"run": [2**40, 0, 0]}}, "the state of the seeds is"),
        ({"seeds": {"a": [2**70]}}, "the state of the generator a is"),
        ({"seeds": {"a": {"b": 1}}}, "the state of the generator a is"),
        ({"variables": [["weight/0"]]}, "not enough values"),
        ({"variables": [["weight/9", "p", "float32", []]]}, "KeyError: 'weight/9'"),
        (
            {"variables": [["weight/0", "p", "float32", [9, 9]]]},
            r"weight/0 is float32 \(4, 1\), and said to be float32",
        ),
        ({"variables": {}}, "variables is {}"),
        ({"per_replica": [3]}, r"per_replica is \[3\]"),
        ({"per_replica": ["weight/77"]}, "variables have no names of their own"),
        ({"optimizers": {"optimizer": 5}}, "TypeError"),
        ({"optimizers": {"optimizer": {"class": "SGD", "of": "all"}}}, "optimizer is {'class'"),
        ({"callbacks": {"c": {"a": _nested(700)}}}, None),
        ({"callbacks": {"c": {"a": {"kind": "tuple"}}}}, "KeyError: 'parts'"),
        ({"callbacks": {"c": {"a": {"kind": "module", "parts": []}}}}, "'module' is not a kind of value"),
        ({"callbacks": {"c": {"a": {"kind": "array", "name": "none"}}}}, "KeyError: 'none'"),
        ({"callbacks": {"c": {"a": {"kind": "dict", "parts": [1]}}}}, "1 is not a part of dict"),
        ({"callbacks": {"c": {"a": {"kind": "set", "parts": [[]], "length": None}}}}, "unhashable"),
        ({"callbacks": {"c": {"a": {"kind": "deque", "parts": [], "length": "x"}}}}, "TypeError"),
        ({"callbacks": {"c": {"__class__": 3}}}, "the callback c has the attribute '__class__'"),
        ({"callbacks": {"c": 5}}, "AttributeError"),
        ({"callbacks": {HISTORY: {"epoch": 5}}}, "epoch of the callback History is 5"),
        ({"callbacks": {HISTORY: {"history": []}}}, r"history of the callback History is \[\]"),
    ],
)
def test_malformed_contents_with_a_right_checksum_are_an_error_before_anything_is_restored(
    change: Any, message: str | None, finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    saves = CheckpointStore(tmp_path, 3)
    metadata, arrays = unpack(saves.newest() or b"")
    assert metadata["position"] == POSITION
    saves.write({**metadata, **change}, arrays)
    if message is None:  # how deep it may be depends on how deep the caller is
        with contextlib.suppress(kde.ResumeError):
            fit_small(tmp_path, epochs=3)
        return
    message = f"is malformed, as this package writes none \\(.*{message}" if "version" not in change else message
    model = small(tf.distribute.get_strategy())
    before = model.get_weights()
    with pytest.raises(kde.ResumeError, match=message):
        model.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[kde.Resume(tmp_path)])
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("weight/0", None, "KeyError: 'weight/0'"),
        ("weight/0", np.zeros([4, 1], np.int32), "weight/0 is int32"),
        ("host/python", np.zeros([1, 5]), "state with version 0"),
        ("host/python", np.full([1, 628], np.nan), "cannot convert float NaN to integer"),
        ("host/numpy", np.ones([1, 9]), "Error"),
        ("host/numpy", np.zeros([2, 9]), "other shapes"),
        ("iterator", np.zeros(3, np.float32), "the iterator's state has another shape"),
        ("iterator", np.full(8, 255, np.uint8), "the iterator's state has 18446744073709551615 parts"),
        ("iterator", np.frombuffer(np.array([1, 99], np.int64).tobytes(), np.uint8), "has 99 bytes"),
    ],
)
def test_malformed_arrays_with_a_right_checksum_are_an_error(
    name: str, array: Any, message: str, finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    saves = CheckpointStore(tmp_path, 3)
    metadata, arrays = unpack(saves.newest() or b"")
    given = {**arrays, name: array}
    saves.write(metadata, {n: a for n, a in given.items() if a is not None})
    with pytest.raises(kde.ResumeError, match=message):
        fit_small(tmp_path, epochs=3)


def test_other_arrays_of_the_same_length_give_a_warning(tmp_path: pathlib.Path) -> None:
    def said(x: Any, y: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit_small(tmp_path, x=x, y=y, epochs=2)
        return [str(w.message) for w in caught if "of the same length" in str(w.message)]

    assert said(X, Y) == [] == said(X, Y) == said(tf.constant(X), tf.constant(Y))
    assert "over other arrays of the same length: the run continues" in said(X, Y[::-1])[0]


def test_data_whose_order_depends_on_timing_gives_a_warning(tmp_path: pathlib.Path) -> None:
    def pipeline(deterministic: bool | None) -> Any:
        return runs.tf_data(lambda d: d.map(lambda x, y: (x, y), 2, deterministic=deterministic).batch(BATCH))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*depends on timing")
        fit_small(tmp_path / "one", x=pipeline(None), y=None, batch_size=None)
    with pytest.warns(UserWarning, match=r"The order of the data depends on timing \(deterministic=False\), so a run"):
        fit_small(tmp_path / "other", x=pipeline(False), y=None, batch_size=None)


def test_other_batches_of_endless_data_are_other_data(tmp_path: pathlib.Path) -> None:
    def endless(batch: int) -> Any:
        data = runs.tf_data(lambda d: d.repeat().batch(batch))
        return {"x": data, "y": None, "batch_size": None, "steps_per_epoch": 3}

    fit_small(tmp_path, **endless(8))
    with pytest.raises(kde.ResumeError, match=r"batches of the pipeline: \[4\], was \[8\]"):
        fit_small(tmp_path, **endless(4))


def test_only_one_resume_callback_is_allowed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        kde.ResumeError,
        match=r"Only one Resume callback is allowed, and fit was given 2 \(.*/one, .*/two\). Give fit one of them",
    ):
        fit_small(tmp_path / "one", kde.Resume(tmp_path / "two"))


def test_a_checkpoint_of_a_later_version_is_refused(tmp_path: pathlib.Path) -> None:
    fit_small(tmp_path)
    saves = CheckpointStore(tmp_path, 3)
    metadata, arrays = unpack(saves.newest() or b"")
    saves.write({**metadata, "version": 3}, arrays)
    with pytest.raises(kde.ResumeError, match="has checkpoints of version 3; this package reads version 2"):
        fit_small(tmp_path)


def test_models_that_cannot_be_saved_exactly_are_refused(tmp_path: pathlib.Path) -> None:
    stock = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    stock.compile("sgd", "mse")
    with pytest.raises(kde.ResumeError, match="a Sequential of stock Keras, .* kde.adopt"):
        stock.fit(X, Y, verbose=0, callbacks=[kde.Resume(tmp_path)])


def test_a_directory_that_cannot_be_written_is_an_error_before_training(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(kde.ResumeError, match="file/saves cannot be written to: .*Error.* Give Resume a directory"):
        fit_small(tmp_path / "file" / "saves")


def test_numbers_of_numpy_in_the_arguments_of_fit_are_saved(tmp_path: pathlib.Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be written")
        fit_small(tmp_path, batch_size=np.int64(BATCH), steps_per_epoch=np.int32(3))
    assert unpack(CheckpointStore(tmp_path, 3).newest() or b"")[0]["data"]["steps_per_epoch"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"save_every": 0},
            "save_every must be 'epoch', a number of steps such as 500, or a time such as '30s', '10min' or '2h', got "
            "0",
        ),
        ({"save_every": 60.0}, "got 60.0"),
        ({"save_every": "often"}, "got 'often'"),
        ({"save_every": "0s"}, "got '0s'"),
        ({"save_every": datetime.timedelta()}, "got datetime.timedelta"),
        ({"keep": 0}, "keep must be an integer >= 1, got 0"),
        ({"keep": True}, "keep must be an integer >= 1, got True"),
        ({"save_every": True}, "got True"),
        ({"directory": ""}, "directory must be the path of a directory for the checkpoints of this run, got ''"),
        ({"directory": None}, "got None"),
    ],
)
def test_invalid_arguments_are_refused(arguments: Any, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(kde.ResumeError, match=message):
        kde.Resume(**{"directory": tmp_path, **arguments})
    with pytest.raises(
        kde.ResumeError, match="directory is 'gs://bucket/run'; files cannot be renamed atomically there"
    ):
        kde.Resume("gs://bucket/run")


def test_steps_may_be_counted_by_numpy(tmp_path: pathlib.Path) -> None:
    fit_small(tmp_path, resume=kde.Resume(tmp_path, np.int64(4), keep=np.int64(2)), epochs=1)
    assert len(list(tmp_path.glob("*.kde"))) == 2


# When


@pytest.mark.parametrize(
    ("save_every", "num_saves"),
    [("epoch", 3), (6, 3), ("1h", 1), (datetime.timedelta(hours=1), 1), ("0.000001s", None)],
)
def test_checkpoints_are_written_when_they_are_due(
    save_every: Any, num_saves: int | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = keras.callbacks.LambdaCallback(on_train_batch_end=wait_for_saves)
    monkeypatch.setattr("keras_dist_ext.training.resume.save_schedule._TIMES_COST", 0.0)  # every epoch is worth a save
    fit_small(tmp_path, waits, resume=kde.Resume(tmp_path, save_every, keep=99), epochs=3)
    found = len(list(tmp_path.glob("*.kde")))
    assert found == num_saves if num_saves else found > 3


def test_training_continues_while_a_checkpoint_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_on, write = threading.Event(), CheckpointStore.write
    written: list[bool] = []

    def slowly(self: CheckpointStore, *arguments: Any) -> Any:
        written.append(went_on.wait(60) and threading.current_thread() is not threading.main_thread())
        return write(self, *arguments)

    class GoesOn(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 8:
                went_on.set()

    monkeypatch.setattr(CheckpointStore, "write", slowly)
    fit_small(tmp_path, GoesOn(), epochs=10)
    assert all(written)
    assert len(written) < 30  # of 60 that were due
    position = unpack(CheckpointStore(tmp_path, 3).newest() or b"")[0]["position"]
    assert position["epoch"] == 10  # it was there when fit returned


def test_two_runs_in_one_directory_do_not_mix_their_checkpoints(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "keras_dist_ext.training.resume.save_schedule._TIMES_COST", 0.0
    )  # every epoch is worth a checkpoint

    class OtherRun(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                fit_small(tmp_path, resume=kde.Resume(tmp_path, 1), epochs=2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_small(tmp_path, OtherRun(), resume=kde.Resume(tmp_path, "epoch"), epochs=3)
    said = [str(warning.message) for warning in caught if "could not be written to" in str(warning.message)]
    assert re.search(
        r"OtherRun: another run \(process \d+ on .*\) has begun there since, and each run needs its own directory\. "
        "Training continues, and this run writes no more checkpoints there",
        said[0],
    )


# Incomplete checkpoints


def test_arrays_of_all_kinds_come_back(tmp_path: pathlib.Path) -> None:
    arrays = {
        "scalar": np.array(3.5, np.float64),
        "empty": np.zeros([0, 3], np.int32),
        "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "bool": np.array([True, False]),
        "bfloat16": tf.constant([1.5, -2.0], tf.bfloat16).numpy(),
        "bytes": np.frombuffer(b"abc", np.uint8),
        "of another machine": np.array([1.5, 2.0], ">f4"),
    }
    saves = CheckpointStore(tmp_path / "a" / "b", 2)
    saves.prepare()
    saves.write({"n": 1, "list": [None, 1e-300, "ü"]}, arrays)
    metadata, back = unpack(saves.newest() or b"")
    assert metadata == {"n": 1, "list": [None, 1e-300, "ü"]}
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(back[name], array)


def test_only_the_newest_checkpoints_are_kept(tmp_path: pathlib.Path) -> None:
    saves = CheckpointStore(tmp_path, 2)
    for number in range(5):
        saves.write({"number": number}, {})
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == [
        "ckpt-0000000004.kde",
        "ckpt-0000000005.kde",
    ]
    assert unpack(saves.newest() or b"")[0] == {"number": 4}


def torn(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


def emptied(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("damage", "message"),
    rotating(
        [(torn, "its checksum does not match"), (flipped, "its checksum does not match"), (emptied, "it is empty")],
        [],
        slow=[(torn, "its checksum does not match")],
    ),
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    damage: Any, message: str, strategies: Any, tmp_path: pathlib.Path
) -> None:
    reference = run(strategies.get("default"), tmp_path / "reference", epochs=2)
    waits = keras.callbacks.LambdaCallback(on_train_batch_end=wait_for_saves)  # so that each step is saved
    crash(strategies.get("default"), tmp_path / "run", 11, epochs=2, save_every=1, more=[waits])
    *_, before, newest = sorted((tmp_path / "run").glob("*.kde"))
    newest.write_bytes(damage(newest.read_bytes()))
    at = unpack(before.read_bytes())[0]["position"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = run(strategies.get("default"), tmp_path / "run", epochs=2, save_every=1)
    (said,) = [str(w.message) for w in caught if "cannot be used" in str(w.message)]
    assert said.startswith(f"{newest} cannot be used: {message}")
    assert said.endswith(f"The run resumes from {before.name}.")
    assert resumed["resumed"] == (at["epoch"], at["step"])
    assert_same(reference, resumed)
    assert not newest.exists()


def test_damaged_saves_do_not_push_out_whole_ones(tmp_path: pathlib.Path) -> None:
    saves = CheckpointStore(tmp_path, 2)
    paths = [saves.write({"number": number}, {}) for number in range(2)]
    paths[1].write_bytes(b"")
    again = CheckpointStore(tmp_path, 2)
    with pytest.warns(UserWarning, match="it is empty"):
        again.newest()
    again.write({"number": 2}, {})
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == [
        "ckpt-0000000001.kde",
        "ckpt-0000000003.kde",
    ]


def test_where_no_save_is_whole_the_run_begins_anew_and_says_so(tmp_path: pathlib.Path) -> None:
    saves = CheckpointStore(tmp_path, 2)
    saves.write({}, {}).write_bytes(b"KDECKPT1")
    with pytest.warns(
        UserWarning, match="ckpt-0000000001.kde cannot be used: .* no other, so the run starts from the beginning"
    ):
        assert saves.newest() is None


DYING = """
import os, signal, sys
import numpy as np
from keras_dist_ext.training.resume.checkpoints import CheckpointStore
saves = CheckpointStore(sys.argv[1], 3)
saves.prepare()
saves.write({"number": 1}, {"a": np.arange(1000)})
function, count = sys.argv[2], int(sys.argv[3])
original = getattr(os, function)
def dying(*arguments):
    global count
    count -= 1
    if count == 0:
        if function == "write":
            original(arguments[0], arguments[1][:len(arguments[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(os, function, dying)
saves.write({"number": 2}, {"a": np.arange(1000)})
"""


@pytest.mark.parametrize(("function", "count", "left"), [("write", 2, 1), ("fsync", 1, 1), ("replace", 1, 1),
                                                          ("fsync", 2, 2)])  # fmt: skip
def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before_or_a_complete_one(
    function: str, count: int, left: int, tmp_path: pathlib.Path
) -> None:
    ended = subprocess.run([sys.executable, "-c", DYING, str(tmp_path), function, str(count)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    saves = CheckpointStore(tmp_path, 3)
    metadata, arrays = unpack(saves.newest() or b"")
    assert metadata == {"number": left}
    np.testing.assert_array_equal(arrays["a"], np.arange(1000))
    saves.prepare()
    assert all(path.suffix == ".kde" for path in tmp_path.glob("ckpt-*"))


FULL = """
import resource, signal, sys
import numpy as np
from keras_dist_ext.training.resume.checkpoints import CheckpointStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
saves = CheckpointStore(sys.argv[1], 3)
saves.prepare()
saves.write({"number": 1}, {"a": np.arange(100)})
try:
    saves.write({"number": 2}, {"a": np.arange(1000)})
except OSError as error:
    print(error.errno)
"""


def test_what_does_not_fit_on_the_disk_leaves_nothing_and_harms_nothing(tmp_path: pathlib.Path) -> None:
    ended = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["27"], ended.stderr  # EFBIG
    assert [path.name for path in tmp_path.glob("ckpt-*")] == ["ckpt-0000000001.kde"]
    assert unpack(CheckpointStore(tmp_path, 3).newest() or b"")[0] == {"number": 1}


def test_a_full_disk_is_one_warning_and_saving_is_tried_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, number = os.write, [0]

    def full_for_a_while(file: int, data: Any) -> int:
        number[0] += 1
        if 5 < number[0] < 20:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(checkpoints_module.os, "write", full_for_a_while)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit_small(tmp_path, epochs=6)
    said = [str(warning.message) for warning in caught if "cannot" not in str(warning.message)]
    assert [text for text in said if "could not be written" in text] == [
        f"{tmp_path} could not be written to: OSError: [Errno 28] No space left on device. Earlier checkpoints are "
        "unchanged; training continues, and the next checkpoint is tried when it is due."
    ]
    assert history.epoch == list(range(6))
    assert unpack(CheckpointStore(tmp_path, 3).newest() or b"")[0]["position"]["epoch"] == 6


def test_checkpoints_that_fail_until_the_end_are_counted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    resume = kde.Resume(tmp_path, "epoch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints_module.os, "write", full)
            fit_small(tmp_path, resume=resume, epochs=2)
    said = [str(warning.message) for warning in caught if "could not be written" in str(warning.message)]
    assert len(said) == 2
    assert said[1] == f"{tmp_path} could not be written to: the last 2 checkpoints of this run have failed."


def test_what_is_read_is_never_unpickled(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Crash):
        fit_small(tmp_path, runs.crash_at(8, kill=False))

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    fit_small(tmp_path)
    with pytest.raises(InvalidCheckpoint, match="it does not start like a checkpoint"):
        check(pickle.dumps({"a": 1}))


# Two workers


def but_for_random(values: dict[str, Any]) -> dict[str, Any]:
    """What callbacks keep comes from the chief, also what each worker's has drawn by itself before."""
    return {**values, "drawn": values["drawn"][-1]}


@pytest.mark.slow
@on_two_workers(runs.crash_and_resume)
def test_two_workers_go_on_together_from_what_the_chief_has_saved(values: Any) -> None:
    for worker in values:
        assert worker["resumed"]["resumed"] is not None
        assert_same(but_for_random(worker["reference"]), but_for_random(worker["resumed"]))
    chief, other = (worker["resumed"] for worker in values)
    assert chief["resumed"] == other["resumed"]
    assert chief["history"] == other["history"]
    assert chief["drawn"][-1] != other["drawn"][-1]  # each worker has generators of its own, which went on
    assert [worker["num_saves"] > 0 for worker in values] == [True, False]


@pytest.mark.slow
@on_two_workers(runs.be_asked_to_end)
def test_all_workers_save_and_end_when_one_is_asked_to(values: Any) -> None:
    for worker in values:
        assert worker["code"] == 0
        assert worker["asked"]["resumed"] == (1, 4)
        assert_same(but_for_random(worker["reference"]), but_for_random(worker["asked"]))


@pytest.mark.rotating
@pytest.mark.multiworker
def test_a_run_that_lost_a_worker_goes_on_in_one_process(mirrored: Any, tmp_path: pathlib.Path) -> None:
    options = {"virtual_replicas": 2, "replica_seeds": 3, "data": "shuffled"}
    with pytest.raises(WorkerFailed, match="worker 1"):
        launch(2, runs.lose_worker_1, args=(str(tmp_path), options), time_limit=120)
    other = run(mirrored, tmp_path / "saves_0", **options)
    reference = run(mirrored, tmp_path / "reference", **options)
    assert other["resumed"] is not None
    for name in ("seeds", "epochs", *(name for name in reference if name.startswith(("weight", "optimizer")))):
        np.testing.assert_array_equal(reference[name], other[name], err_msg=name)
    for name, values in reference["history"].items():
        np.testing.assert_allclose(values, other["history"][name], rtol=1e-5)


# Preemption


@pytest.mark.parametrize("number", rotating([signal.SIGTERM, signal.SIGINT], [], slow=[signal.SIGTERM]))
def test_a_process_that_is_asked_to_end_saves_and_ends_well(
    number: signal.Signals, strategies: Any, tmp_path: pathlib.Path
) -> None:
    class Ask(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and self.model.optimizer.iterations == 10:
                os.kill(os.getpid(), number)

    options = {"resume": {"on_preemption": True}, "save_every": "1h"}
    before = signal.getsignal(number)
    reference = run(strategies.get("default"), tmp_path / "reference", **options)
    with pytest.raises(SystemExit) as ended:
        run(strategies.get("default"), tmp_path / "asked", more=[Ask()], **options)
    assert ended.value.code == 0
    assert signal.getsignal(number) is before
    resumed = run(strategies.get("default"), tmp_path / "asked", **options)
    assert resumed["resumed"] == (1, 5)  # the step after the one in which it was asked
    assert_same(reference, resumed)


@pytest.mark.parametrize("epoch", rotating([0, 1], [0]))  # of 2
@pytest.mark.parametrize("when", rotating(["on_test_begin", "on_train_batch_end"], []))
def test_a_process_that_is_asked_to_end_at_the_end_of_an_epoch_does(
    when: str, epoch: int, strategies: Any, tmp_path: pathlib.Path
) -> None:
    class Ask(keras.callbacks.Callback):
        epoch, ended = 0, False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def ask(self, *arguments: Any, logs: Any = None) -> None:
            if self.epoch == epoch and (when == "on_test_begin" or arguments[0] == 5):
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_end(self, logs: Any = None) -> None:
            self.ended = True

    ask = Ask()
    setattr(ask, when, ask.ask)
    options = {"save_every": "1h", "epochs": 2}
    reference = run(strategies.get("default"), tmp_path / "reference", **options)
    with pytest.raises(SystemExit) as ended:
        run(strategies.get("default"), tmp_path / "asked", more=[ask], resume={"on_preemption": True}, **options)
    assert ended.value.code == 0
    assert ask.ended == (epoch == 1)
    resumed = run(strategies.get("default"), tmp_path / "asked", **options)
    assert resumed["resumed"] == (epoch + 1, 0)
    assert_same(reference, resumed)


@pytest.mark.usefixtures("signals_as_in_a_terminal")
def test_a_second_signal_is_not_held_up(tmp_path: pathlib.Path) -> None:
    class Impatient(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(1)

    with pytest.raises(KeyboardInterrupt):
        fit_small(tmp_path, Impatient(), resume=kde.Resume(tmp_path, on_preemption=True))


def test_signals_are_heard_in_the_main_thread_alone(tmp_path: pathlib.Path) -> None:
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            fit_small(tmp_path, resume=kde.Resume(tmp_path, on_preemption=True))
        except kde.ResumeError as error:
            errors.append(error)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert "in a thread: Python handles signals only in the main thread" in str(errors[0])


def test_nothing_is_left_of_a_run(tmp_path: pathlib.Path) -> None:
    with contextlib.suppress(Crash):
        fit_small(tmp_path, runs.crash_at(5, kill=False))
    assert not [thread for thread in threading.enumerate() if thread.name == "keras_dist_ext.save"]
    assert {path.suffix for path in tmp_path.glob("ckpt-*")} == {".kde"}
