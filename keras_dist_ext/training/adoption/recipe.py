"""Rebuild a layer, model, metric or optimizer from its config.

Functions and classes of the user's travel by reference, lambdas too: nothing is pickled, and nothing needs to be
registered.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.saving import (
    has_automatic_config,
    has_own_config,
    has_recorded_arguments,
    is_serializable_dict,
)
from keras_dist_ext.aliases import Config, TensorNest

__all__ = [
    "CannotRebuildError",
    "Rebuildable",
    "rebuild_from_config",
    "read_recipe",
    "refuse_lost_arguments",
    "by_reference",
    "first_init",
    "label",
]


Rebuildable: TypeAlias = "keras.Layer | keras.Metric | keras.optimizers.Optimizer"
"""What has a config to be made from."""


class CannotRebuildError(Exception):
    """Says what stands in the way, and how to mend it, in full sentences."""


def rebuild_from_config(thing: object, cls: type[Rebuildable], *, records_arguments: bool = False) -> Rebuildable:
    """Make a layer, model or metric again, as a `cls`, here and now.

    Args:
        thing: The old one.
        cls: The class of the new one.
        records_arguments: Whether it is a model of ours: `get_config` knows what these were made with.

    Raises:
        CannotRebuildError: It has no config, or not one that makes it again.
    """
    has_config = has_own_config(thing) or (records_arguments and has_recorded_arguments(thing))
    is_made_from_config = has_config or not isinstance(thing, keras.Model)
    clone = read_recipe(thing)(cls) if is_made_from_config else _from_nothing(thing, cls)
    _rename(clone, thing)
    return clone


def _rename(clone: keras.layers.Layer, thing: Rebuildable) -> None:
    """Give the layers in `clone` the names of those in `thing`: names that Keras makes up count on."""
    clone.name = thing.name  # many constructors take none
    if isinstance(thing, keras.Layer):
        for old, new in zip(flat_layers(thing), flat_layers(clone), strict=False):
            if type(old) is type(new) and not new.built:
                new.name = old.name


def read_recipe(thing: Rebuildable) -> Callable[[type[Rebuildable]], Rebuildable]:
    """Read the config of a thing, where its variables can be read, for a class to make it again elsewhere.

    Returns:
        What makes it, of the class that it is called with; it raises CannotRebuildError where the config does not.

    Raises:
        CannotRebuildError: It has no config.
    """
    shown, name = label(thing), type(thing).__name__
    with by_reference(thing) as objects:
        try:
            config: Config = _bare(keras.saving.serialize_keras_object(thing.get_config()))
        except Exception as error:
            raise CannotRebuildError(
                f"{shown} gives no config: {_first_sentence(error)} Give {name} a `get_config` that returns the "
                "arguments of its constructor."
            ) from error

    def make(cls: type[Rebuildable]) -> Rebuildable:
        with keras.saving.custom_object_scope(objects):
            try:
                clone = cls.from_config(dict(config))
            except Exception as error:
                raise CannotRebuildError(
                    f"{shown} cannot be made from its config: {_first_sentence(error)} Give {name} a `get_config` that "
                    "returns the arguments of its constructor, and a `from_config` that takes them."
                ) from error
        refuse_lost_arguments(thing, clone, config)
        return clone

    return make


def _bare(config: TensorNest) -> TensorNest:
    """The config without how layers in it were built and compiled: what calls them builds them, under their paths."""
    if isinstance(config, dict):
        dropped = ("build_config", "compile_config") if "class_name" in config else ()
        return {key: _bare(value) for key, value in config.items() if key not in dropped}
    return [_bare(value) for value in config] if isinstance(config, list) else config


def refuse_lost_arguments(thing: Rebuildable, clone: keras.layers.Layer, config: Config | None = None) -> None:
    """Notice a `get_config` that forgets an argument of the constructor, which then gets its default in silence.

    Raises:
        CannotRebuildError: Names the argument.
    """
    cls = type(thing)
    is_own = cls.from_config.__module__.partition(".")[0] != "keras"
    for name in _arguments(cls):
        before, after = (getattr(one, name, None) for one in (thing, clone))
        are_plain = all(isinstance(value, bool | int | float | str | None) for value in (before, after))
        if are_plain and before != after:
            raise CannotRebuildError(
                f"{label(thing)} was made with {name}={before!r}, and what its config makes has {name}={after!r}. "
                f"Have the `get_config` of {cls.__name__} return {name}."
            )
        is_left_out = config is not None and name not in config and not has_automatic_config(thing)
        if is_left_out and not is_own and not (are_plain and hasattr(thing, name)):
            raise CannotRebuildError(
                f"the config of {label(thing)} leaves out {name}, which its constructor takes. "
                f"Have the `get_config` of {cls.__name__} return {name}."
            )


def _arguments(cls: type[Rebuildable]) -> list[str]:
    """What the constructor of a user's class takes besides what every layer takes."""
    if first_init(cls).__module__.partition(".")[0] in ("keras", "keras_dist_ext"):
        return []
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    collects = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in parameters if p.kind not in collects and p.name not in ("name", "dtype", "trainable")]


def first_init(cls: type[Rebuildable]) -> type:
    """The class whose constructor makes instances of `cls`."""
    return next(base for base in cls.__mro__ if "__init__" in vars(base))


def _from_nothing(model: keras.Model, cls: type[keras.Model]) -> keras.Model:
    """Make a model again whose class has no `get_config`, if its constructor takes nothing that could be lost.

    Keras' own `get_config` gives the defaults of a model's constructor, whatever it was called with (Keras 3.15.1: the
    arguments do not get past `Model.__new__`).
    """
    lost = _arguments(type(model))
    if lost:
        raise CannotRebuildError(
            f"{type(model).__name__} has no `get_config`, so the arguments that it was made with are unknown: "
            f"{', '.join(lost)}. Give it a `get_config` that returns the arguments of its constructor."
        )
    try:
        return cls()
    except Exception as error:
        raise CannotRebuildError(f"`{type(model).__name__}()` fails: {_first_sentence(error)}") from error


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    for rest in (" Received config=", " Example: ", " Full object config: "):
        text = text.partition(rest)[0]
    return f"{type(error).__name__}: {text[:300]}{'' if text.endswith('.') else '.'}"


def label(thing: Rebuildable) -> str:
    """Name a thing and its class."""
    return f"'{thing.name}' ({type(thing).__name__})"


@contextlib.contextmanager
def by_reference(thing: Rebuildable) -> Iterator[dict[str, object]]:
    """Let the configs of `thing` and of what it holds name the user's functions and classes, rather than their code.

    Yields:
        The custom objects by those names. Keras serialises a lambda by its byte code, without its globals, and tells
        functions apart by name alone, so each function has a name of its own for as long as this lasts.

    Raises:
        CannotRebuildError: Two classes have one name.
    """
    objects: dict[str, object] = {}
    renamed: list[tuple[types.FunctionType, str]] = []
    try:
        for found in _users_own(thing):
            name = keras.saving.get_registered_name(found)
            if isinstance(found, types.FunctionType) and name == found.__name__:
                renamed.append((found, name))
                name = found.__name__ = f"kde_function_{len(renamed)}"
            if objects.setdefault(name, found) is not found:
                raise CannotRebuildError(
                    f"'{thing.name}' holds two classes of the name {name}, and Keras' configs tell classes apart by "
                    "name. Register one with `@keras.saving.register_keras_serializable(package=...)`."
                )
        yield objects
    finally:
        for function, name in renamed:
            function.__name__ = name


def _users_own(thing: Rebuildable) -> Iterator[type | types.FunctionType]:
    """Functions and classes from outside Keras that a layer, metric, optimizer, ... holds, each once."""
    seen: set[int] = set()
    pending = [thing]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, types.FunctionType):
            if not (item.__module__ or "").startswith("keras.") or item.__name__ == "<lambda>":
                yield item
        elif isinstance(item, list | tuple | set):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, type | keras.Variable | tf.Variable | tf.Tensor | np.ndarray):
            continue
        elif hasattr(item, "get_config") or is_serializable_dict(item):
            cls = type(item)
            if id(cls) not in seen and cls.__module__.partition(".")[0] not in ("keras", "keras_dist_ext"):
                seen.add(id(cls))
                yield cls
            pending.extend(v for k, v in getattr(item, "__dict__", {}).items() if k not in ("build", "quantize"))
