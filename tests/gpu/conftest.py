"""The suite for GPUs: `KERAS_DIST_EXT_GPU_REPORT=FILE python -m pytest -m gpu tests/gpu -n 8`."""

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
from strategies import selects_gpus

_STARTED = time.time()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, and say why it is left out where it cannot run."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if not ours:
        return
    is_selected = selects_gpus(config.option.markexpr)
    num_devices = gpus.cut() if is_selected else 0
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if is_selected and not num_devices:
            item.add_marker(pytest.mark.skip(reason="TensorFlow sees no GPU"))


@pytest.fixture(params=[2, 4], ids=["2 GPUs", "4 GPUs"])
def replicas(request: pytest.FixtureRequest) -> tf.distribute.Strategy:
    """Two and four replicas, a GPU each."""
    return gpus.strategy(request.param)


@pytest.fixture
def two() -> tf.distribute.Strategy:
    """Two replicas."""
    return gpus.strategy(2)


class Report:
    """Writes what ran, on what, and how it ended, as one Markdown file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._ended: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._why: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a case ended, and what it took."""
        if report.when != "call" and report.outcome == "passed":
            return
        group = report.nodeid.partition("::")[2].partition("[")[0]
        self._ended[group][report.outcome].append(report.duration)
        if report.outcome == "failed":
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self._why.append((report.nodeid.partition("::")[2], " ".join(lines)[:400]))

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        lines = [
            f"# The suite for GPUs, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
            "",
            f"- devices: {gpus.name_of()}; virtual devices a process: {gpus.NUM_GPUS} where there is one card",
            f"- TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {platform.python_version()}, "
            f"{os.cpu_count()} CPU cores",
            f"- `python -m pytest -m gpu tests/gpu`: {time.time() - _STARTED:.0f} s",
            "",
            "| test | passed | failed | skipped | seconds, all |",
            "| --- | --- | --- | --- | --- |",
        ]
        for group, ended in sorted(self._ended.items()):
            counts = " | ".join(str(len(ended[outcome])) for outcome in ("passed", "failed", "skipped"))
            lines.append(f"| {group} | {counts} | {sum(map(sum, ended.values())):.0f} |")
        if self._why:
            lines += ["", "## Failed", "", *(f"- `{name}`: {why}" for name, why in self._why)]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Write a report where one is asked for, once for all processes."""
    path = os.environ.get("KERAS_DIST_EXT_GPU_REPORT")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Report(path), "gpu-report")
