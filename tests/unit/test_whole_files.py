"""Files are whole or not there, whoever else writes, and where there are no locks or rights nothing is lost."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keras_dist_ext import whole_files
from keras_dist_ext.whole_files import (
    NotAFile,
    create_unfinished,
    exchange,
    locked_folder,
    open_file,
    unfinished,
    unfinished_folder,
    write_whole,
)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as it is where Python has no locks of files."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.spec_from_file_location("whole_files_of_windows", whole_files.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def before_locking(act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another process act just before a file or folder is locked for the first time."""
    acts = iter([act])

    def flock(file: int, how: int, flock: Callable[[int, int], None] = fcntl.flock) -> None:
        next(acts, lambda: None)()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)


def failing_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_without_locks_files_are_written_whole_and_none_is_taken_for_abandoned(windows: Any, tmp_path: Path) -> None:
    windows.write_whole(tmp_path / "notes", "one")
    windows.write_whole(tmp_path / "notes", "two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("notes", "two")]

    others = windows.unfinished(tmp_path / "model")
    others.mkdir()
    with windows.unfinished_folder(tmp_path / "model") as folder:
        (folder / "part").write_text("")
    assert others.is_dir()
    assert not folder.exists()

    file = windows.unfinished(tmp_path / "other")
    file.touch()
    windows.remove_abandoned([file])
    assert file.is_file()


def test_a_file_system_without_locks_is_written_to_and_no_folder_is_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_locks(monkeypatch)
    others = unfinished(tmp_path / "model")
    others.mkdir()
    with locked_folder(tmp_path, 0.0) as is_locked:
        assert not is_locked
    with unfinished_folder(tmp_path / "model") as folder:
        assert folder.is_dir()
    write_whole(tmp_path / "notes", "one")
    assert sorted(tmp_path.iterdir()) == sorted([others, tmp_path / "notes"])


def test_a_file_that_may_be_written_in_a_folder_that_may_not_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "notes").write_text("one")
    monkeypatch.setattr(whole_files, "create_unfinished", refused)
    write_whole(tmp_path / "notes", "two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("notes", "two")]


def test_what_cannot_be_written_leaves_what_was_there_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "notes").write_text("one")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(tmp_path / "notes", "two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("notes", "one")]


def test_a_file_that_another_process_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_locking((tmp_path / "new").unlink, monkeypatch)
    with open(create_unfinished(tmp_path / "new"), "w", encoding="utf-8") as writer:
        writer.write("mine")
    assert (tmp_path / "new").read_text() == "mine"


@pytest.mark.parametrize("is_open", [False, True], ids=["before it was opened", "before it was locked"])
def test_a_folder_that_another_process_removed_is_made_again(
    is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_open:
        before_locking(lambda: next(tmp_path.iterdir()).rmdir(), monkeypatch)
    else:
        removals = iter([os.rmdir])

        def opened(path: Any, flags: int, *, open_: Callable[..., int] = os.open, **kwargs: Any) -> int:
            if flags == os.O_RDONLY | os.O_DIRECTORY:
                next(removals, lambda _: None)(path)
            return open_(path, flags, **kwargs)

        monkeypatch.setattr(os, "open", opened)
    with unfinished_folder(tmp_path / "model") as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_holds_is_waited_for(tmp_path: Path) -> None:
    with locked_folder(tmp_path, 0.0) as is_locked:
        assert is_locked
        with locked_folder(tmp_path, 0.0) as is_locked_too:
            assert not is_locked_too
        released = threading.Event()
        other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def release() -> None:
        released.wait(10)
        os.close(other)

    thread = threading.Thread(target=release)
    thread.start()
    timer = threading.Timer(0.05, released.set)
    timer.start()
    with locked_folder(tmp_path, 10.0) as is_locked:
        assert is_locked
        assert released.is_set()
    thread.join()


def test_folders_change_places_where_the_system_cannot_do_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: types.SimpleNamespace())
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchange(tmp_path / "new", tmp_path / "old")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["new", "new/old", "old", "old/new"]


def test_what_takes_the_place_of_a_file_while_it_is_opened_is_closed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    files = []

    def opened(path: Path, flags: int, open_: Callable[..., int] = os.open) -> int:
        path.unlink()
        path.mkdir()
        files.append(open_(path, flags))
        return files[0]

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(NotAFile, match="it is a folder, not a file"):
        open_file(tmp_path / "file")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files[0])
