"""How many workers a launch starts: a number, or as many as there are places for, from one number to another."""

from dataclasses import dataclass

from keras_dist_ext import arguments
from keras_dist_ext.errors import LaunchError

__all__ = ["WorkerCount"]


@dataclass(frozen=True)
class WorkerCount:
    """How many workers a launch starts, at least and at most."""

    least: int
    most: int

    @classmethod
    def of(cls, num_workers: object) -> "WorkerCount":
        """Return what a number, or a pair of numbers, means.

        >>> WorkerCount.of(3), WorkerCount.of((2, 4))
        (WorkerCount(least=3, most=3), WorkerCount(least=2, most=4))

        Raises:
            LaunchError: it is neither, or out of bounds.
        """
        highest = arguments.MOST_PROCESSES
        if not isinstance(num_workers, tuple | list):
            pair = ", or a pair of the least and the most such as (2, 4)"
            number = arguments.integer(
                "num_workers", num_workers, least=1, most=highest, or_none=pair, error=LaunchError
            )
            return cls(number, number)
        if len(num_workers) != 2:
            arguments.refuse("num_workers", num_workers, "a number, or a pair such as (2, 4)", LaunchError)
        least, most = num_workers
        least = arguments.integer("the least of num_workers", least, least=1, most=highest, error=LaunchError)
        most = arguments.integer("the most of num_workers", most, least=least, most=highest, error=LaunchError)
        return cls(least, most)

    @property
    def is_elastic(self) -> bool:
        """Whether it depends on the places that there are."""
        return self.least < self.most

    def fit(self, num_places: int) -> int:
        """Return how many start where there are so many places.

        >>> [WorkerCount(2, 4).fit(num_places) for num_places in (1, 3, 9)]
        [2, 3, 4]
        """
        return max(self.least, min(self.most, num_places))

    def __str__(self) -> str:
        return f"{self.least} to {self.most}" if self.is_elastic else str(self.least)
