"""Check which variables a step uses, changes, and computes what it returns from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.strategies import strategy_of_variable
from keras_dist_ext._keras.variables import (
    components,
    distributed_variable,
    is_sync_on_read,
    parameter_server_variable,
    tf_variable,
)
from keras_dist_ext.errors import LoopError, ScopeError
from keras_dist_ext.step.ancestry import Assignment
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.global_generator import global_generator_of
from keras_dist_ext.step.origins import read_parts
from keras_dist_ext.strategy.scope import describe_strategy, optimizers, raw_variables
from keras_dist_ext.training.step_assignments import labels, shortened

__all__ = ["check_known", "check_not_trained", "check_results", "updated_metrics"]


def check_known(loop: DistributedModel, name: str, graph: tf.Graph, assigned: set[int]) -> None:
    """Refuse variables that were made elsewhere, or that no part holds though the step changes or trains them."""
    strategy = loop.distribute_strategy
    global_generator = global_generator_of(strategy, is_seeded=loop.replica_seeds.root is not None).state
    known = {id(distributed_variable(copy)) for copy in components(global_generator)}
    known |= {id(same) for variable in _of_parts(loop) for same in (variable, parameter_server_variable(variable))}
    elsewhere: list[str] = []
    unknown: list[str] = []
    for variable in {id(v): v for v in map(distributed_variable, graph.variables)}.values():
        if id(variable) in known:
            continue
        if id(variable) not in assigned and not (variable.trainable and variable.dtype.is_floating):
            continue  # it is a constant to the step
        own = strategy_of_variable(variable)
        (label,) = labels([variable])
        if strategy.num_replicas_in_sync > 1 and (own is None or own.extended is not strategy.extended):
            elsewhere.append(label)
        else:
            unknown.append(label)
    if elsewhere:
        raise ScopeError(
            f"The step {name!r} uses what was created outside {describe_strategy(strategy)}: {shortened(elsewhere)}. "
            "All replicas would write to one copy, in no order. Make it inside `with strategy.scope():`, and name it "
            "in parts={...}."
        )
    if unknown:
        raise LoopError(
            f"The step {name!r} trains with, or changes, variables that no part holds: {shortened(unknown)}. They "
            "would not be saved, restored, seeded or compared between replicas. Name what holds them in parts={...}: "
            "models, optimizers, metrics, random generators, variables."
        )


def check_not_trained(name: str, assigned: Sequence[Assignment]) -> None:
    """Refuse to train where a step evaluates.

    Raises:
        LoopError: it does.
    """
    trained = {id(v): v for v in (distributed_variable(one.variable) for one in assigned) if v.trainable}
    if trained:
        raise LoopError(
            f"The step {name!r} is for evaluation, and changes {shortened(labels(trained.values()))}. Leave the "
            "update to the step of training."
        )


def check_results(loop: DistributedModel, name: str, graph: tf.Graph, values: Mapping[str, tf.Tensor]) -> None:
    """Refuse to return what is computed from a part of a sum that one replica holds, such as the result of a metric."""
    of_metrics = {id(copy) for variable in loop.metrics_variables for copy in components(variable)}

    def is_part(copy: tf.Variable) -> bool:
        return id(copy) in of_metrics or is_sync_on_read(distributed_variable(copy))

    for key, value in values.items():
        read = {id(v): v for v in map(distributed_variable, read_parts(graph, value, is_part))}
        if read:
            raise LoopError(
                f"The step {name!r} returns {key!r}, computed from {shortened(labels(read.values()))}, of which each "
                "replica holds a part: it is the result for its own rows, since it was last reset. Name the metric in "
                "parts={...}, update it in the step, and return nothing of it: its result over all replicas is logged "
                "under its own name."
            )


def updated_metrics(
    metrics: Sequence[keras.Metric], name: str, assigned: Sequence[Assignment], outputs: Iterable[str]
) -> list[keras.Metric]:
    """Return the metrics among a loop's parts that a step updates.

    Raises:
        LoopError: one has the name of something else.
    """
    changed = {id(distributed_variable(one.variable)) for one in assigned}
    updated = [m for m in metrics if any(id(tf_variable(v)) in changed for v in m.variables)]
    taken = set(outputs)
    for metric in updated:
        if metric.name in taken:
            raise LoopError(
                f"The step {name!r} updates the metric {metric.name!r}, and something else is logged by this name. "
                "Give the metric another name=."
            )
        taken.add(metric.name)
    return updated


def _of_parts(loop: DistributedModel) -> list[tf.Variable]:
    variables = [variable for layer in flat_layers(loop) for _, variable in raw_variables(layer)]
    made = [optimizer for _, optimizer in optimizers(loop)]
    made += [inner for optimizer in made for _, inner in optimizers(optimizer)]
    kerases = [*loop.variables, *loop.metrics_variables]
    kerases += [variable for optimizer in made for variable in optimizer.variables]
    return variables + [tf_variable(v) for v in kerases]
