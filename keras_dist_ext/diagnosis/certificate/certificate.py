"""What came of comparing a model under a strategy with one device, step by step: as values, text, JSON and a table."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keras_dist_ext.aliases import JsonValue
from keras_dist_ext.diagnosis.certificate.draws import Draws
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted
from keras_dist_ext.training.deviations import Deviation

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Certificate"]


@dataclass(frozen=True)
class Certificate:
    """What came of training a model on one device and under a strategy.

    Attributes:
        model: the model's name.
        strategy: a description, such as "MirroredStrategy (2 replicas)".
        num_steps: steps that were made on both sides.
        rows: of each replica in each step.
        deviations: the worst step of each variable's gradient, weights, state and optimizer state, and of each metric.
        draws: what random layers drew.
        findings: causes of deviations beyond rounding.
        allowed: findings that were said not to count.
        drift: how far the weights are from one device's after all steps without taking over its state in between,
            relative to the largest weight; None where that was not tried.
        drift_of_reordered: the same of one device whose batches have their rows in another order.
        seed: by which both sides have also drawn the same random numbers in all steps; None if they have not.
    """

    model: str
    strategy: str
    num_steps: int
    rows: tuple[tuple[int, ...], ...]
    deviations: tuple[Deviation, ...]
    draws: tuple[Draws, ...]
    findings: tuple[Finding, ...]
    allowed: tuple[Finding, ...] = ()
    drift: float | None = None
    drift_of_reordered: float | None = None
    seed: int | None = None

    @property
    def is_equivalent(self) -> bool:
        """Whether the run is that of one device but for rounding."""
        return not self.findings

    @property
    def largest(self) -> Deviation | None:
        """The deviation that is largest relative to what rounding explains."""
        return max(self.deviations, key=lambda d: d.excess, default=None)

    def __str__(self) -> str:
        lines = [self._verdict(), *(str(finding) for finding in self.findings)]
        lines += [f"allowed: {finding.code}: {finding.what}" for finding in self.allowed]
        return "\n".join(lines)

    def _verdict(self) -> str:
        run = f"'{self.model}' under {self.strategy}, {counted(self.num_steps, 'step')}"
        if self.findings:
            return f"{run}: not what one device trains, {counted(len(self.findings), 'finding')}."
        allowed = f", but for {', '.join(f.code for f in self.allowed)}" if self.allowed else ""
        if self.largest is None:
            return f"{run}: equivalent to one device{allowed}."
        within = (
            f"the largest deviation is {self.largest.relative:.1e} (the {self.largest.part} of {self.largest.name})"
        )
        return f"{run}: equivalent to one device{allowed}; {within}."

    def to_json(self) -> str:
        """Return all of it as one JSON object; numbers that are not finite are strings there."""
        fields = {**dataclasses.asdict(self), "is_equivalent": self.is_equivalent}
        fields["deviations"] = [{**dataclasses.asdict(d), "is_beyond": d.is_beyond} for d in self.deviations]
        return json.dumps(_finite(fields), allow_nan=False)

    def __rich_console__(self, console: object, options: object) -> Iterator[RenderableType]:
        """Show the verdict, the findings, and tables of deviations and draws, with rich."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        yield Text(self._verdict(), style="bold green" if self.is_equivalent else "bold red")
        for finding in (*self.findings, *self.allowed):
            yield Text(str(finding), style="dim" if finding in self.allowed else "")
        table = Table(title="deviation from one device (worst step)", title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("", "of", "largest", "relative", "of rounding", "between replicas", "step"):
            table.add_column(name, justify="left" if name in ("", "of") else "right", overflow="fold")
        for deviation in sorted(self.deviations, key=lambda d: -d.excess):
            cells = (
                f"{deviation.absolute:.2g}",
                f"{deviation.relative:.1e}",
                f"{deviation.excess:.2g}",
                f"{deviation.spread:.2g}",
                str(deviation.step),
            )
            table.add_row(
                deviation.part, deviation.name, *cells, style="red" if deviation.is_beyond or deviation.is_apart else ""
            )
        yield table
        if self.draws:
            table = Table(title="random numbers", title_justify="left", box=box.SIMPLE_HEAD)
            for name in ("layer", "ops", "numbers", "equal on two replicas", "kept", "to keep"):
                table.add_column(name, justify="left" if name == "layer" else "right", overflow="fold")
            for d in self.draws:
                kept = ("", "") if d.kept is None or d.rate is None else (f"{d.kept:.3f}", f"{1 - d.rate:.3f}")
                table.add_row(
                    d.layer,
                    str(d.num_ops),
                    str(d.num_numbers),
                    f"{d.equal:.1%}",
                    *kept,
                    style="red" if d.is_equal else "",
                )
            yield table
        if self.seed is not None:
            yield Text(f"Replicas and one device have drawn the same random numbers, by the seed {self.seed}.")
        if self.drift is not None and self.drift_of_reordered is not None:
            yield Text(
                f"Weights after {counted(self.num_steps, 'step')} in a row: {self.drift:.1e} from one device; one "
                f"device with its examples in another order: {self.drift_of_reordered:.1e}."
            )


def _finite(value: object) -> JsonValue:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
