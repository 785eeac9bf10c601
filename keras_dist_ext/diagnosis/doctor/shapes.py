"""Hold what the shapes of batches cost: padding that is computed, and compiling anew for shapes that are new."""

from __future__ import annotations

import dataclasses

from keras_dist_ext.diagnosis.doctor.trials import Trials

__all__ = ["Padding", "Recompilation"]


@dataclasses.dataclass(frozen=True)
class Padding:
    """How much of the batches is padding, and what a step takes with it and with less."""

    share: float  # of what batches hold, 0 to 1
    share_by_length: float  # of batches of rows that are alike in length
    num_examples: int  # that were looked at
    batch_size: int
    longest: int
    mean: float  # length
    stage: str = ""  # that pads, such as "padded_batch(64)"; "": rows are padded before they are batched
    boundaries: tuple[int, ...] = ()  # the longest length of each of few buckets but the last
    trials: Trials = dataclasses.field(default_factory=Trials)  # "as they come" and "by length"


@dataclasses.dataclass(frozen=True)
class Recompilation:
    """How many shapes batches have, where XLA compiles the step for each of them."""

    num_shapes: int  # others, of so many batches
    num_batches: int
    examples: tuple[str, ...]  # some of them
    only_rows: bool  # whether they differ in the number of rows alone
    longest: int  # sequence; 0: there are none
    boundaries: tuple[int, ...]  # as of padding
    batch_size: int
    stage: str
    step_seconds: tuple[float, ...]  # of each step that was watched, in computing
    compiled_seconds: float  # a step, once its shape is compiled
    plain_seconds: float  # a step without XLA; 0: that could not be timed
