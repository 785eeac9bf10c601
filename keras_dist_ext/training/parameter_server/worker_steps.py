"""Run steps on a worker of a ParameterServerStrategy: from batches to metrics that began at zero.

The chief traces these functions, and workers run them. Variables stay on the parameter server, shared by all workers;
what a step counts or pools is private to it, and leaves it as a result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.data.split import without_optionals
from keras_dist_ext.errors import StrategyError
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.strategy.scope import optimizers

__all__ = ["WorkerSteps"]

_Result: TypeAlias = tuple[list[tf.Tensor], dict[str, tf.Tensor]]  # the state of metrics, and what else the logs have
_Steps: TypeAlias = Callable[..., _Result]  # of a batch, or of the leaves of several, stacked


class WorkerSteps:
    """What a worker runs for one kind of step.

    Args:
        model: built, with its strategy.
        kind: "train", "test" or "predict".

    Attributes:
        reading: steps on batches that the worker reads itself; see `WorkerData` for what it takes and returns.
        predict: `predict_step` on one batch.

    Raises:
        StrategyError: the model is not built, its metrics do not add up, or its optimizer counts steps.
    """

    def __init__(self, model: DistributedModel, kind: str) -> None:
        _check_built(model, kind)
        used = [optimizer for _, optimizer in optimizers(model)] if kind == "train" else []
        for optimizer in used:
            _check_optimizer(optimizer)
        self._model = model
        self._step = getattr(model, f"{kind}_step")
        self._strategy: tf.distribute.Strategy = model.distribute_strategy
        self._metrics = list(model.metrics_variables)
        self._counters = [optimizer.iterations for optimizer in used]
        kept = [variable for optimizer in used for variable in optimizer.variables]
        self._shared = {id(v): v.value for v in (*model.variables, *kept)}
        self._many: dict[tuple[str, tuple[tf.TensorSpec, ...]], _Steps] = {}
        self._one = in_graph(lambda batch: self._run(batch, self._zeros()), reduce_retracing=True)
        self.reading = in_graph(self._read, reduce_retracing=True)
        self.predict = in_graph(lambda batch: self._strategy.run(self._step, args=(batch,)), reduce_retracing=True)

    def calls(self, batches: Sequence[StepData], at_most: int) -> Iterator[tuple[_Steps, tuple[StepData, ...]]]:
        """Yield functions that make a step of each batch, and what to call them with.

        Args:
            batches: of tensors.
            at_most: neighbours of equal structure and shapes travel in one call, up to so many.
        """
        for bundle in _bundles(batches, at_most):
            yield self._many_at_once(bundle) if len(bundle) > 1 else (self._one, tuple(bundle))

    def _many_at_once(self, batches: Sequence[StepData]) -> tuple[_Steps, tuple[StepData, ...]]:
        present = [leaf is not None for leaf in tf.nest.flatten(batches[0])]
        stacks = [tf.stack(leaves) for leaves in zip(*map(_leaves, batches), strict=True)]
        # An unknown length, so that one trace serves stacks of any: the last one is often shorter.
        signature = tuple(tf.TensorSpec([None, *stack.shape[1:]], stack.dtype) for stack in stacks)
        key = (_structure(batches[0]), signature)
        if key not in self._many:

            def run(*stacks: tf.Tensor) -> _Result:
                def batch(i: int | tf.Tensor) -> StepData:
                    rows = iter([stack[i] for stack in stacks])
                    return tf.nest.pack_sequence_as(batches[0], [next(rows) if here else None for here in present])

                return self._run_many(batch, tf.shape(stacks[0])[0])

            self._many[key] = in_graph(run, input_signature=signature)
        return self._many[key], tuple(stacks)

    def _run(self, batch: StepData, state: Sequence[tf.Tensor]) -> _Result:
        new_state, extra = self._strategy.run(self._replica, args=(batch, state))
        return new_state, extra

    def _run_many(self, batch: Callable[[int | tf.Tensor], StepData], num_steps: tf.Tensor) -> _Result:
        def body(i: tf.Tensor, state: Sequence[tf.Tensor], _: TensorNest) -> tuple[tf.Tensor, ...]:
            return (i + 1, *self._run(batch(i), state))

        # The first step stands before the loop because only it tells what else is in the logs.
        first = (tf.constant(1), *self._run(batch(0), self._zeros()))
        _, state, extra = tf.while_loop(lambda i, *_: i < num_steps, body, first, parallel_iterations=1)
        return state, extra

    def _read(
        self, iterator: tf.data.Iterator, worker: tf.Tensor, num_steps: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, Sequence[tf.Tensor]]:
        def body(i: tf.Tensor, _: tf.Tensor, state: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
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

    def _replica(self, batch: StepData, state: Sequence[tf.Tensor]) -> _Result:
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


def _check_built(model: DistributedModel, kind: str) -> None:
    """Refuse to trace a step that would have to make variables, or whose metrics do not add up."""
    metrics, variables = ([], []) if kind == "predict" else (model.metrics, model.metrics_variables)
    parts = {f"the model {model.name!r}": model, "its optimizer": model.optimizer if kind == "train" else None}
    parts |= {f"its metric {metric.name!r}": metric for metric in metrics}
    unbuilt = [name for name, part in parts.items() if not getattr(part, "built", True)]
    if unbuilt:
        raise StrategyError(
            f"Not built: {', '.join(unbuilt)}. Workers cannot make variables, so all must be there before the first "
            "step. Build them in the strategy's scope, as fit of keras_dist_ext.Model does from the data."
        )
    for variable in variables:
        if variable.aggregation != "sum":
            raise StrategyError(
                f"The metric variable {variable.path!r} has aggregation={variable.aggregation!r}. Each step of a "
                "worker begins with zeros and the chief adds the results up, which is right for aggregation='sum' "
                "only. Write the metric so that its state adds up."
            )


def _check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
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


def _bundles(batches: Sequence[StepData], at_most: int) -> Iterator[list[StepData]]:
    """Group neighbours of equal structure and shapes, which can be stacked."""
    for _, group in itertools.groupby(batches, key=_signature):
        while bundle := list(itertools.islice(group, at_most)):
            yield bundle


def _signature(batch: StepData) -> object:
    leaves = _leaves(batch)
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        return object()  # ragged and sparse tensors stack to something else: never equal to a neighbour
    return _structure(batch), [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]


def _leaves(batch: StepData) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def _structure(batch: StepData) -> str:
    """Say how the leaves are nested, and which of them are missing."""
    return repr(tf.nest.map_structure(lambda leaf: leaf is None, batch))


class _StepScope(keras.StatelessScope):  # type: ignore[misc]
    """Keep some variables of a step to itself, and let all others be what they are.

    Keras' scope has a value for every variable; here those of shared ones are the ``tf.Variable`` objects, so that the
    optimizer updates them in place, gradients find them, and assignments reach the parameter server.
    """

    def __init__(self, shared: dict[int, tf.Variable], private: Iterable[tuple[Variable, tf.Tensor]]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        own = {id(variable): value for variable, value in private}
        self.state_mapping = {**shared, **own}
        self._private = frozenset(own)

    def add_update(self, update: tuple[Variable, tf.Tensor]) -> None:
        """Keep a private variable's new value; write a shared one's."""
        variable, value = update
        if id(variable) in self._private:
            self.state_mapping[id(variable)] = value
        else:
            target = self.state_mapping.get(id(variable), variable.value)
            target.assign(tf.cast(value, target.dtype))
