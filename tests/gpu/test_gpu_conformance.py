"""The conformance table on GPUs: replicas that are GPUs give what one GPU gives to stock Keras."""

import pickle
from functools import cache
from typing import Any

import gpu_runs
import gpus
import pytest
from conformance.rows import ROWS
from conformance.run import WORKERS, Outcome, Row, differences, run, run_on_one_device

import keras_dist_ext as kde

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

KINDS = {"one_device": 1, "mirrored2": 2, "mirrored4": 4}
WORKER_ROWS = [row for row in ROWS if WORKERS in row.under][::6]


@cache
def one_device(row: Row) -> Outcome:
    return run_on_one_device(row)


@pytest.mark.parametrize(
    ("row", "kind"),
    [pytest.param(row, kind, id=f"{row.name}-{kind}") for row in ROWS for kind in KINDS if kind in row.under],
)
def test_replicas_give_what_one_gpu_gives(row: Row, kind: str) -> None:
    expected = one_device(row)
    found = run(row, kde, gpus.strategy(KINDS[kind]))
    assert differences(expected, found, row.tolerance) == []


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """Run rows in one launch of two workers that share the card, summed by TensorFlow's ring."""
    folder = tmp_path_factory.mktemp("two_workers")
    found: dict[tuple[str, int], Any] = {}
    try:
        kde.launch(2, gpu_runs.rows, args=([row.name for row in WORKER_ROWS], str(folder)), time_limit=270, quiet=True)
    except kde.LaunchError as error:
        found = {(row.name, task): f"the workers did not get here:\n{error}" for row in WORKER_ROWS for task in (0, 1)}
    for path in folder.glob("*.pkl"):
        name, task, outcome = pickle.loads(path.read_bytes())
        found[name, task] = outcome
    return found


@pytest.mark.xdist_group("workers on GPUs")
@pytest.mark.parametrize("row", WORKER_ROWS, ids=lambda row: row.name)
def test_two_workers_give_what_one_gpu_gives(row: Row, two_workers: dict[tuple[str, int], Any]) -> None:
    expected = one_device(row)
    for task in (0, 1):
        found = two_workers[row.name, task]
        assert not isinstance(found, str), f"worker {task}: {found}"
        assert differences(expected, found, row.tolerance) == []
