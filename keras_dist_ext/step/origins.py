"""Find out which values in the graph of a step are one replica's own.

A value is a replica's own if it is computed from this replica's rows or random numbers, and from no other's. Whatever
was added up over replicas is not.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from typing import Literal

import tensorflow as tf

from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.step.ancestry import (
    Value,
    copies_by_handle,
    decisions,
    is_argument,
    outermost,
    variable_of,
    walk_back,
)

__all__ = ["Origins", "draws", "read_parts"]

_DRAWS = re.compile("Random|Stateful(Uniform|Standard|Truncated)|TruncatedNormal|Multinomial|RngReadAndSkip")


class Origins:
    """Where values of a graph come from, noted while it is traced."""

    def __init__(self) -> None:
        self._own: dict[tf.Tensor, int] = {}  # by op
        self._common: dict[tf.Operation, tf.Tensor] = {}  # by op

    def mark_per_replica(self, value: TensorNest, replica: int) -> TensorNest:
        """Return a value as one that a replica has for itself."""
        return tf.nest.map_structure(lambda leaf: self._note_own(leaf, replica), value, expand_composites=True)

    def _note_own(self, leaf: tf.Tensor, replica: int) -> tf.Tensor:
        if not tf.is_tensor(leaf):
            return leaf
        leaf = tf.identity(leaf)
        self._own[leaf.op] = replica
        return leaf

    def mark_replicated(self, value: TensorNest) -> TensorNest:
        """Return a value as one that is the same on all replicas, of which nothing else is known."""
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(
                self.mark_replicated(value.values), self.mark_replicated(value.indices), value.dense_shape
            )
        return self._note_common(tf.raw_ops.Snapshot(input=tf.convert_to_tensor(value)))

    def mark_gradient(self, value: TensorNest) -> TensorNest:
        """Return a gradient as one that is the same on all replicas; it may be differentiated further."""
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(
                self.mark_gradient(value.values), self.mark_gradient(value.indices), value.dense_shape
            )
        return self._note_common(tf.identity(value))

    def _note_common(self, value: tf.Tensor) -> tf.Tensor:
        self._common[value.op] = value
        return value

    def note_own(self, value: TensorNest, replica: int) -> TensorNest:
        """Know that a value is one that a replica has for itself, and return it."""
        if not tf.executing_eagerly():
            for leaf in tf.nest.flatten(value, expand_composites=True):
                if _is_of_graph(leaf):
                    self._own[leaf.op] = replica
        return value

    def note_replicated(self, value: TensorNest) -> TensorNest:
        """Know that a tensor is the same on all replicas, and return it."""
        if not tf.executing_eagerly():
            self._common[value.op] = value
        return value

    def kind_of(self, value: TensorNest) -> Literal["own", "replicated", "constant"]:
        """Whether a value is computed from one replica's own, or else from what is the same on all, or from neither."""
        if not _is_of_graph(value):
            return "constant"
        reached: list[Value] = []
        found = self._replicas_of([Value(value)], reached, arguments_are_own=True)
        return "own" if found else "replicated" if reached else "constant"

    @property
    def replicated_ids(self) -> set[int]:
        """Ids of the tensors that are the same on all replicas."""
        return {id(value) for value in self._common.values()}

    def adds_up_by_own_decision(self, graph: tf.Graph) -> bool:
        """Whether replicas add up in a branch or loop of a graph that each takes by its own rows or numbers."""
        return any(op in self._common and self.replicas_of(given) for op, given in decisions(graph))

    def is_shared(self, value: Value) -> bool:
        """Whether a value is the same on all replicas because it is computed from weights, or from sums over them.

        A constant alone may stand for rows, such as zeros that are added to them.
        """
        seen = {"own": False, "shared": False}

        def ends(value: Value) -> bool:
            op = value.tensor.op
            is_common = op in self._common or op.type == "ReadVariableOp" or op.type.startswith("Collective")
            is_own = not is_common and (op in self._own or draws(op))
            seen["own"] |= is_own
            seen["shared"] |= is_common
            return is_common or is_own

        collections.deque(walk_back([value], ends), maxlen=0)
        return seen["shared"] and not seen["own"]

    def replicas_of(self, values: Iterable[Value]) -> set[int]:
        """Return the replicas whose own rows or numbers values are computed from."""
        return self._replicas_of(values, [])

    def _replicas_of(
        self, values: Iterable[Value], common: list[tf.Tensor], *, arguments_are_own: bool = False
    ) -> set[int]:
        found: set[int] = set()

        def ends(value: Value) -> bool:
            op = value.tensor.op
            if op in self._common:
                common.append(op)
                return True
            if op.type == "ReadVariableOp" or op.type.startswith("Collective"):
                return True
            if op in self._own:
                found.add(self._own[op])
            elif arguments_are_own and is_argument(value):
                found.add(-1)
            elif draws(op):
                found.add(_replica_of(outermost(value)))
            else:
                return False
            return True

        collections.deque(walk_back(values, ends), maxlen=0)
        return found


def _is_of_graph(value: tf.Tensor) -> bool:
    return tf.is_tensor(value) and not hasattr(value, "numpy")


def draws(op: tf.Operation) -> bool:
    """Whether an op draws random numbers that no seed of its inputs determines."""
    return bool(_DRAWS.match(op.type)) and not op.type.startswith("Stateless")


def read_parts(graph: tf.Graph, value: tf.Tensor, is_part: Callable[[Variable], bool]) -> list[Variable]:
    """Return the variables that a value is computed from, of those of which each replica holds a part.

    Args:
        graph: of the value.
        value: a tensor.
        is_part: is called with a variable's copy.
    """
    copies = copies_by_handle(graph)
    found = []
    for seen in walk_back([Value(value)], lambda _: False):
        if seen.tensor.dtype == tf.resource:
            copy = variable_of(seen, copies)
            if copy is not None and is_part(copy):
                found.append(copy)
    return found


def _replica_of(op: tf.Operation) -> int:
    """The replica that an op was traced for: MirroredStrategy's name scopes say so (mirrored_run.py)."""
    named = re.search(r"(?:^|/)replica_(\d+)/", op.name)
    return int(named.group(1)) if named else 0
