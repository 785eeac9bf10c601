"""Trace a step of the user's aside before it is run, and refuse what would not do what it seems to.

Nothing of the trace is ever run: replicas do not add anything up in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist_ext import _keras, data
from keras_dist_ext._keras import keras
from keras_dist_ext.degree import degree_in_rows
from keras_dist_ext.errors import LoopError, ScopeError
from keras_dist_ext.looping.python_effects import effects_of, names_used
from keras_dist_ext.replica import LoopStep, Replica
from keras_dist_ext.scope import describe_strategy, optimizers, raw_variables
from keras_dist_ext.seeds import generator_without_seed
from keras_dist_ext.step import UnbuiltOptimizer
from keras_dist_ext.xla import warn_once

__all__ = ["Output", "examine"]

_LISTED = 5  # variables that a message names before it counts the rest


class Output(NamedTuple):
    """What a step returns under a name."""

    spec: tf.TensorSpec  # on one replica
    has_rows: bool  # whether it has one entry for each row


def examine(
    loop: Any, kind: str, function: Callable[..., Any], reduce: Mapping[str, str], batch_spec: Any
) -> dict[str, Output]:
    """Return what a step returns, by name.

    Args:
        loop: the ``TrainLoop``.
        kind: "train" or "test".
        function: the step.
        reduce: the declared reductions.
        batch_spec: specs of one replica's rows, as many as there may be.

    Raises:
        LoopError: the step would not do what it seems to.
        ScopeError: it uses variables that were not made under the loop's strategy.
    """
    _check_built(loop)
    name = getattr(function, "__name__", type(function).__name__)
    _check_names(name, function)
    with effects_of(function) as effects:
        graph, values = _trace(loop, name, function, batch_spec)
    if effects and not loop.run_eagerly:
        raise LoopError(
            f"The step {name!r} has changed {', '.join(effects)} while it was traced. Python runs once when a step is "
            "compiled, and not at every step, so this would happen once and never again. Return what you want to "
            "follow, with its reduction in reduce={...}, do the rest in a callback, and draw random numbers by "
            "tf.random or keras.random. With run_eagerly=True Python does run at every step."
        )
    _check_uses_batch(name, graph, values)
    _check_variables(loop, name, graph)
    return _outputs(name, kind, values, reduce)


def _check_built(loop: Any) -> None:
    unbuilt = [layer for layer in _keras.flat_layers(loop) if layer is not loop and not layer.built]
    if unbuilt:
        raise LoopError(
            f"{', '.join(repr(layer.name) for layer in unbuilt[:_LISTED])}: not built, so the first step would have to "
            "make variables, on every replica. Give the model an Input, or call it once inside `with "
            "strategy.scope():`."
        )


_SCALING = {
    "compute_average_loss": "it divides by the rows of all replicas",
    "scale_regularization_loss": "it divides by the number of replicas",
    "num_replicas_in_sync": "dividing by the number of replicas scales",
}


def _check_names(name: str, function: Callable[..., Any]) -> None:
    used = names_used(function)
    for scaling, what in _SCALING.items():
        if scaling in used:
            raise LoopError(
                f"The step {name!r} uses {scaling}: {what}, and the loop weights each replica by its rows already, so "
                "gradients would be scaled a second time. Write the loss as for one device: "
                "replica.mean_loss(per_example), a loss of Keras, or a mean over the rows at hand."
            )
    if "print" in used:
        warn_once(
            f"The step {name!r} calls print, which prints once when the step is compiled, and not at every step. Use "
            "tf.print, or return the value."
        )


class _ExaminedStep(LoopStep):
    """A step that adds nothing up, and notes what the user's code adds up by itself."""

    added_up: dict[int, Any]

    def sum_over_replicas(self, values: Any) -> list[Any]:
        """Return what this replica has."""
        return [tf.identity(value) for value in values]

    def all_reduce(self, reduce_op: Any, value: Any, original: Callable[..., Any]) -> Any:
        """Note what is reduced."""
        reduced = tf.nest.map_structure(tf.identity, value)
        self.added_up.update({id(leaf): leaf for leaf in tf.nest.flatten(reduced)})
        return reduced

    def apply(self, optimizer: Any, grads: Any, variables: Any, original: Callable[..., None]) -> None:
        """Look at the gradients, and go on."""
        grads = list(grads)
        self.check_single(f"gradients given to {optimizer.name}", grads)
        super().apply(optimizer, grads, variables, original)

    def reduce_by_hand(self, gradients: list[Any]) -> list[Any]:
        """Look at the gradients, and go on."""
        self.check_single("gradients given to reduce_gradients", gradients)
        return super().reduce_by_hand(gradients)

    def check_single(self, what: str, values: list[Any]) -> None:
        """Refuse values that the user's code has reduced over replicas already."""
        for value in values:
            while tf.is_tensor(value) and not isinstance(value, tf.IndexedSlices):
                if id(value) in self.added_up:
                    raise LoopError(
                        f"The {what} were reduced over replicas before, by all_reduce in the step, and would be "
                        "reduced twice. Leave all_reduce out: Keras' optimizers, replica.reduce_gradients and declared "
                        "reductions add up over replicas, exactly."
                    )
                if value.op.type not in ("Identity", "Mul", "RealDiv", "DivNoNan", "Cast"):
                    break
                value = value.op.inputs[0]


def _trace(loop: Any, name: str, function: Callable[..., Any], spec: Any) -> tuple[Any, dict[str, Any]]:
    """Return the graph of a step, and what the first replica returns."""
    strategy = loop.distribute_strategy
    without_seed = generator_without_seed(strategy, is_seeded=loop.replica_seeds.root is not None)
    returned: list[Any] = []

    def replica(batch: Any) -> None:
        rows = data.num_rows(batch)
        step = _ExaminedStep(loop, rows, rows * strategy.num_replicas_in_sync, without_seed=without_seed)
        step.added_up = {}
        with _keras.draws_without_seed(without_seed), _keras.intercept(step):
            values = function(Replica(step, batch), batch)
        if not isinstance(values, Mapping):
            raise LoopError(
                f"The step {name!r} returns {type(values).__name__}; it returns a dict of values by name, whose "
                'reductions over replicas are declared in reduce={"loss": "mean"}; or {} for none.'
            )
        values = {key: tf.convert_to_tensor(value) for key, value in values.items()}
        for key, value in values.items():
            step.check_single(f"values returned as {key!r}", [value])
        returned.append(values)

    def traced(batch: Any) -> None:
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            replica(batch)  # its run is for what is handed to workers
        else:
            strategy.run(replica, args=(batch,))

    for _ in range(100):  # optimizers, at most
        returned.clear()
        try:
            graph = tf.function(traced, autograph=False).get_concrete_function(spec).graph
            break
        except UnbuiltOptimizer as unbuilt:
            with loop._in_scope():
                unbuilt.build()
        except RuntimeError as error:
            if "cross-replica context" not in str(error):
                raise
            raise LoopError(
                f"The step {name!r} calls a method of the strategy (run, reduce, gather) that is for code outside of "
                "replicas. The loop runs the step on every replica already: call what you gave to strategy.run as it "
                "is, and declare reductions in reduce={...}."
            ) from error
    loop._clear_losses()
    return graph, returned[0]


def _check_uses_batch(name: str, graph: Any, values: Mapping[str, Any]) -> None:
    inputs = graph.inputs[: len(graph.inputs) - len(graph.captures)]
    is_returned = any(value is given for value in values.values() for given in inputs)
    is_used = any(op.type != "Shape" for given in inputs for op in given.consumers())
    if inputs and not (is_returned or is_used):
        raise LoopError(
            f"The step {name!r} computes nothing from its batch, so every replica would compute the same from whatever "
            "else it reads. Only the batch is split over replicas: give the data to fit, and take it from there."
        )


def _check_variables(loop: Any, name: str, graph: Any) -> None:
    """Refuse variables that were made elsewhere, or that no part holds."""
    strategy = loop.distribute_strategy
    known = {id(same) for variable in _of_parts(loop) for same in (variable, _keras.served_variable(variable))}
    elsewhere: list[str] = []
    unknown: list[str] = []
    for variable in {id(v): v for v in map(_keras.whole_variable, graph.variables)}.values():
        if id(variable) in known:
            continue
        own = _keras.strategy_of_variable(variable)
        label = f"{variable.name.partition(':')[0]} {tuple(variable.shape)}"
        if strategy.num_replicas_in_sync > 1 and (own is None or own.extended is not strategy.extended):
            elsewhere.append(label)
        elif variable.trainable and variable.dtype.is_floating:
            unknown.append(label)
    if elsewhere:
        raise ScopeError(
            f"The step {name!r} uses what was created outside {describe_strategy(strategy)}: {_shortened(elsewhere)}. "
            "All replicas would write to one copy, in no order. Make it inside `with strategy.scope():`, and name it "
            "in parts={...}."
        )
    if unknown:
        raise LoopError(
            f"The step {name!r} uses trainable variables that no part holds: {_shortened(unknown)}. They would not be "
            "saved, restored or compared between replicas. Name what holds them in parts={...}."
        )


def _of_parts(loop: Any) -> list[Any]:
    variables = [variable for layer in _keras.flat_layers(loop) for _, variable in raw_variables(layer)]
    made = [optimizer for _, optimizer in optimizers(loop)]
    made += [inner for optimizer in made for _, inner in optimizers(optimizer)]
    kerases = [*loop.variables, *(variable for optimizer in made for variable in optimizer.variables)]
    return variables + [v._value if isinstance(v, keras.Variable) else v for v in kerases]


def _shortened(labels: list[str]) -> str:
    rest = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    return ", ".join(labels[:_LISTED]) + rest


def _outputs(name: str, kind: str, values: Mapping[str, tf.Tensor], reduce: Mapping[str, str]) -> dict[str, Output]:
    undeclared = [f"{key} {tuple(value.shape)}" for key, value in values.items() if key not in reduce]
    if undeclared:
        raise LoopError(
            f"The step {name!r} returns {', '.join(undeclared)}, without a declared reduction: every replica has a "
            'value of its own. Declare how to combine them, such as reduce={"loss": "mean", "correct": "sum"}, or '
            "leave them out."
        )
    outputs = {}
    for key, value in values.items():
        has_rows = bool(value.shape.rank) and value.shape[0] is None
        if reduce[key] == "concat" and not has_rows:
            raise LoopError(
                f'{key!r} has the shape {tuple(value.shape)}, and is declared "concat", which keeps '
                "a value for each row."
            )
        if reduce[key] != "sum" and value.shape.rank and not has_rows:
            raise LoopError(
                f"{key!r} has the shape {tuple(value.shape)}; a {reduce[key]!r} is over rows, so it takes a scalar or "
                'a value for each row. Values of other shapes can be declared "sum".'
            )
        if reduce[key] == "mean" and not has_rows and degree_in_rows(value) >= 1:
            raise LoopError(
                f"{key!r} is declared a mean, but grows with the number of rows: it is a sum, divided by a constant if "
                "at all. A replica has a part of the rows, and another one in the last batch, so it and its gradients "
                "would be weighted twice. Use replica.mean_loss(per_example), or divide by the rows at hand; or "
                'declare a value that is not trained on a "sum".'
            )
        outputs[key] = Output(tf.TensorSpec(value.shape, value.dtype), has_rows)
    return outputs
