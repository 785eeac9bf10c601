"""Take the global batches that a certificate compares: the first ones of some data, and the last."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext.aliases import Array, TensorNest
from keras_dist_ext.errors import CertificateError

__all__ = ["global_batches"]

READ_TO_FIND_THE_LAST = 1000  # batches of a dataset; beyond them, the last one is not among those trained on


def global_batches(data: object, steps: int, batch_size: int) -> list[TensorNest]:
    """Return so many batches to train on, as tensors; data that has fewer is begun again.

    Args:
        data: as `certify` takes it.
        steps: how many.
        batch_size: the rows of a batch of arrays.

    Raises:
        CertificateError: the data is something else, or holds no batch.
    """
    if isinstance(data, tf.data.Dataset):
        length = int(data.cardinality())
        is_read_out = 0 <= length <= READ_TO_FIND_THE_LAST
        batches = _first_and_last(data, steps) if is_read_out else list(data.take(steps))
    elif isinstance(data, keras.utils.PyDataset):
        places = range(len(data))
        batches = [data[place] for place in [*places[: steps - 1], *places[steps - 1 :][-1:]]]
    elif isinstance(data, tuple) and len(data) in (2, 3) and _are_arrays(data):
        arrays = tree.map_structure(_as_array, data)
        rows = next(len(leaf) for leaf in tree.flatten(arrays) if leaf is not None)
        starts = range(0, rows, batch_size)
        starts_used = [*starts[: steps - 1], *starts[steps - 1 :][-1:]]
        batches = [
            tree.map_structure(lambda a, start=start: None if a is None else a[start : start + batch_size], arrays)
            for start in starts_used
        ]
    elif isinstance(data, Mapping | str | bytes) or hasattr(data, "shape") or not hasattr(data, "__iter__"):
        raise CertificateError(
            f"certify takes a tf.data.Dataset, a PyDataset, an iterable of batches, or arrays (x, y) or (x, y, "
            f"sample_weight), and got {type(data).__name__}."
        )
    else:
        batches = list(itertools.islice(data, steps))
    if not batches:
        raise CertificateError("The data holds no batch, so there is nothing to train on.")
    batches = [tree.map_structure(_as_tensor, batch) for batch in batches]
    return [batches[i % len(batches)] for i in range(steps)]


def _first_and_last(dataset: tf.data.Dataset, steps: int) -> list[TensorNest]:
    """The first batches, and the last."""
    batches: list[TensorNest] = []
    for batch in dataset:
        batches = [*batches[: steps - 1], batch] if len(batches) == steps else [*batches, batch]
    return batches


def _are_arrays(data: object) -> bool:
    """Whether all that is given are arrays; an optional input may be None."""
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _as_array(leaf: object) -> Array | None:
    if leaf is None:
        return None
    array = np.asarray(leaf)
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def _as_tensor(leaf: object) -> tf.Tensor:
    if leaf is None or isinstance(leaf, tf.SparseTensor | tf.RaggedTensor) or tf.is_tensor(leaf):
        return leaf
    return tf.convert_to_tensor(leaf)
