"""Compare two reports of the doctor, one from before a change and one from after it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

from keras_dist_ext.aliases import JsonObject, JsonValue
from keras_dist_ext.diagnosis.doctor.report import VERSION
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.messages import counted
from keras_dist_ext.whole_files import open_file

__all__ = ["Comparison", "Run", "compare_files", "Since", "read_report", "run_in", "since"]

_MOST_BYTES = 10_000_000  # of a report
_MOST = 2**53  # steps, seconds and examples; what is beyond is no measurement
_ALIKE = 0.05  # more or less: what two runs of the same program differ by


@dataclasses.dataclass(frozen=True)
class Run:
    """What a report says of a run, as far as another one can be compared with it."""

    model: str
    codes: tuple[str, ...]
    num_steps: int
    seconds: float  # of the steps, and of waiting for the first batch of each pass over the data
    num_examples: int | None  # in them; None where a report does not know
    seconds_lost: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by code
    weights: str = ""  # a digest of their shapes; "" where they are not known

    @property
    def per_step(self) -> float:
        """Seconds a step."""
        return self.seconds / self.num_steps

    @property
    def rows(self) -> float | None:
        """Examples a step."""
        return None if self.num_examples is None else self.num_examples / self.num_steps


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What has become of a run.

    Args:
        before: the change.
        after: it.
    """

    before: Run
    after: Run

    @property
    def speedup(self) -> float:
        """How many times as fast the later run is: in examples a second, or in steps where these are not known."""
        before, after = self.before, self.after
        if before.num_examples and after.num_examples:
            return (before.seconds / before.num_examples) / (after.seconds / after.num_examples)
        return before.per_step / after.per_step

    def __str__(self) -> str:
        before, after = self.before, self.after
        lines = [f"{self._verdict()}: a step took {_step(before)}, now {_step(after)}."]
        gone = [code for code in before.codes if code not in after.codes]
        new = [code for code in after.codes if code not in before.codes]
        left = [code for code in after.codes if code in before.codes]
        lines += [f"{word}: {', '.join(codes)}" for word, codes in (("gone", gone), ("new", new)) if codes]
        lines += [f"still there: {', '.join(_lost(code, before, after) for code in left)}"] if left else []
        if before.model != after.model:
            lines.append(f"Beware: the reports are about '{before.model}' and '{after.model}'.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        if abs(self.speedup - 1) <= _ALIKE:
            return "About as fast as before"
        unit = "" if self.before.rows == self.after.rows else ", in examples a second"
        if self.speedup > 1:
            return f"{self.speedup:.3g} times as fast as before{unit}"
        return f"{1 / self.speedup:.3g} times slower than before{unit}"


def compare_files(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> Comparison:
    """Compare two reports that were written as JSON.

    Raises:
        MonitorError: one of them cannot be read, or is no such report.
    """
    return Comparison(read_report(before), read_report(after))


def read_report(path: str | os.PathLike[str]) -> Run:
    """Read a report that was written as JSON.

    Raises:
        MonitorError: it cannot be read, is not a report of the doctor, or one of a run of which no step was watched.
    """
    try:
        values = _read(path)
    except _UNREADABLE as error:
        raise MonitorError(f"{path} is not a report of the doctor: {error}. Write one by `json=`, or --json.") from None
    run = run_in(values)
    if run is not None and _version(values) != VERSION:
        raise MonitorError(
            f"{path} is not a report of the doctor that can be read here: its version is not {VERSION}. Write one by "
            "`json=`, or --json, with this version of the package."
        )
    if run is None:
        raise MonitorError(
            f"{path} is not a report of the doctor on steps that it has watched, so there is nothing to compare. Write "
            "one by `ParallelismDoctor(json=...)`, or `keras-dist-ext doctor --json FILE SCRIPT.py`."
        )
    return run


_UNREADABLE = (OSError, ValueError, OverflowError, RecursionError)  # what reading and parsing any file may raise


def _read(path: str | os.PathLike[str]) -> JsonValue:
    with os.fdopen(open_file(pathlib.Path(path)), "rb") as file:
        return json.loads(file.read(_MOST_BYTES).decode())


def _version(values: JsonValue) -> JsonValue:
    return values.get("version") if isinstance(values, dict) else VERSION  # what is no report has none


def run_in(report: JsonObject) -> Run | None:
    """Return what a report, as plain values, says of a run; None where it says nothing that could be compared."""
    try:
        measured, findings, setting = report["measured"], report["findings"], report["setting"]
        num_steps, seconds = int(measured["num_steps"]), float(measured["seconds"])
        seconds += sum(map(float, measured.get("start_seconds", ())))
        examples = measured.get("examples")
        lost = {finding["code"]: float(finding["seconds"]) for finding in findings if finding["seconds"] is not None}
        codes = tuple(str(finding["code"]) for finding in findings)
        model, weights = str(setting["model"]), str(setting.get("weights", ""))
        total = None if examples is None else sum(int(number) for number in examples)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    is_possible = 1 <= num_steps <= _MOST and 1 / _MOST <= seconds <= _MOST and 0 <= (total or 0) <= _MOST
    if not is_possible:
        return None
    known = {code: each for code, each in lost.items() if 0 <= each <= _MOST}
    return Run(model, codes, num_steps, seconds, total, known, weights)


@dataclasses.dataclass(frozen=True)
class Since:
    """What a report says in view of the one that was in its file before.

    Args:
        file: where that was.
        comparison: with it; None where there is none.
        why_not: the reason for that; "" where there was no file.
        report: what is to be written there. Where no step was watched, it carries the last run along of which some
            were, so that the next one is compared with that.
    """

    file: pathlib.Path
    report: JsonObject
    comparison: Comparison | None = None
    why_not: str = ""

    def __str__(self) -> str:
        if self.comparison is not None:
            return f"Since the report in {self.file}: {self.comparison}"
        return f"Not compared with the report in {self.file}: {self.why_not}." if self.why_not else ""


def since(file: pathlib.Path, report: JsonObject) -> Since:
    """Compare a report with the one that a file holds, if it is one of the same model; whatever the file is."""
    try:
        values = _read(file)
    except FileNotFoundError:
        return Since(file, report)
    except _UNREADABLE as error:
        return Since(file, report, why_not=f"it cannot be read as one ({error})")
    if _version(values) != VERSION:
        return Since(file, report, why_not=f"its version is not {VERSION}")
    before, after = run_in(values), run_in(report)
    if before is None and isinstance(values, dict):
        before = run_in(values.get("last_measured", {}))
    if before is None:
        return Since(file, report, why_not="its steps were not watched")
    if after is None:
        why_not = "no step of this run was watched; the next one is compared with the last of which some were"
        return Since(file, {**report, "last_measured": _written(before)}, why_not=why_not)
    if before.weights != after.weights if before.weights and after.weights else before.model != after.model:
        of_other = f"it is about '{before.model}', whose weights are others than those of '{after.model}' now"
        return Since(file, report, why_not=of_other)
    return Since(file, report, Comparison(before, after))


def _written(run: Run) -> JsonObject:
    """Return a report of which `run_in` makes that run."""
    return {
        "findings": [{"code": code, "seconds": run.seconds_lost.get(code)} for code in run.codes],
        "setting": {"model": run.model, "weights": run.weights},
        "measured": {
            "num_steps": run.num_steps,
            "seconds": run.seconds,
            "examples": None if run.num_examples is None else [run.num_examples],
        },
    }


def _step(run: Run) -> str:
    rows = "" if run.rows is None else f" of {run.rows:.3g} examples"
    return f"{1e3 * run.per_step:.3g} ms{rows} ({counted(run.num_steps, 'step')})"


def _lost(code: str, before: Run, after: Run) -> str:
    sides: Sequence[Run] = (before, after)
    if any(code not in run.seconds_lost for run in sides):
        return code
    was, now = (100 * run.seconds_lost[code] / run.seconds for run in sides)
    return f"{code} ({was:.0f}% of the time lost, now {now:.0f}%)"
