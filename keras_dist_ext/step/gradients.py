"""Make a replica's gradients those of the global batch: where an optimizer gets them, or where a step asks for it.

Where gradients go straight into an optimizer they are summed there, once, packed with what else all replicas have to
know. Gradients that are global already are not summed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext._keras.optimizers import inner_optimizer, optimized_variables
from keras_dist_ext.step.ancestry import Value, sources, walk_back
from keras_dist_ext.step.layer_state import LayerState
from keras_dist_ext.step.nan_guard import ReplicaGuard
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.step.recorder import StepNote
from keras_dist_ext.step.reducers import Reducer
from keras_dist_ext.step.row_weights import RowWeights
from keras_dist_ext.step.update import Update, assign_reduced, run_optimizer, split_flags

__all__ = ["Gradients"]


class Gradients:
    """The gradients of one replica in a step.

    Args:
        reducer: how the replica meets the others.
        weights: of its rows.
        states: that layers assign.
        note: takes what is recorded of the step, if anything is.
        guard: leaves the step out if something in it is not finite, if that is wanted.
        observer: is told of them.
    """

    def __init__(
        self,
        reducer: Reducer,
        weights: RowWeights,
        states: LayerState,
        note: StepNote | None,
        guard: ReplicaGuard | None,
        observer: StepObserver,
    ) -> None:
        self._reducer = reducer
        self._weights = weights
        self._states = states
        self._note = note
        self._guard = guard
        self._observer = observer
        self._global: tuple[Any, ...] = ()  # tensors that ``reduce`` has returned
        self._may_update: tf.Tensor | None = None  # whether weights may change by them

    def apply(self, optimizer: Any, gradients: Any, variables: Any, original: Callable[..., None]) -> None:
        """Sum gradients over replicas, then let every replica run the optimizer on its own copies.

        Those that are global already are not summed again, so this may be done in a branch or a loop of the graph.

        Args:
            optimizer: of Keras.
            gradients: of the replica; None where there is none.
            variables: one for each; None for those of the optimizer.
            original: runs the optimizer.
        """
        gradients = list(gradients)
        variables = list(optimized_variables(optimizer) if variables is None else variables)
        self._observer.on_apply(optimizer, gradients, variables)
        original = self._observed(original)
        self._reducer.prepare(optimizer, variables, guards=self._guard is not None)
        present = [gradient for gradient in gradients if gradient is not None]
        guard = None if self._guard is None else self._guard.of_step
        if present and self._needs_no_sum(optimizer) and all(map(self._is_global, present)):
            update = Update(optimizer, gradients, variables, original, present, [], [], guard)
            run_optimizer(self._reducer, update, present, self._may_update)
            return
        self._note_gradients(optimizer, present)
        found = [] if self._guard is None else [self._guard.found(present, optimizer)]
        if self._reducer.is_alone:
            self._reducer.update(Update(optimizer, gradients, variables, original, present, [], found, guard))
            return
        terms = self._weights.terms(optimizer, present)
        states, values = self._states.take_terms()
        self._reducer.update(Update(optimizer, gradients, variables, original, terms, states, values + found, guard))

    def _observed(self, original: Callable[..., None]) -> Callable[..., None]:
        def run(gradients: Any, variables: Any) -> None:
            self._observer.on_update(gradients, variables)
            original(gradients, variables)

        return run

    def reduce(self, gradients: list[Any]) -> list[Any]:
        """Return the gradients of the global batch, the same on every replica."""
        self._observer.on_reduce(gradients)
        self._note_gradients(None, gradients)
        found = [] if self._guard is None else [self._guard.found(gradients)]
        guard = None if self._guard is None else self._guard.of_step
        if self._reducer.num_replicas == 1:
            return _zero_unless(split_flags(guard, found)[1], gradients)
        own = self._weights.terms(None, gradients)
        states, values = self._states.take_terms()
        summed = self._reducer.sum(own + values + found)
        values, self._may_update = split_flags(guard, summed[len(own) :])
        assign_reduced(states, values)
        gradients = _zero_unless(self._may_update, summed[: len(own)])
        for total in gradients:
            self._global += _parts(total)
        return gradients

    def _needs_no_sum(self, optimizer: Any) -> bool:
        """Whether an optimizer needs no sum but that of its gradients, and some were made global before."""
        accumulates = inner_optimizer(optimizer).gradient_accumulation_steps
        return bool(self._global) and self._reducer.traces_each_replica and not accumulates

    def _is_global(self, gradient: Any) -> bool:
        """Whether a gradient is computed from global ones, and from nothing else but constants."""
        if tf.executing_eagerly():
            return all(any(part is total for total in self._global) for part in _parts(gradient))
        sums = {total.op for total in self._global}
        others = walk_back(map(Value, _parts(gradient)), lambda value: value.tensor.op in sums)
        return all(sources(value) or value.tensor.op.type == "Const" for value in others)

    def _note_gradients(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        if self._note is None:
            return
        factor: Any = 1.0
        if self._reducer.num_replicas > 1 and self._weights.is_weighted(optimizer):
            factor = self._weights.inverse_share
        if hasattr(optimizer, "dynamic_scale"):
            factor = tf.math.divide_no_nan(tf.cast(factor, tf.float32), tf.convert_to_tensor(optimizer.dynamic_scale))
        self._note.gradients(self._reducer.replica_id, gradients, factor)


def _parts(gradient: Any) -> tuple[Any, ...]:
    return (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else (gradient,)


def _zero_unless(may_update: Any, gradients: list[Any]) -> list[Any]:
    """Replace gradients of a step that is left out by zeros."""
    if may_update is None:
        return gradients
    return [
        tf.IndexedSlices(_zero_unless(may_update, [g.values])[0], g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else tf.where(may_update, g, tf.zeros_like(g))
        for g in gradients
    ]
