"""Run a user's script with the doctor attached to its calls of fit, for some steps, and end it there."""

from __future__ import annotations

import gc
import inspect
import os
import pathlib
import runpy
import sys
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.models import intercept_fit
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext.aliases import UserFunction
from keras_dist_ext.data.sources import as_dataset
from keras_dist_ext.diagnosis.doctor.doctor import ParallelismDoctor
from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.report import Report
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.diagnosis.doctor.setting import read_setting
from keras_dist_ext.errors import MonitorError, ScopeError
from keras_dist_ext.training.model import Model

__all__ = ["examine_script"]


def examine_script(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    num_steps: int = 200,
    interventions: bool = False,
    json: str | os.PathLike[str] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> Report:
    """Run a script until calls of ``fit`` have made some steps, and report on the call with the most.

    A call that ends before, such as a warm-up, does not end the script: the next one is looked at too, until one call
    or several together have made so many steps. What comes then is not run. The script runs in this process, as
    ``__main__``. What it does up to there it does: its own callbacks write what they write.

    Args:
        script: a path.
        arguments: for it.
        num_steps: of the training, about.
        interventions: see ``ParallelismDoctor``.
        json: a file for the report.
        log_dir: where TensorBoard looks.
        show: whether to print the report.

    Returns:
        What was found.

    Raises:
        MonitorError: there is no such script, or it has called no ``fit``.
        BaseException: whatever the script ends with, but for an exit that is well; what was found before is told.
    """
    path = pathlib.Path(script)
    if not path.is_file():
        raise MonitorError(f"There is no script {path}. Give the path of what you run by `python`.")

    doctors: list[ParallelismDoctor] = []

    def attend(
        fit: UserFunction, model: keras.Model, *args: object, **kwargs: object
    ) -> keras.callbacks.History | None:
        strategy = _strategy_meant(model)
        doctor = ParallelismDoctor(
            log_dir, interventions=interventions, json=json, show=show, strategy=strategy, num_steps=num_steps
        )
        doctor.report_on_end = False
        doctors.append(doctor)
        call = inspect.signature(fit).bind(model, *args, **kwargs)
        given = call.arguments.get("callbacks")
        given = tree.flatten(getattr(given, "callbacks", given)) if given else []  # of a CallbackList, what is in it
        call.arguments["callbacks"] = [*given, doctor]
        data = call.arguments.get("x")
        if isinstance(data, (tf.data.Dataset, keras.utils.PyDataset)):
            doctor.stock_data = as_dataset(data)
        try:
            history = fit(*call.args, **call.kwargs)
        except ScopeError:  # which is the finding
            doctor.report = judge(Examination(read_setting(model, strategy=strategy)))
            doctors[:-1] = []
            raise _Enough from None
        if doctor.has_seen_enough or sum(each.num_made for each in doctors) >= num_steps:
            raise _Enough
        return history

    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.parent.resolve())
    try:
        with intercept_fit(attend, [keras.Model, Model]):
            runpy.run_path(str(path), run_name="__main__")
    except _Enough:
        pass
    except SystemExit as ended:
        if ended.code:  # as after a wrong command line, of which the script has told
            _report_best(doctors, show=show)
            raise
    except BaseException:
        _report_best(doctors, show=show)
        raise
    finally:
        sys.argv, sys.path[0] = argv, first
    report = _report_best(doctors, show=show)
    if report is None:
        raise MonitorError(
            f"{path} has ended without training by `fit`, so there was nothing to look at. In a loop of your own, call "
            "`kde.diagnose(model, dataset)` before it."
        )
    return report


class _Enough(BaseException):
    """Ends a script; no `except Exception` of its own is to stop that."""


def _report_best(doctors: Sequence[ParallelismDoctor], *, show: bool) -> Report | None:
    """Write, and return, the report on the call with the most steps, if any."""
    able = [doctor for doctor in doctors if doctor.report is not None]
    if not able:
        return None
    best = max(able, key=lambda doctor: doctor.num_observed)
    if show and len(doctors) > 1:
        number = doctors.index(best) + 1
        sys.stdout.write(f"Of {len(doctors)} calls of fit, this is about number {number}, with the most steps:\n")
    best.write_report()
    return best.report


def _strategy_meant(model: keras.Model) -> tf.distribute.Strategy | None:
    """Return the strategy that the script has made, where its model does not live under any."""
    if not is_default_strategy(model.distribute_strategy):
        return None
    made = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), tf.distribute.Strategy) and not is_default_strategy(thing)
    ]
    several = [strategy for strategy in made if strategy.num_replicas_in_sync > 1]
    return several[-1] if several else None
