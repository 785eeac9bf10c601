"""Hand the data of an epoch to the compiled loop, some steps at a time.

Keras' ``fit``, ``evaluate`` and ``predict`` ask an epoch iterator for ``(first step, last step, iterator)`` and give
the iterator to the step function. ``Feed`` gives them an ``Execution`` instead: a source of batches, and how many steps
to make of it. Nothing is pulled ahead of time: data begins once an epoch, and each element is used once.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_dist_ext import _keras
from keras_dist_ext._keras import tree
from keras_dist_ext.errors import DataError
from keras_dist_ext.seeds import fold_in
from keras_dist_ext.workers import Workers

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
    """Batches of one pass over a dataset, one ahead where the end cannot be foreseen.

    Args:
        dataset: a ``tf.data.Dataset``, or one that TensorFlow has distributed.
        length: its number of batches, or None.
        workers: given where each worker reads rows of its own; they take part in a step until all have none left.
    """

    def __init__(
        self, dataset: Any, length: int | None, workers: Workers | None = None, *, on_tpu: bool = False
    ) -> None:
        self.iterator = iter(dataset)
        self._is_plain = isinstance(dataset, tf.data.Dataset)
        self._is_on_tpu = on_tpu
        # What TensorFlow has distributed does not know its length for sure; on a TPU it must, to loop there.
        self._looks_ahead = length is None or workers is not None or not (self._is_plain or on_tpu)
        self._workers = workers
        self._spec = dataset.element_spec
        if workers is not None:
            self._spec = tree.map_structure(_any_rows, self._spec)
        self._ahead: Any = None
        self._has_more = True
        self._waited_seconds = 0.0  # for a batch of this worker's, since that was asked for
        if self._looks_ahead:
            self._look_ahead()

    @property
    def length_is_known(self) -> bool:
        """Whether the caller counts the batches."""
        return not self._looks_ahead

    @property
    def is_of_worker(self) -> bool:
        """Whether the rows are this worker's own."""
        return self._workers is not None

    @property
    def has_more(self) -> bool:
        """Whether another batch is there; True where the length is known and the caller counts."""
        return self._has_more

    def run(self, program: Any, num_steps: int) -> tuple[int, Any]:
        """Run up to ``num_steps`` steps; return how many were made, and the logs."""
        if hasattr(program, "run_source"):
            return program.run_source(self._batches(), num_steps)  # type: ignore[no-any-return]
        if self._workers is not None or not (self._is_plain or self._is_on_tpu):
            made, logs = 0, None
            run = program.on_batches_like(self._spec, of_worker=self.is_of_worker)
            while made < num_steps and self.has_more:
                batch = self.next_batch()
                program.waited_seconds = self._take_waited()
                logs = run(batch)
                made += 1
            return made, logs
        if not self._looks_ahead:
            return num_steps, program.on_iterator(self.iterator, num_steps)
        program.waited_seconds = self._take_waited()
        made, self._ahead, logs = program.on_optional(self._ahead, self.iterator, num_steps)
        self._has_more = bool(self._ahead.has_value())
        return made, logs

    def _take_waited(self) -> float:
        """Return once how long batches have taken that were pulled ahead."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def _batches(self) -> Iterator[Any]:
        while self.has_more:
            try:
                yield self.next_batch()
            except StopIteration:
                return

    def next_batch(self) -> Any:
        """Return the next batch; without rows, where only other workers have some left."""
        if not self._looks_ahead:
            return next(self.iterator)
        if not self._is_plain:
            batch = self._ahead
        elif self._ahead.has_value():
            batch = self._ahead.get_value()
        else:
            batch = tree.map_structure(_no_rows, self._spec)
        self._look_ahead()
        return batch

    def _look_ahead(self) -> None:
        begin = time.perf_counter()
        if self._is_plain:
            self._ahead = self.iterator.get_next_as_optional()
            self._has_more = bool(self._ahead.has_value())
        else:
            self._ahead = next(self.iterator, None)
            self._has_more = self._ahead is not None
        self._waited_seconds += time.perf_counter() - begin  # without what follows: waiting for other workers
        if self._workers is not None:
            self._has_more = self._workers.sum([float(self._has_more)])[0] > 0


def _any_rows(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _no_rows(spec: Any) -> Any:
    if not hasattr(spec, "shape") or isinstance(spec, tf.OptionalSpec):
        return tf.experimental.Optional.empty(None)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_row_splits(tf.zeros([0, *spec.shape[spec.ragged_rank + 1 :]], spec.dtype), [0])
    return tf.zeros([0, *[d or 0 for d in spec.shape[1:]]], spec.dtype)


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


_ORDERED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Feed(_keras.EpochIterator):  # type: ignore[misc]
    """Keras' epoch iterator over a dataset that is read as it is: replicas cut their rows in the step.

    Args:
        strategy: decides whether the dataset must be handed to devices by TensorFlow (TPU).
        pace: how many steps an execution makes.
        workers: the workers that take each step together, if there are several.
        wants_stop: asked before each execution of several workers.
        on_stop: called when a worker has asked to stop; no further execution is made.
        on_epoch_end: called when an epoch has no more steps.
        order_seed: asked for the seed of the data's order when a pass begins; None leaves the order to chance.
        arguments: those of Keras' ``EpochIterator``.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        pace: Pace,
        *,
        workers: Workers | None = None,
        wants_stop: Callable[[], bool] = lambda: False,
        on_stop: Callable[[], None] = lambda: None,
        on_epoch_end: Callable[[], None] = lambda: None,
        order_seed: Callable[[], int | None] = lambda: None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._order = 0
        self._arrays: Any = None
        self._own_rows = False
        dataset = self._given = self.data_adapter.get_tf_dataset()
        if workers is not None:
            dataset, self._own_rows, self._order = workers.agree_on_data(dataset)
        self._strategy = strategy
        self._is_on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        if self._is_on_tpu and isinstance(dataset, tf.data.Dataset):
            dataset = strategy.experimental_distribute_dataset(dataset)
        self._dataset = dataset
        self._pace = pace
        self._workers = workers
        self._wants_stop = wants_stop
        self._on_stop = on_stop
        self._on_epoch_end = on_epoch_end
        self._order_seed = order_seed
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

    @property
    def last_step(self) -> int:
        """The last step that was made, counted from 0 in the epoch."""
        return self._first_step + self._execution.num_made - 1

    def reset(self) -> None:
        """Forget the pass that is under way."""
        super().reset()
        self._source = None

    def _enumerate_iterator(self) -> Iterator[tuple[int, int, Execution]]:
        length = self._num_batches
        begins_pass = self._source is None or self.steps_per_epoch is None
        seed = self._order_seed() if begins_pass else None
        if seed is not None:
            _keras.order_py_datasets_by(seed)
        self.data_adapter.on_epoch_begin()
        if begins_pass:
            self._begin_pass(seed)
        step = 0
        known = self._source is not None and self._source.length_is_known
        target = self.steps_per_epoch or (length if known else None)
        while not target or step < target:  # no batch at all is an error too
            source = self._source
            assert source is not None
            num_steps = self._pace.num_steps if target is None else min(self._pace.num_steps, target - step)
            if length is not None and source.length_is_known:
                num_steps = min(num_steps, length - self._steps_seen)
            if self._workers is not None:
                stop, num_steps = self._agree(num_steps)
                if stop:
                    self._on_stop()
                    break
            if num_steps == 0 or not source.has_more:
                if step == 0 and self._steps_seen == 0:
                    raise DataError("The dataset has no batch: there is nothing to compute.")
                if self.steps_per_epoch:
                    self._interrupted_warning()
                    self._source = None
                break
            execution = self._execution = Execution(source, num_steps)
            self._first_step = step
            yield step, step + num_steps - 1, execution
            self._pace.record(execution.num_made, execution.seconds)
            step += execution.num_made
            self._steps_seen += execution.num_made
        if length is not None and known and self._steps_seen >= length:
            self._source = None
        self._on_epoch_end()
        self.data_adapter.on_epoch_end()

    def _begin_pass(self, seed: int | None) -> None:
        dataset = None
        if isinstance(self.data_adapter, _keras.ArrayDataAdapter):
            if seed is None and self._workers is not None:
                seed = self._order + 1  # of the seed that the workers have agreed on
            if seed is not None and self.data_adapter._shuffle:
                dataset = self._arrays_in_order(seed)
        elif seed is not None:
            dataset = self._ordered(seed)
        workers = self._workers if self._own_rows else None
        dataset = self._dataset if dataset is None else dataset
        self._source = Source(dataset, self._num_batches, workers, on_tpu=self._is_on_tpu)
        self._steps_seen = 0

    def _arrays_in_order(self, seed: int) -> Any:
        self._order = seed
        if self._arrays is None:
            with _keras.arrays_ordered_by(lambda: self._order):
                self._arrays = self.data_adapter.get_tf_dataset()
        return self._arrays

    def _ordered(self, seed: int) -> Any:
        """The dataset with what is random in it drawn by a seed; None where nothing is, or TensorFlow hides it."""
        if self._is_on_tpu or not isinstance(self._given, tf.data.Dataset):
            return None
        graph = _keras.dataset_graph(self._given)
        if graph is None:
            return None
        if _keras.caches_in_memory(graph):  # made once, it keeps what it has cached, and reshuffles by itself
            if self._given not in _ORDERED:
                _ORDERED[self._given] = _keras.with_seeds(self._given, graph, seed)
            return _ORDERED[self._given]
        worker = _keras.first_replica(self._strategy) if self._own_rows else 0
        return _keras.with_seeds(self._given, graph, seed, map_seed=fold_in(seed, "map", worker))

    def _agree(self, num_steps: int) -> tuple[bool, int]:
        assert self._workers is not None
        stop = float(self._wants_stop())
        stops, steps = self._workers.sum([stop, float(num_steps) if self._workers.is_chief else 0.0])
        return stops > 0, int(steps)

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
