"""Rebuild a Keras model, with all that it has learnt, as one of ours in a strategy's scope.

A variable cannot move to another strategy, so a model is taken over by making it again: each layer from its config,
once, however often the model uses it; then values are copied from layer to layer, and read back. Functions and classes
of the user's travel by reference, lambdas too: nothing is pickled, and nothing needs to be registered.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist_ext import _keras
from keras_dist_ext._keras import (
    compile_arguments,
    flat_layers,
    has_own_config,
    has_recorded_arguments,
    is_default_strategy,
    is_serializable_dict,
    keras,
    new_input,
    optimized_variables,
    own_variables,
    share_registered_name,
    strategy_of_variable,
)
from keras_dist_ext.errors import ScopeError
from keras_dist_ext.model import Functional, Model, Sequential
from keras_dist_ext.scope import check_scope, describe_strategy, optimizers, raw_variables

__all__ = ["adopt", "clone_model", "load_model"]


def adopt(model: Any, strategy: tf.distribute.Strategy, *, compile: bool = True) -> Any:
    """Rebuild a model in the scope of a strategy, with equal weights, compile state and optimizer state.

    A `keras.Sequential` becomes a `kde.Sequential`, a functional model a functional `kde.Model`. A subclass of
    `keras.Model` is made again by its `get_config` and `from_config`, as an instance of a class of the same name that
    derives from it and from `kde.Model`: `isinstance` holds, its own methods stay in force, and it is saved and
    pickled under the name of the user's class. So `keras.models.load_model` gives back the user's class, and
    `kde.load_model` ours.

    Taken over are weights, the state of seed generators, `tf.Variable`s that layers hold, vocabularies and other
    assets, `trainable` flags, the dtype policy, and what was given to `compile`: the optimizer with its slots,
    iterations and learning rate, the loss (the same object) and the metrics (made again, at zero). The model that was
    given stays as it is.

    Args:
        model: A built model, stock or ours, made under any strategy or none.
        strategy: The strategy to live under.
        compile: Whether to take over the compile state and the optimizer.

    Returns:
        The new model.

    Raises:
        ScopeError: The model is not built, cannot be made from its config, or did not come out equal; or another
            strategy's scope is entered.
        TypeError: `model` is not a Keras model.
    """
    with _explained("kde.adopt", model, strategy, is_read=True):
        if not model.built:
            raise ScopeError(
                f"'{model.name}' is not built, so it has no weights to take over. Call it on a batch first; or make it "
                "inside `with strategy.scope():`; or, for new weights, use `kde.clone_model(model, strategy)`."
            )
        compile_alike = _compiler(model) if compile and model.compiled else None
        with _scope(strategy):
            rebuilt = _rebuild(model)
            variables = _take_over_state(rebuilt)
            if compile_alike:
                compile_alike(rebuilt.twin)
                _take_over_optimizers(rebuilt.twin, model, variables)
    check_scope(rebuilt.twin, strategy).raise_if_bad()
    return rebuilt.twin


def clone_model(model: Any, strategy: tf.distribute.Strategy | None = None) -> Any:
    """Make a model of the same architecture and compile arguments as ours, with new weights, in a strategy's scope.

    What `keras.models.clone_model` does, for subclassed models too.

    Args:
        model: Any Keras model, built or not.
        strategy: The strategy to live under; by default the one whose scope is entered, else the one of `model`.

    Returns:
        The new model.

    Raises:
        ScopeError: The model cannot be made from its config, or another strategy's scope is entered.
        TypeError: `model` is not a Keras model.
    """
    if strategy is None and not tf.distribute.has_strategy() and isinstance(model, keras.Model):
        strategy = model.distribute_strategy
    with _explained("kde.clone_model", model, strategy, is_read=False):
        compile_alike = _compiler(model) if model.compiled else None
        with _scope(strategy):
            twin = _rebuild(model).twin
            if compile_alike:
                compile_alike(twin)
    return twin


def load_model(
    path: Any,
    strategy: tf.distribute.Strategy | None = None,
    *,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Any:
    """Load a model that Keras or we saved, as one of ours, in a strategy's scope, with its optimizer state.

    Args:
        path: A `.keras` file or directory, or a legacy `.h5` file (of which Keras 3 does not restore the optimizer's
            slots).
        strategy: The strategy to live under; by default the one whose scope is entered.
        custom_objects: The user's classes and functions by name, as for `keras.models.load_model`.
        compile: Whether to compile the model as it was when it was saved.
        safe_mode: Whether to refuse files that hold code (lambdas).

    Returns:
        The model.

    Raises:
        ScopeError: What was saved cannot be made in the scope, or another strategy's scope is entered.
        ValueError: Keras cannot read the file.
    """
    # Keras saves classes that are not its own by their bare names. In legacy files, its own have bare names too.
    is_legacy = str(path).endswith((".h5", ".hdf5"))
    ours = {} if is_legacy else {cls.__name__: cls for cls in (Model, Functional, Sequential)}
    _refuse_nesting("kde.load_model", strategy)
    with _scope(strategy), keras.saving.custom_object_scope(ours):
        model = keras.models.load_model(path, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode)
        if isinstance(model, Model):
            return model
        return adopt(model, tf.distribute.get_strategy(), compile=compile)


@contextlib.contextmanager
def _explained(caller: str, model: Any, strategy: tf.distribute.Strategy | None, *, is_read: bool) -> Iterator[None]:
    """Refuse what cannot work before anything is made, and say what went wrong where."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"{caller} takes a Keras model, and got {type(model).__name__}: {model!r}.")
    _refuse_nesting(caller, strategy)
    here = tf.distribute.get_strategy()
    variables = [*(model.variables if is_read else ()), *(v for _, o in optimizers(model) for v in o.variables)]
    elsewhere = {
        describe_strategy(own)
        for own in map(strategy_of_variable, variables)
        if own is not None and own.extended is not here.extended
    }
    if tf.distribute.has_strategy() and elsewhere:
        raise ScopeError(
            f"{caller} was called inside the scope of {describe_strategy(here)}, where the variables of "
            f"'{model.name}', which live under {' and '.join(sorted(elsewhere))}, cannot be read. Leave the scope."
        )
    try:
        yield
    except _CannotRebuildError as error:
        raise ScopeError(
            f"{caller} cannot make {_label(model)} again: {error} Or build the model inside `with strategy.scope():`, "
            "and load its weights there."
        ) from error.__cause__


def _refuse_nesting(caller: str, strategy: tf.distribute.Strategy | None) -> None:
    here = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and strategy is not None and strategy.extended is not here.extended:
        raise ScopeError(
            f"{caller} was called inside the scope of {describe_strategy(here)} for {describe_strategy(strategy)}. "
            "TensorFlow does not nest scopes of two strategies: leave the first, or give its strategy."
        )


def _scope(strategy: tf.distribute.Strategy | None) -> contextlib.AbstractContextManager[Any]:
    """The strategy's scope, where it has one to enter."""
    if strategy is None or is_default_strategy(strategy):
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = strategy.scope()
    return scope


def _label(thing: Any) -> str:
    return f"'{thing.name}' ({type(thing).__name__})"


class _CannotRebuildError(Exception):
    """Says what stands in the way, and how to mend it, in full sentences."""


# Make the layers again


class _Rebuilt:
    """A model in the making: its layers, old and new, each once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.twin: Any = None
        self._twins: dict[int, tuple[Any, Any]] = {}  # id of the old layer -> (old, new); keeps the old one alive
        self._graphs: set[int] = set()  # ids of the old models whose layers were made one by one

    def twin_of(self, layer: Any) -> Any:
        """Make a layer or an operation of a graph again, or return the one that was made."""
        if id(layer) not in self._twins:
            self._twins[id(layer)] = (layer, self._make(layer))
        return self._twins[id(layer)][1]

    def _make(self, layer: Any) -> Any:
        cls = type(layer)
        if cls in (_keras.Functional, Functional) or _is_functional_by_base(layer):
            return self.functional(layer, cls)
        if cls in (keras.Sequential, Sequential):
            return self.sequential(layer, cls)
        if not isinstance(layer, keras.Layer):
            return _stateless(layer)
        return _again(layer, cls)

    def functional(self, model: Any, cls: Any) -> Any:
        """Call new layers in the order in which the graph of `model` calls the old ones."""
        inputs = keras.tree.map_structure(new_input, model.input)
        bare = keras.Model(model.input, model.output, name=model.name)  # the same layers, uncompiled, of Keras' class
        copy = keras.models.clone_model(
            bare, input_tensors=inputs, clone_function=self.twin_of, call_function=self._call_with_new_variables
        )
        return self._keep(model, cls(inputs, copy.output, name=model.name), is_graph=True)

    def sequential(self, model: Any, cls: Any) -> Any:
        """Stack new layers as `model` stacks the old ones."""
        layers = [self.twin_of(layer) for layer in model.layers]
        inputs = _sequential_input(model)
        twin = cls(layers if inputs is None else [inputs, *layers], name=model.name)
        if not twin.built and model.built:
            _build_alike(twin, model)
        return self._keep(model, twin, is_graph=True)

    def subclassed(self, model: Any, cls: Any) -> Any:
        """Have the user's class make itself again from its config, and build what `model` has built."""
        twin = _again(model, cls)
        if model.built:
            _build_alike(twin, model)
        return self._keep(model, twin, is_graph=False)

    def _keep(self, model: Any, twin: Any, is_graph: bool) -> Any:
        self._twins[id(model)] = (model, twin)
        if is_graph:
            self._graphs.add(id(model))
        return twin

    def pairs(self) -> list[tuple[Any, Any]]:
        """(old, new) for every layer of the model and all that is in them, each old one once."""
        found: dict[int, tuple[Any, Any]] = {}
        for old, new in list(self._twins.values()):
            if not isinstance(old, keras.Layer):
                continue
            for one, other in [(old, new)] if id(old) in self._graphs else _side_by_side(old, new):
                found.setdefault(id(one), (one, other))
        return list(found.values())

    def _call_with_new_variables(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """A graph may hold a variable itself, such as tied embeddings in a `matmul`: give it the new one."""
        args, kwargs = keras.tree.map_structure(self._new_variable, (args, kwargs))
        return layer(*args, **kwargs)

    def _new_variable(self, value: Any) -> Any:
        if not isinstance(value, keras.Variable | tf.Variable):
            return value
        for old, new in self.pairs():
            for one, other in _variable_pairs(old, new):
                if one is value:
                    return other
        raise _CannotRebuildError(
            f"an operation uses the variable '{getattr(value, 'path', value.name)}', which belongs to no layer that "
            "comes before it. Wrap the operation in a layer of its own that gets the variable's layer."
        )


def _rebuild(model: Any) -> _Rebuilt:
    """Make the model again, with new weights; what is ours stays of its class, and what is not becomes ours."""
    rebuilt = _Rebuilt(model)
    user_class: Any = type(model)
    cls = _ours(user_class)
    if isinstance(model, _keras.Functional) and (cls is Functional or _is_functional_by_base(model)):
        rebuilt.twin = rebuilt.functional(model, cls)
    elif isinstance(model, keras.Sequential) and _first_init(user_class) in (keras.Sequential, Sequential, Model):
        rebuilt.twin = rebuilt.sequential(model, cls)
    else:
        rebuilt.twin = rebuilt.subclassed(model, cls)
    rebuilt.twin.dtype_policy = model.dtype_policy
    _take_over_trainable(rebuilt.pairs())
    return rebuilt


def _first_init(cls: type) -> type:
    return next(base for base in cls.__mro__ if "__init__" in vars(base))


def _is_functional_by_base(layer: Any) -> bool:
    """Whether a user's class leaves construction to the functional model: `class Net(keras.Model)`, `Net(x, y)`."""
    return isinstance(layer, _keras.Functional) and _first_init(type(layer)) in (
        *(_keras.Functional, Functional, keras.Model, Model),
    )


def _sequential_input(model: Any) -> Any:
    try:
        return new_input(model.inputs[0])
    except AttributeError:  # Keras' way to say that it has none
        return None


def _stateless(operation: Any) -> Any:
    """An operation such as `x + y` has no state: where it has no config either, the graphs can share it."""
    try:
        return type(operation).from_config(operation.get_config())
    except Exception:
        return operation


def _again(thing: Any, cls: Any) -> Any:
    """Make a layer, model or metric again."""
    has_config = has_own_config(thing) or (isinstance(thing, Model) and has_recorded_arguments(thing))
    is_made_from_config = has_config or not isinstance(thing, keras.Model)
    twin = _recipe(thing)(cls) if is_made_from_config else _from_nothing(thing, cls)
    _rename(twin, thing)
    return twin


def _rename(twin: Any, thing: Any) -> None:
    """Give the layers in `twin` the names of those in `thing`: names that Keras makes up count on."""
    twin.name = thing.name  # many constructors take none
    if isinstance(thing, keras.Layer):
        for old, new in zip(flat_layers(thing), flat_layers(twin), strict=False):
            if type(old) is type(new) and not new.built:
                new.name = old.name


def _recipe(thing: Any) -> Callable[[Any], Any]:
    """Read the config of a thing, where its variables can be read, for a class to make it again elsewhere."""
    label, name = _label(thing), type(thing).__name__
    with _by_reference(thing) as objects:
        try:
            config = _bare(keras.saving.serialize_keras_object(thing.get_config()))
        except Exception as error:
            raise _CannotRebuildError(
                f"{label} gives no config: {_first_sentence(error)} Give {name} a `get_config` that returns the "
                "arguments of its constructor."
            ) from error

    def make(cls: Any) -> Any:
        with keras.saving.custom_object_scope(objects):
            try:
                twin = cls.from_config(dict(config))
            except Exception as error:
                raise _CannotRebuildError(
                    f"{label} cannot be made from its config: {_first_sentence(error)} Give {name} a `get_config` that "
                    "returns the arguments of its constructor, and a `from_config` that takes them."
                ) from error
        _refuse_lost_arguments(thing, twin, config)
        return twin

    return make


def _bare(config: Any) -> Any:
    """The config without how layers in it were built and compiled: what calls them builds them, under their paths."""
    if isinstance(config, dict):
        dropped = ("build_config", "compile_config") if "class_name" in config else ()
        return {key: _bare(value) for key, value in config.items() if key not in dropped}
    return [_bare(value) for value in config] if isinstance(config, list) else config


def _refuse_lost_arguments(thing: Any, twin: Any, config: Any = None) -> None:
    """Notice a `get_config` that forgets an argument of the constructor, which then gets its default in silence."""
    cls = type(thing)
    is_own = cls.from_config.__module__.partition(".")[0] != "keras"
    for name in _arguments(cls):
        before, after = (getattr(one, name, None) for one in (thing, twin))
        are_plain = all(isinstance(value, bool | int | float | str | None) for value in (before, after))
        if are_plain and before != after:
            raise _CannotRebuildError(
                f"{_label(thing)} was made with {name}={before!r}, and what its config makes has {name}={after!r}. "
                f"Have the `get_config` of {cls.__name__} return {name}."
            )
        if config is not None and name not in config and not is_own and not (are_plain and hasattr(thing, name)):
            raise _CannotRebuildError(
                f"the config of {_label(thing)} leaves out {name}, which its constructor takes. "
                f"Have the `get_config` of {cls.__name__} return {name}."
            )


def _arguments(cls: Any) -> list[str]:
    """What the constructor of a user's class takes besides what every layer takes."""
    if _first_init(cls).__module__.partition(".")[0] in ("keras", "keras_dist_ext"):
        return []
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    collects = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in parameters if p.kind not in collects and p.name not in ("name", "dtype", "trainable")]


def _from_nothing(model: Any, cls: Any) -> Any:
    """Make a model again whose class has no `get_config`, if its constructor takes nothing that could be lost.

    Keras' own `get_config` gives the defaults of a model's constructor, whatever it was called with (Keras 3.15.1: the
    arguments do not get past `Model.__new__`).
    """
    lost = _arguments(type(model))
    if lost:
        raise _CannotRebuildError(
            f"{type(model).__name__} has no `get_config`, so nobody knows what it was made with: {', '.join(lost)}. "
            "Give it a `get_config` that returns the arguments of its constructor."
        )
    try:
        return cls()
    except Exception as error:
        raise _CannotRebuildError(f"`{type(model).__name__}()` fails: {_first_sentence(error)}") from error


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text.partition(" Received config=")[0].partition(" Example: ")[0]
    return f"{type(error).__name__}: {text[:300]}{'' if text.endswith('.') else '.'}"


@contextlib.contextmanager
def _by_reference(thing: Any) -> Iterator[dict[str, Any]]:
    """Let the configs of `thing` and of what it holds name the user's functions and classes, rather than their code.

    Yields:
        The custom objects by those names. Keras serialises a lambda by its byte code, without its globals, and tells
        functions apart by name alone, so each function has a name of its own for as long as this lasts.
    """
    objects: dict[str, Any] = {}
    renamed: list[tuple[Any, str]] = []
    try:
        for found in _users_own(thing):
            name = keras.saving.get_registered_name(found)
            if isinstance(found, types.FunctionType) and name == found.__name__:
                renamed.append((found, name))
                name = found.__name__ = f"kde_function_{len(renamed)}"
            if objects.setdefault(name, found) is not found:
                raise _CannotRebuildError(
                    f"'{thing.name}' holds two classes of the name {name}, and Keras' configs tell classes apart by "
                    "name. Register one with `@keras.saving.register_keras_serializable(package=...)`."
                )
        yield objects
    finally:
        for function, name in renamed:
            function.__name__ = name


def _users_own(thing: Any) -> Iterator[Any]:
    """Functions and classes from outside Keras that a layer, metric, optimizer, ... holds, each once."""
    seen: set[int] = set()
    pending = [thing]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, types.FunctionType):
            if not (item.__module__ or "").startswith("keras.") or item.__name__ == "<lambda>":
                yield item
        elif isinstance(item, list | tuple | set):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, type | keras.Variable | tf.Variable | tf.Tensor | np.ndarray):
            continue
        elif hasattr(item, "get_config") or is_serializable_dict(item):
            cls = type(item)
            if id(cls) not in seen and not cls.__module__.startswith("keras"):
                seen.add(id(cls))
                yield cls
            pending.extend(v for k, v in getattr(item, "__dict__", {}).items() if k not in ("build", "quantize"))


def _build_alike(twin: Any, model: Any) -> None:
    """Build what a model and the layers in it have built, from the shapes that they were built with."""
    if not twin.built:
        with warnings.catch_warnings(), keras.name_scope(twin.name, caller=twin):
            warnings.simplefilter("ignore")  # Keras warns where it cannot; the comparison of all variables is an error
            twin.build_from_config(model.get_build_config())
    for old, new in zip(flat_layers(model), flat_layers(twin), strict=False):
        if old.built and not new.built:
            new.build_from_config(old.get_build_config())
    twin.built = True


# The user's class, as one of ours


def _ours(cls: Any) -> Any:
    """The class of ours that stands for a class of Keras' or of the user's."""
    if issubclass(cls, Model):
        return cls
    if cls is keras.Sequential:
        return Sequential
    if cls in (_keras.Functional, keras.Model):
        return Functional
    ours = _derived(cls)
    share_registered_name(cls, ours)
    return ours


@functools.cache
def _derived(cls: Any) -> Any:
    """A class of the same name that derives from the user's class and from ours."""
    base = Sequential if issubclass(cls, keras.Sequential) else Model
    if issubclass(cls, _keras.Functional):
        base = Functional

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(
            __doc__=cls.__doc__, __module__=cls.__module__, __qualname__=cls.__qualname__, __reduce__=_reduce
        )

    return types.new_class(cls.__name__, (cls, base), exec_body=body)


def _reduce(model: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickle the user's class by name, and the model as Keras does: as the bytes of a `.keras` file."""
    cls = next(base for base in type(model).__mro__ if not issubclass(base, Model))
    return _unpickle, (cls, *keras.Model.__reduce__(model)[1])


def _unpickle(cls: type, file: Any) -> Any:
    ours = _ours(cls)
    with keras.saving.custom_object_scope({keras.saving.get_registered_name(cls): ours}):
        return ours._unpickle_model(file)


# Take over values


def _side_by_side(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Pair the layers in two layers that the same code made."""
    olds, news = flat_layers(old), flat_layers(new)
    names = [[f"{type(layer).__name__}" for layer in layers[1:]] for layers in (olds, news)]
    if names[0] != names[1]:
        raise _CannotRebuildError(
            f"'{old.name}' holds {len(names[0])} layers ({', '.join(names[0])}), and what its config makes holds "
            f"{len(names[1])} ({', '.join(names[1])}). Make all layers in its constructor or in `build`, from what "
            "`get_config` returns."
        )
    for one, other in zip(olds, news, strict=True):
        _refuse_lost_arguments(one, other)
        yield one, other


def _take_over_state(rebuilt: _Rebuilt) -> dict[int, Any]:
    """Copy the values of all layers, and read them back.

    Returns:
        The new variables by the ids of the old ones.
    """
    variables: dict[int, Any] = {}
    for old, new in rebuilt.pairs():
        weights = list(_variable_pairs(old, new))
        if type(old).load_own_variables is not keras.Layer.load_own_variables and old.built:
            store = _Store()
            old.save_own_variables(store)
            if store:
                new.load_own_variables(store)  # where it does more than assign, such as Normalization
        if hasattr(old, "save_assets"):
            with tempfile.TemporaryDirectory() as directory:
                old.save_assets(directory)
                new.load_assets(directory)
        for one, other in weights:
            _assign(other, one)
            variables[id(one)] = other
        for (path, one), (_, other) in zip(raw_variables(old), raw_variables(new), strict=False):
            if one.shape != other.shape:
                raise _CannotRebuildError(f"the tf.Variable '{path}' of '{old.name}' came out in another shape.")
            other.assign(_read(one))
    left = [variable for variable in rebuilt.model.variables if id(variable) not in variables]
    if left:
        raise _CannotRebuildError(
            f"{_listed(left)} belong to layers that were attached to it beside its graph. Take them off, and attach "
            "such layers to the new model."
        )
    return variables


class _Store(dict[str, Any]):
    """What `save_own_variables` writes to: keeps values, not variables."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, _read(value) if isinstance(value, keras.Variable) else value)


def _variable_pairs(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """The weights and seed states of a layer and its twin, without those of layers in it."""
    olds, news = own_variables(old), own_variables(new)
    if [tuple(v.shape) for v in olds] != [tuple(v.shape) for v in news]:
        raise _CannotRebuildError(
            f"'{old.name}' ({type(old).__name__}) has the weights {_listed(olds)}, and what its config and build "
            f"config make has {_listed(news)}. Make them all in `__init__` or `build`, or give the class "
            "`get_build_config` and `build_from_config`."
        )
    yield from zip(olds, news, strict=True)


def _listed(variables: Iterable[Any]) -> str:
    return ", ".join(f"{v.name} {tuple(v.shape)}" for v in variables) or "none"


def _read(variable: Any) -> Any:
    """The value of a variable that may live under another strategy than the one whose scope is entered."""
    if _keras.is_sync_on_read(variable):
        return variable.numpy()
    parts = _keras.components(variable)  # copies, unless a ShardedVariable
    return tf.convert_to_tensor(parts[0]).numpy()


def _assign(new: Any, old: Any) -> None:
    value = _read(old)
    if _has_value(new, value):  # half of the time to assign to a mirrored variable is saved
        return
    new.assign(value)
    if not _has_value(new, value):
        raise _CannotRebuildError(f"the variable '{old.path}' did not keep its value of dtype {old.dtype}.")


def _has_value(variable: Any, value: Any) -> bool:
    """Whether it holds just these bytes: NaN must be equal to itself."""
    held = _read(variable)
    return bool(held.dtype == value.dtype and held.tobytes() == value.tobytes())


def _take_over_trainable(pairs: list[tuple[Any, Any]]) -> None:
    """Set the flags from the outside in; a flag goes down to all layers inside, so shared ones need another round."""
    for _ in pairs:
        wrong = [(old, new) for old, new in pairs if old.trainable != new.trainable]
        if not wrong:
            break
        for old, new in wrong:
            new.trainable = old.trainable
    for old, new in pairs:
        for one, other in zip(own_variables(old), own_variables(new), strict=False):
            if one.trainable != other.trainable:
                other.trainable = one.trainable


# Take over what was compiled


def _compiler(model: Any) -> Callable[[Any], None]:
    """Read how the model was compiled, to compile another with a new optimizer of the same config, and new metrics."""
    if _keras.overrides(model, "compile"):
        if not (_keras.overrides(model, "get_compile_config") and _keras.overrides(model, "compile_from_config")):
            raise _CannotRebuildError(
                f"{type(model).__name__} has a `compile` of its own, and does not say how to repeat it. Give it "
                "`get_compile_config` and `compile_from_config`; or use `kde.adopt(model, strategy, compile=False)`, "
                "and compile the result inside the scope."
            )
        with _by_reference(model) as objects:
            config = model.get_compile_config()

        def compile_from_config(twin: Any) -> None:
            with keras.saving.custom_object_scope(objects):
                twin.compile_from_config(config)

        return compile_from_config

    given = compile_arguments(model)
    new_optimizer = None if model.optimizer is None else _recipe(model.optimizer)

    def compile_alike(twin: Any) -> None:
        made: dict[int, Any] = {}
        twin.compile(
            optimizer=new_optimizer and new_optimizer(type(model.optimizer)),
            loss=given["loss"],
            loss_weights=given["loss_weights"],
            metrics=_new_metrics(given["metrics"], made),
            weighted_metrics=_new_metrics(given["weighted_metrics"], made),
            run_eagerly=model.run_eagerly,
            steps_per_execution=given["steps_per_execution"],
            jit_compile=model.jit_compile,
            auto_scale_loss=False,  # the optimizer was wrapped already if it was to be
        )

    return compile_alike


def _new_metrics(given: Any, made: dict[int, Any]) -> Any:
    """The metrics given to `compile`, with those that hold variables made again."""
    if isinstance(given, dict):
        return {key: _new_metrics(value, made) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return [_new_metrics(value, made) for value in given]
    if not isinstance(given, keras.Metric):
        return given
    if id(given) not in made:
        made[id(given)] = _again(given, type(given))
    return made[id(given)]


def _take_over_optimizers(twin: Any, model: Any, variables: dict[int, Any]) -> None:
    for name, old in optimizers(model):
        new = getattr(twin, name, None)
        if new is None:
            continue
        trained = optimized_variables(old)
        if old.built and not trained:
            continue  # Keras builds an optimizer for nothing when it loads a legacy file
        try:
            trained = [variables[id(variable)] for variable in trained]
        except KeyError:
            raise _CannotRebuildError(
                f"its optimizer '{old.name}' trains variables that are not the model's. Use "
                "`kde.adopt(model, strategy, compile=False)`, and compile the result inside the scope."
            ) from None
        if old.built:
            with keras.name_scope(new.name, caller=new):
                new.build(trained)
        olds, news = old.variables, new.variables
        if [tuple(v.shape) for v in olds] != [tuple(v.shape) for v in news]:
            raise _CannotRebuildError(
                f"its optimizer '{old.name}' has the variables {_listed(olds)}, and what its config makes has "
                f"{_listed(news)}. Use `kde.adopt(model, strategy, compile=False)`, and compile the result inside the "
                "scope."
            )
        for one, other in zip(olds, news, strict=True):
            _assign(other, one)
