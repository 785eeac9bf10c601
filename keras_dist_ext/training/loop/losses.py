"""Find out from the graph of a step whether a loss is a mean over the rows at hand, as one device would have it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import numpy as np
import tensorflow as tf

from keras_dist_ext.errors import LoopError
from keras_dist_ext.messages import warn_once
from keras_dist_ext.step.ancestry import Value, walk_back
from keras_dist_ext.step.batch_scaling import batch_exponent

__all__ = ["check_mean", "check_not_scaled", "multiples", "warn_of_own_divisor"]


def check_mean(what: str, value: tf.Tensor, common: Container[int], num_replicas: int | None) -> None:
    """Refuse what is no mean over the rows at hand, or that divided by the number of replicas.

    Args:
        what: it is, for the message.
        value: a scalar of a graph.
        common: ids of tensors that are the same on all replicas.
        num_replicas: that the value may be scaled by; None: it is not.

    Raises:
        LoopError: it is none.
    """
    if batch_exponent(value, common) >= 1:
        raise LoopError(
            f"{what} grows with the number of rows: it is a sum, divided by a constant or by the rows of all replicas "
            "if at all. A replica has a part of the rows, and another one in the last batch, so it and its gradients "
            "would be weighted twice. Use replica.mean_loss(per_example), or divide by the rows at hand; or declare a "
            'value that is not trained on a "sum".'
        )
    if num_replicas is not None and num_replicas > 1:
        check_not_scaled(what, multiples(value), 1 / num_replicas, num_replicas)


def check_not_scaled(what: str, values: Iterable[tf.Tensor], *factors: float) -> None:
    """Refuse values that are others times one of some factors, of which the first is one over the number of replicas.

    Raises:
        LoopError: one is.
    """
    if any(abs(_factor(value) / factor - 1.0) < 1e-6 for value in values for factor in factors):
        raise LoopError(
            f"{what} is scaled by the number of replicas ({round(1 / factors[0])}), and the loop weights each replica "
            "by its rows already, so it and its gradients would be scaled a second time. Write the loss as for one "
            "device: replica.mean_loss(per_example), a loss of Keras, or a mean over the rows at hand."
        )


def multiples(value: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yield a value, and those of which it is a multiple."""
    while tf.is_tensor(value) and not isinstance(value, tf.IndexedSlices):
        yield value
        if value.op.type not in ("Identity", "Mul", "RealDiv", "DivNoNan", "Cast"):
            return
        value = value.op.inputs[0]


def _factor(value: tf.Tensor) -> float:
    """The constant that an op multiplies by; 0 where there is none."""
    if value.op.type not in ("Mul", "RealDiv", "DivNoNan"):
        return 0.0
    one, other = (_constant(given) for given in value.op.inputs)
    if value.op.type == "Mul":
        return (one if other is None else other) or 0.0
    return 1.0 / other if other else 0.0


def _constant(value: tf.Tensor) -> float | None:
    constant = tf.get_static_value(value)
    return None if constant is None or np.size(constant) != 1 else float(np.ravel(constant)[0])


def warn_of_own_divisor(what: str, value: tf.Tensor, common: Container[int]) -> None:
    """Warn of a mean that is not over the rows: each replica divides by a number of its own, and counts by its rows.

    Args:
        what: the value is, for the message.
        value: a scalar of a graph.
        common: ids of tensors that are the same on all replicas.
    """
    for term in _terms(value):
        averaged, divisor = _mean(term)
        if averaged is None or (divisor is not None and batch_exponent(divisor, common) < 1):
            continue
        if divisor is not None and _adds_up_rows(divisor):
            how = "a sum over the rows at hand, divided by another one (of weights, or of a mask)"
        elif _is_selection(averaged):
            how = "a mean over some of the rows at hand, which a mask has selected"
        else:
            continue
        warn_once(
            f"{what} is {how}. Each replica divides by its own number, so gradients are those of one device only "
            "where these are equal. replica.mean_loss(per_example, weights) divides by the sum over all replicas; a "
            "mask is such a weight."
        )


def _mean(value: tf.Tensor) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """What a scalar is the mean of, and what the sum is divided by, if it is one."""
    op = value.op
    if op.type == "Mean":
        return op.inputs[0], None
    if op.type in ("RealDiv", "DivNoNan"):
        sums = [term.op.inputs[0] for term in _terms(op.inputs[0]) if term.op.type == "Sum"]
        return (sums[0] if sums else None), op.inputs[1]
    return None, None


def _terms(value: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yield a scalar, or those that it is the sum of, without constant factors."""
    op = value.op
    if op.type in ("Add", "AddN", "AddV2", "Identity", "Cast", "Neg", "Sub"):
        for given in op.inputs:
            yield from _terms(given)
    elif op.type == "Mul" and _factor(value):
        (other,) = [given for given in op.inputs if _constant(given) is None][:1] or [None]
        if other is not None:
            yield from _terms(other)
    elif value.shape.rank == 0:
        yield value


def _adds_up_rows(value: tf.Tensor) -> bool:
    """Whether values of rows are added up, not just counted."""

    def is_sum(given: Value) -> bool:
        op = given.tensor.op
        return bool(op.type == "Sum" and op.inputs[0].op.type not in ("OnesLike", "Fill", "Shape"))

    return any(is_sum(given) for given in walk_back([Value(value)], lambda v: v.tensor.shape.rank not in (0, None)))


def _is_selection(value: tf.Tensor) -> bool:
    """Whether the rows of a value are some that were selected by what they hold, as by tf.boolean_mask."""

    def ends(given: Value) -> bool:
        shape = given.tensor.shape
        return not (shape.rank and shape[0] is None) or "Scatter" in given.tensor.op.type

    def selects(given: Value) -> bool:
        return bool(given.tensor.op.type == "Where")

    for given in walk_back([Value(value)], ends):
        op = given.tensor.op
        if op.type in ("GatherV2", "GatherNd"):
            indices = walk_back([Value(op.inputs[1], given.calls)], lambda v: v.tensor.op.type not in _OF_INDICES)
            if any(map(selects, indices)):
                return True
    return False


_OF_INDICES = ("Cast", "Identity", "Reshape", "Squeeze", "Where")
