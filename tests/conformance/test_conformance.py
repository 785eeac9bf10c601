"""Show that N replicas give one device's numbers: the table of `conformance.rows`, a test a row and strategy.

The definition of right is stock Keras without a strategy, on the same global batches from equal initial weights. The
default run has the rows that the table calls `Quick`, under three replicas, which few batches split into evenly. CI
runs these under one of the other strategies too, and the other rows under one of several replicas, which rotates with
the commit, as do those of one replica; those of `OF_WORKERS` always run on two workers.

    python -m pytest tests/conformance --row "masked .*" --strategy mirrored4
"""

import importlib
import re
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from cases import TURNS
from two_workers import on_two_workers

import keras_dist_ext as kde
from conformance.causes import CAUSES, cause_of
from conformance.definition import digest
from conformance.feeds import regression
from conformance.models import dense
from conformance.rows import OPTIMIZERS, ROWS
from conformance.run import IN_PROCESS, WORKERS, Outcome, Row, differences, run, run_on_one_device
from conformance.seen import PASSES, RECORD, seen
from conformance.workers import run_row
from keras_dist_ext.step.fused_updates import KERAS_UPDATES
from keras_dist_ext.training import runners

# Stock Keras says so too, from a module whose warnings the suite ignores.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

OF_ONE = ("one_device", "default")
"""Strategies of one replica."""
QUICK_OF_WORKERS = {"batches of 1 to 9 rows"}
OF_WORKERS = {
    "batches of 1 to 9 rows", "fewer rows than replicas", "sparse gradients", "LossScaleOptimizer",
    "gradient accumulation over 4 of 6 steps", "3 steps an execution over data of unknown length",
    "AUC, precision and recall", "logs of every batch", "train, test and predict on batch", "predict 1 to 9 rows",
    "synchronized BatchNormalization of 1 to 9 rows", "state assigned in call", "validation_split", "tf.data",
    "endless tf.data", "a generator of 1 to 9 rows", "an endless generator", "a PyDataset with 2 workers",
    "a distributed dataset", "a dataset made on each worker", "a custom train_step", "jit_compile of a CNN",
}  # fmt: skip
"""Rows about how data comes to workers, and what they tell each other, and one that XLA compiles for several replicas,
as it can on no other strategy here: always run on two of them."""


def cell(row: Row, kind: str) -> Any:
    """Name one test of the table, and say when it runs."""
    if (kind == "mirrored3" and row.quick) or (kind == WORKERS and row.name in QUICK_OF_WORKERS):
        marks = []
    elif _always_runs(row, kind):
        marks = [pytest.mark.slow]
    else:
        marks = [pytest.mark.rotating(row.name, *turn(row, kind))]
    if kind == WORKERS:
        marks.append(on_two_workers(run_row, row.name))
    else:
        marks.append(pytest.mark.xdist_group(row.name))  # one device trains a row once
    return pytest.param(row, kind, id=f"{row.name}-{kind}", marks=marks)


def turn(row: Row, kind: str) -> tuple[int, int]:
    """Say which turn of how many a strategy has among those that take turns at a row.

    At each commit one of several replicas has it, unless one of them always runs; one of one replica at some commits.
    """
    if row.quick:
        others = [other for other in row.under if other != "mirrored3" and not _always_runs(row, other)]
        return others.index(kind), len(others)
    if kind in OF_ONE:
        return OF_ONE.index(kind), TURNS
    of_several = [other for other in row.under if other not in OF_ONE and not _always_runs(row, other)]
    return of_several.index(kind), len(of_several)


def _always_runs(row: Row, kind: str) -> bool:
    return kind == WORKERS and row.name in OF_WORKERS


@cache
def one_device(row: Row) -> Outcome:
    return run_on_one_device(row)


@pytest.mark.parametrize(
    ("row", "kind"),
    [cell(row, kind) for row in ROWS for kind in IN_PROCESS if kind in row.under],
)
def test_replicas_give_what_one_device_gives(row: Row, kind: str, strategies: Any) -> None:
    expected = one_device(row)
    found = run(row, kde, None if kind == "default" else strategies.get(kind))
    assert differences(expected, found, row.tolerance) == []


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.rotating, pytest.mark.xdist_group(row.name)])
        for row in OPTIMIZERS
    ],
)
def test_so_they_do_where_optimizers_run_as_keras_wrote_them(row: Row, mirrored: Any) -> None:
    with patch.dict(KERAS_UPDATES, clear=True):
        assert differences(one_device(row), run(row, kde, mirrored), row.tolerance) == []


def test_jit_compile_goes_on_uncompiled_where_replicas_are_cpus_and_says_so_once(
    mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("keras_dist_ext.messages"), "_warned", set())
    with mirrored.scope():
        model = dense(kde)
        model.compile("sgd", "mse", jit_compile=True)
    x, y = regression(16, 1)
    with pytest.warns(UserWarning, match="XLA cannot compile for 2 replicas that are CPUs of one process") as caught:
        model.fit(x, y, epochs=2, batch_size=5, validation_data=(x, y), verbose=0)
    assert len([warning for warning in caught if "XLA" in str(warning.message)]) == 1


def test_names_of_rows_are_sentences_of_their_own() -> None:
    names = [row.name for row in ROWS]
    assert sorted(names) == sorted(set(names))


def test_rows_that_workers_always_run_are_rows_of_the_table() -> None:
    assert OF_WORKERS >= QUICK_OF_WORKERS
    assert {row.name for row in ROWS if WORKERS in row.under} >= OF_WORKERS


def test_each_row_was_seen_to_fail_with_its_cause_put_back() -> None:
    """As `cd tests && python -m conformance --write` has noted of ours with the cause put back, and of stock Keras."""
    record = [line.split(" | ") for line in RECORD.read_text().splitlines()]
    assert [(name, cause) for name, cause, *_ in record] == [(row.name, cause_of(row).__name__) for row in ROWS]
    assert [name for name, _, _, found, _ in record if found == PASSES] == []


def test_no_row_and_no_cause_has_changed_since_it_was_seen_to_fail() -> None:
    noted = {line.split(" | ")[0]: line.split(" | ")[2] for line in RECORD.read_text().splitlines()}
    stale = [row.name for row in ROWS if noted.get(row.name) != digest(row)]
    names = "|".join(map(re.escape, stale))
    assert stale == [], f'See them fail again: cd tests && python -m conformance --write --rows "{names}"'


@pytest.mark.parametrize("cause", dict.fromkeys(cause for cause, _ in CAUSES))
def test_what_a_cause_replaces_is_there(cause: Any) -> None:
    with cause():
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["even batches", "a partial last batch", "masked time steps", "clipping by norm", "AUC, precision and recall",
     "a custom train_step of 1 to 9 rows", "state assigned in call", "predict 1 to 9 rows", "endless tf.data"],
)  # fmt: skip
def test_a_row_fails_with_its_cause_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("check_step", "check_prediction"):  # which warn of some of them
        monkeypatch.setattr(runners, check, lambda *_: None)
    (row,) = [row for row in ROWS if row.name == name]
    found = seen(row, "ours")
    assert found != PASSES
    assert not found.startswith("dies")


@pytest.mark.parametrize(("row", "kind"), [cell(row, WORKERS) for row in ROWS if WORKERS in row.under])
def test_two_workers_give_what_one_device_gives(row: Row, kind: str, values: tuple[Outcome, Outcome]) -> None:
    expected = one_device(row)
    for task, found in enumerate(values):
        assert differences(expected, found, row.tolerance, f"worker {task}") == []
