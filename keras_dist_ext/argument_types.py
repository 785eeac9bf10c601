"""Types of command-line arguments, for argparse."""

import argparse
import math

from keras_dist_ext.arguments import LONGEST_SECONDS, MOST_PROCESSES

__all__ = [
    "amount",
    "count",
    "counts",
    "path",
    "process_count",
    "process_count_or_zero",
    "restart_count",
    "seconds",
    "worker_count",
]

_MOST = 2**31 - 1


def count(text: str) -> int:
    """Read an integer >= 1.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    return _integer(text, 1, _MOST)


def counts(text: str) -> tuple[int, ...]:
    """Read integers >= 1 with commas between.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    return tuple(count(part.strip()) for part in text.split(","))


def path(text: str) -> str:
    """Read a path.

    Raises:
        argparse.ArgumentTypeError: it is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("'' must be a path")
    return text


def process_count(text: str) -> int:
    """Read how many processes to start, one at least.

    Raises:
        argparse.ArgumentTypeError: it is something else, or more than a machine has ports for.
    """
    return _integer(text, 1, MOST_PROCESSES)


def process_count_or_zero(text: str) -> int:
    """Read how many processes to start, which may be none.

    Raises:
        argparse.ArgumentTypeError: it is something else, or more than a machine has ports for.
    """
    return _integer(text, 0, MOST_PROCESSES)


def worker_count(text: str) -> int | tuple[int, int] | str:
    """Read how many workers to start: a number, the least and the most with a colon between, or ``auto``.

    Raises:
        argparse.ArgumentTypeError: it is something else, or more than a machine has ports for.
    """
    if text == "auto":
        return text
    if ":" not in text:
        return process_count(text)
    try:
        least, most = map(process_count, text.split(":"))
    except (ValueError, argparse.ArgumentTypeError):
        least, most = 1, 0
    if least > most:
        wanted = f"two integers from 1 to {MOST_PROCESSES}, the least number of workers first, such as 2:4"
        raise argparse.ArgumentTypeError(f"{text[:100]!r} must be {wanted}")
    return least, most


def restart_count(text: str) -> int:
    """Read an integer >= 0.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    return _integer(text, 0, _MOST)


def _integer(text: str, least: int, most: int) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= {least}")
    number = int(text[:100])  # Python reads no number of thousands of digits
    if not least <= number <= most:
        bounds = f"from {least} to {most}" if number > most else f">= {least}"
        raise argparse.ArgumentTypeError(f"{text[:100]!r} must be an integer {bounds}")
    return number


def amount(text: str) -> float:
    """Read how much of a resource, which may be a fraction or none.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    number = _number(text)
    if not 0 <= number <= _MOST:
        bound = f" and <= {_MOST:g}" if number > _MOST else ""
        raise argparse.ArgumentTypeError(f"{text!r} must be a number >= 0{bound}")
    return number


def seconds(text: str) -> float:
    """Read a finite number of seconds above 0.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    number = _number(text)
    if not 0 < number <= LONGEST_SECONDS:
        bound = f" and <= {LONGEST_SECONDS:g}" if number > LONGEST_SECONDS else ""
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds > 0{bound}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # which is within no bounds
