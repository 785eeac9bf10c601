"""A dtype in which the device at hand is slower than in float32: measured there, and told where it costs time."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import keras
import pytest
from test_diagnose import HEALTHY, times

from keras_dist_ext.diagnosis.doctor import dtype_speed
from keras_dist_ext.diagnosis.doctor.dtype_speed import measure_dtype
from keras_dist_ext.diagnosis.doctor.examination import DtypeSpeed, Examination
from keras_dist_ext.diagnosis.doctor.rules import judge

L = keras.layers
HALF = DtypeSpeed("float16", "CPU:0", "convolution", seconds=0.004, float32_seconds=0.001)


def test_a_dtype_that_takes_long_is_timed_twice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr(dtype_speed, "time", clock)
    assert dtype_speed._seconds("float32", "CPU:0", convolves=False) == 1.0
    assert next(seconds) == 4  # a round that does not count, and one that does


def test_a_dtype_in_which_the_device_is_slow_says_what_was_timed_and_what_float32_would_save() -> None:
    (finding,) = judge(Examination(HEALTHY, times(), dtype=HALF)).findings
    assert (finding.code, finding.seconds) == ("slow-dtype", pytest.approx(80 * 0.018 * 3 / 4))
    assert finding.evidence.startswith("a convolution with its gradients took 4 ms, and in float32 1 ms; about 100% of")
    assert finding.fix.startswith("Here, float32: leave out `keras.mixed_precision.set_global_policy(...)`")
    double = dataclasses.replace(HALF, dtype="float64")
    assert (
        judge(Examination(HEALTHY, times(), dtype=double))
        .findings[0]
        .fix.startswith('`keras.config.set_floatx("float32")`')
    )


@pytest.mark.parametrize(
    ("facts", "given", "is_found"),
    [
        ({"seconds": 0.00155}, {}, True),
        ({"seconds": 0.00145}, {}, False),  # hardly slower
        ({"seconds": 0.0005}, {}, False),  # faster
        ({"share": 0.32}, {}, True),
        ({"share": 0.28}, {}, False),  # of a small part of the model
        ({}, {"step": 0.1}, False),  # what it computes is a small part of the time
    ],
)
def test_a_dtype_that_costs_little_is_no_finding(facts: Any, given: Any, is_found: bool) -> None:
    examination = Examination(HEALTHY, times(**given), dtype=dataclasses.replace(HALF, **facts))
    assert ("slow-dtype" in judge(examination).codes) == is_found


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([L.Dense(4)], None),
        ([L.Dense(4, dtype="float64"), L.Dense(1, dtype="float64")], ("float64", "matrix product", 1.0)),
        ([L.Dense(8, dtype="mixed_float16"), L.Dense(1)], ("float16", "matrix product", 40 / 49)),
        ([L.Dense(8), L.Dense(1, dtype="mixed_float16")], None),
        (
            [L.Reshape((2, 2, 1)), L.Conv2D(4, 2, padding="same", dtype="mixed_bfloat16"), L.Flatten(), L.Dense(4)],
            ("bfloat16", "convolution", 80 / 148),  # 20 weights at each of 4 places
        ),
    ],
)
def test_what_most_weights_are_computed_with_is_timed(layers: Any, expected: Any) -> None:
    speed = measure_dtype(keras.Sequential([keras.Input((4,)), *layers]), "CPU:0")
    if expected is None:
        assert speed is None
    else:
        assert speed is not None
        assert (speed.dtype, speed.operation, speed.share) == (*expected[:2], pytest.approx(expected[2]))
        assert min(speed.seconds, speed.float32_seconds) > 0
