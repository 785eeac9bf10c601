"""Distribute data to the workers and replicas of a strategy, and say how and why."""

from __future__ import annotations

import random

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import tree
from keras_dist_ext._keras.datasets import WrappedDataset, auto_shard, with_seeds
from keras_dist_ext._keras.strategies import first_replica, is_default_strategy, num_local_replicas
from keras_dist_ext.aliases import FitData, SpecNest, TensorNest
from keras_dist_ext.data import split as data
from keras_dist_ext.data.dataset_graph import DatasetGraph, read_graph
from keras_dist_ext.data.sharding_findings import findings_of
from keras_dist_ext.data.sources import DEFAULT_BATCH_SIZE, as_dataset, checked_batch_size, is_batched, kind_of
from keras_dist_ext.errors import DataError
from keras_dist_ext.findings import Finding
from keras_dist_ext.hashing import checked_seed, fold_in
from keras_dist_ext.messages import close_name, counted
from keras_dist_ext.strategy.given import given_strategy
from keras_dist_ext.strategy.workers import Workers, workers_of

__all__ = ["SharedDataset", "distribute"]

POLICIES = ("auto", "rows", "file", "data", "off")


class SharedDataset(WrappedDataset):
    """A `tf.data.Dataset` that is distributed to the replicas of a strategy; `distribute` makes it.

    Its elements are the batches that `fit`, `evaluate` and `predict` of our models take: global batches under the
    policy "rows", else the part of each that this worker reads.

    Attributes:
        strategy: that it is distributed to.
        policy: how: "rows", "file", "data" or "off".
        reason: why, in words.
        batch_size: rows of a global batch, None where that cannot be seen.
        seed: of its order, None where that is left to chance.
        findings: what would go wrong without this, or is slower than it could be.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        strategy: tf.distribute.Strategy,
        *,
        policy: str,
        reason: str,
        batch_size: int | None,
        seed: int | None,
        findings: tuple[Finding, ...],
        source: object = None,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.policy = policy
        self.reason = reason
        self.batch_size = batch_size
        self.seed = seed
        self.findings = findings
        self._source = source  # what Python functions in the graph belong to lives as long as the graph

    def __str__(self) -> str:
        return "\n".join([f"{self.policy}: {self.reason}", *map(str, self.findings)])

    def per_replica(self) -> TensorNest:
        """Return the same batches for a loop of your own: `for batch in shared.per_replica(): strategy.run(step, ...)`.

        Each replica gets the rows that it gets in `fit`, also of a batch that does not divide evenly, and none where a
        batch has fewer rows than there are replicas. They are copied to its device ahead of time. A strategy of one
        replica on a CPU gets the dataset itself: there is nothing to copy, and OneDeviceStrategy has crashed when its
        datasets were wrapped.

        Raises:
            DataError: the strategy is a ParameterServerStrategy, whose workers take turns and share no batch.
        """
        strategy = self.strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise DataError(
                "Under ParameterServerStrategy each step is one worker's, so no batch is split over replicas. Give the "
                "dataset to fit, or to Coordinator."
            )
        if strategy.num_replicas_in_sync == 1 and (
            is_default_strategy(strategy) or "CPU" in str(strategy.extended.worker_devices[0]).upper()
        ):
            return self
        num_local = num_local_replicas(strategy)
        own = self.policy != "rows"
        plainly = tf.autograph.experimental.do_not_convert
        first, num_shares = (0, num_local) if own else (first_replica(strategy), strategy.num_replicas_in_sync)

        def shares(*batch: TensorNest) -> tf.data.Dataset:
            whole = batch if isinstance(self.element_spec, tuple) else batch[0]
            rows = data.num_rows(whole)
            share = rows // num_shares if isinstance(rows, int) and rows % num_shares == 0 else None

            def of_replica(local: tf.Tensor) -> TensorNest:
                part = data.replica_rows(whole, first + tf.cast(local, tf.int32), num_shares)
                return tree.map_structure(lambda leaf: _with_rows(leaf, share), part)

            return tf.data.Dataset.range(num_local).map(plainly(of_replica))

        return strategy.distribute_datasets_from_function(lambda context: self.flat_map(plainly(shares)))


def _with_rows(leaf: tf.Tensor, rows: int | None) -> tf.Tensor:
    """Let the graph know how many rows a share has; XLA and TPUs need to."""
    if rows is not None and isinstance(leaf, tf.Tensor) and leaf.shape.rank:
        leaf.set_shape([rows, *leaf.shape[1:]])
    return leaf


def distribute(
    dataset: FitData,
    strategy: tf.distribute.Strategy | None = None,
    *,
    batch_size: int | None = None,
    per_replica_batch_size: int | None = None,
    policy: str = "auto",
    seed: int | None = None,
    shuffle: bool | None = None,
) -> SharedDataset:
    """Distribute data of any kind to the replicas of a strategy; say how and why, and what to look out for.

        train = kde.distribute((x, y), strategy, per_replica_batch_size=32, seed=1)
        print(train)                                # rows: 2 workers read the same batches, and ...
        model.fit(train)                            # a model of ours; or a loop of your own:
        for batch in train.per_replica():
            strategy.run(step, args=(batch,))

    The result is a `tf.data.Dataset` with a prefetch at its end. Policies:

    - "rows": all workers read the same batches, and each takes its examples. The batches are those that one device
      would train on, each example is used once, and any number of replicas gives the same run.
    - "file": each worker reads files of its own, so that each is read once. Batches are others than on one device.
    - "data": each worker reads everything, and keeps every W-th example, or batch, of W workers.
    - "off": the data is the worker's own as it is given.
    - "auto": "off" where the workers have split the data (by `Dataset.shard` with their index, or under
      AutoShardPolicy.OFF with batches that differ), else "rows".

    With several workers this is a collective: all must call it at the same point, with the same arguments.

    Args:
        dataset: a tf.data.Dataset; arrays, as x, (x, y) or (x, y, sample_weight), each a structure of arrays [N, ...];
            a generator or a PyDataset of batches.
        strategy: whose replicas get it; by default the one whose scope is entered.
        batch_size: examples of a global batch. Data that comes in batches of another size is batched anew; by default
            they are the global batches. Arrays have 32 by default, as in `fit`.
        per_replica_batch_size: the same, divided by the number of replicas.
        policy: see above.
        seed: makes the order repeatable: shuffles and random ops of the pipeline get one that have none, or only that
            of ``tf.random.set_seed``; maps keep the order. Each pass has an order of its own, given by how many were
            begun before. Python code in generators, PyDatasets and `py_function` is out of its reach, but for the
            order of a PyDataset's batches; so is which call of a parallel map draws which number, which is reported.
        shuffle: whether arrays, and the batches of a PyDataset, are shuffled; by default they are, as in `fit`.

    Returns:
        A `tf.data.Dataset` of batches, which has ``policy``, ``reason`` and ``findings``, and ``per_replica()``.

    Raises:
        DataError: the data cannot be distributed as asked, is in no batches, or differs between workers that should
            read the same.
        SeedError: the seed is not an integer from 0 to 2**31 - 3.
    """
    strategy = given_strategy(strategy)
    rows = _checked_rows(batch_size, per_replica_batch_size, strategy.num_replicas_in_sync)
    if not isinstance(policy, str) or policy not in POLICIES:
        hint = (close_name(policy, POLICIES) if isinstance(policy, str) else "") or "."
        raise DataError(f"There is no policy {arguments.shown(policy)}{hint} There are {', '.join(POLICIES)}.")
    shuffle = arguments.optional(arguments.flag, "shuffle", shuffle, error=DataError)
    kind = kind_of(dataset)
    given_seed = None if seed is None else checked_seed(seed)
    workers = workers_of(strategy)
    seed = given_seed
    if workers is not None and seed is None:
        seed = int(workers.broadcast([random.randrange(2**31 - 2)])[0])  # an order by chance, but the same on all
    if kind == "arrays":
        rows = rows or DEFAULT_BATCH_SIZE
    whole = as_dataset(dataset, batch_size=rows, shuffle=shuffle, seed=seed)
    graph = read_graph(whole) if kind == "tf.data" else None  # it would hold a copy of arrays
    known = kind != "tf.data" or is_batched(whole, graph)
    batched = rows is None if known is None else known  # as asked, where it is not known
    if not batched and rows is None:
        raise DataError(
            f"The dataset gives single examples ({_described(whole.element_spec)}), and no batch_size was given, so "
            "there is no batch to split. Give batch_size=, or per_replica_batch_size=."
        )
    seen = rows if kind == "arrays" else _rows_of_batch(whole, graph) if batched else None
    chosen, reason = _choose(policy, whole, graph, workers, strategy.num_replicas_in_sync)
    num_workers = 1 if workers is None else workers.num_workers
    whole_rows = rows or (seen * num_workers if seen and chosen == "off" else seen)
    _check(chosen, graph, workers, seen or rows)
    result = whole
    if seed is not None:
        worker = 0 if chosen == "rows" else _number_of(strategy)
        result = _in_order(result, graph, seed, worker, over_global=given_seed is not None)
    result = _worker_part(result, chosen, workers, _number_of(strategy), batched, seen, rows)
    return SharedDataset(
        result.prefetch(tf.data.AUTOTUNE),
        strategy,
        policy=chosen,
        reason=reason,
        batch_size=whole_rows,
        seed=seed,
        findings=findings_of(
            graph,
            whole.options(),
            chosen,
            num_workers,
            strategy.num_replicas_in_sync,
            whole_rows,
            given_seed if kind == "tf.data" else None,
        ),
        source=(dataset, whole),
    )


def _checked_rows(batch_size: int | None, per_replica: int | None, num_replicas: int) -> int | None:
    if batch_size is not None and per_replica is not None:
        raise DataError(
            f"Both batch_size={arguments.shown(batch_size)} and per_replica_batch_size={arguments.shown(per_replica)} "
            f"were given; the first is {num_replicas} times the second. Give one of them."
        )
    if per_replica is None:
        return checked_batch_size(batch_size)
    most = arguments.MOST_EXAMPLES // num_replicas
    name = "per_replica_batch_size"
    return num_replicas * arguments.integer(name, per_replica, least=1, most=most, error=DataError)


def _choose(
    policy: str, dataset: tf.data.Dataset, graph: DatasetGraph | None, workers: Workers | None, num_replicas: int
) -> tuple[str, str]:
    """Choose how data is shared, and say why."""
    if workers is None:
        if num_replicas == 1:
            return "rows", "1 worker with 1 replica, which takes whole batches"
        if policy in ("file", "data"):
            return "rows", f"1 worker reads everything, so there is nothing to share by {policy}"
        return "rows", f"1 worker, whose {counted(num_replicas, 'replica')} take examples of each batch"
    asked = "" if policy == "auto" else " (as asked)"
    count = workers.num_workers
    num_files = 0 if graph is None else graph.num_files
    if policy == "file":
        return "file", f"each of {count} workers reads its own of {counted(num_files, 'file')}{asked}"
    if policy == "data":
        return "data", f"each of {count} workers reads everything and keeps every {count}th example or batch{asked}"
    if policy == "off":
        return "off", f"the data of each of {count} workers is its own{asked}"
    if policy == "auto":
        _, is_own, _ = workers.align_data(dataset)
        if is_own:
            return "off", f"the data of {count} workers differs: each has split it by itself"
    return "rows", f"{count} workers read the same batches, those of one device, and each takes its examples{asked}"


def _check(policy: str, graph: DatasetGraph | None, workers: Workers | None, batch_size: int | None) -> None:
    """Refuse what the workers would only find out when examples are missing."""
    if workers is None:
        return
    if policy in ("file", "data") and batch_size is None:
        raise DataError(
            f'policy="{policy}": the batch size cannot be seen in the pipeline, so it cannot be divided by '
            f"{workers.num_workers} workers. Give batch_size=."
        )
    if policy == "file":
        num_files = 0 if graph is None else graph.num_files
        if num_files < workers.num_workers:
            found = "no file is read, or their names cannot be seen" if not num_files else counted(num_files, "file")
            raise DataError(
                f'policy="file": {found}, for {workers.num_workers} workers, so some would have nothing to read. Write '
                'the data into more files, or use policy="rows".'
            )
    if policy in ("rows", "data") and graph is not None:
        seeds = [str(stage.values[2:4]) for stage in graph.of_kind("Shuffle")]
        if not workers.all_equal(fold_in(0, *seeds)):
            raise DataError(
                f'policy="{policy}": the seeds of shuffle differ between workers, so each would read the data in an '
                "order of its own, and some examples would be used twice and others never. Give all workers the same "
                'seed, or let each read a share of its own (Dataset.shard(num_workers, index), policy="off").'
            )


def _rows_of_batch(dataset: tf.data.Dataset, graph: DatasetGraph | None) -> int | None:
    """The rows of a full batch, as seen in the pipeline."""
    stage = None if graph is None else graph.batch
    if stage is not None:
        return stage.batch_size
    shapes = [leaf.shape for leaf in tree.flatten(dataset.element_spec) if getattr(leaf, "shape", None) is not None]
    return shapes[0][0] if shapes and shapes[0].rank else None


def _described(spec: SpecNest) -> str:
    leaves = [leaf for leaf in tree.flatten(spec) if hasattr(leaf, "shape")]
    return ", ".join(f"{leaf.dtype.name}{leaf.shape}" for leaf in leaves[:3])


def _number_of(strategy: tf.distribute.Strategy) -> int:
    """The number of this worker."""
    return first_replica(strategy) // num_local_replicas(strategy)


def _in_order(
    dataset: tf.data.Dataset, graph: DatasetGraph | None, seed: int, worker: int, *, over_global: bool
) -> tf.data.Dataset:
    """The dataset with a seed in all that is random and has none, and maps that keep the order."""
    if graph is not None:
        map_seed = fold_in(seed, "map", worker)
        copy = type(graph.proto)()
        copy.CopyFrom(graph.proto)  # it is changed
        dataset = with_seeds(dataset, copy, fold_in(seed, "order"), map_seed, over_global=over_global)
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def _with_policy(dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, name)
    return dataset.with_options(options)


def _worker_part(
    dataset: tf.data.Dataset,
    policy: str,
    workers: Workers | None,
    worker: int,
    batched: bool,
    seen: int | None,
    rows: int | None,
) -> tf.data.Dataset:
    """Batches as this worker reads them: global ones, or its part of them.

    Args:
        dataset: batches, or examples.
        policy: one that was chosen.
        workers: or None.
        worker: the number of this one.
        batched: whether these are batches.
        seen: how many rows these batches have, if that can be seen.
        rows: how many a global batch shall have, if that was asked for.
    """
    if workers is None or policy == "rows":
        part = None if batched and rows == seen else rows
    else:
        if policy != "off":
            dataset = auto_shard(_with_policy(dataset, policy.upper()), workers.num_workers, worker)
        whole = rows if policy == "off" else rows or seen
        if whole is not None and whole < workers.num_workers:
            raise DataError(
                f"A batch of {whole} examples leaves some of {workers.num_workers} workers none. Give more."
            )
        first, last = (w * (whole or 0) // workers.num_workers for w in (worker, worker + 1))
        part = (last - first) or None
    if part is not None:
        dataset = dataset.rebatch(part) if batched else dataset.batch(part)
    if workers is None:
        return dataset
    # Stock Keras and experimental_distribute_dataset share by this; ours do as the policy says.
    return _with_policy(dataset, "DATA" if policy == "rows" else "OFF")
