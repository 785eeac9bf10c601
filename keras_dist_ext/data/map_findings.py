"""Judge the maps and filters of a pipeline: which of them work one at a time, in Python, or for single examples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_dist_ext.cluster.cores import num_cores
from keras_dist_ext.data.dataset_graph import MAPS, DatasetGraph, Stage, optimises
from keras_dist_ext.data.stage_times import Times
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted

__all__ = ["calls_that_wait", "map_findings"]


def calls_that_wait(dataset: tf.data.Dataset) -> tuple[int, str]:
    """Return how many parallel calls there should be that wait, and the words for the threads that they lack.

    tf.data has a thread a core: with 2 cores, 2 of them run at once, however many there may be. Threads that wait take
    no core, so that more are given than there are by default, but no fewer than a pipeline has been given already.
    """
    given = int(dataset.options().threading.private_threadpool_size or 0)
    wanted = max(16, 4 * num_cores())
    if given >= wanted:
        return given, ""
    options = f"options = tf.data.Options(); options.threading.private_threadpool_size = {wanted}"
    has = f"this one has {given}" if given else "tf.data has one a core"
    return wanted, (
        f", and threads for them, where f waits rather than computes, since {has}: {options}; "
        "dataset.with_options(options)"
    )


def map_findings(graph: DatasetGraph, dataset: tf.data.Dataset, times: Times, spared: float = 0.0) -> Iterator[Finding]:
    """Look at the maps and filters of a pipeline.

    Args:
        graph: of the pipeline.
        dataset: of which it is the graph.
        times: of pulling batches.
        spared: seconds a batch that other findings take from maps, and that none of these may claim again.
    """
    sequential = [stage for stage in graph.of_kind("Map") if not stage.is_parallel and not stage.is_trivial]
    in_python = [stage for stage in graph.of_kind(*MAPS) if stage.calls_python]
    computing = bool(times.stages) and bool(in_python) and not _waits(times)
    of_single = [] if in_python else _of_single_examples(graph)
    if of_single and times.stages and times.is_noticeable(times.cost(*MAPS)):
        yield _before_batch(graph, of_single, times, spared)
    elif not computing:
        yield from _of_sequential(sequential, dataset, times, spared)
    if in_python and times.stages:
        claimed = spared if computing or not sequential else math.inf
        if not computing and not sequential:
            yield from _of_waiting(in_python, dataset, times, claimed)
        else:
            yield from _of_python("map", in_python, times.cost(*MAPS), times, claimed, _size_after(graph, in_python))
    filters = [stage for stage in graph.of_kind("Filter") if stage.calls_python]
    if filters and times.stages:
        yield from _of_python("filter", filters, times.cost("Filter"), times, 0.0)
    yield from _of_filters(graph, times)


def _size_after(graph: DatasetGraph, maps: Sequence[Stage]) -> int | None:
    """Return how many examples a batch has, where maps come before it."""
    batch = graph.batch
    before = [] if batch is None else list(graph.until_other_elements(batch))
    return None if batch is None or not any(stage in before for stage in maps) else batch.batch_size


def _waits(times: Times) -> bool:
    """Whether the functions spend most of their time waiting, so that other threads can continue meanwhile."""
    return times.cpu_share is not None and times.cpu_share < 0.5


def _of_sequential(
    sequential: Sequence[Stage], dataset: tf.data.Dataset, times: Times, spared: float
) -> Iterator[Finding]:
    cost = sum(time.seconds for time in times.stages if time.kind in MAPS and time.is_sequential)
    if not times.stages and all(
        optimises(dataset, "map_parallelization") and not stage.calls_python for stage in sequential
    ):
        return
    if sequential and times.is_noticeable(cost):
        num_calls, threads = calls_that_wait(dataset)
        yield Finding(
            "sequential-map",
            "A map handles one element at a time, and tf.data did not make it parallel by itself.",
            f"{counted(len(sequential), 'map')} without num_parallel_calls{times.share(cost)}",
            f"dataset.map(f, num_parallel_calls={num_calls}){threads}"
            if _waits(times)
            else "dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE)",
            _left(cost, spared, times),
        )


def _of_waiting(stages: Sequence[Stage], dataset: tf.data.Dataset, times: Times, spared: float) -> Iterator[Finding]:
    """Parallel calls that wait, in fewer threads than could."""
    cost = times.cost(*MAPS)
    num_calls, threads = calls_that_wait(dataset)
    if threads and times.is_noticeable(cost):
        yield Finding(
            "python-map",
            "Calls of a map wait rather than compute, and only as many run at once as there are threads.",
            f"{counted(len(stages), 'parallel map')}{times.share(cost)}",
            f"dataset.map(f, num_parallel_calls={num_calls}){threads}",
            _left(cost, spared, times),
        )


def _of_python(
    noun: str, stages: Sequence[Stage], cost: float, times: Times, spared: float, size: int | None = None
) -> Iterator[Finding]:
    """A function that calls Python; where it waits more than it computes, parallel calls help first."""
    batches = ""
    if noun == "map" and size is not None:
        batches = f", of whole batches where they allow it: dataset.batch({size}).map(f, num_parallel_calls=...)"
    if times.is_noticeable(cost):
        yield Finding(
            "python-map",
            f"A {noun} calls Python code, of which one thread runs at a time, however many calls are parallel.",
            f"{counted(len(stages), noun)} through py_function or numpy_function{times.share(cost)}",
            f"write the function with TensorFlow ops{batches}; or use a keras.utils.PyDataset with "
            "use_multiprocessing=True",
            _left(cost, spared, times),
        )


def _of_single_examples(graph: DatasetGraph) -> list[Stage]:
    """Maps before the batch whose functions would give the same for whole batches."""
    if graph.batch is None or (graph.batch.batch_size or 1) < 2:
        return []
    before = [*graph.until_other_elements(graph.batch), *([graph.batch] if graph.batch.kind == "MapAndBatch" else [])]
    maps = [stage for stage in before if stage.kind in MAPS and not stage.is_trivial]
    return maps if all(stage.function_ops <= _of_rows(stage) for stage in maps) else []


def _of_rows(stage: Stage) -> set[str]:
    """The ops that give for a batch what they give for its rows, if need be along another axis."""
    return _ELEMENTWISE | _PARSING | ({"DecodeCSV", "Pack"} if "DecodeCSV" in stage.function_ops else set())


def _before_batch(graph: DatasetGraph, maps: Sequence[Stage], times: Times, spared: float) -> Finding:
    cost = times.cost(*MAPS)
    size = None if graph.batch is None else graph.batch.batch_size
    parses = any(stage.function_ops & _PARSING for stage in maps)
    lines = any("DecodeCSV" in stage.function_ops for stage in maps)
    return Finding(
        "map-before-batch",
        "A map is called for each example, which takes longer than what it computes.",
        f"{counted(len(maps), 'map')} before batch({size}), of ops that work on whole batches alike{times.share(cost)}",
        f"dataset.batch({size}).map(f, num_parallel_calls=tf.data.AUTOTUNE)"
        + (", with tf.io.parse_example instead of tf.io.parse_single_example" if parses else "")
        + (", with tf.stack(fields, axis=-1) of what tf.io.decode_csv gives for the lines of a batch" if lines else ""),
        _left(cost, spared, times),
    )


def _left(cost: float, spared: float, times: Times) -> float | None:
    """Seconds lost by a cost that no other finding claims."""
    left = cost - spared
    return times.lost(left) if not times.stages or times.is_noticeable(left) else None


_PARSING = {"ParseExampleV2", "ParseSingleExample"}
# Ops that give for a batch what they give for each of its rows, and what carries their constants.
_ELEMENTWISE = {
    "Abs", "Add", "AddV2", "AsString", "Cast", "Ceil", "ClipByValue", "Const", "Cos", "Div", "DivNoNan", "Elu", "Equal",
    "Exp", "Floor", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Identity", "IdentityN", "Less", "LessEqual",
    "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "LookupTableFindV2", "Maximum", "Minimum", "Mul",
    "MulNoNan", "Neg", "NoOp", "NotEqual", "OneHot", "Pow", "ReadVariableOp", "RealDiv", "Reciprocal", "Relu", "Round",
    "Rsqrt", "SelectV2", "Sigmoid", "Sign", "Sin", "Sqrt", "Square", "SquaredDifference", "StaticRegexReplace",
    "StringLower", "StringStrip", "StringToHashBucketFast", "StringToNumber", "StringUpper", "Sub", "Tanh",
}  # fmt: skip


def _of_filters(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    filters = [stage for stage in graph.of_kind("Filter") if not stage.calls_python]
    cost = times.cost("Filter")
    if filters and times.stages and times.is_noticeable(cost):
        yield Finding(
            "sequential-filter",
            "A filter handles one element at a time, and tf.data has no parallel one.",
            f"{counted(len(filters), 'filter')}{times.share(cost)}",
            "compute in a parallel map what the filter decides by: dataset.map(lambda x: (x, keep(x)), "
            "num_parallel_calls=tf.data.AUTOTUNE).filter(lambda x, keep: keep)",
            times.lost(cost),
        )
