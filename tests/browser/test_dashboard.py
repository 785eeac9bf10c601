"""The Replicas tab in a real browser, on a real TensorBoard: what it draws is what the log holds.

The page says what it has drawn through `window.replicasDashboard` (see static/index.js).
"""

import base64
import csv
import io
import itertools
import math
import shutil
import struct
import sys
import time
import zlib

import keras
import numpy as np
import pytest
from dashboard import browser as browser_module
from dashboard.browser import Dashboard, chromium
from dashboard.logs import (
    FINDINGS,
    MANIFEST,
    SECONDS,
    START,
    Run,
    example_plan,
    example_series,
    write_experiment,
    write_large_experiment,
)
from dashboard.server import tensorboard
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import keras_dist_ext as kde
from keras_dist_ext.monitoring.dashboard import metadata as names

pytestmark = pytest.mark.skipif(browser_module.missing() is not None, reason=str(browser_module.missing()))

MIRRORED, ONE, LONG, ODD, WIDE = "night/mirrored", "night/one device", "long", "odd", "sixty-four"
PLAN = "night/plan"
EVIL = "<img src=x onerror=document.title='hacked'>/ünï'\"&"
CHARTS = ("loss", "throughput", "heatmap", "gradient_norm")
TAGS = {
    "loss": names.LOSS,
    "throughput": names.EXAMPLES_PER_SECOND,
    "heatmap": names.STEP_SECONDS,
    "gradient_norm": names.GRADIENT_NORM,
}


def mirrored():
    return example_series(4, range(120), slow=2)


def one_device():
    return example_series(1, range(150), seed=5)


def long():
    """4000 steps, of which two stand out: replica 0 at step 1234, replica 1 at step 2345."""
    steps = np.arange(4000)
    rng = np.random.default_rng(3)
    replicas = []
    for replica, (step, peak) in enumerate([(1234, 9.0), (2345, -5.0)]):
        loss = (1 + rng.normal(0, 0.05, steps.size)).astype(np.float32)
        loss[step] = peak
        seconds = (0.1 + 0.02 * replica + rng.gamma(2, 0.002, steps.size)).astype(np.float32)
        columns = {names.LOSS: loss, names.STEP_SECONDS: seconds, names.EXAMPLES_PER_SECOND: 64 / seconds}
        replicas.append(
            {tag: dict(zip(steps.tolist(), values.tolist(), strict=True)) for tag, values in columns.items()}
        )
    return replicas


def odd():
    """Replica 0 starves, replica 1 has NaN and an infinity, replica 2 ends early."""
    replicas = example_series(3, range(60), slow=1)
    for step in range(20, 30):
        del replicas[0][names.LOSS][step]
        replicas[0][names.EXAMPLES][step] = 0.0
    replicas[1][names.LOSS][40] = math.nan
    replicas[1][names.LOSS][41] = math.inf
    replicas[2][names.LOSS] = {step: value for step, value in replicas[2][names.LOSS].items() if step < 35}
    return replicas


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_experiment(folder, MIRRORED, mirrored(), findings=FINDINGS)
    strategy = {"name": "OneDeviceStrategy", "reason": "asked for", "num_replicas": 1, "num_workers": 1}
    write_experiment(
        folder, ONE, one_device(), manifest=MANIFEST | {"strategy": strategy, "devices": ["/device:GPU:0"]}
    )
    write_experiment(folder, LONG, long(), manifest=None)
    write_experiment(folder, ODD, odd())
    write_experiment(folder, WIDE, example_series(64, range(30), slow=37))
    evil = MANIFEST | {
        "strategy": {"name": "<script>window.hacked = 1</script>", "reason": EVIL},
        "devices": [EVIL] * 2,
        "seeds": {EVIL: EVIL},
        "versions": {"<b>x</b>": "<i>y</i>"},
        "host": EVIL,
    }
    found = [FINDINGS[0] | {"code": EVIL, "what": EVIL, "evidence": EVIL, "fix": EVIL, "kind": EVIL}]
    write_experiment(folder, EVIL, example_series(2, range(5)), manifest=evil, findings=found)
    with Run(folder, names.all_run(PLAN)) as run:
        run.text(names.PLAN_TAG, example_plan(), 0, START + 2e5)
    with Run(folder, names.all_run(EVIL)) as run:
        run.text(names.PLAN_TAG, example_plan(EVIL), 4, START + 10)
    # The training that was written to last is shown first.
    write_experiment(folder, MIRRORED + "/validation", example_series(4, range(0, 120, 40)), start=START + 1e5)
    with Run(folder, names.all_run(MIRRORED)) as run:
        run.text(names.FINDINGS_TAG, FINDINGS, 119, START + 9e4)
    return folder


@pytest.fixture(scope="module")
def board(log_dir, tmp_path_factory):
    work = tmp_path_factory.mktemp("tensorboard")
    flags = ("--samples_per_plugin=scalars=100000", "--reload_interval=1")
    with tensorboard(log_dir, work, *flags) as board:
        board.wait(lambda listed: len(listed) == 8 and is_whole(listed))
        for name, num_replicas, last in ((MIRRORED, 4, 119), (ONE, 1, 149), (LONG, 2, 3999), (ODD, 3, 59)):
            board.wait_until_read(name, num_replicas, last)
        board.wait_until_read(WIDE, 64, 29)
        board.wait_until_read(EVIL, 2, 4)
        yield board


def is_whole(listed):
    ends = {MIRRORED: 119, ONE: 149, LONG: 3999, ODD: 59, WIDE: 29, EVIL: 4}
    return (
        all(listed[name]["last_step"] == end for name, end in ends.items())
        and listed[MIRRORED]["last_wall"] > START + 8e4
    )


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def chrome(downloads):
    with chromium(downloads) as browser:
        yield browser


@pytest.fixture(scope="module")
def tab(chrome, board):
    return Dashboard(chrome, board.url)


@pytest.fixture
def page(tab):
    """The tab as a person finds it who opens TensorBoard; it must not have made the browser complain."""
    tab.errors()
    tab.reset()
    yield tab
    assert tab.errors() == []


def column(series, tag, replica):
    return list(series[replica][tag].values())


def over(series, tag, statistic):
    return getattr(np, statistic)([list(tags[tag].values()) for tags in series], axis=0)


def mean_rate(series):
    """Examples a second of all replicas, over the time."""
    rates, seconds = over(series, names.EXAMPLES_PER_SECOND, "sum"), over(series, names.STEP_SECONDS, "mean")
    return np.average(rates, weights=seconds)


def replica_lines(lines):
    return {name: values for name, values in lines.items() if name.startswith("replica ")}


def close(values):
    return pytest.approx(list(values), rel=1e-6)


def wait_for(condition, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


# --- what is drawn


@pytest.mark.slow
def test_the_tab_opens_with_the_training_that_was_written_last(page, board):
    listing = board.get("data/plugins_listing")[1].decode()
    assert (
        '"replicas": {"disable_reload": false, "enabled": true, "remove_dom": false, "tab_name": "Replicas"' in listing
    )
    assert page.find("h2").text == MIRRORED  # its validation is newer, but not what one wants to see first


@pytest.mark.slow
def test_the_loss_of_every_replica_their_mean_and_their_band_are_drawn(page):
    loss = page.drawn(MIRRORED)["loss"]
    assert loss["x"] == list(range(120))
    lines = page.lines("loss", MIRRORED)
    assert list(lines) == ["highest", "lowest", "replica 0", "replica 1", "replica 2", "replica 3", "mean"]
    for replica in range(4):
        assert lines[f"replica {replica}"] == close(column(mirrored(), names.LOSS, replica))
    for name, statistic in (("highest", "max"), ("lowest", "min"), ("mean", "mean")):
        assert lines[name] == close(over(mirrored(), names.LOSS, statistic))
    assert len({one["color"] for one in loss["series"] if one["name"].startswith("replica")}) == 4


@pytest.mark.slow
def test_the_band_is_drawn_without_the_replicas_too(page):
    assert band_pixels(page) < 3 * band_pixels(page, "none")
    assert band_pixels(page, "none") > 500


def band_pixels(page, replicas="all"):
    """Count the pixels of the loss chart that have the colour of the band, with all or none of the replicas shown."""
    page.run(
        "[...document.querySelectorAll('.legend-all button')].find(b => b.textContent === arguments[0]).click()",
        replicas,
    )
    page.settle()
    png = page.run("return window.replicasDashboard.png(...arguments)", MIRRORED, "loss").split(",")[1]
    pixels = pixels_of(base64.b64decode(png))[60:300, :, :3].astype(int)
    return int((np.abs(pixels - (221, 223, 225)).max(axis=-1) <= 2).sum())


@pytest.mark.slow
def test_throughput_is_drawn_for_each_replica_stacked_and_in_total(page):
    rates = [column(mirrored(), names.EXAMPLES_PER_SECOND, replica) for replica in range(4)]
    lines = page.lines("throughput", MIRRORED)
    assert [lines[f"replica {replica}"] for replica in range(4)] == [close(rate) for rate in rates]
    page.click(".card[data-chart=throughput] [data-value=stacked]")
    lines = page.lines("throughput", MIRRORED)
    assert list(lines) == ["replica 3", "replica 2", "replica 1", "replica 0"]  # from the top
    for replica in range(4):
        assert lines[f"replica {replica}"] == close(np.sum(rates[: replica + 1], axis=0))
    page.click(".card[data-chart=throughput] [data-value=total]")
    assert page.lines("throughput", MIRRORED) == {"total": close(np.sum(rates, axis=0))}
    view = page.drawn(MIRRORED)["throughput"]["view"]
    assert view["y"][0] == 0


@pytest.mark.slow
def test_the_heat_map_has_a_row_per_replica_and_darker_cells_for_longer_steps(page):
    for tag in (names.STEP_SECONDS, names.COMPUTE_SECONDS, names.INPUT_SECONDS, names.SYNC_SECONDS):
        page.click(f'.card[data-chart=heatmap] [data-value="{tag}"]')
        heat = page.drawn(MIRRORED)["heatmap"]
        assert heat["x"] == list(range(120))
        assert [row["name"] for row in heat["series"]] == [f"replica {replica}" for replica in range(4)]
        for replica, row in enumerate(heat["series"]):
            assert row["values"] == close(column(mirrored(), tag, replica))
        cells = sorted(
            (value, luminance(color))
            for row in heat["series"]
            for value, color in zip(row["values"], row["colors"], strict=True)
        )
        assert all(darker <= lighter + 1 for (_, lighter), (_, darker) in itertools.pairwise(cells))
    page.click(f'.card[data-chart=heatmap] [data-value="{names.COMPUTE_SECONDS}"]')
    rows = page.drawn(MIRRORED)["heatmap"]["series"]
    darkness = [np.mean([luminance(color) for color in row["colors"]]) for row in rows]
    assert np.argmin(darkness) == 2, "the straggler stands out"
    assert darkness[2] < 0.6 * min(darkness[:2])
    legend = page.find(".heat-legend").text
    for word in ("fast", "slow", " ms"):
        assert word in legend


def luminance(color):
    red, green, blue = map(int, color.removeprefix("rgb(").removesuffix(")").split())
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.slow
def test_a_plan_is_drawn_with_what_was_trained(page):
    page.choose(PLAN)
    assert [(point["replicas"], point["examples_per_second"]) for point in drawn_points(page)] == [
        (1, 100.0),
        (2, 180.0),
        (4, 250.0),
    ]
    of_one, of_two, of_four = [point["trained"] for point in drawn_points(page)]
    assert of_one == [pytest.approx(np.median(column(one_device(), names.EXAMPLES_PER_SECOND, 0)), rel=1e-6)]
    assert of_two == []
    assert pytest.approx(np.median(over(mirrored(), names.EXAMPLES_PER_SECOND, "sum")), rel=1e-6) in of_four
    assert page.find("tr.pays th").text == "2"
    assert len(page.all(".plan-chart circle")) == 3
    assert len(page.all(".plan-chart rect.trained")) == 1 + len(of_four)
    page.click('.card[data-chart=plan] [data-value="fixed batch a replica"]')
    assert [point["examples_per_second"] for point in drawn_points(page)] == [100.0, 190.0, 370.0]
    assert [len(point["trained"]) for point in drawn_points(page)] == [1, 0, 0]
    assert page.all("[data-chart=loss]") == []
    page.choose(PLAN, MIRRORED)
    assert [head.text for head in page.all(".comparison thead th")] == [MIRRORED]


def drawn_points(page):
    return page.drawn(PLAN)["plan"]["points"]


@pytest.mark.slow
def test_one_long_first_step_does_not_make_all_others_look_alike(page):
    page.choose(LONG)
    heat = page.drawn(LONG)["heatmap"]
    low, high, most = heat["scale"]
    assert low < 0.11 < high <= most


@pytest.mark.slow
def test_bars_split_a_step_into_compute_input_and_sync(page):
    bars = page.drawn(MIRRORED)["split"]["bars"]
    tags = {"compute": names.COMPUTE_SECONDS, "input": names.INPUT_SECONDS, "sync": names.SYNC_SECONDS}
    scales = []
    for replica, bar in enumerate(bars):
        means = {part: np.mean(column(mirrored(), tag, replica)) for part, tag in tags.items()}
        assert bar["replica"] == replica
        assert bar["parts"] == pytest.approx(means, rel=1e-5)
        scales += [bar["heights"][part] / means[part] for part in tags]
    assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-4), "heights are in proportion to seconds"
    page.click(".card[data-chart=split] [data-value=share]")
    heights = [sum(bar["heights"].values()) for bar in page.drawn(MIRRORED)["split"]["bars"]]
    assert heights == pytest.approx([heights[0]] * 4)


@pytest.mark.slow
def test_the_table_has_the_numbers_of_each_replica_and_marks_the_worst(page):
    table = page.drawn(MIRRORED)["table"]
    rows = [dict(zip(table["columns"], row["values"], strict=True)) for row in table["rows"]]
    for replica, row in enumerate(rows):
        for tag, worst in ((names.LOSS, "max"), (names.STEP_SECONDS, "max"), (names.EXAMPLES_PER_SECOND, "min")):
            values = np.array(column(mirrored(), tag, replica))
            # A rate counts by its time, so that the mean is examples in all by seconds in all.
            weights = column(mirrored(), names.STEP_SECONDS, replica) if tag == names.EXAMPLES_PER_SECOND else None
            mean = np.average(values, weights=weights)
            expected = {
                "last": values[-1],
                "mean": mean,
                "spread": np.average((values - mean) ** 2, weights=weights) ** 0.5,
                "worst": getattr(values, worst)(),
            }
            assert {name: row[f"{tag}:{name}"] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-9)
        assert row["examples"] == 120 * 64
        assert row["score"] == pytest.approx(0.7 if replica == 2 else 0.97, rel=1e-6)
    assert [row["relative"] for row in rows][2] == min(row["relative"] for row in rows) < 0.8
    marked = page.find("table.replicas").find_elements("css selector", "td.worst")
    assert {
        (cell.find_element("xpath", "..").get_attribute("data-replica"), cell.get_attribute("data-key"))
        for cell in marked
    } >= {
        ("2", "score"),
        ("2", "relative"),
    }
    cells = [cell.text for cell in page.all('table.replicas tbody tr[data-replica="1"] td')]
    assert cells[0] == "GPU:1"
    assert "7,680" in cells


@pytest.mark.slow
def test_no_number_is_marked_the_worst_that_reads_like_the_best(page):
    worst_of = """
        const loaded = performance.getEntriesByType("resource").map(({ name }) => name);
        const url = loaded.find((name) => name.includes("/table.js"));
        const column = { value: (row) => row.value, text: (value) => value.toFixed(2), worst: "min" };
        return import(url).then(({ worstOf }) => worstOf(column, arguments[0].map((value, id) => ({ value, id }))));
    """
    assert page.run(worst_of, [1.0, 0.98, 0.999]) == 1
    assert page.run(worst_of, [1.0, 0.9999, 0.9998]) is None


@pytest.mark.slow
def test_the_table_sorts_by_any_column_both_ways(page):
    def order():
        return [row["replica"] for row in page.drawn(MIRRORED)["table"]["rows"]]

    key = f"{names.LOSS}:last"
    last = [column(mirrored(), names.LOSS, replica)[-1] for replica in range(4)]
    page.click(f'table.replicas button[data-key="{key}"]')
    assert order() == sorted(range(4), key=lambda replica: -last[replica])
    button = page.find(f'table.replicas button[data-key="{key}"]')
    assert button.find_element("xpath", "..").get_attribute("aria-sort") == "descending"
    assert page.run("return document.activeElement.dataset.key") == key, "sorting keeps the focus"
    page.press(Keys.ENTER)
    assert order() == sorted(range(4), key=lambda replica: last[replica])
    page.click('table.replicas button[data-key="replica"]')
    assert order() == [0, 1, 2, 3]


@pytest.mark.slow
def test_strategy_reason_devices_seeds_and_versions_are_at_the_top(page):
    for details in page.all("details"):
        details.click()
    top = page.find(".panel-header").text
    for words in (
        *("MirroredStrategy", "4 GPUs are visible, and there is no TF_CONFIG", "4 replicas on 1 worker"),
        *("global batch 256", "host train-01", "GPU:3", "42, 43, 44, 45", "2.21.0", "4 \u00d7 GPU"),
    ):
        assert words in top, words


def test_findings_are_shown_with_what_to_do_and_marked_in_the_charts(page):
    divergence, straggler = page.all(".finding")
    for element, finding in ((divergence, FINDINGS[1]), (straggler, FINDINGS[0])):
        for name in ("code", "what", "evidence", "fix"):
            assert finding[name].replace("`", "") in element.text
    assert divergence.find_element("css selector", ".fix code").text == "BatchNormalization(synchronized=True)"
    assert "costs 12.5s" in straggler.text
    assert "Divergence" in divergence.text
    straggler.find_element("css selector", "button").click()
    page.settle()
    low, high = page.drawn(MIRRORED)["loss"]["view"]["x"]
    assert low < 60 < high < low + 20


@pytest.mark.slow
def test_the_most_important_numbers_are_tiles(page):
    tiles = {tile.get_attribute("data-tile"): tile.text for tile in page.all(".tile")}
    loss = over(mirrored(), names.LOSS, "mean")[-1]
    assert f"{loss:.4g}" in tiles["loss"]
    assert f"{mean_rate(mirrored()):,.0f}" in tiles["throughput"]
    assert "\n2\n" in tiles["slowest"]
    assert {"loss", "throughput", "step", "efficiency", "input", "slowest"} == tiles.keys()


# --- what a person does


def views(page, experiment):
    found = page.drawn(experiment)
    return [found[chart]["view"]["x"] for chart in CHARTS]


@pytest.mark.slow
def test_a_zoom_is_shared_by_all_charts_and_a_double_click_ends_it(page):
    assert views(page, MIRRORED) == [[0, 119]] * 4
    page.drag("loss", 0.25, 0.5, MIRRORED)
    low, high = views(page, MIRRORED)[0]
    assert (low, high) == (pytest.approx(119 * 0.25, abs=1), pytest.approx(119 * 0.5, abs=1))
    assert views(page, MIRRORED) == [[low, high]] * 4
    inside = [value for step, value in mirrored()[1][names.COMPUTE_SECONDS].items() if low <= step <= high]
    assert page.drawn(MIRRORED)["split"]["bars"][1]["parts"]["compute"] == pytest.approx(np.mean(inside), rel=1e-5)
    page.drag("heatmap", 0.25, 0.75, MIRRORED)
    narrower = views(page, MIRRORED)
    assert narrower == [narrower[0]] * 4
    assert narrower[0][1] - narrower[0][0] == pytest.approx((high - low) / 2, rel=0.1)
    ActionChains(page.browser).double_click(page.over("throughput", MIRRORED)).perform()
    page.settle()
    assert views(page, MIRRORED) == [[0, 119]] * 4


@pytest.mark.slow
def test_a_zoom_fetches_every_step_and_what_is_reduced_has_its_extremes(page):
    page.choose(LONG)
    whole = page.drawn(LONG)["loss"]
    assert not whole["exact"]
    assert len(whole["x"]) < 2500
    lines = page.lines("loss", LONG)
    assert max(lines["replica 0"]) == 9.0
    assert min(lines["replica 1"]) == -5.0
    assert (max(lines["highest"]), min(lines["lowest"])) == (9.0, -5.0)
    page.drag("loss", 0.25, 0.35, LONG)
    fine = page.drawn(LONG)["loss"]
    assert fine["exact"]
    low, high = fine["view"]["x"]
    written = long()[0][names.LOSS]
    drawn = dict(zip(fine["x"], page.lines("loss", LONG)["replica 0"], strict=True))
    assert drawn.keys() >= set(range(math.ceil(low), math.floor(high) + 1))
    assert drawn == pytest.approx({step: written[step] for step in drawn}, rel=1e-6)


@pytest.mark.slow
def test_hovering_reads_the_values_of_all_charts_at_the_same_step(page):
    page.hover("loss", 0.5, MIRRORED)
    wait_for(lambda: page.find('.card[data-chart="heatmap"] .readout').text)
    readouts = {chart: page.find(f'.card[data-chart="{chart}"] .readout').text for chart in CHARTS}
    step = int(readouts["loss"].split()[1])
    assert step in (59, 60)
    assert all(text.startswith(f"step {step}") for text in readouts.values()), readouts
    mean = over(mirrored(), names.LOSS, "mean")[step]
    assert f"mean {mean:.4g}" in readouts["loss"]
    assert f"total {over(mirrored(), names.EXAMPLES_PER_SECOND, 'sum')[step]:,.0f}" in readouts["throughput"]
    tooltip = page.find(".tooltip").text
    for replica in range(4):
        assert f"replica {replica}" in tooltip
        assert f"{column(mirrored(), names.LOSS, replica)[step]:#.4g}" in tooltip
    page.hover("heatmap", 0.25, MIRRORED)
    wait_for(lambda: "replica 2" in page.find(".tooltip").text or "replica 1" in page.find(".tooltip").text)


@pytest.mark.slow
def test_a_log_scale_is_for_lines_and_drops_what_it_cannot_show(page):
    page.choose(LONG)
    page.click("[data-control=log]")
    found = page.drawn(LONG)
    assert [found[chart]["view"]["log"] for chart in ("loss", "throughput", "heatmap")] == [True, True, False]
    values = [value for line in page.lines("loss", LONG).values() for value in line if value is not None]
    assert min(values) > 0
    assert max(values) == 9.0
    page.click(".card[data-chart=throughput] [data-value=stacked]")
    assert not page.drawn(LONG)["throughput"]["view"]["log"]
    page.click("[data-control=log]")
    assert not page.drawn(LONG)["loss"]["view"]["log"]


@pytest.mark.slow
def test_smoothing_is_tensorboards(page):
    page.run("const e = document.getElementById('smoothing'); e.value = 0.6; e.dispatchEvent(new Event('input'))")
    lines = page.lines("loss", MIRRORED)
    last, expected = 0.0, []
    for count, value in enumerate(column(mirrored(), names.LOSS, 1), 1):
        last = 0.6 * last + 0.4 * value
        expected.append(last / (1 - 0.6**count))
    assert lines["replica 1"] == close(expected)
    assert lines["replica 1 unsmoothed"] == close(column(mirrored(), names.LOSS, 1))
    assert lines["highest"] == close(over(mirrored(), names.LOSS, "max")), "extremes are not smoothed away"


@pytest.mark.slow
def test_the_axis_is_steps_or_time(page):
    page.drag("loss", 0.25, 0.5, MIRRORED)
    low, high = views(page, MIRRORED)[0]
    page.click("[data-value=wall]")
    assert page.drawn(MIRRORED)["loss"]["x"] == pytest.approx([START + step * SECONDS for step in range(120)], abs=1e-3)
    assert views(page, MIRRORED) == [pytest.approx([START + low * SECONDS, START + high * SECONDS], abs=1e-2)] * 4
    page.click("[data-value=relative]")
    assert page.drawn(MIRRORED)["heatmap"]["x"] == pytest.approx([step * SECONDS for step in range(120)], abs=1e-3)
    page.drag("loss", 0.0, 0.5, MIRRORED)
    narrower = views(page, MIRRORED)[0]
    assert narrower == pytest.approx([low * SECONDS, (low + high) / 2 * SECONDS], abs=0.5)
    page.click("[data-value=step]")
    assert views(page, MIRRORED)[0] == pytest.approx([low, (low + high) / 2], abs=1)


@pytest.mark.slow
def test_a_click_on_a_replica_hides_it_everywhere(page):
    def shown():
        found = page.drawn(MIRRORED)
        lines = {one["replica"] for one in found["loss"]["series"] if one.get("replica") is not None}
        others = [
            {one["replica"] for one in found["heatmap"]["series"]},
            {bar["replica"] for bar in found["split"]["bars"]},
            {row["replica"] for row in found["table"]["rows"]},
            {one["replica"] for one in found["throughput"]["series"] if one.get("replica") is not None},
        ]
        assert others == [lines] * 4
        return lines

    page.click('.chip[data-replica="1"]')
    assert shown() == {0, 2, 3}
    assert page.find('.chip[data-replica="1"]').get_attribute("aria-pressed") == "false"
    page.click('.chip[data-replica="1"]')
    assert shown() == {0, 1, 2, 3}
    chip = page.find('.chip[data-replica="3"]')
    ActionChains(page.browser).key_down(Keys.SHIFT).click(chip).key_up(Keys.SHIFT).perform()
    assert shown() == {3}
    page.run("[...document.querySelectorAll('.legend-all button')].find(b => b.textContent === 'all').click()")
    assert shown() == {0, 1, 2, 3}
    page.run("[...document.querySelectorAll('.legend-all button')].find(b => b.textContent === 'none').click()")
    assert page.drawn(MIRRORED)["table"]["rows"] == []


@pytest.mark.slow
def test_what_was_chosen_is_remembered(page):
    page.click("[data-control=log]")
    page.click("[data-value=relative]")
    page.run("delete window.replicasDashboard; window.location.reload()")
    page.enter()
    loss = page.drawn(MIRRORED)["loss"]
    assert (loss["log"], loss["axis"]) == (True, "relative")


@pytest.mark.slow
def test_everything_works_with_the_keyboard(page):
    page.run("document.querySelector('.card[data-chart=loss] .plot').focus()")
    page.press(Keys.HOME)
    readout = page.find(".card[data-chart=loss] .readout")
    assert readout.text.startswith("step 0")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.PAGE_DOWN)
    assert readout.text.startswith("step 12")
    assert page.find(".card[data-chart=throughput] .readout").text.startswith("step 12")
    assert page.find("#announcer").get_attribute("textContent").startswith("step 12")
    page.press("+")
    low, high = views(page, MIRRORED)[0]
    assert high - low == pytest.approx(59.5)
    ActionChains(page.browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT).key_up(Keys.SHIFT).perform()
    page.settle()
    assert views(page, MIRRORED)[0][0] > low
    page.press("0", Keys.ESCAPE)
    assert views(page, MIRRORED)[0] == [0, 119]
    assert readout.text == ""
    page.run("document.querySelector('.chip').focus()")
    page.press(Keys.ARROW_RIGHT, Keys.SPACE)
    assert page.find('.chip[data-replica="1"]').get_attribute("aria-pressed") == "false"
    page.run("document.querySelector('.card[data-chart=split] .plot').focus()")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.find(".card[data-chart=split] .readout").text.startswith("replica 2 · compute ")
    page.run("document.querySelector('[data-control=experiments]').focus()")
    page.press(Keys.ENTER)
    assert page.find(".picker-popover").is_displayed()
    page.press(Keys.ESCAPE)
    assert not page.find(".picker-popover").is_displayed()
    assert page.run("return document.activeElement.dataset.control") == "experiments"


@pytest.mark.slow
def test_tab_reaches_every_control_and_shows_where_it_is(page):
    page.run("document.querySelector('[data-control=experiments]').focus()")
    seen = []
    for _ in range(45):
        page.press(Keys.TAB)
        seen.append(
            page.run(
                "const e = document.activeElement, s = getComputedStyle(e), label = e.getAttribute('aria-label');"
                "const name = label ?? e.labels?.[0]?.textContent ?? e.textContent;"
                "return [e.className, name || e.textContent, s.outlineStyle, parseFloat(s.outlineWidth)]"
            )
        )
        if seen[-1][1] == "Table of replicas":
            break
    classes = " ".join(str(one[0]) for one in seen)
    for name in ("toggle", "chip", "plot", "icon-button", "table-scroll"):
        assert name in classes
    for name, label, style, width in seen:
        assert label, name
        assert (style != "none", width >= 1) == (True, True), (name, label, "has no visible focus")


@pytest.mark.slow
def test_every_control_has_a_name_and_every_card_a_title(page):
    unnamed = page.run("""
        const named = (e) => e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length || e.title;
        const controls = [...document.querySelectorAll("button, input, [tabindex], summary")];
        return controls.filter((control) => !named(control)).map((control) => control.outerHTML);
    """)
    assert unnamed == []
    assert page.run("return document.documentElement.lang") == "en"
    titles = [
        page.run("return document.getElementById(arguments[0].getAttribute('aria-labelledby')).textContent", card)
        for card in page.all(".card")
    ]
    assert titles == [
        "Loss",
        "Examples per second",
        "Step time by replica",
        "Where a step\u2019s time goes",
        "Gradient norm",
        "Replicas",
    ]


@pytest.mark.slow
def test_dark_mode_follows_tensorboards(page):
    def colors():
        style = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        return [contrast_color(color) for color in page.run(style)]

    def replicas():
        return [one["color"] for one in page.drawn(MIRRORED)["loss"]["series"]]

    light, light_replicas = colors(), replicas()
    assert light[0] > 200 > 60 > light[1]
    page.browser.switch_to.default_content()
    page.browser.execute_script("document.body.classList.add('dark-mode')")
    page.enter()
    dark = colors()
    assert dark[0] < 60 < 200 < dark[1]
    assert replicas() != light_replicas
    page.browser.switch_to.default_content()
    page.browser.execute_script("document.body.classList.remove('dark-mode')")
    page.enter()
    assert (colors(), replicas()) == (light, light_replicas)


def contrast_color(color):
    return luminance("rgb(" + " ".join(part.strip() for part in color.split("(")[1].rstrip(")").split(",")[:3]) + ")")


@pytest.mark.slow
def test_dark_mode_is_set_from_the_start(chrome, board, tab):
    Dashboard(chrome, board.url, dark=True)
    assert chrome.execute_script("return document.documentElement.dataset.theme") == "dark"
    Dashboard(chrome, board.url)
    assert chrome.execute_script("return document.documentElement.dataset.theme") == "light"


@pytest.mark.slow
def test_an_address_can_name_the_experiment(chrome, board, tab):
    assert Dashboard(chrome, board.url, address="&p.replicas.experiment=sixty-four").find("h2").text == WIDE


# --- downloads


def downloaded(folder, name):
    file = folder / "downloads" / name
    wait_for(lambda: file.exists() and file.stat().st_size)  # Chromium keeps the name free by an empty file at first
    content = file.read_bytes()
    file.unlink()
    return content


def rows_of(content):
    return list(csv.reader(io.StringIO(content.decode(), newline="")))


def test_csv_has_every_step_of_what_is_in_view(page, downloads):
    page.choose(LONG)
    page.click(".card[data-chart=loss] [data-action=csv]")
    header, *rows = rows_of(downloaded(downloads, "long-loss.csv"))
    assert header == ["step", "wall_time", "replica_0", "replica_1", "mean", "min", "max"]
    assert [int(row[0]) for row in rows] == list(range(4000))
    for replica in range(2):
        assert [np.float32(row[2 + replica]) for row in rows] == column(long(), names.LOSS, replica)
    page.choose(MIRRORED)
    page.click('.chip[data-replica="0"]')
    page.drag("loss", 0.25, 0.5, MIRRORED)
    low, high = views(page, MIRRORED)[0]
    page.click(".card[data-chart=throughput] [data-action=csv]")
    header, *rows = rows_of(downloaded(downloads, "night-mirrored-examples-per-second.csv"))
    assert header[2:5] == ["replica_1", "replica_2", "replica_3"]
    assert [int(row[0]) for row in rows] == list(range(math.ceil(low), math.floor(high) + 1))


@pytest.mark.slow
def test_csv_of_bars_and_table(page, downloads):
    page.click(".card[data-chart=split] [data-action=csv]")
    header, *rows = rows_of(downloaded(downloads, "night-mirrored-split.csv"))
    assert header == ["replica", "compute_seconds", "input_seconds", "sync_seconds"]
    assert float(rows[2][1]) == pytest.approx(np.mean(column(mirrored(), names.COMPUTE_SECONDS, 2)), rel=1e-5)
    page.click(".card[data-chart=table] [data-action=csv]")
    header, *rows = rows_of(downloaded(downloads, "night-mirrored-table.csv"))
    assert header[:3] == ["replica", "device", "loss_last"]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[1][1] == MANIFEST["devices"][1]
    assert float(rows[3][2]) == pytest.approx(column(mirrored(), names.LOSS, 3)[-1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("chart", [*CHARTS, "split"])
def test_png_is_a_picture_of_the_chart(page, downloads, chart):
    page.click(f".card[data-chart={chart}] [data-action=png]")
    content = downloaded(downloads, f"night-mirrored-{chart}.png")
    pixels = pixels_of(content)
    assert pixels.shape[0] > 150
    assert pixels.shape[1] > 300
    assert tuple(pixels[0, 0, :3]) == (255, 255, 255), "the page's colour, not see-through"
    drawn = np.unique(pixels[60:, :, :3].reshape(-1, 3), axis=0)
    assert len(drawn) > 20, "more than an empty frame"
    assert content == base64.b64decode(
        page.run("return window.replicasDashboard.png(...arguments)", MIRRORED, chart).split(",")[1]
    )


def pixels_of(png):
    """Decode a PNG as Chromium writes it: 8 bits a channel, not interlaced."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        chunk = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8
        data += chunk if kind == b"IDAT" else b""
        at += 12 + length
    channels = {2: 3, 6: 4}[color]
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    pixels = np.zeros((height, width * channels), np.uint8)
    above = np.zeros(width * channels, np.uint8)
    for y in range(height):
        above = pixels[y] = unfiltered(rows[y, 0], rows[y, 1:], above, channels)
    return pixels.reshape(height, width, channels)


def unfiltered(kind, line, above, step):
    if kind == 0:
        return line
    if kind == 2:
        return line + above
    result = np.zeros(line.size + step, np.int64)
    upper = np.concatenate([np.zeros(step, np.int64), above.astype(np.int64)])
    for i, value in enumerate(line.tolist(), step):
        left, up, corner = int(result[i - step]), int(upper[i]), int(upper[i - step])
        distances = [abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)]
        paeth = (left, up, corner)[distances.index(min(distances))]
        result[i] = (value + {1: left, 3: (left + up) // 2, 4: paeth}[int(kind)]) & 255
    return result[step:].astype(np.uint8)


# --- odd logs


def test_names_from_files_are_text_and_never_markup(page):
    page.choose(EVIL)
    for details in page.all("details"):
        details.click()
    page.hover("heatmap", 0.5, EVIL)
    text = page.text()
    assert text.count("<img src=x onerror=document.title='hacked'>") > 8
    assert "<script>window.hacked = 1</script>" in text
    assert page.run("return document.querySelectorAll('img, b, i, main script').length") == 0
    assert page.run("return window.hacked ?? null") is None
    page.choose(EVIL, MIRRORED)
    assert page.find(".comparison th .swatch").find_element("xpath", "..").text == EVIL
    page.browser.switch_to.default_content()
    assert page.browser.title == "TensorBoard"
    page.enter()


@pytest.mark.slow
def test_a_replica_without_examples_has_a_gap_and_non_finite_values_a_cross(page):
    page.choose(ODD)
    loss = page.drawn(ODD)["loss"]
    lines = page.lines("loss", ODD)
    first = [odd()[0][names.LOSS].get(step) for step in range(60)]
    assert [value is None for value in lines["replica 0"]] == [value is None for value in first]
    assert [value is None for value in lines["replica 1"]] == [step in (40, 41) for step in range(60)]
    assert loss["crosses"] == [40, 41]
    assert [value is None for value in lines["replica 2"]] == [step >= 35 for step in range(60)]
    assert "not a finite number" in page.find(".card[data-chart=loss] .card-footer").text
    assert loss["view"]["y"][1] < 5, "an infinity does not stretch the axis"
    rows = {row["replica"]: row["values"] for row in page.drawn(ODD)["table"]["rows"]}
    examples = page.drawn(ODD)["table"]["columns"].index("examples")
    assert rows[0][examples] == 50 * 64


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "count"), [(ONE, 1), (WIDE, 64)])
def test_one_replica_and_sixty_four_are_readable(page, experiment, count):
    page.choose(experiment)
    found = page.drawn(experiment)
    assert len([one for one in found["loss"]["series"] if one.get("replica") is not None]) == count
    assert len({one["color"] for one in found["loss"]["series"] if one.get("replica") is not None}) == count
    assert len(found["heatmap"]["series"]) == len(found["split"]["bars"]) == len(found["table"]["rows"]) == count
    assert len(page.all(".chip")) == count
    heat = page.find(".card[data-chart=heatmap] .plot")
    assert heat.size["height"] - 46 >= count * 7, "a row is at least seven pixels high"
    assert page.run("return document.documentElement.scrollWidth <= window.innerWidth"), "nothing hangs over the edge"
    tiles = {tile.get_attribute("data-tile") for tile in page.all(".tile")}
    assert ("slowest" in tiles) == (count > 1)


@pytest.mark.slow
def test_an_experiment_without_a_manifest_has_a_note(page):
    page.choose(LONG)
    assert "Strategy not recorded" in page.find(".panel-header").text
    assert page.find(".card[data-chart=split]").get_attribute("data-status") == "empty"
    assert "No compute, input or sync times in this log." in page.find(".card[data-chart=split]").text
    assert "gradient_norm" not in page.drawn(LONG)


# --- several experiments


def test_two_experiments_are_compared_side_by_side(page):
    page.choose(ONE, MIRRORED)
    left, right = page.all(".columns .panel")
    assert left.location["x"] < right.location["x"]
    assert abs(left.location["y"] - right.location["y"]) < 2
    for chart in (*CHARTS, "split", "table"):
        tops = [panel.find_element("css selector", f"[data-chart={chart}]").location["y"] for panel in (left, right)]
        assert abs(tops[0] - tops[1]) < 2, f"{chart} is at the same height in both"
    loss = {chart["kind"]: chart for chart in page.run("return window.replicasDashboard.comparison()")["charts"]}
    assert set(loss) == {"compare-loss", "compare-throughput"}
    curves = {one["experiment"]: one["values"] for one in loss["compare-loss"]["series"] if one.get("experiment")}
    assert curves[ONE] == close(column(one_device(), names.LOSS, 0))
    assert curves[MIRRORED][:120] == close(over(mirrored(), names.LOSS, "mean"))
    assert curves[MIRRORED][120:] == [None] * 30
    rates = {one["experiment"]: one["values"] for one in loss["compare-throughput"]["series"]}
    assert rates[MIRRORED][:120] == close(over(mirrored(), names.EXAMPLES_PER_SECOND, "sum"))
    rows = {row["label"]: row["values"] for row in page.run("return window.replicasDashboard.comparison()")["table"]}
    assert rows["Replicas"] == [1, 4]
    assert rows["Steps"] == [150, 120]
    assert rows["Scaling efficiency"][0] is None, "one replica has none to share with"
    assert rows["Scaling efficiency"][1] > 0
    efficiency = [len(panel.find_elements("css selector", "[data-tile=efficiency]")) for panel in (left, right)]
    assert efficiency == [0, 1]
    means = [mean_rate(one_device()), mean_rate(mirrored())]
    assert rows["Examples per second"] == pytest.approx(means, rel=1e-5)
    cell = page.find("table.comparison").text
    assert f"{means[1] / means[0]:.3g} \u00d7 better" in cell
    assert views(page, ONE) == views(page, MIRRORED) == [[0, 149]] * 4
    page.drag("loss", 0.25, 0.5, ONE)
    assert views(page, ONE) == views(page, MIRRORED)
    assert views(page, ONE)[0][1] < 80


@pytest.mark.slow
def test_compared_experiments_share_their_scales_unless_switched_off(page):
    page.choose(ONE, MIRRORED)

    def scales(chart):
        return [page.drawn(name)[chart]["view"]["y"] for name in (ONE, MIRRORED)]

    assert scales("throughput")[0] == scales("throughput")[1]
    assert page.drawn(ONE)["heatmap"]["scale"] == page.drawn(MIRRORED)["heatmap"]["scale"]
    page.click("[data-control=linked]")
    assert scales("throughput")[0] != scales("throughput")[1]
    assert page.drawn(ONE)["heatmap"]["scale"] != page.drawn(MIRRORED)["heatmap"]["scale"]


@pytest.mark.slow
def test_the_picker_opens_an_experiment_by_its_name_and_compares_by_ticks(page):
    page.choose(ONE)
    assert [one.text for one in page.all("h2")] == [ONE]
    page.choose(ONE, MIRRORED)
    assert [one.text for one in page.all("h2")] == ["Comparison", ONE, MIRRORED]
    page.choose(MIRRORED)
    assert [one.text for one in page.all("h2")] == [MIRRORED]
    assert not page.find("[data-control=linked]").is_displayed()


# --- TensorBoard around it


@pytest.mark.slow
def test_a_reload_of_tensorboard_brings_new_steps_and_keeps_the_zoom(page, log_dir, board):
    name = "live"
    with Run(log_dir, "live/replica_0") as run:
        for step in range(10):
            run.scalars(step, {names.LOSS: 5.0 - step / 10})
        board_knows = lambda end: lambda listed: listed.get(name, {}).get("last_step") == end  # noqa: E731
        run.flush()
        board.wait(board_knows(9))
        reload_with_button(page)
        page.choose(name)
        assert page.drawn(name)["loss"]["x"] == list(range(10))
        page.drag("loss", 0.5, 1.0, name)
        view = page.drawn(name)["loss"]["view"]["x"]
        page.run("window.sameDocument = true")
        for step in range(10, 20):
            run.scalars(step, {names.LOSS: 5.0 - step / 10})
        run.flush()
        board.wait(board_knows(19))
        assert page.drawn(name)["loss"]["x"][-1] <= 10
        reload_with_button(page)
        wait_for(
            lambda: (
                page.run("return window.replicasDashboard.state.experiments.find(e => e.name === 'live').last_step")
                == 19
            )
        )
        assert page.run("return window.sameDocument") is True, "the page itself is not loaded again"
        assert page.drawn(name)["loss"]["view"]["x"] == view
        page.press("0")
        page.run("document.querySelector('.card[data-chart=loss] .plot').focus()")
        page.press("0")
        assert page.lines("loss", name)["replica 0"] == close(np.float32([5.0 - step / 10 for step in range(20)]))


@pytest.mark.slow
def test_a_reload_keeps_a_comparison(page):
    page.choose(ONE, MIRRORED)
    before = page.run("return window.replicasDashboard.comparison()")
    reload_with_button(page)
    assert [one.text for one in page.all("h2")] == ["Comparison", ONE, MIRRORED]
    assert page.run("return window.replicasDashboard.comparison()") == before


def reload_with_button(page):
    """Click TensorBoard's own reload button."""
    before = page.run("return performance.getEntriesByType('resource').length")
    page.browser.switch_to.default_content()
    page.browser.find_element("css selector", "app-header-reload button").click()
    page.enter()
    wait_for(lambda: page.run("return performance.getEntriesByType('resource').length") > before)
    page.settle()


@pytest.mark.slow
def test_the_page_requests_only_tensorboard(page, board):
    sources = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(sources) > 20
    assert [source for source in sources if not source.startswith(board.url + "/")] == []


@pytest.mark.slow
def test_a_path_prefix_and_the_other_loader_work(chrome, tmp_path, log_dir):
    """Also with TensorBoard's own number of points, of which the page says what is missing."""
    with tensorboard(
        log_dir, tmp_path / "work", "--path_prefix=/a/b", "--load_fast=false", "--reload_interval=1"
    ) as board:
        board.url += "/a/b"
        board.wait_until_read(LONG, 2, 3999)
        board.wait_until_read(ONE, 1, 149)
        page = Dashboard(chrome, board.url, address=f"&p.replicas.experiment={LONG}")
        assert len(page.drawn(LONG)["loss"]["series"]) == 5
        assert "--samples_per_plugin scalars=5000" in page.find(".hints").text
        assert page.errors() == []


@pytest.mark.slow
def test_numbers_without_neighbours_are_points(chrome, tmp_path):
    write_experiment(tmp_path / "logs", "one step", example_series(2, range(1)))
    lone = example_series(2, range(9))
    lone[1][names.LOSS] = {step: value if step == 4 else math.nan for step, value in lone[1][names.LOSS].items()}
    write_experiment(tmp_path / "logs", "a number between gaps", lone)
    with tensorboard(tmp_path / "logs", tmp_path / "tensorboard") as board:
        board.wait_until_read("one step", 2, 0)
        board.wait_until_read("a number between gaps", 2, 8)
        page = Dashboard(chrome, board.url)
        for experiment, replicas, below in (("one step", (0, 1), 0), ("a number between gaps", (1,), 30)):  # crosses
            page.reset(experiment)
            for replica in replicas:
                (line,) = [s for s in page.drawn(experiment)["loss"]["series"] if s["replica"] == replica]
                assert 4 <= page.run(PIXELS_OF_A_COLOR, "loss", experiment, line["color"], below) <= 60


PIXELS_OF_A_COLOR = """
const [kind, name, color, from] = arguments;
const cards = [...document.querySelectorAll(`.card[data-chart="${kind}"]`)];
const canvas = cards.find((card) => card.dataset.experiment === name).querySelector("canvas");
const pixels = (context, width, height) => context.getImageData(0, 0, width, height).data;
const brush = document.createElement("canvas").getContext("2d");
brush.fillStyle = color;
brush.fillRect(0, 0, 1, 1);
const wanted = pixels(brush, 1, 1);
const data = pixels(canvas.getContext("2d"), canvas.width, canvas.height);
let found = 0;
for (let i = (from ?? 0) * canvas.width * 4; i < data.length; i += 4) {
  found += [0, 1, 2, 3].every((k) => Math.abs(data[i + k] - wanted[k]) < 4);
}
return found;
"""


@pytest.mark.slow
def test_an_empty_log_directory_shows_the_three_lines_to_add(chrome, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    with tensorboard(folder, tmp_path / "work", "--reload_interval=1") as board:
        page = Dashboard(chrome, board.url)
        code = page.find(".empty pre").text
        assert code.splitlines()[0] == "import keras_dist_ext as kde"
        assert len(code.splitlines()) == 3
        assert f'callbacks=[kde.ReplicaMonitor("{folder}")]' in code
        assert page.find(".empty .logdir").text == str(folder)
        write_experiment(folder, "", example_series(2, range(5)))
        board.wait_until_read("", 2, 4)
        reload_with_button(page)
        assert page.find("h2").text == "(log directory)"
        assert len(page.drawn("")["table"]["rows"]) == 2
        assert page.all(".empty") == []
        shutil.rmtree(folder)
        board.wait(lambda listed: not listed)
        reload_with_button(page)
        assert page.find(".empty pre").text == code
        assert page.all("h2") == page.all(".empty h2")
        assert page.errors() == []


# --- real runs, and large ones


def test_a_real_run_is_drawn_as_its_event_files_say(chrome, tmp_path, mirrored_strategy):
    folder = tmp_path / "logs"
    with mirrored_strategy.scope():
        model = kde.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(80, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0, callbacks=[kde.ReplicaMonitor(folder, update_freq=1)])
    with tensorboard(folder, tmp_path / "work") as board:
        board.wait_until_read("", 2, 10)
        page = Dashboard(chrome, board.url)
        drawn = page.drawn("")
        for replica, (kind, tag) in itertools.product(range(2), TAGS.items()):
            if kind not in drawn:
                continue
            events = events_of(folder / names.replica_run("", replica), tag)
            line = next(one for one in drawn[kind]["series"] if one.get("replica") == replica)
            assert dict(zip(drawn[kind]["x"], line["values"], strict=True)) == pytest.approx(events, rel=1e-6), tag
        assert drawn["loss"]["x"] == list(range(1, 11))
        means = page.lines("loss")["mean"]
        losses = [events_of(folder / names.replica_run("", replica), names.LOSS) for replica in range(2)]
        assert means == pytest.approx([np.mean([one[step] for one in losses]) for step in range(1, 11)], rel=1e-5)
        assert "MirroredStrategy" in page.find(".panel-header").text
        assert page.errors() == []


def events_of(folder, tag):
    """Return what TensorBoard's own reader finds, by step."""
    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    if tag in reader.Tags()["scalars"]:
        return {event.step: event.value for event in reader.Scalars(tag)}
    return {event.step: float(make_ndarray(event.tensor_proto)) for event in reader.Tensors(tag)}


@pytest.fixture
def mirrored_strategy(strategies):
    return strategies.get("mirrored2")


@pytest.mark.rotating(turns=3)
@pytest.mark.timeout(600)
def test_five_million_points_open_and_zoom_with_every_peak(chrome, tmp_path, capsys):
    """64 replicas x 20,000 steps x 4 tags: how long it takes is printed, what arrives is asserted."""
    folder = tmp_path / "logs"
    write_large_experiment(folder, 64, 20_000, {5: 12_345, 60: 19_998})
    with tensorboard(folder, tmp_path / "work", "--samples_per_plugin=scalars=100000") as board:
        board.wait(lambda listed: "" in listed and len(listed[""]["replicas"]) == 64, 300)
        time.sleep(5)  # runs are listed before they have been read to their ends
        start = time.perf_counter()
        page = Dashboard(chrome, board.url)
        seconds = {"open, with TensorBoard's own page": time.perf_counter() - start}
        seconds["open the tab"] = page.run("return performance.now() / 1000")
        drawn = page.drawn("")
        replicas = [one for one in drawn["loss"]["series"] if one.get("replica") is not None]
        assert len(replicas) == len(drawn["heatmap"]["series"]) == 64
        assert not drawn["loss"]["exact"]
        assert len(drawn["loss"]["x"]) < 2500
        highest = {one["replica"]: max(one["values"]) for one in replicas}
        assert [replica for replica, value in highest.items() if value == 50.0] == [5, 60]
        sizes = page.run("return performance.getEntriesByType('resource').map((e) => e.encodedBodySize)")
        assert sum(sizes) < 4e6
        start = time.perf_counter()
        page.drag("loss", 0.6, 0.64)
        seconds["zoom"] = time.perf_counter() - start
        fine = page.drawn("")["loss"]
        assert fine["exact"]
        line = next(one["values"] for one in fine["series"] if one.get("replica") == 5)
        assert dict(zip(fine["x"], line, strict=True))[12_345] == 50.0
        assert page.errors() == []
    with capsys.disabled():
        times = ", ".join(f"{what} {value:.2f} s" for what, value in seconds.items())
        sys.stdout.write(f"\n64 x 20,000 x 4 points: {times}\n")
