"""Know the data of a run: what was given, how its workers read it, and what a batch of it looks like."""

from __future__ import annotations

import functools
import random
import zlib

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.adapters import ArrayDataAdapter, DataAdapter, TFDatasetAdapter
from keras_dist_ext._keras.py_datasets import seed_py_datasets
from keras_dist_ext.aliases import JsonObject, SpecNest
from keras_dist_ext.strategy.consistency import data_fingerprint
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.batch_spec import any_number_of_rows, given_spec
from keras_dist_ext.training.resume.position import Seekable, sample_checksum, seekable_facts

__all__ = ["RunDataset"]


class RunDataset:
    """The dataset that a run reads as it is: replicas cut their rows in the step.

    Args:
        adapter: Keras' own, of the data that was given.
        strategy: that the model lives under.
        seekable: the user's data, if it can seek.
        steps_per_epoch: of ``fit``.

    Attributes:
        data_adapter: see above.
        seekable: ...
        given: the dataset that was given, or that Keras has made of what was.
        read: what is read of it, where no order of a seed is asked for.
        workers: that read it; None on one.
        has_own_rows: whether each of them reads its own examples.
        common_seed: of all workers; None on one.
        is_on_tpu: whether TensorFlow distributes it.
        num_passes: how many passes over it have begun.
    """

    def __init__(
        self,
        adapter: DataAdapter,
        strategy: tf.distribute.Strategy,
        seekable: Seekable | None,
        steps_per_epoch: int | None,
    ) -> None:
        self.data_adapter = adapter
        self.seekable = seekable
        self._steps_per_epoch = steps_per_epoch
        self.workers = workers = workers_of(strategy)
        self.has_own_rows = False
        self.common_seed: int | None = None
        self.num_passes = 0
        self._has_drawn = True  # whether Python's generator is past the common seed
        self.given: tf.data.Dataset = adapter.get_tf_dataset()
        self.read: tf.data.Dataset | tf.distribute.DistributedDataset = self.given
        if workers is not None:
            self.read, self.has_own_rows, seed = workers.align_data(self.given, sample_checksum(adapter))
            seed_py_datasets(seed)
            self.common_seed, self._has_drawn = seed, False
            facts = data_fingerprint(self.batch_spec, adapter.num_batches, own_rows=self.has_own_rows)
            if not workers.all_equal(zlib.crc32(repr(facts).encode())):
                workers.check_consistency("read its data", facts)
        self.is_on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        if self.is_on_tpu and isinstance(self.read, tf.data.Dataset):
            self.read = strategy.experimental_distribute_dataset(self.read)

    @property
    def batch_spec(self) -> SpecNest:
        """Specs of a batch: shapes with an unknown number of rows."""
        return tree.map_structure(any_number_of_rows, self.exact_spec)

    @property
    def exact_spec(self) -> SpecNest:
        """Specs of a batch, with the number of its rows where that is known."""
        return tree.map_structure(given_spec, self.read.element_spec)

    @property
    def is_pipeline(self) -> bool:
        """Whether a dataset was given, which Keras reads as it is."""
        return isinstance(self.data_adapter, TFDatasetAdapter)

    @property
    def can_be_read_again(self) -> bool:
        """Whether another iterator takes nothing from this one: not so for generators, and what is split already."""
        plain = isinstance(self.given, tf.data.Dataset) and not self.has_own_rows
        return plain and (self.is_pipeline or isinstance(self.data_adapter, ArrayDataAdapter))

    @property
    def num_batches(self) -> int | None:
        """Of an epoch, if that is known."""
        return self._steps_per_epoch or self.data_adapter.num_batches

    @functools.cached_property
    def facts(self) -> JsonObject:
        """What a run's data must have in common with that of an earlier process, for positions to mean the same.

        Raises:
            DataError: nobody can say where in this data a run is.
        """
        facts = seekable_facts(
            self.data_adapter,
            self.given,
            self.seekable,
            self._steps_per_epoch,
            pass_length=self.data_adapter.num_batches,
        )
        num_workers = self.workers.num_workers if self.workers and self.has_own_rows else 0
        return {**facts, "workers that read rows of their own": num_workers}

    def begin_epoch(self) -> None:
        """Have Python's generator go past the common seed, once: layers that were built before drew from there."""
        if not self._has_drawn:
            self._has_drawn = True
            random.randrange(2**31)
