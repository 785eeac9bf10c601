"""Walk back in a graph from a value to what it is computed from, also through functions, branches and loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import tensorflow as tf

from keras_dist_ext._keras.tracing import functions_of_op
from keras_dist_ext._keras.variables import Variable

__all__ = [
    "Assignment",
    "Value",
    "assignments",
    "copies_by_handle",
    "decisions",
    "is_argument",
    "operations",
    "outermost",
    "sources",
    "variable_of",
    "walk_back",
]

_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
_LOOPS = {"While", "StatelessWhile"}
_ASSIGNS = re.compile("Assign|ResourceApply|ResourceSparseApply|ResourceScatter|ResourceStridedSliceAssign")


class Value(NamedTuple):
    """A tensor of a graph, or of a function that is called in it."""

    tensor: tf.Tensor
    calls: tuple[tf.Operation, ...] = ()  # the ops that call the functions which it is in, the outermost first


def sources(value: Value) -> list[Value]:
    """Return what a value is computed from directly; of what a call returns, what its function returns."""
    op, calls = value.tensor.op, value.calls
    if op.type == "Placeholder":
        return _given(value)
    graphs, place = functions_of_op(op), value.tensor.value_index
    returning = graphs[:1] if op.type in _LOOPS else graphs
    if not all(place < len(graph.outputs) for graph in returning) or not returning:
        return [Value(given, calls) for given in op.inputs]
    inside = (*calls, op)
    if op.type in _LOOPS:
        body, condition = graphs
        return [Value(op.inputs[place], calls), Value(body.outputs[place], inside), Value(condition.outputs[0], inside)]
    results = [Value(graph.outputs[place], inside) for graph in graphs]
    return [*results, Value(op.inputs[0], calls)] if op.type in _BRANCHES else results


def _given(value: Value) -> list[Value]:
    """Where what a function is given comes from."""
    graph = value.tensor.graph
    if not value.calls:  # of a function that is being traced: a capture, or an argument
        found = [outside for outside, inside in getattr(graph, "captures", ()) if inside is value.tensor]
        return [Value(outside) for outside in found if not hasattr(outside, "numpy")]
    *outer, call = value.calls
    place = next(i for i, given in enumerate(graph.inputs) if given is value.tensor)
    given = [Value(call.inputs[place + (1 if call.type in _BRANCHES else 0)], tuple(outer))]
    if call.type in _LOOPS:
        body, _ = functions_of_op(call)
        given.append(Value(body.outputs[place], value.calls))
    return given


def is_argument(value: Value) -> bool:
    """Whether a value is an argument of a function that is being traced, of which is not known what it will be."""
    op = value.tensor.op
    if op.type != "Placeholder" or value.calls or value.tensor.dtype == tf.resource:
        return False
    return not any(inside is value.tensor for _, inside in getattr(value.tensor.graph, "captures", ()))


def walk_back(values: Iterable[Value], stops: Callable[[Value], bool]) -> Iterator[Value]:
    """Yield values and all that they are computed from, each once, but for what is behind a value that stops the walk.

    Args:
        values: where to begin.
        stops: is called with each; one that stops the walk is not yielded.
    """
    pending, seen = list(values), set()
    while pending:
        value = pending.pop()
        key = value.tensor.op, value.tensor.value_index, value.calls
        if key not in seen and not stops(value):
            seen.add(key)
            yield value
            pending += sources(value)


def outermost(value: Value) -> tf.Tensor:
    """Return the op of the graph itself in which a value is computed."""
    return value.calls[0] if value.calls else value.tensor.op


class Assignment(NamedTuple):
    """An op that assigns a variable."""

    variable: Variable  # this replica's copy
    values: tuple[Value, ...]  # what is assigned, and what decides whether it is


def assignments(graph: tf.Graph) -> Iterator[Assignment]:
    """Yield each assignment of a variable in a graph, and in the functions, branches and loops that its ops call."""
    copies = copies_by_handle(graph)
    for op, calls, conditions in _operations(graph, (), ()):
        if _ASSIGNS.match(op.type) and op.inputs and op.inputs[0].dtype == tf.resource:
            copy = variable_of(Value(op.inputs[0], calls), copies)
            if copy is not None:
                given = (Value(i, calls) for i in op.inputs if i.dtype != tf.resource)
                yield Assignment(copy, (*given, *conditions))


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yield the ops of a graph, and of the functions, branches and loops that they call."""
    return (op for op, _, _ in _operations(graph, (), ()))


def _operations(
    graph: tf.Graph, calls: tuple[tf.Operation, ...], conditions: tuple[Value, ...]
) -> Iterator[tuple[tf.Operation, tuple[tf.Operation, ...], tuple[Value, ...]]]:
    """Yield ops with those that call the functions they are in, and what decides whether they run."""
    for op in graph.get_operations():
        yield op, calls, conditions
        graphs, inside, decides = functions_of_op(op), (*calls, op), conditions
        if graphs and op.type in _BRANCHES:
            decides = (*conditions, Value(op.inputs[0], calls))
        elif graphs and op.type in _LOOPS:
            decides = (*conditions, Value(graphs[1].outputs[0], inside))
        for called in graphs:
            yield from _operations(called, inside, decides)


def decisions(graph: tf.Graph) -> Iterator[tuple[tf.Operation, tuple[Value, ...]]]:
    """Yield the ops in branches and loops of a graph, each with what decides whether it runs."""
    for op, _, conditions in _operations(graph, (), ()):
        if conditions:
            yield op, conditions


def copies_by_handle(graph: tf.Graph) -> dict[int, tf.Variable]:
    """Return the copies of variables that a graph uses, by the ids of their handles."""
    return {id(copy.handle): copy for copy in graph.variables}


def variable_of(handle: Value, copies: Mapping[int, tf.Variable]) -> Variable:
    """Return the copy of a variable that a handle in a graph stands for; None where that is not known.

    Args:
        handle: of dtype resource.
        copies: see ``copies_by_handle``.
    """
    while handle.calls:
        if handle.tensor.op.type != "Placeholder":
            return None
        handle = _given(handle)[0]
    captures = getattr(handle.tensor.graph, "captures", ())
    return next((copies.get(id(outside)) for outside, inside in captures if inside is handle.tensor), None)
