"""Rebuild a model, layer by layer, each layer once however often the model uses it."""

from __future__ import annotations

import warnings

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import attributes, child_layers
from keras_dist_ext._keras.models import KerasFunctional, input_like
from keras_dist_ext._keras.variables import components
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.training.adoption.distributed_class import OwnClasses, distributed_class_for
from keras_dist_ext.training.adoption.recipe import CannotRebuildError, first_init, rebuild_from_config
from keras_dist_ext.training.adoption.variable_pairs import side_by_side, take_over_trainable, variable_pairs
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["Rebuilt", "rebuild"]


def rebuild(model: keras.Model, own: OwnClasses) -> Rebuilt:
    """Make a model again, with new weights; what is ours stays of its class, and what is not becomes ours.

    Raises:
        CannotRebuildError: The model, or a layer in it, cannot be made from its config.
    """
    rebuilt = Rebuilt(own)
    user_class: type[keras.Model] = type(model)
    cls = distributed_class_for(user_class, own)
    if isinstance(model, KerasFunctional) and (cls is own.functional or rebuilt.is_functional_by_base(model)):
        rebuilt.clone = rebuilt.functional(model, cls)
    elif isinstance(model, keras.Sequential) and first_init(user_class) in (
        keras.Sequential,
        own.sequential,
        own.model,
    ):
        rebuilt.clone = rebuilt.sequential(model, cls)
    else:
        rebuilt.clone = rebuilt.subclassed(model, cls)
    rebuilt.clone.dtype_policy = model.dtype_policy
    take_over_trainable(rebuilt.pairs())
    return rebuilt


class Rebuilt:
    """A model that is rebuilt: its layers, old and new, each once.

    Attributes:
        clone: The new model, once it is built.
    """

    def __init__(self, own: OwnClasses) -> None:
        self._own = own
        self.clone: keras.layers.Layer = None
        self._clones: dict[
            int, tuple[keras.Layer, keras.Layer]
        ] = {}  # id of the old layer -> (old, new); keeps the old one alive
        self._graphs: set[int] = set()  # ids of the old models whose layers were made one by one

    def clone_of(self, layer: keras.layers.Layer) -> keras.layers.Layer:
        """Make a layer or an operation of a graph again, or return the one that was made.

        Raises:
            CannotRebuildError: It cannot be made from its config.
        """
        if id(layer) not in self._clones:
            self._clones[id(layer)] = (layer, self._make(layer))
        return self._clones[id(layer)][1]

    def _make(self, layer: keras.layers.Layer) -> keras.layers.Layer:
        cls = type(layer)
        if cls in (KerasFunctional, self._own.functional) or self.is_functional_by_base(layer):
            return self.functional(layer, cls)
        if cls in (keras.Sequential, self._own.sequential):
            return self.sequential(layer, cls)
        if not isinstance(layer, keras.Layer):
            return _stateless(layer)
        return rebuild_from_config(layer, cls, records_arguments=runtime_of(layer) is not None)

    def is_functional_by_base(self, layer: keras.layers.Layer) -> bool:
        """Whether a user's class leaves construction to the functional model: `class Net(keras.Model)`, `Net(x, y)`."""
        constructors = (KerasFunctional, self._own.functional, keras.Model, self._own.model)
        return isinstance(layer, KerasFunctional) and first_init(type(layer)) in constructors

    def functional(self, model: keras.Model, cls: type[keras.Model]) -> keras.Model:
        """Call new layers in the order in which the graph of `model` calls the old ones.

        Raises:
            CannotRebuildError: A layer cannot be rebuilt, or the graph uses a variable of no layer in it.
        """
        inputs = keras.tree.map_structure(input_like, model.input)
        bare = keras.Model(model.input, model.output, name=model.name)  # the same layers, uncompiled, of Keras' class
        copy = keras.models.clone_model(
            bare, input_tensors=inputs, clone_function=self.clone_of, call_function=self._call_with_new_variables
        )
        return self._keep(model, cls(inputs, copy.output, name=model.name), is_graph=True)

    def sequential(self, model: keras.Model, cls: type[keras.Model]) -> keras.Model:
        """Stack new layers as `model` stacks the old ones.

        Raises:
            CannotRebuildError: A layer cannot be rebuilt.
        """
        layers = [self.clone_of(layer) for layer in model.layers]
        inputs = _sequential_input(model)
        clone = cls(layers if inputs is None else [inputs, *layers], name=model.name)
        if not clone.built and model.built:
            _build_alike(clone, model)
        return self._keep(model, clone, is_graph=True)

    def subclassed(self, model: keras.Model, cls: type[keras.Model]) -> keras.Model:
        """Have the user's class make itself again from its config, and build what `model` has built.

        Raises:
            CannotRebuildError: It cannot.
        """
        clone = rebuild_from_config(model, cls, records_arguments=runtime_of(model) is not None)
        if model.built:
            _build_alike(clone, model)
        self._attach_late(clone, model)
        _build_layers_alike(clone, model)
        return self._keep(model, clone, is_graph=False)

    def _attach_late(self, clone: keras.layers.Layer, model: keras.Model) -> None:
        """Give a model the attributes that its class does not make, but its first step or its `compile` has made."""
        for name, value in attributes(model):
            if getattr(clone, name, None) is not None:
                continue
            if isinstance(value, keras.Layer):
                setattr(clone, name, self.clone_of(value))
            elif name.startswith("_"):
                continue  # Keras' own `compile` makes those
            elif isinstance(value, keras.Metric):
                setattr(clone, name, rebuild_from_config(value, type(value)))
            elif isinstance(value, keras.Variable):
                new = clone.add_weight(
                    shape=value.shape,
                    dtype=value.dtype,
                    trainable=value.trainable,
                    name=value.name,
                    initializer="zeros",
                )
                setattr(clone, name, new)
            elif isinstance(value, tf.Variable):
                start = tf.convert_to_tensor(components(value)[0]).numpy()
                how = {"synchronization": value.synchronization, "aggregation": value.aggregation}
                setattr(clone, name, tf.Variable(start, trainable=value.trainable, **how))

    def _keep(self, model: keras.Model, clone: keras.layers.Layer, is_graph: bool) -> keras.Model:
        self._clones[id(model)] = (model, clone)
        if is_graph:
            self._graphs.add(id(model))
        return clone

    def pairs(self) -> list[tuple[keras.Layer, keras.Layer]]:
        """(old, new) for every layer of the model and all that is in them, each old one once.

        Raises:
            CannotRebuildError: A layer and its clone hold other layers, or were made with other arguments.
        """
        found: dict[int, tuple[keras.Layer, keras.Layer]] = {}
        for old, new in list(self._clones.values()):
            if not isinstance(old, keras.Layer):
                continue
            for one, other in [(old, new)] if id(old) in self._graphs else side_by_side(old, new):
                found.setdefault(id(one), (one, other))
        return list(found.values())

    def _call_with_new_variables(
        self, layer: keras.layers.Layer, *args: TensorNest, **kwargs: TensorNest
    ) -> TensorNest:
        """A graph may hold a variable itself, such as tied embeddings in a `matmul`: give it the new one."""
        args, kwargs = keras.tree.map_structure(self._new_variable, (args, kwargs))
        return layer(*args, **kwargs)

    def _new_variable(self, value: TensorNest) -> TensorNest:
        if not isinstance(value, keras.Variable | tf.Variable):
            return value
        for old, new in self.pairs():
            for one, other in variable_pairs(old, new):
                if one is value:
                    return other
        raise CannotRebuildError(
            f"an operation uses the variable '{getattr(value, 'path', value.name)}', which belongs to no layer that "
            "comes before it. Wrap the operation in a layer of its own that gets the variable's layer."
        )


def _sequential_input(model: keras.Model) -> keras.KerasTensor | None:
    try:
        return input_like(model.inputs[0])
    except AttributeError:  # Keras' way to say that it has none
        return None


def _stateless(operation: keras.Operation) -> keras.Operation:
    """An operation such as `x + y` has no state: where it has no config either, the graphs can share it."""
    try:
        return type(operation).from_config(operation.get_config())
    except Exception:
        return operation


def _build_alike(clone: keras.layers.Layer, model: keras.Model) -> None:
    """Build what a model and the layers in it have built, from the shapes that they were built with."""
    if not clone.built:
        with warnings.catch_warnings(), keras.name_scope(clone.name, caller=clone):
            warnings.simplefilter("ignore")  # Keras warns where it cannot; the comparison of all variables is an error
            clone.build_from_config(model.get_build_config())
    _build_layers_alike(clone, model)
    clone.built = True


def _build_layers_alike(clone: keras.layers.Layer, model: keras.Model) -> None:
    """Build the layers in a model that are built in another: from the outside in, since building may make more."""
    pending, seen = [(model, clone)], set()
    while pending:
        old_holder, new_holder = pending.pop(0)
        for old, new in zip(child_layers(old_holder), child_layers(new_holder), strict=False):
            if id(old) in seen or type(old).__name__ != type(new).__name__:
                continue  # what is unlike is refused later
            seen.add(id(old))
            if old.built and not new.built:
                new.build_from_config(old.get_build_config())
            pending.append((old, new))
