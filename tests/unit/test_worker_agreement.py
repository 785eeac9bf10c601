"""What workers must agree on is compared as exactly as it matters, and what one has just made may be replaced."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_dist_ext as kde
from keras_dist_ext.errors import WorkersError
from keras_dist_ext.training import whole_saves, worker_saves
from keras_dist_ext.training.resume import callback as callback_module
from keras_dist_ext.training.resume.save_wishes import EXIT, LEAVE
from keras_dist_ext.training.whole_saves import file_identity, save_whole
from keras_dist_ext.training.worker_sync import WorkerSync


def model() -> Any:
    made = kde.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="net")
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made


# Learning rates


@pytest.mark.parametrize(("other", "is_said"), [(0.1 * (1 + 2e-6), False), (0.2, True)])
def test_learning_rates_that_only_round_differently_are_equal(other: float, is_said: bool) -> None:
    workers: Any = types.SimpleNamespace(
        num_workers=2, index=0, all_equal=lambda checksum: False, sum=lambda own: own + np.array([0.0, other])
    )
    sync = WorkerSync(workers, lambda: "")
    sync.set_model(model())
    if not is_said:
        sync.on_epoch_end(0)
        return
    with pytest.raises(
        WorkersError, match=r"The learning rate of .* is 0\.2 on worker 1 and 0\.1 on worker 0 after epo"
    ):
        sync.on_epoch_end(0)


# Files


def test_only_what_another_worker_has_made_in_the_same_call_is_overwritten_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.keras"
    path.touch()
    made: dict[str, str] = {"of": file_identity(path)}
    store = types.SimpleNamespace(others=[1], get=lambda topic, worker, seconds: made["of"])
    monkeypatch.setattr(worker_saves, "workers_of_process", lambda: types.SimpleNamespace(store=store))
    model().save(path, overwrite=False)
    assert path.stat().st_size > 0
    made["of"] = "an earlier file"
    with pytest.raises(FileExistsError, match="which nobody can answer for several workers. Say overwrite=True"):
        model().save(path, overwrite=False)


def test_one_worker_is_asked_by_keras_whether_to_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: [asked.append(text), "n"][1])
    path = tmp_path / "model.keras"
    path.touch()
    model().save(path, overwrite=False)
    assert len(asked) == 1
    assert path.stat().st_size == 0


@pytest.mark.parametrize("path", ["gs://bucket/model", "/"])
def test_where_no_folder_can_be_made_beside_it_is_saved_to_directly(path: str) -> None:
    assert save_whole(lambda given: given, path, makes_parents=True) is path


def test_a_folder_that_cannot_be_moved_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(target))

    def save(path: Any) -> None:
        Path(path).mkdir()
        Path(path, "part").touch()

    monkeypatch.setattr(whole_saves.os, "rename", refused)
    with pytest.raises(PermissionError, match="Permission denied"):
        save_whole(save, tmp_path / "folder", makes_parents=False)
    assert os.listdir(tmp_path) == []


# The end of a process


def test_a_worker_leaves_when_its_checkpoint_is_on_the_disk_and_stays_where_it_is_not(tmp_path: Path) -> None:
    resume = kde.Resume(tmp_path)

    def fails() -> None:
        raise OSError(28, "No space left on device")

    resume._writer.start(fails)
    with pytest.warns(UserWarning, match="No space left on device"):
        resume._end(LEAVE)
    with pytest.raises(SystemExit, match="The process was asked to exit, and .* cannot be written to"):
        resume._end(EXIT)
    resume._writer.start(lambda: None)
    with pytest.raises(SystemExit) as ended:
        resume._end(LEAVE)
    assert ended.value.code == 0


def test_what_a_worker_has_stopped_is_saved_when_its_epoch_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = types.SimpleNamespace(stops=True)
    monkeypatch.setattr(callback_module, "capture", lambda *_: stopped)
    resume: Any = kde.Resume(tmp_path)
    resume.set_model(model())
    resume._callbacks = types.SimpleNamespace(data=types.SimpleNamespace(position=lambda epoch: epoch))
    assert not resume._save(1)
    assert not list(tmp_path.glob("*.kde"))
