"""Check the arguments of a loop: functions, parts and reductions, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from keras_dist_ext import arguments
from keras_dist_ext.errors import LoopError, StrategyError
from keras_dist_ext.messages import close_name
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.training.loop.step_metrics import REDUCTIONS

__all__ = [
    "check_asynchronous",
    "check_named",
    "check_part_name",
    "check_reductions",
    "checked_functions",
    "checked_kind",
    "parts_by_name",
]


def checked_functions(**functions: object) -> list[Any]:
    """Return Python functions, also of a tf.function: the loop compiles them itself.

    Raises:
        LoopError: one is not callable, or `step` is missing.
    """
    for name, function in functions.items():
        if not callable(function) and (function is not None or name == "step"):
            wanted = "a function of (batch)" if name == "predict" else "a function of (replica, batch)"
            arguments.refuse(name, function, wanted, LoopError)
    return [getattr(function, "python_function", function) for function in functions.values()]


def checked_kind(kind: Kind) -> Kind:
    """Return a kind of steps.

    Raises:
        LoopError: it is neither "train" nor "test".
    """
    arguments.one_of("kind", kind, ("train", "test"), error=LoopError)
    return kind


def check_named(argument: str, given: object) -> None:
    """Refuse anything but a dict by name.

    Raises:
        LoopError: it is not a dict.
    """
    if not isinstance(given, Mapping):
        example = 'reduce={"loss": "mean"}' if argument == "reduce" else 'parts={"net": net}'
        raise LoopError(f"{argument} must be a dict by name, such as {example}, or {{}}; got {type(given).__name__}.")


def check_asynchronous(reduce: Mapping[str, str]) -> None:
    """Refuse reductions that are not sums, where workers make their steps independently.

    Raises:
        StrategyError: there are some.
    """
    others = [f"{name!r} by {how!r}" for name, how in reduce.items() if how not in ("mean", "sum")]
    if others:
        raise StrategyError(
            f"reduce combines {', '.join(others)}, but workers of ParameterServerStrategy make their steps "
            'independently, and what they return is added up. Declare "mean" or "sum", or use '
            "MultiWorkerMirroredStrategy, whose workers make steps together."
        )


def check_part_name(name: str, loop_class: type) -> None:
    """Refuse a name that cannot be an attribute of a loop.

    Raises:
        LoopError: it cannot, or loops have one of this name.
    """
    if not name.isidentifier() or name.startswith("_") or hasattr(loop_class, name):
        raise LoopError(
            f"Invalid name {name!r} of a part: it cannot be an attribute of the loop, or models have an attribute "
            f"of this name already. Rename it, for example to 'my_{name.strip('_')}'."
        )


def check_reductions(reduce: Mapping[str, object]) -> None:
    """Refuse unknown reductions.

    Raises:
        LoopError: one is unknown.
    """
    for name, reduction in reduce.items():
        if not isinstance(reduction, str) or reduction not in REDUCTIONS:
            raise LoopError(
                f"Invalid reduce[{name!r}]={arguments.shown(reduction)}; expected one of "
                f"{', '.join(map(repr, REDUCTIONS))}{close_name(str(reduction), REDUCTIONS)}"
            )


def parts_by_name(parts: Mapping[str, object]) -> dict[str, object]:
    """Return parts by name; those in lists and dicts have the names of both.

    Raises:
        LoopError: two have the same name.
    """
    named: dict[str, object] = {}
    for name, part in _named(parts):
        if name in named:
            raise LoopError(
                f"Two parts have the name {name!r}: a part in a list or dict has the names of both. Rename one."
            )
        named[name] = part
    return named


def _named(parts: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, part in parts.items():
        if isinstance(part, Mapping):
            yield from _named({f"{name}_{key}": value for key, value in part.items()})
        elif isinstance(part, list | tuple):
            yield from _named({f"{name}_{index}": value for index, value in enumerate(part)})
        else:
            yield name, part
