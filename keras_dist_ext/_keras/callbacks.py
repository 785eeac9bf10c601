"""Look into Keras' own callbacks, and make lists of them that are set up late."""

from __future__ import annotations

from keras_dist_ext._keras import keras

__all__ = ["LateCallbackList", "saves_each_epoch", "traces_batches"]


class LateCallbackList(keras.callbacks.CallbackList):  # type: ignore[misc]
    """A list of callbacks whose subclass calls ``super().__init__`` later, when the run begins.

    Keras 3.11 looks at `_executor` when a list is deleted (keras/src/callbacks/callback_list.py, `__del__`).
    """

    _executor: object = None


def saves_each_epoch(callback: keras.callbacks.Callback) -> bool:
    """Whether a ModelCheckpoint or BackupAndRestore saves at the ends of epochs only.

    keras/src/callbacks/model_checkpoint.py, backup_and_restore.py.
    """
    return bool(getattr(callback, "save_freq", "epoch") == "epoch")


def traces_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether a TensorBoard callback profiles some batches (keras/src/callbacks/tensorboard.py)."""
    return bool(callback._should_trace)
