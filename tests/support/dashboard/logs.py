"""Write logs with known numbers as `keras_dist_ext.monitoring.writers` does: TensorBoard's writer, no TensorFlow."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from keras_dist_ext.monitoring.dashboard import metadata as names

START = 1_763_700_000.0  # when the logs say that they begin
SECONDS = 0.5  # from one step to the next

__all__ = [
    "START",
    "SECONDS",
    "Run",
    "MANIFEST",
    "FINDINGS",
    "example_plan",
    "example_series",
    "write_experiment",
    "write_large_experiment",
]


class Run:
    """One TensorBoard run; use it as a context, so that its file is complete when the context ends."""

    def __init__(self, log_dir: Path, name: str, *, as_tensors: bool = True) -> None:
        self._writer = EventFileWriter(str(log_dir / name), max_queue_size=10_000)
        self._as_tensors = as_tensors

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def scalars(self, step: int, values: Mapping[str, float], wall: float | None = None) -> None:
        """Write numbers of a step, as tf.summary of TensorFlow 2 does, or as simple values."""
        summary = Summary()
        for tag, value in values.items():
            if self._as_tensors:
                tensor = tensor_util.make_tensor_proto(np.float32(value))
                summary.value.add(tag=tag, tensor=tensor, metadata=_SCALAR)
            else:
                summary.value.add(tag=tag, simple_value=value)
        self._add(step, summary, wall)

    def text(self, tag: str, value: Any, step: int = 0, wall: float | None = None) -> None:
        """Write JSON, or a text as it is, for our own plugin."""
        content = value if isinstance(value, str) else json.dumps(value)
        tensor = TensorProto(dtype=DT_STRING, string_val=[content.encode()], tensor_shape=TensorShapeProto())
        self._add(step, Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=_TEXT)]), wall)

    def flush(self) -> None:
        """Put what was written so far into the file."""
        self._writer.flush()

    def _add(self, step: int, summary: Summary, wall: float | None) -> None:
        wall = START + step * SECONDS if wall is None else wall
        self._writer.add_event(Event(wall_time=wall, step=step, summary=summary))


def _metadata(plugin_name: str, data_class: int) -> SummaryMetadata:
    metadata = SummaryMetadata(data_class=data_class)
    metadata.plugin_data.plugin_name = plugin_name
    return metadata


_SCALAR = _metadata(names.SCALARS_PLUGIN_NAME, DATA_CLASS_SCALAR)
_TEXT = _metadata(names.PLUGIN_NAME, DATA_CLASS_TENSOR)

MANIFEST: dict[str, Any] = {
    "version": 1,
    "strategy": {
        "name": "MirroredStrategy",
        "reason": "4 GPUs are visible, and there is no TF_CONFIG",
        "num_replicas": 4,
        "num_workers": 1,
    },
    "devices": [f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(4)],
    "seeds": {"global": 42, "replicas": [42, 43, 44, 45]},
    "versions": {"keras_dist_ext": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1", "python": "3.11.7"},
    "batch_size": 256,
    "host": "train-01",
}
FINDINGS: list[dict[str, Any]] = [
    {
        "step": 60,
        "kind": "straggler",
        "code": "slow-replica",
        "what": "Replica 2 computes 1.4 times as long as the fastest.",
        "evidence": "compute 42 ms against 30 ms, over 60 steps",
        "fix": "Look at what else runs on GPU:2.",
        "seconds": 12.5,
    },
    {
        "step": 80,
        "kind": "divergence",
        "code": "replicas-differ",
        "what": "dense/kernel differs between replica 0 and replica 3.",
        "evidence": "hash 9f3c against 11ab",
        "fix": "Use `BatchNormalization(synchronized=True)`.",
    },
]

Series = dict[str, dict[int, float]]  # tag -> step -> value


def example_series(num_replicas: int, steps: Sequence[int], *, seed: int = 0, slow: int | None = None) -> list[Series]:
    """Return what replicas of a plausible training record, as float32 holds it; replica `slow` computes longer."""
    rng = np.random.default_rng(seed)
    series: list[Series] = []
    for replica in range(num_replicas):
        tags: Series = {tag: {} for tag in names.REPLICA_TAGS}
        for step in steps:
            compute = 0.030 * (1.4 if replica == slow else 1.0) + rng.gamma(2.0, 0.0008)
            wait = 0.002 + rng.gamma(2.0, 0.0005)
            sync = max(0.001, 0.030 * (1.4 if slow is not None else 1.0) + 0.008 - compute - wait)
            loss = 2.0 * math.exp(-step / 60) + 0.25 + 0.02 * replica / num_replicas + rng.normal(0, 0.02)
            values = {
                names.LOSS: loss,
                names.EXAMPLES_PER_SECOND: 64 / (compute + wait + sync),
                names.STEP_SECONDS: compute + wait + sync,
                names.COMPUTE_SECONDS: compute,
                names.INPUT_SECONDS: wait,
                names.SYNC_SECONDS: sync,
                names.EXAMPLES: 64.0,
                names.GRADIENT_NORM: 1.5 * math.exp(-step / 80) + 0.3 + rng.normal(0, 0.03),
                names.SCORE: 0.7 if replica == slow else 0.97,
            }
            for tag, value in values.items():
                tags[tag][step] = float(np.float32(value))
        series.append(tags)
    return series


def example_plan(words: str = "compute") -> dict[str, Any]:
    """What `kde.plan` would have said of a batch of 256; `words` stand wherever text does."""

    def point(num_replicas: int, global_batch: int, rate: float) -> dict[str, Any]:
        def of(value: float) -> dict[str, float]:
            return {"low": value * 0.9, "value": value, "high": value * 1.1}

        return {
            "replicas": num_replicas,
            "global_batch": global_batch,
            "batch_per_replica": global_batch // num_replicas,
            "step_seconds": of(global_batch / rate),
            "examples_per_second": of(rate),
            "speedup": of(rate / 100.0),
            "efficiency": of(rate / 100.0 / num_replicas),
            "memory_bytes": None,
            "bound": words,
        }

    def curve(batches: Sequence[int], rates: Sequence[float]) -> dict[str, Any]:
        points = [point(*given) for given in zip((1, 2, 4), batches, rates, strict=True)]
        what_ifs = [{"code": words, "change": words, "factor": 1.5}]
        return {"points": points, "pays": 2, "stops_at": 4, "advice": words, "what_ifs": what_ifs}

    return {
        "version": 1,
        "headline": words,
        "curves": {
            "fixed global batch": curve((256, 256, 256), (100.0, 180.0, 250.0)),
            "fixed batch a replica": curve((256, 512, 1024), (100.0, 190.0, 370.0)),
        },
        "assumptions": [words],
    }


def write_experiment(
    log_dir: Path,
    name: str,
    series: Sequence[Series],
    *,
    with_all: bool = True,
    manifest: Any = MANIFEST,
    findings: Any = None,
    later_findings: Any = None,
    as_tensors: bool = True,
    start: float = START,
    seconds: float = SECONDS,
) -> None:
    """Write an experiment: a run a replica, and the run `all` with exact statistics over them."""

    def wall(step: int) -> float:
        return start + step * seconds

    for replica, tags in enumerate(series):
        with Run(log_dir, names.replica_run(name, replica), as_tensors=as_tensors) as run:
            for step in sorted({step for by_step in tags.values() for step in by_step}):
                run.scalars(step, {tag: by_step[step] for tag, by_step in tags.items() if step in by_step}, wall(step))
    if not with_all:
        return
    with Run(log_dir, names.all_run(name), as_tensors=as_tensors) as run:
        if manifest is not None:
            run.text(names.MANIFEST_TAG, manifest, 0, wall(0))
        for step, values in sorted(_over_replicas(series).items()):
            run.scalars(step, values, wall(step))
        if findings is not None:
            run.text(names.FINDINGS_TAG, findings, 0, wall(1))
        if later_findings is not None:
            run.text(names.FINDINGS_TAG, later_findings, 5, wall(5))


def _over_replicas(series: Sequence[Series]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for tag in names.REPLICA_TAGS:
        for step in sorted({step for tags in series for step in tags.get(tag, {})}):
            held = np.array([tags[tag][step] for tags in series if step in tags.get(tag, {})])
            values = found.setdefault(step, {})
            with np.errstate(invalid="ignore"):
                for statistic in names.STATISTICS:
                    values[names.over_replicas(tag, statistic)] = float(getattr(np, statistic)(held))
            if tag == names.LOSS:
                values[names.ALL_LOSS] = float(held.mean())
            if tag == names.EXAMPLES_PER_SECOND:
                values[names.ALL_EXAMPLES_PER_SECOND] = float(held.sum())
                values[names.SCALING_EFFICIENCY] = float(held.sum() / (held.size * held.max()))
            if tag == names.INPUT_SECONDS:
                values[names.INPUT_SHARE] = float(held.mean() / 0.04)
    return found


def write_large_experiment(log_dir: Path, num_replicas: int, num_steps: int, peaks: Mapping[int, int]) -> None:
    """Write four tags a replica, a point a step, as fast as TensorFlow writes records.

    Args:
        log_dir: Where.
        num_replicas: Runs.
        num_steps: Points of each series.
        peaks: By replica, a step at which its loss is 50.
    """
    import tensorflow as tf

    tags = (names.LOSS, names.EXAMPLES_PER_SECOND, names.STEP_SECONDS, names.INPUT_SECONDS)
    steps = np.arange(num_steps)
    for replica in range(num_replicas):
        rng = np.random.default_rng(replica)
        folder = log_dir / names.replica_run("", replica)
        folder.mkdir(parents=True)
        loss = np.exp(-steps / 4000) + rng.normal(0, 0.05, num_steps)
        if replica in peaks:
            loss[peaks[replica]] = 50.0
        columns = [loss, *(rng.normal(mean, mean / 20, num_steps) for mean in (1000, 0.1, 0.01))]
        event = Event(file_version="brain.Event:2", wall_time=START)
        with tf.io.TFRecordWriter(str(folder / f"events.out.tfevents.{START:.0f}.host.{replica}")) as writer:
            writer.write(event.SerializeToString())
            event = Event()
            values = [event.summary.value.add(tag=tag) for tag in tags]
            for step, row in enumerate(np.stack(columns, axis=1).tolist()):
                event.step, event.wall_time = step, START + step * 0.1
                for value, number in zip(values, row, strict=True):
                    value.simple_value = number
                writer.write(event.SerializeToString())
