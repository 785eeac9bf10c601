"""Write durations and sizes with three digits, for evidence that people read."""

__all__ = ["size", "us", "ms"]


def ms(seconds: float) -> str:
    """Write seconds as milliseconds; as seconds, where these are 1 and more.

    >>> ms(0.01234), ms(2.4141)
    ('12.3 ms', '2.41 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def us(seconds: float) -> str:
    """Write seconds as microseconds."""
    return f"{1e6 * seconds:.3g} µs"


def size(num_bytes: float) -> str:
    """Write a number of bytes.

    >>> size(17_300_000)
    '17.3 MB'
    """
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
