"""Where a run is in its data means the same in another process, and what is read there is what comes next."""

from __future__ import annotations

import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext._keras.adapters import TFDatasetAdapter, make_data_adapter
from keras_dist_ext.errors import DataError
from keras_dist_ext.training import data_order
from keras_dist_ext.training.batch_reader import BatchReader
from keras_dist_ext.training.data_order import DataOrder
from keras_dist_ext.training.few_rows import first_rows, unlike_rows
from keras_dist_ext.training.resume import position, tests_before
from keras_dist_ext.training.resume.position import (
    Position,
    check_seekable,
    example_checksum,
    is_deterministic,
    iterate_batches,
    replay_evaluations,
    replay_passes,
    take_seekable,
)

X = np.arange(12, dtype="float32").reshape(6, 2)
NUMBERS = tf.data.Dataset.range(6)


def arrays(x: Any, y: Any = None) -> Any:
    return make_data_adapter(x, y, None, batch_size=2, shuffle=False)


def distributed(strategy: Any) -> Any:
    return strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(4))


class Batches:
    """Three batches, from any place on."""

    def __init__(self) -> None:
        self.batch = 0

    def __next__(self) -> tuple[int]:
        if self.batch == 3:
            raise StopIteration
        self.batch += 1
        return (self.batch - 1,)

    def seek(self, batch: int) -> None:
        self.batch = batch


# What kinds of data a run can be resumed in


def test_an_iterator_that_can_seek_is_read_by_a_generator_that_ends_with_it() -> None:
    given: dict[str, object] = {"x": Batches()}
    batches = take_seekable(given)
    assert isinstance(batches, Batches)
    assert isinstance(given["x"], types.GeneratorType)
    assert list(given["x"]) == [(0,), (1,), (2,)]
    batches.seek(1)
    assert list(iterate_batches(batches)) == [(1,), (2,)]
    adapter: Any = types.SimpleNamespace()
    assert check_seekable(adapter, NUMBERS, batches, None) == "iterator"


def test_generators_are_left_to_keras_though_they_have_methods() -> None:
    given: dict[str, object] = {"x": (row for row in X)}
    before = given["x"]
    assert take_seekable(given) is None
    assert given["x"] is before


def test_a_dataset_that_is_distributed_already_cannot_be_resumed_in(mirrored: Any) -> None:
    with pytest.raises(DataError, match=r"The data is a DistributedDataset, whose .* Give fit the dataset itself"):
        check_seekable(TFDatasetAdapter(NUMBERS.batch(2)), distributed(mirrored), None, None)


def test_data_of_other_libraries_cannot_be_resumed_in() -> None:
    class TorchDataLoaderAdapter:
        pass

    adapter: Any = TorchDataLoaderAdapter()
    with pytest.raises(DataError, match=r"read through Keras' TorchDataLoaderAdapter, which .* Give fit arrays"):
        check_seekable(adapter, NUMBERS, None, None)


def test_a_shuffle_without_a_seed_in_a_pipeline_that_hides_its_graph_cannot_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tf.random.set_seed(None)  # type: ignore[arg-type]
    shuffled = NUMBERS.shuffle(6).batch(2)
    assert check_seekable(TFDatasetAdapter(shuffled), shuffled, None, None) == "tf.data"
    monkeypatch.setattr(position, "dataset_graph", lambda _: None)
    with pytest.raises(DataError, match=r"shuffled without a seed, in a pipeline whose graph .* Give its shuffle a se"):
        check_seekable(TFDatasetAdapter(shuffled), shuffled, None, None)
    assert is_deterministic(shuffled)  # as far as anybody knows


def test_arrays_of_the_same_length_are_told_apart_as_far_as_they_can_be_read() -> None:
    assert example_checksum(arrays(X)) == example_checksum(arrays(X.copy()))
    assert example_checksum(arrays(X)) != example_checksum(arrays(X + 1))
    assert example_checksum(arrays(X[:0])) is None

    class Convertible:
        """Read by Keras through `__array__`, row by row, as arrays of JAX are."""

        shape = X.shape

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return X

        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, rows: Any) -> Any:
            return X[rows]

    other: Any = types.SimpleNamespace(_inputs=(Convertible(),))
    assert example_checksum(other) is None


# What has happened before, and is made up for


class Noted(keras.utils.PyDataset):
    """Notes what Keras calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, batch: int) -> Any:
        return X[batch : batch + 1], X[batch : batch + 1, 0]


class Zero(keras.Model):
    def call(self, x: Any) -> Any:
        return 0.0 * x[:, 0]


@pytest.mark.slow
def test_hooks_of_a_validation_are_called_as_evaluations_call_them() -> None:
    seen, replayed = Noted(), Noted()
    model = Zero()
    model.compile(loss="mse", run_eagerly=True)
    for _ in range(3):
        model.evaluate(seen, verbose=0)
    adapter = make_data_adapter(replayed, None, None, batch_size=None, shuffle=False)
    begins = keras.callbacks.LambdaCallback()
    begins.on_test_begin = lambda logs=None: replay_evaluations(adapter, 2)  # as Resume does
    model.evaluate(replayed, verbose=0, callbacks=[begins])
    assert replayed.calls == seen.calls
    replay_evaluations(arrays(X), 2)  # has no hooks


@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("is_cached", [False, True], ids=["shuffled", "shuffled, then cached"])
def test_the_next_pass_is_the_one_after_those_of_an_earlier_process(is_cached: bool, num_passes: int) -> None:
    def make() -> tf.data.Dataset:
        shuffled = NUMBERS.shuffle(6, seed=5)
        return shuffled.cache().shuffle(6, seed=7) if is_cached else shuffled

    seen, replayed = make(), make()
    orders = [[int(number) for number in seen] for _ in range(4)]
    replay_passes(num_passes, 0, replayed, None)
    assert [int(number) for number in replayed] == orders[num_passes]


def test_a_pass_whose_order_follows_a_seed_needs_none_before_it() -> None:
    given, ordered = NUMBERS.shuffle(6, seed=5), NUMBERS.shuffle(6, seed=7)
    replay_passes(2, 0, given, ordered)
    assert [int(number) for number in ordered] == [int(number) for number in NUMBERS.shuffle(6, seed=7)]


def test_a_distributed_dataset_is_read_from_its_beginning_by_whatever_pass(mirrored: Any) -> None:
    class Unread:
        """Such as TensorFlow has distributed: an iterator of it takes its batches away from the next one."""

        def __iter__(self) -> Any:
            raise AssertionError("it was read")

    data: Any = Unread()
    replay_passes(2, 1, data, None)


def earlier_tests(data: tf.data.Dataset, order: int | None) -> tests_before.TestsBefore:
    where = Position(1, 0, 1, 1, 0, 6, 1, num_tests=3, num_tests_before=1)
    seeds: Any = types.SimpleNamespace(order_of_evaluation=lambda: order, root=order)
    validation = tests_before.Validation(data.batch(2))
    return tests_before.TestsBefore(validation, where, tf.distribute.get_strategy(), seeds)


def test_evaluations_that_no_seed_orders_are_made_up_for_and_those_of_a_seed_share_nothing() -> None:
    shuffled = NUMBERS.shuffle(6)
    assert earlier_tests(shuffled, None).are_replayed
    assert earlier_tests(NUMBERS, 7).are_replayed  # nothing in it is random
    assert not earlier_tests(shuffled, 7).are_replayed


def test_what_the_order_of_a_seed_cannot_be_given_to_is_read_as_it_is(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: Any = types.SimpleNamespace(root=3)

    def order_of(dataset: Any) -> DataOrder:
        adapter = TFDatasetAdapter(NUMBERS.batch(2))
        return DataOrder(adapter, dataset, mirrored, seeds, has_own_rows=False, workers=None)

    assert order_of(distributed(mirrored)).dataset(5) is None
    shuffled = NUMBERS.shuffle(6)
    assert order_of(shuffled).dataset(None) is None
    ordered = order_of(shuffled).dataset(5)
    assert sorted(int(number) for number in ordered) == list(range(6))
    monkeypatch.setattr(data_order, "dataset_graph", lambda _: None)
    assert order_of(shuffled).dataset(5) is None


# Batches


def others(*have_more: bool) -> Any:
    """Other workers, of which some have batches left each time that they are asked."""
    answers = iter(have_more)
    return types.SimpleNamespace(sum=lambda own: [own[0] + next(answers)])


def test_a_state_that_this_tensorflow_cannot_restore_is_read_up_to() -> None:
    with pytest.warns(UserWarning, match="cannot restore the state that the data's iterator had .* read up to there"):
        reader = BatchReader(NUMBERS, 6, skip=2, state=[b"of another version"])
    assert [int(batch) for batch in reader] == [2, 3, 4, 5]


@pytest.mark.parametrize("length", [6, None])
def test_batches_are_given_out_until_the_last_one(length: int | None) -> None:
    assert [int(batch) for batch in BatchReader(NUMBERS, length)] == list(range(6))


@pytest.mark.slow
def test_a_distributed_dataset_is_read_up_to_a_batch_and_not_looked_at_beforehand(mirrored: Any) -> None:
    reader = BatchReader(distributed(mirrored), None, skip=1)
    (last,) = reader
    rows = np.concatenate([part.numpy() for part in mirrored.experimental_local_results(last)])
    np.testing.assert_array_equal(rows, X[4:])
    of_known_length = BatchReader(distributed(mirrored), 2, on_tpu=True)
    assert of_known_length.peek() is None


def test_looking_at_a_batch_takes_none() -> None:
    reader = BatchReader(NUMBERS.take(1), 1)
    assert int(reader.peek()) == 0
    assert [int(batch) for batch in reader] == [0]
    assert BatchReader(NUMBERS.take(0), 0).peek() is None
    assert BatchReader(NUMBERS.take(0), None).peek() is None


@pytest.mark.slow
def test_a_worker_without_rows_left_has_batches_of_none_of_the_same_structure() -> None:
    def element(number: tf.Tensor) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(tf.range(3), [1, 2])
        rows = {"rows": tf.zeros([2, 3]), "ragged": ragged, "sparse": tf.sparse.eye(2, 4), "number": number}
        return {**rows, "none": None, "optional": tf.experimental.Optional.from_value(number)}

    reader = BatchReader(tf.data.Dataset.range(1).map(element), 1, others(True, True, True))
    first, none = reader.next_batch(), reader.next_batch()
    assert reader.has_more
    assert int(first["number"]) == int(first["optional"].get_value()) == 0
    assert {name: tuple(none[name].shape) for name in ("rows", "ragged", "sparse")} == {
        "rows": (0, 3),
        "ragged": (0, None),
        "sparse": (0, 4),
    }
    assert none["none"] is None
    assert not none["optional"].has_value()


# Some rows of a batch


def test_rows_to_try_a_step_with_are_none_where_there_are_none() -> None:
    one = tf.distribute.get_strategy()
    assert first_rows(None, 2, one) is None
    assert first_rows((tf.constant(X[:0]),), 2, one) is None
    assert unlike_rows(None, 2, one) is None
    np.testing.assert_array_equal(first_rows((tf.constant(X),), 2, one)[0], X[:2])


@pytest.mark.slow
def test_rows_that_replicas_have_already_are_joined_in_their_order(mirrored: Any) -> None:
    sparse = tf.data.Dataset.from_tensor_slices({"dense": X, "sparse": tf.sparse.from_dense(X)}).batch(4)
    batch = next(iter(mirrored.experimental_distribute_dataset(sparse)))
    rows = first_rows(batch, 3, mirrored)
    np.testing.assert_array_equal(rows["dense"], X[:3])
    np.testing.assert_array_equal(tf.sparse.to_dense(rows["sparse"]), X[:3])
