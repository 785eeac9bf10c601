"""Keras models that live under a strategy: built in its scope, trained exactly on all of its replicas."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_dist_ext import _keras, data, feed
from keras_dist_ext._keras import keras, tree
from keras_dist_ext.step import PredictProgram, StepProgram

__all__ = ["Functional", "Model", "Sequential"]


class _Scoped(type(keras.Model)):  # type: ignore[misc]
    """Makes ``Class(..., strategy=s)`` construct the instance inside ``s.scope()``."""

    def __call__(cls, *args: Any, strategy: tf.distribute.Strategy | None = None, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            return super().__call__(*args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        init = inspect.signature(cls.__init__)
        parameters = [p for p in init.parameters.values()][1:]
        strategy = inspect.Parameter("strategy", inspect.Parameter.KEYWORD_ONLY, default=None)
        at = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
        return init.replace(parameters=[*parameters[:at], strategy, *parameters[at:]])


class Model(keras.Model, metaclass=_Scoped):  # type: ignore[misc]
    """A ``keras.Model`` that gives under any ``tf.distribute`` strategy what it gives on one device.

    Use it as ``keras.Model``: subclass it, or call it with inputs and outputs. It belongs to the strategy in whose
    scope it is made, or to the one given as ``strategy=``; whatever makes variables later enters that scope by itself.

    Code inside ``train_step``, ``test_step``, ``compute_loss``, losses, layers and metrics sees the rows of one
    replica, and is written as for one device: losses are means over the rows at hand, nothing is divided by the number
    of replicas. Gradients, losses and metrics of all replicas then add up to those of the global batch.

    Differences that mathematics imposes: ``BatchNormalization(synchronized=False)`` normalizes with the statistics of
    each replica's rows; its moving statistics, like all non-trainable float state that a layer assigns while it is
    called, become the mean over replicas weighted by rows, after every step.

    Args:
        strategy: the strategy to live under (keyword only); by default the one whose scope is entered.

    Raises:
        ScopeError: by ``fit``, ``evaluate`` and ``predict``, when a variable lives elsewhere.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Model and _keras.functional_init_arguments(args, kwargs):
            return super().__new__(Functional, *args, **kwargs)
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _keras.functional_init_arguments(args, kwargs) and not isinstance(self, _keras.Functional):
            _make_functional(type(self))
            Functional.__init__(self, *args, **kwargs)
        else:
            super().__init__(*args, **kwargs)

    # Variables are made in scope

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator[None]:
        strategy = self._distribute_strategy
        if strategy is None or tf.distribute.has_strategy():
            yield
        else:
            with strategy.scope():
                yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.built:
            return super().__call__(*args, **kwargs)
        with self._in_scope():
            return super().__call__(*args, **kwargs)

    def build_from_config(self, config: Any) -> None:
        with self._in_scope():
            super().build_from_config(config)

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        with self._in_scope():
            super().load_weights(*args, **kwargs)

    def compile_from_config(self, config: Any) -> None:
        with self._in_scope():
            super().compile_from_config(config)

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int | str = "auto",
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        with self._in_scope():
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
        self._steps_per_execution_is_auto = steps_per_execution == "auto"

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None:
            spec = iterator.batch_spec
        else:
            spec = tree.map_structure(lambda v: None if v is None else feed.any_number_of_rows(v), data_batch)
        with self._in_scope():
            self._symbolic_build(data_batch=spec)

    # What runs inside a step

    def make_train_function(self, force: bool = False) -> Any:
        if self.train_function is None or force:
            self.train_function = _runner(StepProgram(self, "train"))
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        if self.test_function is None or force:
            self.test_function = _runner(StepProgram(self, "test"))
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        if self.predict_function is None or force:
            self.predict_function = _predictor(PredictProgram(self))
        return self.predict_function

    def get_metrics_result(self) -> Any:
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync == 1 or tf.inside_function() or not tf.distribute.in_cross_replica_context():
            return super().get_metrics_result()
        return super().get_metrics_result()

    # Keras' loops over our data

    def _feeds(self, paces: list[feed.Pace]) -> Any:
        made = iter([*paces, *[paces[-1]] * 8])

        def make(distribute_strategy: Any = None, steps_per_execution: int = 1, **arguments: Any) -> feed.Feed:
            return feed.Feed(self.distribute_strategy, next(made), **arguments)

        return _keras.epoch_iterators(make)

    def _pace(self, callbacks: Any, kind: str) -> feed.Pace:
        if not getattr(self, "_steps_per_execution_is_auto", True):
            return feed.Pace(self.steps_per_execution)
        return feed.Pace(1 if _looks_at_batches(callbacks, kind) else None)

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        callbacks = _FIT.bind(self, *args, **kwargs).arguments.get("callbacks")
        with self._feeds([self._pace(callbacks, "train"), self._pace(callbacks, "test")]):
            return super().fit(*args, **kwargs)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        callbacks = _EVALUATE.bind(self, *args, **kwargs).arguments.get("callbacks")
        with self._feeds([self._pace(callbacks, "test")]):
            return super().evaluate(*args, **kwargs)

    @functools.wraps(keras.Model.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._feeds([feed.Pace(1)]):
            return super().predict(*args, **kwargs)


class Functional(Model, _keras.Functional):  # type: ignore[misc]
    """What ``Model(inputs, outputs)`` makes."""


class Sequential(Model, keras.Sequential):  # type: ignore[misc]
    """A ``keras.Sequential`` with all that ``Model`` adds."""


_FIT = inspect.signature(keras.Model.fit)
_EVALUATE = inspect.signature(keras.Model.evaluate)


def _make_functional(cls: type) -> None:
    """Put ``Functional`` below a user's subclass of ``Model`` (Keras does the same to its own)."""
    if cls is Model or not issubclass(cls, Model):
        return
    cls.__bases__ = tuple(Functional if base is Model else base for base in cls.__bases__)
    for base in cls.__bases__:
        if base is not Functional:
            _make_functional(base)


def _runner(program: StepProgram) -> Callable[[Any], Any]:
    """Keras' ``train_function``: takes an ``Execution``, or any iterator of batches for one step."""

    def run(iterator: Any) -> Any:
        if isinstance(iterator, feed.Execution):
            return iterator.run(program)
        return program.on_batch(tree.map_structure(_as_tensor, next(iterator)))

    return run


def _predictor(program: PredictProgram) -> Callable[[Any], Any]:
    def run(batches: Any) -> Any:
        if isinstance(batches[0], feed.Execution):
            batches = list(batches[0].batches())
        else:
            batches = [tree.map_structure(_as_tensor, batch) for batch in batches]
        return program.on_batches(batches)

    return run


def _as_tensor(value: Any) -> Any:
    return None if value is None else tf.convert_to_tensor(value) if not tf.is_tensor(value) else value


def _looks_at_batches(callbacks: Any, kind: str) -> bool:
    """Whether a callback of the user's own wants every batch."""
    callbacks = getattr(callbacks, "callbacks", callbacks)
    names = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"] + (
        ["on_batch_begin", "on_batch_end"] if kind == "train" else []
    )
    for callback in tree.flatten(callbacks) if callbacks else []:
        if _is_content_with_executions(callback):
            continue
        for name in names:
            method = getattr(callback, name, None)
            if getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, name):
                return True
    return False


def _is_content_with_executions(callback: Any) -> bool:
    """Whether one of Keras' own callbacks needs no single batch, as it is set up."""
    if type(callback) in (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore):
        return getattr(callback, "save_freq", getattr(callback, "_save_freq", "epoch")) == "epoch"
    if type(callback) is keras.callbacks.TensorBoard:
        return callback.update_freq == "epoch" and not callback.write_steps_per_second and not callback._should_trace
    return type(callback) is keras.callbacks.ProgbarLogger
