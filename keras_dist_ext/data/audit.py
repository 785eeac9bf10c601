"""Look at which examples each worker and replica gets in an epoch, by really reading the data.

Letters: S = steps; R = replicas in sync, over all workers; L = replicas of this worker; W = workers.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import tree
from keras_dist_ext._keras.datasets import local_datasets, with_seeds
from keras_dist_ext._keras.py_datasets import preserve_py_dataset_order, seed_py_datasets
from keras_dist_ext._keras.strategies import first_replica, num_local_replicas
from keras_dist_ext.aliases import Array, FitData, SpecNest, TensorNest, UserFunction
from keras_dist_ext.data import split as data
from keras_dist_ext.data.audit_findings import findings_of
from keras_dist_ext.data.dataset_graph import read_graph
from keras_dist_ext.data.distribute import SharedDataset
from keras_dist_ext.data.sources import as_dataset, checked_batch_size, kind_of
from keras_dist_ext.errors import DataError
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted
from keras_dist_ext.strategy.given import given_strategy
from keras_dist_ext.strategy.workers import Workers, workers_of

__all__ = ["Audit", "audit"]

Ids = npt.NDArray[np.int64]
_MOST_MISSING = 10_000_000  # ids that a report can list
STOCK_POLICIES = ("AUTO", "FILE", "DATA", "OFF")


@dataclasses.dataclass(frozen=True)
class Audit:
    """Which examples were given to whom in one epoch; the same on all workers.

    Args:
        ids: for each step, the ids of the examples of each replica: S lists of R arrays.
        num_workers: W; the replicas of worker w are w R / W up to (w + 1) R / W.
        missing: ids that replicas got less often than they should, which is mostly never.
        repeated: how often each id was given that was given more often than it should be.
        errors: of each worker that could not read its part, what TensorFlow said.
        findings: what is wrong, if anything.
    """

    ids: tuple[tuple[Ids, ...], ...]
    num_workers: int
    missing: Ids
    repeated: dict[int, int]
    errors: dict[int, str]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.ids)

    @property
    def rows(self) -> Ids:
        """How many examples each replica got in each step: [S, R]."""
        return np.array([[len(of_replica) for of_replica in step] for step in self.ids], np.int64)

    def of_replica(self, replica: int) -> Ids:
        """The ids that a replica got, in order."""
        most = len(self.ids[0]) - 1 if self.ids else arguments.MOST
        replica = arguments.integer("replica", replica, least=0, most=most, error=DataError)
        return _joined(step[replica] for step in self.ids)

    def of_worker(self, worker: int) -> Ids:
        """The ids that a worker's replicas got, step by step."""
        worker = arguments.integer("worker", worker, least=0, most=self.num_workers - 1, error=DataError)
        num_replicas = len(self.ids[0]) if self.ids else 0
        first, last = (w * num_replicas // self.num_workers for w in (worker, worker + 1))
        return _joined(of_replica for step in self.ids for of_replica in step[first:last])

    def raise_if_bad(self) -> None:
        """Do nothing where nothing was found.

        Raises:
            DataError: with all findings.
        """
        if self.findings:
            raise DataError(str(self))

    def __str__(self) -> str:
        rows = self.rows.sum(axis=0) if self.ids else np.zeros(0, np.int64)
        head = (
            f"{counted(self.num_steps, 'step')}, {counted(int(rows.sum()), 'example')}; of each replica: "
            f"{', '.join(map(str, rows.tolist()))}"
        )
        return "\n".join([head, *map(str, self.findings)])


def audit(
    dataset: FitData,
    strategy: tf.distribute.Strategy | None = None,
    *,
    ids: UserFunction | None = None,
    expected: int | Sequence[int] | None = None,
    stock_policy: str | None = None,
    batch_size: int | None = None,
    max_steps: int | None = None,
) -> Audit:
    """Read an epoch as `fit` would, and say which examples each worker and replica gets.

        kde.audit(train, strategy, ids=lambda x, y: x["id"]).raise_if_bad()

    Reports examples that none gets or several get, workers whose shares are unequal, and batches that do not split.
    With several workers this is a collective: all must call it at the same point. No worker waits for another while it
    reads, so that one that cannot read its part is reported, and does not hang the others.

    Args:
        dataset: what would be given to `fit` of our models: a tf.data.Dataset, arrays, a generator (which is used up)
            or a PyDataset; or what `distribute` has made.
        strategy: to distribute to; by default the one whose scope is entered, or that of `distribute`.
        ids: given features, labels and weights of a batch, returns the ids of its examples: integers [n]. By default
            an example is known by a hash of its content, so that equal examples are told apart by their number only.
        expected: the ids that should be given once each, a number n for 0 to n - 1. By default those in the batches
            that are split, for ``stock_policy`` those that a plain pass over the data gives; where each worker reads
            data of its own, those of all workers together.
        stock_policy: "AUTO", "FILE", "DATA" or "OFF": look at TensorFlow's own
            `strategy.experimental_distribute_dataset` under this AutoShardPolicy, and not at our way.
        batch_size: of arrays; 32 by default, as in `fit`.
        max_steps: how many steps to look at; by default all of an epoch.

    Returns:
        Who got what, and what is wrong with it: print it, or call ``raise_if_bad()``.

    Raises:
        DataError: the data is endless and max_steps was not given, or its ids are not one integer an example.
    """
    if strategy is None and isinstance(dataset, SharedDataset):
        strategy = dataset.strategy
    strategy = given_strategy(strategy)
    arguments.optional(arguments.function, "ids", ids, error=DataError)
    if stock_policy is not None and (not isinstance(stock_policy, str) or stock_policy.upper() not in STOCK_POLICIES):
        shown = arguments.shown(stock_policy)
        raise DataError(f"There is no AutoShardPolicy {shown}. There are {', '.join(STOCK_POLICIES)}.")
    batch_size = checked_batch_size(batch_size)
    max_steps = arguments.optional(arguments.integer, "max_steps", max_steps, least=1, error=DataError)
    asked = _asked_for(expected)
    whole = as_dataset(dataset, batch_size=batch_size)
    if max_steps is None and int(whole.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise DataError("The data is endless, so an epoch has no end. Give max_steps=.")
    workers = workers_of(strategy)
    name = ids or _content
    num_local = num_local_replicas(strategy)
    steps: list[list[Ids]] = []
    wholes: list[Ids] = []
    error = ""
    is_own = False
    plain_pass = whole
    try:
        with preserve_py_dataset_order():
            if stock_policy is None:
                read, is_own = _as_ours(whole, strategy, workers, name, wholes)
            else:
                read_pass, plain_pass = _passes_alike(whole, workers, has_ids=ids is not None)
                read = _as_stock(read_pass, strategy, stock_policy.upper(), name)
            steps.extend(itertools.islice(read, max_steps))
    except (tf.errors.OpError, ValueError) as failure:
        if isinstance(failure, DataError):
            raise
        error = _first_line(failure)
    plain: Ids | None = None
    if expected is None and max_steps is None and (not is_own or workers is None):
        if stock_policy is None:
            plain = _joined(wholes)
        elif kind_of(dataset) != "generator":
            plain = _joined(_named(name, batch, whole.element_spec) for batch in plain_pass)
    seen = _of_all_workers(steps, num_local, workers)
    errors = _errors_of_all(error, workers)
    given = _joined(part for step in seen for part in step)
    wanted = _expected(asked, plain, given, is_own=is_own)
    counts = collections.Counter(given.tolist())
    missing = [] if max_steps is not None else [i for i, count in wanted.items() if counts[i] < count]
    repeated = {i: count for i, count in counts.items() if count > max(wanted[i], 1)}
    ids_of_steps = tuple(tuple(step) for step in seen)
    missing_ids = np.array(sorted(missing), np.int64)
    num_workers = 1 if workers is None else workers.num_workers
    shares_batches = stock_policy is None and not is_own
    findings = findings_of(ids_of_steps, 1 if shares_batches else num_workers, missing_ids, repeated, errors)
    return Audit(ids_of_steps, num_workers, missing_ids, repeated, errors, tuple(findings))


def _first_line(failure: Exception) -> str:
    """What TensorFlow says, without the names of its functions and ops."""
    text = re.sub(r"\{\{.*?\}\}|\[Op:.*|goo\.gle/\S+", "", str(failure).strip().splitlines()[0])
    return text.strip(" :")


def _as_ours(
    dataset: tf.data.Dataset,
    strategy: tf.distribute.Strategy,
    workers: Workers | None,
    name: UserFunction,
    wholes: list[Ids],
) -> tuple[Iterator[list[Ids]], bool]:
    """The ids of this worker's replicas in each step of our models, and whether the rows are the worker's own.

    The ids of the batches that are split go to ``wholes``: another pass may well have others, as after `shuffle` those
    that `drop_remainder` leaves out, or draw other numbers.
    """
    is_own = False
    spec = dataset.element_spec
    if workers is not None:
        dataset, is_own, seed = workers.align_data(dataset)
        seed_py_datasets(seed)
    num_local = num_local_replicas(strategy)
    first, num_shares = (0, num_local) if is_own else (first_replica(strategy), strategy.num_replicas_in_sync)

    def read() -> Iterator[list[Ids]]:
        for batch in dataset:
            rows = _named(name, batch, spec)
            wholes.append(rows)
            yield [np.asarray(data.replica_rows(tf.constant(rows), first + i, num_shares)) for i in range(num_local)]

    return read(), is_own


def _passes_alike(
    dataset: tf.data.Dataset, workers: Workers | None, *, has_ids: bool
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """The dataset for two passes, which draw the same where they would draw by chance.

    Of several workers each draws for itself, as it would in training: what comes of that is to be seen.
    """
    if workers is None:
        seed = random.randrange(2**31)
        graphs = [read_graph(dataset) for _ in range(2)]
        one, other = (
            dataset if graph is None else with_seeds(dataset, graph.proto, seed, map_seed=seed, same_passes=True)
            for graph in graphs
        )
        return one, other
    graph = None if has_ids else read_graph(dataset)
    if any(stage.is_random for stage in graph or ()):
        raise DataError(
            "The pipeline draws random numbers, so an example holds something else each time, and cannot be known by "
            "its content. Give ids=, such as ids=lambda x, y: x['id']."
        )
    return dataset, dataset


def _as_stock(
    dataset: tf.data.Dataset, strategy: tf.distribute.Strategy, policy: str, name: UserFunction
) -> Iterator[list[Ids]]:
    """The same of TensorFlow's own way: a worker's replicas take what it reads in turn."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))
    num_local = num_local_replicas(strategy)
    parts = [distributed] if isinstance(distributed, tf.data.Dataset) else local_datasets(distributed)
    spec = parts[0].element_spec
    elements = (_named(name, element, spec) for part in parts for element in part)
    while step := list(itertools.islice(elements, num_local)):
        yield step + [np.zeros(0, np.int64)] * (num_local - len(step))


def _named(name: UserFunction, batch: TensorNest, spec: SpecNest) -> Ids:
    """The ids of the rows of a batch."""
    batch = data.without_optionals(batch)
    named = np.asarray(name(*batch) if isinstance(spec, tuple) else name(batch))
    rows = int(data.num_rows(batch))
    if named.size != rows or not np.issubdtype(named.dtype, np.integer):
        raise DataError(
            f"ids gave {named.dtype} {list(named.shape)} for a batch of {rows} examples. It must give one integer "
            "for each example, such as ids=lambda x, y: x['id']."
        )
    return named.astype(np.int64).ravel()


def _content(*batch: TensorNest) -> Ids:
    """Name each row by a hash of what it holds."""
    leaves = [leaf for leaf in tree.flatten(batch) if leaf is not None]
    rows = [hashlib.blake2b(digest_size=8) for _ in range(int(data.num_rows(batch)))]
    for leaf in leaves:
        if isinstance(leaf, tf.SparseTensor):
            leaf = tf.sparse.to_dense(leaf)
        for row, digest in enumerate(rows):
            value = leaf[row]
            value = value.to_list() if isinstance(value, tf.RaggedTensor) else np.asarray(value)
            is_plain = isinstance(value, np.ndarray) and value.dtype != object
            digest.update(value.tobytes() if is_plain else repr(value).encode())
    return np.array([int.from_bytes(digest.digest(), "little") >> 12 for digest in rows], np.int64)


def _joined(parts: Iterable[Ids]) -> Ids:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _asked_for(expected: object) -> int | list[int] | None:
    """What was given as ``expected``, in Python's numbers."""
    if expected is None:
        return None
    if isinstance(expected, range) and expected.start == 0 and expected.step == 1:
        return max(expected.stop, 0)  # of any length, so not to be gone through here
    if (
        (isinstance(expected, range) and not expected[_MOST_MISSING:])
        or isinstance(expected, list | tuple | set)
        or (isinstance(expected, np.ndarray) and expected.ndim == 1)
    ):
        return [arguments.integer("expected", one, least=-arguments.MOST, error=DataError) for one in expected]
    wanted = "a list of ids, or a number"
    return arguments.integer("expected", expected, least=0, wanted=wanted, or_none=", or None", error=DataError)


def _expected(asked: int | list[int] | None, plain: Ids | None, seen: Ids, *, is_own: bool) -> collections.Counter[int]:
    """How often each id should be given."""
    if isinstance(asked, int):
        if asked - len(seen) > _MOST_MISSING:
            raise DataError(
                f"expected={asked}, but the data gave {counted(len(seen), 'example')}, so too many are missing to be "
                "listed. Give the number of examples of an epoch."
            )
        return collections.Counter(range(asked))
    if asked is not None:
        return collections.Counter(asked)
    if plain is not None:
        return collections.Counter(plain.tolist())
    return collections.Counter(set(seen.tolist()) if is_own else seen.tolist())


def _of_all_workers(steps: list[list[Ids]], num_local: int, workers: Workers | None) -> list[list[Ids]]:
    """The steps of all workers put together: S lists of R arrays; a worker that has ended early gives nothing."""
    if workers is None:
        return steps
    rows = np.array([[len(part) for part in step] for step in steps], np.float64).reshape(-1, num_local)
    sizes = _gathered(rows.ravel(), workers)
    own = _joined(part for step in steps for part in step)
    values = [
        (high.astype(np.int64) << 32) + low.astype(np.int64)
        for high, low in zip(_gathered(own >> 32, workers), _gathered(own & 0xFFFFFFFF, workers), strict=True)
    ]
    num_steps = max(len(size) for size in sizes) // num_local
    seen: list[list[Ids]] = [[] for _ in range(num_steps)]
    for size, value in zip(sizes, values, strict=True):
        parts = np.split(value, np.cumsum(size.astype(np.int64))[:-1]) if len(size) else []
        for step in range(num_steps):
            mine = parts[step * num_local : (step + 1) * num_local]
            seen[step].extend([*mine, *[np.zeros(0, np.int64)] * (num_local - len(mine))])
    return seen


def _errors_of_all(error: str, workers: Workers | None) -> dict[int, str]:
    if workers is None:
        return {0: error} if error else {}
    texts = _gathered(np.frombuffer(error.encode(), np.uint8).astype(np.float64), workers)
    read = (bytes(text.astype(np.uint8)).decode() for text in texts)
    return {worker: text for worker, text in enumerate(read) if text}


def _gathered(values: Array, workers: Workers) -> list[npt.NDArray[np.float64]]:
    """One vector of each worker, of any length. Sums of doubles are exact up to 2**53."""
    worker = first_replica(workers.strategy) // num_local_replicas(workers.strategy)
    lengths = np.zeros(workers.num_workers)
    lengths[worker] = len(values)
    lengths = workers.sum(lengths.tolist())
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    whole = np.zeros(int(bounds[-1]))
    whole[bounds[worker] : bounds[worker + 1]] = values
    whole = workers.sum(whole.tolist()) if len(whole) else whole
    return [whole[start:stop] for start, stop in itertools.pairwise(bounds)]
