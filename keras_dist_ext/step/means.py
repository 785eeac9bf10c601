"""See numbers that a user's code computes of a replica's rows as parts of those of the global batch.

A step is written for one device. A loss in it may be a mean over the rows, a sum over them, or a sum of both with a
penalty on weights; on one device all of these are right. Here each term tells how it grows with the rows (``degree``),
so that it can be made a mean over the replica's rows whose mean over replicas, by rows, is the number of one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist_ext.errors import DataError
from keras_dist_ext.step.batch_scaling import additive_terms, degree_in_rows

__all__ = ["Degrees", "Means", "Term", "UnknownDegrees"]


class UnknownDegrees(Exception):
    """A number is met whose graph does not tell how it grows, because the number of rows is a constant in it."""


class Term(NamedTuple):
    """A scalar of which, times its sign, another is a sum; or a vector whose sum is meant."""

    value: Any
    sign: int
    degree: Fraction  # the power of the number of rows with which it grows


class Degrees:
    """How the numbers of a step grow with its rows, in the order in which they are asked for.

    Learnt from a step that is traced aside, on batches of any size, where no other graph tells.
    """

    def __init__(self) -> None:
        self._learnt: list[list[Fraction]] | None = None
        self._seen: list[list[list[Fraction]]] | None = None  # by replica, while a step is traced aside

    @contextlib.contextmanager
    def learn(self) -> Iterator[None]:
        """Learn from the step that is traced meanwhile; after an error, take all numbers for means."""
        self._seen, self._learnt = [], []
        try:
            yield
            self._learnt = max(self._seen, key=len, default=[])
        finally:
            self._seen = None

    def new_list(self) -> list[list[Fraction]]:
        """Return what a replica that is traced puts its answers into."""
        answers: list[list[Fraction]] = []
        if self._seen is not None:
            self._seen.append(answers)
        return answers

    def answer(self, number: int) -> list[Fraction] | None:
        """Return the degrees of the terms of what is asked for at this place, if anything was learnt at all."""
        if self._learnt is None:
            return None
        return self._learnt[number] if number < len(self._learnt) else []


class Means:
    """Which numbers of a replica's step are means over its rows.

    Args:
        rows: of the replica, an int where static.
        degrees: what was learnt; None to take all numbers for means.
    """

    def __init__(self, rows: int | tf.Tensor, degrees: Degrees | None) -> None:
        self._is_static = isinstance(rows, int)
        self._degrees = degrees
        self._answers = [] if degrees is None else degrees.new_list()
        self._means: dict[int, Any] = {}  # by id; held, so that no other gets it
        self._asked: dict[int, list[Term]] = {}

    @property
    def are_read(self) -> bool:
        """Whether numbers are looked into at all."""
        return self._degrees is not None

    def mark_as_mean(self, value: Any) -> Any:
        """Remember that a tensor is a mean, and return it."""
        self._means[id(value)] = value
        return value

    def terms(self, value: Any) -> list[Term]:
        """Return the terms of a scalar, or a vector as it is.

        Raises:
            DataError: some of them grow with the rows and others do not, in a step that runs eagerly.
            UnknownDegrees: it is not known yet how they grow.
        """
        is_eager = hasattr(value, "numpy")
        is_computed = isinstance(value, tf.Tensor) and is_eager == tf.executing_eagerly()
        if self._degrees is None or not is_computed or id(value) in self._means:
            return [Term(value, 1, Fraction(0))]
        if id(value) not in self._asked:
            self._asked[id(value)] = self._eager_terms(value) if is_eager else self._graph_terms(value)
        return self._asked[id(value)]

    def _graph_terms(self, value: tf.Tensor) -> list[Term]:
        parts = [(value, 1)] if value.shape.rank else _terms_but_zero(value, self._means)
        if self._is_static:
            degrees = self._answer()
            if len(degrees) != len(parts):
                degrees = [Fraction(0)] * len(parts)
        else:
            scalars = [tf.reduce_sum(part) if part.shape.rank else part for part, _ in parts]
            degrees = [degree_in_rows(scalar, self._means) for scalar in scalars]
            self._answers.append(degrees)
        terms = [Term(part, sign, degree) for (part, sign), degree in zip(parts, degrees, strict=True)]
        return [Term(value, 1, degrees[0])] if len(set(degrees)) == 1 else terms

    def _eager_terms(self, value: Any) -> list[Term]:
        degrees = set(self._answer() if self._is_learnt else [])
        if len(degrees) > 1:
            raise DataError(
                "A step that runs eagerly adds what is a sum over rows to what is none (a mean, or a penalty on "
                "weights), and nothing tells them apart in the result, so it would weigh wrongly over replicas. Divide "
                "the sum by the rows at hand, or compile without run_eagerly."
            )
        return [Term(value, 1, degrees.pop() if degrees else Fraction(0))]

    @property
    def _is_learnt(self) -> bool:
        return self._degrees is not None and self._degrees.answer(0) is not None

    def _answer(self) -> list[Fraction]:
        assert self._degrees is not None
        degrees = self._degrees.answer(len(self._answers))
        if degrees is None:
            raise UnknownDegrees
        self._answers.append(degrees)
        return degrees


def _terms_but_zero(value: tf.Tensor, means: Container[int]) -> list[tuple[tf.Tensor, int]]:
    """The terms of a scalar, without the 0 with which Python's ``sum`` begins."""
    terms = list(additive_terms(value, means))
    return [term for term in terms if tf.get_static_value(term[0]) != 0] or terms[:1]
