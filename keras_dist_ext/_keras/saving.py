"""Tell how Keras saves an object, and read what it has saved."""

from __future__ import annotations

import contextlib
import os
import zipfile
from typing import Any, BinaryIO

import h5py
import numpy.typing as npt
from keras.src import api_export
from keras.src.saving import object_registration, serialization_lib
from keras.src.saving.keras_saveable import KerasSaveable

from keras_dist_ext._keras import keras

__all__ = [
    "Saveable",
    "unpickle_model",
    "save_as",
    "has_own_config",
    "has_recorded_arguments",
    "has_automatic_config",
    "is_serializable_dict",
    "share_registered_name",
    "saved_variables",
]


class Saveable(KerasSaveable):  # type: ignore[misc]
    """An attribute of a model that is saved with its weights, by `save_own_variables` and `load_own_variables`.

    keras/src/saving/saving_lib.py passes over attributes that a plain layer has, too; the others are saved where
    they are a `KerasSaveable` (saving/keras_saveable.py), under what `_obj_type` calls them.
    """

    def _obj_type(self) -> str:
        return "Layer"


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


def has_automatic_config(thing: KerasSaveable) -> bool:
    """Whether `get_config` gives the recorded arguments of the constructor (ops/operation.py).

    Keras 3.11 records those that were given, so others have their defaults; Keras 3.15 records all.
    """
    return bool(getattr(type(thing).get_config, "_is_default", False))


def is_serializable_dict(value: Any) -> bool:
    """Whether it holds constructor arguments for a config (keras/src/saving/serialization_lib.py)."""
    return isinstance(value, serialization_lib.SerializableDict)


def share_registered_name(cls: type, twin: type) -> None:
    """Have `twin` saved under the name of `cls`, without loading it by that name (saving/object_registration.py)."""
    if cls in object_registration.GLOBAL_CUSTOM_NAMES:
        object_registration.GLOBAL_CUSTOM_NAMES[twin] = object_registration.GLOBAL_CUSTOM_NAMES[cls]


def saved_variables(path: Any, group: str) -> dict[str, npt.NDArray[Any]]:
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
            weights = os.path.join(path, "model.weights.h5")
            if not os.path.exists(weights):
                return {}
        file = opened.enter_context(h5py.File(weights, "r"))
        return {name: value[()] for name, value in file.get(f"{group}/vars", {}).items()}
