"""Say what a change has brought: two reports of the doctor, one from before it and one from after."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.messages import counted
from keras_dist_ext.whole_files import NotAFile, open_file

__all__ = ["Comparison", "Run", "compare_files", "read_report", "run_in"]

_MOST_BYTES = 10_000_000  # of a report
_ALIKE = 0.05  # more or less: what two runs of the same program differ by


@dataclasses.dataclass(frozen=True)
class Run:
    """What a report says of a run, as far as another one can be compared with it."""

    model: str
    codes: tuple[str, ...]
    num_steps: int
    seconds: float  # of the steps
    num_examples: int | None  # in them; None where a report does not know
    seconds_lost: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by code

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
        MonitorError: it cannot be read, is no report of the doctor, or one of a run of which no step was watched.
    """
    try:
        with os.fdopen(open_file(pathlib.Path(path)), "rb") as file:
            values = json.loads(file.read(_MOST_BYTES).decode())
    except (OSError, NotAFile, ValueError) as error:
        raise MonitorError(f"{path} is no report of the doctor: {error}. Write one by `json=`, or --json.") from None
    run = run_in(values)
    if run is None:
        raise MonitorError(
            f"{path} is no report of the doctor on steps that it has watched, so there is nothing to compare. Write "
            "one by `ParallelismDoctor(json=...)`, or `keras-dist-ext doctor --json FILE SCRIPT.py`."
        )
    return run


def run_in(report: JsonObject) -> Run | None:
    """Return what a report, as plain values, says of a run; None where it says nothing that could be compared."""
    try:
        measured, findings = report["measured"], report["findings"]
        num_steps, seconds = int(measured["num_steps"]), float(measured["seconds"])
        examples = measured.get("examples")
        lost = {finding["code"]: float(finding["seconds"]) for finding in findings if finding["seconds"] is not None}
        codes = tuple(str(finding["code"]) for finding in findings)
        model = str(report["setting"]["model"])
        total = None if examples is None else sum(int(number) for number in examples)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if num_steps < 1 or not 0 < seconds < float("inf"):
        return None
    return Run(model, codes, num_steps, seconds, total, lost)


def _step(run: Run) -> str:
    rows = "" if run.rows is None else f" of {run.rows:.3g} examples"
    return f"{1e3 * run.per_step:.3g} ms{rows} ({counted(run.num_steps, 'step')})"


def _lost(code: str, before: Run, after: Run) -> str:
    sides: Sequence[Run] = (before, after)
    if any(code not in run.seconds_lost for run in sides):
        return code
    was, now = (100 * run.seconds_lost[code] / run.seconds for run in sides)
    return f"{code} ({was:.0f}% of the time lost, now {now:.0f}%)"
