"""Make a run of Keras' ``fit``, ``evaluate`` or ``predict`` one of all replicas: its checks, callbacks and data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.adapters import use_epoch_iterator
from keras_dist_ext._keras.py_datasets import preserve_py_dataset_order
from keras_dist_ext.data.sources import check_no_scalar
from keras_dist_ext.errors import DataError
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.strategy.adapted import take_into_scope
from keras_dist_ext.strategy.consistency import run_fingerprint
from keras_dist_ext.strategy.workers import Workers, workers_of
from keras_dist_ext.training.callbacks import RunCallbackList
from keras_dist_ext.training.epoch_data import EpochData
from keras_dist_ext.training.execution import RunKind
from keras_dist_ext.training.execution_sizer import ExecutionSizer, looks_at_batches
from keras_dist_ext.training.resume.tests_before import Validation
from keras_dist_ext.training.run_callback import Callbacks, callbacks_of_all_workers
from keras_dist_ext.training.runtime import ReplicaRuntime
from keras_dist_ext.training.stop_signal import shown_to
from keras_dist_ext.training.worker_sync import WorkerSync, callbacks_of_worker

__all__ = ["Sizers", "evaluating", "execution_sizers", "fitting", "predicting"]

Sizers: TypeAlias = Callable[..., Mapping[Kind, ExecutionSizer]]
"""Takes what ``execution_sizers`` does, but for the model."""


def execution_sizers(
    model: keras.Model, callbacks: Callbacks, workers: Workers | None, *kinds: Kind
) -> dict[Kind, ExecutionSizer]:
    """Return how many steps an execution makes: each by itself where a callback of any worker looks at it."""
    if not model.replica_runtime.chooses_num_steps:
        return {kind: ExecutionSizer(model.steps_per_execution) for kind in kinds}
    looks = [float(looks_at_batches(callbacks, kind)) for kind in kinds]
    if workers is not None:
        looks = list(workers.sum(looks))
    return {kind: ExecutionSizer(1 if look else None) for kind, look in zip(kinds, looks, strict=True)}


@contextlib.contextmanager
def fitting(
    model: keras.Model, sizers_of: Sizers, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[inspect.BoundArguments]:
    """Prepare a run of ``fit``, and clean up after it, however it ended.

    Args:
        model: that runs.
        sizers_of: says how many steps executions make.
        args: what ``fit`` was given.
        kwargs: likewise.

    Yields:
        What Keras' ``fit`` is to be given.
    """
    call = _FIT.bind(model, *args, **kwargs)
    callbacks = call.arguments.get("callbacks")
    workers = workers_of(model.distribute_strategy)
    runtime = model.replica_runtime
    verbose = call.arguments.get("verbose", "auto")
    if workers is not None:
        fingerprint = run_fingerprint(model, _with_defaults(call).arguments, callbacks_of_all_workers(callbacks))
        workers.check_consistency("call fit", fingerprint)
    take_into_scope(model, model.distribute_strategy)
    with _running(workers), runtime.prepared(callbacks):
        sizers = sizers_of(callbacks, workers, "train", "test")
        if workers is not None:
            callbacks = [*callbacks_of_worker(callbacks, workers), WorkerSync(workers, runtime.find_divergence)]
            verbose = verbose if workers.is_chief else 0
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            epochs = call.arguments.get("epochs", 1)
            callbacks = RunCallbackList(callbacks, model, verbose=verbose, epochs=epochs, add_history=True)
            callbacks.validation = Validation(
                call.arguments.get("validation_data"), call.arguments.get("validation_steps")
            )
        call.arguments["callbacks"] = callbacks
        try:
            with _epoch_data(runtime, sizers, callbacks):
                yield call
        finally:
            model.replica_seeds.end()


@contextlib.contextmanager
def evaluating(
    model: keras.Model, sizers_of: Sizers, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[inspect.BoundArguments]:
    """Prepare a run of ``evaluate``, which may be within one of ``fit``; see ``fitting``."""
    call = _EVALUATE.bind(model, *args, **kwargs)
    given = callbacks = call.arguments.get("callbacks")
    workers = None
    with contextlib.ExitStack() as stack:
        if not isinstance(callbacks, keras.callbacks.CallbackList):  # inside fit it is one, and fit has checked
            take_into_scope(model, model.distribute_strategy)
            stack.enter_context(model.replica_runtime.prepared(callbacks))
            workers = workers_of(model.distribute_strategy)
            stack.enter_context(_running(workers))
            verbose = call.arguments.get("verbose", "auto") if workers is None or workers.is_chief else 0
            callbacks = RunCallbackList(callbacks, model, verbose=verbose, epochs=1, add_history=False)
            call.arguments["callbacks"] = callbacks
        sizers = sizers_of(given, workers, "test")
        stack.enter_context(_epoch_data(model.replica_runtime, sizers, callbacks))
        yield call


@contextlib.contextmanager
def predicting(
    model: keras.Model, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[inspect.BoundArguments]:
    """Prepare a run of ``predict``; see ``fitting``."""
    take_into_scope(model, model.distribute_strategy)
    call = _PREDICT.bind(model, *args, **kwargs)
    workers = workers_of(model.distribute_strategy)
    runtime = model.replica_runtime
    with _running(workers), runtime.prepared(call.arguments.get("callbacks")):
        model.replica_seeds.begin()
        runtime.check_layers("predict")
        if workers is not None:
            if not workers.is_chief:
                call.arguments["verbose"] = 0
            if not isinstance(call.arguments.get("callbacks"), keras.callbacks.CallbackList):
                call.arguments["callbacks"] = shown_to(call.arguments.get("callbacks"), runtime.stops["predict"])
        ahead = 64 if isinstance(model.distribute_strategy, tf.distribute.ParameterServerStrategy) else 1
        sizers: Mapping[RunKind, ExecutionSizer] = {"predict": ExecutionSizer(max(ahead, model.steps_per_execution))}
        with _epoch_data(runtime, sizers, None):
            yield call


def _running(workers: Workers | None) -> contextlib.AbstractContextManager[None]:
    """Have the other workers know of an error."""
    return contextlib.nullcontext() if workers is None else workers.watch.running()


@contextlib.contextmanager
def _epoch_data(
    runtime: ReplicaRuntime,
    sizers: Mapping[Kind, ExecutionSizer] | Mapping[RunKind, ExecutionSizer],
    callbacks: Callbacks,
) -> Iterator[None]:
    """Have Keras' loops read the data of a run as ``EpochData``.

    Args:
        runtime: of the model that runs.
        sizers: by the kind of the run, then by that of what Keras' loops read beside, for all that they read.
        callbacks: of the run.
    """
    kinds = iter([*sizers, *[list(sizers)[-1]] * 8])
    made: list[EpochData] = []

    def make(
        distribute_strategy: tf.distribute.Strategy | None = None,
        steps_per_execution: int = 1,
        **arguments: object,
    ) -> EpochData:
        kind = next(kinds)
        _check_given(kind, [arguments.get(name) for name in ("x", "y", "sample_weight")])
        beside = callbacks.evaluation_passes if isinstance(callbacks, RunCallbackList) and kind == "train" else None
        new = EpochData(runtime, kind, sizers[kind], beside, **arguments)
        if isinstance(callbacks, RunCallbackList):
            callbacks.add_data(new)
        made.append(new)
        return new

    try:
        with use_epoch_iterator(make), preserve_py_dataset_order():
            yield
    finally:
        for each in made:
            each.passes.close()


def _check_given(kind: RunKind, given: Sequence[object]) -> None:
    """See that there is something to read, of which Keras' adapters would say what they failed at inside.

    Args:
        kind: what the data is for.
        given: x, y and weights.
    """
    x, *_ = given
    if x is None or (isinstance(x, (dict, list, tuple)) and not x):
        held = "None" if x is None else f"an empty {type(x).__name__}"
        method = {"train": "fit", "test": "evaluate", "predict": "predict"}[kind]
        raise DataError(
            f"{method} was given {held} as x: there is no data. Give arrays, a tf.data.Dataset or the like."
        )
    for part in given:
        if hasattr(part, "shape") or isinstance(part, (dict, list, tuple)):
            check_no_scalar(part)


def _with_defaults(call: inspect.BoundArguments) -> inspect.BoundArguments:
    whole = inspect.BoundArguments(call.signature, call.arguments.copy())
    whole.apply_defaults()
    return whole


_FIT = inspect.signature(keras.Model.fit)
_PREDICT = inspect.signature(keras.Model.predict)
_EVALUATE = inspect.signature(keras.Model.evaluate)
