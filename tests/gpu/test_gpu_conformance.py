"""The conformance table on GPUs: replicas that are GPUs give what one GPU gives to stock Keras.

All rows run: on one GPU, and on two or on four, which one depends on the row's name. Those on two come first.
"""

import contextlib
import hashlib
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import gpu_runs
import gpus
import keras
import pytest
from conformance.rows import ROWS
from conformance.run import WORKERS, Outcome, Row, differences, run, run_on_one_device

import keras_dist_ext as kde
from keras_dist_ext._keras.interception import patched

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

KINDS = {"one_device": 1, "mirrored2": 2, "mirrored4": 4}
WORKER_ROWS = [row for row in ROWS if WORKERS in row.under][::6]
NUM_LAUNCHES = 3
"""Of two workers each, which share the rows."""


def of_several(row: Row) -> str | None:
    """Choose how many GPUs a row runs on beside one."""
    kinds = [kind for kind in KINDS if KINDS[kind] > 1 and kind in row.under]
    return kinds[hashlib.sha256(row.name.encode()).digest()[0] % len(kinds)] if kinds else None


def cases() -> list[Any]:
    """All rows, each in one process."""
    rows = sorted(ROWS, key=lambda row: KINDS.get(of_several(row) or "", 0))
    return [
        pytest.param(row, kind, id=f"{row.name}-{kind}", marks=pytest.mark.xdist_group(row.name))
        for row in rows
        for kind in ("one_device", of_several(row))
        if kind in row.under
    ]


FAILS_BY_XLA = ("strings and bools, first batch uneven",)
"""What stock Keras compiles by XLA on a GPU, where it fails: XLA takes no strings."""


@cache
def one_device(row: Row) -> Outcome:
    """What stock Keras gives. Quick rows alone are compiled by XLA there, as is Keras' default, which takes long."""
    is_stock = row.quick and row.name not in FAILS_BY_XLA
    with contextlib.nullcontext() if is_stock else patched(keras.Model, "_resolve_auto_jit_compile", lambda _: False):
        return run_on_one_device(row)


@pytest.mark.parametrize(("row", "kind"), cases())
def test_replicas_give_what_one_gpu_gives(row: Row, kind: str) -> None:
    expected = one_device(row)
    with gpu_runs.xla_of(row), gpu_runs.sends_of(row):
        found = run(row, kde, gpus.strategy(KINDS[kind]))
    assert differences(expected, found, row.tolerance) == []


@cache
def launched(folder: Path, launch: int) -> dict[tuple[str, int], Any]:
    """Run a share of the rows in one launch of two workers; where each has a card, the second share is for NCCL."""
    rows = WORKER_ROWS[launch::NUM_LAUNCHES]
    implementations = gpus.plan().implementations(num_workers=2)
    given = ([row.name for row in rows], str(folder), implementations[launch % len(implementations)])
    folder.mkdir()
    found: dict[tuple[str, int], Any] = {}
    try:
        kde.launch(2, gpu_runs.rows, args=given, time_limit=200, quiet=True)
    except kde.LaunchError as error:
        found = {(row.name, task): f"the workers did not get here:\n{error}" for row in rows for task in (0, 1)}
    for path in folder.glob("*.pkl"):
        name, task, outcome = pickle.loads(path.read_bytes())
        found[name, task] = outcome
    return found


@pytest.mark.multiworker
@pytest.mark.timeout(240, method="thread")  # the first waits for the work of all
@pytest.mark.parametrize(
    ("row", "launch"),
    [
        pytest.param(row, i % NUM_LAUNCHES, id=row.name, marks=pytest.mark.xdist_group(f"workers {i % NUM_LAUNCHES}"))
        for i, row in enumerate(WORKER_ROWS)
    ],
)
def test_two_workers_give_what_one_gpu_gives(row: Row, launch: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = launched(tmp_path_factory.getbasetemp() / f"workers{launch}", launch)
    expected = one_device(row)
    for task in (0, 1):
        of_task = found[row.name, task]
        assert not isinstance(of_task, str), f"worker {task}: {of_task}"
        assert differences(expected, of_task, row.tolerance) == []
