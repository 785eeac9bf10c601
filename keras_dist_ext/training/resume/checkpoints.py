"""Keep the newest checkpoints of a run in a directory, each complete or absent.

A checkpoint is written to a temporary file, synced to the disk, and renamed; then its directory is synced. It ends with
a SHA-256 of everything before, so that a truncated or corrupted file is detected. It consists of JSON and plain arrays:
nothing in it is executed or unpickled. Its place may hold anything: what is no file, does not start like a checkpoint,
or is not as long as it says is not read any further.

    KDECKPT1 | length of the header, 8 bytes | header, JSON | arrays, each at a multiple of 64 bytes | SHA-256
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

import numpy as np

from keras_dist_ext.aliases import Array, DType, JsonObject
from keras_dist_ext.errors import ResumeError
from keras_dist_ext.messages import warn
from keras_dist_ext.training.resume.owner import OtherRun, Owner
from keras_dist_ext.whole_files import create_unfinished, open_file, remove_abandoned, sync_folder, unfinished

__all__ = ["InvalidCheckpoint", "CheckpointStore", "unpack"]

_MAGIC = b"KDECKPT1"
_ALIGNED = 64  # bytes
_CHECKSUM = 32  # bytes
_LONGEST_HEADER = 1 << 30  # bytes
_AT_ONCE = 1 << 24  # bytes: lets threads that wait for the interpreter run
_MOST_DIMENSIONS = 32  # that NumPy 1 can have
_NAME = re.compile(r"ckpt-(\d{10,})\.kde")


class InvalidCheckpoint(Exception):
    """A file is not a complete checkpoint; the message says why."""


class CheckpointStore:
    """The checkpoints in a directory. The run that has begun there last writes them.

    Args:
        directory: is created when it is first needed, and again where it was removed.
        keep: how many of the newest to keep, at least 1.

    Raises:
        OSError: the directory is relative to the working directory, which was removed.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        self.directory = Path(os.path.abspath(directory))  # whatever becomes of the working directory
        self._keep = keep
        self._bad: set[Path] = set()  # damaged: to be removed when there is a new one
        self._not_counted: set[Path] = set()  # that cannot be used, and stay
        self._known: set[Path] = set()  # complete ones, found or written
        self._owner: Owner | None = None

    def prepare(self) -> None:
        """Own the directory from now on, and remove temporary files of killed processes.

        Raises:
            OSError: it cannot be written to.
        """
        self._owner = Owner(self.directory)
        self._owner.claim()
        remove_abandoned([*self.directory.glob("ckpt-*.kde.tmp"), *self.directory.glob("ckpt-*.kde.*.tmp")])

    def write(self, metadata: JsonObject, arrays: Mapping[str, Array]) -> Path:
        """Write a checkpoint as the newest, and remove the oldest beyond `keep`.

        Args:
            metadata: values that JSON can represent.
            arrays: of numbers, by name.

        Raises:
            OtherRun: another run has begun here since `prepare`.
            OSError: it cannot be written; earlier checkpoints are unchanged.
        """
        try:
            return self._write(metadata, arrays)
        except FileNotFoundError:  # the directory was removed, perhaps while a file was written there
            self.directory.mkdir(parents=True, exist_ok=True)
            return self._write(metadata, arrays)

    def _write(self, metadata: JsonObject, arrays: Mapping[str, Array]) -> Path:
        self._check_owner()
        paths = self._paths()
        number = 1 + (_number(paths[-1]) if paths else 0)
        path = self.directory / f"ckpt-{number:010d}.kde"
        temporary = unfinished(path)
        try:
            _write_synced(temporary, _pack(metadata, arrays))
            self._check_owner()
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(self.directory)
        counted = [old for old in paths if old not in self._bad | self._not_counted and old.is_file()]
        for old in [*self._bad, *counted[: max(0, len(counted) + 1 - self._keep)]]:
            with contextlib.suppress(OSError):
                old.unlink(missing_ok=True)
        self._known = {*counted[max(0, len(counted) + 1 - self._keep) :], path}
        self._bad.clear()
        return path

    def _check_owner(self) -> None:
        if self._owner is not None:
            self._owner.check()

    def outlook(self, error: BaseException) -> str:
        """Say what becomes of a run's checkpoints after a failure to write one."""
        if isinstance(error, OtherRun):
            return "Training continues, and this run writes no more checkpoints there."
        earlier = "Earlier checkpoints are unchanged"
        if self._known and not any(path.exists() for path in self._known):
            earlier = "Earlier checkpoints are gone, too"
        return f"{earlier}; training continues, and the next checkpoint is tried when it is due."

    def newest(self) -> bytes | None:
        """Return the newest complete checkpoint, and warn of each that is not; None where there is none.

        Raises:
            ResumeError: it does not fit into memory.
        """
        causes: dict[Path, Exception] = {}
        found: bytes | None = None
        instead = "There is no other, so the run starts from the beginning."
        for path in reversed(self._paths()):
            try:
                found = _read(path)
            except (OSError, InvalidCheckpoint) as error:
                causes[path] = error
            else:
                self._known.add(path)
                instead = f"The run resumes from {path.name}."
                break
        self._bad = {path for path, cause in causes.items() if isinstance(cause, InvalidCheckpoint)}
        self._not_counted = set(causes) - self._bad
        for path, cause in causes.items():
            warn(f"{path} cannot be used: {cause}. {instead}")
        return found

    def _paths(self) -> list[Path]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return sorted((self.directory / name for name in names if _NAME.fullmatch(name)), key=_number)


_Bytes: TypeAlias = bytes | memoryview


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _pack(metadata: JsonObject, arrays: Mapping[str, Array]) -> Iterator[_Bytes]:
    """Yield the parts of a checkpoint up to its checksum."""
    entries: list[JsonObject] = []
    offset = 0
    for name, array in arrays.items():
        entries.append({"name": name, "dtype": array.dtype.name, "shape": array.shape, "offset": offset})
        offset += array.nbytes + -array.nbytes % _ALIGNED
    header = json.dumps({"metadata": metadata, "arrays": entries}, default=_to_python).encode()
    if len(header) > _LONGEST_HEADER:
        raise OverflowError(f"what callbacks keep beside arrays has {len(header)} bytes, of at most {_LONGEST_HEADER}")
    header += b" " * (-(len(_MAGIC) + 8 + len(header)) % _ALIGNED)
    yield _MAGIC + len(header).to_bytes(8, "little") + header
    for array in arrays.values():
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        yield memoryview(native.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        yield b"\0" * (-array.nbytes % _ALIGNED)


def _to_python(value: object) -> object:
    """Return a NumPy number, as users may give, as a Python number."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be saved")


def _write_synced(path: Path, parts: Iterator[_Bytes]) -> None:
    checksum = hashlib.sha256()
    file = create_unfinished(path)
    try:
        for part in parts:
            checksum.update(part)
            _write_all(file, part)
        _write_all(file, checksum.digest())
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, data: _Bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest[:_AT_ONCE]) :]


def _read(path: Path) -> bytes:
    """Read a complete checkpoint, in memory that is bounded until it is known to be complete."""
    with contextlib.closing(os.fdopen(open_file(path), "rb")) as file:
        size = os.fstat(file.fileno()).st_size
        _check(file, size)
        file.seek(0)
        try:
            return file.read(size)
        except MemoryError:
            raise ResumeError(
                f"{path} is a complete checkpoint, and its {size} bytes do not fit into memory. Resume where there is "
                "more."
            ) from None


def check(content: bytes) -> None:
    """Check that a checkpoint is complete.

    Raises:
        InvalidCheckpoint: it is not.
    """
    _check(io.BytesIO(content), len(content))


def _check(file: IO[bytes], size: int) -> None:
    """Check what a checkpoint says of itself, and then its checksum."""
    start = file.read(len(_MAGIC) + 8)
    if not start.startswith(_MAGIC):
        raise InvalidCheckpoint("it does not start like a checkpoint" if size else "it is empty")
    length = int.from_bytes(start[len(_MAGIC) :], "little")
    if len(start) < len(_MAGIC) + 8 or length > min(size - len(start) - _CHECKSUM, _LONGEST_HEADER):
        raise _torn(size)
    try:
        header = file.read(length)
        _, entries = _parse(header)
    except MemoryError:
        raise InvalidCheckpoint(f"its header of {length} bytes does not fit into memory") from None
    end = entries[-1].end if entries else 0
    if size != len(start) + length + end + _CHECKSUM:
        raise _torn(size)
    checksum = hashlib.sha256(start + header)
    left = end
    while left:
        part = file.read(min(left, _AT_ONCE))
        if not part:
            break
        checksum.update(part)
        left -= len(part)
    if checksum.digest() != file.read(_CHECKSUM):
        raise _torn(size)


def _torn(size: int) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"its checksum does not match its {size} bytes, so it is truncated or was changed")


def unpack(content: bytes) -> tuple[JsonObject, dict[str, Array]]:
    """Return the metadata and the arrays of a complete checkpoint."""
    begin = len(_MAGIC) + 8
    length = int.from_bytes(content[len(_MAGIC) : begin], "little")
    metadata, entries = _parse(content[begin : begin + length])
    return metadata, {
        entry.name: np.frombuffer(content, entry.dtype, math.prod(entry.shape), begin + length + entry.begin).reshape(
            entry.shape
        )
        for entry in entries
    }


class _Entry(NamedTuple):
    """Where an array is, in bytes from the end of the header."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


def _parse(header: bytes) -> tuple[JsonObject, list[_Entry]]:
    """Return the metadata, and where the arrays are.

    Raises:
        InvalidCheckpoint: it is not what `_pack` writes.
    """
    try:
        content = json.loads(header)
        metadata, listed = content["metadata"], content["arrays"]
        entries: list[_Entry] = []
        for one in listed:
            dtype, shape, begin = _dtype(one["dtype"]), tuple(map(operator.index, one["shape"])), one["offset"]
            size = math.prod(shape) * dtype.itemsize
            if not isinstance(one["name"], str) or min(shape, default=0) < 0 or len(shape) > _MOST_DIMENSIONS:
                raise ValueError(f"{one['name']!r} is not an array of shape {shape}")
            if begin != (entries[-1].end if entries else 0):
                raise ValueError(f"{one['name']!r} begins at byte {begin}")
            entries.append(_Entry(one["name"], dtype, shape, begin, begin + size + -size % _ALIGNED))
        if not isinstance(metadata, dict) or len({entry.name for entry in entries}) < len(entries):
            raise ValueError("names or metadata are missing")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidCheckpoint(f"its header is malformed ({type(error).__name__}: {str(error)[:200]})") from None
    return metadata, entries


def _dtype(name: str) -> DType:
    """Return a type of numbers by its name."""
    try:
        dtype: DType = np.dtype(name)
    except TypeError:
        import ml_dtypes  # TensorFlow's bfloat16 and float8

        dtype = np.dtype(getattr(ml_dtypes, name))
    if dtype.name != name or dtype.hasobject or dtype.fields or not dtype.itemsize or dtype.kind not in "biufcV":
        raise ValueError(f"{str(name)[:50]!r} is not a numeric type")
    return dtype
