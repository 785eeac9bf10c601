"""Keep the newest few saves of a run in a directory, each whole or not there.

A save is written aside, synced to the disk, and renamed; then its directory is synced. It ends with a SHA-256 of all
that comes before, so that a file that was torn or has rotted is known for what it is. Its parts are JSON and plain
arrays: nothing in it is ever run or unpickled.

    KDECKPT1 | length of the header, 8 bytes | header, JSON | arrays, each at a multiple of 64 bytes | SHA-256
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["InvalidCheckpoint", "CheckpointStore", "unpack"]

Array = npt.NDArray[Any]
_MAGIC = b"KDECKPT1"
_ALIGNED = 64  # bytes
_NAME = re.compile(r"ckpt-(\d{10})\.kde")


class InvalidCheckpoint(Exception):
    """A file that is no whole save; says why."""


class CheckpointStore:
    """The saves in a directory. One process at a time writes there.

    Args:
        directory: is made when it is first needed.
        keep: how many of the newest to keep, at least 1.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        self.directory = Path(directory)
        self._keep = keep
        self._bad: set[Path] = set()
        self._last: int | None = None  # number of the newest save that this object knows of, once it has looked

    def prepare(self) -> None:
        """Make the directory, see that files can be written there, and remove what killed processes have left aside.

        Raises:
            OSError: they cannot.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for aside in self.directory.glob("ckpt-*.kde.aside"):
            aside.unlink(missing_ok=True)
        probe = self.directory / f".probe-{os.getpid()}"
        try:
            probe.write_bytes(b"\n")
        finally:
            probe.unlink(missing_ok=True)

    def write(self, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> Path:
        """Write a save as the newest, and remove those that are too many.

        Args:
            facts: what JSON can hold.
            arrays: of numbers, by name.

        Raises:
            OSError: it cannot be written, or another run has; what was there before is as it was.
        """
        paths = self._paths()
        number = 1 + (_number(paths[-1]) if paths else 0)
        if self._last is not None and number > self._last + 1:
            raise FileExistsError(f"{paths[-1].name} is of another run, and each needs a directory of its own")
        path = self.directory / f"ckpt-{number:010d}.kde"
        aside = path.with_name(f"{path.name}.aside")
        try:
            _write_synced(aside, _pack(facts, arrays))
            os.replace(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        _sync_directory(self.directory)
        self._last = number if self._last is not None else None
        whole = [path for path in paths if path not in self._bad]
        for old in [*self._bad, *whole[: max(0, len(whole) + 1 - self._keep)]]:
            with contextlib.suppress(OSError):
                old.unlink(missing_ok=True)
        self._bad.clear()
        return path

    def newest(self) -> bytes | None:
        """Return the newest save that is whole, and warn of each that is not; None where there is none."""
        causes: dict[Path, Exception] = {}
        found: bytes | None = None
        instead = "There is no other, so the run begins anew."
        paths = self._paths()
        self._last = _number(paths[-1]) if paths else 0
        for path in reversed(paths):
            try:
                content = path.read_bytes()
                check(content)
            except (OSError, InvalidCheckpoint) as error:
                causes[path] = error
            else:
                found, instead = content, f"The run goes on from {path.name}."
                break
        self._bad = {path for path, cause in causes.items() if isinstance(cause, InvalidCheckpoint)}
        for path, cause in causes.items():
            warnings.warn(f"{path} cannot be used: {cause}. {instead}", stacklevel=2)
        return found

    def _paths(self) -> list[Path]:
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return []
        return [self.directory / name for name in names if _NAME.fullmatch(name)]


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _pack(facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> Iterator[Any]:
    """Yield the parts of a save up to its checksum."""
    places: list[dict[str, Any]] = []
    offset = 0
    for name, array in arrays.items():
        places.append({"name": name, "dtype": array.dtype.name, "shape": array.shape, "offset": offset})
        offset += array.nbytes + -array.nbytes % _ALIGNED
    header = json.dumps({"facts": facts, "arrays": places}, default=_of_python).encode()
    header += b" " * (-(len(_MAGIC) + 8 + len(header)) % _ALIGNED)
    yield _MAGIC + len(header).to_bytes(8, "little") + header
    for array in arrays.values():
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        yield memoryview(native.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        yield b"\0" * (-array.nbytes % _ALIGNED)


def _of_python(value: Any) -> Any:
    """Return a number of numpy's, as users give them, as one that JSON can hold."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be saved")


def _write_synced(path: Path, parts: Iterator[Any]) -> None:
    checksum = hashlib.sha256()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        for part in parts:
            checksum.update(part)
            _write_all(file, part)
        _write_all(file, checksum.digest())
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, data: Any) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest[: 1 << 24]) :]  # 16 MiB: a thread that waits for the interpreter gets it


def _sync_directory(directory: Path) -> None:
    """Have the new name outlive a power cut, where directories can be synced."""
    with contextlib.suppress(OSError):
        file = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def check(content: bytes) -> None:
    """See that a save is whole.

    Raises:
        InvalidCheckpoint: it is not.
    """
    if not content.startswith(_MAGIC):
        raise InvalidCheckpoint("it does not begin as a save does" if content else "it is empty")
    if hashlib.sha256(memoryview(content)[:-32]).digest() != content[-32:]:
        raise InvalidCheckpoint(f"its checksum does not fit its {len(content)} bytes, so it is torn or was changed")


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the facts and the arrays of a save that is whole."""
    begin = len(_MAGIC) + 8
    length = int.from_bytes(content[len(_MAGIC) : begin], "little")
    header = json.loads(content[begin : begin + length])
    arrays: dict[str, Array] = {}
    for place in header["arrays"]:
        dtype, shape = _dtype(place["dtype"]), tuple(place["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        offset = begin + length + place["offset"]
        arrays[place["name"]] = np.frombuffer(content, dtype, count, offset).reshape(shape)
    return header["facts"], arrays


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # TensorFlow's bfloat16 and float8

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
