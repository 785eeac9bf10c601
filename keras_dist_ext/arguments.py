"""Check arguments where they come in: each check returns what was given, or raises an error that names the argument.

    num_steps = integer("num_steps", num_steps, least=1, error=MonitorError)

Only public functions and constructors check; what is behind them trusts its caller. Numbers may be NumPy's, and
integers may be scalar tensors and variables; what comes back is Python's own.
"""

from __future__ import annotations

import contextlib
import numbers
import operator
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex, TypeVar

from keras_dist_ext.messages import close_name

__all__ = [
    "LONGEST_SECONDS",
    "MOST",
    "MOST_EXAMPLES",
    "MOST_PROCESSES",
    "flag",
    "function",
    "instance",
    "instances",
    "integer",
    "mapping",
    "number",
    "one_of",
    "optional",
    "path",
    "refuse",
    "seconds",
    "shown",
    "text",
    "texts",
]

MOST = 2**63 - 1  # of an integer: what TensorFlow, NumPy and ranges can hold
MOST_PROCESSES = 65535  # of a machine: each has a port of its own
MOST_EXAMPLES = 2**31 - 1  # of a batch: they are counted in int32 on devices
LONGEST_SECONDS = 1e9  # 31 years; what waits for longer overflows

_T = TypeVar("_T")
_Error = type[Exception]


def shown(value: object) -> str:
    """Write a value into a message, shortened."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlong = 40


def refuse(name: str, value: object, wanted: str, error: _Error) -> NoReturn:
    """Raise an error that says what an argument must be, and what was given.

    Args:
        name: of the argument.
        value: that was given.
        wanted: such as "an integer >= 1".
        error: which to raise.
    """
    raise error(f"{name} must be {wanted}, got {shown(value)}.")


def optional(check: Callable[..., _T], name: str, value: object, **options: object) -> _T | None:
    """Return None for None, else what another check returns.

    Args:
        check: the other one, of this module.
        name: of the argument.
        value: that was given.
        options: of the other check.
    """
    return None if value is None else check(name, value, or_none=", or None", **options)


def integer(
    name: str,
    value: object,
    *,
    least: int,
    most: int = MOST,
    wanted: str = "an integer",
    or_none: str = "",
    error: _Error,
) -> int:
    """Return an integer within bounds.

    Args:
        name: of the argument.
        value: that was given.
        least: it may be.
        most: it may be.
        wanted: what it counts, such as "a number of steps".
        or_none: what else it may be.
        error: to raise otherwise.
    """
    given = _integer(value)
    if given is None or not least <= given <= most:
        bounds = f"from {least} to {most}" if given is not None and given > most else f">= {least}"
        refuse(name, value, f"{wanted} {bounds}{or_none}", error)
    return given


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    with contextlib.suppress(Exception):  # TensorFlow has errors of its own for tensors without a value
        if isinstance(value, SupportsIndex):
            return operator.index(value)
    if getattr(value, "shape", None) != () or not hasattr(value, "__array__"):
        return None
    try:
        return operator.index(value.__array__())  # of a variable of Keras'
    except Exception:
        return None


def number(
    name: str,
    value: object,
    *,
    least: float = -float("inf"),
    above: float = -float("inf"),
    most: float = float("inf"),
    wanted: str = "a number",
    or_none: str = "",
    error: _Error,
) -> float:
    """Return a finite number within bounds.

    Args:
        name: of the argument.
        value: that was given.
        least: it may be.
        above: it must be more than this.
        most: it may be.
        wanted: what it is, such as "a number of seconds".
        or_none: what else it may be.
        error: to raise otherwise.
    """
    given = _number(value)
    if given is None or not (least <= given <= most and given > above) or given - given != 0.0:
        bounds = [f">= {least:g}"] if least > -float("inf") else [f"> {above:g}"] if above > -float("inf") else []
        if most < LONGEST_SECONDS or (given is not None and given > most):
            bounds.append(f"<= {most:g}")
        bounds = bounds or ["that is finite"]
        refuse(name, value, f"{wanted} {' and '.join(bounds)}{or_none}", error)
    return given


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:  # of an integer or a fraction; the message names the limit then, as for an infinite number
        return -float("inf") if value < 0 else float("inf")


def seconds(name: str, value: object, *, or_none: str = "", error: _Error) -> float:
    """Return a number of seconds above 0; see ``number``.

    Args:
        name: of the argument.
        value: that was given.
        or_none: what else it may be.
        error: to raise otherwise.
    """
    wanted = "a number of seconds"
    return number(name, value, above=0.0, most=LONGEST_SECONDS, wanted=wanted, or_none=or_none, error=error)


def flag(name: str, value: object, *, or_none: str = "", error: _Error) -> bool:
    """Return True or False.

    Args:
        name: of the argument.
        value: that was given.
        or_none: what else it may be.
        error: to raise otherwise.
    """
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):  # NumPy's
        refuse(name, value, f"True or False{or_none}", error)
    return bool(value)


def text(name: str, value: object, *, wanted: str = "a string", or_none: str = "", error: _Error) -> str:
    """Return a string that is not empty.

    Args:
        name: of the argument.
        value: that was given.
        wanted: what it is, such as "the name of a metric".
        or_none: what else it may be.
        error: to raise otherwise.
    """
    if not isinstance(value, str) or not value:
        refuse(name, value, f"{wanted}{or_none}", error)
    return value


def texts(name: str, value: object, *, wanted: str, or_none: str = "", error: _Error) -> list[str]:
    """Return strings in a list, a tuple or a set.

    Args:
        name: of the argument.
        value: that was given.
        wanted: what they are, such as "codes of findings".
        or_none: what else it may be.
        error: to raise otherwise.
    """
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(one, str) and one for one in value):
        refuse(name, value, f"a list of {wanted}{or_none}", error)
    return list(value)


def one_of(name: str, value: object, choices: Sequence[str], *, or_none: str = "", error: _Error) -> str:
    """Return one of some strings.

    Args:
        name: of the argument.
        value: that was given.
        choices: what it may be.
        or_none: what else it may be.
        error: to raise otherwise.
    """
    if not isinstance(value, str) or value not in choices:
        listed = " or ".join([*([", ".join(map(repr, choices[:-1]))] if choices[:-1] else []), repr(choices[-1])])
        hint = close_name(value, choices) if isinstance(value, str) else ""
        raise error(f"{name} must be {listed}{or_none}, got {shown(value)}{hint or '.'}")
    return value


def function(name: str, value: object, *, wanted: str = "a function", or_none: str = "", error: _Error) -> Any:
    """Return a function, or anything else that can be called.

    Args:
        name: of the argument.
        value: that was given.
        wanted: what it is, such as "a function of the model".
        or_none: what else it may be.
        error: to raise otherwise.
    """
    if not callable(value):
        refuse(name, value, f"{wanted}{or_none}", error)
    return value


def path(name: str, value: object, *, wanted: str = "a path", or_none: str = "", error: _Error) -> str:
    """Return a path as a string.

    Args:
        name: of the argument.
        value: that was given.
        wanted: what it is, such as "the path of a file".
        or_none: what else it may be.
        error: to raise otherwise.
    """
    given = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(given, str) or not given or "\0" in given:
        refuse(name, value, f"{wanted}{or_none}", error)
    return given


def mapping(name: str, value: object, *, wanted: str, or_none: str = "", error: _Error) -> Mapping[Any, Any]:
    """Return a dict.

    Args:
        name: of the argument.
        value: that was given.
        wanted: what it holds, such as "a dict of functions by name".
        or_none: what else it may be.
        error: to raise otherwise.
    """
    if not isinstance(value, Mapping):
        refuse(name, value, f"{wanted}{or_none}", error)
    return value


def instance(name: str, value: object, kind: type[_T], *, wanted: str, or_none: str = "", error: _Error) -> _T:
    """Return an object of a class.

    Args:
        name: of the argument.
        value: that was given.
        kind: the class.
        wanted: what it is, such as "a Coupled".
        or_none: what else it may be.
        error: to raise otherwise.
    """
    if not isinstance(value, kind):
        refuse(name, value, f"{wanted}{or_none}", error)
    return value


def instances(name: str, value: object, kind: type[_T], *, wanted: str, error: _Error) -> list[_T]:
    """Return a list of objects of a class.

    Args:
        name: of the argument.
        value: that was given, a list or a tuple.
        kind: the class.
        wanted: what they are, such as "Writers".
        error: to raise otherwise.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(one, kind) for one in value):
        refuse(name, value, f"a list of {wanted}", error)
    return list(value)
