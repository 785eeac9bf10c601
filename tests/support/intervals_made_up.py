"""Make up what replicas did, for tests of what judges and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist_ext.monitoring.writers import Run
from keras_dist_ext.step.stats import Kind, ReplicaStats

__all__ = ["interval", "run"]


def interval(
    compute: Sequence[float] = (0.010, 0.012),
    *,
    step: int = 10,
    num_steps: int = 10,
    examples: Sequence[int] | None = None,
    loss: Sequence[float] | None = None,
    waiting: Sequence[float] | float = 0.001,
    kind: Kind = "train",
    gradient_norm: Sequence[float] | None = None,
    wall_time: float | None = None,
) -> ReplicaStats:
    """Return an interval in which replicas computed for so many seconds a step, and waited for the slowest."""
    own = np.asarray(compute, float) + np.broadcast_to(waiting, len(compute))
    longest = own.max() + 0.002
    counts = np.asarray([16 * num_steps] * len(compute) if examples is None else examples, np.int64)
    losses = np.asarray([0.5 + 0.25 * i for i in range(len(compute))] if loss is None else loss, float)
    return ReplicaStats(
        kind=kind,
        step=step,
        num_steps=num_steps,
        wall_time=1_763_700_000.0 + step if wall_time is None else wall_time,
        seconds=num_steps * (longest + 0.0005),
        host_seconds=num_steps * 0.0005,
        loss=np.where(counts > 0, losses, np.nan),
        examples=counts,
        input_seconds=np.broadcast_to(waiting, len(compute)).astype(float),
        compute_seconds=np.asarray(compute, float),
        sync_seconds=longest - own,
        gradient_norm=None if gradient_norm is None else np.asarray(gradient_norm, float),
    )


def run(kind: Kind = "train", experiment: str = "night/3", num_replicas: int = 2, **given: Any) -> Run:
    """Return a run of so many replicas, of which this worker has all unless told otherwise."""
    return Run(
        **{
            "kind": kind,
            "experiment": experiment,
            "manifest": {
                "version": 1,
                "experiment": experiment,
                "strategy": {
                    "name": "MirroredStrategy",
                    "reason": "2 GPUs, no TF_CONFIG",
                    "num_replicas": num_replicas,
                    "num_workers": 1,
                },
                "devices": [f"/device:GPU:{i}" for i in range(num_replicas)],
                "seeds": {"global": 42},
                "versions": {"keras": "3.15.1"},
                "batch_size": 32,
                "host": "train-01",
            },
            "details": {"optimizer": "Adam", "a | b": "x | <b>y</b> *_z_*"},
            "wall_time": 1_763_700_000.0,
            "replicas": range(num_replicas),
            **given,
        }
    )
