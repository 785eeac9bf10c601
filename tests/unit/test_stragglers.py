"""Who is slow is named, against the fastest and against its own best; who is unlucky is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from intervals_made_up import interval

import keras_dist_ext as kde
from keras_dist_ext.monitoring.stragglers import Stragglers


def judge(stragglers: Stragglers, *computes: Sequence[float], **given: Any) -> Any:
    """Score intervals of 10 steps, one after another, and return the last scores."""
    for number, compute in enumerate(computes, 1):
        scores = stragglers.score(interval(compute, step=10 * number, **{"waiting": 0.0, **given}))
    return scores


def test_scores_are_ratios_to_the_fastest_and_to_the_replicas_own_best() -> None:
    stragglers = Stragglers()
    judge(stragglers, [0.010, 0.020], [0.008, 0.030])
    scores = judge(stragglers, [0.016, 0.040])
    np.testing.assert_allclose(scores.relative, [1.0, 0.4])
    np.testing.assert_allclose(scores.individual, [0.5, 0.5])


def test_waiting_for_input_counts_as_busy_time() -> None:
    scores = judge(Stragglers(), [0.010, 0.010], waiting=[0.0, 0.010])
    np.testing.assert_allclose(scores.relative, [1.0, 0.5])


def test_a_replica_without_examples_has_no_score_and_sets_none() -> None:
    scores = judge(Stragglers(), [0.0001, 0.010, 0.010], examples=[0, 160, 160])
    np.testing.assert_allclose(scores.relative, [np.nan, 1.0, 1.0])
    np.testing.assert_allclose(scores.individual, [np.nan, 1.0, 1.0])


def test_a_replica_with_half_the_examples_is_not_compared_with_the_others() -> None:
    scores = judge(Stragglers(), [0.005, 0.010, 0.012], examples=[80, 160, 155])
    np.testing.assert_allclose(scores.relative, [1.0, 1.0, 10 / 12])


def test_the_best_time_with_fewer_examples_is_forgotten() -> None:
    stragglers = Stragglers()
    judge(stragglers, [0.005], examples=[80])
    assert judge(stragglers, [0.010], examples=[160]).individual == 1.0
    assert judge(stragglers, [0.020], examples=[160]).individual == 0.5
    assert judge(stragglers, [0.005], examples=[80]).individual == 1.0


def test_the_slowest_replica_is_named_with_its_share_and_what_it_costs() -> None:
    stragglers = Stragglers()
    judge(stragglers, *[[0.028, 0.030, 0.043]] * 4, waiting=0.002)
    (finding,) = stragglers.findings
    assert finding["kind"] == "straggler"
    assert finding["code"] == "slow-replica"
    assert finding["what"] == "Replica 2 is slow: a step takes 1.50 times as long as on the fastest replica."
    assert finding["evidence"] == (
        "43 ms computing and 2 ms waiting for input per step, the fastest 30 ms together; 40 steps in a row"
    )
    assert finding["step"] == 30
    assert finding["seconds"] == pytest.approx(40 * (0.045 - 0.032))  # steps would take as long as replica 1


@pytest.mark.parametrize(("threshold", "is_named"), [(0.75, True), (0.6, False), (0.0, False)])
def test_the_threshold_decides_which_replicas_are_stragglers(threshold: float, is_named: bool) -> None:
    stragglers = Stragglers(threshold)
    judge(stragglers, *[[0.030, 0.045]] * 5)
    assert bool(stragglers.findings) is is_named


def test_a_single_outlier_is_not_a_straggler() -> None:
    stragglers = Stragglers()
    slow, even = [0.010, 0.030], [0.010, 0.010]
    judge(stragglers, even, slow, slow, even, slow, slow, even)
    assert stragglers.findings == []


def test_intervals_of_one_step_are_scored_ten_at_a_time() -> None:
    stragglers = Stragglers()
    lucky = [[0.001, 0.010] if i % 10 == 0 else [0.010, 0.010] for i in range(60)]
    judge(stragglers, *lucky, num_steps=1, examples=[16, 16])
    assert stragglers.findings == []
    judge(stragglers, *[[0.010, 0.020]] * 30, num_steps=1, examples=[16, 16])
    assert {finding["code"] for finding in stragglers.findings} == {"slow-replica", "slower-than-before"}


def test_a_replica_that_gets_slower_is_named_even_when_all_do() -> None:
    stragglers = Stragglers()
    judge(stragglers, [0.010, 0.010], *[[0.018, 0.018]] * 3)
    (finding,) = stragglers.findings
    assert finding["code"] == "slower-than-before"
    assert (
        finding["what"]
        == "All replicas became slower: a step takes 1.80 times as long as at best (the worst, replica 1)."
    )
    assert finding["seconds"] == pytest.approx(30 * 0.008)


def test_an_outlier_in_a_slow_phase_does_not_count_for_all_of_it() -> None:
    stragglers = Stragglers()
    judge(stragglers, [0.010, 0.010], *[[0.018, 0.018]] * 9, [0.218, 0.218])
    (finding,) = stragglers.findings
    assert finding["what"].startswith(
        "All replicas became slower: a step takes 3.80 times as long as at best"
    )  # not 21.8
    assert finding["evidence"] == (
        "38 ms computing and 0 ms waiting for input per step, at best 10 ms together; 100 steps in a row"
    )
    assert finding["seconds"] == pytest.approx(90 * 0.008 + 10 * 0.208)


def test_a_slow_replica_that_costs_nothing_is_named_too() -> None:
    stragglers = Stragglers()
    judge(stragglers, *[[0.020, 0.010, 0.010, 0.040]] * 3, examples=[80, 80, 80, 320])  # all wait for the last
    (finding,) = stragglers.findings
    assert finding["what"] == "Replica 0 is slow: a step takes 2.00 times as long as on the fastest replica."
    assert finding["seconds"] == 0


def test_if_most_are_slower_than_one_that_one_is_fast() -> None:
    stragglers = Stragglers()
    judge(stragglers, *[[0.003, 0.0045, 0.005, 0.0055]] * 5)  # four logical CPUs on two cores
    assert stragglers.findings == []
    judge(stragglers, *[[0.003, 0.0045, 0.005, 0.0065]] * 5)
    (finding,) = (f for f in stragglers.findings if f["code"] == "slow-replica")
    assert finding["what"].startswith("Replica 3 is slow: a step takes 2.17 times")


def test_replicas_that_share_few_cores_are_compared_only_with_their_own_best() -> None:
    stragglers = Stragglers(shares_cores=True)
    scores = judge(stragglers, *[[0.010, 0.040]] * 5)
    assert scores.relative.tolist() == [1.0, 0.25]
    assert stragglers.findings == []
    judge(stragglers, *[[0.010, 0.080]] * 5)
    assert [f["code"] for f in stragglers.findings] == ["slower-than-before"]


def test_on_cpus_a_replica_is_not_slow_before_a_second_has_passed() -> None:
    slow, even = [0.005, 0.010], [0.005, 0.005]
    stragglers = Stragglers(on_cpu=True)
    judge(stragglers, even, *[slow] * 9, even, *[slow] * 9)  # 0.9 s each time
    assert stragglers.findings == []
    judge(stragglers, *[slow] * 9)
    assert [f["code"] for f in stragglers.findings] == ["slow-replica", "slower-than-before"]
    assert [f["seconds"] for f in stragglers.findings] == [pytest.approx(180 * 0.005)] * 2


def test_on_cpus_what_makes_all_replicas_slower_is_no_straggler() -> None:
    stragglers = Stragglers(on_cpu=True)
    judge(stragglers, [0.010, 0.010], *[[0.018, 0.020]] * 30)
    assert stragglers.findings == []
    judge(stragglers, *[[0.018, 0.040]] * 30)
    before = next(f for f in stragglers.findings if f["code"] == "slower-than-before")
    assert before["what"] == "Replica 1 became slower: a step takes 4.00 times as long as at best."
    assert before["evidence"].startswith("40 ms computing and 0 ms waiting for input per step, at best 10 ms together")
    assert before["seconds"] == pytest.approx(300 * (0.040 - 0.018))


def test_on_cpus_a_slow_replica_of_many_on_few_cores_is_found_against_its_own_best() -> None:
    stragglers = Stragglers(on_cpu=True, shares_cores=True)
    judge(stragglers, *[[0.010, 0.040, 0.020, 0.030]] * 9, *[[0.012, 0.041, 0.060, 0.031]] * 9)
    (finding,) = stragglers.findings
    assert finding["what"].startswith("Replica 2 became slower: ")


def test_a_replica_alone_on_a_cpu_is_not_slower_than_before() -> None:
    stragglers = Stragglers(on_cpu=True)
    judge(stragglers, [0.010], *[[0.030]] * 30)
    assert stragglers.findings == []


def test_a_slow_worker_is_named_as_one() -> None:
    stragglers = Stragglers(num_workers=2)
    judge(stragglers, *[[0.010, 0.011, 0.021, 0.020]] * 3)
    (finding,) = stragglers.findings
    assert finding["what"].startswith("Worker 1 (replicas 2 and 3) is slow: a step takes 2.10 times as long")


def test_a_slow_replica_of_several_workers_is_named_with_its_worker() -> None:
    stragglers = Stragglers(num_workers=2)
    judge(stragglers, *[[0.010, 0.011, 0.010, 0.020]] * 3)
    (finding,) = stragglers.findings
    assert finding["what"].startswith("Replica 3 (of worker 1) is slow: a step takes 2.00 times as long")


def test_replicas_that_take_turns_at_being_slow_are_listed_together() -> None:
    stragglers = Stragglers()
    judge(stragglers, *[[0.02, 0.01, 0.01]] * 3, *[[0.01, 0.03, 0.01]] * 3)
    finding = next(f for f in stragglers.findings if f["code"] == "slow-replica")
    assert finding["what"].startswith("Replicas 0 and 1 are slow: a step takes 3.00 times")
    assert finding["step"] == 30
    assert finding["seconds"] == pytest.approx(30 * 0.01 + 30 * 0.02)


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan")])
def test_an_invalid_threshold_is_refused(threshold: float) -> None:
    with pytest.raises(kde.MonitorError, match="straggler_threshold must be from 0 to 1, got"):
        Stragglers(threshold)
