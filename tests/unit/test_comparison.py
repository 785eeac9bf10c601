"""What a change has brought, from two reports of the doctor."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from test_diagnose import HEALTHY, changed, times, waiting

from keras_dist_ext.cli import main
from keras_dist_ext.diagnosis.doctor.comparison import Comparison, compare_files, read_report, run_in
from keras_dist_ext.diagnosis.doctor.examination import Calls, Examination
from keras_dist_ext.diagnosis.doctor.report import Report
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
    assert "is no report of the doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"measured": {}, "findings": [], "setting": {"model": "m"}}', "\x00"]
)
def test_what_is_no_report_of_watched_steps_is_an_error_that_says_how_to_write_one(
    tmp_path: pathlib.Path, text: str
) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(MonitorError, match=r"is no report of the doctor.*json="):
        read_report(file)
    with pytest.raises(MonitorError, match="is no report of the doctor"):
        read_report(tmp_path)
