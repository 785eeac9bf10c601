"""Name what writers write and the dashboard reads: runs, tags, manifest, findings and plan.

    <log_dir>/<experiment>/replica_<id>   one TensorBoard run per replica: scalars, tags REPLICA_TAGS
    <log_dir>/<experiment>/all            one run for all of them: scalars, tags ALL_TAGS, and texts of our plugin,
                                          MANIFEST_TAG, FINDINGS_TAG and PLAN_TAG: JSON in a string tensor

`<experiment>` may be empty, and may have slashes. A step is an optimizer step. A replica that got no examples in an
interval has `replica/examples` 0 and no `replica/loss` there: a gap in its line, not a zero.
"""

import re
from typing import NamedTuple, TypedDict

from keras_dist_ext.aliases import JsonObject

__all__ = [
    "PLUGIN_NAME",
    "SCALARS_PLUGIN_NAME",
    "LOSS",
    "EXAMPLES_PER_SECOND",
    "STEP_SECONDS",
    "COMPUTE_SECONDS",
    "INPUT_SECONDS",
    "SYNC_SECONDS",
    "EXAMPLES",
    "GRADIENT_NORM",
    "SCORE",
    "REPLICA_TAGS",
    "STATISTICS",
    "over_replicas",
    "ALL_LOSS",
    "ALL_EXAMPLES_PER_SECOND",
    "SCALING_EFFICIENCY",
    "INPUT_SHARE",
    "ALL_TAGS",
    "MANIFEST_TAG",
    "FINDINGS_TAG",
    "PLAN_TAG",
    "MANIFEST_VERSION",
    "Manifest",
    "Strategy",
    "replica_run",
    "all_run",
    "RunName",
    "parse_run",
]

PLUGIN_NAME = "replicas"
SCALARS_PLUGIN_NAME = "scalars"  # our numbers are ordinary scalars, so that TensorBoard's own tabs show them too

# Of one replica, in its own run.
LOSS = "replica/loss"
EXAMPLES_PER_SECOND = "replica/examples_per_second"
STEP_SECONDS = "replica/step_seconds"
COMPUTE_SECONDS = "replica/compute_seconds"
INPUT_SECONDS = "replica/input_seconds"
SYNC_SECONDS = "replica/sync_seconds"
EXAMPLES = "replica/examples"  # in the interval that ends at this step
GRADIENT_NORM = "replica/gradient_norm"  # optional
SCORE = "replica/score"  # optional: 1 = as fast as ever, less = slower
REPLICA_TAGS = (
    LOSS,
    EXAMPLES_PER_SECOND,
    STEP_SECONDS,
    COMPUTE_SECONDS,
    INPUT_SECONDS,
    SYNC_SECONDS,
    EXAMPLES,
    GRADIENT_NORM,
    SCORE,
)

# Of all replicas, in the run `all`.
STATISTICS = ("min", "mean", "max", "std")


def over_replicas(tag: str, statistic: str) -> str:
    """Return the tag that holds a statistic of a replica tag over all replicas, exact at each logged step.

    Raises:
        ValueError: `tag` is not in REPLICA_TAGS, or `statistic` not in STATISTICS.

    >>> over_replicas("replica/step_seconds", "max")
    'all/step_seconds_max'
    """
    if tag not in REPLICA_TAGS:
        raise ValueError(f"{tag!r} is not the tag of a replica; there are {', '.join(REPLICA_TAGS)}.")
    if statistic not in STATISTICS:
        raise ValueError(f"{statistic!r} is not a statistic over replicas; there are {', '.join(STATISTICS)}.")
    return f"all/{tag.removeprefix('replica/')}_{statistic}"


ALL_LOSS = "all/loss"  # weighted by examples: the loss in History
ALL_EXAMPLES_PER_SECOND = "all/examples_per_second"
SCALING_EFFICIENCY = "all/scaling_efficiency"  # 1 = N replicas are N times as fast as the fastest one
INPUT_SHARE = "all/input_share"  # share of the time spent waiting for input, 0 to 1
ALL_TAGS = (
    ALL_LOSS,
    ALL_EXAMPLES_PER_SECOND,
    SCALING_EFFICIENCY,
    INPUT_SHARE,
    *(over_replicas(tag, statistic) for tag in REPLICA_TAGS for statistic in STATISTICS),
)

# Of the experiment, in the run `all`, with our plugin name: their presence activates the tab.
MANIFEST_TAG = "replicas/manifest"
FINDINGS_TAG = "replicas/findings"
PLAN_TAG = "replicas/plan"
MANIFEST_VERSION = 1


class Strategy(TypedDict, total=False):
    """The strategy, its numbers of replicas and workers, and why it was chosen."""

    name: str
    reason: str
    num_replicas: int
    num_workers: int


class Manifest(TypedDict, total=False):
    """What does not change while an experiment runs; the dashboard shows the entries that exist."""

    version: int  # MANIFEST_VERSION
    experiment: str
    strategy: Strategy
    devices: list[str]  # one per replica
    seeds: JsonObject | None
    versions: dict[str, str]
    batch_size: int | None  # global
    host: str


def replica_run(experiment: str, replica: int) -> str:
    """Return the run of a replica, as a path under the log directory.

    >>> replica_run("night/3", 7), replica_run("", 0)
    ('night/3/replica_7', 'replica_0')
    """
    return f"{experiment}/replica_{replica}" if experiment else f"replica_{replica}"


def all_run(experiment: str) -> str:
    """Return the run of all replicas together, as a path under the log directory."""
    return f"{experiment}/all" if experiment else "all"


class RunName(NamedTuple):
    """The experiment and the replica of a run."""

    experiment: str
    replica: int | None  # None: of all replicas


_RUN = re.compile(r"(?:(?P<experiment>.*)[/\\])?(?:replica_(?P<replica>0|[1-9][0-9]{0,8})|all)", re.DOTALL)


def parse_run(run: str) -> RunName | None:
    """Parse the name of a run; None for a run that is not ours. The inverse of `replica_run` and `all_run`.

    >>> parse_run("night/3/replica_7"), parse_run("all"), parse_run("train")
    (RunName(experiment='night/3', replica=7), RunName(experiment='', replica=None), None)
    """
    match = _RUN.fullmatch(run)
    if match is None:
        return None
    replica = match["replica"]
    return RunName(match["experiment"] or "", None if replica is None else int(replica))
