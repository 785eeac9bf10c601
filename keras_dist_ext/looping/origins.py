"""Find out which values in the graph of a step are one replica's own, and which variables are assigned such values.

A value is a replica's own if it is computed from this replica's rows or random numbers, and from no other's. Whatever
was added up over replicas is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

__all__ = ["Origins", "assigned_variables", "read_parts"]

_ASSIGNS = re.compile("Assign|ResourceApply|ResourceSparseApply|ResourceScatter|ResourceStridedSliceAssign")
_DRAWS = re.compile("Random|Stateful(Uniform|Standard|Truncated)|TruncatedNormal|Multinomial|RngReadAndSkip")


class Origins:
    """Where values of a graph come from, noted while it is traced."""

    def __init__(self) -> None:
        self._own: dict[Any, int] = {}  # by op
        self._common: set[Any] = set()

    def own(self, value: Any, replica: int) -> Any:
        """Return a value as one that a replica has for itself."""
        return tf.nest.map_structure(lambda leaf: self._note_own(leaf, replica), value, expand_composites=True)

    def _note_own(self, leaf: Any, replica: int) -> Any:
        if not tf.is_tensor(leaf):
            return leaf
        leaf = tf.identity(leaf)
        self._own[leaf.op] = replica
        return leaf

    def common(self, value: Any) -> Any:
        """Return a value as one that is the same on all replicas, of which nothing else is known."""
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.common(value.values), self.common(value.indices), value.dense_shape)
        value = tf.raw_ops.Snapshot(input=tf.convert_to_tensor(value))
        self._common.add(value.op)
        return value

    def owners(self, value: Any) -> set[int]:
        """Return the replicas whose own rows or numbers a value is computed from."""
        found: set[int] = set()
        pending, seen = [value.op], set()
        while pending:
            op = pending.pop()
            if op in seen or op in self._common or op.type.startswith("Collective"):
                continue
            seen.add(op)
            if op in self._own:
                found.add(self._own[op])
            elif _DRAWS.match(op.type) and not op.type.startswith("Stateless"):
                found.add(_replica_of(op))
            elif op.type != "ReadVariableOp":
                pending += [given.op for given in op.inputs]
        return found


def read_parts(graph: Any, value: Any, is_part: Callable[[Any], bool]) -> list[Any]:
    """Return the variables that a value is computed from, of those of which each replica holds a part.

    Args:
        graph: of the value.
        value: a tensor.
        is_part: told a variable's copy.
    """
    copies = {id(copy.handle): copy for copy in graph.variables if is_part(copy)}
    inner = {id(inside): copies[id(outside)] for outside, inside in graph.captures if id(outside) in copies}
    found: list[Any] = []
    pending, seen = [value.op], set()
    while pending:
        op = pending.pop()
        if op not in seen:
            seen.add(op)
            found += [inner[id(given)] for given in op.inputs if id(given) in inner]
            pending += [given.op for given in op.inputs]
    return found


def _replica_of(op: Any) -> int:
    """The replica that an op was traced for: MirroredStrategy's name scopes say so (mirrored_run.py)."""
    named = re.search(r"(?:^|/)replica_(\d+)/", op.name)
    return int(named.group(1)) if named else 0


def assigned_variables(graph: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each variable that the ops of a graph assign, as this replica's copy of it, and what it is computed from.

    Those that are assigned in a branch, a loop or a function are left out.
    """
    inner = {id(inside): outside for outside, inside in graph.captures}
    copies = {id(copy.handle): copy for copy in graph.variables}
    for op in graph.get_operations():
        if _ASSIGNS.match(op.type) and op.inputs and op.inputs[0].dtype == tf.resource:
            copy = copies.get(id(inner.get(id(op.inputs[0]))))
            if copy is not None:
                yield copy, [given for given in op.inputs if given.dtype != tf.resource]
