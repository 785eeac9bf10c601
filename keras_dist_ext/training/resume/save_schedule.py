"""When checkpoints of a run are due."""

from __future__ import annotations

import datetime
import operator
import re
import time
from typing import SupportsIndex

import numpy as np

from keras_dist_ext import arguments
from keras_dist_ext.errors import ResumeError

__all__ = ["SaveSchedule"]

_TIMES_COST = 100.0  # a checkpoint at the end of an epoch is due after this many times the seconds that it takes


class SaveSchedule:
    """Tells when checkpoints are due: after so many steps, after some time, or after epochs.

    Args:
        save_every: see ``Resume``.

    Raises:
        ResumeError: it is not one of the allowed values.
    """

    def __init__(self, save_every: object) -> None:
        self._steps, self._seconds = _checked_interval(save_every)
        self._batches_at_save = 0
        self._saved_at = 0.0
        self._cost_seconds = 0.0
        self._num_checkpoints = 0

    @property
    def follows_epochs(self) -> bool:
        """Whether they are due after epochs."""
        return not self._steps and not self._seconds

    @property
    def is_due_after_epoch(self) -> bool:
        """Whether one is due after an epoch that has just ended: not where the last one has taken long."""
        seconds = time.monotonic() - self._saved_at
        return not self._num_checkpoints or seconds >= _TIMES_COST * self._cost_seconds

    def begin(self, num_batches_used: int) -> None:
        """Begin a run, in which so many batches were used before."""
        self._batches_at_save = num_batches_used
        self._saved_at = time.monotonic()
        self._num_checkpoints = 0

    def plan(self, num_steps: int, num_batches_used: int, *, follows_clock: bool) -> tuple[int, bool]:
        """Return how many of the next steps to run, and whether one is due after them.

        Args:
            num_steps: of the next execution.
            num_batches_used: up to now.
            follows_clock: whether fewer steps may be run.
        """
        if not self._steps:
            return num_steps, bool(self._seconds) and time.monotonic() - self._saved_at >= self._seconds
        left = max(1, self._steps - (num_batches_used - self._batches_at_save))
        num_steps = min(num_steps, left) if follows_clock else num_steps
        return num_steps, num_steps >= left

    def note_save(self, num_batches_used: int, began: float) -> None:
        """Take note of a checkpoint.

        Args:
            num_batches_used: up to it.
            began: when saving began, by ``time.perf_counter``.
        """
        self._batches_at_save = num_batches_used
        self._saved_at = time.monotonic()
        self._cost_seconds = max(time.perf_counter() - began, 0.7 * self._cost_seconds)
        self._num_checkpoints += 1


def _checked_interval(save_every: object) -> tuple[int, float]:
    """Return the steps and the seconds between two checkpoints; 0 for what does not apply."""
    if _integer(save_every) >= 1:
        return _integer(save_every), 0.0
    if isinstance(save_every, datetime.timedelta) and save_every.total_seconds() > 0:
        return 0, save_every.total_seconds()
    if isinstance(save_every, str) and save_every == "epoch":
        return 0, 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)", save_every) if isinstance(save_every, str) else None
    if match is None or not float(match[1]):
        raise ResumeError(
            f"save_every must be 'epoch', a number of steps such as 500, or a time such as '30s', '10min' or '2h', got "
            f"{arguments.shown(save_every)}."
        )
    return 0, float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def _integer(number: object) -> int:
    """Return an integer, also of NumPy; 0 for anything else."""
    try:
        if isinstance(number, SupportsIndex) and not isinstance(number, bool | np.bool_):
            return operator.index(number)
    except TypeError:
        pass
    return 0
