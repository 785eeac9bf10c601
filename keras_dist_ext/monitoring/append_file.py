"""Append whole records to a file, some seconds at a time, and never leave half of one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

__all__ = ["AppendFile", "RecordsLost", "check_folder", "is_remote", "make_folder"]


class RecordsLost(Exception):
    """Records that could not be written, for the cause that it was raised from.

    Attributes:
        num_records: how many.
    """

    def __init__(self, num_records: int) -> None:
        super().__init__(num_records)
        self.num_records = num_records


class AppendFile:
    """A file that records are appended to; it is open only while it is written.

    What was flushed outlives a killed process. Records wait for at most about ``flush_seconds``: one is written at once
    when the next would come too late, going by the time since the last.

    Where somebody removes it meanwhile, and its folder, both are made anew (but for URLs).

    Args:
        path: a path, or a URL that TensorFlow can write, such as ``gs://bucket/file``. Its folder must exist.
        header: what it begins with, if it is new.
        flush_seconds: see above.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        header: bytes = b"",
        flush_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = os.fspath(path)
        self._header = header
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._records: list[bytes] = []
        self._last_flush = self._last_add = clock()

    def add(self, record: bytes) -> None:
        """Take a record.

        Raises:
            RecordsLost: it was time to flush, and the file cannot be written.
        """
        now = self._clock()
        self._records.append(record)
        next_add = now + (now - self._last_add)
        self._last_add = now
        if next_add - self._last_flush >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Write what was taken: all of it, or nothing.

        Raises:
            RecordsLost: the file cannot be written; what was taken is lost.
        """
        records, self._records = self._records, []
        self._last_flush = self._clock()
        if records:
            try:
                if is_remote(self.path):
                    _append_remote(self.path, self._header + b"".join(records))
                    self._header = b""  # asking each time whether it is still there would take longer than writing
                else:
                    _append(self.path, b"".join(records), self._header)
            except Exception as error:  # OSError here, errors of its own in TensorFlow
                raise RecordsLost(len(records)) from error


def _append(path: str, data: bytes, header: bytes = b"") -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
    try:
        file = os.open(path, flags, 0o666)
    except FileNotFoundError:
        make_folder(os.path.dirname(path))
        file = os.open(path, flags, 0o666)
    try:
        size = os.fstat(file).st_size
        data = data if size else header + data
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
        except BaseException:  # also a KeyboardInterrupt: a torn record would hide all that come after it
            if len(rest) < len(data):
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def _append_remote(path: str, data: bytes) -> None:
    import tensorflow as tf

    with tf.io.gfile.GFile(path, "ab") as file:
        file.write(data)


def is_remote(path: str) -> bool:
    """Whether it is a URL for TensorFlow's file systems, and no path.

    >>> is_remote("gs://bucket/logs"), is_remote("/var/logs"), is_remote("C:/logs")
    (True, False, False)
    """
    return "://" in path


def make_folder(path: str) -> None:
    """Make a folder, and those above it, where there is none.

    Raises:
        OSError: it cannot be made; of URLs, TensorFlow's errors.
    """
    if is_remote(path):
        import tensorflow as tf

        tf.io.gfile.makedirs(path)
    else:
        os.makedirs(path, exist_ok=True)


def check_folder(path: str) -> None:
    """Make a folder and see whether files can be written there.

    Raises:
        OSError: they cannot; of URLs, TensorFlow's errors.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/(?!/)", path):
        raise OSError("a URL of which pathlib.Path has made a path, with one slash for two; give it as a string")
    make_folder(path)
    probe = f"{path.rstrip('/')}/.probe-{os.getpid()}"
    if is_remote(path):
        import tensorflow as tf

        _append_remote(probe, b"\n")
        tf.io.gfile.remove(probe)
    else:
        try:
            _append(probe, b"\n")
        finally:
            if os.path.exists(probe):
                os.remove(probe)
