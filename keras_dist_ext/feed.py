"""Hand the data of an epoch to the compiled loop, some steps at a time.

Keras' ``fit``, ``evaluate`` and ``predict`` ask an epoch iterator for ``(first step, last step, iterator)`` and give
the iterator to the step function. ``Feed`` gives them an ``Execution`` instead: a source of batches, and how many steps
to make of it. Nothing is pulled ahead of time: data begins once an epoch, and each element is used once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_dist_ext import _keras
from keras_dist_ext._keras import tree
from keras_dist_ext.errors import DataError

__all__ = ["Execution", "Feed", "Pace"]


class Pace:
    """How many steps one execution makes: fixed, or as many as fit into a share of a second.

    Args:
        fixed: a number of steps, or None to follow the clock.
        seconds: the length of an execution to aim at. Callbacks, the progress bar and requests to stop wait at most
            about twice as long.
    """

    def __init__(self, fixed: int | None = None, *, seconds: float = 0.12) -> None:
        self._fixed = fixed
        self._seconds = seconds
        self._num_steps = fixed or 1
        self._is_warm = False

    @property
    def num_steps(self) -> int:
        """Steps of the next execution."""
        return self._num_steps

    @property
    def follows_clock(self) -> bool:
        """Whether the number of steps is tuned."""
        return self._fixed is None

    def record(self, num_steps: int, seconds: float) -> None:
        """Take note of how long an execution took; the first one was compiled and does not count."""
        if not self.follows_clock or num_steps == 0:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        fitting = int(self._seconds * num_steps / max(seconds, 1e-6))
        self._num_steps = max(1, min(fitting, 8 * self._num_steps))


class Source:
    """Batches of one pass over a dataset, one ahead where the end cannot be foreseen."""

    def __init__(self, dataset: Any, *, length_is_known: bool) -> None:
        self.iterator = iter(dataset)
        self.is_distributed = isinstance(dataset, tf.distribute.DistributedDataset) or not isinstance(
            dataset, tf.data.Dataset
        )
        self.length_is_known = length_is_known
        self._ahead: Any = None
        if not length_is_known:
            self._look_ahead()

    @property
    def has_more(self) -> bool:
        """Whether another batch is there; True where the length is known and the caller counts."""
        if self.length_is_known:
            return True
        return self._ahead is not None if self.is_distributed else bool(self._ahead.has_value())

    def run(self, program: Any, num_steps: int) -> tuple[int, Any]:
        """Run up to ``num_steps`` steps; return how many were made, and the logs."""
        steps = tf.constant(num_steps)
        if self.is_distributed and not isinstance(program.strategy, tf.distribute.TPUStrategy):
            made, logs = 0, None
            while made < num_steps and self.has_more:
                logs = program.on_batch(self.next_batch())
                made += 1
            return made, logs
        if self.length_is_known:
            return num_steps, program.on_iterator(self.iterator, steps)
        made, self._ahead, logs = program.on_optional(self._ahead, self.iterator, steps)
        return int(made), logs

    def next_batch(self) -> Any:
        """Return the next batch."""
        if self.length_is_known:
            return next(self.iterator)
        batch = self._ahead if self.is_distributed else self._ahead.get_value()
        self._look_ahead()
        return batch

    def _look_ahead(self) -> None:
        if self.is_distributed:
            self._ahead = next(self.iterator, None)
        else:
            self._ahead = self.iterator.get_next_as_optional()


class Execution:
    """Some steps of a source, to be run once."""

    def __init__(self, source: Source, num_steps: int) -> None:
        self.source = source
        self.num_steps = num_steps
        self.num_made = 0
        self.seconds = 0.0
        self._is_taken = False

    def run(self, program: Any) -> Any:
        """Run the steps and return their logs."""
        begin = time.perf_counter()
        self.num_made, logs = self.source.run(program, self.num_steps)
        for leaf in tree.flatten(logs)[:1]:
            if hasattr(leaf, "numpy"):
                leaf.numpy()  # wait for the device
        self.seconds = time.perf_counter() - begin
        return logs

    def batches(self) -> Iterator[Any]:
        """Yield the batches one by one."""
        begin = time.perf_counter()
        while self.num_made < self.num_steps and self.source.has_more:
            self.num_made += 1
            yield self.source.next_batch()
        self.seconds = time.perf_counter() - begin

    def __next__(self) -> Execution:
        """Give itself once: Keras' ``predict`` collects what an iterator yields before it calls the step function."""
        if self._is_taken:
            raise StopIteration
        self._is_taken = True
        return self


class Feed(_keras.EpochIterator):  # type: ignore[misc]
    """Keras' epoch iterator over a dataset that is read as it is: replicas cut their rows in the step.

    Args:
        strategy: decides whether the dataset must be handed to devices by TensorFlow (TPU).
        pace: how many steps an execution makes.
        on_epoch_end: called when an epoch has no more steps.
        arguments: those of Keras' ``EpochIterator``.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        pace: Pace,
        prepare: Callable[[Any], Any] | None = None,
        on_epoch_end: Callable[[], None] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        dataset = self.data_adapter.get_tf_dataset()
        if prepare is not None:
            dataset = prepare(dataset)
        if isinstance(strategy, tf.distribute.TPUStrategy) and isinstance(dataset, tf.data.Dataset):
            dataset = strategy.experimental_distribute_dataset(dataset)
        self._dataset = dataset
        self._pace = pace
        self._on_epoch_end = on_epoch_end or (lambda: None)
        self._source: Source | None = None

    @property
    def batch_spec(self) -> Any:
        """Specs of a batch: shapes with an unknown number of rows."""

        def spec_of(spec: Any) -> Any:
            if hasattr(spec, "_value_specs"):  # PerReplicaSpec
                spec = spec._value_specs[0]
            return None if isinstance(spec, tf.OptionalSpec) else spec

        specs = tree.map_structure(spec_of, self._dataset.element_spec)
        return tree.map_structure(any_number_of_rows, specs)

    def reset(self) -> None:
        """Forget the pass that is under way."""
        super().reset()
        self._source = None

    def _enumerate_iterator(self) -> Iterator[tuple[int, int, Execution]]:
        self.data_adapter.on_epoch_begin()
        length = self._num_batches
        if self._source is None or self.steps_per_epoch is None:
            self._begin_pass()
        step = 0
        target = self.steps_per_epoch or length
        while target is None or step < target:
            source = self._source
            assert source is not None
            num_steps = self._pace.num_steps if target is None else min(self._pace.num_steps, target - step)
            if length is not None:
                num_steps = min(num_steps, length - self._steps_seen)
            if num_steps == 0 or not source.has_more:
                if step == 0 and self._steps_seen == 0:
                    raise DataError("The dataset has no batch: there is nothing to compute.")
                if self.steps_per_epoch:
                    self._interrupted_warning()
                    self._source = None
                break
            execution = Execution(source, num_steps)
            yield step, step + num_steps - 1, execution
            self._pace.record(execution.num_made, execution.seconds)
            step += execution.num_made
            self._steps_seen += execution.num_made
        if length is not None and self._steps_seen >= length:
            self._source = None
        self._on_epoch_end()
        self.data_adapter.on_epoch_end()

    def _begin_pass(self) -> None:
        self._source = Source(self._dataset, length_is_known=self._num_batches is not None)
        self._steps_seen = 0

    def __next__(self) -> tuple[int, int, Execution]:
        return next(self._epoch_iterator)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Let everything through: a pass ends where ``Feed`` says so."""
        yield


def any_number_of_rows(spec: Any) -> Any:
    """Return a dense ``TensorSpec`` like ``spec`` with an unknown first dimension."""
    if spec is None:
        return None
    shape = tf.TensorShape(spec.shape)
    if shape.rank is not None and shape.rank > 0:
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    return tf.TensorSpec(shape, tf.as_dtype(spec.dtype))
