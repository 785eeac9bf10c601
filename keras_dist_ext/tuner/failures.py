"""Class what made a trial fail: what cannot run at this point of the search, and the user's own errors."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from keras_dist_ext.errors import NonFiniteError, ScopeError, StrategyError

__all__ = ["Failure", "Infeasible", "Kind", "failure_of"]

Kind = Literal[
    "scope",  # a model, or part of it, that cannot live under the strategy
    "out of memory",
    "indivisible batch",  # replicas that cannot share the batch as the model needs it
    "missing device",  # a strategy that cannot be had here
    "collective time-out",
    "worker lost",
    "NaN loss",
    "own error",  # the user's own exception, or whatever else was not recognised
]


@dataclass(frozen=True)
class Failure:
    """Why a trial failed."""

    kind: Kind
    cause: str  # one line

    @property
    def is_infeasible(self) -> bool:
        """Whether this point of the search cannot run, so that others are to be tried instead."""
        return self.kind != "own error"

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may succeed."""
        return self.kind in ("collective time-out", "worker lost")

    def __str__(self) -> str:
        return f"{self.kind}: {self.cause}"


class Infeasible(Exception):
    """A trial that cannot go on, known without an exception of TensorFlow's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def failure_of(error: BaseException) -> Failure:
    """Class an exception that ended a trial, by its type, its message, and those of what caused it.

    >>> failure_of(MemoryError("OOM")).kind
    'out of memory'
    >>> failure_of(KeyError("units"))
    Failure(kind='own error', cause="KeyError: 'units'")
    """
    chain = list(_chain(error))
    for one in chain:
        if isinstance(one, Infeasible):
            return one.failure
    for kind, types, words in _SIGNS:
        for one in chain:
            if isinstance(one, types) or (_speaks_for_tensorflow(one) and words.search(str(one))):
                return Failure(kind, _line(one))
    return Failure("own error", _line(error))


def _speaks_for_tensorflow(error: BaseException) -> bool:
    """Whether an exception says what TensorFlow has met: by its type, or as it was raised there, in Keras or here."""
    if isinstance(error, tf.errors.OpError):
        return True
    if not isinstance(error, RuntimeError | ValueError | AssertionError | TypeError | IndexError):
        return False
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or frames[-1].partition(".")[0] in ("tensorflow", "keras", "keras_dist_ext")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _line(error: BaseException) -> str:
    """Return the type and what the message begins with; TensorFlow appends the graph and the stack to it."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = next((line for line in lines if line and not line.startswith(_PREAMBLES)), "")
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


_PREAMBLES = ("Exception encountered when calling", "Graph execution error", "Detected at node", "in user code:")

_ERRORS = tf.errors


def _words(*parts: str) -> Any:
    return re.compile("|".join(parts), re.IGNORECASE)


# In this order: memory that one replica lacks makes the collectives of the others fail.
_SIGNS: tuple[tuple[Kind, tuple[type[BaseException], ...], Any], ...] = (
    (
        "out of memory",
        (_ERRORS.ResourceExhaustedError, MemoryError),
        _words(r"\bOOM\b", "out of memory", "RESOURCE_EXHAUSTED", "failed to allocate memory"),
    ),
    (
        "missing device",
        (StrategyError,),
        _words("could not satisfy (explicit )?device specification", "unknown device", "no such device"),
    ),
    (
        "scope",
        (ScopeError,),
        _words(
            "mixing different tf.distribute.strategy objects",
            "colocate_vars_with",
            "trying to create optimizer slot variable under the scope",
            "pop from empty list",
        ),
    ),
    (
        "collective time-out",
        (_ERRORS.DeadlineExceededError,),
        _words("collective.*(timed? ?out|deadline)", "barrier.*timed? ?out"),
    ),
    (
        "worker lost",
        (_ERRORS.UnavailableError,),
        _words("heartbeat", "connection (refused|reset)", "socket closed", "worker .*(lost|preempted|died)"),
    ),
    (
        "indivisible batch",
        (),
        _words(
            r"(batch|replica).*\bdivisible by",
            r"\bdivisible by.*replica",
            "operation AddN of type AddN must have the same size and shape",
            "invalid reduction dimension",
            "is stateful: it keeps a state for each row of a batch",
        ),
    ),
    ("NaN loss", (NonFiniteError,), _words("tensor had (nan|inf)", "CheckNumerics")),
)
