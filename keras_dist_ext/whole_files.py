"""Write files that others see whole or not at all, and read only what is a file.

A file is written under a name of its own beside its place, and renamed. Its process holds a lock on it meanwhile, so
that one that a killed process has left can be told from one that is being written.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "NotAFile",
    "create_unfinished",
    "exchange",
    "locked_folder",
    "open_file",
    "remove_abandoned",
    "sync_file",
    "sync_folder",
    "unfinished",
    "unfinished_folder",
    "write_whole",
]

_AT_FDCWD, _EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_LOCK_SECONDS = 10.0  # others hold a lock for milliseconds, unless they are stopped
_BINARY = getattr(os, "O_BINARY", 0)


class NotAFile(OSError):
    """The path is not a regular file: a folder, a FIFO, a socket or a device."""


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a small text file, or leave what is there.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays, and what it leads to is written
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # /dev/stdout, say
        return
    aside = unfinished(path)
    try:
        file = create_unfinished(aside)
    except PermissionError:
        path.write_text(text, encoding="utf-8")  # a file that may be written, in a folder that may not
        return
    try:
        with open(file, "w", encoding="utf-8") as writer:
            writer.write(text)
            writer.flush()
            os.fsync(file)
            with contextlib.suppress(OSError):
                shutil.copymode(path, aside)
            os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def unfinished(path: Path) -> Path:
    """Return a name for what is to become a file or folder, that nothing else has."""
    return path.with_name(f"{_start(path)}.{uuid.uuid4().hex[:12]}.tmp")


def _start(path: Path) -> str:
    """Return as much of a name as leaves room for what is added to it."""
    return os.fsencode(path.name)[:200].decode(errors="ignore")


def create_unfinished(path: Path) -> int:
    """Create a file that did not exist, for writing, and lock it; return its descriptor.

    Raises:
        OSError: it cannot be created.
    """
    while True:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
        if fcntl is None:
            return file
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:  # else another process has taken it for abandoned, before it was locked
            return file
        os.close(file)


@contextlib.contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """Have a folder beside a path, for what is to become it, and remove it afterwards with what is left in it.

    Those that killed processes have left for the same path are removed, too.

    Raises:
        OSError: it cannot be made.
    """
    pattern = re.compile(rf"{re.escape(_start(path))}\.[0-9a-f]{{12}}\.tmp")
    for name in os.listdir(path.parent):
        if pattern.fullmatch(name):
            with contextlib.suppress(OSError), locked_folder(path.parent / name, 0.0) as is_abandoned:
                if is_abandoned:
                    shutil.rmtree(path.parent / name, ignore_errors=True)
    while True:
        folder = unfinished(path)
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked_folder(folder, _LOCK_SECONDS))
            except FileNotFoundError:
                continue
            if not folder.exists():  # another process has taken it for abandoned, before it was locked
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


@contextlib.contextmanager
def locked_folder(folder: Path, wait_seconds: float) -> Iterator[bool]:
    """Lock a folder, where there are locks; yield whether it is locked.

    Raises:
        OSError: it does not exist.
    """
    if fcntl is None:
        yield False
        return
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline, is_locked = time.monotonic() + wait_seconds, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.002)
                    continue
            except OSError:  # some network file systems have no locks
                pass
            else:
                is_locked = True
            break
        yield is_locked
    finally:
        os.close(file)


def exchange(new: Path, old: Path) -> None:
    """Have two folders change places, at once where Linux can; else the place is empty for a moment.

    Raises:
        OSError: they cannot.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is not None and not renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _EXCHANGE):
        return
    aside = unfinished(new)
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def sync_file(path: Path) -> None:
    """Make what a file holds survive a power failure."""
    file = os.open(path, os.O_RDONLY | _BINARY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove unfinished files whose processes are gone, as far as that can be told."""
    for path in paths:
        with contextlib.suppress(OSError):
            file = open_file(path)
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
            finally:
                os.close(file)


def open_file(path: Path) -> int:
    """Open a regular file for reading, or a link to one, and return its descriptor.

    Raises:
        NotAFile: it is something else, whose opening or reading might never end.
        OSError: it cannot be opened.
    """
    _check_is_file(path.stat().st_mode)  # opening a device may do something already
    file = os.open(path, os.O_RDONLY | _BINARY | getattr(os, "O_NONBLOCK", 0))
    try:
        _check_is_file(os.fstat(file).st_mode)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_is_file(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
        raise NotAFile(f"it is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file")


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a power failure, where folders can be synced."""
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
