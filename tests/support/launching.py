"""What tests of `launch` have in common: to launch, to look at processes, and to wait for what will come true."""

import io
import os
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest

from keras_dist_ext.cluster.launch import LaunchResult, launch

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of this exists on Linux alone")


def run(num_workers, work, **options) -> tuple[LaunchResult, str]:
    """Launch, and return the result and what was shown."""
    stream = options.pop("stream", None) or io.StringIO()
    time_limit = options.pop("time_limit", 45)
    return launch(num_workers, work, stream=stream, time_limit=time_limit, **options), stream.getvalue()


class Shown(io.StringIO):
    """What a launch shows, and a clock of the launcher's that goes forward by what was shown, not by how fast it runs.

    Args:
        monkeypatch: of the test.
        modules: of the package, whose clock this is.
        react: called with this after each write; it may set
            `ahead`, by which the clock is later than the machine's, and
            `haste`, by which it gets later whenever somebody looks at it.
    """

    def __init__(self, monkeypatch, modules, react):
        super().__init__()
        self.ahead = self.haste = 0.0
        self._react = react
        clock = types.SimpleNamespace(monotonic=self._monotonic, sleep=time.sleep)
        for name in modules:
            monkeypatch.setattr(sys.modules[f"keras_dist_ext.{name}"], "time", clock)

    def _monotonic(self):
        self.ahead += self.haste
        return time.monotonic() + self.ahead

    def write(self, text):
        number = super().write(text)
        self._react(self)
        return number


def script(folder, text) -> str:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def processes_with(token):
    """Find the living processes that have a token in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_TOKEN") == _own(token) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition, seconds=45.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def wait_for_saves(*_, **__):
    """Wait until no save is being written; fit for a callback."""
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "keras_dist_ext.save"])


def environ_with(**more):
    if "TEST_TOKEN" in more:
        more["TEST_TOKEN"] = _own(more["TEST_TOKEN"])
    return {**os.environ, **more}


def _own(token):
    """Tell this run of the tests from others on this machine."""
    return f"{token} of {os.getpid()}"
