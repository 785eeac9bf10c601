"""What ``predict`` runs: the compiled ``predict_step`` over all replicas, its rows in the order of the batch."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.layers import clear_losses
from keras_dist_ext._keras.models import overrides
from keras_dist_ext._keras.random import use_global_seed_generator
from keras_dist_ext._keras.strategies import is_default_strategy, regroup, seen_as_one_replica
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext._keras.variables import without_aggregation
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data import split as data
from keras_dist_ext.errors import DataError, KerasDistError
from keras_dist_ext.step.added_losses import placeholders
from keras_dist_ext.step.all_rows import rows_of_no_batch
from keras_dist_ext.step.drawn_shapes import NotedDraw, UnknownDraws
from keras_dist_ext.step.global_draws import of_any_number
from keras_dist_ext.step.global_generator import global_generator_of
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.step.hook_checks import check_hooks
from keras_dist_ext.step.lone_replica import LoneReplica, is_first_of_worker
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.step.reduce import GATHERED_AS, local_values
from keras_dist_ext.step.replica_step import ReplicaStep
from keras_dist_ext.step.step_options import StepOptions
from keras_dist_ext.step.xla import check_default, compiled
from keras_dist_ext.training.batch_spec import any_number_of_rows
from keras_dist_ext.training.batch_split import (
    HowSplit,
    Split,
    first_row,
    is_per_replica,
    rows_of_replica,
    rows_on_host,
    split_of,
)
from keras_dist_ext.training.draw_examination import cannot_note, note_draws
from keras_dist_ext.training.few_rows import parts_of
from keras_dist_ext.training.snapshot import kept_random
from keras_dist_ext.training.xla_rule import uses_xla

__all__ = ["PredictProgram", "concat_outputs", "concat_replicas"]


class PredictProgram:
    """The compiled ``predict_step`` over all replicas, its rows in the order of the batch."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.strategy: tf.distribute.Strategy = model.distribute_strategy
        is_seeded = model.replica_runtime.seeds.root is not None
        step = model.predict_step
        if uses_xla(model, "predict"):
            step = compiled(step)
        self._step = step
        if self.strategy.num_replicas_in_sync > 1:
            check_default(os.environ)
            check_hooks()
        self._has_checked = False  # whether outputs have a row for each example
        self._has_counted = False  # the rows of outputs that have others than the batch
        self._global_generator = global_generator_of(self.strategy, is_seeded=is_seeded)
        self._draws: Sequence[NotedDraw] | None = None
        self._on_batch = self._one if model.run_eagerly else in_graph(self._one, reduce_retracing=True)

    @property
    def is_of_user(self) -> bool:
        """Whether the step is not that of Keras' own code."""
        return self.takes_check != "compile" or overrides(self.model, "predict_step")

    @property
    def takes_check(self) -> str:
        """What is called with whether steps are checked."""
        return getattr(self.model, "takes_check", "compile")

    def on_batches(self, batches: Sequence[StepData], *, of_worker: bool = False) -> TensorNest:
        """Predict each batch and concatenate the outputs along the rows."""
        outputs = []
        for batch in batches:
            try:
                outputs.append(self._on_batch(batch, of_worker))
            except UnknownDraws:  # raised while tracing
                self._learn_draws(batch)
                outputs.append(self._on_batch(batch, of_worker))
            if not of_worker and self.strategy.num_replicas_in_sync > 1:
                self._check_num_rows(batch, outputs[-1])
        return concat_outputs(outputs)

    def untraced_copy(self, batch: StepData) -> PredictProgram:
        """Return a new program that runs without XLA, not traced yet, and knows what the step draws.

        Args:
            batch: of a few rows.
        """
        copy = PredictProgram(self.model)
        copy._step = self.model.predict_step
        if self.model.replica_seeds.draws == "global":
            copy._learn_draws(batch)
        return copy

    def run_on_replicas(self, batch: StepData) -> TensorNest:
        """Predict a batch, each replica its part of it."""
        return self._one(batch, False)

    def run_on_first_replica(self, batch: StepData) -> TensorNest:
        """Predict a batch as one device does."""
        return _FirstReplicaStep(self.model, self._global_generator).run_on_first_replica(batch)

    def _learn_draws(self, batch: StepData) -> None:
        """Trace the step in a scratch graph, to learn which random numbers have a dimension of examples."""
        batch = next(iter(parts_of(data.without_optionals(batch), self.strategy)))
        spec = tree.map_structure(lambda leaf: leaf if leaf is None else any_number_of_rows(leaf), batch)
        try:
            self._draws = note_draws(_FirstReplicaStep(self.model, self._global_generator), spec, lambda: batch)
        except KerasDistError:
            raise
        except Exception as error:
            raise cannot_note(self.model.name, error) from error

    def _check_num_rows(self, batch: StepData, outputs: TensorNest) -> None:
        """Where an output's rows are not those of the batch, see once that one device returns as many.

        Raises:
            DataError: it does not: what replicas return for their parts does not make up what it returns for the whole.
        """
        if self._has_counted or is_per_replica(batch):
            return
        batch = data.without_optionals(batch)
        rows = max(int(data.num_rows(batch)), 1)
        if all(_count(output) % rows == 0 for output in tree.flatten(outputs)):
            return
        with kept_random(), intercept(None), rows_of_no_batch():
            expected = self.model.predict_step(batch)
        for (path, found), one in zip(tree.flatten_with_path(outputs), tree.flatten(expected), strict=True):
            if _count(found) != _count(one):
                raise DataError(
                    f"predict: {_named(path)} has {_count(one)} rows for a batch of {rows} examples on one device, and "
                    f"{_count(found)} where each replica computes it for its own examples. Return it for each example "
                    "(tf.gather), or compute it under one_device."
                )
        self._has_counted = True

    def _one(self, batch: StepData, of_worker: bool) -> TensorNest:
        batch = data.without_optionals(batch)
        is_whole = self.strategy.num_replicas_in_sync == 1
        split = Split.NONE if is_whole else split_of(batch, of_worker=of_worker)
        outputs = self.strategy.run(self._replica, args=(batch, split))
        if is_whole:
            return outputs
        if split is Split.GLOBAL and not self._has_checked:
            self._check_outputs(batch)
            self._has_checked = True
        return tree.map_structure(functools.partial(concat_replicas, self.strategy), outputs)

    def _replica(self, batch: StepData, split: HowSplit) -> TensorNest:
        num_global = data.num_rows(batch) if split is Split.NONE else rows_on_host(batch)
        first = first_row(split, self.strategy, num_global)
        if split is not Split.NONE:
            batch = rows_of_replica(batch, self.strategy, of_worker=split is Split.WORKER)
        if split is not Split.NONE and self.model.replica_seeds.draws == "global":
            batch = of_any_number(batch)
        rows = data.num_rows(batch)
        options = StepOptions(kind="predict", global_generator=self._global_generator, draws=self._draws)
        step = ReplicaStep(self.model, rows, rows if first is None else num_global, options, first_row=first)
        step.begin(batch)
        with intercept(step), use_global_seed_generator(self._global_generator):
            outputs = self._step(batch)
            step.check_draws()
            if step.has_assigned and first is None:
                (global_rows,) = step.sum_over_replicas([tf.cast(rows, tf.float32)])
                step.weights.global_rows = tf.cast(global_rows, tf.int32)
            if step.has_assigned:
                step.finish({})
        if step.num_replicas > 1:
            _check_have_rows(outputs, rows)
        return outputs

    def _check_outputs(self, batch: StepData) -> None:
        """Trace the step on any number of rows, if that of the batch is a constant, to see what grows with it.

        The graph is a scratch graph, which never runs.

        What cannot be traced so, as code that needs the number of rows, is taken for what has one entry for each.
        """
        leaves = tree.flatten(batch)
        if not isinstance(data.num_rows(batch), int) or not all(leaf is None or _is_dense(leaf) for leaf in leaves):
            return
        spec = tree.map_structure(lambda leaf: leaf if leaf is None else any_number_of_rows(leaf), batch)
        try:
            with scratch_graph("outputs_of_a_step"), intercept(None), rows_of_no_batch():
                given = placeholders(spec)
                outputs = self.model.predict_step(given)
                rows = data.num_rows(given)
        except Exception:
            return
        finally:
            clear_losses(self.model)
        _check_have_rows(outputs, rows)


class _FirstReplicaStep:
    """A step of prediction that one replica makes by itself, as one device does."""

    def __init__(self, model: keras.Model, generator: keras.random.SeedGenerator) -> None:
        self.observer = StepObserver()
        self._model = model
        self._generator = generator

    def run_on_first_replica(self, rows: StepData) -> TensorNest:
        """Make the step, and return its outputs."""
        strategy = self._model.distribute_strategy
        made = []
        options = StepOptions(kind="predict", global_generator=self._generator, observer=self.observer)

        def replica(rows: StepData) -> None:
            if is_first_of_worker():
                step = ReplicaStep(self._model, 1, 1, options, LoneReplica(strategy, 1), first_row=0)
                step.begin(rows)
                with (
                    intercept(step),
                    use_global_seed_generator(self._generator),
                    seen_as_one_replica(),
                    without_aggregation(),
                ):
                    made.append(self._model.predict_step(rows))

        try:
            strategy.run(replica, args=(rows,))
        finally:
            clear_losses(self._model)
        return made[0]


def _is_dense(leaf: TensorNest) -> bool:
    return not isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)


def _check_have_rows(outputs: TensorNest, rows: int | tf.Tensor) -> None:
    """Refuse an output that is one for the whole batch: each replica would give its own.

    Raises:
        DataError: one is.
    """
    for path, output in tree.flatten_with_path(outputs):
        shape = getattr(output, "shape", None)
        if shape is None or shape.rank is None:
            continue
        found = shape[0] if shape.rank else None
        is_for_rows = found is None or (isinstance(rows, int) and (found % rows == 0 if rows else not found))
        if shape.rank and is_for_rows:
            continue
        raise DataError(
            f"predict: {_named(path)} has the shape {shape}, without a dimension for "
            "the examples, so each replica has one of its own, and they are not that of one device. Return it for each "
            "example (tf.repeat), or compute it under one_device."
        )


def _named(path: Sequence[object]) -> str:
    name = "/".join(map(str, path))
    return f"the output {name}" if name else "an output"


def _count(output: tf.Tensor) -> int:
    return int(output.nrows() if isinstance(output, tf.RaggedTensor) else output.shape[0])


def concat_replicas(strategy: tf.distribute.Strategy, value: TensorNest) -> tf.Tensor:
    """Concatenate what each replica of all workers has for its rows, in the order of the replicas."""
    parts = (value,) if is_default_strategy(strategy) else local_values(strategy, value)
    if len(parts) == strategy.num_replicas_in_sync:
        return _concat(parts)
    dtype = parts[0].dtype
    if dtype == tf.string:
        raise DataError(
            "Strings of several workers cannot be concatenated: TensorFlow's collectives carry only numbers. Return "
            "their numbers in a list of all of them, and look them up afterwards."
        )
    wide = GATHERED_AS.get(dtype, dtype)
    gathered = strategy.gather(regroup([tf.cast(part, wide) for part in parts]), axis=0)
    return tf.cast(gathered, dtype)


def concat_outputs(outputs: Sequence[TensorNest]) -> TensorNest:
    """Concatenate the outputs of several batches along the rows."""
    return outputs[0] if len(outputs) == 1 else tree.map_structure(lambda *parts: _concat(parts), *outputs)


def _concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    if parts[0].shape.rank == 0:
        return tf.stack(parts)
    return tf.concat(parts, axis=0)
