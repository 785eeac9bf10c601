"""Add up values over the replicas of a strategy, in cross-replica context.

Letters: R = replicas in sync, over all workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras.strategies import regroup
from keras_dist_ext._keras.variables import Variable, components
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.strategy.packs import bytes_per_pack_of

__all__ = [
    "GATHERED_AS",
    "OrderedSum",
    "PlainSum",
    "optimization_barrier",
    "as_float",
    "carried_as",
    "concat_over_replicas",
    "has_gpus",
    "keep_on_first_replica",
    "of_dtype",
    "local_values",
    "shares_memory",
    "sum_over_replicas",
    "sum_components",
    "scale",
]


def sum_over_replicas(strategy: tf.distribute.Strategy, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Add up each per-replica value, in cross-replica context."""
    parts = [local_values(strategy, value) for value in values]
    if shares_memory(strategy):
        return [_add(part) for part in parts]
    on_gpus, num_bytes = has_gpus(strategy), bytes_per_pack_of(strategy)
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=num_bytes)
    by_dtype: dict[tf.DType, list[int]] = {}
    for i, part in enumerate(parts):
        by_dtype.setdefault(carried_as(part[0], on_gpus=on_gpus), []).append(i)
    sums: list[tf.Tensor] = [None] * len(values)
    for carried, indices in by_dtype.items():
        sent = [regroup([_cast(part, carried) for part in parts[i]]) for i in indices]
        pairs = [(value, value) for value in sent]
        totals = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs, options)
        for i, total in zip(indices, totals, strict=True):
            dtype = parts[i][0].dtype
            if carried != dtype:
                total = regroup([_cast(part, dtype) for part in local_values(strategy, total)])
            sums[i] = total
    return sums


def carried_as(value: tf.Tensor | tf.IndexedSlices, *, on_gpus: bool) -> tf.DType:
    """Return the dtype in which TensorFlow's collectives add up a value: its own, if they can.

    core/ops/collective_ops.cc lists dtypes, fewer for the gathering that adds up slices;
    core/common_runtime/base_collective_executor.cc refuses two of them on GPUs, whatever the implementation, and aborts
    all collectives of the process.
    """
    wide = _CARRIED_ON_GPUS if on_gpus or isinstance(value, tf.IndexedSlices) else _CARRIED
    return wide.get(value.dtype, value.dtype)


_CARRIED = dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32), tf.int64)
_CARRIED_ON_GPUS = {**_CARRIED, tf.int32: tf.int64, tf.bfloat16: tf.float32}
GATHERED_AS = {**_CARRIED_ON_GPUS, tf.float16: tf.float32}
"""In which dtype rows are gathered by collectives, for what those do not carry everywhere."""


def _cast(value: tf.Tensor | tf.IndexedSlices, dtype: tf.DType) -> tf.Tensor | tf.IndexedSlices:
    if value.dtype == dtype:
        return value
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(value.values, dtype), value.indices, value.dense_shape)
    return tf.cast(value, dtype)


def has_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Whether replicas of this worker are GPUs."""
    return any("GPU" in device for device in strategy.extended.worker_devices)


def concat_over_replicas(strategy: tf.distribute.Strategy, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenate what each replica has of each value, along the rows, in cross-replica context of one memory."""
    return [tf.concat(local_values(strategy, value), 0) for value in values]


def local_values(strategy: tf.distribute.Strategy, value: TensorNest) -> tuple[tf.Tensor, ...]:
    """One part a local replica; a value that all of them share is repeated."""
    parts: tuple[tf.Tensor, ...] = strategy.experimental_local_results(value)
    return parts * len(strategy.extended.worker_devices) if len(parts) == 1 else parts


def shares_memory(strategy: tf.distribute.Strategy) -> bool:
    """Whether all replicas are CPUs of this process."""
    devices = strategy.extended.worker_devices
    return len(devices) == strategy.num_replicas_in_sync and all("CPU" in device for device in devices)


def _add(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    if any(isinstance(part, tf.IndexedSlices) for part in parts):
        values = tf.concat([part.values for part in parts], 0)
        return tf.IndexedSlices(values, tf.concat([part.indices for part in parts], 0), parts[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])


class PlainSum:
    """The sum of a replica's terms, added up as they come, then that over replicas.

    Attributes:
        values: the sum so far.
    """

    def __init__(self) -> None:
        self.values: list[tf.Tensor] = []

    def add(self, term: int, values: Sequence[tf.Tensor]) -> None:
        """Add a term: one value for each of the sum's."""
        values = list(values)
        self.values = [_add(pair) for pair in zip(self.values, values, strict=True)] if self.values else values

    def over_replicas(self) -> list[tf.Tensor]:
        """Return the sum of all replicas' terms, in replica context."""
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1 or not self.values:
            return self.values
        return list(context.merge_call(sum_over_replicas, args=(self.values,)))


class OrderedSum:
    """A sum whose bits depend on its terms alone, not on how many replicas have added them up.

    Additions are those of one binary tree over the terms 0 ... V - 1, padded to a power of two. A replica has a block
    of neighbouring terms and makes the additions of the tree that lie in it; the nodes that are left are gathered, and
    every replica makes the other additions alike. Sparse terms are listed in order.

    Args:
        num_terms: V.
    """

    def __init__(self, num_terms: int) -> None:
        self._num_terms = num_terms
        self._nodes: dict[
            tuple[int, int], list[tf.Tensor]
        ] = {}  # (first term, terms below it in the padded tree) -> sums

    @property
    def values(self) -> list[tf.Tensor]:
        """What has been added up so far, where the order does not matter."""
        flat = PlainSum()
        for values in self._in_order():
            flat.add(0, values)
        return flat.values

    def _in_order(self) -> list[list[tf.Tensor]]:
        return [self._nodes[node] for node in sorted(self._nodes)]

    def add(self, term: int, values: Sequence[tf.Tensor]) -> None:
        """Add a term: one value for each of the sum's."""
        self._place(term, 1, [optimization_barrier(value) for value in values])

    def _place(self, first: int, size: int, values: list[tf.Tensor]) -> None:
        while size < self._num_terms:
            sibling = first ^ size
            if sibling < self._num_terms:
                other = self._nodes.pop((sibling, size), None)
                if other is None:
                    break
                pairs = zip(values, other, strict=True) if first < sibling else zip(other, values, strict=True)
                values = [optimization_barrier(_add(pair)) for pair in pairs]
            first, size = min(first, sibling), 2 * size
        self._nodes[first, size] = values

    def over_replicas(self) -> list[tf.Tensor]:
        """Return the sum of all replicas' terms, in replica context."""
        context = tf.distribute.get_replica_context()
        nodes = self._in_order()
        if context.num_replicas_in_sync == 1 or not nodes[0]:
            return self._total()
        is_sparse = [isinstance(value, tf.IndexedSlices) for value in nodes[0]]
        sparse = [_add([node[place] for node in nodes]) for place, is_one in enumerate(is_sparse) if is_one]
        lists = iter(context.merge_call(sum_over_replicas, args=(sparse,)) if sparse else [])
        dense = [place for place, is_one in enumerate(is_sparse) if not is_one]
        sums = iter(self._dense_over_replicas(context, dense) if dense else [])
        return [next(lists) if is_one else next(sums) for is_one in is_sparse]

    def _dense_over_replicas(self, context: tf.distribute.ReplicaContext, places: Sequence[int]) -> list[tf.Tensor]:
        num_replicas: int = context.num_replicas_in_sync
        blocks = [self._nodes_of_block(replica, num_replicas) for replica in range(num_replicas)]
        own = [[node[place] for place in places] for node in self._in_order()]
        if [len(nodes) for nodes in blocks] == [1, 1]:  # one addition is left, which has but one order
            return [optimization_barrier(value) for value in context.merge_call(sum_over_replicas, args=(own[0],))]
        own += own[-1:] * (max(map(len, blocks)) - len(own))  # all gather as many; what is too many is not read

        def finish(by_replica: list[list[list[tf.Tensor]]]) -> list[tf.Tensor]:
            whole = OrderedSum(self._num_terms)
            for nodes, lists in zip(blocks, by_replica, strict=True):
                for node, values in zip(nodes, lists, strict=False):
                    whole._place(*node, values)
            return whole._total()

        def finish_in_memory(strategy: tf.distribute.Strategy, own: list[list[tf.Tensor]]) -> list[tf.Tensor]:
            parts = [[local_values(strategy, value) for value in values] for values in own]
            return finish([[[p[replica] for p in values] for values in parts] for replica in range(num_replicas)])

        if shares_memory(context.strategy):
            return list(context.merge_call(finish_in_memory, args=(own,)))
        return finish(_gathered(context, own))

    def _total(self) -> list[tf.Tensor]:
        ((_, total),) = self._nodes.items()
        return total

    def _nodes_of_block(self, replica: int, num_replicas: int) -> list[tuple[int, int]]:
        block = OrderedSum(self._num_terms)
        for term in range(replica * self._num_terms // num_replicas, (replica + 1) * self._num_terms // num_replicas):
            block._place(term, 1, [])
        return sorted(block._nodes)


def optimization_barrier(value: tf.Tensor) -> tf.Tensor:
    """Keep what computes a value apart from what uses it, by an op that copies nothing.

    Grappler's arithmetic optimizer makes one AddN of a tree of additions, and takes common factors out of them
    (tensorflow/core/grappler/optimizers/arithmetic_optimizer.cc), which changes the rounding. It does not look through
    this op. Neither does oneDNN's graph pass, which merges ops on one device that it leaves alone where a value comes
    from another (common_runtime/mkl_layout_pass.cc).
    """
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(optimization_barrier(value.values), value.indices, value.dense_shape)
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        return tf.identity(value)
    value = tf.convert_to_tensor(value)
    return tf.ensure_shape(value, value.shape)


def _gathered(context: tf.distribute.ReplicaContext, own: list[list[tf.Tensor]]) -> list[list[list[tf.Tensor]]]:
    """Give every replica the lists of all replicas by collectives, one for each dtype: [replicas][lists][values]."""
    everyones = [[list(values) for values in own] for _ in range(context.num_replicas_in_sync)]
    by_dtype: dict[tf.DType, list[int]] = {}
    for place, value in enumerate(own[0]):
        by_dtype.setdefault(value.dtype, []).append(place)
    for dtype, places in by_dtype.items():
        wide = GATHERED_AS.get(dtype, dtype)
        packed = tf.stack([tf.concat([tf.reshape(values[p], [-1]) for p in places], 0) for values in own])
        rows = tf.unstack(
            tf.cast(context.all_gather(tf.cast(packed, wide), axis=0), dtype), num=len(everyones) * len(own)
        )
        shapes = [tf.shape(own[0][p]) for p in places]
        sizes = [tf.reduce_prod(shape) for shape in shapes]
        for i, row in enumerate(rows):
            values = everyones[i // len(own)][i % len(own)]
            for place, flat, shape in zip(places, tf.split(row, sizes, num=len(places)), shapes, strict=True):
                values[place] = tf.reshape(flat, shape)
    return everyones


def scale(value: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Multiply a tensor or ``IndexedSlices`` by a scalar."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(scale(value.values, factor), value.indices, value.dense_shape)
    return value * of_dtype(factor, value.dtype)


def of_dtype(factor: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Give a scalar a dtype; tf.cast would make a float32 of a Python float first."""
    return tf.cast(factor, dtype) if tf.is_tensor(factor) else tf.constant(factor, dtype)


def as_float(value: tf.Tensor) -> tf.Tensor:
    """Return a tensor of floats, of its own kind if it is of floats."""
    value = tf.convert_to_tensor(value)
    return value if value.dtype.is_floating else tf.cast(value, tf.float32)


def sum_components(strategy: tf.distribute.Strategy, variables: Sequence[Variable]) -> None:
    """Give every replica the sum of what all replicas hold, in cross-replica context."""
    for variable in variables:
        copies = components(variable)
        (total,) = sum_over_replicas(strategy, [regroup([copy.read_value() for copy in copies])])
        for copy, value in zip(copies, local_values(strategy, total), strict=True):
            copy.assign(value)


def keep_on_first_replica(variable: Variable, *, is_chief: bool) -> None:
    """Leave a mirrored variable's value to the first replica of the chief, and set all others to 0."""
    for copy in components(variable)[1 if is_chief else 0 :]:
        copy.assign(tf.zeros_like(copy))
