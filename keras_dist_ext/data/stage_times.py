"""Measure what each stage of a tf.data pipeline costs, by pulling batches from it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.data.iterators import release_iterator

__all__ = ["StageTime", "Times", "measure"]

NOTICEABLE_SECONDS = 5e-4  # a batch: about what the fastest steps of a small model take on a CPU


@dataclasses.dataclass(frozen=True)
class StageTime:
    """One stage as tf.data has run it, after its own optimisations.

    Args:
        name: as tf.data calls it, such as "ParallelMapV2"; stages of the same name below an interleave are one.
        num_elements: that it gave.
        seconds: of work, for each batch that came out of the pipeline. Work in threads may overlap.
        is_parallel: whether it works in threads of its own, beside the rest.
        most_threads: how many of them there may be; None where nothing limits them.
        depth: its distance from the end of the pipeline.
    """

    name: str
    num_elements: int
    seconds: float
    is_parallel: bool
    most_threads: int | None
    depth: int

    @property
    def kind(self) -> str:
        """Its name without the version."""
        return re.sub(r"V\d+$", "", self.name)

    @property
    def is_sequential(self) -> bool:
        """Whether it does one thing at a time."""
        return not self.is_parallel or self.most_threads == 1


@dataclasses.dataclass(frozen=True)
class Times:
    """What pulling batches took.

    Args:
        num_batches: that were pulled after the first.
        first_seconds: until the first was there: opening files, filling shuffle buffers.
        batch_seconds: for each of the others, as a training loop would wait that does nothing else; None if there was
            no second one.
        stages: from the end to the sources; empty before TensorFlow 2.18, which does not tell.
        cpu_share: how many processors this process used meanwhile; much less than 1 where functions wait.
    """

    num_batches: int
    first_seconds: float
    batch_seconds: float | None
    stages: tuple[StageTime, ...]
    cpu_share: float | None = None

    def cost(self, *kinds: str) -> float:
        """Seconds a batch of the stages of these kinds."""
        return sum(stage.seconds for stage in self.stages if stage.kind in kinds)

    @property
    def work(self) -> float:
        """Seconds a batch of all stages."""
        return sum(stage.seconds for stage in self.stages if stage.kind != "Prefetch")

    def is_noticeable(self, cost: float) -> bool:
        """Whether stages that cost so much a batch are worth a word; where that is not known, whether the whole is."""
        if not self.stages:
            return (self.batch_seconds or 0.0) >= NOTICEABLE_SECONDS
        return cost >= NOTICEABLE_SECONDS and cost >= 0.2 * self.work

    def share(self, cost: float) -> str:
        """Say what part of all work a cost is."""
        return f", {cost * 1e3:.3g} of {self.work * 1e3:.3g} ms of work a batch" if self.stages else ""

    def lost(self, cost: float) -> float | None:
        """Seconds that a cost a batch makes of what was measured."""
        return cost * self.num_batches if self.stages else None


def measure(dataset: tf.data.Dataset, num_batches: int, seconds: float) -> Times | None:
    """Pull up to ``num_batches`` batches after the first, for at most about so many seconds; None if there is no first.

    Stage times are those of tf.data's own model of the pipeline, from which it tunes itself
    (tensorflow/core/framework/model.proto): the time spent in each stage without those that feed it.
    """
    begin = time.perf_counter()
    iterator = iter(dataset)
    if next(iterator, None) is None:
        return None
    first_seconds = time.perf_counter() - begin
    pulled, spent, look_at = 0, 0.0, 1
    model = _model(iterator)
    cpu_before = time.process_time()
    while pulled < num_batches and spent < seconds:
        begin = time.perf_counter()
        if next(iterator, None) is None:
            break
        spent += time.perf_counter() - begin
        pulled += 1
        if pulled >= look_at:
            look_at = max(look_at + 1, look_at * 5 // 4)
            now = _model(iterator)
            if now is not None and model is not None and len(now.nodes) >= len(model.nodes):
                model = now  # stages that have come to their end are not in it any more
    cpu_share = (time.process_time() - cpu_before) / spent if spent else None
    held = [iterator]
    del iterator
    release_iterator(held)
    stages = () if model is None else tuple(_stages(model))
    return Times(pulled, first_seconds, spent / pulled if pulled else None, stages, cpu_share)


class _Parameter(Protocol):
    name: str
    tunable: bool
    value: float
    max: float


class _Node(Protocol):
    """A stage, as model.proto has it."""

    name: str
    node_class: int
    inputs: Sequence[int]
    num_elements: int
    processing_time: int  # nanoseconds
    ratio: float
    parameters: Sequence[_Parameter]


class _Model(Protocol):
    nodes: Mapping[int, _Node]
    output: int


def _model(iterator: Iterator[TensorNest]) -> _Model | None:
    """What tf.data notes about the stages, None where it does not."""
    read = getattr(tf.data.experimental, "get_model_proto", None)
    try:
        return None if read is None else read(iterator)
    except tf.errors.NotFoundError:  # autotune is off
        return None


_INTERLEAVE = (1, 2)  # INTERLEAVE_MANY, ASYNC_INTERLEAVE_MANY of model.proto
_ASYNC = (2, 4, 6)  # ASYNC_INTERLEAVE_MANY, ASYNC_KNOWN_RATIO, ASYNC_UNKNOWN_RATIO


def _stages(model: _Model) -> Iterator[StageTime]:
    nodes = dict(model.nodes)
    found: dict[tuple[int, str], StageTime] = {}
    pending = [(place, 0, 1.0) for place in nodes[model.output].inputs]
    while pending:
        place, depth, per_batch = pending.pop(0)  # per_batch: elements of this stage that make a batch
        if place not in nodes:
            continue
        node = nodes[place]
        cost = node.processing_time / 1e9 / node.num_elements * per_batch if node.num_elements else 0.0
        before = found.get((depth, node.name))
        found[depth, node.name] = StageTime(
            node.name,
            node.num_elements + (before.num_elements if before else 0),
            cost + (before.seconds if before else 0.0),
            node.node_class in _ASYNC,
            next((int(p.max if p.tunable else p.value) for p in node.parameters if p.name == "parallelism"), None),
            depth,
        )
        pending += [(given, depth + 1, per_batch * ratio) for given, ratio in _inputs(node, nodes)]
    yield from sorted(found.values(), key=lambda stage: stage.depth)


def _inputs(node: _Node, nodes: Mapping[int, _Node]) -> Iterator[tuple[int, float]]:
    """The stages that feed one, and how many elements of each make one of its own."""
    given = [place for place in node.inputs if place in nodes]
    if not node.num_elements:
        return
    counts = [nodes[place].num_elements for place in given]
    if node.node_class in _INTERLEAVE and len(given) > 1:
        # The first is the dataset whose elements become datasets; of these, the ones that have ended are forgotten.
        yield given[0], counts[0] / node.num_elements
        yield from (
            (place, count / max(1, sum(counts[1:]))) for place, count in zip(given[1:], counts[1:], strict=True)
        )
        return
    for place, count in zip(given, counts, strict=True):
        # A shard notes its ratio the other way round: 1 / num_shards (kernels/data/shard_dataset_op.cc).
        ratio = 1 / node.ratio if node.name == "Shard" and 0 < node.ratio < 1 else node.ratio
        yield place, ratio or count / node.num_elements
