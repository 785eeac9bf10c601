"""Keep the newest checkpoints of a run in a directory, each complete or absent.

A checkpoint is written to a temporary file, synced to the disk, and renamed; then its directory is synced. It ends with
a SHA-256 of everything before, so that a truncated or corrupted file is detected. It consists of JSON and plain arrays:
nothing in it is executed or unpickled.

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
    """A file is not a complete checkpoint; the message says why."""


class CheckpointStore:
    """The checkpoints in a directory. One process at a time writes there.

    Args:
        directory: is created when it is first needed.
        keep: how many of the newest to keep, at least 1.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        self.directory = Path(directory)
        self._keep = keep
        self._bad: set[Path] = set()
        self._last: int | None = None  # number of the newest known checkpoint, after the first look

    def prepare(self) -> None:
        """Create the directory, check that it can be written to, and remove temporary files of killed processes.

        Raises:
            OSError: it cannot be written to.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for temporary in self.directory.glob("ckpt-*.kde.tmp"):
            temporary.unlink(missing_ok=True)
        probe = self.directory / f".probe-{os.getpid()}"
        try:
            probe.write_bytes(b"\n")
        finally:
            probe.unlink(missing_ok=True)

    def write(self, metadata: Mapping[str, Any], arrays: Mapping[str, Array]) -> Path:
        """Write a checkpoint as the newest, and remove the oldest beyond `keep`.

        Args:
            metadata: values that JSON can represent.
            arrays: of numbers, by name.

        Raises:
            OSError: it cannot be written, or another run has written one; earlier checkpoints are unchanged.
        """
        paths = self._paths()
        number = 1 + (_number(paths[-1]) if paths else 0)
        if self._last is not None and number > self._last + 1:
            raise FileExistsError(f"{paths[-1].name} is of another run, and each run needs its own directory")
        path = self.directory / f"ckpt-{number:010d}.kde"
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            _write_synced(temporary, _pack(metadata, arrays))
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
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
        """Return the newest complete checkpoint, and warn of each that is not; None where there is none."""
        causes: dict[Path, Exception] = {}
        found: bytes | None = None
        instead = "There is no other, so the run starts from the beginning."
        paths = self._paths()
        self._last = _number(paths[-1]) if paths else 0
        for path in reversed(paths):
            try:
                content = path.read_bytes()
                check(content)
            except (OSError, InvalidCheckpoint) as error:
                causes[path] = error
            else:
                found, instead = content, f"The run resumes from {path.name}."
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


def _pack(metadata: Mapping[str, Any], arrays: Mapping[str, Array]) -> Iterator[Any]:
    """Yield the parts of a checkpoint up to its checksum."""
    entries: list[dict[str, Any]] = []
    offset = 0
    for name, array in arrays.items():
        entries.append({"name": name, "dtype": array.dtype.name, "shape": array.shape, "offset": offset})
        offset += array.nbytes + -array.nbytes % _ALIGNED
    header = json.dumps({"metadata": metadata, "arrays": entries}, default=_to_python).encode()
    header += b" " * (-(len(_MAGIC) + 8 + len(header)) % _ALIGNED)
    yield _MAGIC + len(header).to_bytes(8, "little") + header
    for array in arrays.values():
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        yield memoryview(native.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        yield b"\0" * (-array.nbytes % _ALIGNED)


def _to_python(value: Any) -> Any:
    """Return a NumPy number, as users may give, as a Python number."""
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
        rest = rest[os.write(file, rest[: 1 << 24]) :]  # 16 MiB: lets threads that wait for the interpreter run


def _sync_directory(directory: Path) -> None:
    """Make the new name survive a power failure, where directories can be synced."""
    with contextlib.suppress(OSError):
        file = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def check(content: bytes) -> None:
    """Check that a checkpoint is complete.

    Raises:
        InvalidCheckpoint: it is not.
    """
    if not content.startswith(_MAGIC):
        raise InvalidCheckpoint("it does not start like a checkpoint" if content else "it is empty")
    if hashlib.sha256(memoryview(content)[:-32]).digest() != content[-32:]:
        raise InvalidCheckpoint(
            f"its checksum does not match its {len(content)} bytes, so it is truncated or was changed"
        )


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the metadata and the arrays of a complete checkpoint."""
    begin = len(_MAGIC) + 8
    length = int.from_bytes(content[len(_MAGIC) : begin], "little")
    header = json.loads(content[begin : begin + length])
    arrays: dict[str, Array] = {}
    for entry in header["arrays"]:
        dtype, shape = _dtype(entry["dtype"]), tuple(entry["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        offset = begin + length + entry["offset"]
        arrays[entry["name"]] = np.frombuffer(content, dtype, count, offset).reshape(shape)
    return header["metadata"], arrays


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # TensorFlow's bfloat16 and float8

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
