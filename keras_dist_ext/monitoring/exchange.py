"""Gather the records of the replicas of all workers.

Letters: P = intervals; L = replicas of this worker; R = replicas in sync, over all workers; W = workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keras_dist_ext.step.stats import ReplicaStats
from keras_dist_ext.strategy.workers import Workers

__all__ = ["gather_intervals"]

Floats = npt.NDArray[np.float64]

_PER_REPLICA = ("loss", "examples", "input_seconds", "compute_seconds", "sync_seconds", "gradient_norm")


def gather_intervals(
    stats: Sequence[ReplicaStats],
    workers: Workers | None,
    *,
    first: int,
    num_replicas: int,
    broadcast: Sequence[float] = (),
    to_sum: Sequence[float] = (),
) -> tuple[list[ReplicaStats], Floats, Floats]:
    """Return intervals of all replicas from those of this worker's, in one collective.

    Every worker must call it at the same point of its program, for the same P intervals.

    Args:
        stats: P of them, with arrays [L].
        workers: None with a single worker; then nothing is exchanged.
        first: the global id of this worker's first replica.
        num_replicas: R.
        broadcast: numbers of which the chief's are returned.
        to_sum: numbers to be summed over workers.

    Returns:
        The intervals, with arrays [R] and the mean of the workers' seconds; the chief's numbers; the sums.
    """
    if workers is None:
        return list(stats), np.array(broadcast, np.float64), np.array(to_sum, np.float64)
    replicas = np.zeros((len(stats), len(_PER_REPLICA), num_replicas))  # zeros: sums over workers fill in the others'
    seconds = np.zeros((len(stats), 2))
    for index, local in enumerate(stats):
        seconds[index] = local.seconds, local.host_seconds
        for row, name in enumerate(_PER_REPLICA):
            values = getattr(local, name)
            if values is not None:
                replicas[index, row, first : first + local.num_replicas] = values
    chief_numbers = np.array(broadcast, np.float64) if workers.is_chief else np.zeros(len(broadcast))
    parts = (replicas, seconds / workers.num_workers, chief_numbers, np.array(to_sum, np.float64))
    summed = workers.sum(np.concatenate([part.ravel() for part in parts]).tolist())
    replicas, seconds, chief_numbers, sums = (
        values.reshape(part.shape)
        for values, part in zip(np.split(summed, np.cumsum([p.size for p in parts])[:-1]), parts, strict=True)
    )
    whole = [
        dataclasses.replace(
            local,
            seconds=float(seconds[index, 0]),
            host_seconds=float(seconds[index, 1]),
            loss=replicas[index, 0],
            examples=replicas[index, 1].astype(np.int64),
            input_seconds=replicas[index, 2],
            compute_seconds=replicas[index, 3],
            sync_seconds=replicas[index, 4],
            gradient_norm=None if local.gradient_norm is None else replicas[index, 5],
        )
        for index, local in enumerate(stats)
    ]
    return whole, chief_numbers, sums
