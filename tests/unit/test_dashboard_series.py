"""What the dashboard draws of a series: each step once, reduced without losing an extreme, as strict JSON."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from dashboard.logs import SECONDS, START
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.util import tensor_util

from keras_dist_ext.monitoring.dashboard import metadata as names
from keras_dist_ext.monitoring.dashboard import wire
from keras_dist_ext.monitoring.dashboard.clock import clock_of
from keras_dist_ext.monitoring.dashboard.experiments import Experiment, Newest, group
from keras_dist_ext.monitoring.dashboard.lines import bins_of, over, reduce
from keras_dist_ext.monitoring.dashboard.points import newest, union_of_steps
from keras_dist_ext.monitoring.dashboard.reading import _scalar
from keras_dist_ext.monitoring.dashboard.summary import _numbers
from keras_dist_ext.monitoring.dashboard.trained import MOST, trained
from keras_dist_ext.monitoring.dashboard.view import View


def points(values, steps=None):
    steps = np.arange(len(values)) if steps is None else np.asarray(steps)
    return newest(steps, START + steps * SECONDS, values)


# --- names


@given(st.text(st.characters(exclude_categories=["Cs"])).map(lambda name: name.strip("/\\")), st.integers(0, 10**8))
def test_the_name_of_a_run_says_what_it_was_made_from(experiment, replica):
    assert names.parse_run(names.replica_run(experiment, replica)) == (experiment, replica)
    assert names.parse_run(names.all_run(experiment)) == (experiment, None)


@pytest.mark.parametrize(
    "run", ["replica_", "replica_01", "replica_1/x", "replica_-1", "replica_\u0661", "xreplica_1", "."]
)
def test_other_runs_are_not_ours(run):
    assert names.parse_run(run) is None


def test_a_tag_that_replicas_do_not_have_is_refused_with_those_they_have():
    with pytest.raises(ValueError, match="'loss' is not the tag of a replica; there are replica/loss, "):
        names.over_replicas("loss", "min")
    with pytest.raises(ValueError, match="'median' is not a statistic over replicas; there are min, mean, max, std."):
        names.over_replicas(names.LOSS, "median")


# --- one series


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1, width=32)), max_size=60))
def test_after_a_restart_the_newest_point_of_a_step_counts_and_no_later_abandoned_one(written):
    steps = [step for step, _ in written]
    kept = newest(steps, range(len(written)), [value for _, value in written])
    expected = [
        (step, value) for i, (step, value) in enumerate(written) if all(later > step for later in steps[i + 1 :])
    ]
    assert list(zip(kept.steps.tolist(), kept.values.tolist(), strict=True)) == expected
    assert (np.diff(kept.steps) > 0).all()
    assert (np.diff(kept.walls) > 0).all()


def test_invalid_times_do_not_reach_the_page():
    points = newest([1, 2, 3], [10.0, math.nan, math.inf], [1.0, 2.0, 3.0])
    assert clock_of([points]).walls.tolist() == [10.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("steps", "limit", "sampled"),
    [
        (range(10), 10, False),  # whole: chance does not choose evenly
        (range(0, 100, 10), 10, False),
        ([0, 1, 2, 5, 6, 7, 8, 9, 10, 12], 10, True),
        ([0, 1, 2, 5], 10, False),
        ([0, 1, 2, 5, 6, 7, 8, 9, 10, 12], 0, False),  # --samples_per_plugin scalars=0: all
    ],
)
def test_a_series_is_sampled_when_it_is_as_long_as_tensorboard_keeps_and_uneven(steps, limit, sampled):
    assert points(np.zeros(len(steps)), list(steps)).is_sampled(limit) is sampled


@given(st.lists(st.lists(st.integers(0, 50), unique=True).map(sorted), max_size=6))
def test_the_union_of_steps_has_each_step_once_in_order(series):
    arrays = [np.array(steps, np.int64) for steps in series]
    assert union_of_steps(arrays).tolist() == sorted({step for steps in series for step in steps})


def test_without_steps_there_are_no_bins():
    nothing = np.zeros(0, np.int64)
    line = reduce(points([1.0], [3]), bins_of(nothing, nothing.astype(float), 0, 10, 4))
    assert [part.size for part in (line.low, line.mean, line.high, line.known)] == [0, 0, 0, 0]
    assert line.bad == {}


def test_numbers_of_other_programs_are_read_of_any_dtype():
    for value in (np.float64(1.5), np.int64(2), np.float32(0.5)):
        assert _scalar(tensor_util.make_tensor_proto(value)) == value


def test_runs_of_others_and_runs_without_tags_are_no_experiments():
    end = Newest(3, 10.0)
    scalars = {names.replica_run("a", 0): {names.LOSS: end}, names.replica_run("b", 0): {}, "train": {"loss": end}}
    texts = {names.replica_run("c", 1): {names.MANIFEST_TAG: end}}
    found = group(scalars, texts)
    assert list(found) == ["a", "c"]
    assert found["a"].runs == {0: names.replica_run("a", 0)}
    assert found["c"].runs == {}


class Trained:
    """Stands for the view of an experiment."""

    def __init__(self, number, rates):
        self.experiment = SimpleNamespace(name=f"run {number}", newest=Newest(1, float(number)))
        self.rates = rates

    def overall(self, tag):
        return points(self.rates, range(len(self.rates)))


def test_of_many_trainings_the_newest_that_have_a_speed_are_beside_a_plan():
    manifest = json.dumps({"version": 1, "strategy": {"num_replicas": 2}, "batch_size": 8})
    views = {Trained(number, [1.0, 3.0] if number % 2 else [math.nan]): manifest for number in range(2 * MOST + 4)}
    found = trained(views)
    assert [one["experiment"] for one in found] == [f"run {number}" for number in range(2 * MOST + 3, 3, -2)]
    assert {one["examples_per_second"] for one in found} == {2.0}


def test_an_experiment_without_a_series_has_no_times():
    view = View(SimpleNamespace(limit=0, points=lambda *_: {}), None, "", Experiment("a"))
    assert view.clock.steps.tolist() == []


def test_a_series_without_a_finite_value_has_a_sum_and_no_extremes():
    found = _numbers(None, names.LOSS, points([math.nan, math.inf]), None, 0.0, 1.0)
    assert found == {"count": 2.0, "bad": 2.0, "last": math.inf, "last_step": 1.0, "sum": 0.0}
    assert _numbers(None, names.LOSS, points([1.0]), None, 5.0, 9.0) is None


# --- reducing

series = st.lists(
    st.dictionaries(
        st.integers(0, 400), st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=150
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150)
@given(series, st.integers(1, 40), st.floats(-10, 410), st.floats(0, 420))
def test_reducing_keeps_the_extremes_of_every_bin_and_every_step_in_exactly_one(held, width, low, length):
    replicas = [points(list(by_step.values()), list(by_step)) for by_step in map(dict, map(sorted_items, held))]
    steps = union_of_steps(p.steps for p in replicas)
    high = low + length
    bins = bins_of(steps, steps.astype(float), low, high, width)
    inside = steps[(steps >= low) & (steps <= high)]
    assert ((bins.first <= bins.last) & np.isin(bins.first, steps) & np.isin(bins.last, steps)).all()
    assert (bins.first[1:] > bins.last[:-1]).all()
    assert all(((bins.first <= step) & (step <= bins.last)).sum() == 1 for step in inside)
    assert bins.first.size <= max(width + 3, 2 * width)
    if steps.size <= 2 * width:
        assert bins.is_exact
    for p in replicas:
        line = reduce(p, bins)
        for b, (first, last) in enumerate(zip(bins.first, bins.last, strict=True)):
            values = p.values[(p.steps >= first) & (p.steps <= last)].astype(np.float64)
            finite = values[np.isfinite(values)]
            assert line.known[b] == bool(values.size)
            assert (b in line.bad) == (finite.size < values.size)
            if finite.size:
                assert (line.low[b], line.high[b]) == (finite.min(), finite.max())
                assert line.low[b] <= line.mean[b] <= line.high[b]
                assert line.mean[b] == pytest.approx(finite.mean(), rel=1e-6, abs=1e-30 + 1e-6 * np.abs(finite).max())
            else:
                assert np.isnan([line.low[b], line.mean[b], line.high[b]]).all()


def sorted_items(by_step):
    return sorted(by_step.items())


def test_a_spike_of_one_step_in_twenty_thousand_is_in_the_reduced_line():
    values = np.full(20_000, 0.1, np.float32)
    values[12_345] = 7.0
    p = points(values)
    bins = bins_of(p.steps, p.steps.astype(float), -math.inf, math.inf, 300)
    assert 290 <= bins.first.size <= 303
    line = reduce(p, bins)
    assert line.high.max() == 7.0
    assert (line.high > 1).sum() == 1


def test_a_part_of_a_line_has_its_neighbours_so_that_it_continues_to_the_edge():
    p = points(np.arange(100.0))
    bins = bins_of(p.steps, p.steps.astype(float), 40.5, 44.5, 100)
    assert bins.first.tolist() == [40, 41, 42, 43, 44, 45]


def test_a_line_is_broken_at_a_gap_and_passes_steps_that_only_others_have():
    p = points([1.0, 2.0, 3.0], [0, 2, 6])
    steps = np.arange(7)
    bins = bins_of(steps, steps.astype(float), -math.inf, math.inf, 10)
    line = reduce(p, bins, np.array([4]))
    assert line.known.tolist() == [True, False, True, False, True, False, True]
    assert np.isnan(line.mean[4])


def test_words_for_what_is_not_finite_prefer_nan():
    p = points([math.inf, math.nan, 1.0, -math.inf, 1.0], [0, 1, 2, 10, 11])
    bins = bins_of(p.steps, p.steps.astype(float), -math.inf, math.inf, 2)
    assert reduce(p, bins).bad == {0: "NaN", 1: "-Infinity"}


@given(st.lists(st.lists(st.none() | st.floats(-100, 100, width=32), min_size=5, max_size=5), min_size=1, max_size=5))
def test_statistics_over_replicas_are_of_those_that_have_a_number(rows):
    steps = np.arange(5)
    bins = bins_of(steps, steps.astype(float), -math.inf, math.inf, 10)
    lines = {
        i: reduce(points([v for v in row if v is not None], [s for s, v in enumerate(row) if v is not None]), bins)
        for i, row in enumerate(rows)
    }
    found = over(lines)
    for step in range(5):
        held = [row[step] for row in rows if row[step] is not None]
        expected = (min(held), np.mean(held), max(held), sum(held)) if held else (math.nan,) * 4
        values = [found[name].mean[step] for name in ("min", "mean", "max", "total")]
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-4)


def test_the_clock_has_one_rising_time_for_each_step():
    clock = clock_of([newest([1, 2], [10.5, 10.4], [0, 0]), newest([0, 1, 3], [10.0, 11.0, 13.5], [0, 0, 0])])
    assert clock.steps.tolist() == [0, 1, 2, 3]
    assert clock.walls.tolist() == [10.0, 10.5, 10.5, 13.5]
    assert clock.positions(np.array([0, 3]), "step").tolist() == [0.0, 3.0]
    assert clock.wall_at(np.array([-5, 9])).tolist() == [10.0, 13.5]
    assert clock.steps_between("wall", 10.2, 11) == (1, 2)
    first, last = clock.steps_between("wall", 90, 99)
    assert first > last


# --- JSON


@given(st.lists(st.floats(width=32)))
def test_numbers_survive_json(values):
    sent = json.loads(wire.to_json(wire.numbers(np.array(values, np.float32))), parse_constant=pytest.fail)
    assert len(sent) == len(values)
    for value, received in zip(values, sent, strict=True):
        if math.isfinite(value):
            assert received == pytest.approx(value, rel=2e-7, abs=0)
        else:
            assert received is None


def test_numbers_are_as_short_as_a_float32_needs():
    assert json.dumps(wire.numbers(np.array([0.1, 1e-30, 123456.79, -2.5], np.float32))) == (
        "[0.1, 1e-30, 123456.79, -2.5]"
    )


def test_what_a_file_holds_becomes_strict_json():
    value = json.loads('{"a": [NaN, Infinity, {"b": -Infinity}], "c": 1.5, "d": null}')
    assert json.loads(wire.to_json(wire.finite(value)), parse_constant=pytest.fail) == {
        "a": ["NaN", "Infinity", {"b": "-Infinity"}],
        "c": 1.5,
        "d": None,
    }
