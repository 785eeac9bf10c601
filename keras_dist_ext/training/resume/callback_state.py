"""Save the state of callbacks, and restore it: attributes that JSON and arrays can represent.

The configuration of a callback (its constructor's arguments, what it opens when training begins) comes from the script
at every run; what changes after training began is its state. So an attribute belongs to the state if it has changed
since then: another value, or a variable or a Keras metric with another value. Nothing is pickled.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import Variable, components, is_sync_on_read
from keras_dist_ext.aliases import Array
from keras_dist_ext.messages import warn
from keras_dist_ext.training.resume.frozen_values import (
    FrozenValue,
    Opaque,
    PackedValue,
    VariableValues,
    check_packed,
    freeze,
    is_same,
    pack,
    thaw,
    unpack,
)

__all__ = ["CallbackStates", "Packed"]

Packed: TypeAlias = dict[str, PackedValue]  # by attribute

_SET_BY_KERAS = {"params", "_model", "model"}
_DATA_BYTES = 1 << 20  # a larger array that has not changed counts as data that the callback reads
_SAMPLED_BYTES = 1 << 24  # of such an array, in rows, for the checksum that detects changes


class CallbackStates:
    """The states of a run's callbacks.

    A callback is identified by its class and the number of callbacks of that class before it, so that others may be
    added or removed. One with methods ``get_state()`` and ``set_state(state)`` defines its state itself: values that
    JSON can represent, and arrays.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, keras.callbacks.Callback] = {}
        self._at_begin: dict[str, dict[str, FrozenValue]] = {}
        self._initial: dict[int, tuple[keras.callbacks.Callback, dict[str, FrozenValue]]] = {}
        self._warned: set[str] = set()

    def prepare(self, callbacks: Sequence[keras.callbacks.Callback], *, reset: bool) -> None:
        """Record the callbacks, and their state before `on_train_begin`.

        Args:
            callbacks: of the run that begins.
            reset: whether the run resumes from a checkpoint. Callbacks of an earlier run in this process, which was
                interrupted, then get the state that they had before it.
        """
        self._callbacks = dict(_named(callbacks))
        for callback in callbacks:
            known, attributes = self._initial.get(id(callback), (None, {}))
            if known is not callback:
                attributes = {n: v for n, v in _frozen(callback).items() if not isinstance(v, Opaque)}
                self._initial[id(callback)] = callback, attributes
            elif reset:
                for name, value in attributes.items():
                    _set(callback, name, thaw(value))

    def begin(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Record the state of callbacks after `on_train_begin`."""
        self._callbacks = dict(_named(callbacks))
        self._at_begin = {name: _frozen(callback) for name, callback in self._callbacks.items()}

    def pack(self) -> tuple[dict[str, Packed], dict[str, Array]]:
        """Return what has changed since `begin`, by callback: values that JSON can represent, and arrays."""
        arrays: dict[str, Array] = {}
        states: dict[str, Packed] = {}
        for name, callback in self._callbacks.items():
            if _has_own_state(callback):
                states[name] = {"state": pack(freeze(callback.get_state(), f"{name}.get_state()"), arrays)}
                continue
            before = self._at_begin[name]
            now = _frozen(callback, before)
            changed = {a: value for a, value in now.items() if a not in before or not is_same(before[a], value)}
            self._warn_of_lost_state(name, callback, changed)
            kept = {a: pack(v, arrays) for a, v in changed.items() if not isinstance(v, Opaque)}
            if kept:
                states[name] = kept
        return states, arrays

    def check(self, states: Mapping[str, Packed], arrays: Mapping[str, Array]) -> None:
        """Check that states that were read are what `pack` returns, of callbacks such as these.

        Raises:
            ValueError: they are not.
        """
        for name, packed in states.items():
            callback = self._callbacks.get(name)
            for attribute, value in packed.items():
                if not attribute.isidentifier() or attribute.startswith("__"):
                    raise ValueError(f"the callback {name} has the attribute {attribute!r}")
                check_packed(value, arrays)
                if callback is not None and not _has_own_state(callback):
                    _check_kind(callback, attribute, value)

    def unpack(self, states: Mapping[str, Packed], arrays: Mapping[str, Array]) -> None:
        """Restore the states of callbacks that were saved and still exist."""
        for name, packed in states.items():
            callback = self._callbacks.get(name)
            if callback is None:
                continue
            if _has_own_state(callback):
                if "state" in packed:
                    callback.set_state(unpack(packed["state"], arrays))
                continue
            for attribute, value in packed.items():
                _set(callback, attribute, unpack(value, arrays))

    def _warn_of_lost_state(
        self, name: str, callback: keras.callbacks.Callback, changed: Mapping[str, FrozenValue]
    ) -> None:
        if type(callback).__module__.partition(".")[0] in ("keras", "keras_dist_ext") or name in self._warned:
            return
        lost = {a: type(v.value).__name__ for a, v in changed.items() if isinstance(v, Opaque) and not v.is_models}
        if lost:
            self._warned.add(name)
            warn(
                f"Resume cannot save these attributes of the callback {type(callback).__name__}: "
                f"{', '.join(f'{a} ({kind})' for a, kind in lost.items())}. A resumed run starts without them. Use "
                "numbers, strings, lists, dicts or arrays, or give the callback methods get_state() and "
                "set_state(state)."
            )


def _check_kind(callback: keras.callbacks.Callback, attribute: str, packed: PackedValue) -> None:
    """Check that a container or a number of Keras' own callbacks is replaced by one."""
    is_history = isinstance(callback, keras.callbacks.History) and attribute == "epoch"
    held = [] if is_history else vars(callback).get(attribute)  # which it makes when training begins
    is_known = type(callback).__module__.partition(".")[0] in ("keras", "keras_dist_ext")
    kinds = [(list, list), (dict, dict), (bool, bool), ((int, float), (int, float))]
    value = packed
    if isinstance(packed, dict):
        value = {"dict": {}, "scalar": 0}.get(packed["kind"], packed["kind"])
    for kind, allowed in kinds:
        if is_known and isinstance(held, kind):  # type: ignore[arg-type]
            if not isinstance(value, allowed):  # type: ignore[arg-type]
                raise ValueError(f"{attribute} of the callback {type(callback).__name__} is {str(packed)[:50]}")
            return


def _has_own_state(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _named(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    counts: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            continue
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        yield f"{kind}[{counts[kind]}]", callback
        counts[kind] += 1


def _set(callback: keras.callbacks.Callback, name: str, value: object) -> None:
    held = vars(callback).get(name)
    is_alike = type(held) in (list, set, collections.deque) and type(value) is type(held)
    if isinstance(value, VariableValues):
        _assign(callback, name, _variables_of(held) or [], value)
    elif isinstance(held, dict) and isinstance(value, dict):
        held.clear()  # in place: a Counter stays one, and other references see it
        held.update(value)
    elif is_alike:
        held.clear()
        held.extend(value) if hasattr(held, "extend") else held.update(value)
    else:
        setattr(callback, name, value)


def _assign(
    callback: keras.callbacks.Callback, name: str, variables: Sequence[Variable], value: VariableValues
) -> None:
    shapes = [tuple(components(variable)[0].shape) for variable in variables]
    if shapes != [array.shape for array in value.arrays]:
        warn(
            f"Resume has saved the variables in {name} of the callback {type(callback).__name__}, of shapes "
            f"{', '.join(str(array.shape) for array in value.arrays)}, and they do not exist when training begins. "
            "Create them in its constructor."
        )
        return
    for variable, array in zip(variables, value.arrays, strict=True):
        for copy in components(variable):
            copy.assign(array)


def _variables_of(value: object) -> list[Variable] | None:
    """Return the variables of a value, if they can be read and assigned without a collective; else None."""
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


def _frozen(
    callback: keras.callbacks.Callback, before: Mapping[str, FrozenValue] | None = None
) -> dict[str, FrozenValue]:
    """Return copies of a callback's attributes, except large arrays that have not changed."""
    # Keras negates min_delta when it chooses monitor_op, in the first epoch (callbacks/monitor_callback.py)
    left_out = {*_SET_BY_KERAS, *(["min_delta"] if hasattr(callback, "monitor_op") else [])}
    frozen: dict[str, FrozenValue] = {}
    for name, value in list(vars(callback).items()):
        if name in left_out:
            continue
        variables = _variables_of(value)
        if variables is not None:
            is_models = {id(v) for v in variables} <= _variables_of_model(callback)
            arrays = [np.array(components(variable)[0].numpy()) for variable in variables]
            frozen[name] = Opaque(value, is_models=True) if is_models and arrays else VariableValues(arrays)
            continue
        if isinstance(value, np.ndarray) and value.nbytes > _DATA_BYTES:
            held, opaque = (before or {}).get(name), Opaque(value)
            opaque.marks = {"checksum": zlib.crc32(value[:: max(1, value.nbytes // _SAMPLED_BYTES)].tobytes())}
            if before is None or is_same(held, opaque):
                frozen[name] = opaque
                continue
        frozen[name] = freeze(value)
    return frozen


def _variables_of_model(callback: keras.callbacks.Callback) -> set[int]:
    """The ids of the variables that are saved with the model, as Keras' and as TensorFlow's."""
    model = getattr(callback, "model", None)
    known = [*getattr(model, "variables", ()), *getattr(getattr(model, "optimizer", None), "variables", ())]
    return {id(variable) for variable in known} | {id(getattr(variable, "value", None)) for variable in known}
