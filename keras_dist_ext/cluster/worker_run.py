"""How one process of a launch ended."""

from dataclasses import dataclass
from pathlib import Path

from keras_dist_ext.aliases import Picklable

__all__ = ["WorkerRun"]


@dataclass(frozen=True)
class WorkerRun:
    """How one process ended."""

    name: str  # "worker 0", "chief 0", "ps 1"
    served: bool  # it ran TensorFlow's server, not the command or function
    exit_code: int  # as subprocess has it: -9 = SIGKILL
    ended_by_launch: bool  # it had not ended, or failed, by itself
    seconds: float
    value: Picklable  # what the function returned; None for a command
    last_lines: tuple[str, ...]  # the last traceback and what followed, or the last 20 lines
    log: Path | None  # all its output; None without log_dir
