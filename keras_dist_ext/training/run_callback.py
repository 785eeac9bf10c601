"""A callback that participates in preparing and ending a run, besides what Keras' callbacks see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.adapters import DataAdapter

__all__ = ["Callbacks", "RunCallback", "RunData", "callbacks_in", "callbacks_of_all_workers"]

Callbacks: TypeAlias = (
    "keras.callbacks.CallbackList | keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None"
)
"""What ``fit`` takes."""


class RunData(Protocol):
    """What callbacks may know of a run's data; see ``RunDataset``."""

    data_adapter: DataAdapter
    num_passes: int

    @property
    def num_batches(self) -> int | None:
        """Of an epoch, if that is known."""

    @property
    def given(self) -> tf.data.Dataset:
        """The dataset that was given, or that Keras has made of what was."""

    @property
    def is_pipeline(self) -> bool:
        """Whether a dataset was given, which Keras reads as it is."""

    @property
    def can_be_read_again(self) -> bool:
        """Whether another iterator takes nothing from this one."""


class RunCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A ``keras.callbacks.Callback`` with more hooks, called by models of this package.

        class FirstStepTime(kde.RunCallback):
            supports_multi_step = True

            def on_run_prepare(self, model):
                self.began = time.perf_counter()

            def on_execution_end(self):
                ...

    A run is one call of ``fit``, ``evaluate`` or ``predict``; an execution is one call of the compiled function, which
    makes one step or more. Override what you need: every hook does nothing by itself. In the order in which ``fit``
    calls them, Keras' own among them:

    - ``on_run_prepare``: nothing is built, read or traced yet; an error here leaves all as it was.
    - ``on_run_begin``: the model is built, the data is known, all callbacks are set up.
    - ``on_before_train_begin``, then ``on_train_begin`` of all callbacks, then ``on_after_train_begin``.
    - ``on_epoch_begin`` of all callbacks, then ``on_after_epoch_begin``.
    - ``on_train_batch_end`` of all callbacks, then ``on_execution_end``.
    - ``on_epoch_end`` of all callbacks, then ``on_after_epoch_end``.
    - ``on_train_end`` of all callbacks, then ``on_after_train_end``.
    - ``on_run_end``: the run is over, however it ended.

    ``evaluate`` calls ``on_run_prepare``, ``on_run_begin`` and ``on_run_end``, ``predict`` the first and the last. A
    callback may begin another run in the middle of one, so these may be nested. Models of stock Keras call none of
    them: check in ``on_train_begin`` that ``on_run_prepare`` was called, where that matters.

    Attributes:
        supports_multi_step: whether ``on_train_batch_end`` and its like may be called once for several steps. While a
            callback overrides such a hook and does not say so, ``steps_per_execution="auto"`` makes every step by
            itself.
    """

    supports_multi_step: bool = False

    def on_run_prepare(self, model: keras.Model) -> None:
        """Prepare a run that is about to begin; here ``model.add_recorder`` and ``model.guard_steps`` may be called.

        With several workers, all must have the same callbacks that override this, since it may change what is
        compiled; see ``get_run_config``.

        Args:
            model: that will run.
        """

    def on_run_begin(self, callbacks: Sequence[keras.callbacks.Callback], data: RunData | None) -> None:
        """Look at the other callbacks, and at the data, when the model is built.

        Args:
            callbacks: of the run, as Keras calls them, this one among them.
            data: of training, or of evaluation where nothing is trained: a ``RunDataset``.
        """

    def on_before_train_begin(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Act before any callback knows that training begins.

        Args:
            callbacks: the ``RunCallbackList`` of the run.
        """

    def on_after_train_begin(self) -> None:
        """Act once all callbacks know that training begins."""

    def on_after_epoch_begin(self) -> None:
        """Act once all callbacks know that an epoch begins."""

    def on_execution_end(self) -> None:
        """Act once all callbacks know of the last step of an execution of training."""

    def on_after_epoch_end(self, epoch: int) -> None:
        """Act once all callbacks know that an epoch has ended.

        Args:
            epoch: counted from 0.
        """

    def on_after_train_end(self) -> None:
        """Act once all callbacks know that training has ended."""

    def on_run_end(self) -> None:
        """Clean up after a run, also after one that an exception has ended."""

    def get_run_config(self) -> Mapping[str, object]:
        """Return the settings that must be equal on all workers, as far as ``on_run_prepare`` is overridden.

        They are compared before training begins, and a difference is a ``WorkersError`` on all workers.
        """
        return {}


def callbacks_in(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Return the callbacks in what a user gives to ``fit``: one, a list of them, a ``CallbackList``, or None."""
    return tree.flatten(getattr(callbacks, "callbacks", callbacks)) if callbacks else []


def callbacks_of_all_workers(callbacks: Callbacks) -> list[RunCallback]:
    """Return the callbacks that all workers must have: those that override ``on_run_prepare``."""
    prepares = RunCallback.on_run_prepare
    return [c for c in callbacks_in(callbacks) if isinstance(c, RunCallback) and type(c).on_run_prepare is not prepares]
