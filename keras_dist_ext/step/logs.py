"""The logs of a step: which of its leaves are metrics' results, and their values over all replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import current_step
from keras_dist_ext._keras.layers import flat_layers, own_metrics
from keras_dist_ext._keras.strategies import regroup
from keras_dist_ext._keras.variables import components, is_sync_on_read, local_component
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.reduce import as_float, shares_memory, sum_over_replicas

__all__ = [
    "VALUE",
    "ComputesWithResults",
    "Result",
    "computes_with",
    "leaf_metrics",
    "noted_results",
    "pooled_result",
    "pooled_state",
    "state_of_first",
]

VALUE = object()  # in the plan of a step's logs, among `Result`s: a leaf that no metric holds


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A tensor that is the result of a metric, or one of several in its result.

    Attributes:
        metric: whose it is.
        place: among the leaves of the result.
        tensor: the leaf.
        num_assigned: how many assignments the step had made when it asked for it.
    """

    metric: keras.metrics.Metric
    place: int
    tensor: tf.Tensor
    num_assigned: int

    def now(self) -> tf.Tensor:
        """Compute it from what the metric's state is read as now."""
        return tree.flatten(self.metric.result())[self.place]


class ComputesWithResults(Exception):
    """The logs of a step hold something computed from the results of metrics, not only what these are at its end."""


def computes_with(results: Mapping[int, Result], assigned: Sequence[int], logs: TensorNest) -> bool:
    """Whether a leaf of the logs depends on a metric's result without being one, or is one of before an update.

    Args:
        results: by the id of a tensor.
        assigned: ids of the variables that the step has assigned, in this order.
        logs: of the step.
    """
    if not results:
        return False
    for result in filter(None, (results.get(id(leaf)) for leaf in tree.flatten(logs))):
        if not {id(variable) for variable in result.metric.variables}.isdisjoint(assigned[result.num_assigned :]):
            return True
    pending = [leaf for leaf in tree.flatten(logs) if isinstance(leaf, tf.Tensor) and id(leaf) not in results]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in results:
            return True
        if id(value) not in seen and not hasattr(value, "numpy"):  # a constant that was made eagerly has no op
            seen.add(id(value))
            pending.extend(value.op.inputs)
    return False


@contextlib.contextmanager
def noted_results(metrics: Sequence[keras.metrics.Metric]) -> Iterator[None]:
    """Have metrics tell the running step, by its ``note_result``, which tensors are their results."""
    for metric in metrics:
        metric.__dict__["result"] = _noting(metric)
    try:
        yield
    finally:
        for metric in metrics:
            metric.__dict__.pop("result", None)


def leaf_metrics(model: DistributedModel) -> list[keras.metrics.Metric]:
    """Return the metrics of a model and of all layers in it, and of those that consist of others these."""
    return list({id(metric): metric for metric in _leaves(_metrics_in(model))}.values())


def _metrics_in(model: DistributedModel) -> list[keras.metrics.Metric]:
    """Return all metrics: Keras leaves out those of compiled models in it, and what a user's own list does not name."""
    found = list(model.metrics)
    for layer in flat_layers(model):
        found += [*own_metrics(layer), *(layer.metrics if getattr(layer, "compiled", False) else ())]
    return found


def _leaves(metrics: Sequence[keras.metrics.Metric]) -> Iterator[keras.metrics.Metric]:
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        if isinstance(inner, (list, tuple)):
            yield from _leaves(inner)
        else:
            yield metric


def _noting(metric: keras.metrics.Metric) -> Callable[[], TensorNest]:
    def result() -> TensorNest:
        step = current_step()
        calls = getattr(step, "plain_calls", None)
        compute = functools.partial(type(metric).result, metric)
        value = compute() if calls is None else calls.call("result", compute)
        note = getattr(step, "note_result", None)
        return value if note is None else note(metric, value)

    return result


def pooled_result(
    metric: keras.metrics.Metric, sum_over_replicas: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
) -> tf.Tensor:
    """Compute a metric's result from the state of all replicas, in replica context."""
    variables = [v for v in metric.variables if is_sync_on_read(v)]
    sums = sum_over_replicas([as_float(local_component(v)) for v in variables])
    mapping = [(v, tf.cast(total, v.dtype)) for v, total in zip(variables, sums, strict=True)]
    with keras.StatelessScope(state_mapping=mapping):
        return type(metric).result(metric)


@contextlib.contextmanager
def pooled_state(model: DistributedModel, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Let reads of the model's metric variables give their sum over all replicas, in one reduction."""
    if strategy.num_replicas_in_sync == 1:
        yield
        return
    variables = _pooled(model)
    parts = [[tf.convert_to_tensor(c) for c in components(v)] for v in variables]
    if shares_memory(strategy):
        sums = [tf.add_n(part) for part in parts]
    else:
        floats = [[p if p.dtype.is_floating else tf.cast(p, tf.float64) for p in part] for part in parts]
        summed = sum_over_replicas(strategy, [regroup(part) for part in floats]) if parts else []
        sums = [
            tf.cast(strategy.experimental_local_results(total)[0], part[0].dtype)
            for total, part in zip(summed, parts, strict=True)
        ]
    with keras.StatelessScope(state_mapping=list(zip(variables, sums, strict=True))):
        yield


def _pooled(model: DistributedModel) -> list[tf.Tensor]:
    """Return the variables of metrics of which each replica holds its own part."""
    variables = [v for metric in _metrics_in(model) for v in metric.variables if is_sync_on_read(v)]
    return list({id(v): v for v in variables}.values())


@contextlib.contextmanager
def state_of_first(model: DistributedModel) -> Iterator[None]:
    """Let reads of the model's metric variables give what the first replica of this worker holds."""
    variables = _pooled(model)
    with keras.StatelessScope(state_mapping=[(v, tf.convert_to_tensor(components(v)[0])) for v in variables]):
        yield
