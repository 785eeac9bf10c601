"""What the doctor reads of real models, callbacks and files, and what it does where that fails."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from doctor_runs import L
from tensorflow.python.ops import script_ops

import keras_dist_ext as kde
from keras_dist_ext._keras import python_ops
from keras_dist_ext._keras.python_ops import observe_python_ops
from keras_dist_ext.diagnosis.doctor import setting
from keras_dist_ext.diagnosis.doctor.examination import Examination, PlacedElsewhere, Setting
from keras_dist_ext.diagnosis.doctor.python_clock import PythonClock
from keras_dist_ext.diagnosis.doctor.python_data import MadeInPython
from keras_dist_ext.diagnosis.doctor.python_data_rules import explains_wait
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.diagnosis.doctor.run_trace import _inspected

STEP_BLOCKS = "keras_dist_ext.diagnosis.doctor.step_blocks"

# Between epochs


class Predicts(keras.callbacks.Callback):  # type: ignore[misc]
    """Predicts after each epoch, of arrays, which traces what reads them."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for _ in range(3):
            self.model.predict(np.zeros((64, 4), "float32"), verbose=0)


@pytest.mark.slow
def test_predicting_after_each_epoch_is_the_callbacks_fault_and_not_retracing() -> None:
    model = kde.Sequential([keras.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse")
    predicts, doctor = Predicts(), kde.ParallelismDoctor(show=False)
    x = np.zeros((128, 4), "float32")
    model.fit(x, x[:, :1], epochs=7, verbose=0, callbacks=[predicts, doctor])
    assert doctor.report is not None
    assert [code for code in doctor.report.codes if code != "short-epochs"] == ["slow-epoch-end"]
    between = doctor.report.examination.between
    assert between is not None
    assert between.num_times == 6
    (calls,) = (calls for calls in between.calls if calls.name == "Predicts")
    assert calls.num_calls == 6
    assert calls.seconds <= between.seconds
    assert doctor.report.examination.times.traces == ()
    assert "on_epoch_end" not in vars(predicts)


def test_validation_is_timed_apart_from_steps() -> None:
    model = kde.Sequential([keras.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse")
    doctor = kde.ParallelismDoctor(show=False)
    x = np.zeros((64, 4), "float32")
    model.fit(x, x[:, :1], epochs=8, verbose=0, callbacks=[doctor], validation_data=(x, x[:, :1]), validation_freq=2)
    assert doctor.report is not None
    between = doctor.report.examination.between
    assert between is not None
    assert (between.num_times, 0 < between.validation_seconds < between.seconds) == (7, True)


# The largest variable


class Reads(kde.Model):  # type: ignore[misc]
    """Reads rows of one table, and leaves another one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.unused = L.Embedding(50, 8), L.Dense(1), L.Embedding(10, 2)

    def call(self, x: Any) -> Any:
        return self.head(self.table(x)[:, 0])


def test_a_table_that_was_never_built_costs_no_report() -> None:
    model = Reads()
    model.compile("adam", "mse")
    model(np.zeros((2, 1), "int32"))
    assert not model.unused.built
    report = kde.diagnose(model)
    largest = report.examination.setting.largest
    assert largest is not None
    assert (largest.num_bytes, largest.optimizer, largest.num_rows) == (50 * 8 * 4, "Adam", 50)
    assert largest.variable.endswith("/embeddings")


SGD = keras.optimizers.SGD


@pytest.mark.parametrize(
    ("optimizer", "num_rows"),
    [
        (SGD(), 0),  # writes the rows that were read
        (SGD(momentum=0.9), 50),
        (SGD(weight_decay=1e-3), 50),
        (SGD(use_ema=True), 50),
        (SGD(gradient_accumulation_steps=2), 50),
        (keras.optimizers.LossScaleOptimizer(SGD()), 0),
        (keras.optimizers.Adam(), 50),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_rows_of_a_table_count_where_an_update_writes_all_of_them(optimizer: Any, num_rows: int) -> None:
    model = keras.Sequential([keras.Input((1,), dtype="int32"), L.Embedding(50, 8), L.Flatten(), L.Dense(1)])
    model.compile(optimizer, "mse")
    largest = setting._largest(model)
    assert largest is not None
    assert (largest.num_bytes, largest.num_rows) == (50 * 8 * 4, num_rows)
    assert largest.optimizer == type(getattr(optimizer, "inner_optimizer", optimizer)).__name__


# Shapes of batches

LENGTHS = np.where(np.arange(256) % 8 == 7, 300, 10)


def _sequences(lengths: Any) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(lengths).shuffle(len(lengths), seed=0)
    return data.map(lambda n: (tf.range(1, n + 1), tf.ones([1]))).cache()


def _fit_sequences(
    data: tf.data.Dataset, *, length: int | None = None, epochs: int = 2, **compiled: Any
) -> kde.ParallelismDoctor:
    model = kde.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            L.Embedding(400, 32),
            L.Conv1D(128, 5, padding="same"),
            L.Conv1D(128, 5, padding="same"),
            L.GlobalMaxPooling1D() if length is None else L.Flatten(),
            L.Dense(1),
        ]
    )
    model.compile("adam", "mse", **compiled)
    doctor = kde.ParallelismDoctor(show=False)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[doctor])
    assert doctor.report is not None
    doctor.model.optimizer.build(doctor.model.trainable_variables)
    return doctor


@pytest.mark.rotating
def test_padding_is_found_with_its_stage_and_what_a_step_takes_without_it() -> None:
    doctor = _fit_sequences(_sequences(LENGTHS).padded_batch(16).prefetch(2))
    finding = doctor.report.findings[0]
    assert (finding.code, finding.seconds > 0) == ("mostly-padding", True)
    assert finding.evidence.startswith(
        "padded_batch(16): in 256 examples the longest has 300 places, the mean 46.2; in"
    )
    assert "`kde.bucket_by_length(dataset, batch_size=16)`" in finding.fix
    assert int(doctor.model.optimizer.iterations) == 32  # what was tried is undone


@pytest.mark.rotating
def test_padding_of_sequences_of_similar_lengths_or_that_a_model_needs_is_no_finding() -> None:
    doctor = _fit_sequences(_sequences(np.arange(256) % 20 + 60).padded_batch(16).prefetch(2))
    assert doctor.report.examination.padding is None
    fixed = _sequences(LENGTHS).padded_batch(16, padded_shapes=([300], [1])).prefetch(2)
    assert _fit_sequences(fixed, length=300).report.examination.padding is None


@pytest.mark.rotating
def test_compiling_anew_for_each_shape_is_found_with_its_number_and_seconds() -> None:
    def report(sizes: Any) -> Any:
        model = kde.Sequential([keras.Input((4,)), L.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
        doctor = kde.ParallelismDoctor(show=False)
        data = tf.data.Dataset.from_tensor_slices(sizes).map(lambda n: (tf.ones([n, 4]), tf.ones([n, 1])))
        model.fit(data, verbose=0, callbacks=[doctor])
        return doctor.report

    found = report(np.arange(4, 16))
    finding = found.findings[0]
    assert finding.code == "recompiling"
    assert finding.evidence.startswith("10 of 10 steps took ")
    assert "; 10 batches, read once more, have 10 shapes: (4, 4) and (4, 1); (5, 4) and (5, 1)" in finding.evidence
    assert "`compile(jit_compile=False)`" in finding.fix
    assert "`dataset.rebatch(8, drop_remainder=True)`" in finding.fix
    assert report(np.array([4] * 29 + [2])).examination.recompilation is None


def test_a_wait_that_making_a_batch_does_not_explain_is_not_the_fault_of_a_py_dataset() -> None:
    assert explains_wait(MadeInPython("Generator"), 0.01)  # what a batch takes is not known
    made = MadeInPython("PyDataset", "Rows.__getitem__", seconds=0.002, cpu_seconds=0.002)
    assert [explains_wait(made, wait) for wait in (0.006, 0.007)] == [True, False]
    assert explains_wait(dataclasses.replace(made, use_multiprocessing=True), 0.007)  # sending takes long


class Adds:
    """A function of Python without a line of its own."""

    def __call__(self, x: Any) -> Any:
        return x + np.float32(1)


def test_calls_of_functions_of_python_are_noted_by_all_that_watch_and_by_no_other() -> None:
    seen: list[list[str]] = [[], []]
    stops = [observe_python_ops(lambda token, *_, noted=noted: noted.append(token)) for noted in seen]
    adds = functools.partial(Adds())
    step = tf.function(lambda x: tf.numpy_function(adds, [x], tf.float32)).get_concrete_function(1.0)
    ((token, name),) = python_ops.python_ops_of([step.graph]).items()
    assert name == "Adds"
    assert script_ops._py_funcs(token, None, [np.float32(2)]) == 3.0  # as TensorFlow calls them
    with pytest.raises(TypeError):
        script_ops._py_funcs(token, None, [])
    assert seen == [[token] * 2] * 2
    for noted in seen:
        noted.clear()
    for expected in ([1, 1], [1, 2], [1, 2]):
        assert step(tf.constant(1.0)).numpy() == 2.0
        assert [len(noted) for noted in seen] == expected
        assert set(seen[0] + seen[1]) == {token}
        for stop in stops[:1] * 2:  # as often as one likes
            stop()
        stops = stops[1:] if len(stops) > 1 else stops
    assert not python_ops._observers


def test_functions_of_python_that_were_not_called_took_no_time() -> None:
    def both(x: Any) -> Any:
        return tf.numpy_function(abs, [x], tf.float32) + tf.numpy_function(round, [x], tf.float32)

    clock = PythonClock()
    try:
        step = tf.function(both).get_concrete_function(tf.TensorSpec([]))
        tokens = {name: token for token, name in python_ops.python_ops_of([step.graph]).items()}
        assert set(tokens) == {"abs", "round"}
        called = "round"
        for begin in (1.0, 2.0):
            clock._note(tokens[called], begin, begin + 0.5)
        (calls,) = clock.calls([step.graph])
    finally:
        clock.stop()
    assert (calls.function, calls.num_calls, calls.seconds) == (called, 2, 1.0)


# Where measuring fails


def _fitted(doctor: kde.ParallelismDoctor, num_batches: int = 12, width: int = 1) -> kde.Sequential:
    model = kde.Sequential([keras.Input((4,)), L.Dense(width)])
    model.compile("sgd", "mse", steps_per_execution=1)
    x = np.ones((4 * num_batches, 4), "float32")
    model.fit(x, x[:, :width], batch_size=4, verbose=0, callbacks=[doctor])
    return model


def test_a_doctor_that_fails_in_the_middle_or_at_the_end_lets_training_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("no such counter")

    doctor = kde.ParallelismDoctor(show=False)
    for name in ("keras_dist_ext.training.program.StepProgram.graphs", f"{STEP_BLOCKS}.StepBlocks.end_execution"):
        with monkeypatch.context() as patches:
            patches.setattr(name, fails)
            with pytest.warns(UserWarning, match="ParallelismDoctor failed: KeyError: 'no such counter'"):
                model = _fitted(doctor)
        assert int(model.optimizer.iterations) == 12
        assert not model.replica_runtime.recorders
    for error in (psutil.AccessDenied(), OSError("no /proc")):

        def unreadable(error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patches:
            patches.setattr(psutil, "cpu_times", unreadable)
            _fitted(doctor)
        assert doctor.report is not None
        assert doctor.report.examination.times is not None
        assert doctor.report.examination.times.others_cores is None


@pytest.mark.slow
def test_what_fails_while_a_model_is_diagnosed_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise KeyError("no such rule")

    monkeypatch.setattr("keras_dist_ext.diagnosis.doctor.doctor.judge", fails)
    model = kde.Sequential([keras.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(KeyError, match="no such rule"):
        kde.diagnose(model, np.ones((8, 4)), np.ones((8, 1)), num_steps=2, interventions=False)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


class NeverTrains(kde.Sequential):  # type: ignore[misc]
    def fit(self, *_: Any, **__: Any) -> None:
        """Train in a way of its own, without callbacks."""


def test_a_model_whose_fit_calls_no_callback_is_no_matter_for_the_doctor() -> None:
    model = NeverTrains([keras.Input((4,)), L.Dense(1)], name="never")
    model.compile("sgd", "mse")
    with pytest.raises(kde.MonitorError, match="^'never' made no step, so there is nothing to judge"):
        kde.diagnose(model, np.ones((8, 4)), np.ones((8, 1)))


def test_a_pipeline_that_is_quick_or_that_fails_costs_no_finding() -> None:
    quick = tf.data.Dataset.range(8).batch(2)
    findings, seconds = _inspected(quick, least_seconds=100.0)
    assert findings == []
    assert seconds is not None
    assert 0.0 < seconds < 100.0
    assert _inspected(quick.map(lambda x: tf.debugging.check_numerics(tf.cast(x, tf.float32) / 0.0, "inf"))) == (
        [],
        None,
    )


@pytest.mark.slow
def test_of_data_that_can_be_read_once_no_experiment_is_made() -> None:
    doctor = kde.ParallelismDoctor(show=False, interventions=True)
    model = kde.Sequential([keras.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=1)
    x = np.ones((4, 4), "float32")
    model.fit(((x, x[:, :1]) for _ in range(12)), steps_per_epoch=12, verbose=0, callbacks=[doctor])
    assert doctor.report is not None
    trials = doctor.report.examination.trials
    assert trials is not None
    assert (trials.seconds, trials.skipped) == ({}, {"all": "the data can be read once only"})


@pytest.mark.slow
def test_callbacks_in_a_list_of_keras_are_not_timed_and_steps_are() -> None:
    doctor = kde.ParallelismDoctor(show=False)
    model = kde.Sequential([keras.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=1)
    x = np.ones((48, 4), "float32")
    given = keras.callbacks.CallbackList([doctor], add_history=True, model=model)
    model.fit(x, x[:, :1], batch_size=4, validation_data=(x, x[:, :1]), callbacks=given)
    assert doctor.report is not None
    times = doctor.report.examination.times
    assert times is not None
    assert times.calls == ()
    assert doctor.report.examination.between is None


def test_a_cluster_that_cannot_be_read_is_none_of_the_doctors() -> None:
    assert setting._cluster({"TF_CONFIG": "{"}) is None


def test_heavy_ops_are_looked_for_on_the_replicas_of_this_worker_and_named_by_where_they_lie() -> None:
    with tf.Graph().as_default() as graph:
        for replica, device in ((0, "CPU:1"), (1, "CPU:1"), (2, "CPU:0")):
            with tf.name_scope(f"replica_{replica}/block"), tf.device(device):
                tf.linalg.matmul(tf.ones([2, 2]), tf.ones([2, 2]))
    found, share = setting.placed_elsewhere_in([graph], ["CPU:0", "CPU:1"], [])
    assert found == (PlacedElsewhere("block", (0,), "CPU:1"),)
    assert share == 1.0


# Runs in the middle of others


class Begins(keras.callbacks.Callback):  # type: ignore[misc]
    """Begins another run, with the same doctor, at the end of an epoch."""

    def __init__(self, kind: str, doctor: kde.ParallelismDoctor) -> None:
        super().__init__()
        self.kind, self.doctor = kind, doctor

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.kind == "fails":
            raise KeyError("broken off")
        x = np.ones((8, 4), "float32")
        getattr(self.model, self.kind)(x, x[:, :1], verbose=0, callbacks=[self.doctor])


@pytest.mark.slow
@pytest.mark.parametrize(("library", "kind"), [(kde, "evaluate"), (keras, "fit")], ids=["ours", "stock"])
def test_a_run_that_begins_another_one_with_its_doctor_goes_on(library: Any, kind: str) -> None:
    doctor = kde.ParallelismDoctor(show=False)
    model = library.Sequential([keras.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=1)
    x = np.ones((48, 4), "float32")
    history = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[doctor, Begins(kind, doctor)])
    assert len(history.history["loss"]) == 2
    assert doctor.report is not None
    assert (doctor.report.examination.times is not None) == (library is kde)
    assert not python_ops._observers


@pytest.mark.slow
def test_a_doctor_of_stock_keras_leaves_nothing_of_a_run_that_broke_to_the_next_one() -> None:
    doctor = kde.ParallelismDoctor(show=False)
    model = keras.Sequential([keras.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")
    with pytest.raises(KeyError, match="broken off"):
        model.fit(x, x[:, :1], verbose=0, callbacks=[doctor, Begins("fails", doctor)])
    model.evaluate(x, x[:, :1], verbose=0, callbacks=[kde.ParallelismDoctor(show=False)])
    model.fit(x, x[:, :1], verbose=0, callbacks=[doctor])
    assert doctor.report is not None
    assert not python_ops._observers


def test_steps_of_parameter_servers_are_not_recorded() -> None:
    recorders: list[Any] = []
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    model: Any = SimpleNamespace(distribute_strategy=strategy, add_recorder=recorders.append, train_function=None)
    doctor = kde.ParallelismDoctor(show=False)
    doctor.on_run_prepare(model)
    doctor.on_run_end()
    assert not recorders


# What is written, and compared with


def test_a_report_that_cannot_be_written_is_a_warning_and_without_a_run_there_is_none(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    doctor = kde.ParallelismDoctor(json=tmp_path / "file" / "doctor.json")
    doctor.write_report()
    assert not capsys.readouterr().out
    doctor.report = judge(Examination(Setting(strategy="mirrored", num_replicas=2, devices=("GPU:0", "GPU:1"))))
    with pytest.warns(UserWarning, match="The doctor's report could not be written to .*doctor.json"):
        doctor.write_report()
    assert (tmp_path / "file").read_text() == "kept"


def test_two_runs_with_one_folder_are_compared_and_a_model_of_other_weights_is_not(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor = kde.ParallelismDoctor(tmp_path)
    _fitted(doctor)
    assert doctor.comparison is None
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written["measured"]["num_steps"] == 10
    assert written["measured"]["start_seconds"] == []
    assert "report in" not in capsys.readouterr().out

    again = kde.ParallelismDoctor(tmp_path)
    _fitted(again, num_batches=14)  # of another name
    assert again.report is not None
    assert again.report.examination.setting.model != written["setting"]["model"]
    assert again.report.examination.setting.weights == written["setting"]["weights"]
    assert again.comparison is not None
    assert (again.comparison.before.num_steps, again.comparison.after.num_steps) == (10, 12)
    assert f"Since the report in {tmp_path / 'doctor.json'}: " in capsys.readouterr().out

    _fitted(again, num_batches=2)  # too few to be measured
    assert again.comparison is None
    assert "no step of this run was watched" in capsys.readouterr().out
    _fitted(again)
    assert again.comparison.before.num_steps == 12

    _fitted(again, width=3)
    assert again.comparison is None
    assert "whose weights are others than those of 'sequential" in capsys.readouterr().out
