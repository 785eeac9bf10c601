"""Batch sequences by their length, so that batches hold little padding and replicas equal work."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.datasets import WrappedDataset
from keras_dist_ext.aliases import FitData, TensorNest, UserFunction
from keras_dist_ext.data.bucket_plan import BatchSize, choose_boundaries, imbalance, padding_share, plan_batches
from keras_dist_ext.data.pools import Lengths, Pools
from keras_dist_ext.data.sources import checked_batch_size
from keras_dist_ext.errors import DataError
from keras_dist_ext.hashing import checked_seed, fold_in
from keras_dist_ext.messages import counted
from keras_dist_ext.strategy.given import given_strategy
from keras_dist_ext.strategy.workers import workers_of

__all__ = ["BucketReport", "BucketedDataset", "bucket_by_length"]


@dataclasses.dataclass(frozen=True)
class BucketReport:
    """What batching by length has changed, for the examples that were looked at.

    Before are batches of the same number of rows in the order of the data; after is the first pass.

    Args:
        num_examples: that were looked at.
        num_steps: before and after.
        padding: share of padding in what is computed, 0 to 1; before and after.
        imbalance: how much longer steps are than with tokens shared evenly over the replicas, 0.1 is 10%; before and
            after.
    """

    num_examples: int
    num_steps: tuple[int, int]
    padding: tuple[float, float]
    imbalance: tuple[float, float]

    def __str__(self) -> str:
        return (
            f"{counted(self.num_examples, 'example')}: padding {self.padding[0]:.1%} -> {self.padding[1]:.1%}, "
            f"imbalance {self.imbalance[0]:.1%} -> {self.imbalance[1]:.1%}, "
            f"steps {self.num_steps[0]} -> {self.num_steps[1]}"
        )


class BucketedDataset(WrappedDataset):
    """A `tf.data.Dataset` of batches of sequences of similar length; `bucket_by_length` makes it.

    Attributes:
        boundaries: the longest length of each bucket but the last.
        report: of what it was made from.
        seed: of its order.
    """

    def __init__(
        self, pools: Pools, boundaries: Sequence[int], size: BatchSize, seed: int, report: BucketReport
    ) -> None:
        self.boundaries = tuple(boundaries)
        self.report = report
        self.seed = seed
        self._size = size
        self._epoch = 0
        plainly = tf.autograph.experimental.do_not_convert
        number = plainly(lambda _: tf.numpy_function(self._begin_pass, [], tf.int64))
        batches = tf.data.Dataset.range(1).map(number).flat_map(plainly(lambda epoch: pools.batches(epoch, self._plan)))
        length = pools.num_batches(size)
        if length is not None:
            batches = batches.apply(tf.data.experimental.assert_cardinality(length))
        super().__init__(batches.prefetch(tf.data.AUTOTUNE))

    @property
    def epoch(self) -> int:
        """The number of the next pass: batches depend on it and on the seed alone. Set it to continue from an epoch."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch = arguments.integer("epoch", number, least=0, error=DataError)

    def _begin_pass(self) -> np.int64:
        epoch: np.int64 = np.int64(self._epoch)
        self._epoch += 1
        return epoch

    def _plan(self, lengths: Lengths, epoch: np.int64, pool: np.int64) -> tuple[Lengths, Lengths]:
        """The places of all batches' rows, and where each batch begins and ends."""
        draws = np.random.default_rng(fold_in(self.seed, "buckets", int(epoch), int(pool)))
        batches = plan_batches(lengths, self.boundaries, self._size, draws)
        splits = np.cumsum([0, *map(len, batches)], dtype=np.int64)
        return np.concatenate(batches or [np.zeros(0, np.int64)]), splits


def bucket_by_length(
    dataset: FitData,
    boundaries: Sequence[int] | str = "auto",
    strategy: tf.distribute.Strategy | None = None,
    *,
    batch_size: int | None = None,
    tokens: int | None = None,
    length: UserFunction | None = None,
    pool: int | None = None,
    sample: int = 100_000,
    max_padding: float = 0.05,
    padding_value: TensorNest = 0,
    sequences: Sequence[str] | None = None,
    seed: int | None = None,
) -> BucketedDataset:
    """Batch sequences with others of similar length, and split each batch so that replicas get equal work.

        batches = kde.bucket_by_length((ragged, labels), strategy=strategy, batch_size=64, seed=1)
        print(batches.report)  # 20000 examples: padding 72.4% -> 5.6%, imbalance 6.3% -> 0.0%, steps 313 -> 313
        model.fit(batches)

    Every example comes exactly once in a pass, also those that do not fill a batch of their bucket: they are put
    together in the order of their length, and the batch that is not full comes last. Batches are padded to their
    longest example. Which examples meet within a bucket, and the order of the batches, are others in each pass, and
    follow from the seed and the number of the pass.

    The examples are taken up in pools, and sorted within a pool. Arrays are one pool; other data are read ``pool``
    examples at a time, each pool ending with at most one batch that is not full.

    Args:
        dataset: structures of features, (features, labels) or (features, labels, weights), each [N, length, ...]:
            RaggedTensors or lists of arrays; arrays that are padded at the end; a tf.data.Dataset of examples or of
            batches, ragged or padded; a PyDataset or a generator of padded batches.
        boundaries: the longest length of each bucket but the last, ascending; "auto" chooses the fewest buckets that
            keep padding below ``max_padding``.
        strategy: its replicas share each batch; by default the one whose scope is entered. With several workers all
            must call this at the same point, with the same data.
        batch_size: examples of a global batch.
        tokens: examples times the length of the longest one in a global batch, at most; the number of examples of full
            batches is a multiple of the replicas. With ``batch_size``, whichever allows less.
        length: given an example's features, labels and weights, returns its length; by default that of the longest
            sequence among its features.
        pool: how many examples to sort at once; 16384 by default. They are held in memory.
        sample: how many examples are read now, for "auto" and for the report.
        max_padding: see ``boundaries``.
        padding_value: of features, a scalar for all or one for each leaf; also what padded arrays are padded with.
            Strings are padded with "", labels and weights with 0.
        sequences: which leaves of padded data are sequences, such as ``["0/tokens", "1"]``; by default those of the
            features. Ragged data shows it.
        seed: of the order; by default drawn by chance.

    Returns:
        A `tf.data.Dataset` of global batches for `fit`, whose ``report`` says what became of padding and imbalance.

    Raises:
        DataError: neither batch_size nor tokens is given, boundaries do not ascend or are labels, a sequence is longer
            than tokens, or it cannot be told which leaves are sequences.
        SeedError: the seed is not an integer from 0 to 2**31 - 3.
    """
    if _are_labels(boundaries, dataset):
        raise DataError(
            f"boundaries is a {type(boundaries).__name__} that looks like the labels of the examples. Pass features "
            "and labels together, `kde.bucket_by_length((x, y), ...)`, or a dataset of both, "
            "`tf.data.Dataset.zip(x, y)`; boundaries are the longest lengths of buckets."
        )
    strategy = given_strategy(strategy)
    sample = arguments.integer("sample", sample, least=1, error=DataError)
    most = arguments.MOST_EXAMPLES
    pool = arguments.optional(arguments.integer, "pool", pool, least=1, most=most, error=DataError)
    max_padding = arguments.number("max_padding", max_padding, least=0.0, most=1.0, wanted="a share", error=DataError)
    arguments.optional(arguments.function, "length", length, error=DataError)
    if sequences is not None:
        sequences = arguments.instances("sequences", sequences, str, wanted="paths of leaves", error=DataError)
        if not sequences:
            raise DataError("sequences is empty: name one leaf at least, or leave it out.")
    size = _checked_size(batch_size, tokens, strategy.num_replicas_in_sync)
    fixed = _checked_boundaries(boundaries)
    if seed is not None:
        seed = checked_seed(seed)
    workers = workers_of(strategy)
    if seed is None:
        drawn = random.randrange(2**31 - 2)
        seed = drawn if workers is None else int(workers.broadcast([drawn])[0])
    pools = Pools(dataset, pool, length=length, padding_value=padding_value, sequences=sequences, seed=seed)
    lengths = pools.lengths(sample)
    if not len(lengths):
        raise DataError("The dataset has no example: there is nothing to batch.")
    chosen = choose_boundaries(lengths, size, max_padding) if fixed is None else fixed
    report = _reported(lengths, chosen, size, seed)
    return BucketedDataset(pools, chosen, size, seed, report)


def _are_labels(boundaries: Sequence[int] | str, dataset: FitData) -> bool:
    """Whether what was given as boundaries is a dataset or tensor, or has a value for each example."""
    if isinstance(boundaries, tf.data.Dataset | tf.RaggedTensor | tf.Tensor):
        return True
    ndim = getattr(boundaries, "ndim", 1)
    if isinstance(boundaries, str) or ndim != 1:
        return bool(ndim > 1)
    if isinstance(dataset, tuple | Mapping | tf.data.Dataset | keras.utils.PyDataset):
        return False  # their length is that of a structure or of a pass, not of the examples
    try:
        num_examples = int(dataset.nrows()) if isinstance(dataset, tf.RaggedTensor) else len(dataset)
        return num_examples == len(boundaries) > 2
    except TypeError:  # of unknown length
        return False


def _checked_size(batch_size: int | None, tokens: int | None, num_replicas: int) -> BatchSize:
    if batch_size is None and tokens is None:
        raise DataError(
            "Neither batch_size nor tokens was given, so there is no saying how large a batch is. Give batch_size= "
            "(examples of a global batch), or tokens= (examples times the longest sequence)."
        )
    most = arguments.MOST_EXAMPLES
    tokens = arguments.optional(arguments.integer, "tokens", tokens, least=1, most=most, error=DataError)
    return BatchSize(checked_batch_size(batch_size), tokens, num_replicas)


def _checked_boundaries(boundaries: Sequence[int] | str) -> list[int] | None:
    if isinstance(boundaries, str):
        if boundaries != "auto":
            raise DataError(f'Invalid boundaries={boundaries!r}; must be "auto", or lengths such as [16, 32, 64].')
        return None
    if isinstance(boundaries, bytes) or not isinstance(boundaries, Sequence | np.ndarray):
        arguments.refuse("boundaries", boundaries, '"auto", or a list of lengths such as [16, 32, 64]', DataError)
    given = [arguments.integer(f"boundaries[{i}]", b, least=1, error=DataError) for i, b in enumerate(boundaries)]
    if any(b <= a for a, b in itertools.pairwise(given)):
        raise DataError(f"boundaries={given} do not ascend. Sort them, and leave out what comes twice.")
    return given


def _reported(lengths: Lengths, boundaries: list[int], size: BatchSize, seed: int) -> BucketReport:
    after = plan_batches(lengths, boundaries, size, np.random.default_rng(fold_in(seed, "buckets", 0, 0)))
    rows = size.rows or -(-len(lengths) // len(after))
    places = np.arange(len(lengths), dtype=np.int64)
    before = [places[start : start + rows] for start in range(0, len(places), rows)]
    return BucketReport(
        len(lengths),
        (len(before), len(after)),
        (padding_share(lengths, before), padding_share(lengths, after)),
        (imbalance(lengths, before, size.num_replicas), imbalance(lengths, after, size.num_replicas)),
    )
