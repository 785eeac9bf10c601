"""See that Keras and TensorFlow still ask this package before they save a model, before a first step is made.

Where one of them would not, files would be as Keras writes them: in place, by all workers at once, and a checkpoint
without the seeds of replicas, so that what goes on from it would draw other numbers. As for the hooks of steps (see
``step.hook_checks``), each is tried once in a process, on a small model; the hooks note it, and nothing is saved.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.interception import Hook
from keras_dist_ext._keras.models import HookedModel
from keras_dist_ext._keras.saving import (
    ATTRIBUTES,
    CHECKPOINTS,
    EXPORT_FORMATS,
    PICKLES,
    SAVE_HOOKS,
    Saveable,
    noting_saves,
)
from keras_dist_ext.aliases import SavePath, TensorNest

__all__ = ["uncalled_save_hooks"]


class _SavedNet(HookedModel):
    """A model without weights that notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__(name="save_hook_checks")
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x

    def _checkpoint_children(self) -> dict[str, object]:
        _asked.add(CHECKPOINTS)
        return {}

    @classmethod
    def _load_pickled(cls, file: SavePath, load: Callable[[SavePath], keras.Model]) -> None:
        _asked.add(PICKLES)


class _Kept(Saveable):
    """An attribute that notes whether it is saved with the weights of a model, and loaded."""

    def save_own_variables(self, store: MutableMapping[str, TensorNest]) -> None:
        store["kept"] = [1]

    def load_own_variables(self, store: MutableMapping[str, TensorNest]) -> None:
        _asked.add(ATTRIBUTES)


class _StockNet(keras.Model):  # type: ignore[misc]
    """A model that is not ours, so that it is saved."""

    def __init__(self) -> None:
        super().__init__(name="save_hook_checks")
        self.kept = _Kept()
        self.built = True


_asked: set[str] = set()


def uncalled_save_hooks() -> list[Hook]:
    """Return the hooks that are not called by what should call them."""
    _asked.clear()
    net = _SavedNet()
    with tempfile.TemporaryDirectory(prefix="keras_dist_ext_") as folder, noting_saves() as called_hooks, _quiet():
        for save in _saves(net, Path(folder)):
            with contextlib.suppress(Exception):  # of what is not called, but does save, or cannot
                save()
    return [hook for hook in SAVE_HOOKS if str(hook) not in called_hooks | _asked]


def _saves(net: _SavedNet, folder: Path) -> Iterator[Callable[[], object]]:
    yield lambda: net.save(folder / "net.keras")
    yield lambda: net.save(folder / "net.h5")
    yield lambda: net.save_weights(folder / "net.weights.h5")
    for export_format in EXPORT_FORMATS:
        yield functools.partial(net.export, folder / export_format, format=export_format, verbose=False)
    yield functools.partial(_save_and_load, _StockNet(), folder / "stock.weights.h5")
    yield lambda: pickle.loads(pickle.dumps(net))
    yield lambda: tf.train.Checkpoint(net).write(str(folder / "checkpoint"))
    yield lambda: tf.saved_model.save(tf.Module(), str(folder / "module"))


def _save_and_load(net: keras.Model, path: Path) -> None:
    net.save_weights(path)
    net.load_weights(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Have Keras not advise the user about the format of a file that nobody wants."""

    def refuse(record: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("absl")
    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)
