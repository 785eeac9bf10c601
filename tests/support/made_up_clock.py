"""A clock that goes on when a test says so: what is measured of steps is then known to the last digit."""

from __future__ import annotations

import importlib
import threading
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf


class MadeUpClock:
    """Seconds in place of those that steps read, which are traced from now on, and the host.

    Args:
        monkeypatch: of the test.
        modules: of the package, on the host, that ask ``time.perf_counter`` for durations.
        tick: seconds that pass whenever a step has read it.
    """

    _HANG_SECONDS = 60.0  # nothing takes so long: a step would have stood still for good

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        modules: Sequence[str] = ("training.batch_reader",),
        *,
        tick: float = 0.0,
    ) -> None:
        self._seconds, self._num_reads, self._tick = 1000.0, 0, tick
        self._changed = threading.Condition()
        monkeypatch.setattr(tf, "timestamp", self._timestamp)
        for name in modules:
            module = importlib.import_module(f"keras_dist_ext.{name}")
            monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: self._seconds))

    @property
    def num_reads(self) -> int:
        """How often steps have read it."""
        return self._num_reads

    def advance(self, seconds: float, after_reads: int = 0) -> None:
        """Let time pass, once the clock has been read so often.

        Raises:
            TimeoutError: steps do not read it so often.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_reads >= after_reads, self._HANG_SECONDS):
                raise TimeoutError(f"the clock was read {self._num_reads} times and not {after_reads}")
            self._seconds += seconds

    def _timestamp(self) -> tf.Tensor:
        clock = tf.numpy_function(self._read, [], tf.float64)
        clock.set_shape([])
        return clock

    def _read(self) -> Any:
        with self._changed:
            self._num_reads += 1
            self._changed.notify_all()
            read, self._seconds = self._seconds, self._seconds + self._tick
            return np.float64(read)
