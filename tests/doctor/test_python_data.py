"""Batches that Python makes are made once more, to see how: what they read, how long they take, and how often."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from doctor_runs import train
from healthy_runs import alarms

from keras_dist_ext.diagnosis.doctor import python_data
from keras_dist_ext.diagnosis.doctor.python_data import MadeInPython, Reads, _noted_reads, look_into

ROWS = 8


class PyDatasetAdapter:
    """Stands for the adapter of Keras."""

    def __init__(self, dataset: Any) -> None:
        self.py_dataset = dataset


class Batches(keras.utils.PyDataset):
    """Six batches of what a function gives for a range of rows.

    Attributes:
        asked: for which batches.
    """

    def __init__(self, read: Any, num_batches: Any = 6) -> None:
        super().__init__()
        self.read, self.number = read, num_batches
        self.asked: list[int] = []

    @property
    def num_batches(self) -> Any:
        return self.number

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        x = self.read(range(index * ROWS, (index + 1) * ROWS))
        return x, x[:, :1]


def looked(read: Any, **facts: Any) -> MadeInPython:
    return look_into(PyDatasetAdapter(Batches(read, **facts)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of 64 rows in chunks of 4, and one for each row."""
    path = tmp_path_factory.mktemp("rows")
    rows = np.arange(64 * 3, dtype="float32").reshape(64, 3)
    with h5py.File(path / "all.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(4, 3))
        file.create_dataset("plain", data=rows)
        file.create_dataset("mean", data=3.0)
    for number, row in enumerate(rows):
        with h5py.File(path / f"{number}.h5", "w") as file:
            file["x"] = row[None]
    return path


@pytest.mark.parametrize(
    ("name", "read", "num_reads", "num_rows", "chunk_rows"),
    [
        ("x", lambda x, rows: np.stack([x[row] for row in rows]), 8, 8, 4),
        ("plain", lambda x, rows: np.stack([x[row] for row in rows]), 8, 8, 0),
        ("x", lambda x, rows: x[rows.start : rows.stop], 1, 8, 4),
        ("x", lambda x, rows: x[list(rows)], 1, 8, 4),
        ("x", lambda x, rows: x[np.isin(np.arange(64), rows)], 1, 8, 4),
        ("x", lambda x, rows: x[()][rows.start : rows.stop], 1, 64, 4),
        ("x", lambda x, rows: x[...][rows.start : rows.stop], 1, 64, 4),
        ("x", lambda x, rows: x[:, :2][rows.start : rows.stop], 1, 64, 4),
    ],
)
def test_the_reads_of_a_batch_are_counted_with_their_rows(
    name: str, read: Any, num_reads: int, num_rows: int, chunk_rows: int, folder: Path
) -> None:
    with h5py.File(folder / "all.h5") as file:
        made = looked(lambda rows: read(file[name], rows) - file["mean"][()])
    assert made.reads == (Reads(f"/{name}", num_reads, num_rows, chunk_rows),)
    assert made.rows == ROWS
    assert made.function.startswith("Batches.__getitem__ (test_python_data.py:")


def test_a_file_that_is_opened_for_each_row_is_read_row_by_row(folder: Path) -> None:
    def read(row: int) -> Any:
        with h5py.File(folder / "all.h5") as file:
            return file["x"][row]

    made = looked(lambda rows: np.stack([read(row) for row in rows]))
    assert made.reads == (Reads("/x", 8, 8, 4),)


def test_a_file_for_each_example_is_read_once(folder: Path) -> None:
    def read(row: int) -> Any:
        with h5py.File(folder / f"{row}.h5") as file:
            return file["x"][()]

    made = looked(lambda rows: np.concatenate([read(row) for row in rows]))
    assert made.reads == (Reads("/x", 1, 1, 0),) * 8
    assert python_data_code(made) == "generator-bound"


def python_data_code(made: MadeInPython) -> str:
    from keras_dist_ext.diagnosis.doctor.python_data_rules import judge_python_data

    return judge_python_data(made).code


def test_two_batches_are_made_from_the_midst_of_an_epoch_and_the_quicker_one_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = moved_by_hand(monkeypatch)

    def read(rows: range) -> Any:
        clock.advance(0.9 if dataset.asked == [3] else 0.1)  # the first one opens files
        return np.ones((len(rows), 3))

    dataset = Batches(read)
    made = look_into(PyDatasetAdapter(dataset))
    assert dataset.asked == [3, 4]
    assert made.seconds == pytest.approx(0.1)
    endless = Batches(lambda rows: np.ones((8, 3)), num_batches=None)
    look_into(PyDatasetAdapter(endless))
    single = Batches(lambda rows: np.ones((8, 3)), num_batches=1)
    look_into(PyDatasetAdapter(single))
    assert (endless.asked, single.asked) == ([2, 3], [0, 0])


def test_a_batch_that_takes_longer_than_a_second_is_made_once_and_its_reads_are_known(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    clock = moved_by_hand(monkeypatch)
    with h5py.File(folder / "all.h5") as file:

        def read(rows: range) -> Any:
            clock.advance(1.5)
            return np.stack([file["x"][row] for row in rows])

        dataset = Batches(read)
        made = look_into(PyDatasetAdapter(dataset))
    assert dataset.asked == [3]
    assert made.seconds == pytest.approx(1.5)
    assert made.reads == (Reads("/x", 8, 8, 4),)


class Clock:
    """Goes on when a test says so."""

    seconds = 0.0

    def advance(self, seconds: float) -> None:
        self.seconds += seconds

    def perf_counter(self) -> float:
        return self.seconds

    def thread_time(self) -> float:
        return 0.0


def moved_by_hand(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(python_data, "time", clock)
    return clock


def test_data_that_fails_when_it_is_called_again_is_measured_as_far_as_it_was() -> None:
    def fails(rows: range) -> Any:
        raise RuntimeError("only once")

    def fails_later(rows: range) -> Any:
        if rows.start > 24:
            raise RuntimeError("not that one")
        return np.ones((8, 3))

    assert looked(fails).seconds == 0.0
    assert looked(fails_later).seconds > 0.0
    assert looked(fails_later).rows == ROWS


def test_reads_of_closed_files_and_of_other_things_are_not_counted(folder: Path) -> None:
    found: dict[tuple[str, str], Reads] = {}
    with h5py.File(folder / "all.h5") as file:
        opened = file["x"]
        with _noted_reads(found):
            note: Any = sys.getprofile()
            sys.setprofile(None)
            for event, name, source in (
                ("call", "__getitem__", opened),
                ("return", "__getitem__", opened),
                ("call", "read_direct", opened),
                ("call", "__getitem__", [1, 2]),
            ):
                frame = SimpleNamespace(
                    f_code=SimpleNamespace(co_name=name), f_locals={"self": source, "args": slice(2, 6)}
                )
                note(frame, event, None)
            key = (file.filename, "/x")
    note(SimpleNamespace(f_code=SimpleNamespace(co_name="__getitem__"), f_locals={"self": opened}), "call", None)
    assert found == {key: Reads("/x", 1, 4, 4)}


def test_reads_are_not_noted_while_somebody_else_profiles(folder: Path) -> None:
    def read(rows: range) -> Any:
        with h5py.File(folder / "all.h5") as file:
            return file["x"][rows.start : rows.stop]

    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(event))
    try:
        made = looked(read)
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert made.seconds > 0.0
    assert made.reads == ()


@pytest.mark.slow
def test_a_run_that_reads_hdf5_row_by_row_is_told_to_read_batches(folder: Path, mirrored: Any) -> None:
    with h5py.File(folder / "all.h5") as file:

        def read(rows: range) -> Any:
            time.sleep(0.03)  # what a slow disk adds
            return np.stack([file["x"][row % 64] for row in rows])

        layers = [keras.layers.Dense(4), keras.layers.Dense(1)]
        report = train(mirrored, lambda: [keras.Input((3,)), *layers], Batches(read, 20), num_steps=20)
    assert alarms(report, "unaligned-reads") == ["unaligned-reads"], str(report)
    assert "reads /x 8 times for a batch of 8 rows, of chunks of 4 rows" in report.findings[0].evidence
