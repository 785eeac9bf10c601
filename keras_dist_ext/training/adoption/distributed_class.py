"""The class of this package for a class of Keras' or of the user's."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.models import KerasFunctional
from keras_dist_ext._keras.saving import share_registered_name, unpickle_model

__all__ = ["OwnClasses", "distributed_class_for"]


class OwnClasses(NamedTuple):
    """Our classes of models. They are passed in, because the module that has them imports this one to unpickle."""

    model: type[keras.Model]
    functional: type[keras.Model]
    sequential: type[keras.Model]


def distributed_class_for(cls: type, own: OwnClasses) -> type[keras.Model]:
    """Return the class of this package for a class of Keras' or of the user's, derived from both."""
    if issubclass(cls, own.model):
        return cls
    if cls is keras.Sequential:
        return own.sequential
    if cls in (KerasFunctional, keras.Model):
        return own.functional
    ours = _derived(cls, own)
    share_registered_name(cls, ours)
    return ours


@functools.cache
def _derived(cls: type, own: OwnClasses) -> type[keras.Model]:
    """A class of the same name that derives from the user's class and from ours."""
    base = own.sequential if issubclass(cls, keras.Sequential) else own.model
    if issubclass(cls, KerasFunctional):
        base = own.functional

    def reduce(model: keras.Model) -> tuple[Callable[..., keras.Model], tuple[object, ...]]:
        """Pickle the user's class by name, and the model as Keras does: as the bytes of a `.keras` file."""
        return _unpickle, (cls, own, *keras.Model.__reduce__(model)[1])

    def body(namespace: dict[str, object]) -> None:
        namespace.update(
            __doc__=cls.__doc__, __module__=cls.__module__, __qualname__=cls.__qualname__, __reduce__=reduce
        )

    return types.new_class(cls.__name__, (cls, base), exec_body=body)


def _unpickle(cls: type[keras.Model], own: OwnClasses, file: BinaryIO) -> keras.Model:
    ours = distributed_class_for(cls, own)
    with keras.saving.custom_object_scope({keras.saving.get_registered_name(cls): ours}):
        return unpickle_model(ours, file)
