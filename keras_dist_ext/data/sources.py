"""Read what `fit` takes, whatever it is, as a `tf.data.Dataset` of batches."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.datasets import WrappedDataset
from keras_dist_ext.aliases import FitData, TensorNest
from keras_dist_ext.data.dataset_graph import DatasetGraph, read_graph
from keras_dist_ext.errors import DataError
from keras_dist_ext.hashing import fold_in

if TYPE_CHECKING:
    from keras_dist_ext._keras.adapters import DataAdapter

__all__ = ["as_dataset", "check_no_scalar", "checked_batch_size", "is_batched", "kind_of"]

DEFAULT_BATCH_SIZE = 32  # as in fit


def checked_batch_size(batch_size: object) -> int | None:
    """Return how many examples a batch has, or None.

    Raises:
        DataError: it is not an integer >= 1.
    """
    most = arguments.MOST_EXAMPLES
    return arguments.optional(arguments.integer, "batch_size", batch_size, least=1, most=most, error=DataError)


def kind_of(data: FitData) -> str:
    """Say what data is: "tf.data", "generator", "PyDataset" or "arrays".

    Raises:
        DataError: it is not one of these.
    """
    if isinstance(data, tf.data.Dataset):
        return "tf.data"
    if isinstance(data, types.GeneratorType):
        return "generator"
    if isinstance(data, keras.utils.PyDataset):
        return "PyDataset"
    if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
        raise DataError(
            "The data has been distributed already, by experimental_distribute_dataset or "
            "distribute_datasets_from_function, so its batches cannot be split again. Give the dataset that it was "
            "made of."
        )
    if callable(data):
        raise DataError(
            f"The data is {data!r}, a function. Call it, or make it a dataset: "
            "tf.data.Dataset.from_generator(function, output_signature=...)."
        )
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        held = "something without a shape" if leaves else "nothing"
        raise DataError(
            f"The data is a {type(data).__name__}, and holds {held}. Give a tf.data.Dataset, "
            "arrays as x, (x, y) or (x, y, sample_weight), a generator or a PyDataset."
        )
    check_no_scalar(data)
    return "arrays"


def check_no_scalar(data: object) -> None:
    """See that no part of data has a shape without dimensions.

    Raises:
        DataError: one has.
    """
    leaves = [leaf for leaf in tree.flatten(data) if hasattr(leaf, "shape")]
    if any(tf.TensorShape(leaf.shape).rank == 0 for leaf in leaves):
        held = "holds" if tree.is_nested(data) else "is"
        raise DataError(
            f"The data, a {type(data).__name__}, {held} a scalar, which has no examples. Give arrays of shape "
            "[N, ...], of N examples."
        )


def as_dataset(
    data: FitData, *, batch_size: int | None = None, shuffle: bool | None = None, seed: int | None = None
) -> tf.data.Dataset:
    """Return a dataset that yields what `fit` would read, a batch at a time.

    A tf.data.Dataset comes back as it is.

    Args:
        data: a tf.data.Dataset; arrays, as x, (x, y) or (x, y, sample_weight), each a structure of arrays [N, ...];
            a generator or a PyDataset of batches.
        batch_size: of arrays; 32 by default, as in `fit`.
        shuffle: whether arrays, and the batches of a PyDataset, are shuffled anew for each pass; by default they are,
            as in `fit`.
        seed: of that order, which then depends on the seed and on how many passes were begun before.

    Raises:
        DataError: the data is something else, or cannot be shuffled.
    """
    kind = kind_of(data)
    if kind in ("tf.data", "generator") and shuffle:
        raise DataError(
            f"shuffle=True: a {kind} comes in its own order. "
            + ("Call its method shuffle(...) before batch(...)." if kind == "tf.data" else "Shuffle where it is made.")
        )
    if kind == "tf.data":
        return data
    x, y, weights = (data, None, None)
    if kind == "arrays" and isinstance(data, tuple):
        if len(data) > 3:
            raise DataError(
                f"The data is a tuple of {len(data)}. Give (x, y) or (x, y, sample_weight); several inputs go into x, "
                "as a list or dict."
            )
        x, y, weights = (*data, None, None)[:3]
    from keras_dist_ext._keras.adapters import make_data_adapter, seed_array_shuffles  # private Keras: not for tf.data

    passes = itertools.count()
    if kind == "PyDataset" and _num_batches(data) is None and shuffle is None:
        shuffle = False  # Keras shuffles no order without end
    shuffles = shuffle is not False and kind != "generator"
    adapter = make_data_adapter(x, y, weights, batch_size=batch_size, shuffle=shuffles)
    if kind == "PyDataset":
        return _of_py_dataset(adapter, seed, passes)
    with contextlib.ExitStack() as stack:
        if seed is not None and shuffles and kind == "arrays":
            stack.enter_context(seed_array_shuffles(lambda: fold_in(seed, "order", next(passes))))
        return _of_length(adapter.get_tf_dataset(), adapter.num_batches)


def _num_batches(data: keras.utils.PyDataset) -> int | None:
    """How many batches a pass over a PyDataset has; None where it has no end.

    Raises:
        DataError: it does not say so.
    """
    try:
        return data.num_batches  # type: ignore[no-any-return]
    except NotImplementedError:
        name = type(data).__name__
        raise DataError(
            f"{name} is a PyDataset without `__len__`, so nobody knows how many batches a pass has: `fit` refuses it "
            f"too. Give it `__len__`; or, where its batches have no end, `num_batches`, a property that returns None."
        ) from None


def _of_length(dataset: tf.data.Dataset, length: int | None) -> tf.data.Dataset:
    return dataset if length is None else dataset.apply(tf.data.experimental.assert_cardinality(length))


def _of_py_dataset(adapter: DataAdapter, seed: int | None, passes: itertools.count[int]) -> tf.data.Dataset:
    from keras_dist_ext._keras.py_datasets import preserve_py_dataset_order, py_dataset_batches, seed_py_datasets

    spec = adapter.get_tf_dataset().element_spec

    def one_pass() -> Iterator[TensorNest]:
        with contextlib.closing(py_dataset_batches(adapter)) as batches:
            with preserve_py_dataset_order():  # of others, and of Keras: when the first batch comes, this one is known
                if seed is not None:
                    seed_py_datasets(fold_in(seed, "order", next(passes)))
                first = list(itertools.islice(batches, 1))
            yield from first
            yield from batches

    return _of_length(tf.data.Dataset.from_generator(one_pass, output_signature=spec), adapter.num_batches)


def is_batched(dataset: tf.data.Dataset, graph: DatasetGraph | None = None) -> bool | None:
    """Whether the elements are batches; None where that cannot be told from the pipeline and the shapes.

    They are where a batch can be seen in the pipeline, or the first dimension of all is open; not where one has no
    dimension.

    Args:
        dataset: to look at.
        graph: its graph, where it has been read already.
    """
    if isinstance(dataset, WrappedDataset):  # ours give batches
        return True
    graph = read_graph(dataset) if graph is None else graph
    for stage in graph or ():
        if stage.kind == "Unbatch":
            return False
        if stage.batch_size is not None or stage.kind in ("Rebatch", "LegacyRebatch"):
            return True
    leaves = [leaf for leaf in tree.flatten(dataset.element_spec) if hasattr(leaf, "shape")]
    if any(isinstance(leaf, tf.RaggedTensorSpec) for leaf in leaves):  # a row of one has no ragged dimension left
        return any(isinstance(leaf, tf.RaggedTensorSpec) and leaf.ragged_rank > 0 for leaf in leaves)
    if any(leaf.shape.rank == 0 for leaf in leaves):
        return False
    if leaves and all(leaf.shape.rank is None or leaf.shape[0] is None for leaf in leaves):
        return True
    return None
