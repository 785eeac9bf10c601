"""Show what was found out about a run: as text, as a table, as JSON, and as Markdown for TensorBoard."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.diagnosis.doctor.examination import Estimate, Examination
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted
from keras_dist_ext.monitoring.dashboard.wire import finite

__all__ = ["VERSION", "Report", "as_json"]

VERSION = 1
"""Of what is written as JSON: another number where a key means something else than before."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found out about a run.

    Args:
        findings: faults, most seconds first; none on a healthy run.
        notes: what limits the run, or the judgement, and is no fault.
        examination: what they were judged from.
        speedup: how many times as fast as one replica that does all the work; None where that is unknown.
    """

    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    examination: Examination
    speedup: Estimate | None = None
    why_not: str = ""  # nothing can be done about what most of the time goes to; "" where it is computing, or found

    @property
    def codes(self) -> list[str]:
        """The codes of the findings, in order."""
        return [finding.code for finding in self.findings]

    @property
    def shares(self) -> dict[str, float]:
        """Which share of the time went where, 0 to 1; empty where nothing was measured."""
        return self.examination.shares()

    @property
    def headline(self) -> str:
        """The run in one sentence."""
        setting, times = self.examination.setting, self.examination.times
        faults = counted(len(self.findings), "finding") if self.findings else "no findings"
        if times is None or not times.blocks:
            if self.examination.stock_steps is None:
                return f"{faults} about '{setting.model}'; no step was watched"
            num_steps, seconds = self.examination.stock_steps
            return (
                f"{faults} about '{setting.model}' in {counted(num_steps, 'step')} of {1e3 * seconds / num_steps:.3g} "
                f"ms on {counted(setting.num_replicas, 'replica')}, of stock Keras, seen from outside"
            )
        parts = [
            f"{faults} about '{setting.model}' in {counted(times.num_steps, 'step')} of "
            f"{1e3 * times.seconds / times.num_steps:.3g} ms on {counted(setting.num_replicas, 'replica')}"
        ]
        parts += [f"{share:.0%} {name}" for name, share in self.shares.items() if share >= 0.005]
        if self.speedup is not None:
            how = "" if self.examination.trials and self.examination.trials.has("one device") else ", estimated"
            parts.append(f"{self.speedup.show()} times as fast as one replica{how}")
        return ", ".join(parts) + (f"; {self.why_not}" if self.why_not else "")

    def to_dict(self) -> JsonObject:
        """Return it as plain values, for JSON."""
        times, trials = self.examination.times, self.examination.trials
        measured: JsonObject = {}
        if self.examination.stock_steps is not None:
            measured = dict(zip(("num_steps", "seconds"), self.examination.stock_steps, strict=True))
        if times is not None and times.blocks:
            measured = {
                "num_steps": times.num_steps,
                "num_executions": times.num_executions,
                "seconds": times.seconds,
                "start_seconds": list(times.start_seconds),
                "shares": self.shares,
                "step_seconds": times.step(),
                "compute_seconds": times.compute(),
                "sync_seconds": times.sync(),
                "input_seconds": times.input_seconds / times.num_steps,
                "examples": times.examples.tolist(),
                "callbacks": [dataclasses.asdict(calls) for calls in times.calls],
                "others_cores": times.others_cores,
            }
        return {
            "version": VERSION,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "notes": [dataclasses.asdict(note) for note in self.notes],
            "setting": dataclasses.asdict(self.examination.setting),
            "measured": measured,
            "experiments": {} if trials is None else {name: list(values) for name, values in trials.seconds.items()},
            "skipped_experiments": {} if trials is None else dict(trials.skipped),
            "why_not": self.why_not,
            "speedup": None if self.speedup is None else dataclasses.asdict(self.speedup),
        }

    def to_json(self) -> str:
        """Return it as JSON."""
        return as_json(self.to_dict())

    def __rich__(self) -> Group:
        """Show it as a table."""
        parts: list[RenderableType] = [Text(f"{self.headline}.", style="bold")]
        if self.findings:
            table = Table(show_lines=True)
            for name, style in (("finding", "red"), ("lost", ""), ("what, and what was seen", ""), ("what to do", "")):
                table.add_column(name, style=style, overflow="fold")
            for finding in self.findings:
                what = Text.assemble((finding.what, "bold"), "\n", (finding.evidence, "dim"))
                table.add_row(Text(finding.code), _lost(finding), what, Text(finding.fix.replace("`", "")))
            parts.append(table)
        parts += [Text(f"Note ({note.code}): {note.what}", style="dim") for note in self.notes]
        return Group(*parts)

    def show(self, console: Console | None = None) -> None:
        """Print the table."""
        (console or Console()).print(self)

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [f"{self.headline}.", ""]
        if self.findings:
            lines += ["| finding | lost | what | seen | what to do |", "| --- | --- | --- | --- | --- |"]
            cells = [(f.code, _lost(f), f.what, f.evidence, f.fix) for f in self.findings]
            lines += ["| " + " | ".join(cell.replace("|", "&#124;") for cell in row) + " |" for row in cells]
        lines += ["", *(f"- {note.code}: {note.what}" for note in self.notes)]
        return "\n".join(lines).rstrip()

    def __str__(self) -> str:
        notes = [f"note, {note.code}: {note.what}" for note in self.notes]
        return "\n".join([f"{self.headline}.", *map(str, self.findings), *notes])


def as_json(report: JsonObject) -> str:
    """Return a report's values as JSON."""
    return json.dumps(finite(report), indent=2)


def _lost(finding: Finding) -> str:
    return "" if finding.seconds is None else f"{finding.seconds:.3g} s"
