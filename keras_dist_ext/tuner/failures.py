"""Classify why a trial failed: it cannot run at this point of the search, or the user's code has an error."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import tensorflow as tf

from keras_dist_ext.errors import NonFiniteError, ScopeError, StrategyError

__all__ = ["Failure", "InfeasibleError", "Kind", "classify_failure"]

Kind = Literal[
    "scope",  # the model, or part of it, cannot live under the strategy
    "out of memory",
    "indivisible batch",  # the batch cannot be split over the replicas as the model needs it
    "missing device",  # the strategy is not available here
    "collective time-out",
    "worker lost",
    "NaN loss",
    "user error",  # an exception in the user's code, or one that was not recognized
]


@dataclass(frozen=True)
class Failure:
    """Why a trial failed."""

    kind: Kind
    cause: str  # one line

    @property
    def is_infeasible(self) -> bool:
        """Whether this point of the search cannot run, so that others should be tried instead."""
        return self.kind != "user error"

    @property
    def is_transient(self) -> bool:
        """Whether another attempt may succeed."""
        return self.kind in ("collective time-out", "worker lost")

    def __str__(self) -> str:
        return f"{self.kind}: {self.cause}"


class InfeasibleError(Exception):
    """A trial cannot continue, as is known before TensorFlow raises an exception."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def classify_failure(error: BaseException) -> Failure:
    """Classify an exception that ended a trial, by its type, its message, and those of its causes.

    >>> classify_failure(MemoryError("OOM")).kind
    'out of memory'
    >>> classify_failure(KeyError("units"))
    Failure(kind='user error', cause="KeyError: 'units'")
    """
    chain = list(_causes(error))
    for one in chain:
        if isinstance(one, InfeasibleError):
            return one.failure
    for kind, types, words in _PATTERNS:
        for one in chain:
            if isinstance(one, types) or (_raised_by_framework(one) and words.search(str(one))):
                return Failure(kind, _summarize(one))
    return Failure("user error", _summarize(error))


def _raised_by_framework(error: BaseException) -> bool:
    """Whether an exception is TensorFlow's: by its type, or because it was raised there, in Keras or here."""
    if isinstance(error, tf.errors.OpError):
        return True
    if not isinstance(error, RuntimeError | ValueError | AssertionError | TypeError | IndexError):
        return False
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or frames[-1].partition(".")[0] in ("tensorflow", "keras", "keras_dist_ext")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _summarize(error: BaseException) -> str:
    """Return the type and the first line of the message; TensorFlow appends the graph and the stack to it."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = next((line for line in lines if line and not line.startswith(_UNINFORMATIVE)), "")
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


_UNINFORMATIVE = ("Exception encountered when calling", "Graph execution error", "Detected at node", "in user code:")

_ERRORS = tf.errors


def _pattern(*parts: str) -> re.Pattern[str]:
    return re.compile("|".join(parts), re.IGNORECASE)


# In this order: when one replica runs out of memory, the collectives of the others fail.
_PATTERNS: tuple[tuple[Kind, tuple[type[BaseException], ...], re.Pattern[str]], ...] = (
    (
        "out of memory",
        (_ERRORS.ResourceExhaustedError, MemoryError),
        _pattern(r"\bOOM\b", "out of memory", "RESOURCE_EXHAUSTED", "failed to allocate memory"),
    ),
    (
        "missing device",
        (StrategyError,),
        _pattern("could not satisfy (explicit )?device specification", "unknown device", "no such device"),
    ),
    (
        "scope",
        (ScopeError,),
        _pattern(
            "mixing different tf.distribute.strategy objects",
            "colocate_vars_with",
            "trying to create optimizer slot variable under the scope",
            "pop from empty list",
        ),
    ),
    (
        "collective time-out",
        (_ERRORS.DeadlineExceededError,),
        _pattern("collective.*(timed? ?out|deadline)", "barrier.*timed? ?out"),
    ),
    (
        "worker lost",
        (_ERRORS.UnavailableError,),
        _pattern("heartbeat", "connection (refused|reset)", "socket closed", "worker .*(lost|preempted|died)"),
    ),
    (
        "indivisible batch",
        (),
        _pattern(
            r"(batch|replica).*\bdivisible by",
            r"\bdivisible by.*replica",
            "operation AddN of type AddN must have the same size and shape",
            "invalid reduction dimension",
            "is stateful: it keeps a state for each row of a batch",
        ),
    ),
    ("NaN loss", (NonFiniteError,), _pattern("tensor had (nan|inf)", "CheckNumerics")),
)
