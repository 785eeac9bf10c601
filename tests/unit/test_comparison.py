"""What a change has brought, from two reports of the doctor."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from test_diagnose import HEALTHY, changed, times, waiting

from keras_dist_ext.cli import main
from keras_dist_ext.diagnosis.doctor.comparison import Comparison, Run, Since, compare_files, read_report, run_in, since
from keras_dist_ext.diagnosis.doctor.doctor import ParallelismDoctor
from keras_dist_ext.diagnosis.doctor.examination import Calls, Examination
from keras_dist_ext.diagnosis.doctor.report import Report, as_json
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.errors import MonitorError


def reported(measured: Any = None, setting: Any = HEALTHY) -> Report:
    return judge(Examination(setting, measured))


def compared(before: Report, after: Report) -> Comparison:
    runs = [run_in(report.to_dict()) for report in (before, after)]
    assert runs[0] is not None
    assert runs[1] is not None
    return Comparison(*runs)


SLOW = Calls("Log", "on_train_batch_end", 0.4, 80)


def test_what_is_gone_what_is_left_and_what_is_new_is_said_with_the_speed_up() -> None:
    before = reported(waiting(calls=(SLOW,), host=0.006))
    after = reported(times(step=0.008, input_=0.0, compute=0.002, host=0.006, calls=(SLOW,)))
    assert str(compared(before, after)) == (
        "2.5 times as fast as before: a step took 20 ms of 128 examples (80 steps), now 8 ms of 128 examples "
        "(80 steps).\n"
        "gone: input-bound\n"
        "still there: slow-callback (25% of the time lost, now 62%)"
    )
    assert str(compared(after, before)).splitlines()[:2] == [
        "2.5 times slower than before: a step took 8 ms of 128 examples (80 steps), now 20 ms of 128 examples "
        "(80 steps).",
        "new: input-bound",
    ]


def test_a_larger_batch_is_compared_by_examples_a_second() -> None:
    comparison = compared(reported(times(examples=4)), reported(times(step=0.040, compute=0.038, examples=64)))
    assert comparison.speedup == pytest.approx(8.0)
    assert str(comparison).startswith(
        "8 times as fast as before, in examples a second: a step took 20 ms of 8 examples (80 steps), now 40 ms of 128"
    )


def test_reports_that_know_no_examples_are_compared_by_steps_and_without_seconds_by_codes() -> None:
    before, after = (Run("net", ("eager",), 80, seconds, None) for seconds in (1.6, 0.8))
    comparison = Comparison(before, after)
    assert comparison.speedup == 2.0
    assert str(comparison).splitlines() == [
        "2 times as fast as before: a step took 20 ms (80 steps), now 10 ms (80 steps).",
        "still there: eager",
    ]


def test_runs_that_differ_by_a_twentieth_are_about_as_fast() -> None:
    assert str(compared(reported(times()), reported(times(step=0.0205)))).startswith("About as fast as before: a step")
    assert str(compared(reported(times()), reported(times(step=0.022)))).startswith("1.1 times slower than before: ")


def test_reports_about_two_models_are_compared_with_a_warning() -> None:
    other = changed(model="other")
    comparison = compared(reported(times()), reported(times(), other))
    assert str(comparison).endswith("Beware: the reports are about 'model' and 'other'.")


def test_the_command_compares_two_reports(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "before.json", tmp_path / "after.json"
    for file, report in zip(files, (reported(waiting()), reported(times(step=0.010, compute=0.009))), strict=True):
        file.write_text(report.to_json())
    assert main(["doctor", "--compare", *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 times as fast as before: a step took 20 ms of 128 examples (80 steps), now 10 ms")
    assert "gone: input-bound" in out
    assert compare_files(*files).speedup == pytest.approx(2.0)
    with pytest.raises(SystemExit):
        main(["doctor", "--compare", *map(str, files), "third.json"])
    assert "--compare takes two reports, got 3" in capsys.readouterr().err
    assert main(["doctor", "--compare", str(files[0]), str(tmp_path / "none.json")]) == 1
    assert "is not a report of the doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"measured": {}, "findings": [], "setting": {"model": "m"}}', "\x00"]
)
def test_what_is_no_report_of_watched_steps_is_an_error_that_says_how_to_write_one(
    tmp_path: pathlib.Path, text: str
) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(MonitorError, match=r"is not a report of the doctor.*json="):
        read_report(file)
    with pytest.raises(MonitorError, match="is not a report of the doctor"):
        read_report(tmp_path)


def written(measured: str, version: int = 1) -> str:
    return f'{{"version": {version}, "measured": {measured}, "findings": [], "setting": {{"model": "m"}}}}'


BEYOND = [
    "[" * 100_000,
    written('{"num_steps": Infinity, "seconds": 1}'),
    written('{"num_steps": 1e400, "seconds": 1}'),
    written('{"num_steps": 8, "seconds": 1, "examples": [1%s]}' % (400 * "0")),
    written('{"num_steps": 8, "seconds": 5e-324, "examples": [8]}'),
    written('{"num_steps": 8, "seconds": 1}', version=2),
    "\udcff",
]


@pytest.mark.parametrize("text", BEYOND, ids=range(len(BEYOND)))
def test_a_file_of_whatever_kind_is_an_error_to_compare_and_a_word_in_the_next_report(
    tmp_path: pathlib.Path, text: str
) -> None:
    file = tmp_path / "doctor.json"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(MonitorError, match=r"is not a report of the doctor.*json"):
        read_report(file)
    told = since(file, reported(times()).to_dict())
    assert told.comparison is None
    assert str(told).startswith(f"Not compared with the report in {file}: ")
    assert told.report == reported(times()).to_dict()


def test_the_report_is_shown_and_written_whatever_is_in_its_file(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "doctor.json"
    file.write_text("[" * 100_000)
    doctor = ParallelismDoctor(tmp_path)
    doctor.report = reported(times())
    doctor.write_report()
    out = capsys.readouterr().out
    assert out.index("no findings about 'model'") < out.index(f"Not compared with the report in {file}: ")
    assert read_report(file).num_steps == 80


@pytest.mark.parametrize("error", [PermissionError, NotADirectoryError])
def test_a_file_that_may_not_be_read_costs_the_comparison_alone(
    error: type[OSError], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: pathlib.Path) -> int:
        raise error(f"no way to {path.name}")

    monkeypatch.setattr("keras_dist_ext.diagnosis.doctor.comparison.open_file", refuses)
    assert since(tmp_path / "doctor.json", {}).why_not == "it cannot be read as one (no way to doctor.json)"
    with pytest.raises(MonitorError, match="is not a report of the doctor: no way to"):
        read_report(tmp_path / "doctor.json")


def told_since(before: Report, after: Report, file: pathlib.Path) -> Since:
    file.write_text(before.to_json())
    told = since(file, after.to_dict())
    file.write_text(as_json(told.report))
    return told


def test_a_run_that_has_measured_nothing_leaves_the_last_one_to_be_compared_with(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "doctor.json"
    nothing = reported(None, changed(runs_eagerly=True))
    told = told_since(reported(waiting(calls=(SLOW,), host=0.006)), nothing, file)
    assert told.why_not == "no step of this run was watched; the next one is compared with the last of which some were"
    for _ in range(2):  # twice in a row too
        told = since(file, nothing.to_dict())
        file.write_text(as_json(told.report))
    assert json.loads(file.read_text())["findings"][0]["code"] == "eager"  # the file is about the run that was
    with pytest.raises(MonitorError, match="so there is nothing to compare"):
        read_report(file)
    told = since(file, reported(times(step=0.008, input_=0.0, compute=0.002, host=0.006, calls=(SLOW,))).to_dict())
    assert str(told) == (
        f"Since the report in {file}: 2.5 times as fast as before: a step took 20 ms of 128 examples (80 steps), now "
        "8 ms of 128 examples (80 steps).\n"
        "gone: input-bound\n"
        "still there: slow-callback (25% of the time lost, now 62%)"
    )
    assert "last_measured" not in told.report
    assert since(tmp_path / "none.json", nothing.to_dict()) == Since(tmp_path / "none.json", nothing.to_dict())


def test_a_model_is_known_by_its_weights_and_not_by_the_number_in_its_name(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "doctor.json"
    first, again = (reported(times(), changed(model=name, weights="aa")) for name in ("sequential", "sequential_1"))
    other = reported(times(), changed(model="sequential", weights="bb"))
    assert told_since(first, again, file).comparison is not None
    told = told_since(first, other, file)
    assert told.comparison is None
    assert str(told) == (
        f"Not compared with the report in {file}: it is about 'sequential', whose weights are others than those of "
        "'sequential' now."
    )
    unbuilt = [reported(times(), changed(model=name)) for name in ("one", "two")]
    assert told_since(unbuilt[0], unbuilt[0], file).comparison is not None
    assert told_since(unbuilt[0], unbuilt[1], file).comparison is None


def test_waiting_for_first_batches_counts_as_time_of_a_run() -> None:
    slow = dataclasses.replace(times(), start_seconds=(0.16,) * 40)  # 6.4 s beside 1.6 s of steps
    before, after = reported(slow), reported(times())
    assert before.codes == ["slow-start-of-epochs"]
    assert before.shares["first batches"] == pytest.approx(0.8)
    assert sum(before.shares.values()) == pytest.approx(1.0)
    assert after.shares["first batches"] == 0.0
    assert "80% first batches" in before.headline
    assert str(compared(before, after)) == (
        "5 times as fast as before: a step took 100 ms of 128 examples (80 steps), now 20 ms of 128 examples "
        "(80 steps).\n"
        "gone: slow-start-of-epochs"
    )
    assert str(compared(before, before)).endswith("still there: slow-start-of-epochs (80% of the time lost, now 80%)")
