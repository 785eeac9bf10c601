"""Make training steps one at a time, on one device or on replicas, and read all that they change.

All rows may draw the same random numbers meanwhile (``RowsAlike``), whatever replica they are on.

Letters: N = rows of the global batch; R = replicas.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.interception import patched
from keras_dist_ext._keras.layers import flat_layers, seed_generators
from keras_dist_ext._keras.losses import without_parts
from keras_dist_ext._keras.models import begin_fit, build_as_fit, build_from_batch, metric_results
from keras_dist_ext._keras.optimizers import GradientSlots, inner_optimizer, optimized_variables, slots_by_attribute
from keras_dist_ext._keras.strategies import is_default_strategy, regroup
from keras_dist_ext._keras.variables import Variable, components, is_sync_on_read
from keras_dist_ext.aliases import Array, StepData, TensorNest, UserFunction
from keras_dist_ext.data.split import num_rows, take_rows
from keras_dist_ext.errors import CertificateError
from keras_dist_ext.strategy.scope import describe_strategy, optimizers, raw_variables
from keras_dist_ext.training.deviations import Part, SlotKind, Values
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["TrainingRun", "State", "bounds_of_tensorflow", "even_bounds", "without_retracing_warnings", "on_one_device"]

State = list[Array]


class TrainingRun:
    """A model, and how it makes one training step at a time on a global batch.

    Args:
        build_model: returns a compiled model.
        strategy: under which to build it; None is one device.
        batch: a global batch to build it for.

    Raises:
        CertificateError: what was built cannot be trained, or lives elsewhere.
    """

    def __init__(
        self, build_model: Callable[[], keras.Model], strategy: tf.distribute.Strategy | None, batch: StepData
    ) -> None:
        self.strategy = strategy
        with self._in_scope():
            self.model = build_model()
        self._check_model()
        runtime = runtime_of(self.model)
        self.is_ours = runtime is not None
        if runtime is not None:
            runtime.check = False  # what its steps do is what the certificate says
            runtime.chooses_xla = False  # which rounds otherwise
        with self._in_scope():  # where slots are made, of an optimizer that is built
            self._kept = [GradientSlots(optimizer) for _, optimizer in optimizers(self.model)]
        self.trouble_of_fit: Exception | None = None
        self._build(batch)
        self._functions: dict[frozenset[str], UserFunction] = {}  # that make a step, by what it is made without
        compared = list(self._compared())
        names = unique_names(path for _, path, _ in compared)
        self.compared = [(part, name, v) for (part, _, v), name in zip(compared, names, strict=True)]
        self.slots: list[
            tuple[str, tf.Variable]
        ] = []  # (name, variable) of optimizers, once they are known to be built

    def _in_scope(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    def _check_model(self) -> None:
        if not isinstance(self.model, keras.Model) or not self.model.compiled:
            raise CertificateError(
                f"build_model() returned {type(self.model).__name__}, and a certificate needs a compiled Keras model. "
                "Have the function build a model, call `compile` on it, and return it."
            )
        own = self.model.distribute_strategy
        if self.strategy is None and not is_default_strategy(own):
            raise CertificateError(
                f"build_model() enters the scope of {describe_strategy(own)} by itself, so it cannot build the model "
                "for one device. Take `with strategy.scope():` (or `strategy=`) out of it: it is called in the scope."
            )

    def _build(self, batch: StepData) -> None:
        if self.is_ours:
            with patched(self.model.replica_runtime, "needs_variables", True):
                build_as_fit(self.model, batch)
            return
        with self._in_scope():
            if self.num_replicas > 1:
                try:
                    begin_fit(self.model, self.split(batch, bounds_of_tensorflow(num_rows(batch), self.num_replicas)))
                except Exception as trouble:  # whatever it is, it is what `fit` would end with
                    self.trouble_of_fit = trouble
            build_from_batch(self.model, batch)

    @property
    def num_replicas(self) -> int:
        """R, 1 without a strategy."""
        return 1 if self.strategy is None else int(self.strategy.num_replicas_in_sync)

    def _compared(self) -> Iterator[tuple[str, str, tf.Tensor]]:
        """(part, path, variable) of what is compared after a step: weights, and what layers assign."""
        seeds = {id(g.state) for layer in flat_layers(self.model) for g in seed_generators(layer)}
        for variable in self.model.variables:
            if id(variable) not in seeds:
                yield "weights" if variable.trainable else "state", variable.path, variable
        for layer in flat_layers(self.model):
            for name, variable in raw_variables(layer):
                if variable.dtype.is_floating:
                    yield "state", f"{layer.path or layer.name}/{name}", variable

    def optimizer_variables(self) -> Iterator[Variable]:
        """What optimizers keep: momenta, counts; not what was added to see the gradients."""
        kept = {id(gradient) for _, gradient in self._gradients()}
        for _, optimizer in optimizers(self.model):
            yield from (v for v in optimizer.variables if id(v) not in kept)

    def slot_kinds(self) -> list[tuple[str, SlotKind]]:
        """A name for each variable of an optimizer, such as "adam/momentums of dense/kernel", and what it is.

        Keras' optimizers keep them in lists with one for each variable that they train.
        """
        paths = {id(variable): path for _, path, variable in self.compared}
        known: dict[int, tuple[str, SlotKind]] = {}
        for _, optimizer in optimizers(self.model):
            name = inner_optimizer(optimizer).name
            trained = [paths.get(id(v), v.path) for v in optimized_variables(optimizer)]
            for kind, values in slots_by_attribute(optimizer).items():
                for slot, path in zip(values, trained, strict=False) if len(values) == len(trained) else ():
                    known[id(slot)] = f"{name}/{kind} of {path}", SlotKind(kind, path)
        variables = list(self.optimizer_variables())
        found = [known.get(id(v), (v.path, SlotKind(v.path, ""))) for v in variables]
        return list(zip(unique_names(name for name, _ in found), (kind for _, kind in found), strict=True))

    def _gradients(self) -> list[tuple[tf.Variable, Variable]]:
        return [pair for kept in self._kept for pair in kept.pairs]

    # State

    def state(self) -> State:
        """Read all that a step changes, but random generators and metrics: a value for all replicas."""
        return [_copies(v)[0] for v in self._variables()]

    def load(self, state: State) -> None:
        """Set it on all replicas."""
        for variable, value in zip(self._variables(), state, strict=True):
            if is_sync_on_read(variable):
                variable.assign(value)
                continue
            for copy in components(variable):
                copy.assign(value)

    def _variables(self) -> list[Variable]:
        return [*(v for _, _, v in self.compared), *self.optimizer_variables()]

    def build_optimizers(self, batch: StepData, bounds: Sequence[int]) -> None:
        """Make a step for nothing but the variables of optimizers that only a step builds."""
        if not all(optimizer.built for _, optimizer in optimizers(self.model)):
            before = [_copies(v)[0] for _, _, v in self.compared]
            self.step(batch, bounds)
            self.load([*before, *self.state()[len(before) :]])

    # Steps

    def step(
        self,
        batch: TensorNest,
        bounds: Sequence[int],
        *,
        without: Collection[str] = (),
        gradients: Values | None = None,
    ) -> dict[Part, tuple[Array, ...]]:
        """Make one step.

        Args:
            batch: the global batch.
            bounds: of the rows of each replica of stock Keras, R + 1 numbers; ours split a batch themselves.
            without: parts to leave out, see ``_keras.losses.without_parts``.
            gradients: what another step gave; has its gradients used in place of this step's own.

        Returns:
            For each part and name, a value for each replica.
        """
        paths = {id(variable): path for _, path, variable in self.compared}
        for variable, kept in self._gradients():
            given = None if gradients is None else gradients["gradient", paths.get(id(variable), variable.path)][0]
            for copy in components(kept):
                copy.assign(tf.zeros_like(copy) if given is None else given)
        self.model.reset_metrics()
        for optimizer in self._kept:
            optimizer.are_given = gradients is not None
        wanted = frozenset(without) | ({"gradients"} if gradients is not None else set())
        with without_parts(without):
            is_new = wanted not in self._functions
            if is_new:
                self._functions[wanted] = self.model.make_train_function(force=True) or self.model.train_function
            self.model.train_function = self._functions[wanted]
            splits = self.num_replicas > 1 and not self.is_ours
            if splits and is_new and 0 in np.diff(bounds):
                self._trace_for_any_rows(batch)
            logs = self.model.train_function(iter([self.split(batch, bounds) if splits else batch]))
        if self.is_ours:
            self.model.replica_runtime.synchronize()
        seen: dict[Part, tuple[Array, ...]] = {}
        for variable, kept in self._gradients():
            seen["gradient", paths.get(id(variable), variable.path)] = _copies(kept)
        for part, path, variable in self.compared:
            seen[part, path] = _copies(variable)
        for name, variable in self.slots:
            seen["optimizer", name] = _copies(variable)
        for name, value in metric_results(self.model, logs).items():
            seen["metric", name] = (value,)
        return seen

    def _trace_for_any_rows(self, batch: StepData) -> None:
        """Have a step traced for any number of rows, as in `fit`: Keras treats no rows otherwise where it knows it."""
        before = self.state()
        for rows in (1, 2):
            many = take_rows(batch, np.zeros(rows * self.num_replicas, int))
            self.model.train_function(
                iter([self.split(many, even_bounds(rows * self.num_replicas, self.num_replicas))])
            )
        self.load(before)
        self.model.reset_metrics()

    def retrace(self) -> None:
        """Have the next step traced anew."""
        self._functions.clear()

    def split(self, batch: StepData, bounds: Sequence[int]) -> TensorNest:
        """Cut a batch as TensorFlow hands it to replicas."""
        parts = [rows_between(batch, start, stop) for start, stop in itertools.pairwise(bounds)]
        return tree.map_structure(lambda *leaves: None if leaves[0] is None else regroup(leaves), *parts)


def unique_names(names: Iterable[str]) -> list[str]:
    """Number names that come again: two layers of a model may have one name.

    >>> unique_names(["a/kernel", "b/kernel", "a/kernel"])
    ['a/kernel', 'b/kernel', 'a/kernel (2)']
    """
    counts: collections.Counter[str] = collections.Counter()
    unique = []
    for name in names:
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return unique


def on_one_device(build_model: Callable[[], keras.Model], batch: StepData) -> TrainingRun:
    """Build the side that is right by definition.

    Raises:
        CertificateError: it cannot be built.
    """
    try:
        return TrainingRun(build_model, None, batch)
    except CertificateError:
        raise
    except Exception as error:
        raise CertificateError(
            f"The model cannot be built on one device, so nothing says what is right: {type(error).__name__}: {error}"
        ) from error


def _copies(variable: Variable) -> tuple[Array, ...]:
    if is_sync_on_read(variable):
        return (np.asarray(tf.convert_to_tensor(variable)),)
    return tuple(np.asarray(copy) for copy in components(variable))


def even_bounds(rows: int, replicas: int) -> list[int]:
    """Cut rows as evenly as it goes: replica r gets rows [r N // R, (r + 1) N // R)."""
    return [replica * rows // replicas for replica in range(replicas + 1)]


def bounds_of_tensorflow(rows: int, replicas: int) -> list[int]:
    """Cut rows as TensorFlow does: each replica gets N / R rows, rounded up, as long as there are any."""
    return [min(rows, replica * -(-rows // replicas)) for replica in range(replicas + 1)]


def rows_between(batch: StepData, start: int, stop: int) -> TensorNest:
    """Cut rows out of a batch; what has no rows stays."""
    return take_rows(batch, np.arange(start, stop))


@contextlib.contextmanager
def without_retracing_warnings() -> Iterator[None]:
    """Keep TensorFlow from warning that functions are traced often, which experiments do on purpose."""

    def is_other(record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
