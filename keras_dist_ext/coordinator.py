"""Hand steps to the workers of a ParameterServerStrategy, and pool what they return.

    coordinator = Coordinator(model)                 # the model is compiled and built in the strategy's scope
    while coordinator.train(batches, 8):             # hands out eight steps and does not wait for them
        logs = coordinator.logs()                    # of the steps that are finished by now
    logs = coordinator.join()                        # every step is done: exact, and written to the model's metrics
    while coordinator.test(batches, 8): ...
    for outputs in coordinator.predict(batches): ... # in order, while the workers compute ahead

The chief reads the data, whatever it comes from, and gives each batch to the next free worker. So each element is used
exactly once a pass, uneven and partial batches need no care, and a slow worker simply gets fewer. The price is that all
data flows through the chief: where that is the bottleneck, `worker_data` lets each worker read its own share.

What is exact, and what cannot be:

- A step runs on one worker, on one batch: loss, masks, weights and gradient are those of one device *for that batch at
  the weights that the worker read*. Others change the weights meanwhile, so training is asynchronous: it converges, but
  no two runs are equal. With one worker it is exact.
- Metrics start from zero in each step, travel back with its result and are added up here, in float64. The metric
  variables of Keras would lose updates (`total = total + x` by two workers at once). So evaluate and predict are exact,
  also when a worker dies and another one repeats its step; and `optimizer.iterations` counts every step, since it is
  added to on the parameter server.
- A training step is done at least once: TensorFlow repeats it if its worker died, perhaps after the gradient arrived.
- Layers that assign state in `call` (BatchNormalization, seeds) and averages of weights (`use_ema`) write to the
  parameter server; of two writers at once the last one wins. Two workers may draw the same dropout mask.
- A checkpoint saved while steps are under way holds variables of different steps. `join()` first.

Datasets and tensors must be made after the strategy: connecting to the cluster renames the chief's devices, and
TensorFlow says of older ones "/job:localhost/... unknown device".
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import StatelessScope, keras, per_worker_values
from keras_dist_ext.data import without_optionals
from keras_dist_ext.errors import ClusterError, DataError, StrategyError

__all__ = ["Coordinator", "check_asynchronous"]


class Coordinator:
    """The chief's side of training, evaluation and prediction of one model.

    Between `join()` and the next step the metric variables of the model are the truth, so they may be read and reset
    then; while steps are under way they stand still, and `logs()` knows better.

    Args:
        model: compiled and built in the scope of a ParameterServerStrategy.
        ahead: how many calls of a worker may be handed out before it has finished its first one. Two keep a worker
            busy; more even out workers of different speed. Batches wait in the chief's memory.
        timeout_seconds: how long to wait while no worker finishes anything. The first step includes its compilation.

    Raises:
        StrategyError: the model or its strategy asks for something that asynchronous training cannot do.
    """

    def __init__(self, model: Any, *, ahead: int = 3, timeout_seconds: float = 600.0) -> None:
        self.strategy: tf.distribute.ParameterServerStrategy = model.distribute_strategy
        check_asynchronous(model)
        self.model = model
        devices = tf.config.list_logical_devices("CPU")
        self.num_workers: int = sum("/job:worker/" in d.name and d.name.endswith("CPU:0") for d in devices)
        self._limit = max(1, ahead) * self.num_workers
        self._calls = _Calls(self.strategy, timeout_seconds, on_failure=self._forget)
        self._made: dict[str, _WorkerSteps] = {}
        self._kind = ""  # what is under way: train, test, predict or nothing
        self._pool: _Pool | None = None

    def train(self, data: Iterator[Any] | WorkerData, num_steps: int = 1) -> int:
        """Hand out up to `num_steps` training steps, evenly over the workers, and return how many it handed out.

        Fewer, or 0, says that the batches came to their end. Workers that read for themselves may come to theirs before
        they have made all steps that were handed out: `WorkerData.num_steps` counts those made.

        Args:
            data: batches as Keras' `train_step` takes them, `x`, `(x, y)` or `(x, y, sample_weight)`; or what
                `worker_data` returned.
            num_steps: neighbouring batches of equal shapes travel to a worker as one call, up to its share of these.

        Raises:
            ClusterError: the parameter server is lost, or no worker has finished anything for `timeout_seconds`.
            DataError: a DistributedIterator was given.
            StrategyError: the model is not built, or its metrics do not add up.
            tf.errors.OpError: a step failed; those that were under way are cancelled.
        """
        return self._hand_out("train", data, num_steps)

    def test(self, data: Iterator[Any] | WorkerData, num_steps: int = 1) -> int:
        """Hand out up to `num_steps` evaluation steps; see `train`.

        Raises:
            ClusterError: see `train`.
        """
        return self._hand_out("test", data, num_steps)

    def predict(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield what `predict_step` returns for each batch, in order; workers compute ahead of the reader.

        Raises:
            ClusterError: see `train`.
        """
        self._begin("predict")
        function = self._steps("predict").predict
        outputs: dict[int, Any] = {}
        todo = enumerate(batches)
        ahead: deque[int] = deque()
        while True:
            for i, batch in itertools.islice(todo, self._limit - len(ahead)):
                self._calls.schedule(partial(outputs.__setitem__, i), function, (_as_tensors(batch),))
                ahead.append(i)
            if not ahead:
                return
            while ahead[0] not in outputs:
                self._calls.take_next()
            yield outputs.pop(ahead.popleft())

    def join(self) -> dict[str, Any]:
        """Wait until every step is done, write the pooled metrics to the model's variables, and return the logs.

        Raises:
            ClusterError: see `train`.
        """
        self._gather(at_most=0)
        self._kind = ""
        pool, self._pool = self._pool, None
        if pool is None:
            return {}
        with _lost_servers_named():
            for variable, value in zip(pool.variables, pool.values(), strict=True):
                variable.assign(value)
        return pool.logs(self.model)

    def logs(self) -> dict[str, Any]:
        """Compute the logs of the steps that are finished by now; wait for the first one.

        Raises:
            ClusterError: see `train`.
        """
        if self._pool is None:
            return {}
        self._gather(at_most=self._limit)
        while self._pool.is_empty and self._calls.num_out:
            self._gather(at_most=self._calls.num_out - 1)
        return self._pool.logs(self.model)

    def worker_data(self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> WorkerData:
        """Begin a pass over data that each worker reads for itself.

        Args:
            dataset_fn: called once for each worker, on the chief; it must return that worker's share of the batches, as
                `dataset.shard(context.num_input_pipelines, context.input_pipeline_id)` does. A worker that died and
                came back begins its share again.
        """
        return WorkerData(self, dataset_fn)

    def close(self) -> None:
        """Wait for what is under way, and end the threads of this object."""
        try:
            self.join()
        finally:
            self._calls.close()

    # The steps

    def _hand_out(self, kind: str, data: Any, num_steps: int) -> int:
        if isinstance(data, tf.distribute.DistributedIterator):
            raise DataError(
                "A DistributedIterator was given. Under ParameterServerStrategy the chief deals out the batches of an "
                "ordinary dataset, one to a worker: give the dataset itself, without experimental_distribute_dataset."
            )
        self._begin(kind)
        steps = self._steps(kind)
        if self._pool is None:
            with _lost_servers_named():
                self._pool = _Pool(self.model.metrics_variables)
        share = math.ceil(num_steps / self.num_workers)
        if isinstance(data, WorkerData):
            return self._hand_out_reading(steps, data, num_steps, share, self._pool)
        batches = [_as_tensors(batch) for batch in itertools.islice(data, num_steps)]
        for bundle in _bundles(batches, share):
            function, args = steps.many(bundle) if len(bundle) > 1 else (steps.one, tuple(bundle))
            self._gather(at_most=self._limit - 1)
            self._calls.schedule(self._pool.add, function, args)
        return len(batches)

    def _hand_out_reading(self, steps: _WorkerSteps, data: WorkerData, num_steps: int, share: int, pool: _Pool) -> int:
        for num_made in range(0, num_steps, share):
            if not data.has_more:
                return num_made
            args = (data.iterators, data.workers, tf.constant(min(share, num_steps - num_made)))
            self._gather(at_most=self._limit - 1)
            self._calls.schedule(partial(data.add, pool), steps.reading, args)
        return num_steps

    def _begin(self, kind: str) -> None:
        if self._kind not in ("", kind) or kind == "predict":
            self.join()
        self._kind = kind

    def _forget(self) -> None:
        """Begin anew after a failure: what was pooled lacks the steps that were cancelled."""
        self._kind, self._pool = "", None

    def _gather(self, at_most: int) -> None:
        """Pool what has come back; wait until at most so many calls are out."""
        while self._calls.num_out > at_most or self._calls.has_result:
            self._calls.take_next()

    def _steps(self, kind: str) -> _WorkerSteps:
        if kind not in self._made:
            self._made[kind] = _WorkerSteps(self.model, kind)
        return self._made[kind]


class _WorkerSteps:
    """What a worker runs for one kind of step: from batches to metrics that began at zero, and the rest of the logs.

    Args:
        model: built, with its strategy.
        kind: "train", "test" or "predict".
    """

    def __init__(self, model: Any, kind: str) -> None:
        _check_built(model, kind)
        if kind == "train":
            _check_optimizer(model.optimizer)
        optimizer = model.optimizer if kind == "train" else None
        self._model = model
        self._step = getattr(model, f"{kind}_step")
        self._strategy: tf.distribute.Strategy = model.distribute_strategy
        self._metrics = list(model.metrics_variables)
        self._counters = [] if optimizer is None else [optimizer.iterations]
        self._shared = {id(v): v.value for v in (*model.variables, *(optimizer.variables if optimizer else ()))}
        self._many: dict[Any, Any] = {}
        self.one = _compiled(lambda batch: self._run(batch, self._zeros()))
        self.reading = _compiled(self._read)
        self.predict = _compiled(lambda batch: self._strategy.run(self._step, args=(batch,)))

    def many(self, batches: Sequence[Any]) -> tuple[Any, tuple[tf.Tensor, ...]]:
        """Return the function that makes a step of each batch, and what to call it with; all have equal shapes."""
        present = [leaf is not None for leaf in tf.nest.flatten(batches[0])]
        stacks = [tf.stack(leaves) for leaves in zip(*map(_leaves, batches), strict=True)]
        # An unknown length, so that one trace serves stacks of any: the last one is often shorter.
        signature = tuple(tf.TensorSpec([None, *stack.shape[1:]], stack.dtype) for stack in stacks)
        if signature not in self._many:

            def run(*stacks: tf.Tensor) -> Any:
                def batch(i: Any) -> Any:
                    rows = iter([stack[i] for stack in stacks])
                    return tf.nest.pack_sequence_as(batches[0], [next(rows) if here else None for here in present])

                return self._run_many(batch, tf.shape(stacks[0])[0])

            self._many[signature] = tf.function(run, input_signature=signature, autograph=False)
        return self._many[signature], tuple(stacks)

    def _run(self, batch: Any, state: Sequence[tf.Tensor]) -> Any:
        return self._strategy.run(self._replica, args=(batch, state))

    def _run_many(self, batch: Callable[[Any], Any], num_steps: tf.Tensor) -> Any:
        def body(i: tf.Tensor, state: Any, _: Any) -> Any:
            return (i + 1, *self._run(batch(i), state))

        # The first step stands before the loop because only it tells what else is in the logs.
        first = (tf.constant(1), *self._run(batch(0), self._zeros()))
        return tf.while_loop(lambda i, *_: i < num_steps, body, first, parallel_iterations=1)[1:]

    def _read(self, iterator: Any, worker: tf.Tensor, num_steps: tf.Tensor) -> Any:
        def body(i: tf.Tensor, _: Any, state: Any) -> Any:
            batch = iterator.get_next_as_optional()
            has_value = batch.has_value()
            state = tf.cond(has_value, lambda: self._run(batch.get_value(), state)[0], lambda: state)
            return i + tf.cast(has_value, tf.int32), has_value, state

        first = (tf.constant(0), tf.constant(True), self._zeros())
        num_made, has_more, state = tf.while_loop(
            lambda i, has_more, _: tf.logical_and(i < num_steps, has_more), body, first, parallel_iterations=1
        )
        return worker, num_made, has_more, state

    def _zeros(self) -> list[tf.Tensor]:
        return [tf.zeros(variable.shape, variable.dtype) for variable in self._metrics]

    def _replica(self, batch: Any, state: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], dict[str, Any]]:
        """Make one step; its metrics go on from `state`, and its counters reach the parameter server as sums.

        Keras counts `iterations` as `iterations.assign(iterations + 1)`, which loses steps when workers do it at once.
        """
        counts = [tf.identity(self._shared[id(counter)]) for counter in self._counters]
        private = zip([*self._metrics, *self._counters], [*state, *counts], strict=True)
        with _StepScope(self._shared, private) as scope:
            logs = self._step(without_optionals(batch))
            names = self._model.get_metrics_result().keys()
        for counter, count in zip(self._counters, counts, strict=True):
            self._shared[id(counter)].assign_add(scope.get_current_value(counter) - count)
        extra = {name: tf.convert_to_tensor(value) for name, value in logs.items() if name not in names}
        return [scope.get_current_value(variable) for variable in self._metrics], extra


def _compiled(function: Callable[..., Any]) -> Any:
    return tf.function(function, autograph=False, reduce_retracing=True)


def _leaves(batch: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


class WorkerData:
    """One pass over data that each worker reads for itself; `Coordinator.worker_data` makes it.

    The logs of such steps are the results of metrics; anything else that a custom `train_step` returns is left out.

    Attributes:
        num_steps: steps made, as far as the chief has heard.
    """

    def __init__(
        self, coordinator: Coordinator, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset]
    ) -> None:
        self.num_steps = 0
        self._num_workers = coordinator.num_workers
        self._exhausted: set[int] = set()
        indices = range(coordinator.num_workers)
        contexts = [tf.distribute.InputContext(coordinator.num_workers, index) for index in indices]
        self.iterators = per_worker_values(coordinator.strategy, [dataset_fn(context) for context in contexts])
        self.workers = per_worker_values(coordinator.strategy, indices)

    @property
    def has_more(self) -> bool:
        """Whether some worker may have a batch left, as far as the chief has heard."""
        return len(self._exhausted) < self._num_workers

    def add(self, pool: _Pool, result: tuple[tf.Tensor, tf.Tensor, tf.Tensor, Any]) -> None:
        """Take note of what one call made of its worker's share."""
        worker, num_made, has_more, state = result
        self.num_steps += int(num_made)
        if int(num_made):
            pool.add((state, {}))
        if not bool(has_more):
            self._exhausted.add(int(worker))
        if not int(num_made):
            time.sleep(0.003)  # a worker at its end takes calls faster than one that still works


class _StepScope(StatelessScope):  # type: ignore[misc]
    """Keep some variables of a step to itself, and let all others be what they are.

    Keras' scope has a value for every variable; here those of shared ones are the ``tf.Variable`` objects, so that the
    optimizer updates them in place, gradients find them, and assignments reach the parameter server.
    """

    def __init__(self, shared: dict[int, Any], private: Iterable[tuple[Any, tf.Tensor]]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        own = {id(variable): value for variable, value in private}
        self.state_mapping = {**shared, **own}
        self._private = frozenset(own)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keep a private variable's new value; write a shared one's."""
        variable, value = update
        if id(variable) in self._private:
            self.state_mapping[id(variable)] = value
        else:
            target = self.state_mapping.get(id(variable), variable.value)
            target.assign(tf.cast(value, target.dtype))


def _as_tensors(batch: Any) -> Any:
    batch = without_optionals(batch)
    return tf.nest.map_structure(lambda v: v if v is None or tf.is_tensor(v) else tf.convert_to_tensor(v), batch)


def _bundles(batches: Sequence[Any], at_most: int) -> Iterator[list[Any]]:
    """Group neighbours of equal shapes, which can be stacked."""
    for _, group in itertools.groupby(batches, key=_signature):
        while bundle := list(itertools.islice(group, at_most)):
            yield bundle


def _signature(batch: Any) -> Any:
    leaves = _leaves(batch)
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        return object()  # ragged and sparse tensors stack to something else: never equal to a neighbour
    return [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]


class _Pool:
    """The metrics of all finished steps.

    Args:
        variables: the model's metric variables; their values are where the pool begins.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self.is_empty = True
        self._totals = [_wide(variable.numpy()) for variable in variables]
        self._extra: dict[str, Any] = {}

    def add(self, result: tuple[Sequence[tf.Tensor], dict[str, Any]]) -> None:
        """Add what one call returned."""
        state, extra = result
        self.is_empty = False
        for total, part in zip(self._totals, state, strict=True):
            total += _wide(part.numpy())
        self._extra = extra

    def values(self) -> list[np.ndarray[Any, Any]]:
        """Return the metric variables' values, in their dtypes."""
        dtypes = [tf.as_dtype(variable.dtype).as_numpy_dtype for variable in self.variables]
        return [total.astype(dtype) for total, dtype in zip(self._totals, dtypes, strict=True)]

    def logs(self, model: Any) -> dict[str, Any]:
        """Compute the metrics' results here, without a word to the parameter server."""
        with keras.StatelessScope(state_mapping=list(zip(self.variables, self.values(), strict=True))):
            return {**self._extra, **model.get_metrics_result()}


def _wide(value: Any) -> np.ndarray[Any, Any]:
    narrow: np.ndarray[Any, Any] = np.asarray(value)
    return narrow.astype(np.int64 if narrow.dtype.kind in "biu" else np.float64)


@dataclass(frozen=True)
class _Call:
    on_result: Callable[..., None]
    remote: Any
    generation: int  # calls of an older one were cancelled


class _Calls:
    """Calls that workers have not finished yet, and what finished ones returned, first come, first served.

    TensorFlow's RemoteValue can only be waited for one at a time, so daemon threads do. They report values alone: a
    failed copy may mean that the worker died and TensorFlow is about to repeat the call; what really failed is raised
    by the coordinator's own `schedule` and `done`.
    """

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        timeout_seconds: float,
        on_failure: Callable[[], None],
    ) -> None:
        self.num_out = 0
        self._on_failure = on_failure
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._timeout_seconds = timeout_seconds
        self._generation = 0
        self._waited_for: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[_Call, Any]] = queue.SimpleQueue()
        self._num_threads = 0

    @property
    def has_result(self) -> bool:
        """Whether `take_next` would not wait."""
        return bool(self._finished.qsize() > 0)

    def schedule(self, on_result: Callable[..., None], function: Any, args: tuple[Any, ...]) -> None:
        """Let the next free worker run `function(*args)`, and `take_next` call `on_result` with what it returns."""
        try:
            remote = self._coordinator.schedule(function, args=args)
        except Exception as error:
            self._fail(error)
        self.num_out += 1
        if self._num_threads < self.num_out:
            self._num_threads += 1
            threading.Thread(target=self._wait_for_calls, daemon=True, name="kde-ps-results").start()
        self._waited_for.put(_Call(on_result, remote, self._generation))

    def take_next(self) -> None:
        """Wait for the next call that finishes, and take its result; return at once for a cancelled one."""
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                call, value = self._finished.get(timeout=0.2)
            except queue.Empty:
                try:
                    self._coordinator.done()
                except Exception as error:
                    self._fail(error)
                if time.monotonic() > deadline:
                    self._fail(
                        ClusterError(
                            f"No worker has finished a step for {self._timeout_seconds:g} s; {self.num_out} calls wait "
                            "for one. See whether the processes of the cluster still run, and start the whole job "
                            "again from its last checkpoint; or give Coordinator a longer timeout_seconds."
                        )
                    )
                continue
            if call.generation == self._generation:
                self.num_out -= 1
                call.on_result(value)
            return

    def close(self) -> None:
        """End the threads."""
        self._generation += 1
        for _ in range(self._num_threads):
            self._waited_for.put(None)
        self._num_threads = 0

    def _wait_for_calls(self) -> None:
        while (call := self._waited_for.get()) is not None:
            while call.generation == self._generation:
                try:
                    self._finished.put((call, call.remote.get()))
                    break
                except Exception:
                    time.sleep(0.1)
            del call

    def _fail(self, error: Exception) -> NoReturn:
        """Forget all calls (TensorFlow has cancelled them), and raise what went wrong."""
        self._generation += 1
        self.num_out = 0
        self._on_failure()
        with _lost_servers_named():
            raise error


@contextlib.contextmanager
def _lost_servers_named() -> Iterator[None]:
    """Say what it means that a parameter server does not answer."""
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        if "/job:ps" not in str(error):
            raise
        raise ClusterError(
            "A parameter server is lost, and with it the variables that it held. Start the whole job again from its "
            f"last checkpoint. TensorFlow says: {error}"
        ) from error


def check_asynchronous(model: Any) -> None:
    """Refuse what a model asks for and asynchronous training cannot give.

    Raises:
        StrategyError: names the feature, why it cannot be, and what to do.
    """
    strategy = model.distribute_strategy
    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise StrategyError(
            f"The model's strategy is {type(strategy).__name__}; only models made in the scope of a "
            "ParameterServerStrategy are trained through a coordinator."
        )
    if strategy.num_replicas_in_sync > 1:
        raise StrategyError(
            f"Each worker has {strategy.num_replicas_in_sync} GPUs, and a step of ParameterServerStrategy uses one. "
            "Start a worker for each GPU, with CUDA_VISIBLE_DEVICES, or take MultiWorkerMirroredStrategy."
        )
    if model.run_eagerly:
        raise StrategyError(
            "run_eagerly=True, but workers of ParameterServerStrategy run compiled functions only. Compile the model "
            "without it, and debug on one device."
        )
    if model.jit_compile:
        warnings.warn(
            "jit_compile=True has no effect under ParameterServerStrategy: XLA cannot compile a step whose variables "
            "are on other machines. Steps run uncompiled.",
            stacklevel=3,
        )


def _check_optimizer(optimizer: Any) -> None:
    """Refuse what counts steps or keeps sums of them: workers make theirs at the same time."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise StrategyError(
            "LossScaleOptimizer (mixed_float16) adapts one loss scale step by step, but the workers of "
            "ParameterServerStrategy make their steps at the same time. Use mixed_bfloat16 or float32."
        )
    for name in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        if getattr(optimizer, name, None):
            raise StrategyError(
                f"{name}={getattr(optimizer, name)} counts the optimizer's steps, but the workers of "
                "ParameterServerStrategy make theirs at the same time, on the same accumulators. Leave it out"
                + (" and use larger batches." if name.startswith("gradient") else "; use_ema alone works.")
            )


def _check_built(model: Any, kind: str) -> None:
    """Refuse to trace a step that would have to make variables, or whose metrics do not add up."""
    parts = {f"the model {model.name!r}": model, "its optimizer": model.optimizer if kind == "train" else None}
    parts |= {f"its metric {metric.name!r}": metric for metric in model.metrics if kind != "predict"}
    unbuilt = [name for name, part in parts.items() if not getattr(part, "built", True)]
    if unbuilt:
        raise StrategyError(
            f"Not built: {', '.join(unbuilt)}. Workers cannot make variables, so all must be there before the first "
            "step. Build them in the strategy's scope, as fit of keras_dist_ext.Model does from the data."
        )
    for variable in model.metrics_variables:
        if variable.aggregation != "sum":
            raise StrategyError(
                f"The metric variable {variable.path!r} has aggregation={variable.aggregation!r}. Each step of a "
                "worker begins with zeros and the chief adds the results up, which is right for aggregation='sum' "
                "only. Write the metric so that its state adds up."
            )
