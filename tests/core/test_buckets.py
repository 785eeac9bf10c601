"""Sequences are batched by length: each example once, little padding, equal work for every replica."""

from __future__ import annotations

import collections
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_dist_ext as kde
from keras_dist_ext.data import bucket_plan
from keras_dist_ext.data import split as data
from keras_dist_ext.data.bucket_plan import (
    BatchSize,
    choose_boundaries,
    imbalance,
    padding_share,
    plan_batches,
    spread_evenly,
)
from keras_dist_ext.errors import DataError

NUM_EXAMPLES = 600


def long_tailed(num_examples: int = NUM_EXAMPLES, seed: int = 0) -> np.ndarray:
    """Lengths as of sentences: many short, few long."""
    return np.clip(np.random.default_rng(seed).geometric(0.04, num_examples), 1, 150)


def sequences(lengths: np.ndarray, seed: int = 0) -> tf.RaggedTensor:
    """Rows of these lengths, of tokens from 1 on."""
    tokens = np.random.default_rng(seed).integers(1, 50, int(lengths.sum()))
    return tf.RaggedTensor.from_row_lengths(tokens, lengths)


def ids_of(batches: Any) -> np.ndarray:
    return np.concatenate([np.asarray(batch[1]) for batch in batches])


# The plan

lengths_and_sizes = st.tuples(
    st.lists(st.integers(0, 60), min_size=1, max_size=120),
    st.lists(st.integers(1, 60), max_size=5, unique=True),
    st.one_of(st.none(), st.integers(1, 20)),
    st.one_of(st.none(), st.integers(60, 400)),
    st.integers(1, 5),
    st.integers(0, 2**31),
).filter(lambda case: case[2] is not None or case[3] is not None)


@settings(max_examples=150, deadline=None)
@given(lengths_and_sizes)
def test_every_example_is_in_exactly_one_batch_and_no_batch_is_too_large(case: Any) -> None:
    lengths, boundaries, rows, tokens, num_replicas, seed = case
    lengths = np.array(lengths)
    size = BatchSize(rows, tokens, num_replicas)
    batches = plan_batches(lengths, sorted(boundaries), size, np.random.default_rng(seed))
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert rows is None or len(batch) <= rows
        assert tokens is None or len(batch) * max(lengths[batch].max(), 1) <= tokens
    if tokens is None:
        assert len(batches) == -(-len(lengths) // rows)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 23), st.integers(1, 6), st.integers(0, 2**31))
def test_dealt_rows_are_a_permutation_cut_as_replicas_cut_them(
    num_batches: int, rows: int, num_replicas: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(0, 99, (num_batches, rows))
    dealt = spread_evenly(lengths, num_replicas)
    assert (np.sort(dealt, axis=1) == np.arange(rows)).all()
    bounds = bucket_plan.share_bounds(rows, num_replicas)
    for replica in range(num_replicas):
        cut = data.replica_rows(tf.range(rows), replica, num_replicas)
        np.testing.assert_array_equal(cut, np.arange(bounds[replica], bounds[replica + 1]))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 16), st.integers(2, 6), st.integers(0, 2**31))
def test_dealt_replicas_differ_by_no_more_than_the_rows_of_one_round(rows: int, num_replicas: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 99, (1, rows * num_replicas))
    shares = lengths[0][spread_evenly(lengths, num_replicas)[0]].reshape(num_replicas, rows).sum(axis=1)
    rounds = np.sort(lengths[0]).reshape(rows, num_replicas)
    assert np.ptp(shares) <= np.ptp(rounds, axis=1).max()


def test_imbalance_and_padding_are_what_they_say() -> None:
    lengths = np.array([10, 10, 2, 2, 4])
    batches = [np.array([0, 1, 2, 3]), np.array([4])]
    assert padding_share(lengths, batches) == pytest.approx(16 / 44)
    assert imbalance(lengths, [batches[0]], 2) == pytest.approx(20 / 12 - 1)
    assert imbalance(lengths, [np.array([0, 2, 1, 3])], 2) == 0


def brute_force_padding(lengths: np.ndarray, num_buckets: int) -> float:
    """The least cells that so many buckets can have, each padded to its longest, by trying all."""
    from itertools import combinations

    distinct = sorted(set(lengths.tolist()))
    best = np.inf
    for cuts in combinations(distinct[:-1], num_buckets - 1):
        bounds = [*cuts, distinct[-1]]
        ends = np.array(bounds)[np.searchsorted(bounds, lengths)]
        best = min(best, float(ends.sum()))
    return best


@pytest.mark.parametrize("seed", range(5))
def test_automatic_boundaries_are_the_fewest_and_the_best(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 13, 200)
    chosen = choose_boundaries(lengths, BatchSize(2, None, 1), max_padding=0.12)
    cells = np.array([*chosen, lengths.max()])[np.searchsorted([*chosen, lengths.max()], lengths)].sum()
    assert cells == brute_force_padding(lengths, len(chosen) + 1)
    assert lengths.sum() >= 0.88 * cells
    assert lengths.sum() < 0.88 * brute_force_padding(lengths, len(chosen))


def test_buckets_have_two_batches_on_average() -> None:
    chosen = choose_boundaries(np.arange(1, 101), BatchSize(5, None, 1), max_padding=0.0)
    assert len(chosen) + 1 == 100 // (2 * 5)


def test_one_long_sequence_does_not_leave_a_row_to_each_batch_of_a_token_budget() -> None:
    lengths = np.array([*range(1, 60)] * 4 + [5000])
    size = BatchSize(None, 6000, 2)
    batches = plan_batches(lengths, choose_boundaries(lengths, size), size, np.random.default_rng(0))
    assert sorted(map(len, batches)) == [1, 36, 100, 100]


# Datasets


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    return long_tailed()


def forms(lengths: np.ndarray) -> dict[str, Any]:
    """The same examples in every form in which they may come."""
    ragged = sequences(lengths)
    ids = np.arange(len(lengths))
    examples = tf.data.Dataset.from_tensor_slices((ragged, ids)).map(lambda row, i: (row, i))
    rows = [np.asarray(row) for row in ragged]

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(ids) // 20

        def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            part = slice(20 * i, 20 * i + 20)
            return ragged[part].to_tensor().numpy(), ids[part]

    return {
        "ragged tensor": (ragged, ids),
        "list of arrays": (rows, ids),
        "padded array": (ragged.to_tensor().numpy(), ids),
        "tf.data of examples": examples,
        "tf.data of ragged batches": examples.ragged_batch(7),
        "tf.data of padded batches": examples.padded_batch(7),
        "tf.data, shuffled without a seed": examples.shuffle(50),
        "PyDataset of padded batches": Batches(),
    }


@pytest.mark.parametrize("form", rotating(forms(np.array([1])), ["tf.data of examples"]))
def test_each_example_comes_once_unchanged_with_little_padding(form: str, lengths: np.ndarray, mirrored: Any) -> None:
    batches = kde.bucket_by_length(forms(lengths)[form], strategy=mirrored, batch_size=16, seed=1)
    ragged = sequences(lengths)
    orders = []
    for _ in range(2):
        seen = []
        cells = 0
        for tokens, ids in batches:
            assert tokens.shape[1] == max(lengths[ids.numpy()])
            cells += tokens.shape[0] * tokens.shape[1]
            for row, i in zip(tokens.numpy(), ids.numpy(), strict=True):
                np.testing.assert_array_equal(row[: lengths[i]], ragged[int(i)])
                assert not row[lengths[i] :].any()
                seen.append(int(i))
        assert sorted(seen) == list(range(NUM_EXAMPLES))
        assert 1 - lengths.sum() / cells < 0.15
        orders.append(seen)
    assert orders[0] != orders[1]


def test_the_report_says_what_is_gained(lengths: np.ndarray, mirrored: Any) -> None:
    batches = kde.bucket_by_length((sequences(lengths), np.arange(len(lengths))), strategy=mirrored, batch_size=16)
    first_pass = [np.asarray(ids) for _, ids in batches]
    report = batches.report
    assert report.num_examples == NUM_EXAMPLES
    assert report.num_steps == (38, 38)
    assert report.padding[1] == pytest.approx(padding_share(lengths, first_pass))
    assert report.imbalance[1] == pytest.approx(imbalance(lengths, first_pass, 2))
    in_order = np.split(np.arange(NUM_EXAMPLES), range(16, NUM_EXAMPLES, 16))
    assert report.padding[0] == pytest.approx(padding_share(lengths, in_order))
    assert report.imbalance[0] == pytest.approx(imbalance(lengths, in_order, 2))
    assert report.padding[1] < 0.2 * report.padding[0]
    assert report.imbalance[1] < 0.1 * report.imbalance[0]
    assert str(report).startswith("600 examples: padding ")


def test_order_follows_from_seed_and_epoch(lengths: np.ndarray) -> None:
    def orders(seed: int, first: int, count: int) -> list[list[int]]:
        batches = kde.bucket_by_length((sequences(lengths), np.arange(len(lengths))), batch_size=16, seed=seed)
        batches.epoch = first
        return [ids_of(batches).tolist() for _ in range(count)]

    three = orders(5, 0, 3)
    assert len({tuple(order) for order in three}) == 3
    assert orders(5, 0, 3) == three
    assert orders(5, 2, 1) == three[2:]
    assert orders(6, 0, 1) != three[:1]


@pytest.mark.parametrize("pool", rotating([1, 50, 600, 10_000], [50]))
def test_pools_of_any_size_lose_nothing(pool: int, lengths: np.ndarray) -> None:
    examples = tf.data.Dataset.from_tensor_slices((sequences(lengths), np.arange(len(lengths))))
    batches = kde.bucket_by_length(examples, batch_size=16, pool=pool, seed=1)
    assert sorted(ids_of(batches)) == list(range(NUM_EXAMPLES))
    arrays = kde.bucket_by_length((sequences(lengths), np.arange(len(lengths))), batch_size=16, pool=pool, seed=1)
    assert sorted(ids_of(arrays)) == list(range(NUM_EXAMPLES))


def test_a_token_budget_holds_and_rows_are_a_multiple_of_the_replicas(lengths: np.ndarray, mirrored: Any) -> None:
    source = (sequences(lengths), np.arange(len(lengths)))
    batches = kde.bucket_by_length(source, strategy=mirrored, tokens=700, seed=1)
    shapes = [tokens.shape for tokens, _ in batches]
    assert all(rows * longest <= 700 for rows, longest in shapes)
    assert sum(rows % 2 for rows, _ in shapes) <= 1 + sum(longest > 350 for _, longest in shapes)
    assert len({rows for rows, _ in shapes}) > 3
    assert sorted(ids_of(batches)) == list(range(NUM_EXAMPLES))


def test_the_number_of_batches_is_known_where_it_does_not_depend_on_the_order(lengths: np.ndarray) -> None:
    batches = kde.bucket_by_length((sequences(lengths), np.arange(len(lengths))), batch_size=16)
    assert int(batches.cardinality()) == 38 == len(list(batches))
    examples = tf.data.Dataset.from_tensor_slices(sequences(lengths))
    assert int(kde.bucket_by_length(examples, batch_size=16).cardinality()) == tf.data.UNKNOWN_CARDINALITY


def test_labels_and_weights_of_tokens_are_padded_along(lengths: np.ndarray) -> None:
    tokens = sequences(lengths)
    data = ({"tokens": tokens, "extra": np.ones((len(lengths), 3), "f")}, tokens + 1, tf.ones_like(tokens, tf.float32))
    for x, y, weights in kde.bucket_by_length(data, batch_size=16, padding_value=99):
        is_token = x["tokens"] != 99
        assert x["extra"].shape[1] == 3
        np.testing.assert_array_equal(tf.where(is_token, x["tokens"] + 1, 0), y)
        np.testing.assert_array_equal(tf.cast(is_token, tf.float32), weights)


def test_labels_of_padded_tokens_are_cut_with_them_where_that_is_said(lengths: np.ndarray) -> None:
    tokens = sequences(lengths).to_tensor().numpy()
    labels = np.where(tokens % 2, tokens, 0)  # holds what looks like padding
    for x, y in kde.bucket_by_length((tokens, labels), batch_size=16, sequences=["0", "1"]):
        np.testing.assert_array_equal(tf.where(x % 2 == 1, x, 0), y)
    for x, y in kde.bucket_by_length((tokens, labels), batch_size=16, sequences=["0"]):
        assert y.shape == (x.shape[0], tokens.shape[1])


def test_strings_and_sequences_of_vectors_are_batched_too() -> None:
    words = tf.ragged.constant([["a"], ["b", "c", "d"], ["e", "f"]])
    (batch,) = kde.bucket_by_length(words, batch_size=3)
    assert sorted(map(tuple, batch.numpy().tolist())) == [(b"a", b"", b""), (b"b", b"c", b"d"), (b"e", b"f", b"")]
    frames = [np.ones((n, 4), "f") for n in (2, 5, 3)]
    ((batch, _),) = kde.bucket_by_length((frames, np.arange(3)), batch_size=3)
    assert batch.shape == (3, 5, 4)
    assert sorted(batch.numpy().sum(axis=(1, 2))) == [8, 12, 20]


def test_a_length_of_ones_own_decides(lengths: np.ndarray) -> None:
    cost = np.arange(len(lengths)) % 3
    data = (sequences(lengths), cost)
    batches = kde.bucket_by_length(data, [0 + 1, 2], batch_size=10, length=lambda x, y: y + 1, seed=1)
    full = [set(y.numpy()) for _, y in batches if len(y) == 10]
    assert full == [{value} for value in [next(iter(found)) for found in full]]


def test_empty_lists_say_nothing_of_what_the_others_hold() -> None:
    ((tokens, _),) = kde.bucket_by_length(([[], [1, 2], [3]], np.arange(3)), batch_size=3)
    assert tokens.dtype.is_integer
    assert sorted(map(tuple, tokens.numpy().tolist())) == [(0, 0), (1, 2), (3, 0)]
    ((frames, _),) = kde.bucket_by_length(([[], [[1.0, 2.0]], [[3.0, 4.0]] * 2], np.arange(3)), batch_size=3)
    assert frames.shape == (3, 2, 2)


@pytest.mark.rotating
def test_leaves_keep_their_names_whatever_kind_of_structure_holds_them() -> None:
    named = collections.namedtuple("named", ["tokens", "extra"])
    tokens = np.pad(np.ones((4, 2), "i"), ((0, 0), (0, 3)))
    for features, path in (
        (collections.OrderedDict(tokens=tokens, extra=np.ones((4, 7))), "0/tokens"),
        (named(tokens, np.ones((4, 7))), "0/0"),
    ):
        dataset = tf.data.Dataset.from_tensor_slices((features, np.arange(4)))
        ((found, _),) = kde.bucket_by_length(dataset, batch_size=4, sequences=[path])
        sizes = {leaf.shape[1] for leaf in tf.nest.flatten(found)}
        assert sizes == {2, 7}, path  # the tokens without their padding, the other as it was


def test_weights_may_be_left_out_as_in_fit(lengths: np.ndarray) -> None:
    with_none = kde.bucket_by_length((sequences(lengths), lengths, None), batch_size=10, seed=1)
    without = kde.bucket_by_length((sequences(lengths), lengths), batch_size=10, seed=1)
    assert [y.numpy().tolist() for _, y in with_none] == [y.numpy().tolist() for _, y in without]


def test_sequences_without_tokens_get_one_cell() -> None:
    empty = tf.RaggedTensor.from_row_lengths(np.zeros(0, "i"), [0, 0])
    (batch,) = kde.bucket_by_length(empty, batch_size=2)
    assert batch.shape == (2, 1)


@pytest.mark.rotating
def test_a_model_of_ours_trains_on_it_as_on_one_device(lengths: np.ndarray, mirrored: Any) -> None:
    losses = []
    for strategy in (mirrored, tf.distribute.get_strategy()):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Embedding(50, 4, mask_zero=True), keras.layers.GlobalAveragePooling1D()]
        model = kde.Sequential([*layers, keras.layers.Dense(1)], strategy=strategy)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        targets = np.linspace(0, 1, len(lengths), dtype="float32")
        batches = kde.bucket_by_length((sequences(lengths), targets), strategy=mirrored, batch_size=50, seed=2)
        losses.append(model.fit(batches, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda tokens: {"ids": tokens, "type": tokens, "mask": tokens},  # of three parts
        lambda tokens: tf.data.Dataset.from_tensor_slices(tokens).batch(2),  # three batches
        lambda tokens: Three(tokens),
    ],
    ids=["dict", "tf.data", "PyDataset"],
)
def test_as_many_boundaries_as_data_has_parts_or_batches_are_boundaries(make: Any) -> None:
    tokens = np.tril(np.ones((6, 6), "i"))
    batches = kde.bucket_by_length(make(tokens), [2, 3, 4], batch_size=2, seed=1)
    assert batches.boundaries == (2, 3, 4)
    widths = [max(leaf.shape[1] for leaf in keras.tree.flatten(batch)) for batch in batches]
    assert sorted(widths) == [2, 4, 6]


class Three(keras.utils.PyDataset):
    """Three batches."""

    def __init__(self, tokens: np.ndarray) -> None:
        super().__init__()
        self.tokens = tokens

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[2 * index : 2 * index + 2]


# Errors

padded = np.ones((4, 6), "i")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": padded}, "Neither batch_size nor tokens was given, so there is no saying how large a batch is."),
        ({"dataset": padded, "batch_size": 0}, "batch_size must be an integer >= 1, or None, got 0."),
        (
            {"dataset": padded, "tokens": 2.5},
            "tokens must be an integer >= 1, or None, got 2.5.",
        ),
        ({"dataset": padded, "batch_size": 2, "sample": 0}, "sample must be an integer >= 1, got 0."),
        ({"dataset": padded, "batch_size": 2, "boundaries": [4, 2]}, "boundaries=[4, 2] do not ascend."),
        *(
            (
                {"dataset": padded, "batch_size": 2, "boundaries": labels},
                f"boundaries is a {kind} that looks like the labels of the examples. Pass features and labels together"
                ", `kde.bucket_by_length((x, y), ...)`",
            )
            for kind, labels in {
                "ndarray": np.arange(4),
                "list": [0, 1, 0, 1],
                "EagerTensor": tf.constant([1.0, 2.0]),
                "_TensorSliceDataset": tf.data.Dataset.from_tensor_slices([1, 2]),
            }.items()
        ),
        ({"dataset": padded, "batch_size": 2, "boundaries": "best"}, "Invalid boundaries='best'; must be \"auto\""),
        ({"dataset": padded, "batch_size": 2, "pool": 0}, "pool must be an integer >= 1, or None, got 0."),
        ({"dataset": padded, "tokens": 5}, "A sequence of 6 tokens is longer than the budget of a batch, tokens=5"),
        (
            {"dataset": np.ones(3), "batch_size": 2},
            "has a second dimension, so there are no sequences to sort by length",
        ),
        (
            {"dataset": (padded, padded), "batch_size": 2},
            "1 is as long as the features (6): a value for each token, or",
        ),
        ({"dataset": (padded, padded[:3]), "batch_size": 2}, "hold different numbers of examples (0: 4, 1: 3)."),
        (
            {"dataset": {"a": padded, "b": np.ones((4, 3))}, "batch_size": 2},
            "The features' second dimensions differ (a: 6, b: 3), so it cannot be told which are sequences.",
        ),
        ({"dataset": padded, "batch_size": 2, "sequences": ["1"]}, "sequences=['1']: there is no 1; the data has "),
        (
            {"dataset": (x for x in [(padded,)]), "batch_size": 2},
            "The data is a generator, which can be read only once",
        ),
        (
            {"dataset": tf.data.Dataset.from_tensor_slices(padded).take(0), "batch_size": 2},
            "The dataset has no example: there is nothing to batch.",
        ),
    ],
)
def test_what_cannot_be_batched_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        kde.bucket_by_length(**arguments)
    assert message in str(error.value)
