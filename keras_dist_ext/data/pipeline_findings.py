"""Judge a tf.data pipeline by what it is made of and what its stages cost."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from keras_dist_ext.data.dataset_graph import DatasetGraph, optimises
from keras_dist_ext.data.map_findings import calls_that_wait, map_findings
from keras_dist_ext.data.order_findings import order_findings
from keras_dist_ext.data.regrouping_findings import regrouping_findings
from keras_dist_ext.data.sharding_findings import batch_findings
from keras_dist_ext.data.sources import is_batched
from keras_dist_ext.data.stage_times import Times
from keras_dist_ext.findings import Finding

__all__ = ["findings_of"]

SPARES_MAPS = (
    "shard-after-map",
    "cache-never-fills",
    "repeat-before-cache",
    "map-after-cache",
)  # by their fix maps do less


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
        of_order = list(order_findings(graph, times))
        spared = sum(finding.seconds or 0.0 for finding in of_order if finding.code in SPARES_MAPS)
        found += of_order
        found += map_findings(graph, dataset, times, spared / max(1, times.num_batches))
        found += regrouping_findings(graph, times)
        found += _of_reading(graph, dataset, times)
        found += _of_generators(graph, dataset, times, kind)
    return found + list(_of_batches(graph, dataset, kind, num_replicas, num_examples))


def _of_prefetch(graph: DatasetGraph | None, dataset: tf.data.Dataset, times: Times) -> Iterator[Finding]:
    last = next((stage for stage in times.stages if stage.kind != "AssertCardinality"), None)
    if last is not None:
        if last.is_parallel:
            return
        seen = f"the last stage, as run, is {last.name}"
    else:
        if graph is None or graph.last is None or graph.last.is_parallel or optimises(dataset, "inject_prefetch"):
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


def _of_reading(graph: DatasetGraph, dataset: tf.data.Dataset, times: Times) -> Iterator[Finding]:
    for stage in graph.of_kind("Interleave", "FlatMap"):
        if stage.is_parallel or stage.is_generator:
            continue
        num_files = sum(source.num_strings for source in graph.upstream(stage)) if stage.reads_files else 0
        if stage.kind == "FlatMap" and num_files < 2:
            continue
        first = next((time.depth for time in times.stages if time.kind == stage.kind), None)
        if first is None:
            cost = 0.0
        else:  # files that have come to their end are in no stage's time any more
            above = sum(time.seconds for time in times.stages if time.depth < first)
            cost = sum(time.seconds for time in times.stages if time.depth >= first)
            cost = max(cost, (times.batch_seconds or 0.0) - above)
        if not times.is_noticeable(cost):
            continue
        read = f"{num_files} files are read" if num_files else "its inputs are read"
        waits = times.cpu_share is not None and times.cpu_share < 0.5
        num_calls, threads = calls_that_wait(dataset) if waits else ("tf.data.AUTOTUNE", "")
        at_once = f"cycle_length={num_calls}, " if waits else ""
        yield Finding(
            "sequential-interleave",
            "Inputs are read one at a time, so that waiting for storage adds up.",
            f"{read} without parallel calls{times.share(min(cost, times.work))}",
            f"files.interleave(tf.data.TFRecordDataset, {at_once}num_parallel_calls={num_calls})"
            + (f", or TFRecordDataset(files, num_parallel_reads={num_calls})" if stage.kind == "FlatMap" else "")
            + threads,
            times.lost(cost),
        )


def _of_generators(graph: DatasetGraph, dataset: tf.data.Dataset, times: Times, kind: str) -> Iterator[Finding]:
    if not any(stage.is_generator for stage in graph):
        return
    cost = times.cost("Generator")
    if not times.is_noticeable(cost) or (times.stages and cost < 0.5 * times.work):
        return
    num_calls, threads = calls_that_wait(dataset)
    fix = (
        "dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE) with TensorFlow ops over a dataset of what to load"
        if times.cpu_share is None or times.cpu_share >= 0.5
        else f"dataset.map(load, num_parallel_calls={num_calls}) over a dataset of what to load{threads}"
    )
    if kind == "PyDataset":
        fix = "PyDataset(workers=4, use_multiprocessing=True)"
    yield Finding(
        "generator-bound",
        "Data comes from Python code, which makes one element at a time.",
        f"{'Dataset.from_generator' if kind == 'tf.data' else f'a {kind}'}{times.share(cost)}",
        fix,
        times.lost(cost),
    )


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
