"""Run a user's script with the doctor attached to its call of fit, for some steps, and end it there."""

from __future__ import annotations

import gc
import inspect
import os
import pathlib
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist_ext import _keras
from keras_dist_ext._keras import keras, tree
from keras_dist_ext.diagnose import judge
from keras_dist_ext.diagnosis.examination import Examination
from keras_dist_ext.diagnosis.report import Report
from keras_dist_ext.diagnosis.setting import read_setting
from keras_dist_ext.doctor import ParallelismDoctor
from keras_dist_ext.errors import MonitorError, ScopeError
from keras_dist_ext.model import Model

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
    """Run a script until its first call of ``fit`` has made some steps; what comes after that call is not run.

    The script runs in this process, as ``__main__``. What it does before, and in ``fit``, it does: its own callbacks
    write what they write.

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
    """
    path = pathlib.Path(script)
    if not path.is_file():
        raise MonitorError(f"There is no script {path}. Give the path of what you run by `python`.")

    def attend(fit: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
        strategy = _strategy_meant(model)
        doctor = ParallelismDoctor(
            log_dir, interventions=interventions, json=json, show=show, strategy=strategy, num_steps=num_steps
        )
        call = inspect.signature(fit).bind(model, *args, **kwargs)
        given = call.arguments.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(doctor)
        else:
            call.arguments["callbacks"] = [*(tree.flatten(given) if given else []), doctor]
        try:
            fit(*call.args, **call.kwargs)
        except ScopeError:  # which is the finding
            doctor.report = judge(Examination(read_setting(model, strategy=strategy)))
            if show:
                doctor.report.show()
        raise _Enough(doctor.report)

    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.parent.resolve())
    try:
        with _keras.fits_through(attend, [keras.Model, Model]):
            runpy.run_path(str(path), run_name="__main__")
    except _Enough as enough:
        if enough.report is not None:
            return enough.report
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code:
            raise  # as after a wrong command line, of which the script has told
        if ended.code:
            sys.stderr.write(f"{ended.code}\n")
    finally:
        sys.argv, sys.path[0] = argv, first
    raise MonitorError(
        f"{path} has ended without training by `fit`, so there was nothing to look at. In a loop of your own, call "
        "`kde.diagnose(model, dataset)` before it."
    )


class _Enough(BaseException):
    """Ends a script; no `except Exception` of its own is to stop that."""

    def __init__(self, report: Report | None) -> None:
        super().__init__()
        self.report = report


def _strategy_meant(model: Any) -> tf.distribute.Strategy | None:
    """Return the strategy that the script has made, where its model does not live under any."""
    if not _keras.is_default_strategy(model.distribute_strategy):
        return None
    made = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), tf.distribute.Strategy) and not _keras.is_default_strategy(thing)
    ]
    several = [strategy for strategy in made if strategy.num_replicas_in_sync > 1]
    return several[-1] if several else None
