"""Check what a loop is told: functions, parts and reductions, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from keras_dist_ext.errors import LoopError
from keras_dist_ext.messages import close_name
from keras_dist_ext.training.loop.step_metrics import REDUCTIONS

__all__ = ["check_named", "check_reductions", "checked_functions", "parts_by_name"]


def checked_functions(*functions: Any) -> list[Any]:
    """Return functions as Python's: the loop compiles what a tf.function would have.

    Raises:
        LoopError: one is none.
    """
    for function in functions:
        if function is not None and not callable(function):
            raise LoopError(
                f"A step is a function of (replica, batch), and `predict` one of (batch); given is {function!r}."
            )
    return [getattr(function, "python_function", function) for function in functions]


def check_named(argument: str, given: Any) -> None:
    """Refuse what is no dict by name.

    Raises:
        LoopError: it is none.
    """
    if not isinstance(given, Mapping):
        example = 'reduce={"loss": "mean"}' if argument == "reduce" else 'parts={"net": net}'
        raise LoopError(f"{argument} is {type(given).__name__}; it is a dict by name, such as {example}; or {{}}.")


def check_reductions(reduce: Mapping[str, Any]) -> None:
    """Refuse reductions that there are not.

    Raises:
        LoopError: one is unknown.
    """
    for name, reduction in reduce.items():
        if reduction not in REDUCTIONS:
            raise LoopError(
                f"reduce[{name!r}] is {reduction!r}. Values of replicas are combined by "
                f"{', '.join(map(repr, REDUCTIONS))}{close_name(str(reduction), REDUCTIONS)}"
            )


def parts_by_name(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return parts by name; those in lists and dicts have the names of both.

    Raises:
        LoopError: two have the same name.
    """
    named: dict[str, Any] = {}
    for name, part in _named(parts):
        if name in named:
            raise LoopError(
                f"Two parts are called {name!r}: those in lists and dicts have the names of both. Call one else."
            )
        named[name] = part
    return named


def _named(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, part in parts.items():
        if isinstance(part, Mapping):
            yield from _named({f"{name}_{key}": value for key, value in part.items()})
        elif isinstance(part, list | tuple):
            yield from _named({f"{name}_{index}": value for index, value in enumerate(part)})
        else:
            yield name, part
