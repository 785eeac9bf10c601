"""Count the passes of evaluation over its data, which training may share a shuffle with."""

from __future__ import annotations

from keras_dist_ext.training.run_dataset import RunDataset

__all__ = ["EvaluationPasses"]


class EvaluationPasses:
    """How many passes evaluation has begun, in this process, and in an earlier one where a run continues.

    Attributes:
        num_before: those of the earlier process.
    """

    def __init__(self) -> None:
        self.num_before = 0
        self._dataset: RunDataset | None = None  # of the last evaluation, whose count has the earlier ones in it

    def follow(self, dataset: RunDataset) -> None:
        """Count those over the data of an evaluation that begins."""
        self._dataset = dataset

    @property
    def num_begun(self) -> int:
        """See above."""
        return self.num_before if self._dataset is None else self._dataset.num_passes
