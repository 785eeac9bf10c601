"""Of several workers one comes to harm anywhere in a program: the others are told which, and nobody hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import fault_runs
import pytest
from cases import rotating

# Keras makes a ValueError of what is raised while it loads a layer.
SAYS = {
    "SIGKILL": ("sends no sign of life", "does not answer"),
    "SIGSTOP": ("sends no sign of life", "does not answer"),
    "exit 0": ("has ended",),
    "exception": ("has failed with ArithmeticError (fault_runs.py:", "has failed with ValueError (fault_runs.py:"),
}
SHOWN = {
    "SIGKILL": "launch: worker 1 failed with SIGKILL",
    "SIGSTOP": "launch: worker 1 was stopped, as by SIGSTOP",
    "exception": "launch: worker 1 failed with exit code 1",
}
CASES = [(num_workers, place) for num_workers in (2, 3) for place in fault_runs.PLACES]


def run(*arguments: str) -> list[Any]:
    """Run the script of accidents, and leave no process of it behind."""
    command = [sys.executable, fault_runs.__file__, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait()
    return [json.loads(line) for line in output.splitlines() if line.startswith("[[")]


@pytest.mark.multiworker
@pytest.mark.parametrize(("num_workers", "place"), rotating(CASES, []))
def test_a_worker_that_comes_to_harm_is_named_to_all_others(num_workers: int, place: str) -> None:
    found = run("--workers", str(num_workers), "--places", place)
    assert {case[2] for case, _ in found} == set(fault_runs.ACCIDENTS)
    for (_, _, accident, _), (told, ended, errors) in found:
        assert ended < fault_runs.SECONDS
        for error in errors:
            if place == "program's end":
                assert (told, error) == (0.0, "")
                continue
            assert error.startswith("keras_dist_ext.errors.WorkersError: "), (accident, error)
            assert any(f"worker {num_workers - 1} {text}" in error for text in SAYS[accident]), (accident, error)


@pytest.mark.multiworker
@pytest.mark.parametrize(("num_workers", "place"), rotating([(2, "batch end"), (3, "load_model")], []))
def test_a_first_worker_that_is_stopped_is_named_to_all_others(num_workers: int, place: str) -> None:
    arguments = ["--first", "--workers", str(num_workers), "--places", place, "--accidents", "SIGSTOP"]
    ((_, (_, ended, errors)),) = run(*arguments)
    assert ended < fault_runs.SECONDS
    assert len(errors) == num_workers - 1
    for error in errors:
        assert error.startswith("keras_dist_ext.errors.WorkersError: Worker ")
        assert "and cannot continue: the first worker, by which all know of each other, or its machine, cannot" in error


@pytest.mark.multiworker
@pytest.mark.parametrize(
    ("place", "accident"),
    rotating([(place, accident) for place in ("batch end", "program's end") for accident in fault_runs.ACCIDENTS], []),
)
def test_under_launch_all_end(place: str, accident: str) -> None:
    ((_, (_, ended, (shown,))),) = run("--launch", "--workers", "2", "--places", place, "--accidents", accident)
    assert ended < fault_runs.SECONDS
    assert [name for name, text in SHOWN.items() if text in shown] == [accident] * (accident in SHOWN)
