"""Group TensorBoard's runs into experiments, and parse their manifests, findings and plans."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from keras_dist_ext.aliases import Array, JsonObject, JsonValue
from keras_dist_ext.monitoring.dashboard.metadata import FINDINGS_TAG, MANIFEST_TAG, PLAN_TAG, parse_run
from keras_dist_ext.monitoring.dashboard.wire import finite

__all__ = ["Newest", "Experiment", "group", "parse_manifest", "parse_findings", "parse_plan"]


class Newest(NamedTuple):
    """The newest point of a series that was read."""

    step: int
    wall: float  # seconds since 1970


@dataclass
class Experiment:
    """The runs of one experiment, and their tags."""

    name: str  # "" for runs directly in the log directory
    runs: dict[int, str] = field(default_factory=dict)  # by replica
    all_run: str | None = None
    tags: dict[str, dict[str, Newest]] = field(default_factory=dict)  # scalar tag -> run -> how far
    texts: dict[str, dict[str, Newest]] = field(default_factory=dict)  # tag of our own plugin -> run -> how far

    @property
    def newest(self) -> Newest:
        """The last step, and the time of the last point, of any series."""
        ends = [end for by_run in (*self.tags.values(), *self.texts.values()) for end in by_run.values()]
        return Newest(max(end.step for end in ends), max(end.wall for end in ends))

    def replica_tags(self) -> list[str]:
        """Return the scalar tags that at least one replica has."""
        runs = set(self.runs.values())
        return sorted(tag for tag, by_run in self.tags.items() if runs & by_run.keys())

    def version(self) -> str:
        """Return a hash that changes when there is new data."""
        held = sorted(
            (tag, run, *end) for tags in (self.tags, self.texts) for tag, by in tags.items() for run, end in by.items()
        )
        return hashlib.sha256(repr(held).encode()).hexdigest()[:16]


def group(
    scalars: Mapping[str, Mapping[str, Newest]], texts: Mapping[str, Mapping[str, Newest]]
) -> dict[str, Experiment]:
    """Return experiments by name, from TensorBoard's lists: run -> tag -> newest point.

    A run called `all` is an experiment only if it has our own marker: other programs write such runs, too.
    """
    found: dict[str, Experiment] = {}
    for run, tags in sorted(_merged(scalars, texts).items()):
        name = parse_run(run)
        if name is None or not tags:
            continue
        experiment = found.setdefault(name.experiment, Experiment(name.experiment))
        if name.replica is None:
            experiment.all_run = run
        elif scalars.get(run):
            experiment.runs[name.replica] = run
        for tag, end in scalars.get(run, {}).items():
            experiment.tags.setdefault(tag, {})[run] = end
        for tag, end in texts.get(run, {}).items():
            experiment.texts.setdefault(tag, {})[run] = end
    return {name: experiment for name, experiment in sorted(found.items()) if experiment.runs or experiment.texts}


def _merged(*listings: Mapping[str, Mapping[str, Newest]]) -> dict[str, set[str]]:
    merged: dict[str, set[str]] = {}
    for listing in listings:
        for run, tags in listing.items():
            merged.setdefault(run, set()).update(tags)
    return merged


def parse_manifest(text: str | None) -> tuple[JsonObject | None, str | None]:
    """Return the manifest in a text, and the error in it; at most one of the two is not None."""
    return _parsed_object(text, MANIFEST_TAG)


def parse_plan(text: str | None) -> tuple[JsonObject | None, str | None]:
    """Return the plan in a text, and the error in it; at most one of the two is not None."""
    return _parsed_object(text, PLAN_TAG)


def _parsed_object(text: str | None, tag: str) -> tuple[JsonObject | None, str | None]:
    value, wrong = _parsed(text, tag)
    if wrong is None and value is not None and not isinstance(value, dict):
        return None, f"{tag} is a {type(value).__name__}, not an object; it is not shown."
    return value, wrong


def parse_findings(text: str | None) -> tuple[list[JsonObject], str | None]:
    """Return the findings in a text, and the error in it, if there is one."""
    value, wrong = _parsed(text, FINDINGS_TAG)
    if wrong is not None or value is None:
        return [], wrong
    if not isinstance(value, list):
        return [], f"{FINDINGS_TAG} is a {type(value).__name__}, not a list; it is not shown."
    findings = [finding for finding in value if isinstance(finding, dict)]
    dropped = len(value) - len(findings)
    return findings, f"{dropped} of {len(value)} entries of {FINDINGS_TAG} are not objects." if dropped else None


def _parsed(text: str | None, tag: str) -> tuple[JsonValue, str | None]:
    if text is None:
        return None, None
    try:
        return finite(json.loads(text)), None
    except (ValueError, RecursionError) as error:
        return None, f"{tag} is not JSON ({error}); it is not shown. The rest comes from the scalars."


def last_text(texts: Iterable[tuple[float, Array]]) -> str | None:
    """Return the newest of (wall time, string tensor), decoded."""
    newest = max(texts, key=lambda item: item[0], default=None)
    if newest is None:
        return None
    value = newest[1]
    value = value.item() if getattr(value, "size", None) == 1 else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""
