"""Train by a step of your own, outside of Keras' ``train_step``, with everything that ``fit`` has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_dist_ext import _keras
from keras_dist_ext._keras import keras, tree
from keras_dist_ext.choice.wording import close_name
from keras_dist_ext.data import num_rows
from keras_dist_ext.errors import LoopError, StrategyError
from keras_dist_ext.looping.examined_step import Output, examine
from keras_dist_ext.looping.loop_program import LoopProgram, OneStepWhereKept
from keras_dist_ext.looping.tallies import REDUCTIONS, Reduction, Tally, tally_of
from keras_dist_ext.model import Model
from keras_dist_ext.replica import LoopStep, Replica
from keras_dist_ext.scope import move_into_scope, raw_variables

__all__ = ["TrainLoop"]

Kind = Literal["train", "test"]
StepFunction = Callable[[Replica, Any], Mapping[str, Any]]


class TrainLoop(Model):
    """A training loop around a step of your own: GANs, plain ``tf.Module``s, optimizers written by hand.

        with strategy.scope():
            weights, bias = tf.Variable(tf.zeros([30, 1])), tf.Variable(0.0)

        def step(replica, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                logits = x @ weights + bias
                loss = replica.mean_loss(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))
            gradients = replica.reduce_gradients(tape.gradient(loss, [weights, bias]))
            for variable, gradient in zip([weights, bias], gradients):
                variable.assign_sub(0.1 * gradient)
            return {"loss": loss, "correct": tf.equal(logits > 0, y > 0)}

        loop = kde.TrainLoop(
            step, parts={"w": weights, "b": bias}, reduce={"loss": "mean", "correct": "sum"}, strategy=strategy
        )
        loop.fit(dataset, epochs=5, callbacks=[kde.ReplicaMonitor("logs")])

    The step says what one replica does with its rows, as if they were all: it is given a ``Replica`` and the batch as
    the dataset gives it, and returns a dict. Keras' losses, layers and optimizers in it are exact over replicas, as in
    a ``Model`` of ours. The loop is such a model: ``fit``, ``evaluate`` and ``predict`` with their callbacks, several
    steps in one call of the graph, partial and empty batches, several workers, and saving work as they do there.

    Before the first step, the step is traced aside and examined, so that mistakes are found early: see ``LoopError``.

    Args:
        step: makes one step of training.
        parts: whatever the steps change, by name: Keras models, optimizers, metrics, random generators,
            ``tf.Module``s, ``tf.Variable``s, and lists and dicts of these. They are saved and compared under these
            names, and are attributes of the loop. The first optimizer is the one that Keras' callbacks see. A metric
            that a step updates is logged under its own name, over all replicas, and begins anew with each epoch.
        reduce: for each value that a step returns, how to combine those of all rows, replicas and steps of an epoch:
            "mean" (a scalar counts as often as the replica has rows), "sum", "max" or "min". Values with an entry for
            each row are reduced over rows, too; or kept for all of them, by "concat", see ``rows``.
        test: makes one step of evaluation, which changes nothing.
        predict: gives outputs for the rows of a batch; takes the batch alone.
        steps_per_execution: see ``Model.compile``.
        run_eagerly: run the step as Python, for debugging.
        name: of the loop.
        strategy: the strategy to train under (keyword only); by default the one whose scope is entered.
        seed: see ``Model``.

    Raises:
        LoopError: a part has no usable name, or a reduction is unknown; by ``fit``, ``evaluate`` and ``predict``, a
            step would not do what it seems to.
        ScopeError: by ``fit`` and ``evaluate``, when a variable lives elsewhere.
        StrategyError: the strategy is a ParameterServerStrategy, and a reduction is not "mean" or "sum".
    """

    _cuts_batches = False
    _tallies: Mapping[str, Tally] = MappingProxyType({})
    _kind: Kind = "train"

    def __init__(
        self,
        step: StepFunction,
        *,
        parts: Mapping[str, Any],
        reduce: Mapping[str, Reduction],
        test: StepFunction | None = None,
        predict: Callable[[Any], Any] | None = None,
        steps_per_execution: int | str = "auto",
        run_eagerly: bool = False,
        name: str = "loop",
        strategy: tf.distribute.Strategy | None = None,  # for type checkers: `_Scoped` takes it, and enters its scope
    ) -> None:
        super().__init__(name=name)
        step, test, predict = _check_functions(step, test, predict)
        _check_named("parts", parts)
        _check_named("reduce", reduce)
        _check_reductions(reduce)
        self._check_asynchronous(reduce)
        for attribute, value in {
            "_steps": {"train": step, "test": test, "predict": predict},
            "_reduce": dict(reduce),
            "_tallies": {},
            "_outputs": {},
            "_updated": {},
            "_collected": {},
        }.items():
            object.__setattr__(self, attribute, value)  # past Keras, which would track what is in them
        named = dict(_named(parts))
        made = [part for part in named.values() if isinstance(part, keras.optimizers.Optimizer)]
        own_metrics = [part for part in named.values() if isinstance(part, keras.metrics.Metric)]
        object.__setattr__(self, "_own_metrics", own_metrics)
        with self._in_scope():
            for part in (*made, *own_metrics):
                move_into_scope(part)
        for part_name, part in named.items():
            self._check_name(part_name)
            setattr(self, part_name, part)
        self.compile(
            made[0] if made else None,
            steps_per_execution=steps_per_execution,
            run_eagerly=run_eagerly,
            jit_compile=False,
            auto_scale_loss=False,
        )
        self.built = True

    _steps: Mapping[str, Any]
    _reduce: Mapping[str, Reduction]
    _own_metrics: list[Any] = []  # noqa: RUF012 (of the parts; each loop has a list of its own)
    _outputs: dict[Kind, dict[str, Output]]
    _updated: dict[Kind, list[Any]]
    _collected: dict[Kind, dict[str, list[Any]]]

    @property
    def _is_asynchronous(self) -> bool:
        return isinstance(self.distribute_strategy, tf.distribute.ParameterServerStrategy)

    def _check_asynchronous(self, reduce: Mapping[str, Reduction]) -> None:
        others = [f"{name!r} by {how!r}" for name, how in reduce.items() if how not in ("mean", "sum")]
        if self._is_asynchronous and others:
            raise StrategyError(
                f"reduce combines {', '.join(others)}, but workers of ParameterServerStrategy make steps of their own, "
                'each at its pace, and what they return is added up. Declare "mean" or "sum", or use '
                "MultiWorkerMirroredStrategy, whose workers take steps together."
            )

    def _check_name(self, name: str) -> None:
        if not name.isidentifier() or name.startswith("_") or hasattr(type(self), name):
            raise LoopError(
                f"A part is called {name!r}, which is no name that an attribute of the loop can have, or one that "
                f"models have already. Call it something else, such as 'my_{name.strip('_')}'."
            )

    # What runs inside a step

    def train_step(self, data: Any) -> dict[str, Any]:
        """Make one step of training on a replica's rows."""
        return self._tallied("train", data)

    def test_step(self, data: Any) -> dict[str, Any]:
        """Make one step of evaluation on a replica's rows."""
        return self._tallied("test", data)

    def predict_step(self, data: Any) -> Any:
        """Return outputs for a replica's rows."""
        return self._steps["predict"](data)

    def _tallied(self, kind: Kind, data: Any) -> dict[str, Any]:
        step = _keras.current_step()
        if step is None and self._is_asynchronous:
            step = LoopStep(self, num_rows(data), num_rows(data))  # a worker's own
        assert isinstance(step, LoopStep)
        replica = Replica(step, data)
        values = {name: tf.convert_to_tensor(value) for name, value in self._steps[kind](replica, data).items()}
        for name, value in values.items():
            if name in self._tallies:
                self._tallies[name].update_state(value, replica)
        return values

    # What Keras' loops ask for

    @property
    def metrics(self) -> list[Any]:
        """What the declared values add up to, and the metrics among the parts."""
        return [*self._tallies.values(), *self._own_metrics]

    def get_metrics_result(self) -> dict[str, Any]:
        """Return what has been added up, of the values that the steps of the present kind return."""
        declared = {name: self._tallies[name].result() for name in self._outputs[self._kind] if name in self._tallies}
        return {**declared, **{metric.name: metric.result() for metric in self._updated[self._kind]}}

    def _program(self, kind: str) -> Any:
        return super()._program(kind) if kind == "predict" or self._is_asynchronous else LoopProgram(self, kind)

    def _find_loss_degrees(self, batch_spec: Any, kind: str) -> None:
        self._loss_degrees[kind] = {}  # the step adds up its own losses

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        spec = iterator.given.element_spec if iterator is not None else tree.map_structure(_spec_of, data_batch)
        kind = self._kind
        if kind not in self._outputs:
            outputs, updated = examine(self, kind, self._steps[kind], self._reduce, tree.map_structure(_any_rows, spec))
            with self._in_scope():
                for name, output in outputs.items():
                    if name not in self._tallies and self._reduce[name] != "concat":
                        made = tally_of(name, self._reduce[name], output.spec, has_rows=output.has_rows)
                        self._tallies[name] = made  # type: ignore[index]  # a dict, once there is a loop
            self._outputs[kind], self._updated[kind] = outputs, updated
        self.replica_seeds.begin()

    # What is kept for all rows

    def rows(self, kind: Kind = "train") -> dict[str, np.ndarray[Any, Any]]:
        """Return what steps have returned under reductions "concat": for all rows, in the order of the data.

        Steps that return some are made one at a time.

        Args:
            kind: "train" for those of the last epoch, "test" for those of the last evaluation.
        """
        return {name: np.concatenate(parts) for name, parts in self._collected.get(kind, {}).items()}

    def kept(self, kind: str) -> list[str]:
        """Return which values of a step are kept for all rows, as far as it is known."""
        outputs = self._outputs.get(kind, {})  # type: ignore[call-overload]
        return [name for name in outputs if self._reduce[name] == "concat"]

    def reset_metrics(self) -> None:
        """Begin to add up and to keep anew."""
        super().reset_metrics()
        self._collected[self._kind] = {}

    def _recording_function(self, kind: str, is_new: bool) -> Any:
        run = super()._recording_function(kind, is_new)
        kept = self.kept(kind)
        if not kept:
            return run

        def keeping(iterator: Any) -> Any:
            logs = dict(run(iterator))
            for name in kept:
                self._collected[self._kind].setdefault(name, []).append(np.asarray(logs.pop(name)))
            return logs

        keeping.program = run.program  # type: ignore[attr-defined]
        return keeping

    def _pace(self, callbacks: Any, kind: str) -> Any:
        return OneStepWhereKept(super()._pace(callbacks, kind), lambda: bool(self.kept(kind)))

    # Keras' loops

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see ``keras.Model.fit``.

        Raises:
            LoopError: a callback saves whole models.
        """
        for callback in tree.flatten(kwargs.get("callbacks") or []):
            if isinstance(callback, keras.callbacks.ModelCheckpoint) and not callback.save_weights_only:
                self.save()
        with self._running("train"):
            return super().fit(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate by the step ``test``; see ``keras.Model.evaluate``.

        Raises:
            LoopError: there is none.
        """
        self._check_has("test", "evaluate and validation_data need")
        with self._running("test"):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of ``predict`` for all rows, in order; see ``keras.Model.predict``.

        Raises:
            LoopError: there is no function ``predict``.
        """
        self._check_has("predict", "predict needs")
        return super().predict(*args, **kwargs)

    def compile(self, *args: Any, virtual_replicas: Any = None, **kwargs: Any) -> None:
        """See ``Model.compile``; a loop is compiled when it is made.

        Raises:
            StrategyError: by ``virtual_replicas``, which a step that is a function cannot have.
        """
        if virtual_replicas is not None:
            raise StrategyError(
                f"virtual_replicas={virtual_replicas!r} for '{self.name}', a TrainLoop, whose step is a function that "
                "changes what it likes, so that several cannot take turns on a replica. Leave virtual_replicas out, or "
                "make a kde.Model with a train_step of its own."
            )
        super().compile(*args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step; see ``keras.Model.train_on_batch``."""
        with self._running("train"):
            return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step of evaluation; see ``keras.Model.test_on_batch``."""
        self._check_has("test", "test_on_batch needs")
        with self._running("test"):
            return super().test_on_batch(*args, **kwargs)

    @contextlib.contextmanager
    def _running(self, kind: Kind) -> Iterator[None]:
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def _check_has(self, kind: str, who: str) -> None:
        if self._steps[kind] is None:
            given = "predict(batch)" if kind == "predict" else "test(replica, batch)"
            raise LoopError(f"{who} to know what to do with a batch. Give TrainLoop a function {kind}={given}.")

    # What is saved

    def count_params(self) -> int:
        """Count the numbers in all weights of Keras' models, and in all ``tf.Variable``s of other parts."""
        return int(super().count_params()) + sum(int(np.prod(v.shape)) for _, v in raw_variables(self))

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a step is Python, which no file of Keras holds.

        Raises:
            LoopError: always.
        """
        raise LoopError(
            f"'{self.name}' is a TrainLoop, whose step is a function that no file of Keras' can hold. Save the weights "
            "of all parts, loop.save_weights('loop.weights.h5') or ModelCheckpoint(..., save_weights_only=True), or a "
            "part that is a model, loop.net.save('net.keras')."
        )

    def save_own_variables(self, store: Any) -> None:
        """Save ``tf.Variable``s into a Keras file, where Keras saves its own."""
        super().save_own_variables(store)
        for name, variable in raw_variables(self):
            is_in_parts = _keras.is_sync_on_read(variable)
            store[f"tf.{name.replace('/', '.')}"] = (
                variable if is_in_parts else _keras.components(variable)[0]
            ).numpy()

    def load_own_variables(self, store: Any) -> None:
        """Load what ``save_own_variables`` has saved."""
        names = [name for name, _ in raw_variables(self)]
        super().load_own_variables({key: store[key] for key in store.keys() if not key.startswith("tf.")})  # noqa: SIM118
        for name, variable in zip(names, [v for _, v in raw_variables(self)], strict=True):
            value = np.asarray(store[f"tf.{name.replace('/', '.')}"])
            first, *others = _keras.components(variable)
            is_sum = _keras.is_sync_on_read(variable) and variable.aggregation == tf.VariableAggregation.SUM
            first.assign(value)
            for copy in others:
                copy.assign(np.zeros_like(value) if is_sum else value)


def _check_functions(*functions: Any) -> list[Any]:
    """Return functions as Python's: the loop compiles what a tf.function would have."""
    for function in functions:
        if function is not None and not callable(function):
            raise LoopError(
                f"A step is a function of (replica, batch), and `predict` one of (batch); given is {function!r}."
            )
    return [getattr(function, "python_function", function) for function in functions]


def _check_named(argument: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        example = 'reduce={"loss": "mean"}' if argument == "reduce" else 'parts={"net": net}'
        raise LoopError(f"{argument} is {type(given).__name__}; it is a dict by name, such as {example}; or {{}}.")


def _check_reductions(reduce: Mapping[str, Any]) -> None:
    for name, reduction in reduce.items():
        if reduction not in REDUCTIONS:
            raise LoopError(
                f"reduce[{name!r}] is {reduction!r}. Values of replicas are combined by "
                f"{', '.join(map(repr, REDUCTIONS))}{close_name(str(reduction), REDUCTIONS)}"
            )


def _named(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parts by name; those in lists and dicts have the names of both."""
    for name, part in parts.items():
        if isinstance(part, Mapping):
            yield from _named({f"{name}_{key}": value for key, value in part.items()})
        elif isinstance(part, list | tuple):
            yield from _named({f"{name}_{index}": value for index, value in enumerate(part)})
        else:
            yield name, part


def _spec_of(leaf: Any) -> Any:
    return None if leaf is None else tf.type_spec_from_value(tf.convert_to_tensor(leaf))


def _any_rows(spec: Any) -> Any:
    """A spec of one replica's rows, however many there are."""
    if hasattr(spec, "_value_specs"):  # of what TensorFlow has distributed
        spec = spec._value_specs[0]
    if isinstance(spec, tf.OptionalSpec) or not hasattr(spec, "shape"):
        return None
    shape = spec.shape
    if shape.rank:
        shape = tf.TensorShape([None, *shape[1:]])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return (
        tf.SparseTensorSpec(shape, spec.dtype)
        if isinstance(spec, tf.SparseTensorSpec)
        else tf.TensorSpec(shape, spec.dtype)
    )
