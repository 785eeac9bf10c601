"""TensorBoard reads what was written: its own readers, old and new, its fast loader, and a real TensorBoard."""

from __future__ import annotations

import html
import json
import math
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dashboard.server import TensorBoard, tensorboard
from intervals_made_up import interval, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import keras_dist_ext as kde
from keras_dist_ext.monitoring import event_files
from keras_dist_ext.monitoring.append_file import RecordsLost
from keras_dist_ext.monitoring.dashboard import metadata as names
from keras_dist_ext.monitoring.event_files import overall_values, replica_values
from keras_dist_ext.monitoring.writers import CompositeWriter

FINDINGS: Any = [{"step": 20, "kind": "straggler", "code": "slow-replica", "what": "Replica 1 is slow.", "seconds": 2}]
STARVED = interval(step=20, examples=[160, 0], loss=[math.nan, 0.0], gradient_norm=[2.0, math.nan])
INTERVALS = [interval(gradient_norm=[1.0, 1.5]), STARVED, interval([0.011, 0.02], step=30, gradient_norm=[1.0, 2.0])]
SCORES = [np.array([1.0, 1.0]), np.array([0.9, math.nan]), np.array([0.8, 0.5])]


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("logs")
    writer = kde.EventWriter(folder)
    writer.check("night/3")
    writer.begin(run())
    for stats, scores in zip(INTERVALS, SCORES, strict=True):
        writer.write(stats, scores)
    writer.write_findings(FINDINGS, step=20, wall_time=INTERVALS[1].wall_time)
    writer.begin(run("test", "night/3/validation"))
    writer.write(interval(kind="test", step=30), None)
    writer.close()
    return folder


@pytest.fixture(scope="module")
def board(log_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    """A real TensorBoard, which reads by its fast loader."""
    with tensorboard(log_dir, tmp_path_factory.mktemp("board")) as board:
        board.wait_until_read("night/3", 2, 30)
        board.wait_until_read("night/3/validation", 2, 30)
        board.wait(lambda listed: listed["night/3"]["findings"] == FINDINGS)
        yield board


def scalars(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """Read the scalars of a run as people do in Python."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def same(value: float, expected: float) -> bool:
    return value == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_every_number_of_a_replica_is_read_back(log_dir: pathlib.Path) -> None:
    for replica in (0, 1):
        held = scalars(log_dir / "night" / "3" / f"replica_{replica}")
        expected: dict[str, list[tuple[int, float]]] = {}
        for stats, scores in zip(INTERVALS, SCORES, strict=True):
            for tag, value in replica_values(stats, scores)[replica].items():
                expected.setdefault(tag, []).append((stats.step, value))
        assert set(held) == set(expected) == set(names.REPLICA_TAGS)
        for tag, points in expected.items():
            assert [step for step, _ in held[tag]] == [step for step, _ in points], tag
            assert all(same(a, b) for (_, a), (_, b) in zip(held[tag], points, strict=True)), tag


def test_a_replica_without_examples_has_no_loss_and_no_zero_for_it(log_dir: pathlib.Path) -> None:
    held = scalars(log_dir / "night" / "3" / "replica_1")
    assert [step for step, _ in held[names.LOSS]] == [10, 30]
    assert [step for step, _ in held[names.GRADIENT_NORM]] == [10, 30]
    assert [step for step, _ in held[names.SCORE]] == [10, 30]
    assert held[names.EXAMPLES] == [(10, 160.0), (20, 0.0), (30, 160.0)]


def test_a_loss_that_is_really_nan_is_written(log_dir: pathlib.Path) -> None:
    held = scalars(log_dir / "night" / "3" / "replica_0")
    assert [math.isnan(value) for _, value in held[names.LOSS]] == [False, True, False]


def test_the_run_of_all_has_exact_statistics_over_replicas(log_dir: pathlib.Path) -> None:
    held = scalars(log_dir / "night" / "3" / "all")
    last = INTERVALS[-1]
    assert held[names.ALL_LOSS][-1][1] == pytest.approx(0.625)
    assert held[names.ALL_EXAMPLES_PER_SECOND][-1][1] == pytest.approx(320 / last.seconds)
    assert held[names.SCALING_EFFICIENCY][-1][1] == pytest.approx(last.scaling_efficiency)
    assert held[names.INPUT_SHARE][-1][1] == pytest.approx(last.input_share)
    for statistic, value in {"min": 0.011, "mean": 0.0155, "max": 0.02, "std": 0.0045}.items():
        assert held[names.over_replicas(names.COMPUTE_SECONDS, statistic)][-1][1] == pytest.approx(value)
    assert set(held) <= set(names.ALL_TAGS)


def test_statistics_are_over_the_replicas_that_have_a_value() -> None:
    starved = interval(examples=[160, 0, 80], compute=[0.01, 0.01, 0.01], loss=[1.0, 9.0, 4.0])
    values = overall_values(starved, replica_values(starved, None))
    assert values[names.over_replicas(names.LOSS, "mean")] == 2.5
    assert values[names.over_replicas(names.LOSS, "max")] == 4.0
    assert values[names.ALL_LOSS] == 2.0  # weighted by examples
    assert values[names.over_replicas(names.EXAMPLES, "min")] == 0.0
    assert names.over_replicas(names.SCORE, "mean") not in values
    nobody = interval(examples=[0, 0])
    assert not {tag for tag in overall_values(nobody, replica_values(nobody, None)) if "loss" in tag}


def test_an_interval_is_one_event_a_run(log_dir: pathlib.Path) -> None:
    (file,) = (log_dir / "night" / "3" / "replica_0").iterdir()
    events = list(EventFileLoader(str(file)).Load())
    assert events[0].file_version == "brain.Event:2"
    assert [(event.step, len(event.summary.value)) for event in events[1:]] == [(10, 9), (20, 9), (30, 9)]
    assert [event.wall_time for event in events[1:]] == [stats.wall_time for stats in INTERVALS]


def test_tensorboard_shows_the_numbers_in_its_own_tab(board: TensorBoard) -> None:
    status, body, _ = board.get("data/plugin/scalars/tags")
    assert status == 200
    tags = json.loads(body)
    assert set(tags["night/3/replica_0"]) == set(names.REPLICA_TAGS)
    assert names.ALL_LOSS in tags["night/3/all"]
    assert names.LOSS in tags["night/3/validation/replica_1"]
    _, body, _ = board.get("data/plugin/scalars/scalars", run="night/3/replica_1", tag=names.COMPUTE_SECONDS)
    points = json.loads(body)
    assert [(step, pytest.approx(value)) for _, step, value in points] == [(10, 0.012), (20, 0.012), (30, 0.02)]
    assert points[0][0] == INTERVALS[0].wall_time


def test_tensorboard_shows_the_summary_as_text_with_nothing_of_it_as_html(board: TensorBoard) -> None:
    _, body, _ = board.get("data/plugin/text/text", run="night/3/all", tag=event_files.SUMMARY_TAG)
    shown = json.loads(body)[-1]["text"]
    for cell in ("2 GPUs, no TF_CONFIG", "MirroredStrategy", "/device:GPU:1", "Adam", "42", "3.15.1", "train-01"):
        assert cell in shown, cell
    assert "<b>" not in shown
    assert "<td>a | b</td>\n<td>x | <b>y</b> *_z_*</td>" in html.unescape(shown)


def test_the_dashboard_finds_manifest_and_findings(board: TensorBoard) -> None:
    experiments = {one["name"]: one for one in board.ask("experiments")["experiments"]}
    assert set(experiments) == {"night/3", "night/3/validation"}
    found = experiments["night/3"]
    assert found["replicas"] == [0, 1]
    assert found["manifest"]["strategy"]["reason"] == "2 GPUs, no TF_CONFIG"
    assert found["findings"] == FINDINGS
    assert found["notes"] == []


def test_each_worker_writes_its_own_replicas_and_the_chief_the_rest(tmp_path: pathlib.Path) -> None:
    for worker, is_chief in enumerate([True, False]):
        writer = kde.EventWriter(tmp_path)
        writer.begin(run(num_replicas=4, replicas=range(2 * worker, 2 * worker + 2), is_chief=is_chief))
        writer.write(interval([0.01] * 4), np.ones(4))
        writer.write_findings(FINDINGS, step=10, wall_time=0.0)
        writer.close()
    files = {
        folder.name: len(list(folder.iterdir())) for folder in (tmp_path / "night" / "3").iterdir() if folder.is_dir()
    }
    assert files == {"all": 1, "replica_0": 1, "replica_1": 1, "replica_2": 1, "replica_3": 1}


def test_files_are_valid_after_a_kill_up_to_the_last_flush(tmp_path: pathlib.Path) -> None:
    code = f"""
import os, signal, sys, time
sys.path.insert(0, {str(pathlib.Path(__file__).parents[1] / "support")!r})
from intervals_made_up import interval, run
from keras_dist_ext.monitoring.event_files import EventWriter
writer = EventWriter({str(tmp_path)!r}, flush_seconds=0.2)
writer.begin(run())
for step in range(1, 1001):
    if step == 900:
        time.sleep(0.3)  # so that the next record comes when it is time to flush
    writer.write(interval(step=step), None)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    for name in ("replica_0", "replica_1", "all"):
        steps = [step for step, _ in next(iter(scalars(tmp_path / "night" / "3" / name).values()))]
        assert steps == list(range(1, steps[-1] + 1))
        assert steps[-1] >= 900


def test_a_new_file_of_a_resumed_run_comes_after_the_first(tmp_path: pathlib.Path) -> None:
    for step in (10, 20):
        writer = kde.EventWriter(tmp_path)
        writer.begin(run())
        writer.write(interval(step=step), None)
        writer.close()
    held = scalars(tmp_path / "night" / "3" / "replica_0")
    assert [step for step, _ in held[names.EXAMPLES]] == [10, 20]


def test_a_directory_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path: pathlib.Path) -> None:
    (tmp_path / "night").write_text("a file is in the way")
    with pytest.raises(kde.MonitorError, match="TensorBoard's events cannot be written to .*night/3 .*Give a log_dir"):
        kde.EventWriter(tmp_path).check("night/3")
    kde.EventWriter(tmp_path / "new" / "logs").check("")
    assert list((tmp_path / "new" / "logs").iterdir()) == []


def test_a_run_whose_file_cannot_be_written_does_not_stop_other_runs(tmp_path: pathlib.Path) -> None:
    writer = kde.EventWriter(tmp_path, flush_seconds=0.0)
    writer.begin(run())
    (tmp_path / "night" / "3" / "replica_0").write_text("a file is in the way")
    with pytest.raises(RecordsLost) as caught:
        writer.write(interval(), None)
    assert caught.value.num_records == 1
    assert isinstance(caught.value.__cause__, FileExistsError)
    (tmp_path / "night" / "3" / "replica_0").unlink()
    writer.write(interval(step=20), None)
    assert [step for step, _ in scalars(tmp_path / "night" / "3" / "replica_0")[names.LOSS]] == [20]
    assert [step for step, _ in scalars(tmp_path / "night" / "3" / "replica_1")[names.LOSS]] == [10, 20]


def test_a_full_disk_drops_records_with_a_warning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = kde.EventWriter(tmp_path, flush_seconds=0.0)
    several = CompositeWriter([writer])
    several.begin(run())
    several.write(interval(step=10), None)
    for folder in (tmp_path / "night" / "3").iterdir():
        (file,) = folder.iterdir()
        file.rename(tmp_path / folder.name)
        file.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match=r"EventWriter failed: OSError: .*No space left on device. 3 records dropped"):
        several.write(interval(step=20), None)
    several.write(interval(step=30), None)
    for folder in (tmp_path / "night" / "3").iterdir():
        (file,) = folder.iterdir()
        file.unlink()
        (tmp_path / folder.name).rename(file)
    several.write(interval(step=40), None)
    with pytest.warns(UserWarning, match="EventWriter dropped 6 records of this run in total"):
        several.close()
    assert [step for step, _ in scalars(tmp_path / "night" / "3" / "replica_1")[names.LOSS]] == [10, 40]


def test_json_lines_replay_into_events(tmp_path: pathlib.Path) -> None:
    lines = kde.JsonLinesWriter(tmp_path / "r.jsonl")
    direct = kde.EventWriter(tmp_path / "direct")
    both = CompositeWriter([lines, direct])
    both.begin(run())
    for stats, scores in zip(INTERVALS, SCORES, strict=True):
        both.write(stats, scores)
    both.close()
    assert kde.replay(tmp_path / "r.jsonl", kde.EventWriter(tmp_path / "replayed")) == 3
    for name in ("replica_0", "replica_1", "all"):
        first, second = (scalars(tmp_path / folder / "night" / "3" / name) for folder in ("direct", "replayed"))
        assert str(first) == str(second)
        assert first
