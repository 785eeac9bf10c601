"""Note which run owns a directory of checkpoints: the one that began last."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from pathlib import Path

from keras_dist_ext.whole_files import NotAFile, open_file, write_whole

__all__ = ["OtherRun", "Owner"]

_FILE = "owner"
_LONGEST = 1 << 10  # bytes


class OtherRun(FileExistsError):
    """Another run has begun in the directory."""


class Owner:
    """A run, and the note in its directory that it owns it.

    Args:
        directory: of its checkpoints.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        self._id = uuid.uuid4().hex

    def claim(self) -> None:
        """Own the directory from now on, and create it where it does not exist.

        Raises:
            OSError: it cannot be written to.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and not self._path.is_file():
            raise NotAFile(f"{self._path}, where a run notes that the directory is its own, is not a file; remove it")
        write_whole(self._path, f"{self._id}\nprocess {os.getpid()} on {socket.gethostname()}\n")

    def check(self) -> None:
        """Check that no other run has begun here since; where the directory was removed, or emptied, claim it again.

        Raises:
            OtherRun: one has.
            OSError: the directory cannot be made again.
        """
        found = self._read()
        if found is None:
            self.claim()
        elif found[:1] != [self._id]:
            which = f" ({found[1]})" if len(found) > 1 else ""
            raise OtherRun(f"another run{which} has begun there since, and each run needs its own directory")

    def _read(self) -> list[str] | None:
        """Return the lines of the note; None where there is none."""
        try:
            file = open_file(self._path)
        except FileNotFoundError:
            return None
        except NotAFile:
            return []
        with contextlib.closing(os.fdopen(file, "rb")) as reader:
            return reader.read(_LONGEST).decode(errors="replace").splitlines()
