"""Find the layers that a part's name means, and what is left over."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import child_layers, flat_layers
from keras_dist_ext.errors import PlacementError
from keras_dist_ext.messages import close_name

__all__ = ["Part", "check_not_shared", "find_layers", "layer_names", "layers_left_over", "own_layers"]

_LISTED = 12  # names that a message lists before it counts the rest


@dataclasses.dataclass(frozen=True)
class Part:
    """Layers that live on one device of each replica."""

    name: str
    layers: tuple[keras.layers.Layer, ...]  # those that the name means; the layers in them go along
    devices: tuple[str, ...]  # one for each replica


def find_layers(model: keras.Model, names: Sequence[str]) -> dict[str, tuple[keras.layers.Layer, ...]]:
    """Return the layers that each name means.

    Args:
        model: a Keras model.
        names: of layers or attributes of the model; ``outer/inner`` for layers in layers, ``block*`` for several.

    Raises:
        PlacementError: there is no such layer, or two names mean the same one.
    """
    found = {name: _find(model, name) for name in names}
    owners: dict[int, str] = {}
    for name, layers in found.items():
        for layer in layers:
            other = owners.setdefault(id(layer), name)
            if other != name:
                raise PlacementError(
                    f"{other!r} and {name!r} both mean the layer {layer.name!r}, which can live on one device only. "
                    "Leave one of them out."
                )
    return found


def _find(model: keras.Model, name: str) -> tuple[keras.layers.Layer, ...]:
    layers = [model]
    for step, piece in enumerate(name.split("/")):
        named = {label: child for layer in layers for label, child in _named_children(layer).items()}
        matches = {id(named[label]): named[label] for label in fnmatch.filter(named, piece)}
        if not matches:
            where = "/".join(name.split("/")[:step])
            inside = f"In {where!r} of" if where else "In"
            raise PlacementError(
                f"There is no part {name!r}{close_name(piece, list(named)) or '.'} {inside} '{model.name}' there are "
                f"{_shortened(list(named)) or 'no layers'}. Name layers, or attributes that hold them; "
                "'outer/inner' for layers in layers, 'block*' for several."
            )
        layers = list(matches.values())
    return tuple(layers)


def layer_names(model: keras.Model) -> list[str]:
    """Return the names of a model's own layers, and the attributes that hold them."""
    return list(_named_children(model))


def _named_children(layer: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """A layer's own layers, by name, by attribute, and by place in a list that is an attribute."""
    children = [child for child in child_layers(layer) if not isinstance(child, keras.layers.InputLayer)]
    known = {id(child) for child in children}
    named = {}
    for attribute, value in vars(layer).items():
        if attribute.startswith("_"):
            continue
        if id(value) in known:
            named[attribute] = value
        elif isinstance(value, list | tuple):
            named.update({f"{attribute}{i}": item for i, item in enumerate(value) if id(item) in known})
    return {**{child.name: child for child in children}, **named}


def _shortened(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + rest


def own_layers(layers: Sequence[keras.layers.Layer], placed: set[int]) -> list[keras.layers.Layer]:
    """Return layers with all that is in them, but for those that are placed by a name of their own, each once.

    Args:
        layers: of one part.
        placed: ids of the layers that are named.
    """
    found: dict[int, keras.layers.Layer] = {}

    def walk(layer: keras.layers.Layer) -> None:
        found[id(layer)] = layer
        for child in child_layers(layer):
            if id(child) not in placed and id(child) not in found:
                walk(child)

    for layer in layers:
        walk(layer)
    return list(found.values())


def check_not_shared(parts: Sequence[Part]) -> None:
    """See that no layer belongs to parts on different devices.

    Raises:
        PlacementError: one does.
    """
    placed = {id(layer) for part in parts for layer in part.layers}
    owners: dict[int, Part] = {}
    for part in parts:
        for layer in own_layers(part.layers, placed):
            other = owners.setdefault(id(layer), part)
            if other.devices != part.devices:
                raise PlacementError(
                    f"The layer {layer.name!r} is used by {other.name!r} ({', '.join(other.devices)}) and by "
                    f"{part.name!r} ({', '.join(part.devices)}), and its weights can live on one device only. Name it "
                    "too, with the device that it is to live on, or put both parts on one."
                )


def layers_left_over(model: keras.Model, parts: Sequence[Part]) -> list[keras.layers.Layer]:
    """Return the outermost layers that no part has, each once."""
    placed = {id(layer) for part in parts for layer in part.layers}
    taken = {id(layer) for part in parts for layer in own_layers(part.layers, placed)}

    def walk(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
        for child in child_layers(layer):
            if id(child) in taken or isinstance(child, keras.layers.InputLayer):
                continue
            if taken & {id(inner) for inner in flat_layers(child)}:
                yield from walk(child)
            else:
                yield child

    return list({id(layer): layer for layer in walk(model)}.values())
