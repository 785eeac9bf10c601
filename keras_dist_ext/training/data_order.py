"""Put the data of a pass into the order of a seed."""

from __future__ import annotations

import weakref

import tensorflow as tf

from keras_dist_ext._keras.adapters import ArrayDataAdapter, DataAdapter, array_shuffle, seed_array_shuffles
from keras_dist_ext._keras.datasets import (
    caches_in_memory,
    captures_variables,
    dataset_graph,
    generator_states,
    unseeded_random_ops,
    with_seeds,
)
from keras_dist_ext._keras.strategies import first_replica
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext.hashing import fold_in
from keras_dist_ext.messages import warn_once
from keras_dist_ext.step.seeds import Seeds
from keras_dist_ext.strategy.workers import Workers

__all__ = ["DataOrder"]


class DataOrder:
    """Gives the dataset of a pass, with what is random in it drawn by a seed.

    Args:
        adapter: Keras' own, of the data that was given.
        given: the dataset that it makes of it.
        strategy: that reads it.
        seeds: of the run; where it has a seed, they stand above TensorFlow's global one.
        has_own_rows: whether each worker reads its own examples.
        workers: that read it; None on one.

    Attributes:
        is_own: whether each worker would shuffle arrays in an order of its own: TensorFlow has no global seed
            (``tf.random.set_seed``), or not the same on all.
    """

    def __init__(
        self,
        adapter: DataAdapter,
        given: tf.data.Dataset,
        strategy: tf.distribute.Strategy,
        seeds: Seeds,
        *,
        has_own_rows: bool,
        workers: Workers | None,
    ) -> None:
        self._adapter = adapter
        self._given = given
        self._strategy = strategy
        self._seeds = seeds
        self._has_own_rows = has_own_rows
        self._is_on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        self._dataset: tf.data.Dataset | None = None  # of arrays, made once
        self._seed = 0
        self.is_own = workers is not None and isinstance(adapter, ArrayDataAdapter) and not _have_one_seed(workers)

    def dataset(self, seed: int | None) -> tf.data.Dataset | None:
        """Return the dataset in the order of a seed; None for the one that was given."""
        if seed is None:
            return None
        if isinstance(self._adapter, ArrayDataAdapter):
            return self._arrays(seed) if array_shuffle(self._adapter) else None
        return self.of_pipeline(seed)

    def _arrays(self, seed: int) -> tf.data.Dataset:
        self._seed = seed
        if self._dataset is None:
            with seed_array_shuffles(lambda: self._seed):
                self._dataset = self._adapter.get_tf_dataset()
        return self._dataset

    def of_pipeline(self, seed: int) -> tf.data.Dataset | None:
        """Return the pipeline with what is random drawn by a seed; None where nothing is, or TensorFlow hides it."""
        if self._is_on_tpu or not isinstance(self._given, tf.data.Dataset):
            return None
        graph = dataset_graph(self._given)
        if graph is None:
            return None
        over_global = self._seeds.root is not None
        if caches_in_memory(graph):  # made once, it keeps what it has cached, and reshuffles by itself
            if self._given not in _ORDERED:
                if unseeded_random_ops(graph, over_global=over_global) or generator_states(graph):
                    warn_once(
                        "The pipeline keeps elements in memory (cache()) and draws random numbers in its functions, "
                        "which therefore cannot follow the seed of the run: they differ from run to run. Draw in the "
                        "model, by Keras' layers or keras.random, or by tf.random.stateless_* ops."
                    )
                _ORDERED[self._given] = with_seeds(self._given, graph, seed, over_global=over_global)
            return _ORDERED[self._given]
        worker = first_replica(self._strategy) if self._has_own_rows else 0
        map_seed = fold_in(seed, "map", worker)
        holds_variables = captures_variables(graph)
        ordered = with_seeds(self._given, graph, seed, map_seed, over_global=over_global)
        if holds_variables and ordered is not self._given:
            warn_once(
                "The pipeline's functions read a tf.Variable. To have its order follow a seed, it is made anew for "
                "each pass, with a copy of the variable: what is assigned in the middle of a pass is seen in the next "
                "one. Give its shuffles seeds of their own if that matters."
            )
        return ordered


def _have_one_seed(workers: Workers) -> bool:
    """Whether all workers have the same global seed of TensorFlow, by which they shuffle as one device does."""
    with scratch_graph("global_seed") as graph:  # a graph takes the seed over
        seed = graph.seed
    return workers.all_equal(-1 if seed is None else int(seed)) and seed is not None


# Pipelines that cache in memory.
_ORDERED: weakref.WeakKeyDictionary[tf.data.Dataset, tf.data.Dataset] = weakref.WeakKeyDictionary()
