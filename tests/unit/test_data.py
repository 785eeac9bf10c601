"""How data is shared, looked into and batched, as far as that needs no run: graphs, made-up clocks, plain numbers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext.data import audit, distribute, sharding_findings
from keras_dist_ext.data.bucket_plan import BatchSize, choose_boundaries
from keras_dist_ext.data.dataset_graph import optimises, read_graph
from keras_dist_ext.data.graph_checks import require
from keras_dist_ext.data.order_findings import order_findings
from keras_dist_ext.data.pipeline import Inspection
from keras_dist_ext.data.pipeline_findings import findings_of
from keras_dist_ext.data.regrouping_findings import _cost_down_from
from keras_dist_ext.data.sources import is_batched
from keras_dist_ext.data.stage_times import StageTime, Times, _stages
from keras_dist_ext.errors import DataError

NUMBERS = np.arange(8)
WORKERS: Any = SimpleNamespace(num_workers=2)


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(NUMBERS)


def timed(*stages: tuple[str, float], batch_seconds: float | None = None) -> Times:
    """Return what was measured of a pipeline of these stages, from its end to its source."""
    found = tuple(StageTime(name, 10, cost, False, None, depth) for depth, (name, cost) in enumerate(stages))
    return Times(10, 0.1, batch_seconds, found)


# Shared by workers


@pytest.mark.parametrize(
    ("policy", "workers", "expected"),
    [
        ("file", None, ("rows", "1 worker reads everything, so there is nothing to share by file")),
        ("auto", None, ("rows", "1 worker, whose 4 replicas take examples of each batch")),
        ("off", WORKERS, ("off", "the data of each of 2 workers is its own (as asked)")),
        (
            "rows",
            WORKERS,
            ("rows", "2 workers read the same batches, those of one device, and each takes its examples (as asked)"),
        ),
    ],
)
def test_how_data_is_shared_says_why(policy: str, workers: Any, expected: tuple[str, str]) -> None:
    assert distribute._choose(policy, numbers(), None, workers, 4) == expected


def test_parts_that_workers_cannot_have_are_refused() -> None:
    with pytest.raises(DataError, match=r'policy="data": the batch size cannot be seen .*by 2 workers\. Give batch_s'):
        distribute._check("data", None, WORKERS, None)
    with pytest.raises(DataError, match=r"A batch of 1 examples leaves some of 2 workers none\. Give more\."):
        distribute._worker_part(numbers().batch(1), "off", WORKERS, 0, True, 1, 1)


def test_batches_of_parameter_servers_are_split_over_no_replicas(mirrored: Any) -> None:
    shared: Any = kde.distribute(numbers().batch(4), mirrored)
    of_servers = SimpleNamespace(strategy=object.__new__(tf.distribute.ParameterServerStrategy))
    with pytest.raises(DataError, match="Under ParameterServerStrategy each step is one worker's"):
        type(shared).per_replica(of_servers)


@pytest.mark.parametrize(
    ("policy", "num_files", "is_deterministic", "seed", "expected"),
    [
        ("file", 3, True, None, ["unequal-shards"]),
        ("file", 4, True, None, []),
        ("rows", 0, False, None, ["order-not-deterministic"]),
        ("rows", 0, True, 1, ["order-not-seeded"]),
    ],
)
def test_what_comes_of_sharing_is_a_finding(
    policy: str, num_files: int, is_deterministic: bool, seed: int | None, expected: list[str]
) -> None:
    graph: Any = None if seed is not None else SimpleNamespace(num_files=num_files, of_kind=lambda *_: [])
    options = tf.data.Options()
    options.deterministic = is_deterministic
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    found = sharding_findings.findings_of(graph, options, policy, 2, 4, 8, seed)
    assert [finding.code for finding in found] == expected


# Audited


def test_examples_of_a_sparse_batch_are_known_by_what_they_hold() -> None:
    dense = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    ids = audit._content(tf.sparse.from_dense(dense))
    np.testing.assert_array_equal(ids, audit._content(tf.constant(dense)))
    assert ids[0] == ids[2] != ids[1]


def test_a_pipeline_that_draws_is_audited_by_ids_alone_where_workers_draw_for_themselves() -> None:
    noisy = numbers().map(lambda x: (x, tf.random.uniform([])))
    with pytest.raises(DataError, match=r"The pipeline draws random numbers, .*Give ids="):
        audit._passes_alike(noisy, WORKERS, has_ids=False)
    assert audit._passes_alike(noisy, WORKERS, has_ids=True) == (noisy, noisy)


def test_a_range_of_any_length_is_a_number_of_examples_and_too_many_missing_ones_are_an_error() -> None:
    assert audit._asked_for(range(10**12)) == 10**12
    assert audit._asked_for(range(2, 4)) == [2, 3]
    with pytest.raises(DataError, match="expected=1000000000, but the data gave 0 examples, so too many are missing"):
        audit._expected(10**9, None, np.zeros(0, np.int64), is_own=False)


# The graph of a pipeline


def test_a_source_that_is_read_twice_is_two_stages() -> None:
    source = numbers()
    graph = read_graph(tf.data.Dataset.zip((source, source)))
    assert graph is not None
    (zipped,) = graph.of_kind("Zip")
    assert [stage.node for stage in graph.of_kind("TensorSlice")] == list(zipped.inputs)
    assert len(set(zipped.inputs)) == 2
    assert graph.num_elements(zipped) == 8
    assert graph.num_elements(dataclasses.replace(zipped, node="nowhere")) is None
    assert not list(graph.upstream(dataclasses.replace(zipped, inputs=("nowhere",))))


def test_a_function_that_a_map_calls_twice_is_looked_into() -> None:
    draw = tf.function(lambda: tf.random.uniform([]))
    graph = read_graph(numbers().map(lambda x: (x, draw(), draw())))
    assert graph is not None
    assert graph.of_kind("Map")[0].is_random


def test_what_options_say_of_an_optimisation_goes() -> None:
    options = tf.data.Options()
    assert optimises(numbers(), "inject_prefetch")
    options.experimental_optimization.inject_prefetch = False
    assert not optimises(numbers().with_options(options), "inject_prefetch")


def test_a_pipeline_that_cannot_be_written_down_is_judged_by_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise tf.errors.FailedPreconditionError(None, None, "external state")

    dataset = numbers().batch(2)
    monkeypatch.setattr(type(dataset), "_as_serialized_graph", fails, raising=False)
    assert read_graph(dataset) is None
    assert findings_of(None, dataset, timed(), "tf.data", 2, None) == []
    assert str(Inspection((), None, None, timed(), ())) == "(tf.data cannot write this pipeline down)"


def test_examples_of_batches_taken_apart_are_no_batches() -> None:
    assert is_batched(numbers().batch(2).unbatch()) is False
    assert is_batched(numbers().batch(2)) is True


# What stages cost


@pytest.mark.parametrize(("cost", "codes"), [(0.05, True), (1e-6, False)])
def test_what_is_made_in_vain_is_a_finding_where_it_takes_time(cost: float, codes: bool) -> None:
    made = numbers().map(lambda x: x * x + 1)
    shard, skip = read_graph(made.shard(2, 0)), read_graph(made.skip(4))
    assert shard is not None
    assert skip is not None
    found = [
        *order_findings(shard, timed(("Shard", 0.0), ("Map", cost), ("TensorSlice", 0.0))),
        *order_findings(skip, timed(("Skip", 0.0), ("Map", cost), ("TensorSlice", 0.0))),
    ]
    assert [finding.code for finding in found] == (["shard-after-map", "skip-after-map"] if codes else [])


def test_a_stage_that_was_not_seen_costs_nothing() -> None:
    times = timed(("Batch", 0.01), ("Map", 0.02), batch_seconds=0.05)
    assert _cost_down_from(times, "Batch") == pytest.approx(0.03)
    assert _cost_down_from(times, "Window") == 0.0
    made = numbers().window(2).interleave(lambda window: window.map(tf.identity)).batch(2)
    codes = [f.code for f in findings_of(read_graph(made), made, times, "tf.data", 1, None)]
    assert "sequential-interleave" not in codes


def test_stages_of_the_model_of_tf_data_that_have_ended_are_left_out() -> None:
    def node(name: str, num_elements: int, *inputs: int) -> Any:
        return SimpleNamespace(
            name=name,
            num_elements=num_elements,
            processing_time=4e9,
            inputs=inputs,
            parameters=[],
            node_class=3,
            ratio=1.0,
        )

    nodes = {1: node("Root", 2, 2), 2: node("Batch", 2, 3, 9), 3: node("Map", 0, 4), 4: node("Range", 8)}
    model: Any = SimpleNamespace(nodes=nodes, output=1)
    assert [(stage.name, stage.seconds) for stage in _stages(model)] == [("Batch", 2.0), ("Map", 0.0)]
    nodes[1].inputs = (2, 8)
    assert [stage.name for stage in _stages(model)] == ["Batch", "Map"]


# Checks in graphs


def test_a_condition_is_checked_at_once_outside_of_graphs() -> None:
    assert require(tf.constant(True), "{} rows", tf.constant(3)) is None
    with pytest.raises(DataError, match="^3 rows are not 4$"):
        require(tf.constant(False), "{} rows are not {}", tf.constant(3), tf.constant(4))


# Buckets


def test_boundaries_among_very_many_lengths_keep_padding_below_its_bound() -> None:
    lengths = np.arange(1, 2001)
    chosen = choose_boundaries(lengths, BatchSize(4, None, 1), max_padding=0.1)
    cells = np.array([*chosen, 2000])[np.searchsorted([*chosen, 2000], lengths)].sum()
    assert 1 - lengths.sum() / cells <= 0.1
    assert chosen == sorted(chosen)
    assert len(chosen) < 20


def test_a_pass_has_a_number_and_a_pool_its_batches() -> None:
    batches = kde.bucket_by_length(np.tril(np.ones((6, 6), "i")), [2, 4], batch_size=2, seed=1)
    batches.epoch = 4
    assert [batches._begin_pass() for _ in range(2)] == [4, 5]
    lengths = np.array([1, 5, 2, 6, 3])
    places, splits = batches._plan(lengths, np.int64(4), np.int64(0))
    assert sorted(places) == [0, 1, 2, 3, 4]
    cut = sorted(sorted(lengths[part]) for part in np.split(places, splits[1:-1]))
    assert cut == [[1, 2], [3], [5, 6]]
    again, _ = batches._plan(lengths, np.int64(4), np.int64(0))
    np.testing.assert_array_equal(again, places)
    nothing, none = batches._plan(np.zeros(0, np.int64), np.int64(4), np.int64(0))
    assert (nothing.tolist(), none.tolist()) == ([], [0])


@pytest.mark.slow
def test_lengths_are_read_of_as_many_examples_as_are_asked_for() -> None:
    rows = tf.ragged.range(tf.constant([3, 1, 2, 5, 4, 1]))
    examples = tf.data.Dataset.from_tensor_slices(rows)
    batches = kde.bucket_by_length(examples, [2], batch_size=2, pool=2, sample=3, seed=1)
    assert batches.report.num_examples == 3
    assert sum(len(batch) for batch in batches) == 6


@pytest.mark.slow
def test_padding_values_are_given_by_name_or_in_order() -> None:
    tokens, tags = np.array([[7, 7, 9], [7, 9, 9]]), np.array([[1, 2, 0], [1, 0, 0]])
    for values in ({"tags": 0, "tokens": 9}, [0, 9]):
        data = {"tags": tags, "tokens": tokens}
        batches = kde.bucket_by_length(data, [1], batch_size=1, padding_value=values, seed=1)
        assert sorted(batch["tokens"].shape[1] for batch in batches) == [1, 2]


@pytest.mark.slow
def test_vectors_are_padding_where_all_of_their_numbers_are() -> None:
    x = np.array([[[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]])
    batches = kde.bucket_by_length(x, [1], batch_size=1, seed=1)
    assert sorted(batch.shape[1] for batch in batches) == [1, 2]


@pytest.mark.slow
def test_sequences_of_padded_batches_are_as_long_as_without_their_padding() -> None:
    rows = tf.ragged.constant([[3], [1, 2, 5], [4, 6]])
    padded = tf.data.Dataset.from_tensor_slices(rows).map(lambda row: row + 0).padded_batch(2)
    batches = kde.bucket_by_length(padded, [1, 2], batch_size=1, seed=1)
    assert sorted(tuple(batch.numpy()[0]) for batch in batches) == [(1, 2, 5), (3,), (4, 6)]
