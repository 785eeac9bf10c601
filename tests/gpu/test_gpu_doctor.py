"""Faults that are planted in real runs, on replicas that are GPUs: the doctor finds each first.

Those of support/doctor_runs.py that cost the same whatever computes: what sleeps, what the host does, what is seen
without a clock. A pipeline that computes, shards of unequal size and an LSTM are no fault where a GPU is fast at them.
"""

from typing import Any

import doctor_runs
import pytest
import tensorflow as tf
from healthy_runs import alarms

FAULTS = {
    "sequential_map": "sequential-map",
    "generator_bound": "generator-bound",
    "python_generator": "generator-bound",
    "starved": "batch-too-small",
    "host_bound": "host-bound",
    "watched_steps": "host-bound",
    "eager": "eager",
    "python_step": "python-in-step",
    "retracing": "retracing",
    "fetching_callback": "fetching-callback",
    "slow_callback": "slow-callback",
    "pinned_device": "pinned-device",
    "straggler": "straggler",
}
BY_NO_CLOCK = ("starved", "eager", "pinned_device")


def found(strategy: tf.distribute.Strategy, fault: str, *, is_planted: bool) -> list[str]:
    """Return what is said of a run, but not that other GPUs are idle."""
    report: Any = getattr(doctor_runs, fault)(strategy, is_planted)
    return [code for code in alarms(report, FAULTS[fault]) if code != "idle-accelerators"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_doctor_finds_a_planted_fault_first(fault: str, two: tf.distribute.Strategy) -> None:
    assert found(two, fault, is_planted=True)[:1] == [FAULTS[fault]]


@pytest.mark.parametrize("fault", BY_NO_CLOCK)
def test_the_doctor_does_not_find_a_fault_that_is_not_there(fault: str, two: tf.distribute.Strategy) -> None:
    assert FAULTS[fault] not in found(two, fault, is_planted=False)
