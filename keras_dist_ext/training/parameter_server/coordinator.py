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

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import tensorflow as tf

from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data.split import without_optionals
from keras_dist_ext.errors import DataError, StrategyError
from keras_dist_ext.messages import warn
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.training.parameter_server.pool import Pool
from keras_dist_ext.training.parameter_server.worker_calls import WorkerCalls, lost_servers_named
from keras_dist_ext.training.parameter_server.worker_data import WorkerData
from keras_dist_ext.training.parameter_server.worker_steps import WorkerSteps

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

    def __init__(self, model: DistributedModel, *, ahead: int = 3, timeout_seconds: float = 600.0) -> None:
        self.strategy: tf.distribute.ParameterServerStrategy = model.distribute_strategy
        check_asynchronous(model)
        self.model = model
        devices = tf.config.list_logical_devices("CPU")
        self.num_workers: int = sum("/job:worker/" in d.name and d.name.endswith("CPU:0") for d in devices)
        self._limit = max(1, ahead) * self.num_workers
        self._calls = WorkerCalls(self.strategy, timeout_seconds, on_failure=self._forget)
        self._made: dict[str, WorkerSteps] = {}
        self._kind = ""  # what is under way: train, test, predict or nothing
        self._pool: Pool | None = None

    def train(self, data: Iterator[StepData] | WorkerData, num_steps: int = 1) -> int:
        """Hand out up to `num_steps` training steps, evenly over the workers, and return how many it handed out.

        Fewer, or 0, says that the batches came to their end. Workers that read for themselves may come to theirs before
        they have made all steps that were handed out: `WorkerData.num_steps` counts those made.

        Args:
            data: an iterator over batches as Keras' `train_step` takes them, `x`, `(x, y)` or `(x, y, sample_weight)`;
                or what `worker_data` returned.
            num_steps: neighbouring batches of equal shapes travel to a worker as one call, up to its share of these.

        Raises:
            ClusterError: the parameter server is lost, or no worker has finished anything for `timeout_seconds`.
            DataError: a DistributedIterator was given, or data that begins anew at every call.
            StrategyError: the model is not built, its metrics do not add up, or its optimizer counts steps.
            tf.errors.OpError: a step failed; those that were under way are cancelled.
        """
        return self._hand_out("train", data, num_steps)

    def test(self, data: Iterator[StepData] | WorkerData, num_steps: int = 1) -> int:
        """Hand out up to `num_steps` evaluation steps; see `train`.

        Raises:
            ClusterError: as `train`.
            DataError: as `train`.
            StrategyError: the model is not built, or its metrics do not add up.
            tf.errors.OpError: a step failed; those that were under way are cancelled.
        """
        return self._hand_out("test", data, num_steps)

    def predict(self, batches: Iterable[StepData]) -> Iterator[TensorNest]:
        """Yield what `predict_step` returns for each batch, in order; workers compute ahead of the reader.

        Raises:
            ClusterError: see `train`.
            StrategyError: the model is not built.
            tf.errors.OpError: a step failed; those that were under way are cancelled.
        """
        self._begin("predict")
        function = self._steps("predict").predict
        outputs: dict[int, TensorNest] = {}
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

    def join(self) -> dict[str, TensorNest]:
        """Wait until every step is done, write the pooled metrics to the model's variables, and return the logs.

        Raises:
            ClusterError: see `train`.
            tf.errors.OpError: a step failed; those that were under way are cancelled.
        """
        self._gather(at_most=0)
        self._kind = ""
        pool, self._pool = self._pool, None
        if pool is None:
            return {}
        with lost_servers_named():
            for variable, value in zip(pool.variables, pool.values(), strict=True):
                variable.assign(value)
        return pool.logs(self.model)

    def logs(self) -> dict[str, TensorNest]:
        """Compute the logs of the steps that are finished by now; wait for the first one.

        Raises:
            ClusterError: see `train`.
            tf.errors.OpError: a step failed; those that were under way are cancelled.
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
        return WorkerData(self.strategy, self.num_workers, dataset_fn)

    def close(self) -> None:
        """Wait for what is under way, and end the threads of this object.

        Raises:
            ClusterError: see `train`; the threads end all the same.
            tf.errors.OpError: a step failed; the threads end all the same.
        """
        try:
            self.join()
        finally:
            self._calls.close()

    # The steps

    def _hand_out(self, kind: str, data: object, num_steps: int) -> int:
        if isinstance(data, tf.distribute.DistributedIterator):
            raise DataError(
                "A DistributedIterator was given. Under ParameterServerStrategy the chief gives out the batches of an "
                "ordinary dataset, one to a worker: give the dataset itself, without experimental_distribute_dataset, "
                "as iter(dataset)."
            )
        if not isinstance(data, Iterator | WorkerData):
            raise DataError(
                f"The data is a {type(data).__name__}, which begins anew at every call: its end would never come. "
                "Give an iterator over it, iter(data), and the same one until its end."
            )
        self._begin(kind)
        steps = self._steps(kind)
        if self._pool is None:
            with lost_servers_named():
                self._pool = Pool(self.model.metrics_variables)
        share = math.ceil(num_steps / self.num_workers)
        if isinstance(data, WorkerData):
            return self._hand_out_reading(steps, data, num_steps, share, self._pool)
        batches = [_as_tensors(batch) for batch in itertools.islice(data, num_steps)]
        for function, args in steps.calls(batches, share):
            self._gather(at_most=self._limit - 1)
            self._calls.schedule(self._pool.add, function, args)
        return len(batches)

    def _hand_out_reading(self, steps: WorkerSteps, data: WorkerData, num_steps: int, share: int, pool: Pool) -> int:
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

    def _steps(self, kind: str) -> WorkerSteps:
        if kind not in self._made:
            self._made[kind] = WorkerSteps(self.model, kind)
        return self._made[kind]


def _as_tensors(batch: StepData) -> StepData:
    batch = without_optionals(batch)
    return tf.nest.map_structure(lambda v: v if v is None or tf.is_tensor(v) else tf.convert_to_tensor(v), batch)


def check_asynchronous(model: DistributedModel) -> None:
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
        warn(
            "jit_compile=True has no effect under ParameterServerStrategy: XLA cannot compile a step whose variables "
            "are on other machines. Steps run uncompiled."
        )
