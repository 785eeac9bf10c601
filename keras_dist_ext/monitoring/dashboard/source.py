"""Read TensorBoard's data as arrays, and cache it until TensorBoard has read more.

TensorBoard samples when it reads: of each series it keeps as many points as `--samples_per_plugin scalars=N` (1000 by
default; 0: all, but then its own Scalars tab stays empty). Everything that it kept is read here; `Points.is_sampled`
tells whether points are missing.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from tensorboard import context as tb_context
from tensorboard import errors
from tensorboard.data import provider as tb

from keras_dist_ext.aliases import Array
from keras_dist_ext.monitoring.dashboard.experiments import Experiment, Newest, group, last_text
from keras_dist_ext.monitoring.dashboard.metadata import (
    ALL_TAGS,
    EXAMPLES_PER_SECOND,
    FINDINGS_TAG,
    LOSS,
    MANIFEST_TAG,
    PLAN_TAG,
    PLUGIN_NAME,
    REPLICA_TAGS,
    SCALARS_PLUGIN_NAME,
    STEP_SECONDS,
)
from keras_dist_ext.monitoring.dashboard.points import Points
from keras_dist_ext.monitoring.dashboard.reading import ALL, read_scalars

__all__ = ["DEFAULT_LIMIT", "Source"]

DEFAULT_LIMIT = 1000  # points of a scalar series that TensorBoard keeps by default; see --samples_per_plugin
_LISTING_SECONDS = 5.0  # for requests without a reload: a zoom requests several series at the same time
_MAX_POINTS = 24_000_000  # in memory: 20 bytes each

_log = logging.getLogger("tensorboard")


class Source:
    """TensorBoard's data provider, by experiment.

    Args:
        provider: TensorBoard's data provider.
        limit: points that TensorBoard keeps of a scalar series; 0: all.
        clock: monotonic, in seconds.
    """

    def __init__(
        self, provider: tb.DataProvider, limit: int = DEFAULT_LIMIT, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self._provider = provider
        self._clock = clock
        self._listings: dict[str, tuple[float, dict[str, Experiment]]] = {}
        self._cache = _SeriesCache(_MAX_POINTS)
        self._is_warming = False

    def has_runs(self, ctx: tb_context.RequestContext, experiment_id: str) -> bool:
        """Whether there is an experiment."""
        return bool(self.experiments(ctx, experiment_id))

    def experiments(
        self, ctx: tb_context.RequestContext, experiment_id: str, *, refresh: bool = False
    ) -> dict[str, Experiment]:
        """Return experiments by name; a few seconds old, unless `refresh`."""
        then, found = self._listings.get(experiment_id, (-_LISTING_SECONDS, {}))
        now = self._clock()
        if refresh or now - then >= _LISTING_SECONDS or not found:
            found = group(
                self._list(self._provider.list_scalars, ctx, experiment_id, SCALARS_PLUGIN_NAME, _SCALAR_TAGS),
                self._list(self._provider.list_tensors, ctx, experiment_id, PLUGIN_NAME, _TEXT_TAGS),
            )
            self._listings[experiment_id] = now, found
        return found

    def _list(
        self,
        listing: Callable[..., dict[str, dict[str, tb.ScalarTimeSeries | tb.TensorTimeSeries]]],
        ctx: tb_context.RequestContext,
        experiment_id: str,
        plugin_name: str,
        tags: list[str],
    ) -> dict[str, dict[str, Newest]]:
        try:
            listed = listing(
                ctx, experiment_id=experiment_id, plugin_name=plugin_name, run_tag_filter=tb.RunTagFilter(tags=tags)
            )
        except errors.NotFoundError:  # no log directory yet
            return {}
        return {
            run: {tag: Newest(series.max_step, series.max_wall_time) for tag, series in by_tag.items()}
            for run, by_tag in listed.items()
        }

    def points(
        self, ctx: tb_context.RequestContext, experiment_id: str, experiment: Experiment, tag: str
    ) -> dict[str, Points]:
        """Return the series of a tag, by run; no run without points."""
        ends = experiment.tags.get(tag)
        if not ends:
            return {}
        return self._cache.get(
            (experiment_id, experiment.name, tag),
            tuple(sorted(ends.items())),
            lambda: read_scalars(self._provider, ctx, experiment_id, sorted(ends), tag),
        )

    def warm(self, ctx: tb_context.RequestContext, experiment_id: str, experiment: Experiment) -> None:
        """Start to read what a page that is opened now will request, while its scripts are loading."""
        if self._is_warming or self._cache.has(experiment_id):
            return
        self._is_warming = True

        def read() -> None:
            try:
                for tag in _FIRST_TAGS:
                    self.points(ctx, experiment_id, experiment, tag)
            except Exception as error:  # the page requests it again, and gets the error
                _log.info("Replicas: could not read ahead: %s", error)
            finally:
                self._is_warming = False

        threading.Thread(target=read, name="replicas-read-ahead", daemon=True).start()

    def texts(
        self, ctx: tb_context.RequestContext, experiment_id: str, experiments: Iterable[Experiment]
    ) -> dict[tuple[str, str], str | None]:
        """Return the newest text of each tag of our own plugin, by experiment and tag, in a single read."""
        experiments = list(experiments)
        runs = sorted({run for experiment in experiments for by_run in experiment.texts.values() for run in by_run})
        read = {}
        if runs:
            read = self._provider.read_tensors(
                ctx,
                experiment_id=experiment_id,
                plugin_name=PLUGIN_NAME,
                downsample=ALL,
                run_tag_filter=tb.RunTagFilter(runs=runs, tags=_TEXT_TAGS),
            )

        def held(experiment: Experiment, tag: str) -> Iterator[tuple[float, Array]]:
            for run in experiment.texts.get(tag, ()):
                yield from ((datum.wall_time, datum.numpy) for datum in read.get(run, {}).get(tag, ()))

        return {(one.name, tag): last_text(held(one, tag)) for one in experiments for tag in _TEXT_TAGS}


_FIRST_TAGS = (STEP_SECONDS, LOSS, EXAMPLES_PER_SECOND)
_SCALAR_TAGS = [*REPLICA_TAGS, *ALL_TAGS]
_TEXT_TAGS = [MANIFEST_TAG, FINDINGS_TAG, PLAN_TAG]


class _SeriesCache:
    """A cache of series by key, valid while their fingerprint is the same; drops the least recently used."""

    def __init__(self, max_points: int) -> None:
        self._max_points = max_points
        self._series: OrderedDict[tuple[str, str, str], tuple[object, dict[str, Points]]] = OrderedDict()
        self._locks: dict[tuple[str, str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def has(self, experiment_id: str) -> bool:
        """Whether a series of a TensorBoard experiment is in the cache."""
        with self._lock:
            return any(key[0] == experiment_id for key in self._series)

    def get(
        self, key: tuple[str, str, str], fingerprint: object, read: Callable[[], dict[str, Points]]
    ) -> dict[str, Points]:
        """Return the cached series, or what `read` returns; simultaneous requests for the same wait for one read."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            with self._lock:
                held = self._series.get(key)
                if held is not None and held[0] == fingerprint:
                    self._series.move_to_end(key)
                    return held[1]
            series = read()
            with self._lock:
                self._series[key] = fingerprint, series
                self._series.move_to_end(key)
                while len(self._series) > 1 and self._num_points() > self._max_points:
                    self._series.popitem(last=False)
        return series

    def _num_points(self) -> int:
        return sum(points.steps.size for _, series in self._series.values() for points in series.values())
