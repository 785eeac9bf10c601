"""With two real workers, each plans with what sums over both add to a step of the model."""

from __future__ import annotations

from typing import Any

import pytest
from plan_worker_runs import GRADIENT_BYTES, SLOW, plan_on_both

from keras_dist_ext.cluster.launch import launch


@pytest.mark.multiworker
@pytest.mark.slow
def test_both_workers_plan_with_what_sums_over_them_add_to_a_step() -> None:
    values: Any = launch(2, plan_on_both, time_limit=200).values
    assert len(values) == 2
    for worker in values:
        assert worker["unchanged"]
        assert max(worker["sums"]) == GRADIENT_BYTES
        assert worker["bound"] == "communication", worker["text"]
        assert worker["communication"] >= 0.4 * SLOW  # which was put into each sum; a busy machine adds to it
        assert "measured in steps on MultiWorkerMirroredStrategy" in worker["text"]
