"""With two real workers, all of them come to the same judgement, about the replicas of both."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_worker_runs import run_all

from keras_dist_ext.cluster.launch import launch

pytestmark = [pytest.mark.multiworker, pytest.mark.slow, pytest.mark.timeout(700)]


CASES = {"is_clean": [], "synchronises": ["sync-bound"], "has_a_slow_worker": ["straggler"]}


@pytest.fixture(scope="module")
def reports() -> tuple[Any, ...]:
    """What both workers found; of three launches at most, since others use the cores of this machine, too."""
    for _ in range(3):
        values = launch(2, run_all, time_limit=200).values
        assert len(values) == 2
        if all(worker[case][1] == codes for worker in values for case, codes in CASES.items()):
            break
    return values


@pytest.mark.parametrize(("case", "codes"), CASES.items())
def test_both_workers_find_the_fault_first_and_none_where_there_is_none(
    case: str, codes: list[str], reports: Any
) -> None:
    for worker in reports:
        text, found, _ = worker[case]
        assert found == codes, text


def test_a_slow_worker_is_named(reports: Any) -> None:
    _, _, report = reports[0]["has_a_slow_worker"]
    (finding,) = report["findings"]
    assert finding["what"].startswith("Worker 1 (replica 1) is slow: ")
    assert finding["seconds"] > 0.15 * 20


def test_bytes_and_rate_of_synchronising_are_said(reports: Any) -> None:
    _, _, report = reports[0]["synchronises"]
    assert report["setting"]["gradient_bytes"] == 4 * (64 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 + 1)
    assert "17.3 MB of gradients a step" in report["findings"][0]["evidence"]


def test_experiments_are_left_out_with_the_reason(reports: Any) -> None:
    _, _, report = reports[1]["is_clean"]
    assert report["skipped_experiments"] == {"all": "there are several workers"}
    assert "skipped-experiments" in [note["code"] for note in report["notes"]]
