"""A callback that has a run recorded."""

from __future__ import annotations

from typing import Any

import keras_dist_ext as kde
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.step.stats import Kind, StepRecords


class Recording(kde.RunCallback):
    """Has a run recorded."""

    supports_multi_step = True

    def __init__(self, *, gradient_norm: bool = False) -> None:
        super().__init__()
        self.recorder = Recorder(gradient_norm=gradient_norm)

    def on_run_prepare(self, model: Any) -> None:
        model.add_recorder(self.recorder)

    def of(self, kind: Kind = "train") -> StepRecords:
        records = self.recorder.fetch(kind)
        assert records is not None
        return records
