"""What the doctor advises for the case at hand: the argument, the line, the variable, and how often."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import keras
import pytest
from test_diagnose import HEALTHY, ON_CPU, changed, codes, short, times, trials, waiting

from keras_dist_ext.diagnosis.doctor.examination import Calls, Examination, Largest, Times, Traces
from keras_dist_ext.diagnosis.doctor.host_clock import CallbackClock, _looked_into, period
from keras_dist_ext.diagnosis.doctor.python_data import MadeInPython, Reads
from keras_dist_ext.diagnosis.doctor.python_data_rules import judge_python_data
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.diagnosis.doctor.setting import read_setting
from keras_dist_ext.diagnosis.doctor.why_not import why_not
from keras_dist_ext.findings import Finding

TABLE = Largest("net/embedding/embeddings", 51_200_000, "Adam", num_rows=200_000)
ON_ONE = dataclasses.replace(ON_CPU, strategy="none", num_replicas=1, devices=("CPU:0",))


def of_table(setting: Any = ON_ONE, **facts: Any) -> Any:
    return dataclasses.replace(setting, gradient_bytes=51_300_000, largest=TABLE, **facts)


def updating(**given: Any) -> Times:
    return times(**{"compute": 0.001, "sync": 0.018, "examples": 60, "num_replicas": 1, **given})


# Updates


def test_an_update_of_a_large_table_names_it_and_what_writes_only_the_rows_that_were_read() -> None:
    report = judge(Examination(of_table(), updating()))
    (finding,) = report.findings
    assert (finding.code, finding.seconds) == ("update-bound", pytest.approx(0.018 * 80))
    assert finding.evidence == (
        "computing took 1 ms a step of 60 examples, and what Adam does to 51.3 MB of weights 18 ms, whatever the batch "
        "(90% of the time); net/embedding/embeddings has 51.2 MB of them, in 200,000 rows, of which a batch reads a few"
    )
    assert finding.fix.startswith("An optimizer that writes only the rows that a batch has read: `keras.optimizers.SGD")
    assert "1,920 examples instead of 60" in finding.fix
    assert "`keras.optimizers.Adam(gradient_accumulation_steps=4)`" in finding.fix
    assert report.shares["updating"] > 0.8
    assert "synchronising" not in report.shares


def test_an_update_of_dense_weights_says_to_update_less_often() -> None:
    setting = dataclasses.replace(of_table(), largest=dataclasses.replace(TABLE, num_rows=0))
    (finding,) = judge(Examination(setting, updating(examples=4))).findings  # and not that the batch is too small
    assert finding.code == "update-bound"
    assert finding.fix.startswith("Update less often: a larger batch, such as 128 examples instead of 4")


@pytest.mark.parametrize(
    ("setting", "measured"),
    [
        (of_table(), updating(compute=0.0185, step=0.038)),  # computing takes longer
        (of_table(), updating(sync=0.0019, step=0.003)),  # a short update
        (of_table(HEALTHY), updating(num_replicas=2, compute=0.018, sync=0.001)),
        (dataclasses.replace(of_table(), gradient_bytes=1_000_000), updating()),  # of a small model
        (dataclasses.replace(of_table(), runs_eagerly=True), updating()),
    ],
)
def test_updates_that_are_short_or_of_small_models_are_no_finding(setting: Any, measured: Times) -> None:
    assert "update-bound" not in codes(setting, measured)


def test_an_experiment_tells_the_update_from_the_sum_where_replicas_have_devices_of_their_own() -> None:
    measured = updating(num_replicas=2)
    assert codes(of_table(HEALTHY), measured) == ["sync-bound"]
    shown = trials(as_it_was=0.02, no_sum=0.0196)
    report = judge(Examination(of_table(HEALTHY), measured, shown))
    assert report.codes == ["update-bound"]
    assert "updating" in report.shares
    half = judge(Examination(of_table(HEALTHY), measured, trials(as_it_was=0.02, no_sum=0.011)))
    assert half.codes == ["update-bound", "sync-bound"] or half.codes == ["sync-bound", "update-bound"]
    assert sum(finding.seconds or 0.0 for finding in half.findings) == pytest.approx(0.018 * 80)  # claimed once
    assert judge(Examination(of_table(ON_CPU), measured)).codes == ["update-bound"]


@pytest.mark.parametrize(
    ("optimizer", "num_rows"),
    [
        (lambda: keras.optimizers.Adam(), 300),
        (lambda: keras.optimizers.SGD(), 0),  # writes the rows that were read
        (lambda: keras.optimizers.SGD(momentum=0.9), 300),
        (lambda: keras.optimizers.SGD(weight_decay=0.1), 300),
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), 300),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), 300),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), 0),
    ],
)
def test_the_largest_variable_of_a_model_is_a_table_where_its_optimizer_writes_all_rows(
    optimizer: Any, num_rows: int
) -> None:
    layers = [keras.layers.Embedding(300, 4, name="words"), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    assert read_setting(model).largest is None  # no optimizer is known
    model.compile(optimizer(), "mse")
    largest = read_setting(model).largest
    assert largest is not None
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert (largest.num_bytes, largest.optimizer, largest.num_rows) == (4800, type(inner).__name__, num_rows)
    assert largest.variable.endswith("words/embeddings")


# Callbacks


def callback(calls: Calls) -> Finding:
    (finding,) = judge(Examination(HEALTHY, times(calls=(calls,), host=0.008))).findings
    return finding


def test_a_callback_of_keras_that_writes_at_every_batch_is_told_by_the_argument_that_makes_it() -> None:
    calls = Calls("ModelCheckpoint", "on_train_batch_end", 0.5, 80, ("numpy",))
    finding = callback(dataclasses.replace(calls, argument="save_freq=1", better='save_freq="epoch"'))
    assert finding.code == "slow-callback"
    assert finding.what == (
        "The callback ModelCheckpoint(save_freq=1) writes at every batch; all replicas wait meanwhile."
    )
    assert finding.fix == '`ModelCheckpoint(..., save_freq="epoch")`, which writes once an epoch.'


def test_steps_that_a_callback_of_keras_makes_one_by_one_are_told_by_its_argument() -> None:
    calls = Calls(
        "TensorBoard", "on_train_batch_end", 0.001, 80, argument="update_freq=1", better='update_freq="epoch"'
    )
    setting = changed(step_watchers=("TensorBoard",))
    (finding,) = judge(Examination(setting, short(calls=(calls,)))).findings
    assert (finding.code, finding.fix) == (
        "host-bound",
        '`TensorBoard(..., update_freq="epoch")`, so that 94 steps run at once instead of one by one.',
    )
    others = changed(step_watchers=("TensorBoard", "Log"))
    assert (
        "Let TensorBoard, Log do without every batch"
        in judge(Examination(others, short(calls=(calls,)))).findings[0].fix
    )


def test_a_callback_that_works_now_and_then_is_told_with_its_period_and_its_share() -> None:
    calls = Calls("Log", "on_train_batch_end", 0.4, 80, every=10, num_slow=8)
    finding = callback(calls)
    assert finding.what == "The callback Log is slow at every 10th batch; all replicas wait meanwhile."
    assert finding.evidence == ("Log.on_train_batch_end took 50 ms a call, 8 times in 80 batches: 25% of the time")
    assert "let it work at every 100th batch instead of every 10th" in finding.fix
    assert codes(HEALTHY, times(calls=(dataclasses.replace(calls, num_slow=2),), host=0.008)) == []


def test_a_callback_that_works_at_some_batches_is_told_by_their_number_and_only_where_it_came_again() -> None:
    calls = Calls("Log", "on_train_batch_end", 0.4, 80, ("numpy",), every=0, num_slow=7)
    finding = callback(calls)
    assert finding.what == (
        "The callback Log fetches values from the devices at 7 of 80 batches; all replicas wait meanwhile."
    )
    assert finding.evidence.startswith("Log.on_train_batch_end took 57.1 ms a call, 7 times in 80 batches: 25% of the")
    assert finding.fix.startswith("Fetch less often: move it to `on_epoch_end`, or let it work less often; ")
    other = callback(dataclasses.replace(calls, fetched=()))
    assert other.what == "The callback Log is slow at 7 of 80 batches; all replicas wait meanwhile."
    assert other.fix == "Move the work to `on_epoch_end`, let it work less often, or hand it to a thread."
    argument = dataclasses.replace(calls, name="ModelCheckpoint", argument="save_freq=9", better='save_freq="epoch"')
    assert callback(argument).what.startswith("The callback ModelCheckpoint(save_freq=9) writes at 7 of 80 batches;")
    assert codes(HEALTHY, times(calls=(dataclasses.replace(calls, num_slow=2),), host=0.008)) == []


class Saved:
    """Stands for a model: saving it takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def save(self, *_: Any, **__: Any) -> None:
        self.seconds += 1.0


@pytest.mark.parametrize(("save_freq", "num_calls", "expected"), [(1, 20, (1, 19)), (5, 50, (5, 10)), (40, 60, (0, 1))])
def test_the_clock_tells_how_often_a_callback_of_keras_writes_and_by_which_argument(
    save_freq: int, num_calls: int, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = Saved()
    clock = types.SimpleNamespace(perf_counter=lambda: model.seconds)
    monkeypatch.setattr("keras_dist_ext.diagnosis.doctor.host_clock.time", clock)
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras", save_freq=save_freq)
    checkpoint.set_model(model)
    checkpoint.on_epoch_begin(0)
    watching = CallbackClock([checkpoint], but=keras.callbacks.Callback())
    for batch in range(num_calls):
        checkpoint.on_train_batch_end(batch, {})
    watching.stop()
    (calls,) = watching.calls()
    assert (calls.name, calls.hook, calls.num_calls) == ("ModelCheckpoint", "on_train_batch_end", num_calls - 1)
    assert (calls.every, calls.num_slow) == expected
    assert (calls.argument, calls.better) == (f"save_freq={save_freq}", 'save_freq="epoch"')
    assert "on_train_batch_end" not in vars(checkpoint)


class Hooked(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Do nothing."""


def test_the_clock_leaves_callbacks_as_they_are_now() -> None:
    own, replaced = Hooked(), Hooked()
    hook = own.on_train_batch_end = lambda batch, logs=None: None  # type: ignore[method-assign]
    watching = CallbackClock([own, replaced], but=keras.callbacks.Callback())
    other = replaced.on_train_batch_end = lambda batch, logs=None: None  # type: ignore[method-assign]
    watching.stop()
    assert own.on_train_batch_end is hook
    assert replaced.on_train_batch_end is other


def test_values_are_fetched_by_functions_of_upstream_alone() -> None:
    def call() -> str:
        note: Any = sys.getprofile()
        sys.setprofile(None)
        for event, name, file in (
            ("call", "numpy", "/lib/tensorflow/ops.py"),
            ("call", "numpy", r"C:\\lib\\tensorflow\\ops.py"),
            ("return", "numpy", "/lib/tensorflow/ops.py"),
            ("call", "item", "/lib/keras/variable.py"),
            ("call", "item", "/home/me/train.py"),
            ("call", "apply", "/lib/keras/optimizer.py"),
        ):
            note(types.SimpleNamespace(f_code=types.SimpleNamespace(co_name=name, co_filename=file)), event, None)
        return "value"

    assert _looked_into(call) == ("value", ("numpy (2 times)", "item"))


def test_a_profiler_of_the_users_is_left_in_its_place() -> None:
    callback = Hooked()
    watching = CallbackClock([callback], but=keras.callbacks.Callback())
    seen: list[str] = []
    profiler = sys.getprofile()
    sys.setprofile(lambda frame, event, _: seen.append(event))
    try:
        for batch in range(4):
            callback.on_train_batch_end(batch)
    finally:
        sys.setprofile(profiler)
    watching.stop()
    (calls,) = watching.calls()
    assert calls.fetched == ()
    assert "return" in seen


def test_the_progress_bar_is_a_finding_where_it_takes_most() -> None:
    calls = Calls("ProgbarLogger", "on_train_batch_end", 0.7, 80, is_keras_own=True)
    finding = judge(Examination(HEALTHY, times(calls=(calls,), host=0.009))).findings[0]
    assert finding.fix.startswith("`fit(..., verbose=2)`")
    harmless = dataclasses.replace(calls, name="History")
    assert codes(HEALTHY, times(calls=(harmless,), host=0.009)) == []


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.01] * 20, (1, 20)),
        (([1e-5] * 9 + [0.1]) * 5, (10, 5)),
        (([1e-5] * 9 + [0.1]) * 5 + [1e-5] * 4, (10, 5)),
        ([0.1, *[1e-5] * 49], (0, 1)),  # once
        ([1e-5] * 50 + [1.0] + [1e-5] * 50, (0, 1)),
        ([1e-5] * 999 + [1.0] + [1e-5] * 500, (0, 1)),  # at every 1000th, as may be
        ([0.1, 1e-5, 0.1, 0.1, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 0.1, 1e-5, 1e-5], (0, 4)),  # at no period
        ([1e-5] * 20 + [0.1] * 5 + [1e-5] * 20, (0, 5)),  # one after the other, and then no more
        ([0.1] * 51 + [1e-5] * 49, (0, 51)),  # up to the middle
        ([1e-5] * 60 + [0.1] * 30 + [1.0] * 10, (0, 40)),
        ([1e-5, 0.1] * 20, (2, 20)),
        ([0.05, 0.1] * 10, (1, 20)),  # long at each
        ([0.01] * 99 + [0.2], (1, 100)),  # and once longer
        ([0.0] * 9, (1, 9)),
        ([], (1, 0)),
    ],
)
def test_the_period_of_calls_is_read_from_those_that_take_long(seconds: list[float], expected: Any) -> None:
    assert period(seconds, len(seconds)) == expected


# Batches that Python makes


def made(**facts: Any) -> MadeInPython:
    return MadeInPython("PyDataset", "Rows.__getitem__ (train.py:7)", **{"seconds": 0.02, "rows": 64, **facts})


def test_hdf5_read_row_by_row_says_to_read_whole_chunks() -> None:
    finding = judge_python_data(made(reads=(Reads("/x", 64, 64, 128), Reads("/y", 1, 64, 0))))
    assert finding.code == "unaligned-reads"
    assert finding.evidence == (
        "Rows.__getitem__ (train.py:7) reads /x 64 times for a batch of 64 rows, of chunks of 128 rows, each of which "
        "is read and decompressed as a whole; a batch takes 20 ms"
    )
    assert finding.fix.startswith("Read a batch at once, `x[i * 64:(i + 1) * 64]`, where the batch size is a multiple")
    plain = judge_python_data(made(reads=(Reads("/x", 64, 64, 0),)))
    assert "which lie one behind the other" in plain.evidence
    assert judge_python_data(made(reads=(Reads("/x", 2, 64, 32),))).code == "generator-bound"


@pytest.mark.parametrize(
    ("facts", "fix"),
    [
        ({"cpu_seconds": 0.001}, "`Rows(workers=16, use_multiprocessing=False)`, whose threads wait at once."),
        ({"cpu_seconds": 0.001, "workers": 16}, "`Rows(workers=32, use_multiprocessing=False)`, whose threads"),
        ({"cpu_seconds": 0.019}, "`Rows(workers=4, use_multiprocessing=True)`, since threads take turns"),
        ({"cpu_seconds": 0.019, "workers": 4}, "`Rows(workers=4, use_multiprocessing=True)`, since threads take turns"),
        (
            {"cpu_seconds": 0.019, "workers": 4, "use_multiprocessing": True},
            "`Rows(workers=8, use_multiprocessing=True)`, as far as there are cores; or make less",
        ),
    ],
)
def test_a_py_dataset_is_given_threads_where_it_waits_and_processes_where_it_computes(facts: Any, fix: str) -> None:
    finding = judge_python_data(made(**facts))
    assert finding.code == "generator-bound"
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize(("step", "is_spared"), [(0.027, True), (0.023, False), (0.0, False)])
def test_processes_are_spared_where_one_thread_makes_batches_faster_than_steps_take_them(
    step: float, is_spared: bool
) -> None:
    finding = judge_python_data(made(cpu_seconds=0.019, workers=2, use_multiprocessing=True), step)
    assert finding.code == "generator-bound"
    assert finding.fix.startswith("`Rows(workers=1, use_multiprocessing=False)`: one thread") == is_spared
    if is_spared:
        assert finding.evidence == (
            "Rows.__getitem__ (train.py:7) makes a batch in 20 ms, in this process, and a step takes 27 ms without "
            "waiting for it; the batches come from 2 processes"
        )
    threads = judge_python_data(made(cpu_seconds=0.019, workers=2), step)
    assert threads.fix.startswith("`Rows(workers=4, use_multiprocessing=True)`")


def test_a_py_dataset_whose_batches_could_not_be_timed_is_given_both_ways() -> None:
    finding = judge_python_data(made(seconds=0.0))
    assert finding.evidence == (
        "Rows.__getitem__ (train.py:7) makes batches, in 1 thread; what one takes could not be measured"
    )
    assert finding.fix == (
        "`Rows(workers=16)` where making a batch waits, and `Rows(workers=4, use_multiprocessing=True)` where it "
        "computes; the class and what it holds must be picklable then."
    )


def test_a_generator_is_to_be_read_by_tf_data() -> None:
    finding = judge_python_data(MadeInPython("Generator"))
    assert finding.evidence == "the data is a Generator"
    assert "tf.data.Dataset.from_tensor_slices(files)" in finding.fix


# Where most of the time goes


SHORT_WAITS = times(step=0.001, input_=0.0006, compute=0.0003, sync=0.0001, host=0.0)
STARTS = times(step=0.002, host=0.0015, compute=0.0004, input_=0.0, sync=0.0001)


def called(*seconds: float) -> Times:
    calls = tuple(Calls(f"C{i}", "on_train_batch_end", each, 80) for i, each in enumerate(seconds))
    return times(host=0.014, compute=0.004, calls=calls)


def traced(num_executions: int) -> Times:
    traces = Traces("step", num_executions, num_executions, 0.8, "", ())
    return times(host=0.014, compute=0.004, traces=(traces,) if num_executions else (), tracing_seconds=0.9)


@pytest.mark.parametrize(
    ("examined", "reason"),
    [
        (
            Examination(HEALTHY, SHORT_WAITS, batch_seconds=1e-4),
            "nothing is to be gained from the 60% input: a batch comes after 0.6 ms, and the pipeline by itself gives "
            "one in 100 µs",
        ),
        (
            Examination(HEALTHY, SHORT_WAITS, trials(data=0.001, as_it_was=0.001)),
            "nothing is to be gained from the 60% input: on a cached batch steps are not shorter by more than they "
            "vary (0 ms (0 to 0))",
        ),
        (
            Examination(HEALTHY, SHORT_WAITS),  # what a batch takes by itself is not known
            "nothing is to be gained from the 60% input: a batch comes after 600 µs, little more than handing one on",
        ),
        (
            Examination(HEALTHY, SHORT_WAITS, batch_seconds=4e-4),
            "nothing is to be gained from the 60% input: a batch comes after 600 µs, little more than handing one on",
        ),
        (
            Examination(HEALTHY, dataclasses.replace(times(1, step=0.004, num_steps=4), start_seconds=(0.03,) * 2)),
            "nothing is to be gained from the 79% first batches: beginning a pass over the data takes 30 ms, and one "
            "has no more than 2 steps; only longer ones, `dataset.repeat(n)`, need it less",
        ),
        (Examination(HEALTHY, SHORT_WAITS, trials(data=0.001, as_it_was=0.0004)), ""),  # a cached batch has helped
        (
            Examination(HEALTHY, times(step=0.004, compute=0.001, sync=0.0019, input_=0.0)),
            "nothing is to be gained from the 68% synchronising: the sum, the update and the metrics take 1.9 ms",
        ),
        (
            Examination(HEALTHY, dataclasses.replace(STARTS, num_executions=1)),
            "",  # 160 ms
        ),
        (
            Examination(HEALTHY, times(step=0.006, host=0.0048, input_=0.0, compute=0.001, num_executions=2)),
            "nothing is to be gained from the 80% host: an execution, of 40 steps, takes 240 ms, about as long as "
            "callbacks can wait, and starting it 192 ms",
        ),
        (Examination(HEALTHY, STARTS), ""),  # one step an execution
        (
            Examination(HEALTHY, called(*[0.11] * 9)),
            "nothing is to be gained from the 62% callbacks: 9 callbacks share it, and C0 has most, 1.38 ms a call",
        ),
        (
            Examination(HEALTHY, traced(15)),
            "nothing is to be gained from the 56% tracing: step was traced in no more than 15 of 80 executions",
        ),
        (Examination(HEALTHY, traced(0)), ""),
    ],
)
def test_where_most_of_the_time_goes_and_nothing_is_to_be_done_the_headline_says_why_if_that_is_known(
    examined: Examination, reason: str
) -> None:
    report = judge(examined)
    assert report.findings == ()
    assert report.why_not.startswith(reason)
    assert bool(report.why_not) == bool(reason)
    assert report.headline.endswith(f"; {report.why_not}") == bool(reason)


def test_no_reason_is_given_where_one_callback_or_a_function_traced_often_is_to_blame() -> None:
    assert why_not(Examination(HEALTHY, called(0.6, 0.1, 0.1)), []) == ""
    assert why_not(Examination(HEALTHY, called(0.3, 0.3, 0.3)), []).startswith("nothing is to be gained from the")
    assert why_not(Examination(HEALTHY, traced(16)), []) == ""


def test_a_wait_that_the_pipeline_by_itself_does_not_explain_is_no_finding_about_it() -> None:
    found = [codes(HEALTHY, waiting(), batch_seconds=seconds) for seconds in (0.01, 0.004, 0.0035)]  # of 12 ms
    assert found == [["input-bound"], ["input-bound"], []]
    report = judge(Examination(HEALTHY, waiting(), batch_seconds=1e-4))
    assert report.why_not.endswith("a batch comes after 12 ms, and the pipeline by itself gives one in 100 µs")
    slow_map = (Finding("sequential-map", "", "seen", "", 1.0),)
    assert codes(HEALTHY, waiting(), pipeline=slow_map, batch_seconds=1e-4) == ["sequential-map"]


def test_a_headline_gives_no_reason_where_a_finding_does_or_the_time_goes_to_computing() -> None:
    assert judge(Examination(HEALTHY, times())).why_not == ""
    assert judge(Examination(HEALTHY, waiting())).why_not == ""
