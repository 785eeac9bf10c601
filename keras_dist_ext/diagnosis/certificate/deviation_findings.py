"""Explain deviations of state, optimizers, metrics and logs, which no gradient explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keras_dist_ext.diagnosis.certificate.lockstep import Lockstep
from keras_dist_ext.diagnosis.certificate.root_causes import FIX_OF_STOCK, listed
from keras_dist_ext.findings import Finding
from keras_dist_ext.strategy.scope import describe_strategy
from keras_dist_ext.training.deviations import Deviation

__all__ = ["of_deviations"]


def of_deviations(lockstep: Lockstep, deviations: Sequence[Deviation], is_explained: bool) -> Iterator[Finding]:
    """Say what deviations mean that are no matter of gradients.

    Args:
        lockstep: both sides.
        deviations: the worst of each variable and metric.
        is_explained: whether the gradients are off, which explains what follows from them.
    """
    where = describe_strategy(lockstep.strategy)
    ours = lockstep.many.is_ours
    fix = "Please report this model: it should not be." if ours else FIX_OF_STOCK
    apart = [d for d in deviations if d.is_apart and d.part == "state"]
    if apart:
        worst = max(apart, key=lambda d: d.spread)
        yield Finding(
            code="state-drifts",
            what=f"Non-trainable state drifts apart between the replicas of {where}: "
            f"{listed([d.name for d in apart])}. Each replica keeps what its own examples made of "
            "it, and `save` and `predict` take whichever they meet.",
            evidence=f"{worst.name} differs by up to {worst.spread:.3g} between replicas after step {worst.step}.",
            fix=fix,
        )
    for part, what in (("weights", "train different weights"), ("optimizer", "keep different state of the optimizer")):
        differ = [d for d in deviations if d.is_apart and d.part == part]
        if differ:
            worst = max(differ, key=lambda d: d.spread)
            yield Finding(
                code="replicas-differ",
                what=f"Replicas {what}: {listed([d.name for d in differ])}.",
                evidence=f"{worst.name} differs by up to {worst.spread:.3g} between replicas after step {worst.step}.",
                fix="Look for code that assigns these from one replica's examples; apply gradients by the optimizer.",
            )
    if is_explained:
        return
    for part, code, what, advice in _REST:
        off = [d for d in deviations if d.part == part and d.is_beyond and not (part != "metric" and d.is_apart)]
        if off:
            worst = max(off, key=lambda d: d.excess)
            yield Finding(
                code=code,
                what=f"{what}: {listed([d.name for d in off])}.",
                evidence=f"{worst.name} is {worst.relative:.2g} (relative) from one device at step {worst.step}, "
                f"{worst.excess:.3g} times what rounding explains. The gradients are equal.",
                fix=advice if ours or part != "metric" else fix,
            )


_REST: tuple[tuple[str, str, str, str], ...] = (
    (
        "state",
        "state-differs",
        "Replicas agree on state that one device has otherwise",
        "It is not a mean over examples. Gather those of all replicas first, by kde.gather_rows, or assign means over "
        "examples.",
    ),
    (
        "optimizer",
        "optimizer-differs",
        "Equal gradients leave the optimizer otherwise, and later steps with it",
        "Look at what the optimizer's `update_step` assigns, and whether it counts replicas.",
    ),
    (
        "metric",
        "metric-differs",
        "Equal training is logged differently",
        "Keep in a metric's variables what can be added up over replicas, and compute the result from them.",
    ),
)
