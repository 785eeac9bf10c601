"""Hold what was measured of a model, as plain values, so that predictions are made, and tested, without TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from keras_dist_ext.diagnosis.plan.links import Link, SumTimes
from keras_dist_ext.findings import Finding

__all__ = ["Measurements"]


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What a step of one replica costs, and what replicas sum over.

    Attributes:
        model: its name.
        device: that it was measured on, such as "GPU:0".
        batch_size: examples in a batch of the data.
        steps: seconds of whole steps by examples in a batch, a sample a round; batches were there already, and many
            steps made an execution.
        update: seconds of an update of the weights, a sample a round; it is in ``steps``, too.
        host: seconds a step between executions, in Python, a sample for each block of steps.
        input: seconds in which the data's pipeline by itself makes a batch, a sample for each time it was read.
        input_hidden: the share of it that passes while steps compute, 0 to 1, where both take as long.
        run_seconds: of a step of the run that all of it is to explain, with its own data; None where there was none.
        gradient_bytes: that replicas sum in a step.
        num_gradients: the tensors that have them.
        state_bytes: of weights, and what the optimizer keeps.
        peak_bytes: of the device's memory by examples in a batch; empty where a device does not tell.
        cores_busy: cores that steps kept busy.
        num_cores: that this process may use.
        sums: what sums over replicas took here, where they were measured.
        given_link: what they go over else, None where that is unknown.
        findings: of the doctor and of the pipeline; their seconds are those of a step.
    """

    model: str
    device: str
    batch_size: int
    steps: Mapping[int, tuple[float, ...]]
    update: tuple[float, ...] = (0.0,)
    host: tuple[float, ...] = (0.0,)
    input: tuple[float, ...] = (0.0,)
    input_hidden: float = 1.0
    run_seconds: float | None = None
    gradient_bytes: int = 0
    num_gradients: int = 1
    state_bytes: int = 0
    peak_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    cores_busy: float = 1.0
    num_cores: int = 1
    sums: SumTimes | None = None
    given_link: Link | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def link(self) -> Link | None:
        """What replicas sum over: measured, or else given; None where it is unknown."""
        return self.given_link if self.sums is None else self.sums.link()
