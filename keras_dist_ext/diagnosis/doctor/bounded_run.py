"""Train a model for some steps to examine it, and restore it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras, tree
from keras_dist_ext.aliases import FitData, Logs, TensorNest
from keras_dist_ext.data.pipeline import mixing_of
from keras_dist_ext.diagnosis.doctor.doctor import ParallelismDoctor
from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.report import Report
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.diagnosis.doctor.setting import read_setting
from keras_dist_ext.errors import KerasDistError, MonitorError
from keras_dist_ext.strategy.given import checked_strategy
from keras_dist_ext.training.adoption.adopt import adopt, clone_model
from keras_dist_ext.training.run_callback import RunCallback
from keras_dist_ext.training.runtime import runtime_of
from keras_dist_ext.training.snapshot import kept_pass, kept_state

__all__ = ["diagnose"]


def diagnose(
    model: keras.Model,
    data: FitData = None,
    y: object = None,
    *,
    num_steps: int = 60,
    interventions: bool = True,
    strategy: tf.distribute.Strategy | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    **fit_arguments: object,
) -> Report:
    """Train a model for some steps, find out why it is not faster, and leave it bit for bit as it was.

        report = kde.diagnose(model, train)
        print(report)
        assert not report.findings

    A model of stock Keras is not trained: nobody can see into its steps. Its setting is judged, and where
    ``kde.adopt`` can rebuild it, or ``kde.clone_model`` where it is not built, the steps of the rebuilt model.

    What is drawn from generators is gone from them, a shuffle that has no seed of the run's goes on to its next order,
    and ``tf.random`` ops go on where the last step stopped.

    Args:
        model: a compiled model.
        data: what `fit` takes: a dataset, arrays, a generator, a PyDataset; None judges the setting alone.
        y: targets, where ``data`` are arrays.
        num_steps: how many steps to watch, at least.
        interventions: whether to make experiments too: see ``ParallelismDoctor``.
        strategy: the strategy that the model is meant to live under; None is its own.
        callbacks: those of the run, to be looked at too.
        fit_arguments: others of `fit`, such as ``batch_size``.

    Returns:
        What was found.

    Raises:
        MonitorError: the model is not compiled, an argument is invalid, or there is nothing to measure.
        DataError: the dataset has no batch.
    """
    if not isinstance(model, keras.Model):
        arguments.refuse("model", model, "a compiled Keras model", MonitorError)
    num_steps = arguments.integer("num_steps", num_steps, least=1, error=MonitorError)
    interventions = arguments.flag("interventions", interventions, error=MonitorError)
    checked_strategy(strategy)
    if isinstance(data, list | tuple | dict) and not tree.flatten(data):
        arguments.refuse("data", data, "what `fit` takes, or None", MonitorError)
    if y is not None and not all(hasattr(leaf, "shape") for leaf in tree.flatten(y) or [None]):
        arguments.refuse("y", y, "arrays, or None", MonitorError)
    callbacks = arguments.instances(
        "callbacks", callbacks, keras.callbacks.Callback, wanted="callbacks", error=MonitorError
    )
    if not getattr(model, "compiled", False):
        raise MonitorError(f"The model '{model.name}' is not compiled, so no step can be made. Compile it.")
    if data is None:
        return judge(Examination(read_setting(model, strategy=strategy)))
    if runtime_of(model) is None:
        return _examined_copy(model, data, y, num_steps, interventions, strategy, callbacks, fit_arguments)
    doctor = ParallelismDoctor(interventions=interventions, show=False, strategy=strategy, num_steps=num_steps)
    doctor.judges_epochs = False  # passes are its epochs here
    doctor.raise_on_error = True
    keeper = _Keeper(model)
    is_once = hasattr(data, "__next__")
    options = {"epochs": 1 if is_once else _MANY_EPOCHS, "verbose": 0, **fit_arguments}
    try:
        with kept_pass(data):
            model.fit(data, y, callbacks=[keeper, *callbacks, doctor], **options)
    finally:
        keeper.restore()
    if doctor.report is None:
        raise MonitorError(f"'{model.name}' made no step, so there is nothing to judge.")
    return doctor.report


_MANY_EPOCHS = 10_000  # the doctor stops the run


class _Keeper(RunCallback):
    """Keeps a model's state from before a run, or from when the run has built it."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._has_kept = bool(model.built and (model.optimizer is None or model.optimizer.built))
        if self._has_kept:
            self._stack.enter_context(kept_state(model))

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Keep the state of a model that was built just now."""
        if not self._has_kept:
            self._has_kept = True
            self._stack.enter_context(kept_state(self.model))

    def restore(self) -> None:
        """Undo what was done since."""
        self._stack.close()


def _examined_copy(
    model: keras.Model,
    data: FitData,
    y: TensorNest,
    num_steps: int,
    interventions: bool,
    strategy: tf.distribute.Strategy | None,
    callbacks: Sequence[keras.callbacks.Callback],
    fit_arguments: dict[str, object],
) -> Report:
    """Examine a model of stock Keras: its own setting, and the steps of a copy that is one of ours.

    A model that is not built has no weights, so the copy's are new ones, which take as long.
    """
    setting = read_setting(model, strategy=strategy)
    has_weights = model.built or model.variables
    try:
        copy = (adopt if has_weights else clone_model)(model, strategy or model.distribute_strategy)
    except KerasDistError as error:
        return judge(Examination(setting, mixing=mixing_of(data), not_copied=str(error)))
    report = diagnose(
        copy,
        data,
        y,
        num_steps=num_steps,
        interventions=interventions,
        strategy=None,
        callbacks=callbacks,
        **fit_arguments,
    )
    mixed = dataclasses.replace(  # what was measured goes with the devices of the copy
        report.examination.setting,
        model=setting.model,
        is_ours=False,
        outside=setting.outside,
        num_replicas_meant=setting.num_replicas_meant,
    )
    return judge(dataclasses.replace(report.examination, setting=mixed))
