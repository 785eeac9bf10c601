"""The traced code of one distributed step: what a replica computes, and what all replicas agree on.

User code inside a step (``train_step``, ``compute_loss``, losses, layers, metrics) is written for one device and sees
one replica's rows as if they were the whole batch. ``ReplicaStep`` makes the sum over replicas exact:

- a gradient is weighted by the replica's share of the global rows, then summed once, before clipping and updates;
- a loss that does not divide by the rows (sum, mask, sample weights) divides by the count over all replicas;
- an optimizer runs on every replica with the same summed gradient, so no conditional of it spans devices;
- non-trainable float state that a layer assigned becomes the mean over replicas, weighted by rows;
- metrics add up on each replica, and results are computed from the pooled state, once an execution.

Letters: n = rows of a replica, N = rows of the global batch, R = replicas in sync, over all workers.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext import _keras, data
from keras_dist_ext._keras import keras, tree

__all__ = ["CannotCompile", "PassThrough", "PredictProgram", "ReplicaStep", "StepProgram", "UnknownLossDegrees"]


class UnknownLossDegrees(Exception):
    """A layer's additional loss is met before it is known how it grows with the rows of a batch."""


class ReplicaStep:
    """One replica's part of a step, while it is traced (or run eagerly).

    Args:
        model: the Keras model.
        rows: n, an int where static.
        global_rows: N, an int where static.
    """

    def __init__(self, model: Any, rows: int | tf.Tensor, global_rows: int | tf.Tensor) -> None:
        context = tf.distribute.get_replica_context()
        self.model = model
        self.strategy = context.strategy
        self.num_replicas: int = context.num_replicas_in_sync
        self.rows = rows
        self.global_rows = global_rows
        self.results: dict[int, tuple[Any, Any]] = {}
        self._can_be_empty = not (isinstance(rows, int) and rows > 0)
        self._scaled: set[int] = set()
        self._assigned: dict[int, Any] = {}

    # Shares

    @property
    def share(self) -> float | tf.Tensor:
        """n / N, a float where both are static."""
        if isinstance(self.rows, int) and isinstance(self.global_rows, int):
            return self.rows / self.global_rows if self.global_rows else 0.0
        return tf.math.divide_no_nan(tf.cast(self.rows, tf.float32), tf.cast(self.global_rows, tf.float32))

    @property
    def _inverse_share(self) -> float | tf.Tensor:
        """N / n, and 0 for an empty replica."""
        if isinstance(self.rows, int) and isinstance(self.global_rows, int):
            return self.global_rows / self.rows if self.rows else 0.0
        return tf.math.divide_no_nan(tf.cast(self.global_rows, tf.float32), tf.cast(self.rows, tf.float32))

    def sum_over_replicas(self, values: Sequence[Any]) -> list[Any]:
        """Add up each value over all replicas; every replica gets the sums."""
        context = tf.distribute.get_replica_context()
        if _keras.in_xla():
            raise CannotCompile
        return list(context.merge_call(_sum_over_replicas, args=(list(values),)))

    # What Keras asks (_keras.Step)

    def reduce_loss(self, local: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> Any:
        """Turn a replica's reduced loss into one whose mean over replicas, weighted by share, is the global loss."""
        if self.num_replicas == 1 or reduction in (None, "none"):
            return local
        if reduction == "sum":
            return local * tf.cast(self._inverse_share, local.dtype)
        weighted = reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None)
        if mask is None and not weighted:
            return local
        if weighted:
            elements = tf.convert_to_tensor(_keras.apply_mask(sample_weight, mask, local.dtype, reduction))
        else:
            elements = mask
        count = tf.reduce_sum(tf.cast(elements, tf.float32))
        (global_count,) = self.sum_over_replicas([count])
        factor = tf.math.divide_no_nan(count, global_count) * self._inverse_share
        return local * tf.cast(tf.stop_gradient(factor), local.dtype)

    def additional_loss(self, local: tf.Tensor, degree: Any) -> tf.Tensor:
        """Turn what a layer gave to ``add_loss`` into a mean: it grows with the rows to the power ``degree``."""
        factor = self._inverse_share
        return local * tf.cast(factor ** float(degree), local.dtype) if degree else local

    def mean_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Make a scalar that a step gives to a ``Mean`` count once for the global batch, not once a replica."""
        if self.num_replicas == 1:
            return values, sample_weight
        is_scalar = len(getattr(values, "shape", ())) == 0
        if is_scalar and sample_weight is None:
            sample_weight = self.share
        elif not is_scalar and (sample_weight is None or len(getattr(sample_weight, "shape", ())) > 0):
            return values, sample_weight
        if self._can_be_empty:  # the mean of nothing is not a number, and weighs nothing
            values = tf.convert_to_tensor(values)
            mean = tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype))
            values = tf.where(tf.cast(self.rows, tf.int32) > 0, mean, tf.zeros_like(mean))
        return values, sample_weight

    def scale_loss(self, optimizer: Any, loss: Any, original: Callable[[Any], Any]) -> Any:
        """Weight the loss by the replica's share (a vector of losses is a sum: its weight is 1)."""
        scaled = original(loss)
        if self.num_replicas == 1:
            return scaled
        self._scaled.add(id(optimizer))
        return scaled * tf.cast(self.share, scaled.dtype) if scaled.shape.rank == 0 else scaled

    def assign(self, variable: Any, value: Any, original: Callable[[Any], None]) -> None:
        """Note float state that a layer assigns, so that the replicas agree on it after the step."""
        original(value)
        is_float = tf.as_dtype(variable.dtype).is_floating
        if self.num_replicas > 1 and is_float and not variable.trainable and not _keras.is_sync_on_read(variable):
            self._assigned[id(variable)] = variable

    def apply(self, optimizer: Any, grads: Any, variables: Any, original: Callable[..., None]) -> None:
        """Sum the gradients over replicas, then let every replica run the optimizer on its own copies."""
        grads = list(grads)
        variables = list(optimizer._trainable_variables if variables is None else variables)
        if self.num_replicas == 1:
            with _keras.intercept(None):
                return original(grads, variables)
        if not optimizer.built:
            with _keras.intercept(None), _keras.keras.name_scope(optimizer.name):
                optimizer.build(variables)
        present = [g for g in grads if g is not None]
        if id(optimizer) not in self._scaled:
            present = [_times(g, self.share) for g in present]
        self._scaled.discard(id(optimizer))
        present = self._zero_if_empty(present)
        states, state_values = self._assigned_state()
        accumulation = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps
        if accumulation:
            summed_state = self.sum_over_replicas(state_values) if states else []
            present = self._accumulate(optimizer, present, [v for g, v in zip(grads, variables) if g is not None])
        else:
            summed = self.sum_over_replicas(present + state_values)
            present, summed_state = summed[: len(present)], summed[len(present) :]
        self._agree(states, summed_state)
        reduced = iter(present)
        with _keras.intercept(_LocalUpdate()), _keras.local_updates(self.strategy):
            original([None if g is None else next(reduced) for g in grads], variables)

    def _accumulate(self, optimizer: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Sum over replicas at the last micro-batch of an accumulation only; before it, keep each replica's own.

        Keras adds what it is given to its accumulators, and at the update divides the sum of both. So before the
        update the accumulators are emptied into the gradients, which then are summed over replicas.
        """
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        scale = tf.convert_to_tensor(optimizer.dynamic_scale) if inner is not optimizer else 1.0
        grads = [tf.convert_to_tensor(g) for g in grads]
        accumulators = [inner._accumulated_gradients[inner._get_variable_index(v)] for v in variables]
        is_update = (inner._iterations.value + 1) % inner.gradient_accumulation_steps == 0
        if inner is not optimizer:
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads])
            (num_bad,) = self.sum_over_replicas([1.0 - tf.cast(finite, tf.float32)])
            is_update = tf.logical_and(is_update, num_bad == 0)
            poison = tf.where(num_bad > 0, float("nan"), 0.0)
            grads = [g + tf.cast(poison, g.dtype) for g in grads]
        totals = [tf.cond(is_update, lambda g=g, a=a: g + a.value * scale, lambda g=g: g)  # type: ignore[misc]
                  for g, a in zip(grads, accumulators)]  # fmt: skip

        def merge(strategy: tf.distribute.Strategy, is_update: Any, totals: list[Any]) -> list[Any]:
            here = strategy.experimental_local_results(is_update)[0]
            summed = tf.cond(
                here,
                lambda: [_parts(strategy, total) for total in _sum_over_replicas(strategy, totals)],
                lambda: [_parts(strategy, total) for total in totals],
            )
            return [_keras.regroup(s) for s in summed]

        summed = tf.distribute.get_replica_context().merge_call(merge, args=(is_update, totals))
        for accumulator in accumulators:
            local = _keras.local_component(accumulator)
            local.assign(tf.cond(is_update, lambda a=local: tf.zeros_like(a), lambda a=local: a.read_value()))  # type: ignore[misc]
        return list(summed)

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
            for d, v in zip(dense, values)
        ]

    def _assigned_state(self) -> tuple[list[Any], list[Any]]:
        variables = list(self._assigned.values())
        self._assigned.clear()
        values = [_times(tf.convert_to_tensor(_keras.local_component(v)), self.share) for v in variables]
        return variables, self._zero_if_empty(values)

    def _agree(self, variables: list[Any], values: list[Any]) -> None:
        for variable, value in zip(variables, values):
            local = _keras.local_component(variable)
            local.assign(tf.cast(value, local.dtype))

    def all_reduce_gradients(self, grads_and_vars: Any) -> Any:
        """Leave gradients alone: ``apply`` sums them."""
        return grads_and_vars

    def all_reduce(self, reduce_op: Any, value: Any, original: Callable[..., Any]) -> Any:
        """All-reduce inside a layer by plain additions where replicas share memory, else as TensorFlow does.

        TensorFlow's collectives of several strategies in a process take each other's keys (tensorflow#62790).
        """
        if not shares_memory(self.strategy) or self.num_replicas == 1:
            with _keras.intercept(None):
                return original(reduce_op, value)
        factor = 1.0
        if tf.distribute.ReduceOp.MEAN in (reduce_op, getattr(reduce_op, "value", None)) or reduce_op == "MEAN":
            factor = 1.0 / self.num_replicas
        flat = tf.nest.flatten(value)
        summed = self._differentiable_sum(*[tf.convert_to_tensor(v) for v in flat])
        return tf.nest.pack_sequence_as(value, [_times(v, factor) if factor != 1.0 else v for v in summed])

    def _differentiable_sum(self, *values: tf.Tensor) -> list[tf.Tensor]:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def total(*values: tf.Tensor) -> Any:
            return self.sum_over_replicas(values), lambda *upstream: self.sum_over_replicas(upstream)

        summed = total(*values)
        return list(summed) if isinstance(summed, (list, tuple)) else [summed]

    # Around the user's step

    def note_result(self, metric: Any, value: Any) -> Any:
        """Remember that ``value`` is the result of ``metric``, to compute it from the pooled state instead."""
        self.results[id(value)] = (metric, value)
        return value

    def finish(self, logs: Any) -> list[tf.Tensor]:
        """Agree on what is left, and return the leaves of the logs that are not results of metrics."""
        states, values = self._assigned_state()
        if states:
            self._agree(states, self.sum_over_replicas(values))
        local = [leaf for leaf in tree.flatten(logs) if id(leaf) not in self.results]
        if self.num_replicas == 1:
            return [tf.convert_to_tensor(leaf) for leaf in local]
        return self._zero_if_empty([_times(_as_float(leaf), self.share) for leaf in local])


class PassThrough:
    """Answers Keras' questions as Keras would, but assigns to this worker's copies of a variable only."""

    def reduce_loss(self, local: Any, *_: Any) -> Any:
        """Return the loss as it is."""
        return local

    def mean_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Return what the metric was given."""
        return values, sample_weight

    def scale_loss(self, optimizer: Any, loss: Any, original: Callable[[Any], Any]) -> Any:
        """Scale as the optimizer does."""
        return original(loss)

    def apply(self, optimizer: Any, grads: Any, variables: Any, original: Callable[..., None]) -> None:
        """Apply as the optimizer does."""
        original(grads, variables)

    def all_reduce_gradients(self, grads_and_vars: Any) -> Any:
        """Leave gradients alone."""
        return grads_and_vars

    def all_reduce(self, reduce_op: Any, value: Any, original: Callable[..., Any]) -> Any:
        """Reduce as TensorFlow does."""
        return original(reduce_op, value)

    def assign(self, variable: Any, value: Any, original: Callable[[Any], None]) -> None:
        """Assign to every copy on this worker, without a collective."""
        for copy in _keras.components(variable):
            copy.assign(tf.cast(value, copy.dtype))


class _LocalUpdate(PassThrough):
    """The inside of an optimizer, run by each replica on its own copies of the variables."""

    def assign(self, variable: Any, value: Any, original: Callable[[Any], None]) -> None:
        local = _keras.local_component(variable)
        local.assign(tf.cast(value, local.dtype))


def _times(value: Any, factor: float | tf.Tensor) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_times(value.values, factor), value.indices, value.dense_shape)
    return value * tf.cast(factor, value.dtype)


def _as_float(value: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    return value if value.dtype.is_floating else tf.cast(value, tf.float32)


def _sum_over_replicas(strategy: tf.distribute.Strategy, values: list[Any]) -> list[Any]:
    """Add up each per-replica value, in cross-replica context."""
    parts = [_parts(strategy, value) for value in values]
    if shares_memory(strategy):
        return [_add(part) for part in parts]
    values = [_keras.regroup(part) for part in parts]
    sums: list[Any] = [None] * len(values)
    by_dtype: dict[tf.DType, list[int]] = {}
    for i, part in enumerate(parts):
        by_dtype.setdefault(part[0].dtype, []).append(i)
    for indices in by_dtype.values():
        pairs = [(values[i], values[i]) for i in indices]
        for i, total in zip(indices, strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)):
            sums[i] = total
    return sums


def _parts(strategy: tf.distribute.Strategy, value: Any) -> tuple[Any, ...]:
    """One part a local replica; a value that all of them share is repeated."""
    parts = strategy.experimental_local_results(value)
    return parts * len(strategy.extended.worker_devices) if len(parts) == 1 else parts


def shares_memory(strategy: tf.distribute.Strategy) -> bool:
    """Whether all replicas are CPUs of this process."""
    devices = strategy.extended.worker_devices
    return len(devices) == strategy.num_replicas_in_sync and all("CPU" in device for device in devices)


def _add(parts: Sequence[Any]) -> Any:
    if any(isinstance(part, tf.IndexedSlices) for part in parts):
        values = tf.concat([part.values for part in parts], 0)
        return tf.IndexedSlices(values, tf.concat([part.indices for part in parts], 0), parts[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])


def sum_parts(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> None:
    """Give every replica the sum of what all replicas hold, in cross-replica context."""
    for variable in variables:
        copies = _keras.components(variable)
        (total,) = _sum_over_replicas(strategy, [_keras.regroup([copy.read_value() for copy in copies])])
        for copy, value in zip(copies, _parts(strategy, total)):
            copy.assign(value)


def keep_first_part(variable: Any, *, is_chief: bool) -> None:
    """Leave a mirrored variable's value to the first replica of the chief, and set all others to 0."""
    for copy in _keras.components(variable)[1 if is_chief else 0 :]:
        copy.assign(tf.zeros_like(copy))


class StepProgram:
    """The compiled loop of one kind of step over a model.

    Args:
        model: the Keras model; its strategy, ``run_eagerly`` and ``jit_compile`` are read here.
        kind: "train" or "test".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self.model = model
        self.kind = kind
        self.strategy: tf.distribute.Strategy = model.distribute_strategy
        self.num_replicas: int = self.strategy.num_replicas_in_sync
        self._log_plan: Any = None
        self._user_step = getattr(model, f"{kind}_step")
        if model.jit_compile and not model.run_eagerly and can_compile(self.strategy):
            self._compile(f"{kind}_step")
        self._plain_logs = not any(
            _keras.overrides(model, name) for name in (f"{kind}_step", "compute_metrics", "get_metrics_result")
        )
        wrap: Callable[[Any], Any] = (
            (lambda f: f) if model.run_eagerly else tf.function(autograph=False, reduce_retracing=True)
        )
        self.on_batch = wrap(self._on_batch)
        self._on_rows = wrap(self._on_rows_of_worker)
        self.on_iterator = self._on_iterator_eagerly if model.run_eagerly else wrap(self._on_iterator)
        self.on_optional = self._on_optional_eagerly if model.run_eagerly else wrap(self._on_optional)

    def _compile(self, name: str) -> None:
        """Compile by XLA: the whole step of one device; of several replicas, what each computes by itself."""
        if self.num_replicas == 1:
            self._user_step = _xla(self._user_step)
        elif _keras.overrides(self.model, name):
            _warn_once(
                f"jit_compile=True: '{self.model.name}' has a {name} of its own, and XLA cannot compile the reductions "
                f"over {self.num_replicas} replicas in it; the step runs without XLA."
            )
        else:
            self._user_step = functools.partial(_STEPS[self.kind], self.model, _xla(functools.partial(_forward, self)))

    def without_xla(self) -> None:
        """Go on uncompiled."""
        self._user_step = getattr(self.model, f"{self.kind}_step")

    # Entry points

    def on_batches_like(self, spec: Any, *, of_worker: bool) -> Callable[[Any], Any]:
        """Return a function that runs one step on a batch of that spec.

        It is traced once, whatever the rows: collectives are numbered as they are traced, so all workers must trace
        the same functions in the same order, and the number of rows may differ between workers.

        Args:
            spec: of a batch, its rows unknown where they may vary.
            of_worker: whether the rows are this worker's own.
        """
        run = self._on_rows if of_worker else self.on_batch
        return run if self.model.run_eagerly else run.get_concrete_function(spec)  # type: ignore[no-any-return]

    def _on_batch(self, batch: Any) -> Any:
        """Run one step on a batch (global, or per replica) and return its logs."""
        return self._logs(self._one(batch))

    def _on_rows_of_worker(self, batch: Any) -> Any:
        """Run one step on rows that this worker alone has read."""
        return self._logs(self._one(batch, of_worker=True))

    def _on_iterator(self, iterator: Any, num_steps: tf.Tensor) -> Any:
        """Run exactly ``num_steps`` steps in the graph and return the logs of the last."""

        def body(i: tf.Tensor, *_: Any) -> tuple[Any, ...]:
            return (i + 1, *self._one(iterator.get_next()))

        extra = self._initial_extra(lambda: iterator.get_next())
        i, *extra = tf.while_loop(
            lambda i, *_: i < num_steps, body, (tf.constant(0), *extra), parallel_iterations=1,
            shape_invariants=(tf.TensorShape([]), *(tf.TensorShape(None) for _ in extra)),
        )  # fmt: skip
        return self._logs(extra)

    def _on_optional(self, optional: Any, iterator: Any, num_steps: tf.Tensor) -> Any:
        """Run up to ``num_steps`` steps, beginning with ``optional``; return steps made, what is next, and logs."""

        def body(i: tf.Tensor, optional: Any, *_: Any) -> tuple[Any, ...]:
            extra = self._one(optional.get_value())
            return (i + 1, iterator.get_next_as_optional(), *extra)

        extra = self._initial_extra(lambda: optional.get_value())
        i, optional, *extra = tf.while_loop(
            lambda i, optional, *_: tf.logical_and(i < num_steps, optional.has_value()),
            body,
            (tf.constant(0), optional, *extra),
            parallel_iterations=1,
        )
        return i, optional, self._logs(extra)

    def _on_iterator_eagerly(self, iterator: Any, num_steps: tf.Tensor) -> Any:
        for _ in range(int(num_steps)):
            extra = self._one(next(iterator))
        return self._logs(extra)

    def _on_optional_eagerly(self, optional: Any, iterator: Any, num_steps: tf.Tensor) -> Any:
        made = 0
        while made < int(num_steps) and optional.has_value():
            extra = self._one(optional.get_value())
            optional = iterator.get_next_as_optional()
            made += 1
        return tf.constant(made), optional, self._logs(extra)

    # One step

    def _one(self, batch: Any, *, of_worker: bool = False) -> list[tf.Tensor]:
        """Run one step over all replicas; return each local replica's leaves of the logs that no metric holds."""
        batch = data.without_optionals(batch)
        cut = "not" if is_per_replica(batch) else "worker" if of_worker else "global"
        with self._noted_results():
            outputs = self.strategy.run(self._replica, args=(batch, cut))
        return [part for value in outputs for part in self.strategy.experimental_local_results(value)]

    def _replica(self, batch: Any, cut: str) -> list[tf.Tensor]:
        """Run the user's step on this replica's rows.

        ``cut`` says what the batch is: the "global" one, the rows of this "worker", or "not" to be cut any more.
        """
        num_replicas = self.num_replicas
        if num_replicas == 1:
            rows: Any = 1
            global_rows: Any = 1
        elif cut == "global":
            global_rows = data.num_rows(batch)
            batch = rows_of_replica(batch, self.strategy)
            rows = data.num_rows(batch)
        else:
            batch = rows_of_replica(batch, self.strategy, of_worker=True) if cut == "worker" else batch
            rows = data.num_rows(batch)
            global_rows = self._global_rows(rows, num_replicas, is_even=cut == "not")
        step = ReplicaStep(self.model, rows, global_rows)
        with _keras.intercept(step):
            logs = self._user_step(batch)
            if self._plain_logs:
                logs = {}
            extra = step.finish(logs)
        self._log_plan = tree.map_structure(lambda leaf: step.results.get(id(leaf), (_VALUE, None))[0], logs)
        return extra

    def _global_rows(self, rows: int | tf.Tensor, num_replicas: int, *, is_even: bool) -> int | tf.Tensor:
        if is_even and isinstance(rows, int) and not tf.executing_eagerly():
            return rows * num_replicas  # TensorFlow makes a static batch dimension only where all replicas have it
        total = tf.distribute.get_replica_context().merge_call(_sum_over_replicas, args=([tf.cast(rows, tf.float32)],))[
            0
        ]
        return tf.cast(total, tf.int32)

    @contextlib.contextmanager
    def _noted_results(self) -> Iterator[None]:
        """Have metrics tell the running step which tensors are their results."""
        if self._plain_logs:
            yield
            return
        metrics = list(_leaf_metrics(self.model.metrics))
        for metric in metrics:
            metric.__dict__["result"] = _noting(metric)
        try:
            yield
        finally:
            for metric in metrics:
                metric.__dict__.pop("result", None)

    def _initial_extra(self, next_batch: Callable[[], Any]) -> list[tf.Tensor]:
        """Zeros shaped like the leaves of the logs that a loop must carry, found by tracing a step aside."""
        if self._plain_logs:
            return []
        scratch = tf.__internal__.FuncGraph("logs_of_a_step")
        with scratch.as_default():
            extra = self._one(next_batch())
        return [tf.zeros([d or 0 for d in e.shape] if e.shape.rank is not None else [], e.dtype) for e in extra]

    # Logs

    def _logs(self, extra: Sequence[tf.Tensor]) -> Any:
        """Compute the logs from the state pooled over replicas."""
        num_local = len(self.strategy.extended.worker_devices) if self.num_replicas > 1 else 1
        values = [tuple(extra[i : i + num_local]) for i in range(0, len(extra), num_local)]
        if self.num_replicas > 1 and values:
            sums = _sum_over_replicas(self.strategy, [_keras.regroup(v) for v in values])
            values = [self.strategy.experimental_local_results(s) for s in sums]
        local = iter([v[0] for v in values])
        with pooled_state(self.model, self.strategy):
            if self._plain_logs:
                return self.model.get_metrics_result()
            return tree.map_structure(
                lambda metric: next(local) if metric is _VALUE else metric.result(), self._log_plan
            )


def rows_of_replica(batch: Any, strategy: tf.distribute.Strategy, *, of_worker: bool = False) -> Any:
    """Cut this replica's rows out of the global batch, or out of those of its worker."""
    replica, num_replicas = _keras.replica_id(), strategy.num_replicas_in_sync
    if of_worker:
        num_replicas = len(strategy.extended.worker_devices)
        replica = replica % num_replicas
    with tf.device("/device:CPU:0"):
        return data.replica_rows(batch, replica, num_replicas)


_VALUE = object()  # in a log plan: a leaf that no metric holds


class CannotCompile(Exception):
    """A reduction over replicas is met inside of what XLA compiles."""


def can_compile(strategy: tf.distribute.Strategy) -> bool:
    """Whether XLA can compile what a replica computes. If not, warn once.

    XLA runs the programs of all logical CPUs of a process on the first one.
    """
    devices = strategy.extended.worker_devices
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return False  # compiled already
    if len(devices) == 1 or all("GPU" in device for device in devices):
        return True
    _warn_once(
        f"jit_compile=True: XLA cannot compile for {len(devices)} replicas that are CPUs of one process; the step runs "
        "without XLA."
    )
    return False


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


_warned: set[str] = set()


def _xla(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, jit_compile=True, autograph=False, reduce_retracing=True)  # type: ignore[no-any-return]


def _forward(program: StepProgram, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """What a replica computes by itself: prediction, loss and, to train, gradients of its own rows.

    With ``_train`` and ``_test`` this is ``train_step`` and ``test_step`` of keras/src/backend/tensorflow/trainer.py,
    which cannot be compiled in one piece when the optimizer in it waits for other replicas.
    """
    model, training = program.model, program.kind == "train"
    with tf.GradientTape() if training else contextlib.nullcontext() as tape:
        y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
        loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        scaled = model.optimizer.scale_loss(loss) if training else loss
    return y_pred, loss, tape.gradient(scaled, model.trainable_weights) if training else []


def _train(model: Any, forward: Callable[..., Any], batch: Any) -> Any:
    x, y, sample_weight = _keras.Unpack(batch)
    y_pred, loss, gradients = forward(x, y, sample_weight)
    model._loss_tracker.update_state(loss, sample_weight=data.num_rows(x))
    model.optimizer.apply_gradients(zip(gradients, model.trainable_weights))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _test(model: Any, forward: Callable[..., Any], batch: Any) -> Any:
    x, y, sample_weight = _keras.Unpack(batch)
    y_pred, loss, _ = forward(x, y, sample_weight)
    model._loss_tracker.update_state(loss, sample_weight=data.num_rows(x))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


_STEPS = {"train": _train, "test": _test}


def is_per_replica(batch: Any) -> bool:
    """Whether a batch comes from a distributed iterator, split already."""
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tree.flatten(batch))


def _leaf_metrics(metrics: Sequence[Any]) -> Iterator[Any]:
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        if isinstance(inner, (list, tuple)):
            yield from _leaf_metrics(inner)
        else:
            yield metric


def _noting(metric: Any) -> Callable[[], Any]:
    def result() -> Any:
        value = type(metric).result(metric)
        step = _keras.current_step()
        return step.note_result(metric, value) if isinstance(step, ReplicaStep) else value

    return result


@contextlib.contextmanager
def pooled_state(model: Any, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Let reads of the model's metric variables give their sum over all replicas, in one reduction."""
    if strategy.num_replicas_in_sync == 1:
        yield
        return
    variables = [v for v in model.metrics_variables if _keras.is_sync_on_read(v)]
    parts = [[tf.convert_to_tensor(c) for c in _keras.components(v)] for v in variables]
    if shares_memory(strategy):
        sums = [tf.add_n(part) for part in parts]
    else:
        floats = [[p if p.dtype.is_floating else tf.cast(p, tf.float64) for p in part] for part in parts]
        summed = _sum_over_replicas(strategy, [_keras.regroup(part) for part in floats]) if parts else []
        sums = [
            tf.cast(strategy.experimental_local_results(total)[0], part[0].dtype) for total, part in zip(summed, parts)
        ]
    with _keras.StatelessScope(state_mapping=list(zip(variables, sums))):
        yield


class PredictProgram:
    """The compiled ``predict_step`` over all replicas, its rows in the order of the batch."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.strategy: tf.distribute.Strategy = model.distribute_strategy
        step = model.predict_step
        if model.jit_compile and not model.run_eagerly and can_compile(self.strategy):
            step = tf.function(step, jit_compile=True, autograph=False, reduce_retracing=True)
        self._step = step
        self._on_batch = (
            self._one if model.run_eagerly else tf.function(self._one, autograph=False, reduce_retracing=True)
        )

    def on_batches(self, batches: Sequence[Any], *, of_worker: bool = False) -> Any:
        """Predict each batch and concatenate the outputs along the rows."""
        return concat_outputs([self._on_batch(batch, of_worker) for batch in batches])

    def _one(self, batch: Any, of_worker: bool) -> Any:
        batch = data.without_optionals(batch)
        if self.strategy.num_replicas_in_sync == 1:
            return self.strategy.run(self._step, args=(batch,))
        cut = "not" if is_per_replica(batch) else "worker" if of_worker else "global"
        outputs = self.strategy.run(self._replica, args=(batch, cut))
        if len(self.strategy.extended.worker_devices) == self.strategy.num_replicas_in_sync:
            return tree.map_structure(lambda v: _concat(self.strategy.experimental_local_results(v)), outputs)
        return tree.map_structure(lambda v: self.strategy.gather(v, axis=0), outputs)

    def _replica(self, batch: Any, cut: str) -> Any:
        if cut != "not":
            batch = rows_of_replica(batch, self.strategy, of_worker=cut == "worker")
        with _keras.intercept(ReplicaStep(self.model, 1, self.strategy.num_replicas_in_sync)):
            return self._step(batch)


def concat_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of several batches along the rows."""
    return outputs[0] if len(outputs) == 1 else tree.map_structure(lambda *parts: _concat(parts), *outputs)


def _concat(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    if parts[0].shape.rank == 0:
        return tf.stack(parts)
    return tf.concat(parts, axis=0)
