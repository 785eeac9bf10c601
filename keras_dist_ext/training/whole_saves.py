"""Save a model to a temporary folder, and move it to its path when it is complete.

Several workers may save to one path at the same time, each for itself: a file is one worker's at any time, and whole;
several files that belong together are of the first worker that has saved. A save that is killed leaves what was there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.saving import said_of
from keras_dist_ext.aliases import SavePath
from keras_dist_ext.strategy.key_value import KeyValueStore
from keras_dist_ext.whole_files import exchange, locked_folder, sync_file, sync_folder, unfinished_folder

__all__ = ["SharedSaves", "checkpoint_state", "file_identity", "is_saving", "save_whole"]

_T = TypeVar("_T")
_ANSWER_SECONDS = 1.0  # milliseconds, but on a busy machine; a path that does not exist yet is not asked for
_OF_ALL = 1  # who stores the one text on a topic, whichever worker it is: one that may not get an answer
_LOCK_SECONDS = 10.0  # others hold a lock for milliseconds, unless they are stopped


class SharedSaves:
    """Where there is what this worker is about to save, because another worker has saved the same just before.

    Files of two workers must not be mixed: those of a SavedModel number its variables in an order that differs between
    processes. A worker that reads what it has saved would find a mixture if the others replaced it meanwhile.

    Args:
        state: tells what is saved; the same on workers that save the same.
    """

    def __init__(self, state: str) -> None:
        self._store = KeyValueStore({"worker": 2}, _OF_ALL)
        self._state = state

    def has(self, path: Path) -> bool:
        """Whether a file or folder is as a worker has left it that has saved the same state."""
        with contextlib.suppress(OSError, tf.errors.OpError):
            return file_identity(path) == self._store.get(self._topic(path), _OF_ALL, _ANSWER_SECONDS)
        return False

    def note(self, path: Path) -> None:
        """Note that this worker has saved the state there."""
        with contextlib.suppress(OSError, tf.errors.OpError):
            with contextlib.suppress(tf.errors.OpError):
                self._store.delete(self._topic(path))
            self._store.set(self._topic(path), file_identity(path))

    def _topic(self, path: Path) -> str:
        return f"saved/{zlib.crc32(os.fsencode(path)):08x}/{self._state}"


def file_identity(path: Path) -> str:
    """Return what tells a file from all others that have its name, and stays when it is renamed."""
    found = path.stat()
    return f"{found.st_ino} {found.st_mtime_ns}"


def save_whole(
    save: Callable[[SavePath], _T],
    path: SavePath,
    *,
    makes_parents: bool,
    state: Callable[[Path], str] | None = None,
    announce: Callable[[Path, Path], None] | None = None,
) -> _T:
    """Save to a path by ``save(path)``, so that others see what is saved whole or not at all.

    A folder that exists keeps what else is in it.

    Args:
        save: writes all files next to the path that it is given, or below it.
        path: a path. URLs and open files are written to directly, and so is what is neither file nor folder.
        makes_parents: whether folders above it are to be made.
        state: tells what has just been saved to a path; the same on workers that save the same, if there are some.
        announce: is called with what is about to be moved to the path, and with the path.

    Returns:
        What ``save`` has returned.
    """
    if not isinstance(path, str | os.PathLike) or "://" in str(path) or not Path(path).name:
        return save(path)
    given = Path(os.path.abspath(path))
    target = Path(os.path.realpath(given))  # a link stays, and what it leads to is written
    if target.exists() and not (target.is_file() or target.is_dir()):
        return save(path)  # a device or a FIFO
    if makes_parents:
        target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            aside = stack.enter_context(unfinished_folder(target))
        except (FileNotFoundError, PermissionError):
            return save(path)  # Keras says what is missing; or writes a file in a folder where none can be made
        stack.enter_context(said_of(str(path), str(aside / given.name)))
        with _saving():
            result = save(str(aside / given.name))
        for folder, _, names in os.walk(aside):
            for name in names:
                sync_file(Path(folder, name))
        moves = [
            (source, target if source.name == given.name else given.parent / source.name)
            for source in _as_written(aside)
        ]
        saves = None
        if state is not None and (len(moves) > 1 or moves[0][0].is_dir()):
            saves = SharedSaves(state(aside / given.name))
            stack.enter_context(locked_folder(target.parent, _LOCK_SECONDS))
            if saves.has(moves[-1][1]):
                return result
        for source, place in moves:
            if announce is not None and place == target:
                announce(source, given)
            _put(source, place)
        sync_folder(target.parent)
        if saves is not None:
            saves.note(moves[-1][1])
        return result


def is_saving() -> bool:
    """Whether this thread saves something aside: what belongs to it needs no more than that."""
    return getattr(_thread, "is_saving", False)


_thread = threading.local()


@contextlib.contextmanager
def _saving() -> Iterator[None]:
    before, _thread.is_saving = is_saving(), True
    try:
        yield
    finally:
        _thread.is_saving = before


def _put(source: Path, target: Path) -> None:
    """Move a file or a folder to its place. What else is in a folder that is there stays in it."""
    if not source.is_dir():
        with contextlib.suppress(OSError):
            shutil.copymode(target, source)
        os.replace(source, target)
        return
    try:
        os.rename(source, target)
    except OSError:
        if not target.is_dir():
            raise
        _take_over_others(target, source)
        exchange(source, target)


def _take_over_others(old: Path, new: Path) -> None:
    """Have a folder hold what another has beside."""
    for folder, _, names in os.walk(old):
        there = new / os.path.relpath(folder, old)
        there.mkdir(exist_ok=True)
        for name in names:
            if not (there / name).exists():
                os.link(os.path.join(folder, name), there / name, follow_symlinks=False)


def _as_written(folder: Path) -> list[Path]:
    """Return what is in a folder, in the order in which it was written: what names the others comes last.

    That is a checkpoint's index, or the JSON of sharded weights, also where the clock is coarse or was set back.
    """

    def place(path: Path) -> tuple[bool, bool, int, str]:
        return (not path.is_dir(), path.suffix in (".index", ".json"), path.stat().st_mtime_ns, path.name)

    return sorted(folder.iterdir(), key=place)


def checkpoint_state(prefix: Path) -> str:
    """Return a checksum of the tensors of a TensorFlow checkpoint, whatever order they are in.

    Their names are left out: those of a SavedModel number its variables, in an order that differs between processes.
    """
    reader = tf.train.load_checkpoint(prefix)
    checksums = []
    for name in reader.get_variable_to_shape_map():
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH":
            value = reader.get_tensor(name)
            is_numbers = isinstance(value, np.ndarray) and value.dtype != object
            checksums.append(zlib.crc32(value.tobytes() if is_numbers else repr(value).encode()))
    return f"{zlib.crc32(repr(sorted(checksums)).encode()):08x}"
