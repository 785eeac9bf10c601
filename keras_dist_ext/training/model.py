"""Keras models that live under a strategy: built in its scope, trained exactly on all of its replicas."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.adapters import check_epoch_iterator
from keras_dist_ext._keras.interception import patched
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.models import HookedModel, KerasFunctional, functional_init_arguments, overrides
from keras_dist_ext._keras.saving import save_as
from keras_dist_ext._keras.variables import components
from keras_dist_ext.aliases import Config, LossNest, MetricNest, SavePath, Scores, StepData, TensorNest
from keras_dist_ext.messages import warn_once
from keras_dist_ext.step.added_losses import losses_as_means
from keras_dist_ext.step.compression import CompressionKind, checked_compression, compression_of
from keras_dist_ext.step.distributed_model import PlacedParts
from keras_dist_ext.step.nan_guard import Guard
from keras_dist_ext.step.plain_calls import call_model
from keras_dist_ext.step.recorder import Recorder
from keras_dist_ext.step.seeds import Seeds
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.strategy.virtual import VirtualReplicas
from keras_dist_ext.strategy.workers import Workers, checksum_of, workers_of
from keras_dist_ext.training.adoption.distributed_class import OwnClasses
from keras_dist_ext.training.adoption.take_over import take_over_loaded
from keras_dist_ext.training.batch_spec import specs_of_arrays
from keras_dist_ext.training.batch_statistics import BatchStatistics, checked_statistics
from keras_dist_ext.training.check_mode import CheckMode, check_mode
from keras_dist_ext.training.compile_config import add_own_arguments, read_arguments
from keras_dist_ext.training.construction import Scoped, in_scope_of, make_functional
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.documented import documented_as
from keras_dist_ext.training.epoch_data import EpochData
from keras_dist_ext.training.exactness import checked_exact
from keras_dist_ext.training.execution import PredictFunction, StepFunction
from keras_dist_ext.training.execution_sizer import (
    ExecutionSizer,
    checked_steps_per_execution,
)
from keras_dist_ext.training.prediction import PredictProgram
from keras_dist_ext.training.program import StepProgram
from keras_dist_ext.training.run_callback import Callbacks
from keras_dist_ext.training.runners import CoordinatorProgram, StepRunner, predictor
from keras_dist_ext.training.runs import evaluating, execution_sizers, fitting, predicting
from keras_dist_ext.training.runtime import ReplicaRuntime, runtime_of, stop_attribute
from keras_dist_ext.training.whole_saves import save_whole
from keras_dist_ext.training.worker_saves import save_by_worker

__all__ = ["OWN_CLASSES", "Functional", "Model", "Sequential"]

_T = TypeVar("_T")


class Model(HookedModel, metaclass=Scoped):
    """A ``keras.Model`` that gives under any ``tf.distribute`` strategy what it gives on one device.

    Use it as ``keras.Model``: subclass it, or call it with inputs and outputs. It belongs to the strategy in whose
    scope it is made, or to the one given as ``strategy=``; whatever makes variables later enters that scope by itself.

    Code inside ``train_step``, ``test_step``, ``compute_loss``, losses, layers and metrics sees the rows of one
    replica, and is written as for one device: losses are means over the rows at hand, or sums over them, and nothing
    is divided by the number of replicas. Gradients, losses and metrics of all replicas then add up to those of the
    global batch. ``fit`` sees before its first step whether this holds, see ``compile``.

    Differences that mathematics imposes: ``BatchNormalization(synchronized=False)`` normalizes with the statistics of
    each replica's rows, unless ``compile`` says otherwise; its moving statistics, like all non-trainable float state
    that a layer assigns while it is called, become the mean over replicas weighted by rows, after every step.

    Args:
        strategy: the strategy to live under (keyword only); by default the one whose scope is entered.
        seed: the global seed of all that is random in a step (keyword only), as ``ReplicaSeeds(seed)`` gives it. The
            weights' initial values are the initializers' affair, and ``keras.utils.set_random_seed``'s.

    Raises:
        ScopeError: by ``fit``, ``evaluate`` and ``predict``, when a variable lives elsewhere.
        SeedError: ``seed`` is not an integer from 0 to 2**31 - 3.
        StrategyError: ``strategy`` is not a ``tf.distribute.Strategy``.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Model:
        """Make a ``Functional`` where inputs and outputs are given, as Keras does."""
        if cls is Model and functional_init_arguments(args, kwargs):
            cls = Functional
        is_graph = issubclass(cls, (KerasFunctional, keras.Sequential))
        # keras.Model.__new__ forgets the arguments that the default get_config returns; Layer's keeps them.
        instance: Model = (
            super().__new__(cls, *args, **kwargs) if is_graph else keras.Layer.__new__(cls, *args, **kwargs)
        )
        object.__setattr__(instance, "replica_runtime", ReplicaRuntime(instance))  # past Keras, which would track it
        object.__setattr__(instance, "build", in_scope_of(instance, instance.build))
        return instance

    def __init__(self, *args: object, **kwargs: object) -> None:
        if functional_init_arguments(args, kwargs) and not isinstance(self, KerasFunctional):
            make_functional(type(self), OWN_CLASSES)
            Functional.__init__(self, *args, **kwargs)
        else:
            super().__init__(*args, **kwargs)

    virtual_replicas: VirtualReplicas | None = None
    placement: PlacedParts | None = None  # of its parts, see ``place``
    replica_runtime: ReplicaRuntime
    train_function: StepFunction | None
    test_function: StepFunction | None
    predict_function: PredictFunction | None

    @property
    def replica_seeds(self) -> Seeds:
        """The model's random generators, where files and checkpoints meet them."""
        return self.replica_runtime.seeds

    # Variables are made in scope

    def __call__(self, *args: object, **kwargs: object) -> TensorNest:
        """Call the model; what it builds is made in scope."""
        if all(layer.built for layer in flat_layers(self)):  # Keras may call a model built whose layers are not
            return call_model(self, super().__call__, *args, **kwargs)
        with self.replica_runtime.in_scope():
            return super().__call__(*args, **kwargs)

    def build_from_config(self, config: Config) -> None:
        """See ``keras.Layer.build_from_config``; variables are made in scope."""
        with self.replica_runtime.in_scope():
            super().build_from_config(config)
        if self.variables:  # Keras itself says so only when it loads a whole model; keras-tuner loads weights
            self.built = True

    def load_weights(self, *args: object, **kwargs: object) -> None:
        """See ``keras.Model.load_weights``."""
        with contextlib.nullcontext() if self.built else self.replica_runtime.in_scope():
            super().load_weights(*args, **kwargs)

    @documented_as(keras.Model.quantize)
    def quantize(self, *args: object, **kwargs: object) -> None:
        """See ``keras.Model.quantize``."""
        with self.replica_runtime.in_scope():
            super().quantize(*args, **kwargs)

    def compile_from_config(self, config: Config) -> None:
        """See ``keras.Model.compile_from_config``."""
        if overrides(self, "compile"):
            super().compile_from_config(config)  # says that such a class must override this too
            return
        self.compile(**read_arguments(config))
        if self.optimizer is not None and self.built:
            with self.replica_runtime.in_scope():
                self.optimizer.build(self.trainable_variables)

    def get_compile_config(self) -> Config | None:
        """See ``keras.Model.get_compile_config``."""
        return add_own_arguments(super().get_compile_config(), self)

    def compile(
        self,
        optimizer: str | Config | keras.optimizers.Optimizer = "rmsprop",
        loss: LossNest = None,
        loss_weights: LossNest = None,
        metrics: MetricNest = None,
        weighted_metrics: MetricNest = None,
        run_eagerly: bool = False,
        steps_per_execution: int | str = "auto",
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
        virtual_replicas: VirtualReplicas | int | None = None,
        check: CheckMode = True,
        batch_statistics: BatchStatistics | None = None,
        exact: bool = False,
        gradient_compression: CompressionKind = None,
    ) -> None:
        """Configure the model as ``keras.Model.compile`` does, in the scope of its strategy.

        Args:
            optimizer: see ``keras.Model.compile``, as for all that is not named here. Called outside of all scopes,
                optimizers and metrics that were made there too, and never used, are moved into the model's.
            loss: ...
            loss_weights: ...
            metrics: ...
            weighted_metrics: ...
            run_eagerly: ...
            steps_per_execution: "auto" runs as many steps at once as fit into about 0.1 seconds, and every step by
                itself when a callback of yours looks at batches. An int is Keras' own.
            jit_compile: True compiles by XLA what one replica computes, where TensorFlow can; else a warning says why
                not. "auto" does so on GPUs, for Keras' own code and batches of one shape; see the guide.
            auto_scale_loss: ...
            virtual_replicas: for how many replicas the run is defined, on as many devices or fewer: a number, or
                ``VirtualReplicas``. By default as many as the strategy has.
            check: what ``fit``, ``evaluate``, ``predict`` and their ``*_on_batch`` do, before their first step on
                several replicas, for a model with code of yours in its step: they make a step on a few examples both
                on one device and on replicas, put everything back, and warn of what differs (True), raise a
                ``StepError`` ("raise"), or make no such step (False). A step that runs eagerly is run for it: what its
                Python code does stays done, but for numbers and words that it keeps in attributes of the model and its
                layers (it prints, or appends to a list, once more).
            batch_statistics: "global" has every BatchNormalization normalize by the statistics of the global batch, as
                on one device; "replica", the default, those not ``synchronized`` by those of a replica's examples.
            exact: have all replicas together do what one device does, random numbers included: ``batch_statistics`` and
                the draws of ``ReplicaSeeds``, or else of the layers' own seeds, are "global", and ``check`` is "raise"
                for any model. What cannot be exact is an error before the first step.
            gradient_compression: "bfloat16" has workers send each other gradients in 16 bits; see the guide.

        Raises:
            StrategyError: the replicas cannot carry so many virtual ones evenly, or know no global batch; ``exact``
                contradicts another argument.
            ValueError: ``steps_per_execution`` is neither "auto" nor an integer >= 1, or ``check`` none of these.
        """
        steps_per_execution = checked_steps_per_execution(steps_per_execution)
        check = check_mode(check)
        strategy, runtime = self.distribute_strategy, self.replica_runtime
        exact = checked_exact(exact, batch_statistics=batch_statistics, jit_compile=jit_compile, strategy=strategy)
        statistics = checked_statistics("global" if exact else batch_statistics, strategy)
        virtual = VirtualReplicas.of(virtual_replicas, strategy)
        compression = checked_compression(gradient_compression, strategy, virtual, exact=exact)
        chooses_xla = jit_compile == "auto"
        if virtual is not None:
            if jit_compile is True:
                warn_once(
                    f"jit_compile=True: with virtual_replicas={virtual.count} the step runs without XLA, which cannot "
                    "compile for every number of devices, and computes other numbers."
                )
            jit_compile = False
        runtime.take_into_scope([optimizer, metrics, weighted_metrics])
        with runtime.in_scope():
            super().compile(
                optimizer=optimizer,
                loss=loss,
                loss_weights=loss_weights,
                metrics=metrics,
                weighted_metrics=weighted_metrics,
                run_eagerly=run_eagerly,
                steps_per_execution=1 if steps_per_execution == "auto" else steps_per_execution,
                jit_compile=jit_compile,
                auto_scale_loss=auto_scale_loss,
            )
        runtime.chooses_num_steps, runtime.chooses_xla = steps_per_execution == "auto", chooses_xla
        self.virtual_replicas = virtual
        runtime.check, runtime.batch_statistics, runtime.exact = check, statistics, exact
        runtime.compression = compression_of(compression)
        runtime.hold_sums()
        runtime.forget_traces()

    def _build_for_run(self, iterator: EpochData | None, batch: StepData) -> None:
        runtime = self.replica_runtime
        if iterator is None:
            runtime.build(runtime.kind_of_batches, *specs_of_arrays(batch))
        else:
            check_epoch_iterator()
            runtime.build(iterator.kind, iterator.dataset.batch_spec, iterator.dataset.exact_spec)
        if self.placement is not None:
            self.placement.place_new_variables()
        self.replica_seeds.begin()

    # What runs inside a step

    def make_train_function(self, force: bool = False) -> StepFunction:
        """Return what ``fit`` calls for each execution: it takes an ``Execution``, or an iterator of batches."""
        self.train_function = self._recording_function("train", force or self.train_function is None)
        return self.train_function

    def make_test_function(self, force: bool = False) -> StepFunction:
        """Return what ``evaluate`` calls for each execution."""
        self.test_function = self._recording_function("test", force or self.test_function is None)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> PredictFunction:
        """Return what ``predict`` calls for each execution."""
        if self.predict_function is None or force:
            program = CoordinatorProgram(self, "predict") if self._is_asynchronous else PredictProgram(self)
            self.predict_function = predictor(program)
        return self.predict_function

    def _recording_function(self, kind: Kind, is_new: bool) -> StepFunction:
        """Return a function whose steps record what is asked for now; those made for something else are kept."""
        runtime = self.replica_runtime
        with_norm = any(recorder.gradient_norm for recorder in runtime.recorders)
        guards = kind == "train" and runtime.guard is not None
        wanted = bool(runtime.recorders), with_norm, guards, tf.config.functions_run_eagerly()
        return runtime.function_of(kind, wanted, lambda: StepRunner(self._program(kind)), is_new=is_new)

    def _program(self, kind: Kind) -> StepProgram | CoordinatorProgram:
        return CoordinatorProgram(self, kind) if self._is_asynchronous else StepProgram(DistributedStep(self, kind))

    @property
    def _is_asynchronous(self) -> bool:
        return isinstance(self.distribute_strategy, tf.distribute.ParameterServerStrategy)

    @property
    def losses(self) -> list[tf.Tensor]:
        """See ``keras.Layer.losses``; in a step, sums and means that layers have added count as on one device."""
        return losses_as_means(self, super().losses)

    # Keras' loops over our data

    stop_training = stop_attribute("train")
    stop_evaluating = stop_attribute("test")
    stop_predicting = stop_attribute("predict")

    def _save_whole(self, save: Callable[[SavePath], _T], path: SavePath, *, makes_parents: bool, arguments: str) -> _T:
        workers = workers_of(self.distribute_strategy)
        if workers is None:  # several workers agree on it at the end of an epoch
            self.replica_runtime.synchronize()
            return save_whole(save, path, makes_parents=makes_parents)

        def state(written: Path) -> str:
            weights = checksum_of([components(weight)[0] for weight in self.weights])
            return f"{weights:08x}-{zlib.crc32(arguments.encode()):08x}"

        return save_by_worker(save, path, workers, makes_parents=makes_parents, state=state)

    def _checkpoint_children(self) -> dict[str, object]:
        return {"replica_seeds": self.replica_seeds.in_checkpoint}

    @classmethod
    def _load_pickled(cls, file: SavePath, load: Callable[[SavePath], keras.Model]) -> keras.Model:
        """Load a pickled model in the scope that is entered.

        Files hold the names of Keras' classes, so what comes from them is taken over.
        """
        with keras.saving.custom_object_scope({keras.saving.get_registered_name(cls): cls}):
            model = load(file)
        if runtime_of(model) is not None:
            return model
        return take_over_loaded(model, file, OWN_CLASSES)

    def _sizers(self, callbacks: Callbacks, workers: Workers | None, *kinds: Kind) -> dict[Kind, ExecutionSizer]:
        return execution_sizers(self, callbacks, workers, *kinds)

    def add_recorder(self, recorder: Recorder) -> None:
        """Have the steps of the run that is about to begin recorded.

        For callbacks, in ``RunCallback.on_run_prepare``.

        Args:
            recorder: takes what is recorded.
        """
        self.replica_runtime.add_recorder(recorder)

    def guard_steps(self, most_in_a_row: int) -> Guard:
        """Have steps of the run that is about to begin left out if something in them is not finite.

        For callbacks, in ``RunCallback.on_run_prepare``; see ``Guard.begin``.

        Args:
            most_in_a_row: how many steps in a row may be left out.
        """
        return self.replica_runtime.guard_steps(most_in_a_row)

    def drop_recorder(self, recorder: Recorder) -> None:
        """Have the steps of the run that is under way recorded no longer, from the next execution on.

        Args:
            recorder: that ``add_recorder`` was given.
        """
        self.replica_runtime.drop_recorder(recorder)

    @documented_as(keras.Model.fit)
    def fit(self, *args: object, **kwargs: object) -> keras.callbacks.History:
        """See ``keras.Model.fit``."""
        with fitting(self, self._sizers, args, kwargs) as call:
            return super().fit(*call.args[1:], **call.kwargs)

    @documented_as(keras.Model.evaluate)
    def evaluate(self, *args: object, **kwargs: object) -> Scores:
        """See ``keras.Model.evaluate``."""
        with evaluating(self, self._sizers, args, kwargs) as call:
            return super().evaluate(*call.args[1:], **call.kwargs)

    @documented_as(keras.Model.test_on_batch)
    def test_on_batch(self, *args: object, **kwargs: object) -> Scores:
        """See ``keras.Model.test_on_batch``."""
        with patched(self.replica_runtime, "kind_of_batches", "test"):
            return super().test_on_batch(*args, **kwargs)

    @documented_as(keras.Model.predict)
    def predict(self, *args: object, **kwargs: object) -> TensorNest:
        """See ``keras.Model.predict``."""
        with predicting(self, args, kwargs) as call:
            return super().predict(*call.args[1:], **call.kwargs)


class Functional(Model, KerasFunctional):  # type: ignore[misc]
    """What ``Model(inputs, outputs)`` makes."""


class Sequential(Model, keras.Sequential):  # type: ignore[misc]
    """A ``keras.Sequential`` with all that ``Model`` adds."""


# Saved under Keras' own names, they load without this package.
save_as(Functional, KerasFunctional)
save_as(Sequential, keras.Sequential)

OWN_CLASSES = OwnClasses(Model, Functional, Sequential)
