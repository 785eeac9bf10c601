"""Each fault that is planted in a real run is the first finding, its reference without the fault has none."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time
from typing import Any

import doctor_runs
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from doctor_runs import WIDTH, L, X, Y, mlp, pipeline, train
from healthy_runs import alarms, judge_on_exact_times, share
from made_up_clock import MadeUpClock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorflow.python.eager.polymorphic_function import polymorphic_function

import keras_dist_ext as kde
from keras_dist_ext.diagnosis.doctor import setting
from keras_dist_ext.diagnosis.doctor.interventions import _doubled, experiment
from keras_dist_ext.diagnosis.doctor.report import Report
from keras_dist_ext.strategy.pick import pick_strategy
from keras_dist_ext.training.snapshot import _copies

# Planted faults

slow, in_turn = pytest.mark.slow, pytest.mark.rotating(turns=2)
FAULTS = [
    pytest.param("sequential_map", "sequential-map", marks=in_turn),
    pytest.param("no_prefetch", "no-prefetch", marks=in_turn),
    pytest.param("generator_bound", "generator-bound", marks=in_turn),
    pytest.param("python_generator", "generator-bound", marks=in_turn),
    pytest.param("input_bound", "input-bound", marks=in_turn),
    pytest.param("starved", "batch-too-small", marks=in_turn),
    pytest.param("host_bound", "host-bound"),
    pytest.param("watched_steps", "host-bound", marks=in_turn),
    pytest.param("eager", "eager", marks=in_turn),
    pytest.param("python_step", "python-in-step", marks=in_turn),
    pytest.param("retracing", "retracing", marks=in_turn),
    pytest.param("fetching_callback", "fetching-callback", marks=in_turn),
    pytest.param("slow_callback", "slow-callback", marks=in_turn),
    pytest.param("pinned_device", "pinned-device", marks=in_turn),
    pytest.param("straggler", "straggler", marks=in_turn),
    pytest.param("unequal_shards", "unequal-shards", marks=in_turn),
    pytest.param("sequential_model", "sequential-model", marks=in_turn),
]
ON_NO_CLOCK = ("eager", "pinned-device", "batch-too-small")
MADE_UP_FAULTS = {"straggler": 78 * 0.375, "slow-callback": 77 * 0.125, "generator-bound": 77 * 0.25}  # seconds lost


def assert_healthy(report: Report) -> None:
    """Nothing is to be said but what the machine may have done to the clock, and nothing at all on exact times."""
    assert alarms(report) == [], str(report)
    exact = judge_on_exact_times(report.examination)
    assert exact.findings == (), str(exact)


@pytest.mark.parametrize(("fault", "code"), FAULTS)
def test_a_planted_fault_is_the_first_finding_and_its_reference_has_none(fault: str, code: str, mirrored: Any) -> None:
    run = getattr(doctor_runs, fault)
    found = run(mirrored, True)
    assert alarms(found, code)[:1] == [code], str(found)
    reference = run(mirrored, False)
    assert_healthy(reference)
    claimed, of_reference = (sum(share(r, f) for f in r.findings if f.code == code) for r in (found, reference))
    assert of_reference < claimed / 3, f"{found}\n{reference}"
    if code in ON_NO_CLOCK:
        assert judge_on_exact_times(found.examination).codes == [code]
    assert [note.code for note in reference.notes if note.code != "busy-machine"] == ["shared-cpu"]


@pytest.mark.parametrize("fault", MADE_UP_FAULTS)
def test_by_a_made_up_clock_a_fault_alone_is_found_with_its_seconds_and_its_reference_has_no_finding(
    fault: str, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches:
        reference = doctor_runs.by_a_made_up_clock(mirrored, "", patches)
    assert reference.findings == (), str(reference)
    assert reference.shares["computing"] == 1.0
    found = doctor_runs.by_a_made_up_clock(mirrored, fault, monkeypatch)
    assert [(finding.code, finding.seconds) for finding in found.findings] == [(fault, MADE_UP_FAULTS[fault])]


@pytest.mark.parametrize(
    ("fault", "code"),
    rotating(
        [
            ("batch_too_small", "batch-too-small"),  # what of it timings alone show depends on what else runs
            ("host_bound", "host-bound"),
            ("eager", "eager"),
            ("sequential_map", "sequential-map"),
        ],
        [],
        slow=[("sequential_map", "sequential-map")],
    ),
)
def test_experiments_confirm_a_planted_fault(
    fault: str, code: str, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_runs, "train", _with_experiments)
    run = getattr(doctor_runs, fault)
    found = run(mirrored, True)
    assert alarms(found, code)[:1] == [code], str(found)
    assert found.examination.trials is not None
    assert len(found.examination.trials.seconds) >= 5, str(found.examination.trials)
    assert found.speedup is not None
    assert_healthy(run(mirrored, False))


def _with_experiments(*args: Any, **kwargs: Any) -> Any:
    return train(*args, doctor=kde.ParallelismDoctor(show=False, interventions=True), **kwargs)


# Healthy runs


def _images(num: int = 512) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(num, 20, 20, 1)).astype("float32"), generator.integers(10, size=(num, 1))


def _cnn() -> list[Any]:
    layers = [L.Conv2D(16, 3, activation="relu"), L.MaxPooling2D(), L.Conv2D(32, 3, activation="relu")]
    return [keras.Input((20, 20, 1)), *layers, L.GlobalAveragePooling2D(), L.Dense(10, "softmax")]


def _residual() -> list[Any]:
    return [
        keras.Input((WIDTH,)),
        L.Dense(256),
        L.BatchNormalization(),
        L.ReLU(),
        L.Dropout(0.3),
        L.Dense(256),
        L.Dense(1),
    ]


def _text() -> list[Any]:
    return [
        keras.Input((32,), dtype="int32"),
        L.Embedding(500, 64),
        L.Conv1D(64, 3),
        L.GlobalMaxPooling1D(),
        L.Dense(1),
    ]


def _recurrent() -> list[Any]:
    return [keras.Input((20, 16)), L.GRU(64), L.Dense(1)]


def _autoencoder() -> list[Any]:
    return [keras.Input((WIDTH,)), L.Dense(512, "relu"), L.Dense(32), L.Dense(512, "relu"), L.Dense(WIDTH)]


CLEAN: dict[str, tuple[Any, ...]] = {
    "perceptron": (mlp, lambda: pipeline()),
    "arrays": (doctor_runs.wide, lambda: (X, Y)),
    "convolutions": (_cnn, lambda: pipeline(*_images(), 64), "sparse_categorical_crossentropy"),
    "normalization and dropout": (_residual, lambda: pipeline()),
    "text": (_text, lambda: pipeline(np.abs(X[:, :32] * 100).astype("int32"), Y, 128)),
    "recurrent": (_recurrent, lambda: pipeline(X[:, :].reshape(-1, 4, 16).repeat(5, axis=1), Y, 64)),
    "autoencoder": (_autoencoder, lambda: pipeline(X, X)),
    "tiny": (doctor_runs.tiny, lambda: pipeline()),
}


@pytest.mark.parametrize(
    "name", [name if name in ("perceptron", "tiny") else pytest.param(name, marks=slow) for name in CLEAN]
)
def test_a_healthy_run_has_no_finding(name: str, mirrored: Any) -> None:
    layers, data, *loss = CLEAN[name]
    report = train(mirrored, layers, data(), loss=loss[0] if loss else "mse")
    assert_healthy(report)
    assert report.shares


def _diagnosed(strategy: Any, data: Any, **arguments: Any) -> Any:
    with strategy.scope():
        model = kde.Sequential(mlp())
        model.compile("adam", "mse")
    return kde.diagnose(model, data, num_steps=25, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("interventions", [False, pytest.param(True, marks=slow)])
def test_epochs_of_one_batch_are_no_fault(interventions: bool, mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras_dist_ext.diagnosis.doctor.interventions._SECONDS", 0.5)
    data = tf.data.Dataset.from_tensor_slices((X[:256], Y[:256])).shuffle(256).batch(256)
    report = _diagnosed(mirrored, data, interventions=interventions)
    assert_healthy(report)
    assert len(report.examination.times.start_seconds) == report.examination.times.num_steps


@pytest.mark.slow
def test_data_that_takes_long_to_begin_is_found_where_epochs_are_short(mirrored: Any) -> None:
    opened = tf.data.Dataset.range(1).map(
        lambda i: tf.numpy_function(lambda j: (time.sleep(0.15), j)[1], [i], tf.int64)
    )
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(256)
    data = opened.flat_map(lambda _: batches).apply(tf.data.experimental.assert_cardinality(8))
    codes = ["slow-start-of-epochs"]
    report = _diagnosed(mirrored, data, interventions=False)
    assert alarms(report) == codes, str(report)


@slow
def test_a_healthy_run_on_one_device_has_no_finding_and_no_note(strategies: Any) -> None:
    report = train(strategies.get("default"), _cnn, pipeline(*_images(), 64), loss="sparse_categorical_crossentropy")
    assert_healthy(report)
    assert [note.code for note in report.notes if note.code != "busy-machine"] == []


@pytest.mark.rotating(turns=3)
def test_a_healthy_run_of_a_functional_model_on_four_replicas_has_no_finding(strategies: Any) -> None:
    with strategies.get("mirrored4").scope():
        inputs = keras.Input((WIDTH,))
        tokens = L.Reshape((16, WIDTH // 16))(inputs)
        attended = L.MultiHeadAttention(4, 16)(tokens, tokens)
        model = kde.Model(inputs, L.Dense(1)(L.Flatten()(L.Dense(128, "relu")(attended))))
        model.compile("adam", "mse")

    def look() -> Any:
        doctor = kde.ParallelismDoctor(show=False, interventions=True)
        model.fit(pipeline(), steps_per_epoch=40, epochs=2, verbose=0, shuffle=False, callbacks=[doctor])
        return doctor.report

    assert_healthy(look())


# The setting of real runs


def _quick(strategy: Any) -> list[str]:
    return alarms(train(strategy, mlp, pipeline(), num_steps=10))


@pytest.mark.slow
def test_a_cluster_that_is_ignored_is_found(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    assert _quick(mirrored) == ["cluster-ignored"]


def test_mirrored_with_one_device_is_found() -> None:
    strategy = pick_strategy("mirrored", devices=["CPU:0"], environ={}).strategy
    assert _quick(strategy) == ["mirrored-one-device"]


def test_idle_gpus_are_found(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "keras_dist_ext.diagnosis.doctor.setting.list_devices", lambda: ("CPU:0", "CPU:1", "GPU:0", "GPU:1")
    )
    assert _quick(mirrored) == ["idle-accelerators"]


@pytest.mark.slow
def test_a_stock_model_outside_of_the_scope_is_found_and_its_copy_is_measured(mirrored: Any) -> None:
    stock = keras.Sequential(mlp())
    stock.compile("adam", "mse")
    before = [weight.tobytes() for weight in stock.get_weights()]
    report = kde.diagnose(stock, pipeline(), strategy=mirrored, interventions=False, steps_per_epoch=30)
    assert alarms(report) == ["outside-scope"]
    assert "sequential" in report.findings[0].evidence
    assert [note.code for note in report.notes if note.code == "stock-model"] == ["stock-model"]
    assert report.shares  # of a copy of ours
    assert [weight.tobytes() for weight in stock.get_weights()] == before


class NoConfig(keras.Model):
    """Cannot be made again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = L.Dense(width)

    def call(self, x: Any) -> Any:
        return self.dense(x)


@pytest.mark.slow
@pytest.mark.parametrize("is_mixed", [True, False])
def test_passes_that_run_into_each_other_are_found_whatever_the_model_is(is_mixed: bool, mirrored: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices((X[:256], Y[:256]))
    data = data.shuffle(256).repeat() if is_mixed else data.repeat().shuffle(256)
    data = data.batch(64).prefetch(2)
    codes = [] if is_mixed else ["repeat-before-shuffle"]
    made: dict[str, Any] = {"ours": kde.Sequential, "stock, not built": keras.Sequential, "no copy": None}
    for name, cls in made.items():
        with mirrored.scope():
            model = NoConfig(1) if cls is None else cls([L.Dense(8), L.Dense(1)])
            model.compile("adam", "mse")
        report = kde.diagnose(model, data, num_steps=25, interventions=False)
        assert [code for code in report.codes if code == "repeat-before-shuffle"] == codes, name
        assert (report.examination.times is None) == (cls is None), name
        said = [note.what for note in report.notes if note.code == "stock-model"]
        assert len(said) == (cls is not kde.Sequential)
        assert all(("has no `get_config`" in what) == (cls is None) for what in said)
    doctor = kde.ParallelismDoctor(show=False)
    with mirrored.scope():
        model = kde.Sequential([L.Dense(8), L.Dense(1)])
        model.compile("adam", "mse")
    model.fit(data, steps_per_epoch=20, epochs=2, verbose=0, shuffle=False, callbacks=[doctor])
    assert doctor.report is not None
    assert ("repeat-before-shuffle" in doctor.report.codes) != is_mixed


@pytest.mark.slow
def test_a_stock_model_can_have_the_callback_too(mirrored: Any) -> None:
    with mirrored.scope():
        stock = keras.Sequential(mlp())
        stock.compile("adam", "mse", run_eagerly=True)
    doctor = kde.ParallelismDoctor(show=False)
    stock.fit(X[:512], Y[:512], batch_size=256, verbose=0, callbacks=[doctor])
    assert doctor.report is not None
    assert doctor.report.codes == ["eager"]


def test_without_data_the_setting_alone_is_judged(mirrored: Any) -> None:
    with mirrored.scope():
        model = kde.Sequential(mlp())
        model.compile("adam", "mse", run_eagerly=True)
    assert kde.diagnose(model).codes == ["eager"]
    with pytest.raises(kde.MonitorError, match="'.*' is not compiled, so no step can be made. Compile it."):
        kde.diagnose(kde.Sequential([L.Dense(1)]))


# Nothing is left behind


def _stateful(strategy: Any, **compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = kde.Sequential([keras.Input((WIDTH,)), L.Dense(32), L.BatchNormalization(), L.Dropout(0.5), L.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01, **compiled), "mse", metrics=["mae"])
    model.fit(pipeline(), steps_per_epoch=3, verbose=0, shuffle=False)
    return model


@pytest.mark.parametrize("accumulate", rotating([None, 4], [], slow=[4]))
def test_diagnosis_with_experiments_leaves_every_copy_of_every_variable_bit_for_bit(
    accumulate: int | None, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keras_dist_ext.diagnosis.doctor.interventions._SECONDS", 0.5)
    model = _stateful(mirrored, gradient_accumulation_steps=accumulate)
    random.seed(3)
    before = [copy.numpy().tobytes() for copy in _copies(model)]
    drawn = random.getstate(), np.random.get_state()[1].tobytes()
    history = model.history
    report = kde.diagnose(model, pipeline(), steps_per_epoch=30)
    assert report.examination.trials is not None
    assert set(report.examination.trials.seconds) >= {"as it was", "data", "no sum", "one device", "double"}
    assert [copy.numpy().tobytes() for copy in _copies(model)] == before
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == drawn
    assert model.history is history
    reference = _stateful(mirrored, gradient_accumulation_steps=accumulate)
    for one in (model, reference):
        one.fit(pipeline(), steps_per_epoch=5, verbose=0, shuffle=False)
    assert [w.tobytes() for w in model.get_weights()] == [w.tobytes() for w in reference.get_weights()]


class NoCopy(kde.Model):
    """Cannot be rebuilt on one device."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.head = L.Dense(num)

    def call(self, x: Any) -> Any:
        return self.head(x)

    def get_config(self) -> Any:
        raise NotImplementedError("no config")


def _tried(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {"_BLOCK_SECONDS": 1e-6, "_DRAIN_SECONDS": 1e-6, "_MANY_SECONDS": 1e-6, "_SECONDS": 0.0}.items():
        monkeypatch.setattr(f"keras_dist_ext.diagnosis.doctor.interventions.{name}", value)
    batches = tf.data.Dataset.from_tensors((tf.ones([8, 2]), tf.ones([8, 1]))).repeat(2)
    model.fit(batches, verbose=0)
    before = model.get_weights()
    trials = experiment(model, batches)
    for was, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, now)
    return trials


@pytest.mark.slow
def test_steps_that_run_eagerly_are_tried_compiled_and_run_eagerly_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kde.Sequential([keras.Input((2,)), L.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    trials = _tried(model, monkeypatch)
    assert set(trials.seconds) == {"as it was", "data", "compiled", "double"}  # one replica has no sum
    assert model.run_eagerly
    assert not tf.config.functions_run_eagerly()


@pytest.mark.slow
def test_experiments_that_a_model_does_not_bear_are_left_out_with_the_reason(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirrored.scope():
        model = NoCopy(1)
        model.compile("sgd", "mse", virtual_replicas=2)
    trials = _tried(model, monkeypatch)
    assert set(trials.seconds) >= {"as it was", "data"}
    assert trials.skipped["no sum"] == "virtual replicas are summed in order"
    assert "one device" in trials.skipped, trials.skipped


def test_twice_the_rows_are_of_every_part_that_has_rows() -> None:
    sparse = tf.sparse.from_dense([[1.0, 0.0]])
    dense, twice, scalar = _doubled((tf.constant([[1.0]]), sparse, tf.constant(3.0)))
    np.testing.assert_array_equal(dense, [[1.0], [1.0]])
    np.testing.assert_array_equal(tf.sparse.to_dense(twice), [[1.0, 0.0], [1.0, 0.0]])
    assert scalar.numpy() == 3.0


class OwnOptimizer(kde.Model):
    """Updates by an optimizer that the first step builds, and that begins with other numbers than 0."""

    def __init__(self) -> None:
        super().__init__()
        self.head = L.Dense(1)
        self.own = {"head": keras.optimizers.Adagrad(0.1)}

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.own["head"].apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
def test_diagnosis_leaves_an_optimizer_that_a_step_builds_as_if_it_were_new(mirrored: Any) -> None:
    def made() -> Any:
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = OwnOptimizer()
            model.build((None, WIDTH))
            model.compile(loss="mse")
        return model

    model, reference = made(), made()
    kde.diagnose(model, pipeline(), steps_per_epoch=20, num_steps=10, interventions=False)
    for one in (model, reference):
        one.fit(pipeline(), steps_per_epoch=5, verbose=0, shuffle=False)
    assert [w.tobytes() for w in model.get_weights()] == [w.tobytes() for w in reference.get_weights()]


@pytest.mark.slow
def test_data_that_numbers_its_passes_goes_on_with_the_next_one(mirrored: Any) -> None:
    sequences = tf.RaggedTensor.from_row_lengths(np.arange(1200) % 50, [3] * 400)
    with mirrored.scope():
        model = kde.Sequential([L.Embedding(50, 4), L.GlobalAveragePooling1D(), L.Dense(1)])
        model.compile("sgd", "mse")
    batches = kde.bucket_by_length((sequences, np.ones(400, "f")), strategy=mirrored, batch_size=40, seed=1)
    kde.diagnose(model, batches, num_steps=15, interventions=False)
    assert batches.epoch == 0
    model.fit(batches, epochs=2, verbose=0, callbacks=[kde.ParallelismDoctor(show=False)])
    assert batches.epoch == 2


@pytest.mark.slow
def test_a_run_that_is_looked_at_computes_what_it_would_have_computed(mirrored: Any) -> None:
    weights = []
    for callbacks in ([], [kde.ParallelismDoctor(show=False)]):
        model = _stateful(mirrored)
        model.fit(pipeline(), steps_per_epoch=20, verbose=0, shuffle=False, callbacks=callbacks)
        weights.append([weight.tobytes() for weight in model.get_weights()])
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_other_callbacks_are_as_they_were_after_a_run_and_after_one_that_broke(mirrored: Any) -> None:
    class Breaks(doctor_runs.LooksAtBatches):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                raise RuntimeError("broken")

    model = _stateful(mirrored)
    for other in (doctor_runs.LooksAtBatches(), Breaks()):
        doctor = kde.ParallelismDoctor(show=False)
        try:
            model.fit(pipeline(), steps_per_epoch=10, verbose=0, shuffle=False, callbacks=[other, doctor])
        except RuntimeError:
            assert doctor.report is None
        assert "on_train_batch_end" not in vars(other)
        assert not doctor._trace


@pytest.mark.slow
def test_short_steps_are_recorded_for_a_while_only(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras_dist_ext.diagnosis.doctor.step_blocks._ENOUGH_SECONDS", 0.25)
    MadeUpClock(monkeypatch, tick=1e-3 / 6)  # steps of about a millisecond, which read it six times
    seen: list[int] = []

    class Recorders(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(len(self.model.replica_runtime.recorders))

    report = train(mirrored, doctor_runs.tiny, pipeline(), Recorders(), num_steps=500, steps_per_execution=10)
    assert seen == [0, 0]
    assert 200 <= report.examination.times.num_steps < 400  # type: ignore[union-attr]


# Where it tells


@pytest.mark.slow
def test_findings_are_in_the_monitors_dashboard_in_text_and_in_json(mirrored: Any, tmp_path: pathlib.Path) -> None:
    memory = kde.MemoryWriter()
    monitor = kde.ReplicaMonitor(tmp_path / "logs", writers=[memory])
    doctor = kde.ParallelismDoctor(show=False, json=tmp_path / "report.json")
    train(mirrored, mlp, pipeline(), monitor, doctor=doctor, num_steps=10, run_eagerly=True)
    (finding,) = [f for f in memory.findings if f["kind"] == "diagnosis"]
    assert finding["code"] == "eager"
    assert finding["step"] == 20
    accumulator = EventAccumulator(str(tmp_path / "logs" / "all"))
    accumulator.Reload()
    texts = [
        accumulator.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in ("replicas/findings", "findings")
    ]
    assert json.loads(texts[0])[0]["code"] == "eager"
    assert texts[1].splitlines()[2].startswith("| eager |  | Steps run eagerly")
    assert json.loads((tmp_path / "report.json").read_text())["findings"][0]["code"] == "eager"


@pytest.mark.slow
def test_without_a_monitor_it_writes_its_own_events_and_prints(
    mirrored: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(mirrored, mlp, pipeline(), doctor=kde.ParallelismDoctor(tmp_path), num_steps=10, run_eagerly=True)
    accumulator = EventAccumulator(str(tmp_path / "all"))
    accumulator.Reload()
    assert {"replicas/manifest", "replicas/findings", "findings"} <= set(accumulator.Tags()["tensors"])
    printed = capsys.readouterr().out
    assert "1 finding about 'sequential" in printed
    assert "run_eagerly=False" in printed


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(kde.MonitorError, match="num_steps must be an integer >= 1, or None, got 0"):
        kde.ParallelismDoctor(num_steps=0)


# The command

SCRIPT = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf
import keras_dist_ext as kde
{setup}
x = np.random.default_rng(0).normal(size=(2048, 64)).astype("float32")
model.fit(x, x[:, :1], batch_size=256, epochs=50, verbose=0)
print("after fit", sys.argv)
"""
LAYERS = "[keras.Input((64,)), keras.layers.Dense(256, 'relu'), keras.layers.Dense(256, 'relu'), keras.layers.Dense(1)]"
SETUPS = {
    "clean": (f"model = kde.Sequential({LAYERS}); model.compile('adam', 'mse')", []),
    "outside-scope": (
        "strategy = kde.pick_strategy(num_replicas=2).strategy\n"
        f"model = keras.Sequential({LAYERS}); model.compile('adam', 'mse')",
        ["outside-scope"],
    ),
    "no-cluster": (
        "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        f"with strategy.scope(): model = kde.Sequential({LAYERS}); model.compile('adam', 'mse')",
        ["no-cluster"],
    ),
    "threads": (
        "tf.config.threading.set_intra_op_parallelism_threads(64)\n"
        f"model = kde.Sequential({LAYERS}); model.compile('adam', 'mse')",
        ["oversubscribed-threads"],
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=slow) for n in SETUPS])
def test_the_command_runs_a_script_until_it_has_seen_enough(name: str, tmp_path: pathlib.Path) -> None:
    setup, codes = SETUPS[name]
    (tmp_path / "train.py").write_text(SCRIPT.format(setup=setup))
    command = [
        sys.executable,
        "-m",
        "keras_dist_ext",
        "doctor",
        "--steps",
        "60",
        "--json",
        "r.json",
        "train.py",
        "--lr",
        "1",
    ]
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}

    def run() -> tuple[list[str], str]:
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environ, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "after fit" not in done.stdout
        findings = json.loads((tmp_path / "r.json").read_text())["findings"]
        return [finding["code"] for finding in findings if finding.get("seconds") is None], done.stdout

    found, printed = run()
    assert found == codes, printed


def test_a_script_that_does_not_train_is_an_error_that_says_so(tmp_path: pathlib.Path) -> None:
    from keras_dist_ext.diagnosis.doctor.doctor_command import examine_script

    (tmp_path / "train.py").write_text("print('nothing')")
    with pytest.raises(kde.MonitorError, match="has ended without training by `fit`.*kde.diagnose"):
        examine_script(tmp_path / "train.py")
    with pytest.raises(kde.MonitorError, match="There is no script"):
        examine_script(tmp_path / "none.py")
    assert not hasattr(keras.Model.fit, "__wrapped__") or "fit" not in vars(keras.Model)


CALLS = """
import keras, numpy as np
import keras_dist_ext as kde
model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((8, 4), "float32")
for number, num_steps in enumerate({calls}, 1):
    print("call", number)
    model.fit(x, x[:, :1], batch_size=8, epochs=num_steps, verbose=0)
{last}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "last", "num_called", "told"),
    [
        ([3, 500, 3], "", 2, 2),  # a warm-up, and what was meant
        pytest.param([3, 25, 4], "raise SystemExit", 3, 2, marks=slow),  # none is long
        ([1] * 500, "", 40, 1),  # a loop around `fit`
        pytest.param([25, 3], "raise SystemExit(3)", 2, 1, marks=slow),
        ([25, 3], "raise ValueError(3)", 2, 1),
    ],
)
def test_the_command_looks_at_the_call_of_fit_with_the_most_steps(
    calls: list[int], last: str, num_called: int, told: int, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from keras_dist_ext.diagnosis.doctor.doctor_command import examine_script

    script = tmp_path / "train.py"
    script.write_text(CALLS.format(calls=calls, last=last))
    ends_ill = last.endswith("(3)")
    with pytest.raises((SystemExit, ValueError), match="3") if ends_ill else contextlib.nullcontext():
        examine_script(script, num_steps=40, json=tmp_path / "r.json")
    printed = capsys.readouterr().out
    assert printed.count("call ") == num_called
    assert f"Of {num_called} calls of fit, this is about number {told}, with the most steps:" in printed
    assert printed.count(" about 'sequential") == 1
    steps = json.loads((tmp_path / "r.json").read_text())["measured"].get("num_steps", 0)
    assert steps == pytest.approx({500: 45, 25: 23, 1: 0}[calls[told - 1]], abs=6)


STOCK = """
import time, keras, numpy as np, tensorflow as tf
def slow(i):
    waited = tf.numpy_function(lambda i: (time.sleep({sleep}), np.float32(i))[1], [i], tf.float32)
    return tf.fill([4], tf.ensure_shape(waited, [])), tf.fill([1], 1.0)
data = tf.data.Dataset.range(96).map(slow).batch(8)
with tf.distribute.OneDeviceStrategy("CPU:0").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(data, epochs=2, verbose=0)
"""


def test_the_data_of_a_stock_script_is_judged_and_what_to_run_next_is_told(tmp_path: pathlib.Path) -> None:
    from keras_dist_ext.diagnosis.doctor.doctor_command import examine_script

    (tmp_path / "train.py").write_text(STOCK.format(sleep=0.003))
    report = examine_script(tmp_path / "train.py", show=False, json=tmp_path / "r.json")
    assert report.codes == ["sequential-map", "python-map"]
    sequential, python = report.findings
    assert python.seconds is None
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["measured"]["num_steps"] == 22
    assert 22 * 8 * 0.003 <= sequential.seconds <= read["measured"]["seconds"]
    assert re.search(r"; a step of stock Keras took [\d.]+ ms$", sequential.evidence)
    assert re.search(
        r"^2 findings about 'sequential\w*' in 22 steps of [\d.]+ ms on 1 replica, of stock Keras, seen from outside\.",
        str(report),
    )
    (note,) = report.notes
    assert note.code == "stock-model"
    assert "`kde.diagnose(model, data)` watches the steps of a copy" in note.what


@pytest.mark.slow
def test_the_command_takes_callbacks_in_a_list_of_keras(tmp_path: pathlib.Path) -> None:
    from keras_dist_ext.diagnosis.doctor.doctor_command import examine_script

    made = "keras.callbacks.CallbackList([keras.callbacks.TerminateOnNaN()], True, model=model)"
    (tmp_path / "train.py").write_text(
        CALLS.replace("verbose=0", f"verbose=0, callbacks={made}").format(calls=[25], last="")
    )
    report = examine_script(tmp_path / "train.py", show=False)
    assert report.examination.times is not None
    assert report.examination.times.num_steps == 23
    assert len(report.examination.times.start_seconds) == 23


@pytest.mark.slow
def test_a_model_outside_of_the_scope_is_the_finding_of_its_script(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from keras_dist_ext.diagnosis.doctor.doctor_command import examine_script

    outside = """
strategy = kde.pick_strategy("mirrored", num_replicas=2).strategy
model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
with strategy.scope():
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], verbose=0)
"""
    (tmp_path / "train.py").write_text(CALLS.format(calls=[5], last=outside))
    assert examine_script(tmp_path / "train.py", json=tmp_path / "r.json").codes == ["outside-scope"]
    assert json.loads((tmp_path / "r.json").read_text())["findings"][0]["code"] == "outside-scope"
    assert "1 finding about 'sequential" in capsys.readouterr().out


@pytest.mark.slow
def test_a_bound_that_is_beyond_what_is_recorded_of_short_steps_ends_the_run_too(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keras_dist_ext.diagnosis.doctor.step_blocks._ENOUGH_SECONDS", 0.01)
    with mirrored.scope():
        model = kde.Sequential(doctor_runs.tiny())
        model.compile("sgd", "mse", steps_per_execution=10)
    doctor = kde.ParallelismDoctor(show=False, num_steps=10_000)
    model.fit(pipeline(), steps_per_epoch=3000, epochs=2, verbose=0, shuffle=False, callbacks=[doctor])
    assert int(model.optimizer.iterations) < 3000
    assert doctor.has_seen_enough


@slow
def test_experiments_do_not_set_off_tensorflows_warning_of_retracing(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns twice in a process at most, so that a user's own retracing would not be told of."""
    monkeypatch.setattr("keras_dist_ext.diagnosis.doctor.interventions._ROUNDS", (1, 1))
    monkeypatch.setattr(
        polymorphic_function,
        "_frequent_tracing_detector_manager",
        polymorphic_function._FrequentTracingDetectorManager(),
    )
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    report = _diagnosed(mirrored, X, y=Y, batch_size=128)
    assert len(report.examination.trials.seconds) == 7, report.examination.trials
    assert [record.getMessage() for record in caplog.records if "retracing" in record.getMessage()] == []


def test_the_number_of_time_steps_is_known_of_a_model_without_a_graph_of_layers() -> None:
    class Net(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = keras.layers.LSTM(2), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.head(self.lstm(x))

    net = Net()
    net.compile("sgd", "mse")
    net.fit(np.ones((4, 7, 3), "float32"), np.ones((4, 1), "float32"), verbose=0)
    (loop,) = setting._loops(net)
    assert loop.num_steps == 7
