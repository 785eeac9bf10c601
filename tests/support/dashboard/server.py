"""Run a real TensorBoard on a log directory, with the plugin found through its entry point as setup.cfg has it."""

import configparser
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[3]

__all__ = ["ROOT", "TensorBoard", "tensorboard", "as_installed", "environment"]


class TensorBoard:
    """A TensorBoard that runs."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def get(self, path: str, **parameters: Any) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers of a page."""
        url = f"{self.url}/{path}" + (f"?{urlencode(parameters)}" if parameters else "")
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)

    def ask(self, route: str, **parameters: Any) -> Any:
        """Return what a route of the plugin answers."""
        status, body, _ = self.get(f"data/plugin/replicas/{route}", **parameters)
        assert status == 200, (route, status, body[:500])
        return json.loads(body, parse_constant=_refuse)

    def wait(self, condition: Callable[[dict[str, Any]], bool], timeout: float = 60.0) -> None:
        """Wait until the experiments that the plugin lists, by name, are as they should be."""
        deadline = time.monotonic() + timeout
        while True:
            listed = {one["name"]: one for one in self.ask("experiments")["experiments"]}
            if condition(listed):
                return
            assert time.monotonic() < deadline, f"after {timeout} s there is {listed}"
            time.sleep(0.1)

    def wait_until_read(self, experiment: str, num_replicas: int, last_step: int, timeout: float = 60.0) -> None:
        """Wait until each replica of an experiment is read to its end: TensorBoard lists runs before it reads them."""

        def is_read(listed: dict[str, Any]) -> bool:
            if experiment not in listed:
                return False
            rows = self.ask("summary", experiment=experiment)["replicas"]
            ends = [max((tag["last_step"] for tag in row["numbers"].values()), default=None) for row in rows]
            return ends == [last_step] * num_replicas

        self.wait(is_read, timeout)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def as_installed(folder: Path, **groups: str) -> Path:
    """Write what an installed package says of itself: its entry points, from setup.cfg, or as given."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    points = groups or {"tensorboard_plugins": setup["options.entry_points"]["tensorboard_plugins"]}
    info = folder / "keras_dist_ext-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keras_dist_ext\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{text.strip()}\n" for group, text in points.items()))
    return folder


def environment(*paths: Path) -> dict[str, str]:
    """Return an environment in which Python finds these folders and the checkout first, and no TensorFlow chatters."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }


@contextlib.contextmanager
def tensorboard(log_dir: Path, work: Path, *flags: str, installed: Path | None = None) -> Iterator[TensorBoard]:
    """Run a TensorBoard while the context lasts; it answers when the context begins."""
    work.mkdir(parents=True, exist_ok=True)
    held = socket.socket()  # it does not listen: no other process is handed its port, and TensorBoard can take it
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    log = work / "tensorboard.log"
    env = environment(installed or as_installed(work / "site"))
    # notf: TensorBoard's own import of TensorFlow takes seconds and is nothing that is tested here.
    command = [sys.executable, "-c", _START, f"--logdir={log_dir}", "--host=127.0.0.1", f"--port={port}", *flags]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        board = TensorBoard(f"http://127.0.0.1:{port}", log)
        _wait_for(board, process)
        yield board
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        held.close()


_START = """
import sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("tensorboard.compat.notf")
sys.argv[0] = "tensorboard"
from tensorboard.main import run_main
run_main()
"""


def _wait_for(board: TensorBoard, process: subprocess.Popen[bytes], timeout: float = 90.0) -> None:
    deadline = time.monotonic() + timeout
    while True:
        assert process.poll() is None, f"TensorBoard ended with {process.returncode}:\n{board.output}"
        with contextlib.suppress(OSError):
            board.get("data/environment")
            return
        assert time.monotonic() < deadline, f"TensorBoard does not answer after {timeout} s:\n{board.output}"
        time.sleep(0.1)
