"""Writers take what replicas did; one that fails stops neither training nor the others, and says what it lost."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from intervals_made_up import interval, run

import keras_dist_ext as kde
from keras_dist_ext.monitoring import json_lines
from keras_dist_ext.monitoring.append_file import AppendFile, RecordsLost
from keras_dist_ext.monitoring.writers import CompositeWriter, Writer
from keras_dist_ext.step.stats import ReplicaStats

FINDINGS: Any = [
    {"step": 20, "kind": "straggler", "code": "slow-replica", "what": "Replica 1 is slow.", "seconds": 2.5}
]


def assert_same(first: Sequence[ReplicaStats], second: Sequence[ReplicaStats]) -> None:
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        for field in dataclasses.fields(a):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


class Failing(Writer):
    """Fails for a while."""

    def __init__(self, *fails: bool) -> None:
        self.fails = list(fails)
        self.taken: list[int] = []

    def write(self, stats: ReplicaStats, scores: Any) -> None:
        if self.fails.pop(0):
            raise OSError(28, "No space left on device")
        self.taken.append(stats.step)


# Memory


def test_memory_keeps_everything_to_be_read_in_python() -> None:
    memory = kde.MemoryWriter()
    memory.begin(run())
    train, test = interval(), interval(kind="test")
    memory.write(train, np.array([1.0, 0.9]))
    memory.write(test, None)
    memory.write_findings(FINDINGS, step=20, wall_time=0.0)
    assert memory.train == [train]
    assert memory.test == [test]
    assert memory.scores[0] is not None
    assert memory.scores[0].tolist() == [1.0, 0.9]
    assert memory.findings == FINDINGS
    assert memory.runs["train"].experiment == "night/3"


# Several


def test_a_writer_that_fails_is_one_warning_with_its_cause_and_a_count_at_the_end() -> None:
    memory, failing = kde.MemoryWriter(), Failing(False, True, True, False, True)
    several = CompositeWriter([failing, memory])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 6):
            several.write(interval(step=step), None)
        several.close()
    first, last = (str(warning.message) for warning in caught)
    assert first == (
        "Failing failed: OSError: [Errno 28] No space left on device. 1 record dropped so far; training and other "
        "writers continue. The total will be reported when the run ends."
    )
    assert last == "Failing dropped 3 records of this run in total."
    assert failing.taken == [1, 4]
    assert [stats.step for stats in memory.train] == [1, 2, 3, 4, 5]


def test_a_writer_that_failed_warns_again_in_the_next_run() -> None:
    several = CompositeWriter([Failing(True, True)])
    for _ in range(2):
        with pytest.warns(UserWarning, match="1 record dropped so far"):
            several.write(interval(), None)
        several.close()


def test_a_failure_before_the_first_step_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    several = CompositeWriter([kde.MemoryWriter(), kde.JsonLinesWriter(tmp_path / "file" / "r.jsonl")])
    with pytest.raises(kde.MonitorError, match="cannot be written to .*r.jsonl .* Give JsonLinesWriter a path"):
        several.check("")


def test_a_custom_writer_needs_only_write() -> None:
    class Mine(Writer):
        def write(self, stats: ReplicaStats, scores: Any) -> None:
            self.step = stats.step

    mine = Mine()
    several = CompositeWriter([mine])
    several.check("")
    several.begin(run())
    several.write(interval(step=7), None)
    several.write_findings(FINDINGS, step=7, wall_time=0.0)
    several.flush()
    several.close()
    assert mine.step == 7
    with pytest.raises(NotImplementedError):
        Writer().write(interval(), None)


# Appending


def test_records_wait_for_the_clock_and_no_longer(tmp_path: pathlib.Path) -> None:
    now = [0.0]
    file = AppendFile(tmp_path / "file", flush_seconds=2.0, clock=lambda: now[0])
    sizes = []
    for second in (0.1, 0.9, 1.0, 1.1, 3.0, 4.5, 10.0):
        now[0] = second
        file.add(b"x")
        sizes.append(os.path.getsize(file.path) if os.path.exists(file.path) else 0)
    # at 3.0 there are 3 seconds behind, at 4.5 the next is due too late, as the last came 1.5 seconds before
    assert sizes == [0, 0, 0, 0, 5, 6, 7]


def test_a_full_disk_leaves_no_incomplete_record(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    code = f"""
import resource, signal
from keras_dist_ext.monitoring import json_lines
from keras_dist_ext.monitoring.append_file import AppendFile, RecordsLost
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
file = AppendFile({str(path)!r}, flush_seconds=1e9)
for number in range(3):
    file.add(b"%d" % number * 50)
    file.add(b"." * 50)
    try:
        file.flush()
    except RecordsLost as error:
        print(error.num_records, type(error.__cause__).__name__, error.__cause__.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.add(b"end")
file.flush()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["2", "OSError", "27"], ended.stderr  # EFBIG after half of the third pair
    assert path.read_bytes() == b"0" * 50 + b"." * 50 + b"1" * 50 + b"." * 50 + b"end"


def test_a_full_disk_is_named(tmp_path: pathlib.Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    file = AppendFile(full, flush_seconds=1e9)
    file.add(b"a")
    file.add(b"b")
    with pytest.raises(RecordsLost) as caught:
        file.flush()
    assert caught.value.num_records == 2
    assert "No space left on device" in str(caught.value.__cause__)
    file.flush()  # there is nothing left to lose


def test_a_file_that_is_removed_with_its_folder_is_created_again(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = AppendFile(folder / "file", header=b"header ", flush_seconds=0.0)
    file.add(b"a")
    file.add(b"b")
    assert (folder / "file").read_bytes() == b"header ab"
    shutil.rmtree(folder)
    file.add(b"c")
    assert (folder / "file").read_bytes() == b"header c"


def test_urls_are_written_by_tensorflow() -> None:
    import tensorflow as tf

    path = "ram://replicas/r.jsonl"
    writer = kde.JsonLinesWriter(path, flush_seconds=0.0)
    writer.check("")
    writer.begin(run())
    writer.write(interval(), None)
    lines = tf.io.gfile.GFile(path).read().splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["run", "record"]
    with pytest.raises(kde.MonitorError, match="ram:/replicas .*give it as a string"):
        kde.EventWriter(pathlib.Path("ram://replicas")).check("")


# JSON lines

STARVED = interval(step=20, examples=[160, 0], loss=[math.inf, 0.0], gradient_norm=[2.0, math.nan])


def written(path: pathlib.Path) -> kde.MemoryWriter:
    """Write a run as JSON lines and into memory, and return the latter."""
    memory, lines = kde.MemoryWriter(), kde.JsonLinesWriter(path)
    both = CompositeWriter([memory, lines])
    both.check("")
    both.begin(run())
    both.write(interval(gradient_norm=[1.0, 1.5]), np.array([1.0, 0.5]))
    both.write(STARVED, np.array([0.875, math.nan]))
    both.write_findings(FINDINGS, step=20, wall_time=5.0)
    both.begin(run("test", "night/3/validation"))
    both.write(interval(kind="test"), None)
    both.close()
    return memory


def test_json_lines_are_strict_json_one_record_an_interval(tmp_path: pathlib.Path) -> None:
    written(tmp_path / "a" / "r.jsonl")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "a" / "r.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["run", "record", "record", "findings", "run", "record"]
    assert {line["version"] for line in lines} == {1}
    assert lines[2]["loss"] == ["Infinity", None]
    assert lines[2]["examples"] == [160, 0]
    assert lines[2]["scores"] == [0.875, None]
    assert lines[0]["manifest"]["strategy"]["reason"] == "2 GPUs, no TF_CONFIG"


def test_json_lines_replay_into_another_writer(tmp_path: pathlib.Path) -> None:
    original = written(tmp_path / "r.jsonl")
    replayed = kde.MemoryWriter()
    assert kde.replay(tmp_path / "r.jsonl", replayed) == 3
    assert_same(replayed.train, original.train)
    assert_same(replayed.test, original.test)
    for a, b in zip(replayed.scores, original.scores, strict=True):
        np.testing.assert_array_equal(a, b)
    assert replayed.findings == original.findings
    assert replayed.runs == original.runs


def test_an_incomplete_line_is_left_out_with_a_warning_and_a_resumed_run_continues_after_it(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "r.jsonl"
    original = written(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.warns(UserWarning, match="1 incomplete line of .*r.jsonl left out: 6. A process that is killed"):
        assert kde.replay(path, kde.MemoryWriter()) == 2
    resumed = kde.JsonLinesWriter(path)
    resumed.begin(run())
    resumed.write(interval(step=30), None)
    resumed.close()
    replayed = kde.MemoryWriter()
    with pytest.warns(UserWarning, match="r.jsonl left out: 6"):
        assert kde.replay(path, replayed) == 3
    assert [stats.step for stats in replayed.train] == [*(stats.step for stats in original.train), 30]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"version": 2, "type": "record"}', "line 1 of .* has version 2; this package reads version 1"),
        ("[1]", "line 1 of .* has no version"),
        (
            '{"version": 1, "type": "record", "step": 1}',
            "line 1 of .* is not a valid 'record' of JsonLinesWriter: KeyError",
        ),
        ('{"version": 1, "type": "song"}', "line 1 of .* is not a valid 'song' of JsonLinesWriter"),
    ],
)
def test_a_file_of_another_format_is_refused(line: str, message: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "r.jsonl").write_text(f"{line}\n")
    with pytest.raises(kde.DataError, match=message):
        kde.replay(tmp_path / "r.jsonl", kde.MemoryWriter())


def test_records_without_the_line_of_their_run_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.jsonl"
    written(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["type"] != "run"))
    with pytest.raises(kde.DataError, match="line 1 of .* is a 'record', but no line before it has its run"):
        kde.replay(path, kde.EventWriter(tmp_path / "logs"))


def test_empty_lines_are_passed_over(tmp_path: pathlib.Path) -> None:
    written(tmp_path / "r.jsonl")
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    (tmp_path / "r.jsonl").write_text("\n\n".join(lines) + "\n \n")
    assert kde.replay(tmp_path / "r.jsonl", kde.MemoryWriter()) == 3


def test_lines_are_written_to_no_folder_and_to_no_file_that_cannot_be_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kde.MonitorError, match="Records cannot be written to .* is a folder.*a path that is writable"):
        kde.JsonLinesWriter(tmp_path).check("")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no")

    (tmp_path / "r.jsonl").write_text("print(1)")
    monkeypatch.setattr(json_lines, "open", refuse, raising=False)
    assert not json_lines._holds_something_else(str(tmp_path / "r.jsonl"))  # writing says what is wrong


@pytest.mark.parametrize("text", ["print(1)\n", '{"loss": "mse"}\n', "[1]", "\x89PNG"])
def test_lines_are_not_appended_to_a_file_of_something_else(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(kde.MonitorError, match=r"train\.py exists, and its first line is no record: .* a new file"):
        kde.JsonLinesWriter(path).check("")
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["", "\n", '{"vers', '{"version":1,"type"', '{"version": 1, "type": "run"}\n{"ver'])
def test_lines_are_appended_to_what_a_killed_run_has_left(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    kde.JsonLinesWriter(path).check("")


def test_of_several_workers_only_the_chief_writes_lines(tmp_path: pathlib.Path) -> None:
    writer = kde.JsonLinesWriter(tmp_path / "r.jsonl")
    writer.begin(run(is_chief=False))
    writer.write(interval(), None)
    writer.close()
    assert not (tmp_path / "r.jsonl").exists()


def test_writers_can_be_copied_before_a_run(tmp_path: pathlib.Path) -> None:
    writers = [kde.MemoryWriter(), kde.JsonLinesWriter(tmp_path / "r.jsonl"), kde.EventWriter(tmp_path)]
    for writer in copy.deepcopy([*writers, kde.TerminalWriter()]):
        writer.begin(run())  # keras-tuner copies callbacks for each trial
