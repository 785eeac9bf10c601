"""An audit says which examples each worker and replica gets, for our way of sharing and for TensorFlow's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from data_runs import NUM_EXAMPLES, arrays, generator, last_leaf, plain, py_dataset, run_audit
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.errors import DataError

EVERYTHING = list(range(NUM_EXAMPLES))


# One process


@pytest.mark.parametrize("name", ["tf.data", "arrays", "generator", "PyDataset", "distributed"])
def test_an_epoch_in_which_each_example_comes_once_has_no_findings(name: str, mirrored: Any) -> None:
    made = {
        "tf.data": lambda: plain().shuffle(NUM_EXAMPLES).batch(8),
        "arrays": arrays,
        "generator": generator,
        "PyDataset": py_dataset,
        "distributed": lambda: kde.distribute(plain(), mirrored, batch_size=8),
    }[name]()
    found = kde.audit(made, mirrored, ids=last_leaf, expected=NUM_EXAMPLES, batch_size=8)
    assert found.ok
    assert found.rows.tolist() == [[4, 4]] * 5
    assert sorted([*found.of_replica(0), *found.of_replica(1)]) == EVERYTHING
    assert found.of_worker(0).size == NUM_EXAMPLES
    assert str(found) == "5 steps, 40 examples; of each replica: 20, 20"
    found.raise_if_bad()


def test_the_rows_of_each_replica_are_those_that_fit_gives_it(strategies: Any) -> None:
    found = kde.audit(tf.data.Dataset.range(7).batch(5), strategies.get("mirrored3"), ids=lambda i: i)
    assert [[part.tolist() for part in step] for step in found.ids] == [[[0], [1, 2], [3, 4]], [[], [5], [6]]]


def test_examples_without_ids_are_known_by_their_content(mirrored: Any) -> None:
    rows = np.repeat(np.arange(5.0), 2)[:, None]  # each twice, which is no fault
    words = tf.ragged.constant([["a"], [], ["b", "c"]] * 2)
    assert kde.audit((rows, rows), mirrored, batch_size=4).ok
    assert kde.audit(tf.data.Dataset.from_tensor_slices(words).ragged_batch(2), mirrored).ok
    found = kde.audit((rows, rows), mirrored, batch_size=4)
    assert len(set(np.concatenate([found.of_replica(0), found.of_replica(1)]).tolist())) == 5


def test_what_is_missing_and_what_is_repeated_is_named(mirrored: Any) -> None:
    dataset = tf.data.Dataset.from_tensor_slices([0, 1, 1, 3]).batch(2)
    found = kde.audit(dataset, mirrored, ids=lambda i: i, expected=np.int64(5))
    assert found.missing.tolist() == [2, 4]
    assert found.repeated == {1: 2}
    missed, repeated = found.findings
    assert (missed.code, missed.evidence) == ("examples-missed", "2 examples: 2, 4")
    assert (repeated.code, repeated.evidence) == ("examples-repeated", "1 example: 1 (2 times)")
    with pytest.raises(DataError, match="examples-missed: Some examples are used by no replica."):
        found.raise_if_bad()


def test_batches_that_do_not_split_are_reported(strategies: Any) -> None:
    strategy = strategies.get("mirrored4")
    (idle,) = kde.audit(tf.data.Dataset.range(9).batch(3), strategy).findings
    assert idle.code == "batch-cannot-be-split"
    assert idle.evidence == "3 steps of 3; step 0: 3 examples as 0, 1, 1, 1 on 4 replicas"
    (uneven,) = kde.audit(tf.data.Dataset.range(20).batch(10), strategy).findings
    assert uneven.code == "uneven-batch"
    assert uneven.evidence == "1 step of 2; step 0: 2, 3, 2, 3 examples"
    assert kde.audit(tf.data.Dataset.range(14).batch(8), strategy).ok  # the last may hold what is left over


def test_endless_data_is_looked_at_for_some_steps(mirrored: Any) -> None:
    endless = plain().repeat().batch(8)
    with pytest.raises(DataError, match="The data is endless, so an epoch has no end. Give max_steps="):
        kde.audit(endless, mirrored)
    assert kde.audit(endless, mirrored, ids=lambda i: i, max_steps=3).rows.tolist() == [[4, 4]] * 3


def test_ids_that_are_none_are_refused(mirrored: Any) -> None:
    with pytest.raises(DataError, match=r"ids gave float32 \[8\] for a batch of 8 examples. It must give one integer"):
        kde.audit(arrays(), mirrored, ids=lambda x, y: y, batch_size=8)
    with pytest.raises(DataError, match="There is no AutoShardPolicy 'ROWS'. There are AUTO, FILE, DATA, OFF."):
        kde.audit(plain().batch(8), mirrored, stock_policy="ROWS")


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "OFF"])
def test_one_worker_of_stock_gets_each_example_once(policy: str, mirrored: Any) -> None:
    found = kde.audit(plain().batch(8), mirrored, ids=lambda i: i, stock_policy=policy)
    assert found.ok
    assert found.rows.tolist() == [[4, 4]] * 5


DRAWN = {
    "what is left over is another part in each pass": lambda ids: ids.shuffle(83).batch(8, drop_remainder=True),
    "the same of a shuffle with a seed": lambda ids: ids.shuffle(83, seed=3).batch(8, drop_remainder=True),
    "a sample": lambda ids: ids.shuffle(83).take(40).batch(8),
    "random numbers": lambda ids: ids.map(lambda i: tf.cast(i, tf.float32) + tf.random.uniform([])).batch(8),
}


@pytest.mark.parametrize("stock_policy", [None, "DATA"])
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_anew_in_each_pass_is_not_missing(name: str, stock_policy: str | None, mirrored: Any) -> None:
    found = kde.audit(DRAWN[name](tf.data.Dataset.range(83)), mirrored, stock_policy=stock_policy)
    assert found.ok, str(found)


def test_an_example_that_is_given_less_often_than_it_should_be_is_missing(mirrored: Any) -> None:
    twice = tf.data.Dataset.from_tensor_slices([0, 1, 1, 2]).batch(2)
    assert kde.audit(twice, mirrored, ids=lambda i: i, expected=[0, 1, 1, 2]).ok
    found = kde.audit(twice, mirrored, ids=lambda i: i, expected=[0, 0, 1, 1, 2])
    assert found.missing.tolist() == [0]


def test_data_without_an_example_does_not_pass(mirrored: Any) -> None:
    (finding,) = kde.audit(plain().take(0).batch(8), mirrored).findings
    assert finding.code == "no-examples"


# Two workers


on_both = on_two_workers(run_audit)


WRONG_ORDER = ["examples-missed", "examples-repeated"]
# For each policy of stock TensorFlow: what an audit finds.
STOCK = {
    "AUTO": {
        "files": [],
        "one file": ["cannot-read", "examples-missed"],  # does not fall back to DATA; the other worker would wait
        "no file": [],
        "shuffled": WRONG_ORDER,
    },
    "FILE": {
        "files": [],
        "one file": ["cannot-read", "examples-missed"],
        "no file": ["cannot-read", "cannot-read", "examples-missed"],
        "shuffled": ["cannot-read", "cannot-read", "examples-missed"],
    },
    "DATA": {"files": [], "one file": [], "no file": [], "shuffled": WRONG_ORDER},
    "OFF": {name: ["examples-repeated"] for name in ("files", "one file", "no file", "shuffled")},
}


@pytest.mark.multiworker
@pytest.mark.parametrize("policy", STOCK)
@pytest.mark.slow
@on_both
def test_two_workers_of_stock_get_what_each_policy_gives_them(policy: str, values: Any) -> None:
    for worker in values:
        found = worker[f"stock {policy}"]
        for name, codes in STOCK[policy].items():
            assert found[name]["codes"] == codes, (name, found[name]["text"])
            if not codes:
                assert sorted(found[name]["of workers"][0] + found[name]["of workers"][1]) == EVERYTHING
            if policy == "OFF":
                assert set(found[name]["repeated"].values()) == {2}
    assert values[0] == values[1]


@pytest.mark.multiworker
@pytest.mark.slow
@on_both
def test_stock_shares_files_by_file_and_fails_on_one_worker_where_there_are_too_few(values: Any) -> None:
    errors = values[0]["stock AUTO"]["one file"]["errors"]
    assert list(errors) == [0]
    assert errors[0].startswith("Could not apply FILE based sharding: the dataset only has 1 file(s), which is not")
    by_file = values[0]["stock AUTO"]["files"]["of workers"]
    assert [{i // 10 for i in ids} for ids in by_file] == [{0, 2}, {1, 3}]


@pytest.mark.multiworker
@pytest.mark.slow
@on_both
def test_two_workers_of_ours_get_each_example_once(values: Any) -> None:
    for worker in values:
        for name in ("ours", "ours, a generator"):
            assert worker[name]["codes"] == []
            assert worker[name]["rows"] == [[4, 4]] * 5
            assert sorted(worker[name]["of workers"][0] + worker[name]["of workers"][1]) == EVERYTHING


@pytest.mark.multiworker
@pytest.mark.slow
@on_both
def test_shards_that_overlap_or_are_unequal_are_reported(values: Any) -> None:
    for worker in values:
        overlap = worker["ours, shards that overlap"]
        assert overlap["codes"] == ["examples-repeated"]
        assert overlap["missing"] == []
        assert sorted(overlap["repeated"]) == sorted([*range(0, NUM_EXAMPLES, 4), *range(1, NUM_EXAMPLES, 4)])
        unequal = worker["ours, unequal shards"]
        assert unequal["codes"] == ["unequal-shards"]
        assert "worker 0: 30 examples in 8 steps, worker 1: 10 examples in 3 steps" in unequal["text"]
        assert worker["ours, small batches"]["codes"] == ["batch-cannot-be-split"]
