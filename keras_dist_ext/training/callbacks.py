"""Keras callbacks that carry values from a run to checks, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.callbacks import LateCallbackList
from keras_dist_ext._keras.layers import flat_layers, seed_generators
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext.aliases import Logs
from keras_dist_ext.errors import CallbackError, ScopeError
from keras_dist_ext.hashing import checked_seed
from keras_dist_ext.messages import warn_once
from keras_dist_ext.step.seeds import seeds_of
from keras_dist_ext.strategy.given import checked_strategy
from keras_dist_ext.strategy.scope import check_scope
from keras_dist_ext.training.epoch_data import EpochData
from keras_dist_ext.training.evaluation_passes import EvaluationPasses
from keras_dist_ext.training.resume.tests_before import Validation
from keras_dist_ext.training.run_callback import Callbacks, RunCallback
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["ReplicaSeeds", "RunCallbackList", "ScopeGuard"]


class ScopeGuard(RunCallback):
    """Stop training, evaluation and prediction before the first step if anything lives outside the strategy.

    Works with stock Keras models too. A stock model whose optimizer keeps slots, such as Adam, and was made elsewhere
    fails inside Keras before any callback is asked: `check_scope(model, strategy)` before `fit` names it.

    Args:
        strategy: The strategy that everything must live under. None is the one that the model was made under, or the
            one whose scope is entered; `tf.distribute.get_strategy()`, called outside of all scopes, is not one.

    Raises:
        ScopeError: When training, evaluation or prediction begins, if something lives elsewhere, or if no strategy is
            given and the model was made under none.
        StrategyError: When it is made, if `strategy` is not a `tf.distribute.Strategy`.
    """

    def __init__(self, strategy: tf.distribute.Strategy | None = None) -> None:
        super().__init__()
        self._strategy = checked_strategy(strategy)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Check before the first step of `fit`."""
        self._check("fit")

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Check before the first step of `evaluate`, or of a validation."""
        self._check("evaluate")

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Check before the first step of `predict`."""
        self._check("predict")

    def _check(self, method: str) -> None:
        model = self.model
        strategy = self._strategy or model.distribute_strategy
        if self._strategy is None and is_default_strategy(strategy):
            raise ScopeError(
                f"'{model.name}' was made under no strategy, so `{method}` would run it on one device. "
                "Build the model inside `with strategy.scope():`. `kde.adopt(model, strategy)` rebuilds one that "
                "exists there, with equal weights. If one device is what you want, say so: "
                "`ScopeGuard(tf.distribute.get_strategy())`."
            )
        check_scope(model, strategy).raise_if_bad()
        num_replicas = strategy.num_replicas_in_sync
        random_layers = [layer.name for layer in flat_layers(model) if seed_generators(layer)]
        if num_replicas > 1 and random_layers and runtime_of(model) is None:
            warn_once(
                f"'{model.name}' is a model of stock Keras, whose random layers draw the same numbers on all "
                f"{num_replicas} replicas: {', '.join(random_layers)}. Derive it from kde.Model, or rebuild it by "
                "kde.adopt(model, strategy)."
            )


class ReplicaSeeds(RunCallback):
    """Give every replica its own random streams, the same at every run: replica i draws from the seed ``seed + i``.

    Seeded are Keras' random layers, also those with a seed of their own, ``keras.random`` with ``seed=None`` and with
    generators that the model tracks, ``tf.random`` ops and ``tf.random.Generator``s in a step; Python's and NumPy's
    generators, differently on each worker; the order of data that is shuffled without a seed, and ``tf.random`` ops and
    generators in its functions. See ``seeds`` for how. The initial values of weights, and integers given as ``seed=``
    to ``keras.random``, stay as they are: alike on all replicas.

    The first run of a model with a seed begins all streams; later ones, and those of a model that was loaded, continue
    where the last one stopped. ``kde.seed_replicas(model, seed)`` begins anew.

    Numbers do not depend on ``steps_per_execution``, ``run_eagerly`` and ``jit_compile``, but for ``tf.random`` ops:
    TensorFlow keeps their place where nothing can save it. Nor do they depend on the number of replicas and workers:
    replica i draws the same.

    Args:
        seed: the global seed, from 0 to 2**31 - 3.
        draws: "replica" gives every replica its own streams. "global" has it draw its own rows of what one device
            would draw for the global batch, bit for bit, and the same as all others where random numbers have no
            dimension of examples; see the guide for what cannot be drawn so. By default "global" for a model compiled
            with ``exact=True``, and "replica" for others.
        enable_op_determinism: have TensorFlow choose ops that give the same bits at every run
            (``tf.config.experimental.enable_op_determinism``), for the rest of the process. It costs speed.

    Raises:
        SeedError: when it is made, if the seed is invalid; when a run begins, if the model is not one of this package.
        CallbackError: when it is made, if ``draws`` is neither "replica" nor "global", or ``enable_op_determinism``
            neither True nor False; when a run begins, if ``draws="replica"`` contradicts ``compile(exact=True)``.
    """

    def __init__(self, seed: int, *, draws: str | None = None, enable_op_determinism: bool = False) -> None:
        super().__init__()
        self.seed = checked_seed(seed)
        if draws is not None:
            draws = arguments.one_of("draws", draws, ("replica", "global"), error=CallbackError)
        self.draws = draws
        self.enable_op_determinism = arguments.flag("enable_op_determinism", enable_op_determinism, error=CallbackError)

    def get_run_config(self) -> Mapping[str, object]:
        """See ``RunCallback``."""
        return {"seed": self.seed} | ({"draws": self.draws} if self.draws == "global" else {})

    def on_run_prepare(self, model: keras.Model) -> None:
        """Have the model begin its next run with the seed."""
        seeds = seeds_of(model)
        if seeds.is_exact and self.draws == "replica":
            raise CallbackError(
                f"ReplicaSeeds({self.seed}, draws=\"replica\"), and '{model.name}' is compiled with exact=True, by "
                "which all replicas draw what one device does. Leave out one of them."
            )
        seeds.wanted, seeds.wanted_draws = self.seed, self.draws or "replica"
        if self.enable_op_determinism:
            tf.config.experimental.enable_op_determinism()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Refuse models of stock Keras."""
        seeds_of(self.model)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Refuse models of stock Keras."""
        seeds_of(self.model)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Refuse models of stock Keras."""
        seeds_of(self.model)


class RunCallbackList(LateCallbackList):
    """The callbacks of a run, which get the true number of the last batch of an execution.

    Keras names the last batch before an execution is made, when the end of data of unknown length is not in sight.
    They are set up when the run begins: the model is built then, and the number of its batches may be known.

    A ``RunCallback`` has hooks that come before or after those of all others, wherever it stands in the list.
    """

    def __init__(
        self, callbacks: Callbacks, model: keras.Model, *, verbose: int | str, epochs: int, add_history: bool
    ) -> None:
        self._arguments = {"callbacks": callbacks, "model": model, "verbose": verbose, "epochs": epochs}
        self._arguments |= {"add_history": add_history, "add_progbar": verbose != 0}
        self._runtime = model.replica_runtime
        self._stops = model.replica_runtime.stops
        self._is_set_up = False
        self._run_callbacks: list[RunCallback] = []
        self._on_execution_end: list[Callable[[], None]] = []  # only those that do something: they are called often
        self.validation = Validation()
        self.evaluation_passes = EvaluationPasses()
        self._data: EpochData | None = None
        self._test_data: EpochData | None = None

    @property
    def data(self) -> EpochData:
        """That of training, or of evaluation where nothing is trained; known before a run begins."""
        assert self._data is not None
        return self._data

    @property
    def test_data(self) -> EpochData:
        """That of the last evaluation; that of training before there is one."""
        assert self._test_data is not None
        return self._test_data

    def add_data(self, data: EpochData) -> None:
        """Take note of the data of training, or of an evaluation."""
        if self._data is None:
            self._data = data
        else:
            self.evaluation_passes.follow(data.dataset)
        self._test_data = data

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Set up, and begin training."""
        self._set_up()
        for callback in self._run_callbacks:
            callback.on_before_train_begin(self)
        super().on_train_begin(logs)
        for callback in self._run_callbacks:
            callback.on_after_train_begin()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin an epoch."""
        super().on_epoch_begin(epoch, logs)
        for callback in self._run_callbacks:
            callback.on_after_epoch_begin()

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Begin an execution of training."""
        with self._stops["train"].shown():
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """End an execution of training at the batch that was its last."""
        with self._stops["train"].shown():
            super().on_train_batch_end(min(batch, self.data.last_step), logs)
            for on_execution_end in self._on_execution_end:
                on_execution_end()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """End an epoch."""
        super().on_epoch_end(epoch, logs)
        for callback in self._run_callbacks:
            callback.on_after_epoch_end(epoch)
        self._runtime.agree_on_stop()  # also where one of these has asked for it

    def on_train_end(self, logs: Logs | None = None) -> None:
        """End training."""
        super().on_train_end(logs)
        for callback in self._run_callbacks:
            callback.on_after_train_end()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Set up where nothing is trained, and begin evaluation."""
        self._set_up()
        super().on_test_begin(logs)

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Begin an execution of evaluation."""
        with self._stops["test"].shown():
            super().on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """End an execution of evaluation at the batch that was its last."""
        with self._stops["test"].shown():
            super().on_test_batch_end(min(batch, self.test_data.last_step), logs)

    def _set_up(self) -> None:
        if not self._is_set_up:
            self._is_set_up = True
            super().__init__(**self._arguments, steps=self.data.num_batches)
            self._run_callbacks = [callback for callback in self.callbacks if isinstance(callback, RunCallback)]
            self._on_execution_end = [
                callback.on_execution_end
                for callback in self._run_callbacks
                if type(callback).on_execution_end is not RunCallback.on_execution_end
            ]
            for callback in self._run_callbacks:
                callback.on_run_begin(self.callbacks, self.data.dataset)
