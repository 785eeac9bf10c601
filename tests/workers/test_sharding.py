"""Data is dealt to workers and replicas, each example once, and it is said how and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from data_runs import NUM_EXAMPLES, SHARDING_CASES, arrays, generator, plain, py_dataset, run_sharding, write_files
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.errors import DataError, SeedError

EVERYTHING = list(range(NUM_EXAMPLES))


def ids_of(batches: Any) -> list[int]:
    flat = [np.asarray(tf.nest.flatten(batch)[-1]).ravel() for batch in batches]
    return np.concatenate(flat).astype(int).tolist()


def parts_of(strategy: Any, dealt: Any) -> list[list[list[int]]]:
    """The ids of each replica in each step of a loop of one's own."""
    return [
        [np.asarray(tf.nest.flatten(part)[-1]).astype(int).ravel().tolist() for part in local]
        for local in map(strategy.experimental_local_results, dealt.per_replica())
    ]


SOURCES = {
    "examples": lambda: plain().shuffle(9),
    "batches": lambda: plain().shuffle(9).batch(8),
    "batches of other size": lambda: plain().batch(5),
    "arrays": arrays,
    "generator": generator,
    "PyDataset": py_dataset,
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("kind", ["default", "one_device", "mirrored2", "mirrored3"])
def test_each_example_comes_once_in_global_batches_and_in_a_loop_of_ones_own(
    name: str, kind: str, strategies: Any
) -> None:
    strategy = strategies.get(kind)
    dealt = kde.distribute(SOURCES[name](), strategy, batch_size=8)
    sizes = [len(np.asarray(tf.nest.flatten(batch)[-1])) for batch in dealt]
    assert sizes == [8] * 5
    replicas = f"{strategy.num_replicas_in_sync} replicas take examples of each batch"
    one = "1 worker with 1 replica, which takes whole batches"
    assert (dealt.policy, dealt.batch_size) == ("rows", 8)
    assert dealt.reason == (one if strategy.num_replicas_in_sync == 1 else f"1 worker, whose {replicas}")
    parts = parts_of(strategy, kde.distribute(SOURCES[name](), strategy, batch_size=8))
    assert sorted(i for step in parts for part in step for i in part) == EVERYTHING
    assert all(len(step) == strategy.num_replicas_in_sync for step in parts)


def test_where_batches_cannot_be_told_a_batch_size_makes_them(mirrored: Any) -> None:
    blocks = tf.data.Dataset.from_tensor_slices(np.arange(40).reshape(5, 8))
    assert [len(batch) for batch in kde.distribute(blocks, mirrored)] == [8] * 5
    assert [batch.shape for batch in kde.distribute(blocks, mirrored, batch_size=4)] == [(4, 8), (1, 8)]


def test_a_loop_gets_the_rows_that_replicas_get_in_fit(strategies: Any) -> None:
    strategy = strategies.get("mirrored3")
    dealt = kde.distribute(tf.data.Dataset.range(19), strategy, batch_size=8)
    assert parts_of(strategy, dealt) == [
        [[0, 1], [2, 3, 4], [5, 6, 7]],
        [[8, 9], [10, 11, 12], [13, 14, 15]],
        [[16], [17], [18]],
    ]
    few = kde.distribute(tf.data.Dataset.range(2), strategy, batch_size=8)
    assert parts_of(strategy, few) == [[[], [0], [1]]]


def test_shares_of_known_size_have_it_in_their_shape(mirrored: Any) -> None:
    dealt = kde.distribute(plain().batch(8, drop_remainder=True), mirrored)
    (spec,) = {spec.shape[0] for spec in dealt.per_replica().element_spec._value_specs}
    assert spec == 4


def test_dicts_ragged_rows_and_tuples_of_one_are_dealt_whole(mirrored: Any) -> None:
    features = {"a": tf.ragged.constant([[1], [2, 3], [4], [5, 6, 7]]), "b": [0, 1, 2, 3]}
    dealt = kde.distribute(tf.data.Dataset.from_tensor_slices((features,)).ragged_batch(4), mirrored)
    ((batch,),) = dealt.per_replica()
    (first, second) = mirrored.experimental_local_results(batch)
    assert first["a"].to_list() == [[1], [2, 3]]
    assert second["a"].to_list() == [[4], [5, 6, 7]]
    assert second["b"].numpy().tolist() == [2, 3]


def test_a_model_trains_on_it_as_on_the_plain_dataset(mirrored: Any) -> None:
    x = np.linspace(-1, 1, 40, dtype="float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(7)

    def losses(given: Any) -> list[float]:
        keras.utils.set_random_seed(1)
        model = kde.Sequential([keras.layers.Dense(1)], strategy=mirrored)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model.fit(given, validation_data=given, epochs=3, verbose=0).history["loss"]

    assert losses(kde.distribute(data, mirrored)) == losses(data)


@pytest.fixture(params=[None, 7], ids=["no global seed", "a global seed"])
def global_seed(request: pytest.FixtureRequest) -> Iterator[None]:
    """With a global seed, TensorFlow gives one to each shuffle and random op."""
    tf.random.set_seed(request.param)
    yield
    tf.random.set_seed(None)


@pytest.mark.parametrize("name", ["examples", "batches", "arrays", pytest.param("PyDataset", marks=pytest.mark.slow)])
def test_the_order_follows_from_the_seed_and_is_another_in_each_pass(
    name: str, mirrored: Any, global_seed: None
) -> None:
    def orders(seed: int) -> list[list[int]]:
        dealt = kde.distribute(SOURCES[name](), mirrored, batch_size=8, seed=seed)
        return [ids_of(dealt) for _ in range(3)]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert len({tuple(order) for order in orders(1)}) == 3


def test_random_ops_of_maps_are_seeded_too(mirrored: Any, global_seed: None) -> None:
    def drawn(seed: int = 1) -> list[float]:
        dealt = kde.distribute(plain().map(lambda i: tf.random.uniform([])), mirrored, batch_size=8, seed=seed)
        assert dealt.findings == ()
        return np.concatenate([batch.numpy() for batch in dealt]).tolist()

    assert drawn() == drawn()
    assert drawn() != drawn(2)
    assert len(set(drawn())) > 1


def test_random_ops_that_race_are_reported(mirrored: Any) -> None:
    noisy = plain().map(lambda i: tf.random.uniform([]), num_parallel_calls=4)
    (finding,) = kde.distribute(noisy, mirrored, batch_size=8, seed=1).findings
    assert finding.code == "draws-not-repeatable"
    assert kde.distribute(noisy, mirrored, batch_size=8).findings == ()


def test_arrays_keep_their_order_where_that_is_asked() -> None:
    assert ids_of(kde.distribute(arrays(), batch_size=8, shuffle=False)) == EVERYTHING
    assert ids_of(kde.distribute(arrays(), batch_size=8)) != EVERYTHING
    assert int(kde.distribute(arrays(), batch_size=8).cardinality()) == 5


def test_a_py_dataset_begins_and_ends_its_epochs() -> None:
    calls = []

    class Batches(type(py_dataset())):  # type: ignore[misc]
        def on_epoch_begin(self) -> None:
            calls.append("begin")

        def on_epoch_end(self) -> None:
            calls.append("end")

    dealt = kde.distribute(Batches(workers=2))
    assert int(dealt.cardinality()) == 5
    for _ in range(2):
        list(dealt)
    assert calls == ["begin", "end"] * 2
    next(iter(dealt))  # left early
    list(dealt)
    assert calls == ["begin", "end"] * 4


def test_policy_and_reason_are_said_with_what_to_look_out_for(strategies: Any) -> None:
    dealt = kde.distribute(plain().batch(10), strategies.get("mirrored4"))
    assert (dealt.policy, dealt.reason) == ("rows", "1 worker, whose 4 replicas take examples of each batch")
    (finding,) = dealt.findings
    assert finding.code == "uneven-batch"
    assert finding.evidence == "batches of 10 examples for 4 replicas: 2, 3, 2, 3 examples"
    assert finding.fix == "batch_size=12, a multiple of 4"
    assert str(dealt).startswith("rows: 1 worker, whose 4 replicas")
    (small,) = kde.distribute(plain().batch(3), strategies.get("mirrored4")).findings
    assert small.code == "batch-smaller-than-replicas"
    assert kde.distribute(plain(), strategies.get("mirrored4"), per_replica_batch_size=3).findings == ()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": plain()}, DataError, "The dataset gives single examples (int64()), and no batch_size was given"),
        ({"dataset": plain(), "batch_size": 0}, DataError, "batch_size must be an integer >= 1, or None, got 0."),
        (
            {"dataset": plain(), "batch_size": 8, "per_replica_batch_size": 8},
            DataError,
            "Both batch_size=8 and per_replica_batch_size=8 were given; the first is 1 times the second.",
        ),
        ({"dataset": plain(), "policy": "fil"}, DataError, "There is no policy 'fil'; did you mean 'file'? There are"),
        ({"dataset": plain(), "shuffle": True}, DataError, "shuffle=True: a tf.data comes in its own order. Call its"),
        ({"dataset": generator(), "shuffle": True}, DataError, "a generator comes in its own order. Shuffle where it"),
        ({"dataset": generator}, DataError, "a function. Call it, or make it a dataset"),
        ({"dataset": (1, 2, 3, 4)}, DataError, "The data is a tuple, and holds something without a shape."),
        ({"dataset": (np.ones(2),) * 4}, DataError, "The data is a tuple of 4. Give (x, y) or (x, y, sample_weight)"),
        ({"dataset": plain().batch(8), "seed": -1}, SeedError, "The seed is -1."),
    ],
)
def test_what_cannot_be_dealt_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        kde.distribute(**arguments)
    assert message in str(raised.value)


def test_what_is_distributed_already_is_refused(mirrored: Any) -> None:
    with pytest.raises(DataError, match="The data has been distributed already, by experimental_distribute_dataset or"):
        kde.distribute(mirrored.experimental_distribute_dataset(plain().batch(8)), mirrored)


# Two workers


on_both = on_two_workers(run_sharding)


REFUSED = {
    "seeds that differ": 'policy="rows": the seeds of shuffle differ between workers, so each would read the data in',
    "one file": 'policy="file": 1 file, for 2 workers, so some would have nothing to read.',
}
POLICIES = {"files": "file", "batched files": "file", "every second": "data", "every second batch": "data"}
POLICIES |= {"split by the user": "off", "examples split by the user": "off"}


SIZES = {"examples": [6] * 6 + [4]}


@pytest.mark.multiworker
@pytest.mark.parametrize("name", [name for name in SHARDING_CASES if name not in REFUSED])
@pytest.mark.slow
@on_both
def test_two_workers_use_each_example_once_in_fit_and_in_a_loop(name: str, values: Any) -> None:
    for worker in values:
        assert worker[name]["policy"] == POLICIES.get(name, "rows")
        assert worker[name]["batch_size"] == {"examples": 6, "PyDataset": None}.get(name, 8)
        assert worker[name]["missing"] == [[], []]
        assert worker[name]["repeated"] == [{}, {}]
        for one_pass in worker[name]["passes"]:
            assert sorted(i for step in one_pass for i in step) == EVERYTHING
            if name != "every second batch":  # of 5, one worker gets 3
                assert [len(step) for step in one_pass] == SIZES.get(name, [8] * 5)
    for one_pass in zip(*(worker[name]["loops"] for worker in values), strict=True):
        assert sorted(i for worker in one_pass for step in worker for i in step) == EVERYTHING


@pytest.mark.multiworker
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.slow
@on_both
def test_what_workers_cannot_share_is_refused_by_all(name: str, values: Any) -> None:
    for worker in values:
        assert worker[name]["error"].startswith(REFUSED[name])


@pytest.mark.multiworker
@pytest.mark.slow
@on_both
def test_two_workers_hear_of_what_they_share(values: Any) -> None:
    codes = {name: value.get("codes") for name, value in values[0].items() if name in SHARDING_CASES}
    assert codes["shuffled without a seed"] == ["auto-falls-back", "shuffle-without-seed"]
    assert codes["seeded"] == ["auto-falls-back"]
    assert codes["files, read by all"] == ["read-by-all"]
    assert codes["files"] == []
    assert codes["one file, read by all"] == ["auto-fails"]
    assert values[0]["files"]["reason"] == "each of 2 workers reads its own of 4 files (as asked)"
    assert values[0]["seeded"]["passes"][0] == values[1]["seeded"]["passes"][0]


@pytest.mark.multiworker
@pytest.mark.slow
@on_both
def test_workers_agree_on_the_order_of_buckets(values: Any) -> None:
    for worker in values:
        found = worker["bucketed without a seed"]
        assert found["codes"] == []
        assert sorted(found["of workers"][0] + found["of workers"][1]) == EVERYTHING
        assert found == values[0]["bucketed without a seed"]


@pytest.mark.multiworker
@pytest.mark.slow
@on_both
def test_fit_on_two_workers_uses_each_example_once(values: Any) -> None:
    for worker in values:
        assert worker["fitted"] == dict.fromkeys(["rows", "data", "buckets"], [[1.0] * 29] * 2)


def test_buckets_can_be_dealt_too(mirrored: Any) -> None:
    rows = tf.RaggedTensor.from_row_lengths(np.ones(820, "i"), np.arange(NUM_EXAMPLES) + 1)
    batches = kde.bucket_by_length((rows, np.arange(NUM_EXAMPLES)), strategy=mirrored, batch_size=6)
    parts = parts_of(mirrored, kde.distribute(batches, mirrored, seed=1))
    assert sorted(i for step in parts for part in step for i in part) == EVERYTHING


def test_files_are_counted_where_their_names_are_known(tmp_path: Any) -> None:
    from keras_dist_ext.data.dataset_graph import read_graph

    paths = write_files(str(tmp_path))
    for dataset in (
        tf.data.TFRecordDataset(paths).batch(2),
        tf.data.Dataset.list_files(str(tmp_path / "*.tfrecord")).interleave(tf.data.TFRecordDataset).batch(2),
        tf.data.TFRecordDataset(paths, num_parallel_reads=2),
    ):
        graph = read_graph(dataset)
        assert graph is not None
        assert graph.num_files == 4
