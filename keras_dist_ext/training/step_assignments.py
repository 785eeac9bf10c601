"""Check what a step assigns to variables: replicas keep the same values only if all assign the same."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import tensorflow as tf

from keras_dist_ext._keras.variables import Variable, components, distributed_variable, is_sync_on_read, unread
from keras_dist_ext.errors import LoopError, StrategyError
from keras_dist_ext.step.ancestry import Assignment
from keras_dist_ext.step.origins import Origins

__all__ = ["check_assigned", "check_decisions", "check_of_keras", "labels", "shared_state", "shortened"]

_LISTED = 5  # variables that a message names before it counts the rest


def check_decisions(name: str, graph: tf.Graph, origins: Origins) -> None:
    """Refuse to add up over replicas where each decides by itself whether to.

    Args:
        name: of the step.
        graph: of the step.
        origins: of the values in it.

    Raises:
        LoopError: they do.
    """
    if origins.adds_up_by_own_decision(graph):
        raise LoopError(
            f"The step {name!r} adds up over replicas (gradients of weights, a sum or a weighted mean) inside of a "
            "branch or loop of the graph that each replica takes by its own rows or random numbers, so that some "
            "would wait for others without end. Decide by what is the same on all of them: a counter, weights, "
            "gradients of a tape, or a mean over all examples, kde.reduce_gradients(mean)."
        )


def check_assigned(
    strategy: tf.distribute.Strategy,
    name: str,
    assigned: Sequence[Assignment],
    origins: Origins,
    averaged: Mapping[int, Variable],
) -> None:
    """Refuse to assign what only one replica has computed.

    Args:
        strategy: of the replicas.
        name: of the step.
        assigned: what it assigns.
        origins: of the values.
        averaged: by ids of copies, variables whose mean over replicas is taken after the step.

    Raises:
        LoopError: it does.
    """
    if strategy.num_replicas_in_sync == 1 or not isinstance(strategy, _MIRRORED):
        return
    variables = _by_copy(assigned)
    for variable in variables.values():
        if is_sync_on_read(variable) and variable.aggregation == tf.VariableAggregation.NONE:
            raise LoopError(f"{unread(variable)} The step {name!r} assigns to it.")
    shared = {
        copy: variable
        for copy, variable in variables.items()
        if copy not in averaged
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and variable.aggregation != tf.VariableAggregation.SUM  # TensorFlow adds up what they assign
    }
    partly = {
        id(variable): variable
        for variable in shared.values()
        if any(id(copy) not in shared for copy in components(variable))
    }
    if partly:
        raise LoopError(
            f"The step {name!r} assigns to {shortened(labels(partly.values()))} on some replicas only, so that they "
            "would continue with different values, and the first one's would be saved. Assign on all of them alike, "
            "whatever replica.index is."
        )
    differing = {
        id(shared[id(one.variable)]): shared[id(one.variable)]
        for one in assigned
        if id(one.variable) in shared and origins.replicas_of(one.values)
    }
    if differing:
        raise LoopError(
            f"The step {name!r} assigns to {shortened(labels(differing.values()))} what each replica computes from its "
            "own rows or random numbers, so that replicas would continue with different values, and the first one's "
            "would be saved. Gradients of a GradientTape are those of the whole batch on every replica; what else is "
            "a mean over the examples, such as a loss that scales them or decides on an update, becomes one of the "
            "whole batch by loss = kde.reduce_gradients(loss), and replica.sum of a TrainLoop adds up. What is meant "
            "to be a part of a sum on each replica is a variable with "
            "synchronization=tf.VariableSynchronization.ON_READ and an aggregation, or with the aggregation SUM."
        )


def check_of_keras(name: str, assigned: Sequence[Assignment], of_keras: Container[int]) -> None:
    """Refuse to assign, on each of several virtual replicas, what is not Keras': all would assign to one copy.

    Args:
        name: of the step.
        assigned: what it assigns.
        of_keras: ids of the variables that are assigned by Keras.

    Raises:
        StrategyError: it does.
    """
    others = {id(v): v for v in _by_copy(assigned).values() if id(v) not in of_keras}
    if others:
        raise StrategyError(
            f"The step {name!r} assigns to {shortened(labels(others.values()))}, which are tf.Variables, so that each "
            "of the virtual replicas on a device would assign to the same copy. Make variables of Keras, by "
            "add_weight of a layer or model; or compile without virtual_replicas."
        )


def shared_state(assigned: Sequence[Assignment], origins: Origins) -> frozenset[int]:
    """Return the ids of the variables to which all replicas assign the same.

    Args:
        assigned: what a step assigns.
        origins: of the values.
    """
    variables = _by_copy(assigned)
    own = {id(variables[id(one.variable)]) for one in assigned if origins.replicas_of(one.values)}
    return frozenset(map(id, variables.values())) - own


def _by_copy(assigned: Iterable[Assignment]) -> dict[int, tf.Variable]:
    return {id(one.variable): distributed_variable(one.variable) for one in assigned}


_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)


def labels(variables: Iterable[Variable]) -> list[str]:
    """Return how messages name variables."""
    return [f"{variable.name.partition(':')[0]} {tuple(variable.shape)}" for variable in variables]


def shortened(names: list[str]) -> str:
    """Return a list that names a few, and counts the rest."""
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + rest
