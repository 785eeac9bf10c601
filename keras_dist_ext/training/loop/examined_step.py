"""Trace a step of the user's in a scratch graph before it is run, and refuse what would not do what it seems to.

Nothing of the trace is ever run: replicas do not add anything up in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext._keras.layers import clear_losses, flat_layers, needs_build
from keras_dist_ext._keras.random import use_global_seed_generator
from keras_dist_ext._keras.strategies import replica_id
from keras_dist_ext._keras.variables import Variable, distributed_variable
from keras_dist_ext.aliases import Gradient, SpecNest, StepData, TensorNest, UserFunction
from keras_dist_ext.data import split as data
from keras_dist_ext.errors import LoopError
from keras_dist_ext.step.ancestry import assignments, operations
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.global_generator import global_generator_of
from keras_dist_ext.step.origins import Origins, draws
from keras_dist_ext.step.reducers import reducer_of
from keras_dist_ext.step.replica_step import ReplicaStep
from keras_dist_ext.step.step_options import StepOptions
from keras_dist_ext.step.step_plan import GradientCall, StepPlan
from keras_dist_ext.training.loop.losses import check_mean, check_not_scaled, multiples, warn_of_own_divisor
from keras_dist_ext.training.loop.python_effects import check_names, effects_of, names_used
from keras_dist_ext.training.loop.replica import Replica
from keras_dist_ext.training.loop.step_variables import check_known, check_not_trained, check_results, updated_metrics
from keras_dist_ext.training.step_assignments import check_assigned, check_decisions
from keras_dist_ext.training.step_errors import explain, metric_under_way
from keras_dist_ext.training.step_examination import StepExamination

__all__ = ["Output", "examine"]

_LISTED = 5  # variables that a message names before it counts the rest


class Output(NamedTuple):
    """What a step returns under a name."""

    spec: tf.TensorSpec  # on one replica
    has_rows: bool  # whether it has one entry for each row


def examine(
    loop: DistributedModel,
    own_metrics: Sequence[keras.Metric],
    kind: str,
    function: UserFunction,
    reduce: Mapping[str, str],
    batch_spec: SpecNest,
) -> tuple[dict[str, Output], list[keras.Metric]]:
    """Return what a step returns, by name, and the metrics among the loop's parts that it updates.

    Args:
        loop: the ``TrainLoop``.
        own_metrics: those among its parts.
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
    check_names(name, function)
    plan = StepPlan()
    (graph, values, seen), effects = _trace_for_effects(loop, name, function, batch_spec, plan)
    if effects and not loop.run_eagerly:
        raise LoopError(
            f"The step {name!r} has changed {', '.join(effects)} while it was traced. Python runs once when a step is "
            "compiled, and not at every step, so this would happen once and never again. Return what you want to "
            "follow, with its reduction in reduce={...}, do the rest in a callback, and draw random numbers by "
            "tf.random or keras.random. With run_eagerly=True Python does run at every step."
        )
    _check_uses_batch(name, graph, values)
    assigned = list(assignments(graph))
    check_known(loop, name, graph, {id(distributed_variable(one.variable)) for one in assigned})
    check_decisions(name, graph, seen.origins)
    if kind == "test":
        check_not_trained(name, assigned)
    check_assigned(loop.distribute_strategy, name, assigned, seen.origins, seen.averaged)
    check_results(loop, name, graph, values)
    outputs = _outputs(name, values, reduce, seen)
    if loop.distribute_strategy.num_replicas_in_sync > 1:
        seen.complete(plan, assigned)
        loop.replica_runtime.plans[kind] = plan
    return outputs, updated_metrics(own_metrics, name, assigned, outputs)


def _trace_for_effects(
    loop: DistributedModel, name: str, function: UserFunction, spec: SpecNest, plan: StepPlan
) -> tuple[_StepTrace, list[str]]:
    """Trace a step, and again if Python has changed something meanwhile, which others may have done, or once for all.

    Returns:
        What `_trace` does, and what is changed whenever the step is traced.
    """
    scales = not {"num_replicas", "num_replicas_in_sync"}.isdisjoint(names_used(function))
    with effects_of(function) as effects:
        traced = _trace(loop, name, function, spec, plan, scales=scales)
    if not effects:
        return traced, []
    with effects_of(function) as again:
        try:
            traced = _trace(loop, name, function, spec, plan, scales=scales)
        except Exception:  # it uses what it has kept of the first graph
            return traced, effects
    return traced, [effect for effect in effects if effect in again]


def _check_built(loop: DistributedModel) -> None:
    unbuilt = [layer for layer in flat_layers(loop) if layer is not loop and needs_build(layer)]
    if unbuilt:
        raise LoopError(
            f"{', '.join(repr(layer.name) for layer in unbuilt[:_LISTED])}: not built, so the first step would have to "
            "make variables, on every replica. Give the model an Input, or call it once inside `with "
            "strategy.scope():`."
        )


class _LoopExamination(StepExamination):
    """What was noted of a loop's step; beside what all steps are refused, losses that are no means.

    Args:
        name: of the step.
        num_replicas: in sync, over all workers.
        strategy: of the loop.
        scales: whether the number of replicas is asked for.
    """

    def __init__(self, name: str, num_replicas: int, strategy: tf.distribute.Strategy, *, scales: bool) -> None:
        super().__init__(name, num_replicas, strategy)
        self.scaled_by = num_replicas if scales and num_replicas > 1 else None
        self.gathered = Origins()

    def on_variable(self, name: str) -> None:
        """Refuse to make a variable."""
        metric = metric_under_way()
        if metric is not None:
            raise LoopError(
                f"The step {self.name!r} is the first to use the metric {metric.name!r} ({type(metric).__name__}), "
                f"which makes its variable {name} at its first use, and would make it on every replica. Use it once "
                "before, with values of the shapes of the step, and forget them: `metric.update_state(y_true, "
                "y_pred)`, then `metric.reset_state()`, inside `with strategy.scope():`."
            )
        raise LoopError(
            f"The step {self.name!r} makes a variable ({name}), which it would do once, when it is compiled, and on "
            "replicas. Make variables, layers and metrics beforehand, inside `with strategy.scope():`, build layers by "
            "an Input or a call there, and name them in parts={...}."
        )

    def on_gather(self, value: tf.Tensor) -> None:
        """Note what is the same on all replicas."""
        super().on_gather(value)
        self.gathered.note_replicated(value)

    def is_of_all_rows(self, value: tf.Tensor) -> bool:
        """Whether a value is computed from gathered rows, and from nothing that one replica has for itself."""
        return self.gathered.kind_of(value) == "replicated" and self.origins.kind_of(value) == "replicated"

    def on_differentiate(self, target: TensorNest, sources: Sequence[tf.Tensor | Variable]) -> GradientCall:
        """Look at what is differentiated for variables: a loss."""
        if all(isinstance(source, tf.Variable | keras.Variable) for source in sources):
            for value in [] if target is None else tf.nest.flatten(target):
                if tf.is_tensor(value) and not isinstance(value, tf.IndexedSlices):
                    total = value if value.shape.rank == 0 else tf.reduce_sum(value)  # as the tape takes it
                    what = f"The loss that the step {self.name!r} differentiates"
                    check_mean(what, total, self.origins.replicated_ids, self.scaled_by)
                    if self.num_replicas > 1:
                        warn_of_own_divisor(what, total, self.origins.replicated_ids)
        return super().on_differentiate(target, sources)

    def on_apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
    ) -> None:
        """Look at the gradients."""
        self._check_gradients(f"gradients given to {optimizer.name}", gradients)
        super().on_apply(optimizer, gradients, variables)

    def on_reduce(self, gradients: Sequence[Gradient]) -> Sequence[bool]:
        """Look at the gradients."""
        self._check_gradients("gradients given to reduce_gradients", gradients)
        return super().on_reduce(gradients)

    def _check_gradients(self, what: str, gradients: Sequence[Gradient]) -> None:
        self.check_single(what, gradients)
        if self.scaled_by is not None:
            for gradient in gradients:
                if tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices):
                    check_not_scaled(f"One of the {what}", [gradient], 1 / self.scaled_by)

    def check_single(self, what: str, values: Sequence[tf.Tensor | None]) -> None:
        """Refuse values that the user's code has reduced over replicas already."""
        for value in values:
            for inner in multiples(value):
                if any(id(inner) in reducer.reduced for reducer in self.reducers):
                    raise LoopError(
                        f"The {what} were reduced over replicas before, by all_reduce in the step, and would be "
                        "reduced twice. Leave all_reduce out: gradients of a tape, Keras' optimizers and declared "
                        "reductions add up over replicas, exactly."
                    )


_StepTrace: TypeAlias = tuple[tf.Graph, dict[str, tf.Tensor], _LoopExamination]


def _trace(
    loop: DistributedModel, name: str, function: UserFunction, spec: SpecNest, plan: StepPlan, *, scales: bool
) -> _StepTrace:
    """Return the graph of a step, what the first replica returns, and what was seen."""
    strategy = loop.distribute_strategy
    global_generator = global_generator_of(strategy, is_seeded=loop.replica_seeds.root is not None)
    returned: list[dict[str, tf.Tensor]] = []
    seen = _LoopExamination(name, strategy.num_replicas_in_sync, strategy, scales=scales)

    def refuse(next_creator: Callable[..., tf.Variable], **given: str) -> None:
        seen.on_variable(given.get("name") or "without a name")

    def replica(batch: StepData) -> None:
        if strategy.num_replicas_in_sync > 1:
            batch = seen.origins.mark_per_replica(batch, replica_id())
        rows = data.num_rows(batch)
        global_rows = seen.origins.mark_replicated(rows) if strategy.num_replicas_in_sync > 1 else rows
        options = StepOptions(global_generator=global_generator, plan=plan, observer=seen)
        step = ReplicaStep(loop, rows, global_rows, options, seen.reducer(reducer_of(loop)))
        with (
            use_global_seed_generator(global_generator),
            intercept(step),
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
            seen.check_single(f"values returned as {key!r}", [value])
        step.end(list(values.values()))
        returned.append(values)

    def traced(batch: StepData) -> None:
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            replica(batch)  # its run is for what is handed to workers
        else:
            strategy.run(replica, args=(batch,))

    for _ in range(100):  # functions that are a part of it, at most
        returned.clear()
        seen.forget()
        try:
            with plan.exponents.learn() as asked:
                graph = tf.function(traced, autograph=False).get_concrete_function(spec).graph
            plan.exponents.store([one.exponents({}) for one in asked])
            break
        except Exception as error:
            if seen.functions - plan.inlined:
                plan.inlined |= seen.functions
                continue
            explained = explain(name, error, of_loop=True, is_eager=loop.run_eagerly)
            if explained is None:
                raise
            raise explained from error
    clear_losses(loop)
    return graph, returned[0], seen


def _tensor(name: str, key: object, value: object) -> tf.Tensor:
    """Return a value that a step returns as a tensor.

    Raises:
        LoopError: it is none.
    """
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise LoopError(
            f"The step {name!r} returns {type(value).__name__} as {key!r}, which is not a tensor, so replicas "
            "cannot combine it. Return dense tensors and numbers by name, in a flat dict."
        ) from error


def _check_uses_batch(name: str, graph: tf.Graph, values: Mapping[str, tf.Tensor]) -> None:
    inputs = graph.inputs[: len(graph.inputs) - len(graph.captures)]
    returned = {value.name for value in values.values()}
    if not inputs or any(draws(op) or op.type.startswith(_OUTSIDE) for op in operations(graph)):
        return  # each replica has numbers of its own, say of a simulation
    if not any(_is_used(given, returned) for given in inputs):
        raise LoopError(
            f"The step {name!r} computes nothing from its batch, so every replica would compute the same from whatever "
            "else it reads. Only the batch is split over replicas: give the data to fit, and take it from there."
        )


_OUTSIDE = ("EagerPyFunc", "PyFunc", "StatelessRandom")


def _is_used(value: tf.Tensor, returned: set[str]) -> bool:
    """Whether a tensor, or a copy of it, is returned, or used for more than its shape."""
    return value.name in returned or any(
        _is_used(op.outputs[0], returned) if op.type == "Identity" else op.type != "Shape" for op in value.consumers()
    )


def _outputs(
    name: str, values: Mapping[str, tf.Tensor], reduce: Mapping[str, str], seen: _LoopExamination
) -> dict[str, Output]:
    for key, value in values.items():
        if value.shape.rank is None:
            raise LoopError(
                f"The shape of {key!r} is not known, not even how many dimensions it has, as of what tf.py_function "
                "returns. Say it by tf.ensure_shape(value, []) for a number, or [None] for one of each row."
            )
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
        if reduce[key] == "sum" and seen.is_of_all_rows(value):
            raise LoopError(
                f"{key!r} is computed from gathered rows alone, so it is the same on every replica, and declared a "
                f'"sum", so that it would count {seen.num_replicas} times. Declare it a "mean".'
            )
        if reduce[key] == "sum" and not (value.shape[1:] if has_rows else value.shape).is_fully_defined():
            raise LoopError(
                f'{key!r} has the shape {value.shape}, and a "sum" is over rows, so its own shape would not be known. '
                "Return sums over the other dimensions, tf.reduce_sum(value, axis=1) and so on."
            )
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
            what = f"{key!r} is declared a mean, but"
            check_mean(what, value, seen.origins.replicated_ids, seen.scaled_by)
        outputs[key] = Output(tf.TensorSpec(value.shape, value.dtype), has_rows)
    return outputs
