"""Time what happens between epochs: validation, callbacks, and what Keras does to end one and begin another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from keras_dist_ext._keras import keras
from keras_dist_ext.diagnosis.doctor.examination import BetweenEpochs
from keras_dist_ext.diagnosis.doctor.host_clock import CallbackClock

__all__ = ["EpochClock"]

_HOOKS = ("on_epoch_begin", "on_epoch_end")


class EpochClock:
    """Times the intervals from the last step of an epoch to the first one of the next.

    The first interval does not count: what validates is traced in it, and files are opened. The last one ends with the
    last epoch.

    Args:
        callbacks: those of the run.
        but: the one that asks.
        clock: what it reads, in seconds; None is the host's.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        but: keras.callbacks.Callback,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = time.perf_counter if clock is None else clock
        self._callbacks = CallbackClock(callbacks, but, _HOOKS, looks_into_calls=False)
        self._last_end: float | None = None  # of an execution in this epoch
        self._test_begin: float | None = None
        self._num_ever = 0
        self._seconds = self._validation_seconds = self._new_validation_seconds = 0.0

    def end_execution(self) -> None:
        """Take note that a step has ended."""
        self._last_end = self._clock()

    def begin_validation(self) -> None:
        """Take note that validation begins."""
        self._test_begin = self._clock()

    def end_validation(self) -> None:
        """Take note that validation has ended."""
        if self._test_begin is not None:
            self._new_validation_seconds += self._clock() - self._test_begin
            self._test_begin = None

    def end_epoch(self) -> None:
        """Take note that all callbacks know that an epoch has ended."""
        validation, self._new_validation_seconds = self._new_validation_seconds, 0.0
        if self._last_end is None:  # it had no step
            return
        self._num_ever += 1
        self._count()
        self._validation_seconds += validation if self._num_ever > 1 else 0.0

    def begin_epoch(self) -> None:
        """Take note that all callbacks know of a new epoch."""
        if self._last_end is not None:
            self._count()
        self._last_end = None

    def _count(self) -> None:
        """Count the time since a step, or an epoch, has ended; but not the first time."""
        before, self._last_end = self._last_end, self._clock()
        if self._num_ever > 1:
            self._seconds += self._last_end - (before or 0.0)
        else:
            self._callbacks.reset()

    def stop(self) -> None:
        """Leave the callbacks as they were."""
        self._callbacks.stop()

    def between(self) -> BetweenEpochs:
        """Return what was timed."""
        return BetweenEpochs(
            num_times=max(0, self._num_ever - 1),
            seconds=self._seconds,
            validation_seconds=self._validation_seconds,
            calls=self._callbacks.calls(),
        )
