"""Judge batches that Python makes, of which replicas wait for each."""

from __future__ import annotations

from keras_dist_ext.diagnosis.doctor.python_data import MadeInPython, Reads
from keras_dist_ext.diagnosis.doctor.units import ms
from keras_dist_ext.findings import Finding

__all__ = ["explains_wait", "judge_python_data"]

_MOST_READS = 4  # of one dataset of a file, for one batch
_COMPUTES = 0.5  # of the time: then threads wait for each other, since one at a time runs Python
_KEEPS_UP = 0.8  # of a step's time: who makes a batch in less is ready before the step is
_ALONE = 0.3  # of the wait for a batch: the least that making one takes where it is what is waited for
_WORKERS = 4
_WAITING_WORKERS = 16
_SLOW = "Batches come from Python code, which does not make them as fast as replicas take them."


def explains_wait(made: MadeInPython, waited_seconds: float) -> bool:
    """Whether making a batch may be what is waited for, and not a core that others have.

    >>> cheap = MadeInPython("PyDataset", "Rows.__getitem__", 2e-5, 2e-5)
    >>> explains_wait(cheap, 1e-3), explains_wait(cheap, 5e-5)
    (False, True)
    """
    if not made.seconds or made.use_multiprocessing:  # it is not known; or what is sent takes longer than what is made
        return True
    return made.seconds >= _ALONE * waited_seconds


def judge_python_data(made: MadeInPython, spare_seconds: float = 0.0) -> Finding:
    """Say what is to be changed about data that is known to be slow.

    Args:
        made: how its batches are made.
        spare_seconds: of a step, without the wait for its batch.
    """
    often = [reads for reads in made.reads if reads.num_reads > _MOST_READS and reads.num_rows < 4 * reads.num_reads]
    if often:
        return _unaligned(made, max(often, key=lambda reads: reads.num_reads))
    if made.kind != "PyDataset":
        return Finding(
            "generator-bound",
            "Batches come from Python code, which makes one at a time while replicas wait.",
            f"the data is a {made.kind}",
            "A `keras.utils.PyDataset` with `workers=16` where making a batch waits, and with `workers=4, "
            "use_multiprocessing=True` where it computes; or tf.data, in threads: "
            "`tf.data.Dataset.from_tensor_slices(files).map(load, "
            "num_parallel_calls=tf.data.AUTOTUNE).batch(n).prefetch(tf.data.AUTOTUNE)`.",
        )
    computes = made.cpu_seconds >= _COMPUTES * made.seconds
    workers = max(_WORKERS, made.workers)
    name = made.function.partition(".")[0]
    if not made.seconds:
        return Finding(
            "generator-bound",
            _SLOW,
            f"{made.function} makes batches, in {_by(made)}; what one takes could not be measured",
            f"`{name}(workers={max(_WAITING_WORKERS, 2 * made.workers)})` where making a batch waits, and "
            f"`{name}(workers={workers}, use_multiprocessing=True)` where it computes; the class and what it holds "
            "must be picklable then.",
        )
    if made.use_multiprocessing and made.seconds < _KEEPS_UP * spare_seconds:
        return Finding(
            "generator-bound",
            "Processes make batches that cost little, and each is copied from one process to another.",
            f"{made.function} makes a batch in {ms(made.seconds)}, in this process, and a step takes "
            f"{ms(spare_seconds)} without waiting for it; the batches come from {_by(made)}",
            f"`{name}(workers=1, use_multiprocessing=False)`: one thread makes them faster than they are taken, and "
            "hands them on as they are.",
        )
    if not computes:
        how = f"workers={max(_WAITING_WORKERS, 2 * made.workers)}, use_multiprocessing={made.use_multiprocessing}"
        why = "whose threads wait at once"
    elif not made.use_multiprocessing:
        how = f"workers={workers}, use_multiprocessing=True"
        why = "since threads take turns where Python computes; the class and what it holds must be picklable"
    else:
        how = f"workers={2 * made.workers}, use_multiprocessing=True"
        why = "as far as there are cores; or make less of a batch in Python"
    return Finding(
        "generator-bound",
        _SLOW,
        f"{made.function} makes batches, of which one takes {ms(made.seconds)}, {ms(made.cpu_seconds)} of it "
        f"computing, in {_by(made)}",
        f"`{name}({how})`, {why}.",
    )


def _by(made: MadeInPython) -> str:
    kind = "process" if made.use_multiprocessing else "thread"
    return f"1 {kind}" if made.workers <= 1 else f"{made.workers} {kind}{'es' if made.use_multiprocessing else 's'}"


def _unaligned(made: MadeInPython, reads: Reads) -> Finding:
    name = reads.name.rpartition("/")[2]
    rows = made.rows or reads.num_rows
    if reads.chunk_rows:
        found = f"of chunks of {reads.chunk_rows} rows, each of which is read and decompressed as a whole"
        whole = f"where the batch size is a multiple of the {reads.chunk_rows} rows of a chunk"
    else:
        found = "which lie one behind the other"
        whole = "which is one read"
    return Finding(
        "unaligned-reads",
        "Batches are read from an HDF5 file row by row, and each read costs what many rows would.",
        f"{made.function} reads {reads.name} {reads.num_reads} times for a batch of {rows} rows, {found}; "
        f"a batch takes {ms(made.seconds)}",
        f"Read a batch at once, `{name}[i * {rows}:(i + 1) * {rows}]`, {whole}; mix by the order of batches and within "
        f"them, or write the file once in a random order. More `workers` bring little: h5py reads one thing at a time, "
        "and `use_multiprocessing=True` only shares the waste.",
    )
