"""Convert numbers to strict JSON: no NaN, no Infinity, no more digits than needed.

A number that is not finite is null in lists and the string "NaN", "Infinity" or "-Infinity" where it is a single value,
so that a page can show which it was.
"""

import json
import math
from collections.abc import Mapping

import numpy as np

from keras_dist_ext.aliases import Array, JsonValue

__all__ = ["numbers", "number", "spelled", "finite", "to_json", "round_up"]

_DIGITS = 8  # that a float32 can distinguish


def numbers(values: Array, digits: int = _DIGITS) -> list[float | None]:
    """Return values for JSON: rounded to the digits of a float32, or fewer; null where not finite."""
    values = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(values)
    safe = np.where(is_finite, values, 0.0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        exponent = np.floor(np.log10(np.abs(safe)))
        scale = 10.0 ** (digits - 1 - exponent)
        rounded = np.rint(safe * scale) / scale
    result: list[float | None] = np.where(np.isfinite(rounded), rounded, safe).tolist()
    if not is_finite.all():
        for index in np.flatnonzero(~is_finite).tolist():
            result[index] = None
    return result


def number(value: float | None) -> float | str | None:
    """Return one value for JSON: a number, null for None, a string where not finite.

    >>> number(0.25), number(None), number(float("nan")), number(float("-inf"))
    (0.25, None, 'NaN', '-Infinity')
    """
    if value is None:
        return None
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else spelled(value)


def spelled(value: float) -> str:
    """Return the name of a number that is not finite, as in JavaScript."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def finite(value: object) -> JsonValue:
    """Return a value from a file, with strings for numbers that are not finite, so that it is strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return spelled(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def to_json(value: object) -> bytes:
    """Return strict JSON.

    Raises:
        ValueError: a number in it is not finite.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def round_up(value: int) -> int:
    """Return the next number that is 1, 2 or 5 times a power of ten.

    >>> round_up(19_999), round_up(20_001)
    (20000, 50000)
    """
    digit = 1
    while True:
        for start in (1, 2, 5):
            if start * digit >= value:
                return start * digit
        digit *= 10
