"""Log which strategy a screening benchmarks, so that one that crashes its process is not tried again forever."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from keras_dist_ext.tuner.failures import Failure
from keras_dist_ext.whole_files import write_whole

__all__ = ["BenchmarkLog"]

_FILE = "screening_log.json"


class BenchmarkLog:
    """The log of a screening while it runs.

    Args:
        project: the folder of the search.
    """

    MAX_CRASHES = 2  # of the process, under one strategy

    def __init__(self, project: str | os.PathLike[str]) -> None:
        self._path = Path(project) / _FILE
        state = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        self._crashes: dict[str, int] = state.get("crashes", {})
        if state.get("running"):  # when the process ended without a final entry
            self._crashes[state["running"]] = self._crashes.get(state["running"], 0) + 1

    @property
    def crashing(self) -> dict[str, str]:
        """The strategies that have crashed their process too often, and the reason to report for each."""
        failed = {name: number for name, number in self._crashes.items() if number >= self.MAX_CRASHES}
        return {
            name: str(Failure("worker lost", f"the process died {number} times while it trained under this strategy"))
            for name, number in failed.items()
        }

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Log which strategy runs, as long as a `with` lasts."""
        self._write(name)
        try:
            yield
        finally:
            self._write(None)

    def _write(self, name: str | None) -> None:
        write_whole(self._path, json.dumps({"running": name, "crashes": self._crashes}))
