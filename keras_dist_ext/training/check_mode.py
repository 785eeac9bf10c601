"""What `compile(check=...)` may be given."""

from __future__ import annotations

from typing import Literal

__all__ = ["CheckMode", "check_mode"]

CheckMode = bool | Literal["raise"]


def check_mode(value: object) -> CheckMode:
    """Return what was given as ``check``.

    Raises:
        ValueError: it is not True, False or "raise".
    """
    if isinstance(value, bool) or (isinstance(value, str) and value == "raise"):
        return value  # type: ignore[return-value]
    raise ValueError(f"Invalid check={value!r}; must be True, False or 'raise'.")
