"""Data for the table: small, made from a seed, equal on every worker, and served in every form that Keras takes.

A `Feed` holds the arguments of `fit`, `evaluate` and `predict`. A row names a function from the strategy (`None`: one
device without any) to a feed, because a distributed dataset needs one, and because a generator can be read only once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Arrays = Any  # an array, or a tuple or dict of arrays with equal numbers of rows
Make = Callable[[int, int], tuple[Arrays, Arrays]]
"""From the number of rows and a seed to inputs and targets."""


@dataclass(frozen=True)
class Feed:
    """Arguments for `fit`, `evaluate` and `predict`; `None` where a row does not call one of them."""

    fit: dict[str, Any]
    evaluate: dict[str, Any] | None = None
    predict: dict[str, Any] | None = None
    seen: Callable[[], dict[str, Any]] = field(default=dict)
    """What the data itself noticed, read after `fit`: how often it was started, how much of it was taken."""


Serve = Callable[[tf.distribute.Strategy | None], Feed]


# What a row learns from


def regression(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_rows, 5)).astype("float32")
    y = x[:, :3] * [1.0, -2.0, 0.5] + np.abs(x[:, 2:])
    return x, y.astype("float32")


def labels(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, y = regression(num_rows, seed)
    return x, (np.argmax(y, axis=1) + (x[:, 4] > 1)).astype("int32")


def one_hot_labels(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, y = labels(num_rows, seed)
    return x, np.eye(4, dtype="float32")[y]


def binary_labels(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, y = regression(num_rows, seed)
    return x, (y.sum(axis=1, keepdims=True) > 0).astype("float32")


def images(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    random = np.random.default_rng(seed)
    return random.normal(size=(num_rows, 6, 6, 1)).astype("float32"), regression(num_rows, seed)[1]


def sequences(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    random = np.random.default_rng(seed)
    return random.normal(size=(num_rows, 4, 3)).astype("float32"), regression(num_rows, seed)[1]


def padded_sequences(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    """Rows of 1 to 4 time steps, filled up with zeros: replicas get different numbers of valid steps."""
    x, y = sequences(num_rows, seed)
    lengths = np.random.default_rng(seed + 100).integers(1, 5, size=num_rows)
    return x * (np.arange(4)[None, :, None] < lengths[:, None, None]).astype("float32"), y


def padded_steps(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, _ = padded_sequences(num_rows, seed)
    return x, (x[..., :2] * [1.0, -1.0] + x[..., 1:]).astype("float32")


def tokens(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, y = padded_sequences(num_rows, seed)
    filled = np.random.default_rng(seed + 200).integers(1, 12, size=(num_rows, 4))
    return np.where(x[..., 0] != 0, filled, 0).astype("int32"), y


def tags(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, _ = tokens(num_rows, seed)
    return x, (x % 4).astype("int32")


def pairs(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, y = regression(num_rows, seed)
    return (x, x[::-1].copy()), y


def dicts(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, value = regression(num_rows, seed)
    return {"wide": x, "deep": x[:, 1:3] ** 2}, {"value": value, "label": labels(num_rows, seed)[1]}


def one_of_two(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, y = regression(num_rows, seed)
    return {"one": x, "other": None}, y


def flags(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, y = regression(num_rows, seed)
    return x, (y > 0).astype("float32")


def spellings(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, _ = sequences(num_rows, seed)
    return x, np.random.default_rng(seed + 500).integers(1, 3, size=(num_rows, 2)).astype("int32")


def words_and_flags(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, y = regression(num_rows, seed)
    words = np.array(["x" * (1 + int(4 * abs(value))) for value in x[:, 0]])
    return {"word": words, "flag": x[:, 1] > 0}, y


def words(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    random = np.random.default_rng(seed)
    return random.choice(np.array(["a", "bb", "ccc", "dddd", "unknown"]), size=num_rows), regression(num_rows, seed)[1]


def noise_and_real(num_rows: int, seed: int) -> tuple[Arrays, Arrays]:
    x, _ = regression(num_rows, seed)
    return x[:, :2], x


def row_weights(num_rows: int, seed: int) -> np.ndarray:
    """Uneven weights, some of them 0."""
    return np.maximum(0, np.random.default_rng(seed + 300).normal(1.0, 1.0, size=num_rows)).astype("float32")


def step_weights(num_rows: int, seed: int) -> np.ndarray:
    return np.maximum(0, np.random.default_rng(seed + 400).normal(1.0, 1.0, size=(num_rows, 4))).astype("float32")


# How it is served


def arrays(
    make: Make = regression,
    *,
    num_rows: int = 45,
    batch: int = 8,
    epochs: int = 4,
    weights: Callable[[int, int], Any] | None = None,
    convert: Callable[[Any], Any] = np.asarray,
    validation: Callable[[], Any] | None = None,
    **fit: Any,
) -> Serve:
    """Arrays, with a partial last batch in `fit`, `evaluate` and `predict`; `validation` makes validation data."""

    def part(rows: int, seed: int) -> dict[str, Any]:
        x, y = keras.tree.map_structure(lambda leaf: None if leaf is None else convert(leaf), make(rows, seed))
        return {"x": x, "y": y, "batch_size": batch} | ({"sample_weight": weights(rows, seed)} if weights else {})

    def serve(strategy: tf.distribute.Strategy | None) -> Feed:
        predict = part(13, 3)
        return Feed(
            fit={
                **part(num_rows, 1),
                "epochs": epochs,
                "shuffle": False,
                "validation_data": None if validation is None else validation(),
                **fit,
            },
            evaluate=part(21, 2),
            predict={"x": predict["x"], "batch_size": batch},
        )

    return serve


def batches(*sizes: int, make: Make = regression, epochs: int = 4, **fit: Any) -> Serve:
    """A tf.data pipeline of known length, with batches of these sizes; backwards in `evaluate`."""

    def serve(strategy: tf.distribute.Strategy | None) -> Feed:
        return Feed(
            fit={"x": dataset_of(sizes, make), "epochs": epochs, **fit},
            evaluate={"x": dataset_of(sizes[::-1], make)},
            predict={"x": dataset_of(sizes, make).map(lambda x, y: x)},
        )

    return serve


def dataset_of(sizes: Sequence[int], make: Make) -> tf.data.Dataset:
    """Return a pipeline of batches of these sizes, of known length."""
    datasets = [tf.data.Dataset.from_tensors(batch) for batch in split(make(sum(sizes), 1), sizes)]
    whole = datasets[0]
    for dataset in datasets[1:]:
        whole = whole.concatenate(dataset)
    return whole


def split(data: Arrays, sizes: Sequence[int]) -> list[Arrays]:
    """Cut arrays into batches of these sizes."""
    edges = np.cumsum([0, *sizes])
    return [
        keras.tree.map_structure(lambda array, start=start, stop=stop: array[start:stop], data)
        for start, stop in pairwise(edges)
    ]


def pipeline(
    change: Callable[[tf.data.Dataset], tf.data.Dataset], make: Make = regression, *, num_rows: int = 45, **fit: Any
) -> Serve:
    """A tf.data pipeline made by `change` from single rows, the same for `fit`, `evaluate` and `predict`."""

    def dataset(rows: int, seed: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(make(rows, seed))

    def serve(strategy: tf.distribute.Strategy | None) -> Feed:
        return Feed(
            fit={"x": change(dataset(num_rows, 1)), "epochs": 3, **fit},
            evaluate={"x": dataset(21, 2).batch(8)},
            predict={"x": dataset(13, 3).batch(8).map(lambda x, y: x)},
        )

    return serve


def validation_of_unknown_length() -> tf.data.Dataset:
    return forgetting_length(tf.data.Dataset.from_tensor_slices(regression(21, 5)).batch(8))


def forgetting_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the same elements, with a length that TensorFlow does not know."""
    return dataset.filter(lambda *_: True)


def unknown_length(num_rows: int = 45, make: Make = regression, **fit: Any) -> Serve:
    """Pipelines of unknown length everywhere."""

    def dataset(rows: int, seed: int) -> tf.data.Dataset:
        return forgetting_length(tf.data.Dataset.from_tensor_slices(make(rows, seed)).batch(8))

    def serve(strategy: tf.distribute.Strategy | None) -> Feed:
        return Feed(
            fit={"x": dataset(num_rows, 1), "epochs": 3, **fit},
            evaluate={"x": dataset(21, 2)},
            predict={"x": dataset(13, 3).map(lambda x, y: x)},
        )

    return serve


def generator(*sizes: int, endless: bool = False, make: Make = regression, **fit: Any) -> Serve:
    """A Python generator of batches; a finite one checks that each was taken once."""

    def serve(strategy: tf.distribute.Strategy | None) -> Feed:
        taken = [0]

        def elements(count: bool, rounds: int) -> Iterator[Arrays]:
            for _ in range(rounds):
                for batch in split(make(sum(sizes), 1), sizes):
                    taken[0] += count
                    yield batch

        def seen() -> dict[str, Any]:
            assert endless or taken[0] == len(sizes), f"{taken[0]} of {len(sizes)} elements were taken"
            return {}

        return Feed(
            fit={"x": elements(True, 10**9 if endless else 1), **fit},
            evaluate={"x": elements(False, 1)},
            predict={"x": ((x,) for x, _ in elements(False, 1))},
            seen=seen,
        )

    return serve


def counted_starts(endless: bool = False, **fit: Any) -> Serve:
    """A tf.data pipeline that counts how often it was started."""

    def serve(strategy: tf.distribute.Strategy | None) -> Feed:
        starts = [0]

        def elements() -> Iterator[Arrays]:
            starts[0] += 1
            for _ in range(10**9 if endless else 1):
                yield from split(regression(45, 1), [8, 8, 8, 8, 8, 5])

        specs = tf.TensorSpec((None, 5)), tf.TensorSpec((None, 3))
        dataset = tf.data.Dataset.from_generator(elements, output_signature=specs)
        if not endless:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(6))
        return Feed(fit={"x": dataset, **fit}, seen=lambda: {"starts": starts[0]})

    return serve


class _Batches(keras.utils.PyDataset):
    """45 rows in batches of 8, in order."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Arrays:
        x, y = regression(45, 1)
        return x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8]


def py_dataset(workers: int, **fit: Any) -> Serve:
    def serve(strategy: tf.distribute.Strategy | None) -> Feed:
        return Feed(
            fit={"x": _Batches(workers=workers), "shuffle": False, "epochs": 3, **fit},
            evaluate={"x": _Batches(workers=workers)},
            predict={"x": _Batches(workers=workers)},
        )

    return serve


def distributed_dataset(**fit: Any) -> Serve:
    """What `strategy.experimental_distribute_dataset` returns; the plain pipeline on one device."""

    def serve(strategy: tf.distribute.Strategy | None) -> Feed:
        def dataset(rows: int) -> Any:
            plain = tf.data.Dataset.from_tensor_slices(regression(rows, 1)).batch(8)
            return plain if strategy is None else strategy.experimental_distribute_dataset(plain)

        return Feed(fit={"x": dataset(45), "epochs": 3, **fit}, evaluate={"x": dataset(21)})

    return serve


def dataset_from_function(**fit: Any) -> Serve:
    """Per-replica batches of a global batch of 12; the last of 40 rows does not fill them."""

    def serve(strategy: tf.distribute.Strategy | None) -> Feed:
        def dataset(context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
            rows = tf.data.Dataset.from_tensor_slices(regression(40, 1))
            if context is None:
                return rows.batch(12)
            shard = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return shard.batch(context.get_per_replica_batch_size(12))

        x = dataset() if strategy is None else strategy.distribute_datasets_from_function(dataset)
        return Feed(fit={"x": x, "epochs": 3, **fit})

    return serve
