"""Where the ops of a step run: each part's on its device, forward and backward, one micro-batch after the other.

TensorFlow makes the ops of a backward pass on the device from which the gradients are asked for, not on that of the
forward pass. They are made in the name scope of the ops that they belong to, so that here, once a replica's step is
traced, each is sent there. Ops outside of all parts (a loss, a sum of two parts' outputs) go where their inputs come
from; what stands in a layer that is left over stays on the replica's own device.

With several micro-batches a part begins one when it has made the last one. Otherwise a device would compute all of
them at once, they would all be ready at the same time, and no part would work while another does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_dist_ext._keras.hooks import current_step
from keras_dist_ext._keras.layers import copy_mask
from keras_dist_ext._keras.tracing import set_op_device
from keras_dist_ext.aliases import TensorNest, UserFunction

__all__ = ["Handover", "Trace", "part_of_op"]

_GRADIENT = "gradient_tape/"  # tensorflow/python/eager/backprop.py, `_gradient_function`


@dataclasses.dataclass
class _Queue:
    """What was traced on one replica of what makes one micro-batch after the other, in the step being traced."""

    forward: dict[int, list[tf.Tensor]] = dataclasses.field(default_factory=dict)  # by micro-batch: what it has given
    backward: dict[int, list[tf.Tensor]] = dataclasses.field(default_factory=dict)  # and gradients of what it was given

    def forget(self) -> None:
        self.forward.clear()
        self.backward.clear()


class Handover(NamedTuple):
    """What a part is given from another device, for one micro-batch."""

    part: str
    source: str
    target: str
    specs: tuple[tuple[tuple[int | None, ...], tf.DType], ...]  # shapes, in which rows may be None, and dtypes


class _Graph:
    """What was traced into one graph so far."""

    def __init__(self) -> None:
        self.devices: dict[str, str] = {}  # by name scope
        self.scopes: dict[str, tuple[str, int]] = {}  # part and replica, by name scope
        self.queues: dict[tuple[str, int], _Queue] = {}  # by name and replica
        self.handovers: dict[tuple[str, str], Handover] = {}  # by part and source


class Trace:
    """Sends the ops of steps to devices, while they are traced."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, _Graph] = weakref.WeakKeyDictionary()

    @property
    def scopes(self) -> dict[str, tuple[str, int]]:
        """Name scopes of parts in all that was traced so far, with the part and the replica."""
        return {scope: part for graph in list(self._graphs.values()) for scope, part in graph.scopes.items()}

    @property
    def handovers(self) -> list[Handover]:
        """What each part is given from other devices."""
        return list({key: h for graph in list(self._graphs.values()) for key, h in graph.handovers.items()}.values())

    # Forward

    def call(
        self, part: str, device: str, replica: int, function: UserFunction, inputs: object, *, queue: str = ""
    ) -> TensorNest:
        """Call a layer of a part on its device.

        Args:
            part: its name.
            device: of the part, on this replica.
            replica: its number.
            function: takes the inputs and returns the outputs.
            inputs: a structure that may hold tensors.
            queue: what makes one micro-batch after the other, if not the whole part.
        """
        with tf.device(device):
            if tf.executing_eagerly():
                return function(inputs)
            graph = self._here()
            scope = tf.compat.v1.get_default_graph().get_name_scope()
            graph.devices[scope] = device
            graph.scopes[scope] = part, replica
            if replica == 0:
                graph.handovers.update(_handovers(part, device, inputs))
            turn: int | None = getattr(current_step(), "virtual_replica", None)
            if turn is None:
                return function(inputs)
            return _in_turn(graph.queues.setdefault((queue or part, replica), _Queue()), turn, function, inputs)

    def _here(self) -> _Graph:
        return self._graphs.setdefault(tf.compat.v1.get_default_graph(), _Graph())

    # Backward

    @contextlib.contextmanager
    def step(self, devices: Sequence[str], replica: int) -> Iterator[None]:
        """Once a replica's step is traced, send its ops to devices.

        Args:
            devices: of the replica's parts, but for the replica's own.
            replica: its number.
        """
        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        traced = self._here()
        first = len(graph.get_operations())
        home = tf.no_op().device  # what the strategy, or nobody, asks for here
        try:
            yield
        finally:  # tensors would keep the graph alive
            for key in [key for key in traced.queues if key[1] == replica]:
                traced.queues.pop(key).forget()
        _send(graph.get_operations()[first:], traced.devices, home, set(devices))


def _handovers(part: str, device: str, inputs: object) -> dict[tuple[str, str], Handover]:
    found: dict[str, list[tuple[tuple[int | None, ...], tf.DType]]] = {}
    for value in tf.nest.flatten(inputs):
        source = _short(value.op.device) if isinstance(value, tf.Tensor) and value.dtype.is_floating else ""
        if source and source != device and value.shape.rank is not None:
            found.setdefault(source, []).append((tuple(value.shape), value.dtype))
    return {(part, source): Handover(part, source, device, tuple(specs)) for source, specs in found.items()}


def _in_turn(queue: _Queue, turn: int, function: UserFunction, inputs: object) -> TensorNest:
    """Call a layer for one of several micro-batches, after the one before it, and so on the way back."""

    def enter(value: tf.Tensor) -> tf.Tensor:
        def begun(value: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies(queue.forward.get(turn - 1, [])):
                return tf.identity(value)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def gate(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                queue.backward.setdefault(turn, []).append(upstream)
                return upstream

            return begun(value), gradient

        return _alike(value, gate(value) if value.dtype.is_floating else begun(value))

    def leave(value: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def gate(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                with tf.control_dependencies(queue.backward.get(turn - 1, [])):
                    return tf.identity(upstream)

            return tf.identity(value), gradient

        return _alike(value, gate(value)) if value.dtype.is_floating else value

    outputs = _map_tensors(leave, function(_map_tensors(enter, inputs)))
    queue.forward[turn] = [value for value in tf.nest.flatten(outputs) if isinstance(value, tf.Tensor)]
    return outputs


def _map_tensors(function: Callable[[tf.Tensor], tf.Tensor], values: TensorNest) -> TensorNest:
    return tf.nest.map_structure(lambda v: function(v) if isinstance(v, tf.Tensor) else v, values)


def _alike(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Keras keeps the mask of a tensor at the tensor."""
    other.set_shape(value.shape)
    copy_mask(value, other)
    return other


def _send(ops: Sequence[tf.Operation], devices: dict[str, str], home: str, own: set[str]) -> None:
    """Send ops that nobody has placed: to the device of their scope, else to where their inputs come from."""
    free = [op for op in ops if op.device == home and not _is_beside_another(op)]
    for op in free:
        device = _device_of_scope(op.name, devices)
        if device is None and not any(value.dtype == tf.resource for value in op.inputs):
            given = {_short(value.op.device) for value in op.inputs} & own
            device = given.pop() if len(given) == 1 else None
        if device is not None:
            set_op_device(op, device)
    for op in free:  # a constant goes to the one who needs it
        if op.type == "Const" and op.device == home:
            users = {user.device for value in op.outputs for user in value.consumers()}
            if len(users) == 1 and _short(next(iter(users))) in own:
                set_op_device(op, users.pop())


def _is_beside_another(op: tf.Operation) -> bool:
    return op.type == "Placeholder" or any(g != f"loc:@{op.name}".encode() for g in op.colocation_groups())


def _device_of_scope(name: str, devices: dict[str, str]) -> str | None:
    scope = name.rpartition(_GRADIENT)[2].rpartition("/")[0]
    while scope:
        if scope in devices:
            return devices[scope]
        scope = scope.rpartition("/")[0]
    return None


def part_of_op(name: str, scopes: Mapping[str, tuple[str, int]]) -> tuple[str, int, int] | None:
    """Return the part and the replica that an op belongs to, and 1 if it is of a backward pass, else 0.

    Args:
        name: of the op, perhaps below those of loops and functions that TensorFlow has merged into one graph.
        scopes: the name scopes of parts.
    """
    _, gradient, rest = name.rpartition(_GRADIENT)
    pieces = (rest if gradient else name).split("/")[:-1]
    for first in range(len(pieces)):
        for last in range(len(pieces), first, -1):
            found = scopes.get("/".join(pieces[first:last]))
            if found is not None:
                return (*found, 1 if gradient else 0)
    return None


def _short(device: str) -> str:
    return device.rpartition("device:")[2]
