"""Keep the workers of a run in agreement: when to stop, how many steps to make, and what data to read.

Every worker runs the same program, and a collective that one of them leaves out hangs the others. So whatever could
differ between them (a clock, a callback's request to stop, the length of the data) is summed over all before it is
acted upon. Letters: W = workers.
"""

from __future__ import annotations

import functools
import random
import sys
import weakref
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.datasets import checksum_of_constants, dataset_graph, shard_indices, with_seeds
from keras_dist_ext._keras.strategies import first_replica, has_several_workers, note_creations, replica_id
from keras_dist_ext._keras.variables import components
from keras_dist_ext.cluster import heartbeat
from keras_dist_ext.cluster.rendezvous import wait_seconds_of
from keras_dist_ext.errors import WorkersError
from keras_dist_ext.messages import warn
from keras_dist_ext.strategy.consistency import Fingerprint, check_consistency
from keras_dist_ext.strategy.deadlock import DeadlockWatch
from keras_dist_ext.strategy.key_value import KeyValueStore

__all__ = ["Workers", "checksum_of", "workers_of", "workers_of_process"]


def workers_of(strategy: tf.distribute.Strategy) -> Workers | None:
    """Return the workers that train in step under ``strategy``; None for a strategy of one process."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return None
    if not has_several_workers(strategy):
        return None
    if strategy not in _WORKERS:
        _WORKERS[strategy] = Workers(strategy)
    return _WORKERS[strategy]


def workers_of_process() -> Workers | None:
    """Return the workers of the cluster that this process has joined, if it has: it can join one only."""
    return next(iter(_WORKERS.values()), None)


_WORKERS: weakref.WeakKeyDictionary[tf.distribute.Strategy, Workers] = weakref.WeakKeyDictionary()


class Workers:
    """All workers of a ``MultiWorkerMirroredStrategy``, seen from one of them.

    Attributes:
        store: what all of them can read.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        resolver = strategy.cluster_resolver
        tasks = resolver.cluster_spec().as_dict()
        self.strategy = strategy
        self.num_workers: int = len(tasks.get("chief", [])) + len(tasks.get("worker", []))
        first = "chief" if tasks.get("chief") else "worker"
        self.is_chief: bool = (resolver.task_type, resolver.task_id) == (first, 0)
        self.index: int = first_replica(strategy) // len(strategy.extended.worker_devices)
        self._sum, self._sum_integers = (
            tf.function(self._sum_in_graph, autograph=False, input_signature=[tf.TensorSpec([None], dtype)])
            for dtype in (tf.float64, tf.int64)
        )
        jobs = {job: len(tasks[job]) for job in ("chief", "worker") if tasks.get(job)}
        self.store = KeyValueStore(jobs, self.index)
        self._num_checks = 0
        self.watch = DeadlockWatch(self.store)
        self.watch.presence.begin()
        note_creations(strategy, functools.partial(self.watch.waiting, "the creation of a variable"))

    def check_consistency(self, what: str, fingerprint: Fingerprint) -> None:
        """Check that all workers are about to do the same. Every worker must call it, at the same point of its program.

        Args:
            what: they are about to do, such as "call fit".
            fingerprint: of this worker.

        Raises:
            WorkersError: they are not, or one does not arrive; says what differs.
        """
        self._num_checks += 1
        with self.watch.waiting(f"the check before they {what}"):
            check_consistency(
                self.store,
                f"run/{self._num_checks}",
                fingerprint,
                what=what,
                wait_seconds=wait_seconds_of(self.strategy),
                look=self.watch.check,
            )
        self.store.delete(f"run/{self._num_checks - 1}")  # which all have read, since all have got here

    def sum(self, values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Add up numbers over all workers. Every worker must call it, at the same point of its program.

        Raises:
            WorkersError: another worker is at another point.
        """
        here = _caller(self)
        tag = float(zlib.crc32(here.encode()) & 0xFFFF)
        with heartbeat.waiting(), self.watch.waiting(f"a worker sync ({here})"):
            numbers = [tag, tag * tag, *values]
            numbers += [0.0] * (_SMALL - len(numbers))  # where shapes differ, TensorFlow raises on one worker only
            total, squares, *sums = np.asarray(self._sum(tf.constant(numbers, tf.float64)))
        if self.num_workers * squares != total * total:
            raise WorkersError(self.watch.mismatch_message(f"a worker sync ({here})"))
        return np.asarray(sums[: len(values)])

    def broadcast(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the chief's numbers to all workers."""
        return self.sum(list(values) if self.is_chief else [0.0] * len(values))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return the chief's bytes to all workers."""
        (size,) = self.broadcast([float(len(data))])
        words = np.zeros(-(-int(size) // 8), np.int64)
        if self.is_chief:
            words = np.frombuffer(data.ljust(words.nbytes, b"\0"), np.int64)
        with heartbeat.waiting(), self.watch.waiting("a broadcast of bytes"):
            parts = [
                np.asarray(self._sum_integers(tf.constant(words[begin : begin + _WORDS_AT_ONCE])))
                for begin in range(0, len(words), _WORDS_AT_ONCE)
            ]
        return b"".join(part.tobytes() for part in parts)[: int(size)]

    def all_equal(self, checksum: int) -> bool:
        """Whether all workers hold the same checksum (its low 32 bits)."""
        halves = [float(checksum & 0xFFFF), float(checksum >> 16 & 0xFFFF)]  # sums of their squares are exact
        *totals, low, high = self.sum([*halves, *(half * half for half in halves)])
        return all(
            self.num_workers * squares == total * total for total, squares in zip(totals, (low, high), strict=True)
        )

    def broadcast_state(self, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        """Give the chief's values of ``variables`` to all workers."""
        with self.watch.waiting("a worker sync (state of the chief)"):
            self._broadcast_state(variables)

    def _broadcast_state(self, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        for variable in variables:
            value = tf.convert_to_tensor(components(variable)[0])
            flat = tf.reshape(tf.cast(value, tf.float64), [-1])  # exact for all of Keras' dtypes but huge integers
            shared = tf.reshape(self._sum(flat if self.is_chief else tf.zeros_like(flat)), value.shape)
            for copy in components(variable):
                copy.assign(tf.cast(shared, value.dtype))

    def _sum_in_graph(self, value: tf.Tensor) -> tf.Tensor:
        def reduce() -> tf.Tensor:
            is_first = replica_id() % len(self.strategy.extended.worker_devices) == 0
            mine = tf.identity(value) if is_first else tf.zeros_like(value)
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine)

        return self.strategy.experimental_local_results(self.strategy.run(reduce))[0]

    # Data

    def align_data(
        self, dataset: tf.data.Dataset | tf.distribute.DistributedDataset, sample: int | None = None
    ) -> tuple[tf.data.Dataset, bool, int]:
        """Return the dataset to read, whether each worker reads its own examples, and a common seed.

        By default all workers read the same batches and take their examples of each, so shuffles without a seed get a
        common one. Data is a worker's own where the user has split it: under ``AutoShardPolicy.OFF`` with
        batches that differ, or by ``Dataset.shard`` with an index that differs. The seed is the next number of Python's
        generator, which the caller draws once the model is built.

        Args:
            dataset: of this worker.
            sample: a checksum of some of its examples, where they are in memory, and not from a pipeline of the user's.
        """
        state = random.getstate()
        seed = int(self.broadcast([random.randrange(2**31)])[0])
        random.setstate(state)  # layers that the first step makes draw their seeds from here, as on one device
        if not isinstance(dataset, tf.data.Dataset):
            return dataset, False, seed
        if sample is not None:
            self.compare_data(sample)
            return dataset, False, seed
        graph = dataset_graph(dataset)
        shards = [] if graph is None else shard_indices(graph)
        if not self.all_equal(zlib.crc32(repr(shards).encode())):
            return dataset, True, seed
        made_of = 0 if graph is None else checksum_of_constants(graph)
        if dataset.options().experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF:
            return dataset, not self.all_equal(made_of ^ checksum_of(next(iter(dataset), None))), seed
        self.compare_data(made_of)
        return (dataset if graph is None else with_seeds(dataset, graph, seed)), False, seed

    def compare_batch(self, batch: object) -> None:
        """Warn where workers make a step on batches that differ."""
        self.compare_data(checksum_of(batch))

    def compare_data(self, checksum: int) -> None:
        """Warn where a checksum of what all read differs between workers: much of it would not be used."""
        if not self.all_equal(checksum) and self.is_chief:
            warn(
                "The workers were given data that differs. Each takes its examples of every batch, as if all had the "
                f"same batches, so that of each worker's data 1/{self.num_workers} is used. Give all workers the same "
                "data, made alike (with a seed, if it is random); or, for data of their own, a Dataset.shard each, or "
                "AutoShardPolicy.OFF."
            )


def _caller(workers: Workers) -> str:
    """Name the function that has called for an agreement, the same on all workers."""
    frame = sys._getframe(2)
    while frame.f_locals.get("self") is workers and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '').rpartition('.')[2]}.{frame.f_code.co_name}"


_WORDS_AT_ONCE = 1 << 20
_SMALL = 8  # numbers of an agreement that has fewer


def checksum_of(batch: object) -> int:
    """Return a checksum of a batch that is equal on all workers where the batch is."""
    checksum = 0
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is not None and not isinstance(leaf, tf.TypeSpec) and getattr(leaf, "dtype", None) != tf.variant:
            checksum = zlib.crc32(tf.io.serialize_tensor(leaf).numpy(), checksum)  # also of strings
    return checksum
