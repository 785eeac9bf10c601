"""Serve the Replicas tab: experiments, series, summaries, CSV, and the page itself.

All under `data/plugin/replicas/`, read only:

    experiments                                          all of them, with manifest, findings and plan; reads again
    series?experiment=&tag=&axis=&low=&high=&width=      the lines of a chart (chart.py)
    summary?experiment=&axis=&low=&high=                 numbers of each replica (summary.py)
    csv?experiment=&tag=&axis=&low=&high=&hidden=        every point (export.py)
    trained                                              how fast experiments were, beside what a plan says (trained.py)
    static/...                                           the page
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from tensorboard import context as tb_context
from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.monitoring.dashboard import metadata, wire
from keras_dist_ext.monitoring.dashboard.chart import chart
from keras_dist_ext.monitoring.dashboard.experiments import Experiment, parse_findings, parse_manifest, parse_plan
from keras_dist_ext.monitoring.dashboard.export import csv_of, file_name
from keras_dist_ext.monitoring.dashboard.query import Query, QueryError, parse_hidden, parse_query, parse_tag
from keras_dist_ext.monitoring.dashboard.source import DEFAULT_LIMIT, Source
from keras_dist_ext.monitoring.dashboard.static_files import StaticFiles
from keras_dist_ext.monitoring.dashboard.summary import summary
from keras_dist_ext.monitoring.dashboard.trained import trained
from keras_dist_ext.monitoring.dashboard.view import View

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

__all__ = ["ReplicasPlugin"]


class ReplicasPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # TensorBoard ships no types
    """The tab *Replicas*."""

    plugin_name = metadata.PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        limit = (context.sampling_hints or {}).get(metadata.SCALARS_PLUGIN_NAME, DEFAULT_LIMIT)
        self._provider = context.data_provider
        self._source = Source(context.data_provider, limit)
        self._static = StaticFiles()
        self._logdir = context.logdir or getattr(context.flags, "logdir_spec", "") or ""

    def is_active(self) -> bool:
        """Whether there are runs of replicas, even without the marker, as in a log without the chief's."""
        return self._source.has_runs(tb_context.RequestContext(), "")

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the name of the tab and its module."""
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="Replicas")

    def get_plugin_apps(self) -> dict[str, WSGIApplication]:
        """Return the routes."""
        return {
            "/experiments": _app(self._experiments),
            "/series": _app(self._series),
            "/summary": _app(self._summary),
            "/csv": _app(self._csv),
            "/trained": _app(self._trained),
            "/static/*": _app(self._serve_static),
        }

    def _experiments(self, request: wrappers.Request) -> wrappers.Response:
        ctx, experiment_id = _asked_by(request)
        found = self._source.experiments(ctx, experiment_id, refresh=True)
        if found:
            self._source.warm(ctx, experiment_id, max(found.values(), key=lambda experiment: experiment.newest.wall))
        texts = self._source.texts(ctx, experiment_id, found.values())
        return _json(
            request,
            {
                "experiments": [_described(experiment, texts) for experiment in found.values()],
                "logdir": str(self._logdir),
                "limit": self._source.limit,
            },
        )

    def _series(self, request: wrappers.Request) -> wrappers.Response:
        query, tag = parse_query(request.args), parse_tag(request.args)
        return _json(request, chart(self._view(request, query), tag, query))

    def _summary(self, request: wrappers.Request) -> wrappers.Response:
        query = parse_query(request.args)
        return _json(request, summary(self._view(request, query), query))

    def _csv(self, request: wrappers.Request) -> wrappers.Response:
        query, tag = parse_query(request.args), parse_tag(request.args)
        text = csv_of(self._view(request, query), tag, query, parse_hidden(request.args))
        disposition = f'attachment; filename="{file_name(query.experiment, tag)}"'
        return _respond(request, text, "text/csv", headers=[("Content-Disposition", disposition)])

    def _trained(self, request: wrappers.Request) -> wrappers.Response:
        ctx, experiment_id = _asked_by(request)
        experiments = self._source.experiments(ctx, experiment_id)
        texts = self._source.texts(ctx, experiment_id, experiments.values())
        views = [View(self._source, ctx, experiment_id, experiment) for experiment in experiments.values()]
        return _json(
            request,
            {"trained": trained({view: texts[view.experiment.name, metadata.MANIFEST_TAG] for view in views})},
        )

    def _serve_static(self, request: wrappers.Request) -> wrappers.Response:
        path = request.path.partition(f"/{self.plugin_name}/static/")[2]
        found = self._static.read(path)
        if found is None:
            return _respond(request, f"There is no {path!r}.", "text/plain", code=404)
        return _respond(request, *found)

    def _view(self, request: wrappers.Request, query: Query) -> View:
        ctx, experiment_id = _asked_by(request)
        experiments = self._source.experiments(ctx, experiment_id)
        if query.experiment not in experiments:
            raise _NotHere(
                f"There is no experiment {query.experiment!r} in {str(self._logdir)!r} (anymore); there are "
                f"{', '.join(map(repr, experiments)) or 'none'}. Reload the page."
            )
        return View(self._source, ctx, experiment_id, experiments[query.experiment])


def _described(experiment: Experiment, texts: Mapping[tuple[str, str], str | None]) -> JsonObject:
    manifest, wrong_manifest = parse_manifest(texts[experiment.name, metadata.MANIFEST_TAG])
    findings, wrong_findings = parse_findings(texts[experiment.name, metadata.FINDINGS_TAG])
    plan, wrong_plan = parse_plan(texts[experiment.name, metadata.PLAN_TAG])
    newest = experiment.newest
    return {
        "name": experiment.name,
        "replicas": sorted(experiment.runs),
        "tags": experiment.replica_tags(),
        "manifest": manifest,
        "findings": findings,
        "plan": plan,
        "notes": [note for note in (wrong_manifest, wrong_findings, wrong_plan) if note],
        "last_step": int(newest.step),
        "last_wall": wire.number(newest.wall),
        "version": experiment.version(),
    }


class _NotHere(QueryError):
    """An experiment does not exist anymore."""


def _asked_by(request: wrappers.Request) -> tuple[tb_context.RequestContext, str]:
    return plugin_util.context(request.environ), plugin_util.experiment_id(request.environ)


def _respond(
    request: wrappers.Request, content: str | bytes, content_type: str, **options: object
) -> wrappers.Response:
    response: wrappers.Response = http_util.Respond(request, content, content_type, **options)
    return response


def _json(request: wrappers.Request, value: object) -> wrappers.Response:
    return _respond(request, wire.to_json(value), "application/json")


def _app(answer: Callable[[wrappers.Request], wrappers.Response]) -> WSGIApplication:
    """Return a WSGI application for a route; an invalid query gets its error as the response."""

    @wrappers.Request.application
    def respond(request: wrappers.Request) -> wrappers.Response:
        if request.method not in ("GET", "HEAD"):
            return _respond(request, "Read only: use GET.", "text/plain", code=405, headers=[("Allow", "GET")])
        try:
            with np.errstate(all="ignore"):
                return answer(request)
        except QueryError as error:
            code = 404 if isinstance(error, _NotHere) else 400
            return _respond(request, wire.to_json({"error": str(error)}), "application/json", code=code)

    return respond
