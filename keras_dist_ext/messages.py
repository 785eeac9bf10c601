"""Put numbers and names into sentences, and warn."""

import difflib
import warnings
from collections.abc import Sequence

__all__ = ["counted", "close_name", "warn_once"]


def counted(number: int, noun: str) -> str:
    """Put a number before a noun: `1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def close_name(name: str, names: Sequence[str]) -> str:
    """Suggest a name that is spelled alike, as the end of a sentence."""
    matches = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def warn_once(message: str) -> None:
    """Warn of something once in a process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


_warned: set[str] = set()
