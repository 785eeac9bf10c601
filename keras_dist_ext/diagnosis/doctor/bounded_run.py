"""Train a model for some steps to examine it, and put it back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.diagnosis.doctor.doctor import ParallelismDoctor
from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.report import Report
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.diagnosis.doctor.setting import read_setting
from keras_dist_ext.errors import KerasDistError, MonitorError
from keras_dist_ext.training.adoption.adopt import adopt
from keras_dist_ext.training.snapshot import kept_pass, kept_state

__all__ = ["examine"]


def examine(
    model: Any,
    data: Any,
    y: Any,
    *,
    num_steps: int,
    interventions: bool,
    strategy: tf.distribute.Strategy | None,
    callbacks: Sequence[Any],
    **fit_arguments: Any,
) -> Report:
    """Train for some steps, judge, and put the model back; see ``kde.diagnose``."""
    if not getattr(model, "compiled", False):
        raise MonitorError(f"'{getattr(model, 'name', model)}' is not compiled, so no step can be made. Compile it.")
    if data is None:
        return judge(Examination(read_setting(model, strategy=strategy)))
    if not hasattr(model, "replica_recorders"):
        return _examined_copy(model, data, y, num_steps, interventions, strategy, callbacks, fit_arguments)
    doctor = ParallelismDoctor(interventions=interventions, show=False, strategy=strategy, num_steps=num_steps)
    doctor.is_asked = True
    keeper = _Keeper(model)
    is_once = hasattr(data, "__next__")
    arguments = {"epochs": 1 if is_once else _MANY_EPOCHS, "verbose": 0, **fit_arguments}
    try:
        with kept_pass(data):
            model.fit(data, y, callbacks=[keeper, *callbacks, doctor], **arguments)
    finally:
        keeper.put_back()
    if doctor.report is None:
        raise MonitorError(f"'{model.name}' made no step, so there is nothing to judge.")
    return doctor.report


_MANY_EPOCHS = 10_000  # the doctor stops the run


class _Keeper(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps a model's state from before a run, or from when the run has built it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._has_kept = bool(model.built and (model.optimizer is None or model.optimizer.built))
        if self._has_kept:
            self._stack.enter_context(kept_state(model))

    def on_train_begin(self, logs: Any = None) -> None:
        """Keep the state of a model that was built just now."""
        if not self._has_kept:
            self._has_kept = True
            self._stack.enter_context(kept_state(self.model))

    def put_back(self) -> None:
        """Undo what was done since."""
        self._stack.close()


def _examined_copy(
    model: Any,
    data: Any,
    y: Any,
    num_steps: int,
    interventions: bool,
    strategy: tf.distribute.Strategy | None,
    callbacks: Sequence[Any],
    fit_arguments: dict[str, Any],
) -> Report:
    """Examine a model of stock Keras: its own setting, and the steps of a copy that is one of ours."""
    setting = read_setting(model, strategy=strategy)
    try:
        copy = adopt(model, strategy or model.distribute_strategy)
    except KerasDistError:
        return judge(Examination(setting))
    report = examine(
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
