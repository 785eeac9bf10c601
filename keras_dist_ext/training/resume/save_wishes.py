"""Say what is wished for between executions: a checkpoint, and after it the end of the process."""

from __future__ import annotations

from keras_dist_ext.cluster import heartbeat
from keras_dist_ext.strategy.workers import Workers
from keras_dist_ext.training.resume.background_writer import BackgroundWriter
from keras_dist_ext.training.resume.preemption import Preemption
from keras_dist_ext.training.resume.save_schedule import SaveSchedule

__all__ = ["EXIT", "LEAVE", "SAVE", "SaveWishes"]

SAVE, LEAVE, EXIT = 1, 1 << 10, 1 << 20  # what a worker wishes for; summed over all


class SaveWishes:
    """The wishes of one worker; when a checkpoint is due, the chief decides for all.

    Args:
        schedule: when checkpoints are due.
        writer: of checkpoints; while it is busy, none is wished for.
        preemption: that may have asked for the end of the process; None where nobody can.
        workers: of the run; None on one.
    """

    def __init__(
        self, schedule: SaveSchedule, writer: BackgroundWriter, preemption: Preemption | None, workers: Workers | None
    ) -> None:
        self._schedule = schedule
        self._writer = writer
        self._preemption = preemption
        self._workers = workers

    def plan(self, num_steps: int, num_batches_used: int, *, follows_clock: bool) -> tuple[int, int]:
        """Return how many of the next steps to make, and what is wished for after them; see ``Wishes``."""
        if self._preemption is not None and self._preemption.is_requested:
            return num_steps, EXIT
        if self._workers is not None and not self._workers.is_chief:
            return num_steps, 0
        num_steps, is_due = self._schedule.plan(num_steps, num_batches_used, follows_clock=follows_clock)
        return num_steps, self._of_chief(is_due)

    def after_epoch(self, agreed_wish: int, *, is_last: bool) -> int:
        """Return what all workers wish for after an epoch.

        Args:
            agreed_wish: what they have wished for after its last execution.
            is_last: whether a checkpoint is written whatever is wished.
        """
        wish = EXIT if self.must_exit() else agreed_wish
        if not (is_last or wish) and self._schedule.follows_epochs:
            wish = self._of_chief(self._schedule.is_due_after_epoch)
            wish = wish if self._workers is None else int(self._workers.broadcast([float(wish)])[0])
        return wish

    def must_exit(self) -> bool:
        """Whether this process, or another worker, was asked to exit."""
        if self._preemption is None:
            return False
        is_requested = float(self._preemption.is_requested)
        return bool(is_requested if self._workers is None else self._workers.sum([is_requested])[0])

    def _of_chief(self, is_due: bool) -> int:
        if not is_due or self._writer.is_busy:
            return 0
        return LEAVE if heartbeat.is_asked_to_leave() else SAVE
