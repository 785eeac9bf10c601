"""Write records as lines of JSON, one per interval, and replay them into other writers.

Each line is an object with "version" 1 and a "type":

    run        kind, experiment, manifest, details, step, wall_time
    record     the fields of stats.ReplicaStats and "scores"; lists have an entry per replica, by global id
    findings   findings (all so far), step, wall_time

A missing number is null; infinities are "Infinity" and "-Infinity". Lines are only appended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from keras_dist_ext import arguments
from keras_dist_ext.aliases import JsonObject, JsonValue
from keras_dist_ext.errors import DataError, MonitorError
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.messages import counted
from keras_dist_ext.monitoring.append_file import AppendFile, check_folder, checked_flush_seconds, is_remote
from keras_dist_ext.monitoring.writers import Floats, Run, Writer
from keras_dist_ext.step.stats import ReplicaStats

__all__ = ["JsonLinesWriter", "replay"]

_VERSION = 1


class JsonLinesWriter(Writer):
    """Appends a line per interval to a file; of several workers, only the chief does.

    Args:
        path: the file; its folder is created.
        flush_seconds: how long lines may wait before they are in the file.

    Raises:
        MonitorError: an argument is invalid.
    """

    def __init__(self, path: str | os.PathLike[str], *, flush_seconds: float = 2.0) -> None:
        given = arguments.path("path", path, error=MonitorError)
        self._file = AppendFile(given, flush_seconds=checked_flush_seconds(flush_seconds))
        self._is_chief = True
        self._is_ready = False

    def check(self, experiment: str) -> None:
        """Create the folder.

        Raises:
            MonitorError: the file cannot be written there, or one exists that holds something else.
        """
        path = self._file.path
        if _holds_something_else(path):
            raise MonitorError(
                f"{path} exists, and its first line is no record: JsonLinesWriter would append to a file that is not "
                "its own. Give it a path of a new file, or of one that it has written."
            )
        try:
            if os.path.isdir(path):
                raise IsADirectoryError(f"{path} is a folder")
            check_folder(os.path.dirname(path) or ".")
        except Exception as error:
            raise MonitorError(
                f"Records cannot be written to {path} ({error}). Give JsonLinesWriter a path that is writable."
            ) from error

    def begin(self, run: Run) -> None:
        """See ``Writer.begin``."""
        self._is_chief = run.is_chief
        self._add(
            "run",
            kind=run.kind,
            experiment=run.experiment,
            manifest=run.manifest,
            details=dict(run.details),
            step=run.step,
            wall_time=run.wall_time,
        )

    def write(self, stats: ReplicaStats, scores: Floats | None) -> None:
        """See ``Writer.write``."""
        fields = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
        self._add("record", **fields, scores=scores)

    def write_findings(self, findings: Sequence[FindingRecord], *, step: int, wall_time: float) -> None:
        """See ``Writer.write_findings``."""
        self._add("findings", findings=list(findings), step=step, wall_time=wall_time)

    def flush(self) -> None:
        """See ``Writer.flush``."""
        self._file.flush()

    def close(self) -> None:
        """See ``Writer.close``."""
        self._file.flush()

    def _add(self, type_: str, **fields: object) -> None:
        if not self._is_chief:
            return
        line = json.dumps(_plain({"version": _VERSION, "type": type_, **fields}), allow_nan=False)
        if not self._is_ready:
            self._is_ready = True
            line = _end_of_torn_line(self._file.path) + line
        self._file.add(f"{line}\n".encode())


def _end_of_torn_line(path: str) -> str:
    """Return a line end if the file has an incomplete line, which a killed process may leave."""
    if is_remote(path) or not os.path.isfile(path) or not os.path.getsize(path):
        return ""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return "" if file.read() == b"\n" else "\n"


def _holds_something_else(path: str) -> bool:
    """Whether a file is there that does not begin as one of ours does, be it torn."""
    if is_remote(path) or not os.path.isfile(path):
        return False
    begin = b'{"version"'
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.read(64).lstrip()[: len(begin)]
        return not begin.startswith(first)
    return False


def _plain(value: object) -> JsonValue:
    """Return a value of numbers, arrays, lists and dicts as strict JSON represents it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def replay(path: str | os.PathLike[str], writer: Writer) -> int:
    """Write the records of a file to another writer, as if the run took place again.

        replay("records.jsonl", EventWriter("logs"))

    Incomplete lines, where a process was killed, are left out with a warning.

    Args:
        path: of a file that a ``JsonLinesWriter`` has written.
        writer: gets everything, and is closed at the end.

    Returns:
        The number of records.

    Raises:
        DataError: a line is of another format or of a later version.
        MonitorError: an argument is invalid.
        OSError: the file cannot be read.
    """
    path = arguments.path("path", path, error=MonitorError)
    arguments.instance("writer", writer, Writer, wanted="a Writer such as EventWriter('logs')", error=MonitorError)
    num_records = 0
    incomplete: list[int] = []
    started: set[str] = set()  # the kinds of runs
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                incomplete.append(number)
                continue
            num_records += _replay_line(value, writer, started, f"line {number} of {os.fspath(path)}")
    writer.close()
    if incomplete:
        warnings.warn(
            f"{counted(len(incomplete), 'incomplete line')} of {os.fspath(path)} left out: "
            f"{', '.join(map(str, incomplete[:5]))}{' ...' if len(incomplete) > 5 else ''}. A process that is killed "
            "while it writes leaves such a line.",
            stacklevel=2,
        )
    return num_records


def _replay_line(value: JsonValue, writer: Writer, started: set[str], location: str) -> int:
    version = value.get("version") if isinstance(value, dict) else None
    if version != _VERSION:
        found = f"has version {version!r}" if version is not None else "has no version"
        raise DataError(
            f"{location} {found}; this package reads version {_VERSION}. Give a file that JsonLinesWriter has written, "
            "and read it with the version of the package that wrote it, or a later one."
        )
    fields = {key: item for key, item in value.items() if key not in ("version", "type")}
    try:
        call = _READERS[value["type"]](fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{location} is not a valid {value.get('type')!r} of JsonLinesWriter: {error!r}.") from error
    kind = fields.get("kind", "train")
    if value["type"] == "run":
        started.add(kind)
    elif kind not in started:
        raise DataError(
            f'{location} is a {value["type"]!r}, but no line before it has its run ("type": "run", "kind": '
            f'"{kind}"). Give the file from the beginning of that run.'
        )
    call(writer)
    return int(value["type"] == "record")


def _run(fields: JsonObject) -> Callable[[Writer], None]:
    run = Run(**fields, replicas=range(fields["manifest"].get("strategy", {}).get("num_replicas", 1)))
    return lambda writer: writer.begin(run)


def _record(fields: JsonObject) -> Callable[[Writer], None]:
    given = fields.pop("scores")
    arrays = {name: None if fields[name] is None else _floats(fields[name]) for name in _ARRAYS}
    stats = ReplicaStats(**{**fields, **arrays, "examples": np.asarray(fields["examples"], np.int64)})
    scores = None if given is None else _floats(given)
    return lambda writer: writer.write(stats, scores)


def _findings(fields: JsonObject) -> Callable[[Writer], None]:
    findings, step, wall_time = fields["findings"], int(fields["step"]), float(fields["wall_time"])
    return lambda writer: writer.write_findings(findings, step=step, wall_time=wall_time)


_READERS = {"run": _run, "record": _record, "findings": _findings}
_ARRAYS = ("loss", "input_seconds", "compute_seconds", "sync_seconds", "gradient_norm")


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([float("nan") if value is None else float(value) for value in values])
