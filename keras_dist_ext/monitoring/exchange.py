"""Put together what the replicas of all workers did.

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

_OF_REPLICAS = ("loss", "examples", "input_seconds", "compute_seconds", "sync_seconds", "gradient_norm")


def gather_intervals(
    stats: Sequence[ReplicaStats],
    workers: Workers | None,
    *,
    first: int,
    num_replicas: int,
    broadcast: Sequence[float] = (),
    add_up: Sequence[float] = (),
) -> tuple[list[ReplicaStats], Floats, Floats]:
    """Return intervals of all replicas from those of this worker's, in one collective.

    Every worker must call it at the same point of its program, for the same P intervals.

    Args:
        stats: P of them, with arrays [L].
        workers: None where this process trains alone; nothing is exchanged then.
        first: the global id of this worker's first replica.
        num_replicas: R.
        broadcast: numbers that the chief decides on.
        add_up: numbers to be summed over workers.

    Returns:
        The intervals, with arrays [R] and the mean of the workers' seconds; the chief's numbers; the sums.
    """
    if workers is None:
        return list(stats), np.array(broadcast, np.float64), np.array(add_up, np.float64)
    replicas = np.zeros((len(stats), len(_OF_REPLICAS), num_replicas))  # zeros: sums over workers fill in the others'
    seconds = np.zeros((len(stats), 2))
    for place, local in enumerate(stats):
        seconds[place] = local.seconds, local.host_seconds
        for row, name in enumerate(_OF_REPLICAS):
            values = getattr(local, name)
            if values is not None:
                replicas[place, row, first : first + local.num_replicas] = values
    said = np.array(broadcast, np.float64) if workers.is_chief else np.zeros(len(broadcast))
    parts = (replicas, seconds / workers.num_workers, said, np.array(add_up, np.float64))
    summed = workers.sum(np.concatenate([part.ravel() for part in parts]).tolist())
    replicas, seconds, said, sums = (
        values.reshape(part.shape)
        for values, part in zip(np.split(summed, np.cumsum([p.size for p in parts])[:-1]), parts, strict=True)
    )
    whole = [
        dataclasses.replace(
            local,
            seconds=float(seconds[place, 0]),
            host_seconds=float(seconds[place, 1]),
            loss=replicas[place, 0],
            examples=replicas[place, 1].astype(np.int64),
            input_seconds=replicas[place, 2],
            compute_seconds=replicas[place, 3],
            sync_seconds=replicas[place, 4],
            gradient_norm=None if local.gradient_norm is None else replicas[place, 5],
        )
        for place, local in enumerate(stats)
    ]
    return whole, said, sums
