"""Say what a change would bring: the doctor's findings, and the parts of a step, each predicted again without its cost.

A finding's seconds go from the part of the step that it is about; what that brings is a bound, since no change is free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from keras_dist_ext.diagnosis.plan.measurements import Measurements
from keras_dist_ext.diagnosis.plan.scaling import Point
from keras_dist_ext.diagnosis.plan.step_costs import Devices, Predicted, StepCosts
from keras_dist_ext.findings import SLOWS_PIPELINES

__all__ = ["WhatIf", "what_ifs"]

LEAST = 1.05  # what brings less is not worth a word

_INPUT = {*SLOWS_PIPELINES, "input-bound", "unaligned-reads"}
_HOST = {"slow-callback", "fetching-callback", "host-bound", "retracing"}


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """What a change would bring.

    Attributes:
        code: of the finding, or of the part of a step.
        change: what to change.
        factor: how many times as many examples a second, at most.
    """

    code: str
    change: str
    factor: float

    def __str__(self) -> str:
        return f"{self.code}: up to {self.factor:.2g}x: {self.change}"


def what_ifs(point: Point, measured: Measurements, costs: StepCosts, devices: Devices = "own") -> tuple[WhatIf, ...]:
    """Return what changes would bring at a number of replicas, most first; those that bring next to nothing are not in.

    Args:
        point: the number of replicas.
        measured: with the findings.
        costs: from the medians.
        devices: see ``StepCosts.predict``.
    """
    of_findings = [one for one in _of_findings(point, measured) if one.factor >= LEAST]
    said = {_part_of(one.code) for one in of_findings}  # with what to change
    of_parts = [one for one in _of_parts(point, costs, devices) if one.factor >= LEAST and one.code not in said]
    return tuple(sorted([*of_findings, *of_parts], key=lambda one: -one.factor))


def _part_of(code: str) -> str:
    """Return the part of a step that a finding is about."""
    if code in _INPUT:
        return "input"
    if code in _HOST:
        return "host"
    return "update" if code == "update-bound" else "compute"


def _of_findings(point: Point, measured: Measurements) -> Iterator[WhatIf]:
    """Predict again without what each finding costs."""
    parts = point.parts
    for finding in measured.findings:
        part = _part_of(finding.code)
        if finding.code == "no-prefetch":
            changed = dataclasses.replace(parts, input_hidden=1.0)
        elif finding.seconds is None:
            continue
        else:
            scale = point.global_batch / measured.batch_size if part == "input" else 1.0
            left = max(0.0, getattr(parts, part) - scale * finding.seconds)
            changed = dataclasses.replace(parts, **{part: left})
        yield WhatIf(finding.code, finding.fix, _factor(parts, changed))


def _of_parts(point: Point, costs: StepCosts, devices: Devices) -> Iterator[WhatIf]:
    """Predict again without each part, and with twice the batch."""
    parts = point.parts
    yield WhatIf(
        "input",
        "let the pipeline be no slower than the replicas: more parallel calls, a cache, or files read by each worker",
        _factor(parts, dataclasses.replace(parts, input=0.0)),
    )
    if parts.communication:
        yield WhatIf(
            "communication",
            "a faster network, fewer replicas with larger batches, or fewer weights",
            _factor(parts, dataclasses.replace(parts, communication=0.0)),
        )
    yield WhatIf(
        "host",
        'many steps an execution: compile(steps_per_execution="auto"), and no callback that looks at every batch',
        _factor(parts, dataclasses.replace(parts, host=0.0)),
    )
    doubled = costs.predict(point.num_replicas, 2 * point.global_batch, devices)
    yield WhatIf("batch", "twice the batch, where the model still trains as well", 2 * _factor(parts, doubled))


def _factor(before: Predicted, after: Predicted) -> float:
    return before.seconds / max(after.seconds, 1e-12)
