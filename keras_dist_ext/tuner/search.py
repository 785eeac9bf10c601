"""Search hyperparameters with the strategy among them: keras-tuner's tuners, and what makes them of any other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import callbacks_of_worker, keras_tuner, objectives_of, replace_space
from keras_dist_ext._keras.models import compile_arguments
from keras_dist_ext.errors import StrategyError, TunerError
from keras_dist_ext.messages import counted
from keras_dist_ext.strategy.pick import StrategyChoice
from keras_dist_ext.strategy.scope import describe_strategy
from keras_dist_ext.training.resume.callback import Resume
from keras_dist_ext.tuner.avoidance import avoid_infeasible
from keras_dist_ext.tuner.coupled import Coupled, CoupledValues, couple
from keras_dist_ext.tuner.first_pass import FirstPass, ModelRacer, Outcome, RaceDiary, race
from keras_dist_ext.tuner.leftovers import cleared, keras_settings
from keras_dist_ext.tuner.processes.measuring import measured_by_one
from keras_dist_ext.tuner.processes.part import connect, go_on_alone, search_in_part
from keras_dist_ext.tuner.processes.place import place_of
from keras_dist_ext.tuner.records import ProjectRecords
from keras_dist_ext.tuner.scoped import ScopedHyperModel, build_in_scope
from keras_dist_ext.tuner.strategies import HYPERPARAMETER, Strategies, StrategyEntry
from keras_dist_ext.tuner.strategy_report import StrategyReport, report_on
from keras_dist_ext.tuner.trial_logs import TrialLogs
from keras_dist_ext.tuner.trial_run import TrialRun, fit_coupled

__all__ = ["BayesianOptimization", "GridSearch", "Hyperband", "RandomSearch", "StrategySearch", "with_strategies"]


class StrategySearch(keras_tuner.Tuner):  # type: ignore[misc]
    """A tuner whose trials each live under a strategy of their own; all else is keras-tuner's.

    It comes first among the bases of a class, ``class Mine(StrategySearch, keras_tuner.RandomSearch)``, or by
    ``@with_strategies``. The strategy is the hyperparameter ``distribution_strategy`` of every trial, which
    ``build(hp)`` may read, and which other hyperparameters may be conditional on. Models are built in its scope; those
    of stock Keras are rebuilt there as ours.

    A trial that cannot run at its point of the search (out of memory, a device that is not there, a NaN loss, ...) is
    FAILED with the cause; the search goes on, and stays away from there. Errors of the user's own count as ever.

    Args:
        args: of the tuner.
        strategies: names as `pick_strategy` takes them, also with a number of replicas as in ``"mirrored(2)"``,
            `StrategyChoice`s, or functions that return a strategy; a mapping gives each a name. One is fixed, several
            are searched. By default what fits the devices at hand.
        coupled: hyperparameters that belong to the strategy, see `Coupled`.
        first_pass: drops slow strategies before the search, see `FirstPass`.
        log_dir: where TensorBoard looks for each trial's replicas, hyperparameters and results; by default nothing is
            written.
        kwargs: of the tuner.

    Raises:
        TunerError: the strategies cannot be understood, or the project was begun with others.
        ScopeError: the model that `build` returns first cannot live under a strategy.
        StrategyError: none of the strategies can be had here.
    """

    def __init__(
        self,
        *args: Any,
        strategies: Sequence[StrategyEntry] | Mapping[str, StrategyEntry] | StrategyEntry | None = None,
        coupled: Coupled | None = None,
        first_pass: FirstPass | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        fixed = kwargs.pop("distribution_strategy", None)
        if fixed is not None and strategies is not None:
            raise TunerError(
                "Both strategies and distribution_strategy were given. Give strategies=[...] alone; one entry is fixed."
            )
        given = fixed if strategies is None else strategies
        self._strategies = Strategies.of("auto" if given is None else given)
        self._coupled = coupled or Coupled()
        self.first_pass = first_pass
        self._place = place_of()
        self._run: TrialRun | None = None
        self._values = CoupledValues()  # of the model that was built last
        self._is_discovering = False
        self._is_loading = False
        self._is_reloaded = False
        self._restore_settings: Callable[[], None] | None = None  # of Keras, which a build begins with
        _refuse_scope("made")
        if self._place is not None and self._place.num_members > 1:
            self._strategies.make_all()  # MultiWorkerMirroredStrategy has to be made before TensorFlow has run anything
        else:
            self._strategies.make_room()
        if self._place is not None and not self._place.may_overwrite:
            kwargs["overwrite"] = False  # each process would empty the folder that all of them work in
        super().__init__(*args, **kwargs)
        if self.hypermodel is None and super().run_trial.__func__ is keras_tuner.Tuner.run_trial:
            raise ValueError("hypermodel is None, and run_trial is keras-tuner's own, which trains what it builds.")
        connect(self)
        self._logs = None if log_dir is None else TrialLogs(log_dir, several=self.executions_per_trial > 1)
        self._records = ProjectRecords(self.project_dir)
        if self._place is None or self._place.is_chief:
            outcome = Outcome.load(self.project_dir)
            self._check_space(set(outcome.dropped) if outcome else set())
            if outcome:
                replace_space(self.oracle, outcome.narrowed)
            avoid_infeasible(self.oracle, self._records, self.executions_per_trial)

    def reload(self) -> None:
        """Go on with what the project knows; what keras-tuner loses of it is put right."""
        super().reload()
        self._is_reloaded = True
        if self._place is None:  # else the chief does, which knows whether its workers live
            go_on_alone(self)

    # The space

    def _populate_initial_space(self) -> None:
        self.oracle.hyperparameters = self.oracle.hyperparameters.copy()  # the user may give them to other tuners
        self._strategies.declare(self.oracle.hyperparameters)
        self._coupled.declare(self.oracle.hyperparameters)
        self._is_discovering = True
        try:
            super()._populate_initial_space()
        finally:
            self._is_discovering = False
        if isinstance(self.oracle, keras_tuner.oracles.GridSearchOracle):
            replace_space(self.oracle, _strategy_last)

    def _check_space(self, dropped: set[str]) -> None:
        """Refuse a project that was begun without strategies, or with others.

        Args:
            dropped: by its first pass.
        """
        known = [hp for hp in self.oracle.get_space().space if hp.name == HYPERPARAMETER]
        if not known:
            raise TunerError(
                f"The project in {self.project_dir} was begun without strategies, so its trials would not say which is "
                "theirs. Give another project_name, or overwrite=True."
            )
        names = getattr(known[0], "values", None) or [known[0].value]
        if unknown := [name for name in names if name not in self._strategies.names]:
            raise TunerError(
                f"The project in {self.project_dir} was begun with the strategies {', '.join(names)}, and strategies "
                f"does not have {', '.join(unknown)}. Give the same, another project_name, or overwrite=True."
            )
        late = [name for name in self._strategies.names if name not in {*names, *dropped}]
        if self._is_reloaded and late:
            raise TunerError(
                f"The project in {self.project_dir} was begun with the strategies {', '.join(names)}, so no trial "
                f"would get {', '.join(late)}. Give the same, another project_name, or overwrite=True."
            )

    # Models

    @property
    def hypermodel(self) -> Any:
        """The user's hypermodel; what it builds lives under the strategy of the hyperparameters."""
        return self._hypermodel

    @hypermodel.setter
    def hypermodel(self, given: Any) -> None:
        given = given.inner if isinstance(given, ScopedHyperModel) else given
        self._hypermodel = None if given is None else ScopedHyperModel(given, self._build, self._fit)

    def strategy_of(self, hp: Any) -> StrategyChoice:
        """Return the strategy of a trial's hyperparameters, say for a `run_trial` of one's own.

        Args:
            hp: the trial's `keras_tuner.HyperParameters`.

        Raises:
            StrategyError: it cannot be had here.
            TunerError: it is none of this search.
        """
        return self._strategies.get(self._strategies.declare(hp))

    def _try_build(self, hp: Any) -> Any:
        self._restore_settings = keras_settings()  # what comes first is Keras' clear_session
        try:
            return super()._try_build(hp)
        finally:
            self._restore_settings = None

    def _build(self, build: Any, hp: Any) -> Any:
        if self._restore_settings is not None:
            self._restore_settings()
        choice = self._choice_to_build(hp)
        if self._run is not None:
            self._run.choice = choice
        self._coupled.declare(hp)
        model = build_in_scope(build, hp, choice.strategy)
        if isinstance(model, keras.Model) and not self._is_discovering:
            self._values = self._coupled.values(hp, choice.strategy.num_replicas_in_sync)
            if self._run is not None:
                self._run.values = self._values
            if not self._given_to_compile:  # else the model is about to be compiled again
                couple(model, self._values)
        return model

    @property
    def _given_to_compile(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("optimizer", "loss", "metrics")}
        return {name: value for name, value in given.items() if value}

    def _choice_to_build(self, hp: Any) -> StrategyChoice:
        none = StrategyChoice(tf.distribute.get_strategy(), "none", "no trial runs in this process")
        name = self._strategies.declare(hp)
        if self._is_discovering and self._place is not None and self._place.is_chief:
            return none
        try:
            return self._strategies.get(name)
        except StrategyError:
            if self._is_loading and self._place is not None:
                return none
            if not self._is_discovering:
                raise
            for other in self._strategies.names:  # what the space is does not depend on it
                try:
                    return self._strategies.get(other)
                except StrategyError:
                    continue
            raise

    def _override_compile_args(self, model: Any) -> None:
        """Compile a model as the tuner was told; keras-tuner's own forgets the rest, and fails where there is none."""
        given = self._given_to_compile
        if not given:
            return
        kept = {**compile_arguments(model), "optimizer": model.optimizer} if model.compiled else {}
        optimizer = given.get("optimizer")
        if optimizer is not None and not isinstance(optimizer, str):
            given["optimizer"] = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        model.compile(**{**kept, **given})
        couple(model, self._values)

    def load_model(self, trial: Any) -> Any:
        """Return the model of a trial with its best weights, under its own strategy."""
        self._is_loading = True
        try:
            return super().load_model(trial)
        finally:
            self._is_loading = False

    # Trials

    def _fit(self, fit: Any, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._place is not None and self._place.member > 0:
            kwargs["callbacks"] = callbacks_of_worker(kwargs.get("callbacks", ()), model)
        if self._run is not None:
            return self._run.fit(fit, hp, model, *args, **kwargs)
        values = self._coupled.values(hp, model.distribute_strategy.num_replicas_in_sync)
        return fit_coupled(fit, hp, model, values, *args, **kwargs)

    def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a trial under its strategy, and keep what is known of it in its folder."""
        hp = trial.hyperparameters
        self._run = TrialRun(
            trial,
            self._strategies.declare(hp),
            objectives=objectives_of(self.oracle.objective),
            logs=self._logs,
            seconds_before=self._seconds_of(hp.values.get("tuner/trial_id")),
            tuner=self,
        )
        failure: Exception | None = None
        try:
            with cleared():
                results = super().run_trial(trial, *args, **kwargs)
            self._run.check(results)
            return results
        except Exception as error:
            failure = error
            told = self._run.failed(error)
            if told is None:
                raise
            raise told from error
        finally:
            if self._reports:
                self._run.record(failure).save(self.get_trial_dir(trial.trial_id))
            self._run = None
            failure = None  # it holds the frames, and so the model

    @property
    def _reports(self) -> bool:
        """Whether this process writes down what came of a trial; of those that share it, one does."""
        return self._place is None or self._place.member == 0

    def _seconds_of(self, trial_id: str | None) -> float:
        """How long the trial that this one continues has trained."""
        record = self._records.of_trial(trial_id) if trial_id else None
        return max(record.seconds, default=0.0) if record else 0.0

    def on_trial_end(self, trial: Any) -> None:
        """End a trial, and log its hyperparameters and results."""
        if self._logs is not None and self._reports:
            metrics = self.oracle.get_trial(trial.trial_id).metrics
            name = self.oracle.objective.name
            self._logs.write(
                trial.trial_id,
                trial.hyperparameters.values,
                {name: metrics.get_best_value(name) for name in metrics.metrics},
                step=(metrics.get_best_step(name) or 0) if metrics.exists(name) else 0,
                completed=trial.status == "COMPLETED",
            )
        super().on_trial_end(trial)

    def search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as keras-tuner does; a first pass, if one is wanted and was not made, comes before."""
        _refuse_scope("asked to search")
        _refuse_resume(kwargs.get("callbacks"))
        if self.first_pass is not None:
            self._check_first_pass()
        return search_in_part(self, self._search, *args, **kwargs)

    def _check_first_pass(self) -> None:
        if self._place is not None and self._place.num_members > 1:
            raise TunerError(
                f"first_pass measures strategies in one process, and {self._place.num_members} run each trial of this "
                "search together. Leave it out."
            )
        is_first = self._place is None or self._place.is_chief
        if is_first and self.oracle.trials and Outcome.load(self.project_dir) is None:
            raise TunerError(
                f"first_pass drops strategies before the first trial, and the project in {self.project_dir} has "
                f"{counted(len(self.oracle.trials), 'trial')} already. Leave it out, or give another project_name."
            )

    def _search(self, *args: Any, **kwargs: Any) -> Any:
        """Search in this process, where trials run."""
        if self.first_pass is not None:
            self._pass_first(self.first_pass, args, kwargs)
        return super().search(*args, **kwargs)

    def _pass_first(self, rules: FirstPass, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        def measure() -> Outcome:
            with cleared():
                diary = RaceDiary(self.project_dir)
                return race(rules, self._strategies.names, lambda name: self._racer(name, args, kwargs), diary)

        if self._place is not None:
            measured_by_one(self.oracle, measure)
        elif Outcome.load(self.project_dir) is None:
            outcome = measure()
            outcome.save(self.project_dir)
            replace_space(self.oracle, outcome.narrowed)

    def _racer(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelRacer:
        """Return a model of the default hyperparameters under a strategy, ready to train on the search's data."""
        hp = self.oracle.get_space()
        hp.values[HYPERPARAMETER] = name
        for one in hp.space:  # keras-tuner would draw those that are conditional on the strategy
            if hp.is_active(one):
                hp.values.setdefault(one.name, one.default)
        hp.ensure_active_values()
        model, known = self._build_hypermodel(hp), self.hypermodel
        return ModelRacer(model, known.train, hp, self._values, args, kwargs, is_own_fit=known.has_own_fit)

    def strategy_report(self) -> StrategyReport:
        """Print and return what is known of each strategy: trials, best score, throughput, failures with causes."""
        from rich.console import Console

        report = report_on(self._strategies.names, self.oracle.objective, self._records, Outcome.load(self.project_dir))
        Console().print(report)
        return report


def _refuse_scope(what: str) -> None:
    """Refuse a tuner inside of a scope: each trial enters its own, and TensorFlow nests none."""
    if tf.distribute.has_strategy():
        raise TunerError(
            f"The tuner was {what} inside the scope of {describe_strategy(tf.distribute.get_strategy())}, and each "
            "trial enters the scope of its own strategy. Leave the scope; give the strategy as strategies=[...]."
        )


def _refuse_resume(callbacks: Any) -> None:
    """Refuse what would have a trial go on where the one before it has ended."""
    if any(isinstance(callback, Resume) for callback in keras.tree.flatten(callbacks or [])):
        raise TunerError(
            "search was given the callback Resume, whose directory all trials would share, so that each would go on "
            "where the one before it has ended. Leave it out: a search that is started again goes on by itself."
        )


def _strategy_last(space: list[Any]) -> list[Any]:
    """Put the strategy behind what does not depend on it: GridSearch varies the last hyperparameter fastest."""
    depends = any(getattr(c, "name", None) == HYPERPARAMETER for hp in space for c in hp.conditions)
    return space if depends else sorted(space, key=lambda hp: hp.name == HYPERPARAMETER)


class RandomSearch(StrategySearch, keras_tuner.RandomSearch):  # type: ignore[misc]
    """keras-tuner's RandomSearch; see `StrategySearch` for what comes on top."""


class BayesianOptimization(StrategySearch, keras_tuner.BayesianOptimization):  # type: ignore[misc]
    """keras-tuner's BayesianOptimization; see `StrategySearch` for what comes on top."""


class Hyperband(StrategySearch, keras_tuner.Hyperband):  # type: ignore[misc]
    """keras-tuner's Hyperband; see `StrategySearch` for what comes on top."""


class GridSearch(StrategySearch, keras_tuner.GridSearch):  # type: ignore[misc]
    """keras-tuner's GridSearch, which tries the strategies one after another before other values change."""


_Tuner = TypeVar("_Tuner", bound=type)


def with_strategies(cls: _Tuner) -> _Tuner:
    """Make a tuner of one's own search strategies, too; for use as a decorator.

        @kde.tuner.with_strategies
        class Mine(keras_tuner.RandomSearch): ...

    Args:
        cls: a class derived from `keras_tuner.Tuner`.

    Returns:
        A class of the same name, whose constructor also takes what `RandomSearch` here takes; ``cls`` itself where it
        does already.

    Raises:
        TunerError: the class is no `keras_tuner.Tuner`.
    """
    if isinstance(cls, type) and issubclass(cls, StrategySearch):
        return cls
    if not (isinstance(cls, type) and issubclass(cls, keras_tuner.Tuner)):
        raise TunerError(
            f"{getattr(cls, '__name__', repr(cls))} is no keras_tuner.Tuner, so it does not build Keras models for "
            "trials. (SklearnTuner searches models of scikit-learn, which no strategy distributes.)"
        )
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (StrategySearch, cls), body)  # type: ignore[return-value]
