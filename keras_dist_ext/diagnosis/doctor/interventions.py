"""Find out by experiment what a step's time goes to: change one thing, and time both in turn.

Experiments train the model itself and put it back bit for bit (see ``kept_state``). Each condition runs once a round,
another one first in each, so that a slow moment of the machine hits all of them; what a change saves is the median of
the differences within rounds, with a bootstrap interval.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext.aliases import BatchFunction, TensorNest
from keras_dist_ext.diagnosis.doctor.examination import Trials
from keras_dist_ext.errors import KerasDistError
from keras_dist_ext.step.reducers import MirroredReducer
from keras_dist_ext.training.adoption.adopt import adopt
from keras_dist_ext.training.batch_reader import BatchReader
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.execution import Execution
from keras_dist_ext.training.program import StepProgram
from keras_dist_ext.training.runners import StepRunner
from keras_dist_ext.training.snapshot import kept_state

__all__ = ["Conditions", "WithoutSum", "experiment"]

_SECONDS = 8.0  # that rounds may take together
_BLOCK_SECONDS = 0.06  # of a condition in a round, at least
_ROUNDS = (7, 15)  # at least, at most
_MANY_SECONDS = 0.05  # of an execution of many steps
_DRAIN_SECONDS = 0.12  # of steps on the data before its block: while others run, pipelines read ahead


def experiment(model: keras.Model, dataset: tf.data.Dataset, *, steps_per_execution: int = 1) -> Trials:
    """Time a model's steps under changed conditions, and leave it as it was.

    Args:
        model: a built model of ours that trains in this process, and has made a step.
        dataset: what the run reads, to be read once more; its first batch is that of all conditions but one.
        steps_per_execution: of the run, about.
    """
    conditions = Conditions(model, steps_per_execution)
    batch = dataset.take(1).cache()  # its shapes are as unknown as the data's, so that both run the same trace
    with kept_state(model):
        model.replica_runtime.recorders = ()
        conditions.add("as it was", batch)
        conditions.add("data", dataset, drain_seconds=_DRAIN_SECONDS)
        if model.run_eagerly or tf.config.functions_run_eagerly():
            conditions.add("compiled", batch, condition=lambda: _compiled(model))
        else:
            conditions.add("one step", batch, num_steps=1)
            conditions.add("many steps", batch, num_steps=conditions.many())
        conditions.add("double", batch, change=_doubled)
        if model.distribute_strategy.num_replicas_in_sync > 1:
            if model.virtual_replicas is None:
                conditions.add("no sum", batch, step=WithoutSum)
            else:
                conditions.skipped["no sum"] = "virtual replicas are summed in order"
            conditions.add_one_device(batch)
        return conditions.measure()


class _SumsNothing(MirroredReducer):
    """Has each replica keep its gradients to itself."""

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(values)


class WithoutSum(DistributedStep):
    """A step that sums no gradients."""

    def reducer(self) -> MirroredReducer:
        """See ``DistributedStep``."""
        return _SumsNothing(self.model, self.strategy, loops=self.loops)


class Conditions:
    """What is measured in turn.

    Args:
        model: whose steps are timed, unless others are named.
        steps_per_execution: of conditions that name no other number.

    Attributes:
        skipped: conditions that could not be made, and why.
    """

    def __init__(self, model: keras.Model, steps_per_execution: int) -> None:
        self._model = model
        self._num_steps = max(1, steps_per_execution)
        self._trials: dict[str, _Trial] = {}
        self._runs: dict[tuple[object, ...], BatchFunction] = {}
        self.skipped: dict[str, str] = {}

    def many(self, name: str = "as it was") -> int:
        """Return how many steps of a condition make an execution long against what starting it takes."""
        base = self._trials.get(name)
        if base is None:
            return 10
        return max(2, min(200, round(_MANY_SECONDS / max(1e-5, base.seconds_a_step))))

    def add(
        self,
        name: str,
        dataset: tf.data.Dataset,
        *,
        change: BatchFunction | None = None,
        step: type[DistributedStep] = DistributedStep,
        num_steps: int | None = None,
        condition: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        model: keras.Model = None,
        drain_seconds: float = 0.0,
    ) -> None:
        """Prepare a condition, which traces and runs it; leave it out, with the reason, where that fails.

        Conditions of the same steps share their trace: TensorFlow warns of functions that are traced often.
        """
        try:
            if change is not None:
                dataset = dataset.map(lambda *parts: change(parts if len(parts) > 1 else parts[0])).cache()
            model = model or self._model
            key = step, id(model), condition
            with condition():
                if key not in self._runs:
                    self._runs[key] = StepRunner(StepProgram(step(model, "train")))
                run = self._runs[key]
                num_steps = num_steps or self._num_steps
                self._trials[name] = _Trial(run, dataset.repeat(), num_steps, condition, drain_seconds)
        except Exception as error:  # code of the user's may not bear the change, and the run has gone well without
            self.skipped[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"

    def add_one_device(self, batch: tf.data.Dataset) -> None:
        """Prepare a copy of the model that has one replica."""
        try:
            copy = adopt(self._model, tf.distribute.get_strategy())
        except (KerasDistError, TypeError, ValueError) as error:
            self.skipped["one device"] = str(error).partition(". ")[0]
            return
        assert is_default_strategy(copy.distribute_strategy)
        copy.replica_runtime.batch_spec = self._model.replica_runtime.batch_spec
        self.add("one device", batch, model=copy)

    def run(self, name: str) -> None:
        """Make an execution of a condition, which is not timed."""
        self._trials[name].execute()

    def measure(self, seconds: float | None = None, *, rounds: tuple[int, int] = _ROUNDS) -> Trials:
        """Time all conditions, round by round, and close them.

        Args:
            seconds: that rounds may take together; the least number of rounds is made all the same.
            rounds: how many, at least and at most.
        """
        seconds = _SECONDS if seconds is None else seconds
        samples: dict[str, list[float]] = {name: [] for name in self._trials}
        begin, names = time.perf_counter(), list(self._trials)
        least, most = rounds
        for number in range(most):
            if number >= least and time.perf_counter() - begin > seconds:
                break
            first = number % max(1, len(names))
            for name in names[first:] + names[:first]:
                samples[name].append(self._trials[name].time())
        self.close()
        return Trials(
            {name: tuple(values) for name, values in samples.items()},
            {name: trial.num_steps for name, trial in self._trials.items()},
            dict(self.skipped),
        )

    def close(self) -> None:
        """Read no more data."""
        for trial in self._trials.values():
            trial.close()


class _Trial:
    """One condition, ready to be timed."""

    def __init__(
        self,
        run: BatchFunction,
        dataset: object,
        num_steps: int,
        condition: Callable[[], contextlib.AbstractContextManager[None]],
        drain_seconds: float,
    ) -> None:
        self.num_steps = num_steps
        self._drain_seconds = drain_seconds
        self._run = run
        self._source = BatchReader(dataset, 2**40, one_step=num_steps == 1)
        self._condition = condition
        self._num_executions = 1
        self.execute()  # traces
        self.execute()
        self.seconds_a_step = self.time()
        self._num_executions = min(200, math.ceil(_BLOCK_SECONDS / max(1e-5, self.seconds_a_step * num_steps)))

    def close(self) -> None:
        """Read no more data."""
        self._source.close()

    def execute(self) -> None:
        """Make an execution."""
        self._run(Execution(self._source, self.num_steps))

    def time(self) -> float:
        """Return the seconds a step of a block."""
        with self._condition():
            begin = time.perf_counter()
            while time.perf_counter() - begin < self._drain_seconds:
                self.execute()
            begin = time.perf_counter()
            for _ in range(self._num_executions):
                self.execute()
            return (time.perf_counter() - begin) / (self._num_executions * self.num_steps)


def _doubled(batch: TensorNest) -> TensorNest:
    def twice(leaf: tf.Tensor) -> tf.Tensor:
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.concat(0, [leaf, leaf])
        has_rows = getattr(leaf, "shape", None) is not None and leaf.shape.rank
        return tf.concat([leaf, leaf], 0) if has_rows else leaf

    return tree.map_structure(twice, batch)


@contextlib.contextmanager
def _compiled(model: keras.Model) -> Iterator[None]:
    """Let steps be compiled that the run makes eagerly."""
    own, functions = model.run_eagerly, tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(False)
    model.run_eagerly = False
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(functions)
        model.run_eagerly = own
