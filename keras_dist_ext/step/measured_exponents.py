"""Measure how numbers of a graph grow with the rows of a batch, where their ops do not tell.

The graph is evaluated on a few rows, and on these repeated k times: a number that is k**exponent times as large has
that exponent in the batch size (see ``batch_scaling``). Only what the numbers are computed from runs, so nothing is
assigned but what they are read from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext._keras.tracing import ScratchTrace
from keras_dist_ext.aliases import SpecNest, TensorNest
from keras_dist_ext.data.split import num_rows, take_rows
from keras_dist_ext.step.means import BatchExponents

__all__ = ["MOST_ROWS", "learn_exponents", "learn_exponents_of_sizes", "measure_exponents"]

_MOST_TRACES = 3
_REPEATS = (1, 2, 3)
MOST_ROWS = 4
"""That are repeated."""
_TOLERANCE = 0.02  # of an exponent, which is a whole number or a half; float16 has 1e-3


def learn_exponents(
    exponents: BatchExponents, step: Callable[[TensorNest], None], spec: SpecNest, batch: TensorNest
) -> None:
    """Learn the exponents of a step's scalars from a scratch graph, and by measuring what that does not tell.

    Args:
        exponents: of the step.
        step: runs it on a batch, as if all replicas had these rows.
        spec: of a batch of any number of rows.
        batch: the rows to measure with; None leaves unknown what has to be measured.
    """
    if exponents.answer(0) is None:
        exponents.store([])  # and so it stays where the step cannot be traced: all count as means
    for _ in range(_MOST_TRACES):
        with exponents.learn() as asked:
            trace = ScratchTrace(step, spec)
        unknown = [tensor for one in asked for tensor in one.unknown()]
        measured = measure_exponents(trace, unknown, batch) if unknown and batch is not None else {}
        found = [one.exponents(measured) for one in asked]
        exponents.store(found)
        if not measured or not any(None in one for one in found):
            return  # else what was found now may be what the others are computed with


def learn_exponents_of_sizes(
    exponents: BatchExponents,
    step: Callable[[TensorNest], None],
    spec_of: Callable[[TensorNest], SpecNest],
    batch: TensorNest,
) -> None:
    """Learn the same of a step that must know the number of rows: trace it for several, and measure all its scalars.

    Args:
        exponents: see ``learn_exponents``.
        step: ...
        spec_of: returns the spec of a batch of just these rows.
        batch: the rows to measure with.
    """
    found: list[list[npt.NDArray[np.float64]]] = []
    for rows in _repeated(batch):
        with exponents.learn() as asked:
            trace = ScratchTrace(step, spec_of(rows))
        terms = [term for one in asked for term in one.terms]
        if any(term.graph is not trace.graph for term in terms):
            return
        found.append([np.asarray(value, np.float64) for value in trace.evaluate(terms, [rows])[0]])
    if len({len(values) for values in found}) == 1:
        powers = [_power(values) for values in zip(*found, strict=True)]
        measured = {id(term): power for term, power in zip(terms, powers, strict=True) if power is not None}
        exponents.store([one.exponents(measured) for one in asked])


def _repeated(batch: TensorNest) -> list[TensorNest]:
    rows = min(int(num_rows(batch)), MOST_ROWS)
    return [take_rows(batch, np.tile(np.arange(rows), k)) for k in _REPEATS] if rows else []


def measure_exponents(trace: ScratchTrace, values: Sequence[tf.Tensor], batch: TensorNest) -> dict[int, Fraction]:
    """Return the exponents of tensors in the batch size, by id, of those that grow with a power of it.

    Args:
        trace: the graph, a function of a batch.
        values: of that graph, of shapes that do not depend on the rows. Those of functions in it are left out.
        batch: rows to evaluate it on, of which the first few are taken.
    """
    values = [value for value in values if value.graph is trace.graph]
    repeated = _repeated(batch) if values else []
    if not repeated:
        return {}
    try:
        seen = trace.evaluate(values, repeated)
    except tf.errors.OpError:  # one of them asks for rows that are not there, as those of other replicas
        if len(values) == 1:
            return {}
        return {key: one for value in values for key, one in measure_exponents(trace, [value], batch).items()}
    arrays = [[np.asarray(value, np.float64) for value in found] for found in seen]
    exponents = {id(value): _power(found) for value, *found in zip(values, *arrays, strict=True)}
    return {key: exponent for key, exponent in exponents.items() if exponent is not None}


def _power(found: Sequence[npt.NDArray[np.float64]]) -> Fraction | None:
    """The power of k with which all entries grow; None where they grow otherwise, or are 0 or not finite."""
    once, *others = found
    counts = np.isfinite(once) & (once != 0)
    if not counts.any() or not all(np.isfinite(other[counts]).all() for other in others):
        return None
    powers = set()
    for other, k in zip(others, _REPEATS[1:], strict=True):
        ratios = other[counts] / once[counts]
        if (ratios <= 0).any():
            return None
        exact = np.log(ratios) / math.log(k)
        nearest = np.round(2 * exact) / 2
        if (np.abs(exact - nearest) > _TOLERANCE).any():
            return None
        powers.update(nearest)
    return Fraction(powers.pop()) if len(powers) == 1 else None
