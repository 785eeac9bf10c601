"""Say what of a pipeline would go wrong, or be slow, when workers and replicas share it."""

from __future__ import annotations

import tensorflow as tf

from keras_dist_ext.data.dataset_graph import DatasetGraph
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted

__all__ = ["batch_findings", "findings_of"]


def findings_of(
    graph: DatasetGraph | None,
    options: tf.data.Options,
    policy: str,
    num_workers: int,
    num_replicas: int,
    batch_size: int | None,
    seed: int | None,
) -> tuple[Finding, ...]:
    """Look at how data is about to be shared.

    Args:
        graph: of the pipeline, None where tf.data cannot write it down.
        options: of the pipeline, a `tf.data.Options`.
        policy: one of "rows", "file", "data" and "off".
        num_workers: in the cluster.
        num_replicas: over all workers.
        batch_size: rows of a global batch, or None.
        seed: as the user gave it.
    """
    found = batch_findings(batch_size, num_replicas)
    if num_workers > 1:
        found += _worker_findings(graph, options, policy, num_workers, seed)
    if seed is not None and graph is None:
        found.append(
            Finding(
                "order-not-seeded",
                "tf.data cannot write this pipeline down, so shuffles and random ops in it were not given the seed.",
                f"seed={seed}; the pipeline has a stage that cannot be serialized",
                "give each shuffle(...) and random op a seed=",
            )
        )
    racing = [] if graph is None else [stage for stage in graph.of_kind("Map") if stage.is_random and stage.is_parallel]
    if seed is not None and racing:
        found.append(
            Finding(
                "draws-not-repeatable",
                "Calls of a map that draw random numbers run in parallel, and which call draws which number is chance: "
                "the order of examples is repeatable, what is drawn for them is not.",
                f"seed={seed}; {counted(len(racing), 'map')} with num_parallel_calls and random ops",
                "draw by the example: zip with Dataset.random(seed=...), and use tf.random.stateless_* in the map",
            )
        )
    return tuple(found)


def batch_findings(batch_size: int | None, num_replicas: int) -> list[Finding]:
    """Look at how a batch divides over replicas."""
    if batch_size is None or num_replicas == 1 or batch_size % num_replicas == 0:
        return []
    shares = [(r + 1) * batch_size // num_replicas - r * batch_size // num_replicas for r in range(num_replicas)]
    better = -(-batch_size // num_replicas) * num_replicas
    if batch_size < num_replicas:
        return [
            Finding(
                "batch-smaller-than-replicas",
                "A global batch has fewer examples than there are replicas, so some replicas idle in each step.",
                f"batches of {counted(batch_size, 'example')} for {num_replicas} replicas: {_listed(shares)} examples",
                f"batch_size={better} or more",
            )
        ]
    return [
        Finding(
            "uneven-batch",
            "Replicas get different numbers of examples in each step, and all wait for the fullest.",
            f"batches of {batch_size} examples for {num_replicas} replicas: {_listed(shares)} examples",
            f"batch_size={better}, a multiple of {num_replicas}",
        )
    ]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _worker_findings(
    graph: DatasetGraph | None, options: tf.data.Options, policy: str, num_workers: int, seed: int | None
) -> list[Finding]:
    found = []
    num_files = 0 if graph is None else graph.num_files
    if policy == "rows" and num_files >= num_workers:
        found.append(
            Finding(
                "read-by-all",
                "Every worker reads and prepares all data, and uses its examples of it.",
                f"{num_files} files, {num_workers} workers",
                'distribute(..., policy="file") has each file read by one worker, if reading is what limits you; '
                "batches are then others than on one device",
            )
        )
    if options.experimental_distribute.auto_shard_policy.name == "AUTO" and num_files < num_workers:
        found.append(_of_auto(policy, num_files, num_workers))
    unseeded = [] if graph is None else [stage for stage in graph.of_kind("Shuffle") if stage.lacks_seed]
    if policy in ("rows", "data") and seed is None and unseeded:
        found.append(
            Finding(
                "shuffle-without-seed",
                "Each worker would shuffle in an order of its own, so that some examples were used by several workers "
                "and others by none. All workers were given the same seed, drawn by chance.",
                f"{counted(len(unseeded), 'shuffle')} without a seed, {num_workers} workers",
                "distribute(..., seed=1) makes the order repeatable too",
            )
        )
    if policy in ("rows", "data") and options.deterministic is False:
        found.append(
            Finding(
                "order-not-deterministic",
                "Parallel stages would give elements in another order on each worker, so that their shares overlapped. "
                "They were made to keep the order.",
                "options.deterministic is False",
                "leave options.deterministic alone",
            )
        )
    if policy == "file" and num_files % num_workers:
        more = -(-num_files // num_workers)
        found.append(
            Finding(
                "unequal-shards",
                "Some workers read more files than others, which wait for them at the end of each epoch.",
                f"{num_files} files for {num_workers} workers: up to {more} each, others {num_files // num_workers}",
                f"a number of files that {num_workers} divides, of equal size",
            )
        )
    return found


def _of_auto(policy: str, num_files: int, num_workers: int) -> Finding:
    """What AutoShardPolicy.AUTO makes of too few files (core/grappler/optimizers/data/auto_shard.cc)."""
    fix = f"nothing, with what this returns: its policy is {policy!r}"
    if num_files == 0:
        return Finding(
            "auto-falls-back",
            "TensorFlow's own experimental_distribute_dataset, under its default AutoShardPolicy.AUTO, would find no "
            "files, and have each worker prepare everything and keep its part.",
            f"no files for {num_workers} workers",
            fix,
        )
    return Finding(
        "auto-fails",
        "TensorFlow's own experimental_distribute_dataset, under its default AutoShardPolicy.AUTO, would share by file "
        "and fail on one worker, while the others wait.",
        f"{counted(num_files, 'file')} for {num_workers} workers",
        fix,
    )
