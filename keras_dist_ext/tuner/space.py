"""Order the hyperparameters of a search, and check that a project was started with the same strategies."""

from __future__ import annotations

from collections.abc import Sequence

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.errors import TunerError
from keras_dist_ext.tuner.screening import ScreeningResult
from keras_dist_ext.tuner.strategies import HYPERPARAMETER

__all__ = ["check_project_strategies", "strategy_last"]


def strategy_last(
    space: list[keras_tuner.engine.hyperparameters.HyperParameter],
) -> list[keras_tuner.engine.hyperparameters.HyperParameter]:
    """Put the strategy behind what does not depend on it: GridSearch varies the last hyperparameter fastest."""
    depends = any(getattr(c, "name", None) == HYPERPARAMETER for hp in space for c in hp.conditions)
    return space if depends else sorted(space, key=lambda hp: hp.name == HYPERPARAMETER)


def check_project_strategies(
    space: keras_tuner.HyperParameters, names: Sequence[str], project_dir: str, *, is_reloaded: bool
) -> None:
    """Refuse a project that was started without strategies, or with others.

    Args:
        space: the hyperparameters that the project searches.
        names: the strategies that this search was given.
        project_dir: where the project is, with the result of its screening, if there was one.
        is_reloaded: whether it was started by another search, which may not have had all of the strategies.

    Raises:
        TunerError: says which strategies differ.
    """
    known = [hp for hp in space.space if hp.name == HYPERPARAMETER]
    if not known:
        raise TunerError(
            f"The project in {project_dir} was started without strategies, so its trials would not say which strategy "
            "they ran under. Give another project_name, or overwrite=True."
        )
    searched = getattr(known[0], "values", None) or [known[0].value]
    if unknown := [name for name in searched if name not in names]:
        raise TunerError(
            f"The project in {project_dir} was started with the strategies {', '.join(searched)}, and strategies "
            f"does not have {', '.join(unknown)}. Give the same, another project_name, or overwrite=True."
        )
    result = ScreeningResult.load(project_dir)
    dropped = set(result.dropped) if result else set()
    late = [name for name in names if name not in {*searched, *dropped}]
    if is_reloaded and late:
        raise TunerError(
            f"The project in {project_dir} was started with the strategies {', '.join(searched)}, so no trial "
            f"would get {', '.join(late)}. Give the same, another project_name, or overwrite=True."
        )
