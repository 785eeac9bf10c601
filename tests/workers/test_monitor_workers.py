"""With two real workers, each writes what its own replica did, and all agree on what happened."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from monitor_runs import run_case
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.monitoring.dashboard import metadata as names


def of(name: str) -> pytest.MarkDecorator:
    """Have a test look at one case, each worker's value of which is its `values[worker][name]`."""
    return on_two_workers(run_case, name)


def scalars(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@of("writes")
def test_all_workers_have_the_records_of_all_replicas(values: Any) -> None:
    (chief, history), (other, _) = (worker["writes"] for worker in values)
    assert [stats.step for stats in chief.train] == [3, 6, 7, 9, 12, 14]
    for a, b in zip(chief.train + chief.test, other.train + other.test, strict=True):
        for name in ("loss", "examples", "compute_seconds", "input_seconds", "sync_seconds", "gradient_norm"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert a.seconds == b.seconds
        assert a.num_replicas == 2
    for epoch, loss in enumerate(history["loss"]):
        part = chief.train[3 * epoch : 3 * epoch + 3]
        total = sum((stats.loss * stats.examples).sum() for stats in part)
        assert total / 50 == pytest.approx(loss, rel=1e-5)
    assert [stats.mean_loss for stats in chief.test] == pytest.approx(history["val_loss"], rel=1e-5)
    assert chief.train[0].loss[0] != chief.train[0].loss[1]
    manifest = chief.runs["train"].manifest
    assert manifest["strategy"]["num_workers"] == 2
    assert [device.split("/")[3] for device in manifest["devices"]] == ["task:0", "task:1"]
    assert manifest["batch_size"] == 8


@of("writes")
def test_each_worker_writes_its_own_replica_and_the_chief_what_is_about_all(values: Any) -> None:
    folder = values[0]["folder"]
    chief, _ = values[0]["writes"]
    for experiment in ("two", "two/validation"):
        for run in ("replica_0", "replica_1", "all"):
            assert len(list((folder / "logs" / experiment / run).iterdir())) == 1
    held = [scalars(folder / "logs" / "two" / f"replica_{i}") for i in (0, 1)]
    for replica in (0, 1):
        for tag, name in ((names.LOSS, "loss"), (names.COMPUTE_SECONDS, "compute_seconds")):
            expected = [(stats.step, np.float32(getattr(stats, name)[replica])) for stats in chief.train]
            assert held[replica][tag] == expected
    overall = scalars(folder / "logs" / "two" / "all")
    assert [value for _, value in overall[names.ALL_LOSS]] == pytest.approx([s.mean_loss for s in chief.train])
    assert len({pid for f in (folder / "logs").rglob("*tfevents*") for pid in [f.name.split(".")[-2]]}) == 2


@of("writes")
def test_only_the_chief_writes_lines(values: Any) -> None:
    folder = values[0]["folder"]
    memory = kde.MemoryWriter()
    assert kde.replay(folder / "replicas.jsonl", memory) == 8
    assert [stats.step for stats in memory.train] == [3, 6, 7, 9, 12, 14]


@pytest.mark.slow
@of("agrees_on_intervals")
def test_automatic_intervals_end_at_the_same_steps_on_all_workers(values: Any) -> None:
    first, second = (worker["agrees_on_intervals"] for worker in values)
    assert first == second
    assert sum(num_steps for _, num_steps in first) == first[-1][0] == 200
    assert len(first) > 2


@pytest.mark.slow
@of("has_a_slow_worker")
def test_a_worker_that_waits_for_its_input_is_named(values: Any) -> None:
    for findings, intervals in (worker["has_a_slow_worker"] for worker in values):
        finding = next(f for f in findings if f["code"] == "slow-replica")
        assert finding["what"].startswith("Worker 1 (replica 1) is slow: ")
        waits, syncs = (
            np.median([getattr(stats, name) for stats in intervals], axis=0)  # of epochs: a hiccup is in one
            for name in ("input_seconds", "sync_seconds")
        )
        assert waits[1] > 2 * waits[0]
        assert syncs[0] > waits[1] / 2  # it waits, too, but not for input
        assert syncs[0] > 2 * syncs[1]


@pytest.mark.slow
@of("diverges")
def test_a_variable_that_differs_on_one_worker_is_found_by_all_and_reported_by_the_chief(values: Any) -> None:
    (findings, said), (others, silent) = (worker["diverges"] for worker in values)
    assert findings == others
    assert "bias differs between replica 0 and replica 1 at step 8" in findings[0]["what"]
    assert len(said) == 1
    assert silent == []


@pytest.mark.slow
@of("cannot_write")
def test_a_worker_that_cannot_write_stops_all_with_an_error(values: Any) -> None:
    fine, failing = (worker["cannot_write"] for worker in values)
    assert "cannot be written to" in failing
    assert fine.startswith("log_dir is not writable on worker 1")


@pytest.mark.slow
@of("evaluates")
def test_an_evaluation_by_itself_is_shown_on_all_workers(values: Any) -> None:
    for loss, (stats,) in (worker["evaluates"] for worker in values):
        assert stats.mean_loss == pytest.approx(loss, rel=1e-5)
        assert stats.examples.sum() == 9
