"""Look into a tf.data pipeline: what it is made of, what each stage costs, and what to change."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext.aliases import FitData
from keras_dist_ext.data.dataset_graph import read_graph
from keras_dist_ext.data.order_findings import mixing_findings
from keras_dist_ext.data.pipeline_findings import findings_of
from keras_dist_ext.data.sources import as_dataset, checked_batch_size, kind_of
from keras_dist_ext.data.stage_times import Times, measure
from keras_dist_ext.errors import DataError
from keras_dist_ext.findings import Finding, worst_first
from keras_dist_ext.strategy.given import given_strategy

__all__ = ["Inspection", "inspect", "mixing_of"]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What was found in a pipeline.

    Args:
        stages: as they were written, from the source to the end, such as ("TensorSlice", "Shuffle", "Batch").
        batch_size: rows of a full batch, None where it cannot be seen.
        num_examples: that go into batches in a pass, None where only a pass would tell.
        times: what pulling batches took, stage by stage.
        findings: what to change; those that cost most come first.
    """

    stages: tuple[str, ...]
    batch_size: int | None
    num_examples: int | None
    times: Times
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        times = self.times
        lines = [" > ".join(self.stages) or "(tf.data cannot write this pipeline down)"]
        if times.batch_seconds is not None:
            lines.append(
                f"{times.batch_seconds * 1e3:.3g} ms a batch over {times.num_batches}; "
                f"the first took {times.first_seconds * 1e3:.3g} ms"
            )
        width = max((len(stage.name) + stage.depth for stage in times.stages), default=0)
        for stage in times.stages:
            name = f"{' ' * stage.depth}{stage.name}"
            beside = "  in threads of its own" if stage.is_parallel else ""
            lines.append(f"  {name:<{width}}  {stage.seconds * 1e3:9.3f} ms a batch{beside}")
        return "\n".join([*lines, *map(str, self.findings)])


def inspect(
    dataset: FitData,
    strategy: tf.distribute.Strategy | None = None,
    *,
    num_batches: int = 50,
    seconds: float = 2.0,
    batch_size: int | None = None,
) -> Inspection:
    """Say what slows a pipeline down, or mixes less than it seems to; from its graph, and from pulling batches.

        print(kde.inspect(train))

    What counts is what tf.data does in the end. By default (seen on TensorFlow 2.21) it adds a prefetch by itself, and
    runs maps without side effects in parallel, so these are only reported where it does not. Costs are measured by
    reading some batches, which is felt where reading has effects: a generator is used up. Before TensorFlow 2.18,
    which does not tell what stages cost, and where autotune is off, the graph and its options are judged alone.

    Args:
        dataset: a tf.data.Dataset, arrays, a generator or a PyDataset.
        strategy: whose replicas share each batch; by default the one whose scope is entered.
        num_batches: to pull after the first, at most.
        seconds: to spend on it, at most; a batch that is under way is waited for.
        batch_size: of arrays; 32 by default, as in `fit`.

    Returns:
        The stages with what each costs, and findings: print it.

    Raises:
        DataError: there is no batch.
    """
    strategy = given_strategy(strategy)
    num_batches = arguments.integer("num_batches", num_batches, least=0, error=DataError)
    seconds = arguments.number("seconds", seconds, least=0.0, most=arguments.LONGEST_SECONDS, error=DataError)
    batch_size = checked_batch_size(batch_size)
    kind = kind_of(dataset)
    whole = as_dataset(dataset, batch_size=batch_size)
    graph = read_graph(whole)
    times = measure(whole, num_batches, seconds)
    if times is None:
        raise DataError("The dataset has no batch: there is nothing to look into.")
    batch = None if graph is None else graph.batch
    num_examples = None if graph is None else graph.num_examples
    found = findings_of(graph, whole, times, kind, strategy.num_replicas_in_sync, num_examples)
    names = () if graph is None else tuple(stage.kind for stage in reversed(list(graph)) if stage.kind != "Options")
    return Inspection(
        names, None if batch is None else batch.batch_size, num_examples, times, tuple(worst_first(found))
    )


def mixing_of(data: FitData) -> tuple[Finding, ...]:
    """Say where a tf.data.Dataset mixes less than it seems: from its graph, of which nothing is run.

    Args:
        data: what `fit` takes. Of all but datasets nothing is said.
    """
    graph = read_graph(data) if isinstance(data, tf.data.Dataset) else None
    return () if graph is None else tuple(mixing_findings(graph))
