"""Kill workers at random: the run ends with the bits that it would have had, and leaves nothing behind.

Each row is a launch whose attempts are killed one after the other, at points drawn from a seed: 20 in all, of which
a commit has ten.
"""

import itertools
import json

import chaos_runs
import numpy as np
import pytest
from launching import environ_with, processes_with, run

NUM_ACCIDENTS = 5
SEEDS = (250, 251, 252, 253)  # by which every kind comes to every victim

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.multiworker,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("signals_as_in_a_terminal"),
]


def train(folder, plan, token):
    return run(
        2,
        chaos_runs.train,
        args=(str(folder), plan),
        max_restarts=len(plan),
        timeout=120,
        time_limit=580,
        pause_seconds=0.05,
        grace_seconds=0.5,
        threads_per_worker=1,  # the same bits on any machine
        environ=environ_with(TF_CPP_MIN_LOG_LEVEL="3", TEST_TOKEN=token),
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What each worker ends with where nobody dies."""
    return train(tmp_path_factory.mktemp("uninterrupted"), [], "uninterrupted")[0].values


def test_the_accidents_are_of_all_kinds():
    drawn = [accident for seed in SEEDS for accident in chaos_runs.accidents(seed, NUM_ACCIDENTS)]
    assert len(drawn) == 20
    assert {(accident.kind, accident.victims) for accident in drawn} == set(
        itertools.product(chaos_runs.KINDS, [(0,), (1,), (0, 1)])
    )
    assert {accident.call for accident in drawn if accident.kind == "in a save"} == set(chaos_runs.CALLS)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.rotating("chaos", seed % 2, 2)) for seed in SEEDS]
)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(seed, uninterrupted, tmp_path, temporary):
    plan = chaos_runs.accidents(seed, NUM_ACCIDENTS)
    token = f"chaos {seed}"
    result, shown = train(tmp_path, plan, token)
    assert result.num_restarts == NUM_ACCIDENTS, shown
    for attempt, accident in enumerate(plan):
        files = json.loads((tmp_path / f"accident-{attempt}.json").read_text())
        if accident.call in ("write", "replace"):
            assert ".tmp" in files, "it was in the middle of a save"
    assert shown.count("failed with SIGKILL") == NUM_ACCIDENTS, shown
    for worker, reference in zip(result.values, uninterrupted, strict=True):
        assert worker["resumed"] is not None
        assert worker["seen"] == [[1.0] * chaos_runs.NUM_EXAMPLES] * chaos_runs.EPOCHS
        assert worker["loss"] == reference["loss"]
        for one, other in zip(worker["weights"], reference["weights"], strict=True):
            np.testing.assert_array_equal(one, other)
    assert reference["seen"] == worker["seen"]
    assert processes_with(token) == []
