"""The traced code of one distributed step: what a replica computes, and what all replicas agree on.

User code inside a step (``train_step``, ``compute_loss``, losses, layers, metrics) is written for one device and sees
one replica's rows as if they were the whole batch. ``ReplicaStep`` makes the sum over replicas exact:

- a gradient is weighted by the replica's share of the global rows, then summed once, before clipping and updates;
- a loss that does not divide by the rows (sum, mask, sample weights) divides by the count over all replicas;
- an optimizer runs on every replica with the same summed gradient, so no conditional of it spans devices;
- non-trainable state that a layer assigned becomes the mean over replicas, weighted by rows;
- metrics add up on each replica, and results are computed from the pooled state, once an execution.

Letters: n = rows of a replica, N = rows of the global batch, R = replicas in sync, over all workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext import _keras, pass_through
from keras_dist_ext._keras import Variable, tree
from keras_dist_ext.errors import DataError
from keras_dist_ext.guard import StepGuard
from keras_dist_ext.logs import Result
from keras_dist_ext.means import Degrees, Means, Term
from keras_dist_ext.pass_through import LocalUpdate, PassThrough
from keras_dist_ext.recorder import StepNote
from keras_dist_ext.reduce import of_dtype, parts_of, shares_memory, sum_over_replicas, times
from keras_dist_ext.seeds import fold_in, replica_offset
from keras_dist_ext.xla import draw_as_uncompiled, warn_once

__all__ = [
    "CannotCompile",
    "CannotLoop",
    "ReplicaStep",
    "UnbuiltOptimizer",
    "UnknownLossDegrees",
    "assign_mean",
]


class UnknownLossDegrees(Exception):
    """A layer's additional loss is met before it is known how it grows with the rows of a batch."""


class UnbuiltOptimizer(Exception):
    """An optimizer meets its variables for the first time in a graph, where it can make none of its own.

    Args:
        build: makes them, outside of graphs, in the strategy's scope.
    """

    def __init__(self, build: Callable[[], None]) -> None:
        super().__init__()
        self.build = build


class CannotCompile(Exception):
    """A reduction over replicas is met inside of what XLA compiles."""


class CannotLoop(Exception):
    """Sparse gradients whose length may change from step to step are met in a loop of steps.

    TensorFlow gathers them by a collective, which in one execution takes one shape ("Shape mismatch in the collective
    instance", tensorflow/core/common_runtime/collective_param_resolver_local.cc).
    """


class ReplicaStep:
    """One replica's part of a step, while it is traced (or run eagerly).

    Args:
        model: the Keras model.
        rows: n, an int where static.
        global_rows: N, an int where static.
        kind: "train", "test" or "predict".
        pools_results: whether the results of metrics inside the step are those of all replicas, because the step
            computes with them.
        without_seed: the generator behind ``seed=None``.
        note: takes what is recorded of the step, if anything is.
        guard: leaves the step out if something in it is not finite, if that is wanted.
        loops: whether one execution may make several steps.
        degrees: how numbers grow with the rows, where the graph does not tell; None takes all of them for means.
    """

    turn: int | None = None  # the number of the virtual replica or micro-batch, where replicas make several

    def __init__(
        self,
        model: Any,
        rows: int | tf.Tensor,
        global_rows: int | tf.Tensor,
        *,
        kind: str = "train",
        pools_results: bool = False,
        without_seed: Any = None,
        note: StepNote | None = None,
        guard: StepGuard | None = None,
        loops: bool = False,
        degrees: Degrees | None = None,
    ) -> None:
        context = tf.distribute.get_replica_context()
        self.model = model
        self.strategy = context.strategy
        self.num_replicas: int = context.num_replicas_in_sync
        self.kind = kind
        self.rows = rows
        self.global_rows = global_rows
        # One trace serves all replicas of a TPU: there are no threads to meet, and all is compiled as it is.
        self._is_on_tpu = isinstance(self.strategy, tf.distribute.TPUStrategy)
        self.results: dict[int, Result] = {}  # by the tensor's id
        self._pools_results = pools_results
        self._can_be_empty = not (isinstance(rows, int) and rows > 0)
        self._scaled: set[int] = set()
        self._means = Means(rows, degrees)
        self._has_sums = False  # whether a loss was a sum over all rows, and was made a mean
        self._assigned: dict[int, Any] = {}
        self._functions: dict[int, tuple[Any, Any]] = {}  # by id: a tf.function of the user's, and its copy
        self._draws_seed = False
        self._seeds: Any = getattr(model, "replica_seeds", None)
        self._generator_without_seed = without_seed
        self._num_ops = 0
        self.note = note
        self.guard = guard
        self.batch: Any = None  # this replica's, where it is guarded
        self._losses: list[Any] = []
        gathers = self.num_replicas > 1 and not self._is_on_tpu and not shares_memory(self.strategy)
        self._must_not_loop = loops and gathers  # with sparse gradients of unknown length

    # Shares

    @property
    def share(self) -> float | tf.Tensor:
        """The fraction n / N, a float where both are static, else a float64 tensor."""
        if isinstance(self.rows, int) and isinstance(self.global_rows, int):
            return self.rows / self.global_rows if self.global_rows else 0.0
        return tf.math.divide_no_nan(tf.cast(self.rows, tf.float64), tf.cast(self.global_rows, tf.float64))

    @property
    def _inverse_share(self) -> float | tf.Tensor:
        """N / n, and 0 for an empty replica."""
        if isinstance(self.rows, int) and isinstance(self.global_rows, int):
            return self.global_rows / self.rows if self.rows else 0.0
        return tf.math.divide_no_nan(tf.cast(self.global_rows, tf.float64), tf.cast(self.rows, tf.float64))

    def sum_over_replicas(self, values: Sequence[Any]) -> list[Any]:
        """Add up each value over all replicas; every replica gets the sums."""
        self.check_loop(values)
        context = tf.distribute.get_replica_context()
        if self._is_on_tpu:
            return list(context.all_reduce(tf.distribute.ReduceOp.SUM, list(values)))
        if _keras.in_xla():
            raise CannotCompile
        with _keras.kept_losses(self.model):  # of the layers, which the other replicas call meanwhile
            return list(context.merge_call(sum_over_replicas, args=(list(values),)))

    def check_loop(self, values: Sequence[Any]) -> None:
        """Raise ``CannotLoop`` if these cannot be added up over replicas several times in an execution."""
        if self._must_not_loop and any(isinstance(v, tf.IndexedSlices) and v.values.shape[0] is None for v in values):
            raise CannotLoop

    @property
    def replica_id(self) -> Any:
        """The replica's number over all workers: an int but on TPUs."""
        return _keras.replica_id()

    @property
    def sums_in_layers(self) -> bool:
        """Whether sums inside of a layer are ours to make."""
        return self.num_replicas > 1 and shares_memory(self.strategy)

    # What Keras asks (_keras.Step)

    def reduce_loss(self, local: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> Any:
        """Turn a replica's reduced loss into one whose mean over replicas, weighted by share, is the global loss."""
        if self.num_replicas == 1 or reduction in (None, "none"):
            return local
        return self._means.know(self._mean_loss(local, sample_weight, mask, reduction))

    def _mean_loss(self, local: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
        if tuple(local.shape) == (0,):
            local = tf.reduce_sum(local)  # Keras leaves the losses of no rows as they are (losses/loss.py)
        weighted = reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None)
        if reduction == "sum" or (weighted and mask is None and not _rank(sample_weight)):
            self._has_sums = True
            return times(local, self._inverse_share)
        if mask is None and not weighted:
            return local
        if weighted:
            elements = tf.convert_to_tensor(_keras.apply_mask(sample_weight, mask, local.dtype, reduction))
        else:
            elements = mask
        count = tf.reduce_sum(tf.cast(elements, tf.float64 if local.dtype == tf.float64 else tf.float32))
        (global_count,) = self.sum_over_replicas([count])
        factor = tf.math.divide_no_nan(count, global_count) * of_dtype(self._inverse_share, count.dtype)
        return local * tf.cast(tf.stop_gradient(factor), local.dtype)

    def adds_losses_of(self, model: Any) -> bool:
        """Whether what layers of a model have added to the loss is part of this step, and is made means by it."""
        if model is self.model:
            return True
        return self._means.are_read and any(layer is model for layer in _keras.flat_layers(self.model))

    def additional_loss(self, local: tf.Tensor, degree: Any) -> tf.Tensor:
        """Turn what a layer gave to ``add_loss`` into a mean: it grows with the rows to the power ``degree``."""
        return self._means.know(times(local, self._factor(degree)) if degree else local)

    def _factor(self, degree: Any) -> float | tf.Tensor:
        """What makes a mean of a number that grows with the rows to the power ``degree``."""
        if degree < 0:  # a sum over all rows, divided by the rows at hand; else, it is of pairs of rows
            return self.share ** -float(degree) if self._has_sums else 1.0
        return self._inverse_share ** float(degree)

    def as_mean(self, value: Any) -> Any:
        """Turn a scalar of the user's code into one whose mean over replicas, weighted by share, is the global one."""
        if self.num_replicas == 1 or _rank(value) > 0:
            return value
        terms = self._means.terms(value)
        if not any(term.degree for term in terms):
            return value
        return self._means.know(tf.add_n([self._mean_of(term, _as_float(term.value)) for term in terms]))

    def take_for_mean(self, value: Any) -> None:
        """Take a tensor for what ``as_mean`` has returned."""
        self._means.know(value)

    def _mean_of(self, term: Term, value: tf.Tensor) -> tf.Tensor:
        factor = self._factor(term.degree) if term.degree else 1.0
        return times(value, factor * term.sign)

    def differentiate(self, target: Any, sources: Any) -> tuple[Any, Any]:
        """Return what to differentiate for variables instead, and factors of its parts, so that losses are means."""
        flat = tf.nest.flatten(target)
        of_variables = all(isinstance(source, tf.Variable | Variable) for source in tf.nest.flatten(sources))
        if self.num_replicas == 1 or not of_variables or not all(isinstance(value, tf.Tensor) for value in flat):
            return target, None
        terms = [term for value in flat for term in self._means.terms(value)]
        if not any(term.degree for term in terms):
            return target, None
        return [term.value for term in terms], [self._mean_of(term, tf.ones_like(term.value)) for term in terms]

    def sum_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Make a scalar that a step gives to a ``Sum`` count once for the global batch, not once a replica."""
        if self.num_replicas == 1 or not self._means.are_read or _rank(values) + _rank(sample_weight) > 0:
            return values, sample_weight
        values = tf.cast(self.as_mean(values), metric.dtype)
        weight = self._weight(metric, 1.0 if sample_weight is None else sample_weight)
        return self._zero_if_empty([values * weight])[0], None

    def _weight(self, metric: Any, sample_weight: Any) -> Any:
        """What a scalar weighs on this replica, so that all replicas together give it the weight on one device."""
        if isinstance(self.rows, int) and isinstance(sample_weight, int) and sample_weight == self.rows:
            return sample_weight
        return times(tf.cast(self.as_mean(sample_weight), metric.dtype), self.share)

    def mean_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Make a scalar that a step gives to a ``Mean`` count once for the global batch, not once a replica."""
        values, sample_weight = self._mean_update(metric, values, sample_weight)
        if self.note is not None and metric.name == "loss" and len(getattr(values, "shape", ())) == 0:
            self.note.loss(self.replica_id, values, is_logged=True)
        return values, sample_weight

    def _mean_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        if self.num_replicas == 1:
            return values, sample_weight
        if _rank(values) == 0:
            values = self.as_mean(values)
        elif sample_weight is None or _rank(sample_weight) > 0:
            return values, sample_weight
        if sample_weight is None:
            sample_weight = of_dtype(self.share, metric.dtype)
        elif self._means.are_read and not _rank(sample_weight) and not _keras.tracks_loss(self.model, metric):
            sample_weight = self._weight(metric, sample_weight)  # what Keras tracks, it weighs by rows
        if self._can_be_empty:  # the mean of nothing is not a number, and weighs nothing
            values = tf.convert_to_tensor(values)
            mean = tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype))
            values = tf.where(tf.cast(self.rows, tf.int32) > 0, mean, tf.zeros_like(mean))
        return values, sample_weight

    def scale_loss(self, optimizer: Any, loss: Any, original: Callable[[Any], Any]) -> Any:
        """Weight the loss by the replica's share (a vector of losses is a sum: its weight is 1)."""
        if self.num_replicas == 1:
            return original(loss)
        scaled = original(self.as_mean(loss))
        self._scaled.add(id(optimizer))
        return self._means.know(times(scaled, self.share) if scaled.shape.rank == 0 else scaled)

    def assign(self, variable: Any, value: Any, original: Callable[[Any], None]) -> None:
        """Note state that a layer assigns, so that the replicas agree on it after the step."""
        if self.guard is not None:
            self.guard.note(variable)
        original(value)
        if self.num_replicas > 1:
            self._note_assigned(variable)

    def _note_assigned(self, variable: Any) -> None:
        dtype = tf.as_dtype(variable.dtype)
        is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
        if is_number and not self._draws_seed and not variable.trainable and not _keras.is_sync_on_read(variable):
            self._assigned[id(variable)] = variable

    def apply(self, optimizer: Any, grads: Any, variables: Any, original: Callable[..., None]) -> None:
        """Sum the gradients over replicas, then let every replica run the optimizer on its own copies."""
        grads = list(grads)
        variables = list(_keras.optimized_variables(optimizer) if variables is None else variables)
        if self.num_replicas == 1:
            present = [g for g in grads if g is not None]
            self._note_gradients(optimizer, present)
            if self.guard is None:  # and nothing to reduce: TensorFlow's reduction would keep the graph for ever
                with _keras.intercept(PassThrough(of_worker=False)):
                    return original(grads, variables)
            self.build(optimizer, variables)
            may_update = self.settle([self._found(optimizer, present)])[1]
            self.update(grads, present, variables, original, may_update)
            return None
        self.build(optimizer, variables)
        gradients, states, values = self.contribution(optimizer, grads)
        trained = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        gradients, values = self.reduce(optimizer, trained, gradients, values)
        values, may_update = self.settle(values)
        self.agree(states, values)
        self.update(grads, gradients, variables, original, may_update)
        return None

    def build(self, optimizer: Any, variables: list[Any]) -> None:
        """Make the variables of an optimizer that has none yet."""
        if not optimizer.built:
            if not tf.executing_eagerly():
                raise UnbuiltOptimizer(functools.partial(optimizer.build, variables))
            with _keras.intercept(None):
                optimizer.build(variables)

    def contribution(self, optimizer: Any, grads: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return what this replica adds to the sums: its gradients that are there, and state assigned, with values.

        Where it is guarded, another value comes last: what it has found, see ``settle``.
        """
        present = [g for g in grads if g is not None]
        self._note_gradients(optimizer, present)
        found = [] if self.guard is None else [self._found(optimizer, present)]
        if id(optimizer) not in self._scaled:
            present = [times(g, self.share) for g in present]
        self._scaled.discard(id(optimizer))
        states, values = self.assigned_state()
        return self._zero_if_empty(present), states, values + found

    def _found(self, optimizer: Any, gradients: list[Any]) -> tf.Tensor:
        assert self.guard is not None
        scale = getattr(optimizer, "dynamic_scale", None)
        own = self.replica_id, self.num_replicas, self.rows, self.batch
        return self.guard.found(*own, self._losses, gradients, scale)

    def settle(self, values: list[Any]) -> tuple[list[Any], tf.Tensor | None]:
        """Take from summed values what all replicas have found; return the others, and whether weights may change."""
        if self.guard is None:
            return values, None
        *values, found = values
        may_update = self.guard.may_update(found)
        self.guard.keep(found)
        return values, may_update

    def _note_gradients(self, optimizer: Any, grads: list[Any]) -> None:
        if self.note is None:
            return
        factor: Any = 1.0
        if self.num_replicas > 1 and id(optimizer) in self._scaled:
            factor = self._inverse_share
        if hasattr(optimizer, "dynamic_scale"):
            factor = tf.math.divide_no_nan(tf.cast(factor, tf.float32), tf.convert_to_tensor(optimizer.dynamic_scale))
        self.note.gradients(self.replica_id, grads, factor)

    def note_loss(self, value: Any) -> None:
        """Note what Keras' ``compute_loss`` has returned, a sum of means."""
        self._means.know(value)
        if len(getattr(value, "shape", ())) == 0:
            self._losses.append(value)
            if self.note is not None:
                self.note.loss(self.replica_id, value)

    def reduce(
        self, optimizer: Any, variables: list[Any], grads: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Sum gradients and values over replicas."""
        if getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps:
            values = self.sum_over_replicas(values) if values else []
            may_update = None if self.guard is None else self.guard.may_update(values[-1])
            return self._accumulate(optimizer, grads, variables, may_update), values
        summed = self.sum_over_replicas(grads + values)
        return summed[: len(grads)], summed[len(grads) :]

    def update(
        self,
        grads: list[Any],
        reduced: list[Any],
        variables: list[Any],
        original: Callable[..., None],
        may_update: tf.Tensor | None = None,
    ) -> None:
        """Let every replica run the optimizer on its own copies, if it may."""
        if self.num_replicas == 1:
            update: Any = _keras.intercept(None)
        elif self._is_on_tpu:
            update = _keras.intercept(PassThrough(of_worker=False))
        else:
            update = _keras.local_updates(self.strategy, LocalUpdate())
        rest = iter(reduced)
        summed = [None if g is None else next(rest) for g in grads]

        def run() -> tf.Tensor:
            with update:
                original(summed, variables)
            return tf.constant(True)

        if may_update is None:
            run()
        else:
            tf.cond(may_update, run, lambda: tf.constant(False))

    def _accumulate(
        self, optimizer: Any, grads: list[Any], variables: list[Any], may_update: tf.Tensor | None
    ) -> list[Any]:
        """Sum over replicas at the last micro-batch of an accumulation only; before it, keep each replica's own.

        Keras adds what it is given to its accumulators, and at the update divides the sum of both. So before the
        update the accumulators are emptied into the gradients, which then are summed over replicas.
        """
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        scale = tf.convert_to_tensor(optimizer.dynamic_scale) if inner is not optimizer else 1.0
        grads = [tf.convert_to_tensor(g) for g in grads]
        accumulators = [inner._accumulated_gradients[inner._get_variable_index(v)] for v in variables]
        is_update = (inner._iterations.value + 1) % inner.gradient_accumulation_steps == 0
        if may_update is not None:
            is_update = tf.logical_and(is_update, may_update)
        if inner is not optimizer:
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads])
            (num_bad,) = self.sum_over_replicas([1.0 - tf.cast(finite, tf.float32)])
            is_update = tf.logical_and(is_update, num_bad == 0)
            poison = tf.where(num_bad > 0, float("nan"), 0.0)
            grads = [g + tf.cast(poison, g.dtype) for g in grads]
        totals = [
            tf.cond(is_update, lambda g=g, a=a: g + a.value * scale, lambda g=g: g)
            for g, a in zip(grads, accumulators, strict=True)
        ]

        if self._is_on_tpu:
            # The reduction of a micro-batch before the update is thrown away: XLA takes no collective in a condition.
            totals = [
                tf.where(is_update, total, own)
                for total, own in zip(self.sum_over_replicas(totals), totals, strict=True)
            ]
            self._empty(accumulators, is_update)
            return totals

        def merge(strategy: tf.distribute.Strategy, is_update: Any, totals: list[Any]) -> list[Any]:
            here = strategy.experimental_local_results(is_update)[0]
            summed = tf.cond(
                here,
                lambda: [parts_of(strategy, total) for total in sum_over_replicas(strategy, totals)],
                lambda: [parts_of(strategy, total) for total in totals],
            )
            return [_keras.regroup(s) for s in summed]

        summed = tf.distribute.get_replica_context().merge_call(merge, args=(is_update, totals))
        self._empty(accumulators, is_update)
        return list(summed)

    @staticmethod
    def _empty(accumulators: list[Any], when: tf.Tensor) -> None:
        for accumulator in accumulators:
            local = _keras.local_component(accumulator)
            local.assign(tf.cond(when, lambda a=local: tf.zeros_like(a), lambda a=local: a.read_value()))

    def _zero_if_empty(self, values: list[Any]) -> list[Any]:
        """Replace what an empty batch gave (perhaps NaN) by zeros."""
        if not self._can_be_empty or not values:
            return values
        dense = [v.values if isinstance(v, tf.IndexedSlices) else v for v in values]
        dense = tf.cond(
            tf.cast(self.rows, tf.int32) > 0,
            lambda: [tf.identity(v) for v in dense],
            lambda: [tf.zeros_like(v) for v in dense],
        )
        return [
            tf.IndexedSlices(d, v.indices, v.dense_shape) if isinstance(v, tf.IndexedSlices) else d
            for d, v in zip(dense, values, strict=True)
        ]

    @property
    def has_assigned(self) -> bool:
        """Whether state was assigned on which the replicas have not agreed yet."""
        return bool(self._assigned)

    def assigned_state(self) -> tuple[list[Any], list[Any]]:
        """Return the variables assigned since this was asked last, and what this replica adds to their mean."""
        variables = list(self._assigned.values())
        self._assigned.clear()
        held = [tf.convert_to_tensor(_keras.local_component(v)) for v in variables]
        values = [times(v if v.dtype.is_floating else tf.cast(v, tf.float64), self.share) for v in held]
        return variables, self._zero_if_empty(values)

    def agree(self, variables: list[Any], values: list[Any]) -> None:
        """Assign what the replicas have agreed on."""
        for variable, value in zip(variables, values, strict=True):
            assign_mean(_keras.local_component(variable), value)

    def all_reduce_gradients(self, grads_and_vars: Any) -> Any:
        """Leave gradients alone: ``apply`` sums them."""
        return grads_and_vars

    def next_seed(self, generator: Any, ordered: bool, original: Callable[[bool], Any]) -> Any:
        """Give each replica a stream of its own; the first replica's is that of one device (see ``seeds``)."""
        seeds = self._seeds
        if seeds is not None and generator is self._generator_without_seed:
            seeds.uses_global = True
            ordered = ordered or seeds.root is not None
        elif seeds is not None and seeds.root is not None and not seeds.has(generator):
            warn_once(
                f"A step of '{self.model.name}' draws from {generator.name!r}, a SeedGenerator that neither the model "
                "nor a layer of it holds: it keeps a seed of its own, and what it has drawn is not saved. Make it an "
                "attribute of the layer or the model."
            )
        self._draws_seed = True
        try:
            state = original(ordered)
        finally:
            self._draws_seed = False
        replica = self.replica_id
        if self.num_replicas == 1 or (isinstance(replica, int) and replica == 0):
            return state
        return state + tf.cast(replica_offset(replica), state.dtype)

    def op_seeds(self, op_seed: Any, original: Callable[[Any], Any]) -> Any:
        """Seed a ``tf.random`` op: by its place in the step from the global seed, else apart from other replicas'."""
        replica = self.replica_id
        if not isinstance(replica, int):
            return original(op_seed)  # one trace for all replicas of a TPU
        if op_seed is None and self._seeds is not None and self._seeds.root is not None:
            self._num_ops += 1
            number = fold_in(self._seeds.root + replica, "tf.random", replica, self._num_ops)
            return number % 2**31, number >> 31
        first, second = original(op_seed)
        if replica == 0 or first is None:
            return first, second
        offset = replica_offset(replica)
        return (first + int(offset[0])) % 2**31, (second + int(offset[1])) % 2**31

    def constant_seed(self, seed: int) -> None:
        """Warn that an integer as a seed gives every replica the same numbers."""
        is_seeded = self._seeds is not None and self._seeds.root is not None
        is_initializer = tf.executing_eagerly()  # it runs outside of the graph, and all replicas want its numbers
        if self.num_replicas > 1 and not is_seeded and not is_initializer:
            warn_once(
                f"keras.random was called with seed={seed} in a step: an integer is a constant, so every replica draws "
                "the same numbers, at every step. Pass a keras.random.SeedGenerator instead; or, if that is what you "
                "want, say so by the callback ReplicaSeeds(seed)."
            )

    def compiled_draw(self, kind: str, shape: Any, dtype: tf.DType, **key: Any) -> Any:
        """Under XLA and a global seed, draw the numbers that are drawn without XLA."""
        if self._seeds is None or self._seeds.root is None or not _keras.in_xla():
            return None
        return draw_as_uncompiled(kind, shape, dtype, **key)

    def all_reduce(self, reduce_op: Any, value: Any, original: Callable[..., Any]) -> Any:
        """All-reduce inside a layer by plain additions where replicas share memory, else as TensorFlow does.

        TensorFlow's collectives of several strategies in a process take each other's keys (tensorflow#62790).
        """
        if not self.sums_in_layers:
            with _keras.intercept(None):
                return original(reduce_op, value)
        factor = 1.0
        if tf.distribute.ReduceOp.MEAN in (reduce_op, getattr(reduce_op, "value", None)) or reduce_op == "MEAN":
            factor = 1.0 / self.num_replicas
        flat = tf.nest.flatten(value)
        summed = self._differentiable_sum(*[tf.convert_to_tensor(v) for v in flat])
        return tf.nest.pack_sequence_as(value, [times(v, factor) if factor != 1.0 else v for v in summed])

    def _differentiable_sum(self, *values: tf.Tensor) -> list[tf.Tensor]:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def total(*values: tf.Tensor) -> Any:
            return self.sum_over_replicas(values), lambda *upstream: self.sum_over_replicas(upstream)

        summed = total(*values)
        return list(summed) if isinstance(summed, (list, tuple)) else [summed]

    def trace_of(self, function: Any) -> Any:
        """Have a tf.function traced for steps, and anew in each: only while it is traced, what it assigns is seen."""
        if self.num_replicas == 1 or tf.executing_eagerly():
            return function
        if id(function) not in self._functions:
            self._functions[id(function)] = (function, _keras.copy_of_function(function))
        return self._functions[id(function)][1]

    # Around the user's step

    def on_rows(self, inputs: Any, op: Callable[[Any], Any]) -> Any:
        """Return what an op gives for each row, where this replica may have none."""
        return op(inputs) if self.num_replicas == 1 else pass_through.on_rows(inputs, op)

    def check_stateful(self, layer: Any) -> None:
        """Refuse a layer that keeps a state for each row of the global batch.

        Raises:
            DataError: there are several replicas.
        """
        if self.num_replicas > 1:
            raise DataError(
                f"'{layer.name}' is stateful: it keeps a state for each row of a batch, and each of the "
                f"{self.num_replicas} replicas has only some of the rows. Run it on one device "
                "(`pick_strategy('one_device')`), or have it return its states (`return_state=True`) and give them "
                "back as inputs (`initial_state=`)."
            )

    def note_result(self, metric: Any, value: Any) -> Any:
        """Remember that ``value`` is the result of ``metric``, to compute it from the pooled state instead."""
        if self._pools_results and self.num_replicas > 1:
            return self.pooled_result(metric)
        for place, leaf in enumerate(tree.flatten(value)):  # a result may be a dict of several
            if tf.is_tensor(leaf):
                self.results[id(leaf)] = Result(metric, place, leaf)
        return value

    def pooled_result(self, metric: Any) -> Any:
        """Compute a metric's result from the state of all replicas."""
        if self.num_replicas == 1:
            return type(metric).result(metric)
        variables = [v for v in metric.variables if _keras.is_sync_on_read(v)]
        states = [_as_float(_keras.local_component(v)) for v in variables]
        sums = self.sum_over_replicas(states)
        mapping = [(v, tf.cast(total, v.dtype)) for v, total in zip(variables, sums, strict=True)]
        with _keras.StatelessScope(state_mapping=mapping):
            return type(metric).result(metric)

    def finish(self, logs: Any) -> list[tf.Tensor]:
        """Agree on what is left, and return the leaves of the logs that are not results of metrics."""
        states, values = self.assigned_state()
        if states:
            self.agree(states, self.sum_over_replicas(values))
        local = [leaf for leaf in tree.flatten(logs) if id(leaf) not in self.results]
        if self.num_replicas == 1:
            return [tf.convert_to_tensor(leaf) for leaf in local]
        return self._zero_if_empty([times(_as_float(self.as_mean(leaf)), self.share) for leaf in local])


def assign_mean(local: Any, mean: tf.Tensor) -> None:
    """Assign to a variable what its replicas have in the mean; of integers and bools, the nearest."""
    local.assign(tf.cast(mean if local.dtype.is_floating else tf.round(mean), local.dtype))


def _rank(value: Any) -> int:
    """How many dimensions; some, if that is not known."""
    shape = tf.TensorShape(getattr(value, "shape", ()))
    return 1 if shape.rank is None else shape.rank


def _as_float(value: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    return value if value.dtype.is_floating else tf.cast(value, tf.float32)
