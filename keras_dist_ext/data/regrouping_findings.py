"""Judge the stages of a pipeline that take elements apart, one by one, and put them together again."""

from __future__ import annotations

from collections.abc import Iterator

from keras_dist_ext.data.dataset_graph import DatasetGraph, Stage
from keras_dist_ext.data.stage_times import NOTICEABLE_SECONDS, Times
from keras_dist_ext.findings import Finding

__all__ = ["regrouping_findings"]

_SHARE = 0.2  # of the time that a batch takes


def regrouping_findings(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    """Look at the stages that regroup elements.

    What they cost is not in their own times alone: each element of theirs passes through all stages up to the batch.

    Args:
        graph: of the pipeline.
        times: of pulling batches.
    """
    yield from _of_batches_taken_apart(graph, times)
    yield from _of_windows(graph, times)


def _of_batches_taken_apart(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    batch = graph.batch
    if batch is None or batch.kind != "Batch" or batch.batch_size is None:
        return
    before = _before(graph, batch)
    if before is None or before.kind != "Unbatch":
        return
    cost = _cost_down_from(times, "Unbatch")
    if _is_noticeable(times, cost):
        rest = ", drop_remainder=True" if batch.drops_remainder else ""
        yield Finding(
            "unbatch-then-batch",
            "Batches are taken apart into single examples, and these are put together again one by one.",
            f"batch({batch.batch_size}) comes after unbatch(): {_share(times, cost)}",
            f"dataset.rebatch({batch.batch_size}{rest}) instead of both",
            cost * times.num_batches,
        )


def _of_windows(graph: DatasetGraph, times: Times) -> Iterator[Finding]:
    for stage in graph.of_kind("FlatMap", "Interleave"):
        window = _before(graph, stage)
        if window is None or window.kind != "Window" or "BatchDatasetV2" not in stage.function_ops:
            continue
        size, shift = window.values[-4:-2]
        cost = _cost_down_from(times, "Window")
        if not isinstance(size, int) or not isinstance(shift, int) or not _is_noticeable(times, cost):
            continue
        rows = "" if graph.batch is None else str(graph.batch.batch_size or "")
        places = f"({shift} * i)[:, None] + tf.range({size}, dtype=tf.int64)"
        gather = (
            f"tf.data.Dataset.range(num_windows).batch({rows or 'n'}).map(lambda i: tf.gather(series, {places}), "
            "num_parallel_calls=tf.data.AUTOTUNE), if the series fits into memory"
        )
        yield Finding(
            "window-by-window",
            "Each window is a dataset of its own, which is opened, read element by element, and closed.",
            f"window({size}, shift={shift}) comes before {'flat_map' if stage.kind == 'FlatMap' else 'interleave'}: "
            f"{_share(times, cost)}",
            f"dataset.batch({size}, drop_remainder=True): these windows do not overlap" if shift == size else gather,
            cost * times.num_batches,
        )


def _before(graph: DatasetGraph, stage: Stage) -> Stage | None:
    """The stage that feeds one, without those that only hand elements on."""
    before = graph.stages.get(stage.inputs[0]) if stage.inputs else None
    while before is not None and before.kind in ("Prefetch", "Options", "AssertCardinality") and before.inputs:
        before = graph.stages.get(before.inputs[0])
    return before


def _cost_down_from(times: Times, kind: str) -> float:
    """Seconds that a batch takes, without the stages above that of a kind."""
    place = next((time.depth for time in times.stages if time.kind == kind), None)
    if place is None or times.batch_seconds is None:
        return 0.0
    return max(0.0, times.batch_seconds - sum(time.seconds for time in times.stages if time.depth > place))


def _is_noticeable(times: Times, cost: float) -> bool:
    return cost >= NOTICEABLE_SECONDS and cost >= _SHARE * (times.batch_seconds or 0.0)


def _share(times: Times, cost: float) -> str:
    return f"{cost * 1e3:.3g} of the {(times.batch_seconds or 0.0) * 1e3:.3g} ms that a batch takes"
