"""Predict the curve over numbers of replicas, with intervals, and say which number pays: pure functions of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from keras_dist_ext.diagnosis.doctor.examination import Estimate
from keras_dist_ext.diagnosis.plan.links import fit_line
from keras_dist_ext.diagnosis.plan.measurements import Measurements
from keras_dist_ext.diagnosis.plan.step_costs import Bound, Devices, Predicted, StepCosts

__all__ = ["KINDS", "Curve", "Kind", "Point", "draw_curve"]

Kind = Literal["fixed global batch", "fixed batch a replica"]
KINDS: tuple[Kind, ...] = ("fixed global batch", "fixed batch a replica")
PAYS = 0.5  # of what one replica trains: an added one that brings less does not pay


@dataclasses.dataclass(frozen=True)
class Point:
    """What so many replicas would give.

    Attributes:
        num_replicas: N.
        global_batch: examples of all together.
        parts: the step, from the medians.
        seconds: of it, with a 95% interval.
        examples_per_second: of all together.
        speedup: how many times as many examples a second as one replica on a batch of the data.
        memory_bytes: of a device, None where that is unknown.
        is_measured: whether the examples of a replica are within the sizes that were measured.
    """

    num_replicas: int
    global_batch: int
    parts: Predicted
    seconds: Estimate
    examples_per_second: Estimate
    speedup: Estimate
    memory_bytes: float | None
    is_measured: bool

    @property
    def efficiency(self) -> Estimate:
        """The speed-up for each replica; 1 is perfect."""
        return self.speedup.times(1 / self.num_replicas)

    @property
    def bound(self) -> Bound:
        """What decides."""
        return self.parts.bound

    @property
    def batch_per_replica(self) -> int:
        """Examples of the replica with the most."""
        return -(-self.global_batch // self.num_replicas)


@dataclasses.dataclass(frozen=True)
class Curve:
    """What numbers of replicas would give, at one way of dividing batches.

    Attributes:
        kind: whether all replicas together have a batch of the data, or each of them.
        one: one replica.
        points: those that were asked for, ascending.
    """

    kind: Kind
    one: Point
    points: tuple[Point, ...]

    def gain(self, point: Point) -> float:
        """Return what each replica added since the number before brings, as a share of what one trains."""
        before = max(
            (p for p in (self.one, *self.points) if p.num_replicas < point.num_replicas),
            key=lambda p: p.num_replicas,
            default=None,
        )
        if before is None:
            return 1.0
        return (point.speedup.value - before.speedup.value) / (point.num_replicas - before.num_replicas)

    @property
    def best(self) -> Point:
        """The most replicas of which each added one still brings half of what one trains."""
        best = self.one
        for point in self.points:
            if self.gain(point) < PAYS:
                break
            best = point
        return best

    @property
    def stops_at(self) -> Point | None:
        """The first number of replicas that does not pay; None where all of them do."""
        return next((point for point in self.points if self.gain(point) < PAYS), None)


def draw_curve(
    kind: Kind,
    replicas: Sequence[int],
    measured: Measurements,
    costs: StepCosts,
    draws: Sequence[StepCosts],
    devices: Devices = "own",
) -> Curve:
    """Return the curve over numbers of replicas.

    Args:
        kind: see ``Curve``.
        replicas: their numbers, ascending.
        measured: of one replica.
        costs: from the medians.
        draws: from samples drawn again; at least one.
        devices: see ``StepCosts.predict``.
    """
    memory = _memory_of(measured)

    def batch_of(count: int) -> int:
        return measured.batch_size * (count if kind == "fixed batch a replica" else 1)

    bases = [draw.predict(1, measured.batch_size).seconds / measured.batch_size for draw in (costs, *draws)]
    off = 1.0 if measured.run_seconds is None else measured.run_seconds / max(1e-12, bases[0] * measured.batch_size)
    unexplained = np.linspace(1.0, off, len(draws))

    def point(count: int) -> Point:
        batch = batch_of(count)
        parts = costs.predict(count, batch, devices)
        steps = [draw.predict(count, batch, devices) for draw in draws]
        sums = np.array([step.communication for step in steps])
        seconds = sums + unexplained * (np.array([step.seconds for step in steps]) - sums)
        rates = batch / seconds
        speedups = rates * np.array(bases[1:]) * unexplained
        examples = -(-batch // count)
        return Point(
            num_replicas=count,
            global_batch=batch,
            parts=parts,
            seconds=_estimate(parts.seconds, seconds),
            examples_per_second=_estimate(batch / parts.seconds, rates),
            speedup=_estimate(batch / parts.seconds * bases[0], speedups),
            memory_bytes=None if memory is None else memory(examples),
            is_measured=bool(costs.sizes[0] <= examples <= costs.sizes[-1]),
        )

    return Curve(kind, point(1), tuple(point(count) for count in replicas))


def _estimate(value: float, samples: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Estimate:
    low, high = np.quantile(samples, [0.025, 0.975])
    return Estimate(min(float(low), value), value, max(float(high), value))


def _memory_of(measured: Measurements) -> Callable[[int], float] | None:
    """Return a function of a replica's examples; None where a device does not tell."""
    if not measured.peak_bytes:
        return None
    sizes = sorted(measured.peak_bytes)
    at_0, per_example = fit_line([float(size) for size in sizes], [float(measured.peak_bytes[s]) for s in sizes])
    return lambda examples: at_0 + per_example * examples
