"""Find out which variables, optimizer, metrics and seeds of a model live under which strategy.

TensorFlow lets a variable made under one strategy, or under none, be trained under another, and then trains on one
device in silence or fails with object addresses. Here each variable says where it was made.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Literal

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import attributes, flat_layers, own_metrics
from keras_dist_ext._keras.models import user_metrics
from keras_dist_ext._keras.strategies import (
    is_default_strategy,
    num_tasks,
    strategy_of_model,
    strategy_of_optimizer,
    strategy_of_variable,
)
from keras_dist_ext._keras.variables import Variable, hold_sum, variables_of_module
from keras_dist_ext.errors import ScopeError
from keras_dist_ext.messages import counted
from keras_dist_ext.strategy.given import checked_strategy

__all__ = [
    "check_scope",
    "check_sums",
    "hold_sums",
    "report_scope",
    "ScopeReport",
    "ScopeEntry",
    "Role",
    "describe_strategy",
    "optimizers",
    "raw_variables",
    "move_into_scope",
]

Role = Literal[
    "model", "trainable", "non-trainable", "tf.Variable", "seed", "optimizer", "optimizer variable", "metric variable"
]
_Part = tuple[str, Role, object, "tf.distribute.Strategy | None"]  # path, role, thing, its own strategy
NO_STRATEGY = "no strategy"
LISTED = 5  # paths that a message names before it counts the rest


def check_scope(model: keras.Layer, strategy: tf.distribute.Strategy | None) -> ScopeReport:
    """Find out where everything that training `model` reads or writes was made.

    Looked at are the model and the models in it, the weights of all layers, `tf.Variable`s that layers hold, the
    state of seed generators, the optimizer (and the one inside a `LossScaleOptimizer`), and the metrics of `compile`,
    of the model and of its layers. What is not made yet cannot be in the wrong place: Keras makes the metrics given by
    name, for example, in the first step.

    Args:
        model: Any Keras model, built or not.
        strategy: The strategy that will train it; None and TensorFlow's default strategy mean none.

    Returns:
        The report, as values; `report.raise_if_bad()` turns it into an error.

    Raises:
        StrategyError: `strategy` is not a tf.distribute.Strategy.
        TypeError: `model` is not a Keras layer or model.
    """
    if not isinstance(model, keras.Layer):
        raise TypeError(f"model must be a Keras model or layer, got {arguments.shown(model)}.")
    return report_scope(model, strategy)


def report_scope(
    model: keras.Layer, strategy: tf.distribute.Strategy | None, *, movable: Container[int] = ()
) -> ScopeReport:
    """Find out what `check_scope` does.

    Args:
        model: likewise.
        strategy: likewise.
        movable: ids of variables that are about to be moved under the strategy, and count as made there.
    """
    expected = _no_default(checked_strategy(strategy))
    entries: list[ScopeEntry] = []
    seen: set[int] = set()
    for path, role, thing, own in _parts(model):
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        is_inner_model = role == "model" and thing is not model
        inside = _is_same(own, expected) or (is_inner_model and own is None) or id(thing) in movable
        entries.append(ScopeEntry(path, role, _place(own, expected), inside))
    return ScopeReport(model.name, describe_strategy(expected), tuple(entries))


@dataclass(frozen=True)
class ScopeEntry:
    """One thing and where it was made."""

    path: str
    role: Role
    place: str  # the strategy it was made under, such as "MirroredStrategy (2 replicas)" or "no strategy"
    inside: bool  # whether that is the strategy asked about


@dataclass(frozen=True)
class ScopeReport:
    """Where everything of one model was made, and whether that is the strategy asked about."""

    model: str
    strategy: str  # a description, such as "MirroredStrategy (2 replicas)"
    entries: tuple[ScopeEntry, ...]

    @property
    def outside(self) -> tuple[ScopeEntry, ...]:
        """What was made elsewhere."""
        return tuple(entry for entry in self.entries if not entry.inside)

    @property
    def ok(self) -> bool:
        """Whether nothing was made elsewhere."""
        return not self.outside

    def raise_if_bad(self) -> None:
        """Refuse a model of which something was made elsewhere.

        Raises:
            ScopeError: Names what was made elsewhere by path, the strategy of each, what that leads to and the fix.
        """
        if not self.ok:
            raise ScopeError(str(self))

    def __str__(self) -> str:
        outside = self.outside
        if not outside:
            return f"All {len(self.entries)} parts of '{self.model}' live under {self.strategy}."
        roles = {entry.role for entry in outside}
        # The variables say more than their owner: name the owner where it is the only one.
        if roles & {"trainable", "non-trainable", "tf.Variable", "seed"}:
            outside = tuple(entry for entry in outside if entry.role != "model" or entry.path != self.model)
        if "optimizer" in roles:
            outside = tuple(entry for entry in outside if entry.role != "optimizer variable")
        found = [self._sentence(role, outside) for role in _NOUNS if any(entry.role == role for entry in outside)]
        own = any(entry.role == "model" and entry.path == self.model and entry.inside for entry in self.entries)
        return " ".join([*found, *_advice(roles, outside, self.strategy, model_is_inside=own)])

    def _sentence(self, role: Role, outside: tuple[ScopeEntry, ...]) -> str:
        wrong = [entry for entry in outside if entry.role == role]
        total = sum(entry.role == role for entry in self.entries)
        one, many = _NOUNS[role]
        count = f"{len(wrong)} of {total} {one if total == 1 else many} of '{self.model}'"
        if role == "model":
            count = f"The {one if len(wrong) == 1 else many}"
        verb = "was" if len(wrong) == 1 else "were"
        where = (
            f"outside {self.strategy}" if self.strategy != NO_STRATEGY else "under a strategy, while it runs under none"
        )
        places = dict.fromkeys(entry.place for entry in wrong)
        lists = [_shortened([entry.path for entry in wrong if entry.place == place], place) for place in places]
        return f"{count} {verb} created {where}: {'; '.join(lists)}."


def describe_strategy(strategy: tf.distribute.Strategy | None) -> str:
    """Name a strategy and its size, as in `MirroredStrategy (2 replicas)`, or say "no strategy"."""
    strategy = _no_default(strategy)
    if strategy is None:
        return NO_STRATEGY
    name = type(strategy).__name__.removesuffix("V1").removesuffix("V2")
    name = {"CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy"}.get(name, name)
    if name == "ParameterServerStrategy":
        tasks = num_tasks(strategy)
        return (
            f"{name} ({counted(tasks.get('worker', 0), 'worker')}, {counted(tasks.get('ps', 0), 'parameter server')})"
        )
    sizes = [counted(strategy.num_replicas_in_sync, "replica")]
    if name == "MultiWorkerMirroredStrategy":
        tasks = num_tasks(strategy)
        sizes.insert(0, counted(max(1, tasks.get("worker", 0) + tasks.get("chief", 0)), "worker"))
    return f"{name} ({', '.join(sizes)})"


_NOUNS: dict[Role, tuple[str, str]] = {
    "model": ("model", "models"),
    "trainable": ("trainable variable", "trainable variables"),
    "non-trainable": ("non-trainable variable", "non-trainable variables"),
    "tf.Variable": ("tf.Variable", "tf.Variables"),
    "seed": ("seed state", "seed states"),
    "optimizer": ("optimizer", "optimizers"),
    "optimizer variable": ("optimizer variable", "optimizer variables"),
    "metric variable": ("metric variable", "metric variables"),
}


def _shortened(paths: list[str], place: str) -> str:
    rest = f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
    return f"{', '.join(paths[:LISTED])}{rest} (under {place})"


def _advice(
    roles: set[Role], outside: tuple[ScopeEntry, ...], strategy: str, *, model_is_inside: bool
) -> Iterator[str]:
    mixing = "'Mixing different tf.distribute.Strategy objects'"
    if any(entry.place.startswith("another ") for entry in outside):
        name = strategy.partition(" ")[0]
        yield (
            f"Two {name} objects are two strategies, even on the same devices: make one, and use it everywhere "
            "(`kde.pick_strategy` returns the same object for the same devices)."
        )
    if strategy == NO_STRATEGY:
        yield "TensorFlow would fail in the first step with a TypeError about a MirroredVariable."
        yield "Build and compile the model inside `with strategy.scope():`."
        yield "`kde.adopt(model, strategy)` rebuilds one that exists there, with equal weights."
    elif roles & {"model", "trainable", "non-trainable", "tf.Variable", "seed"}:
        if roles & {"model", "trainable", "non-trainable", "tf.Variable"}:
            yield f"TensorFlow would train them on one device, or fail later with {mixing}."
        else:
            yield "All replicas would write to one copy, in no order."
        if model_is_inside and roles != {"seed"}:
            yield "Make the layers that hold them inside `with strategy.scope():`, as the model was."
        else:
            yield "Build the model inside `with strategy.scope():`."
        yield "`kde.adopt(model, strategy)` rebuilds one that exists there, with equal weights."
    elif roles & {"optimizer", "optimizer variable"}:
        yield f"TensorFlow would fail with {mixing} when the optimizer makes its slot variables (plain SGD has none)."
        yield "Make the optimizer, and call `compile`, inside `with strategy.scope():`."
    else:
        yield "All replicas would write to one copy, in no order."
        yield "Make the metrics, and call `compile`, inside `with strategy.scope():`."


def _no_default(strategy: tf.distribute.Strategy | None) -> tf.distribute.Strategy | None:
    """Return None for TensorFlow's default strategy."""
    return None if is_default_strategy(strategy) else strategy


def _is_same(one: tf.distribute.Strategy | None, other: tf.distribute.Strategy | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.extended is other.extended


def _place(own: tf.distribute.Strategy | None, expected: tf.distribute.Strategy | None) -> str:
    place = describe_strategy(own)
    return f"another {place}" if not _is_same(own, expected) and place == describe_strategy(expected) else place


def _parts(model: keras.Layer) -> Iterator[_Part]:
    """(path, role, thing, its own strategy) of everything; the same thing may come twice."""
    layers = flat_layers(model)
    for layer in layers:
        if isinstance(layer, keras.Model):
            yield layer.path or layer.name, "model", layer, _no_default(strategy_of_model(layer))

    weights = {id(variable) for variable in model.weights}
    trained = {id(variable) for variable in model.trainable_variables}
    for variable in model.variables:
        role: Role = "seed" if id(variable) not in weights else "non-trainable"
        yield from _of_variable(variable, "trainable" if id(variable) in trained else role)
    for layer in layers:
        for name, variable in raw_variables(layer):
            yield f"{layer.path or layer.name}/{name}", "tf.Variable", variable, _own_strategy(variable)

    for _, optimizer in optimizers(model):
        yield from _optimizer_parts(optimizer)

    for metric in _metrics(model):
        for variable in metric.variables:
            yield from _of_variable(variable, "metric variable")


def _of_variable(variable: keras.Variable | tf.Variable, role: Role) -> Iterator[_Part]:
    value = variable.value if isinstance(variable, keras.Variable) else variable
    if isinstance(value, tf.Variable) or hasattr(value, "variables"):  # a ShardedVariable has variables
        yield getattr(variable, "path", variable.name), role, variable, _own_strategy(value)


def _own_strategy(variable: keras.Variable | tf.Variable) -> tf.distribute.Strategy | None:
    return _no_default(strategy_of_variable(variable))


_OPTIMIZER = keras.optimizers.Optimizer


def optimizers(model: keras.Model) -> list[tuple[str, keras.optimizers.Optimizer]]:
    """The optimizers that a model holds, each once: `optimizer`, and those of the user's own, also in lists and dicts.

    Returns:
        Each with its attribute, such as `critic`, `critics[0]` or `of['critic']`.
    """
    found = {id(value): (name, value) for name, value in vars(model).items() if isinstance(value, _OPTIMIZER)}
    pending = [(name, value) for name, value in vars(model).items() if not name.startswith("_")]
    while pending:
        name, value = pending.pop(0)
        if isinstance(value, _OPTIMIZER):
            found.setdefault(id(value), (name, value))
        elif isinstance(value, list | tuple | dict):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{name}[{key!r}]", part) for key, part in parts]
    return list(found.values())


def _optimizer_parts(optimizer: keras.optimizers.Optimizer) -> Iterator[_Part]:
    # An optimizer remembers its strategy before it has slots, and makes them under it.
    yield optimizer.name, "optimizer", optimizer, _no_default(strategy_of_optimizer(optimizer))
    for variable in optimizer.variables:
        yield from _of_variable(variable, "optimizer variable")
    for _, inner in optimizers(optimizer):
        yield from _optimizer_parts(inner)


def _metrics(model: keras.Model) -> list[keras.Metric]:
    """Return a model's metrics, also before it is built, and those of its layers."""
    metrics = [*getattr(model, "metrics", ()), *user_metrics(model)]
    return [*metrics, *(metric for layer in flat_layers(model) for metric in own_metrics(layer))]


def raw_variables(layer: keras.Layer) -> Iterator[tuple[str, tf.Variable]]:
    """`tf.Variable`s that a layer holds as attributes, in containers, `tf.Module`s and `tf.random.Generator`s."""
    pending = attributes(layer)
    while pending:
        name, value = pending.pop(0)
        if isinstance(value, keras.Variable | keras.Layer | keras.Metric | keras.optimizers.Optimizer):
            continue
        if isinstance(value, tf.Variable):
            yield name, value
        elif isinstance(value, tf.random.Generator):
            yield f"{name}/state", value.state
        elif isinstance(value, tf.Module):
            yield from ((f"{name}/{path}", variable) for path, variable in variables_of_module(value))
        elif isinstance(value, list | tuple):
            pending.extend((f"{name}/{index}", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            pending.extend((f"{name}/{key}", item) for key, item in value.items())


def hold_sums(model: keras.Model) -> list[str]:
    """Have the first replica hold what sums over replicas begin with (ON_READ, SUM), which TensorFlow gives to each.

    Returns:
        The names of those that were made before this package was there and of which each replica holds the same, so
        that it is unknown whether that is their initial value.
    """
    held: list[tuple[str, Variable]] = [
        (f"{layer.path or layer.name}/{name}", variable)
        for layer in flat_layers(model)
        for name, variable in raw_variables(layer)
    ]
    held += [(v.path, v) for v in [*model.variables, *(v for metric in _metrics(model) for v in metric.variables)]]
    return [name for name, variable in held if not hold_sum(variable)]


def check_sums(model: keras.Model) -> None:
    """See that the first replica holds what sums over replicas begin with.

    Raises:
        ScopeError: of some that is unknown, see ``hold_sums``.
    """
    often = hold_sums(model)
    if often:
        raise ScopeError(
            f"Each replica of '{model.name}' holds the whole value of {', '.join(often[:LISTED])}, of which it is to "
            "hold a part (ON_READ, SUM), so that it is read times the number of replicas: TensorFlow made it so before "
            "keras_dist_ext was imported. Import kde.Model above the lines that make it "
            "(`from keras_dist_ext import Model`), or assign its value in the strategy's scope: variable.assign(value)."
        )


def move_into_scope(thing: keras.optimizers.Optimizer | keras.Metric) -> None:
    """Make the variables of an optimizer or a metric that was never used again, in the scope that is entered.

    It stays the same object. What has been used, lives under a strategy, or cannot be made from its config stays as it
    is, for `check_scope` to refuse.
    """
    cls = type(thing)
    is_keras_own = cls.__module__.partition(".")[0] == "keras"
    if not is_keras_own and cls.get_config in (keras.optimizers.Optimizer.get_config, keras.metrics.Metric.get_config):
        return  # its constructor may have taken more than its config tells
    inner = getattr(thing, "inner_optimizer", None)
    if inner is not None:
        move_into_scope(inner)
    of_inner = {id(v) for v in inner.variables} if inner is not None else set()
    variables = [v for v in thing.variables if id(v) not in of_inner]
    is_used = getattr(thing, "built", False) and isinstance(thing, keras.optimizers.Optimizer)
    if is_used or any(strategy_of_variable(v) is not None for v in variables):
        return
    if isinstance(thing, keras.metrics.Metric) and any(keras.ops.convert_to_numpy(v).any() for v in variables):
        return
    try:
        new = cls.from_config(thing.get_config())
    except (TypeError, ValueError, NotImplementedError):
        return
    thing.__dict__.clear()
    thing.__dict__.update(new.__dict__)
    if inner is not None:
        thing.inner_optimizer = inner
