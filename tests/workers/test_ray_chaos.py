"""Kill workers, nodes and the driver of a launch on Ray at points drawn from a seed: the run ends with the same bits.

pip install '.[test,ray]' && python -m pytest -m ray --every-case tests/workers/test_ray_chaos.py
"""

import pickle
import subprocess
import sys
import time
from pathlib import Path

import chaos_runs
import numpy as np
import pytest
import ray_runs
from launching import environ_with, run
from ray_nodes import assert_nothing_is_left, token

SEEDS = range(10)

pytestmark = ray_runs.MARKS


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What each worker ends with where nobody dies."""
    folder, environ = tmp_path_factory.mktemp("uninterrupted"), environ_with(TF_CPP_MIN_LOG_LEVEL="3")
    options = {"threads_per_worker": 1, "environ": environ, "time_limit": 200}
    return run(2, chaos_runs.train, args=(str(folder), []), **options)[0].values


def submit(address, folder, seed):
    """Start the driver of a run."""
    call = f"chaos_runs.launch_on_ray({address!r}, {str(folder)!r}, {seed}, {token(seed)['TEST_TOKEN']!r})"
    return subprocess.Popen([sys.executable, "-c", f"import chaos_runs; {call}"], cwd=Path(chaos_runs.__file__).parent)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=ray_runs.at_length(2 + seed)) for seed in SEEDS])
def test_a_run_that_loses_a_worker_a_node_and_its_driver_ends_with_the_same_bits(seed, uninterrupted, nodes, tmp_path):
    plan, began, num_drivers = chaos_runs.accidents_on_ray(seed), time.monotonic(), 0
    nodes.have(3)
    while not (tmp_path / "values").exists():
        num_drivers += 1
        with submit(nodes.cluster.address, tmp_path, seed) as driver:
            while driver.poll() is None:
                nodes.have(3)  # a node that is lost is replaced
                time.sleep(0.1)
        assert driver.returncode in (0, -9), "it is resubmitted after a SIGKILL alone"
    values, num_restarts = pickle.loads((tmp_path / "values").read_bytes())
    dying = ", ".join(f"{accident.dies} of worker {accident.victims[0]} {accident.kind}" for accident in plan)
    sys.stdout.write(f"seed {seed}: {dying}: {time.monotonic() - began:.0f} s, {num_restarts} restarts at last\n")
    assert len(list(tmp_path.glob("accident-*.json"))) == len(plan)
    assert num_drivers == 2
    for worker, reference in zip(values, uninterrupted, strict=True):
        assert (worker["resumed"] is not None) == worker["is_saved"]
        assert worker["seen"] == reference["seen"] == [[1.0] * chaos_runs.NUM_EXAMPLES] * chaos_runs.EPOCHS
        assert worker["loss"] == reference["loss"]
        for one, other in zip(worker["weights"], reference["weights"], strict=True):
            np.testing.assert_array_equal(one, other)
    assert_nothing_is_left(str(seed), nodes)
