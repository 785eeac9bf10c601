"""Wait for the places of processes on a host, a look at a time, so that whoever waits can do other things between."""

import time
from collections.abc import Generator

from keras_dist_ext.cluster.tasks import Task

__all__ = ["Placing", "PlacingSteps"]

# Yields what it still waits for, and returns the tasks.
PlacingSteps = Generator[str, None, list[Task]]


class Placing:
    """The wait for the places of processes that start together.

    Args:
        steps: see `Host.reserve`.
    """

    NOTICE_SECONDS = 10.0  # after which it is said what is waited for

    def __init__(self, steps: PlacingSteps):
        self._steps = steps
        self._said: set[str] = set()
        self._since = time.monotonic()
        self.waits_for = ""  # in words; nothing before the first look

    def tasks(self) -> list[Task] | None:
        """Look once, and return the tasks when each has its place.

        Raises:
            LaunchError: see `Host.reserve`.
            NotPlaced: see `Host.reserve`.
        """
        try:
            waits_for = next(self._steps)
        except StopIteration as end:
            tasks: list[Task] = end.value
            return tasks
        if waits_for != self.waits_for:
            self.waits_for, self._since = waits_for, time.monotonic()
        return None

    def notice(self) -> str:
        """Return what it waits for where that takes long, each once."""
        takes_long = time.monotonic() - self._since > self.NOTICE_SECONDS
        if not takes_long or self.waits_for in self._said:
            return ""
        self._said.add(self.waits_for)
        return self.waits_for
