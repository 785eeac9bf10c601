"""Hold what experiments have shown: seconds a step under changed conditions, and figures with their intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["Estimate", "Trials"]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure with its 95% confidence interval."""

    low: float
    value: float
    high: float

    @staticmethod
    def of(samples: Sequence[float], *, num_resamples: int = 1000) -> Estimate:
        """Return the median of at least one sample, and how it scatters when samples are drawn again (bootstrap).

        Raises:
            ValueError: there is no sample.

        >>> Estimate.of([1.0, 1.0, 1.0, 9.0, 1.0]).value
        1.0
        """
        if not len(samples):
            raise ValueError("There are no samples, so they have no median. Measure at least one round.")
        held = np.asarray(samples, np.float64)
        drawn = np.random.default_rng(0).integers(len(held), size=(num_resamples, len(held)))
        low, high = np.quantile(np.median(held[drawn], axis=1), [0.025, 0.975])
        return Estimate(float(low), float(np.median(held)), float(high))

    def times(self, factor: float) -> Estimate:
        """Return it multiplied by a number from 0 up."""
        return Estimate(self.low * factor, self.value * factor, self.high * factor)

    def show(self, unit: str = "", scale: float = 1.0) -> str:
        """Return, say, `2.1 ms (1.9 to 2.4)`."""
        return f"{self.value * scale:.3g}{unit} ({self.low * scale:.3g} to {self.high * scale:.3g})"


@dataclasses.dataclass(frozen=True)
class Trials:
    """Seconds a step of the same model under changed conditions, measured in turn: [rounds] of each.

    "as it was" is on a cached batch, as many steps an execution as the run had; "data" reads the run's own data; "no
    sum" leaves gradients unsummed; "double" has the rows twice; "one step" makes a step an execution, and "many steps"
    many; "one device" is one replica that does the work of all; "compiled" is not eager.
    """

    seconds: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    num_steps: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of an execution
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)  # experiment -> why it was not made

    def has(self, *names: str) -> bool:
        """Whether all of these were measured."""
        return all(self.seconds.get(name) for name in names)

    def saved(self, by: str, than: str = "as it was") -> Estimate:
        """Return the seconds a step that one condition takes less than another, round by round."""
        pairs = zip(self.seconds[than], self.seconds[by], strict=True)
        return Estimate.of([base - changed for base, changed in pairs])

    def ratio(self, of: str, to: str = "as it was") -> Estimate:
        """Return how many times as long one takes as another, round by round."""
        pairs = zip(self.seconds[of], self.seconds[to], strict=True)
        return Estimate.of([own / base for own, base in pairs])
