"""With two real workers, all of them come to the same judgement, about the replicas of both."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_worker_runs import PLANTED, run_all

from keras_dist_ext.cluster.launch import launch

pytestmark = [pytest.mark.multiworker, pytest.mark.slow, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def reports() -> tuple[Any, ...]:
    """What both workers found."""
    values = launch(2, run_all, time_limit=200).values
    assert len(values) == 2
    return values


def test_both_workers_find_a_fault_first_and_none_where_there_is_none(reports: Any) -> None:
    for worker in reports:
        for case, planted in PLANTED.items():
            assert worker[case]["alarms"][:1] == [planted] * bool(planted), worker[case]["text"]
            assert worker[case]["on exact times"] == [], worker[case]["text"]
        assert worker["synchronises"]["synchronising"] > 2 * worker["is_clean"]["synchronising"]


def test_a_slow_worker_is_named(reports: Any) -> None:
    worker = reports[0]["has_a_slow_worker"]
    finding = next(found for found in worker["report"]["findings"] if found["code"] == "straggler")
    assert finding["what"].startswith("Worker 1 (replica 1) is slow: ")
    assert worker["claimed"]["straggler"] > 0.5  # of the run


def test_bytes_and_rate_of_synchronising_are_said(reports: Any) -> None:
    report = reports[0]["synchronises"]["report"]
    assert report["setting"]["gradient_bytes"] == 4 * (64 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 + 1)
    finding = next(found for found in report["findings"] if found["code"] == "sync-bound")
    assert "17.3 MB of gradients a step" in finding["evidence"]


def test_experiments_are_left_out_with_the_reason(reports: Any) -> None:
    report = reports[1]["is_clean"]["report"]
    assert report["skipped_experiments"] == {"all": "there are several workers"}
    assert "skipped-experiments" in [note["code"] for note in report["notes"]]
