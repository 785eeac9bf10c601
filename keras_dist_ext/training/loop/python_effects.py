"""Find out what a user's function does in Python: which names it uses, and what it changes while it is traced."""

from __future__ import annotations

import contextlib
import functools
import io
import random
import types
from collections import deque
from collections.abc import Iterator

import numpy as np

from keras_dist_ext.aliases import UserFunction
from keras_dist_ext.errors import LoopError

__all__ = ["check_names", "effects_of", "names_used"]

_FOREIGN = ("tensorflow", "keras", "numpy", "keras_dist_ext", "builtins")


def names_used(function: UserFunction) -> set[str]:
    """Return the global names and attributes in a function's code, and in user functions that it refers to."""
    return {name for part in _functions(function) for code in _codes(part.__code__) for name in code.co_names}


def _functions(function: UserFunction) -> list[types.FunctionType]:
    """A function, and those of the user's that it refers to by a global name or from an enclosing function."""
    found: dict[int, types.FunctionType] = {}
    pending: list[object] = [function]
    while pending:
        part = pending.pop()
        if isinstance(part, functools.partial):
            pending.append(part.func)
            continue
        part = getattr(part, "python_function", part)  # of a tf.function
        part = getattr(part, "__func__", part)
        if not isinstance(part, types.FunctionType):
            part = vars(type(part)).get("__call__") if not _is_foreign(part) else None
        if not isinstance(part, types.FunctionType) or id(part) in found or _is_foreign(part):
            continue
        found[id(part)] = part
        pending += [value for _, value in _references(part) if callable(value) and not isinstance(value, type)]
    return list(found.values())


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_foreign(value: object) -> bool:
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0] in _FOREIGN and not str(module).startswith("keras_dist_ext.examples")


def _references(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What a function refers to outside of itself, by name: perhaps also globals called as attributes that it uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    for code in _codes(function.__code__):
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]


_SCALING = {
    "compute_average_loss": "it divides by the rows of all replicas",
    "scale_regularization_loss": "it divides by the number of replicas",
}


def check_names(name: str, function: UserFunction) -> None:
    """Refuse a step that scales by the number of replicas, or by the rows of all of them.

    Raises:
        LoopError: it does.
    """
    used = names_used(function)
    for scaling, what in _SCALING.items():
        if scaling in used:
            raise LoopError(
                f"The step {name!r} uses {scaling}: {what}, and the loop weights each replica by its rows already, so "
                "gradients would be scaled a second time. Write the loss as for one device: "
                "replica.mean_loss(per_example), a loss of Keras, or a mean over the rows at hand."
            )


@contextlib.contextmanager
def effects_of(function: UserFunction) -> Iterator[list[str]]:
    """Fill a list with what a function has changed while this was entered: names, and generators of random numbers.

    Compared are numbers, strings and containers that the function refers to, and those that are attributes of objects
    that it refers to.
    """
    changed: list[str] = []
    before = _state(function)
    yield changed
    after = _state(function)
    changed += [name for name in after if name in before and after[name] != before[name]]


def _state(function: UserFunction) -> dict[str, object]:
    owner = getattr(function, "__self__", None)
    pairs = [("self", owner)] if owner is not None else []
    for part in _functions(function):
        pairs += list(_references(part))
    state: dict[str, object] = {
        "the random numbers of NumPy": repr(np.random.get_state(legacy=False)),  # it may be no Mersenne Twister
        "the random numbers of Python": random.getstate(),
    }
    for name, value in pairs:
        if _is_plain(value):
            state[repr(name)] = _summary(value)
        elif hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type) and not _is_tool(value):
            state.update({f"'{name}.{key}'": _summary(v) for key, v in vars(value).items() if _is_plain(v)})
    return state


def _is_tool(value: object) -> bool:
    """Whether an object or its class is not the user's: a tf.function says that it is what it wraps."""
    return _is_foreign(value) or _is_foreign(type(value))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (int, float, str, bytes, list, dict, set, deque, *_STREAMS))


_STREAMS = (random.Random, np.random.Generator, np.random.RandomState, io.IOBase)


def _summary(value: object) -> object:
    if isinstance(value, list | dict | set | deque):
        return id(value), len(value), [id(part) for part in (value.values() if isinstance(value, dict) else value)]
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, io.IOBase):
        return value.tell() if not value.closed and value.seekable() else None
    return value
