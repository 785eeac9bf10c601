"""Describe what replicas sum over: as it is written (``"10Gb/s, 50us"``), as documented, or as measured.

Letters: R = replicas that a sum was measured on; N = those that it is predicted for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from keras_dist_ext import arguments
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.messages import close_name

__all__ = ["DOCUMENTED", "Link", "SumTimes", "fit_line", "read_network"]


@dataclasses.dataclass(frozen=True)
class Link:
    """What sums over replicas go over.

    Attributes:
        bytes_per_second: of each replica, in one direction.
        latency_seconds: of a message.
        source: where the figures come from, for people.
        in_memory: whether one process adds up in its own memory, instead of replicas around a ring.
    """

    bytes_per_second: float
    latency_seconds: float
    source: str
    in_memory: bool = False

    def sum_seconds(self, num_replicas: int, num_bytes: float) -> float:
        """Return the seconds of a sum over so many replicas, each of which has so many bytes.

        Around a ring, each replica sends 2 (N - 1) messages of 1/N of the bytes (Patarasuk and Yuan, Bandwidth optimal
        all-reduce algorithms for clusters of workstations, J. Parallel Distrib. Comput. 69, 2009). In memory, what
        all replicas have is read once.

        >>> round(Link(1e9, 1e-5, "made up").sum_seconds(4, 1e6), 6)
        0.00156
        """
        if num_replicas < 2:
            return 0.0
        if self.in_memory:
            return self.latency_seconds + num_replicas * num_bytes / self.bytes_per_second
        num_messages = 2 * (num_replicas - 1)
        return num_messages * (self.latency_seconds + num_bytes / num_replicas / self.bytes_per_second)


# Peaks in one direction, as their data sheets have them; those give no latency.
DOCUMENTED: dict[str, Link] = {
    "nvlink": Link(450e9, 0.0, "NVLink 4, peak in NVIDIA's data sheet of the H100 SXM (900 GB/s in both directions)"),
    "nvlink3": Link(300e9, 0.0, "NVLink 3, peak in NVIDIA's data sheet of the A100 (600 GB/s in both directions)"),
    "pcie5": Link(64e9, 0.0, "PCIe 5.0 x16, peak in NVIDIA's data sheet of the H100 (128 GB/s in both directions)"),
    "pcie4": Link(32e9, 0.0, "PCIe 4.0 x16, peak in NVIDIA's data sheet of the A100 (64 GB/s in both directions)"),
}

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_BANDWIDTH = re.compile(_NUMBER + r"\s*([kKMGT]?)(b|bit|B)(?:/s|ps)")
_LATENCY = re.compile(_NUMBER + r"\s*(s|ms|us|µs|ns)")
_EXAMPLE = '"10Gb/s, 50us"'


def read_network(text: str) -> Link:
    """Read a bandwidth, in bits (b) or bytes (B) a second, and the latency of a message; or the name of a link.

    >>> read_network("10Gb/s, 50us").bytes_per_second
    1250000000.0
    >>> read_network("nvlink").bytes_per_second
    450000000000.0

    Args:
        text: see above. Without a latency, messages take no time of their own.

    Raises:
        MonitorError: it is something else.
    """
    name = text.strip().lower()
    if name in DOCUMENTED:
        return DOCUMENTED[name]
    parts = [part.strip() for part in text.split(",")]
    bandwidth = _BANDWIDTH.fullmatch(parts[0])
    latency = _LATENCY.fullmatch(parts[1]) if len(parts) == 2 else None
    if bandwidth is None or len(parts) > 2 or (len(parts) == 2 and latency is None):
        hint = close_name(name, list(DOCUMENTED)) or "."
        raise MonitorError(
            f"network must be a bandwidth and a latency such as {_EXAMPLE}, or one of {', '.join(DOCUMENTED)}, got "
            f"{arguments.shown(text)}{hint}"
        )
    bytes_per_second = float(bandwidth[1]) * _PREFIXES[bandwidth[2]] * (1.0 if bandwidth[3] == "B" else 0.125)
    seconds = 0.0 if latency is None else float(latency[1]) * _SECONDS[latency[2]]
    if not 0 < bytes_per_second < float("inf") or seconds > arguments.LONGEST_SECONDS:
        raise MonitorError(f"network must have a bandwidth above 0, such as {_EXAMPLE}, got {arguments.shown(text)}.")
    return Link(bytes_per_second, seconds, f"given: {text.strip()}")


@dataclasses.dataclass(frozen=True)
class SumTimes:
    """Seconds of sums over replicas, as they were measured here.

    Attributes:
        num_replicas: R, at least 2.
        seconds: by bytes of each replica, a sample a round.
        where: what they were measured on, for people.
        in_memory: see ``Link``.
        in_steps: whether the most bytes are a model's gradients, and its seconds what sums add to its steps.
    """

    num_replicas: int
    seconds: Mapping[int, tuple[float, ...]]
    where: str
    in_memory: bool = False
    in_steps: bool = False

    def link(self, number: int | None = None) -> Link:
        """Return the link that explains the medians of all rounds, or the round of a number."""
        sizes = sorted(self.seconds)
        medians = [float(np.median(_of_round(self.seconds[size], number))) for size in sizes]
        if self.in_steps:  # what the gradients take is kept; what next to nothing takes by itself is latency
            at_once = min(medians[0], medians[-1])
            per_byte = (medians[-1] - at_once) / max(1, sizes[-1])
        else:
            at_once, per_byte = fit_line([float(size) for size in sizes], medians)
        count = self.num_replicas
        num_messages, per_message = (1, float(count)) if self.in_memory else (2 * (count - 1), 2 * (count - 1) / count)
        bytes_per_second = per_message / max(per_byte, 1e-15)
        return Link(
            bytes_per_second,
            at_once / num_messages,
            f"measured {'in steps ' if self.in_steps else ''}on {self.where}",
            self.in_memory,
        )


def _of_round(samples: Sequence[float], number: int | None) -> Sequence[float]:
    """Return the samples of a round, whose number may count more than there are; for None, all of them."""
    return samples if number is None else [samples[number % len(samples)]]


def fit_line(places: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return a line's value at 0 and its slope, neither below 0: the least squares of deviations relative to values.

    One point alone gives a line through 0, two at least the best one.

    >>> [round(x, 9) for x in fit_line([16, 32, 64], [2.6, 4.2, 7.4])]
    [1.0, 0.1]
    """
    x, y = np.asarray(places, np.float64), np.asarray(values, np.float64)
    weight = 1 / np.maximum(y, max(1e-12, 0.02 * float(y.max())))  # what is next to nothing counts no more than that
    slope_through_0 = float(np.sum(weight**2 * x * y) / np.sum((weight * x) ** 2))
    if len(x) < 2:
        return 0.0, max(0.0, slope_through_0)
    at_0, slope = np.linalg.lstsq(np.stack([weight, weight * x], 1), weight * y, rcond=None)[0]
    if at_0 < 0:
        return 0.0, max(0.0, slope_through_0)
    if slope < 0:
        return float(np.sum(weight**2 * y) / np.sum(weight**2)), 0.0
    return float(at_0), float(slope)
