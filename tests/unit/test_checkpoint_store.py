"""Checkpoints of several runs in one directory stay whole, and what is no checkpoint is named and passed over."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keras_dist_ext as kde
from keras_dist_ext.training.resume import checkpoints as checkpoints_module
from keras_dist_ext.training.resume.background_writer import BackgroundWriter
from keras_dist_ext.training.resume.checkpoints import CheckpointStore, InvalidCheckpoint, check, unpack
from keras_dist_ext.training.resume.owner import OtherRun
from keras_dist_ext.whole_files import NotAFile, create_unfinished, open_file, write_whole


def begin(directory: Path, keep: int = 3) -> CheckpointStore:
    """Begin a run in a directory."""
    store = CheckpointStore(directory, keep)
    store.prepare()
    store.newest()
    return store


def newest(directory: Path) -> tuple[Any, list[str]]:
    """Return the metadata of the newest checkpoint, and what is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        content = CheckpointStore(directory, 3).newest()
    return content and unpack(content)[0], [str(warning.message) for warning in caught]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("ckpt-*"))


# Two runs in one directory

BOTH = """
import os, sys, time
import numpy as np
from keras_dist_ext.training.resume.checkpoints import CheckpointStore
from keras_dist_ext.training.resume.owner import OtherRun
go, come = os.pipe(), os.pipe()
pids = []
for run in (0, 1):
    pid = os.fork()
    if not pid:
        store = CheckpointStore(sys.argv[1], 2)
        if run == 1:
            os.read(come[0], 1)  # it begins later
        store.prepare(); store.newest()
        os.write(come[1], b"x")
        if run == 0:
            os.read(go[0], 1)  # and both write at once
        else:
            os.write(go[1], b"x")
        told = 0
        for number in range(3):
            try:
                store.write({"run": run}, {"a": np.full(400_000 + 100_000 * run, run, np.float32)})
            except OtherRun:
                told += 1
        os._exit(told)
    pids.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


def test_of_two_runs_that_write_at_once_the_later_one_owns_the_directory_and_every_file_is_whole(
    tmp_path: Path,
) -> None:
    ended = subprocess.run([sys.executable, "-c", BOTH, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[3, 0]", ended.stderr  # how often each was told that the other owns it
    assert len(names(tmp_path)) == 2
    for name in names(tmp_path):
        content = (tmp_path / name).read_bytes()
        check(content)
        assert unpack(content)[0] == {"run": 1}


def test_the_later_run_owns_the_directory_from_its_start_and_after_the_earlier_one_is_gone(tmp_path: Path) -> None:
    earlier = begin(tmp_path)
    earlier.write({"run": "earlier"}, {})
    later = begin(tmp_path)
    with pytest.raises(OtherRun, match=r"another run \(process \d+ on .+\) has begun there since, and each run needs"):
        earlier.write({"run": "earlier"}, {})
    later.write({"run": "later"}, {})
    with pytest.raises(OtherRun):
        earlier.write({"run": "earlier"}, {})
    del earlier
    later.write({"run": "later"}, {})
    assert newest(tmp_path) == ({"run": "later"}, [])
    assert len(names(tmp_path)) == 3


def test_a_run_that_begins_while_another_writes_leaves_its_unfinished_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = begin(tmp_path)
    fsync = os.fsync

    def begin_another(file: int) -> None:
        monkeypatch.setattr(checkpoints_module.os, "fsync", fsync)
        (unfinished,) = tmp_path.glob("ckpt-*.tmp")
        begin(tmp_path)
        assert unfinished.exists()
        fsync(file)

    monkeypatch.setattr(checkpoints_module.os, "fsync", begin_another)
    with pytest.raises(OtherRun):
        earlier.write({}, {"a": np.zeros(10)})
    assert names(tmp_path) == []


def test_an_unfinished_file_is_removed_when_its_process_is_gone(tmp_path: Path) -> None:
    (tmp_path / "ckpt-0000000001.kde.tmp").write_bytes(b"x")
    (tmp_path / "ckpt-0000000001.kde.0123.tmp").write_bytes(b"x")
    held = create_unfinished(tmp_path / "ckpt-0000000001.kde.4567.tmp")
    begin(tmp_path)
    assert names(tmp_path) == ["ckpt-0000000001.kde.4567.tmp"]
    os.close(held)
    begin(tmp_path)
    assert names(tmp_path) == []


def test_an_unfinished_file_never_takes_a_place_that_is_taken(tmp_path: Path) -> None:
    os.close(create_unfinished(tmp_path / "file"))
    with pytest.raises(FileExistsError):
        create_unfinished(tmp_path / "file")


# A directory that is removed


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = begin(tmp_path / "a" / "run")
    store.write({"number": 1}, {})
    shutil.rmtree(tmp_path / "a")
    store.write({"number": 2}, {})
    assert newest(tmp_path / "a" / "run") == ({"number": 2}, [])
    fsync = os.fsync

    def remove(file: int) -> None:
        monkeypatch.setattr(checkpoints_module.os, "fsync", fsync)
        shutil.rmtree(tmp_path / "a")

    monkeypatch.setattr(checkpoints_module.os, "fsync", remove)
    store.write({"number": 3}, {})
    assert newest(tmp_path / "a" / "run") == ({"number": 3}, [])


def test_a_warning_says_whether_earlier_checkpoints_are_there(tmp_path: Path) -> None:
    store = begin(tmp_path / "run")
    store.write({}, {})
    writer = BackgroundWriter("run", store.outlook)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("")  # no directory can be made here
    writer.start(lambda: store.write({}, {}))
    with pytest.warns(UserWarning, match=r"NotADirectoryError.*\. Earlier checkpoints are gone, too; training conti"):
        writer.wait()


def test_a_relative_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("run", 3)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.prepare()
    store.write({}, {})
    assert names(tmp_path / "run") == ["ckpt-0000000001.kde"]


# What a checkpoint's place may hold


def test_a_number_of_any_length_is_followed_by_the_next(tmp_path: Path) -> None:
    begin(tmp_path).write({"number": 1}, {})
    (tmp_path / "ckpt-0000000001.kde").rename(tmp_path / "ckpt-9999999999.kde")
    begin(tmp_path).write({"number": 2}, {})
    assert names(tmp_path) == ["ckpt-10000000000.kde", "ckpt-9999999999.kde"]
    assert newest(tmp_path) == ({"number": 2}, [])
    begin(tmp_path, keep=1).write({"number": 3}, {})
    assert names(tmp_path) == ["ckpt-10000000001.kde"]


ODD = """
import resource, signal, sys, time, warnings
from keras_dist_ext.training.resume.checkpoints import CheckpointStore, unpack
signal.alarm(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    content = CheckpointStore(sys.argv[1], 3).newest()
print(unpack(content)[0]["number"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(*(warning.message for warning in caught), sep="\\n")
"""


def magic(length: int) -> bytes:
    return b"KDECKPT1" + length.to_bytes(8, "little")


def test_what_is_no_checkpoint_is_named_and_the_one_before_it_used_in_little_memory(tmp_path: Path) -> None:
    begin(tmp_path).write({"number": 1}, {"a": np.zeros(3)})
    paths = iter(tmp_path / f"ckpt-{number:010d}.kde" for number in range(2, 99))
    expected = {}

    def sparse(content: bytes) -> Callable[[Path], None]:
        def make(path: Path) -> None:
            path.write_bytes(content)
            os.truncate(path, 8 << 30)

        return make

    listener = socket.socket(socket.AF_UNIX)
    header = json.dumps({"metadata": {}, "arrays": []}).encode()
    cases: list[tuple[Callable[[Path], Any], str]] = [
        (os.mkfifo, "it is a FIFO, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (Path.mkdir, "it is a folder, not a file"),
        (lambda path: path.symlink_to(tmp_path), "it is a folder, not a file"),
        (lambda path: listener.bind(os.path.relpath(path)), "it is a socket, not a file"),
        (lambda path: path.symlink_to(tmp_path / "nothing"), "No such file or directory"),
        (sparse(b""), "it does not start like a checkpoint"),
        (sparse(magic(1 << 40)), "so it is truncated or was changed"),
        (sparse(magic(1 << 20)), "its header is malformed (JSONDecodeError"),
        (sparse(magic(len(header)) + header), "so it is truncated or was changed"),
    ]
    for make, message in cases:
        path = next(paths)
        make(path)
        expected[path] = message
    ended = subprocess.run([sys.executable, "-c", ODD, str(tmp_path)], capture_output=True, text=True, timeout=60)
    listener.close()
    first, *said = ended.stdout.splitlines()
    number, kilobytes = map(int, first.split())
    assert number == 1
    assert kilobytes < 50_000
    assert len(said) == len(cases)
    for (path, message), line in zip(reversed(expected.items()), said, strict=True):
        assert line.startswith(f"{path} cannot be used: ")
        assert message in line
        assert line.endswith("The run resumes from ckpt-0000000001.kde.")


def test_what_is_no_file_is_not_counted_among_the_checkpoints_and_stays(tmp_path: Path) -> None:
    begin(tmp_path, keep=1).write({"number": 1}, {})
    for number in (2, 3, 4):
        (tmp_path / f"ckpt-{number:010d}.kde").mkdir()
    with pytest.warns(UserWarning, match="it is a folder"):
        store = begin(tmp_path, keep=2)
    store.write({"number": 5}, {})
    assert names(tmp_path) == [f"ckpt-{number:010d}.kde" for number in range(1, 6)]


def test_a_link_to_a_checkpoint_is_one(tmp_path: Path) -> None:
    begin(tmp_path / "archive").write({"number": 1}, {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt-0000000007.kde").symlink_to(tmp_path / "archive" / "ckpt-0000000001.kde")
    assert newest(tmp_path / "run") == ({"number": 1}, [])


def whole(header: bytes, arrays: bytes = b"") -> bytes:
    """Return a file with a right checksum."""
    content = magic(len(header)) + header + arrays
    return content + hashlib.sha256(content).digest()


ENTRY = {"name": "a", "dtype": "float32", "shape": [2], "offset": 0}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b'"text"',
        b"9" * 5000,
        {"metadata": {}},
        {"metadata": [], "arrays": []},
        {"metadata": {}, "arrays": {}},
        {"metadata": {}, "arrays": [3]},
        *(
            {"metadata": {}, "arrays": [{**ENTRY, **change}]}
            for change in (
                {"name": 3},
                {"dtype": "object"},
                {"dtype": "U5"},
                {"dtype": "void"},
                {"dtype": "f4,f4"},
                {"dtype": "finfo"},
                {"dtype": None},
                {"dtype": ["f4"]},
                {"shape": 2},
                {"shape": [-2]},
                {"shape": [2.0]},
                {"shape": [1] * 99},
                {"shape": [2**62, 2**62]},
                {"shape": "22"},
                {"offset": 64},
                {"offset": -64},
                {"offset": "0"},
            )
        ),
        {"metadata": {}, "arrays": [ENTRY, {**ENTRY, "offset": 64}]},
    ],
)
def test_a_malformed_header_with_a_right_checksum_is_named_and_the_checkpoint_before_it_used(
    header: Any, tmp_path: Path
) -> None:
    begin(tmp_path).write({"number": 1}, {})
    content = whole(header if isinstance(header, bytes) else json.dumps(header).encode(), bytes(128))
    (tmp_path / "ckpt-0000000002.kde").write_bytes(content)
    metadata, said = newest(tmp_path)
    assert metadata == {"number": 1}
    assert "ckpt-0000000002.kde cannot be used: its " in said[0]
    with pytest.raises(InvalidCheckpoint):
        check(content)


def test_any_truncated_or_changed_byte_is_noticed(tmp_path: Path) -> None:
    content = begin(tmp_path).write({"n": [1, 2]}, {"a": np.arange(5)}).read_bytes()
    check(content)
    for place in range(len(content)):
        with pytest.raises(InvalidCheckpoint):
            check(content[:place])
        with pytest.raises(InvalidCheckpoint):
            check(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(InvalidCheckpoint):
        check(content + b"\0")


def test_a_checkpoint_that_does_not_fit_into_memory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begin(tmp_path)
    store.write({"number": 1}, {"a": np.zeros(100_000)})

    class Small:
        """A file that cannot be read at once."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def read(self, size: int) -> bytes:
            if size > 800_100:
                raise MemoryError
            return bytes(self.file.read(size))

    fdopen = os.fdopen
    monkeypatch.setattr(checkpoints_module.os, "fdopen", lambda *arguments: Small(fdopen(*arguments)))
    with pytest.raises(kde.ResumeError, match=r"ckpt-0000000001.kde is a complete checkpoint, and its \d+ bytes do no"):
        store.newest()


def test_a_header_that_does_not_fit_into_memory_is_named_and_the_checkpoint_before_it_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begin(tmp_path)
    for number in (1, 2):
        store.write({"number": number}, {})
    parse, calls = checkpoints_module._parse, iter([1])

    def out_of_memory(header: bytes) -> Any:
        if next(calls, None):
            raise MemoryError
        return parse(header)

    monkeypatch.setattr(checkpoints_module, "_parse", out_of_memory)
    metadata, said = newest(tmp_path)
    assert metadata == {"number": 1}
    assert re.search(r"ckpt-0000000002.kde cannot be used: its header of \d+ bytes does not fit into memory\.", said[0])


def test_a_checkpoint_that_is_cut_while_it_is_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = begin(tmp_path).write({"number": 1}, {"a": np.zeros(1000)})
    size, stat = path.stat().st_size, os.fstat
    os.truncate(path, size - 4000)

    def before(file: int) -> Any:
        found = stat(file)
        return types.SimpleNamespace(st_mode=found.st_mode, st_nlink=found.st_nlink, st_size=size)

    monkeypatch.setattr(checkpoints_module.os, "fstat", before)
    metadata, said = newest(tmp_path)
    assert metadata is None
    assert f"does not match its {size} bytes, so it is truncated or was changed" in said[0]


def test_what_no_checkpoint_can_hold_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = begin(tmp_path)
    with pytest.raises(TypeError, match="a object cannot be saved"):
        store.write({"object": object()}, {})
    monkeypatch.setattr(checkpoints_module, "_LONGEST_HEADER", 100)
    with pytest.raises(OverflowError, match=r"what callbacks keep beside arrays has 1\d\d bytes, of at most 100"):
        store.write({"numbers": [np.int64(10)] * 20}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["owner"]


def test_what_is_no_file_in_the_place_of_the_note_of_a_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = begin(tmp_path)
    (tmp_path / "owner").unlink()
    (tmp_path / "owner").mkdir()
    with pytest.raises(OtherRun, match="another run has begun there since, and each run needs its own directory"):
        store.write({"number": 1}, {})
    with pytest.raises(NotAFile, match=r"owner, where a run notes that the directory is its own, is not a file; rem"):
        CheckpointStore(tmp_path, 3).prepare()


# Small files

KILLED = """
import os, signal, sys
from keras_dist_ext import whole_files
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
whole_files.os.replace = die
whole_files.write_whole(sys.argv[1], "new")
"""


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "file.json", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(link)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    write_whole(link, "ü")
    assert path.read_text(encoding="utf-8") == "ü"
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    write_whole("/dev/null", "gone")
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no" / "file", "x")
    with pytest.raises(NotAFile, match="it is a device, not a file"):
        open_file(Path("/dev/null"))
