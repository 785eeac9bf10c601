"""What tests of `launch` have in common: to launch, to look at processes, and to wait for what will come true."""

import io
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from keras_dist_ext.launch import LaunchResult, launch

ROOT = Path(__file__).resolve().parents[1]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of this exists on Linux alone")


def run(num_workers, work, **options) -> tuple[LaunchResult, str]:
    """Launch, and return the result and what was shown."""
    stream = io.StringIO()
    time_limit = options.pop("time_limit", 45)
    return launch(num_workers, work, stream=stream, time_limit=time_limit, **options), stream.getvalue()


def script(folder, text) -> str:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def processes_with(token):
    """Find the living processes that have a token in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_TOKEN") == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def environ_with(**more):
    return {**os.environ, **more}
