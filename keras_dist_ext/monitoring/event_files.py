"""Write records as TensorBoard's events: a run for each replica, and one for all, as in ``dashboard.metadata``.

Numbers are simple values, which TensorBoard's Scalars tab, both of its loaders and its Python readers support.
"""

from __future__ import annotations

import functools
import html
import io
import itertools
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from keras_dist_ext import arguments
from keras_dist_ext.aliases import Array, JsonObject
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.monitoring.append_file import (
    AppendFile,
    RecordsLost,
    check_folder,
    checked_flush_seconds,
    make_folder,
)
from keras_dist_ext.monitoring.dashboard import metadata as names
from keras_dist_ext.monitoring.dashboard.wire import finite
from keras_dist_ext.monitoring.writers import Floats, Run, Writer, checked_experiment
from keras_dist_ext.step.stats import Kind, ReplicaStats

__all__ = ["EventWriter", "overall_values", "replica_values"]

SUMMARY_TAG = "run"  # a description for TensorBoard's Text tab
FINDINGS_TEXT_TAG = "findings"  # likewise
PLAN_TEXT_TAG = "plan"  # likewise


class EventWriter(Writer):
    """Writes TensorBoard's event files, which are valid at any time, even if the process is killed.

    Each worker writes the runs of its own replicas, ``<log_dir>/<experiment>/replica_<id>``, and the chief the run
    ``all``; records of evaluation go to ``<experiment>/validation``. No directory has two writers, so TensorBoard's
    fast loader reads all.

    Args:
        log_dir: a path, or a URL that TensorFlow can write, such as ``gs://bucket/logs``.
        flush_seconds: how long records may wait before they are in the files.

    Raises:
        MonitorError: an argument is invalid.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, flush_seconds: float = 2.0) -> None:
        self._log_dir = arguments.path("log_dir", log_dir, error=MonitorError)
        self._flush_seconds = checked_flush_seconds(flush_seconds)
        self._runs: dict[Kind, Run] = {}
        self._files: dict[str, AppendFile] = {}

    def check(self, experiment: str) -> None:
        """Create the directory.

        Raises:
            MonitorError: files cannot be written there.
        """
        folder = f"{self._log_dir}/{experiment}" if experiment else self._log_dir
        try:
            check_folder(folder)
        except Exception as error:
            raise MonitorError(
                f"TensorBoard's events cannot be written to {folder} ({error}). Give a log_dir that is writable."
            ) from error

    def begin(self, run: Run) -> None:
        """Write the manifest, which the dashboard shows at its top, and a description for the Text tab."""
        self._runs[run.kind] = run
        if run.is_chief:
            texts = [
                _text(names.MANIFEST_TAG, json.dumps(finite(run.manifest)), _OUR_TEXT),
                _text(SUMMARY_TAG, _markdown(run), create_summary_metadata("", "")),
            ]
            self._add({names.all_run(run.experiment): texts}, run.step, run.wall_time)

    def write(self, stats: ReplicaStats, scores: Floats | None) -> None:
        """See ``Writer.write``."""
        run = self._runs[stats.kind]
        values = replica_values(stats, scores)
        summaries = {
            names.replica_run(run.experiment, replica): _simple_values(values[replica]) for replica in run.replicas
        }
        if run.is_chief:
            summaries[names.all_run(run.experiment)] = _simple_values(overall_values(stats, values))
        self._add(summaries, stats.step, stats.wall_time)

    def write_findings(self, findings: Sequence[FindingRecord], *, step: int, wall_time: float) -> None:
        """See ``Writer.write_findings``."""
        run = self._runs["train"]
        if run.is_chief:
            texts = [
                _text(names.FINDINGS_TAG, json.dumps(finite(list(findings))), _OUR_TEXT),
                _text(FINDINGS_TEXT_TAG, _findings_markdown(findings), create_summary_metadata("", "")),
            ]
            self._add({names.all_run(run.experiment): texts}, step, wall_time)

    def write_plan(self, plan: JsonObject, text: str, *, experiment: str) -> None:
        """Write a plan as an experiment, for the Replicas tab, and its text for the Text tab.

        Args:
            plan: as ``Plan.to_dict`` returns it.
            text: for people.
            experiment: a name for a folder in the log directory.

        Raises:
            MonitorError: files cannot be written there, or the experiment's name is invalid.
        """
        self.check(checked_experiment(experiment))
        texts = [
            _text(names.PLAN_TAG, json.dumps(finite(plan)), _OUR_TEXT),
            _text(PLAN_TEXT_TAG, "  \n".join(map(_cell, text.splitlines())), create_summary_metadata("", "")),
        ]
        try:
            self._add({names.all_run(experiment): texts}, 0, time.time())
            self.close()
        except RecordsLost as error:
            raise MonitorError(f"The plan cannot be written to {self._log_dir} ({error.__cause__}).") from error

    def flush(self) -> None:
        """See ``Writer.flush``."""
        _each(file.flush for file in self._files.values())

    def close(self) -> None:
        """See ``Writer.close``."""
        self.flush()

    def _add(self, summaries: Mapping[str, list[Summary.Value]], step: int, wall_time: float) -> None:
        """Add an event to each of some runs, with its values."""
        calls = []
        for name, values in summaries.items():
            event = Event(wall_time=wall_time, step=step, summary=Summary(value=values))
            calls.append(lambda name=name, event=event: self._file(name, wall_time).add(_record(event)))
        _each(calls)

    def _file(self, run: str, wall_time: float) -> AppendFile:
        if run not in self._files:
            folder = f"{self._log_dir}/{run}"
            try:
                make_folder(folder)
            except Exception as error:
                raise RecordsLost(1) from error
            version = _record(Event(wall_time=wall_time, file_version="brain.Event:2"))
            self._files[run] = AppendFile(f"{folder}/{_file_name()}", header=version, flush_seconds=self._flush_seconds)
        return self._files[run]


_numbers = itertools.count()


def _file_name() -> str:
    """Return a name that sorts after those of earlier files: TensorBoard reads the files of a run in order."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return f"events.out.tfevents.{int(time.time()):010d}.{host}.{os.getpid()}.{next(_numbers):04d}"


def _each(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls, and only then report how many records were lost."""
    lost: list[RecordsLost] = []
    for call in calls:
        try:
            call()
        except RecordsLost as error:
            lost.append(error)
    if lost:
        raise RecordsLost(sum(error.num_records for error in lost)) from lost[0].__cause__


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def replica_values(stats: ReplicaStats, scores: Floats | None) -> list[dict[str, float]]:
    """Return the scalars of each replica by tag: no loss where it had no examples, no score where it is unknown."""
    rate, total = stats.examples_per_second, stats.step_seconds
    return [
        {
            tag: float(value)
            for tag, value in {
                names.LOSS: stats.loss[i] if stats.examples[i] else None,
                names.EXAMPLES_PER_SECOND: rate[i],
                names.STEP_SECONDS: total[i],
                names.COMPUTE_SECONDS: stats.compute_seconds[i],
                names.INPUT_SECONDS: stats.input_seconds[i],
                names.SYNC_SECONDS: stats.sync_seconds[i],
                names.EXAMPLES: stats.examples[i],
                names.GRADIENT_NORM: stats.gradient_norm[i]
                if stats.gradient_norm is not None and stats.examples[i]
                else None,
                names.SCORE: scores[i] if scores is not None and not math.isnan(scores[i]) else None,
            }.items()
            if value is not None
        }
        for i in range(stats.num_replicas)
    ]


def overall_values(stats: ReplicaStats, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the scalars of all replicas together; statistics are over those that have a value.

    Args:
        stats: of the interval.
        values: what ``replica_values`` returns for it.
    """
    found = {
        names.ALL_EXAMPLES_PER_SECOND: float(stats.examples_per_second.sum()),
        names.SCALING_EFFICIENCY: stats.scaling_efficiency,
        names.INPUT_SHARE: stats.input_share,
    }
    found = {tag: value for tag, value in found.items() if not math.isnan(value)}
    if stats.examples.any():
        found[names.ALL_LOSS] = stats.mean_loss
    tags = [tag for tag in names.REPLICA_TAGS if any(tag in of_replica for of_replica in values)]
    held = np.array([[of_replica.get(tag, 0.0) for of_replica in values] for tag in tags])
    has = np.array([[tag in of_replica for of_replica in values] for tag in tags])
    with np.errstate(invalid="ignore"):  # of infinite losses
        for statistic, function in _STATISTICS.items():
            for tag, value in zip(tags, function(held, axis=1, where=has).tolist(), strict=True):
                found[names.over_replicas(tag, statistic)] = value
    return found


_STATISTICS: dict[str, Callable[..., Array]] = {
    "min": functools.partial(np.min, initial=np.inf),
    "mean": np.mean,
    "max": functools.partial(np.max, initial=-np.inf),
    "std": np.std,
}


def _simple_values(values: Mapping[str, float]) -> list[Summary.Value]:
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]


def _text(tag: str, text: str, metadata: SummaryMetadata) -> Summary.Value:
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=TensorShapeProto())
    metadata.data_class = DATA_CLASS_TENSOR
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


_OUR_TEXT = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=names.PLUGIN_NAME))


def _markdown(run: Run) -> str:
    """Return the manifest and the details as a table."""
    manifest = run.manifest
    strategy = manifest.get("strategy", {})
    rows = {
        "strategy": strategy.get("name"),
        "why": strategy.get("reason"),
        "replicas": strategy.get("num_replicas"),
        "workers": strategy.get("num_workers"),
        "devices": ", ".join(manifest.get("devices", [])),
        "global batch size": manifest.get("batch_size"),
        "seed": (manifest.get("seeds") or {}).get("global"),
        "host": manifest.get("host"),
        **manifest.get("versions", {}),
        **run.details,
    }
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items() if value not in (None, "")]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _findings_markdown(findings: Sequence[FindingRecord]) -> str:
    """Return findings as a table, in their order."""
    if not findings:
        return "no findings"
    rows = [
        [
            f.get("code"),
            f"{f['seconds']:.3g} s" if "seconds" in f else "",
            *(f.get(n) for n in ("what", "evidence", "fix")),
        ]
        for f in findings
    ]
    lines = ["| " + " | ".join(_cell("" if value is None else value) for value in row) + " |" for row in rows]
    return "\n".join(["| finding | lost | what | evidence | fix |", "| --- | --- | --- | --- | --- |", *lines])


def _cell(value: object) -> str:
    """Return a value as Markdown that shows it literally."""
    text = re.sub(r"([\\`*_\[\]])", r"\\\1", html.escape(str(value), quote=False))
    return text.replace("|", "&#124;").replace("\n", " ")
