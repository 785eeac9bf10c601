"""Read and change the graph of a dataset, its iterators and its shards."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from keras_dist_ext import versions
from keras_dist_ext.aliases import Array, SpecNest

__all__ = [
    "GraphDef",
    "NodeDef",
    "dataset_graph",
    "iterator_state",
    "has_unseeded_shuffle",
    "has_random_order",
    "set_iterator_state",
    "shard_indices",
    "checksum_of_constants",
    "with_seeds",
    "unseeded_random_ops",
    "generator_states",
    "seeds_of_random_ops",
    "calls_python",
    "captures_variables",
    "caches_in_memory",
    "WrappedDataset",
    "auto_shard",
    "local_datasets",
]

GraphDef: TypeAlias = tf.compat.v1.GraphDef
NodeDef: TypeAlias = tf.compat.v1.NodeDef


def dataset_graph(dataset: tf.data.Dataset) -> GraphDef | None:
    """The graph of a dataset as tf.data serializes it, or None where it cannot (dataset_ops.py).

    Of the device of a `tf.py_function`, TensorFlow leaves "/device::0", which it refuses when a dataset is made of it.
    """
    try:
        graph = GraphDef.FromString(dataset._as_serialized_graph(strip_device_assignment=True).numpy())
    except (tf.errors.OpError, ValueError, DecodeError):
        return None
    for function in graph.library.function:
        for node in function.node_def:
            if "/device::" in node.device:
                node.device = ""
    return graph


def iterator_state(iterator: tf.data.Iterator) -> list[bytes] | None:
    """What a dataset's iterator holds, buffers included; None where it depends on what TensorFlow cannot save.

    tensorflow/python/data/ops/iterator_ops.py does the same for `tf.train.Checkpoint`, which writes files.
    """
    fail = tf.data.experimental.ExternalStatePolicy.FAIL.value
    try:
        state = tf.raw_ops.SerializeIterator(resource_handle=iterator._iterator_resource, external_state_policy=fail)
        return [tf.io.serialize_tensor(part).numpy() for part in tf.unstack(state)]
    except (tf.errors.OpError, AttributeError):
        return None


def has_unseeded_shuffle(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset shuffles by a seed that TensorFlow draws, told without its graph (data/ops/shuffle_op.py)."""
    is_shuffle = type(dataset) is _type_of_shuffle()
    if is_shuffle and not any(int(seed) for seed in (dataset._seed, dataset._seed2)):
        return True
    return any(map(has_unseeded_shuffle, dataset._inputs()))


@functools.cache
def _type_of_shuffle() -> type:
    return type(tf.data.Dataset.range(1).shuffle(1, seed=1))


def has_random_order(graph: GraphDef) -> bool:
    """Whether a dataset shuffles, or has a source of random numbers, also in its functions (dataset_ops.py).

    The state of an iterator then does not bring back what comes after this pass: saved when a shuffle has taken the
    last element of its input, it loses count of the passes (core/kernels/data/shuffle_dataset_op.cc, TensorFlow 2.21).
    """
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return any(node.op.startswith(("Shuffle", "RandomDataset")) for node in nodes)


def set_iterator_state(iterator: tf.data.Iterator, state: Sequence[bytes]) -> bool:
    """Put back what ``iterator_state`` has returned; return whether that has worked (iterator_ops.py)."""
    try:
        parts = tf.stack([tf.io.parse_tensor(part, tf.variant) for part in state])
        tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=parts)
    except (tf.errors.OpError, AttributeError):
        return False
    return True


def shard_indices(graph: GraphDef) -> list[tuple[int, ...]]:
    """The (number of shards, index) of each ``Dataset.shard`` in the graph."""
    constants = {n.name: n for n in graph.node if n.op == "Const"}

    def value(name: str) -> int:
        node = constants.get(name)
        return -1 if node is None else int(tf.make_ndarray(node.attr["value"].tensor))

    return [tuple(value(i) for i in node.input[1:3]) for node in graph.node if node.op == "ShardDataset"]


def checksum_of_constants(graph: GraphDef) -> int:
    """Tell the arrays and lists of files apart that a dataset is made of (dataset_ops.py: `Const` nodes).

    Of a text, the part after its last slash counts: folders may be called differently on each machine.
    """
    checksum = 0
    states = [node.name for node, _ in generator_states(graph)]  # random, where a layer was given no seed
    for node in graph.node:
        tensor = node.attr["value"].tensor
        if node.op != "Const" or not tensor.tensor_shape.dim or node.name in states:
            continue
        if tensor.dtype == tf.string.as_datatype_enum:
            texts = tf.io.parse_tensor(tensor.SerializeToString(), tf.string).numpy().ravel()
            texts = [text.rpartition(b"/")[2] for text in texts]
            checksum = zlib.crc32(repr(texts).encode(), checksum)
        else:
            checksum = zlib.crc32(tensor.SerializeToString(deterministic=True), checksum)
    return checksum


@versions.naming("The seed of a dataset")
def with_seeds(
    dataset: tf.data.Dataset,
    graph: GraphDef,
    seed: int,
    map_seed: int | None = None,
    *,
    same_passes: bool = False,
    over_global: bool = False,
) -> tf.data.Dataset:
    """Return the dataset with a seed of its own in each shuffle and random op that has none, also in its functions.

    A shuffle without a seed draws one when it is made, differently in each process. tf.data's ShuffleDatasetV3 and
    RandomDatasetV2 hold it in a resource; ShuffleDataset and RandomDataset are the same with the seed in the graph
    (shuffle_dataset_op.cc, random_dataset_op.cc).

    Args:
        dataset: what ``graph`` was made of.
        graph: is changed.
        seed: for shuffles.
        map_seed: for random ops in functions such as that of ``map``, and for the generators that they draw from,
            which are copies in what is made anew; None leaves them alone.
        same_passes: whether shuffles give the same order in each pass, also those that have a seed.
        over_global: whether what has a seed because of ``tf.random.set_seed`` only counts as having none.
    """
    from tensorflow.python.data.ops import dataset_ops

    found = 0
    for nodes, of_output in [(graph.node, ""), *((f.node_def, ":output:0") for f in graph.library.function)]:
        constants = {f"{n.name}{of_output}": n for n in nodes if n.op == "Const"}
        for node in list(nodes):
            first = {"ShuffleDatasetV3": 2, "RandomDatasetV2": 0}.get(node.op)
            if first is None or not all(name in constants for name in node.input[first : first + 2]):
                continue
            places = range(first, first + 2)
            seeds = [int(tf.make_ndarray(constants[node.input[i]].attr["value"].tensor)) for i in places]
            is_seeded = any(seeds) and not (over_global and _is_of_global_seed(seeds, 2**16, 2**31))
            if is_seeded and not same_passes:
                continue
            found += 1
            node.op = node.op[:-2]
            node.attr.pop("rerandomize_each_iteration", None)
            del node.input[first + 2 :]
            if same_passes and "reshuffle_each_iteration" in node.attr:
                node.attr["reshuffle_each_iteration"].b = False
            if is_seeded:
                continue
            for i, part in zip(places, (seed % 2**62, found), strict=True):
                constant = nodes.add(name=f"{node.name}/seed_{i}", op="Const")
                constant.attr["dtype"].type = tf.int64.as_datatype_enum
                constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(part + 1, tf.int64))
                node.input[i] = f"{constant.name}{of_output}"
    if map_seed is not None:
        for node in unseeded_random_ops(graph, over_global=over_global):
            found += 1
            node.attr["seed"].i, node.attr["seed2"].i = map_seed % 2**62 + 1, found
        for constant, state in generator_states(graph):
            found += 1
            key = (map_seed + found * 0x9E3779B1) % (2**31 - 2)
            begin = [key, 0] if len(state) == 2 else [0, 0, key]
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.array(begin, state.dtype)))
    if not found:
        return dataset
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    seeded = dataset_ops._VariantDataset(variant, dataset.element_spec)
    return seeded.with_options(dataset.options())


def unseeded_random_ops(graph: GraphDef, *, over_global: bool = False) -> list[NodeDef]:
    """The random ops without a seed in the functions of a dataset's graph (python/ops/random_ops.py)."""
    found = []
    for function in graph.library.function:
        ops = [node for node in function.node_def if node.op in _RANDOM_OPS]
        for node in ops:
            seeds = [node.attr["seed"].i, node.attr["seed2"].i]
            if not any(seeds) or (over_global and _is_of_global_seed(seeds, 0, len(ops))):
                found.append(node)
    return found


def seeds_of_random_ops(graph: GraphDef) -> list[int]:
    """The seeds that random ops in the functions of a dataset's graph have of their own."""
    ops = [node for function in graph.library.function for node in function.node_def if node.op in _RANDOM_OPS]
    return [node.attr["seed2"].i for node in ops]


def calls_python(graph: GraphDef) -> bool:
    """Whether a function of a dataset's graph calls Python, as all do in tf.data's debug mode."""
    return any(node.op == "EagerPyFunc" for function in graph.library.function for node in function.node_def)


def generator_states(graph: GraphDef) -> list[tuple[NodeDef, Array]]:
    """The states of generators that a dataset's functions draw from: constants of its graph, with their values.

    A variable that a function captures is written down as one that begins with what it holds (framework/
    resource_var.cc, `AsGraphDef`). Those of Keras' layers hold [seed, counter], those of `tf.random.Generator` three.
    """
    ops = {node.op for function in graph.library.function for node in function.node_def}
    sizes = {2 for op in ("StatelessRandomGetKeyCounter", "RngReadAndSkip") if op in ops}
    sizes |= {3} if "RngReadAndSkip" in ops else set()
    constants = {n.name: n for n in graph.node if n.op == "Const"}
    assigned = [constants.get(node.input[1]) for node in graph.node if node.op == "AssignVariableOp"]
    states = [(node, tf.make_ndarray(node.attr["value"].tensor)) for node in assigned if node is not None]
    return [(node, s) for node, s in states if s.dtype.kind in "iu" and s.ndim == 1 and len(s) in sizes]


def captures_variables(graph: GraphDef) -> bool:
    """Whether a dataset's functions read variables other than those of generators, see ``generator_states``."""
    return bool(sum(node.op == "AssignVariableOp" for node in graph.node) > len(generator_states(graph)))


@versions.naming("The seed of a dataset")
def _is_of_global_seed(seeds: Sequence[int], begin: int, end: int) -> bool:
    """Whether `tf.random.set_seed` alone has given these: the second is none that anybody would.

    tensorflow/python/framework/random_seed.py puts the global seed first, or a constant if there is none, and then the
    seed of the op: without one a number of 31 bits, or in a function how many ops had none before. So a seed given to
    an op as well is taken for none if it is so small, or to a shuffle if it is so large.
    """
    from tensorflow.python.framework import random_seed

    second = 0 if list(seeds) == [0, 2**31 - 1] else seeds[1]  # that of 0 and 0, which would count as none
    return seeds[0] != random_seed.DEFAULT_GRAPH_SEED and begin <= second < end


_RANDOM_OPS = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


def caches_in_memory(graph: GraphDef) -> bool:
    """Whether a dataset keeps elements in memory, which making it anew would lose (dataset_ops.py, `cache`)."""
    constants = {n.name: n for n in graph.node if n.op == "Const"}
    caches = [node for node in graph.node if node.op in ("CacheDataset", "CacheDatasetV2")]
    names = [constants.get(node.input[1]) for node in caches]
    return any(name is None or not tf.make_ndarray(name.attr["value"].tensor).item() for name in names)


class WrappedDataset(tf.data.Dataset):  # type: ignore[misc]
    """A dataset that gives what another gives, for classes that have more to say about it.

    tensorflow_io derives its datasets from tf.data.Dataset in the same way; `_inputs` carries options on
    (tensorflow/python/data/ops/dataset_ops.py).
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._wrapped = dataset
        super().__init__(tf.data.experimental.to_variant(dataset))

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._wrapped]

    @property
    def element_spec(self) -> SpecNest:
        """Specs of an element."""
        return self._wrapped.element_spec


@versions.naming("A worker's part of a dataset")
def auto_shard(dataset: tf.data.Dataset, num_workers: int, worker: int) -> tf.data.Dataset:
    """A worker's part of a dataset under the `auto_shard_policy` of its options, without any batch being cut.

    tensorflow/python/data/experimental/ops/distribute.py; the graph is rewritten in core/grappler/optimizers/data/
    auto_shard.cc. `strategy.experimental_distribute_dataset` does the same, and more.
    """
    from tensorflow.python.data.experimental.ops import distribute as data_distribute

    return data_distribute._AutoShardDataset(dataset, num_workers, worker)


def local_datasets(distributed: tf.distribute.DistributedDataset) -> list[tf.data.Dataset]:
    """What this worker reads of `strategy.experimental_distribute_dataset`: its replicas take elements in turn.

    tensorflow/python/distribute/input_lib.py. Reading it waits for no other worker.
    """
    return list(distributed._cloned_datasets)
