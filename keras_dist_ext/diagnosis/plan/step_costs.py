"""Predict the seconds of a step on so many replicas from what was measured of one: pure functions of numbers.

    costs = step_costs(measurements)
    costs.predict(num_replicas=8, global_batch=256).seconds

A step computes, sums gradients over replicas, updates and returns to the host, one after the other: gradients are
summed in one message when all of them are there, so nothing of the sum is hidden behind computing. Input is made
beside, as far as was seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from keras_dist_ext.diagnosis.plan.links import Link, fit_line
from keras_dist_ext.diagnosis.plan.measurements import Measurements

__all__ = [
    "BOUNDS",
    "Bound",
    "Devices",
    "Predicted",
    "StepCosts",
    "resampled_costs",
    "sizes_to_measure",
    "step_costs",
]

Floats = npt.NDArray[np.float64]
Bound = Literal["input", "compute", "communication", "host"]
BOUNDS: tuple[Bound, ...] = ("input", "compute", "communication", "host")
Devices = Literal["own", "shared"]


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A step on some replicas, in seconds.

    Attributes:
        compute: until gradients are there, on the replica with the most examples.
        update: of the weights.
        communication: the sum over replicas.
        host: Python between executions.
        input: that the pipeline takes for a global batch.
        input_hidden: see ``Measurements``.
    """

    compute: float
    update: float
    communication: float
    host: float
    input: float
    input_hidden: float = 1.0

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        busy = self.compute + self.update + self.communication + self.host
        return busy + self.input - self.input_hidden * min(busy, self.input)

    @property
    def waiting(self) -> float:
        """Seconds of it in which replicas wait for input."""
        return self.seconds - self.compute - self.update - self.communication - self.host

    @property
    def bound(self) -> Bound:
        """What decides: the part that shortens the step most if it takes half as long."""
        halved = {bound: self.seconds_with(bound, 0.5) for bound in BOUNDS}
        return min(BOUNDS, key=lambda bound: halved[bound])

    def seconds_with(self, bound: Bound, factor: float) -> float:
        """Return the seconds of the step if one part took so many times as long."""
        names = {"compute": ("compute", "update")}.get(bound, (bound,))
        return dataclasses.replace(self, **{name: factor * getattr(self, name) for name in names}).seconds


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """What a step costs: one value for each thing that was measured.

    Attributes:
        sizes: examples in a batch, ascending.
        seconds: of the step for each, with the update.
        at_0: where the line through them begins: seconds that do not depend on examples, with the update.
        per_example: its slope: seconds of each example.
        update: see ``Predicted``.
        host: see there.
        input_per_example: seconds of the pipeline.
        input_hidden: see ``Measurements``.
        gradient_bytes: that are summed.
        link: over this; None where it is unknown, and sums are left out.
        cores_busy: see ``Measurements``.
        num_cores: see there.
    """

    sizes: Floats
    seconds: Floats
    at_0: float
    per_example: float
    update: float
    host: float
    input_per_example: float
    input_hidden: float
    gradient_bytes: int
    link: Link | None
    cores_busy: float
    num_cores: int

    @property
    def fixed(self) -> float:
        """Seconds that do not depend on examples, without the update."""
        return max(0.0, self.at_0 - self.update)

    def line(self, examples: float) -> float:
        """Return the seconds that the line has for so many examples, with the update."""
        return self.at_0 + self.per_example * examples

    def compute(self, examples: float) -> float:
        """Return the seconds until gradients of so many examples are there.

        What was measured deviates from the line; in between by what the two next to it do, outside as at the end.
        """
        off = self.seconds / np.maximum([self.line(size) for size in self.sizes], 1e-15)
        return max(0.0, self.line(examples) * float(np.interp(examples, self.sizes, off)) - self.update)

    @property
    def misfit(self) -> float:
        """How far the line is from what was measured, relative, at worst."""
        line = np.array([self.line(size) for size in self.sizes])
        return float(np.max(np.abs(self.seconds / np.maximum(line, 1e-15) - 1)))

    def predict(self, num_replicas: int, global_batch: int, devices: Devices = "own") -> Predicted:
        """Return a step of so many replicas.

        Args:
            num_replicas: N.
            global_batch: examples of all together; the replica with the most has the next integer from N-th of it.
            devices: whether each replica has a device like the one measured, or all share the cores of this machine.
        """
        crowd = 1.0
        if devices == "shared":  # of the cores that all would keep busy, these are there
            crowd = max(1.0, num_replicas * self.cores_busy / self.num_cores)
        return Predicted(
            compute=crowd * self.compute(-(-global_batch // num_replicas)),
            update=crowd * self.update,
            communication=0.0 if self.link is None else self.link.sum_seconds(num_replicas, self.gradient_bytes),
            host=self.host,
            input=self.input_per_example * global_batch,
            input_hidden=self.input_hidden,
        )


def step_costs(measured: Measurements) -> StepCosts:
    """Return the costs that the medians of all samples give."""
    return _costs(measured, None)


def resampled_costs(measured: Measurements, num_draws: int = 200) -> list[StepCosts]:
    """Return the costs that single rounds give, drawn so often: what some seconds of training may take.

    Not the medians of rounds drawn again, which say how sure the median is: a machine that is slow now and then stays
    so for longer than a round. Samples of one round are drawn together: a slow moment hits all of them.
    """
    generator = np.random.default_rng(0)
    most = max(len(samples) for samples in _all_samples(measured))
    return [_costs(measured, int(number)) for number in generator.integers(most, size=num_draws)]


def _all_samples(measured: Measurements) -> list[Sequence[float]]:
    sums = () if measured.sums is None else measured.sums.seconds.values()
    return [*measured.steps.values(), measured.update, measured.host, measured.input, *sums]


def _costs(measured: Measurements, number: int | None) -> StepCosts:
    """Return the costs that one round gives, which may count more than there are; for None, all of them."""

    def middle(samples: Sequence[float]) -> float:
        return float(np.median(samples) if number is None else samples[number % len(samples)])

    sizes = sorted(measured.steps)
    seconds = [middle(measured.steps[size]) for size in sizes]
    at_0, per_example = fit_line([float(size) for size in sizes], seconds)
    update = min(middle(measured.update), min(seconds))
    link = measured.given_link
    if measured.sums is not None:
        link = measured.sums.link(number)
    return StepCosts(
        sizes=np.array(sizes, np.float64),
        seconds=np.array(seconds),
        at_0=at_0,
        per_example=per_example,
        update=update,
        host=middle(measured.host),
        input_per_example=middle(measured.input) / measured.batch_size,
        input_hidden=measured.input_hidden,
        gradient_bytes=measured.gradient_bytes,
        link=link,
        cores_busy=measured.cores_busy,
        num_cores=measured.num_cores,
    )


def sizes_to_measure(batch_size: int, replicas: Sequence[int], most: int = 6) -> list[int]:
    """Return how many examples steps are to be timed with, ascending: what replicas would have, two sizes at least.

    >>> sizes_to_measure(256, [1, 2, 4])
    [64, 128, 256]
    >>> sizes_to_measure(256, [1])
    [128, 256]

    Args:
        batch_size: of the data.
        replicas: their numbers.
        most: sizes to return.
    """
    sizes = sorted({batch_size, *(-(-batch_size // count) for count in replicas)})
    if len(sizes) == 1 and batch_size > 1:
        sizes = [batch_size // 2, batch_size]
    if len(sizes) > most:
        places = np.linspace(0, len(sizes) - 1, most).round().astype(int)
        sizes = [sizes[place] for place in places]
    return sizes
