"""Run the virtual replicas that one real replica carries, in turns, within one step.

A virtual replica has its rows of the global batch, its random streams, its batch statistics and its place in the sums:
it is a ``ReplicaStep`` as any. It runs in a thread of its own that stops wherever replicas meet (a sum, an update of
the weights), until the others of this real replica are there too. So steps of the user's own, losses with masks and
layers that sum over replicas need nothing else. One thread runs at a time, and in graphs they live while tracing only.

Each virtual replica finds the state of layers and random generators as it was when the step began. Then the state
becomes the mean over all, weighted by rows, and counters have gone on as for one.

Letters: V = virtual replicas, P = real ones, both over all workers; a real one has V / P turns a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.layers import get_layer_losses, set_layer_losses
from keras_dist_ext._keras.optimizers import optimized_variables
from keras_dist_ext._keras.tracing import capture_thread_context, clone_function
from keras_dist_ext._keras.variables import local_component
from keras_dist_ext.data import split as data
from keras_dist_ext.errors import StrategyError
from keras_dist_ext.step.reduce import OrderedSum, PlainSum, apart
from keras_dist_ext.step.replica_step import ReplicaStep, assign_mean
from keras_dist_ext.strategy.virtual import VirtualReplicas

__all__ = ["in_turns"]


def in_turns(
    virtual: VirtualReplicas,
    model: Any,
    parts: Sequence[Any],
    global_rows: int | tf.Tensor,
    run: Callable[[ReplicaStep, Any], tuple[Any, list[Any]]],
    *,
    side_by_side: bool = False,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """Run the virtual replicas of this real one, in replica context.

    Args:
        virtual: how many there are in all.
        model: the Keras model.
        parts: the batch of each that this real replica carries.
        global_rows: rows of the global batch.
        run: makes the step of one replica on its batch; returns anything, and values that are to be added up.
        side_by_side: whether TensorFlow may compute several at a time, which takes the memory of all.
        options: for ``ReplicaStep``.

    Returns:
        What ``run`` has returned for the first, and the sums over those carried.
    """
    return _Turns(virtual, model, parts, global_rows, options, side_by_side=side_by_side).run(run)


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """Where a virtual replica has stopped: what for, what it adds to a sum, and what the others need to know."""

    kind: Literal["sum", "agree", "update", "result", "end"]
    values: list[Any]
    subject: Any = None


class _Turns:
    """The virtual replicas of one real one, during one step."""

    def __init__(
        self,
        virtual: VirtualReplicas,
        model: Any,
        parts: Sequence[Any],
        global_rows: int | tf.Tensor,
        options: dict[str, Any],
        *,
        side_by_side: bool,
    ) -> None:
        context = tf.distribute.get_replica_context()
        self._real = ReplicaStep(model, 1, context.num_replicas_in_sync, **options)
        self._virtual = virtual
        self._side_by_side = side_by_side
        self._parts = parts
        self._first = self._real.replica_id * len(parts)
        self.state = _State(model)
        self._place = capture_thread_context(_OneOfSeveral(context.strategy, self._real.replica_id))
        self._before: list[Any] = []
        self._replicas = [
            _VirtualReplica(
                model, virtual.count, self._first + turn, self.state, data.num_rows(part), global_rows, options
            )
            for turn, part in enumerate(parts)
        ]

    def run(self, run: Callable[[ReplicaStep, Any], tuple[Any, list[Any]]]) -> tuple[Any, list[Any]]:
        for turn, replica in enumerate(self._replicas):
            replica.thread = _Thread(functools.partial(self._one, run, turn))
        answer: Any = None
        try:
            while True:
                total = self._new_sum()
                meeting = self._meet(total, answer)
                if meeting.kind == "end":
                    return meeting.subject, total.values
                answer = self._answer(meeting, total)
        finally:
            for replica in self._replicas:
                replica.thread.end()

    def _new_sum(self) -> Any:
        return OrderedSum(self._virtual.count) if self._virtual.is_ordered else PlainSum()

    def _one(self, run: Callable[[ReplicaStep, Any], tuple[Any, list[Any]]], turn: int) -> _Meeting:
        replica, part = self._replicas[turn], self._parts[turn]
        with self._place(f"virtual_replica_{replica.replica_id}"), intercept(replica):
            with tf.control_dependencies(self._before):  # what the last one's gradients were made from is free by then
                part = tree.map_structure(lambda leaf: leaf if leaf is None else apart(leaf), part)
            replica.batch = part
            subject, values = run(replica, part)
        return _Meeting("end", values, subject)

    def _meet(self, total: Any, answer: Any) -> _Meeting:
        """Let each go on until it stops again, all for the same reason."""
        meetings: list[_Meeting] = []
        for turn, replica in enumerate(self._replicas):
            with self.state.of(turn):
                meetings.append(replica.thread.go_on(answer))
            first, this = meetings[0], meetings[-1]
            if first.kind != this.kind or len(first.values) != len(this.values):
                raise StrategyError(
                    f"Virtual replica {self._first} stopped for '{first.kind}' with {len(first.values)} values, and "
                    f"{replica.replica_id} for '{this.kind}' with {len(this.values)}. All replicas must run the same "
                    "code: take out of the step what depends on a replica's number, or on how often it was traced."
                )
            total.add(replica.replica_id, this.values)
            is_last = this.kind in ("update", "end") and not self._side_by_side and not tf.executing_eagerly()
            self._before = _tensors(this.values) if is_last else []
        return meetings[0]

    def _answer(self, meeting: _Meeting, total: Any) -> Any:
        """Do what they have stopped for, once for all."""
        if meeting.kind == "sum":
            return total.over_replicas()
        if meeting.kind == "agree":
            self.state.settle(meeting.subject, total.over_replicas())
        elif meeting.kind == "update":
            self._update(total, *meeting.subject)
        elif meeting.kind == "result":
            return self._real.pooled_result(meeting.subject)
        return None

    def _update(
        self, total: Any, optimizer: Any, grads: list[Any], variables: list[Any], original: Any, states: list[Any]
    ) -> None:
        real = self._real
        num_gradients = len([g for g in grads if g is not None])
        if real.num_replicas > 1:
            real.build(optimizer, variables)
        if self._virtual.is_ordered or real.num_replicas == 1:
            summed = total.over_replicas()
            gradients, values = summed[:num_gradients], summed[num_gradients:]
        else:
            trained = [v for g, v in zip(grads, variables, strict=True) if g is not None]
            gradients, values = real.reduce(
                optimizer, trained, total.values[:num_gradients], total.values[num_gradients:]
            )
        values, may_update = real.settle(values)
        self.state.settle(states, values)
        self.state.forget(variables)
        real.update(grads, gradients, variables, original, may_update)


def _tensors(values: Sequence[Any]) -> list[Any]:
    return [value.values if isinstance(value, tf.IndexedSlices) else value for value in values]


class _VirtualReplica(ReplicaStep):
    """One virtual replica's part of a step."""

    thread: _Thread

    def __init__(
        self,
        model: Any,
        num_replicas: int,
        replica_id: int,
        state: _State,
        rows: int | tf.Tensor,
        global_rows: int | tf.Tensor,
        options: dict[str, Any],
    ) -> None:
        super().__init__(model, rows, global_rows, **options)
        self.num_replicas = num_replicas
        self._state = state
        self.turn = self._replica_id = replica_id

    @property
    def replica_id(self) -> int:
        """Its number among all virtual replicas."""
        return self._replica_id

    @property
    def sums_in_layers(self) -> bool:
        """Sums inside of a layer go over all virtual replicas."""
        return True

    def _meet(self, meeting: _Meeting) -> Any:
        self._state.check_graph()
        self.check_loop(meeting.values)
        return self.thread.stop_for(meeting)

    def sum_over_replicas(self, values: Sequence[Any]) -> list[Any]:
        """Add up each value over all virtual replicas."""
        return list(self._meet(_Meeting("sum", list(values))))

    def apply(self, optimizer: Any, grads: Any, variables: Any, original: Callable[..., None]) -> None:
        """Have the optimizer run once for all virtual replicas, with the sum of their gradients."""
        grads = list(grads)
        variables = list(optimized_variables(optimizer) if variables is None else variables)
        gradients, states, values = self.contribution(optimizer, grads)
        self._meet(_Meeting("update", gradients + values, (optimizer, grads, variables, original, states)))

    def assign(self, variable: Any, value: Any, original: Callable[[Any], None]) -> None:
        """Assign for this virtual replica alone; metrics add up."""
        if self.guard is not None:
            self.guard.note(variable)
        if variable.synchronization == "on_read":
            original(value)
            return
        self._state.note(variable)
        local = local_component(variable)
        local.assign(tf.cast(value, local.dtype))
        self._note_assigned(variable)

    def trace_of(self, function: Any) -> Any:
        """Have a tf.function traced for this virtual replica: a trace holds the replica's seeds and weights."""
        if id(function) not in self._functions:
            self._functions[id(function)] = (function, clone_function(function))
        return self._functions[id(function)][1]

    def pooled_result(self, metric: Any) -> Any:
        """The result of a metric once all virtual replicas have come here."""
        return self._meet(_Meeting("result", [], metric))

    def finish(self, logs: Any) -> list[tf.Tensor]:
        """Agree on what is left, and return the leaves of the logs that are not results of metrics."""
        states, values = self.assigned_state()
        if states:
            self._meet(_Meeting("agree", values, states))
        return super().finish(logs)


class _State:
    """What virtual replicas assign to variables and give to ``add_loss``, each for itself."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._variables: dict[int, Any] = {}
        self._start: dict[int, Any] = {}  # what a variable held when the step began
        self._held: dict[int, Any] = {}  # what it holds now
        self._own: dict[tuple[int, int], Any] = {}  # what it holds for a turn that has assigned it
        self._losses: dict[int, Any] = {}
        self._new: dict[int, None] = {}  # assigned in this turn

    def check_graph(self) -> None:
        """See that replicas can meet here.

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
    def of(self, turn: int) -> Iterator[None]:
        """Put the state of a turn in place, and keep what becomes of it."""
        for key, variable in self._variables.items():
            wanted = self._own.get((turn, key), self._start[key])
            if self._held[key] is not wanted:
                self._hold(key, variable, wanted)
        if turn in self._losses:
            set_layer_losses(self._losses[turn])
        yield
        self._losses[turn] = get_layer_losses(self._model)
        for key in self._new:
            value = local_component(self._variables[key]).read_value()
            self._own[turn, key] = self._held[key] = value
        self._new.clear()

    def note(self, variable: Any) -> None:
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

    def _hold(self, key: int, variable: Any, value: Any) -> None:
        local = local_component(variable)
        local.assign(tf.cast(value, local.dtype))
        self._held[key] = value

    def settle(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Assign what all have agreed on."""
        self.forget(variables)
        for variable, value in zip(variables, values, strict=True):
            assign_mean(local_component(variable), value)

    def forget(self, variables: Sequence[Any]) -> None:
        """Let all have the same again in variables that are about to be assigned for all."""
        for variable in variables:
            key = id(variable)
            if self._variables.pop(key, None) is not None:
                self._own = {(turn, k): value for (turn, k), value in self._own.items() if k != key}


class _OneOfSeveral(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """The replica context in the thread of a virtual replica: TensorFlow itself cannot wait for the others there."""

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            "A step calls merge_call of tf.distribute, as all_gather does and tf.Variables with an aggregation do when "
            "they are assigned; there, virtual replicas cannot wait for each other. Use all_reduce of the replica "
            "context, or compile without virtual_replicas."
        )


class _Abandoned(BaseException):
    """Ends a thread whose others have failed."""


class _Thread:
    """A function that stops where it asks something, and goes on with the answer; nothing else runs meanwhile."""

    def __init__(self, function: Callable[[], _Meeting]) -> None:
        self._function = function
        self._goes, self._stops = threading.Semaphore(0), threading.Semaphore(0)
        self._answer: Any = None
        self._meeting: _Meeting | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="in_turns", daemon=True)

    def go_on(self, answer: Any) -> _Meeting:
        """Answer, and wait until it stops again."""
        self._answer = answer
        if self._thread.ident is None:
            self._thread.start()
        self._goes.release()
        self._stops.acquire()
        if self._error is not None:
            raise self._error
        assert self._meeting is not None
        return self._meeting

    def stop_for(self, meeting: _Meeting) -> Any:
        """Stop, in this thread, and return the answer."""
        if self._is_abandoned:  # and the user's code has caught that
            raise _Abandoned
        self._meeting = meeting
        self._stops.release()
        self._goes.acquire()
        if self._is_abandoned:
            raise _Abandoned
        return self._answer

    def end(self) -> None:
        """Abandon the function where it has stopped, if it has not returned."""
        self._is_abandoned = True
        if self._thread.ident is not None:
            self._goes.release()
            self._thread.join()

    def _run(self) -> None:
        self._goes.acquire()
        try:
            self._meeting = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._stops.release()
