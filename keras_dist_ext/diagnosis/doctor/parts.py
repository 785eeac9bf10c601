"""Hold what single parts of a step take: metrics, and what single layers do, each timed by leaving it out."""

from __future__ import annotations

import dataclasses

from keras_dist_ext.diagnosis.doctor.trials import Trials

__all__ = ["Layout", "Looped", "Metered", "OneHot", "Parts", "RecurrentDropout", "Summaries"]


@dataclasses.dataclass(frozen=True)
class Metered:
    """A metric, and what a step takes with it and without."""

    name: str
    kind: str  # its class
    trials: Trials  # "as it was" and "without"
    argument: str = ""  # by which it costs what it does: "num_thresholds=200000"
    better: str = ""  # what to give instead: "num_thresholds=200"

    @property
    def seconds(self) -> float:
        """Seconds of it in a step, as far as they are more than what steps vary; 0 where they are not."""
        saved = self.trials.saved("without") if self.trials.has("as it was", "without") else None
        return 0.0 if saved is None or saved.low <= 0 else saved.value


@dataclasses.dataclass(frozen=True)
class Looped:
    """A layer whose call goes round in a loop, and what a step takes with it, without it, and compiled by XLA."""

    layer: str  # its name; "" is the loss of `compile`
    trials: Trials  # "as it was", "without", and "compiled" where XLA can
    num_turns: float = 0.0  # of a replica's step; 0: unknown
    turn_seconds: float = 0.0  # that a turn takes which computes next to nothing, forward and back


@dataclasses.dataclass(frozen=True)
class OneHot:
    """A Dense layer that is given one-hot vectors, and what a step takes with it and without."""

    layer: str
    num_rows: int  # of its kernel
    num_columns: int
    trials: Trials  # "as it was" and "without"


@dataclasses.dataclass(frozen=True)
class RecurrentDropout:
    """A recurrent layer with recurrent dropout, and what a step takes with it and without."""

    layer: str
    kind: str  # its class
    rate: float
    trials: Trials  # "as it was" and "without"


@dataclasses.dataclass(frozen=True)
class Summaries:
    """Summaries that a step writes, and what it takes with them and without."""

    tags: tuple[str, ...]  # of some of them
    num_written: int
    trials: Trials  # "as it was" and "without"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How long a convolution takes whose channels come first, and with channels last."""

    layer: str  # the largest of those that were timed
    device: str
    first_seconds: float
    last_seconds: float
    share: float  # of the products of a step, that such layers make


@dataclasses.dataclass(frozen=True)
class Parts:
    """All that were timed."""

    metrics: tuple[Metered, ...] = ()
    loops: tuple[Looped, ...] = ()
    one_hots: tuple[OneHot, ...] = ()
    recurrent_dropouts: tuple[RecurrentDropout, ...] = ()
    summaries: Summaries | None = None  # None: it writes none
    layout: Layout | None = None  # None: channels come last, or the device is no CPU
