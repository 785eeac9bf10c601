"""Looks at what is measured, on a machine that others use too."""

from collections.abc import Callable
from typing import Any


def undisturbed(look: Callable[[], Any], is_expected: Callable[[Any], bool]) -> Any:
    """Look until it is as expected, three times at most; return what was seen last."""
    for _ in range(3):
        seen = look()
        if is_expected(seen):
            break
    return seen
