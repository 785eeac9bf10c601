"""The suite for GPUs: `KERAS_DIST_EXT_GPU_REPORT=FILE python -m pytest -m gpu tests/gpu -n 14`.

A report is written while cases run, and beside it a log of them; a run that is cut off leaves both.
"""

import datetime
import os
import platform
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import gpus
import keras
import pytest
import tensorflow as tf
from cases import handful, head
from strategies import selects_gpus

_STARTED = time.time()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, and say why it is left out where it cannot run."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if not ours:
        return
    # What takes long begins first, then the features; rows are many, and share processes evenly.
    items.sort(key=lambda item: (item.get_closest_marker("multiworker") is None, "conformance" in item.path.stem))
    if config.option.handful:
        chosen = _handful(config, ours)
        config.hook.pytest_deselected(items=[item for item in ours if item not in chosen])
        items[:] = [item for item in items if item in chosen or item not in ours]
        ours = chosen
    is_selected = selects_gpus(config.option.markexpr)
    num_devices = gpus.cut() if is_selected else 0
    seconds = 90 if gpus.KIND == "GPU" else 300
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if not _takes_long(item):  # what waits for a GPU takes no signal: end the process
            item.add_marker(pytest.mark.timeout(seconds, method="thread"))
        if not num_devices:
            reason = "TensorFlow sees no GPU" if is_selected else "GPUs are hidden from all but `-m gpu`"
            item.add_marker(pytest.mark.skip(reason=reason))


def _takes_long(item: pytest.Item) -> bool:
    """Say whether a test has a limit of its own."""
    return item.get_closest_marker("timeout") is not None


def _handful(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Choose what runs at this commit where not all is to: one that takes long counts as three.

    What looks at real clocks is left out: a machine that does other things, too, would decide.
    """
    tests: dict[str, tuple[int, list[str]]] = {}
    for item in items:
        if "doctor" in item.nodeid or "times_of_a_step" in item.nodeid:
            continue
        counts = 3 if _takes_long(item) else 1
        tests.setdefault(item.nodeid.partition("[")[0], (counts, []))[1].append(item.nodeid)
    chosen = handful(tests, config.option.handful, commit=config.option.commit or head(config.rootpath))
    return [item for item in items if item.nodeid in chosen]


@pytest.fixture(params=[2, 4], ids=["2 GPUs", "4 GPUs"])
def replicas(request: pytest.FixtureRequest) -> tf.distribute.Strategy:
    """Two and four replicas, a GPU each."""
    return gpus.strategy(request.param)


@pytest.fixture
def two() -> tf.distribute.Strategy:
    """Two replicas."""
    return gpus.strategy(2)


class Report:
    """Writes what ran, on what, and how it ended, as one Markdown file, and a line a case to a log beside it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._path.with_suffix(".log").open("w", encoding="utf-8", buffering=1)
        self._devices: str | None = None
        self._num_cases = 0
        self._ended: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._why: list[tuple[str, str]] = []
        self._written = 0.0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Note how many cases there are."""
        self._num_cases = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a case ended, and what it took."""
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.partition("::")[2].partition("@")[0]  # pytest-xdist adds the group
        self._ended[name.partition("[")[0]][report.outcome].append(report.duration)
        why = ""
        if report.outcome == "failed":
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            why = " ".join(lines or report.longreprtext.splitlines()[-3:])
            self._why.append((name, why[:400]))
        self._log.write(f"{time.time() - _STARTED:.0f} s: {report.outcome} in {report.duration:.1f} s: {name} {why}\n")
        if report.longreprtext and why:
            self._log.write(report.longreprtext + "\n" + "\n".join(text for _, text in report.sections)[-3000:] + "\n")
        if time.time() > self._written + 1:
            self._write()

    def pytest_sessionfinish(self) -> None:
        """Write all."""
        self._write()

    def _write(self) -> None:
        if self._devices is None:
            self._devices = gpus.name_of()
        num_run = sum(len(durations) for ended in self._ended.values() for durations in ended.values())
        lines = [
            f"# The suite for GPUs, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
            "",
            f"- devices: {self._devices}",
            f"- TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {platform.python_version()}, "
            f"{os.cpu_count()} CPU cores",
            f"- `python -m pytest -m gpu tests/gpu`: {time.time() - _STARTED:.0f} s, {num_run} of "
            f"{self._num_cases or num_run} cases",
            "",
            "| test | passed | failed | skipped | seconds, all |",
            "| --- | --- | --- | --- | --- |",
        ]
        for group, ended in sorted(self._ended.items()):
            counts = " | ".join(str(len(ended[outcome])) for outcome in ("passed", "failed", "skipped"))
            lines.append(f"| {group} | {counts} | {sum(map(sum, ended.values())):.0f} |")
        if self._why:
            lines += ["", "## Failed", "", *(f"- `{name}`: {why}" for name, why in self._why)]
        part = self._path.with_suffix(".part")
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(part, self._path)
        self._written = time.time()


def pytest_configure(config: pytest.Config) -> None:
    """Write a report where one is asked for, once for all processes; hand out tests in the order above."""
    if selects_gpus(config.option.markexpr):
        config.option.loadscopereorder = False  # else pytest-xdist begins with large groups: the rows
    path = os.environ.get("KERAS_DIST_EXT_GPU_REPORT")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Report(path), "gpu-report")
