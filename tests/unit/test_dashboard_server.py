"""What the dashboard's server answers: every number of the log, through both of TensorBoard's loaders."""

import configparser
import csv
import gc
import io
import json
import math
import subprocess
import sys
import threading
import time
import types
import warnings

import numpy as np
import pytest
from dashboard.logs import FINDINGS, MANIFEST, SECONDS, START, Run, example_plan, example_series, write_experiment
from dashboard.server import ROOT, as_installed, environment
from tensorboard import errors
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.data import server_ingester
from tensorboard.util import grpc_util
from werkzeug.test import Client

from keras_dist_ext.monitoring.dashboard import metadata as names
from keras_dist_ext.monitoring.dashboard import source as source_module
from keras_dist_ext.monitoring.dashboard.export import file_name
from keras_dist_ext.monitoring.dashboard.plugin import ReplicasPlugin
from keras_dist_ext.monitoring.dashboard.points import newest
from keras_dist_ext.monitoring.dashboard.reading import read_columns, read_publicly
from keras_dist_ext.monitoring.dashboard.source import Source
from keras_dist_ext.monitoring.dashboard.static_files import StaticFiles

CTX = RequestContext()


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    """A log with every oddity that the routes must bear."""
    folder = tmp_path_factory.mktemp("logs")
    write_experiment(
        folder, "a/b", example_series(3, range(40), slow=1), findings=FINDINGS, later_findings=FINDINGS[:1]
    )
    write_experiment(folder, "no chief", example_series(2, range(30), seed=1), with_all=False, as_tensors=False)
    write_experiment(folder, "", example_series(2, range(3), seed=2), manifest="{broken", findings={"not": "a list"})
    starved = example_series(2, range(12), seed=3)
    for step in (4, 5):
        del starved[1][names.LOSS][step]
        starved[1][names.EXAMPLES][step] = 0.0
    starved[0][names.LOSS][8] = math.nan
    starved[0][names.LOSS][9] = -math.inf
    write_experiment(folder, "starved", starved)
    no_examples = [{tag: by for tag, by in tags.items() if tag != names.EXAMPLES} for tags in starved]
    write_experiment(folder, "starved, without examples", no_examples, with_all=False)
    with Run(folder, "restarted/replica_0") as run:
        for step, value in [(0, 9.0), (1, 8.0), (2, 7.0), (3, 6.0), (2, 1.5), (3, 1.25)]:
            run.scalars(step, {names.LOSS: value}, START + step)
    with Run(folder, "other/all") as run:
        run.scalars(0, {"loss": 1.0})
    with Run(folder, "other/train") as run:
        run.scalars(0, {"loss": 1.0})
    return folder


def multiplexer_of(log_dir):
    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 1000})
    multiplexer.AddRunsFromDirectory(str(log_dir))
    multiplexer.Reload()
    return MultiplexerDataProvider(multiplexer, str(log_dir))


@pytest.fixture(scope="module")
def slow_provider(log_dir):
    """What TensorBoard uses with --load_fast=false."""
    return multiplexer_of(log_dir)


@pytest.fixture(scope="module")
def fast_provider(log_dir, slow_provider):
    """What TensorBoard uses as a rule."""
    ingester = server_ingester.SubprocessServerDataIngester(
        server_ingester.get_server_binary(),
        str(log_dir),
        reload_interval=0,
        channel_creds_type=grpc_util.ChannelCredsType.LOCAL,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard leaves the process, and the file with its port, to the collector
        ingester.start()
        gc.collect()
    provider = ingester.data_provider
    deadline = time.monotonic() + 90
    while versions(provider) != versions(slow_provider):
        assert time.monotonic() < deadline, "TensorBoard's fast loader does not read all that its other one reads"
        time.sleep(0.05)
    yield provider
    ingester._stdin_handle.close()  # that ends it


def versions(provider):
    """What is new in each experiment, as the provider has read it."""
    return {name: experiment.version() for name, experiment in Source(provider).experiments(CTX, "").items()}


@pytest.fixture(params=["fast", "slow"])
def provider(request):
    return request.getfixturevalue(f"{request.param}_provider")


def plugin_of(provider, log_dir, **hints):
    context = types.SimpleNamespace(data_provider=provider, logdir=str(log_dir), flags=None, sampling_hints=hints)
    return ReplicasPlugin(context)


@pytest.fixture
def ask(provider, log_dir):
    plugin = plugin_of(provider, log_dir)
    return lambda route, **parameters: answer(plugin, route, **parameters)


def get(plugin, route, method="GET", **parameters):
    """Send a request to a route, as TensorBoard routes it."""
    app = plugin.get_plugin_apps()[route if not route.startswith("/static") else "/static/*"]
    return Client(app).open(f"/data/plugin/replicas{route}", query_string=parameters, method=method)


def answer(plugin, route, **parameters):
    response = get(plugin, route, **parameters)
    assert response.status_code == 200, response.get_data(as_text=True)
    assert response.headers["Content-Type"] == "application/json"
    return json.loads(response.get_data(), parse_constant=pytest.fail)


def test_experiments_are_listed_with_replicas_manifest_and_the_newest_findings(ask, log_dir):
    listed = ask("/experiments")
    assert listed["logdir"] == str(log_dir)
    found = {one["name"]: one for one in listed["experiments"]}
    assert list(found) == ["", "a/b", "no chief", "restarted", "starved", "starved, without examples"]
    assert found["a/b"]["replicas"] == [0, 1, 2]
    assert found["a/b"]["manifest"] == MANIFEST
    assert found["a/b"]["findings"] == FINDINGS[:1]
    assert found["a/b"]["tags"] == sorted(names.REPLICA_TAGS)
    assert found["a/b"]["last_step"] == 39
    assert found["no chief"]["manifest"] is None
    assert found["no chief"]["notes"] == []
    broken = found[""]
    assert (broken["replicas"], broken["manifest"], broken["findings"]) == ([0, 1], None, [])
    assert "replicas/manifest is not JSON (Expecting property name" in broken["notes"][0]
    assert broken["notes"][1] == "replicas/findings is a dict, not a list; it is not shown."


def test_a_plan_is_shown_with_what_trainings_beside_it_have_reached(tmp_path):
    series = example_series(4, range(9), seed=1)
    write_experiment(tmp_path, "four", series)
    write_experiment(tmp_path, "four/validation", example_series(4, range(3)))
    write_experiment(tmp_path, "no batch", example_series(2, range(3)), manifest=MANIFEST | {"batch_size": None})
    write_experiment(tmp_path, "no manifest", example_series(2, range(3)), manifest=None)
    with Run(tmp_path, "plan/all") as run:
        run.text(names.PLAN_TAG, example_plan(), 0, START)
    with Run(tmp_path, "broken/all") as run:
        run.text(names.PLAN_TAG, [1], 0, START)
    plugin = plugin_of(multiplexer_of(tmp_path), tmp_path)
    found = {one["name"]: one for one in answer(plugin, "/experiments")["experiments"]}
    assert found["plan"]["plan"] == example_plan()
    assert (found["plan"]["replicas"], found["plan"]["notes"]) == ([], [])
    assert found["four"]["plan"] is None
    assert found["broken"]["notes"] == ["replicas/plan is a list, not an object; it is not shown."]
    (trained,) = answer(plugin, "/trained")["trained"]
    rates = np.sum([list(tags[names.EXAMPLES_PER_SECOND].values()) for tags in series], axis=0)
    assert trained == {
        "experiment": "four",
        "replicas": 4,
        "global_batch": 256,
        "examples_per_second": pytest.approx(np.median(rates), rel=1e-6),
    }


def test_a_chart_has_every_number_of_the_log(ask):
    written = example_series(3, range(40), slow=1)
    for tag in names.REPLICA_TAGS:
        chart = ask("/series", experiment="a/b", tag=tag)
        assert chart["exact"]
        assert chart["steps"] == list(range(40))
        assert chart["walls"] == [START + step * SECONDS for step in range(40)]
        assert chart["start"] == START
        assert chart["extent"] == {"step": [0, 39], "wall": [START, START + 39 * SECONDS]}
        assert chart["sampled"] is None
        for replica, line in zip(written, chart["replicas"], strict=True):
            assert line["values"] == pytest.approx(list(replica[tag].values()), rel=1e-7)
            assert line.keys() == {"id", "values"}
        held = np.array([list(replica[tag].values()) for replica in written])
        for statistic in ("min", "mean", "max"):
            line = chart["overall"][statistic]
            assert line["source"] == "recorded"
            assert line["values"] == pytest.approx(getattr(held, statistic)(axis=0).tolist(), rel=1e-6)
        if tag == names.EXAMPLES_PER_SECOND:
            assert chart["overall"]["total"]["source"] == "recorded"
            assert chart["overall"]["total"]["values"] == pytest.approx(held.sum(axis=0).tolist(), rel=1e-6)


def test_without_the_chiefs_run_statistics_come_from_the_replicas(ask):
    held = np.array([list(tags[names.LOSS].values()) for tags in example_series(2, range(30), seed=1)])
    overall = ask("/series", experiment="no chief", tag=names.LOSS)["overall"]
    for statistic in ("min", "mean", "max"):
        assert overall[statistic]["source"] == "derived"
        assert overall[statistic]["values"] == pytest.approx(getattr(held, statistic)(axis=0).tolist(), rel=1e-6)


@pytest.mark.parametrize("experiment", ["starved", "starved, without examples"])
def test_a_replica_without_examples_has_a_gap_and_non_finite_values_are_named(ask, experiment):
    chart = ask("/series", experiment=experiment, tag=names.LOSS)
    first, second = chart["replicas"]
    assert second["values"][4:6] == [None, None]
    assert "at" not in second
    assert first["values"][8:10] == [None, None]
    assert first["bad"] == [[8, "NaN"], [9, "-Infinity"]]
    assert "bad" not in second
    assert all(isinstance(value, float) for value in first["values"][:8] + second["values"][:4] + second["values"][6:])


def test_after_a_restart_abandoned_steps_are_not_shown(ask):
    chart = ask("/series", experiment="restarted", tag=names.LOSS)
    assert (chart["steps"], chart["replicas"][0]["values"]) == ([0, 1, 2, 3], [9.0, 8.0, 1.5, 1.25])


def test_a_tag_without_points_is_an_empty_chart(ask):
    chart = ask("/series", experiment="restarted", tag=names.SCORE)
    assert (chart["steps"], chart["replicas"], chart["overall"], chart["extent"]) == ([], [], {}, None)


@pytest.mark.parametrize("axis", ["step", "wall"])
def test_a_part_of_a_chart_is_finer_and_the_same_on_both_axes(ask, axis):
    low, high = (10, 14) if axis == "step" else (START + 10 * SECONDS, START + 14 * SECONDS)
    coarse = ask("/series", experiment="a/b", tag=names.LOSS, width=8, axis=axis)
    assert not coarse["exact"]
    assert len(coarse["steps"]) == 8
    fine = ask("/series", experiment="a/b", tag=names.LOSS, width=8, axis=axis, low=low, high=high)
    assert fine["exact"]
    assert fine["steps"] == [9, 10, 11, 12, 13, 14, 15]
    written = example_series(3, range(40), slow=1)[2][names.LOSS]
    line = coarse["replicas"][2]
    assert min(line["min"]) == pytest.approx(min(written.values()), rel=1e-5)
    assert max(line["max"]) == pytest.approx(max(written.values()), rel=1e-5)
    assert coarse["ends"][-1] == 39


def test_the_summary_has_the_numbers_of_each_replica(ask):
    written = example_series(3, range(40), slow=1)
    found = ask("/summary", experiment="a/b")
    own = []
    for replica, row in zip(written, found["replicas"], strict=True):
        for tag in (names.LOSS, names.STEP_SECONDS):
            values = np.array(list(replica[tag].values()))
            numbers = row["numbers"][tag]
            expected = {"last": values[-1], "mean": values.mean(), "std": values.std(), "max": values.max()}
            assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-9)
            assert (numbers["count"], numbers["bad"], numbers["last_step"]) == (40, 0, 39)
            assert numbers["max_step"] == values.argmax()
        assert row["examples"] == 40 * 64
        assert row["examples_sampled"] is False
        assert row["score"] == pytest.approx(replica[names.SCORE][39])
        means = [np.mean(list(replica[tag].values())) for tag in (names.COMPUTE_SECONDS, names.INPUT_SECONDS)]
        own.append(sum(means))
    assert [row["relative"] for row in found["replicas"]] == pytest.approx([min(own) / one for one in own], rel=1e-6)
    assert found["overall"][names.ALL_LOSS]["source"] == "recorded"
    assert found["steps"] == [0, 39]
    assert found["seconds"] == pytest.approx(39 * SECONDS)


def test_the_summary_follows_the_part_in_view_and_bears_a_part_without_data(ask):
    part = ask("/summary", experiment="a/b", axis="wall", low=START + 10 * SECONDS, high=START + 19.9 * SECONDS)
    assert part["steps"] == [10, 19]
    assert part["replicas"][0]["examples"] == 640
    nothing = ask("/summary", experiment="a/b", low=500, high=600)
    assert (nothing["steps"], nothing["replicas"][0]["numbers"]) == (None, {})


def test_the_summary_of_what_is_not_finite_and_of_a_log_without_a_chief(ask):
    numbers = ask("/summary", experiment="starved")["replicas"][0]["numbers"][names.LOSS]
    assert (numbers["bad"], numbers["count"]) == (2, 12)
    overall = ask("/summary", experiment="no chief")["overall"]
    seconds = [list(tags[names.STEP_SECONDS].values()) for tags in example_series(2, range(30), seed=1)]
    assert overall[names.ALL_EXAMPLES_PER_SECOND] == {
        "mean": pytest.approx((64 / np.mean(seconds, axis=1)).sum(), rel=1e-6),
        "source": "derived",
    }


def test_intervals_count_by_their_steps_and_rates_by_their_time(tmp_path):
    columns = {names.STEP_SECONDS: (1.0, 0.1, 0.01), names.EXAMPLES_PER_SECOND: (50.0, 500.0, 5000.0)}
    columns[names.LOSS] = (3.0, 2.0, 1.0)
    series = {tag: dict(zip((1, 10, 30), values, strict=True)) for tag, values in columns.items()}
    write_experiment(tmp_path, "grows", [series])
    found = answer(plugin_of(multiplexer_of(tmp_path), tmp_path), "/summary", experiment="grows")
    numbers = {tag: found["replicas"][0]["numbers"][tag]["mean"] for tag in columns}
    seconds = 1 * 1.0 + 9 * 0.1 + 20 * 0.01
    expected = {names.STEP_SECONDS: seconds / 30, names.EXAMPLES_PER_SECOND: 30 * 50 / seconds, names.LOSS: 41 / 30}
    assert numbers == pytest.approx(expected, rel=1e-5)
    assert found["overall"][names.ALL_EXAMPLES_PER_SECOND]["mean"] == pytest.approx(30 * 50 / seconds, rel=1e-5)


def test_csv_has_every_point_and_an_empty_cell_where_there_is_none(provider, log_dir):
    plugin = plugin_of(provider, log_dir)
    response = get(plugin, "/csv", experiment="starved", tag=names.LOSS)
    assert response.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert response.headers["Content-Disposition"] == 'attachment; filename="starved-loss.csv"'
    header, *rows = csv.reader(io.StringIO(response.get_data(as_text=True), newline=""))
    assert header == ["step", "wall_time", "replica_0", "replica_1", "mean", "min", "max"]
    assert [row[0] for row in rows] == [str(step) for step in range(12)]
    assert [row[1] for row in rows][:2] == [f"{START:.3f}", f"{START + SECONDS:.3f}"]
    assert (rows[8][2], rows[9][2], rows[4][3]) == ("NaN", "-Infinity", "")
    written = example_series(2, range(12), seed=3)
    assert [np.float32(row[3]) for row in rows if row[3]] == [
        np.float32(value) for step, value in written[1][names.LOSS].items() if step not in (4, 5)
    ]
    part = get(plugin, "/csv", experiment="starved", tag=names.LOSS, low=3, high=5, hidden="0").get_data(as_text=True)
    assert part.splitlines()[0] == "step,wall_time,replica_1,mean,min,max"
    assert [line.split(",")[0] for line in part.splitlines()[1:]] == ["3", "4", "5"]


def test_a_part_without_points_is_csv_of_no_rows(slow_provider, log_dir):
    plugin = plugin_of(slow_provider, log_dir)
    response = get(plugin, "/csv", experiment="a/b", tag=names.LOSS, low=1e6, high=2e6)
    (header,) = response.get_data(as_text=True).splitlines()
    assert header.startswith("step,wall_time,")


def test_a_log_directory_that_is_not_there_yet_has_no_experiments(tmp_path):
    def missing(*_, **__):
        raise errors.NotFoundError("no such folder")

    provider = types.SimpleNamespace(list_scalars=missing, list_tensors=missing)
    assert answer(plugin_of(provider, tmp_path), "/experiments")["experiments"] == []


def test_what_cannot_be_read_ahead_is_read_when_it_is_asked_for(slow_provider, log_dir, monkeypatch, caplog):
    source = Source(slow_provider)
    (experiment, *_) = source.experiments(RequestContext(), "").values()

    def fails(*_):
        raise RuntimeError("no luck here")

    caplog.set_level("INFO", logger=source_module._log.name)
    monkeypatch.setattr(source, "points", fails)
    source.warm(RequestContext(), "", experiment)
    deadline = time.monotonic() + 10
    while source._is_warming and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not source._is_warming
    assert "could not read ahead: no luck here" in caplog.text


def test_the_name_of_a_csv_file_is_harmless():
    assert file_name('x"\r\nSet-Cookie: a=b;../../ü', names.LOSS) == "x-Set-Cookie-a-b-loss.csv"


@pytest.mark.parametrize(
    ("parameters", "status", "words"),
    [
        ({"tag": names.LOSS}, 400, "has no experiment"),
        ({"experiment": "a/b", "tag": "nope"}, 400, "tag='nope': there are replica/loss, "),
        ({"experiment": "a/b", "tag": names.LOSS, "axis": "up"}, 400, "axis='up': there are step and wall."),
        ({"experiment": "a/b", "tag": names.LOSS, "low": "nan"}, 400, "low='nan' is not a finite number."),
        ({"experiment": "a/b", "tag": names.LOSS, "low": "abc"}, 400, "low='abc' is not a finite number."),
        ({"experiment": "a/b", "tag": names.LOSS, "low": 5, "high": 1}, 400, "low=5 is above high=1"),
        ({"experiment": "a/b", "tag": names.LOSS, "width": 0}, 400, "width=0 pixels: give 1 to 4000."),
        ({"experiment": "a/b", "tag": names.LOSS, "width": "9e9"}, 400, "width=9e+09 pixels"),
        ({"experiment": "gone", "tag": names.LOSS}, 404, "There is no experiment 'gone' in "),
    ],
)
def test_an_invalid_request_is_refused_with_the_valid_values(slow_provider, log_dir, parameters, status, words):
    response = get(plugin_of(slow_provider, log_dir), "/series", **parameters)
    assert response.status_code == status
    assert words in json.loads(response.get_data())["error"]


def test_hidden_replicas_are_numbers(slow_provider, log_dir):
    for hidden in ("1,x", "9" * 5000):
        response = get(plugin_of(slow_provider, log_dir), "/csv", experiment="a/b", tag=names.LOSS, hidden=hidden)
        assert response.status_code == 400
        assert f"hidden='{hidden}': give ids of replicas" in json.loads(response.get_data())["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_routes_only_read(slow_provider, log_dir, method):
    assert get(plugin_of(slow_provider, log_dir), "/experiments", method=method).status_code == 405


def test_an_empty_log_directory_has_no_experiments_and_the_tab_is_not_active(tmp_path):
    plugin = plugin_of(multiplexer_of(tmp_path), tmp_path)
    assert answer(plugin, "/experiments")["experiments"] == []
    assert plugin.is_active() is False


def test_the_tab_is_active_without_a_marker(tmp_path):
    write_experiment(tmp_path, "x", example_series(1, range(2)), with_all=False)
    assert plugin_of(multiplexer_of(tmp_path), tmp_path).is_active() is True


@pytest.mark.slow
def test_dropped_points_are_reported_with_the_flag_that_keeps_them(tmp_path):
    written = example_series(2, range(3000))
    del written[1][names.LOSS][17]  # the reservoirs keep other steps from here on
    write_experiment(tmp_path, "long", written, with_all=False)
    plugin = plugin_of(multiplexer_of(tmp_path), tmp_path)
    chart = answer(plugin, "/series", experiment="long", tag=names.LOSS, width=600)
    assert chart["sampled"] == {"limit": 1000, "last_step": 2999, "suggested": 5000}
    # No line hops from one replica to the other: each bin has points of both.
    assert not chart["exact"]
    assert len(chart["steps"]) <= 1000 // 8 + 3
    assert all("at" not in line for line in chart["replicas"])
    means = chart["overall"]["mean"]["mean"]
    true = np.mean([[tags[names.LOSS].get(step, np.nan) for step in range(3000)] for tags in written], axis=0)
    for first, last, mean in zip(chart["steps"], chart["ends"], means, strict=True):
        assert mean == pytest.approx(np.nanmean(true[first : last + 1]), abs=0.05)


# --- reading


def test_fast_reading_is_used_and_equals_the_public_api(provider):
    for runs in (["a/b/replica_0", "a/b/replica_2"], ["starved/replica_0"], ["no chief/replica_1"], ["gone"]):
        fast = read_columns(provider, "", runs, names.LOSS)
        assert fast is not None, "TensorBoard's data provider has changed: reading is 10 times as slow now"
        public = read_publicly(provider, CTX, "", runs, names.LOSS)
        assert fast.keys() == public.keys()
        assert len(fast) == (runs != ["gone"]) * len(runs)
        for run, columns in fast.items():
            for column, expected in zip(columns, public[run], strict=True):
                np.testing.assert_array_equal(np.float64(column), np.float64(expected))


@pytest.mark.parametrize("private", [{}, {"_stub": object()}, {"_multiplexer": object()}])
def test_reading_falls_back_to_the_public_api(slow_provider, private):
    methods = ("read_scalars", "list_scalars", "list_tensors")
    public = types.SimpleNamespace(**{name: getattr(slow_provider, name) for name in methods}, **private)
    source = Source(public)
    found = source.points(CTX, "", source.experiments(CTX, "")["a/b"], names.LOSS)
    assert found["a/b/replica_1"].values.tolist() == list(example_series(3, range(40), slow=1)[1][names.LOSS].values())


class Counting:
    """A provider that counts what it is asked."""

    def __init__(self, provider):
        self._provider = provider
        self.asked = []

    def __getattr__(self, name):
        def ask(*args, **kwargs):
            self.asked.append(name)
            return getattr(self._provider, name)(*args, **kwargs)

        if name.startswith("_"):
            raise AttributeError(name)
        return ask


def test_series_are_read_again_only_when_tensorboard_has_read_more(tmp_path):
    write_experiment(tmp_path, "x", example_series(2, range(5)), with_all=False)
    inner = multiplexer_of(tmp_path)
    provider, now = Counting(inner), [0.0]
    source = Source(provider, clock=lambda: now[0])

    def read():
        return source.points(CTX, "", source.experiments(CTX, "")["x"], names.LOSS)

    first = read()
    assert read() is first
    assert provider.asked == ["list_scalars", "list_tensors", "read_scalars"]
    now[0] += 100  # the listing is old, what it says is the same
    assert read() is first
    assert provider.asked[3:] == ["list_scalars", "list_tensors"]
    with Run(tmp_path, "x/replica_0") as run:
        run.scalars(9, {names.LOSS: 4.0})
    inner._multiplexer.Reload()
    assert read() is first, "nobody has asked for a new listing"
    source.experiments(CTX, "", refresh=True)
    assert read()["x/replica_0"].values[-1] == 4.0


def test_simultaneous_requests_wait_for_one_read():
    kept, started, reads = source_module._SeriesCache(1000), threading.Event(), []

    def read():
        reads.append(1)
        assert started.wait(60)
        return {"run": newest([0], [0.0], [1.0])}

    threads = [threading.Thread(target=kept.get, args=("key", 1, read)) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.set()
    for thread in threads:
        thread.join(60)
    assert reads == [1]


def test_the_series_used_longest_ago_go_first_when_memory_is_full():
    kept, reads = source_module._SeriesCache(25), []

    def get_(key):
        return kept.get(key, 1, lambda: reads.append(key) or {"run": newest(range(10), range(10), [0.0] * 10)})

    for key in "abac":  # a, b, a again, then c: b must go
        get_(key)
    reads.clear()
    for key in "ca":
        get_(key)
    assert reads == []
    get_("b")
    assert reads == ["b"]


def test_replicas_with_equal_steps_share_them_in_memory(slow_provider):
    source = Source(slow_provider)
    found = source.points(CTX, "", source.experiments(CTX, "")["a/b"], names.LOSS)
    assert found["a/b/replica_0"].steps is found["a/b/replica_1"].steps


# --- the page's files, and how TensorBoard finds the plugin


def test_every_file_of_the_page_is_packaged_and_nothing_else_is_served(slow_provider, log_dir):
    static = ROOT / "keras_dist_ext" / "monitoring" / "dashboard" / "static"
    files = {file.relative_to(static).as_posix() for file in static.rglob("*") if file.is_file()}
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["keras_dist_ext.monitoring.dashboard"].split()
    packaged = {file.relative_to(static).as_posix() for pattern in patterns for file in static.parent.glob(pattern)}
    assert packaged == files == set(StaticFiles().paths)
    assert "vendor/uplot/LICENSE" in files
    plugin = plugin_of(slow_provider, log_dir)
    for path in files:
        response = get(plugin, f"/static/{path}")
        kind = {"js": "text/javascript", "css": "text/css"}.get(path.rsplit(".", 1)[-1], "text/plain")
        assert response.headers["Content-Type"] == f"{kind}; charset=utf-8", path
        assert response.get_data() == (static / path).read_bytes()


@pytest.mark.parametrize("path", ["../plugin.py", "..%2fplugin.py", "/etc/passwd", "nope.js", "", "charts"])
def test_no_other_file_is_served(slow_provider, log_dir, path):
    response = get(plugin_of(slow_provider, log_dir), f"/static/{path}")
    assert response.status_code == 404


def test_scripts_come_only_from_the_package():
    static = ROOT / "keras_dist_ext" / "monitoring" / "dashboard" / "static"
    own = [file for file in static.rglob("*.js") if "vendor" not in file.parts]
    assert len(own) > 15
    for file in own:
        text = file.read_text()
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "https://",
            "//cdn",
        ):
            assert forbidden not in text, f"{forbidden} in {file.name}"


_START = """
import sys
from tensorboard import default
plugins = [plugin for plugin in default.get_dynamic_plugins() if "replicas" in str(plugin).lower()]
assert len(plugins) == 1, plugins
import types
from tensorboard.backend import application
loader = application.make_plugin_loader(plugins[0])
context = types.SimpleNamespace(data_provider=object(), logdir="x", flags=None, sampling_hints=None)
{before}
plugin = loader.load(context)
print(plugin and plugin.plugin_name, sorted(set(sys.modules) & {{"tensorflow", "keras", "tf_keras"}}))
"""


def start(tmp_path, before=""):
    ended = subprocess.run(
        [sys.executable, "-c", _START.format(before=before)],
        env=environment(as_installed(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip(), ended.stderr


def test_tensorboard_finds_the_plugin_by_its_entry_point_and_imports_neither_tensorflow_nor_keras(tmp_path):
    assert start(tmp_path)[0] == "replicas []"


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (
            "sys.modules['keras_dist_ext.monitoring.dashboard.plugin'] = None",
            "The Replicas tab is off: ModuleNotFoundError: ",
        ),
        ("context.data_provider = None", "The Replicas tab is off: TensorBoard runs with --generic_data=false."),
        ("context.sampling_hints = 7", "The Replicas tab is off: AttributeError: "),
    ],
)
def test_a_plugin_that_cannot_work_is_left_out_with_a_warning(tmp_path, before, words):
    stdout, stderr = start(tmp_path, before)
    assert stdout == "None []"
    assert words in stderr


_LOADER = """
import sys
from tensorboard.plugins import base_plugin
before = set(sys.modules)
import keras_dist_ext.monitoring.dashboard.loader
print(*sorted(name for name in set(sys.modules) - before if name.startswith("keras_dist_ext")))
"""


def test_the_loader_needs_nothing_but_tensorboard():
    ended = subprocess.run([sys.executable, "-c", _LOADER], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.stdout.split() == [
        "keras_dist_ext",
        "keras_dist_ext.errors",
        "keras_dist_ext.monitoring",
        "keras_dist_ext.monitoring.dashboard",
        "keras_dist_ext.monitoring.dashboard.loader",
        "keras_dist_ext.versions",
    ]
