"""Train by a step of your own, outside of Keras' ``train_step``, with everything that ``fit`` has."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import NoReturn

import numpy as np
import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.hooks import current_step
from keras_dist_ext.aliases import Array, BatchFunction, CompileArgument, Scores, StepData, TensorNest, UserFunction
from keras_dist_ext.data.split import num_rows
from keras_dist_ext.errors import LoopError, StrategyError
from keras_dist_ext.step.replica_step import ReplicaStep
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.strategy.given import checked_strategy
from keras_dist_ext.strategy.scope import move_into_scope, raw_variables
from keras_dist_ext.strategy.virtual import VirtualReplicas
from keras_dist_ext.strategy.workers import Workers
from keras_dist_ext.training.check_mode import CheckMode
from keras_dist_ext.training.epoch_data import EpochData
from keras_dist_ext.training.execution import Execution, StepFunction
from keras_dist_ext.training.execution_sizer import ExecutionSizer, checked_steps_per_execution
from keras_dist_ext.training.loop import plain_variables
from keras_dist_ext.training.loop.arguments import (
    check_asynchronous,
    check_named,
    check_part_name,
    check_reductions,
    checked_functions,
    checked_kind,
    parts_by_name,
)
from keras_dist_ext.training.loop.declared_values import DeclaredValues, spec_of_arrays, spec_of_rows
from keras_dist_ext.training.loop.loop_program import DeclaredStep, OneStepWhereKept
from keras_dist_ext.training.loop.replica import Replica
from keras_dist_ext.training.loop.step_metrics import Reduction
from keras_dist_ext.training.model import Model
from keras_dist_ext.training.program import StepProgram
from keras_dist_ext.training.run_callback import Callbacks
from keras_dist_ext.training.runners import CoordinatorProgram

__all__ = ["TrainLoop"]

UserStep = Callable[[Replica, TensorNest], Mapping[str, TensorNest]]


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

    Before the first step, the step is traced in a scratch graph and examined, so that mistakes are found early: see
    ``LoopError``.

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
        check: see ``Model.compile``.
        exact: likewise.
        strategy: the strategy to train under (keyword only); by default the one whose scope is entered.
        seed: see ``Model``.

    Raises:
        LoopError: a part has no usable name, or a reduction is unknown; by ``fit``, ``evaluate`` and ``predict``, a
            step would not do what it seems to.
        ScopeError: by ``fit`` and ``evaluate``, when a variable lives elsewhere.
        StrategyError: the strategy is a ParameterServerStrategy, and a reduction is not "mean" or "sum".
    """

    _declared = DeclaredValues({}, ())  # of the loop, once it has parts
    _kind: Kind = "train"

    def __init__(
        self,
        step: UserStep,
        *,
        parts: Mapping[str, object],
        reduce: Mapping[str, Reduction],
        test: UserStep | None = None,
        predict: BatchFunction | None = None,
        steps_per_execution: int | str = "auto",
        run_eagerly: bool = False,
        name: str = "loop",
        check: CheckMode = True,
        exact: bool = False,
        strategy: tf.distribute.Strategy | None = None,  # for type checkers: `Scoped` takes it, and enters its scope
    ) -> None:
        checked_strategy(strategy)
        name = arguments.text("name", name, wanted="a name of the loop", error=LoopError)
        steps_per_execution = checked_steps_per_execution(steps_per_execution)
        run_eagerly = arguments.flag("run_eagerly", run_eagerly, error=LoopError)
        step, test, predict = checked_functions(step=step, test=test, predict=predict)
        check_named("parts", parts)
        check_named("reduce", reduce)
        check_reductions(reduce)
        super().__init__(name=name)
        if self._is_asynchronous:
            check_asynchronous(reduce)
        object.__setattr__(self, "_steps", {"train": step, "test": test, "predict": predict})  # past Keras' tracking
        self.replica_runtime.can_split_batches = False
        named = parts_by_name(parts)
        made = [part for part in named.values() if isinstance(part, keras.optimizers.Optimizer)]
        own_metrics = [part for part in named.values() if isinstance(part, keras.metrics.Metric)]
        object.__setattr__(self, "_declared", DeclaredValues(dict(reduce), own_metrics))
        with self.replica_runtime.in_scope():
            for part in (*made, *own_metrics):
                move_into_scope(part)
        for part_name, part in named.items():
            check_part_name(part_name, type(self))
            setattr(self, part_name, part)
        self.compile(
            made[0] if made else None,
            steps_per_execution=steps_per_execution,
            run_eagerly=run_eagerly,
            jit_compile=False,
            auto_scale_loss=False,
            check=check,
            exact=exact,
        )
        self.built = True

    _steps: Mapping[str, UserFunction]
    takes_check = "TrainLoop"
    """Is called with whether steps are checked."""

    # What runs inside a step

    def train_step(self, data: StepData) -> dict[str, tf.Tensor]:
        """Make one step of training on a replica's rows."""
        return self._run_step("train", data)

    def test_step(self, data: StepData) -> dict[str, tf.Tensor]:
        """Make one step of evaluation on a replica's rows."""
        return self._run_step("test", data)

    def predict_step(self, data: StepData) -> TensorNest:
        """Return outputs for a replica's rows."""
        return self._steps["predict"](data)

    def _run_step(self, kind: Kind, data: StepData) -> dict[str, tf.Tensor]:
        step = current_step()
        if step is None and self._is_asynchronous:
            step = ReplicaStep(self, num_rows(data), num_rows(data))  # a worker's own
        assert isinstance(step, ReplicaStep)
        replica = Replica(step, data)
        values = {name: tf.convert_to_tensor(value) for name, value in self._steps[kind](replica, data).items()}
        self._declared.update(kind, values, replica)
        return values

    # What Keras' loops ask for

    @property
    def metrics(self) -> list[keras.Metric]:
        """What the declared values of the present kind of steps add up to, and the metrics among the parts."""
        return self._declared.metrics(self._kind)

    def get_metrics_result(self) -> dict[str, tf.Tensor]:
        """Return what has been added up, of the values that the steps of the present kind return."""
        return self._declared.results(self._kind)

    def _program(self, kind: Kind) -> StepProgram | CoordinatorProgram:
        if self._is_asynchronous:
            return super()._program(kind)
        kept = self.kept(kind)
        program = StepProgram(DeclaredStep(self, kind, kept))
        if kept:
            program.make_single_steps()
        return program

    def _build_for_run(self, iterator: EpochData | None, batch: StepData) -> None:
        kind = self._kind
        given = spec_of_arrays(batch) if iterator is None else iterator.dataset.given.element_spec
        spec = self.replica_runtime.batch_spec = spec_of_rows(given)
        if self._declared.examine(self, kind, self._steps[kind], spec):
            self.replica_runtime.functions[kind].clear()  # what was traced adds up to the metrics before
            setattr(self, f"{kind}_function", None)
        self.replica_runtime.check_layers(kind)
        self.replica_seeds.begin()

    # What is kept for all rows

    def rows(self, kind: Kind = "train") -> dict[str, Array]:
        """Return what steps have returned under reductions "concat": for all rows, in the order of the data.

        Steps that return some are made one at a time.

        Args:
            kind: "train" for those of the last epoch, "test" for those of the last evaluation.

        Raises:
            LoopError: ``kind`` is another one.
        """
        return self._declared.rows(checked_kind(kind))

    def kept(self, kind: Kind) -> list[str]:
        """Return which values of a step are kept for all rows, as far as it is known.

        Args:
            kind: "train" or "test".

        Raises:
            LoopError: ``kind`` is another one.
        """
        return self._declared.kept(checked_kind(kind))

    def reset_metrics(self) -> None:
        """Begin to add up and to keep anew."""
        super().reset_metrics()
        self._declared.begin_to_keep(self._kind)

    def _recording_function(self, kind: Kind, is_new: bool) -> StepFunction:
        run = super()._recording_function(kind, is_new)
        kept = self.kept(kind)
        if not kept:
            return run

        def keeping(iterator: Execution | Iterator[StepData]) -> Mapping[str, TensorNest]:
            logs = dict(run(iterator))
            for name in kept:
                self._declared.keep(self._kind, name, logs.pop(name))
            return logs

        keeping.program = run.program  # type: ignore[attr-defined]
        return keeping

    def _sizers(self, callbacks: Callbacks, workers: Workers | None, *kinds: Kind) -> dict[Kind, ExecutionSizer]:
        made = super()._sizers(callbacks, workers, *kinds)
        return {kind: OneStepWhereKept(made[kind], functools.partial(self._keeps, kind)) for kind in kinds}

    def _keeps(self, kind: Kind) -> bool:
        return bool(self.kept(kind))

    # Keras' loops

    def fit(self, *args: object, **kwargs: object) -> keras.callbacks.History:
        """Train; see ``keras.Model.fit``.

        Raises:
            LoopError: a callback saves whole models, or sets the learning rate where no optimizer of Keras has one.
        """
        for callback in tree.flatten(kwargs.get("callbacks") or []):
            if isinstance(callback, keras.callbacks.ModelCheckpoint) and not callback.save_weights_only:
                self.save()
            if isinstance(callback, _SETS_RATE) and self.optimizer is None:
                raise LoopError(
                    f"{type(callback).__name__} sets the learning rate of the first optimizer among the parts, and "
                    f"'{self.name}' has none of Keras'. Keep your rate in a tf.Variable, and assign it in a callback "
                    "of your own, such as keras.callbacks.LambdaCallback(on_epoch_begin=...)."
                )
        with self._running("train"):
            return super().fit(*args, **kwargs)

    def evaluate(self, *args: object, **kwargs: object) -> Scores:
        """Evaluate by the step ``test``; see ``keras.Model.evaluate``.

        Raises:
            LoopError: there is none.
        """
        self._check_has("test", "evaluate and validation_data need")
        with self._running("test"):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: object, **kwargs: object) -> TensorNest:
        """Return the outputs of ``predict`` for all rows, in order; see ``keras.Model.predict``.

        Raises:
            LoopError: there is no function ``predict``.
        """
        self._check_has("predict", "predict needs")
        return super().predict(*args, **kwargs)

    def compile(
        self,
        *args: CompileArgument,
        virtual_replicas: VirtualReplicas | int | None = None,
        **kwargs: CompileArgument,
    ) -> None:
        """See ``Model.compile``; a loop is compiled when it is made.

        Raises:
            StrategyError: by ``virtual_replicas``, which a step that is a function cannot have.
        """
        if virtual_replicas is not None:
            raise StrategyError(
                f"virtual_replicas={virtual_replicas!r} for '{self.name}', a TrainLoop, whose step is a function that "
                "may change anything, so several virtual replicas cannot run on one device. Leave virtual_replicas "
                "out, or use a kde.Model with a custom train_step."
            )
        super().compile(*args, **kwargs)

    def train_on_batch(self, *args: object, **kwargs: object) -> Scores:
        """Make one step; see ``keras.Model.train_on_batch``."""
        with self._running("train"):
            return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: object, **kwargs: object) -> Scores:
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

    def save(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: a step is Python, which no file of Keras holds.

        Raises:
            LoopError: always.
        """
        raise LoopError(
            f"'{self.name}' is a TrainLoop, whose step is a function that no file of Keras' can hold. Save the weights "
            "of all parts, loop.save_weights('loop.weights.h5') or ModelCheckpoint(..., save_weights_only=True), or a "
            "part that is a model, loop.net.save('net.keras')."
        )

    def save_own_variables(self, store: MutableMapping[str, Array]) -> None:
        """Save ``tf.Variable``s into a Keras file, where Keras saves its own."""
        super().save_own_variables(store)
        plain_variables.save(raw_variables(self), store)

    def load_own_variables(self, store: MutableMapping[str, Array]) -> None:
        """Load what ``save_own_variables`` has saved."""
        super().load_own_variables(plain_variables.without(store))
        plain_variables.load(raw_variables(self), store)

    def get_weights(self) -> list[Array]:
        """Return the values of all weights of Keras' models, and then of all ``tf.Variable``s of other parts."""
        return [*super().get_weights(), *(plain_variables.value_of(variable) for _, variable in raw_variables(self))]

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Set what ``get_weights`` has returned; EarlyStopping does so.

        Raises:
            ValueError: they are not as many, or of other shapes.
        """
        raw = [variable for _, variable in raw_variables(self)]
        of_keras, of_others = plain_variables.split_weights(self.name, weights, len(self.weights), len(raw))
        super().set_weights(of_keras)
        for variable, value in zip(raw, of_others, strict=True):
            plain_variables.set_value(variable, np.asarray(value))


_SETS_RATE = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
