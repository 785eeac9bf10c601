"""Trace a step of the user's aside before it is run, and refuse what would not do what it seems to.

Nothing of the trace is ever run: replicas do not add anything up in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_dist_ext import _keras, data
from keras_dist_ext._keras import keras
from keras_dist_ext.degree import degree_in_rows
from keras_dist_ext.errors import LoopError
from keras_dist_ext.looping.origins import Origins, assigned_variables
from keras_dist_ext.looping.python_effects import calls_done_once, effects_of, names_used
from keras_dist_ext.looping.step_variables import check_assigned, check_known, check_results, updated_metrics
from keras_dist_ext.replica import LoopStep, Replica
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
) -> tuple[dict[str, Output], list[Any]]:
    """Return what a step returns, by name, and the metrics among the loop's parts that it updates.

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
    scales = "num_replicas" in names_used(function)
    with effects_of(function) as effects:
        graph, values, seen = _trace(loop, name, function, batch_spec, scales=scales)
    if effects and not loop.run_eagerly:
        raise LoopError(
            f"The step {name!r} has changed {', '.join(effects)} while it was traced. Python runs once when a step is "
            "compiled, and not at every step, so this would happen once and never again. Return what you want to "
            "follow, with its reduction in reduce={...}, do the rest in a callback, and draw random numbers by "
            "tf.random or keras.random. With run_eagerly=True Python does run at every step."
        )
    _check_uses_batch(name, graph, values)
    assigned = list(assigned_variables(graph))
    check_known(loop, name, graph, {id(_keras.whole_variable(copy)) for copy, _ in assigned})
    check_assigned(loop, name, kind, assigned, seen.origins, seen.averaged)
    check_results(loop, name, graph, values)
    outputs = _outputs(name, values, reduce, seen, loop.distribute_strategy.num_replicas_in_sync)
    return outputs, updated_metrics(loop, name, assigned, outputs)


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
    for called in calls_done_once(function):
        instead = "Use tf.print, or return the value." if called == "print" else "Do it in a callback."
        warn_once(
            f"The step {name!r} calls {called}, which Python does once, when the step is compiled, and not at every "
            f"step. {instead}"
        )


class _Seen:
    """What was noted of a step while it was traced, on all replicas."""

    def __init__(self, name: str, *, scales: bool) -> None:
        self.name = name
        self.scales = scales  # whether the number of replicas is asked for
        self.origins = Origins()
        self.added_up: dict[int, Any] = {}  # what the user's code has added up by itself
        self.averaged: dict[int, Any] = {}  # state of layers, whose mean over replicas is taken after the step


class _ExaminedStep(LoopStep):
    """A step that adds nothing up, and notes what the user's code does with values of one replica."""

    seen: _Seen
    graph: Any

    def sum_over_replicas(self, values: Any) -> list[Any]:
        """Return what may be the sums."""
        if self.num_replicas > 1 and tf.compat.v1.get_default_graph() is not self.graph:
            raise LoopError(
                f"The step {self.seen.name!r} adds up over replicas (an optimizer's update, reduce_gradients, a sum or "
                "a weighted mean) inside of a tf.function, or of a branch or loop in the graph, where replicas cannot "
                "wait for each other. Compute there, and update outside; a loop of a fixed number of updates can be "
                "one of Python's."
            )
        return [self.seen.origins.common(value) for value in values]

    def reduce(
        self, optimizer: Any, variables: Any, grads: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return what may be the sums, also where gradients are accumulated."""
        return self.sum_over_replicas(grads), self.sum_over_replicas(values)

    def all_reduce(self, reduce_op: Any, value: Any, original: Callable[..., Any]) -> Any:
        """Note what is reduced."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def reduced(given: tf.Tensor) -> Any:
            return self.seen.origins.common(given), self.seen.origins.common

        total = tf.nest.map_structure(lambda given: reduced(tf.convert_to_tensor(given)), value)
        self.seen.added_up.update({id(leaf): leaf for leaf in tf.nest.flatten(total)})
        return total

    def next_seed(self, generator: Any, ordered: bool, original: Callable[[bool], Any]) -> Any:
        """Note what is drawn."""
        state = super().next_seed(generator, ordered, original)
        return self.seen.origins.own(state, self.replica_id) if self.num_replicas > 1 else state

    def scale_loss(self, optimizer: Any, loss: Any, original: Callable[[Any], Any]) -> Any:
        """Leave out the replica's share, which is not of the user's doing."""
        super().scale_loss(optimizer, loss, original)
        return original(loss)

    def assign(self, variable: Any, value: Any, original: Callable[[Any], None]) -> None:
        """Note of which state the mean will be taken."""
        super().assign(variable, value, original)
        if id(variable) in self._assigned:
            self.seen.averaged[id(_keras.local_component(variable))] = variable

    def differentiate(self, target: Any, sources: Any) -> None:
        """Look at what is differentiated for variables: a loss."""
        if all(isinstance(source, tf.Variable | keras.Variable) for source in tf.nest.flatten(sources)):
            for value in tf.nest.flatten(target):
                if tf.is_tensor(value) and not isinstance(value, tf.IndexedSlices):
                    total = value if value.shape.rank == 0 else tf.reduce_sum(value)  # as the tape takes it
                    what = f"The loss that the step {self.seen.name!r} differentiates"
                    _check_mean(what, total, self.num_replicas if self.seen.scales else 1)

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
            for inner in _scaled(value):
                if id(inner) in self.seen.added_up:
                    raise LoopError(
                        f"The {what} were reduced over replicas before, by all_reduce in the step, and would be "
                        "reduced twice. Leave all_reduce out: Keras' optimizers, replica.reduce_gradients and declared "
                        "reductions add up over replicas, exactly."
                    )


def _scaled(value: Any) -> Iterator[Any]:
    """A value, and those of which it is a multiple."""
    while tf.is_tensor(value) and not isinstance(value, tf.IndexedSlices):
        yield value
        if value.op.type not in ("Identity", "Mul", "RealDiv", "DivNoNan", "Cast"):
            return
        value = value.op.inputs[0]


def _check_mean(what: str, value: Any, num_replicas: int) -> None:
    """Refuse what is no mean over the rows at hand, or that divided by the number of replicas."""
    if degree_in_rows(value) >= 1:
        raise LoopError(
            f"{what} grows with the number of rows: it is a sum, divided by a constant or by the rows of all replicas "
            "if at all. A replica has a part of the rows, and another one in the last batch, so it and its gradients "
            "would be weighted twice. Use replica.mean_loss(per_example), or divide by the rows at hand; or declare a "
            'value that is not trained on a "sum".'
        )
    if num_replicas > 1 and any(_is_scaled_by(part, num_replicas) for part in _scaled(value)):
        raise LoopError(
            f"{what} is scaled by the number of replicas ({num_replicas}), and the loop weights each replica by its "
            "rows already, so it and its gradients would be scaled a second time. Write the loss as for one device: "
            "replica.mean_loss(per_example), a loss of Keras, or a mean over the rows at hand."
        )


def _is_scaled_by(value: Any, number: int) -> bool:
    if value.op.type not in ("Mul", "RealDiv", "DivNoNan"):
        return False
    factors = [tf.get_static_value(given) for given in value.op.inputs]
    factors = [float(factor) for factor in factors if factor is not None and np.size(factor) == 1]
    return any(abs(factor - wanted) < 1e-6 for factor in factors for wanted in (number, 1 / number))


def _trace(
    loop: Any, name: str, function: Callable[..., Any], spec: Any, *, scales: bool
) -> tuple[Any, dict[str, Any], _Seen]:
    """Return the graph of a step, what the first replica returns, and what was seen."""
    strategy = loop.distribute_strategy
    without_seed = generator_without_seed(strategy, is_seeded=loop.replica_seeds.root is not None)
    returned: list[Any] = []
    seen = _Seen(name, scales=scales)

    def refuse(next_creator: Any, **given: Any) -> Any:
        raise LoopError(
            f"The step {name!r} makes a variable ({given.get('name') or 'without a name'}), which it would do once, "
            "when it is compiled, and on replicas. Make variables, layers and metrics beforehand, inside `with "
            "strategy.scope():`, build layers by an Input or a call there, and name them in parts={...}."
        )

    def replica(batch: Any) -> None:
        if strategy.num_replicas_in_sync > 1:
            batch = seen.origins.own(batch, _keras.replica_id())
        rows = data.num_rows(batch)
        global_rows = seen.origins.common(rows) if strategy.num_replicas_in_sync > 1 else rows
        step = _ExaminedStep(loop, rows, global_rows, without_seed=without_seed)
        step.seen, step.graph = seen, tf.compat.v1.get_default_graph()
        with (
            _keras.draws_without_seed(without_seed),
            _keras.intercept(step),
            tf.variable_creator_scope(refuse),
        ):
            values = function(Replica(step, batch), batch)
        if not isinstance(values, Mapping):
            raise LoopError(
                f"The step {name!r} returns {type(values).__name__}; it returns a dict of values by name, whose "
                'reductions over replicas are declared in reduce={"loss": "mean"}; or {} for none.'
            )
        values = {key: _tensor(name, key, value) for key, value in values.items()}
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
    return graph, returned[0], seen


def _tensor(name: str, key: Any, value: Any) -> Any:
    """Return a value that a step returns as a tensor.

    Raises:
        LoopError: it is none.
    """
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise LoopError(
            f"The step {name!r} returns {type(value).__name__} as {key!r}, which is no tensor, so replicas cannot "
            "combine it. Return dense tensors and numbers by name, in a dict without others in it."
        ) from error


def _check_uses_batch(name: str, graph: Any, values: Mapping[str, Any]) -> None:
    inputs = graph.inputs[: len(graph.inputs) - len(graph.captures)]
    returned = {value.name for value in values.values()}
    if inputs and not any(_is_used(given, returned) for given in inputs):
        raise LoopError(
            f"The step {name!r} computes nothing from its batch, so every replica would compute the same from whatever "
            "else it reads. Only the batch is split over replicas: give the data to fit, and take it from there."
        )


def _is_used(value: Any, returned: set[str]) -> bool:
    """Whether a tensor, or a copy of it, is returned, or used for more than its shape."""
    return value.name in returned or any(
        _is_used(op.outputs[0], returned) if op.type == "Identity" else op.type != "Shape" for op in value.consumers()
    )


def _outputs(
    name: str, values: Mapping[str, tf.Tensor], reduce: Mapping[str, str], seen: _Seen, num_replicas: int
) -> dict[str, Output]:
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
        if reduce[key] != "concat" and not (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool):
            raise LoopError(
                f"{key!r} is {value.dtype.name}, of which there is no {reduce[key]!r}. Return numbers, such as "
                'tf.abs(value), or declare values of rows "concat".'
            )
        if reduce[key] == "mean" and not has_rows:
            _check_mean(f"{key!r} is declared a mean, but", value, num_replicas if seen.scales else 1)
        outputs[key] = Output(tf.TensorSpec(value.shape, value.dtype), has_rows)
    return outputs
