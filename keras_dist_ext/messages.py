"""Put numbers and names into sentences, and warn."""

import difflib
import inspect
import warnings
from collections.abc import Sequence

__all__ = ["counted", "close_name", "warn", "warn_once"]


def counted(number: int, noun: str) -> str:
    """Put a number before a noun: `1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def close_name(name: str, names: Sequence[str]) -> str:
    """Suggest a name that is spelled alike, as the end of a sentence."""
    matches = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def warn(message: str) -> None:
    """Warn of something at the line of the user's code that has led to it, such as the call of ``fit``."""
    warnings.warn(message, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """Return which caller of ``warn`` is the user's, from 2 for the nearest; 2 if none is, as in threads of ours."""
    frame, level = inspect.currentframe(), 0
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _LIBRARIES and not name.startswith("__autograph_generated"):
            return level
        frame, level = frame.f_back, level + 1
    return 2


_LIBRARIES = {"contextlib", "functools", "keras", "keras_dist_ext", "keras_tuner", "tensorflow", "threading"}


def warn_once(message: str) -> None:
    """Warn of something once in a process."""
    if message not in _warned:
        _warned.add(message)
        warn(message)


_warned: set[str] = set()
