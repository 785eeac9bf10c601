"""Skip steps whose numbers are not finite, on all replicas alike, and record which they were.

Each replica looks at its own loss and gradients. What it finds travels to the others with the gradients, in the same
reduction, so that all of them leave the same update out, in the middle of an execution and without asking the host.
A step that is left out has never been: weights, optimizers, metrics and state that layers assign are as before it.
Random streams and counters of layers have gone on, and the data is used.

Letters: R = replicas, virtual ones where there are such, over all workers; K = steps that are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.variables import Variable, components, is_sync_on_read, local_component
from keras_dist_ext.aliases import Gradient, TensorNest
from keras_dist_ext.step.gradient_values import dense_values

__all__ = ["DATA", "GRADIENTS", "LOSS", "BadStep", "Guard", "ReplicaGuard", "StepGuard"]

LOSS, GRADIENTS, DATA = 1, 2, 4  # where a replica has found what is not finite: a sum of these
_REMEMBERED = 16  # K

# What the state holds, before what was found in the step that is under way, by replica.
_STEPS, _BAD, _IN_A_ROW, _MOST_IN_A_ROW, _STOPPED, _FOUND = range(6)


class BadStep(NamedTuple):
    """A step that was left out."""

    steps_ago: int  # 0 = the last one that was made
    found: tuple[int, ...]  # [R], each a sum of LOSS, GRADIENTS and DATA; 0 = all is finite


class Guard:
    """What a model's steps leave out. To be made in the scope of the model's strategy, on all workers.

    Attributes:
        num_replicas: R.

    Args:
        num_replicas: see above.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        # Every replica keeps its own, and all hold the same.
        options: dict[str, object] = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
        }
        self.state = tf.Variable(tf.zeros([_FOUND + num_replicas], tf.int64), name="guard", **options)
        self.bad = tf.Variable(tf.zeros([_REMEMBERED, 1 + num_replicas], tf.int64), name="guarded_steps", **options)
        self._num_seen = 0

    def begin(self, most_in_a_row: int) -> None:
        """Begin anew: nothing was left out.

        Args:
            most_in_a_row: how many steps may be left out one after the other. With one more, that and all later steps
                of the run are.
        """
        state = np.zeros([_FOUND + self.num_replicas], np.int64)
        state[_MOST_IN_A_ROW] = most_in_a_row
        for copy in components(self.state):
            copy.assign(state)
        self._num_seen = 0

    def look(self) -> tuple[list[BadStep], int, bool]:
        """Return the last few steps left out since the last call, how many there were, and whether all are from now on.

        All workers get the same answer.
        """
        state = components(self.state)[0].numpy()
        before, self._num_seen = self._num_seen, int(state[_BAD])
        if self._num_seen == before:
            return [], 0, bool(state[_STOPPED])
        table = components(self.bad)[0].numpy()
        numbers = range(max(before, self._num_seen - _REMEMBERED), self._num_seen)
        rows = [table[number % _REMEMBERED] for number in numbers]
        steps = [BadStep(int(state[_STEPS] - 1 - row[0]), tuple(int(code) for code in row[1:])) for row in rows]
        return steps, self._num_seen - before, bool(state[_STOPPED])

    def step(self) -> StepGuard:
        """Return what guards one step of this replica, while it is traced."""
        return StepGuard(self)


class StepGuard:
    """Guards one step of a replica; virtual replicas that one carries share it.

    Args:
        guard: of the model.
    """

    def __init__(self, guard: Guard) -> None:
        self._num_replicas = guard.num_replicas
        self._state = local_component(guard.state)
        self._bad = local_component(guard.bad)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._before: dict[int, tuple[tf.Variable, tf.Tensor]] = {}

    def note(self, variable: Variable) -> None:
        """Take note, before a variable is assigned in the step, of what it holds."""
        local = local_component(variable)
        if id(local) in self._before or not (local.dtype.is_floating or is_sync_on_read(variable)):
            return
        # Perhaps this is in the graph of a function that the step calls, which holds no value for after it.
        with tf.init_scope() if self._graph is None else self._graph.as_default():
            self._before[id(local)] = local, local.read_value()

    def found(
        self,
        replica: int | tf.Tensor,
        num_replicas: int,
        rows: TensorNest,
        batch: TensorNest,
        losses: Sequence[tf.Tensor],
        gradients: Sequence[Gradient],
        scale: tf.Tensor = None,
    ) -> tf.Tensor:
        """Return what a replica has found, [3, R] float32: 1 where the loss, gradients or data of one are not finite.

        Args:
            replica: its number.
            num_replicas: among so many; a multiple of R where a replica's batch is cut further.
            rows: of its batch; of none, nothing is wrong.
            batch: what is looked at when something is wrong.
            losses: scalars.
            gradients: its own.
            scale: of the loss, by which an optimizer halves it when gradients overflow; so these count only where it
                is 1 or less.
        """
        loss_is_bad = tf.logical_not(_all_finite([loss for loss in losses if _is_at_hand(loss)]))
        gradients_are_bad = tf.logical_not(_all_finite(gradients))
        if scale is not None:
            gradients_are_bad = tf.logical_and(gradients_are_bad, tf.convert_to_tensor(scale) <= 1.0)
        is_bad = tf.logical_and(tf.logical_or(loss_is_bad, gradients_are_bad), tf.cast(rows, tf.int32) > 0)
        leaves = [leaf for leaf in tree.flatten(batch) if tf.is_tensor(leaf)]
        data_is_bad = tf.cond(is_bad, lambda: tf.logical_not(_all_finite(leaves)), lambda: tf.constant(False))
        flags = tf.stack([tf.logical_and(is_bad, flag) for flag in (loss_is_bad, gradients_are_bad, data_is_bad)])
        place = tf.one_hot(replica * self._num_replicas // num_replicas, self._num_replicas, dtype=tf.float32)
        return tf.cast(flags, tf.float32)[:, None] * place[None]

    def may_update(self, found: tf.Tensor) -> tf.Tensor:
        """Whether weights may be updated, given the sum of what all replicas have found, [3, R]."""
        return tf.logical_and(tf.reduce_all(tf.equal(found, 0.0)), tf.equal(self._state.read_value()[_STOPPED], 0))

    def allows(self) -> tf.Tensor:
        """Whether weights may be updated, given what all replicas have found in this step so far."""
        state = self._state.read_value()
        return tf.logical_and(tf.reduce_all(tf.equal(state[_FOUND:], 0)), tf.equal(state[_STOPPED], 0))

    def keep(self, found: tf.Tensor) -> None:
        """Keep the sum of what all replicas have found, [3, R], with what was found in this step before."""
        state = self._state.read_value()
        flags = tf.cast(found > 0.0, tf.int64) * tf.constant([[LOSS], [GRADIENTS], [DATA]], tf.int64)
        codes = tf.bitwise.bitwise_or(state[_FOUND:], tf.reduce_sum(flags, axis=0))
        self._state.assign(tf.concat([state[:_FOUND], codes], axis=0))

    def end(self) -> None:
        """End the step: if it is skipped, restore what it has assigned, and record it."""
        state = self._state.read_value()
        steps, num_bad, in_a_row, most_in_a_row = (state[i] for i in (_STEPS, _BAD, _IN_A_ROW, _MOST_IN_A_ROW))
        found, was_stopped = state[_FOUND:], state[_STOPPED] > 0
        is_bad = tf.reduce_any(found > 0)
        is_news = tf.logical_and(is_bad, tf.logical_not(was_stopped))
        in_a_row = tf.where(is_bad, in_a_row + 1, tf.zeros_like(in_a_row))
        stopped = tf.logical_or(was_stopped, tf.logical_and(is_bad, in_a_row > most_in_a_row))
        counts = [steps + 1, num_bad + tf.cast(is_news, tf.int64), in_a_row, most_in_a_row, tf.cast(stopped, tf.int64)]

        def remember() -> tf.Tensor:
            place = tf.equal(tf.range(_REMEMBERED, dtype=tf.int64), num_bad % _REMEMBERED)
            row = tf.concat([steps[None], found], axis=0)
            self._bad.assign(tf.where(place[:, None], row[None], self._bad.read_value()))
            return tf.constant(True)

        def put_back() -> tf.Tensor:
            for local, value in self._before.values():
                local.assign(value)
            return tf.constant(True)

        tf.cond(is_news, remember, lambda: tf.constant(False))
        tf.cond(tf.logical_or(is_bad, was_stopped), put_back, lambda: tf.constant(False))
        self._state.assign(tf.concat([tf.stack(counts), tf.zeros_like(found)], axis=0))


class ReplicaGuard:
    """What one replica finds in a step that is guarded.

    Attributes:
        of_step: guards the step, for all virtual replicas that a real one carries.
        batch: the replica's, which is looked at when something is wrong.
        losses: scalars of the step.

    Args:
        of_step: see above.
        replica: its number, and
        num_replicas: among so many, see ``StepGuard.found``.
        rows: of its batch.
    """

    def __init__(self, of_step: StepGuard, replica: int | tf.Tensor, num_replicas: int, rows: int | tf.Tensor) -> None:
        self.of_step = of_step
        self.batch: TensorNest = None
        self.losses: list[tf.Tensor] = []
        self._own = replica, num_replicas, rows

    def found(self, gradients: Sequence[Gradient], optimizer: keras.optimizers.Optimizer | None = None) -> tf.Tensor:
        """Return what the replica has found, see ``StepGuard.found``."""
        scale = getattr(optimizer, "dynamic_scale", None)
        return self.of_step.found(*self._own, self.batch, self.losses, gradients, scale)


def _all_finite(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether all floats are; True for none."""
    dense = dense_values(values)
    dense = [value.flat_values if isinstance(value, tf.RaggedTensor) else value for value in dense]
    dense = [value.values if isinstance(value, tf.SparseTensor) else value for value in dense]
    finite = [tf.reduce_all(tf.math.is_finite(value)) for value in dense if value.dtype.is_floating]
    return tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)


def _is_at_hand(value: tf.Tensor) -> bool:
    """Whether the graph that is being traced can use a tensor: it is of this one, or of one around it."""
    if tf.executing_eagerly():
        return True
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(value, "graph", graph) is graph:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
