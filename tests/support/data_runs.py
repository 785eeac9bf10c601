"""What each of two workers does in tests/workers/test_sharding.py and test_audit.py: small readings of data."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

NUM_EXAMPLES = 40
NUM_FILES = 4


def write_files(folder: str, num_files: int = NUM_FILES) -> list[str]:
    """TFRecord files that hold the ids from 0 to 39, ten in each of four."""
    import tensorflow as tf

    paths = [str(pathlib.Path(folder) / f"{i}-of-{num_files}.tfrecord") for i in range(num_files)]
    for i, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for value in range(i * NUM_EXAMPLES // num_files, (i + 1) * NUM_EXAMPLES // num_files):
                writer.write(str(value).encode())
    return paths


def of_files(paths: list[str]) -> Any:
    import tensorflow as tf

    return tf.data.TFRecordDataset(paths).map(lambda text: tf.strings.to_number(text, tf.int64))


def plain() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(NUM_EXAMPLES)


def run_sharding(strategy: Any, folder: pathlib.Path) -> dict[str, Any]:
    """Run the cases of tests/workers/test_sharding.py in this worker, and return their values."""
    return _run(strategy, {**SHARDING_CASES, **BUCKET_CASES, **FIT_CASES}, folder)


def run_audit(strategy: Any, folder: pathlib.Path) -> dict[str, Any]:
    """Run the cases of tests/workers/test_audit.py in this worker, and return their values."""
    return _run(strategy, AUDIT_CASES, folder)


def _run(strategy: Any, cases: dict[str, Callable[[Any, int, str], Any]], folder: pathlib.Path) -> dict[str, Any]:
    import tensorflow as tf

    tf.random.set_seed(None)  # what has no seed is among the cases
    worker = strategy.cluster_resolver.task_id
    (folder / str(worker)).mkdir()
    return {name: case(strategy, worker, str(folder)) for name, case in cases.items()}


# distribute


def shared(strategy: Any, make: Callable[[], Any], **arguments: Any) -> dict[str, Any]:
    """What `distribute` says, and which ids this worker trains on in two passes: by `fit`, and in a loop."""
    import keras_dist_ext as kde
    from keras_dist_ext.errors import DataError

    try:
        dealt = kde.distribute(make(), strategy, **arguments)
    except DataError as error:
        return {"error": str(error)}
    audits = [kde.audit(dealt, strategy, ids=last_leaf) for _ in range(2)]
    loops = []
    for _ in range(2):
        batches = [strategy.experimental_local_results(batch) for batch in dealt.per_replica()]
        loops.append([np.asarray(last_leaf(*as_tuple(part))).tolist() for batch in batches for part in batch])
    return {
        "policy": dealt.policy,
        "reason": dealt.reason,
        "batch_size": dealt.batch_size,
        "codes": [finding.code for finding in dealt.findings],
        "passes": [[np.concatenate(step).tolist() for step in found.ids] for found in audits],
        "missing": [found.missing.tolist() for found in audits],
        "repeated": [found.repeated for found in audits],
        "loops": loops,
    }


def as_tuple(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def last_leaf(*batch: Any) -> Any:
    """Ids are the labels."""
    return np.asarray(batch[-1]).astype(np.int64).ravel()


def arrays() -> Any:
    ids = np.arange(NUM_EXAMPLES, dtype="float32")
    return ids[:, None], ids


def py_dataset() -> Any:
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> Any:
            x, y = arrays()
            return x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]

    return Batches(workers=2)


def generator() -> Any:
    x, y = arrays()
    return ((x[i : i + 8], y[i : i + 8]) for i in range(0, NUM_EXAMPLES, 8))


SHARDING_CASES: dict[str, Callable[[Any, int, str], Any]] = {
    "shuffled without a seed": lambda s, w, f: shared(s, lambda: plain().shuffle(NUM_EXAMPLES).batch(8)),
    "seeded": lambda s, w, f: shared(s, lambda: plain().shuffle(NUM_EXAMPLES).batch(8), seed=3),
    "seeds that differ": lambda s, w, f: shared(s, lambda: plain().shuffle(NUM_EXAMPLES, seed=w + 1).batch(8)),
    "examples": lambda s, w, f: shared(s, plain, per_replica_batch_size=3),
    "files": lambda s, w, f: shared(s, lambda: of_files(write_files(f"{f}/{w}")), batch_size=8, policy="file"),
    "batched files": lambda s, w, f: shared(s, lambda: of_files(write_files(f"{f}/{w}")).batch(8), policy="file"),
    "files, read by all": lambda s, w, f: shared(s, lambda: of_files(write_files(f"{f}/{w}")), batch_size=8),
    "one file": lambda s, w, f: shared(s, lambda: of_files(write_files(f"{f}/{w}", 1)), batch_size=8, policy="file"),
    "one file, read by all": lambda s, w, f: shared(s, lambda: of_files(write_files(f"{f}/{w}", 1)), batch_size=8),
    "every second": lambda s, w, f: shared(s, plain, batch_size=8, policy="data"),
    "every second batch": lambda s, w, f: shared(s, lambda: plain().batch(8), policy="data"),
    "split by the user": lambda s, w, f: shared(s, lambda: plain().shard(2, w).batch(4)),
    "examples split by the user": lambda s, w, f: shared(s, lambda: plain().shard(2, w), batch_size=8),
    "arrays": lambda s, w, f: shared(s, arrays, batch_size=8),
    "PyDataset": lambda s, w, f: shared(s, py_dataset, seed=5),
}


# audit


def looked_at(strategy: Any, dataset: Any, **arguments: Any) -> dict[str, Any]:
    import keras_dist_ext as kde

    found = kde.audit(dataset, strategy, ids=last_leaf, **arguments)
    return {
        "of workers": [found.of_worker(worker).tolist() for worker in range(2)],
        "rows": found.rows.tolist(),
        "missing": found.missing.tolist(),
        "repeated": found.repeated,
        "errors": found.errors,
        "codes": [finding.code for finding in found.findings],
        "text": str(found),
    }


def policies(policy: str) -> Callable[[Any, int, str], Any]:
    return lambda s, w, f: {
        "files": looked_at(s, of_files(write_files(f"{f}/{w}")).batch(8), stock_policy=policy),
        "one file": looked_at(s, of_files(write_files(f"{f}/{w}", 1)).batch(8), stock_policy=policy),
        "no file": looked_at(s, plain().batch(8), stock_policy=policy),
        "shuffled": looked_at(s, plain().shuffle(NUM_EXAMPLES, seed=w + 1).batch(8), stock_policy=policy),
    }


AUDIT_CASES: dict[str, Callable[[Any, int, str], Any]] = {
    **{f"stock {policy}": policies(policy) for policy in ("AUTO", "FILE", "DATA", "OFF")},
    "ours": lambda s, w, f: looked_at(s, plain().batch(8)),
    "ours, a generator": lambda s, w, f: looked_at(s, generator(), expected=NUM_EXAMPLES),
    "ours, shards that overlap": lambda s, w, f: looked_at(
        s, plain().shard(4, 0 if w else 1).concatenate(plain().shard(2, w)).batch(5), expected=NUM_EXAMPLES
    ),
    "ours, unequal shards": lambda s, w, f: looked_at(s, plain().skip(30 * w).take(30 if w == 0 else 10).shard(1, 0)
                                                      .with_options(off()).batch(4)),
    "ours, small batches": lambda s, w, f: looked_at(s, plain().batch(1), max_steps=3),
}  # fmt: skip


def off() -> Any:
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


# bucket_by_length


def bucketed(strategy: Any, worker: int, folder: str) -> Any:
    """Without a seed, the workers must agree on one."""
    import tensorflow as tf

    import keras_dist_ext as kde

    rows = tf.RaggedTensor.from_row_lengths(np.ones(820, "i"), np.arange(NUM_EXAMPLES) + 1)
    batches = kde.bucket_by_length((rows, np.arange(NUM_EXAMPLES)), strategy=strategy, batch_size=6)
    return looked_at(strategy, batches)


BUCKET_CASES: dict[str, Callable[[Any, int, str], Any]] = {"bucketed without a seed": bucketed}


# How often `fit` uses each of 29 examples, in each of two epochs


def fitted(strategy: Any, worker: int, folder: str) -> Any:
    import tensorflow as tf
    from worker_runs import dataset, ids, seen

    import keras_dist_ext as kde

    lengths = np.arange(len(ids())) % 7 + 1
    rows = tf.RaggedTensor.from_row_lengths(np.ones(int(lengths.sum()), "f"), lengths)
    of_length_one = kde.bucket_by_length((rows, ids()), strategy=strategy, batch_size=8)
    return {
        "rows": seen(strategy, kde.distribute((ids(), ids()), strategy, batch_size=8)),
        "data": seen(strategy, kde.distribute(dataset(), strategy, policy="data")),
        "buckets": seen(strategy, of_length_one.map(lambda x, y: (x[:, :1], y))),
    }


FIT_CASES: dict[str, Callable[[Any, int, str], Any]] = {"fitted": fitted}
