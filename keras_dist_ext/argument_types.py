"""Types of command-line arguments, for argparse."""

import argparse

__all__ = ["count", "count_or_auto", "count_or_zero", "seconds"]


def count(text: str) -> int:
    """Read an integer >= 1.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    return _integer(text, least=1)


def count_or_auto(text: str) -> int | str:
    """Read an integer >= 1, or ``auto``.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    return text if text == "auto" else count(text)


def count_or_zero(text: str) -> int:
    """Read an integer >= 0.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    return _integer(text, least=0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= {least}")
    return int(text)


def seconds(text: str) -> float:
    """Read a finite number of seconds above 0.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds > 0")
    return number
