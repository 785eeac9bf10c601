"""What each replica did, step by step: recorded on its device, fetched once an interval.

``StepRecords`` holds the steps of some executions, one by one; ``ReplicaStats`` what they come to, over all workers.
Both are values; ``monitoring.writers`` writes them, ``diagnosis.doctor`` judges them.

What the times of a step mean, on the host's clock:

- ``input_seconds``: from the moment when the step could begin until its batch was there;
- ``compute_seconds``: from then until the replica's own loss, or its gradients, were there;
- ``sync_seconds``: from then until the step was over: waiting for other replicas, the sum over replicas, the update,
  and the metrics; before that, waiting until the other workers have a batch, too.

They add up to ``step_seconds``. On CPUs a value is there when it is computed. On GPUs it is when the host has seen it,
for which the host waits; so in executions of several steps two of 32 are timed, and the last two, and the others have
times from these (``untimed_steps``): what was waited for their batches is their own, and their sum is right. On a TPU,
and where XLA compiles a whole step, the inside of a step cannot be timed: all of it counts as computing. Logical CPU
devices of a process share its cores, so a replica's computing includes waiting for a core.

Letters: n = steps; R = replicas in sync, over all workers; L = replicas of this worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from keras_dist_ext.aliases import Array

__all__ = ["Kind", "ReplicaStats", "StepRecords", "join_records", "summarize"]

Kind = Literal["train", "test"]
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class StepRecords:
    """Steps of this worker's replicas, in order."""

    kind: Kind
    loss: Floats  # [n, L], the replica's own, before any averaging; NaN where it had no examples
    examples: Counts  # [n, L]
    gradient_norm: Floats | None  # [n, L], of the replica's own gradients, unscaled; NaN where it had no examples
    input_seconds: Floats  # [n]
    compute_seconds: Floats  # [n, L]
    sync_seconds: Floats  # [n, L]
    host_seconds: float  # spent between the executions of these steps, by callbacks and Keras

    def __len__(self) -> int:
        return len(self.input_seconds)

    @property
    def step_seconds(self) -> Floats:
        """The length of each step, [n]."""
        total: Floats = self.input_seconds + (self.compute_seconds + self.sync_seconds).max(axis=1)
        return total

    def steps(self, begin: int, end: int) -> StepRecords:
        """Return some of the steps; time between executions stays with the first of them."""
        part = slice(begin, end)
        return dataclasses.replace(
            self,
            loss=self.loss[part],
            examples=self.examples[part],
            gradient_norm=None if self.gradient_norm is None else self.gradient_norm[part],
            input_seconds=self.input_seconds[part],
            compute_seconds=self.compute_seconds[part],
            sync_seconds=self.sync_seconds[part],
            host_seconds=self.host_seconds if begin == 0 else 0.0,
        )


def join_records(records: Sequence[StepRecords]) -> StepRecords:
    """Return the steps of several records as one; at least one, all of a kind."""
    first = records[0]
    norms = [r.gradient_norm for r in records]
    return StepRecords(
        kind=first.kind,
        loss=np.concatenate([r.loss for r in records]),
        examples=np.concatenate([r.examples for r in records]),
        gradient_norm=None if first.gradient_norm is None else np.concatenate([n for n in norms if n is not None]),
        input_seconds=np.concatenate([r.input_seconds for r in records]),
        compute_seconds=np.concatenate([r.compute_seconds for r in records]),
        sync_seconds=np.concatenate([r.sync_seconds for r in records]),
        host_seconds=sum(r.host_seconds for r in records),
    )


@dataclasses.dataclass(frozen=True)
class ReplicaStats:
    """What all replicas did in an interval of steps.

    Arrays are [R], by global replica id. Seconds are means over the steps.
    """

    kind: Kind
    step: int  # the optimizer step that the interval ends with; in evaluation, that of the model
    num_steps: int  # batches, in the interval; with gradient accumulation, more than optimizer steps
    wall_time: float  # when it ended, in seconds since 1970, for charts by the clock
    seconds: float  # that the interval took, with the host's share
    host_seconds: float  # of these, between executions
    loss: Floats  # mean weighted by examples; NaN for a replica without any
    examples: Counts
    input_seconds: Floats
    compute_seconds: Floats
    sync_seconds: Floats
    gradient_norm: Floats | None = None  # mean over the steps in which the replica had examples

    @property
    def num_replicas(self) -> int:
        """R."""
        return len(self.examples)

    @property
    def step_seconds(self) -> Floats:
        """Seconds a step, [R]."""
        total: Floats = self.input_seconds + self.compute_seconds + self.sync_seconds
        return total

    @property
    def mean_loss(self) -> float:
        """The mean over replicas weighted by examples: the loss in History. NaN without any example."""
        has = self.examples > 0
        total = self.examples.sum()
        return float((self.loss[has] * self.examples[has]).sum() / total) if total else float("nan")

    @property
    def examples_per_second(self) -> Floats:
        """Examples a second of each replica, [R]; together they are all that the run has got through."""
        rate: Floats = self.examples / max(self.seconds, 1e-9)
        return rate

    @property
    def scaling_efficiency(self) -> float:
        """Throughput of all against R times that of the replica that computes fastest, by itself: 1 is perfect.

        NaN where nothing was computed.
        """
        busy = self.compute_seconds * self.num_steps
        alone = np.divide(self.examples, busy, out=np.zeros(len(busy)), where=busy > 0)
        best = float(alone.max(initial=0.0))
        return float(self.examples_per_second.sum() / (self.num_replicas * best)) if best else float("nan")

    @property
    def input_share(self) -> float:
        """The share of the time that was spent waiting for input, 0 to 1, of the replica that waited most."""
        return float(self.input_seconds.max(initial=0.0) * self.num_steps / max(self.seconds, 1e-9))


def summarize(records: StepRecords, *, step: int, wall_time: float) -> ReplicaStats:
    """Return what the steps of this worker come to; its arrays are [L].

    Args:
        records: at least one step.
        step: the optimizer step after the last.
        wall_time: when that ended, in seconds since 1970.
    """
    examples = records.examples.sum(axis=0)
    has = records.examples > 0
    loss = _mean(records.loss, np.where(has, records.examples, 0))
    norm = None if records.gradient_norm is None else _mean(records.gradient_norm, has.astype(np.float64))
    return ReplicaStats(
        kind=records.kind,
        step=step,
        num_steps=len(records),
        wall_time=wall_time,
        seconds=float(records.step_seconds.sum()) + records.host_seconds,
        host_seconds=records.host_seconds,
        loss=loss,
        examples=examples,
        input_seconds=np.full(len(examples), records.input_seconds.mean()),
        compute_seconds=records.compute_seconds.mean(axis=0),
        sync_seconds=records.sync_seconds.mean(axis=0),
        gradient_norm=norm,
    )


def _mean(values: Floats, weights: Array) -> Floats:
    """Return the weighted mean over the steps, [L]; NaN where all weights are 0."""
    total = weights.sum(axis=0)
    weighted = np.where(weights > 0, values, 0.0) * weights
    mean: Floats = np.divide(weighted.sum(axis=0), total, out=np.full(len(total), np.nan), where=total > 0)
    return mean
