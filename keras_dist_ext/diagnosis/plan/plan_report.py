"""Show what more replicas would give: as text, as tables, and as JSON."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.diagnosis.doctor.examination import Estimate
from keras_dist_ext.diagnosis.doctor.report import as_json
from keras_dist_ext.diagnosis.doctor.units import ms, size
from keras_dist_ext.diagnosis.plan.measurements import Measurements
from keras_dist_ext.diagnosis.plan.scaling import Curve, Kind, Point
from keras_dist_ext.diagnosis.plan.step_costs import StepCosts
from keras_dist_ext.diagnosis.plan.what_ifs import WhatIf
from keras_dist_ext.messages import counted
from keras_dist_ext.monitoring.event_files import EventWriter

__all__ = ["VERSION", "Plan"]

VERSION = 1
"""Of what is written as JSON: another number where a key means something else than before."""

_SHOWN = 3  # what-ifs


@dataclasses.dataclass(frozen=True)
class Plan:
    """What more replicas would give.

    Attributes:
        measured: of one replica.
        costs: what that came to.
        curves: at a fixed global batch, and at a fixed batch a replica.
        what_ifs: by the kind of curve, what changes would bring where it stops paying, or else at its end.
        assumptions: what was not measured, in sentences.
    """

    measured: Measurements
    costs: StepCosts
    curves: tuple[Curve, ...]
    what_ifs: Mapping[Kind, tuple[WhatIf, ...]]
    assumptions: tuple[str, ...]

    def curve(self, kind: Kind) -> Curve:
        """Return one of the curves.

        Raises:
            KeyError: there is no such curve.
        """
        for curve in self.curves:
            if curve.kind == kind:
                return curve
        raise KeyError(kind)

    @property
    def headline(self) -> str:
        """What was measured, in one sentence."""
        costs, measured = self.costs, self.measured
        parts = [
            f"computing {ms(costs.compute(measured.batch_size))} ({ms(costs.fixed)} fixed, {ms(costs.per_example)} an "
            "example)",
            f"update {ms(costs.update)}",
            f"host {ms(costs.host)}",
            f"input {ms(costs.input_per_example * measured.batch_size)} beside",
        ]
        return (
            f"'{measured.model}' on {measured.device}, {counted(measured.batch_size, 'example')} a batch: "
            + ", ".join(parts)
        )

    def advice(self, curve: Curve) -> str:
        """Return which number of replicas pays, and where it stops."""
        best, stops = curve.best, curve.stops_at
        text = (
            f"{curve.kind[0].upper()}{curve.kind[1:]}: {counted(best.num_replicas, 'replica')} "
            f"{'pays' if best.num_replicas == 1 else 'pay'}: {best.speedup.show('x')}, {best.bound}-bound."
        )
        if stops is not None:
            text += (
                f" With {stops.num_replicas}, each one added brings {curve.gain(stops):.0%} of what one trains: "
                f"{stops.bound} decides."
            )
        return text

    def to_dict(self) -> JsonObject:
        """Return it as plain values, for JSON."""
        costs, measured = self.costs, self.measured
        link = costs.link
        return {
            "version": VERSION,
            "headline": self.headline,
            "measured": {
                "model": measured.model,
                "device": measured.device,
                "batch_size": measured.batch_size,
                "step_seconds": {str(size): list(values) for size, values in measured.steps.items()},
                "update_seconds": list(measured.update),
                "host_seconds": list(measured.host),
                "input_seconds": list(measured.input),
                "input_hidden": measured.input_hidden,
                "run_seconds": measured.run_seconds,
                "gradient_bytes": measured.gradient_bytes,
                "state_bytes": measured.state_bytes,
                "peak_bytes": {str(size): value for size, value in measured.peak_bytes.items()},
                "cores_busy": measured.cores_busy,
                "num_cores": measured.num_cores,
                "findings": [dataclasses.asdict(finding) for finding in measured.findings],
            },
            "costs": {
                "fixed_seconds": costs.fixed,
                "seconds_per_example": costs.per_example,
                "misfit": costs.misfit,
                "link": None if link is None else dataclasses.asdict(link),
            },
            "curves": {
                curve.kind: {
                    "points": [_point(point) for point in curve.points],
                    "pays": curve.best.num_replicas,
                    "stops_at": None if curve.stops_at is None else curve.stops_at.num_replicas,
                    "advice": self.advice(curve),
                    "what_ifs": [dataclasses.asdict(one) for one in self.what_ifs.get(curve.kind, ())],
                }
                for curve in self.curves
            },
            "assumptions": list(self.assumptions),
        }

    def to_json(self) -> str:
        """Return it as JSON."""
        return as_json(self.to_dict())

    def save(self, log_dir: str | os.PathLike[str], experiment: str = "plan") -> None:
        """Write it as TensorBoard's events: the Replicas tab shows it, and what was trained in the same directory.

        Args:
            log_dir: where runs are logged, as for ``ReplicaMonitor``.
            experiment: a name for the plan, unlike those of trainings; a folder in ``log_dir``.

        Raises:
            MonitorError: files cannot be written there, or an argument is invalid.
        """
        EventWriter(log_dir).write_plan(self.to_dict(), str(self), experiment=experiment)

    def __rich__(self) -> Group:
        """Show it as tables."""
        parts: list[RenderableType] = [Text(f"{self.headline}.", style="bold")]
        for curve in self.curves:
            parts += [_table(curve), Text(self.advice(curve))]
            for one in self.what_ifs.get(curve.kind, ())[:_SHOWN]:
                parts.append(Text(f"  {str(one).replace('`', '')}"))
        parts.append(Text("Assumed:", style="dim"))
        parts += [Text(f"- {sentence}", style="dim") for sentence in self.assumptions]
        return Group(*parts)

    def show(self, console: Console | None = None) -> None:
        """Print the tables."""
        (console or Console()).print(self)

    def __str__(self) -> str:
        lines = [f"{self.headline}."]
        for curve in self.curves:
            lines.append(self.advice(curve))
            lines += [
                f"  {counted(point.num_replicas, 'replica')}: {point.seconds.show(' ms', 1e3)} a step, "
                f"{_rate(point.examples_per_second.value)} examples/s, {point.speedup.show('x')}, {point.bound}-bound"
                for point in curve.points
            ]
            lines += [f"  {one}" for one in self.what_ifs.get(curve.kind, ())[:_SHOWN]]
        return "\n".join([*lines, *(f"assumed: {sentence}" for sentence in self.assumptions)])


def _give_or_take(estimate: Estimate) -> str:
    """Write a number with how far its interval reaches on the wider side."""
    return f"{estimate.value:.2f} ±{max(estimate.high - estimate.value, estimate.value - estimate.low):.2f}"


def _rate(examples_per_second: float) -> str:
    return f"{examples_per_second:,.0f}" if examples_per_second >= 100 else f"{examples_per_second:.3g}"


def _table(curve: Curve) -> Table:
    has_memory = any(point.memory_bytes is not None for point in curve.points)
    table = Table(title=curve.kind, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("replicas", "each", "step", "examples/s", "speed-up", "effic.", *(["memory"] if has_memory else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for point in curve.points:
        table.add_row(
            str(point.num_replicas),
            f"{point.batch_per_replica}{'' if point.is_measured else '*'}",
            ms(point.seconds.value),
            _rate(point.examples_per_second.value),
            _give_or_take(point.speedup),
            f"{point.efficiency.value:.0%}",
            *([size(point.memory_bytes or 0)] if has_memory else []),
            point.bound,
            style="bold" if point.num_replicas == curve.best.num_replicas else "",
        )
    return table


def _point(point: Point) -> JsonObject:
    parts = point.parts
    return {
        "replicas": point.num_replicas,
        "global_batch": point.global_batch,
        "batch_per_replica": point.batch_per_replica,
        "step_seconds": dataclasses.asdict(point.seconds),
        "examples_per_second": dataclasses.asdict(point.examples_per_second),
        "speedup": dataclasses.asdict(point.speedup),
        "efficiency": dataclasses.asdict(point.efficiency),
        "memory_bytes": point.memory_bytes,
        "bound": point.bound,
        "is_measured": point.is_measured,
        "parts": {
            "compute": parts.compute,
            "update": parts.update,
            "communication": parts.communication,
            "host": parts.host,
            "waiting_for_input": parts.waiting,
        },
    }
