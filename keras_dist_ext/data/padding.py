"""Read some batches of sequences again, and say how much is padding: as they come, and with rows alike in length.

Letters: B = batches; n = rows of a batch; T = its length; G = groups of leaves that are equally long in each batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext.aliases import Array, SpecNest, TensorNest
from keras_dist_ext.data.bucket_plan import BatchSize, choose_boundaries
from keras_dist_ext.data.dataset_graph import MAPS, read_graph

__all__ = ["SequenceBatches", "read_sequences", "shapes_of"]

_LEAST_LENGTH = 16  # of integers that are taken for a sequence where all batches are equally long
_MOST_PADDING = 0.25  # in a bucket, of few
_TO_TENSOR = "map(... to_tensor())"
_LONGEST_BYTES = 2**28  # that are held

Lengths = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class SequenceBatches:
    """Some batches, as they come and as rows of similar length would be batched together.

    Args:
        as_they_come: batches of arrays, B of them.
        by_length: the same rows, sorted by their length, as many to a batch, cut behind the longest of each.
        spec: of both, in which lengths and the number of rows are open.
        batch_size: rows of the first batch.
        is_padded_by: the stage that pads, such as "padded_batch(64)" or "map(... to_tensor())"; "" where rows are
            padded before they are batched.
        is_padded_before: whether padding comes first, as `pad_sequences` has it by default.
        padding: its share of what both hold, 0 to 1.
        longest, mean: lengths of rows, in the first group.
        boundaries: the longest lengths of few buckets but the last; none where there are several groups.
    """

    as_they_come: Sequence[TensorNest]
    by_length: Sequence[TensorNest]
    spec: SpecNest
    batch_size: int
    is_padded_by: str
    is_padded_before: bool
    padding: tuple[float, float]
    longest: int
    mean: float
    boundaries: tuple[int, ...]

    def dataset(self, batches: Sequence[TensorNest]) -> tf.data.Dataset:
        """Return some of the batches as a dataset in memory."""
        return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=self.spec).cache()


def read_sequences(dataset: tf.data.Dataset, *, most_batches: int, seconds: float) -> SequenceBatches | None:
    """Read some batches, and measure the lengths of their rows; None where they hold no sequences that are padded.

    Sequences are the features whose second dimension is open, and integers [n, T].

    Args:
        dataset: of batches.
        most_batches: to read.
        seconds: to spend on reading, at most; a batch that is under way is waited for.
    """
    places = _features(dataset.element_spec)
    if not places:
        return None
    batches = _read(dataset, most_batches, seconds)
    if not batches:
        return None
    stage, values = _padded_by(dataset)
    leaves = [tree.flatten(batch) for batch in batches]
    groups = _groups(leaves, places)
    lengths, before = _measured(leaves, groups, values)  # [rows, G]
    widths = np.array([[len(batch[0]), *(batch[group[0]].shape[1] for group in groups)] for batch in leaves])
    held = int((widths[:, :1] * widths[:, 1:]).sum())
    rows = len(leaves[0][0])
    order = np.argsort(lengths.sum(axis=1), kind="stable")
    specs = tree.flatten(dataset.element_spec)
    members = [_members(leaves, specs, group) for group in groups]
    sorted_rows = list(_regrouped(leaves, members, lengths, order, rows, before=before))
    kept = sum(
        len(places_of) * int(lengths[places_of, g].max())
        for places_of in np.split(order, range(rows, len(order), rows))
        for g in range(len(groups))
    )
    used = int(lengths.sum())
    main = lengths[:, 0]
    boundaries = choose_boundaries(main, BatchSize(rows, None, 1), _MOST_PADDING) if len(groups) == 1 else []
    boundaries = [] if stage == _TO_TENSOR else boundaries  # buckets of tf.data take examples, not batches
    open_places = {place for places_of in members for place in places_of}
    return SequenceBatches(
        batches,
        [tree.pack_sequence_as(batches[0], batch) for batch in sorted_rows],
        tree.pack_sequence_as(
            dataset.element_spec, [_opened(leaf, place in open_places) for place, leaf in enumerate(specs)]
        ),
        rows,
        stage,
        before,
        (1 - used / max(1, held), 1 - used / max(1, kept)),
        int(main.max()),
        float(main.mean()),
        tuple(int(b) for b in boundaries),
    )


def shapes_of(dataset: tf.data.Dataset, *, most_batches: int, seconds: float) -> list[tuple[tuple[int, ...], ...]]:
    """Return the shapes of some batches, leaf by leaf; none where all dimensions but the rows are fixed."""
    specs = [leaf for leaf in tree.flatten(dataset.element_spec) if isinstance(leaf, tf.TensorSpec)]
    if all(leaf.shape.is_fully_defined() for leaf in specs):
        return []
    found, begin = [], time.perf_counter()
    for batch in dataset.take(most_batches):
        found.append(tuple(tuple(leaf.shape) for leaf in tree.flatten(batch) if isinstance(leaf, tf.Tensor)))
        if time.perf_counter() - begin > seconds:
            break
    return found


def _features(spec: SpecNest) -> list[int]:
    """The places of the features that are sequences, among all leaves."""
    leaves = tree.flatten(spec)
    if not all(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank for leaf in leaves):
        return []
    num_features = len(tree.flatten(spec[0])) if isinstance(spec, tuple) else len(leaves)
    found = []
    for place, leaf in enumerate(leaves[:num_features]):
        is_open = leaf.shape.rank >= 2 and leaf.shape[1] is None and leaf.dtype != tf.string
        is_long = leaf.shape.rank == 2 and leaf.dtype.is_integer and (leaf.shape[1] or 0) >= _LEAST_LENGTH
        if is_open or is_long:
            found.append(place)
    return found


def _read(dataset: tf.data.Dataset, most_batches: int, seconds: float) -> list[TensorNest]:
    found: list[TensorNest] = []
    begin, size = time.perf_counter(), 0
    for batch in dataset.take(most_batches).as_numpy_iterator():
        found.append(batch)
        size += sum(leaf.nbytes for leaf in tree.flatten(batch))
        if time.perf_counter() - begin > seconds or size > _LONGEST_BYTES:
            break
    return found


def _padded_by(dataset: tf.data.Dataset) -> tuple[str, list[object]]:
    """The stage that pads, and with what, leaf by leaf."""
    graph = None
    if any(leaf.shape.rank >= 2 and leaf.shape[1] is None for leaf in tree.flatten(dataset.element_spec)):
        graph = read_graph(dataset)
    if graph is not None and any("RaggedTensorToTensor" in stage.function_ops for stage in graph.of_kind(*MAPS)):
        return _TO_TENSOR, []
    batch = None if graph is None else graph.batch
    if batch is None or batch.kind != "PaddedBatch" or batch.batch_size is None:
        return "", []
    num_leaves = (len(batch.values) - 3) // 2  # dataset, size, shapes, values, remainder (padded_batch_op.py)
    return f"padded_batch({batch.batch_size})", list(batch.values[2 + num_leaves : 2 + 2 * num_leaves])


def _groups(leaves: Sequence[Sequence[Array]], places: Sequence[int]) -> list[list[int]]:
    """Features that are equally long in each batch belong together."""
    found: dict[tuple[int, ...], list[int]] = {}
    for place in places:
        found.setdefault(tuple(batch[place].shape[1] for batch in leaves), []).append(place)
    return list(found.values())


def _members(leaves: Sequence[Sequence[Array]], specs: Sequence[tf.TensorSpec], group: Sequence[int]) -> list[int]:
    """The leaves that are as long as a group of features, labels and weights included."""
    widths = [batch[group[0]].shape[1] for batch in leaves]
    return [
        place
        for place, spec in enumerate(specs)
        if spec.shape.rank >= 2
        and spec.shape[1] == specs[group[0]].shape[1]
        and [batch[place].shape[1] for batch in leaves] == widths
    ]


def _measured(
    leaves: Sequence[Sequence[Array]], groups: Sequence[Sequence[int]], values: Sequence[object]
) -> tuple[Lengths, bool]:
    """How long each row is in each group, [rows, G], and whether what pads it comes first."""
    sides = []
    for from_end in (True, False):
        columns = []
        for group in groups:
            by_leaf = []
            for place in group:
                value = values[place] if place < len(values) and values[place] is not None else 0
                by_leaf.append(np.concatenate([_lengths(batch[place], value, from_end) for batch in leaves]))
            columns.append(np.max(by_leaf, axis=0))
        sides.append(np.maximum(np.stack(columns, axis=1), 1))
    is_first = bool(sides[1].sum() < sides[0].sum())
    return sides[is_first], is_first


def _lengths(rows: Array, value: object, from_end: bool) -> Lengths:
    """[n] of [n, T, ...]: how long each is without what it is padded with.

    >>> _lengths(np.array([[1, 0, 2, 0], [0, 0, 0, 0]]), 0, True).tolist()
    [3, 0]
    >>> _lengths(np.array([[0, 0, 2, 0], [3, 0, 1, 2]]), 0, False).tolist()
    [2, 4]
    """
    is_held = (rows != value).reshape(*rows.shape[:2], -1).any(axis=2)
    is_held = is_held[:, ::-1] if from_end else is_held
    return np.where(is_held.any(axis=1), rows.shape[1] - is_held.argmax(axis=1), 0).astype(np.int64)


def _regrouped(
    leaves: Sequence[Sequence[Array]],
    members: Sequence[Sequence[int]],
    lengths: Lengths,
    order: Lengths,
    num_rows: int,
    *,
    before: bool,
) -> Iterator[list[Array]]:
    """Batches of rows in an order, cut to the longest of each."""
    splits = np.cumsum([0, *(len(batch[0]) for batch in leaves)])
    group_of = {place: g for g, places in enumerate(members) for place in places}
    for places in np.split(order, range(num_rows, len(order), num_rows)):
        made = []
        for place in range(len(leaves[0])):
            rows = []
            longest = int(lengths[places, group_of[place]].max()) if place in group_of else 0
            for row in places:
                batch = int(np.searchsorted(splits, row, side="right")) - 1
                given = leaves[batch][place][row - splits[batch]]
                rows.append(_cut(given, longest, before=before) if place in group_of else given)
            made.append(np.stack(rows))
        yield made


def _cut(row: Array, length: int, *, before: bool) -> Array:
    """Return the part of a row that has so many places; what a batch of shorter rows lacks is filled with zeros."""
    cut = row[max(0, len(row) - length) :] if before else row[:length]
    missing = [(0, 0)] * row.ndim
    missing[0] = (length - len(cut), 0) if before else (0, length - len(cut))
    return np.pad(cut, missing)


def _opened(leaf: tf.TensorSpec, is_sequence: bool) -> tf.TensorSpec:
    return tf.TensorSpec([None, *([None] if is_sequence else leaf.shape[1:2]), *leaf.shape[2:]], leaf.dtype)
