"""Examine what a step does with its gradients in a scratch graph, and refuse what would not do what it seems to.

Nothing of the trace is ever run: replicas do not add anything up in it, and know no more of a sum than that it is the
same on all of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.creation import call_outside
from keras_dist_ext._keras.optimizers import inner_optimizer
from keras_dist_ext._keras.strategies import replica_id
from keras_dist_ext._keras.variables import Variable, local_component, tf_variable
from keras_dist_ext.aliases import Gradient, TensorNest
from keras_dist_ext.errors import LoopError
from keras_dist_ext.step.all_rows import stands_for_all
from keras_dist_ext.step.ancestry import Assignment, Value
from keras_dist_ext.step.branches import Place
from keras_dist_ext.step.gradient_values import parts
from keras_dist_ext.step.gradients import Gradients
from keras_dist_ext.step.logs import ComputesWithResults, pooled_result
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.step.origins import Origins
from keras_dist_ext.step.reducers import Reducer, RowRange
from keras_dist_ext.step.step_plan import GradientCall, StepPlan
from keras_dist_ext.step.update import Update, assign_reduced, run_optimizer
from keras_dist_ext.training.step_assignments import labels, shared_state, shortened

__all__ = ["ExaminedReducer", "ReducesInFunction", "StepExamination"]


class ReducesInFunction(Exception):
    """Replicas add up inside of a function of TensorFlow, which is to be run as a part of the step."""


class ExaminedReducer(Reducer):
    """Adds nothing up, and returns what may be the sums.

    Args:
        step_name: for messages.
        examination: takes note of where they add up, and of the values.
        own: adds up over replicas when the step is run.
        num_replicas: that add up, virtual ones where there are such.
    """

    def __init__(self, step_name: str, examination: StepExamination, own: Reducer, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.is_single = own.is_single and num_replicas == 1
        self.traces_each_replica = own.traces_each_replica
        self.reduced: dict[int, tf.Tensor] = {}  # by id: what the user's code has added up by itself
        self._step_name = step_name
        self._origins = examination.origins
        self._examination = examination
        self._own = own
        self._graph = tf.compat.v1.get_default_graph()

    @property
    def traces_functions_anew(self) -> bool:
        """See ``Reducer``."""
        return self.num_replicas > 1

    @property
    def sums_in_layers(self) -> bool:
        """See ``Reducer``."""
        return self._own.sums_in_layers

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return what may be the sums."""
        if values:
            self.note_reduction()
        return [self._origins.mark_replicated(value) for value in values]

    def note_reduction(self) -> None:
        """Note that replicas add up here.

        Raises:
            LoopError: they cannot wait for each other here.
            ReducesInFunction: the step is to be traced anew, with the function as a part of it.
        """
        if self.num_replicas == 1 or tf.compat.v1.get_default_graph() is self._graph:
            return
        if not self._examination.nested or not self._own.merges_branches or self.num_replicas != self._own.num_replicas:
            raise LoopError(
                f"The step {self._step_name!r} adds up over replicas (the gradients of a tape, reduce_gradients, "
                "gather_rows, a sum or a weighted mean) inside of a tf.function, or of a branch or loop in the graph, "
                "where replicas cannot wait for each other. Add up before: take gradients, and gather rows, outside, "
                "and use them inside. A loop of a fixed number of updates can be one of Python's."
            )
        self._examination.inline_functions()
        self._examination.reduces_in.update(place.key for place in self._examination.nested)

    def sum_if(self, condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See ``sum``."""
        return self.sum(values)

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """See ``Reducer``."""
        return self._own.updating()

    def update(self, update: Update) -> None:
        """Run the optimizer with what may be the sums, also where gradients are accumulated."""
        if self.is_single:
            self._own.update(update)
            return
        if update.are_global:
            run_optimizer(self, update, update.terms)
            return
        gradients, values = self.sum(update.terms), self.sum(update.values)
        assign_reduced(update.states, values)
        run_optimizer(self, update, gradients)

    def gather(self, values: Sequence[tf.Tensor], rows: RowRange) -> list[tf.Tensor]:
        """Return what stands for the rows of all replicas."""
        return self.sum([stands_for_all(value) for value in values])

    def pooled_result(self, metric: keras.Metric) -> TensorNest:
        """Compute a metric's result from what may be the state of all replicas."""
        return pooled_result(metric, self.sum)

    def all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: TensorNest, original: Callable[..., TensorNest]
    ) -> TensorNest:
        """Note what is reduced."""
        self.note_reduction()

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def reduced(given: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return self._origins.mark_replicated(given), self._origins.mark_replicated

        total = tf.nest.map_structure(lambda given: reduced(tf.convert_to_tensor(given)), value)
        self.reduced.update({id(leaf): leaf for leaf in tf.nest.flatten(total)})
        return total


class StepExamination(StepObserver):
    """What was noted of a step while it was traced, on all replicas.

    Args:
        name: of the step, as messages say it.
        num_replicas: over all workers; virtual ones where there are such.
        strategy: under which it makes what it trains.

    Attributes:
        functions: of TensorFlow, in which replicas add up, and
        computes_with_results: whether it does so with results of metrics. Of both a trace has to know from its start.
        has_unknown_losses: whether layers add losses of which is not known yet how they grow.
    """

    examines = True

    def __init__(self, name: str, num_replicas: int, strategy: tf.distribute.Strategy) -> None:
        self.name = name
        self.num_replicas = num_replicas
        self.computes_with_results = False
        self.has_unknown_losses = False
        self._strategy = strategy
        self.origins = Origins()
        self.averaged: dict[int, Variable] = {}  # state of layers, whose mean over replicas is taken after the step
        self.of_keras: set[int] = set()  # variables that are assigned by Keras, or by an optimizer of Keras
        self.reducers: list[ExaminedReducer] = []
        self.nested: list[Place] = []
        self.reduces_in: set[Hashable] = set()  # branches and loops in which replicas add up
        self.functions: set[Hashable] = set()
        self._ends: list[tuple[Gradients, Sequence[TensorNest]]] = []  # of each replica's step

    def reducer(self, own: Reducer) -> ExaminedReducer:
        """Return what seems to add up over replicas; see there."""
        self.reducers.append(ExaminedReducer(self.name, self, own, self.num_replicas))
        return self.reducers[-1]

    def inline_functions(self) -> None:
        """Have the functions of TensorFlow that are being traced run as parts of the step.

        Raises:
            ReducesInFunction: there are some, so that the step is to be traced anew.
        """
        functions = [place.key for place in self.nested if place.is_function]
        if functions:
            self.functions.update(functions)
            raise ReducesInFunction

    def forget(self) -> None:
        """Begin anew: the step is traced again."""
        self._ends.clear()

    def complete(self, plan: StepPlan, assigned: Sequence[Assignment]) -> None:
        """Put into a plan what was seen.

        Args:
            plan: of the step.
            assigned: what the step assigns.
        """
        plan.reduces_in = frozenset(self.reduces_in)
        plan.shared_state = shared_state(assigned, self.origins)
        gradients, returned = self._ends[0]
        plan.calls, plan.are_own, plan.whole_accumulators = gradients.calls_seen(returned)
        plan.is_made = plan.is_checked = True

    # StepObserver

    def on_draw(self, own: tf.Tensor) -> tf.Tensor:
        """Note what is drawn."""
        return self.origins.mark_per_replica(own, replica_id()) if self.num_replicas > 1 else own

    def on_write(self, variable: Variable) -> None:
        """Note a variable of Keras that is assigned."""
        self.of_keras.add(id(tf_variable(variable)))

    def on_assign(self, variable: Variable) -> None:
        """Note of which state the mean will be taken."""
        self.averaged[id(local_component(variable))] = variable

    def on_differentiate(self, target: TensorNest, sources: Sequence[tf.Tensor | Variable]) -> GradientCall:
        """Say that all gradients may go straight into an optimizer, so that it is seen which do."""
        shared = tuple(map(self._is_shared, sources))
        return GradientCall(shared, shared)

    def _is_shared(self, source: tf.Tensor | Variable) -> bool:
        if isinstance(source, tf.Variable | keras.Variable):
            return True
        return isinstance(source, tf.Tensor) and self.origins.is_shared(Value(source))

    def on_gather(self, value: tf.Tensor) -> None:
        """Note what is the same on all replicas."""
        self.origins.note_replicated(value)
        self.reducers[-1].note_reduction()

    def on_gradient(self, value: tf.Tensor) -> tf.Tensor:
        """Mark a gradient as one of the global batch."""
        self.reducers[-1].note_reduction()
        return self.origins.mark_gradient(value)

    def on_apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
    ) -> None:
        """Refuse gradients that no tape has made, and have the optimizer's variables made, which a step cannot."""
        self.inline_functions()
        present = [(g, v) for g, v in zip(gradients, variables, strict=False) if g is not None]
        own = [v for g, v in present if self._is_own(g)]
        if self.num_replicas > 1 and own:
            raise LoopError(
                f"The step {self.name!r} gives {optimizer.name} gradients of {shortened(labels(own))} that each "
                "replica has computed from its own examples or random numbers. What scales gradients of a "
                "GradientTape, or decides on them, such as the loss, must be that of the whole batch: loss = "
                "kde.reduce_gradients(loss) before it is used. Gradients that no GradientTape has made become so by "
                "kde.reduce_gradients(gradients). All replicas draw the same for a gradient with ReplicaSeeds(seed, "
                'draws="global").'
            )
        if not optimizer.built:
            call_outside(functools.partial(optimizer.build, list(variables)), self._strategy)
        self.of_keras.update(
            id(tf_variable(v)) for v in (*variables, *inner_optimizer(optimizer).variables, *optimizer.variables)
        )

    def on_unknown_losses(self) -> bool:
        """Note it, and go on: what becomes of gradients does not depend on how they are weighed."""
        self.has_unknown_losses = True
        return True

    def on_result(self) -> None:
        """Have results of metrics in functions, branches and loops be those of all replicas."""
        if self.nested and self.num_replicas > 1:
            self.inline_functions()
            self.computes_with_results = True
            raise ComputesWithResults

    def on_end(self, gradients: Gradients, returned: Sequence[TensorNest]) -> None:
        """Note it."""
        self._ends.append((gradients, returned))

    def on_reduce(self, gradients: Sequence[Gradient]) -> Sequence[bool]:
        """Say which gradients are a replica's own."""
        return [self._is_own(gradient) for gradient in gradients]

    def _is_own(self, gradient: Gradient) -> bool:
        return bool(self.origins.replicas_of([Value(part) for part in parts(gradient) if isinstance(part, tf.Tensor)]))
