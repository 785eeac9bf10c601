"""Copy the values of callbacks' attributes, and represent the copies by JSON and arrays.

Values are frozen when they are read (copies, with arrays), packed for a file (arrays by name), and unpacked.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_dist_ext.aliases import Array

__all__ = [
    "FrozenValue",
    "Items",
    "Opaque",
    "PackedValue",
    "VariableValues",
    "check_packed",
    "freeze",
    "is_same",
    "pack",
    "thaw",
    "unpack",
]

PackedValue: TypeAlias = Any
"""What JSON can represent; arrays are replaced by their names."""

FrozenValue: TypeAlias = "_Scalar | tuple[Array, bool] | Items | Opaque | VariableValues"
"""A copy of a value; the bool says that an array is a NumPy scalar."""

_Scalar: TypeAlias = "bool | int | float | str | None"


class Opaque:
    """A value that cannot be saved."""

    def __init__(self, value: object, *, is_models: bool = False) -> None:
        self.value = value
        self.is_models = is_models  # saved with the model
        self.marks = _marks(value)


def _marks(value: object) -> dict[str, object]:
    """Return values that show that an object of a user's class has changed."""
    if type(value).__module__.partition(".")[0] in _NOT_TRACKED or isinstance(value, type | types.ModuleType):
        return {}
    held = getattr(value, "__dict__", {})
    return {name: mark for name, part in list(held.items()) if (mark := _mark(part)) is not None}


def _mark(value: object) -> object:
    if isinstance(value, bool | int | float | str):
        return value
    return len(value) if isinstance(value, list | tuple | set | dict | collections.deque) else None


_NOT_TRACKED = ("builtins", "keras", "keras_dist_ext", "tensorflow", "threading", "_thread", "functools", "logging")


class VariableValues:
    """The values of variables: one, or those of a metric or a seed generator."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = arrays


class Items:
    """The items of a container."""

    def __init__(self, value: object, items: list[FrozenValue]) -> None:
        self.kind = type(value).__name__
        self.length = getattr(value, "maxlen", None)
        self.items = sorted(items, key=repr) if isinstance(value, set | frozenset) else items


def freeze(value: object, required: str = "") -> FrozenValue:
    """Return a copy that later changes do not affect; an `Opaque` of what cannot be saved, unless it is required."""
    kind = type(value)
    if value is None or (isinstance(value, bool | int | float | str) and kind in (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray | np.generic | tf.Tensor):
        try:
            array = np.array(value.numpy() if isinstance(value, tf.Tensor) else value)
        except (AttributeError, ValueError, NotImplementedError):  # a symbolic tensor
            return _opaque(value, required)
        is_number = array.dtype.kind in "biufc" or array.dtype.name.startswith(("bfloat", "float"))
        return (array, isinstance(value, np.generic)) if is_number else _opaque(value, required)
    if isinstance(value, _GROUPS) and kind in _GROUPS:
        parts = [freeze(part, required) for part in value]
        return _opaque(value, required) if any(isinstance(p, Opaque) for p in parts) else Items(value, parts)
    if isinstance(value, dict):
        keys = [freeze(key, required) for key in value]
        parts = [freeze(part, required) for part in value.values()]
        if any(isinstance(part, Opaque) for part in (*keys, *parts)):
            return _opaque(value, required)
        return Items({}, [Items((), [k, v]) for k, v in zip(keys, parts, strict=True)])
    return _opaque(value, required)


_GROUPS = (list, tuple, set, frozenset, collections.deque)


def _opaque(value: object, required: str) -> Opaque:
    if required:
        raise TypeError(
            f"{required} has a {type(value).__name__}, which Resume cannot save. Return numbers, strings, lists, "
            "dicts and arrays."
        )
    return Opaque(value)


def is_same(one: FrozenValue, other: FrozenValue) -> bool:
    """Whether two copies are of equal values; of what cannot be saved, of one object that shows no change."""
    if isinstance(one, Opaque) or isinstance(other, Opaque):
        if not (isinstance(one, Opaque) and isinstance(other, Opaque)):
            return False
        return one.value is other.value and one.marks == other.marks
    if isinstance(one, VariableValues) and isinstance(other, VariableValues):
        pairs = zip(one.arrays, other.arrays, strict=False)
        return len(one.arrays) == len(other.arrays) and all(a.tobytes() == b.tobytes() for a, b in pairs)
    if isinstance(one, Items) and isinstance(other, Items):
        is_similar = one.kind == other.kind and len(one.items) == len(other.items)
        return is_similar and all(is_same(a, b) for a, b in zip(one.items, other.items, strict=True))
    if isinstance(one, tuple) and isinstance(other, tuple):
        (a, _), (b, _) = one, other
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def pack(frozen: FrozenValue, arrays: dict[str, Array]) -> PackedValue:
    """Return what JSON can represent of a copy, and put arrays into a dictionary."""
    if isinstance(frozen, VariableValues):
        return {"kind": "variables", "parts": [pack((array, False), arrays) for array in frozen.arrays]}
    if isinstance(frozen, Items):
        parts = [pack(part, arrays) for part in frozen.items]
        return parts if frozen.kind == "list" else {"kind": frozen.kind, "parts": parts, "length": frozen.length}
    if isinstance(frozen, tuple):
        name = f"callbacks/{len(arrays)}"
        arrays[name] = frozen[0]
        return {"kind": "scalar" if frozen[1] else "array", "name": name}
    return frozen


def thaw(frozen: FrozenValue) -> object:
    """Return a value that is equal to the one that was copied."""
    arrays: dict[str, Array] = {}
    return unpack(pack(frozen, arrays), arrays)


def unpack(packed: PackedValue, arrays: Mapping[str, Array]) -> Any:
    """Return the value that was packed."""
    if isinstance(packed, list):
        return [unpack(part, arrays) for part in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed["kind"]
    if kind in ("array", "scalar"):
        array = arrays[packed["name"]]
        return array[()] if kind == "scalar" else array.copy()
    parts = [unpack(part, arrays) for part in packed["parts"]]
    if kind == "variables":
        return VariableValues(parts)
    if kind == "deque":
        return collections.deque(parts, packed["length"])
    return _CONTAINERS[kind](parts)


_CONTAINERS: Mapping[str, Callable[[list[Any]], object]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}


def check_packed(packed: PackedValue, arrays: Mapping[str, Array]) -> None:
    """Check that `unpack` can make something of a value."""
    if isinstance(packed, list):
        for part in packed:
            check_packed(part, arrays)
    elif isinstance(packed, dict):
        kind = packed["kind"]
        if kind in ("array", "scalar"):
            if arrays[packed["name"]].ndim and kind == "scalar":
                raise ValueError(f"{packed['name']!r} is not a single number")
            return
        if kind not in _CONTAINERS and kind not in ("variables", "deque"):
            raise ValueError(f"{kind!r} is not a kind of value")
        for part in packed["parts"]:
            check_packed(part, arrays)
            is_array = isinstance(part, dict) and part["kind"] == "array"
            is_pair = isinstance(part, dict) and part["kind"] == "tuple" and len(part["parts"]) == 2
            if not {"variables": is_array, "dict": is_pair}.get(kind, True):
                raise ValueError(f"{part!r} is not a part of {kind}")
        if kind != "variables":
            unpack(packed, arrays)  # whether its keys or elements can be hashed, and its length is one
