"""Save what one of several workers saves: complete, waiting for no other worker, and without asking the user.

Whatever a worker's process saves by Keras or TensorFlow comes here: models of this package, checkpoints and SavedModels
of anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tensorflow as tf

from keras_dist_ext._keras.saving import answer_overwriting_by, write_saves_by
from keras_dist_ext.aliases import SavePath
from keras_dist_ext.strategy.workers import Workers, workers_of_process
from keras_dist_ext.training.whole_saves import checkpoint_state, file_identity, is_saving, save_whole
from keras_dist_ext.training.worker_sync import without_collectives

__all__ = ["save_by_worker"]

_T = TypeVar("_T")
_ANSWER_SECONDS = 0.2  # milliseconds, but on a busy machine


def save_by_worker(
    save: Callable[[SavePath], _T],
    path: SavePath,
    workers: Workers,
    *,
    makes_parents: bool,
    state: Callable[[Path], str],
) -> _T:
    """Save to a path by ``save(path)``, on any number of the workers; see ``save_whole``."""

    def announce(source: Path, target: Path) -> None:
        number = _NUM_SAVES[target] = _NUM_SAVES.get(target, 0) + 1
        with contextlib.suppress(tf.errors.OpError):  # the cluster is gone
            workers.store.set(_topic(target, number), file_identity(source))
            if number > 1:
                workers.store.delete(_topic(target, number - 1))

    return without_collectives(save_whole)(save, path, makes_parents=makes_parents, state=state, announce=announce)


# How often this worker has saved to a path. Workers that make the same calls have the same numbers, so that a file that
# another has made in the same call is told from one that was there before.
_NUM_SAVES: dict[Path, int] = {}


def _topic(path: Path, number: int) -> str:
    return f"made/{zlib.crc32(os.fsencode(path)):08x}/{number}"


def _may_overwrite(filepath: str | os.PathLike[str]) -> bool | None:
    """Answer for the user, whom several workers cannot ask.

    Raises:
        FileExistsError: the path exists already.
    """
    workers = workers_of_process()
    if workers is None:
        return None
    path = Path(os.path.abspath(filepath))
    topic = _topic(path, _NUM_SAVES.get(path, 0) + 1)
    with contextlib.suppress(tf.errors.OpError):  # the cluster is gone
        found = file_identity(path)
        if any(workers.store.get(topic, worker, _ANSWER_SECONDS) == found for worker in workers.store.others):
            return True
    raise FileExistsError(
        errno.EEXIST,
        "It exists already, and with overwrite=False Keras asks whether it may be overwritten, which nobody can answer "
        "for several workers. Say overwrite=True, or choose another path",
        str(filepath),
    )


def _write_checkpoint(write: Callable[[SavePath], SavePath], prefix: SavePath) -> SavePath:
    workers = workers_of_process()
    if workers is None or is_saving():
        return write(prefix)
    save_by_worker(write, prefix, workers, makes_parents=True, state=checkpoint_state)
    return prefix


def _write_saved_model(write: Callable[[SavePath], _T], path: SavePath) -> _T:
    workers = workers_of_process()
    if workers is None or is_saving():
        return write(path)

    def state(written: Path) -> str:
        variables = written / "variables" / "variables"
        return checkpoint_state(variables) if variables.with_suffix(".index").exists() else "no variables"

    return save_by_worker(write, path, workers, makes_parents=True, state=state)


write_saves_by(_write_checkpoint, _write_saved_model)
answer_overwriting_by(_may_overwrite)
