"""Check, before the first step, that Keras and TensorFlow still call the hooks of this package when they save a model.

Without them files would be as Keras writes them: in place, by all workers at once, and a checkpoint would lack the
seeds of replicas, so that a resumed run would draw other numbers. As with the hooks of steps (``step.hook_checks``),
each is tried once in a process, on a small model; the hooks record the call, and nothing is saved.
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
    """A model without weights that records which of its methods are called."""

    def __init__(self) -> None:
        super().__init__(name="save_hook_checks")
        self.built = True

    def _checkpoint_children(self) -> dict[str, object]:
        _asked.add(CHECKPOINTS)
        return {}

    @classmethod
    def _load_pickled(cls, file: SavePath, load: Callable[[SavePath], keras.Model]) -> None:
        _asked.add(PICKLES)


class _Kept(Saveable):
    """An attribute that records whether it is saved with the weights of a model, and loaded."""

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
    """Return the hooks that Keras and TensorFlow do not call; none where there is no room for a temporary file."""
    _asked.clear()
    net = _SavedNet()
    try:
        with tempfile.TemporaryDirectory(prefix="keras_dist_ext_") as folder, noting_saves() as called_hooks, _quiet():
            for save in _saves(net, Path(folder)):
                with contextlib.suppress(Exception):  # if the hook is not called, it saves, or fails
                    save()
            Path(folder, "room").write_bytes(bytes(2**16))
    except OSError:
        return []
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
    """Silence Keras' advice about the formats of these files."""

    def refuse(record: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("absl")
    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)
