"""Each worker sends the rows of its own replicas to their GPUs one step ahead: the numbers are those of one device.

No GPU is needed: the device of a worker's replica is taken for one, and the data is on another.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from sent_ahead_runs import CASES, run_sent_ahead, trained
from two_workers import on_two_workers


def of(case: str, *marks: Any) -> Any:
    return pytest.param(case, id=case, marks=[on_two_workers(run_sent_ahead, case), *marks])


@pytest.mark.parametrize("case", [of(case, pytest.mark.rotating(case)) for case in CASES])
def test_workers_train_as_one_device_on_rows_that_were_sent_ahead(case: str, values: Any, strategies: Any) -> None:
    expected = trained(keras, case)
    for found, num_dealt in values:
        assert num_dealt == 2  # in training and in validation
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
