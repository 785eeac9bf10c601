"""Append complete records to a file, every few seconds, and never a part of one."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable

from keras_dist_ext import arguments
from keras_dist_ext.errors import MonitorError

__all__ = ["AppendFile", "RecordsLost", "check_folder", "checked_flush_seconds", "is_remote", "make_folder"]


def checked_flush_seconds(flush_seconds: object) -> float:
    """Return how long records may wait.

    Raises:
        MonitorError: it is not a number of seconds >= 0.
    """
    longest = arguments.LONGEST_SECONDS
    return arguments.number("flush_seconds", flush_seconds, least=0.0, most=longest, error=MonitorError)


class RecordsLost(Exception):
    """Records could not be written; the cause is the exception that this was raised from.

    Attributes:
        num_records: how many.
    """

    def __init__(self, num_records: int) -> None:
        super().__init__(num_records)
        self.num_records = num_records


class AppendFile:
    """A file that records are appended to; it is open only while it is written.

    What was flushed survives a killed process. Records wait for at most about ``flush_seconds``: one is written at once
    if the next one is expected too late, judging by the time since the last.

    If the file, or its folder, is removed meanwhile, it is created again (except for URLs).

    Args:
        path: a path, or a URL that TensorFlow can write, such as ``gs://bucket/file``. Its folder must exist.
        header: the start of a new file.
        flush_seconds: see above.
        clock: monotonic, in seconds.
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
        """Add a record.

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
        """Write the records that were added: all of them, or none.

        Raises:
            RecordsLost: the file cannot be written; these records are lost.
        """
        records, self._records = self._records, []
        self._last_flush = self._clock()
        if records:
            try:
                if is_remote(self.path):
                    _append_remote(self.path, self._header + b"".join(records))
                    self._header = (
                        b""  # checking each time whether the file still exists would take longer than writing
                    )
                else:
                    _append(self.path, b"".join(records), self._header)
            except Exception as error:  # OSError here, TensorFlow's errors for URLs
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
        except BaseException:  # also a KeyboardInterrupt: an incomplete record would hide all later ones
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
    """Whether a path is a URL for TensorFlow's file systems.

    >>> is_remote("gs://bucket/logs"), is_remote("/var/logs"), is_remote("C:/logs")
    (True, False, False)
    """
    return "://" in path


def make_folder(path: str) -> None:
    """Create a folder, and its parents, if it does not exist.

    Raises:
        OSError: it cannot be created; for URLs, TensorFlow's errors.
    """
    if is_remote(path):
        import tensorflow as tf

        tf.io.gfile.makedirs(path)
    else:
        os.makedirs(path, exist_ok=True)


def check_folder(path: str) -> None:
    """Create a folder, and check that files can be written there.

    Raises:
        OSError: they cannot; for URLs, TensorFlow's errors.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/(?!/)", path):
        raise OSError("pathlib.Path has replaced two slashes of a URL by one; give it as a string")
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
            with contextlib.suppress(FileNotFoundError):
                os.remove(probe)
