"""One experiment during one request: series by replica, gaps, and their common clock."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tensorboard import context as tb_context

from keras_dist_ext.monitoring.dashboard.clock import Clock, clock_of
from keras_dist_ext.monitoring.dashboard.experiments import Experiment
from keras_dist_ext.monitoring.dashboard.metadata import (
    ALL_EXAMPLES_PER_SECOND,
    ALL_LOSS,
    ALL_TAGS,
    EXAMPLES,
    EXAMPLES_PER_SECOND,
    LOSS,
    REPLICA_TAGS,
    STEP_SECONDS,
    over_replicas,
)
from keras_dist_ext.monitoring.dashboard.points import Points
from keras_dist_ext.monitoring.dashboard.source import Source

__all__ = ["View", "recorded_tags"]

_CLOCK_TAGS = (STEP_SECONDS, EXAMPLES_PER_SECOND, LOSS, *REPLICA_TAGS, ALL_LOSS, *ALL_TAGS)


def recorded_tags(tag: str) -> dict[str, tuple[str, ...]]:
    """Return the tags of the run `all` with mean, min, max and total of a replica tag, best first."""
    tags: dict[str, tuple[str, ...]] = {
        statistic: (over_replicas(tag, statistic),) for statistic in ("mean", "min", "max")
    }
    if tag == LOSS:
        tags["mean"] = ALL_LOSS, *tags["mean"]  # weighted by examples, as in History
    if tag == EXAMPLES_PER_SECOND:
        tags["total"] = (ALL_EXAMPLES_PER_SECOND,)
    return tags


class View:
    """One experiment, with TensorBoard's data during one request."""

    def __init__(
        self, source: Source, ctx: tb_context.RequestContext, experiment_id: str, experiment: Experiment
    ) -> None:
        self.experiment = experiment
        self.limit = source.limit
        self._source = source
        self._ctx = ctx
        self._experiment_id = experiment_id

    def replicas(self, tag: str) -> dict[int, Points]:
        """Return the series of a tag, by replica, in order."""
        by_run = self._points(tag)
        return {replica: by_run[run] for replica, run in sorted(self.experiment.runs.items()) if run in by_run}

    def recorded(self, tag: str) -> dict[str, Points]:
        """Return the series recorded over all replicas for a replica tag: some of mean, min, max, total."""
        found = {}
        for statistic, tags in recorded_tags(tag).items():
            held = next((points for tag in tags if (points := self.overall(tag)) is not None), None)
            if held is not None:
                found[statistic] = held
        return found

    def overall(self, tag: str) -> Points | None:
        """Return the series of a tag of the run `all`, or None."""
        run = self.experiment.all_run
        return self._points(tag).get(run) if run is not None else None

    @cached_property
    def clock(self) -> Clock:
        """The times of steps."""
        for tag in _CLOCK_TAGS:
            points = self._points(tag)
            if points:
                return clock_of(points.values())
        return clock_of(())

    def gaps(self, tag: str) -> dict[int, NDArray[np.int64]]:
        """Return, by replica, the steps at which it has no number because it got no examples.

        These are the steps where `replica/examples` is 0; for a log without examples, those where it has a step time
        and TensorBoard has not dropped points.
        """
        found = {}
        examples, seconds = self.replicas(EXAMPLES), self.replicas(STEP_SECONDS)
        for replica, points in self.replicas(tag).items():
            if replica in examples:
                starved = examples[replica].steps[examples[replica].values == 0]
            elif replica in seconds and not points.is_sampled(self.limit):
                starved = seconds[replica].steps
            else:
                continue
            if starved.size and not np.array_equal(starved, points.steps):
                found[replica] = np.setdiff1d(starved, points.steps, assume_unique=True)
        return found

    def _points(self, tag: str) -> dict[str, Points]:
        return self._source.points(self._ctx, self._experiment_id, self.experiment, tag)
