"""Put parts of a model on different devices, and several micro-batches on their way through them at once.

A replica is then a group of devices: one of its own, where all lives that is not placed, and those of its parts.
Without a strategy there is one group. Under a MirroredStrategy over one device of each group, say CPU:0 and CPU:2, a
part of replica 0 may live on CPU:1, and of replica 1 on CPU:3: data parallelism over groups.

* Variables live on the device of their part, and so do their slots in the optimizer. MirroredStrategy makes a mirrored
  variable on the devices of the variable that it is to lie beside (its ``_create_variable``), which need not be devices
  of the strategy; so each of its copies is made on the group's device, and nothing is copied in a step but what parts
  hand on. They are made where Keras makes them, and moved: by ``place``, or, where a layer is built later, before the
  first step. So for a moment all weights lie on a replica's own device, but neither slots nor activations.
* A part's layers are called under ``tf.device``; the ops of their gradients are sent after them (``placing.trace``).
* A replica's batch is cut into micro-batches as for virtual replicas (``turns``), so gradients, losses, metrics and
  state of layers add up to those of the batch, weighted by rows. They are not traced one after the other but side by
  side, and a part begins a micro-batch when it has made the last one, so that others can have it meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.models import compile_arguments
from keras_dist_ext._keras.strategies import local_replica_id
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.errors import PlacementError
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted, warn_once
from keras_dist_ext.strategy.virtual import VirtualReplicas
from keras_dist_ext.training.placement import groups, verdict
from keras_dist_ext.training.placement.parts import Part, check_not_shared, find_layers, layer_names, layers_left_over
from keras_dist_ext.training.placement.timeline import Timeline, measure
from keras_dist_ext.training.placement.trace import Trace
from keras_dist_ext.training.placement.variables import bytes_by_device, move_variables, stuck_variables
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["Placement", "place"]


def place(model: keras.Model, parts: Mapping[str, str | Sequence[str]], *, micro_batches: int = 1) -> Placement:
    """Put parts of a model on their own devices, in each replica.

        model = kde.Sequential([keras.Input((784,)), encoder, decoder])
        placement = kde.place(model, {"encoder": "GPU:0", "decoder": "GPU:1"}, micro_batches=4)
        print(placement)
        model.fit(x, y)

    Weights, losses and metrics equal those of one device, to float32 rounding. What no part has stays on the replica's
    own device: the first of the strategy's for it, or without a strategy TensorFlow's first GPU, else its first CPU.

    Args:
        model: one of ours, built or not; a ``TrainLoop`` too, whose parts are Keras models.
        parts: by name of a layer, or of an attribute that holds one, the device it is to live on, such as ``"GPU:1"``;
            with several replicas a list, one for each. ``"outer/inner"`` is a layer in a layer, ``"block*"`` all that
            match.
        micro_batches: in how many a replica's batch is cut, so that parts work at the same time. Random numbers and
            batch statistics are of their own in each, as on so many replicas. Memory holds the activations of all.

    Returns:
        What lives where; ``measure`` tells what it is good for.

    Raises:
        PlacementError: there is no such part, a layer would have to live on two devices, or the model cannot be placed.
        StrategyError: there is no such device, or not one for each replica.
    """
    if runtime_of(model) is None:
        raise PlacementError(
            f"place was given {type(model).__name__}, whose step is not ours, so that gradients would be "
            "computed on the first device. Derive the model from kde.Model, or take it over by "
            "kde.adopt(model, strategy)."
        )
    micro_batches = arguments.integer(
        "micro_batches", micro_batches, least=1, most=_MOST_MICRO_BATCHES, error=PlacementError
    )
    wanted = 'a dict of devices by name of a layer, such as {"encoder": "GPU:0"}'
    arguments.mapping("parts", parts, wanted=wanted, error=PlacementError)
    if not all(isinstance(name, str) for name in parts):
        arguments.refuse("parts", parts, wanted, PlacementError)
    if not parts:
        names = ", ".join(map(repr, layer_names(model)))
        raise PlacementError(f"No part is named, so nothing would move. '{model.name}' has {names or 'no layers yet'}.")
    homes = groups.home_devices(model.distribute_strategy)
    layers = find_layers(model, list(parts))
    devices = groups.devices_of_parts(homes, parts)
    made = tuple(Part(name, layers[name], devices[name]) for name in parts)
    check_not_shared(made)
    return Placement(model, made, homes, micro_batches)


_MOST_MICRO_BATCHES = 4096  # a step is traced once for each


class Placement:
    """Where the parts of a model live; ``place`` makes it.

    Attributes:
        parts: those that were named.
        homes: each replica's own device.
        micro_batches: in how many parts a replica's batch is cut.

    Args:
        model: a model of this package, or a ``TrainLoop``.
        parts: see above.
        homes: see above.
        micro_batches: see above.
    """

    def __init__(self, model: keras.Model, parts: tuple[Part, ...], homes: tuple[str, ...], micro_batches: int) -> None:
        self._model = model
        self.parts = parts
        self.homes = homes
        self.micro_batches = micro_batches
        self._trace = Trace()
        _check_turns(model, micro_batches)
        before: Placement | None = model.placement
        if before is not None:
            before._withdraw()
        move_variables(model, parts)
        self._rest = Part("left over", (), homes)
        self._placed: list[keras.layers.Layer] = []
        for part in parts:
            for layer in part.layers:
                self._call_on(layer, part)
        self._place_rest()
        object.__setattr__(model, "placement", self)
        _forget_functions(model)
        for finding in self.findings:
            warn_once(str(finding))

    def _place_rest(self) -> None:
        self._rest = dataclasses.replace(self._rest, layers=tuple(layers_left_over(self._model, self.parts)))
        for layer in self._rest.layers:
            if all(layer is not other for other in self._placed):
                self._call_on(layer, self._rest, queue=layer.name)

    def _call_on(self, layer: keras.layers.Layer, part: Part, *, queue: str = "") -> None:
        """Have a layer called on a device, as Keras itself has `build` of an instance wrapped."""
        call = layer.call

        @functools.wraps(call)
        def placed(*args: TensorNest, **kwargs: TensorNest) -> TensorNest:
            replica = local_replica_id()
            return self._trace.call(
                part.name,
                part.devices[replica],
                replica,
                lambda given: call(*given[0], **given[1]),
                (args, kwargs),
                queue=queue,
            )

        object.__setattr__(layer, "call", placed)
        self._placed.append(layer)

    def _withdraw(self) -> None:
        for layer in self._placed:
            object.__delattr__(layer, "call")
        self._placed.clear()

    # For the model's loops

    def place_new_variables(self) -> None:
        """Move what was built since."""
        if move_variables(self._model, self.parts):
            _forget_functions(self._model)
        self._place_rest()

    def virtual(self, virtual: VirtualReplicas | None, num_replicas: int) -> VirtualReplicas | None:
        """Return by which turns a step is made, given those that the run is defined for.

        Args:
            virtual: what the model was compiled with; None is one for each replica.
            num_replicas: of the strategy.

        Raises:
            PlacementError: its batches are cut twice.
        """
        _check_turns(self._model, self.micro_batches)
        if compile_arguments(self._model).get("jit_compile") is True:
            warn_once(f"jit_compile=True: '{self._model.name}' is placed on several devices, which XLA cannot do.")
        if virtual is not None or self.micro_batches == 1:
            return virtual
        return VirtualReplicas(num_replicas * self.micro_batches, reduction="fast")

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Around the tracing of a replica's step: send its ops to their devices."""
        replica = local_replica_id()
        devices = {part.devices[replica] for part in self.parts} - {self.homes[replica]}
        return self._trace.step(sorted(devices), replica)

    # For people

    @property
    def left_over(self) -> list[str]:
        """Names of the layers that no part has; they are on each replica's own device."""
        return [layer.name for layer in self._rest.layers]

    @property
    def findings(self) -> list[Finding]:
        """Why this cannot make anything faster or smaller, as far as that is known without measuring."""
        return verdict.of_devices(self.parts, self.homes, groups.processors(), self.micro_batches)

    def measure(self, x: object, y: object = None, *, num_steps: int = 5) -> Timeline:
        """Make some steps of training on a batch, then put everything back; return when each part has worked.

        Args:
            x: of one batch, as large as those to train on.
            y: ...
            num_steps: that are timed.

        Raises:
            PlacementError: ``num_steps`` is not an integer >= 1, or TensorFlow's profiler has not seen the parts.
        """
        num_steps = arguments.integer("num_steps", num_steps, least=1, error=PlacementError)
        parts = [*self.parts, self._rest] if self._rest.layers else self.parts
        timeline = measure(self._model, parts, self._trace, (x, y), num_steps, self.micro_batches)
        return dataclasses.replace(timeline, findings=tuple(verdict.of_times(timeline)))

    def __str__(self) -> str:
        lines = [f"'{self._model.name}' on {counted(len(self.homes), 'replica')}, micro_batches={self.micro_batches}"]
        for part in self.parts:
            variables = [variable for layer in part.layers for variable in layer.variables]
            sizes = bytes_by_device(variables)
            names = ", ".join(layer.name for layer in part.layers)
            size = max(sizes.values(), default=0) / 2**20
            lines.append(f"  {part.name}: {', '.join(part.devices)} ({names}; {size:.3g} MiB of weights each)")
        lines.append(f"  left over: {', '.join(self.homes)} ({', '.join(self.left_over) or 'no layers'})")
        stuck = stuck_variables(self.parts)
        if stuck:
            lines.append(f"  tf.Variables that stay where they were made, and are copied each step: {', '.join(stuck)}")
        return "\n".join([*lines, *map(str, self.findings)])


def _check_turns(model: keras.Model, micro_batches: int) -> None:
    virtual: VirtualReplicas | None = model.virtual_replicas
    if micro_batches == 1:
        return
    if virtual is not None:
        raise PlacementError(
            f"micro_batches={micro_batches}, and the model is compiled with virtual_replicas={virtual.count}, which "
            "cut its batches already, and make one after the other. Leave one of the two out."
        )
    if not model.replica_runtime.can_split_batches:
        raise PlacementError(
            f"micro_batches={micro_batches} for '{model.name}', a TrainLoop: its step is a function that sees all rows "
            "of a replica. Leave micro_batches out, or cut the rows in the step; ops of several cuts run side by side."
        )


def _forget_functions(model: keras.Model) -> None:
    """What was traced has the old variables."""
    model.train_function = model.test_function = model.predict_function = None
