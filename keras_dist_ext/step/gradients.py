"""Turn a replica's gradients into those of the global batch: in its GradientTape, or where a step asks for it.

Whatever a step does with its gradients is then as on one device. Where they go straight into an optimizer they are
summed there instead, once, packed with what else all replicas have to know (see ``StepPlan``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.optimizers import inner_optimizer, keeps_gradients, optimized_variables
from keras_dist_ext._keras.tapes import is_differentiated
from keras_dist_ext._keras.tracing import in_vectorized_map
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.aliases import Gradient, TensorNest
from keras_dist_ext.step.ancestry import Value, sources, walk_back
from keras_dist_ext.step.gradient_values import copied, parts, zero_unless
from keras_dist_ext.step.kept_gradients import KeptGradient, KeptGradients
from keras_dist_ext.step.layer_state import LayerState
from keras_dist_ext.step.nan_guard import ReplicaGuard
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.step.recorder import StepNote
from keras_dist_ext.step.reduce import optimization_barrier, scale
from keras_dist_ext.step.reducers import Reducer
from keras_dist_ext.step.row_weights import RowWeights
from keras_dist_ext.step.step_plan import GradientCall, StepPlan
from keras_dist_ext.step.update import Update, assign_reduced, build_optimizer, split_flags

__all__ = ["Gradients"]


class Gradients:
    """The gradients of one replica in a step.

    Args:
        reducer: adds up over replicas.
        weights: of its rows.
        states: that layers assign.
        note: takes what is recorded of the step, if anything is.
        guard: leaves the step out if something in it is not finite, if that is wanted.
        observer: is called with them.
        plan: what is known of the step; None sums all gradients where they are made.
    """

    def __init__(
        self,
        reducer: Reducer,
        weights: RowWeights,
        states: LayerState,
        note: StepNote | None,
        guard: ReplicaGuard | None,
        observer: StepObserver,
        plan: StepPlan | None,
    ) -> None:
        self._reducer = reducer
        self._weights = weights
        self._states = states
        self._note = note
        self._guard = guard
        self._observer = observer
        self._plan = plan
        self._graph = self._noted_graph = _graph()
        self._kept = KeptGradients(self._graph)
        self._global: list[tf.Tensor] = []  # tensors that were summed
        self._calls: list[GradientCall] = []
        self._reduced: list[Sequence[bool]] = []

    # Where a tape makes them

    def differentiate(
        self,
        gradient: Callable[[TensorNest, TensorNest], TensorNest],
        target: TensorNest,
        sources: TensorNest,
        output_gradients: TensorNest = None,
        *,
        of_keras: keras.optimizers.Optimizer | None = None,
    ) -> TensorNest:
        """Return gradients of the global batch for what all replicas share, and this replica's own for all else.

        In a tf.vectorized_map, which has a turn for each row, all are the replica's own.

        Args:
            gradient: takes a target and what comes from above; returns gradients.
            target: a loss, or several.
            sources: what it is differentiated for.
            output_gradients: what comes from above, see ``tf.GradientTape.gradient``.
            of_keras: the optimizer that Keras' own step gives the gradients to; None for a step of the user's.
        """
        if self._reducer.num_replicas > 1 and in_vectorized_map():  # a turn is a row, and each replica has its own
            return gradient(target, output_gradients)
        flat_sources = tf.nest.flatten(sources)
        known = self._observer.on_differentiate(target, flat_sources)
        goes_straight = of_keras is not None and keeps_gradients(of_keras)
        if self._reducer.num_replicas == 1:
            found = gradient(target, output_gradients)
            return found if self._guard is None or goes_straight else self._guarded(found, flat_sources, target)
        if goes_straight:
            call = GradientCall.of(flat_sources, go_straight=True)
        else:
            call = known or self._next_call(flat_sources)
            self._calls.append(call)
        found = self._weights.differentiate(gradient, target, output_gradients, of_shared=any(call.are_shared))
        flat = tf.nest.flatten(found)
        keeps = goes_straight or not tf.executing_eagerly()
        at_once = []
        for place, value in enumerate(flat):
            if value is None or not call.are_shared[place]:
                continue
            if call.go_straight[place] and keeps:
                flat[place] = self._keep(value, place, is_checked=not goes_straight)
            else:
                at_once.append(place)
        sums = self._sum([flat[place] for place in at_once], self._weights.scaled_by(target)) if at_once else []
        for place, total in zip(at_once, sums, strict=True):
            flat[place] = total
        return tf.nest.pack_sequence_as(found, flat)

    def jacobian(self, jacobian: Callable[[], TensorNest], target: TensorNest, sources: TensorNest) -> TensorNest:
        """Return a jacobian over the global batch, where the target has no dimension of examples, else of this replica.

        Args:
            jacobian: computes it from this replica's examples.
            target: what is differentiated.
            sources: what for.
        """
        flat_sources = tf.nest.flatten(sources)
        found = jacobian()
        if self._reducer.num_replicas == 1:
            return found
        weight = self._weights.weight_of(target)  # asked for in any case, so that numbers are asked for in one order
        known = self._observer.on_differentiate(None, flat_sources)
        is_known = self._plan is not None and len(self._calls) < len(self._plan.calls)
        call = known or self._next_call(flat_sources)
        if not is_known and not self._is_of_batch(target):
            call = GradientCall((False,) * len(flat_sources), (False,) * len(flat_sources))
        call = GradientCall(call.are_shared, (False,) * len(flat_sources))
        self._calls.append(call)
        flat = tf.nest.flatten(found)
        places = [i for i, value in enumerate(flat) if value is not None and call.are_shared[i]]
        if places:
            terms = [scale(flat[place], weight) for place in places]
            for place, total in zip(places, self._sum(terms, None), strict=True):
                flat[place] = total
        return tf.nest.pack_sequence_as(found, flat)

    def _is_of_batch(self, target: TensorNest) -> bool:
        """Whether a target has no dimension of examples, as far as its shape tells."""
        first, rows = target.shape[0] if target.shape.rank else 1, self._weights.rows
        return not target.shape.rank or (first is not None and not (isinstance(rows, int) and rows == first))

    def _next_call(self, flat_sources: Sequence[Variable]) -> GradientCall:
        if self._plan is None:
            return GradientCall.of(flat_sources)
        return self._plan.call(len(self._calls), flat_sources)

    def keep_straight(self, gradients: Sequence[Gradient]) -> None:
        """Take gradients for those of Keras' own step, which go straight into its optimizer."""
        for place, value in enumerate(gradients):
            if value is not None:
                self._keep(value, place, is_checked=False)

    def _keep(self, value: tf.Tensor, place: int, *, is_checked: bool) -> Gradient:
        """Return what the step gets for a gradient that an optimizer is to sum."""
        given = value
        if is_checked:
            given = self._observer.on_gradient(value if self._observer.examines else copied(value))
        self._weights.mark_as_mean(given)
        self._kept.add(KeptGradient(given, value, len(self._calls) - 1, place, _graph(), is_checked=is_checked))
        return given

    def _sum(self, terms: list[tf.Tensor], optimizer: keras.optimizers.Optimizer) -> list[tf.Tensor]:
        """Add up over replicas; what is differentiated further is differentiated through the sum."""
        self._note_gradients(optimizer, terms)
        found = [] if self._guard is None else [self._guard.found(terms, optimizer)]
        terms = self._weights.zero_if_empty(terms)
        states, others = self._states.take_terms() if _graph() is self._graph else ([], [])
        others += found
        if is_differentiated(terms):
            summed = self._reducer.differentiable_sum([tf.convert_to_tensor(term) for term in terms])
            summed = self._weights.pass_on_if_filled(summed)
            others = self._reducer.sum(others) if others else []
        else:
            summed = self._reducer.sum(others + terms)  # in the order of `sum_terms`
            others, summed = summed[: len(others)], summed[len(others) :]
        summed = [optimization_barrier(total) for total in summed]  # or replicas round differently what comes of it
        others, may_update = split_flags(None if self._guard is None else self._guard.of_step, others)
        assign_reduced(states, others)
        summed = zero_unless(may_update, summed)
        for total in summed:
            self._global += parts(total)
            self._weights.mark_as_mean(total)
        return summed

    def _guarded(self, gradients: TensorNest, flat_sources: Sequence[Variable], target: TensorNest) -> TensorNest:
        """Look at gradients of the only replica, and give the step zeros if it is left out."""
        flat = tf.nest.flatten(gradients)
        shared = GradientCall.of(flat_sources).are_shared
        places = [i for i, value in enumerate(flat) if value is not None and shared[i]]
        values = self._zero_if_bad([flat[place] for place in places], self._weights.scaled_by(target))
        for place, value in zip(places, values, strict=True):
            flat[place] = value
        return tf.nest.pack_sequence_as(gradients, flat)

    def _zero_if_bad(
        self, gradients: list[Gradient], optimizer: keras.optimizers.Optimizer | None = None
    ) -> list[Gradient]:
        if self._guard is None or not gradients:
            return gradients
        return zero_unless(split_flags(self._guard.of_step, [self._guard.found(gradients, optimizer)])[1], gradients)

    # Where an optimizer gets them

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: TensorNest,
        variables: Sequence[Variable],
        original: Callable[..., None],
    ) -> None:
        """Let every replica run the optimizer on its own copies, with gradients of the global batch.

        Those that are global already are not summed again, so this may be done in a branch or a loop of the graph.

        Args:
            optimizer: of Keras.
            gradients: of the replica; None where there is none.
            variables: one for each; None for those of the optimizer.
            original: runs the optimizer.
        """
        gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.Variable | keras.Variable) else g for g in gradients]
        variables = list(optimized_variables(optimizer) if variables is None else variables)
        kept = [self._kept.of(gradient) for gradient in gradients]
        others = [gradient if term is None else None for gradient, term in zip(gradients, kept, strict=True)]
        self._observer.on_apply(optimizer, others, variables)
        if inner_optimizer(optimizer) is not optimizer:  # what has scaled the loss is a constant until it is built
            build_optimizer(optimizer, variables)
        original = self._observed(original)
        self._reducer.prepare(optimizer, variables, guards=self._guard is not None)
        present = [gradient for gradient in gradients if gradient is not None]
        guard = None if self._guard is None else self._guard.of_step
        if self._reducer.is_single:
            self._note_gradients(optimizer, present)
            found = [] if self._guard is None else [self._guard.found(present, optimizer)]
            self._reducer.update(Update(optimizer, gradients, variables, original, present, [], found, guard))
            return
        terms = [term for term, gradient in zip(kept, gradients, strict=True) if gradient is not None]
        own, are_global = self._own_terms(optimizer, present, list(terms))
        if are_global:
            update = Update(optimizer, gradients, variables, original, own, [], [], guard, are_global=True)
            self._reducer.update(update)
            return
        self._note_gradients(optimizer, own)
        found = [] if self._guard is None else [self._guard.found(own, optimizer)]
        states, values = self._states.take_terms() if _graph() is self._graph else ([], [])
        own = self._weights.zero_if_empty(own)
        self._reducer.update(Update(optimizer, gradients, variables, original, own, states, values + found, guard))

    def _observed(self, original: Callable[..., None]) -> Callable[..., None]:
        def run(gradients: TensorNest, variables: Sequence[Variable]) -> None:
            if _graph() is self._graph:  # those of a branch are not seen outside of it
                self._observer.on_update(gradients, variables)
            original(gradients, variables)

        return run

    def _own_terms(
        self, optimizer: keras.optimizers.Optimizer, present: list[Gradient], terms: list[KeptGradient | None]
    ) -> tuple[list[tf.Tensor], bool]:
        """Return what this replica adds to the gradients, or these themselves, and whether that is so."""
        terms = self._kept.used(optimizer, terms)
        straight = [term for term in terms if term is not None]
        if present and len(straight) == len(present):
            return [term.value for term in straight], False
        if straight and not self._observer.examines:  # some are, which a plan avoids
            sums = iter(self._sum([term.value for term in straight], optimizer))
            present = [g if term is None else next(sums) for g, term in zip(present, terms, strict=True)]
        if self._are_global(optimizer, present):
            return present, True
        return self._weights.as_means(present), False

    def _are_global(self, optimizer: keras.optimizers.Optimizer, gradients: list[Gradient]) -> bool:
        """Whether gradients are those of the global batch, and the optimizer can take them so."""
        if self._observer.examines:
            return True
        plan, inner = self._plan, inner_optimizer(optimizer)
        if inner.gradient_accumulation_steps:
            return plan is not None and id(inner) in plan.whole_accumulators
        return (plan is not None and plan.is_checked) or all(map(self._is_global, gradients))

    def _is_global(self, gradient: Gradient) -> bool:
        """Whether a gradient is computed from global ones, and from nothing else but constants."""
        if tf.executing_eagerly():
            return all(any(part is total for total in self._global) for part in parts(gradient))
        sums = {total.op for total in self._global}
        others = walk_back(map(Value, parts(gradient)), lambda value: value.tensor.op in sums)
        return all(sources(value) or value.tensor.op.type == "Const" for value in others)

    # Where a step asks for it

    def reduce(self, gradients: list[Gradient]) -> list[Gradient]:
        """Return the gradients of the global batch, the same on every replica; those that are global stay as they are.

        Args:
            gradients: of this replica, each that of a mean or a sum over its rows.
        """
        gradients = [g if isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g) for g in gradients]
        if self._reducer.num_replicas == 1:
            self._observer.on_reduce(gradients)
            return self._zero_if_bad(gradients)
        places = [
            i
            for i, gradient in enumerate(gradients)
            if self._kept.of(gradient) is None and not any(gradient is total for total in self._global)
        ]
        others = [gradients[place] for place in places]
        are_own = self._observer.on_reduce(others)
        if are_own is None and self._plan is not None and len(self._reduced) < len(self._plan.are_own):
            are_own = self._plan.are_own[len(self._reduced)]
        if are_own is None or len(are_own) != len(others):
            are_own = [True] * len(others)
        self._reduced.append(list(are_own))
        terms = [scale(gradients[place], self._weights.weight_of(gradients[place])) for place in places]
        own = [(place, term) for place, term, is_own in zip(places, terms, are_own, strict=True) if is_own]
        if own:
            sums = self._sum([term for _, term in own], None)
            for (place, _), total in zip(own, sums, strict=True):
                gradients[place] = total
        return gradients

    # When the step is over

    def check_plan(self, returned: Sequence[tf.Tensor]) -> None:
        """See that what was to go straight into an optimizer has gone nowhere else.

        Args:
            returned: what the step returns.

        Raises:
            StalePlan: something has.
        """
        self._kept.check(returned)

    def calls_seen(
        self, returned: Sequence[tf.Tensor]
    ) -> tuple[list[GradientCall], list[Sequence[bool]], frozenset[int]]:
        """Return what has become of gradients in a step that was traced in a scratch graph; see ``StepPlan`` for these.

        Args:
            returned: what the step returns.
        """
        places, whole = self._kept.places_seen(returned)
        calls = [
            GradientCall(call.are_shared, tuple((number, i) in places for i in range(len(call.are_shared))))
            for number, call in enumerate(self._calls)
        ]
        return calls, self._reduced, whole

    @contextlib.contextmanager
    def noted_here(self) -> Iterator[None]:
        """Note gradients in the function that is being traced: all of the step is in it, and it returns them."""
        before, self._noted_graph = self._noted_graph, _graph()
        try:
            yield
        finally:
            self._noted_graph = before

    def _note_gradients(self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Gradient]) -> None:
        if self._note is None or _graph() is not self._noted_graph:
            return
        factor: tf.Tensor = self._weights.inverse_share if self._reducer.num_replicas > 1 else 1.0
        if hasattr(optimizer, "dynamic_scale"):
            factor = tf.math.divide_no_nan(tf.cast(factor, tf.float32), tf.convert_to_tensor(optimizer.dynamic_scale))
        self._note.gradients(self._reducer.replica_id, gradients, factor)


def _graph() -> tf.Graph:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
