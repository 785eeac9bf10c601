"""Import keras-tuner, and reach what keras-tuner 1.4.8 keeps to itself of trials: results, callbacks.

`tests/tuner/test_tuner.py` and `tests/tuner/test_tuner_chief.py` fail when one of these changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from keras_dist_ext import versions
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.strategies import has_several_workers
from keras_dist_ext.aliases import UserFunction
from keras_dist_ext.errors import BackendError, TunerError

try:
    import keras_tuner
    from keras_tuner.src.engine import oracle as oracle_module
    from keras_tuner.src.engine import tuner_utils
    from keras_tuner.src.tuners import gridsearch
except ImportError as error:
    raise BackendError(
        f"kde.tuner searches with keras-tuner, which cannot be imported here ({error}). "
        "Install it: pip install 'keras_dist_ext[tuner]'."
    ) from error

__all__ = [
    "FatalTunerError",
    "FatalBackendError",
    "gridsearch",
    "keras_tuner",
    "oracle_module",
    "HookedTuner",
    "objectives_of",
    "score_of",
    "callbacks_with_empty_batch_hooks",
    "callbacks_of_worker",
]


class FatalTunerError(TunerError, keras_tuner.errors.FatalError):  # type: ignore[misc]
    """A mistake in how a search was set up; keras-tuner does not take it for a failed trial."""


class FatalBackendError(BackendError, keras_tuner.errors.FatalError):  # type: ignore[misc]
    """What is installed is not what this package needs, whatever trial comes next."""


class HookedTuner(keras_tuner.Tuner):  # type: ignore[misc]
    """A tuner that asks its subclass what keras-tuner decides in private methods (engine/base_tuner.py, tuner.py).

    A newer release may call others instead: a subclass asks `check_space` once it is made, and `check_trial` before
    a trial trains.
    """

    run_trial: UserFunction  # keras-tuner's, or a user's own
    _called: frozenset[str] = frozenset()  # of these methods, by keras-tuner: when it was made, or in this trial
    _is_in_trial = False

    def check_space(self) -> None:
        """See that keras-tuner has asked for the space.

        Raises:
            FatalBackendError: it has not.
        """
        if "reload" not in self._called:
            self._check_called(self._populate_initial_space)

    def check_trial(self) -> None:
        """See that keras-tuner has asked to run the trial, and to build and compile its model.

        Raises:
            FatalBackendError: it has not.
        """
        if not self._is_in_trial:
            return
        self._check_called(self._run_and_update_trial)
        if "run_trial" not in self._called and not any(
            {"run_trial", "_build_and_fit_model"} & vars(cls).keys()
            for cls in type(self).__mro__
            if not cls.__module__.startswith("keras_tuner.")
        ):  # else a user's own code may build models
            self._check_called(self._try_build, self._override_compile_args)

    def _check_called(self, *methods: Callable[..., object]) -> None:
        missing = [method.__name__ for method in methods if method.__name__ not in self._called]
        if missing:
            raise FatalBackendError(
                versions.changed_tuner(
                    f"the tuner no longer calls {', '.join(f'Tuner.{name}' for name in missing)} "
                    "(keras_tuner/src/engine/tuner.py, base_tuner.py), by which keras_dist_ext has the models of a "
                    "search live under strategies. No step was made"
                )
            )

    def reload(self) -> None:
        """Continue from the saved project."""
        self._called |= {"reload"}
        super().reload()

    def on_trial_begin(self, trial: keras_tuner.engine.trial.Trial) -> None:
        """Begin a trial."""
        super().on_trial_begin(trial)
        self._called, self._is_in_trial = frozenset(), True

    def on_trial_end(self, trial: keras_tuner.engine.trial.Trial) -> None:
        """End a trial."""
        self._is_in_trial = False
        super().on_trial_end(trial)

    def _discover_space(self) -> None:
        """Find the hyperparameters to search, by building a model."""
        super()._populate_initial_space()

    def _build_for_trial(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        """Build a model with values after clearing Keras' session; raise FailedTrialError where it is too large."""
        return super()._try_build(hp)

    def _compile_for_trial(self, model: keras.Model) -> None:
        """Compile a model by the arguments that the tuner was given."""
        super()._override_compile_args(model)

    def _build_model(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        """Build and compile a model with values, once."""
        return self._build_hypermodel(hp)

    def _follow_trial(
        self, run_trial: UserFunction, trial: keras_tuner.engine.trial.Trial, *args: object, **kwargs: object
    ) -> object:
        """Run a trial by ``run_trial``, which is keras-tuner's or one of the user's own."""
        return run_trial(trial, *args, **kwargs)

    def _run_and_update_trial(self, trial: keras_tuner.engine.trial.Trial, *args: object, **kwargs: object) -> None:
        own = vars(self).get("run_trial")
        self._called |= {self._run_and_update_trial.__name__} | ({"run_trial"} if own is not None else set())
        self.run_trial = functools.partial(self._follow_trial, self.run_trial)  # what keras-tuner is about to call
        try:
            super()._run_and_update_trial(trial, *args, **kwargs)
        finally:
            del self.run_trial
            if own is not None:
                self.run_trial = own

    def _populate_initial_space(self) -> None:
        self._called |= {self._populate_initial_space.__name__}
        self._discover_space()

    def _try_build(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        self._called |= {self._try_build.__name__}
        return self._build_for_trial(hp)

    def _override_compile_args(self, model: keras.Model) -> None:
        self._called |= {self._override_compile_args.__name__}
        self._compile_for_trial(model)


def objectives_of(objective: keras_tuner.Objective) -> list[keras_tuner.Objective]:
    """Return the single objectives of a search (engine/objective.py, `MultiObjective.objectives`)."""
    return list(getattr(objective, "objectives", [objective]))


def score_of(results: object, objective: keras_tuner.Objective) -> float | None:
    """Return the score that a trial's results come to; None where they have none (engine/tuner_utils.py)."""
    try:
        return float(tuner_utils.convert_to_metrics_dict(results, objective)[objective.name])
    except (KeyError, TypeError):
        return None


def callbacks_with_empty_batch_hooks(
    callbacks: Iterable[keras.callbacks.Callback], tuner: keras_tuner.Tuner
) -> list[keras.callbacks.Callback]:
    """Return the tuner's own callbacks where its hooks for batches do nothing (engine/tuner_utils.py).

    `TunerCallback` has hooks for batches, which call the tuner's; they are empty unless a subclass has its own.
    """
    names = ("on_batch_begin", "on_batch_end")
    if any(getattr(type(tuner), name) is not getattr(keras_tuner.Tuner, name) for name in names):
        return []
    return [c for c in keras.tree.flatten(list(callbacks)) if type(c) is tuner_utils.TunerCallback]


def callbacks_of_worker(
    callbacks: Iterable[keras.callbacks.Callback], model: keras.Model
) -> list[keras.callbacks.Callback]:
    """Return the callbacks for one of those who run a trial together, but for the first (engine/tuner_utils.py).

    `SaveBestEpoch` writes its checkpoint elsewhere on all workers but the first; where they train alike, but not
    together, all would write the same file.
    """
    alone = not has_several_workers(model.distribute_strategy)
    return [callback for callback in callbacks if not (alone and isinstance(callback, tuner_utils.SaveBestEpoch))]
