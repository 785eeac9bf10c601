"""Describe the position of a run in its data, and move new data of the same kind there without training steps.

A position counts global batches, so it means the same for any number of replicas and workers. What follows it depends
on the data and the seeds of its order: arrays and PyDatasets start at the batch, tf.data is read up to it.
"""

from __future__ import annotations

import dataclasses
import types
import zlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.adapters import (
    ArrayDataAdapter,
    DataAdapter,
    GeneratorDataAdapter,
    TFDatasetAdapter,
    array_shuffle,
    first_batch_of_generator,
    num_array_examples,
    take_examples,
)
from keras_dist_ext._keras.datasets import caches_in_memory, dataset_graph, has_random_order, has_unseeded_shuffle
from keras_dist_ext._keras.py_datasets import resume_py_dataset
from keras_dist_ext.aliases import JsonObject, StepData
from keras_dist_ext.data.dataset_graph import read_graph
from keras_dist_ext.errors import DataError
from keras_dist_ext.strategy.workers import checksum_of

__all__ = [
    "Position",
    "Seekable",
    "batch_sizes",
    "iterate_batches",
    "check_seekable",
    "example_checksum",
    "skip_to",
    "replay_epochs",
    "replay_evaluations",
    "has_resumable_iterator",
    "is_deterministic",
    "replay_passes",
    "sample_checksum",
    "seekable_facts",
    "take_seekable",
]


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of training: after a step, or between two epochs."""

    epoch: int  # the present or the next one, counted from 0
    step: int  # batches used in that epoch; 0 = it has not started
    num_epochs: int  # that have ended in this run
    num_passes: int  # times that the data was iterated from its start in this run
    num_pass_batches: int  # batches used in the last pass; 0 = the next epoch starts a new pass
    num_run_batches: int  # batches used in this run
    order: int  # number of the order of the last pass
    num_tests: int  # passes of evaluation over its data
    num_tests_before: int  # that began before the iterator of the last, or next, pass was made


@runtime_checkable
class Seekable(Protocol):
    """An iterator over batches that can seek: ``kde.Model.fit`` takes it where Keras takes a generator."""

    def __next__(self) -> StepData:
        """Return the next batch, a tuple."""

    def seek(self, batch: int) -> None:
        """Continue with this batch, counted from 0 at the first batch of the first epoch, through all epochs."""


def take_seekable(arguments: dict[str, object]) -> Seekable | None:
    """Return the data if it is seekable, and replace it by a generator, which Keras takes."""
    x = arguments.get("x")
    if not isinstance(x, Seekable) or isinstance(x, types.GeneratorType):
        return None

    arguments["x"] = iterate_batches(x)
    return x


def iterate_batches(data: Seekable) -> Iterator[StepData]:
    """Yield the batches of take_seekable data."""
    while True:
        try:
            batch = next(data)
        except StopIteration:
            return
        yield batch


def check_seekable(
    adapter: DataAdapter, dataset: tf.data.Dataset, given: Seekable | None, steps_per_epoch: int | None
) -> str:
    """Return the kind of the data.

    Args:
        adapter: Keras' own.
        dataset: that the adapter made of the data.
        given: the user's data, if it can seek.
        steps_per_epoch: of `fit`.

    Raises:
        DataError: a run cannot resume in the middle of this data.
    """
    if isinstance(adapter, ArrayDataAdapter):
        return "arrays"
    if given is not None:
        return "iterator"
    if hasattr(adapter, "py_dataset"):
        num_batches = adapter.num_batches
        if adapter.enqueuer is not None and steps_per_epoch not in (None, num_batches):
            whole = "infinitely many batches" if num_batches is None else f"{num_batches} batches"
            raise DataError(
                f"The data is a PyDataset with {adapter.py_dataset.workers} workers, which Keras restarts "
                f"at each epoch, here after {steps_per_epoch} of its {whole}: the batches that they have prefetched by "
                "then are lost, and their number differs from run to run. Leave steps_per_epoch out, or set workers=1."
            )
        return "PyDataset"
    if hasattr(adapter, "generator"):
        raise DataError(
            "The data is a generator, which cannot start in the middle, so a resumed run would start it from the "
            "beginning and see other batches. Give fit tf.data.Dataset.from_generator(a function that returns the "
            "generator), a keras.utils.PyDataset, or an iterator with a method seek(batch)."
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise DataError(
            f"The data is a {type(dataset).__name__}, whose batches TensorFlow has already distributed to replicas; it "
            "cannot start in the middle. Give fit the dataset itself: its batches are split over the replicas."
        )
    if not isinstance(adapter, TFDatasetAdapter):
        raise DataError(
            f"The data is read through Keras' {type(adapter).__name__}, which cannot start in the middle. Give "
            "fit arrays, a tf.data.Dataset or a keras.utils.PyDataset."
        )
    if has_unseeded_shuffle(dataset) and dataset_graph(dataset) is None:
        raise DataError(
            "The data is shuffled without a seed, in a pipeline whose graph TensorFlow cannot serialize (it has more "
            "than 2 GB, or depends on state of this process), so its order could not be reproduced. Give its shuffle "
            "a seed."
        )
    return "tf.data"


def seekable_facts(
    adapter: DataAdapter,
    dataset: tf.data.Dataset,
    given: Seekable | None,
    steps_per_epoch: int | None,
    *,
    pass_length: int | None,
) -> JsonObject:
    """Return what a run's data must have in common with that of an earlier process; see `check_seekable`.

    Args:
        adapter: Keras' own.
        dataset: that the adapter made of the data.
        given: the user's data, if it can seek.
        steps_per_epoch: of `fit`.
        pass_length: how many batches a pass has, if that is known.

    Raises:
        DataError: a run cannot resume in the middle of this data.
    """
    kind = check_seekable(adapter, dataset, given, steps_per_epoch)
    is_array = kind == "arrays"
    return {
        "data": kind,
        "rows": num_array_examples(adapter) if is_array else None,
        "batch_size": adapter.batch_size if is_array else None,
        "shuffle": array_shuffle(adapter) if is_array else None,
        "checksum": example_checksum(adapter) if is_array else None,
        "batches of the pipeline": batch_sizes(dataset) if kind == "tf.data" else [],
        "batches of a pass": pass_length if kind != "iterator" else None,
        "steps_per_epoch": steps_per_epoch,
    }


def batch_sizes(dataset: tf.data.Dataset) -> list[int]:
    """Return the batch size of each batching stage of a pipeline, as far as its graph shows it."""
    graph = read_graph(dataset) if isinstance(dataset, tf.data.Dataset) else None
    stages = [] if graph is None else graph.stages.values()
    return [int(stage.batch_size) for stage in stages if stage.batch_size is not None]


def example_checksum(adapter: DataAdapter) -> int | None:
    """Return a checksum of some examples of arrays, to detect other arrays of the same length; None if unavailable."""
    if not num_array_examples(adapter):
        return None
    rows = np.unique(np.linspace(0, num_array_examples(adapter) - 1, 64).astype(np.int64))
    checksum = 0
    try:
        taken = take_examples(adapter, rows)
    except TypeError:
        return None
    for part in taken:
        checksum = zlib.crc32(repr(part.tolist()).encode() if part.dtype == object else part.tobytes(), checksum)
    return checksum


def sample_checksum(adapter: DataAdapter) -> int | None:
    """Return a checksum of what is at hand of data that no pipeline of the user's gives."""
    if isinstance(adapter, ArrayDataAdapter):
        return example_checksum(adapter) or 0
    if isinstance(adapter, GeneratorDataAdapter):
        return checksum_of(first_batch_of_generator(adapter))
    return None


def is_deterministic(dataset: tf.data.Dataset) -> bool:
    """Whether the order of a pipeline's elements does not depend on timing."""
    graph = dataset_graph(dataset) if isinstance(dataset, tf.data.Dataset) else None
    if graph is None:
        return True
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    said = {node.attr["deterministic"].s for node in nodes if "deterministic" in node.attr}
    return b"false" not in said and (dataset.options().deterministic is not False or b"default" not in said)


def replay_epochs(adapter: DataAdapter, position: Position) -> None:
    """Call a PyDataset's hooks for the epochs that have ended: some choose their batches there."""
    py_dataset = getattr(adapter, "py_dataset", None)
    if py_dataset is not None:
        for _ in range(position.num_epochs):
            py_dataset.on_epoch_begin()
            py_dataset.on_epoch_end()


def replay_evaluations(adapter: DataAdapter, num_evaluations: int) -> None:
    """Call a PyDataset's hooks for evaluations that have ended: Keras ends an epoch before each, and after it."""
    py_dataset = getattr(adapter, "py_dataset", None)
    if py_dataset is not None:
        for _ in range(num_evaluations):
            py_dataset.on_epoch_begin()
            py_dataset.on_epoch_end()
            py_dataset.on_epoch_end()


def skip_to(batch: int, adapter: DataAdapter, seed: int | None) -> tf.data.Dataset | None:
    """Return a dataset that starts with a batch of the pass; None where it has to be read up to there."""
    if batch and getattr(adapter, "py_dataset", None) is not None and adapter.enqueuer is None:
        return resume_py_dataset(adapter, batch, seed)
    return None


def has_resumable_iterator(adapter: DataAdapter, dataset: tf.data.Dataset) -> bool:
    """Whether an iterator over the data can be saved and restored exactly.

    With a shuffle it cannot be restored, and with a cache it may be large.
    """
    if not isinstance(adapter, TFDatasetAdapter) or not isinstance(dataset, tf.data.Dataset):
        return False
    graph = dataset_graph(dataset)
    return not (graph is None or caches_in_memory(graph) or has_random_order(graph))


def replay_passes(num_passes: int, num_unread: int, dataset: tf.data.Dataset, ordered: tf.data.Dataset | None) -> None:
    """Make the next pass over a dataset the one after a number of earlier passes.

    A shuffle with the user's seed has another order each time that an iterator is created, even if it is not read
    (tensorflow/core/kernels/data/shuffle_dataset_op.cc); a cache in memory is filled by the first pass.

    Args:
        num_passes: in an earlier process.
        num_unread: how many iterators were made and not read there, where its order follows no seed.
        dataset: as it was given.
        ordered: the dataset of the first pass, if its order follows a seed.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return
    graph = dataset_graph(dataset)
    read = dataset if ordered is None else ordered
    if graph is not None and caches_in_memory(graph):
        for _ in read:
            pass
        num_passes -= 1
    elif read is not dataset:
        return  # it is created again for each pass
    for _ in range(num_passes + (num_unread if read is dataset else 0)):
        iter(read)
