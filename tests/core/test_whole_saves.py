"""What a model saves is whole or what was there before, whoever saves to a path, and is what stock Keras saves."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
import save_runs as runs
import tensorflow as tf
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.strategy import key_value
from keras_dist_ext.training import whole_saves


@pytest.fixture(scope="module")
def model() -> Any:
    return runs.make(tf.distribute.get_strategy(), units=4)


@pytest.mark.parametrize("name", runs.WAYS)
def test_what_is_saved_is_read_back_and_nothing_else_is_left(name: str, model: Any, tmp_path: pathlib.Path) -> None:
    for _ in range(2):
        found = runs.WAYS[name](model, str(tmp_path / "model"), tf.distribute.get_strategy())
        assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), found, strict=True))
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
@on_two_workers(runs.save_everywhere)
def test_workers_save_whole_files_to_a_shared_path_together_or_alone(values: Any) -> None:
    for worker in values:
        assert {name: worker[name] for name in runs.WAYS} == dict.fromkeys(runs.WAYS, ["equal"] * 3)
        assert set(worker["alone"].values()) == {"equal"}
        assert worker["by the chief"]
        for name in ("a.keras", "a.weights.h5"):
            assert worker[f"first {name}"] == "whole"
            assert worker[f"again {name}"].startswith(
                "FileExistsError: [Errno 17] It exists already, and with overwrite=False Keras asks whether it may be "
                "overwritten, which nobody can answer for several workers."
            )
        assert worker["left"] == []


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_whole_files(tmp_path: pathlib.Path) -> None:
    generator = random.Random(0)
    process = subprocess.Popen([sys.executable, runs.__file__, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        for _ in range(20):
            process.send_signal(signal.SIGSTOP)  # as good as dead, and cheaper to begin again
            weights = keras.models.load_model(tmp_path / "model.keras").get_weights()
            again = keras.models.load_model(tmp_path / "model.keras")
            again.load_weights(tmp_path / "model.weights.h5")
            assert all(np.array_equal(a, b) for a, b in zip(weights, again.get_weights(), strict=True))
            served = tf.saved_model.load(tmp_path / "exported")
            np.testing.assert_allclose(served.serve(runs.X), again(runs.X), rtol=1e-4, atol=1e-6)
            process.send_signal(signal.SIGCONT)
            time.sleep(generator.random() / 10)
    finally:
        process.kill()
        process.wait()


def test_what_a_killed_save_has_left_goes_with_the_next_one_but_not_while_it_is_made(
    model: Any, tmp_path: pathlib.Path
) -> None:
    left = tmp_path / "model.keras.0123456789ab.tmp"
    left.mkdir()
    (left / "model.keras").write_text("torn")
    other = tmp_path / "model.keras.mine.tmp"
    other.mkdir()
    model.save(tmp_path / "model.keras")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras", "model.keras.mine.tmp"]
    from keras_dist_ext.whole_files import unfinished_folder

    with unfinished_folder(tmp_path / "model.keras") as folder:
        model.save(tmp_path / "model.keras")
        assert folder.exists()


def test_a_save_that_fails_leaves_what_was_there(model: Any, tmp_path: pathlib.Path) -> None:
    class Broken(keras.layers.Dense):
        def get_config(self) -> Any:
            raise OSError("No space left on device")

        def save_own_variables(self, store: Any) -> None:
            raise OSError("No space left on device")

    broken = kde.Sequential([keras.Input((8,)), Broken(3)])
    for save, path in (("save", "model.keras"), ("save_weights", "model.weights.h5")):
        getattr(model, save)(tmp_path / path)
        before = (tmp_path / path).read_bytes()
        with pytest.raises(OSError, match="No space left"):
            getattr(broken, save)(tmp_path / path)
        assert (tmp_path / path).read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_errors_and_messages_name_the_path_that_was_given(
    model: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model.export("a/b")
    assert "Saved artifact at 'a/b'." in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="'no/model.keras'"):
        model.save("no/model.keras")
    with pytest.raises(FileNotFoundError, match="name = 'no/model.weights.h5'"):
        model.save_weights("no/model.weights.h5")
    (tmp_path / "folder.keras").mkdir()
    with pytest.raises(IsADirectoryError, match="folder.keras"):
        model.save("folder.keras")


def test_what_names_other_files_comes_last_though_the_clock_was_set_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: Any) -> None:
        for number, name in enumerate(["_00000.weights.h5", "_00001.weights.h5", ".weights.json"]):
            part = pathlib.Path(f"{str(path).removesuffix('.weights.json')}{name}")
            part.touch()
            os.utime(part, (100 - number, 100 - number))

    moved: list[str] = []
    put = whole_saves._put
    monkeypatch.setattr(whole_saves, "_put", lambda source, target: [moved.append(target.name), put(source, target)])
    whole_saves.save_whole(save, tmp_path / "a.weights.json", makes_parents=False)
    assert moved == ["a_00001.weights.h5", "a_00000.weights.h5", "a.weights.json"]


def test_a_first_worker_that_answers_nothing_holds_up_no_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(key_value, "_SILENT_SECONDS", 0.01)
    for name in ("get_key", "set_key", "delete_key"):
        monkeypatch.setattr(key_value, name, lambda *_: over.wait(60) and None)
    monkeypatch.setattr(whole_saves, "_ANSWER_SECONDS", 0.01)
    saves = whole_saves.SharedSaves("a state")
    assert not saves.has(tmp_path)
    saves.note(tmp_path)
    over.set()


def test_links_modes_and_other_files_in_a_folder_stay(model: Any, tmp_path: pathlib.Path) -> None:
    target, link = tmp_path / "data" / f"{'ü' * 100}.keras", tmp_path / "latest.keras"  # 206 bytes
    target.parent.mkdir()
    target.write_text("")
    target.chmod(0o600)
    link.symlink_to(target)
    model.save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert keras.models.load_model(target).count_params() == model.count_params()
    model.export(tmp_path / "exported", verbose=False)
    (tmp_path / "exported" / "notes.txt").write_text("mine")
    model.export(tmp_path / "exported", verbose=False)
    assert (tmp_path / "exported" / "notes.txt").read_text() == "mine"


def test_what_is_no_file_is_written_to_directly(model: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "null.keras").symlink_to("/dev/null")
    model.save(tmp_path / "null.keras")
    assert os.path.realpath(tmp_path / "null.keras") == "/dev/null"


def test_models_of_stock_keras_are_saved_as_ever(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    monkeypatch.setattr("keras_dist_ext.training.model.save_whole", None)
    stock.save(tmp_path / "model.keras")
    stock.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=stock).save(str(tmp_path / "a"))
