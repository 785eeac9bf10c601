"""Measure how far replicas are from one device after a step, and how much of it rounding explains.

A deviation is rounding as long as it stays below a bound, which is the sum of

- 1e-5 of the largest value of the variable's gradient, state or metric on one device (80 units of float32; 4 units of
  the layers' dtype where that is coarser); values below a thousandth of the largest gradient, or below 0.001, count as
  that large;
- 8 times the deviation of one device from itself when the rows of the batch come in another order and its weights are
  moved by a unit of rounding (gradients that cancel, such as those of a bias before a normalization, are rounding of
  larger numbers), unless that is more than 0.001 of the value, or of the largest gradient, and so no rounding;
- for weights, which optimizers may compute by dividing rounding by rounding: 8 units of float32 of the weight, 1e-5 of
  the largest update, and what the deviation of the element's gradient explains;
- for an optimizer's variables, what the deviation of the gradient explains; values below a thousandth of the largest of
  their kind, such as all momenta, count as that large, and no other.

Where the gradients are within these bounds and what an optimizer makes of them is not, one device makes the step once
more with the gradients of the replicas, and weights and the optimizer's variables are measured by that: Adam makes
whole steps of what rounding leaves of a gradient that cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext.aliases import Array

__all__ = [
    "LEAST",
    "ROUNDING",
    "Deviation",
    "Part",
    "SlotKind",
    "Values",
    "as_float",
    "difference",
    "largest",
    "measure",
    "moved_by_rounding",
    "rounding_of",
]

Part = tuple[str, str]  # what a value is, and of what: ("gradient", "dense/kernel")
Values = Mapping[Part, tuple[Array, ...]]  # one array a replica
ROUNDING = 1e-5
COPIES = 8.0  # how many times the deviation of rows in another order, and of a gradient, is allowed
LEAST = 1e-3  # below it, a value counts as that large
ORDER_MATTERS = 1e-3  # one device that is further from itself than this does not only round differently


@dataclass(frozen=True)
class SlotKind:
    """What an optimizer's variable is."""

    kind: str  # such as "momentum"
    variable: str  # that it belongs to; "" for none, as with "iteration"


@dataclass(frozen=True)
class Deviation:
    """How far the replicas are from one device in one variable or metric, after one step or the worst of several."""

    part: str  # "gradient", "weights", "state", "optimizer" or "metric"
    name: str
    absolute: float  # the largest difference of an element, on any replica
    relative: float  # the same, relative to the largest value on one device
    excess: float  # relative to what rounding explains, element by element: beyond rounding above 1
    spread: float  # the largest difference between two replicas
    is_apart: bool  # whether the spread is beyond rounding
    step: int  # from 1

    @property
    def is_beyond(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.excess <= 1.0


def measure(
    expected: Values,
    found: Values,
    reordered: Values,
    before: Mapping[Part, Array],
    step: int,
    rounding: float,
    slots: Mapping[str, SlotKind],
) -> Iterator[Deviation]:
    """Measure the deviation of everything that both sides have.

    Args:
        expected: after the step on one device.
        found: after the step on the replicas.
        reordered: after the step on one device with rows in another order, and values moved by rounding.
        before: weights before the step.
        step: its number.
        rounding: the least bound, relative.
        slots: what each variable of an optimizer is.
    """
    gradients = {name: as_float(copies[0]) for (part, name), copies in expected.items() if part == "gradient"}
    largest_gradient = max((largest(_finite(g)) for g in gradients.values()), default=0.0)
    largest_of_kind: dict[str, float] = {}
    for name, slot in slots.items():
        values = expected.get(("optimizer", name), (0.0,))
        largest_of_kind[slot.kind] = max(largest_of_kind.get(slot.kind, 0.0), largest(_finite(as_float(values[0]))))
    for (part, name), copies in expected.items():
        one = as_float(copies[0])
        others = [as_float(copy) for copy in found.get((part, name), ())]
        if any(other.shape != one.shape for other in others) or (part == "metric" and not others):
            yield Deviation(part, name, np.inf, np.inf, np.inf, 0.0, False, step)
            continue
        if not others:
            continue
        floor = largest_gradient if part == "gradient" else 1.0
        if part == "optimizer":
            floor = largest_of_kind[slots[name].kind]
        scale = max(largest(_finite(one)), LEAST * floor, 1e-30)
        control = np.abs(_finite(as_float(reordered[part, name][0])) - _finite(one))
        size = max(scale, largest_gradient) if part == "gradient" else scale
        control = np.zeros_like(one) if not largest(control) <= ORDER_MATTERS * size else control
        allowed = np.full_like(one, rounding * scale + COPIES * largest(control))
        if part == "weights" and (part, name) in before:
            update = largest(_finite(one - before[part, name]))
            unit = 8 * 2.0**-23 * largest(_finite(one))
            allowed = np.full_like(one, unit + rounding * update + COPIES * largest(control))
            if name in gradients:
                allowed = allowed + COPIES * update * _unsure(gradients[name], found["gradient", name])
        if part == "optimizer" and slots[name].variable in gradients:
            of = slots[name].variable
            unsure = _unsure(gradients[of], found["gradient", of], as_whole=gradients[of].shape != one.shape)
            allowed = allowed + COPIES * scale * unsure
        apart = np.max([difference(other, one) for other in others], axis=0)
        spread = np.max([difference(other, others[0]) for other in others], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = largest(np.where(apart > 0, apart / allowed, 0.0))
            is_apart = largest(np.where(spread > 0, spread / allowed, 0.0)) > 1.0
        absolute = largest(apart)
        yield Deviation(part, name, absolute, absolute / scale, excess, largest(spread), is_apart, step)


def _unsure(gradient: Array, others: Sequence[Array], *, as_whole: bool = False) -> Array:
    """Which part of each element of a gradient, 0 to 1, is its deviation; as a whole: of the largest element."""
    apart = np.max([difference(as_float(other), gradient) for other in others], axis=0)
    if as_whole:
        apart, gradient = np.asarray(largest(apart)), np.asarray(largest(_finite(gradient)))
    with np.errstate(divide="ignore", invalid="ignore"):
        share: Array = np.nan_to_num(apart / np.abs(gradient), nan=0.0, posinf=1.0)
    return np.asarray(np.minimum(1.0, share))


def as_float(value: npt.ArrayLike) -> Array:
    """Return a value as float64."""
    return np.asarray(value).astype(np.float64)


def largest(value: Array) -> float:
    """Return the largest absolute value, 0 for none."""
    return float(np.max(np.abs(value), initial=0.0))


def _finite(value: Array) -> Array:
    """Return a value with 0 for what is not finite."""
    return np.where(np.isfinite(value), value, 0.0)


def difference(one: Array, other: Array) -> Array:
    """Return the absolute difference; infinite where one is not a number, none where both are not."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    both = ~np.isfinite(one) & ~np.isfinite(other)
    return np.where(both, 0.0, np.nan_to_num(apart, nan=np.inf, posinf=np.inf))


def moved_by_rounding(value: Array, random: np.random.Generator) -> Array:
    """Move each number up or down by a unit of rounding."""
    if value.dtype.kind != "f":
        return value
    signs = random.choice([-1.0, 1.0], size=value.shape)
    return np.asarray(value * (1.0 + signs * np.finfo(value.dtype).eps)).astype(value.dtype)


def _unit(layer: keras.layers.Layer) -> float:
    """The unit of rounding of a layer's dtype, 0 where float32 or finer."""
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(str(layer.compute_dtype), 0.0)


def rounding_of(model: keras.Model) -> float:
    """Return the least bound for a model, relative: more where its layers compute in less than float32."""
    return max([ROUNDING, *(4 * unit for unit in map(_unit, flat_layers(model)))])
