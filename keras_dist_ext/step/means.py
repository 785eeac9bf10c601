"""Split scalars that user code computes from a replica's rows into terms, and tell which of them are means.

A step is written for one device. A loss in it may be a mean over the rows, a sum over them, or a sum of both with a
penalty on weights; on one device all of these are right. Here each term has an exponent in the batch size (see
``batch_scaling``), by which it can be scaled to a mean over the replica's rows. The mean of these over replicas,
weighted by their rows, is the value on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist_ext.errors import DataError
from keras_dist_ext.step.batch_scaling import additive_terms, batch_exponent

__all__ = ["BatchExponents", "Means", "Term", "UnknownExponents"]


class UnknownExponents(Exception):
    """The exponent of a scalar is needed, and its graph does not tell.

    The batch size is a constant in it, or rows of all replicas, too, are in unknown numbers.
    """


class Term(NamedTuple):
    """One term of a sum; or a vector whose sum is meant."""

    value: Any
    sign: int
    exponent: Fraction  # in the batch size: 0 = a mean, 1 = a sum over rows


class BatchExponents:
    """The exponents in the batch size of a step's scalars, in the order in which they are needed.

    Learned by tracing the step on batches of unknown size, without running it, where the graph that runs does not tell.
    """

    def __init__(self) -> None:
        self._learned: list[list[Fraction]] | None = None
        self._seen: list[list[list[Fraction]]] | None = None  # by replica, while a step is traced aside

    @contextlib.contextmanager
    def learn(self) -> Iterator[None]:
        """Learn from the step that is traced meanwhile; after an error, all scalars count as means."""
        self._seen, self._learned = [], []
        try:
            yield
            self._learned = max(self._seen, key=len, default=[])
        finally:
            self._seen = None

    @property
    def are_being_learned(self) -> bool:
        """Whether a step is traced aside, to learn from it."""
        return self._seen is not None

    def new_list(self) -> list[list[Fraction]]:
        """Return what a replica that is traced puts its answers into."""
        answers: list[list[Fraction]] = []
        if self._seen is not None:
            self._seen.append(answers)
        return answers

    def answer(self, number: int) -> list[Fraction] | None:
        """Return the exponents of the terms of the scalar with this number, if anything was learned at all."""
        if self._learned is None:
            return None
        return self._learned[number] if number < len(self._learned) else []


class Means:
    """Tells which scalars of a replica's step are means over its rows.

    Args:
        rows: of the replica, an int where static.
        exponents: what was learned; None: all scalars count as means.
    """

    def __init__(self, rows: int | tf.Tensor, exponents: BatchExponents | None) -> None:
        self.has_gathered = False  # whether there are rows of all replicas, whose number is as unknown as the own
        self._is_static = isinstance(rows, int)
        self._exponents = exponents
        self._answers = [] if exponents is None else exponents.new_list()
        self._means: dict[int, Any] = {}  # by id; held, so that no other gets it
        self._asked: dict[int, list[Term]] = {}

    @property
    def are_read(self) -> bool:
        """Whether the graphs of scalars are read at all."""
        return self._exponents is not None

    @property
    def are_examined(self) -> bool:
        """Whether nothing is run: the step is traced to learn the exponents."""
        return self._exponents is not None and self._exponents.are_being_learned

    def mark_as_mean(self, value: Any) -> Any:
        """Remember that a tensor is a mean, and return it."""
        self._means[id(value)] = value
        return value

    def terms(self, value: Any) -> list[Term]:
        """Return the terms of a scalar, or a vector as it is.

        Raises:
            DataError: some are means and others sums, in a step that runs eagerly.
            UnknownExponents: their exponents are not known yet.
        """
        is_eager = hasattr(value, "numpy")
        is_computed = isinstance(value, tf.Tensor) and is_eager == tf.executing_eagerly()
        if self._exponents is None or not is_computed or id(value) in self._means:
            return [Term(value, 1, Fraction(0))]
        if id(value) not in self._asked:
            self._asked[id(value)] = self._eager_terms(value) if is_eager else self._graph_terms(value)
        return self._asked[id(value)]

    def _graph_terms(self, value: tf.Tensor) -> list[Term]:
        parts = [(value, 1)] if value.shape.rank else _terms_but_zero(value, self._means)
        if self._is_static or (self.has_gathered and not self.are_examined):
            exponents = self._answer()
            if len(exponents) != len(parts):
                exponents = [Fraction(0)] * len(parts)
        else:
            scalars = [tf.reduce_sum(part) if part.shape.rank else part for part, _ in parts]
            exponents = [batch_exponent(scalar, self._means) for scalar in scalars]
            self._answers.append(exponents)
        terms = [Term(part, sign, exponent) for (part, sign), exponent in zip(parts, exponents, strict=True)]
        return [Term(value, 1, exponents[0])] if len(set(exponents)) == 1 else terms

    def _eager_terms(self, value: Any) -> list[Term]:
        exponents = set(self._answer() if self._is_learned else [])
        if len(exponents) > 1:
            raise DataError(
                "A step that runs eagerly mixes sum- and mean-reduced loss terms (a penalty on weights counts as a "
                "mean). Their total cannot be split into terms again, so replicas would weigh it wrongly. Divide the "
                "sum by the batch size at hand, or compile without run_eagerly."
            )
        return [Term(value, 1, exponents.pop() if exponents else Fraction(0))]

    @property
    def _is_learned(self) -> bool:
        return self._exponents is not None and self._exponents.answer(0) is not None

    def _answer(self) -> list[Fraction]:
        assert self._exponents is not None
        exponents = self._exponents.answer(len(self._answers))
        if exponents is None:
            raise UnknownExponents
        self._answers.append(exponents)
        return exponents


def _terms_but_zero(value: tf.Tensor, means: Container[int]) -> list[tuple[tf.Tensor, int]]:
    """The terms of a scalar, without the 0 with which Python's ``sum`` begins."""
    terms = list(additive_terms(value, means))
    return [term for term in terms if tf.get_static_value(term[0]) != 0] or terms[:1]
