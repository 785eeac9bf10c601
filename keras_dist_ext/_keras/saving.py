"""Tell how Keras saves an object, and read what it has saved."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, BinaryIO, TypeAlias

import h5py
import tensorflow as tf
from keras.src import api_export
from keras.src import export as export_module
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib, serialization_lib
from keras.src.utils import io_utils
from tensorflow.python.checkpoint import checkpoint
from tensorflow.python.saved_model import save as saved_model

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.interception import Hook, definer, patched
from keras_dist_ext._keras.models import HookedModel
from keras_dist_ext.aliases import Array, SavePath

__all__ = [
    "Saveable",
    "SAVE_HOOKS",
    "EXPORT_FORMATS",
    "PICKLES",
    "CHECKPOINTS",
    "ATTRIBUTES",
    "noting_saves",
    "unpickle_model",
    "save_as",
    "has_own_config",
    "has_recorded_arguments",
    "has_automatic_config",
    "is_serializable_dict",
    "share_registered_name",
    "saved_variables",
    "said_of",
    "write_saves_by",
    "answer_overwriting_by",
]

KerasSaveable: Any = definer(keras.Model, "_unpickle_model")  # keras/src/saving/keras_saveable.py

Write: TypeAlias = Callable[[SavePath], SavePath]
"""Write something to a path."""


SAVE_HOOKS: list[Hook] = []
"""What is asked, in Keras and TensorFlow, before something is saved. `noting_saves` notes those that are called."""

EXPORT_FORMATS: list[str] = []
"""How `Model.export` calls the formats whose functions are among those."""

_thread = threading.local()


@contextlib.contextmanager
def noting_saves() -> Iterator[set[str]]:
    """Note which of these hooks are called in this thread; they do nothing else, but where a checkpoint is written."""
    called_hooks: set[str] = set()
    _thread.called_hooks = called_hooks
    try:
        yield called_hooks
    finally:
        del _thread.called_hooks


def _is_noted(hook: Hook) -> bool:
    called_hooks = getattr(_thread, "called_hooks", None)
    if called_hooks is not None:
        called_hooks.add(str(hook))
    return called_hooks is not None


def _save_hook(owner: type | ModuleType, name: str) -> Hook:
    function = getattr(owner, name)
    hook = Hook(owner, name, f"{function.__module__.replace('.', '/')}.py")
    SAVE_HOOKS.append(hook)
    return hook


def _hook_saves(owner: ModuleType, name: str, *, makes_parents: bool | None = None) -> None:
    """Have a function that saves a model ask the model to, where it is one of ours, once per process."""
    original = getattr(owner, name)
    if hasattr(original, "is_kde_hook"):
        return
    hook = _save_hook(owner, name)

    @functools.wraps(original)
    def save(model: keras.Model, filepath: SavePath, *args: object, **kwargs: object) -> object:
        if not isinstance(model, HookedModel):
            return original(model, filepath, *args, **kwargs)
        if _is_noted(hook):
            return None
        makes = not kwargs.get("zipped", True) if makes_parents is None else makes_parents
        return model._save_whole(
            lambda path: original(model, path, *args, **kwargs),
            filepath,
            makes_parents=makes,
            arguments=f"{name} {args} {kwargs}",
        )

    save.is_kde_hook = True  # type: ignore[attr-defined]
    setattr(owner, name, save)


# What keras/src/saving/saving_api.py calls for `save`, `save_weights` and the functions of the same names, and
# models/model.py for `export`.
_hook_saves(saving_lib, "save_model")
_hook_saves(saving_lib, "save_weights_only", makes_parents=False)
_hook_saves(legacy_h5_format, "save_model_to_hdf5", makes_parents=True)
for _format in ("saved_model", "onnx", "openvino", "litert"):  # and "torch", which Keras refuses with TensorFlow
    if hasattr(export_module, f"export_{_format}"):  # older versions have fewer formats to export to
        _hook_saves(export_module, f"export_{_format}", makes_parents=_format == "saved_model")
        EXPORT_FORMATS.append("tf_saved_model" if _format == "saved_model" else _format)


def _overridden(name: str) -> str:
    """Note a method that our models override for saves, and return its label."""
    SAVE_HOOKS.append(Hook(HookedModel, name, f"{definer(keras.Model, name).__module__.replace('.', '/')}.py"))
    return str(SAVE_HOOKS[-1])


PICKLES = _overridden("_unpickle_model")  # keras/src/saving/keras_saveable.py
CHECKPOINTS = _overridden("_trackable_children")  # keras/src/backend/tensorflow/layer.py


def write_saves_by(
    write_checkpoint: Callable[[Write, SavePath], SavePath], write_saved_model: Callable[[Write, SavePath], object]
) -> None:
    """Have functions write what TensorFlow saves, and not only models, given its way to write to a path, and the path.

    Args:
        write_checkpoint: what ``tf.train.Checkpoint`` and ``CheckpointManager`` save (checkpoint/checkpoint.py).
        write_saved_model: what ``tf.saved_model.save`` and Keras' ``ExportArchive`` save (saved_model/save.py).
    """
    save_checkpoint, save_model = checkpoint.TrackableSaver.save, saved_model.save_and_return_nodes
    hook_of_checkpoint = _save_hook(checkpoint.TrackableSaver, "save")
    hook_of_model = _save_hook(saved_model, "save_and_return_nodes")

    @functools.wraps(save_checkpoint)
    def of_checkpoint(
        saver: checkpoint.TrackableSaver, file_prefix: SavePath, *args: object, **kwargs: object
    ) -> SavePath:
        def write(prefix: SavePath) -> SavePath:
            written: SavePath = save_checkpoint(saver, prefix, *args, **kwargs)
            return written

        if _is_noted(hook_of_checkpoint) or not tf.executing_eagerly():
            return write(file_prefix)
        return write_checkpoint(write, file_prefix)

    @functools.wraps(save_model)
    def of_model(obj: tf.Module, export_dir: SavePath, *args: object, **kwargs: object) -> object:
        if _is_noted(hook_of_model):
            return None
        return write_saved_model(lambda path: save_model(obj, path, *args, **kwargs), export_dir)

    checkpoint.TrackableSaver.save = of_checkpoint
    saved_model.save_and_return_nodes = of_model


def answer_overwriting_by(answer: Callable[[str], bool | None]) -> None:
    """Have a function answer whether a file may be overwritten, where ``overwrite=False``; None asks at the terminal.

    keras/src/utils/io_utils.py asks, for keras/src/saving/saving_api.py.
    """
    original = io_utils.ask_to_proceed_with_overwrite

    @functools.wraps(original)
    def ask(filepath: str) -> bool:
        answered = answer(filepath)
        return bool(original(filepath)) if answered is None else answered

    io_utils.ask_to_proceed_with_overwrite = ask


@contextlib.contextmanager
def said_of(path: str, written: str) -> Iterator[None]:
    """Have Keras name ``path`` in what it prints and raises, where it names what is written in its stead.

    keras/src/utils/io_utils.py prints.
    """
    original = io_utils.print_msg

    def print_msg(message: object, *args: object, **kwargs: object) -> None:
        original(str(message).replace(written, path), *args, **kwargs)

    try:
        with patched(io_utils, "print_msg", print_msg):
            yield
    except Exception as error:
        error.args = tuple(one.replace(written, path) if isinstance(one, str) else one for one in error.args)
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = str(error.filename).replace(written, path)
        raise


class Saveable(KerasSaveable):  # type: ignore[misc]
    """An attribute of a model that is saved with its weights, by `save_own_variables` and `load_own_variables`.

    keras/src/saving/saving_lib.py passes over attributes that a plain layer has, too; the others are saved where
    they are a `KerasSaveable` (saving/keras_saveable.py), under what `_obj_type` calls them.
    """

    def _obj_type(self) -> str:
        return "Layer"


SAVE_HOOKS.append(Hook(Saveable, "save_own_variables", "keras/src/saving/saving_lib.py"))
ATTRIBUTES = str(SAVE_HOOKS[-1])


def unpickle_model(cls: type[keras.Model], file: BinaryIO) -> keras.Model:
    """Load a model of a class from what Keras has pickled, a `.keras` file (saving/keras_saveable.py)."""
    return cls._unpickle_model(file)


def save_as(cls: type, keras_class: type) -> None:
    """Have instances of ``cls`` saved under the name of one of Keras' own classes (keras/src/api_export.py)."""
    name = api_export.get_name_from_symbol(keras_class) or f"{keras_class.__module__}.{keras_class.__name__}"
    api_export.REGISTERED_OBJS_TO_NAMES[cls] = name


def has_own_config(model: keras.Model) -> bool:
    """Whether a model's `get_config` is not Keras' own (keras/src/layers/layer.py, models/functional.py)."""
    return bool(type(model).get_config.__module__.partition(".")[0] != "keras")


def has_recorded_arguments(model: keras.Model) -> bool:
    """Whether Keras' own `get_config` has arguments to give (ops/operation.py); of stock models these are defaults."""
    recorded = getattr(model, "_auto_config", None)
    return bool(recorded is not None and recorded.config)


def has_automatic_config(thing: keras.Operation) -> bool:
    """Whether `get_config` gives the recorded arguments of the constructor (ops/operation.py).

    Keras 3.11 records those that were given, so others have their defaults; Keras 3.15 records all.
    """
    return bool(getattr(type(thing).get_config, "_is_default", False))


def is_serializable_dict(value: object) -> bool:
    """Whether it holds constructor arguments for a config (keras/src/saving/serialization_lib.py)."""
    return isinstance(value, serialization_lib.SerializableDict)


def share_registered_name(cls: type, clone: type) -> None:
    """Have `clone` saved under the name of `cls`, without loading it by that name."""
    registered = keras.saving.get_registered_name(cls)
    package, is_registered, name = registered.partition(">")
    if is_registered:
        loaded = keras.saving.get_registered_object(registered)
        keras.saving.register_keras_serializable(package, name)(clone)
        keras.saving.get_custom_objects()[registered] = loaded


def saved_variables(path: SavePath, group: str) -> dict[str, Array]:
    """The variables that an attribute of a model has saved in a `.keras` file or directory (saving/saving_lib.py).

    ``path`` may be a file object.
    """
    with contextlib.ExitStack() as opened:
        if zipfile.is_zipfile(path):
            archive = opened.enter_context(zipfile.ZipFile(path))
            if "model.weights.h5" not in archive.namelist():
                return {}
            weights: Any = opened.enter_context(archive.open("model.weights.h5"))
        else:
            weights = os.path.join(path, "model.weights.h5")  # type: ignore[arg-type] # no open file, which is zipped
            if not os.path.exists(weights):
                return {}
        file = opened.enter_context(h5py.File(weights, "r"))
        return {name: value[()] for name, value in file.get(f"{group}/vars", {}).items()}
