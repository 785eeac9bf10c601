"""Put numbers and names into sentences."""

import difflib
from collections.abc import Sequence

__all__ = ["counted", "close_name"]


def counted(number: int, noun: str) -> str:
    """Put a number before a noun: `1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def close_name(name: str, names: Sequence[str]) -> str:
    """Suggest a name that is spelled alike, as the end of a sentence."""
    matches = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
