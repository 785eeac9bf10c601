"""Choose how many steps to make at once."""

from __future__ import annotations

import weakref
from typing import Literal

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.callbacks import saves_each_epoch, traces_batches
from keras_dist_ext.training.run_callback import Callbacks, RunCallback, callbacks_in
from keras_dist_ext.training.worker_sync import own_callback

__all__ = ["ExecutionSizer", "allow_multi_step", "checked_steps_per_execution", "looks_at_batches"]


def checked_steps_per_execution(given: object) -> int | Literal["auto"]:
    """Return "auto", or an integer.

    Raises:
        ValueError: it is neither "auto" nor an integer >= 1, which is what Keras raises.
    """
    if isinstance(given, str) and given == "auto":
        return "auto"
    auto = ", or 'auto'"
    return arguments.integer("steps_per_execution", given, least=1, most=_MOST_STEPS, or_none=auto, error=ValueError)


_MOST_STEPS = 2**31 - 1  # as an int32 can count


class ExecutionSizer:
    """How many steps one execution makes: fixed, or as many as fit into a share of a second.

    Args:
        fixed: a number of steps, or None to follow the clock.
        seconds: the length of an execution to aim at. Callbacks, the progress bar and requests to stop wait at most
            about twice as long.
    """

    def __init__(self, fixed: int | None = None, *, seconds: float = 0.12) -> None:
        self._fixed = fixed
        self._seconds = seconds
        self._num_steps = fixed or 1
        self._is_warm = False

    @property
    def num_steps(self) -> int:
        """Steps of the next execution."""
        return self._num_steps

    @property
    def follows_clock(self) -> bool:
        """Whether the number of steps is tuned."""
        return self._fixed is None

    def record(self, num_steps: int, seconds: float) -> None:
        """Take note of how long an execution took; the first one was compiled and does not count."""
        if not self.follows_clock or num_steps == 0:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        fitting = int(self._seconds * num_steps / max(seconds, 1e-6))
        self._num_steps = max(1, min(fitting, 8 * self._num_steps))


def looks_at_batches(callbacks: Callbacks, kind: str) -> bool:
    """Return whether a callback of the user's own wants every batch of a run of this kind, train or test."""
    names = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"] + (
        ["on_batch_begin", "on_batch_end"] if kind == "train" else []
    )
    for callback in map(own_callback, callbacks_in(callbacks)):
        if _supports_multi_step(callback):
            continue
        for name in names:
            method = getattr(callback, name, None)
            if getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, name):
                return True
    return False


def allow_multi_step(callback: keras.callbacks.Callback) -> None:
    """Have a callback that is no ``RunCallback`` called once for several steps, though it has hooks for batches."""
    _ALLOWED.add(callback)


_ALLOWED: weakref.WeakSet[keras.callbacks.Callback] = weakref.WeakSet()


def _supports_multi_step(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback need not see each step: it says so, or is one of Keras' own and set up like that."""
    if isinstance(callback, RunCallback):
        return callback.supports_multi_step
    if callback in _ALLOWED:
        return True
    if type(callback) in (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore):
        return saves_each_epoch(callback)
    if type(callback) is keras.callbacks.TensorBoard:
        return callback.update_freq == "epoch" and not callback.write_steps_per_second and not traces_batches(callback)
    return type(callback) is keras.callbacks.ProgbarLogger
