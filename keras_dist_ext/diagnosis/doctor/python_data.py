"""Look into Python code that makes batches: which function it is, whether it computes or waits, how it reads files."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from types import FrameType

import numpy as np

from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import TensorNest

__all__ = ["MadeInPython", "Reads", "look_into"]

_LONGEST_SECONDS = 1.0  # of a batch, for another one to be made


@dataclasses.dataclass(frozen=True)
class Reads:
    """What is read of one dataset of an HDF5 file to make a batch."""

    name: str  # in the file
    num_reads: int
    num_rows: int  # in all of them
    chunk_rows: int  # of a chunk, which is read and decompressed as a whole; 0: the rows lie one behind the other


@dataclasses.dataclass(frozen=True)
class MadeInPython:
    """How batches are made that come from Python."""

    kind: str  # "PyDataset" or "Generator"
    function: str = ""  # its name, and where it is
    seconds: float = 0.0  # that it took for one batch; 0: it was not measured
    cpu_seconds: float = 0.0  # of these, in which its thread computed
    workers: int = 1
    use_multiprocessing: bool = False
    reads: tuple[Reads, ...] = ()
    rows: int = 0  # of a batch


def look_into(adapter: object) -> MadeInPython:
    """Make one or two batches more, and say how: ``__getitem__`` of a PyDataset is called, in this thread.

    They lie in the midst of an epoch, where a disk has read them less lately than the first ones. The second one is
    made where the first took no longer than a second; what took less counts, since the first may open files, and is
    made while the reads of files are noted.

    Args:
        adapter: Keras' own, of the data that was given.
    """
    kind = type(adapter).__name__.removesuffix("DataAdapter").removesuffix("Adapter")
    dataset = getattr(adapter, "py_dataset", None)
    if not isinstance(dataset, keras.utils.PyDataset):
        return MadeInPython(kind)
    code = type(dataset).__getitem__.__code__ if hasattr(type(dataset).__getitem__, "__code__") else None
    place = "" if code is None else f" ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"
    function = f"{type(dataset).__name__}.__getitem__{place}"
    try:
        num_batches = dataset.num_batches or 4  # endless data has any number
        reads: dict[tuple[str, str], Reads] = {}
        with _noted_reads(reads):
            made = _timed(dataset, num_batches // 2)
        if made[0] <= _LONGEST_SECONDS:
            with contextlib.suppress(Exception):  # one is known
                made = min(made, _timed(dataset, 3 * num_batches // 4), key=lambda one: one[0])
    except Exception:  # code of the user's, which may not bear to be called here
        return MadeInPython(kind, function, workers=dataset.workers, use_multiprocessing=dataset.use_multiprocessing)
    seconds, cpu, batch = made
    leaves = [leaf for leaf in keras.tree.flatten(batch) if getattr(leaf, "shape", ())]
    rows = int(leaves[0].shape[0]) if leaves else 0
    return MadeInPython(
        kind, function, seconds, cpu, dataset.workers, dataset.use_multiprocessing, tuple(reads.values()), rows
    )


def _timed(dataset: keras.utils.PyDataset, index: int) -> tuple[float, float, TensorNest]:
    """Return the seconds of a batch, those of computing, and the batch."""
    begin, cpu = time.perf_counter(), time.thread_time()
    batch = dataset[index]
    return time.perf_counter() - begin, time.thread_time() - cpu, batch


@contextlib.contextmanager
def _noted_reads(found: dict[tuple[str, str], Reads]) -> Iterator[None]:
    """Note how h5py is asked for rows (h5py/_hl/dataset.py), for each dataset of each file."""
    if "h5py" not in sys.modules or sys.getprofile() is not None:
        yield
        return
    import h5py

    def look(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code.co_name != "__getitem__":
            return
        source = frame.f_locals.get("self")
        if isinstance(source, h5py.Dataset) and source and source.shape:  # it may be closed when the batch is made
            key = (source.file.filename, source.name or "")
            before = found.get(key, Reads(key[1], 0, 0, (source.chunks or (0,))[0]))
            rows = before.num_rows + _num_rows(frame.f_locals.get("args"), source.shape[0])
            found[key] = dataclasses.replace(before, num_reads=before.num_reads + 1, num_rows=rows)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def _num_rows(asked: object, length: int) -> int:
    """Return how many rows an index has of a dataset of so many.

    >>> [_num_rows(asked, 10) for asked in (3, slice(2, 6), (slice(None), 0), [1, 5], [True, False], (), ..., "name")]
    [1, 4, 10, 2, 1, 10, 10, 10]
    """
    asked = asked if isinstance(asked, tuple) else (asked,)
    places = [place for place in asked if not isinstance(place, str)]  # but the names of fields
    first = places[0] if places else ...
    if first is ...:
        return length
    if isinstance(first, slice):
        return len(range(*first.indices(length)))
    rows = np.asarray(first)
    if not rows.ndim:
        return 1
    return int(np.count_nonzero(rows)) if rows.dtype.kind == "b" else len(rows)
