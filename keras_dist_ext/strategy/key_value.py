"""Keys and values that all workers of a cluster can read, without a collective: nobody has to ask at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import tensorflow as tf

from keras_dist_ext._keras.cluster import delete_key, get_key, set_key, silent_tasks

__all__ = ["KeyValueStore"]


class KeyValueStore:
    """What the workers of a cluster have stored, by topic and worker. A value that is set stays as it is.

    Args:
        jobs: how many tasks "chief" and "worker" have, of which all are workers, in this order.
        index: of this one.
    """

    def __init__(self, jobs: Mapping[str, int], index: int) -> None:
        self._jobs = jobs
        self.num_workers = sum(jobs.values())
        self.index = index

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [worker for worker in range(self.num_workers) if worker != self.index]

    def index_of(self, job: str, number: int) -> int:
        """Return the number of the worker that is a task of a job."""
        return number if job == "chief" else self._jobs.get("chief", 0) + number

    def silent(self) -> list[int]:
        """Return the workers that send no sign of life any more; a thread of TensorFlow's does."""
        return [self.index_of(job, number) for job, number in silent_tasks(self._jobs)]

    def set(self, topic: str, text: str) -> None:
        """Store a text on a topic, for all workers to read."""
        set_key(_name(topic, self.index), text)

    def get(self, topic: str, worker: int, wait_seconds: float) -> str | None:
        """Return what a worker has stored on a topic; None where it has stored nothing for so long."""
        return get_key(_name(topic, worker), wait_seconds)

    def set_for_all(self, topic: str, text: str) -> None:
        """Store a text on a topic of all workers, unless one of them has."""
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            set_key(_name(topic, "all"), text)

    def get_for_all(self, topic: str, wait_seconds: float) -> str | None:
        """Return what one of the workers has stored on a topic of all."""
        return get_key(_name(topic, "all"), wait_seconds)

    def delete(self, topic: str) -> None:
        """Delete what this worker has stored."""
        delete_key(_name(topic, self.index))


def _name(topic: str, worker: int | str) -> str:
    return f"keras_dist_ext/{topic}/{worker}"
