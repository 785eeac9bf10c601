"""Look into a model, and build and fit it step by step as ``fit`` does."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional as KerasFunctional
from keras.src.models.model import functional_init_arguments

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.adapters import CustomEpochIterator
from keras_dist_ext.aliases import (
    Array,
    BatchIterator,
    CompileArgument,
    Original,
    SavePath,
    StepData,
    TensorNest,
    UserFunction,
)

__all__ = [
    "KerasFunctional",
    "functional_init_arguments",
    "HookedModel",
    "overrides",
    "tracks_loss",
    "user_metrics",
    "compile_arguments",
    "input_like",
    "metric_results",
    "compute_loss",
    "update_loss_tracker",
    "initial_epoch",
    "set_initial_epoch",
    "build_from_batch",
    "build_as_fit",
    "begin_fit",
    "intercept_fit",
]

T = TypeVar("T")
_thread = threading.local()


class HookedModel(keras.Model):  # type: ignore[misc]
    """A ``keras.Model`` that asks its subclass what Keras decides in private methods.

    keras/src/backend/tensorflow/trainer.py calls ``_maybe_symbolic_build`` before the first step of a run,
    backend/tensorflow/layer.py, trackable.py and saving/keras_saveable.py have the others.
    """

    def _build_for_run(self, iterator: BatchIterator, batch: TensorNest) -> None:
        """Build the model, its metrics and its optimizer for an epoch iterator, or for a batch where that is None."""
        super()._maybe_symbolic_build(iterator, batch)

    def _checkpoint_children(self) -> dict[str, object]:
        """What ``tf.train.Checkpoint`` is to save besides what TensorFlow tracks, by name."""
        return {}

    def _save_whole(self, save: Callable[[SavePath], T], path: SavePath, *, makes_parents: bool, arguments: str) -> T:
        """Save to a path, as Keras does by ``save(path)``.

        Args:
            save: writes all files next to the path that it is given, or below it.
            path: anything that Keras takes: a path, a URL, an open file.
            makes_parents: whether Keras makes the folders above it.
            arguments: how it is saved, in words.
        """
        return save(path)

    @classmethod
    def _load_pickled(cls, file: SavePath, load: Callable[[SavePath], keras.Model]) -> keras.Model:
        """Return the model of a file that Keras has pickled, which it itself would ``load`` so."""
        return load(file)

    def _maybe_symbolic_build(self, iterator: BatchIterator = None, data_batch: TensorNest = None) -> None:
        if isinstance(iterator, CustomEpochIterator):
            iterator.is_built_for = True
        self._build_for_run(iterator, data_batch)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: object) -> dict[str, object]:
        children = super()._trackable_children(save_type, **kwargs)
        return {**children, **self._checkpoint_children()} if save_type == "checkpoint" else children

    @classmethod
    def _unpickle_model(cls, file: SavePath) -> keras.Model:
        return cls._load_pickled(file, super()._unpickle_model)


def overrides(model: keras.Model, name: str) -> bool:
    """Whether a user's class replaces the method ``name`` of Keras' trainer."""
    return getattr(getattr(type(model), name), "__module__", "").split(".")[0] not in ("keras", "keras_dist_ext")


def tracks_loss(model: keras.Model, metric: keras.Metric) -> bool:
    """Whether a metric is one to which Keras itself gives losses (trainers/trainer.py, trainers/compile_utils.py)."""
    of_compile = getattr(model, "_compile_loss", None)
    given = [getattr(model, "_loss_tracker", None), *(of_compile.metrics if of_compile is not None else ())]
    return any(metric is one for one in given)


def user_metrics(model: keras.Model) -> list[keras.Metric]:
    """The metric objects given to `compile`, also before the first step (keras/src/trainers/trainer.py, `compile`)."""
    given = getattr(getattr(model, "_compile_config", None), "config", {})
    metrics = keras.tree.flatten([given.get("metrics"), given.get("weighted_metrics")])
    return [metric for metric in metrics if isinstance(metric, keras.Metric)]


def compile_arguments(model: keras.Model) -> dict[str, CompileArgument]:
    """What was given to `compile`, as the objects themselves (keras/src/trainers/trainer.py, `compile`)."""
    given = dict(model._compile_config.config)
    # Ours knows that "auto" was asked for; Keras' default is 1.
    runtime = model.replica_runtime if isinstance(model, HookedModel) else None
    automatic = model.steps_per_execution == 1 if runtime is None else runtime.chooses_num_steps
    if runtime is not None and runtime.chooses_xla:
        given["jit_compile"] = "auto"  # not what Keras has made of it: with a GPU it is True without a strategy
    return {**given, "steps_per_execution": "auto" if automatic else model.steps_per_execution}


def input_like(tensor: keras.KerasTensor) -> keras.KerasTensor:
    """A new `keras.Input` like the one that a symbolic tensor came from (keras/src/backend/common/keras_tensor.py)."""
    layer = tensor._keras_history.operation
    return keras.Input(
        batch_shape=tensor.shape,
        dtype=tensor.dtype,
        sparse=tensor.sparse,
        name=layer.name,
        optional=getattr(layer, "optional", False),
    )


def metric_results(model: keras.Model, logs: TensorNest) -> dict[str, Array]:
    """What ``fit`` logs at the end of an epoch, of the logs of its last step (keras/src/trainers/trainer.py).

    In the order in which the model has its metrics: Keras numbers the names of those that were given none.
    """

    def leaves(results: TensorNest, path: str) -> Iterator[tuple[str, Array]]:
        if isinstance(results, dict):
            for name, value in results.items():
                yield from leaves(value, f"{path}/{name}" if path else str(name))
        else:
            yield path, np.asarray(results)

    results = model._get_metrics_result_or_logs(logs)
    return dict(leaves(results, "")) if isinstance(results, dict) else {}


def compute_loss(
    model: keras.Model, *, x: TensorNest, y: TensorNest, y_pred: TensorNest, sample_weight: TensorNest, training: bool
) -> tf.Tensor:
    """The loss of a step, as Keras' own steps compute it (keras/src/trainers/trainer.py, ``_compute_loss``).

    It leaves out ``training`` where ``compute_loss`` is a user's own that does not take it.
    """
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def update_loss_tracker(model: keras.Model, loss: tf.Tensor, num_examples: tf.Tensor) -> None:
    """Log the loss of a step, as Keras' own steps do (keras/src/backend/tensorflow/trainer.py)."""
    model._loss_tracker.update_state(loss, sample_weight=num_examples)


def initial_epoch(model: keras.Model) -> int | None:
    """The epoch that a callback has told ``fit`` to begin with (keras/src/trainers/trainer.py, `_initial_epoch`)."""
    return model._initial_epoch  # type: ignore[no-any-return]


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Have ``fit`` begin with an epoch, as BackupAndRestore does (backend/tensorflow/trainer.py); None for its own."""
    model._initial_epoch = epoch


def build_from_batch(model: keras.Model, batch: TensorNest) -> None:
    """Build a model, its metrics and its optimizer as ``fit`` does (trainer.py, ``_symbolic_build``)."""
    model._symbolic_build(data_batch=batch)


def build_as_fit(model: HookedModel, batch: TensorNest) -> None:
    """Have a model of ours build itself for a batch, as for a run (backend/tensorflow/trainer.py)."""
    model._maybe_symbolic_build(data_batch=batch)


def begin_fit(model: keras.Model, split_batch: StepData) -> None:
    """Do what ``fit`` of stock Keras does before its first step (backend/tensorflow/trainer.py)."""
    model._maybe_symbolic_build(iterator=[(0, 1, iter([split_batch]))])


@contextlib.contextmanager
def intercept_fit(hook: UserFunction, classes: Sequence[type]) -> Iterator[None]:
    """Send calls of ``fit`` of these classes to ``hook(original, model, *args, **kwargs)``; nested ones pass by.

    For a script that is run to be looked at. `fit` is public, but made in keras/src/backend/tensorflow/trainer.py and
    inherited by ``keras.Model``.
    """
    before = {cls: vars(cls).get("fit") for cls in classes}

    def wrapped(original: Original) -> Original:
        @functools.wraps(original)
        def fit(model: keras.Model, *args: object, **kwargs: object) -> object:
            if getattr(_thread, "fits", False):
                return original(model, *args, **kwargs)
            _thread.fits = True
            try:
                return hook(original, model, *args, **kwargs)
            finally:
                _thread.fits = False

        return fit

    for cls in classes:
        cls.fit = wrapped(cls.fit)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for cls, own in before.items():
            if own is None:
                del cls.fit  # type: ignore[attr-defined]
            else:
                cls.fit = own  # type: ignore[attr-defined]
