"""What holds for a step of a replica, whatever its batch: its kind, and what records, guards, plans and observes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keras_dist_ext._keras import keras
from keras_dist_ext.step.drawn_shapes import NotedDraw
from keras_dist_ext.step.means import BatchExponents
from keras_dist_ext.step.nan_guard import StepGuard
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.step.recorder import StepNote
from keras_dist_ext.step.step_plan import StepPlan

__all__ = ["StepOptions"]


@dataclasses.dataclass(frozen=True, eq=False)
class StepOptions:
    """What holds for a step whatever its rows are.

    Attributes:
        kind: "train", "test" or "predict".
        pools_results: whether the results of metrics inside the step are those of all replicas, because the step
            computes with them.
        global_generator: the generator behind ``seed=None``.
        note: takes what is recorded of the step, if anything is.
        guard: leaves the step out if something in it is not finite, if that is wanted.
        exponents: how numbers grow with the rows, where the graph does not tell; None takes all of them for means.
        plan: what is known of the step; None if it is not asked for.
        draws: what it has drawn when it was traced in a scratch graph; None if it was not (see ``drawn_shapes``).
        observer: is called with what the step does while it is traced.
    """

    kind: str = "train"
    pools_results: bool = False
    global_generator: keras.random.SeedGenerator | None = None
    note: StepNote | None = None
    guard: StepGuard | None = None
    exponents: BatchExponents | None = None
    plan: StepPlan | None = None
    draws: Sequence[NotedDraw] | None = None
    observer: StepObserver = dataclasses.field(default_factory=StepObserver)
