"""Plan batches of sequences: alike in length, and with equal work for every replica.

Numbers only, no data and no TensorFlow. Letters: N = examples; M = batches; n = rows of a batch; R = replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keras_dist_ext.aliases import Array
from keras_dist_ext.errors import DataError

__all__ = [
    "BatchSize",
    "choose_boundaries",
    "imbalance",
    "padding_share",
    "plan_batches",
    "share_bounds",
    "spread_evenly",
]

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """How many rows a global batch may have.

    Args:
        rows: at most so many; None leaves it to the tokens.
        tokens: rows times the longest row, at most; None leaves it to the rows.
        num_replicas: R.
    """

    rows: int | None
    tokens: int | None
    num_replicas: int

    def rows_of(self, longest: int) -> int:
        """Return the number of rows of a full batch whose longest sequence has ``longest`` tokens.

        A multiple of R where tokens decide, so that no replica waits for another's row.

        Raises:
            DataError: one such sequence is more than the token budget.
        """
        if self.tokens is None:
            assert self.rows is not None
            return self.rows
        rows = self.tokens // max(longest, 1)
        if rows == 0:
            raise DataError(
                f"A sequence of {longest} tokens is longer than the budget of a batch, tokens={self.tokens}, so it "
                f"would be left out. Give tokens={longest} or more, or cut sequences first."
            )
        if self.rows is not None and self.rows <= rows:
            return self.rows
        return rows - rows % self.num_replicas if rows > self.num_replicas else rows


def plan_batches(lengths: Ints, boundaries: Sequence[int], size: BatchSize, random: np.random.Generator) -> list[Ints]:
    """Put N examples into batches, each example into one.

    Examples of a bucket come in random order, and so do the batches; those that are not full come last. What is left
    over in buckets is put together in the order of its length. The rows of a batch are in the order of `spread_evenly`.

    Args:
        lengths: [N], in tokens.
        boundaries: the longest length of each bucket but the last, ascending.
        size: of a batch.
        random: draws the order.

    Returns:
        The places of the examples of each batch.

    Raises:
        DataError: a sequence is longer than the token budget.
    """
    lengths = np.asarray(lengths, np.int64)
    bucket_of = np.searchsorted(np.asarray(boundaries, np.int64), lengths, side="left")
    full: list[Ints] = []
    left: list[Ints] = []
    for bucket in np.unique(bucket_of):
        members = random.permutation(np.flatnonzero(bucket_of == bucket)).astype(np.int64)
        rows = size.rows_of(int(lengths[members].max()))
        num_full = len(members) // rows
        if num_full:
            batches = members[: num_full * rows].reshape(num_full, rows)
            spread = spread_evenly(lengths[batches], size.num_replicas)
            full.extend(batches[np.arange(num_full)[:, None], spread])
        left.append(members[num_full * rows :])
    order = random.permutation(len(full))
    rest = np.concatenate(left) if left else np.zeros(0, np.int64)
    rest = rest[np.argsort(lengths[rest], kind="stable")]
    return [*(full[i] for i in order), *_cut(rest, lengths, size, random)]


def _cut(rest: Ints, lengths: Ints, size: BatchSize, random: np.random.Generator) -> list[Ints]:
    """Cut examples sorted by length into batches, full ones in random order first."""
    batches: list[Ints] = []
    stop = len(rest)
    while stop > 0:  # from the longest down, so that the last batch, which is not full, is the cheapest
        rows = min(size.rows_of(int(lengths[rest[stop - 1]])), stop)
        batch = rest[stop - rows : stop]
        batches.append(batch[spread_evenly(lengths[batch][None], size.num_replicas)[0]])
        stop -= rows
    order = [*random.permutation(len(batches) - 1), len(batches) - 1] if batches else []
    return [batches[i] for i in order]


def spread_evenly(lengths: Ints, num_replicas: int) -> Ints:
    """Order the rows of batches so that the contiguous share of each replica has about equally many tokens.

    The longest rows are placed first, a round of one row a replica at a time, the longest of a round at the replica
    that has the fewest tokens so far (the LPT rule of Graham, 1969, with shares of equal size).

    Args:
        lengths: [M, n], in tokens.
        num_replicas: R.

    Returns:
        [M, n]: the places of the rows, in the order in which `data.replica_rows` cuts them.
    """
    num_batches, rows = lengths.shape
    longest_first = np.argsort(-lengths, axis=1, kind="stable")
    if num_replicas == 1 or rows <= 1:
        return np.broadcast_to(np.arange(rows), (num_batches, rows)).astype(np.int64)
    bounds = share_bounds(rows, num_replicas)
    takes = np.diff(bounds)
    tokens = np.zeros((num_batches, num_replicas), np.int64)
    placed = np.zeros((num_batches, rows), np.int64)
    batch = np.arange(num_batches)[:, None]
    place = 0
    for round_ in range(int(takes.max())):
        open_ = np.flatnonzero(takes > round_)
        given = longest_first[:, place : place + len(open_)]
        replicas = open_[np.argsort(tokens[:, open_], axis=1, kind="stable")]
        placed[batch, bounds[replicas] + round_] = given
        tokens[batch, replicas] += np.take_along_axis(lengths, given, axis=1)
        place += len(open_)
    return placed


def share_bounds(rows: int, num_replicas: int) -> Ints:
    """Return [R + 1]: where the share of each replica begins, and the last ends, as `data.replica_rows` cuts."""
    return np.arange(num_replicas + 1, dtype=np.int64) * rows // num_replicas


def padding_share(lengths: Ints, batches: Sequence[Ints]) -> float:
    """Return the share of padding in what is computed, when each batch is padded to its longest row: 0 to 1."""
    cells = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return 0.0 if cells == 0 else 1.0 - sum(int(lengths[batch].sum()) for batch in batches) / cells


def imbalance(lengths: Ints, batches: Sequence[Ints], num_replicas: int) -> float:
    """Return how much longer steps are than with tokens shared evenly: 0.1 where replicas wait for 10% more.

    The tokens of the fullest replica, summed over all batches, by those of the mean replica, less 1.
    """
    fullest = mean = 0.0
    for batch in batches:
        running = np.concatenate([[0], np.cumsum(lengths[batch])])
        shares = np.diff(running[share_bounds(len(batch), num_replicas)])
        fullest += float(shares.max())
        mean += float(shares.mean())
    return 0.0 if mean == 0 else fullest / mean - 1.0


def choose_boundaries(lengths: Ints, size: BatchSize, max_padding: float = 0.05, max_buckets: int = 64) -> list[int]:
    """Choose the fewest buckets with which at most a share ``max_padding`` of the cells is padding.

    Exact over at most 256 candidates, by dynamic programming; a bucket is counted as if all its rows were padded to its
    longest. Few buckets, because examples change their company from epoch to epoch only within a bucket: with a bucket
    for each length, batches would hardly change.

    Args:
        lengths: [N], in tokens.
        size: of a batch; there are at most so many buckets that each has two batches on average, but two where the
            longest would leave few rows to all others' batches.
        max_padding: from 0 to 1.
        max_buckets: at most.

    Returns:
        The longest length of each bucket but the last, ascending; none where one bucket does.
    """
    distinct, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
    if len(distinct) > 256:
        places = np.unique(np.searchsorted(np.cumsum(counts), np.linspace(0, len(lengths), 257)[1:], side="left"))
        candidates = distinct[np.minimum(places, len(distinct) - 1)]
    else:
        candidates = distinct
    running = np.concatenate([[0], np.cumsum(counts)])[np.searchsorted(distinct, candidates, side="right")]
    running = np.concatenate([[0], running])  # examples up to each candidate
    num = len(candidates)
    typical, fewest = (size.rows_of(int(of(lengths))) if len(lengths) else 1 for of in (np.median, np.max))
    least = 2 if 2 * fewest <= typical else 1
    limit = max(least, min(max_buckets, num, len(lengths) // (2 * typical)))
    # cells[i, j]: of a bucket with the candidates i to j
    cells = (running[None, 1:] - running[:-1, None]) * candidates[None, :]
    cells = np.where(np.arange(num)[:, None] <= np.arange(num)[None, :], cells, np.inf)
    real = float(np.sum(lengths))
    best = cells[0]
    cuts: list[Array] = []
    while len(cuts) + 1 < limit and real < (1 - max_padding) * best[-1]:
        options = np.concatenate([[0.0], best[:-1]])[:, None] + cells  # the last bucket begins at i
        options[0] = np.inf
        cuts.append(np.argmin(options, axis=0))
        best = np.min(options, axis=0)
    ends = []
    end = num - 1
    for starts in reversed(cuts):
        end = int(starts[end]) - 1
        ends.append(int(candidates[end]))
    return ends[::-1]
