"""Make the same training steps on one device and on a strategy's replicas, each from equal state, and compare them.

Both sides are models that the same function builds. Before every step the replicas take over the state of one device,
so that a deviation is made by that step alone, and rounding does not grow from step to step.

Letters: N = rows of the global batch; R = replicas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data.split import num_rows, take_rows
from keras_dist_ext.diagnosis.certificate.drawn_numbers import DrawnNumbers
from keras_dist_ext.diagnosis.certificate.training_run import (
    State,
    TrainingRun,
    bounds_of_tensorflow,
    even_bounds,
    on_one_device,
)
from keras_dist_ext.errors import CertificateError
from keras_dist_ext.messages import counted
from keras_dist_ext.strategy.scope import describe_strategy
from keras_dist_ext.training.deviations import (
    LEAST,
    Deviation,
    SlotKind,
    Values,
    as_float,
    difference,
    largest,
    measure,
    moved_by_rounding,
    rounding_of,
)

__all__ = ["Comparison", "Lockstep"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """One step, made on both sides from the same state."""

    step: int
    sizes: tuple[int, ...]  # rows of each replica
    batch: StepData
    before: State
    expected: Values
    found: Values  # one array a replica
    deviations: tuple[Deviation, ...]

    @property
    def is_even(self) -> bool:
        """Whether all replicas had equally many rows."""
        return len(set(self.sizes)) == 1

    @property
    def is_finite_on_one_device(self) -> bool:
        """Whether training is; a metric of too few rows may be NaN, and state infinite until something comes."""
        trained = [values[0] for key, values in self.expected.items() if key[0] == "weights" or key[1] == "loss"]
        return all(np.isfinite(as_float(value)).all() for value in trained)

    @property
    def excess(self) -> float:
        """How far training is off, relative to rounding: by the gradients, or the weights where none are known."""
        by_part = {
            part: max((d.excess for d in self.deviations if d.part == part), default=0.0)
            for part in ("gradient", "weights")
        }
        return max(by_part.values())

    @property
    def is_finite(self) -> bool:
        """Whether all that the replicas computed is, as far as it is on one device."""
        return all(
            (np.isfinite(as_float(copy)) | ~np.isfinite(as_float(self.expected[key][0]))).all()
            for key, copies in self.found.items()
            for copy in copies
            if key in self.expected and np.shape(copy) == np.shape(self.expected[key][0])
        )


class Lockstep:
    """One device and replicas, which begin every step with equal state.

    Args:
        build_model: returns a compiled model.
        strategy: of the replicas.
        batch: a global batch, to build the models for.
        draws: what random ops draw.

    Raises:
        CertificateError: the two models are not alike, or cannot be trained.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model],
        strategy: tf.distribute.Strategy,
        batch: StepData,
        draws: DrawnNumbers,
    ) -> None:
        self.strategy = strategy
        self.draws = draws
        self.many = TrainingRun(build_model, strategy, batch)
        self.one = on_one_device(build_model, batch)
        if not self.many.model.jit_compile:
            self.one.model.jit_compile = False  # "auto" means XLA for one device with a GPU, which rounds otherwise
        shapes = [[(part, tuple(v.shape)) for part, _, v in side.compared] for side in (self.one, self.many)]
        if shapes[0] != shapes[1]:
            raise CertificateError(
                f"build_model() built another model on one device than under {describe_strategy(strategy)}: "
                f"{counted(len(shapes[0]), 'variable')} of {shapes[0]} against {shapes[1]}. Have it build the same."
            )
        paths = [path for _, path, _ in self.many.compared]
        self.one.compared = [(part, path, v) for (part, _, v), path in zip(self.one.compared, paths, strict=True)]
        for side in (self.one, self.many):
            draws.begin(side.model)
        self._slots: dict[str, SlotKind] = {}
        self.rounding = rounding_of(self.many.model)

    def build_optimizers(self, batch: StepData) -> None:
        """Have optimizers make their variables that only do so in a step.

        Raises:
            CertificateError: one device itself fails.
            Exception: whatever the replicas' step ends with.
        """
        bounds = self.bounds(int(num_rows(batch)))
        with _must_work():
            self.one.build_optimizers(batch, bounds)
        self.many.build_optimizers(batch, bounds)
        self._slots = dict(self.many.slot_kinds())
        for side in (self.one, self.many):
            side.slots = list(zip(self._slots, side.optimizer_variables(), strict=True))

    def train_freely(self, batches: Sequence[TensorNest], start: State) -> tuple[float, float]:
        """Train from a state without taking over any in between.

        Returns:
            How far the weights end from one device's, relative to its largest weight: those of the replicas, and of
            one device with the rows of each batch in another order.
        """
        ends: list[Values] = []
        for side, is_reordered in ((self.one, False), (self.many, False), (self.one, True)):
            side.load(start)
            for step, batch in enumerate(batches, 1):
                self.draws.at(side.model, step)
                rows = int(num_rows(batch))
                order = np.random.default_rng(step).permutation(rows)
                seen = side.step(take_rows(batch, order) if is_reordered else batch, self.bounds(rows))
            ends.append(seen)
        one, *others = ({k: as_float(v[0]) for k, v in end.items() if k[0] == "weights"} for end in ends)
        scale = max([LEAST, *(largest(value) for value in one.values())])
        many, reordered = (
            max([largest(difference(other[key], one[key])) for key in one], default=0.0) / scale for other in others
        )
        return many, reordered

    def bounds(self, rows: int) -> list[int]:
        """Where a batch of that many rows is cut: by ours as evenly as it goes, else as TensorFlow does."""
        cut = even_bounds if self.many.is_ours else bounds_of_tensorflow
        return cut(rows, self.many.num_replicas)

    def compare(
        self,
        batch: StepData,
        step: int,
        *,
        before: State | None = None,
        bounds: Sequence[int] | None = None,
        without: Collection[str] = (),
    ) -> Comparison:
        """Make a step on both sides from the state of one device, which is left where the step leads it.

        Raises:
            CertificateError: one device itself fails.
            Exception: whatever the replicas' step ends with.
        """
        rows = int(num_rows(batch))
        bounds = self.bounds(rows) if bounds is None else bounds
        before = self.one.state() if before is None else before
        self.many.load(before)
        expected = self._on_one_device(batch, before, without, step)
        self.draws.note(self.one.model, step)
        after = self.one.state()
        reordered = self._reordered(batch, before, without, step)
        self.one.load(after)
        self.draws.at(self.many.model, step)
        found = self.many.step(batch, bounds, without=without)
        expected, reordered = (_named_as_in(found, values) for values in (expected, reordered))
        sizes = tuple(stop - start for start, stop in itertools.pairwise(bounds))
        was = {(part, path): value for (part, path, _), value in zip(self.one.compared, before, strict=False)}
        deviations = tuple(measure(expected, found, reordered, was, step, self.rounding, self._slots))
        if _is_off_in_updates_alone(deviations):
            given = self._on_one_device(batch, before, without, step, gradients=found)
            self.one.load(after)
            by_part = {(d.part, d.name): d for d in measure(given, found, given, was, step, self.rounding, self._slots)}
            deviations = tuple(_judged_by(by_part[d.part, d.name], d) if _is_of_update(d) else d for d in deviations)
        return Comparison(step, sizes, batch, before, expected, found, deviations)

    def _on_one_device(
        self,
        batch: StepData,
        before: State,
        without: Collection[str],
        step: int,
        *,
        gradients: Values | None = None,
    ) -> Values:
        self.one.load(before)
        self.draws.at(self.one.model, step)
        with _must_work():
            return self.one.step(batch, (), without=without, gradients=gradients)

    def _reordered(self, batch: StepData, before: State, without: Collection[str], step: int) -> Values:
        """Make the step on one device in another way that is as good: rows reordered, values moved by rounding."""
        random = np.random.default_rng(0)
        moved = [moved_by_rounding(value, random) for value in before]
        order = random.permutation(int(num_rows(batch)))
        others = batch if self.draws.depend_on_rows else take_rows(batch, order)
        return self._on_one_device(others, moved, without, step)

    def distance_to_itself(self, comparison: Comparison) -> Deviation | None:
        """Make a step of one device again, traced anew; return the largest deviation beyond rounding, if any."""
        self.one.retrace()
        again = self._on_one_device(comparison.batch, comparison.before, (), comparison.step)
        again = _named_as_in(comparison.expected, again)
        deviations = measure(
            comparison.expected, again, comparison.expected, {}, comparison.step, self.rounding, self._slots
        )
        return max((d for d in deviations if d.is_beyond), key=lambda d: d.excess, default=None)


@contextlib.contextmanager
def _must_work() -> Iterator[None]:
    """Let what one device does be no matter of the strategy.

    Raises:
        CertificateError: it fails.
    """
    try:
        yield
    except Exception as error:
        raise CertificateError(
            f"The model fails on one device, so nothing says what is right: {type(error).__name__}: {error}"
        ) from error


def _is_of_update(deviation: Deviation) -> bool:
    """Whether an optimizer's update is off in a variable."""
    return deviation.part in ("weights", "optimizer") and (deviation.is_beyond or deviation.is_apart)


def _is_off_in_updates_alone(deviations: Sequence[Deviation]) -> bool:
    """Whether updates are off, and the gradients, which are known, are not."""
    gradients = [d for d in deviations if d.part == "gradient"]
    return bool(gradients) and not any(d.is_beyond for d in gradients) and any(map(_is_of_update, deviations))


def _judged_by(other: Deviation, deviation: Deviation) -> Deviation:
    """Return a deviation as large as it is, and as far beyond rounding as another one."""
    return dataclasses.replace(deviation, excess=other.excess, is_apart=other.is_apart)


def _named_as_in(found: Values, values: Values) -> Values:
    """Name metrics as the other side does: Keras numbers the names of those that were given none."""
    own, others = ([key for key in of_side if key[0] == "metric"] for of_side in (values, found))
    if len(own) != len(others):
        return values
    names = dict(zip(own, others, strict=True))
    return {names.get(key, key): value for key, value in values.items()}
