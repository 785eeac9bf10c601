"""What the doctor reads of real models, callbacks and files, and what it does where that fails."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from doctor_runs import L

import keras_dist_ext as kde
from keras_dist_ext.diagnosis.doctor import setting

# The largest variable


class Reads(kde.Model):  # type: ignore[misc]
    """Reads rows of one table, and leaves another one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.unused = L.Embedding(50, 8), L.Dense(1), L.Embedding(10, 2)

    def call(self, x: Any) -> Any:
        return self.head(self.table(x)[:, 0])


def test_a_table_that_was_never_built_costs_no_report() -> None:
    model = Reads()
    model.compile("adam", "mse")
    model(np.zeros((2, 1), "int32"))
    assert not model.unused.built
    report = kde.diagnose(model)
    largest = report.examination.setting.largest
    assert largest is not None
    assert (largest.num_bytes, largest.optimizer, largest.num_rows) == (50 * 8 * 4, "Adam", 50)
    assert largest.variable.endswith("/embeddings")


SGD = keras.optimizers.SGD


@pytest.mark.parametrize(
    ("optimizer", "num_rows"),
    [
        (SGD(), 0),  # writes the rows that were read
        (SGD(momentum=0.9), 50),
        (SGD(weight_decay=1e-3), 50),
        (SGD(use_ema=True), 50),
        (SGD(gradient_accumulation_steps=2), 50),
        (keras.optimizers.LossScaleOptimizer(SGD()), 0),
        (keras.optimizers.Adam(), 50),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_rows_of_a_table_count_where_an_update_writes_all_of_them(optimizer: Any, num_rows: int) -> None:
    model = keras.Sequential([keras.Input((1,), dtype="int32"), L.Embedding(50, 8), L.Flatten(), L.Dense(1)])
    model.compile(optimizer, "mse")
    largest = setting._largest(model)
    assert largest is not None
    assert (largest.num_bytes, largest.num_rows) == (50 * 8 * 4, num_rows)
    assert largest.optimizer == type(getattr(optimizer, "inner_optimizer", optimizer)).__name__
