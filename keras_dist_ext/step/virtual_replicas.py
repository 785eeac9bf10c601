"""Run the virtual replicas of one real replica, one after the other, within one step.

A virtual replica has its rows of the global batch, its random streams, its batch statistics and its place in the sums:
it is a ``ReplicaStep`` with its own ``Reducer``. It runs in a thread that is suspended at each point where
replicas synchronize (a sum, an update of the weights), until the others of this real replica have come there too. So
steps of the user's own, losses with masks and layers that sum over replicas need nothing else. One thread runs at a
time, and in graphs they live while tracing only.

Each virtual replica finds the state of layers and random generators as it was when the step began. Then the state
becomes the mean over all, weighted by rows, and counters have advanced as for one.

Letters: V = virtual replicas, P = real ones, both over all workers; a real one carries V / P in a step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.layers import get_layer_losses, set_layer_losses
from keras_dist_ext._keras.tracing import capture_thread_context
from keras_dist_ext._keras.variables import Variable, is_sync_on_read, local_component
from keras_dist_ext.aliases import StepData, TensorNest, UserFunction
from keras_dist_ext.data import split as data
from keras_dist_ext.errors import StrategyError
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.gradient_values import dense_values
from keras_dist_ext.step.pass_through import LocalUpdate
from keras_dist_ext.step.reduce import OrderedSum, PlainSum, optimization_barrier
from keras_dist_ext.step.reducers import MirroredReducer, OneReplica, Reducer, RowRange, reducer_of
from keras_dist_ext.step.replica_step import ReplicaStep
from keras_dist_ext.step.step_options import StepOptions
from keras_dist_ext.step.suspendable_thread import SuspendableThread, SyncPoint
from keras_dist_ext.step.update import (
    Update,
    assign_mean,
    build_optimizer,
    run_optimizer,
    run_update,
    split_flags,
    sum_terms,
)
from keras_dist_ext.strategy.virtual import VirtualReplicas

__all__ = ["run_virtual_replicas"]


Run = Callable[[ReplicaStep, StepData], tuple[TensorNest, list[tf.Tensor]]]


def run_virtual_replicas(
    virtual: VirtualReplicas,
    model: DistributedModel,
    parts: Sequence[StepData],
    global_rows: int | tf.Tensor,
    run: Run,
    options: StepOptions,
    *,
    first_rows: Sequence[int | tf.Tensor | None],
    loops: bool = False,
    side_by_side: bool = False,
) -> tuple[TensorNest, list[tf.Tensor]]:
    """Run the virtual replicas of this real one, in replica context.

    Args:
        virtual: how many there are in all.
        model: the Keras model.
        parts: the batch of each that this real replica carries.
        global_rows: rows of the global batch.
        run: makes the step of one replica on its batch; returns anything, and values that are to be added up.
        options: of the step.
        first_rows: where the batch of each begins in the global one, if that is known.
        loops: whether one execution may make several steps.
        side_by_side: whether TensorFlow may compute several at a time, which takes the memory of all.

    Returns:
        What ``run`` has returned for the first, and the sums over those carried.
    """
    replicas = _VirtualReplicas(
        virtual, model, parts, global_rows, options, first_rows=first_rows, loops=loops, side_by_side=side_by_side
    )
    return replicas.run(run)


class _VirtualReplicas:
    """The virtual replicas of one real one, during one step."""

    def __init__(
        self,
        virtual: VirtualReplicas,
        model: DistributedModel,
        parts: Sequence[StepData],
        global_rows: int | tf.Tensor,
        options: StepOptions,
        *,
        first_rows: Sequence[int | tf.Tensor | None],
        loops: bool,
        side_by_side: bool,
    ) -> None:
        context = tf.distribute.get_replica_context()
        self._real = reducer_of(model, loops=loops)
        if self._real.is_single and virtual.is_ordered:
            self._real = _OneDevice()
        self._virtual = virtual
        self._side_by_side = side_by_side
        self._parts = parts
        self._first = self._real.replica_id * len(parts)
        self._state = _State(model)
        self._place = capture_thread_context(_OneOfSeveral(context.strategy, self._real.replica_id))
        self._before: list[TensorNest] = []
        self._reducers = [
            _VirtualReducer(self._real, virtual.count, self._first + place, self._state) for place in range(len(parts))
        ]
        self._steps = [
            ReplicaStep(model, data.num_rows(part), global_rows, options, reducer, first_row=first)
            for part, reducer, first in zip(parts, self._reducers, first_rows, strict=True)
        ]

    def run(self, run: Run) -> tuple[TensorNest, list[tf.Tensor]]:
        """See ``run_virtual_replicas``."""
        for place, reducer in enumerate(self._reducers):
            reducer.thread = SuspendableThread(functools.partial(self._one, run, place))
        answer: TensorNest = None
        try:
            while True:
                total = self._new_sum()
                points = self._resume_all(total, answer)
                if points[0].kind == "end":
                    return points[0].subject, total.values
                answer = self._gather(points) if points[0].kind == "gather" else self._answer(points[0], total)
        finally:
            for reducer in self._reducers:
                reducer.thread.end()

    def _new_sum(self) -> OrderedSum | PlainSum:
        return OrderedSum(self._virtual.count) if self._virtual.is_ordered else PlainSum()

    def _one(self, run: Run, place: int) -> SyncPoint:
        step, part = self._steps[place], self._parts[place]
        with self._place(f"virtual_replica_{step.replica_id}"), intercept(step):
            with tf.control_dependencies(self._before):  # what the last one's gradients were made from is free by then
                part = tree.map_structure(lambda leaf: leaf if leaf is None else optimization_barrier(leaf), part)
            step.begin(part)
            subject, values = run(step, part)
        return SyncPoint("end", values, subject)

    def _resume_all(self, total: OrderedSum | PlainSum, answer: TensorNest) -> list[SyncPoint]:
        """Let each run until it is suspended again, all for the same reason."""
        points: list[SyncPoint] = []
        for place, reducer in enumerate(self._reducers):
            with self._state.of(place):
                points.append(reducer.thread.resume(answer))
            first, this = points[0], points[-1]
            if first.kind != this.kind or len(first.values) != len(this.values):
                raise StrategyError(
                    f"Virtual replica {self._first} stopped for '{first.kind}' with {len(first.values)} values, and "
                    f"{reducer.replica_id} for '{this.kind}' with {len(this.values)}. All replicas must run the same "
                    "code: take out of the step what depends on a replica's number, or on how often it was traced."
                )
            if this.kind != "gather":
                total.add(reducer.replica_id, this.values)
            is_last = this.kind in ("update", "end") and not self._side_by_side and not tf.executing_eagerly()
            self._before = dense_values(this.values) if is_last else []
        return points

    def _gather(self, points: Sequence[SyncPoint]) -> list[tf.Tensor]:
        """Put the rows of all together: of those carried here, then of all real replicas."""
        own = [tf.concat(parts, 0) for parts in zip(*[point.values for point in points], strict=True)]
        ranges: list[RowRange] = [point.subject for point in points]
        count = sum(one.count for one in ranges)
        return self._real.gather(own, RowRange(ranges[0].first, count, ranges[0].total))

    def _answer(self, point: SyncPoint, total: OrderedSum | PlainSum) -> TensorNest:
        """Do what they were suspended for, once for all."""
        if point.kind == "sum":
            return total.over_replicas()
        if point.kind == "result":
            return self._real.pooled_result(point.subject)
        if point.kind == "assign":
            self._state.assign_reduced(point.subject, total.over_replicas())
        else:
            self._update(total, point.subject)
        return None

    def _update(self, total: OrderedSum | PlainSum, update: Update) -> None:
        real, num_values = self._real, len(update.values)
        if real.num_replicas > 1:
            build_optimizer(update.optimizer, update.variables)
        if update.are_global:
            self._state.share(update.variables)
            run_update(real, update)
            return
        if self._virtual.is_ordered or real.num_replicas == 1:
            summed = total.over_replicas()
            values, gradients = summed[:num_values], summed[num_values:]
        else:
            gradients, values = sum_terms(real, update, total.values[num_values:], total.values[:num_values])
        values, may_update = split_flags(update.guard, values)
        self._state.assign_reduced(update.states, values)
        self._state.share(update.variables)
        run_optimizer(real, update, gradients, may_update)


class _OneDevice(OneReplica):
    """The only device, which updates weights with the bits that several devices give them."""

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """See ``Reducer``."""
        return intercept(LocalUpdate())


class _VirtualReducer(Reducer):
    """Adds up over all virtual replicas: the thread of each is suspended until those of its real replica are there too.

    Args:
        real: adds up over the real replicas.
        num_replicas: V.
        replica_id: the number among them.
        state: what each virtual replica has for itself.
    """

    thread: SuspendableThread

    def __init__(self, real: Reducer, num_replicas: int, replica_id: int, state: _State) -> None:
        self.num_replicas = num_replicas
        self.traces_each_replica = real.traces_each_replica
        self.virtual_replica = self._replica_id = replica_id
        self._real = real
        self._state = state

    @property
    def replica_id(self) -> int:
        """Its number among all virtual replicas."""
        return self._replica_id

    @property
    def sums_in_layers(self) -> bool:
        """Sums inside of a layer go over all virtual replicas."""
        return True

    def _suspend(self, point: SyncPoint) -> TensorNest:
        self._state.check_graph()
        if isinstance(self._real, MirroredReducer):
            self._real.check_loop(point.values)
        return self.thread.suspend(point)

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up each value over all virtual replicas."""
        return list(self._suspend(SyncPoint("sum", list(values))))

    def gather(self, values: Sequence[tf.Tensor], rows: RowRange) -> list[tf.Tensor]:
        """Return each value with the rows of all virtual replicas."""
        return list(self._suspend(SyncPoint("gather", list(values), rows)))

    def sum_if(self, condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Leave it to the real replica, which runs the optimizer for all.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """See ``sum_if``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError

    def prepare(self, optimizer: keras.optimizers.Optimizer, variables: list[Variable], *, guards: bool) -> None:
        """Leave it to the real replica."""

    def update(self, update: Update) -> None:
        """Have the optimizer run once for all virtual replicas, with the sum of their gradients."""
        self._suspend(SyncPoint("update", [] if update.are_global else update.values + update.terms, update))

    def assign(self, variable: Variable, value: tf.Tensor, original: Callable[[tf.Tensor], None]) -> bool:
        """Assign for this virtual replica only; metrics add up."""
        if variable.synchronization == "on_read":
            original(value)
            return False
        self._state.note(variable)
        local = local_component(variable)
        local.assign(tf.cast(value, local.dtype))
        return not is_sync_on_read(variable)

    def assign_mean(self, variables: list[Variable], terms: list[tf.Tensor]) -> None:
        """Assign to variables the sum over all virtual replicas of what each adds to it."""
        self._suspend(SyncPoint("assign", terms, variables))

    def pooled_result(self, metric: keras.metrics.Metric) -> tf.Tensor:
        """The result of a metric once all virtual replicas have come here."""
        return self._suspend(SyncPoint("result", [], metric))


class _State:
    """What virtual replicas assign to variables and give to ``add_loss``, each for itself."""

    def __init__(self, model: DistributedModel) -> None:
        self._model = model
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._variables: dict[int, Variable] = {}
        self._start: dict[int, tf.Tensor] = {}  # what a variable held when the step began
        self._held: dict[int, tf.Tensor] = {}  # what it holds now
        self._own: dict[tuple[int, int], tf.Tensor] = {}  # what it holds for a replica that has assigned it
        self._losses: dict[int, tf.Tensor] = {}
        self._new: dict[int, None] = {}  # assigned by the replica that runs

    def check_graph(self) -> None:
        """See that replicas can add up here.

        Raises:
            StrategyError: they are in the graph of a tf.function, or of a branch or loop.
        """
        here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if here is not self._graph:
            raise StrategyError(
                "A step sums over replicas inside of a tf.function, or of a branch or loop in the graph, where virtual "
                "replicas cannot wait for each other. Take the decorator off, or the sum (an update of weights, a loss "
                "with a mask or sample weights, a synchronized layer) out of the branch."
            )

    @contextlib.contextmanager
    def of(self, place: int) -> Iterator[None]:
        """Put the state of a virtual replica in place, and keep what becomes of it."""
        for key, variable in self._variables.items():
            wanted = self._own.get((place, key), self._start[key])
            if self._held[key] is not wanted:
                self._hold(key, variable, wanted)
        if place in self._losses:
            set_layer_losses(self._losses[place])
        yield
        self._losses[place] = get_layer_losses(self._model)
        for key in self._new:
            value = local_component(self._variables[key]).read_value()
            self._own[place, key] = self._held[key] = value
        self._new.clear()

    def note(self, variable: Variable) -> None:
        """Take note, before a variable is assigned, of what it held when the step began."""
        if self._graph is None and not tf.executing_eagerly():
            raise StrategyError(
                f"'{variable.path}' is assigned inside of a tf.function, in a model that runs eagerly, so that virtual "
                "replicas would share what it holds. Compile without run_eagerly, or take the decorator off."
            )
        key = id(variable)
        self._new[key] = None
        if key not in self._variables:
            with contextlib.nullcontext() if self._graph is None else self._graph.as_default():
                self._start[key] = self._held[key] = local_component(variable).read_value()
            self._variables[key] = variable

    def _hold(self, key: int, variable: Variable, value: tf.Tensor) -> None:
        local = local_component(variable)
        local.assign(tf.cast(value, local.dtype))
        self._held[key] = value

    def assign_reduced(self, variables: Sequence[Variable], values: Sequence[tf.Tensor]) -> None:
        """Assign what the values of all were reduced to."""
        self.share(variables)
        for variable, value in zip(variables, values, strict=True):
            assign_mean(local_component(variable), value)

    def share(self, variables: Sequence[Variable]) -> None:
        """Let all have the same again in variables that are about to be assigned for all of them."""
        for variable in variables:
            key = id(variable)
            if self._variables.pop(key, None) is not None:
                self._own = {(place, k): value for (place, k), value in self._own.items() if k != key}


class _OneOfSeveral(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """The replica context in the thread of a virtual replica: TensorFlow itself cannot wait for the others there."""

    def merge_call(self, merge_fn: UserFunction, args: TensorNest = (), kwargs: TensorNest = None) -> NoReturn:
        """Refuse.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            "A step calls merge_call of tf.distribute, as all_gather does and tf.Variables with an aggregation do when "
            "they are assigned; there, virtual replicas cannot wait for each other. Use all_reduce of the replica "
            "context, or compile without virtual_replicas."
        )
