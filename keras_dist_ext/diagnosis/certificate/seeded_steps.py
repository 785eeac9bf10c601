"""Compare steps with the random numbers that they draw, where replicas draw what one device draws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import StepData
from keras_dist_ext.diagnosis.certificate.drawn_numbers import AsSeeded
from keras_dist_ext.diagnosis.certificate.lockstep import Comparison, Lockstep
from keras_dist_ext.diagnosis.certificate.root_causes import listed
from keras_dist_ext.findings import Finding
from keras_dist_ext.training.callbacks import ReplicaSeeds

__all__ = ["compare_seeded", "of_seeded_steps"]


def compare_seeded(
    build_model: Callable[[], keras.Model],
    strategy: tf.distribute.Strategy,
    batches: Sequence[StepData],
    seeds: ReplicaSeeds,
    without: Collection[str],
) -> list[Comparison]:
    """Make the steps of a run with seeds.

    Args:
        build_model: returns a compiled model of ours.
        strategy: of the replicas.
        batches: one for each step.
        seeds: of the run.
        without: parts to leave out, see ``_keras.losses.without_parts``.

    Raises:
        Exception: whatever a step ends with.
    """
    lockstep = Lockstep(build_model, strategy, batches[0], AsSeeded(seeds))
    lockstep.build_optimizers(batches[0])
    return [lockstep.compare(batch, step, without=without) for step, batch in enumerate(batches, 1)]


def of_seeded_steps(comparisons: Sequence[Comparison]) -> Iterator[Finding]:
    """Say that steps are off with the random numbers that they draw; they were not with numbers alike for all rows."""
    off = {(d.part, d.name): d for c in comparisons for d in c.deviations if d.is_beyond or d.is_apart}
    if off:
        worst = max(off.values(), key=lambda d: d.excess)
        yield Finding(
            code="draws-differ",
            what="With the random numbers that it draws, a step is another on replicas than on one device, and with "
            f"the same numbers for all examples it is not: {listed(list(dict.fromkeys(name for _, name in off)))}.",
            evidence=f"step {worst.step}; the {worst.part} of {worst.name} is {worst.relative:.2g} (relative) off.",
            fix="Please report this model: it should not be.",
        )
