"""Call functions during a run: every so many steps, when a value has improved, when the process must end."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import Logs
from keras_dist_ext.errors import CallbackError
from keras_dist_ext.training.resume.callback import Resume
from keras_dist_ext.training.run_callback import RunCallback, RunData
from keras_dist_ext.training.worker_sync import own_callback

if TYPE_CHECKING:
    from keras_dist_ext.training.model import Model

__all__ = ["every", "on_improvement", "on_preemption"]

Action = Callable[[keras.Model], object]


def every(num_steps: int, action: Action) -> keras.callbacks.Callback:
    """Return a callback that calls ``action(model)`` after every so many steps of training.

    Steps are counted over all epochs of a ``fit``. Of several that were made in one call of the graph, the action sees
    the state after the last, and is called once.

    Raises:
        CallbackError: ``num_steps`` is not an integer >= 1, or ``action`` is not a function.
    """
    num_steps = arguments.integer("num_steps", num_steps, least=1, error=CallbackError)
    return _Every(num_steps, _checked_action(action))


def _checked_action(action: Action) -> Action:
    arguments.function("action", action, wanted="a function of the model", error=CallbackError)
    return action


class _Every(RunCallback):
    supports_multi_step = True

    def __init__(self, num_steps: int, action: Action) -> None:
        super().__init__()
        self._num_steps = num_steps
        self._action = action

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._made_before = self._made = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._made_before = self._made

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        made = self._made_before + batch + 1
        is_due = made // self._num_steps > self._made // self._num_steps
        self._made = made
        if is_due:
            self._action(self.model)


def on_improvement(name: str, action: Action, mode: Literal["min", "max"] = "min") -> keras.callbacks.Callback:
    """Return a callback that calls ``action(model)`` after each epoch whose value ``name`` is the best so far.

    Args:
        name: of a value in the logs, such as "loss" or "val_loss".
        action: what to do.
        mode: whether smaller or larger values are better.

    Raises:
        CallbackError: an argument is invalid; when an epoch ends, the logs have no such value.
    """
    name = arguments.text("name", name, wanted="the name of a value in the logs", error=CallbackError)
    mode_given = arguments.one_of("mode", mode, ("min", "max"), error=CallbackError)
    return _OnImprovement(name, _checked_action(action), mode_given)


class _OnImprovement(RunCallback):
    def __init__(self, name: str, action: Action, mode: str) -> None:
        super().__init__()
        self._name = name
        self._action = action
        self._sign = 1.0 if mode == "max" else -1.0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._best = -float("inf")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._name not in (logs or {}):
            raise CallbackError(
                f"on_improvement({self._name!r}): an epoch has the values {sorted(logs or {})}. Name one."
            )
        assert logs is not None
        value = self._sign * float(logs[self._name])
        if value > self._best:
            self._best = value
            self._action(self.model)


def on_preemption(action: Action) -> keras.callbacks.Callback:
    """Return a callback that calls ``action(model)`` once SIGTERM has come, between two steps, and ends training.

    Of several workers each needs the signal. A second one does what it always did. To continue the run from there, use
    ``Resume``.

    Raises:
        CallbackError: ``action`` is not a function; when training begins, in a thread, or beside a ``Resume``.
    """
    return _OnPreemption(_checked_action(action))


class _OnPreemption(RunCallback):
    supports_multi_step = True

    def __init__(self, action: Action) -> None:
        super().__init__()
        self._action = action
        self._is_near = False

    def on_run_prepare(self, model: Model) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CallbackError(
                "on_preemption in a thread: Python delivers signals to the main thread only, so SIGTERM would not "
                "be noticed. Call fit in the main thread."
            )
        self._is_near = False
        self._before = signal.signal(signal.SIGTERM, self._note)

    def on_run_begin(self, callbacks: Sequence[keras.callbacks.Callback], data: RunData | None) -> None:
        if any(isinstance(own_callback(callback), Resume) for callback in callbacks):
            raise CallbackError(
                "on_preemption ends training, and Resume beside it would save the run as one that is over, so that it "
                "would never continue. Give fit one of them: Resume(..., on_preemption=True) saves when SIGTERM comes, "
                "and the run continues from there."
            )

    def on_run_end(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._is_near = True
        self.on_run_end()  # a second one does what it did before

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._is_near:
            self._is_near = False
            self._action(self.model)
            self.model.stop_training = True
