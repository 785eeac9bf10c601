"""Judge a tf.data pipeline by what it is made of and what its stages cost."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from keras_dist_ext.data.dataset_graph import DatasetGraph, Stage
from keras_dist_ext.data.sharding_findings import batch_findings
from keras_dist_ext.data.sources import is_batched
from keras_dist_ext.data.stage_times import Times
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted

__all__ = ["findings_of"]

NOTICEABLE_SECONDS = 5e-4  # a batch: about what the fastest steps of a small model take on a CPU
MAPS = ("Map", "MapAndBatch", "ParallelMap")


def findings_of(
    graph: DatasetGraph | None,
    dataset: tf.data.Dataset,
    times: Times,
    kind: str,
    num_replicas: int,
    num_examples: int | None,
) -> list[Finding]:
    """Look at a pipeline.

    Args:
        graph: None where tf.data cannot write it down.
        dataset: of which it is the graph.
        times: of pulling batches.
        kind: of the data, as `sources.kind_of` names it.
        num_replicas: that share each batch.
        num_examples: in a pass, or None.
    """
    found = list(_of_prefetch(graph, dataset, times))
    if graph is not None:
        found += _of_maps(graph, dataset, times)
        found += _of_reading(graph, times)
        found += _of_generators(graph, times, kind)
        found += _of_order(graph, times)
    return found + list(_of_batches(graph, dataset, kind, num_replicas, num_examples))


def _of_prefetch(graph: DatasetGraph | None, dataset: tf.data.Dataset, times: Times) -> Iterator[Finding]:
    last = next((stage for stage in times.stages if stage.kind != "AssertCardinality"), None)
    if last is not None:
        if last.is_parallel:
            return
        seen = f"the last stage, as run, is {last.name}"
    else:
        if graph is None or graph.last is None or graph.last.is_parallel or _optimises(dataset, "inject_prefetch"):
            return
        seen = f"the last stage is {graph.last.kind}"
    waits = "" if times.batch_seconds is None else f"; a batch takes {times.batch_seconds * 1e3:.3g} ms"
    yield Finding(
        "no-prefetch",
        "The next batch is made only when a step asks for it, so that devices wait for all of it.",
        f"{seen}, and options keep tf.data from adding a prefetch{waits}",
        "dataset.prefetch(tf.data.AUTOTUNE) at the end",
        None if times.batch_seconds is None else times.batch_seconds * times.num_batches,
    )


def _optimises(dataset: tf.data.Dataset, name: str) -> bool:
    """Whether tf.data makes an optimisation by itself, by its options (data/ops/options.py)."""
    options = dataset.options()
    if options.autotune.enabled is False:
        return False
    wanted = getattr(options.experimental_optimization, name)
    if wanted is None:
        wanted = options.experimental_optimization.apply_default_optimizations is not False
    return bool(wanted)


def _of_maps(graph: DatasetGraph, dataset: tf.data.Dataset, times: Times) -> Iterator[Finding]:
    sequential = [stage for stage in graph.of_kind("Map") if not stage.is_parallel and not _is_trivial(stage)]
    cost = sum(time.seconds for time in times.stages if time.kind in MAPS and time.is_sequential)
    if not times.stages and all(
        _optimises(dataset, "map_parallelization") and not stage.calls_python for stage in sequential
    ):
        sequential = []
    if sequential and _is_noticeable(cost, times):
        yield Finding(
            "sequential-map",
            "A map handles one element at a time, and tf.data did not make it parallel by itself.",
            f"{counted(len(sequential), 'map')} without num_parallel_calls{_share(cost, times)}",
            "dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE)",
            _lost(cost, times),
        )
    for noun, kinds in (("map", MAPS), ("filter", ("Filter",))):
        in_python = [stage for stage in graph.of_kind(*kinds) if stage.calls_python]
        cost = _cost(times, *kinds)
        if in_python and times.stages and _is_noticeable(cost, times):
            yield Finding(
                "python-map",
                f"A {noun} calls Python code, of which one thread runs at a time, however many calls are parallel.",
                f"{counted(len(in_python), noun)} through py_function or numpy_function{_share(cost, times)}",
                "write the function with TensorFlow ops, or use a keras.utils.PyDataset with use_multiprocessing=True",
                _lost(cost, times),
            )
    yield from _of_filters(graph, times)


def _of_filters(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    filters = [stage for stage in graph.of_kind("Filter") if not stage.calls_python]
    cost = _cost(times, "Filter")
    if filters and times.stages and _is_noticeable(cost, times):
        yield Finding(
            "sequential-filter",
            "A filter handles one element at a time, and tf.data has no parallel one.",
            f"{counted(len(filters), 'filter')}{_share(cost, times)}",
            "compute in a parallel map what the filter decides by: dataset.map(lambda x: (x, keep(x)), "
            "num_parallel_calls=tf.data.AUTOTUNE).filter(lambda x, keep: keep)",
            _lost(cost, times),
        )


def _of_reading(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    for stage in graph.of_kind("Interleave", "FlatMap"):
        if stage.is_parallel or stage.is_generator:
            continue
        num_files = sum(source.num_strings for source in graph.upstream(stage)) if stage.reads_files else 0
        if stage.kind == "FlatMap" and num_files < 2:
            continue
        first = next((time.depth for time in times.stages if time.kind == stage.kind), None)
        cost = 0.0 if first is None else sum(time.seconds for time in times.stages if time.depth >= first)
        if not _is_noticeable(cost, times):
            continue
        read = f"{num_files} files are read" if num_files else "its inputs are read"
        yield Finding(
            "sequential-interleave",
            "Inputs are read one at a time, so that waiting for storage adds up.",
            f"{read} without parallel calls{_share(cost, times)}",
            "files.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)"
            + (", or TFRecordDataset(files, num_parallel_reads=tf.data.AUTOTUNE)" if stage.kind == "FlatMap" else ""),
            _lost(cost, times),
        )


def _of_generators(graph: DatasetGraph, times: Times, kind: str) -> Iterator[Finding]:
    if not any(stage.is_generator for stage in graph):
        return
    cost = _cost(times, "Generator")
    if not _is_noticeable(cost, times) or (times.stages and cost < 0.5 * _total(times)):
        return
    fix = "dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE) with TensorFlow ops over a dataset of what to load"
    if kind == "PyDataset":
        fix = "PyDataset(workers=4, use_multiprocessing=True)"
    yield Finding(
        "generator-bound",
        "Data comes from Python code, which makes one element at a time.",
        f"{'Dataset.from_generator' if kind == 'tf.data' else f'a {kind}'}{_share(cost, times)}",
        fix,
        _lost(cost, times),
    )


def _of_order(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    for cache in graph.of_kind("Cache"):
        before = list(graph.upstream(cache))
        if any(stage.kind == "Shuffle" and stage.attributes.get("reshuffle_each_iteration") for stage in before):
            yield Finding(
                "shuffle-before-cache",
                "The cache keeps the order of the first pass, so that all later passes have the same.",
                "cache() comes after shuffle(...)",
                "dataset.cache().shuffle(...)",
            )
        if any(stage.is_random for stage in before if stage.kind in ("Map", "MapAndBatch")):
            yield Finding(
                "random-before-cache",
                "The cache keeps what was drawn in the first pass, so that later passes see the same augmentation.",
                "cache() comes after a map that draws random numbers",
                "dataset.cache().map(augment, num_parallel_calls=tf.data.AUTOTUNE)",
            )
        if any(stage.kind == "Repeat" for stage in before):
            yield Finding(
                "repeat-before-cache",
                "The cache keeps every repetition, and is complete only when all have been read.",
                "cache() comes after repeat(...)",
                "dataset.cache().repeat(...)",
            )
    yield from _of_maps_after_cache(graph, times)
    mixed = [] if graph.batch is None else list(graph.until_other_elements(graph.batch))  # not names of files
    for shuffle in graph.of_kind("Shuffle"):
        batch = next((stage for stage in graph.until_other_elements(shuffle) if stage.batch_size is not None), None)
        size = shuffle.values[1] if len(shuffle.values) > 1 else None
        if batch is not None:
            yield Finding(
                "shuffle-after-batch",
                "Whole batches are shuffled, so that the same examples meet in every pass.",
                f"shuffle({size}) comes after batch({batch.batch_size})",
                "dataset.shuffle(...).batch(...)",
            )
        elif graph.batch is not None and shuffle in mixed and 0 < (size or 0) < (graph.batch.batch_size or 0):
            yield Finding(
                "shuffle-buffer-small",
                "An example can move by less than a batch, so that batches hardly differ from pass to pass.",
                f"shuffle({size}) before batch({graph.batch.batch_size})",
                f"dataset.shuffle({max(1000, 10 * (graph.batch.batch_size or 0))}) or more",
            )


def _of_maps_after_cache(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    cost = _cost(times, *MAPS)
    if not times.stages or not _is_noticeable(cost, times) or cost < 0.5 * _total(times):
        return
    for stage in graph.of_kind("Map"):
        is_after = any(other.kind == "Cache" for other in graph.upstream(stage))
        if is_after and not stage.is_random and not stage.calls_python and not _is_trivial(stage):
            yield Finding(
                "map-after-cache",
                "A map that draws nothing at random is computed anew in each pass, though there is a cache.",
                f"map comes after cache(){_share(cost, times)}",
                "dataset.map(...).cache(), if what it gives fits into memory",
                _lost(cost, times),
            )
            return


def _of_batches(
    graph: DatasetGraph | None, dataset: tf.data.Dataset, kind: str, num_replicas: int, num_examples: int | None
) -> Iterator[Finding]:
    if graph is None:
        return
    if kind == "tf.data" and is_batched(dataset, graph) is False:
        yield Finding(
            "not-batched",
            "The dataset gives single examples: fit would take each for a batch.",
            f"its elements are {dataset.element_spec}",
            "dataset.batch(...)",
        )
        return
    batch = graph.batch
    if batch is None or batch.batch_size is None:
        return
    yield from batch_findings(batch.batch_size, num_replicas)
    inner = next((stage for stage in graph.until_other_elements(batch) if stage.batch_size is not None), None)
    if inner is not None:
        yield Finding(
            "batched-twice",
            "Batches are batched again, so that examples lie in the second dimension.",
            f"batch({batch.batch_size}) comes after batch({inner.batch_size})",
            "one batch(...), or rebatch(...)",
        )
    left = 0 if num_examples is None or batch.drops_remainder else num_examples % batch.batch_size
    if left % num_replicas:
        yield Finding(
            "partial-last-batch",
            "The last batch of a pass does not split evenly over the replicas. Stock Keras then weights its examples "
            "wrongly; models of keras_dist_ext do not, but some replicas wait.",
            f"{num_examples} examples in batches of {batch.batch_size} leave {left} for {num_replicas} replicas",
            "batch(..., drop_remainder=True), repeat(), or a batch size that leaves none",
        )


def _is_trivial(stage: Stage) -> bool:
    """Whether the function of a map does nothing that takes time, as of those that tf.data adds itself."""
    return stage.function_ops <= {"Identity", "NoOp", "Const", "RaggedTensorToVariant", "RaggedTensorFromVariant"}


def _cost(times: Times, *kinds: str) -> float:
    """Seconds a batch of the stages of these kinds."""
    return sum(stage.seconds for stage in times.stages if stage.kind in kinds)


def _total(times: Times) -> float:
    return sum(stage.seconds for stage in times.stages if stage.kind != "Prefetch")


def _is_noticeable(cost: float, times: Times) -> bool:
    """Whether stages that cost so much a batch are worth a word; where that is not known, whether the whole is."""
    if not times.stages:
        return (times.batch_seconds or 0.0) >= NOTICEABLE_SECONDS
    return cost >= NOTICEABLE_SECONDS and cost >= 0.2 * _total(times)


def _share(cost: float, times: Times) -> str:
    return f", {cost * 1e3:.3g} of {_total(times) * 1e3:.3g} ms of work a batch" if times.stages else ""


def _lost(cost: float, times: Times) -> float | None:
    return cost * times.num_batches if times.stages else None
