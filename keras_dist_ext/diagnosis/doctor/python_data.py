"""Look into Python code that makes batches: which function it is, whether it computes or waits, how it reads files."""

from __future__ import annotations

import dataclasses
import sys
import time
from types import FrameType
from typing import Any

from keras_dist_ext._keras import keras

__all__ = ["MadeInPython", "Reads", "look_into"]


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
    seconds: float = 0.0  # that it took for one batch
    cpu_seconds: float = 0.0  # of these, in which its thread computed
    workers: int = 1
    use_multiprocessing: bool = False
    reads: tuple[Reads, ...] = ()
    rows: int = 0  # of a batch


def look_into(adapter: Any) -> MadeInPython:
    """Make one batch more, and say how.

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
        dataset[0]  # opens files
        begin, cpu = time.perf_counter(), time.thread_time()
        batch = dataset[0]
        seconds, cpu = time.perf_counter() - begin, time.thread_time() - cpu
        reads = _reads(dataset)
    except Exception:  # code of the user's, which may not bear to be called here
        return MadeInPython(kind, function, workers=dataset.workers, use_multiprocessing=dataset.use_multiprocessing)
    leaves = [leaf for leaf in keras.tree.flatten(batch) if getattr(leaf, "shape", ())]
    rows = int(leaves[0].shape[0]) if leaves else 0
    return MadeInPython(kind, function, seconds, cpu, dataset.workers, dataset.use_multiprocessing, reads, rows)


def _reads(dataset: keras.utils.PyDataset) -> tuple[Reads, ...]:
    """Make a batch, and note how h5py is asked for rows (h5py/_hl/dataset.py)."""
    if "h5py" not in sys.modules or sys.getprofile() is not None:
        return ()
    import h5py

    asked: dict[str, list[Any]] = {}

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "__getitem__":
            source = frame.f_locals.get("self")
            if isinstance(source, h5py.Dataset):
                asked.setdefault(source.name, [source]).append(frame.f_locals.get("args"))

    sys.setprofile(look)
    try:
        dataset[0]
    finally:
        sys.setprofile(None)
    return tuple(
        Reads(name, len(calls), sum(_num_rows(call, len(source)) for call in calls), (source.chunks or (0,))[0])
        for name, (source, *calls) in asked.items()
        if source.shape
    )


def _num_rows(asked: Any, length: int) -> int:
    first = asked[0] if isinstance(asked, tuple) and asked else asked
    if isinstance(first, slice):
        return len(range(*first.indices(length)))
    return len(first) if hasattr(first, "__len__") else 1
