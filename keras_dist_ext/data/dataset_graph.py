"""Read what a tf.data pipeline is made of: its stages, as tf.data itself writes them down."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from keras_dist_ext._keras.datasets import GraphDef, NodeDef, dataset_graph

__all__ = ["MAPS", "DatasetGraph", "Stage", "optimises", "read_graph"]

MAPS = ("Map", "MapAndBatch", "ParallelMap")  # kinds of stages, as written or as run


class _Function(Protocol):
    @property
    def node_def(self) -> Sequence[NodeDef]: ...


@dataclasses.dataclass(frozen=True)
class Stage:
    """One transformation, or a source.

    Args:
        kind: the transformation, without its version and without "Parallel": ``"Map"``, ``"Batch"``, ``"TensorSlice"``.
        is_parallel: whether it was given ``num_parallel_calls``, or does its work in threads by itself.
        node: its name in the graph.
        inputs: the names of the stages whose elements it gives; not what chooses among them, as `sample_from_datasets`
            has it.
        values: of each input of the node: a number or a bool where it is a constant scalar, else None.
        num_strings: how many strings its first input holds, where that is a vector of constant strings; else 0.
        function_ops: what its functions compute with, the functions that they call included.
        attributes: bools of the node.
    """

    kind: str
    is_parallel: bool
    node: str
    inputs: tuple[str, ...]
    values: tuple[bool | int | float | None, ...]
    num_strings: int
    function_ops: frozenset[str]
    attributes: Mapping[str, bool]

    @property
    def batch_size(self) -> int | None:
        """How many elements become one; None where it does not batch."""
        place = {"Batch": 1, "PaddedBatch": 1, "MapAndBatch": -3}.get(self.kind)
        values = self.values if self.kind != "MapAndBatch" else tuple(v for v in self.values if v is not None)
        size = None if place is None or len(values) < abs(place) else values[place]
        return size if isinstance(size, int) else None

    @property
    def drops_remainder(self) -> bool:
        """Whether what does not fill a batch is left out."""
        return self.batch_size is not None and any(value is True for value in self.values)

    @property
    def calls_python(self) -> bool:
        """Whether its function calls back into Python, which one thread does at a time."""
        return bool(self.function_ops & {"PyFunc", "EagerPyFunc", "PyFuncStateless"})

    @property
    def is_random(self) -> bool:
        """Whether its function draws random numbers, others in each pass."""
        drawing = (op for op in self.function_ops if not op.startswith("Stateless"))
        return any("Random" in op or op in ("RngReadAndSkip", "Multinomial") for op in drawing)

    @property
    def lacks_seed(self) -> bool:
        """Whether it is a shuffle that draws a seed by itself."""
        return self.kind == "Shuffle" and not any(self.values[2:4])

    @property
    def is_trivial(self) -> bool:
        """Whether its function does nothing that takes time, as of those that tf.data adds itself."""
        return self.function_ops <= {"Identity", "NoOp", "Const", "RaggedTensorToVariant", "RaggedTensorFromVariant"}

    @property
    def makes_other_elements(self) -> bool:
        """Whether each element that it takes may become several, or several one, in another way than `batch` does."""
        return self.kind in _REGROUPING

    @property
    def reads_files(self) -> bool:
        """Whether it reads files, or its function does."""
        return self.kind in _READERS or any(_kind(op)[0] in _READERS for op in self.function_ops if "Dataset" in op)

    @property
    def is_generator(self) -> bool:
        """Whether it is `Dataset.from_generator`."""
        return "GeneratorDataset" in self.function_ops and self.calls_python


_REGROUPING = {
    "FlatMap", "GroupByWindow", "Interleave", "LegacyInterleave", "LegacyParallelInterleave", "LegacyRebatch",
    "Rebatch", "Unbatch", "Window",
}  # fmt: skip
_READERS = {"TFRecord", "TextLine", "FixedLengthRecord", "CSV", "SSTable", "ParquetFile"}


@dataclasses.dataclass(frozen=True)
class DatasetGraph:
    """The stages of a pipeline, from its end to its sources.

    Args:
        proto: the GraphDef.
        stages: by the name of their node; the last transformation comes first.
    """

    proto: GraphDef
    stages: Mapping[str, Stage]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages.values())

    def upstream(self, stage: Stage) -> Iterator[Stage]:
        """Go through the stages that feed this one, the nearest first."""
        for name in stage.inputs:
            if name in self.stages:
                yield self.stages[name]
                yield from self.upstream(self.stages[name])

    def of_kind(self, *kinds: str) -> list[Stage]:
        """The stages of some kinds."""
        return [stage for stage in self if stage.kind in kinds]

    @property
    def last(self) -> Stage | None:
        """The last stage that does something, without options."""
        return next((stage for stage in self if stage.kind not in ("Options", "AssertCardinality")), None)

    @property
    def batch(self) -> Stage | None:
        """The stage that makes the batches that come out, where it can be seen."""
        for stage in self:
            if stage.makes_other_elements:
                return None
            if stage.batch_size is not None:
                return stage
        return None

    @property
    def num_examples(self) -> int | None:
        """How many examples go into batches in a pass; None where only a pass would tell, or there are several ways."""
        batch = self.batch
        if batch is None or not batch.inputs:
            return None
        after = itertools.takewhile(lambda stage: stage is not batch, self)
        if any(stage.kind in ("Concatenate", "DirectedInterleave") for stage in after):
            return None
        return self.num_elements(self.stages[batch.inputs[0]])

    def until_other_elements(self, stage: Stage) -> Iterator[Stage]:
        """The stages that feed this one, up to one that may give other elements than it takes."""
        for name in stage.inputs:
            if name in self.stages and not self.stages[name].makes_other_elements:
                yield self.stages[name]
                yield from self.until_other_elements(self.stages[name])

    @property
    def num_files(self) -> int:
        """How many files are read, where their names are in the graph; else 0."""
        read = [stage for stage in self if stage.reads_files]
        return sum(source.num_strings for stage in read for source in [stage, *self.upstream(stage)])

    def num_elements(self, stage: Stage) -> int | None:
        """Count what a stage gives in a pass, as far as tf.data can tell without a pass; None if not."""
        proto = type(self.proto)()
        proto.CopyFrom(self.proto)
        for node in proto.node:
            if node.op == "_Retval":
                node.input[0] = stage.node
        try:
            dataset = tf.raw_ops.DatasetFromGraph(graph_def=proto.SerializeToString())
            count = int(tf.raw_ops.DatasetCardinality(input_dataset=dataset))
        except (tf.errors.OpError, ValueError):
            return None
        return count if count >= 0 else None


def read_graph(dataset: tf.data.Dataset) -> DatasetGraph | None:
    """Return the graph of a dataset, or None where tf.data cannot write it down.

    Data that the pipeline holds in memory is in it, so reading it takes as much again for a moment.
    """
    proto = dataset_graph(dataset)
    if proto is None:
        return None
    nodes = {node.name: node for node in proto.node}
    functions = {function.signature.name: function for function in proto.library.function}
    stages: dict[str, Stage] = {}
    pending = [_name(node.input[0]) for node in proto.node if node.op == "_Retval"]
    while pending:
        name = pending.pop(0)  # of each once: tf.data writes down what is read twice as two
        stages[name] = _stage(nodes[name], nodes, functions)
        pending = [*stages[name].inputs, *pending]
    return DatasetGraph(proto, stages)


def _stage(node: NodeDef, nodes: Mapping[str, NodeDef], functions: Mapping[str, _Function]) -> Stage:
    kind, is_parallel = _kind(node.op)
    inputs = [nodes[_name(name)] for name in node.input if _name(name) in nodes]
    return Stage(
        kind=kind,
        is_parallel=is_parallel,
        node=node.name,
        inputs=tuple(given.name for given in inputs[kind == "DirectedInterleave" :] if "Dataset" in given.op),
        values=tuple(_scalar(given) for given in inputs),
        num_strings=_num_strings(inputs[0]) if inputs else 0,
        function_ops=frozenset(_function_ops(node, functions, set())),
        attributes={name: value.b for name, value in node.attr.items() if value.WhichOneof("value") == "b"},
    )


def _kind(op: str) -> tuple[str, bool]:
    """The kind of a stage, and whether it is parallel: ("Map", True) of "ParallelMapDatasetV2"."""
    kind = re.sub(r"(Dataset)(V\d+)?$", "", op)
    plain = kind.removeprefix("Parallel")
    return plain, plain != kind or kind in ("Prefetch", "MapAndBatch")


def _name(written: str) -> str:
    """The name of the node that an input comes from."""
    return written.removeprefix("^").partition(":")[0]


_VARIANT = tf.variant.as_datatype_enum


def _scalar(node: NodeDef) -> bool | int | float | None:
    tensor = node.attr["value"].tensor if node.op == "Const" else None
    if tensor is None or tensor.tensor_shape.dim or tensor.dtype in (tf.resource.as_datatype_enum, _VARIANT):
        return None
    value = tf.make_ndarray(tensor).item()
    return value if isinstance(value, (bool, int, float)) else None


def _num_strings(node: NodeDef) -> int:
    tensor = node.attr["value"].tensor if node.op == "Const" else None
    if tensor is None or tensor.dtype != tf.string.as_datatype_enum:
        return 0
    return math.prod(dim.size for dim in tensor.tensor_shape.dim)


def _function_ops(node: NodeDef, functions: Mapping[str, _Function], seen: set[str]) -> Iterator[str]:
    called = [value.func.name for value in node.attr.values() if value.WhichOneof("value") == "func"]
    called += [func.name for value in node.attr.values() for func in value.list.func]
    if node.op in functions:
        called.append(node.op)
    for name in called:
        if name in functions and name not in seen:
            seen.add(name)
            for inner in functions[name].node_def:
                yield inner.op
                yield from _function_ops(inner, functions, seen)


def optimises(dataset: tf.data.Dataset, name: str) -> bool:
    """Whether tf.data makes an optimisation by itself, by its options (data/ops/options.py)."""
    options = dataset.options()
    if options.autotune.enabled is False:
        return False
    wanted = getattr(options.experimental_optimization, name)
    if wanted is None:
        wanted = options.experimental_optimization.apply_default_optimizations is not False
    return bool(wanted)
