"""Save what callbacks have counted and kept, and give it back: attributes that JSON and arrays can hold.

What a callback is *told* (its constructor's arguments, what it opens when training begins) comes from the script at
every run; what it has *learned* since training began is its state. So an attribute belongs to the state if it has
changed since training began: another value, or a variable, or a metric of Keras, that holds another one. Nothing is
pickled.
"""

from __future__ import annotations

import collections
import types
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import components, is_sync_on_read

__all__ = ["CallbackStates", "Packed"]

Packed = dict[str, Any]  # attribute -> what JSON can hold; arrays are left aside and named

_SET_BY_KERAS = {"params", "_model", "model"}
_DATA_BYTES = 1 << 20  # a larger array that nothing has changed is taken for data that the callback looks at
_LOOKED_AT_BYTES = 1 << 24  # of such an array, by rows, to see whether it has changed


class CallbackStates:
    """The states of a run's callbacks.

    A callback is known by its class and by how many of that class come before it, so that others may come and go. One
    that has methods ``get_state()`` and ``set_state(state)`` says itself what its state is: what JSON can hold, and
    arrays.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, Any] = {}
        self._at_begin: dict[str, dict[str, Any]] = {}
        self._as_given: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._warned: set[str] = set()

    def take_over(self, callbacks: Sequence[Any], *, restore: bool) -> None:
        """Take note of what callbacks hold before they know that training begins.

        Args:
            callbacks: of the run that begins.
            restore: whether the run goes on from a save. Those that this process has used before, until they were
                broken off, are then put back to where they were when they came.
        """
        for callback in callbacks:
            known, attributes = self._as_given.get(id(callback), (None, {}))
            if known is not callback:
                attributes = {n: v for n, v in _frozen(callback).items() if not isinstance(v, _Opaque)}
                self._as_given[id(callback)] = callback, attributes
            elif restore:
                for name, value in attributes.items():
                    _set(callback, name, _thaw(value))

    def begin(self, callbacks: Sequence[Any]) -> None:
        """Take note of what callbacks hold, now that all know that training begins."""
        self._callbacks = dict(_named(callbacks))
        self._at_begin = {name: _frozen(callback) for name, callback in self._callbacks.items()}

    def pack(self) -> tuple[dict[str, Packed], dict[str, np.ndarray[Any, Any]]]:
        """Return what has changed since, by callback: what JSON can hold, and arrays."""
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        states: dict[str, Packed] = {}
        for name, callback in self._callbacks.items():
            if _speaks_for_itself(callback):
                states[name] = {"state": _pack(_freeze(callback.get_state(), f"{name}.get_state()"), arrays)}
                continue
            before = self._at_begin[name]
            now = _frozen(callback, before)
            changed = {a: value for a, value in now.items() if a not in before or not _same(before[a], value)}
            self._warn_of_what_is_lost(name, callback, changed)
            kept = {a: _pack(v, arrays) for a, v in changed.items() if not isinstance(v, _Opaque)}
            if kept:
                states[name] = kept
        return states, arrays

    def unpack(self, states: Mapping[str, Packed], arrays: Mapping[str, Any]) -> None:
        """Give callbacks their states; those that were not saved, or are no longer there, go without."""
        for name, packed in states.items():
            callback = self._callbacks.get(name)
            if callback is None:
                continue
            if _speaks_for_itself(callback):
                if "state" in packed:
                    callback.set_state(_unpack(packed["state"], arrays))
                continue
            for attribute, value in packed.items():
                _set(callback, attribute, _unpack(value, arrays))

    def _warn_of_what_is_lost(self, name: str, callback: Any, changed: Mapping[str, Any]) -> None:
        if type(callback).__module__.partition(".")[0] in ("keras", "keras_dist_ext") or name in self._warned:
            return
        lost = {a: type(v.value).__name__ for a, v in changed.items() if isinstance(v, _Opaque) and not v.is_models}
        if lost:
            self._warned.add(name)
            warnings.warn(
                f"Resume cannot save what the callback {type(callback).__name__} keeps in "
                f"{', '.join(f'{a} ({kind})' for a, kind in lost.items())}: a resumed run begins without. Keep it in "
                "numbers, strings, lists, dicts or arrays, or give the callback methods get_state() and "
                "set_state(state).",
                stacklevel=2,
            )


def _speaks_for_itself(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    counts: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            continue
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        yield f"{kind}[{counts[kind]}]", callback
        counts[kind] += 1


def _set(callback: Any, name: str, value: Any) -> None:
    held = vars(callback).get(name)
    if isinstance(value, _Held):
        _assign(callback, name, _variables_of(held) or [], value)
    elif isinstance(held, dict) and isinstance(value, dict):
        held.clear()  # a Counter stays one, and who else holds it sees it too
        held.update(value)
    elif type(held) in (list, set, collections.deque) and type(value) is type(held):
        held.clear()
        held.extend(value) if hasattr(held, "extend") else held.update(value)
    else:
        setattr(callback, name, value)


def _assign(callback: Any, name: str, variables: Sequence[Any], value: _Held) -> None:
    shapes = [tuple(components(variable)[0].shape) for variable in variables]
    if shapes != [array.shape for array in value.arrays]:
        warnings.warn(
            f"Resume has saved what the variables in {name} of the callback {type(callback).__name__} held, of shapes "
            f"{', '.join(str(array.shape) for array in value.arrays)}, and they are not there when training begins. "
            "Make them in its constructor.",
            stacklevel=2,
        )
        return
    for variable, array in zip(variables, value.arrays, strict=True):
        for copy in components(variable):
            copy.assign(array)


# Values are frozen when they are looked at (copies, with arrays), packed for a file (arrays by name), and unpacked.


class _Opaque:
    """What cannot be saved."""

    def __init__(self, value: Any, *, is_models: bool = False) -> None:
        self.value = value
        self.is_models = is_models  # and saved with the model
        self.marks = _marks(value)


def _marks(value: Any) -> dict[str, Any]:
    """What tells, of an object of a class that somebody has written, that it has changed."""
    if type(value).__module__.partition(".")[0] in _NOT_WATCHED or isinstance(value, type | types.ModuleType):
        return {}
    held = getattr(value, "__dict__", {})
    return {name: mark for name, part in list(held.items()) if (mark := _mark(part)) is not None}


def _mark(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    return len(value) if isinstance(value, list | tuple | set | dict | collections.deque) else None


_NOT_WATCHED = ("builtins", "keras", "keras_dist_ext", "tensorflow", "threading", "_thread", "functools", "logging")


class _Held:
    """What variables hold: one, or those of a metric or a seed generator."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = arrays


def _variables_of(value: Any) -> list[Any] | None:
    """Return the variables that make up a value, if they can be read and assigned without asking other workers."""
    if isinstance(value, tf.Variable | keras.Variable):
        variables = [value]
    elif isinstance(value, keras.metrics.Metric):
        variables = list(value.variables)
    elif isinstance(value, keras.random.SeedGenerator):
        variables = [value.state]
    else:
        return None
    is_plain = all(_is_number(components(v)[0].dtype) and not is_sync_on_read(v) for v in variables)
    return variables if is_plain else None


def _is_number(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex)


def _frozen(callback: Any, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Copy what a callback holds, but for large arrays that were there before."""
    # Keras negates min_delta when it chooses monitor_op, in the first epoch (callbacks/monitor_callback.py)
    left_out = {*_SET_BY_KERAS, *(["min_delta"] if hasattr(callback, "monitor_op") else [])}
    frozen: dict[str, Any] = {}
    for name, value in list(vars(callback).items()):
        if name in left_out:
            continue
        variables = _variables_of(value)
        if variables is not None:
            is_models = {id(v) for v in variables} <= _variables_of_model(callback)
            arrays = [np.array(components(variable)[0].numpy()) for variable in variables]
            frozen[name] = _Opaque(value, is_models=True) if is_models and arrays else _Held(arrays)
            continue
        if isinstance(value, np.ndarray) and value.nbytes > _DATA_BYTES:
            held, watched = (before or {}).get(name), _Opaque(value)
            watched.marks = {"checksum": zlib.crc32(value[:: max(1, value.nbytes // _LOOKED_AT_BYTES)].tobytes())}
            if before is None or _same(held, watched):
                frozen[name] = watched
                continue
        frozen[name] = _freeze(value)
    return frozen


def _variables_of_model(callback: Any) -> set[int]:
    """The variables that are saved with the model, in both of their guises."""
    model = getattr(callback, "model", None)
    known = [*getattr(model, "variables", ()), *getattr(getattr(model, "optimizer", None), "variables", ())]
    return {id(variable) for variable in known} | {id(getattr(variable, "value", None)) for variable in known}


def _freeze(value: Any, required: str = "") -> Any:
    """Return a copy that later changes leave alone; an opaque one of what cannot be saved, unless that is required."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic | tf.Tensor):
        try:
            array = np.array(value.numpy() if isinstance(value, tf.Tensor) else value)
        except (AttributeError, ValueError, NotImplementedError):  # a symbolic tensor
            return _opaque(value, required)
        is_number = array.dtype.kind in "biufc" or array.dtype.name.startswith(("bfloat", "float"))
        return (array, isinstance(value, np.generic)) if is_number else _opaque(value, required)
    if kind in (list, tuple, set, frozenset, collections.deque):
        parts = [_freeze(part, required) for part in value]
        return _opaque(value, required) if any(isinstance(p, _Opaque) for p in parts) else _Several(value, parts)
    if isinstance(value, dict):
        keys = [_freeze(key, required) for key in value]
        parts = [_freeze(part, required) for part in value.values()]
        if any(isinstance(part, _Opaque) for part in (*keys, *parts)):
            return _opaque(value, required)
        return _Several({}, [_Several((), [k, v]) for k, v in zip(keys, parts, strict=True)])
    return _opaque(value, required)


def _opaque(value: Any, required: str) -> _Opaque:
    if required:
        raise TypeError(
            f"{required} holds a {type(value).__name__}, which Resume cannot save. Return numbers, strings, lists, "
            "dicts and arrays."
        )
    return _Opaque(value)


class _Several:
    """The parts of a container."""

    def __init__(self, value: Any, parts: list[Any]) -> None:
        self.kind = type(value).__name__
        self.length = getattr(value, "maxlen", None)
        self.parts = sorted(parts, key=repr) if isinstance(value, set | frozenset) else parts


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _Opaque) or isinstance(other, _Opaque):
        is_same = isinstance(one, _Opaque) and isinstance(other, _Opaque) and one.value is other.value
        return is_same and one.marks == other.marks
    if isinstance(one, _Held) and isinstance(other, _Held):
        pairs = zip(one.arrays, other.arrays, strict=False)
        return len(one.arrays) == len(other.arrays) and all(a.tobytes() == b.tobytes() for a, b in pairs)
    if isinstance(one, _Several) and isinstance(other, _Several):
        is_alike = one.kind == other.kind and len(one.parts) == len(other.parts)
        return is_alike and all(_same(a, b) for a, b in zip(one.parts, other.parts, strict=True))
    if isinstance(one, tuple) and isinstance(other, tuple):
        (a, _), (b, _) = one, other
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _pack(frozen: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(frozen, _Held):
        return {"kind": "variables", "parts": [_pack((array, False), arrays) for array in frozen.arrays]}
    if isinstance(frozen, _Several):
        parts = [_pack(part, arrays) for part in frozen.parts]
        return parts if frozen.kind == "list" else {"kind": frozen.kind, "parts": parts, "length": frozen.length}
    if isinstance(frozen, tuple):
        name = f"callbacks/{len(arrays)}"
        arrays[name] = frozen[0]
        return {"kind": "scalar" if frozen[1] else "array", "name": name}
    return frozen


def _thaw(frozen: Any) -> Any:
    arrays: dict[str, Any] = {}
    return _unpack(_pack(frozen, arrays), arrays)


def _unpack(packed: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(packed, list):
        return [_unpack(part, arrays) for part in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed["kind"]
    if kind in ("array", "scalar"):
        array = arrays[packed["name"]]
        return array[()] if kind == "scalar" else array.copy()
    parts = [_unpack(part, arrays) for part in packed["parts"]]
    if kind == "variables":
        return _Held(parts)
    if kind == "deque":
        return collections.deque(parts, packed["length"])
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}[kind](parts)
