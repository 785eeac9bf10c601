"""Make up for the passes that evaluation has made over its data before training begins to read its own.

The two may share a shuffle: they are the same dataset, or parts of one, by ``take`` and ``skip``. Each iterator over
either then moves the order of the other's next pass on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from keras_dist_ext._keras.adapters import TFDatasetAdapter
from keras_dist_ext.step.seeds import Seeds
from keras_dist_ext.training.data_order import DataOrder
from keras_dist_ext.training.resume.position import Position, replay_passes

__all__ = ["TestsBefore", "Validation"]


class Validation(NamedTuple):
    """What ``fit`` was given to evaluate on."""

    data: object = None
    steps: int | None = None


class TestsBefore:
    """The passes that evaluation had made over its data in an earlier process.

    Args:
        validation: what the present ``fit`` was given.
        position: where the earlier process was.
        strategy: of the model.
        seeds: of the model.
    """

    def __init__(
        self, validation: Validation, position: Position, strategy: tf.distribute.Strategy, seeds: Seeds
    ) -> None:
        self._position = position
        self._makes_unread = False
        self._dataset: tf.data.Dataset | None = None
        data, order = validation.data, seeds.order_of_evaluation()
        if isinstance(data, tf.data.Dataset):
            length = int(data.cardinality())
            self._makes_unread = 0 <= length <= (validation.steps or length)  # each evaluation begins a pass
            ordered = None
            if order is not None:
                orders = DataOrder(
                    TFDatasetAdapter(data),
                    data,
                    strategy,
                    seeds,
                    has_own_rows=False,
                    workers=None,  # only arrays are shuffled otherwise there
                )
                ordered = orders.of_pipeline(order)
            if ordered is None or ordered is data:  # otherwise it shares nothing: it is another dataset
                self._dataset = data

    @property
    def are_replayed(self) -> bool:
        """Whether `replaying` has made up for them."""
        return self._dataset is not None

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Make up for those before, and for those after the iterator of training was made, which is made inside."""
        before = self._position.num_tests_before
        self._replay(before)
        yield
        self._replay(self._position.num_tests - before)

    def _replay(self, num_passes: int) -> None:
        if self._dataset is not None and num_passes:
            replay_passes(num_passes, self._makes_unread * num_passes, self._dataset, None)
