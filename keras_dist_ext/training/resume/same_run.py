"""Check that a checkpoint is of the run that is about to resume from it."""

from __future__ import annotations

from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.errors import ResumeError

__all__ = ["VERSION", "check_same_run", "check_version"]

VERSION = 2  # of what a checkpoint holds


def check_version(metadata: JsonObject, directory: str) -> None:
    """Check that this package reads a checkpoint.

    Args:
        metadata: of the checkpoint.
        directory: for the message.

    Raises:
        ResumeError: it does not.
    """
    if metadata.get("version") != VERSION:
        raise ResumeError(
            f"{directory} has checkpoints of version {metadata.get('version')}; this package reads version "
            f"{VERSION}. Finish the run with the package that started it, or give Resume another directory."
        )


def check_same_run(metadata: JsonObject, data: JsonObject, random_seed: int | None, directory: str) -> None:
    """Check that a checkpoint is of a run over the same data with the same seed.

    Args:
        metadata: of the checkpoint, well-formed.
        data: what is known of the present run's.
        random_seed: of keras.utils.set_random_seed, in the present run.
        directory: for the message.

    Raises:
        ResumeError: it is not.
    """
    saved = metadata["data"]
    differences = [
        f"{name}: {data.get(name)}, was {saved[name]}"
        for name in saved
        if name != "checksum" and saved[name] != data.get(name)
    ]
    if differences:
        raise ResumeError(
            f"The checkpoint in {directory} is of a run over other data, so its position in this data is "
            f"unknown. {'; '.join(differences)}. Give fit the same data, or Resume another directory."
        )
    if metadata["random_seed"] != random_seed:
        now, was = ("none" if seed is None else seed for seed in (random_seed, metadata["random_seed"]))
        raise ResumeError(
            f"The checkpoint in {directory} is of a run with another seed: that of "
            f"keras.utils.set_random_seed is {now}, was {was}. Call it with the same seed before fit, or give "
            "Resume another directory."
        )
