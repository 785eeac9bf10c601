"""Parse the query of a request, and refuse invalid ones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from keras_dist_ext.errors import KerasDistError
from keras_dist_ext.monitoring.dashboard.metadata import REPLICA_TAGS

__all__ = ["QueryError", "Query", "parse_query", "parse_tag", "parse_hidden"]

AXES = ("step", "wall")
MAX_WIDTH = 4000
_MAX_DIGITS = 9  # of a replica's id; Python refuses to read numbers of thousands of digits


class QueryError(KerasDistError, ValueError):
    """An invalid request, which our page does not make."""


@dataclass(frozen=True)
class Query:
    """The part of an experiment, and its resolution."""

    experiment: str
    axis: str = "step"  # one of AXES: the unit of `low` and `high`; wall: seconds since 1970
    low: float = -math.inf
    high: float = math.inf
    width: int = 600  # pixels, so bins


def parse_query(args: Mapping[str, str]) -> Query:
    """Return the query of a request.

    Args:
        args: experiment (required, may be empty), axis, low, high, width.

    Raises:
        QueryError: one is missing or invalid; the message has its name and the valid values.
    """
    if "experiment" not in args:
        raise QueryError(
            "The request has no experiment. Add `experiment=`, empty for runs in the log directory itself."
        )
    axis = args.get("axis", "step")
    if axis not in AXES:
        raise QueryError(f"axis={axis!r}: there are {' and '.join(AXES)}.")
    low, high = (_number(args, name, default) for name, default in (("low", -math.inf), ("high", math.inf)))
    if not low <= high:
        raise QueryError(f"low={low:g} is above high={high:g}. Swap them.")
    width = _number(args, "width", 600)
    if not 1 <= width <= MAX_WIDTH:
        raise QueryError(f"width={width:g} pixels: give 1 to {MAX_WIDTH}.")
    return Query(args["experiment"], axis, low, high, int(width))


def _number(args: Mapping[str, str], name: str, default: float) -> float:
    text = args.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise QueryError(f"{name}={text!r} is not a finite number.")
    return value


def parse_tag(args: Mapping[str, str]) -> str:
    """Return the tag of a request.

    Raises:
        QueryError: it is missing, or not a tag of replicas.
    """
    tag = args.get("tag", "")
    if tag not in REPLICA_TAGS:
        raise QueryError(f"tag={tag!r}: there are {', '.join(REPLICA_TAGS)}.")
    return tag


def parse_hidden(args: Mapping[str, str]) -> frozenset[int]:
    """Return the replicas that a page hides: ids, separated by commas.

    Raises:
        QueryError: it is anything else.
    """
    words = [word for word in args.get("hidden", "").split(",") if word]
    if not all(word.isascii() and word.isdigit() and len(word) <= _MAX_DIGITS for word in words):
        raise QueryError(f"hidden={args['hidden']!r}: give ids of replicas, separated by commas.")
    return frozenset(map(int, words))
