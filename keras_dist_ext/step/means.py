"""Split scalars that user code computes from a replica's rows into terms, and find out which of them are means.

A step is written for one device. A loss in it may be a mean over the rows, a sum over them, or a sum of both with a
penalty on weights; on one device all of these are right. Here each term has an exponent in the batch size (see
``batch_scaling``), by which it can be scaled to a mean over the replica's rows. The mean of these over replicas,
weighted by their rows, is the value on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import tensorflow as tf

from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.errors import DataError
from keras_dist_ext.step.batch_scaling import Reading, additive_terms, read_exponent

__all__ = ["Asked", "BatchExponents", "Means", "Term", "UnknownExponents"]


class UnknownExponents(Exception):
    """The exponent of a scalar is needed, and its graph does not tell.

    The batch size is a constant in it, or rows of all replicas, too, are in unknown numbers.
    """


class Term(NamedTuple):
    """One term of a sum; or a vector whose sum is meant."""

    value: tf.Tensor
    sign: int
    exponent: Fraction  # in the batch size: 0 = a mean, 1 = a sum over rows


class Asked(NamedTuple):
    """A scalar that a step traced in a scratch graph has asked for, as its terms."""

    terms: list[tf.Tensor]
    readings: list[Reading]
    means: dict[int, TensorNest]  # what was known to be a mean by then
    is_static: bool = False  # whether the number of rows is a constant of the graph, which then tells nothing

    def unknown(self) -> list[tf.Tensor]:
        """Return the tensors that must be measured to know the exponents of the terms."""
        return [tensor for reading in self.readings for tensor in reading.unknown]

    def exponents(self, measured: Mapping[int, Fraction]) -> list[Fraction | None]:
        """Return the exponents of the terms, given those of tensors that were measured, by id."""
        if self.is_static:
            return [
                measured.get(id(term)) if reading.exponent is None else reading.exponent
                for term, reading in zip(self.terms, self.readings, strict=True)
            ]
        return [
            reading.exponent if reading.exponent is not None else read_exponent(term, self.means, measured).exponent
            for term, reading in zip(self.terms, self.readings, strict=True)
        ]


class BatchExponents:
    """The exponents in the batch size of a step's scalars, in the order in which they are needed.

    Learned by tracing the step on batches of unknown size, where the graph that runs does not tell; what no graph tells
    is measured on a few rows (see ``measured_exponents``).

    Attributes:
        were_asked: whether a step has needed some.
        are_missing: whether one has assumed means, since nothing told it.
    """

    def __init__(self) -> None:
        self.were_asked = False
        self.are_missing = False
        self._learned: list[list[Fraction]] | None = None
        self._asked: list[Asked] | None = None  # while a step is traced in a scratch graph
        self._assumes_means = False

    @property
    def are_known(self) -> bool:
        """Whether a step is being traced in a scratch graph, or was, and has asked for some."""
        return self.are_being_learned or bool(self._learned)

    @contextlib.contextmanager
    def learn(self) -> Iterator[list[Asked]]:
        """Note what the step that is traced meanwhile asks for, to be stored after it."""
        self._asked = []
        try:
            yield self._asked
        finally:
            self._asked = None

    @contextlib.contextmanager
    def assuming_means(self) -> Iterator[None]:
        """Have the step that is traced meanwhile take for means what nothing was learned of: nobody runs it."""
        self._assumes_means = True
        try:
            yield
        finally:
            self._assumes_means = False

    def unknown(self) -> list[Fraction]:
        """Return the answer where nothing was learned.

        Raises:
            UnknownExponents: the step is to be run.
        """
        if not self._assumes_means:
            raise UnknownExponents
        self.are_missing = True
        return []

    @property
    def are_being_learned(self) -> bool:
        """Whether a step is traced in a scratch graph, to learn from it."""
        return self._asked is not None

    def note(self, asked: Asked) -> list[Fraction]:
        """Note what is asked for; return the exponents as far as they are known by now, 0 where they are not."""
        assert self._asked is not None
        answer = self.answer(len(self._asked)) or []
        self._asked.append(asked)
        return _filled(asked.exponents({}), answer)

    def store(self, exponents: Sequence[Sequence[Fraction | None]]) -> None:
        """Take over what was learned; None counts as a mean."""
        self._learned = [_filled(each, ()) for each in exponents]

    def answer(self, number: int) -> list[Fraction] | None:
        """Return the exponents of the terms of the scalar with this number, if anything was learned at all."""
        if self._learned is None:
            return None
        return self._learned[number] if number < len(self._learned) else []


def _filled(exponents: Sequence[Fraction | None], answer: Sequence[Fraction]) -> list[Fraction]:
    """Return exponents with those of an answer in place of what is None."""
    others = answer if len(answer) == len(exponents) else [Fraction(0)] * len(exponents)
    return [other if one is None else one for one, other in zip(exponents, others, strict=True)]


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
        self._num_asked = 0
        self._means: dict[int, TensorNest] = {}  # by id; held, so that no other gets it
        self._asked: dict[int, list[Term]] = {}

    @property
    def are_read(self) -> bool:
        """Whether the graphs of scalars are read at all."""
        return self._exponents is not None

    @property
    def are_known(self) -> bool:
        """Whether exponents are those of the step, traced on batches of unknown size."""
        return self._exponents is not None and self._exponents.are_known

    @property
    def are_examined(self) -> bool:
        """Whether nothing is run: the step is traced to learn the exponents."""
        return self._exponents is not None and self._exponents.are_being_learned

    def mark_as_mean(self, value: TensorNest) -> TensorNest:
        """Remember that a tensor is a mean, and return it."""
        self._means[id(value)] = value
        return value

    def has_marked(self, value: tf.Tensor) -> bool:
        """Whether a tensor is remembered as a mean."""
        return id(value) in self._means

    def terms(self, value: tf.Tensor) -> list[Term]:
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
            self._exponents.were_asked = True
            self._asked[id(value)] = self._eager_terms(value) if is_eager else self._graph_terms(value)
        return self._asked[id(value)]

    def _graph_terms(self, value: tf.Tensor) -> list[Term]:
        parts = [(value, 1)] if value.shape.rank else _terms_but_zero(value, self._means)
        is_in_graph = self.are_examined or not (self._is_static or self.has_gathered)
        exponents = self._read([part for part, _ in parts]) if is_in_graph else self._answer(len(parts))
        terms = [Term(part, sign, exponent) for (part, sign), exponent in zip(parts, exponents, strict=True)]
        return [Term(value, 1, exponents[0])] if len(set(exponents)) == 1 else terms

    def _read(self, parts: list[tf.Tensor]) -> list[Fraction]:
        """Read the exponents of terms; of those of which the graph does not tell they were learned."""
        assert self._exponents is not None
        scalars = [part if part.shape.rank == 0 else tf.reduce_sum(part) for part in parts]
        if self._is_static:
            known = [Fraction(0) if id(part) in self._means else None for part in parts]
            readings = [Reading(one, [scalar]) for one, scalar in zip(known, scalars, strict=True)]
        else:
            readings = [read_exponent(scalar, self._means) for scalar in scalars]
        if self.are_examined:
            return self._exponents.note(Asked(scalars, readings, dict(self._means), self._is_static))
        exponents = [reading.exponent for reading in readings]
        if None in exponents:
            return _filled(exponents, self._answer(len(parts)))
        self._num_asked += 1
        return _filled(exponents, ())

    def _eager_terms(self, value: tf.Tensor) -> list[Term]:
        exponents = set(self._answer(None) if self._is_learned else [])
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

    def _answer(self, num_terms: int | None) -> list[Fraction]:
        """Return what was learned of the scalar that is asked for now, of so many terms.

        Raises:
            UnknownExponents: nothing was learned yet.
        """
        assert self._exponents is not None
        exponents = self._exponents.answer(self._num_asked)
        if exponents is None:
            exponents = self._exponents.unknown()
        self._num_asked += 1
        return exponents if num_terms in (None, len(exponents)) else [Fraction(0)] * (num_terms or 0)


def _terms_but_zero(value: tf.Tensor, means: Container[int]) -> list[tuple[tf.Tensor, int]]:
    """The terms of a scalar, without the 0 with which Python's ``sum`` begins."""
    terms = list(additive_terms(value, means))
    return [term for term in terms if tf.get_static_value(term[0]) != 0] or terms[:1]
