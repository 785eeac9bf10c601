"""Keep what the steps of a run took, in blocks of neighbouring steps, for as long as that is worth its cost."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import psutil

from keras_dist_ext.diagnosis.doctor.examination import blocks_of_steps
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.step.stats import ReplicaStats, summarize

__all__ = ["StepBlocks", "others_seconds"]

_MOST_BLOCKS = 32
_MOST_STEPS = 10_000  # one by one
_WARM_UP = 2  # executions: they trace, and allocate; a pipeline fills its buffers
_PARTS = 4  # that the steps fetched at once are cut into, at first
_SHORT_SECONDS = 3e-3  # a step: recording it costs more than 1%
_ENOUGH_STEPS, _ENOUGH_SECONDS = 200, 2.0


class StepBlocks:
    """Blocks of steps of one run; every worker makes the same.

    Waiting for the first batch of a pass over the data is no part of them: a pipeline that begins anew opens files, and
    fills its buffers.

    Attributes:
        num_executions: that were watched, without those at the beginning.
        start_seconds: of waiting for the first batch, pass by pass.
        compute_seconds: of each step, of the replica that took longest; of no more steps than matter.

    Args:
        recorder: of the steps.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._blocks: list[ReplicaStats] = []
        self._num_steps, self._seconds = 0, 0.0  # of all blocks
        self._least = 1  # steps of a block
        self._num_ever = 0
        self._began = 0.0
        self._others_before: float | None = None
        self._num_pending = 0  # steps that were not fetched yet
        self._starts: list[int] = []  # which of them came first in a pass
        self.num_executions = 0
        self.start_seconds: list[float] = []
        self.compute_seconds: list[float] = []

    def end_execution(self, *, begins_pass: bool = False) -> bool:
        """Take note of an execution; return whether it was the last one that does not count.

        Args:
            begins_pass: whether its first batch was the first of a pass over the data.
        """
        self._num_ever += 1
        if self._num_ever <= _WARM_UP:
            if self._num_ever == _WARM_UP:
                self._recorder.fetch("train")
                self._began, self._others_before = time.perf_counter(), others_seconds()
                return True
            return False
        self.num_executions += 1
        if begins_pass:
            self._starts.append(self._num_pending)
        self._num_pending = self._recorder.num_pending("train")
        if self._num_pending >= self._least:
            self._cut()
        return False

    def end(self) -> None:
        """Take what is left."""
        if self._num_ever > _WARM_UP:
            self._cut()

    @property
    def blocks(self) -> list[ReplicaStats]:
        """The blocks so far."""
        return self._blocks

    @property
    def num_steps(self) -> int:
        """Steps so far, without those at the beginning, and those that were not fetched yet."""
        return self._num_steps

    @property
    def is_enough(self) -> bool:
        """Whether steps are so short that to record more of them would cost more than it tells."""
        if self._num_steps < _ENOUGH_STEPS or self._seconds < _ENOUGH_SECONDS:
            return False
        return self._seconds / self._num_steps < _SHORT_SECONDS

    @property
    def others_cores(self) -> float | None:
        """How many cores other processes took since steps began to count; None where that is unknown."""
        passed = time.perf_counter() - self._began
        if not self._began or passed < 0.5:  # the system counts in hundredths of a second
            return None
        now = others_seconds()
        return None if now is None or self._others_before is None else max(0.0, (now - self._others_before) / passed)

    def _cut(self) -> None:
        records = self._recorder.fetch("train")
        starts, self._starts, self._num_pending = self._starts, [], 0
        if records is None:
            return
        self.start_seconds += records.input_seconds[starts].tolist()
        if len(self.compute_seconds) < _MOST_STEPS:
            self.compute_seconds += records.compute_seconds.max(axis=1).tolist()
        is_start = np.isin(np.arange(len(records)), starts)
        records = dataclasses.replace(records, input_seconds=np.where(is_start, 0.0, records.input_seconds))
        parts = min(len(records), _PARTS if len(self._blocks) < _MOST_BLOCKS // 2 else 1)
        ends = [len(records) * (i + 1) // parts for i in range(parts)]
        new = [
            summarize(records.steps(begin, end), step=0, wall_time=0.0)
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        self._blocks += new
        self._num_steps += sum(block.num_steps for block in new)
        self._seconds += sum(block.seconds for block in new)
        if len(self._blocks) > _MOST_BLOCKS:
            self._blocks = blocks_of_steps(self._blocks, _MOST_BLOCKS)
            self._least = max(1, self._blocks[-1].num_steps)


def others_seconds() -> float | None:
    """Return the core-seconds since boot that went to other processes; None where the system does not tell."""
    try:
        everyone, own = psutil.cpu_times(), psutil.Process().cpu_times()
    except (psutil.Error, OSError):
        return None
    idle = everyone.idle + getattr(everyone, "iowait", 0.0)
    guests = getattr(everyone, "guest", 0.0) + getattr(everyone, "guest_nice", 0.0)  # counted in user and nice too
    return float(sum(everyone) - guests - idle - own.user - own.system)
