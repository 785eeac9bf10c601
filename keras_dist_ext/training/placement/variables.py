"""Recreate the variables of a model on other devices, with the same values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import own_variables
from keras_dist_ext._keras.optimizers import optimized_variables
from keras_dist_ext._keras.variables import Variable, components, move_variable, tf_variable
from keras_dist_ext.errors import PlacementError
from keras_dist_ext.strategy.scope import optimizers, raw_variables
from keras_dist_ext.training.placement.parts import Part, own_layers

__all__ = ["bytes_by_device", "move_variables", "stuck_variables"]


def move_variables(model: keras.Model, parts: Sequence[Part]) -> int:
    """Move what lives elsewhere to the devices of its part, and optimizers' slots along; return how many have moved.

    Keras' variables stay the same objects, so that layers, callbacks and files find them where they were.

    Args:
        model: a model of ours; layers that are not built yet have nothing to move.
        parts: of the model.

    Raises:
        PlacementError: an optimizer that is built already cannot be made anew from its config.
    """
    wanted = {id(variable): (variable, part.devices) for part, layer in _layers(parts) for variable in _made(layer)}
    astray = [(variable, devices) for variable, devices in wanted.values() if not _is_on(variable, devices)]
    if astray:
        with _remade_optimizers(model):
            for variable, devices in astray:
                move_variable(variable, model.distribute_strategy, devices)
    return len(astray)


def _layers(parts: Sequence[Part]) -> Iterator[tuple[Part, keras.layers.Layer]]:
    placed = {id(layer) for part in parts for layer in part.layers}
    for part in parts:
        for layer in own_layers(part.layers, placed):
            yield part, layer


def _made(layer: keras.layers.Layer) -> list[Variable]:
    return [variable for variable in own_variables(layer) if tf_variable(variable) is not None]


def _is_on(variable: Variable, devices: Sequence[str]) -> bool:
    copies = components(variable)
    return all(copy.device.endswith(f"device:{device}") for copy, device in zip(copies, devices, strict=True))


@contextlib.contextmanager
def _remade_optimizers(model: keras.Model) -> Iterator[None]:
    """Make optimizers that are built anew once the variables are where they belong, with all that they hold.

    An optimizer knows its variables by the ids of TensorFlow's, and its slots live beside them.
    """
    built = [optimizer for _, optimizer in optimizers(model) if optimizer.built]
    held = [[[copy.numpy() for copy in components(v)] for v in optimizer.variables] for optimizer in built]
    trained = [optimized_variables(optimizer) for optimizer in built]
    with model.replica_runtime.in_scope():
        made = [_like(optimizer) for optimizer in built]
    yield
    for old, new, variables, values in zip(built, made, trained, held, strict=True):
        with model.replica_runtime.in_scope():
            new.build(variables)
        vars(old).clear()
        vars(old).update(vars(new))
        for variable, copies in zip(old.variables, values, strict=True):
            for copy, value in zip(components(variable), copies, strict=True):
                copy.assign(value)


def _like(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    try:
        return type(optimizer).from_config(optimizer.get_config())
    except (TypeError, ValueError, NotImplementedError) as error:
        raise PlacementError(
            f"The optimizer {optimizer.name!r} is built already, so its slots have to move with the weights, and it "
            f"cannot be made anew from its config ({error}). Call place before the optimizer is built, which fit does."
        ) from error


def stuck_variables(parts: Sequence[Part]) -> list[str]:
    """Name the ``tf.Variable``s of the user's own that live elsewhere: they stay, and are read from there each step."""
    return [
        f"{layer.path or layer.name}/{name}"
        for part, layer in _layers(parts)
        for name, variable in raw_variables(layer)
        if not _is_on(variable, part.devices)
    ]


def bytes_by_device(variables: Sequence[Variable]) -> dict[str, int]:
    """Count the bytes that variables take on each device, such as `CPU:0`."""
    total: dict[str, int] = {}
    for variable in variables:
        for copy in components(variable):
            device = copy.device.rpartition("device:")[2]
            total[device] = total.get(device, 0) + copy.dtype.size * int(np.prod(copy.shape))
    return total
