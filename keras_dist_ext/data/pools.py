"""Take up sequences in pools, measure their lengths, and pad those that are batched together.

Letters: P = examples of a pool; n = rows of a batch; T = the longest row.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.datasets import with_seeds
from keras_dist_ext.aliases import Array, FitData, SpecNest, TensorNest, UserFunction
from keras_dist_ext.data.bucket_plan import BatchSize
from keras_dist_ext.data.dataset_graph import read_graph
from keras_dist_ext.data.sources import as_dataset, is_batched
from keras_dist_ext.errors import DataError
from keras_dist_ext.hashing import fold_in

__all__ = ["Pools"]

DEFAULT_POOL = 16384
_GIVE = "Give sequences [N, length, ...] as RaggedTensors, arrays or lists of them; a tf.data.Dataset or a PyDataset."
_plainly = tf.autograph.experimental.do_not_convert  # tf.data would convert our code, which needs it nowhere
Lengths = npt.NDArray[np.int64]
Plan = Callable[[Lengths, np.int64, np.int64], tuple[Lengths, Lengths]]


class Pools:
    """Examples in pools, each a structure of tensors [P, ...], ragged or padded, with the length of each example.

    Args:
        data: as `bucket_by_length` takes it.
        size: P; None for all that is in memory, else 16384.
        length: of an example, or None.
        padding_value: of features.
        sequences: paths of the leaves of padded data that are sequences, or None.
        seed: for shuffles and random ops of a pipeline that have none.

    Raises:
        DataError: it cannot be told which leaves are sequences.
    """

    def __init__(
        self,
        data: FitData,
        size: int | None,
        *,
        length: UserFunction | None,
        padding_value: TensorNest,
        sequences: Sequence[str] | None,
        seed: int,
    ) -> None:
        self.num_examples: int | None = None  # where all are in one pool
        self._is_read_once = isinstance(data, types.GeneratorType)
        if isinstance(data, (tf.data.Dataset, types.GeneratorType, keras.utils.PyDataset)):
            examples, was_padded = _examples(data, seed)
        else:
            try:
                data = _as_tensors(_without_missing(data))
            except (TypeError, ValueError) as error:
                raise DataError(f"The dataset cannot be read as sequences ({error}). {_GIVE}") from error
            was_padded = False
            self.num_examples = _num_examples(data)
            if length is None and (size is None or size >= self.num_examples):
                examples = None
            else:
                examples = tf.data.Dataset.from_tensor_slices(data)
                if size is None or size >= self.num_examples:
                    size = self.num_examples
                else:
                    self.num_examples = None
        if examples is None:
            whole = tf.data.Dataset.from_tensors(data)
            pools = whole.map(_plainly(lambda *pool: (_whole(pool, whole.element_spec), ())))
        else:
            measured = length or (lambda *example: ())
            spec = examples.element_spec

            def with_length(*example: TensorNest) -> tuple[TensorNest, TensorNest]:
                given = _whole(example, spec)
                return given, measured(*given) if isinstance(given, tuple) else measured(given)

            pools = examples.map(_plainly(with_length), num_parallel_calls=tf.data.AUTOTUNE)
            pools = pools.ragged_batch(size or DEFAULT_POOL)
        self._pools = pools
        self._has_length = length is not None
        self._source = data  # what Python functions in a graph belong to lives as long as the graph
        self._lay_out(pools.element_spec[0], padding_value, sequences, was_padded)

    def num_batches(self, size: BatchSize) -> int | None:
        """How many batches a pass has, where that does not depend on the order."""
        if self.num_examples is None or size.rows is None or size.tokens is not None:
            return None
        return -(-self.num_examples // size.rows)

    def lengths(self, sample: int) -> Lengths:
        """Read the lengths of the first ``sample`` examples.

        Raises:
            DataError: the data could be read no more after that.
        """
        if self._is_read_once:
            raise DataError(
                "The data is a generator, which can be read only once, and lengths are read before training. Give a "
                "PyDataset, or tf.data.Dataset.from_generator(function, output_signature=...)."
            )
        found: list[Lengths] = []
        for lengths in self._pools.map(_plainly(self._measured)).as_numpy_iterator():
            found.append(np.asarray(lengths, np.int64))
            if sum(map(len, found)) >= sample:
                break
        return np.concatenate(found or [np.zeros(0, np.int64)])[:sample]

    def batches(self, epoch: tf.Tensor, plan: Plan) -> tf.data.Dataset:
        """The batches of a pass.

        Args:
            epoch: the number of the pass.
            plan: given lengths [P], the epoch and the number of the pool, returns the rows of all batches, and their
                splits.
        """

        def of_pool(number: tf.Tensor, pool: TensorNest) -> tf.data.Dataset:
            lengths = self._measured(*pool)
            rows, splits = tf.numpy_function(plan, [lengths, epoch, number], [tf.int64, tf.int64])
            rows.set_shape([None])
            splits.set_shape([None])

            def batch(i: tf.Tensor) -> TensorNest:
                of_batch = rows[splits[i] : splits[i + 1]]
                return self._padded(pool[0], of_batch)

            places = tf.data.Dataset.range(tf.size(splits, tf.int64) - 1)
            return places.map(_plainly(batch), num_parallel_calls=tf.data.AUTOTUNE)

        return self._pools.enumerate().flat_map(_plainly(of_pool))

    def _lay_out(
        self, spec: SpecNest, padding_value: TensorNest, sequences: Sequence[str] | None, was_padded: bool
    ) -> None:
        """Find out which leaves are sequences, and what they are padded with."""
        leaves = _leaves_with_paths(spec)
        features = [path for path, _ in leaves if not isinstance(spec, tuple) or path.partition("/")[0] == "0"]
        ragged = [path for path, leaf in leaves if isinstance(leaf, tf.RaggedTensorSpec)]
        self._is_padded = was_padded or not ragged
        if sequences is not None:
            unknown = [path for path in sequences if path not in dict(leaves)]
            if unknown:
                raise DataError(
                    f"sequences={list(sequences)}: there is no {', '.join(unknown)}; the data has "
                    f"{', '.join(path for path, _ in leaves)}."
                )
            self._sequences = list(sequences)
        elif self._is_padded:
            self._sequences = _padded_sequences(leaves, features)
        else:
            self._sequences = ragged
        self._measured_by = [path for path in self._sequences if path in features] or self._sequences
        values = _values(padding_value, spec, leaves, features)
        self._values = {path: _as_dtype(values[path], leaf.dtype) for path, leaf in leaves}

    def _measured(self, pool: TensorNest, given: TensorNest) -> tf.Tensor:
        """The lengths [P] of the examples of a pool."""
        if self._has_length:
            return tf.cast(given, tf.int64)
        by_path = dict(_leaves_with_paths(pool))
        lengths = [self._length_of(by_path[path], self._values[path]) for path in self._measured_by]
        return tf.reduce_max(tf.stack(lengths), axis=0)

    def _length_of(self, leaf: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        if isinstance(leaf, tf.RaggedTensor):
            if not self._is_padded:
                return tf.cast(leaf.row_lengths(), tf.int64)
            leaf = leaf.to_tensor(value)
        return _unpadded_lengths(leaf, value)

    def _padded(self, pool: TensorNest, rows: tf.Tensor) -> tf.Tensor:
        """The rows of a batch, with no more padding than they need."""
        taken = {path: self._dense(path, tf.gather(leaf, rows)) for path, leaf in _leaves_with_paths(pool)}
        if self._is_padded:  # all to the same length: a leaf that runs along may hold values that look like padding
            lengths = [_unpadded_lengths(taken[path], self._values[path]) for path in self._measured_by]
            longest = tf.maximum(tf.reduce_max(tf.stack(lengths)), 1)
            for path in self._sequences:
                taken[path] = taken[path][:, :longest]
        return tree.pack_sequence_as(pool, list(taken.values()))

    def _dense(self, path: str, leaf: tf.Tensor) -> tf.Tensor:
        if not isinstance(leaf, tf.RaggedTensor):
            return leaf
        dense = leaf.to_tensor(self._values[path])
        shape = tf.shape(dense)
        missing = tf.concat([shape[:1], [tf.maximum(1 - shape[1], 0)], shape[2:]], 0)
        dense = tf.concat([dense, tf.fill(missing, self._values[path])], 1)  # layers take no sequence of length 0
        dense.set_shape([None, None, *leaf.shape[2:]])
        return dense


def _examples(data: FitData, seed: int) -> tuple[tf.data.Dataset, bool]:
    """The data as single examples, and whether they were in batches padded to their longest."""
    dataset = as_dataset(data, seed=seed)
    graph = read_graph(dataset) if isinstance(data, tf.data.Dataset) else None
    if graph is not None:
        dataset = with_seeds(dataset, graph.proto, fold_in(seed, "order"))
    specs = [leaf for leaf in tree.flatten(dataset.element_spec) if hasattr(leaf, "shape")]
    is_single = all(leaf.shape.rank == 1 for leaf in specs) and not any(
        stage.batch_size is not None for stage in graph or ()
    )  # a single leaf of one dimension: a sequence, not a batch of numbers
    if isinstance(data, tf.data.Dataset) and (is_single or not is_batched(dataset, graph)):
        return dataset, False
    is_ragged = any(isinstance(leaf, tf.RaggedTensorSpec) for leaf in tree.flatten(dataset.element_spec))
    return dataset.unbatch(), not is_ragged


def _without_missing(data: FitData) -> TensorNest:
    """What `fit` takes as ``(x, y, None)`` has no weights."""
    while isinstance(data, tuple) and data and data[-1] is None:
        data = data[:-1]
    return data


def _as_tensors(data: FitData) -> TensorNest:
    """Arrays in memory as tensors, lists of arrays as RaggedTensors."""

    def convert(value: TensorNest) -> TensorNest:
        if isinstance(value, (tf.RaggedTensor, tf.Tensor)):
            return value
        is_list = isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object)
        if is_list and len(value) and np.ndim(value[0]) > 0:
            return _ragged([np.asarray(row) for row in value])
        return tf.convert_to_tensor(value)

    def walk(value: TensorNest) -> TensorNest:
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        if isinstance(value, tuple):
            return tuple(walk(inner) for inner in value)
        return convert(value)

    return walk(data)


def _ragged(rows: list[Array]) -> tf.RaggedTensor:
    """Rows of different lengths; an empty list says nothing of its dtype and its further dimensions."""
    telling = [row for row in rows if row.size] or rows[:1]
    values = np.concatenate([row for row in telling if len(row)] or [telling[0][:0]])
    return tf.RaggedTensor.from_row_lengths(values, [len(row) for row in rows])


def _num_examples(data: TensorNest) -> int:
    leaves = _leaves_with_paths(data)
    if not leaves or any(leaf.shape.rank == 0 for _, leaf in leaves):
        raise DataError(f"The dataset holds {'a single value' if leaves else 'nothing'}. {_GIVE}")
    counts = {path: int(leaf.shape[0] or 0) for path, leaf in leaves}
    if len(set(counts.values())) != 1:
        counted = ", ".join(f"{path or 'the data'}: {count}" for path, count in counts.items())
        raise DataError(f"The arrays hold different numbers of examples ({counted}). Give as many of each.")
    return next(iter(counts.values()))


def _whole(arguments: tuple[TensorNest, ...], spec: SpecNest) -> TensorNest:
    """An element from the arguments of a function given to `map`."""
    return arguments if isinstance(spec, tuple) else arguments[0]


def _leaves_with_paths(structure: TensorNest) -> list[tuple[str, tf.Tensor]]:
    return [("/".join(map(str, path)), leaf) for path, leaf in tree.flatten_with_path(structure)]


def _padded_sequences(leaves: list[tuple[str, tf.TypeSpec]], features: list[str]) -> list[str]:
    """The leaves of padded data that are sequences: all of the features' that are equally long."""
    long = {path: leaf.shape[1] for path, leaf in leaves if leaf.shape.rank is not None and leaf.shape.rank >= 2}
    found = [path for path in features if path in long]
    if not found:
        raise DataError(
            f"No leaf of the features ({', '.join(features)}) has a second dimension, so there are no sequences to "
            "sort by length. Give sequences [N, length, ...], ragged or padded at the end."
        )
    if len({long[path] for path in found}) > 1:
        lengths = ", ".join(f"{path or 'features'}: {long[path]}" for path in found)
        raise DataError(
            f"The features' second dimensions differ ({lengths}), so it cannot be told which are sequences. Say it, "
            f"such as sequences={found[:1]}."
        )
    also = [path for path in long if path not in features and long[path] == long[found[0]]]
    if also:
        raise DataError(
            f"{', '.join(also)} is as long as the features ({long[found[0]]}): a value for each token, or by chance? "
            f"Say sequences={[*found, *also]} or sequences={found}."
        )
    return found


def _values(
    padding_value: TensorNest, spec: SpecNest, leaves: list[tuple[str, tf.TypeSpec]], features: list[str]
) -> dict[str, TensorNest]:
    if isinstance(padding_value, (dict, tuple, list)):
        by_path = dict(_leaves_with_paths(padding_value))
        if by_path.keys() == dict(leaves).keys():
            return by_path
        flat = tree.flatten(padding_value)
        if len(flat) != len(leaves):
            raise DataError(
                f"padding_value has {len(flat)} values for {len(leaves)} leaves "
                f"({', '.join(path for path, _ in leaves)}). Give one for each, or a single one for the features."
            )
        return {path: value for (path, _), value in zip(leaves, flat, strict=True)}
    return {path: padding_value if path in features else 0 for path, _ in leaves}


def _as_dtype(value: object, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.string:
        return value if isinstance(value, (str, bytes)) else ""
    try:
        made = tf.constant(value, dtype) if dtype != tf.bool else tf.constant(bool(value))
    except (TypeError, ValueError, OverflowError):
        made = None
    if made is None or made.shape.rank:
        wanted = f"a number for leaves of {dtype.name}, or one for each leaf"
        arguments.refuse("padding_value", value, wanted, DataError)
    return made


def _unpadded_lengths(leaf: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """[P] of [P, T, ...]: how long each is without what it is padded with at the end."""
    is_real = tf.not_equal(leaf, value)
    if leaf.shape.rank > 2:
        is_real = tf.reduce_any(is_real, axis=list(range(2, leaf.shape.rank)))
    places = tf.range(1, tf.shape(leaf, tf.int64)[1] + 1)
    return tf.reduce_max(tf.where(is_real, places, tf.zeros_like(places)), axis=1, keepdims=False)
