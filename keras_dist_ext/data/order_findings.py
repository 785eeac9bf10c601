"""Judge the order of a pipeline's stages: what is computed or kept in vain, and what hardly mixes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from keras_dist_ext.data.dataset_graph import MAPS, DatasetGraph, Stage
from keras_dist_ext.data.stage_times import Times
from keras_dist_ext.findings import Finding

__all__ = ["mixing_findings", "order_findings"]


def order_findings(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    """Look at the order of the stages of a pipeline.

    Args:
        graph: of the pipeline.
        times: of pulling batches.
    """
    yield from _of_shards(graph, times)
    yield from _of_skips(graph, times)
    yield from _of_caches(graph, times)
    yield from _of_maps_after_cache(graph, times)
    yield from mixing_findings(graph)


def _of_shards(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    for shard in graph.of_kind("Shard"):
        num_shards = shard.values[1] if len(shard.values) > 1 else None
        worked = [stage for stage in graph.upstream(shard) if stage.kind in _WORK and not stage.is_trivial]
        if not worked or (num_shards or 2) < 2:
            continue
        place = next((time.depth for time in times.stages if time.kind == "Shard"), None)
        before = [] if place is None else [time for time in times.stages if time.depth > place]
        cost = sum(time.seconds for time in before if time.kind in _WORK) * (1 - 1 / (num_shards or 2))
        if times.is_noticeable(cost):
            yield Finding(
                "shard-after-map",
                f"Each of {num_shards or 'the'} shards computes all elements and throws away those of the others.",
                f"shard({num_shards or 'n'}, ...) comes after {worked[-1].kind.lower()}{times.share(cost)} in vain",
                f"dataset.shard({num_shards or 'n'}, index) right after the source, before {worked[-1].kind.lower()}",
                times.lost(cost),
            )


def _of_skips(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    for skip in graph.of_kind("Skip"):
        count = skip.values[1] if len(skip.values) > 1 else None
        made_anew = itertools.takewhile(lambda stage: stage.kind != "Cache", graph.upstream(skip))
        worked = [stage for stage in made_anew if stage.kind in _WORK and not stage.is_trivial]
        given = graph.num_elements(skip)
        if not worked or count is None or count < 1 or not given:
            continue
        place = next((time.depth for time in times.stages if time.kind in ("Skip", "FiniteSkip")), None)
        before = [] if place is None else [time for time in times.stages if time.depth > place]
        cost = sum(time.seconds for time in before if time.kind in _WORK) * count / given
        if times.is_noticeable(cost):
            yield Finding(
                "skip-after-map",
                "Each pass computes the elements that it skips, before it gives its first one.",
                f"skip({count}) comes after {worked[-1].kind.lower()}, and leaves {given} elements: {1e3 * cost:.3g} "
                f"ms a batch in vain, spread over those that are left, beside {1e3 * times.work:.3g} ms of work",
                f"dataset.skip({count}) right after the source, before {worked[-1].kind.lower()}",
                times.lost(cost),
            )


_WORK = (*MAPS, "Filter", "FlatMap", "Interleave", "ParallelInterleave", "Generator")


def _of_caches(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
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
        repeats = next((stage for stage in before if stage.kind == "Repeat"), None)
        if repeats is not None:
            is_endless = len(repeats.values) > 1 and repeats.values[1] is not None and repeats.values[1] < 0
            cost = _below_cache(times)
            yield Finding(
                "repeat-before-cache",
                "The cache is never complete, grows without end, and spares nothing."
                if is_endless
                else "The cache keeps every repetition, and is complete only when all have been read.",
                f"cache() comes after repeat({'' if is_endless else '...'})"
                + (f"{times.share(cost)} kept in vain" if is_endless and times.stages else ""),
                f"dataset.cache().repeat({'' if is_endless else '...'})",
                times.lost(cost) if is_endless and times.is_noticeable(cost) else None,
            )
        yield from _of_cut_cache(graph, cache, before, times)


def _below_cache(times: Times) -> float:
    """Seconds a batch of all that goes into a cache."""
    place = next((time.depth for time in times.stages if time.kind in ("Cache", "MemoryCache")), None)
    return 0.0 if place is None else sum(time.seconds for time in times.stages if time.depth > place)


def _of_cut_cache(graph: DatasetGraph, cache: Stage, before: list[Stage], times: Times) -> Iterator[Finding]:
    """Whether fewer elements are taken of a cache than it has, so that it is never complete."""
    for take in graph.of_kind("Take"):
        limit = take.values[1] if len(take.values) > 1 else None
        between = list(graph.upstream(take))
        if cache not in between or limit is None or limit < 0:
            continue
        if any(stage.kind == "Repeat" for stage in between[: between.index(cache)]):
            continue
        given = graph.num_elements(graph.stages[take.inputs[0]])
        if given is None or given <= limit:
            continue
        cost = _below_cache(times) if before else 0.0
        yield Finding(
            "cache-never-fills",
            "The cache is complete only when all that goes into it was read, so that each pass makes it anew.",
            f"take({limit}) comes after cache(), of {given} elements{times.share(cost)} kept in vain",
            f"dataset.take({limit}).cache()",
            times.lost(cost) if times.is_noticeable(cost) else None,
        )


def _of_maps_after_cache(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    cost = times.cost(*MAPS)
    if not times.stages or not times.is_noticeable(cost) or cost < 0.5 * times.work:
        return
    for stage in graph.of_kind("Map"):
        is_after = any(other.kind == "Cache" for other in graph.upstream(stage))
        if is_after and not stage.is_random and not stage.calls_python and not stage.is_trivial:
            yield Finding(
                "map-after-cache",
                "A map that draws nothing at random is computed anew in each pass, though there is a cache.",
                f"map comes after cache(){times.share(cost)}",
                "dataset.map(...).cache(), if what it gives fits into memory",
                times.lost(cost),
            )
            return


def mixing_findings(graph: DatasetGraph) -> Iterator[Finding]:
    """Say where examples are mixed less than it seems, which costs no time.

    Args:
        graph: of the pipeline.
    """
    mixed = [] if graph.batch is None else list(graph.until_other_elements(graph.batch))  # not names of files
    for shuffle in graph.of_kind("Shuffle"):
        batch = next((stage for stage in graph.until_other_elements(shuffle) if stage.batch_size is not None), None)
        size = shuffle.values[1] if len(shuffle.values) > 1 else None
        if batch is not None:
            yield Finding(
                "shuffle-after-batch",
                "Whole batches are shuffled, so that the same examples are in a batch in every pass.",
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
        repeat = next((stage for stage in graph.until_other_elements(shuffle) if stage.kind == "Repeat"), None)
        if repeat is not None and shuffle in mixed and repeat.values[1:2] != (1,):
            yield Finding(
                "repeat-before-shuffle",
                "Passes run into each other: near a border one may have an example twice, and another not at all.",
                f"shuffle({size}) comes after repeat()",
                "dataset.shuffle(...).repeat()",
            )
