"""Let workers read what the others have said, without a collective: nobody has to ask at the same time."""

from __future__ import annotations

from typing import Any

from keras_dist_ext._keras.cluster import delete_key, get_key, set_key

__all__ = ["Bulletin"]


class Bulletin:
    """What the workers of a cluster say to each other. What was said once stays as it is.

    Args:
        num_workers: how many there are.
        index: of this one.
    """

    def __init__(self, num_workers: int, index: int) -> None:
        self.num_workers = num_workers
        self.index = index

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [worker for worker in range(self.num_workers) if worker != self.index]

    def say(self, topic: str, text: str) -> None:
        """Say something on a topic, for all workers to read."""
        set_key(_name(topic, self.index), text)

    def hear(self, topic: str, worker: int, wait_seconds: float) -> str | None:
        """Return what a worker has said on a topic; None where it has said nothing for so long."""
        return get_key(_name(topic, worker), wait_seconds)

    def forget(self, topic: str) -> None:
        """Take back what this worker has said."""
        delete_key(_name(topic, self.index))


def _name(topic: str, worker: Any) -> str:
    return f"keras_dist_ext/{topic}/{worker}"
