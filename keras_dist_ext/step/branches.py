"""Let replicas add up inside of a branch or a loop of the graph, and of a function of TensorFlow.

Each replica traces its branch, loop or function by itself, to graphs of its own, between which nothing can be added up.
So where a step that was traced in a scratch graph has added up there, one branch or loop is traced for all replicas of
the process, in which each runs its part, and a function is run as a part of the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import preserve_losses
from keras_dist_ext._keras.strategies import regroup
from keras_dist_ext._keras.tapes import may_be_differentiated
from keras_dist_ext._keras.tracing import capture_thread_state, clone_function, inlined
from keras_dist_ext.aliases import Original, TensorNest, TracedFunction, UserFunction
from keras_dist_ext.errors import LoopError
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.nan_guard import StepGuard
from keras_dist_ext.step.reducers import Reducer
from keras_dist_ext.step.step_plan import StepPlan, Unplanned

__all__ = ["Branches", "identity_of", "nested_in"]


class Examination(Protocol):
    """Is called where branches, loops and functions begin and end."""

    nested: list[Place]


class Branches:
    """The branches, loops and functions of TensorFlow in one replica's step.

    Args:
        model: the Keras model.
        reducer: adds up over replicas.
        plan: says in which of them replicas add up; None where that is not known.
        examination: is called where each begins and ends, if the step is traced in a scratch graph.
        guard: is to know what functions assign, if the step is guarded.
    """

    def __init__(
        self,
        model: DistributedModel,
        reducer: Reducer,
        plan: StepPlan | None,
        examination: Examination | None,
        guard: StepGuard | None,
    ) -> None:
        self._model = model
        self._reducer = reducer
        self._plan = plan
        self._examination = examination
        self._guard = guard
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._functions: dict[
            int, tuple[TracedFunction, TracedFunction]
        ] = {}  # by id: a tf.function of the user's, and its copy

    def cond(self, original: Original, predicate: tf.Tensor, true: UserFunction, false: UserFunction) -> TensorNest:
        """Trace a branch.

        Args:
            original: takes the others.
            predicate: which of two functions runs.
            true: one.
            false: the other.
        """
        key = identity_of(true), identity_of(false)
        if not self._replicas_add_up(key):
            with nested_in(self._examination, key):
                return original(predicate, true, false)
        own = _Branch([true, false])

        def merge(strategy: tf.distribute.Strategy, predicate: tf.Tensor, branches: TensorNest) -> TensorNest:
            branches = strategy.experimental_local_results(branches)
            here = strategy.experimental_local_results(predicate)[0]
            run = functools.partial(_run_all, strategy, branches)
            flat = original(here, lambda: run(0), lambda: run(1))
            return _regrouped(flat, len(branches))

        return own.packed(self._merged(merge, predicate, own))

    def while_loop(
        self,
        original: Original,
        condition: UserFunction,
        body: UserFunction,
        loop_vars: TensorNest,
        shape_invariants: TensorNest = None,
        **options: object,
    ) -> TensorNest:
        """Trace a loop; see ``tf.while_loop``.

        Args:
            original: takes the others.
            condition: ...
            body: ...
            loop_vars: ...
            shape_invariants: ...
            options: ...
        """
        key = identity_of(condition), identity_of(body)
        if not self._replicas_add_up(key):
            with nested_in(self._examination, key):
                return original(condition, body, loop_vars, shape_invariants, **options)
        own = _Branch([condition, body], loop_vars)
        given = None if shape_invariants is None else tf.nest.flatten(shape_invariants)
        is_packed = options.get("return_same_structure") or len(loop_vars) != 1
        options = {**options, "parallel_iterations": 1, "return_same_structure": True}

        def merge(strategy: tf.distribute.Strategy, flat: TensorNest, branches: TensorNest) -> TensorNest:
            branches = strategy.experimental_local_results(branches)
            parts = [strategy.experimental_local_results(value) for value in flat]
            parts = [part if len(part) == len(branches) else part * len(branches) for part in parts]
            everyones = [part[replica] for replica in range(len(branches)) for part in parts]
            shapes = None if given is None or len(given) != len(flat) else given * len(branches)
            result = original(
                lambda *values: _run_all(strategy, branches, 0, values)[0],
                lambda *values: _run_all(strategy, branches, 1, values),
                everyones,
                shapes,
                **options,
            )
            return _regrouped(result, len(branches))

        flat = [tf.convert_to_tensor(value) for value in tf.nest.flatten(loop_vars, expand_composites=True)]
        packed = tf.nest.pack_sequence_as(loop_vars, self._merged(merge, flat, own), expand_composites=True)
        return packed if is_packed else packed[0]

    def _merged(self, merge: Callable[..., TensorNest], *args: object) -> list[TensorNest]:
        with preserve_losses(self._model):  # of the layers, which the other replicas call meanwhile
            return list(tf.distribute.get_replica_context().merge_call(merge, args=args))

    def call(self, original: Original, function: TracedFunction, args: TensorNest, kwargs: TensorNest) -> TensorNest:
        """Call a tf.function, traced anew in each step: only while it is traced is seen what it assigns.

        Args:
            original: takes the function and what it is called with.
            function: of the user's.
            args: ...
            kwargs: ...
        """
        key = identity_of(function.python_function)
        if self._plan is not None and key in self._plan.inlined and self._reducer.num_replicas > 1:
            return (function.python_function if tf.executing_eagerly() else inlined(function))(*args, **kwargs)
        if not self._reducer.traces_functions_anew:
            if self._guard is not None:
                for variable in function.get_concrete_function(*args, **kwargs).variables:
                    self._guard.note(variable)
            return original(function, *args, **kwargs)
        if id(function) not in self._functions:
            self._functions[id(function)] = (function, clone_function(function))
        with nested_in(self._examination, key, is_function=True):
            return original(self._functions[id(function)][1], *args, **kwargs)

    def check_planned(self) -> None:
        """See that it is known, inside of a branch, loop or function, that replicas add up there.

        Raises:
            Unplanned: the step is to be traced in a scratch graph first.
        """
        if self._is_planned and not self._known.is_made and self._examination is None:
            here = tf.compat.v1.get_default_graph()
            if here is not self._graph:
                raise Unplanned

    @property
    def _known(self) -> StepPlan:
        assert self._plan is not None
        return self._plan

    @property
    def _is_planned(self) -> bool:
        return self._plan is not None and self._reducer.num_replicas > 1 and not tf.executing_eagerly()

    def _replicas_add_up(self, key: Hashable) -> bool:
        if self._examination is not None or not self._is_planned or key not in self._known.reduces_in:
            return False
        if not self._reducer.merges_branches:
            return False
        if may_be_differentiated():
            raise LoopError(
                "A step takes gradients of weights, gathers rows or normalizes by the statistics of the global batch "
                "(BatchNormalization) inside of a branch or loop of the graph (tf.cond, tf.while_loop, or an if or "
                "while of a tf.function), and that inside of another GradientTape, which cannot see through it on "
                "several replicas. Do it before the branch; use a branch or loop of Python's, such as for _ in "
                "range(5); or end the outer tape before."
            )
        return True


class _Branch:
    """One replica's functions for a branch or loop, and where they are to run.

    Args:
        functions: two.
        structure: of what they take; that of what they return, where it is None.
    """

    def __init__(self, functions: Sequence[UserFunction], structure: TensorNest = None) -> None:
        self._functions = functions
        self._takes = structure
        self._gives = structure
        self._entered = capture_thread_state()

    def run(self, which: int, values: Sequence[tf.Tensor] | None) -> list[tf.Tensor]:
        """Run one of the functions in this thread; return flat tensors."""
        with self._entered():
            if values is None:
                found = self._functions[which]()
                self._gives = tf.nest.map_structure(_as_leaf, found)
            else:
                found = self._functions[which](*tf.nest.pack_sequence_as(self._takes, values, expand_composites=True))
                if which == 0:
                    return [tf.convert_to_tensor(found)]
                if len(self._takes) == 1 and not isinstance(found, (list, tuple)):
                    found = [found]
                found = tf.nest.pack_sequence_as(self._takes, tf.nest.flatten(found))
                return [tf.convert_to_tensor(value) for value in tf.nest.flatten(found, expand_composites=True)]
            flat = tf.nest.flatten(self._gives, expand_composites=True)
            return [tf.constant(False) if value is None else tf.convert_to_tensor(value) for value in flat]

    def packed(self, flat: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return what the branch gives, as the functions return it."""
        present = tf.nest.flatten(self._gives, expand_composites=True)
        values = [None if leaf is None else value for leaf, value in zip(present, flat, strict=True)]
        return tf.nest.pack_sequence_as(self._gives, values, expand_composites=True)


def _as_leaf(value: tf.Tensor) -> tf.Tensor:
    """What a function returns; for an op, a tensor that is computed once the op was run."""
    if isinstance(value, tf.Operation):
        with tf.control_dependencies([value]):
            return tf.constant(True)
    is_variable = isinstance(value, tf.Variable | keras.Variable)
    if value is None or isinstance(value, tf.TensorArray) or (tf.is_tensor(value) and not is_variable):
        return value
    return tf.convert_to_tensor(value)


def _run_all(
    strategy: tf.distribute.Strategy, branches: Sequence[_Branch], which: int, values: Sequence[tf.Tensor] | None = None
) -> list[tf.Tensor]:
    """Run a function of each replica, in a thread for each; return the tensors of the first, then of the second, ..."""
    num_values = 0 if values is None else len(values) // len(branches)
    own = [
        (branch, None if values is None else list(values[i * num_values : (i + 1) * num_values]))
        for i, branch in enumerate(branches)
    ]
    found: dict[int, list[tf.Tensor]] = {}

    def replica(number: int) -> None:
        branch, given = own[number]
        found[number] = branch.run(which, given)

    strategy.extended.call_for_each_replica(replica, args=(regroup(list(range(len(branches)))),))
    return [value for number in range(len(branches)) for value in found[number]]


def _regrouped(flat: TensorNest, num_replicas: int) -> list[tf.Tensor]:
    size = len(flat) // num_replicas
    return [regroup([flat[replica * size + i] for replica in range(num_replicas)]) for i in range(size)]


@contextlib.contextmanager
def nested_in(examination: Examination | None, key: Hashable, *, is_function: bool = False) -> Iterator[None]:
    """Tell what examines a step that what follows is inside of a branch, loop or function."""
    if examination is None:
        yield
        return
    examination.nested.append(Place(key, is_function=is_function))
    try:
        yield
    finally:
        examination.nested.pop()


@dataclasses.dataclass(frozen=True)
class Place:
    """A branch, loop or function of a step."""

    key: Hashable
    is_function: bool


def identity_of(function: object) -> Hashable:
    """Return a key for a function of the user's, the same if it is defined again whenever a step is traced.

    AutoGraph wraps the bodies of its branches and loops into functions of its own, which hold them in their closures.
    """
    return _identity_of(function, 4)


def _identity_of(function: object, depth: int) -> Hashable:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "python_function", function)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__qualname__
    inner = []
    if depth and "tensorflow" in code.co_filename:
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                if callable(cell.cell_contents):
                    inner.append(_identity_of(cell.cell_contents, depth - 1))
    return code, tuple(inner)
