"""Write files that others see whole or not at all, and read only what is a file.

A file is written under a name of its own beside its place, and renamed. Its process holds a lock on it meanwhile, so
that one that a killed process has left can be told from one that is being written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["NotAFile", "create_unfinished", "open_file", "remove_abandoned", "sync_folder", "unfinished", "write_whole"]

_BINARY = getattr(os, "O_BINARY", 0)


class NotAFile(OSError):
    """What has the name of a file is none: a folder, a FIFO, a socket or a device."""


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
    return path.with_name(f"{path.name[:200]}.{uuid.uuid4().hex[:12]}.tmp")


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
