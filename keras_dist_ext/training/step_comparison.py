"""Make a step on a few rows both on one device and on replicas, from the same state, and measure what differs.

What differs by definition is left out on both sides: moments of ``BatchNormalization``, unless of the global batch, and
random numbers, which are the same for each row, unless replicas draw what one device draws. All that a step changes is
put back.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.layers import flat_layers, seed_generators
from keras_dist_ext._keras.optimizers import end_accumulation_next
from keras_dist_ext._keras.tracing import functions_traced_apart
from keras_dist_ext._keras.variables import Variable, components, is_sync_on_read, tf_variable
from keras_dist_ext.aliases import Array, Gradient, SpecNest, StepData, TensorNest
from keras_dist_ext.data.split import num_rows, take_rows
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.step.logs import ComputesWithResults, leaf_metrics
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.strategy.scope import optimizers, raw_variables
from keras_dist_ext.strategy.workers import Workers, workers_of
from keras_dist_ext.training.comparable_steps import CannotCompare, comparable, refuse_python, unoptimized
from keras_dist_ext.training.deviations import (
    Deviation,
    Part,
    as_float,
    difference,
    largest,
    measure,
    moved_by_rounding,
    rounding_of,
)
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.snapshot import kept_numbers, kept_state

__all__ = ["Prepare", "compare_step", "state_added_up", "sums_on_read"]

Prepare = Callable[[Exception], None]
_Traced = Callable[[StepData], tuple[TensorNest, dict[str, tf.Tensor]]]  # logs, and gradients by their variable's id
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")
_Runner = Callable[[StepData], tuple[TensorNest, dict[int, tf.Tensor]]]


def compare_step(
    of_run: DistributedStep,
    rows: StepData,
    prepare: Prepare,
    unprepared: tuple[type[Exception], ...],
) -> list[Deviation]:
    """Make a step both ways, and return what differs beyond rounding.

    Raises:
        CannotCompare: the step cannot be made on so few rows, calls Python when it runs, or draws random numbers that
            cannot be made alike for all rows.
    """
    with comparable(of_run.model, rows):
        step = of_run.untraced_copy()
        step.without_xla()
        return _BothWays(step, rows, prepare, unprepared).compare()


class _Gradients(StepObserver):
    """Keeps the gradients that optimizers run with, of the first replica that is traced, or runs."""

    def __init__(self) -> None:
        self.of: dict[int, tf.Tensor] = {}  # by the variable's id
        self._graph = _graph()

    def on_update(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
        """Keep them, unless they are in a branch or loop of the graph."""
        if _graph() is self._graph:
            for gradient, variable in zip(gradients, variables, strict=True):
                if gradient is not None:
                    self.of.setdefault(id(variable), tf.convert_to_tensor(gradient))


def _graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class _BothWays:
    """One step, made on one device and on replicas from the same state."""

    def __init__(
        self, step: DistributedStep, rows: StepData, prepare: Prepare, unprepared: tuple[type[Exception], ...]
    ) -> None:
        self._step = step
        self._rows = rows
        self._prepare = prepare
        self._unprepared = unprepared
        self._workers = workers_of(step.strategy)
        self._is_chief = self._workers is None or self._workers.is_chief
        self._compared = list(_compared(step.model))
        self._parts_of_sums = list(_parts_of_sums(step.model))
        self._paths = {id(variable): path for (_, path), variable in self._compared}

    def compare(self) -> list[Deviation]:
        """Return what is beyond rounding, in one step or, where that assigns state, in another from what it has left.

        A running maximum that begins at zero is after one step the mean of what replicas have, as on one device.
        """
        one, many = self._runner(self._alone), self._runner(self._on_replicas)
        before = {part: components(variable)[0].numpy() for part, variable in self._compared}
        deviations, after = self._deviations(one, many, {}, before)
        left = {
            part: after[part][0]
            for part, value in before.items()
            if part[0] == "state" and not np.array_equal(after[part][0], value)
        }
        if deviations or not left:
            return deviations
        return self._deviations(one, many, left, before | left)[0]

    def _deviations(
        self, one: _Runner, many: _Runner, state: Mapping[Part, Array], before: Mapping[Part, Array]
    ) -> tuple[list[Deviation], dict[Part, tuple[Array, ...]]]:
        """Make a step both ways; return what is beyond rounding, and what one device has made.

        Args:
            one: makes it on one device.
            many: makes it on the replicas.
            state: that it begins with, where that is not what the model has.
            before: all that the step begins with.
        """
        with self._kept():
            self._begin_with(state)
            expected = self._made(one, self._rows)
        with self._kept():
            self._begin_with(state)
            found = self._made(many, self._rows, on_replicas=True)
        rounding = rounding_of(self._step.model)
        off = _suspects(expected, found, rounding)
        if self._workers is not None:  # of a state of rows, some replicas may have what one device has
            seen = self._workers.sum([float(part in off) for part in expected])
            off = {part: expected[part] for part, count in zip(expected, seen, strict=True) if count}
        if not off:
            return [], expected
        with self._kept():
            reordered = self._made(one, self._in_other_order(before))
        measured = measure(off, found, reordered, {k: as_float(v) for k, v in before.items()}, 1, rounding, {})
        deviations = list(measured) if self._workers is None else _worst(list(measured), self._workers)
        return [d for d in deviations if d.is_beyond or d.is_apart], expected

    def _begin_with(self, state: Mapping[Part, Array]) -> None:
        for part, variable in self._compared:
            if part in state:
                for copy in components(variable):
                    copy.assign(state[part])

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Put back what a step changes: the model's state, and what Python counts where a step runs eagerly."""
        with kept_state(self._step.model), kept_numbers(self._step.model):
            yield

    def _in_other_order(self, before: Mapping[Part, Array]) -> StepData:
        """Reorder the rows, and move values by rounding: what one device makes of that is as good."""
        random = np.random.default_rng(0)
        for part, variable in self._compared:
            components(variable)[0].assign(moved_by_rounding(before[part], random))
        if self._step.model.replica_seeds.draws == "global":
            return self._rows  # an example draws by its place
        return take_rows(self._rows, random.permutation(int(num_rows(self._rows))))

    def _alone(self, rows: StepData) -> TensorNest:
        return self._step.logs_of_first_replica(self._step.run_on_first_replica(rows))

    def _on_replicas(self, rows: StepData) -> TensorNest:
        extra, _ = self._step.run(rows)
        return self._step.logs(extra)

    def _runner(self, way: Callable[[StepData], TensorNest]) -> _Runner:
        """Trace a way of making the step; return what makes it, and gives logs and gradients, these by variable."""

        def run(rows: StepData) -> tuple[TensorNest, dict[str, tf.Tensor]]:
            gradients = self._step.observer = _Gradients()
            with functions_traced_apart():  # a step that runs eagerly may leave what the check draws in their traces
                logs = way(rows)
            return logs, {str(key): gradient for key, gradient in gradients.of.items()}

        def made(traced: _Traced, rows: StepData) -> tuple[TensorNest, dict[int, tf.Tensor]]:
            logs, gradients = traced(rows)
            return logs, {int(key): gradient for key, gradient in gradients.items()}

        if self._step.is_eager:
            return functools.partial(made, functools.partial(self._prepared, run))
        runtime, exact = self._step.model.replica_runtime, tree.map_structure(_spec, self._rows)
        try:
            return functools.partial(made, self._traced(run, exact if runtime.rows_are_static else runtime.batch_spec))
        except CannotCompare:
            raise
        except Exception:  # code that needs a number of rows
            return functools.partial(made, self._traced(run, exact))

    def _traced(self, run: _Traced, spec: SpecNest) -> _Traced:
        traced = self._prepared(in_graph(run).get_concrete_function, spec)
        refuse_python(traced.graph)
        runner: _Traced = traced
        return runner

    def _prepared(self, function: Callable[[_Given], _Made], given: _Given) -> _Made:
        """Call a function that traces or runs a step, until the step has all that it needs."""
        while True:
            try:
                return function(given)
            except ComputesWithResults:
                self._step.pool_results()
            except self._unprepared as missing:
                self._prepare(missing)

    def _made(self, run: _Runner, rows: StepData, *, on_replicas: bool = False) -> dict[Part, tuple[Array, ...]]:
        """Make a step; return all that it has changed, a value for each replica of this worker."""
        model = self._step.model
        for _, variable in self._parts_of_sums:
            _put_on_first(variable, is_chief=self._is_chief or not on_replicas)
        for metric in leaf_metrics(model):
            metric.reset_state()
        for _, optimizer in optimizers(model):
            end_accumulation_next(optimizer)
        with unoptimized():
            logs, gradients = run(rows)
        seen: dict[Part, tuple[Array, ...]] = {}
        for key, gradient in gradients.items():
            if key in self._paths:
                seen["gradient", self._paths[key]] = (np.asarray(gradient),)
        for part, variable in self._compared:
            seen[part] = tuple(copy.numpy() for copy in components(variable))
        for part, variable in self._parts_of_sums:
            seen[part] = (np.asarray(variable.read_value() if on_replicas else components(variable)[0]),)
        for name, value in _leaves(logs, "") if self._step.logs_are_compared else ():
            seen["metric", name] = (np.asarray(value),)
        return seen


def _worst(own: list[Deviation], workers: Workers) -> list[Deviation]:
    """Return the largest deviations of all workers, each of which has measured the same parts of its replicas."""
    of_all = np.zeros((workers.num_workers, len(own), 5))
    of_all[workers.index] = [(d.absolute, d.relative, d.excess, d.spread, d.is_apart) for d in own]
    worst = workers.sum(of_all.ravel()).reshape(of_all.shape).max(axis=0)
    return [
        dataclasses.replace(d, absolute=a, relative=r, excess=e, spread=s, is_apart=bool(apart))
        for d, (a, r, e, s, apart) in zip(own, worst.tolist(), strict=True)
    ]


def _spec(leaf: TensorNest) -> tf.TypeSpec | None:
    return None if leaf is None else tf.type_spec_from_value(leaf)


def _leaves(logs: TensorNest, path: str) -> Iterator[tuple[str, tf.Tensor]]:
    if isinstance(logs, Mapping):
        for name, value in logs.items():
            yield from _leaves(value, f"{path}/{name}" if path else str(name))
    elif isinstance(logs, list | tuple):
        for number, value in enumerate(logs):
            yield from _leaves(value, f"{path}/{number}" if path else str(number))
    elif tf.is_tensor(logs) and (logs.dtype.is_floating or logs.dtype.is_integer):
        yield path or "the logs", logs


def _compared(model: keras.Model) -> Iterator[tuple[Part, Variable]]:
    """Yield what a step may change, but for what optimizers, metrics and random generators hold."""
    seeds = {id(generator.state) for layer in flat_layers(model) for generator in seed_generators(layer)}
    seen: collections.Counter[Part] = collections.Counter()
    for variable in model.variables:
        if id(variable) in seeds or is_sync_on_read(variable):
            continue
        part = "weights" if variable.trainable else "state", variable.path
        seen[part] += 1  # layers of one name have variables of one path
        yield part if seen[part] == 1 else (part[0], f"{part[1]} ({seen[part]})"), variable
    for layer in flat_layers(model):
        for name, variable in raw_variables(layer):
            part = "state", f"{layer.path or layer.name}/{name}"
            is_number = variable.dtype.is_floating or variable.dtype.is_integer
            if is_number and part not in seen and not is_sync_on_read(variable):
                seen[part] += 1
                yield part, variable


def _parts_of_sums(model: keras.Model) -> Iterator[tuple[Part, tf.Variable]]:
    """Yield the variables of which each replica holds its own part until they are read, but for those of metrics."""
    for layer in flat_layers(model):
        for name, variable in raw_variables(layer):
            is_number = variable.dtype.is_floating or variable.dtype.is_integer
            if is_number and is_sync_on_read(variable) and variable.aggregation != tf.VariableAggregation.NONE:
                yield ("state", f"{layer.path or layer.name}/{name}"), variable


def state_added_up(model: keras.Model) -> frozenset[str]:
    """Return the names of the state of which TensorFlow adds up what the replicas assign."""
    held = [*_compared(model), *_parts_of_sums(model)]
    total = tf.VariableAggregation.SUM
    return frozenset(name for (_, name), variable in held if tf_variable(variable).aggregation == total)


def sums_on_read(model: keras.Model) -> list[str]:
    """Return the names of the state of which each replica holds its own part of a sum."""
    total = tf.VariableAggregation.SUM
    return [name for (_, name), variable in _parts_of_sums(model) if variable.aggregation == total]


def _put_on_first(variable: tf.Variable, *, is_chief: bool) -> None:
    """Have the first replica hold all that is read of a variable, and the others nothing that is added to it."""
    value = tf.identity(variable.read_value())
    is_sum = variable.aggregation == tf.VariableAggregation.SUM
    for number, copy in enumerate(components(variable)):
        copy.assign(value if not is_sum or (is_chief and not number) else tf.zeros_like(value))


def _suspects(
    expected: Mapping[Part, tuple[Array, ...]], found: Mapping[Part, tuple[Array, ...]], rounding: float
) -> dict[Part, tuple[Array, ...]]:
    """Return of what was expected that of which something else was found, and the largest gradient, to measure by."""
    off = {}
    for part, copies in expected.items():
        others = found.get(part, ())
        if part[0] == "gradient" and not others:
            continue
        if not others or any(np.shape(other) != np.shape(copies[0]) for other in others):
            off[part] = copies
            continue
        one = as_float(copies[0])
        if not all(largest(difference(as_float(other), one)) <= 1e-2 * rounding * largest(one) for other in others):
            off[part] = copies
    if off:
        gradients = {part: largest(as_float(copies[0])) for part, copies in expected.items() if part[0] == "gradient"}
        parts = [max(gradients, key=lambda part: gradients[part])] if gradients else []
        parts += [("gradient", name) for kind, name in off if kind == "weights" and ("gradient", name) in gradients]
        off.update({part: expected[part] for part in parts if part in found})
    return off
