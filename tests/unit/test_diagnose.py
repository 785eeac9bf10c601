"""Judgement: from plain facts and timings to findings, each with its evidence and a change; and none without cause."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from healthy_runs import HEALTHY as HEALTHY_RUNS
from healthy_runs import Healthy

from keras_dist_ext.diagnosis.doctor.examination import (
    Calls,
    Estimate,
    Examination,
    Loop,
    PlacedElsewhere,
    PythonCalls,
    Setting,
    Times,
    Traces,
    Trials,
    blocks_of_steps,
)
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.diagnosis.doctor.setting_rules import shared_cpu
from keras_dist_ext.diagnosis.doctor.waiting_rules import best_steps_per_execution
from keras_dist_ext.findings import Finding
from keras_dist_ext.step.stats import ReplicaStats

GPUS = ("GPU:0", "GPU:1")
HEALTHY = Setting(strategy="mirrored", num_replicas=2, devices=GPUS, accelerators=GPUS, num_cores=8)


def block(
    *,
    num_steps: int = 10,
    step: float = 0.020,
    input_: Any = 0.0005,
    compute: Any = 0.018,
    sync: Any = 0.0012,
    host: float = 0.0003,
    examples: Any = 64,
    num_replicas: int = 2,
) -> ReplicaStats:
    """Return a block of steps; seconds are those of a step, and one number stands for all replicas."""

    def each(value: Any) -> Any:
        return np.broadcast_to(np.asarray(value, np.float64), (num_replicas,)).copy()

    return ReplicaStats(
        kind="train",
        step=0,
        num_steps=num_steps,
        wall_time=0.0,
        seconds=num_steps * step,
        host_seconds=num_steps * host,
        loss=each(1.0),
        examples=(each(examples) * num_steps).astype(np.int64),
        input_seconds=each(input_),
        compute_seconds=each(compute),
        sync_seconds=each(sync),
    )


def times(num_blocks: int = 8, *, num_executions: int = 80, others: float | None = None, **given: Any) -> Times:
    extra = {name: given.pop(name) for name in ("calls", "traces", "tracing_seconds") if name in given}
    blocks = tuple(block(**given) for _ in range(num_blocks))
    return Times(blocks, num_executions=num_executions, others_cores=others, **extra)


def codes(setting: Setting = HEALTHY, measured: Times | None = None, **more: Any) -> list[str]:
    return judge(Examination(setting, measured, **more)).codes


def changed(**facts: Any) -> Setting:
    return dataclasses.replace(HEALTHY, **facts)


def trials(**samples: Any) -> Trials:
    """Return experiments of seven rounds, from the seconds a step of each."""
    noise = np.array([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0])
    return Trials({name.replace("_", " "): tuple(float(s) * noise) for name, s in samples.items()}, {"many steps": 50})


def test_a_healthy_run_has_no_findings_and_no_notes() -> None:
    report = judge(Examination(HEALTHY, times(), trials(as_it_was=0.02, no_sum=0.0195, double=0.039, data=0.0201)))
    assert (report.findings, report.notes) == ((), ())
    assert str(report).startswith("no findings about 'model' in 80 steps of 20 ms on 2 replicas, ")


ON_CPU = Setting(strategy="mirrored", num_replicas=2, devices=("CPU:0", "CPU:1"), num_cores=2)
DISTURBED: dict[str, Callable[[Healthy], Healthy]] = {
    "nothing": lambda run: run,
    "input takes twice as long": lambda run: dataclasses.replace(run, input=2 * run.input),
    "one replica computes for twice as long": lambda run: dataclasses.replace(
        run, compute=(*run.compute[:-1], 2 * run.compute[-1])
    ),
    "the sum takes three times as long": lambda run: dataclasses.replace(run, sync=tuple(3 * s for s in run.sync)),
    "executions take 1.4 times as long to begin": lambda run: dataclasses.replace(run, host=1.4 * run.host),
}


@pytest.mark.parametrize("disturbed", DISTURBED)
@pytest.mark.parametrize("name", HEALTHY_RUNS)
def test_runs_that_were_measured_healthy_have_no_finding_nor_when_a_part_takes_longer(
    name: str, disturbed: str
) -> None:
    run = DISTURBED[disturbed](HEALTHY_RUNS[name])
    num_replicas = len(run.compute)
    setting = dataclasses.replace(ON_CPU, steps_per_execution=1 if run.steps == 1 else None)
    if num_replicas == 1:
        setting = dataclasses.replace(setting, strategy="none", num_replicas=1, devices=("CPU:0",))
    elif run.steps == 1:  # its callbacks take a hundredth of the time
        calls = Calls("Log", "on_train_batch_end", 1e-4 * 80, 80)
        assert codes(setting, dataclasses.replace(run.times(), calls=(calls,))) == []
    report = judge(Examination(setting, run.times()))
    assert report.findings == ()
    assert [note.code for note in report.notes] == ["shared-cpu"] * (num_replicas == 2)


# Each rule at its threshold: a little below there is no finding, a little above there is one.

AT_THRESHOLD: dict[str, tuple[str, Callable[[float], Examination]]] = {
    "a quarter of the time for input": (
        "input-bound",
        lambda f: Examination(HEALTHY, times(input_=0.25 * 0.020 * f, compute=0.012)),
    ),
    "a millisecond a step for input": (
        "input-bound",
        lambda f: Examination(HEALTHY, times(step=0.002, input_=1e-3 * f, compute=0.0008, sync=0.0001)),
    ),
    "an eighth of the time for input in three of four blocks": (
        "input-bound",
        lambda f: Examination(
            HEALTHY,
            Times(
                (*[block(input_=0.125 * 0.020 * f)] * 3, *[block(input_=0.012, compute=0.007)] * 5), num_executions=80
            ),
        ),
    ),
    "80 ms for each pass to begin": (
        "slow-start-of-epochs",
        lambda f: Examination(HEALTHY, dataclasses.replace(times(), start_seconds=(0.08 * f,) * 40)),
    ),
    "a quarter of the time for passes to begin": (
        "slow-start-of-epochs",
        lambda f: Examination(HEALTHY, dataclasses.replace(times(), start_seconds=(1.6 / 3 / 5 * f,) * 5)),
    ),
    "15% of the time in a callback": (
        "slow-callback",
        lambda f: Examination(
            HEALTHY, times(calls=(Calls("Log", "on_train_batch_end", 0.15 * 1.6 * f, 80),), host=0.004)
        ),
    ),
    "0.3 ms a call of a callback": (
        "slow-callback",
        lambda f: Examination(
            HEALTHY, times(step=0.001, calls=(Calls("Log", "on_train_batch_end", 3e-4 * 80 * f, 80),), host=4e-4)
        ),
    ),
    "five calls of a callback": (
        "slow-callback",
        lambda f: Examination(HEALTHY, times(calls=(Calls("Log", "on_train_batch_end", 0.5, int(5 * f)),), host=0.007)),
    ),
    "a tenth of the time for tracing": (
        "retracing",
        lambda f: Examination(HEALTHY, times(traces=(Traces("note", 60, 60, 0.1 * 1.6 * f),), host=0.003)),
    ),
    "five traces": (
        "retracing",
        lambda f: Examination(HEALTHY, times(traces=(Traces("note", int(5 * f), 60, 0.9),), host=0.012)),
    ),
    "traces in a fifth of the executions": (
        "retracing",
        lambda f: Examination(HEALTHY, times(traces=(Traces("note", 60, int(16 * f), 0.9),), host=0.012)),
    ),
    "30% of the time to begin executions": (
        "host-bound",
        lambda f: Examination(changed(steps_per_execution=1), times(step=0.002, host=0.3 * 0.002 * f, compute=0.0011)),
    ),
    "5% of the time waiting for a replica with more examples": (
        "unequal-shards",
        lambda f: Examination(HEALTHY, times(compute=0.05 * 0.020 * f / (1 - 64 / 96), examples=[96, 32])),
    ),
    "1.25 times as many examples": (
        "unequal-shards",
        lambda f: Examination(HEALTHY, times(examples=[round(100 * 1.25 * f), round(100 * (2 - 1.25 * f))])),
    ),
    "1.5 times as long a step, on a device of its own": (
        "straggler",
        lambda f: Examination(HEALTHY, times(input_=0.0, compute=[0.012, 0.012 * 1.5 * f])),
    ),
    "three times as long a step, on cores that are shared": (
        "straggler",
        lambda f: Examination(ON_CPU, times(step=0.1, input_=0.0, compute=[0.03, 0.03 * 3 * f])),
    ),
    "8 ms more a step, on cores that are shared": (
        "straggler",
        lambda f: Examination(ON_CPU, times(input_=0.0, compute=[0.001, 0.001 + 0.008 * f])),
    ),
    "a tenth of the time waiting for a replica": (
        "straggler",
        lambda f: Examination(HEALTHY, times(input_=0.0, compute=[0.002, 0.002 + 0.1 * 0.020 * f])),
    ),
    "a sum as long as computing": (
        "sync-bound",
        lambda f: Examination(changed(gradient_bytes=1000), times(compute=0.009, sync=0.009 * f)),
    ),
    "a sum that takes 40% of the time": (
        "sync-bound",
        lambda f: Examination(changed(gradient_bytes=1000), times(compute=0.006, sync=0.4 * 0.020 * f)),
    ),
    "2 ms for a sum": (
        "sync-bound",
        lambda f: Examination(changed(gradient_bytes=1000), times(step=0.004, compute=0.001, sync=2e-3 * f)),
    ),
    "40% of the time that does not depend on the few rows": (
        "batch-too-small",
        lambda f: Examination(HEALTHY, times(examples=4, compute=0.006, sync=0.4 * 0.020 * f)),
    ),
    "half a millisecond that does not depend on the few rows": (
        "batch-too-small",
        lambda f: Examination(HEALTHY, times(examples=4, step=0.001, compute=0.0003, input_=0.0, sync=5e-4 * f)),
    ),
    "a hundred time steps": (
        "sequential-model",
        lambda f: Examination(changed(loops=(Loop("lstm", int(100 * f), 400),)), times()),
    ),
    "half of a step for a long recurrence": (
        "sequential-model",
        lambda f: Examination(changed(loops=(Loop("lstm", 200, 400),)), times(compute=0.5 * 0.020 * f)),
    ),
    "other processes on half a core": (
        "busy-machine",
        lambda f: Examination(changed(num_cores=1), times(others=0.5 * f)),
    ),
}


@pytest.mark.parametrize("name", AT_THRESHOLD)
def test_a_rule_begins_at_its_threshold_and_says_nothing_below(name: str) -> None:
    code, examination = AT_THRESHOLD[name]
    for factor, expected in ((0.97, []), (1.03, [code])):
        report = judge(examination(factor))
        found = [finding.code for finding in (*report.findings, *report.notes)]
        assert [code for code in found if code != "shared-cpu"] == expected


# The setting

WRONG_SETTINGS: dict[str, tuple[Setting, str]] = {
    "mirrored-one-device": (
        changed(num_replicas=1, devices=("GPU:0",), accelerators=("GPU:0",)),
        "kde.pick_strategy()",
    ),
    "idle-accelerators": (changed(num_replicas=1, devices=("GPU:0",), strategy="none"), "with strategy.scope()"),
    "cluster-ignored": (changed(num_listed_workers=3), 'kde.pick_strategy("multi_worker")'),
    "no-cluster": (changed(strategy="multi_worker"), "keras-dist-ext launch --workers 2"),
    "outside-scope": (changed(outside="1 of 2 parts of 'model'", num_replicas_meant=2), "kde.adopt(model, strategy)"),
    "eager": (changed(runs_eagerly=True), "run_eagerly=False"),
    "pinned-device": (
        changed(placed_elsewhere=(PlacedElsewhere("dense", (1,), "GPU:0"),), elsewhere_share=0.4),
        "Remove `tf.device('GPU:0')`",
    ),
    "oversubscribed-threads": (
        changed(devices=("CPU:0", "CPU:1"), accelerators=(), num_threads=64),
        "set_intra_op_parallelism_threads(8)",
    ),
}


@pytest.mark.parametrize("code", WRONG_SETTINGS)
def test_a_wrong_setting_is_found_whatever_the_timings_and_says_what_to_change(code: str) -> None:
    setting, fix = WRONG_SETTINGS[code]
    for measured in (None, times()):
        (finding,) = judge(Examination(setting, measured)).findings
        assert finding.code == code
        assert fix in finding.fix
        assert finding.what.endswith(".")
        assert finding.evidence


@pytest.mark.parametrize(
    ("setting", "seconds"),
    [
        (WRONG_SETTINGS["idle-accelerators"][0], 0.8),  # of 1.6 seconds, half
        (WRONG_SETTINGS["cluster-ignored"][0], 1.6 * 2 / 3),
        (WRONG_SETTINGS["outside-scope"][0], 0.8),
        (changed(outside="all", num_replicas_meant=2, devices=("CPU:0", "CPU:1")), None),  # no speed-up is possible
    ],
)
def test_idle_devices_lose_the_seconds_that_they_could_have_taken_over(setting: Setting, seconds: float | None) -> None:
    (finding, *_) = judge(Examination(setting, times())).findings
    assert finding.seconds == (None if seconds is None else pytest.approx(seconds))


def test_workers_of_one_machine_oversubscribe_it_together() -> None:
    alone = changed(devices=("CPU:0",), num_replicas=1, strategy="one_device", accelerators=(), num_cores=2)
    four = dataclasses.replace(alone, strategy="multi_worker", num_workers=4, num_workers_here=4, num_replicas=4)
    assert codes(dataclasses.replace(four, num_listed_workers=4)) == ["oversubscribed-threads"]
    assert codes(dataclasses.replace(four, num_workers_here=2, num_listed_workers=4)) == []  # the default of two
    assert codes(dataclasses.replace(four, num_threads=1, num_listed_workers=4)) == []
    assert codes(alone) == []


def test_replicas_that_share_a_cpu_are_a_note_and_no_fault() -> None:
    setting = changed(devices=("CPU:0", "CPU:1"), accelerators=(), num_cores=2)
    report = judge(Examination(setting, times()))
    assert report.findings == ()
    (note,) = report.notes
    assert note.code == "shared-cpu"
    assert "they share its 2 cores, so no speed-up over one replica is possible here" in note.what
    assert report.speedup is None
    assert shared_cpu(HEALTHY) is None


def test_other_processes_and_stock_models_are_notes() -> None:
    report = judge(Examination(changed(is_ours=False), times(others=5.0)))
    assert report.findings == ()
    assert [note.code for note in report.notes] == ["stock-model", "busy-machine"]
    assert "took 5 of 8 cores" in report.notes[1].what
    assert judge(Examination(HEALTHY, times(others=0.4))).notes == ()


def test_data_that_mixes_little_is_the_last_finding_and_explains_no_time() -> None:
    mixing = Finding("repeat-before-shuffle", "Passes run into each other.", "shuffle(8) comes after repeat()", "...")
    report = judge(Examination(HEALTHY, times(), mixing=(mixing,)))
    assert report.findings == (mixing,)
    slow = judge(Examination(HEALTHY, times(others=0.4), mixing=(mixing,)))
    assert slow.why_not == judge(Examination(HEALTHY, times(others=0.4))).why_not
    assert judge(Examination(HEALTHY, mixing=(mixing,))).findings == (mixing,)


def test_a_stock_model_of_which_no_copy_can_be_made_is_told_with_the_reason() -> None:
    (note, *_) = judge(Examination(changed(is_ours=False), not_copied="Own has no `get_config`.")).notes
    assert note.code == "stock-model"
    assert note.what.endswith("No copy could be made of it to watch: Own has no `get_config`.")
    assert note.fix == "Make it one of ours: swap the base class for `kde.Model` or `kde.Sequential`."


# Where the time goes


def waiting(**given: Any) -> Times:
    return times(**{"input_": 0.012, "compute": 0.006, **given})


def test_waiting_for_input_is_a_finding_of_its_own_where_the_pipeline_tells_no_reason() -> None:
    (finding,) = judge(Examination(HEALTHY, waiting())).findings
    assert finding.code == "input-bound"
    assert finding.seconds == pytest.approx(0.96)
    assert "12 ms of 20 ms a step (60% of the time)" in finding.evidence
    assert "prefetch(tf.data.AUTOTUNE)" in finding.fix


def test_what_is_wrong_with_the_pipeline_stands_for_the_waiting_that_it_causes() -> None:
    reasons = tuple(Finding(code, "", "seen", "", 1.0) for code in ("sequential-map", "no-prefetch"))
    first, second = judge(Examination(HEALTHY, waiting(), pipeline=reasons)).findings
    assert (first.code, second.code) == ("sequential-map", "no-prefetch")
    assert first.seconds == pytest.approx(0.96)
    assert first.evidence.startswith("seen; waiting for input took 12 ms")
    assert second.seconds is None
    assert codes(HEALTHY, times(), pipeline=reasons) == []  # which costs nothing here


def python(seconds: float, **more: Any) -> tuple[PythonCalls, ...]:
    return (PythonCalls("quality (train.py:7)", 160, seconds, **more),)


def test_python_that_a_step_calls_is_told_from_input_and_named() -> None:
    late = dataclasses.replace(times(input_=0.012, compute=0.006), python=python(1.2))  # of 1.6 s
    report = judge(Examination(HEALTHY, late))
    (finding,) = report.findings
    assert (finding.code, finding.seconds) == ("python-in-step", pytest.approx(1.2))
    assert finding.evidence == "quality (train.py:7), 2 calls a step, 15 ms a step: 75% of the time"
    assert finding.fix.startswith("write quality with TensorFlow ops; or call it outside of the step")
    assert report.shares["Python in the step"] == pytest.approx(0.45)  # which the clocks took for waiting for input
    assert report.shares["input"] == pytest.approx(0.15)
    assert sum(report.shares.values()) == pytest.approx(1.0)


def test_python_within_what_replicas_compute_leaves_the_wait_for_input_as_it_is() -> None:
    within = dataclasses.replace(waiting(), python=python(0.3))
    assert codes(HEALTHY, within) == ["input-bound", "python-in-step"]
    assert judge(Examination(HEALTHY, within)).shares["input"] == pytest.approx(0.6)


@pytest.mark.parametrize("calls", [python(0.1), python(1.2, is_even=False)])
def test_python_that_takes_little_or_is_slow_on_one_replica_only_is_no_finding_of_its_own(calls: Any) -> None:
    assert codes(HEALTHY, dataclasses.replace(times(), python=calls)) == []


def test_one_long_wait_and_short_ones_are_not_input_bound() -> None:
    fills_its_buffer = Times((block(step=0.4, input_=0.39), *(block() for _ in range(7))), num_executions=80)
    assert codes(HEALTHY, fills_its_buffer) == []
    assert codes(HEALTHY, times(step=0.001, input_=0.0006, compute=0.0003, sync=0.0001, host=0.0)) == []


def test_waiting_at_the_beginning_of_each_pass_is_a_finding_of_its_own_where_that_is_long() -> None:
    short = dataclasses.replace(times(), start_seconds=(0.07,) * 40)  # 2.8 s beside 1.6
    assert codes(HEALTHY, short) == []
    (finding,) = judge(Examination(HEALTHY, dataclasses.replace(times(), start_seconds=(0.2,) * 8))).findings
    assert (finding.code, finding.seconds) == ("slow-start-of-epochs", pytest.approx(1.6))
    assert "took 200 ms in each of 8 passes over the data, with 10 steps a pass: 50% of the time" in finding.evidence
    assert "repeat()" in finding.fix


def test_what_each_pass_skips_is_what_its_beginning_waits_for() -> None:
    skip = Finding("skip-after-map", "what", "skip(30) comes after map", "skip before map", 0.1)
    slow = Finding("python-map", "what", "seen", "fix", 0.05)
    starting = dataclasses.replace(times(), start_seconds=(0.3, 0.3, 0.3))
    (finding,) = judge(Examination(HEALTHY, starting, pipeline=(skip,))).findings
    assert (finding.code, finding.seconds) == ("skip-after-map", pytest.approx(0.9))
    assert finding.evidence.startswith("skip(30) comes after map; the first batch took 300 ms in each of 3 passes")
    waiting_too = dataclasses.replace(times(input_=0.012, compute=0.007), start_seconds=(0.3, 0.3, 0.3))
    found = judge(Examination(HEALTHY, waiting_too, pipeline=(skip, slow))).findings
    assert [(f.code, f.seconds) for f in found] == [
        ("python-map", pytest.approx(80 * 0.012)),
        ("skip-after-map", pytest.approx(0.9)),
    ]


def test_an_experiment_decides_whether_input_is_to_blame() -> None:
    assert codes(HEALTHY, waiting(), trials=trials(as_it_was=0.02, data=0.0199)) == []
    assert codes(HEALTHY, waiting(), trials=trials(as_it_was=0.02, data=0.0203)) == []  # surely, but hardly
    report = judge(Examination(HEALTHY, waiting(), trials(as_it_was=0.01, data=0.02)))
    assert report.codes == ["input-bound"]
    assert report.findings[0].seconds == pytest.approx(0.8, rel=0.05)
    assert "on a cached batch a step took 10 ms (9.9 to 10.1) less" in report.findings[0].evidence


def test_a_callback_that_is_slow_at_every_batch_is_named_with_what_it_fetches() -> None:
    calls = Calls("Log", "on_train_batch_end", 0.5, 80, ("numpy (20 times)",))
    (finding,) = judge(Examination(HEALTHY, times(calls=(calls,), host=0.007))).findings
    assert finding.code == "fetching-callback"
    assert "Log.on_train_batch_end took 6.25 ms a call, 80 times: 31% of the time" in finding.evidence
    assert "fetched by numpy (20 times)" in finding.evidence
    assert finding.seconds == pytest.approx(0.5)
    slow = dataclasses.replace(calls, fetched=())
    assert codes(HEALTHY, times(calls=(slow,), host=0.007)) == ["slow-callback"]
    for harmless in (
        dataclasses.replace(calls, seconds=0.1),
        dataclasses.replace(calls, is_keras_own=True, name="ProgbarLogger"),
        dataclasses.replace(calls, num_calls=8000),
    ):
        assert codes(HEALTHY, times(calls=(harmless,), host=0.007)) == []


def test_a_function_that_is_traced_again_and_again_is_named_with_its_argument() -> None:
    traces = Traces("note", 60, 60, 0.9, "step", ("2", "3", "4"))
    calls = Calls("Log", "on_train_batch_end", 1.0, 80)
    (finding,) = judge(
        Examination(HEALTHY, times(traces=(traces,), calls=(calls,), tracing_seconds=0.9, host=0.012))
    ).findings
    assert finding.code == "retracing"  # which explains the callback
    assert "60 traces in 60 of 80 executions, 15 ms each: its argument step was another one each time (2, 3, 4" in (
        finding.evidence
    )
    assert "Pass step as a tensor" in finding.fix
    for harmless in (
        dataclasses.replace(traces, num_traces=2, num_executions=2),  # the shape of the last batch
        dataclasses.replace(traces, num_executions=5),
        dataclasses.replace(traces, seconds=0.01),
    ):
        assert codes(HEALTHY, times(traces=(harmless,))) == []


SPEC = "TensorSpec(shape=({}), dtype=tf.{}, name=None)"


@pytest.mark.parametrize(
    ("argument", "values", "fix"),
    [
        (
            "",
            (),
            "Make note once, outside of what is called for each batch: its arguments were the same each time, and",
        ),
        ("x", ("2", "'a'"), "Pass x as a tensor, `tf.constant(...)`"),
        (
            "x",
            (SPEC.format("2, 8", "float32"), SPEC.format("3, 8", "float32")),
            "`@tf.function(reduce_retracing=True)`, by which note is traced for all shapes of x at once; or declare "
            "them, `tf.TensorSpec([None, 8], tf.float32)` in `input_signature`; or pad x to few lengths",
        ),
        (
            "x",
            (SPEC.format("2,", "float32"), SPEC.format("2,", "float64")),
            "Cast x to one dtype before note is called: `tf.cast(x, tf.float32)`.",
        ),
        ("x", (SPEC.format("2,", "float32"), SPEC.format("2, 1", "float32")), "Give x one rank: `tf.reshape(x, [...])"),
        ("x", ("Weakref[Batch]",), "Call note with the same object each time, or hand it the tensors that x holds"),
        ("x", ("List[Literal[1]]", "List[Literal[1], Literal[2]]"), "Pass x as one tensor, `tf.stack(x)`"),
    ],
)
def test_how_a_function_is_traced_once_depends_on_what_it_is_called_with(argument: str, values: Any, fix: str) -> None:
    traces = Traces("note", 60, 60, 0.9, argument, values)
    (finding,) = judge(Examination(HEALTHY, times(traces=(traces,), tracing_seconds=0.9, host=0.012))).findings
    assert finding.fix.startswith(fix)


def short(**given: Any) -> Times:
    return times(**{"step": 0.0012, "compute": 0.0001, "sync": 0.00005, "input_": 0.00005, "host": 0.001, **given})


def test_steps_shorter_than_their_start_say_how_many_to_make_at_once() -> None:
    (finding,) = judge(Examination(changed(steps_per_execution=1), short())).findings
    assert finding.code == "host-bound"
    assert "steps_per_execution=95" in finding.fix
    assert "starting an execution took 1 ms" in finding.evidence
    assert codes(HEALTHY, short()) == []  # "auto" makes as many as callbacks can wait for
    (watched,) = judge(Examination(changed(step_watchers=("Log",)), short())).findings
    assert "Let Log do without every batch" in watched.fix
    assert codes(changed(steps_per_execution=1), times()) == []


def test_as_many_steps_an_execution_as_pay_are_not_to_be_more() -> None:
    def measured(num_steps: int) -> Times:  # in 10 executions, of steps of which 10 ms compute
        seconds = {"step": 0.016, "compute": 0.0098, "sync": 1e-4, "input_": 1e-4, "host": 0.006}
        return times(num_executions=10, num_steps=num_steps // 8, **seconds)

    assert codes(changed(steps_per_execution=16), measured(160)) == ["host-bound"]
    assert codes(changed(steps_per_execution=32), measured(320)) == []  # a quarter of a second is 25 steps


def test_what_compiling_would_save_is_the_time_that_eager_steps_lose() -> None:
    setting = changed(runs_eagerly=True, eager_because="compile(run_eagerly=True)")
    finding = judge(Examination(setting, times(), trials(as_it_was=0.02, compiled=0.005))).findings[0]
    assert finding.code == "eager"
    assert finding.evidence.startswith("compile(run_eagerly=True); compiled, a step took 15 ms")
    assert finding.seconds == pytest.approx(0.015 * 80)


def test_a_report_of_a_healthy_run_has_no_table() -> None:
    text = judge(Examination(HEALTHY, times())).markdown()
    assert "| finding |" not in text
    assert text.startswith(judge(Examination(HEALTHY, times())).headline)


def test_an_experiment_decides_whether_more_steps_an_execution_help() -> None:
    setting = changed(steps_per_execution=1)
    assert codes(setting, short(), trials=trials(one_step=0.0012, many_steps=0.00121)) == []
    (finding,) = judge(Examination(setting, short(), trials(one_step=0.0012, many_steps=0.0003))).findings
    assert "50 an execution saved 0.9 ms (0.891 to 0.909) a step" in finding.evidence


@pytest.mark.parametrize(("host", "step", "best"), [(1e-3, 1e-4, 190), (1e-3, 2e-2, 1), (1e-5, 1e-3, 1), (1.0, 0.1, 2)])
def test_enough_steps_make_the_host_a_twentieth_and_an_execution_at_most_a_quarter_of_a_second(
    host: float, step: float, best: int
) -> None:
    assert best_steps_per_execution(host, step) == best


def test_unequal_shards_are_found_and_a_remainder_is_not() -> None:
    (finding,) = judge(Examination(HEALTHY, times(examples=[96, 32]))).findings
    assert finding.code == "unequal-shards"
    assert "Replica 0 has 1.50 times as many examples as the mean" in finding.what
    assert finding.seconds == pytest.approx(0.018 * 80 / 3)
    assert codes(HEALTHY, times(examples=[32, 33])) == []
    assert codes(HEALTHY, times(examples=[2, 3], num_replicas=2)) == []
    (small,) = judge(Examination(HEALTHY, times(examples=[1, 2]))).findings  # as fit splits a batch of 3
    assert small.code == "batch-too-small"
    assert small.evidence.startswith("1, 2 examples a replica; ")
    assert small.seconds == pytest.approx(0.018 * 80 / 4)


def test_a_straggler_is_named_where_the_replicas_have_devices_of_their_own() -> None:
    slow = times(compute=[0.005, 0.018])
    (finding,) = judge(Examination(HEALTHY, slow)).findings
    assert finding.code == "straggler"
    assert finding.what.startswith("Replica 1 is slow: 3.36 times as long a step as the others")
    assert finding.seconds == pytest.approx(0.013 * 80)
    on_cpu = changed(devices=("CPU:0", "CPU:1"), accelerators=())
    assert codes(on_cpu, slow) == ["straggler"]
    assert codes(on_cpu, times(compute=[0.009, 0.018])) == []  # who is given a core first is ahead
    assert codes(on_cpu, times(step=0.006, compute=[0.0005, 0.005])) == []  # who loses its core for a moment is behind
    assert codes(dataclasses.replace(on_cpu, num_cores=1), slow) == []  # they take turns
    once = Times((block(compute=[0.001, 0.018]), *(block() for _ in range(7))), num_executions=80)
    assert codes(HEALTHY, once) == []


def test_a_slow_worker_is_named_as_such() -> None:
    setting = changed(
        strategy="multi_worker", num_workers=2, num_listed_workers=2, num_replicas=4, devices=("GPU:0", "GPU:1")
    )
    (finding,) = judge(Examination(setting, times(compute=[0.005, 0.005, 0.018, 0.018], num_replicas=4))).findings
    assert finding.code == "straggler"
    assert finding.what.startswith("Worker 1 (replicas 2, 3) ")


def test_python_that_makes_a_worker_slow_is_named_by_the_straggler_alone() -> None:
    here = {"devices": ("GPU:0",), "accelerators": ("GPU:0",)}
    setting = changed(strategy="multi_worker", num_workers=2, num_listed_workers=2, **here)
    slow = dataclasses.replace(times(compute=[0.005, 0.018]), python=python(1.1))
    (finding,) = judge(Examination(setting, slow)).findings
    assert finding.code == "straggler"
    assert finding.evidence.endswith("; here each step calls Python, quality (train.py:7), for 13.8 ms")
    assert finding.fix.startswith(
        "Write quality with TensorFlow ops, or see why it takes longer here. Look at what else "
    )
    everywhere = dataclasses.replace(times(compute=[0.015, 0.028]), python=python(1.1))
    assert codes(setting, everywhere) == ["python-in-step", "straggler"]


def synchronising(**given: Any) -> Times:
    return times(**{"compute": 0.006, "sync": 0.013, **given})


def test_summing_that_takes_longer_than_computing_says_how_many_bytes_at_what_rate() -> None:
    (finding,) = judge(Examination(changed(gradient_bytes=13_000_000), synchronising())).findings
    assert finding.code == "sync-bound"
    assert "13 MB of gradients a step, 1 GB a second" in finding.evidence
    assert finding.fix.endswith("`keras.optimizers.Adam(gradient_accumulation_steps=4)`.")
    on_hosts = changed(gradient_bytes=13_000_000, devices=("CPU:0",), accelerators=(), num_workers=2)
    (finding,) = judge(Examination(on_hosts, synchronising())).findings
    assert finding.fix.endswith('; or half the bytes, `model.compile(..., gradient_compression="bfloat16")`.')
    assert codes(HEALTHY, synchronising(compute=[0.001, 0.006], sync=[0.018, 0.0005])) == ["straggler"]
    assert codes(changed(num_replicas=1, strategy="none", accelerators=()), synchronising(num_replicas=1)) == []


def test_an_experiment_tells_the_sum_from_the_update() -> None:
    assert codes(HEALTHY, synchronising(), trials=trials(as_it_was=0.02, no_sum=0.0195)) == []
    shown = trials(as_it_was=0.02, no_sum=0.008)
    (finding,) = judge(Examination(HEALTHY, synchronising(), shown)).findings
    assert finding.seconds == pytest.approx(0.012 * 80, rel=0.05)
    on_cpu = changed(devices=("CPU:0", "CPU:1"), accelerators=())  # these add up in memory
    assert codes(on_cpu, synchronising()) == []
    (finding,) = judge(Examination(on_cpu, synchronising(), shown)).findings
    assert finding.code == "sync-bound"
    assert finding.fix.endswith("`keras.optimizers.Adam(gradient_accumulation_steps=4)`.")  # nothing is sent


def test_few_rows_a_replica_are_the_batchs_fault_and_not_the_sums() -> None:
    report = judge(Examination(HEALTHY, synchronising(examples=4)))
    assert report.codes == ["batch-too-small"]
    assert "from 8 to 256 examples or more" in report.findings[0].fix
    assert codes(HEALTHY, times(examples=4)) == []  # a large model may well have few
    starved = judge(Examination(HEALTHY, times(examples=[0, 1])))
    assert starved.codes == ["batch-too-small"]
    assert "examples a step: 0, 1" in starved.findings[0].evidence


def test_an_experiment_decides_whether_twice_the_rows_are_nearly_free() -> None:
    few = times(examples=4)
    (finding,) = judge(Examination(HEALTHY, few, trials(as_it_was=0.02, double=0.021))).findings
    assert finding.code == "batch-too-small"
    assert "with twice the examples it took 1.05 (" in finding.evidence
    assert codes(HEALTHY, synchronising(examples=4), trials=trials(as_it_was=0.02, double=0.039)) == []


def test_a_long_recurrence_of_small_steps_is_sequential_and_a_short_or_a_wide_one_is_not() -> None:
    def setting(num_steps: int, parameters: int) -> Setting:
        return changed(loops=(Loop("lstm", num_steps, parameters),))

    (finding,) = judge(Examination(setting(200, 400), times())).findings
    assert finding.code == "sequential-model"
    assert "lstm makes 200 time steps, one after the other: 90 µs each" in finding.evidence
    assert codes(setting(24, 400), times()) == []
    assert codes(setting(200, 400_000), times()) == []
    assert codes(setting(200, 400), times(step=2.0, compute=1.9)) == []  # something else takes the time
    assert codes(setting(200, 400), times(), trials=trials(as_it_was=0.02, double=0.039)) == []
    (finding,) = judge(Examination(setting(200, 400), times(), trials(as_it_was=0.02, double=0.021))).findings
    assert "; with twice the examples a step took 1.05 " in finding.evidence


# What explains what, and in which order


def test_most_seconds_come_first_and_unknown_ones_last() -> None:
    calls = Calls("Log", "on_train_batch_end", 0.4, 80)
    setting = changed(devices=("CPU:0", "CPU:1"), accelerators=(), num_threads=64)
    report = judge(Examination(setting, waiting(calls=(calls,), host=0.005)))
    assert report.codes == ["input-bound", "slow-callback", "oversubscribed-threads"]


@pytest.mark.parametrize("cause", ["eager", "pinned-device"])
def test_what_one_finding_explains_is_not_said_twice(cause: str) -> None:
    assert codes(WRONG_SETTINGS[cause][0], synchronising()) == [cause]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.025, ["host-bound", "slow-callback"]), (0.045, ["slow-callback"])]
)
def test_a_callback_explains_short_steps_only_where_it_costs_more(seconds: float, expected: list[str]) -> None:
    calls = Calls("Log", "on_train_batch_begin", seconds, 80)
    assert codes(changed(step_watchers=("Log",)), short(calls=(calls,))) == expected


# The report


def test_a_report_can_be_read_by_people_and_programs() -> None:
    report = judge(Examination(HEALTHY, waiting(), trials(as_it_was=0.01, data=0.02, one_device=0.018)))
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(1.8)
    assert sum(report.shares.values()) == pytest.approx(1.0)
    read = json.loads(report.to_json())
    assert read["findings"][0]["code"] == "input-bound"
    assert read["measured"]["num_steps"] == 80
    assert read["experiments"]["one device"][0] == pytest.approx(0.018)
    assert "| input-bound | 0.8 s |" in report.markdown()
    assert "1.8 (1.8 to 1.8) times as fast as one replica" in str(report)
    assert "no step was watched" in str(judge(Examination(HEALTHY)))


def test_speed_up_is_estimated_where_replicas_have_devices_of_their_own() -> None:
    speedup = judge(Examination(HEALTHY, times())).speedup
    assert speedup is not None
    assert speedup.value == pytest.approx(1.8)


def test_an_interval_covers_what_samples_scatter_over() -> None:
    samples = np.random.default_rng(1).normal(5.0, 1.0, size=200)
    estimate = Estimate.of(samples.tolist())
    assert estimate.low < 5.0 < estimate.high
    assert estimate.high - estimate.low < 0.6
    with pytest.raises(ValueError, match="no samples"):
        Estimate.of([])


def test_neighbouring_blocks_merge_without_losing_a_second_or_an_example() -> None:
    blocks = [block(num_steps=n, compute=0.001 * n) for n in (1, 2, 3, 4, 5)]
    merged = blocks_of_steps(blocks, 2)
    assert [b.num_steps for b in merged] == [10, 5]
    assert sum(b.seconds for b in merged) == pytest.approx(sum(b.seconds for b in blocks))
    assert sum(b.examples.sum() for b in merged) == sum(b.examples.sum() for b in blocks)
    assert merged[0].compute_seconds[0] == pytest.approx((1 + 4 + 9 + 16) * 0.001 / 10)


def test_judging_needs_no_tensorflow() -> None:
    module = "keras_dist_ext.diagnosis.doctor.rules"
    code = f"import {module}, sys; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
