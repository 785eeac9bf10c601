"""Let each worker of a ParameterServerStrategy read its own share of the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext._keras.cluster import per_worker_values
from keras_dist_ext.training.parameter_server.pool import Pool

__all__ = ["WorkerData"]


class WorkerData:
    """One pass over data that each worker reads for itself; `Coordinator.worker_data` makes it.

    The logs of such steps are the results of metrics; anything else that a custom `train_step` returns is left out.

    Args:
        strategy: whose workers read.
        num_workers: how many there are.
        dataset_fn: see `Coordinator.worker_data`.

    Attributes:
        iterators: one on each worker, and
        workers: the worker's number there: the first two arguments of `WorkerSteps.reading`.
        num_steps: steps made, as far as the chief has heard.
    """

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        num_workers: int,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    ) -> None:
        self.num_steps = 0
        self._num_workers = num_workers
        self._exhausted: set[int] = set()
        contexts = [tf.distribute.InputContext(num_workers, index) for index in range(num_workers)]
        self.iterators = per_worker_values(strategy, [dataset_fn(context) for context in contexts])
        self.workers = per_worker_values(strategy, range(num_workers))

    @property
    def has_more(self) -> bool:
        """Whether some worker may have a batch left, as far as the chief has heard."""
        return len(self._exhausted) < self._num_workers

    def add(self, pool: Pool, result: tuple[tf.Tensor, tf.Tensor, tf.Tensor, Sequence[tf.Tensor]]) -> None:
        """Take note of what one call of `WorkerSteps.reading` made of its worker's share, and pool its metrics."""
        worker, num_made, has_more, state = result
        self.num_steps += int(num_made)
        if int(num_made):
            pool.add((state, {}))
        if not bool(has_more):
            self._exhausted.add(int(worker))
        if not int(num_made):
            time.sleep(0.003)  # a worker at its end takes calls faster than one that still works
