"""Predictions from planted measurements: known costs in, the right step time, bound and advice out."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import keras_dist_ext as kde
from keras_dist_ext import data
from keras_dist_ext.argument_types import counts
from keras_dist_ext.diagnosis.first_fit import FirstFit
from keras_dist_ext.diagnosis.plan import planned_script
from keras_dist_ext.diagnosis.plan.assumptions import assumptions_of
from keras_dist_ext.diagnosis.plan.links import DOCUMENTED, Link, SumTimes, fit_line, read_network
from keras_dist_ext.diagnosis.plan.measure import _peak_of, _time_updates
from keras_dist_ext.diagnosis.plan.measurements import Measurements
from keras_dist_ext.diagnosis.plan.plan_report import Plan
from keras_dist_ext.diagnosis.plan.scaling import KINDS, draw_curve
from keras_dist_ext.diagnosis.plan.step_costs import BOUNDS, Predicted, resampled_costs, sizes_to_measure, step_costs
from keras_dist_ext.diagnosis.plan.what_ifs import what_ifs
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.findings import SLOWS_PIPELINES, Finding
from keras_dist_ext.monitoring.append_file import RecordsLost
from keras_dist_ext.monitoring.dashboard import metadata as names
from keras_dist_ext.monitoring.event_files import EventWriter

FIXED, PER_EXAMPLE, UPDATE, HOST = 0.002, 1e-4, 0.001, 2e-4
BATCH = 256
REPLICAS = (1, 2, 4, 8)


def measured(**changed: Any) -> Measurements:
    """Return what was measured of a step of FIXED + UPDATE + PER_EXAMPLE an example, seven rounds that are alike."""
    steps = {size: (FIXED + UPDATE + PER_EXAMPLE * size,) * 7 for size in (32, 64, 128, 256)}
    given: dict[str, Any] = {"steps": steps, "update": (UPDATE,) * 7, "host": (HOST,) * 7, "state_bytes": 300}
    return Measurements("model", "CPU:0", BATCH, **{**given, **changed})


def planned(made: Measurements, replicas: tuple[int, ...] = REPLICAS, devices: Any = "own") -> Plan:
    costs, draws = step_costs(made), resampled_costs(made, 20)
    curves = tuple(draw_curve(kind, replicas, made, costs, draws, devices) for kind in KINDS)
    changes = {curve.kind: what_ifs(curve.stops_at or curve.points[-1], made, costs, devices) for curve in curves}
    return Plan(made, costs, curves, changes, assumptions_of(made, costs, curves, devices))


SUMS = SumTimes(8, {4096: (1e-4,), 8192: (2e-4,)}, "here")  # of as many replicas as are planned for


def finding(code: str, seconds: float | None) -> Finding:
    return Finding(code, "something is slow.", "seen", f"mend {code}", seconds)


# A step


@pytest.mark.parametrize("num_replicas", REPLICAS)
def test_a_step_has_the_parts_that_were_planted(num_replicas: int) -> None:
    link = Link(1e9, 5e-5, "planted")
    costs = step_costs(measured(gradient_bytes=4_000_000, given_link=link))
    step = costs.predict(num_replicas, BATCH)
    assert step.compute == pytest.approx(FIXED + PER_EXAMPLE * BATCH / num_replicas)
    assert step.update == pytest.approx(UPDATE)
    ring = 2 * (num_replicas - 1) * (5e-5 + 4e-3 / num_replicas)
    assert step.communication == pytest.approx(ring)
    assert step.seconds == pytest.approx(step.compute + UPDATE + ring + HOST)


def test_the_replica_with_the_most_examples_is_waited_for() -> None:
    assert step_costs(measured()).predict(3, 256).compute == pytest.approx(FIXED + PER_EXAMPLE * 86)


def test_fixed_and_growing_seconds_are_told_apart() -> None:
    costs = step_costs(measured())
    assert (costs.fixed, costs.per_example) == (pytest.approx(FIXED), pytest.approx(PER_EXAMPLE))
    assert costs.misfit < 1e-9


def test_sizes_that_were_measured_come_back_as_they_were_though_no_line_fits() -> None:
    seconds = {32: 0.010, 64: 0.010, 128: 0.011, 256: 0.030}
    costs = step_costs(measured(steps={size: (value,) * 7 for size, value in seconds.items()}, update=(0.0,)))
    for size, value in seconds.items():
        assert costs.compute(size) == pytest.approx(value)
    assert 0.011 < costs.compute(192) < 0.030


def test_replicas_that_share_cores_take_turns_as_far_as_one_keeps_them_busy() -> None:
    costs = step_costs(measured(cores_busy=1.5, num_cores=2))
    alone = FIXED + PER_EXAMPLE * 64
    assert costs.predict(4, BATCH, "shared").compute == pytest.approx(alone * 4 * 1.5 / 2)
    assert costs.predict(4, BATCH, "own").compute == pytest.approx(alone)
    idle = step_costs(measured(cores_busy=1.0, num_cores=8))
    assert idle.predict(4, BATCH, "shared").compute == pytest.approx(alone)


def test_input_is_hidden_behind_the_step_as_far_as_was_seen() -> None:
    busy = FIXED + PER_EXAMPLE * BATCH + UPDATE + HOST
    hidden = step_costs(measured(input=(0.010,), input_hidden=1.0)).predict(1, BATCH)
    assert hidden.seconds == pytest.approx(busy)
    seen = step_costs(measured(input=(0.010,), input_hidden=0.0)).predict(1, BATCH)
    assert seen.seconds == pytest.approx(busy + 0.010)
    assert seen.waiting == pytest.approx(0.010)


@pytest.mark.parametrize(
    ("bound", "parts"),
    [
        ("compute", {"compute": 0.02, "communication": 0.005, "host": 0.001, "input": 0.01}),
        ("compute", {"update": 0.02, "communication": 0.005, "host": 0.001, "input": 0.01}),
        ("communication", {"compute": 0.004, "communication": 0.03, "host": 0.001, "input": 0.01}),
        ("host", {"compute": 0.001, "communication": 0.001, "host": 0.01, "input": 0.004}),
        ("input", {"compute": 0.008, "communication": 0.001, "host": 0.001, "input": 0.04}),
    ],
)
def test_the_bound_is_what_was_planted(bound: str, parts: dict[str, float]) -> None:
    given = {"compute": 0.0, "update": 0.0, **parts}
    assert Predicted(**given).bound == bound
    assert bound in BOUNDS


def test_a_pipeline_that_is_hidden_is_not_the_bound_until_replicas_are_faster() -> None:
    plan = planned(measured(input=(0.010,) * 4))
    assert [point.bound for point in plan.curve("fixed global batch").points] == [
        "compute",
        "compute",
        "input",
        "input",
    ]


# Curves


def test_perfect_replicas_pay_to_the_end() -> None:
    made = measured(
        steps={size: (PER_EXAMPLE * size,) * 7 for size in (32, 64, 128, 256)},
        update=(0.0,),
        host=(0.0,),
        given_link=Link(1e15, 0.0, "planted"),
    )
    for curve in planned(made).curves:
        assert [point.efficiency.value for point in curve.points] == pytest.approx([1.0] * 4)
        assert (curve.best.num_replicas, curve.stops_at) == (8, None)


def test_it_stops_paying_where_an_added_replica_brings_less_than_half() -> None:
    plan = planned(measured(gradient_bytes=12_000_000, given_link=Link(1e9, 0.0, "planted")))
    curve = plan.curve("fixed global batch")
    assert curve.stops_at is not None
    assert curve.best.num_replicas < curve.stops_at.num_replicas
    assert curve.gain(curve.stops_at) < 0.5 <= curve.gain(curve.best)
    assert f"With {curve.stops_at.num_replicas}, each one added brings" in plan.advice(curve)


def test_a_batch_for_each_replica_scales_further_than_one_for_all() -> None:
    plan = planned(measured(gradient_bytes=4_000_000, given_link=Link(1e9, 1e-5, "planted")))
    of_all, of_each = (plan.curve(kind).points[-1].speedup.value for kind in KINDS)
    assert of_each > of_all
    assert [point.global_batch for point in plan.curve("fixed batch a replica").points] == [256, 512, 1024, 2048]


def test_intervals_hold_the_value_and_come_from_the_spread() -> None:
    noisy = {size: tuple(v[0] * (1 + 0.1 * (n - 3)) for n in range(7)) for size, v in measured().steps.items()}
    wide = planned(measured(steps=noisy)).curves[0].points[-1].seconds
    narrow = planned(measured()).curves[0].points[-1].seconds
    assert wide.low < wide.value < wide.high
    assert narrow.high - narrow.low < 1e-9


def test_intervals_reach_as_far_as_the_run_was_from_what_was_predicted_of_it() -> None:
    right = planned(measured()).curves[0]
    off = planned(measured(run_seconds=1.5 * right.one.seconds.value)).curves[0]
    for was, now in zip(right.points, off.points, strict=True):
        assert now.seconds.value == was.seconds.value
        assert now.seconds.high == pytest.approx(1.5 * was.seconds.value, rel=0.05)
    assert off.one.speedup.high == pytest.approx(1)


def test_memory_is_a_line_through_what_was_measured() -> None:
    plan = planned(measured(peak_bytes={64: 1000 + 64, 256: 1000 + 256}))
    memory = [point.memory_bytes for point in plan.curve("fixed global batch").points]
    assert memory == pytest.approx([1256, 1128, 1064, 1032])
    assert planned(measured()).curves[0].points[0].memory_bytes is None


# Links


@pytest.mark.parametrize(
    ("text", "bytes_per_second", "latency"),
    [
        ("10Gb/s, 50us", 1.25e9, 5e-5),
        ("10 Gbit/s, 0.05 ms", 1.25e9, 5e-5),
        ("100Gbps,2µs", 12.5e9, 2e-6),
        ("12.5 GB/s, 1ms", 12.5e9, 1e-3),
        ("800Mb/s", 1e8, 0.0),
        (" NVLink ", 450e9, 0.0),
    ],
)
def test_a_network_is_read_as_it_is_written(text: str, bytes_per_second: float, latency: float) -> None:
    link = read_network(text)
    assert link.bytes_per_second == pytest.approx(bytes_per_second)
    assert link.latency_seconds == pytest.approx(latency)


@pytest.mark.parametrize(
    "text", ["", "fast", "10Gb", "10Gb/s, 50", "10Gb/s, 50us, 3", "-1Gb/s", "0Gb/s", "50us, 10Gb/s"]
)
def test_another_network_is_an_error_that_shows_one(text: str) -> None:
    with pytest.raises(MonitorError, match=r"^network must .*10Gb/s, 50us.* got "):
        read_network(text)


def test_a_name_that_is_spelled_wrong_gets_a_suggestion() -> None:
    with pytest.raises(MonitorError, match="did you mean 'nvlink'"):
        read_network("nvlnik")


def test_documented_links_say_where_their_figures_come_from() -> None:
    assert all("data sheet" in link.source for link in DOCUMENTED.values())


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_measured_link_predicts_the_sums_that_it_was_measured_by(in_memory: bool) -> None:
    planted = Link(2e9, 3e-5, "planted", in_memory)
    sizes = (4096, 1_000_000, 4_000_000)
    sums = SumTimes(4, {size: (planted.sum_seconds(4, size),) * 5 for size in sizes}, "here", in_memory)
    link = sums.link()
    for count in (2, 4, 16):
        assert link.sum_seconds(count, 2_000_000) == pytest.approx(planted.sum_seconds(count, 2_000_000))
    assert link.sum_seconds(1, 2_000_000) == 0.0


def test_a_sum_of_few_bytes_that_seemed_to_take_no_time_does_not_set_the_bandwidth() -> None:
    sums = SumTimes(2, {4096: (0.0,), 250_000: (2.5e-4,), 1_000_000: (1e-3,)}, "here")
    assert sums.link().bytes_per_second == pytest.approx(1e9, rel=0.05)


def test_what_a_sum_of_few_bytes_adds_to_steps_is_latency() -> None:
    link = SumTimes(2, {644: (2e-4,) * 3}, "here", in_steps=True).link()
    assert link.sum_seconds(2, 644) == pytest.approx(2e-4)
    assert link.sum_seconds(4, 644) == pytest.approx(6e-4)
    assert link.source == "measured in steps on here"


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("added", [1e-3, 0.1])
def test_what_gradients_add_to_steps_is_predicted_as_it_was_measured(in_memory: bool, added: float) -> None:
    link = SumTimes(2, {4096: (2.6e-3,) * 3, 40_000: (added,) * 3}, "here", in_memory, in_steps=True).link()
    assert link.sum_seconds(2, 40_000) == pytest.approx(added)


def test_lines_have_no_parts_below_zero() -> None:
    assert fit_line([1.0, 2.0, 4.0], [0.5, 2.0, 8.0])[0] == 0.0
    assert fit_line([1.0, 2.0, 4.0], [4.0, 2.0, 1.0])[1] == 0.0


# What to change


def test_without_a_slow_map_the_input_decides_no_longer() -> None:
    made = measured(input=(0.030,) * 4, findings=(finding("sequential-map", 0.025),))
    plan = planned(made)
    first = plan.what_ifs["fixed global batch"][0]
    assert (first.code, first.change) == ("sequential-map", "mend sequential-map")
    curve = plan.curve("fixed global batch")
    point = curve.stops_at or curve.points[-1]
    better = dataclasses.replace(point.parts, input=0.005)
    assert first.factor == pytest.approx(point.parts.seconds / better.seconds)
    assert "input" not in [one.code for one in plan.what_ifs["fixed global batch"]]  # the finding says what to change


@pytest.mark.parametrize("code", sorted(SLOWS_PIPELINES - {"no-prefetch"}))
def test_the_seconds_of_a_slow_pipeline_come_off_the_input(code: str) -> None:
    plan = planned(measured(input=(0.030,) * 4, findings=(finding(code, 0.025),)))
    assert plan.what_ifs["fixed global batch"][0].code == code


def test_codes_of_slow_pipelines_are_those_of_findings() -> None:
    made = "".join(path.read_text() for path in Path(data.__path__[0]).glob("*_findings.py"))
    assert {code for code in SLOWS_PIPELINES if f'"{code}",\n' not in made} == set()


def test_a_prefetch_hides_the_input() -> None:
    made = measured(input=(0.020,) * 4, input_hidden=0.0, findings=(finding("no-prefetch", None),))
    codes = [one.code for one in planned(made, (1, 2)).what_ifs["fixed global batch"]]
    assert "no-prefetch" in codes


def test_a_slow_network_is_named() -> None:
    plan = planned(measured(gradient_bytes=50_000_000, given_link=Link(1.25e8, 1e-3, "planted")))
    assert plan.what_ifs["fixed global batch"][0].code == "communication"
    assert plan.curve("fixed global batch").points[1].bound == "communication"
    assert plan.curve("fixed global batch").best.num_replicas == 1


def test_a_finding_without_seconds_changes_nothing_that_could_be_predicted() -> None:
    found = planned(measured(findings=(finding("unknown", None),)), (1, 2)).what_ifs["fixed global batch"]
    assert "unknown" not in [one.code for one in found]


def test_what_brings_next_to_nothing_is_not_said() -> None:
    made = measured(host=(1e-7,), findings=(finding("slow-callback", 1e-7),))
    assert not {"slow-callback", "host", "input"} & {one.code for one in planned(made).what_ifs["fixed global batch"]}


# What is assumed


@pytest.mark.parametrize(
    ("changed", "devices", "said"),
    [
        ({}, "own", "No network was measured or given, so the sum of"),
        ({}, "own", "Each replica has a device like CPU:0 here"),
        ({"num_cores": 2}, "shared", "All replicas share the 2 cores of this machine"),
        ({"given_link": DOCUMENTED["nvlink"]}, "own", "no latency was given"),
        ({"given_link": Link(1e9, 1e-5, "given: it")}, "own", r"1 GB/s and 10 µs a message \(given: it\)"),
        ({"input": (0.01,)}, "own", "Each process reads whole global batches"),
        ({"steps": {256: (0.03,), 128: (0.02,)}}, "own", "those of 32, 64 continue the line"),
        ({"steps": {256: (0.03,)}}, "own", "with one number of examples"),
        ({"steps": {32: (0.01,), 128: (0.01,), 256: (0.05,)}}, "own", "a line misses them by up to"),
        ({"run_seconds": 0.05}, "own", "predicted to take 28.8 ms a step, and took 50 ms in the run"),
        ({}, "own", "The memory of CPU:0 was not measured"),
        ({"sums": SumTimes(2, {4096: (1e-4,), 8192: (2e-4,)}, "here")}, "own", "Sums were measured on 2 replicas"),
        ({"sums": SUMS, "gradient_bytes": 10_000}, "own", "Sums were measured up to .*; beyond, seconds grow"),
    ],
)
def test_what_was_not_measured_is_said(changed: dict[str, Any], devices: str, said: str) -> None:
    assert any(re.search(said, sentence) for sentence in planned(measured(**changed), devices=devices).assumptions)


def test_a_run_that_took_as_long_as_was_predicted_is_not_spoken_of() -> None:
    right = FIXED + PER_EXAMPLE * BATCH + UPDATE + HOST
    assert not any("in the run" in sentence for sentence in planned(measured(run_seconds=right)).assumptions)


def test_one_replica_alone_assumes_no_network() -> None:
    assert not any("network" in sentence for sentence in planned(measured(), (1,)).assumptions)


# Sizes, text, command line


@pytest.mark.parametrize(
    ("batch", "replicas", "sizes"),
    [
        (256, [1, 2, 4, 8, 16], [16, 32, 64, 128, 256]),
        (100, [3], [34, 100]),
        (1, [1, 2], [1]),
        (2, [1, 2, 4], [1, 2]),
        (1000, list(range(1, 65)), None),
    ],
)
def test_steps_are_measured_with_what_replicas_would_have(batch: int, replicas: list[int], sizes: Any) -> None:
    found = sizes_to_measure(batch, replicas)
    assert found == (sizes or found)
    assert len(found) <= 6
    assert found[-1] == batch


def test_the_plan_is_text_and_json() -> None:
    plan = planned(measured(input=(0.03,), gradient_bytes=4_000_000, given_link=Link(1e9, 1e-5, "planted")))
    text = str(plan)
    assert "'model' on CPU:0, 256 examples a batch: computing" in text
    assert "Fixed global batch:" in text
    assert "assumed: " in text
    values = json.loads(plan.to_json())
    of_all = values["curves"]["fixed global batch"]
    assert [point["replicas"] for point in of_all["points"]] == [1, 2, 4, 8]
    assert of_all["pays"] == plan.curve("fixed global batch").best.num_replicas
    assert sum(of_all["points"][0]["parts"].values()) == pytest.approx(of_all["points"][0]["step_seconds"]["value"])


def test_a_plan_has_no_other_curve() -> None:
    with pytest.raises(KeyError, match="perfect"):
        planned(measured()).curve("perfect")  # type: ignore[arg-type]


# What is measured, and how: nothing is trained


@pytest.mark.parametrize(
    ("given", "in_memory", "expected"),
    [
        ({}, False, "in steps"),
        pytest.param({}, True, None, marks=pytest.mark.slow),
        ({"devices": "shared"}, True, "in memory"),
        pytest.param({"devices": "shared", "replicas": [1]}, True, None, marks=pytest.mark.slow),
        pytest.param({"network": "10Gb/s, 50us"}, False, None, marks=pytest.mark.slow),
    ],
)
def test_sums_are_measured_where_replicas_are_meant_to_be(
    given: dict[str, Any], in_memory: bool, expected: str | None, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(where: str, num_replicas: int) -> SumTimes:
        return SumTimes(num_replicas, {4096: (1e-4,), 8192: (2e-4,)}, where)

    module = importlib.import_module("keras_dist_ext.diagnosis.plan.plan")
    monkeypatch.setattr(module, "measure_one_replica", lambda *_, **__: measured(gradient_bytes=8192))
    monkeypatch.setattr(module, "shares_memory", lambda _: in_memory)
    monkeypatch.setattr(module, "time_sums_in_memory", lambda num_replicas, _: timed("in memory", num_replicas))
    in_steps = lambda model, one, strategy, *_, **__: timed("in steps", strategy.num_replicas_in_sync)  # noqa: E731
    monkeypatch.setattr(module, "time_sums_in_steps", in_steps)
    with mirrored.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    sums = kde.plan(model, np.ones((8, 2)), np.ones((8, 1)), **{"replicas": [1, 2], **given}).measured.sums
    assert (None if sums is None else sums.where) == expected
    assert sums is None or sums.num_replicas == 2


def test_a_model_without_an_optimizer_has_no_update_to_time() -> None:
    assert _time_updates(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])) == (0.0,)


@pytest.mark.parametrize("counts_memory", [True, False])
def test_the_memory_of_a_gpu_is_the_most_that_an_execution_takes(
    counts_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def reset(device: str) -> None:
        if not counts_memory:
            raise ValueError("the allocator keeps no count")
        done.append(f"reset {device}")

    def info(device: str) -> dict[str, int]:
        done.append(f"read {device}")
        return {"peak": 12}

    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", reset)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    conditions: Any = SimpleNamespace(run=lambda name: done.append(f"run {name}"))
    assert list(_peak_of(conditions, "8")) == ([12] if counts_memory else [])
    assert done == (["reset GPU:0", "run 8", "read GPU:0"] if counts_memory else [])


# A script


class Watches(keras.callbacks.Callback):
    """A callback of the script's."""


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_script_is_planned_by_what_its_first_fit_was_given(
    is_quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def plan(model: Any, x: Any, **given: Any) -> Plan:
        asked.update(given, x=x)
        return planned(measured(), (1, 2))

    (tmp_path / "train.py").touch()
    given = {"x": "x", "y": "y", "batch_size": 8, "epochs": 9, "class_weight": None}
    callbacks = [Watches(), Watches()] if is_quiet else []
    monkeypatch.setattr(
        planned_script, "run_to_first_fit", lambda *_: FirstFit(None, {**given, "callbacks": callbacks})
    )
    monkeypatch.setattr(planned_script, "plan", plan)
    places = {"json": tmp_path / "plan.json", "log_dir": tmp_path / "logs"} if is_quiet else {}
    made = planned_script.plan_script(str(tmp_path / "train.py"), replicas=[2, 1], show=not is_quiet, **places)
    assert asked == {
        **{name: given[name] for name in ("x", "y", "batch_size")},
        "replicas": (1, 2),
        "devices": "own",
        "network": None,
        "num_steps": 60,
    }
    left_out = [sentence for sentence in made.assumptions if "callbacks were left out" in sentence]
    assert len(left_out) == is_quiet
    assert all(sentence.endswith(": Watches.") for sentence in left_out)
    assert ("Fixed global batch" in capsys.readouterr().out) == (not is_quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(["logs", "plan.json"] * is_quiet), "train.py"]
    if is_quiet:
        assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(made.to_json())
        events = EventAccumulator(str(tmp_path / "logs" / "plan" / "all")).Reload()
        assert events.Tensors(names.PLAN_TAG)


def test_a_script_is_not_run_where_its_plan_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    (tmp_path / "file").touch()
    with pytest.raises(MonitorError, match=r"events cannot be written to .*file"):
        planned_script.plan_script(str(tmp_path / "train.py"), log_dir=tmp_path / "file")


def test_a_plan_is_saved_for_tensorboard(tmp_path: Path) -> None:
    plan = planned(measured())
    plan.save(tmp_path / "logs")
    plan.save(tmp_path / "logs", "night/plan")
    for experiment in ("plan", "night/plan"):
        events = EventAccumulator(str(tmp_path / "logs" / experiment / "all")).Reload()
        (event,) = events.Tensors(names.PLAN_TAG)
        assert json.loads(make_ndarray(event.tensor_proto).item()) == json.loads(plan.to_json())
        assert events.SummaryMetadata(names.PLAN_TAG).plugin_data.plugin_name == "replicas"
        assert events.SummaryMetadata("plan").plugin_data.plugin_name == "text"


def test_a_plan_that_cannot_be_saved_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(MonitorError, match=r"events cannot be written to .*file"):
        planned(measured()).save(tmp_path / "file")
    with pytest.raises(MonitorError, match="experiment must be a name for a directory below log_dir"):
        planned(measured()).save(tmp_path / "logs", "../up")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_plan_that_is_cut_off_by_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RecordsLost("1 record was lost") from OSError("No space left on device")

    monkeypatch.setattr(EventWriter, "_add", fails)
    with pytest.raises(MonitorError, match=r"The plan cannot be written to .*logs \(No space left on device\)"):
        planned(measured()).save(tmp_path / "logs")


@pytest.mark.parametrize("text", ["", "1,", "0", "1,-2", "two", "1;2"])
def test_numbers_of_replicas_on_the_command_line_are_checked(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be an integer >= 1"):
        counts(text)
    assert counts("1, 2,8") == (1, 2, 8)


def test_predictions_need_no_tensorflow() -> None:
    code = (
        "import sys, keras_dist_ext.diagnosis.plan.plan_report, keras_dist_ext.diagnosis.plan.what_ifs, "
        "keras_dist_ext.diagnosis.plan.assumptions; assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
