"""Search hyperparameters and the strategy together: what any tuner of keras-tuner does for that."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import HookedTuner, callbacks_of_worker, keras_tuner, objectives_of
from keras_dist_ext._keras.keras_tuner_oracles import replace_space
from keras_dist_ext._keras.models import compile_arguments
from keras_dist_ext.aliases import Config, FitArgument, UserFunction
from keras_dist_ext.errors import TunerError
from keras_dist_ext.strategy.pick import StrategyChoice
from keras_dist_ext.strategy.scope import describe_strategy
from keras_dist_ext.training.resume.callback import Resume
from keras_dist_ext.tuner.coupled import Coupled
from keras_dist_ext.tuner.global_state import restored_global_state
from keras_dist_ext.tuner.infeasible import avoid_infeasible
from keras_dist_ext.tuner.model_benchmark import ModelBenchmark
from keras_dist_ext.tuner.model_builder import ModelBuilder, Purpose
from keras_dist_ext.tuner.processes.process_role import process_role
from keras_dist_ext.tuner.processes.role_entry import connect_to_chief, restore_oracle, run_search
from keras_dist_ext.tuner.records import ProjectRecords
from keras_dist_ext.tuner.scoped import Build, ScopedHyperModel
from keras_dist_ext.tuner.screening import Screening, ScreeningResult
from keras_dist_ext.tuner.search_screening import check_screening, default_of_strategy, screen_once
from keras_dist_ext.tuner.space import check_project_strategies, strategy_last
from keras_dist_ext.tuner.strategies import Strategies, StrategyEntry
from keras_dist_ext.tuner.strategy_report import StrategyReport, build_report
from keras_dist_ext.tuner.trial_logs import TrialLogs
from keras_dist_ext.tuner.trial_run import TrialRun, fit_with_coupled

__all__ = ["StrategySearch"]


class StrategySearch(HookedTuner):
    """A tuner that runs each trial under a strategy of its own; everything else is keras-tuner's.

    It comes first among the bases of a class, ``class Mine(StrategySearch, keras_tuner.RandomSearch)``, or by
    ``@with_strategies``. The strategy is the hyperparameter ``distribution_strategy`` of every trial, which
    ``build(hp)`` may read, and which other hyperparameters may be conditional on. Models are built in its scope; those
    of stock Keras are rebuilt there as distributed ones.

    A trial that cannot run at its point of the search (out of memory, a missing device, a NaN loss, ...) is FAILED with
    the cause; the search continues, and avoids that point. Errors in the user's own code count as in keras-tuner.

    Args:
        args: of the tuner.
        strategies: names as `pick_strategy` takes them, also with a number of replicas as in ``"mirrored(2)"``,
            `StrategyChoice`s, or functions that return a strategy; a mapping gives each a name. One is fixed, several
            are searched. By default what fits the available devices.
        coupled: hyperparameters that belong to the strategy, see `Coupled`.
        screening: drops slow strategies before the search, see `Screening`.
        log_dir: where TensorBoard looks for each trial's replicas, hyperparameters and results; by default nothing is
            written.
        kwargs: of the tuner.

    Raises:
        TunerError: the strategies are invalid, or the project was started with others.
        ScopeError: the model that `build` returns first cannot live under a strategy.
        StrategyError: none of the strategies is available here.
    """

    def __init__(
        self,
        *args: FitArgument,
        strategies: Sequence[StrategyEntry] | Mapping[str, StrategyEntry] | StrategyEntry | None = None,
        coupled: Coupled | None = None,
        screening: Screening | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        **kwargs: FitArgument,
    ) -> None:
        fixed = kwargs.pop("distribution_strategy", None)
        if fixed is not None and strategies is not None:
            raise TunerError(
                "Both strategies and distribution_strategy were given. Give only strategies=[...]; one entry is fixed."
            )
        given = fixed if strategies is None else strategies
        if not isinstance(coupled, Coupled | None):
            arguments.refuse("coupled", coupled, "a Coupled, or None", TunerError)
        if not isinstance(screening, Screening | None):
            arguments.refuse("screening", screening, "a Screening, or None", TunerError)
        arguments.optional(arguments.path, "log_dir", log_dir, error=TunerError)
        self._strategies = Strategies.of("auto" if given is None else given)
        self._coupled = coupled or Coupled()
        self._role = process_role()
        self._builder = ModelBuilder(self._strategies, self._coupled, self._role)
        self.screening = screening
        self._trial_run: TrialRun | None = None  # the trial that runs now
        _refuse_scope("created")
        if self._role.num_workers > 1:
            # MultiWorkerMirroredStrategy has to be created before TensorFlow runs its first operation.
            self._strategies.create_all()
        else:
            self._strategies.reserve_devices()
        if not self._role.may_overwrite:
            kwargs["overwrite"] = False  # each process would empty the folder that all of them work in
        super().__init__(*args, **kwargs)
        self.check_space()
        connect_to_chief(self, self._role)
        self._logs = None if log_dir is None else TrialLogs(log_dir, several=self.executions_per_trial > 1)
        self._records = ProjectRecords(self.project_dir)
        if self._role.has_oracle:
            result = ScreeningResult.load(self.project_dir)
            if result:
                replace_space(self.oracle, result.narrowed)
            avoid_infeasible(self.oracle, self._records, self.executions_per_trial)

    def reload(self) -> None:
        """Continue from the saved project, with what keras-tuner's own reload loses."""
        super().reload()
        if self._role.is_single:  # else the chief does so, which knows whether its workers are alive
            restore_oracle(self)
        self._check_project(is_reloaded=True)

    # The space

    def _discover_space(self) -> None:
        self.oracle.hyperparameters = self.oracle.hyperparameters.copy()  # the user may give them to other tuners
        self._strategies.declare(self.oracle.hyperparameters)
        self._coupled.declare(self.oracle.hyperparameters)
        with self._builder.purpose(Purpose.DISCOVER):
            super()._discover_space()
        if isinstance(self.oracle, keras_tuner.oracles.GridSearchOracle):
            replace_space(self.oracle, strategy_last)
        self._check_project(is_reloaded=False)

    def _check_project(self, *, is_reloaded: bool) -> None:
        if self._role.has_oracle:
            space = self.oracle.get_space()
            check_project_strategies(space, self._strategies.names, self.project_dir, is_reloaded=is_reloaded)

    # Models

    @property
    def hypermodel(self) -> ScopedHyperModel | None:
        """The user's hypermodel; the models that it builds live under the strategy of the hyperparameters."""
        return self._hypermodel

    @hypermodel.setter
    def hypermodel(self, given: keras_tuner.HyperModel | None) -> None:
        given = given.inner if isinstance(given, ScopedHyperModel) else given
        self._hypermodel = None if given is None else ScopedHyperModel(given, self._build, self._fit)

    def strategy_of(self, hp: keras_tuner.HyperParameters) -> StrategyChoice:
        """Return the strategy of a trial's hyperparameters, for example in a custom `run_trial`.

        Args:
            hp: the trial's `keras_tuner.HyperParameters`.

        Raises:
            StrategyError: it is not available here.
            TunerError: this search does not have it, or ``hp`` is something else.
        """
        kind = keras_tuner.HyperParameters
        arguments.instance("hp", hp, kind, wanted="the hyperparameters of a trial", error=TunerError)
        choice = self._strategies.get(self._strategies.declare(hp))
        if self._trial_run is not None and self._builder.built.choice is None:
            self._builder.built.choice = choice  # of a trial whose `run_trial` builds by itself
        return choice

    def _build(self, build: Build, hp: keras_tuner.HyperParameters) -> keras.Model:
        model = self._builder.build(build, hp)
        if not self._compile_overrides:  # else the model is compiled again, and coupled then
            self._builder.couple(model)
        return model

    def _build_for_trial(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        with self._builder.kept_settings():
            return super()._build_for_trial(hp)

    @property
    def _compile_overrides(self) -> Config:
        """The arguments of `compile` that the tuner was given; none yet while the space is discovered."""
        given = {name: getattr(self, name, None) for name in ("optimizer", "loss", "metrics")}
        return {name: value for name, value in given.items() if value}

    def _compile_for_trial(self, model: keras.Model) -> None:
        """Compile a model with the tuner's arguments; keras-tuner's own forgets the others, or fails without any."""
        given = self._compile_overrides
        if not given:
            return
        kept = {**compile_arguments(model), "optimizer": model.optimizer} if model.compiled else {}
        optimizer = given.get("optimizer")
        if optimizer is not None and not isinstance(optimizer, str):
            given["optimizer"] = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        model.compile(**{**kept, **given})
        self._builder.couple(model)

    def load_model(self, trial: keras_tuner.engine.trial.Trial) -> keras.Model:
        """Return the model of a trial with its best weights, under its own strategy."""
        with self._builder.purpose(Purpose.LOAD):
            return super().load_model(trial)

    # Trials

    def _fit(
        self,
        fit: UserFunction,
        hp: keras_tuner.HyperParameters,
        model: keras.Model,
        *args: FitArgument,
        **kwargs: FitArgument,
    ) -> object:
        self.check_trial()
        if not self._role.reports:
            kwargs["callbacks"] = callbacks_of_worker(kwargs.get("callbacks", ()), model)
        if self._trial_run is not None:
            return self._trial_run.fit(fit, hp, model, *args, **kwargs)
        return fit_with_coupled(fit, hp, model, self._builder.values(hp, model.distribute_strategy), *args, **kwargs)

    def _follow_trial(
        self, run_trial: UserFunction, trial: keras_tuner.engine.trial.Trial, *args: FitArgument, **kwargs: FitArgument
    ) -> object:
        """Run a trial under its strategy, and write a record of it into its folder."""
        hp = trial.hyperparameters
        self._trial_run = TrialRun(
            trial,
            self._strategies.declare(hp),
            self._builder.start_trial(),
            objectives=objectives_of(self.oracle.objective),
            logs=self._logs,
            seconds_before=self._records.seconds_of(hp.values.get("tuner/trial_id")),
            tuner=self,
        )
        failure: Exception | None = None
        try:
            with restored_global_state():
                results = run_trial(trial, *args, **kwargs)
            self._trial_run.check(results)
            return results
        except Exception as error:
            failure = error
            replacement = self._trial_run.error_for_tuner(error)
            if replacement is None:
                raise
            raise replacement from error
        finally:
            if self._role.reports:
                self._trial_run.record(failure).save(self.get_trial_dir(trial.trial_id))
            self._trial_run = None
            failure = None  # it holds the frames, and so the model

    def on_trial_end(self, trial: keras_tuner.engine.trial.Trial) -> None:
        """End a trial, and log its hyperparameters and results."""
        if self._logs is not None and self._role.reports:
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

    def search(self, *args: FitArgument, **kwargs: FitArgument) -> None:
        """Search as keras-tuner does, after a screening of the strategies if one was asked for and not made yet."""
        _refuse_scope("asked to search")
        _refuse_resume(kwargs.get("callbacks"))
        if self.screening is not None:
            check_screening(self.oracle, self.project_dir, self._role)
        run_search(self, self._role, self._search, *args, **kwargs)

    def _search(self, *args: FitArgument, **kwargs: FitArgument) -> None:
        """Search in this process, where trials run."""
        if self.screening is not None:
            self._screen(self.screening, args, kwargs)
        super().search(*args, **kwargs)

    # Screening

    def _screen(self, screening: Screening, args: Sequence[FitArgument], kwargs: Mapping[str, FitArgument]) -> None:
        def benchmark(name: str) -> ModelBenchmark:
            return self._benchmark(name, args, kwargs)

        screen_once(screening, self._strategies.names, benchmark, self.oracle, self.project_dir, self._role)

    def _benchmark(self, name: str, args: Sequence[FitArgument], kwargs: Mapping[str, FitArgument]) -> ModelBenchmark:
        """Return a model of the default hyperparameters under a strategy, ready to train on the search's data."""
        hp = default_of_strategy(self.oracle, name)
        model, hypermodel = self._build_model(hp), self.hypermodel
        assert hypermodel is not None
        values = self._builder.built.values
        return ModelBenchmark(model, hypermodel.train, hp, values, args, kwargs, has_own_fit=hypermodel.has_own_fit)

    def strategy_report(self) -> StrategyReport:
        """Print and return what is known of each strategy: trials, best score, throughput, failures with causes."""
        from rich.console import Console

        result = ScreeningResult.load(self.project_dir)
        report = build_report(self._strategies.names, self.oracle.objective, self._records, result)
        Console().print(report)
        return report


def _refuse_scope(what: str) -> None:
    """Refuse a tuner inside of a scope: each trial enters its own, and TensorFlow does not nest scopes."""
    if tf.distribute.has_strategy():
        raise TunerError(
            f"The tuner was {what} inside the scope of {describe_strategy(tf.distribute.get_strategy())}, and each "
            "trial enters the scope of its own strategy. Leave the scope; give the strategy as strategies=[...]."
        )


def _refuse_resume(callbacks: object) -> None:
    """Refuse a callback that would make each trial continue from the one before."""
    if any(isinstance(callback, Resume) for callback in keras.tree.flatten(callbacks or [])):
        raise TunerError(
            "search was given the callback Resume, whose directory all trials would share, so that each would continue "
            "where the one before it ended. Leave it out: a search that is restarted continues by itself."
        )
