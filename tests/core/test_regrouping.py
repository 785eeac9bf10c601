"""Pipelines that take elements apart and put them together again: what that costs is found, and what to do instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext.data.dataset_graph import read_graph
from keras_dist_ext.data.regrouping_findings import regrouping_findings
from keras_dist_ext.data.stage_times import StageTime, Times
from keras_dist_ext.findings import Finding

BASE = tf.data.Dataset.range(1600)


def found(data: tf.data.Dataset, kind: str, seconds: float = 0.004) -> list[Finding]:
    """Judge a pipeline of which a batch takes so long, a quarter of it before the stage of a kind."""
    stages = (StageTime(kind, 80, 1e-5, False, None, 2), StageTime("Range", 80, seconds / 4, False, None, 3))
    graph = read_graph(data)
    assert graph is not None
    return list(regrouping_findings(graph, Times(50, 0.01, seconds, stages)))


def test_batches_that_are_taken_apart_and_put_together_are_found_with_what_that_costs() -> None:
    (finding,) = found(BASE.batch(32).unbatch().batch(8).prefetch(2), "Unbatch")
    assert (finding.code, finding.fix) == ("unbatch-then-batch", "dataset.rebatch(8) instead of both")
    assert finding.seconds == pytest.approx(50 * 0.003)
    assert finding.evidence == "batch(8) comes after unbatch(): 3 of the 4 ms that a batch takes"
    (cut,) = found(BASE.batch(32).unbatch().prefetch(2).batch(8, drop_remainder=True), "Unbatch")
    assert cut.fix == "dataset.rebatch(8, drop_remainder=True) instead of both"


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (BASE.batch(32).unbatch().batch(8), 6e-4),  # too little to be noticed
        (BASE.batch(32).unbatch().shuffle(100).batch(8), 0.004),  # single examples are mixed
        (BASE.batch(32).rebatch(8), 0.004),
        (BASE.batch(8), 0.004),
        (BASE.batch(8).unbatch(), 0.004),
    ],
)
def test_single_examples_that_are_needed_or_cost_nothing_are_no_finding(data: Any, seconds: float) -> None:
    assert found(data, "Unbatch", seconds) == []


def windows(size: int, shift: int) -> tf.data.Dataset:
    return BASE.window(size, shift=shift, drop_remainder=True).flat_map(lambda window: window.batch(size))


def test_windows_that_are_read_one_by_one_are_to_be_gathered_batch_by_batch() -> None:
    (finding,) = found(windows(5, 1).batch(8), "Window")
    assert (finding.code, finding.seconds) == ("window-by-window", pytest.approx(50 * 0.003))
    assert finding.evidence == "window(5, shift=1) comes before flat_map: 3 of the 4 ms that a batch takes"
    assert finding.fix == (
        "tf.data.Dataset.range(num_windows).batch(8).map(lambda i: tf.gather(series, (1 * i)[:, None] + tf.range(5, "
        "dtype=tf.int64)), num_parallel_calls=tf.data.AUTOTUNE), if the series fits into memory"
    )


@pytest.mark.parametrize(("size", "shift"), [(5, 1), (4, 3)])
def test_what_is_gathered_is_what_the_windows_hold(size: int, shift: int) -> None:
    (finding,) = found(windows(size, shift).batch(8), "Window")
    expected = list(windows(size, shift).batch(8).as_numpy_iterator())
    names = {"tf": tf, "series": tf.range(1600, dtype=tf.int64), "num_windows": sum(map(len, expected))}
    gathered = eval(finding.fix.removesuffix(", if the series fits into memory"), names)
    for one, other in zip(gathered.as_numpy_iterator(), expected, strict=True):
        assert np.array_equal(one, other)


def test_windows_that_do_not_overlap_are_batches() -> None:
    (finding,) = found(windows(5, 5).batch(8), "Window")
    assert finding.fix == "dataset.batch(5, drop_remainder=True): these windows do not overlap"
    assert found(windows(5, 1).batch(8), "Window", 6e-4) == []
