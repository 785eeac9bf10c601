"""Call a function on each replica's rows of a batch, and put the results of all rows in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import tree
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext.aliases import BatchFunction, StepData, TensorNest
from keras_dist_ext.data.graph_checks import as_data_errors
from keras_dist_ext.errors import DataError, LoopError, StrategyError
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.strategy.given import given_strategy
from keras_dist_ext.training.batch_split import is_per_replica, rows_of_replica
from keras_dist_ext.training.prediction import concat_replicas

__all__ = ["gather", "per_replica"]


def per_replica(function: BatchFunction, strategy: tf.distribute.Strategy | None = None) -> BatchFunction:
    """Return a compiled function that gives each replica its rows of a batch.

        predict = kde.per_replica(net, strategy)
        predictions = [kde.gather(predict(batch), strategy) for batch in dataset]     # all rows, in order

    Rows are split as in training, also where they do not divide evenly: some replicas then have more than others, or
    none. Under several workers, each calls it with the same global batches.

    Args:
        function: takes a batch: one replica's rows of it.
        strategy: whose replicas call it; by default the one whose scope is entered now.

    Returns:
        A function of the global batch, or of one that TensorFlow has distributed, that returns what ``strategy.run``
        does: a value for each replica.

    Raises:
        LoopError: ``function`` cannot be called.
        StrategyError: ``strategy`` is not a ``tf.distribute.Strategy``.
    """
    under = given_strategy(strategy)
    arguments.function("function", function, wanted="a function of a batch", error=LoopError)

    def of_replica(batch: StepData, is_cut: bool) -> TensorNest:
        return function(batch if is_cut else rows_of_replica(batch, under))

    def on_all(batch: StepData) -> TensorNest:
        if under.num_replicas_in_sync == 1:
            return under.run(function, args=(batch,))
        return under.run(of_replica, args=(batch, is_per_replica(batch)))

    compiled = in_graph(on_all, reduce_retracing=True)

    @functools.wraps(function if hasattr(function, "__name__") else of_replica)
    def call(batch: StepData) -> TensorNest:
        with as_data_errors():
            return compiled(tree.map_structure(_as_tensor, batch))

    return call


def _as_tensor(leaf: TensorNest) -> TensorNest:
    is_value = leaf is None or isinstance(leaf, tf.distribute.DistributedValues | tf.RaggedTensor | tf.SparseTensor)
    return leaf if is_value else tf.convert_to_tensor(leaf)


def gather(values: TensorNest, strategy: tf.distribute.Strategy | None = None) -> TensorNest:
    """Put what the replicas have for their rows together, in the order of the global batch, over all workers.

    Args:
        values: a structure of what ``per_replica`` returns, each with a first dimension of rows.
        strategy: whose replicas they are; by default the one whose scope is entered.

    Raises:
        StrategyError: they are of several replicas, and no strategy says of which; or ``strategy`` is none.
        DataError: rows of different replicas have different shapes; of several workers, they are strings; or they are
            no tensors.
    """
    under = given_strategy(strategy)

    def gathered(value: TensorNest) -> tf.Tensor:
        if value is None:
            return None
        if isinstance(value, tf.distribute.DistributedValues) and is_default_strategy(under):
            raise StrategyError(
                "gather was given values of several replicas, and no strategy, so it is unknown of how many "
                "workers. Give the strategy that per_replica was given: gather(values, strategy)."
            )
        if not (tf.is_tensor(value) or isinstance(value, tf.distribute.DistributedValues)):
            arguments.refuse("values", value, "a structure of what per_replica returns", DataError)
        _check_shapes(under.experimental_local_results(value))
        return concat_replicas(under, value)

    return tf.nest.map_structure(gathered, values)


def _check_shapes(parts: Sequence[TensorNest]) -> None:
    """Refuse what can be no tensor: rows of different shapes."""
    if not tf.executing_eagerly():
        return
    shapes = {tuple(part.shape[1:]) for part in parts if isinstance(part, tf.Tensor) and part.shape.rank}
    if len(shapes) > 1:
        raise DataError(
            f"gather was given rows of the shapes {', '.join(map(str, sorted(shapes)))} by different replicas, which "
            "cannot be one tensor. Pad them to one shape, as tf.pad does, or return tf.RaggedTensors."
        )
