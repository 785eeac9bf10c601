"""Reach the components of distributed variables, and move variables to other devices."""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute import values as distribute_values
from tensorflow.python.ops import handle_data_util

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.interception import put
from keras_dist_ext._keras.strategies import first_replica, is_default_strategy
from keras_dist_ext._keras.tracing import run_independently
from keras_dist_ext.aliases import Original, TensorNest
from keras_dist_ext.errors import ScopeError

__all__ = [
    "tf_variable",
    "local_component",
    "is_sync_on_read",
    "components",
    "distributed_variable",
    "parameter_server_variable",
    "move_variable",
    "initialize_again",
    "hold_sum",
    "NamedVariable",
    "variables_of_module",
    "without_aggregation",
    "unread",
]


Variable: TypeAlias = "keras.Variable | tf.Variable"


def tf_variable(variable: Variable) -> tf.Variable:
    """The `tf.Variable` of a Keras variable, None before it is made; or the variable itself.

    Public is `value`, which reads it under a stateless scope or autocast (keras/src/backend/common/variables.py).
    """
    return variable._value if isinstance(variable, keras.Variable) else variable


def local_component(variable: Variable) -> Variable:
    """The copy of a mirrored ``tf.Variable`` that belongs to the current replica (values.py)."""
    value = tf_variable(variable)
    return value._get_on_device_or_primary() if isinstance(value, distribute_values.DistributedVariable) else value


def is_sync_on_read(variable: Variable) -> bool:
    """Whether each replica holds its own part of the variable, to be summed when read (values.py)."""
    value = tf_variable(variable)
    return getattr(value, "synchronization", None) == tf.VariableSynchronization.ON_READ and hasattr(value, "values")


def components(variable: Variable) -> tuple[Variable, ...]:
    """The copies of a variable on this worker's replicas, or the variable itself (values.py)."""
    value = tf_variable(variable)
    return tuple(getattr(value, "values", (value,)))


def distributed_variable(variable: Variable) -> Variable:
    """The mirrored variable that a copy of it belongs to, or the variable itself (distribute_utils.py)."""
    return distribute_utils.value_container(variable)


def parameter_server_variable(variable: Variable) -> Variable:
    """What a parameter server holds, which is what graphs know of a variable; or the variable itself (ps_values.py)."""
    return getattr(variable, "_v", variable)


def move_variable(variable: Variable, strategy: tf.distribute.Strategy, devices: Sequence[str]) -> None:
    """Make the `tf.Variable` of a Keras variable anew on other devices, one for each replica, with the same values.

    A MirroredStrategy makes a mirrored variable on the `_devices` of what it is colocated with, a OneDeviceStrategy
    beside any tensor (tensorflow/python/distribute/mirrored_strategy.py, one_device_strategy.py, `_create_variable`;
    public is `extended.colocate_vars_with`, which takes a variable). A Keras variable makes its `tf.Variable` in
    `_initialize` (keras/src/backend/tensorflow/core.py).
    """
    values = [copy.numpy() for copy in components(variable)]
    places = [f"/device:{device}" for device in devices]
    if is_default_strategy(strategy):
        with tf.device(places[0]):
            variable._initialize(values[0])
        return
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        with tf.device(places[0]):
            beside: tf.Tensor | _Colocation = tf.zeros(())
    else:
        beside = _Colocation(tuple(places))

    def create(next_creator: Original, **kwargs: object) -> tf.Variable:
        return next_creator(**{**kwargs, "colocate_with": beside})

    with strategy.scope(), tf.variable_creator_scope(create):
        variable._initialize(values[0])
    for copy, value in zip(components(variable), values, strict=True):
        copy.assign(value)


def initialize_again(variable: keras.Variable) -> None:
    """Make the `tf.Variable` of a Keras variable anew in the scope that is entered, with the same value (core.py)."""
    variable._initialize(components(variable)[0].numpy())


class _Colocation(NamedTuple):
    """Stands for a variable that others are to be colocated with."""

    devices: tuple[str, ...]

    @property
    def _devices(self) -> tuple[str, ...]:
        return self.devices


class NamedVariable:
    """A variable on the current device, in a strategy's scope too, that graphs may find by its name.

    What a graph captures becomes an argument. Those and whatever else waits for nothing are handed to threads one by
    one when a call begins (``ScheduleReady`` in core/common_runtime/executor.cc), and who calls looks at each: together
    some 1 µs a handle. In a loop it is the other way around: what is captured costs nothing there.

    Args:
        initial_value: a tensor.

    Attributes:
        handle: to be used eagerly, or captured.
    """

    def __init__(self, initial_value: tf.Tensor) -> None:
        self._named = {
            "dtype": initial_value.dtype,
            "shape": initial_value.shape,
            "shared_name": f"keras_dist_ext_{uuid.uuid4().hex}",
        }
        self.handle: tf.Tensor = tf.raw_ops.VarHandleOp(**self._named)
        self.handle._handle_data = handle_data_util.create_handle_data(initial_value.shape, initial_value.dtype)
        weakref.finalize(self, _destroy, self.handle).atexit = False
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=initial_value)

    def handle_in_graph(self) -> tf.Tensor:
        """Return its handle in the graph that is traced, on the current device; what it waits for, it waits for."""
        handle = tf.raw_ops.VarHandleOp(**self._named)
        run_independently(handle)
        return handle

    def value(self) -> tf.Tensor:
        """Read it, eagerly; methods of variables take several times as long."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self._named["dtype"])

    def assign(self, value: tf.Tensor) -> None:
        """Set it, eagerly."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


def _destroy(handle: tf.Tensor) -> None:
    with tf.init_scope(), tf.device(handle.device):
        tf.raw_ops.DestroyResourceOp(resource=handle)


def variables_of_module(module: tf.Module) -> list[tuple[str, tf.Variable]]:
    """The variables of a ``tf.Module`` with where it holds them, as ``blocks/0/kernel``; their own names may be alike.

    tensorflow/python/module/module.py finds them so for ``module.variables``.
    """
    found = module._flatten(predicate=lambda value: isinstance(value, tf.Variable), with_path=True)
    return [("/".join(map(str, path)), variable) for path, variable in found]


def _read_as(kind: type) -> Callable[[tf.Variable], object]:
    return lambda variable: kind(variable.numpy())


# tensorflow/python/distribute/values.py: `float(optimizer.learning_rate)` works with a variable of one device only.
for _number in (int, float):
    if f"__{_number.__name__}__" not in vars(distribute_values.DistributedVariable):
        setattr(distribute_values.DistributedVariable, f"__{_number.__name__}__", _read_as(_number))


@contextlib.contextmanager
def without_aggregation() -> Iterator[None]:
    """Have what this thread assigns to a mirrored variable go to its replica's copy, whatever the aggregation.

    tensorflow/python/distribute/values.py otherwise waits there for all replicas, to add up what they assign.
    """
    _thread.assigns_alone = True
    try:
        yield
    finally:
        _thread.assigns_alone = False


_thread = threading.local()
_aggregation = distribute_values.DistributedVariable.aggregation.fget


def _seen_aggregation(variable: tf.Variable) -> tf.VariableAggregation:
    alone = getattr(_thread, "assigns_alone", False)
    return tf.VariableAggregation.NONE if alone else _aggregation(variable)


distribute_values.DistributedVariable.aggregation = property(_seen_aggregation, doc=_aggregation.__doc__)


_OF_KERAS = "scratch_graph"
"""How names of graphs begin that Keras traces to see what a layer returns."""


def _assigning_nothing(original: Original) -> Original:
    """Have a variable of which each replica holds its own part be assigned nothing in a graph that never runs.

    TensorFlow refuses outside of replicas what it does in them (values.py). There Keras calls layers, to make a
    functional model or to build one (keras/src/backend/tensorflow/core.py, `compute_output_spec`).
    """

    @functools.wraps(original)
    def assign(variable: tf.Variable, value: tf.Tensor, *args: object, **kwargs: object) -> tf.Variable | tf.Tensor:
        if tf.executing_eagerly() or not tf.distribute.in_cross_replica_context():
            return original(variable, value, *args, **kwargs)
        if not tf.compat.v1.get_default_graph().name.startswith(_OF_KERAS):
            return original(variable, value, *args, **kwargs)
        if variable.aggregation == tf.VariableAggregation.NONE:
            raise ScopeError(unread(variable))
        return tf.zeros(variable.shape, variable.dtype)

    return assign


def unread(variable: tf.Variable) -> str:
    """Say of a variable that nothing tells what it is where replicas have assigned different values."""
    return (
        f"The variable '{variable.name.partition(':')[0]}' is made with synchronization="
        "tf.VariableSynchronization.ON_READ, so that each replica assigns to a part of its own, and without an "
        "aggregation that makes one value of the parts when it is read or saved. Make it with "
        "aggregation=tf.VariableAggregation.SUM for counts and sums over the examples, MEAN, or ONLY_FIRST_REPLICA; or "
        "by add_weight."
    )


for _name in ("assign", "assign_add", "assign_sub"):
    _original = getattr(distribute_values.SyncOnReadVariable, _name)
    put(distribute_values.SyncOnReadVariable, _name, _assigning_nothing(_original))


# Sums of which each replica holds a part: TensorFlow gives the initial value to each, so that it is read times their
# number, and divides among them what it assigns and restores, which integers do not survive. Of a model of ours the
# first replica holds it. All others, such as metrics of stock Keras, are only noted where they are made.

_SUM = tf.VariableAggregation.SUM
_NOTE = "keras_dist_ext_note"  # an attribute of variables, which are not hashable


class _Note(NamedTuple):
    """What is known of a sum.

    Attributes:
        initial: what all replicas hold as long as nobody has assigned anything.
        is_held: whether the first replica holds what is assigned.
        is_refused: whether it was made before this module was there, and its initial value is unknown.
    """

    initial: tf.Tensor | None = None
    is_held: bool = False
    is_refused: bool = False


def hold_sum(variable: Variable) -> bool:
    """Have the first replica hold what a sum over replicas begins with, and what is assigned to it from now on.

    A sum of which replicas hold other parts already is left as it is.

    Returns:
        False if it was made before this module was there, and all replicas hold the same: its initial value, or not.
    """
    variable = tf_variable(variable)
    if not _is_sum(variable):
        return True
    note = _note_of(variable)
    if note is not None and (note.is_held or note.is_refused):
        return not note.is_refused
    initial, is_refused = None if note is None else note.initial, False
    if note is None or initial is not None:
        parts = [part.numpy() for part in variable.values]
        are_same = parts[0].any() and all(np.array_equal(part, parts[0]) for part in parts)
        is_refused = note is None and are_same and len(parts) > 1
        if initial is not None and are_same and np.array_equal(initial.numpy(), parts[0]):
            _on_first(variable, "assign", initial, clears=True)
    setattr(variable, _NOTE, _Note(is_held=not is_refused, is_refused=is_refused))
    return not is_refused


def _is_sum(variable: tf.Variable) -> bool:
    return isinstance(variable, distribute_values.SyncOnReadVariable) and variable.aggregation == _SUM


def _note_of(variable: tf.Variable) -> _Note | None:
    """Return what is known of a sum; None if it was made before this module was there."""
    note: _Note | None = vars(variable).get(_NOTE)  # getattr would ask a replica's part
    return note


def _is_held(variable: tf.Variable) -> bool:
    """Note that something is assigned to a variable; return whether the first replica is to hold it."""
    if not _is_sum(variable):
        return False
    note = _note_of(variable)
    is_held = note is not None and (note.is_held or note.is_refused)
    setattr(variable, _NOTE, _Note(is_held=is_held))
    return is_held


def _on_first(variable: tf.Variable, method: str, value: TensorNest, *, clears: bool) -> list[tf.Variable | tf.Tensor]:
    """Call a method of the first replica's part; give those of the others nothing.

    Args:
        variable: a sum.
        method: ``assign``, ``assign_add`` or ``assign_sub``.
        value: that it takes.
        clears: whether the others lose what they hold.
    """
    value = tf.cast(value, variable.dtype)
    first = first_replica(variable.distribute_strategy)
    done = []
    for number, part in enumerate(variable.values):
        with tf.device(part.device):
            if not first + number:
                done.append(getattr(part, method)(value))
            elif clears:
                done.append(part.assign(tf.zeros_like(part)))
    return done


def _make(original: Original) -> Original:
    @functools.wraps(original)
    def make(*args: object, **kwargs: object) -> tf.Variable:
        variable = original(*args, **kwargs)
        if _is_sum(variable) and tf.executing_eagerly():  # else a function makes it, which is lifted out of its graph
            setattr(variable, _NOTE, _Note(variable.values[0].value()))
        return variable

    return make


def _assign(method: str) -> Original:
    def replace(original: Original) -> Original:
        @functools.wraps(original)
        def assign(variable: tf.Variable, value: TensorNest, read_value: bool = True) -> tf.Tensor | None:
            if not _is_held(variable):
                return original(variable, value, read_value=read_value)
            done = _on_first(variable, method, value, clears=method == "assign")
            with tf.control_dependencies([] if tf.executing_eagerly() else done):
                return variable.read_value() if read_value else tf.group(*done)

        return assign

    return replace


def _restore(original: Original) -> Original:
    @functools.wraps(original)
    def restore(variable: tf.Variable, tensor: tf.Tensor, aggregation: tf.VariableAggregation) -> tf.Operation | None:
        if not _is_held(variable):
            return original(variable, tensor, aggregation)
        done = _on_first(variable, "assign", tensor, clears=True)
        return None if tf.executing_eagerly() else tf.group(*done)

    return restore


# tensorflow/python/distribute/mirrored_strategy.py, values.py: each is asked for in its module where it is called.
for _owner, _name, _replace in (
    (distribute_utils, "create_mirrored_variable", _make),
    (distribute_values.values_util, "on_read_assign_cross_replica", _assign("assign")),
    (distribute_values.values_util, "on_read_assign_add_cross_replica", _assign("assign_add")),
    (distribute_values.values_util, "on_read_assign_sub_cross_replica", _assign("assign_sub")),
    (distribute_values.values_util, "get_on_read_restore_ops", _restore),
):
    put(_owner, _name, _replace(getattr(_owner, _name)))
