"""Stand in for a class of Keras' or of the user's with one that is ours too."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from keras_dist_ext import _keras
from keras_dist_ext._keras import keras, share_registered_name
from keras_dist_ext.training.model import Functional, Model, Sequential

__all__ = ["class_of_ours"]


def class_of_ours(cls: Any) -> Any:
    """The class of ours that stands for a class of Keras' or of the user's."""
    if issubclass(cls, Model):
        return cls
    if cls is keras.Sequential:
        return Sequential
    if cls in (_keras.Functional, keras.Model):
        return Functional
    ours = _derived(cls)
    share_registered_name(cls, ours)
    return ours


@functools.cache
def _derived(cls: Any) -> Any:
    """A class of the same name that derives from the user's class and from ours."""
    base = Sequential if issubclass(cls, keras.Sequential) else Model
    if issubclass(cls, _keras.Functional):
        base = Functional

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(
            __doc__=cls.__doc__, __module__=cls.__module__, __qualname__=cls.__qualname__, __reduce__=_reduce
        )

    return types.new_class(cls.__name__, (cls, base), exec_body=body)


def _reduce(model: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickle the user's class by name, and the model as Keras does: as the bytes of a `.keras` file."""
    cls = next(base for base in type(model).__mro__ if not issubclass(base, Model))
    return _unpickle, (cls, *keras.Model.__reduce__(model)[1])


def _unpickle(cls: type, file: Any) -> Any:
    ours = class_of_ours(cls)
    with keras.saving.custom_object_scope({keras.saving.get_registered_name(cls): ours}):
        return ours._unpickle_model(file)
