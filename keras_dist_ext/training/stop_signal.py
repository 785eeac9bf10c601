"""A request to end training, an evaluation or a prediction, which all workers follow after the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import Logs
from keras_dist_ext.training.run_callback import Callbacks, callbacks_in

__all__ = ["StopSignal", "shown_to"]


class StopSignal:
    """What ``stop_training``, ``stop_evaluating`` or ``stop_predicting`` of a model says.

    Keras' loops look at these after each execution. With several workers a loop must not end on the one alone whose
    callback has asked for it: there the signal is not shown to Keras until all workers know, before their next
    execution. Callbacks see what they have set, as on one device.

    Attributes:
        is_requested: whether a callback of this worker, or an agreement of all, has asked for the end.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._is_deferred = False

    @property
    def is_set(self) -> bool:
        """Whether the end was asked for, as far as whoever reads this is to know."""
        return self.is_requested and not self._is_deferred

    def request(self, value: bool) -> None:
        """Ask for the end, or take that back."""
        self.is_requested = value

    def defer(self) -> None:
        """Show nothing from here on: the workers have not agreed yet."""
        self._is_deferred = True

    def show(self) -> None:
        """Show what was asked for: the workers are about to agree, or have."""
        self._is_deferred = False

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show what was asked for, to callbacks."""
        before, self._is_deferred = self._is_deferred, False
        try:
            yield
        finally:
            self._is_deferred = before


def shown_to(callbacks: Callbacks, stop: StopSignal) -> list[keras.callbacks.Callback]:
    """Return the callbacks of a prediction between two that show its signal to them alone, see ``StopSignal``."""
    return [_Around(stop.show), *callbacks_in(callbacks), _Around(stop.defer)]


class _Around(keras.callbacks.Callback):  # type: ignore[misc]
    """Does something when the callbacks of an execution are called: before them if it is the first, else after."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._act()

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._act()
