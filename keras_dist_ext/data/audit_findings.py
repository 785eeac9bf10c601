"""Say what is wrong with which replica got which examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keras_dist_ext.aliases import Array
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted

__all__ = ["findings_of"]


def findings_of(
    ids: tuple[tuple[Array, ...], ...],
    num_workers: int,
    missing: Array,
    repeated: dict[int, int],
    errors: dict[int, str],
) -> list[Finding]:
    """Look at the examples of an epoch.

    Args:
        ids: S lists of R arrays: the examples of each replica in each step.
        num_workers: W; 1 where all workers share each batch.
        missing: ids that no replica got.
        repeated: how often those were given that were given too often.
        errors: what kept a worker from reading, by its number.
    """
    found = [
        Finding(
            "cannot-read",
            "A worker could not read its part of the data; others would wait for it forever.",
            f"worker {worker}: {text}",
            "the other policies of AutoShardPolicy, or kde.distribute",
        )
        for worker, text in errors.items()
    ]
    if len(missing):
        found.append(
            Finding(
                "examples-missed",
                "Some examples are used by no replica.",
                f"{counted(len(missing), 'example')}: {_listed(missing.tolist())}",
                "give all workers the same data in the same order (kde.distribute does), or complete shards",
            )
        )
    if repeated:
        found.append(
            Finding(
                "examples-repeated",
                "Some examples are used several times in one epoch, so that they count more than others.",
                f"{counted(len(repeated), 'example')}: {_listed([f'{i} ({n} times)' for i, n in repeated.items()])}",
                "the same seed for shuffles on all workers (kde.distribute gives one), or shards that do not overlap",
            )
        )
    if not ids:
        nothing = Finding(
            "no-examples",
            "The data holds no example, so no replica gets any.",
            "0 batches",
            "look at where it comes from: names of files that match nothing, a filter that keeps nothing",
        )
        return found if errors or len(missing) else [*found, nothing]
    rows = np.array([[len(part) for part in step] for step in ids], np.int64)
    steps_of_all = len(rows)
    if num_workers > 1:
        of_workers = rows.reshape(len(rows), num_workers, -1).sum(axis=2)
        steps_of_all = min(int(np.flatnonzero(of_worker).max(initial=-1)) + 1 for of_worker in of_workers.T)
        found += _of_shares(rows, num_workers)
    return found + _of_batches(rows[:steps_of_all])


def _of_shares(rows: npt.NDArray[np.int64], num_workers: int) -> list[Finding]:
    """Whether workers got about the same number of examples, and in the same number of steps."""
    of_workers = rows.reshape(len(rows), num_workers, -1).sum(axis=2)
    totals = of_workers.sum(axis=0)
    steps = [int(np.flatnonzero(of_worker).max(initial=-1)) + 1 for of_worker in of_workers.T]
    # Rows that do not divide evenly give one worker up to one row more for each of its replicas in each step.
    tolerated = len(rows) * rows.shape[1] // num_workers
    if len(set(steps)) == 1 and totals.max() - totals.min() <= tolerated:
        return []
    shares = ", ".join(
        f"worker {worker}: {counted(int(total), 'example')} in {counted(step, 'step')}"
        for worker, (total, step) in enumerate(zip(totals, steps, strict=True))
    )
    return [
        Finding(
            "unequal-shards",
            "Workers get unequal shares: those with little wait for the others, or hang a loop of your own.",
            shares,
            'shards of equal size; kde.distribute(..., policy="rows") splits each batch over all workers',
        )
    ]


def _of_batches(rows: npt.NDArray[np.int64]) -> list[Finding]:
    """Whether batches split evenly over the replicas. The last may hold what is left over."""
    found = []
    num_replicas = rows.shape[1]
    totals = rows.sum(axis=1)
    idle = [step for step in range(len(rows)) if (rows[step] == 0).any()]
    if idle:
        step = idle[0]
        found.append(
            Finding(
                "batch-cannot-be-split",
                "Some replicas get no examples in some steps, and idle.",
                f"{counted(len(idle), 'step')} of {len(rows)}; step {step}: {counted(int(totals[step]), 'example')} as "
                f"{_listed(rows[step].tolist())} on {num_replicas} replicas",
                "batches of at least as many examples as there are replicas, or drop_remainder=True for the last",
            )
        )
    uneven = [step for step in range(len(rows) - 1) if rows[step].max() != rows[step].min() and step not in idle]
    if uneven:
        step = uneven[0]
        found.append(
            Finding(
                "uneven-batch",
                "Replicas get different numbers of examples, and all wait for the fullest.",
                f"{counted(len(uneven), 'step')} of {len(rows)}; step {step}: {_listed(rows[step].tolist())} examples",
                f"a batch size that {num_replicas} divides",
            )
        )
    return found


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
