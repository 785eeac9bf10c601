"""What ``predict`` runs: the compiled ``predict_step`` over all replicas, its rows in the order of the batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.random import use_global_seed_generator
from keras_dist_ext._keras.strategies import is_default_strategy, regroup
from keras_dist_ext.data import split as data
from keras_dist_ext.errors import DataError
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.step.reduce import local_values
from keras_dist_ext.step.replica_step import ReplicaStep, StepOptions
from keras_dist_ext.step.seeds import global_generator_of
from keras_dist_ext.step.xla import can_compile, compiled
from keras_dist_ext.training.batch_split import Split, rows_of_replica, split_of

if TYPE_CHECKING:
    from keras_dist_ext.training.model import Model

__all__ = ["PredictProgram", "concat_outputs", "gather_rows"]


class PredictProgram:
    """The compiled ``predict_step`` over all replicas, its rows in the order of the batch."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.strategy: tf.distribute.Strategy = model.distribute_strategy
        is_seeded = model.replica_runtime.seeds.root is not None
        step = model.predict_step
        if model.jit_compile and model.placement is None and not model.run_eagerly and can_compile(self.strategy):
            step = compiled(step)
        self._step = step
        self._global_generator = global_generator_of(self.strategy, is_seeded=is_seeded)
        self._on_batch = self._one if model.run_eagerly else in_graph(self._one, reduce_retracing=True)

    def on_batches(self, batches: Sequence[Any], *, of_worker: bool = False) -> Any:
        """Predict each batch and concatenate the outputs along the rows."""
        return concat_outputs([self._on_batch(batch, of_worker) for batch in batches])

    def _one(self, batch: Any, of_worker: bool) -> Any:
        batch = data.without_optionals(batch)
        is_whole = self.strategy.num_replicas_in_sync == 1
        split = Split.NONE if is_whole else split_of(batch, of_worker=of_worker)
        outputs = self.strategy.run(self._replica, args=(batch, split))
        if is_whole:
            return outputs
        return tree.map_structure(functools.partial(gather_rows, self.strategy), outputs)

    def _replica(self, batch: Any, split: Split) -> Any:
        if split is not Split.NONE:
            batch = rows_of_replica(batch, self.strategy, of_worker=split is Split.WORKER)
        rows = data.num_rows(batch)
        step = ReplicaStep(self.model, rows, rows, StepOptions(kind="predict", global_generator=self._global_generator))
        with intercept(step), use_global_seed_generator(self._global_generator):
            outputs = self._step(batch)
            if step.has_assigned:
                (global_rows,) = step.sum_over_replicas([tf.cast(rows, tf.float32)])
                step.weights.global_rows = tf.cast(global_rows, tf.int32)
                step.finish({})
        return outputs


def gather_rows(strategy: tf.distribute.Strategy, value: Any) -> Any:
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
    wide = {tf.bfloat16: tf.float32, tf.float16: tf.float32, tf.bool: tf.int32}.get(dtype, dtype)
    gathered = strategy.gather(regroup([tf.cast(part, wide) for part in parts]), axis=0)
    return tf.cast(gathered, dtype)


def concat_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of several batches along the rows."""
    return outputs[0] if len(outputs) == 1 else tree.map_structure(lambda *parts: _concat(parts), *outputs)


def _concat(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    if parts[0].shape.rank == 0:
        return tf.stack(parts)
    return tf.concat(parts, axis=0)
