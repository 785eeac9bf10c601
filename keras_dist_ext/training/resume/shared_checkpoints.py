"""Give the chief's newest checkpoint to all workers."""

from __future__ import annotations

from keras_dist_ext.errors import ResumeError
from keras_dist_ext.strategy.workers import Workers
from keras_dist_ext.training.resume.checkpoints import CheckpointStore

__all__ = ["newest_of_chief"]


def newest_of_chief(checkpoints: CheckpointStore, workers: Workers | None, directory: str) -> bytes:
    """Return the chief's newest checkpoint on all workers; empty where there is none.

    Args:
        checkpoints: of this worker's disk.
        workers: of the run; all must call this.
        directory: for messages.

    Raises:
        ResumeError: the chief cannot read or write there.
    """
    failure: OSError | ResumeError | None = None
    content = b""
    if workers is None or workers.is_chief:
        try:
            checkpoints.prepare()
            content = checkpoints.newest() or b""
        except (OSError, ResumeError) as error:
            failure = error
    has_failed = failure is not None
    if bool(workers.broadcast([float(has_failed)])[0]) if workers is not None else has_failed:
        if isinstance(failure, ResumeError):
            raise failure
        cause = f": {type(failure).__name__}: {failure}" if failure else " by the chief, which reports why"
        raise ResumeError(
            f"{directory} cannot be written to{cause}. A run without checkpoints could not resume after a "
            "crash. Give Resume a directory that can be written to."
        )
    return content if workers is None else workers.broadcast_bytes(content)
