"""A host of processes for tests that start none."""

import contextlib
from typing import Any


class SilentHost(contextlib.nullcontext[Any]):
    """A host, and the process that it starts, which prints nothing."""

    def start(self, name: str, work: Any, environ: Any, cpus: Any) -> Any:
        return self

    def read(self, seconds: float) -> list[bytes]:
        return []

    def foresee_end(self) -> None:
        pass
