"""Count the optimizer steps of batches, and split batches into intervals.

Batches and updates are the same unless gradients accumulate: then the optimizer counts batches, and a step has several.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from keras_dist_ext import arguments
from keras_dist_ext._keras.optimizers import inner_optimizer, num_batches_used
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.strategy.scope import optimizers
from keras_dist_ext.training.model import Model

__all__ = ["Intervals", "StepCounter", "UpdateFreq"]

UpdateFreq = int | Literal["auto", "epoch"]
Counts = npt.NDArray[np.int64]


class StepCounter:
    """Counts the batches that a model's optimizer has used, across calls to ``fit`` and after a resume.

    Of several optimizers the one with the most batches counts; where none advances, as with a ``train_step`` that has
    its own elsewhere, batches are counted from the start of the first run.

    Attributes:
        count: batches up to the last one that was counted.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._counts_itself = False
        self._batches_per_step = 1
        self.count = 0

    def begin(self) -> None:
        """Continue at the optimizer's count: it may have been restored."""
        if not self._counts_itself:
            self.count = self._read()

    def after(self, num_batches: int) -> Counts:
        """Return the count after each batch since ``count``, the last of which the optimizer has just used."""
        now = self._read()
        counted = np.arange(1, num_batches + 1)
        if now > self.count:
            counted = np.rint(counted * ((now - self.count) / num_batches)).astype(np.int64)
        elif now == self.count and not self._counts_itself and self._may_skip():
            counted = counted * 0
        else:
            self._counts_itself = True
        return self.count + counted

    def latest(self, num_batches: int) -> int:
        """Return the optimizer step after the batches since ``count``."""
        return self.step(int(self.after(num_batches)[-1]) if num_batches else self.count)

    @property
    def batches_per_step(self) -> int:
        """More than 1 where gradients accumulate."""
        return self._batches_per_step

    def step(self, count: int) -> int:
        """Return the optimizer step after a number of batches."""
        return count // self._batches_per_step

    def _read(self) -> int:
        counts = [(num_batches_used(optimizer), optimizer) for _, optimizer in optimizers(self._model)]
        if not counts:
            return 0
        count, optimizer = max(counts, key=lambda pair: pair[0])
        self._batches_per_step = inner_optimizer(optimizer).gradient_accumulation_steps or 1
        return count

    def _may_skip(self) -> bool:
        """Whether an optimizer leaves out updates whose gradients are not finite."""
        return any(inner_optimizer(optimizer) is not optimizer for _, optimizer in optimizers(self._model))


class Intervals:
    """Splits batches into intervals.

    Args:
        update_freq: the length in optimizer steps, to end at multiples of it; "epoch"; or "auto": at least a second,
            and long enough that the work at its end takes 0.1% of it. The first automatic interval has one batch, and
            none has more than 8 times as many as the one before.

    Raises:
        MonitorError: it is not one of these.
    """

    def __init__(self, update_freq: UpdateFreq = "auto") -> None:
        if not isinstance(update_freq, str) or update_freq not in ("auto", "epoch"):
            wanted, others = "a number of optimizer steps", ", 'epoch' or 'auto'"
            update_freq = arguments.integer(
                "update_freq", update_freq, least=1, wanted=wanted, or_none=others, error=MonitorError
            )
        self._freq = update_freq
        self._num_auto = 1
        self._least_auto = 1
        self._cost_seconds = 0.0

    def length(self, counter: StepCounter) -> float:
        """Return the number of batches from ``counter.count`` to the end of the interval."""
        if isinstance(self._freq, int):
            period = self._freq * counter.batches_per_step
            return period - counter.count % period
        return self._num_auto if self._freq == "auto" else float("inf")

    def ends(self, counter: StepCounter, counts: Counts, *, is_last: bool = False) -> list[int]:
        """Return the numbers of batches after which intervals end.

        Args:
            counter: at its count before these batches.
            counts: the count after each batch.
            is_last: whether the last interval ends with them, however long it is.
        """
        found: list[int] = []
        if isinstance(self._freq, int):
            periods = np.append(counter.count, counts) // (self._freq * counter.batches_per_step)
            found = (np.flatnonzero(np.diff(periods)) + 1).tolist()
        elif self._freq == "auto" and len(counts) >= self._num_auto:
            found = [len(counts)]
        if is_last and len(counts) and (not found or found[-1] < len(counts)):
            found.append(len(counts))
        return found

    def is_worthwhile(self, num_batches: int) -> bool:
        """Whether the end of an epoch ends an interval of this length: if that takes at most 0.1% of its time."""
        return self._freq != "auto" or num_batches >= self._least_auto

    def lengths(self, step_seconds: float, cost_seconds: float) -> tuple[int, int]:
        """Return the length of the next automatic interval, and the least length that is worth its cost, in batches.

        Args:
            step_seconds: of a batch, in the last interval.
            cost_seconds: of the work at the end of an interval.
        """
        self._cost_seconds = max(cost_seconds, 0.7 * self._cost_seconds)
        worthwhile = _TIMES_COST * self._cost_seconds
        fitting, least = (
            min(math.ceil(seconds / max(step_seconds, 1e-6)), 8 * self._num_auto)
            for seconds in (max(_SECONDS, worthwhile), worthwhile)
        )
        return fitting, least

    def set_lengths(self, fitting: int, least: int) -> None:
        """Set what ``lengths`` has returned, here or on the chief."""
        self._num_auto, self._least_auto = fitting, least


_SECONDS = 1.0  # of an automatic interval, at least
_TIMES_COST = 1000.0  # an automatic interval takes at least this many times as long as the work at its end: 0.1%
