"""Screen the strategies of a search, once in its project, by one process, before trials begin."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext._keras.keras_tuner_oracles import replace_space
from keras_dist_ext.errors import TunerError
from keras_dist_ext.messages import counted
from keras_dist_ext.tuner.benchmark_log import BenchmarkLog
from keras_dist_ext.tuner.global_state import restored_global_state
from keras_dist_ext.tuner.processes.process_role import ProcessRole
from keras_dist_ext.tuner.processes.screening_lease import screen_on_one_worker
from keras_dist_ext.tuner.screening import Screening, ScreeningResult, StrategyBenchmark, screen_strategies
from keras_dist_ext.tuner.strategies import HYPERPARAMETER

__all__ = ["check_screening", "default_of_strategy", "screen_once"]


def check_screening(oracle: keras_tuner.Oracle, project_dir: str | os.PathLike[str], role: ProcessRole) -> None:
    """Refuse a screening that comes too late, or where several processes run each trial.

    Args:
        oracle: of the search.
        project_dir: where its project is.
        role: of this process in it.

    Raises:
        TunerError: see above.
    """
    if role.num_workers > 1:
        raise TunerError(
            f"screening measures strategies in one process, and {role.num_workers} processes run each trial "
            "of this search together. Leave it out."
        )
    if role.has_oracle and oracle.trials and ScreeningResult.load(project_dir) is None:
        raise TunerError(
            f"screening drops strategies before the first trial, and the project in {project_dir} already has "
            f"{counted(len(oracle.trials), 'trial')}. Leave it out, or give another project_name."
        )


def screen_once(
    screening: Screening,
    names: Sequence[str],
    benchmark: Callable[[str], StrategyBenchmark],
    oracle: keras_tuner.Oracle,
    project_dir: str | os.PathLike[str],
    role: ProcessRole,
) -> None:
    """Measure strategies, unless the project has the result, and leave those that remain in the oracle's space.

    Args:
        screening: how.
        names: of the strategies.
        benchmark: returns what trains under one of them.
        oracle: see ``check_screening``.
        project_dir: ...
        role: ...
    """

    def measure() -> ScreeningResult:
        with restored_global_state():
            return screen_strategies(screening, names, benchmark, BenchmarkLog(project_dir))

    if not role.is_single:
        screen_on_one_worker(oracle, measure)
    elif ScreeningResult.load(project_dir) is None:
        result = measure()
        result.save(project_dir)
        replace_space(oracle, result.narrowed)


def default_of_strategy(oracle: keras_tuner.Oracle, name: str) -> keras_tuner.HyperParameters:
    """Return the default hyperparameters of a search under a strategy."""
    hp = oracle.get_space()
    given = [hp.values.get(one.name, one.default) if hp.is_active(one) else one.default for one in hp.space]
    hp.values = {HYPERPARAMETER: name}
    for one, value in zip(hp.space, given, strict=True):
        if hp.is_active(one):  # of several of one name, that of the strategy; keras-tuner would draw its value
            hp.values.setdefault(one.name, value)
    return hp
