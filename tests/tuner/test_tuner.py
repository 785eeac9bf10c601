"""Each trial lives under its own strategy; what cannot run is avoided; all else is as in keras-tuner."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import itertools
import json
import math
import pathlib
import subprocess
import sys
import time
import types
import warnings
from typing import Any

import keras
import keras_tuner
import numpy as np
import psutil
import pytest
import tensorflow as tf
from cases import rotating
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.hparams import api_pb2, get_experiment, list_session_groups, plugin_data_pb2
from tensorboard.plugins.hparams.backend_context import Context
from threadpoolctl import threadpool_limits
from tuner_runs import (
    HELD_OUT,
    TRAIN,
    TWO,
    Slow,
    X,
    Y,
    compiled,
    judged,
    lazy_model,
    of_trials,
    our_model,
    slowed,
    space,
    stock_model,
    strategy_of,
    subclassed_model,
)

import keras_dist_ext as kde
from keras_dist_ext._keras.keras_tuner import callbacks_with_empty_batch_hooks
from keras_dist_ext.training.execution_sizer import allow_multi_step, looks_at_batches
from keras_dist_ext.tuner.coupled import CoupledValues, ScaledLearningRate, apply_coupled, batch_data
from keras_dist_ext.tuner.failures import Failure, InfeasibleError, classify_failure
from keras_dist_ext.tuner.infeasible import _FailedTrials
from keras_dist_ext.tuner.meter import Meter
from keras_dist_ext.tuner.objectives import UNREACHED
from keras_dist_ext.tuner.records import ProjectRecords, TrialRecord
from keras_dist_ext.tuner.scoped import ScopedHyperModel, build_in_scope
from keras_dist_ext.tuner.screening import ScreeningResult, screen_strategies
from keras_dist_ext.tuner.strategies import Strategies
from keras_dist_ext.tuner.strategy_report import StrategyReport, build_report
from keras_dist_ext.tuner.trial_logs import TrialLogs
from keras_dist_ext.tuner.trial_run import ObjectiveLogger, TrialRun

# Tests have four devices, so that this one is always missing.
pytestmark = pytest.mark.filterwarnings("ignore:strategies. 'mirrored.9.' cannot be made here")
TUNERS: dict[str, dict[str, Any]] = {
    "RandomSearch": {"max_trials": 1, "executions_per_trial": 2},
    "BayesianOptimization": {"max_trials": 2, "num_initial_points": 1},
    "Hyperband": {"max_epochs": 2, "factor": 2},
    "GridSearch": {"max_trials": 2},
}
# The others are slow; Hyperband has a quick test of its own.
QUICKLY = [("GridSearch", "mirrored(2)")]
CASES = rotating(itertools.product(TUNERS, TWO), QUICKLY)
QUICK = {"epochs": 1, "batch_size": 40, "verbose": 0}


def searched(
    folder: pathlib.Path,
    build: Any = stock_model,
    tuner: Any = "RandomSearch",
    *,
    search: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    cls = getattr(kde.tuner, tuner) if isinstance(tuner, str) else tuner
    arguments = {"objective": "val_accuracy", "directory": folder, "project_name": "p", **given}
    made = cls(build, **arguments)
    made.search(*TRAIN, validation_data=HELD_OUT, **{**QUICK, **(search or {})})
    return made


def rate_of(model: Any) -> float:
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def only(tuner: Any) -> Any:
    (trial,) = tuner.oracle.trials.values()
    return trial


# Every tuner, under every kind of strategy


@pytest.mark.parametrize(("tuner", "strategy"), CASES)
def test_every_tuner_searches_under_a_strategy_and_returns_its_best_model(
    tuner: str, strategy: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = lazy_model if tuner == "Hyperband" else stock_model
    made = searched(tmp_path, build, tuner, strategies=[strategy], **TUNERS[tuner])
    assert len(made.oracle.trials) == TUNERS[tuner].get("max_trials", 5)
    assert of_trials(made, lambda t: t.status) == ["COMPLETED"] * len(made.oracle.trials)
    assert set(of_trials(made, strategy_of)) == {strategy}
    (model,) = made.get_best_models()
    wanted = made.strategy_of(made.get_best_hyperparameters()[0]).strategy
    assert model.distribute_strategy is wanted
    assert wanted.num_replicas_in_sync == (2 if strategy == "mirrored(2)" else 1)
    assert kde.check_scope(model, wanted).ok
    best = made.oracle.get_best_trials()[0]
    if tuner != "RandomSearch":  # whose score is the mean of two executions
        assert model.evaluate(*HELD_OUT, verbose=0, return_dict=True)["accuracy"] == pytest.approx(best.score)
    made.results_summary()
    assert f"distribution_strategy: {strategy}" in capsys.readouterr().out


@pytest.mark.slow
def test_models_of_a_search_live_under_their_strategy_with_equal_scores(tmp_path: pathlib.Path) -> None:
    seen: list[tuple[str, int]] = []

    def build(hp: Any) -> Any:
        seen.append((hp.get("distribution_strategy"), tf.distribute.get_strategy().num_replicas_in_sync))
        model = our_model(hp)
        model.add(keras.layers.BatchNormalization())  # has state that replicas compute apart
        return model

    tuner = searched(tmp_path, build, "GridSearch", strategies=TWO, objective="val_loss", max_trials=3)
    assert seen[0] == ("one_device", 1)  # the build that discovers the space
    assert set(seen) == {("one_device", 1), ("mirrored(2)", 2)}
    # a grid tries the strategies one after another, before it changes anything else
    assert of_trials(tuner, lambda t: (t.hyperparameters.get("units"), strategy_of(t))) == [
        (4, "one_device"),
        (4, "mirrored(2)"),
        (8, "one_device"),
    ]
    trials = tuner.oracle.get_best_trials(3)
    for trial, model in zip(trials, tuner.get_best_models(3), strict=True):
        assert model.distribute_strategy is tuner.strategy_of(trial.hyperparameters).strategy
        assert model.evaluate(*HELD_OUT, verbose=0)[0] == pytest.approx(trial.score, rel=1e-5)
    assert tuner.load_model(trials[0]).distribute_strategy is tuner.strategy_of(trials[0].hyperparameters).strategy


def test_the_build_that_discovers_the_space_is_under_a_strategy(tmp_path: pathlib.Path, mirrored: Any) -> None:
    def build(hp: Any) -> Any:
        seen.append(tf.distribute.get_strategy())
        return our_model(hp)

    seen: list[Any] = []
    kde.tuner.RandomSearch(build, "val_loss", strategies=["mirrored(2)", "one_device"], directory=tmp_path)
    assert len(seen) == 1
    assert seen[0] is mirrored


@pytest.mark.slow
def test_a_trial_that_hyperband_continues_starts_with_the_weights_and_the_time_of_the_first(
    tmp_path: pathlib.Path,
) -> None:
    began: list[tuple[int, float]] = []

    class Noting(keras_tuner.HyperModel):
        def build(self, hp: Any) -> Any:
            return subclassed_model(hp)

        def fit(self, hp: Any, model: Any, x: Any, y: Any, **kwargs: Any) -> Any:
            epoch = kwargs["initial_epoch"]
            if epoch:
                past = tuner.oracle.get_trial(hp.values["tuner/trial_id"])
                assert model.evaluate(*HELD_OUT, verbose=0)[0] == pytest.approx(past.score, rel=1e-5)
            began.append((epoch, kwargs["epochs"]))
            return model.fit(x, y, **kwargs)

    tuner = kde.tuner.Hyperband(
        Noting(), "val_loss", max_epochs=2, factor=2, strategies=["mirrored(2)"], directory=tmp_path, project_name="p"
    )
    tuner.search(*TRAIN, validation_data=HELD_OUT, batch_size=40, verbose=0)
    assert any(epoch for epoch, _ in began)
    for trial in tuner.oracle.trials.values():
        past = trial.hyperparameters.values.get("tuner/trial_id")
        if past:
            seconds = [TrialRecord.load(tuner.get_trial_dir(i)).seconds[0] for i in (past, trial.trial_id)]
            assert seconds[1] > seconds[0]  # it goes on counting


@pytest.mark.slow
def test_a_reloaded_project_continues(tmp_path: pathlib.Path) -> None:
    first = searched(tmp_path, strategies=TWO, max_trials=2, seed=1)
    again = searched(tmp_path, strategies=TWO, max_trials=3, seed=1)
    assert sorted(again.oracle.trials) == ["0", "1", "2"]
    assert again.oracle.get_trial("0").score == first.oracle.get_trial("0").score
    reopened = kde.tuner.RandomSearch(
        stock_model, "val_accuracy", max_trials=3, strategies=TWO, directory=tmp_path, project_name="p"
    )
    trial = reopened.oracle.get_best_trials()[0]
    (model,) = reopened.get_best_models()
    assert model.distribute_strategy is reopened.strategy_of(trial.hyperparameters).strategy
    assert model.evaluate(*HELD_OUT, verbose=0)[1] == pytest.approx(trial.score)
    assert sum(row.num_completed for row in reopened.strategy_report()) == 3


def test_a_project_of_other_strategies_or_of_none_is_refused(tmp_path: pathlib.Path) -> None:
    def make(cls: Any, name: str, **given: Any) -> Any:
        return cls(stock_model, "val_loss", max_trials=1, directory=tmp_path, project_name=name, **given)

    make(kde.tuner.RandomSearch, "a", strategies=TWO).save()
    with pytest.raises(
        kde.TunerError, match=r"started with the strategies one_device, mirrored\(2\).*does not have mirr"
    ):
        make(kde.tuner.RandomSearch, "a", strategies=["one_device"])
    make(keras_tuner.RandomSearch, "b").save()
    with pytest.raises(kde.TunerError, match=r"started with the strategies one_device, .* would get mirrored\(3\)"):
        make(kde.tuner.RandomSearch, "a", strategies=[*TWO, "mirrored(3)"])
    with pytest.raises(kde.TunerError, match="was started without strategies"):
        make(kde.tuner.RandomSearch, "b", strategies=TWO)
    make(kde.tuner.RandomSearch, "b", strategies=TWO, overwrite=True)


def test_a_reloaded_grid_search_continues(tmp_path: pathlib.Path) -> None:
    cls = judged(keras_tuner.GridSearch, lambda hp: float(hp.get("x")))
    for max_trials in (3, 6):
        tuner = cls(
            hyperparameters=space(x=[1, 2, 3]),
            strategies=TWO,
            max_trials=max_trials,
            directory=tmp_path,
            project_name="p",
        )
        tuner.search(verbose=0)
    assert len(set(of_trials(tuner, lambda t: (t.hyperparameters.get("x"), strategy_of(t))))) == 6


def test_hyperparameters_that_were_given_may_be_given_again(tmp_path: pathlib.Path) -> None:
    given = space(units=[4, 8])
    for name, strategies in (("a", TWO), ("b", ["one_device", "mirrored(3)"])):
        tuner = kde.tuner.RandomSearch(
            stock_model,
            "val_loss",
            hyperparameters=given,
            strategies=strategies,
            directory=tmp_path,
            project_name=name,
        )
        assert "distribution_strategy" in tuner.oracle.get_space()
    assert [hp.name for hp in given.space] == ["units"]


def test_a_tuner_in_a_scope_is_refused(tmp_path: pathlib.Path, mirrored: Any) -> None:
    with (
        mirrored.scope(),
        pytest.raises(
            kde.TunerError, match=r"was created inside the scope of MirroredStrategy .2 rep.*Leave the scope"
        ),
    ):
        kde.tuner.RandomSearch(stock_model, "val_loss", strategies=["mirrored(2)"], directory=tmp_path)
    tuner = kde.tuner.RandomSearch(stock_model, "val_loss", strategies=["mirrored(2)"], directory=tmp_path)
    with mirrored.scope(), pytest.raises(kde.TunerError, match="was asked to search inside the scope"):
        tuner.search(*TRAIN)


# Strategies


def test_mirrored_strategies_without_collectives_are_not_shared() -> None:
    devices, ops = ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    known = Strategies.of(
        {
            "own": tf.distribute.MirroredStrategy(devices, cross_device_ops=ops),
            "default": tf.distribute.MirroredStrategy(devices),
            "name": "mirrored(2)",
        }
    )
    assert known.get("own").strategy.extended._cross_device_ops is ops
    assert known.get("default").strategy is known.get("name").strategy


@pytest.mark.slow
def test_a_fresh_process_has_the_devices_that_its_strategies_ask_for(tmp_path: pathlib.Path) -> None:
    code = (
        "import keras, keras_dist_ext as kde\n"
        "def build(hp):\n"
        "    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(hp.Int('units', 1, 9))])\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
        "names = ['one_device', 'mirrored(2)', 'mirrored(3)']\n"
        f"tuner = kde.tuner.RandomSearch(build, 'val_loss', strategies=names, directory={str(tmp_path)!r})\n"
        "hp = tuner.oracle.get_space()\n"
        "for name in names:\n"
        "    hp.values['distribution_strategy'] = name\n"
        "    print(tuner.strategy_of(hp).strategy.num_replicas_in_sync)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ended.stdout.split() == ["1", "2", "3"], ended.stderr


def test_strategies_are_names_choices_strategies_and_functions(mirrored: Any) -> None:
    def of_my_own() -> Any:
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    choice = kde.pick_strategy("mirrored", num_replicas=3, environ={})
    known = Strategies.of(["mirrored(2)", choice, of_my_own, tf.distribute.get_strategy()])
    assert known.names == ("mirrored(2)", "mirrored(3)", "of_my_own", "no strategy")
    assert known.get("mirrored(2)").strategy is mirrored
    assert known.get("mirrored(3)").strategy is choice.strategy
    assert known.get("of_my_own").strategy is mirrored  # TensorFlow takes one for a set of devices
    assert known.get("no strategy").strategy.num_replicas_in_sync == 1
    assert Strategies.of({"a": lambda: mirrored}).names == ("a",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "strategies is empty"),
        (["miror"], "There is no strategy 'miror'; did you mean 'mirrored'"),
        (["mirrored", "mirrored"], "Two strategies are called 'mirrored'"),
        ([lambda: None], "a function without a name"),
        ([3], "strategies has 3, of type int"),
        ({1: "mirrored"}, "strategies has the name 1; names must be strings"),
    ],
)
def test_an_invalid_strategy_is_refused_in_the_constructor(given: Any, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(kde.TunerError, match=message):
        kde.tuner.RandomSearch(stock_model, "val_loss", strategies=given, directory=tmp_path)


def test_a_function_that_returns_no_strategy_and_missing_devices_are_errors() -> None:
    with pytest.raises(kde.TunerError, match="The function for the strategy 'a' returned 3"):
        Strategies.of({"a": lambda: 3}).get("a")
    far = tf.distribute.MirroredStrategy(["CPU:0", "CPU:9"])
    with pytest.raises(
        kde.StrategyError, match="'a' uses CPU:9, which this process does not have; training there would"
    ):
        Strategies.of({"a": lambda: far}).get("a")


def test_a_trial_whose_strategy_the_search_no_longer_has_names_those_that_there_are() -> None:
    with pytest.raises(
        kde.TunerError, match=r"needs the strategy 'mirrored\(2\)', which this search does not have; it"
    ):
        Strategies.of(["one_device", "mirrored(4)"]).get("mirrored(2)")


def test_a_function_that_cannot_create_its_strategy_here_is_not_a_user_error() -> None:
    def tpu() -> Any:
        raise ValueError("Please provide a TPU Name to connect to.")

    with pytest.raises(
        kde.StrategyError, match="'tpu' is not available here: its function raised ValueError: Please prov"
    ):
        Strategies.of([tpu]).get("tpu")
    with pytest.raises(kde.StrategyError, match="^num_replicas=9 needs 9"):
        Strategies.of({"a": lambda: kde.pick_strategy("mirrored", num_replicas=9, environ={})}).get("a")


def test_hyperparameters_may_depend_on_the_strategy(tmp_path: pathlib.Path) -> None:
    def build(hp: Any) -> Any:
        model = stock_model(hp)
        with hp.conditional_scope("distribution_strategy", ["mirrored(2)"]):
            hp.Int("only_mirrored", 1, 3)
        return model

    tuner = kde.tuner.GridSearch(build, "val_loss", strategies=TWO, directory=tmp_path)
    values = [tuner.oracle.create_trial(f"t{i}").hyperparameters.values for i in range(2)]
    assert [v["distribution_strategy"] for v in values] == ["one_device"] * 2
    hp = tuner.oracle.get_space()
    hp.values["distribution_strategy"] = "mirrored(2)"
    hp.ensure_active_values()
    assert hp.get("only_mirrored") in (1, 2, 3)
    benchmarks = [tuner._benchmark("mirrored(2)", TRAIN, {}) for _ in range(4)]
    assert {benchmark._hp.get("only_mirrored") for benchmark in benchmarks} == {
        1
    }  # a benchmark has the default hyperparameters


def test_the_space_is_discovered_under_another_strategy_if_the_first_is_unavailable(tmp_path: pathlib.Path) -> None:
    tuner = kde.tuner.RandomSearch(
        stock_model, "val_loss", strategies=["mirrored(9)", "one_device"], directory=tmp_path
    )
    assert "units" in tuner.oracle.get_space()
    with pytest.raises(kde.StrategyError, match="num_replicas=9 needs 9 logical CPU devices"):
        kde.tuner.RandomSearch(stock_model, "val_loss", strategies=["mirrored(9)"], directory=tmp_path / "b")


# Models


def test_a_stock_model_that_cannot_be_rebuilt_is_refused_before_the_search_with_the_reason(
    tmp_path: pathlib.Path,
) -> None:
    class NoConfig(keras.Model):
        def __init__(self, dense: Any) -> None:
            super().__init__()
            self.dense = dense

        def call(self, x: Any) -> Any:
            return self.dense(x)

    def build(hp: Any) -> Any:
        model = NoConfig(object())
        model.dense = keras.layers.Dense(3)
        return compiled(model)

    with pytest.raises(kde.ScopeError, match="cannot make 'no_config'.* again"):
        kde.tuner.RandomSearch(build, "val_loss", strategies=["mirrored(2)"], directory=tmp_path)


@pytest.mark.slow
def test_a_custom_tuner_with_a_custom_hypermodel_works(tmp_path: pathlib.Path) -> None:
    class Mine(keras_tuner.HyperModel):
        note = "mine"

        def build(self, hp: Any) -> Any:
            return stock_model(hp)

        def fit(self, hp: Any, model: Any, x: Any, y: Any, **kwargs: Any) -> Any:
            model.fit(x, y, **kwargs)
            return {"seen": float(model.distribute_strategy.num_replicas_in_sync)}

    @kde.tuner.with_strategies
    class Tuner(keras_tuner.RandomSearch):
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            trial.hyperparameters.Fixed("mine", 1)
            return super().run_trial(trial, *args, **kwargs)

    objective = keras_tuner.Objective("seen", "max")
    tuner = searched(tmp_path, Mine(), Tuner, strategies=["mirrored(2)"], objective=objective, max_trials=1)
    assert Tuner.__name__ == "Tuner"
    assert tuner.hypermodel.note == "mine"
    assert only(tuner).score == 2
    assert only(tuner).hyperparameters.get("mine") == 1
    model = tuner.hypermodel.build(tuner.get_best_hyperparameters()[0])  # to be trained anew, as keras-tuner advises
    assert model.distribute_strategy.num_replicas_in_sync == 2
    for wrong in (keras_tuner.SklearnTuner, 3):
        with pytest.raises(kde.TunerError, match="Expected a keras_tuner.Tuner, got (SklearnTuner|3)"):
            kde.tuner.with_strategies(wrong)
    assert kde.tuner.with_strategies(Tuner) is Tuner


@pytest.mark.slow
def test_models_that_a_custom_fit_builds_live_under_the_strategy_too(tmp_path: pathlib.Path) -> None:
    class Folds(keras_tuner.HyperModel):
        def build(self, hp: Any) -> Any:
            return stock_model(hp)

        def fit(self, hp: Any, model: Any, x: Any, y: Any, **kwargs: Any) -> Any:
            models = [self.build(hp) for _ in range(2)]
            seen.extend((m.distribute_strategy.num_replicas_in_sync, isinstance(m, kde.Model)) for m in models)
            return [m.fit(x, y, **kwargs) for m in models]

    seen: list[Any] = []
    folds = Folds()
    own = folds.build
    tuner = searched(tmp_path, folds, strategies="mirrored(2)", max_trials=1)
    assert seen == [(2, True)] * 2
    assert folds.build == own  # and is the user's again
    assert len(TrialRecord.load(tuner.get_trial_dir("0")).seconds) == 1


def test_what_is_no_model_is_left_to_keras_tuner(tmp_path: pathlib.Path, mirrored: Any) -> None:
    assert build_in_scope(lambda hp: "no model", keras_tuner.HyperParameters(), mirrored) == "no model"


def test_a_copy_of_a_hypermodel_has_the_users_attributes() -> None:
    class Mine(keras_tuner.HyperModel):
        note = "mine"

    wrapped = ScopedHyperModel(Mine("a name"), lambda *_: None, lambda *_: None)
    copied = copy.copy(wrapped)
    assert (copied.inner, copied.note, copied.name) == (wrapped.inner, "mine", "a name")
    with pytest.raises(AttributeError, match="other"):
        copied.other  # noqa: B018 - it is looked up


@pytest.mark.slow
def test_a_model_of_the_best_hyperparameters_trains_after_the_search_too(tmp_path: pathlib.Path) -> None:
    """As keras-tuner advises: built anew, and trained by the hypermodel."""
    coupled = kde.tuner.Coupled(batch_size_per_replica=60)
    tuner = kde.tuner.RandomSearch(
        our_model, "val_loss", strategies="one_device", coupled=coupled, max_trials=1, directory=tmp_path
    )
    hp = tuner.oracle.get_space()
    model = tuner.hypermodel.build(hp)
    tuner.hypermodel.fit(hp, model, *TRAIN, epochs=1, verbose=0)
    assert model.optimizer.iterations == 2  # of 120 examples, in batches of 60


def test_a_search_refuses_resume(tmp_path: pathlib.Path) -> None:
    with pytest.raises(kde.TunerError, match="search was given the callback Resume, whose directory all trials would"):
        searched(tmp_path, strategies="one_device", search={"callbacks": [kde.Resume(tmp_path / "run")]})


@pytest.mark.slow
def test_a_subclassed_model_is_loaded_with_its_weights_under_its_strategy(tmp_path: pathlib.Path) -> None:
    tuner = searched(tmp_path, subclassed_model, "GridSearch", strategies=TWO, max_trials=2)
    trials = tuner.oracle.get_best_trials(2)
    for trial, model in zip(trials, tuner.get_best_models(2), strict=True):
        assert model.distribute_strategy is tuner.strategy_of(trial.hyperparameters).strategy
        assert model.evaluate(*HELD_OUT, verbose=0)[1] == pytest.approx(trial.score)


def test_settings_of_keras_made_before_a_search_hold_in_its_trials(tmp_path: pathlib.Path) -> None:
    def build(hp: Any) -> Any:
        seen.append(
            (
                keras.config.dtype_policy().name,
                keras.config.is_interactive_logging_enabled(),
                keras.config.is_traceback_filtering_enabled(),
            )
        )
        return our_model(hp)

    seen: list[tuple[str, bool, bool]] = []
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.disable_interactive_logging()
    keras.config.disable_traceback_filtering()
    try:
        tuner = kde.tuner.RandomSearch(build, "val_loss", strategies="one_device", directory=tmp_path)
        model = tuner._try_build(tuner.oracle.get_space())  # what a trial does, and get_best_models
        assert seen == [("mixed_bfloat16", False, False)] * 2
        assert model.layers[0].compute_dtype == "bfloat16"
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")
        keras.config.enable_interactive_logging()
        keras.config.enable_traceback_filtering()


def test_a_custom_run_trial_is_warned_of_what_it_does_not_do(tmp_path: pathlib.Path) -> None:
    class Own(keras_tuner.RandomSearch):
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            self.hypermodel.build(trial.hyperparameters)
            return {"val_loss": 1.0}

    def make(name: str, objective: Any, **given: Any) -> Any:
        return kde.tuner.with_strategies(Own)(
            our_model,
            objective,
            max_trials=1,
            strategies=["mirrored(2)"],
            directory=tmp_path,
            project_name=name,
            **given,
        )

    with pytest.raises(
        kde.TunerError, match=r"The objective examples_per_second was not measured, .*self.hypermodel.fit"
    ):
        make("a", kde.tuner.examples_per_second()).search(verbose=0)
    tuner = make("b", "val_loss", coupled=kde.tuner.Coupled(batch_size_per_replica=8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        tuner.search(verbose=0)
    (told,) = [str(warning.message) for warning in caught if "run_trial" in str(warning.message)]
    assert "not those of batch_size_per_replica, unless it has made batches of 16 examples itself" in told


@pytest.mark.parametrize("with_decorator", [False, True])
def test_a_tuner_with_a_run_trial_of_its_own_needs_no_hypermodel(with_decorator: bool, tmp_path: pathlib.Path) -> None:
    class Own(keras_tuner.GridSearch if with_decorator else kde.tuner.GridSearch):  # type: ignore[misc]
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            units = trial.hyperparameters.Int("units", 1, 2)
            strategy = self.strategy_of(trial.hyperparameters).strategy
            assert kwargs == {"extra": 5, "verbose": 0}
            return {"mine": float(units * strategy.num_replicas_in_sync)}

    made = (kde.tuner.with_strategies(Own) if with_decorator else Own)(
        objective=keras_tuner.Objective("mine", "min"), strategies=TWO, directory=tmp_path
    )
    made.search(extra=5, verbose=0)
    assert sorted(of_trials(made, lambda t: (strategy_of(t), t.hyperparameters.get("units"), t.score))) == [
        ("mirrored(2)", 1, 2.0),
        ("mirrored(2)", 2, 4.0),
        ("one_device", 1, 1.0),
        ("one_device", 2, 2.0),
    ]
    assert set(of_trials(made, lambda t: t.status)) == {"COMPLETED"}
    report = made.strategy_report()
    assert [(row.strategy, row.num_completed, row.best_score) for row in report] == [
        ("one_device", 2, 1.0),
        ("mirrored(2)", 2, 2.0),
    ]


@pytest.mark.slow
def test_a_run_trial_of_its_own_that_calls_keras_tuners_is_followed_once(tmp_path: pathlib.Path) -> None:
    class Own(kde.tuner.RandomSearch):
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            self.names = [*getattr(self, "names", []), strategy_of(trial)]
            return super().run_trial(trial, *args, **kwargs)

    tuner = searched(tmp_path, our_model, Own, strategies=["mirrored(2)"], max_trials=1)
    assert tuner.names == ["mirrored(2)"]
    assert only(tuner).status == "COMPLETED"
    assert tuner.strategy_report()["mirrored(2)"].num_completed == 1
    assert "run_trial" not in vars(tuner)


def test_a_strategy_that_cannot_be_made_any_more_is_named_when_the_tuner_is_made(tmp_path: pathlib.Path) -> None:
    message = (
        r"strategies: 'mirrored\(9\)' cannot be made here, so each of its trials will fail. num_replicas=9 needs 9 "
        r"logical CPU devices, but TensorFlow is initialised already .* Call pick_strategy before anything else "
    )
    with pytest.warns(UserWarning, match=message):
        kde.tuner.RandomSearch(our_model, "val_loss", strategies=["one_device", "mirrored(9)"], directory=tmp_path)


def test_an_objective_is_measured_over_all_that_a_custom_fit_trains_and_returns(tmp_path: pathlib.Path) -> None:
    class Several(keras_tuner.HyperModel):
        def build(self, hp: Any) -> Any:
            return our_model(hp)

        def fit(self, hp: Any, model: Any, x: Any, y: Any, **kwargs: Any) -> Any:
            for _ in range(2):
                model.fit(x, y, **kwargs)
            return [{"q": 1.0}, {"q": 3.0}]

    resets: list[int] = []
    objective = kde.tuner.cost("q", seconds=1e-9, direction="min")
    objective.reset = lambda: resets.append(1)  # type: ignore[method-assign]
    objective.value = lambda logs, times: logs.get("q", 9.0)  # type: ignore[method-assign]
    tuner = searched(tmp_path, Several(), strategies="one_device", objective=objective, max_trials=1)
    assert only(tuner).score == 2.0
    assert resets == [1]


def test_a_meter_leaves_out_the_first_execution_of_validation() -> None:
    times = iter([1.0, 2.0, 7.0, 8.0, 20.0])
    meter = Meter(clock=lambda: next(times))
    meter.on_train_batch_end(0)
    meter.on_test_begin()
    meter.on_test_batch_end(0)
    meter.on_test_begin()  # of the second epoch, which compiles nothing
    meter.on_test_batch_end(0)
    assert meter.seconds == 20.0 - 1.0 - (7.0 - 2.0)


def test_executions_have_many_steps_unless_a_tuner_looks_at_batches() -> None:
    class Looks(keras_tuner.RandomSearch):
        def on_batch_end(self, trial: Any, model: Any, batch: int, logs: Any = None) -> None:
            """Look."""

    tuner_utils = importlib.import_module("keras_tuner.src.engine.tuner_utils")
    for cls, have_many in ((keras_tuner.RandomSearch, True), (Looks, False)):
        tuner = cls.__new__(cls)
        callback = tuner_utils.TunerCallback(tuner, None)
        assert looks_at_batches([callback], "train")
        for found in callbacks_with_empty_batch_hooks([callback], tuner):
            allow_multi_step(found)
        assert looks_at_batches([callback], "train") != have_many


def test_a_meter_records_nothing_where_a_step_is_made_elsewhere() -> None:
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    meter = Meter()
    model: Any = types.SimpleNamespace(distribute_strategy=strategy)  # without a way to add a recorder
    meter.on_run_prepare(model)
    assert math.isnan(meter.examples_per_second)


def test_a_meter_continues_with_a_second_fit() -> None:
    times = iter([1.0, 4.0, 9.0])
    meter = Meter(clock=lambda: next(times))
    meter.on_train_begin()
    meter.on_train_batch_end(0)
    meter.on_train_end()
    assert meter.seconds == 3.0
    meter.on_train_begin()
    assert meter.seconds == 8.0


@pytest.mark.slow
def test_monitors_given_to_search_write_each_trial_into_its_own_folder(tmp_path: pathlib.Path) -> None:
    monitor = kde.ReplicaMonitor(tmp_path / "logs", experiment="mine")
    given = {"strategies": "one_device", "max_trials": 1, "executions_per_trial": 2, "log_dir": tmp_path / "own"}
    searched(tmp_path, our_model, search={"callbacks": [monitor]}, **given)
    for folder, besides in ((tmp_path / "logs" / "mine", []), (tmp_path / "own", ["result"])):
        found = sorted(path.name for path in (folder / "trial_0").iterdir() if path.is_dir())
        assert found == ["execution_0", "execution_1", *besides]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["mine"]


def test_a_tuner_compiles_models_in_scope_and_keeps_arguments_it_was_not_given(tmp_path: pathlib.Path) -> None:
    def make(build: Any, name: str, **given: Any) -> Any:
        return kde.tuner.RandomSearch(
            build, "val_loss", strategies=["mirrored(2)"], directory=tmp_path, project_name=name, **given
        )

    def uncompiled(hp: Any) -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])

    loss = "sparse_categorical_crossentropy"
    coupled = kde.tuner.Coupled(batch_size_per_replica=10, learning_rate_scaling="linear")
    tuner = make(uncompiled, "a", optimizer=keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"], coupled=coupled)
    model = tuner._build_hypermodel(tuner.oracle.get_space())  # what a trial does
    assert rate_of(model) == pytest.approx(0.2)
    assert kde.check_scope(model, model.distribute_strategy).ok
    assert rate_of(tuner._build_hypermodel(tuner.oracle.get_space())) == pytest.approx(0.2)  # each has its own
    other = make(stock_model, "b", loss="mse")
    model = other._build_hypermodel(other.oracle.get_space())
    assert model.loss == "mse"
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    model.fit(X, np.eye(3)[Y], epochs=1, verbose=0)
    assert "accuracy" in model.history.history  # keras-tuner would have dropped it


def test_stock_arguments_mean_what_they_mean_in_keras_tuner(tmp_path: pathlib.Path, mirrored: Any) -> None:
    tuner = kde.tuner.RandomSearch(stock_model, "val_loss", distribution_strategy=mirrored, directory=tmp_path)
    assert tuner.hypermodel.build(tuner.oracle.get_space()).distribute_strategy is mirrored
    with pytest.raises(kde.TunerError, match="Both strategies and distribution_strategy were given"):
        kde.tuner.RandomSearch(stock_model, "val_loss", distribution_strategy=mirrored, strategies=TWO)
    with pytest.raises(ValueError, match="Received `hypermodel=None`. We only allow not specifying"):
        kde.tuner.RandomSearch(objective="val_loss", directory=tmp_path, project_name="b")
    fixed = space(units=[4])
    tuner = kde.tuner.RandomSearch(
        stock_model,
        "val_loss",
        hyperparameters=fixed,
        tune_new_entries=False,
        allow_new_entries=False,
        strategies=TWO,
        directory=tmp_path,
        project_name="c",
    )
    drawn = {tuner.oracle.create_trial(f"t{i}").hyperparameters.get("distribution_strategy") for i in range(2)}
    assert drawn == set(TWO)  # strategies are searched whatever else is not


# What cannot run

CAUSES: dict[str, tuple[BaseException, str]] = {
    "OOM": (tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9]"), "out of memory"),
    "XLA's OOM": (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"), "out of memory"),
    "Python's": (MemoryError(), "out of memory"),
    "a strategy": (kde.StrategyError("num_replicas is 8, but there are fewer GPUs."), "missing device"),
    "a device": (
        tf.errors.InvalidArgumentError(None, None, "Could not satisfy device specification '/device:GPU:1'"),
        "missing device",
    ),
    "ours": (kde.ScopeError("2 of 2 trainable variables of 'net' were created outside"), "scope"),
    "TensorFlow's": (ValueError("Mixing different tf.distribute.Strategy objects: <...>"), "scope"),
    "a deadline": (tf.errors.DeadlineExceededError(None, None, "Deadline Exceeded"), "collective time-out"),
    "a collective": (
        tf.errors.InternalError(None, None, "Collective ops is aborted by: ... timed out"),
        "collective time-out",
    ),
    "heartbeat": (tf.errors.UnavailableError(None, None, "Task /job:worker/task:1 heartbeat timeout"), "worker lost"),
    "connection": (tf.errors.InternalError(None, None, "Connection reset by peer"), "worker lost"),
    "AddN": (
        tf.errors.InvalidArgumentError(
            None, None, "Inputs to operation AddN of type AddN must have the same size and shape."
        ),
        "indivisible batch",
    ),
    "TPU": (ValueError("The batch size (15) must be divisible by the number of replicas (2)"), "indivisible batch"),
    "check_numerics": (tf.errors.InvalidArgumentError(None, None, "y : Tensor had NaN values"), "NaN loss"),
    "known": (InfeasibleError(Failure("NaN loss", "loss was NaN")), "NaN loss"),
    "NonFinite": (kde.NonFiniteError("Step 6 of epoch 1: loss of replica 1 is not finite."), "NaN loss"),
    "stateful": (
        kde.DataError("'rnn' is stateful: it keeps a state for each row of a batch, and each of the 2 replicas has"),
        "indivisible batch",
    ),
    "heads": (ValueError("`num_query_heads` must be divisible by `num_key_value_heads`."), "user error"),
    "shapes": (ValueError("Input 0 of layer dense is incompatible with the layer"), "user error"),
    "a key": (KeyError("heartbeat"), "user error"),
    "user's device": (FileNotFoundError("No such device: camera"), "user error"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_failure_is_classified_by_its_type_or_message_also_as_a_cause(name: str) -> None:
    error, kind = CAUSES[name]
    assert classify_failure(error).kind == kind
    wrapped = RuntimeError("fit failed")
    wrapped.__cause__ = error
    assert classify_failure(wrapped).kind == kind
    assert classify_failure(error).is_infeasible == (kind != "user error")


def test_messages_of_tensorflow_count_where_tensorflow_raises_them() -> None:
    def of_raised(call: Any, *args: Any) -> str:
        with pytest.raises((IndexError, ValueError)) as caught:
            call(*args)
        return classify_failure(caught.value).kind

    assert of_raised(lambda: [].pop()) == "user error"
    assert (
        classify_failure(IndexError("pop from empty list")).kind == "scope"
    )  # what stock keras-tuner meets in a scope
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    with one.scope(), pytest.raises(RuntimeError) as caught, tf.distribute.OneDeviceStrategy("CPU:0").scope():
        pass
    assert classify_failure(caught.value).kind == "scope"


def test_out_of_memory_on_one_replica_is_not_classified_as_a_failed_collective() -> None:
    aborted = tf.errors.InternalError(None, None, "Collective ops is aborted by: OOM when allocating; timed out")
    assert classify_failure(aborted).kind == "out of memory"


def _too_large(hp: Any) -> Any:
    if hp.get("distribution_strategy") == "mirrored(2)":
        np.zeros((2**40, 2**10))
    return our_model(hp)


def _too_large_for_tensorflow(hp: Any) -> Any:
    if hp.get("distribution_strategy") == "mirrored(2)":
        tf.zeros([2**40, 2**10])  # for ten seconds it hopes that somebody gives memory back
    return our_model(hp)


_OUTSIDE: list[Any] = []


def _outside(hp: Any) -> Any:
    if not _OUTSIDE:
        _OUTSIDE.append(keras.layers.Dense(3, "softmax"))
        _OUTSIDE[0].build((None, 4))  # under the first strategy that comes
    return compiled(kde.Sequential([keras.Input((4,)), _OUTSIDE[0]]))


def _nan(hp: Any) -> Any:
    factor = math.nan if hp.get("distribution_strategy") == "mirrored(2)" else 1.0
    return compiled(
        kde.Sequential([keras.Input((4,)), keras.layers.Rescaling(factor), keras.layers.Dense(3, "softmax")])
    )


def _fixed_batch(hp: Any) -> Any:
    inputs = keras.Input(batch_shape=(40, 4))
    return compiled(kde.Model(inputs, keras.layers.Dense(3, "softmax")(inputs)))


@pytest.mark.parametrize(
    ("kind", "build", "strategy", "cause"),
    [
        ("out of memory", _too_large, "mirrored(2)", "Unable to allocate 8.00 PiB for an array"),
        pytest.param(
            "out of memory",
            _too_large_for_tensorflow,
            "mirrored(2)",
            "OOM when allocating tensor with shape",
            marks=pytest.mark.slow,
        ),
        ("missing device", our_model, "mirrored(9)", "num_replicas=9 needs 9 logical CPU devices"),
        ("scope", _outside, "mirrored(2)", "were created outside MirroredStrategy"),
        ("NaN loss", _nan, "mirrored(2)", "loss was NaN in 1 epoch out of 1"),
        (
            "indivisible batch",
            _fixed_batch,
            "mirrored(2)",
            "takes batches of 40 examples, and each of 2 replicas gets 20 of 40",
        ),
    ],
)
def test_a_point_that_cannot_run_fails_with_the_cause_and_the_search_continues(
    kind: str, build: Any, strategy: str, cause: str, tmp_path: pathlib.Path
) -> None:
    _OUTSIDE.clear()
    tuner = searched(tmp_path, build, "GridSearch", strategies=["one_device", strategy], max_trials=2)
    first, second = sorted(tuner.oracle.trials.values(), key=lambda trial: trial.trial_id)
    assert (first.status, second.status) == ("COMPLETED", "FAILED")
    assert strategy_of(second) == strategy
    assert f"This trial cannot run under the strategy '{strategy}'. {kind}: " in second.message
    (failure,) = tuner.strategy_report()[strategy].failures
    assert (failure.kind, failure.count) == (kind, 1)
    assert cause in failure.causes[0]


def test_consecutive_infeasible_trials_do_not_end_the_search_and_user_errors_do(tmp_path: pathlib.Path) -> None:
    def full(hp: Any) -> float:
        raise MemoryError(hp.get("x"))

    def wrong(hp: Any) -> float:
        if hp.get("x") % 2:
            raise MemoryError
        raise KeyError("a bug")

    def search(judge: Any, name: str) -> Any:
        tuner = judged(keras_tuner.GridSearch, judge)(
            hyperparameters=space(x=list(range(12))), strategies=["one_device"], directory=tmp_path, project_name=name
        )
        tuner.search(verbose=0)
        return tuner

    tuner = search(full, "a")
    assert of_trials(tuner, lambda trial: trial.status) == ["FAILED"] * 12
    with pytest.raises(RuntimeError, match="(?s)consecutive failures exceeded the limit of 3.*a bug") as caught:
        search(wrong, "b")
    assert "MemoryError" not in str(caught.value)
    assert (
        len(list((tmp_path / "b").glob("trial_*"))) == 5
    )  # 0, 2 and 4 are wrong; what is full in between is no matter


def test_a_nan_score_is_a_failure_with_its_cause(tmp_path: pathlib.Path) -> None:
    tuner = judged(keras_tuner.GridSearch, lambda hp: math.nan)(
        hyperparameters=space(x=[1, 2, 3, 4, 5]),
        objective=keras_tuner.Objective("q", "max"),
        strategies="one_device",
        directory=tmp_path,
    )
    tuner.search(verbose=0)
    (failure,) = tuner.strategy_report()["one_device"].failures
    assert (failure.kind, failure.count, failure.causes) == ("NaN loss", 5, ("q was NaN",))


def test_a_strategy_that_failed_is_tried_with_other_values(tmp_path: pathlib.Path) -> None:
    def build(hp: Any) -> Any:
        model = our_model(hp)
        model.compile("sgd", "mse", virtual_replicas=hp.Choice("virtual", [2, 3, 4]))
        return model

    class Own(keras_tuner.GridSearch):
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            self.hypermodel.build(trial.hyperparameters)
            return 1.0

    tuner = kde.tuner.with_strategies(Own)(
        build, hyperparameters=space(units=[4]), strategies=["mirrored(2)"], directory=tmp_path
    )
    tuner.search(verbose=0)
    statuses = dict(of_trials(tuner, lambda t: (t.hyperparameters.get("virtual"), t.status)))
    assert statuses == {2: "COMPLETED", 3: "FAILED", 4: "COMPLETED"}
    hopeless = [i for i in (2, 3, 4) if _is_hopeless(tuner, {"units": 4, "virtual": i})]
    assert hopeless == [3]


def _is_hopeless(tuner: Any, values: dict[str, Any]) -> bool:
    return _FailedTrials(tuner.oracle, tuner._records).is_known_infeasible(
        {"distribution_strategy": "mirrored(2)", **values}
    )


def test_a_transient_failure_is_retried(tmp_path: pathlib.Path) -> None:
    attempts: list[int] = []

    def judge(hp: Any) -> float:
        attempts.append(1)
        if len(attempts) == 1:
            raise tf.errors.UnavailableError(None, None, "heartbeat timeout")
        return 1.0

    tuner = judged(keras_tuner.RandomSearch, judge)(
        hyperparameters=space(x=[1, 2]),
        strategies="one_device",
        max_trials=1,
        max_retries_per_trial=1,
        directory=tmp_path,
    )
    tuner.search(verbose=0)
    assert only(tuner).status == "COMPLETED"
    assert tuner.strategy_report()["one_device"].failures == ()


@pytest.mark.parametrize("tuner", ["RandomSearch", "BayesianOptimization", "Hyperband"])
def test_an_unavailable_strategy_is_proposed_once(tuner: str, tmp_path: pathlib.Path) -> None:
    def judge(hp: Any) -> float:
        made.strategy_of(hp)
        return float(hp.get("x"))

    given = {"max_epochs": 9} if tuner == "Hyperband" else {"max_trials": 12}
    made = judged(getattr(keras_tuner, tuner), judge)(
        hyperparameters=space(x=list(range(100))),
        strategies=["one_device", "mirrored(9)"],
        directory=tmp_path,
        seed=3,
        **given,
    )
    made.search(verbose=0)
    assert len(made.oracle.trials) >= 12
    assert of_trials(made, strategy_of).count("mirrored(9)") == 1
    row = made.strategy_report()["mirrored(9)"]
    assert (row.num_trials, row.num_completed, row.failures[0].kind) == (1, 0, "missing device")


@pytest.mark.slow
def test_bayesian_optimization_learns_where_trials_fail(tmp_path: pathlib.Path) -> None:
    failed: dict[str, list[float]] = {"ours": [], "stock": []}

    def judge(who: str) -> Any:
        def of(hp: Any) -> float:
            x = hp.Float("x", 0.0, 1.0)
            if x > 0.5:
                failed[who].append(x)
                raise MemoryError("OOM")
            return -x  # the best is at the edge of what cannot run

        return of

    given = {"max_trials": 16, "num_initial_points": 5, "seed": 4, "directory": tmp_path}
    tuner = judged(keras_tuner.BayesianOptimization, judge("ours"))

    class Stock(keras_tuner.BayesianOptimization):
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            return judge("stock")(trial.hyperparameters)

    with threadpool_limits(1):  # threads of linear algebra wait for each other on a busy machine
        tuner(strategies="one_device", project_name="a", **given).search(verbose=0)
        Stock(max_consecutive_failed_trials=99, project_name="b", **given).search(verbose=0)
    assert len(failed["ours"]) < len(failed["stock"]) / 2


@pytest.mark.parametrize(
    ("objective", "executions", "scores", "seen"),
    [
        ("val_loss", 1, [3e9, 5e9, 4e9], [3e9, 5e9, 4e9]),
        ("val_accuracy", 1, [0.5, 0.9, math.nan], [-0.5, -0.9, -0.1]),
        (kde.tuner.seconds_to("val_accuracy", 0.9), 1, [3.0, 5.0, 1.2 * UNREACHED], [3.0, 5.0, 7.0]),
        (kde.tuner.seconds_to("val_accuracy", 0.9), 3, [3.0, 5.0, UNREACHED / 3 + 4.0], [3.0, 5.0, 7.0]),
    ],
)
def test_bayesian_optimization_counts_an_unreached_quality_as_a_failure_and_no_other_large_score(
    objective: Any, executions: int, scores: list[float], seen: list[float], tmp_path: pathlib.Path
) -> None:
    drawn = iter(scores)
    tuner = judged(keras_tuner.BayesianOptimization, lambda hp: next(drawn))(
        hyperparameters=space(x=list(range(100))),
        objective=objective,
        executions_per_trial=executions,
        strategies="one_device",
        max_trials=3,
        num_initial_points=3,
        directory=tmp_path,
    )
    tuner.search(verbose=0)
    assert sorted(tuner.oracle._vectorize_trials()[1]) == pytest.approx(sorted(seen))


def test_mistakes_in_setting_up_a_search_end_it_with_the_message(tmp_path: pathlib.Path) -> None:
    given = {"strategies": "one_device", "max_trials": 1, "objective": kde.tuner.examples_per_second()}
    with pytest.raises(
        kde.TunerError, match="examples_per_second could not be measured: that takes at least three steps"
    ):
        searched(tmp_path / "b", search={"batch_size": 120}, **given)
    with pytest.raises(kde.TunerError, match="search was given a batch_size, and batch_size_per_replica is coupled"):
        searched(tmp_path, strategies="one_device", coupled=kde.tuner.Coupled(batch_size_per_replica=8), max_trials=1)


# Which strategy is best

OBJECTIVES = {
    "examples_per_second": kde.tuner.examples_per_second,
    "seconds_to": lambda: kde.tuner.seconds_to("loss", 50.0),
    "cost": lambda: kde.tuner.cost("val_loss", seconds=100.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("slow", TWO)
@pytest.mark.parametrize("objective", rotating(OBJECTIVES, ["examples_per_second"]))
def test_a_slow_strategy_is_never_picked(objective: str, slow: str, tmp_path: pathlib.Path) -> None:
    (fast,) = set(TWO) - {slow}
    tuner = searched(
        tmp_path,
        slowed(slow, 0.1),  # a second an epoch: more than a hiccup of the machine
        "GridSearch",
        strategies=TWO,
        objective=OBJECTIVES[objective](),
        search={"epochs": 2, "batch_size": 12},
    )
    assert tuner.get_best_hyperparameters()[0].get("distribution_strategy") == fast
    report = tuner.strategy_report()
    low, middle, high = report[slow].examples_per_second
    assert low <= middle <= high < 12 / 0.1  # rows a step, and seconds that it sleeps
    assert report[fast].examples_per_second[1] > middle


@pytest.mark.slow
def test_throughput_leaves_out_compilation_and_the_first_steps(tmp_path: pathlib.Path) -> None:
    def build(hp: Any) -> Any:
        return compiled(kde.Sequential([keras.Input((4,)), Slow(0.01), keras.layers.Dense(3, "softmax")]))

    class Look(kde.RunCallback):
        """Times what follows the first two executions, epoch by epoch."""

        supports_multi_step = True

        def on_train_begin(self, logs: Any = None) -> None:
            self.num_executions, self.num_examples, self.seconds = 0, 0, 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.num_steps, self.last = 0, time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now, num_steps = time.perf_counter(), batch + 1
            self.num_executions += 1
            if self.num_executions > 2:
                self.num_examples += 12 * (num_steps - self.num_steps)
                self.seconds += now - self.last
            self.num_steps, self.last = num_steps, now

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append("examples_per_second" in logs)
            looked[:] = [self.num_examples, self.seconds]

    seen: list[bool] = []
    looked: list[float] = []
    tuner = searched(
        tmp_path,
        build,
        strategies="mirrored(2)",
        objective=kde.tuner.examples_per_second(),
        max_trials=1,
        search={"epochs": 3, "batch_size": 12, "callbacks": [Look()]},
    )
    assert seen == [True] * 3  # as early stopping needs it
    num_examples, seconds = looked
    assert num_examples > 200
    assert num_examples / seconds < only(tuner).score < 12 / 0.01  # rows a step, and seconds that it sleeps
    (rate,) = TrialRecord.load(tuner.get_trial_dir("0")).examples_per_second
    assert rate == pytest.approx(only(tuner).score)


class _Times:
    seconds = 0.0
    examples_per_second = 7.0


def test_seconds_to_a_quality_count_until_it_is_first_reached_and_else_by_how_far_it_was() -> None:
    objective, times = kde.tuner.seconds_to("val_accuracy", 0.9), _Times()
    assert (objective.name, objective.direction) == ("seconds_to_val_accuracy_0.9", "min")
    values = []
    for times.seconds, accuracy in ((1.0, 0.45), (2.0, 0.81), (3.0, 0.9), (4.0, 0.95)):
        values.append(objective.value({"val_accuracy": accuracy}, times))
    assert values == [pytest.approx(1.5 * UNREACHED), pytest.approx(1.1 * UNREACHED), 3.0, 3.0]
    objective.reset()
    assert objective.value({"val_accuracy": math.nan}, times) > 2 * UNREACHED
    down = kde.tuner.seconds_to("val_loss", 0.5)
    assert down.value({"val_loss": 0.4}, times) == 4.0


def test_what_a_fit_has_measured_of_its_epochs_is_kept(tmp_path: pathlib.Path) -> None:
    cost = kde.tuner.cost("val_loss", seconds=0.1)
    trial = keras_tuner.engine.trial.Trial(keras_tuner.HyperParameters(), "0")
    run = TrialRun(trial, "a", None, objectives=[cost], logs=None, seconds_before=0.0, tuner=None)  # type: ignore[arg-type]
    history = keras.callbacks.History()
    history.history = {"val_loss": [0.5, 0.4], cost.name: [2.5, 4.4]}
    times: Any = _Times()
    assert run._add_measurements(history, times).history[cost.name] == [2.5, 4.4]  # type: ignore[attr-defined]
    times.seconds = 20.0
    assert run._add_measurements([{"val_loss": 0.5}, {cost.name: 7.0}], times) == [
        {"val_loss": 0.5, cost.name: pytest.approx(2.5)},
        {cost.name: 7.0},
    ]


def test_an_epoch_without_logs_is_measured_all_the_same() -> None:
    ended: list[int] = []
    meter: Any = types.SimpleNamespace(on_epoch_end=ended.append)
    ObjectiveLogger(meter, [kde.tuner.cost("val_loss", seconds=0.1)]).on_epoch_end(3)
    assert ended == [3]


def test_a_cost_adds_a_price_for_time_to_quality() -> None:
    times = _Times()
    times.seconds = 20.0
    assert kde.tuner.cost("val_loss", seconds=0.1).value({"val_loss": 0.5}, times) == pytest.approx(2.5)
    assert kde.tuner.cost("val_accuracy", seconds=0.1).value({"val_accuracy": 0.5}, times) == pytest.approx(1.5)
    with pytest.raises(kde.TunerError, match="seconds must be what a second costs, a number > 0, got 0"):
        kde.tuner.cost("val_loss", seconds=0)
    with pytest.raises(kde.TunerError, match="Whether to maximize or to minimize 'mine' is not known"):
        kde.tuner.cost("mine", seconds=1)
    with pytest.raises(kde.TunerError, match="needs 'val_loss', which is not logged; logged are loss, accuracy"):
        kde.tuner.cost("val_loss", seconds=1).value({"loss": 1.0, "accuracy": 1.0}, times)


@pytest.mark.slow
def test_a_screening_drops_strategies_that_are_slow_or_cannot_run(tmp_path: pathlib.Path) -> None:
    rules = kde.tuner.Screening(seconds=0.2, samples=3, rungs=1)
    given = {"strategies": [*TWO, "mirrored(9)"], "screening": rules, "max_trials": 2}
    tuner = searched(tmp_path, slowed("mirrored(2)", 0.1), **given)
    assert set(of_trials(tuner, strategy_of)) == {"one_device"}
    report = tuner.strategy_report()
    assert "times slower than one_device, in each of 3 rounds" in report["mirrored(2)"].note
    assert report["mirrored(9)"].note.startswith("missing device: ")
    assert report["one_device"].note == ""
    reopened = searched(tmp_path, slowed("mirrored(2)", 0.1), **{**given, "max_trials": 3})
    assert reopened.oracle.get_space().get("distribution_strategy") == "one_device"


def test_a_screening_keeps_strategies_that_are_equal_within_noise_and_doubles_the_time() -> None:
    class Runner:
        def __init__(self, name: str) -> None:
            self.name, self.rates = name, iter(RATES[name])

        def run(self, seconds: float) -> float:
            runs.append((self.name, seconds))
            return next(self.rates)

    RATES = {
        "a": [100, 102, 98, 100, 101, 99],
        "b": [99, 104, 97, 90, 91, 89],  # as fast as a in the first rung
        "c": [50, 51, 49],
        "d": [99, 80, 103, 99, 80, 99],  # slower in some turns only
    }
    runs: list[tuple[str, float]] = []
    result = screen_strategies(kde.tuner.Screening(seconds=1.0, samples=3, rungs=2), list(RATES), Runner)
    assert set(result.survivors) == {"a", "d"}
    assert result.dropped["c"] == "2.0 times slower than a, in each of 3 rounds"
    assert set(result.dropped) == {"b", "c"}
    assert {seconds for name, seconds in runs if name == "c"} == {1.0}
    assert {seconds for name, seconds in runs[-9:]} == {2.0}
    assert [name for name, _ in runs[:8]] == ["a", "b", "c", "d", "b", "c", "d", "a"]  # another one begins each turn


def test_a_screening_that_no_strategy_can_run_and_a_bug_in_it_are_errors() -> None:
    def full(name: str) -> Any:
        raise MemoryError("OOM")

    def wrong(name: str) -> Any:
        raise KeyError("a bug")

    with pytest.raises(kde.TunerError, match="None of the strategies can train .* a: out of memory: MemoryError: OOM"):
        screen_strategies(kde.tuner.Screening(), ["a"], full)
    with pytest.raises(KeyError, match="a bug"):
        screen_strategies(kde.tuner.Screening(), ["a"], wrong)
    with pytest.raises(kde.TunerError, match="samples must be an integer >= 3, got 2"):
        kde.tuner.Screening(samples=2)


# What goes with the strategy


def _rate() -> float:
    return 0.1


@pytest.mark.parametrize(
    ("rule", "rate"),
    rotating([("none", 0.1), ("linear", 0.1 * 4 * 3), ("sqrt", 0.1 * 12**0.5)], [("linear", 0.1 * 4 * 3)]),
)
def test_the_learning_rate_follows_the_examples_of_an_update_exactly(
    rule: str, rate: float, tmp_path: pathlib.Path
) -> None:
    def build(hp: Any) -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    coupled = kde.tuner.Coupled(
        batch_size_per_replica=10,
        learning_rate_scaling=rule,
        reference_batch_size=None if rule == "none" else 5,
        gradient_accumulation_steps=3,
        steps_per_execution=2,
    )
    seen: list[Any] = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append((self.model.steps_per_execution, rate_of(self.model)))
            assert not self.model.replica_runtime.chooses_num_steps

        def on_train_end(self, logs: Any = None) -> None:
            seen.append((self.params["steps"], int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))))

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    tuner = searched(
        tmp_path,
        build,
        strategies="mirrored(2)",
        coupled=coupled,
        objective="val_loss",
        max_trials=1,
        search={"batch_size": None, "callbacks": [Look()]},
    )
    assert seen == [(2, pytest.approx(rate)), (6, 2)]  # 120 rows in batches of 20, three of which make an update
    values = only(tuner).hyperparameters.values
    assert values["batch_size_per_replica"] == 10
    assert values["gradient_accumulation_steps"] == 3
    assert TrialRecord.load(tuner.get_trial_dir("0")).global_batch_size == 20
    (model,) = tuner.get_best_models()
    assert rate_of(model) == pytest.approx(rate)


def test_custom_hyperparameters_are_not_mistaken_for_coupled_ones() -> None:
    hp = keras_tuner.HyperParameters()
    hp.Fixed("warmup_steps", 100)
    hp.Fixed("learning_rate_scaling", "mine")
    coupled = kde.tuner.Coupled(batch_size_per_replica=10)
    coupled.declare(hp)
    assert coupled.values(hp, 2) == CoupledValues(global_batch_size=20)


def test_warm_up_grows_the_learning_rate_of_build_to_the_scaled_one() -> None:
    rate = ScaledLearningRate(0.1, factor=5.0, warmup_steps=4)
    assert [float(rate(step)) for step in (0, 1, 2, 4, 9)] == pytest.approx([0.1, 0.2, 0.3, 0.5, 0.5])
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
    scaled = ScaledLearningRate(decay, factor=2.0)
    assert [float(scaled(step)) for step in (0, 1, 2)] == pytest.approx([0.2, 0.1, 0.05])
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(scaled))
    assert float(again(1)) == pytest.approx(0.1)


def test_warm_up_counts_updates_and_is_not_repeated_where_hyperband_continues(tmp_path: pathlib.Path) -> None:
    coupled = kde.tuner.Coupled(
        batch_size_per_replica=[10, 20], learning_rate_scaling="linear", warmup_steps=6, gradient_accumulation_steps=2
    )
    tuner = kde.tuner.GridSearch(our_model, "val_loss", strategies="mirrored(2)", coupled=coupled, directory=tmp_path)
    hp = tuner.oracle.get_space()
    model = tuner.hypermodel.build(hp)
    rate = model.optimizer._learning_rate
    assert (rate.base, rate.factor, rate.warmup_steps) == (pytest.approx(0.05), 4.0, 12)  # Keras counts batches
    model.fit(*TRAIN, batch_size=20, epochs=1, verbose=0)
    assert rate_of(model) == pytest.approx(0.05 * (1 + 3 * 6 / 12))
    hp.values["batch_size_per_replica"] = 20
    hp.values["tuner/initial_epoch"] = 2
    assert coupled.values(hp, 4) == CoupledValues(80, 16.0, 0, 2, None)
    assert rate_of(tuner.hypermodel.build(hp)) == pytest.approx(0.05 * 8)


@pytest.mark.parametrize(
    ("optimizer", "values", "message"),
    [
        (None, CoupledValues(learning_rate_factor=2.0), "is not compiled, so it has no learning rate to scale"),
        (
            {"gradient_accumulation_steps": 2},
            CoupledValues(accumulation=4),
            "The optimizer of .* already accumulates gradients",
        ),
        ({"learning_rate": _rate}, CoupledValues(learning_rate_factor=2.0), "is a function, which cannot be scaled"),
    ],
)
def test_what_cannot_be_coupled_is_an_error(optimizer: Any, values: CoupledValues, message: str) -> None:
    model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    if optimizer is not None:
        model.compile(keras.optimizers.SGD(**optimizer), "mse")
    with pytest.raises(kde.TunerError, match=message):
        apply_coupled(model, values)


def test_a_batch_that_a_model_does_not_take_is_known_when_it_is_built() -> None:
    model = _fixed_batch(None)
    apply_coupled(model, CoupledValues(global_batch_size=40))
    with pytest.raises(InfeasibleError, match="takes batches of 40 examples, and each of 1 replicas gets 80 of 80"):
        apply_coupled(model, CoupledValues(global_batch_size=80))


def test_gradients_accumulate_though_the_learning_rate_stays() -> None:
    model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(_rate), "mse")  # which could not be scaled
    apply_coupled(model, CoupledValues(accumulation=4))
    assert model.optimizer.gradient_accumulation_steps == 4
    assert rate_of(model) == pytest.approx(0.1)


def test_a_schedule_is_scaled_at_every_step() -> None:
    model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
    model.compile(keras.optimizers.SGD(decay), "mse")
    apply_coupled(model, CoupledValues(learning_rate_factor=2.0))
    rates = []
    for step in (0, 1, 2):
        model.optimizer.iterations.assign(step)
        rates.append(rate_of(model))
    assert rates == pytest.approx([0.2, 0.1, 0.05])


def test_data_may_be_given_by_name_and_a_batch_size_of_validation_is_kept() -> None:
    given, named = batch_data([], {"x": tf.data.Dataset.from_tensor_slices(TRAIN)}, 50)
    assert given == []
    assert [len(x) for x, _ in named["x"]] == [50, 50, 20]
    _, named = batch_data(TRAIN, {"validation_data": HELD_OUT, "validation_batch_size": 7}, 50)
    assert (named["batch_size"], named["validation_batch_size"]) == (50, 7)


def test_the_tuner_batches_arrays_and_datasets_of_examples() -> None:
    examples = tf.data.Dataset.from_tensor_slices(TRAIN)
    (data,), named = batch_data([examples], {"validation_data": tf.data.Dataset.from_tensor_slices(HELD_OUT)}, 50)
    assert [len(x) for x, _ in data] == [50, 50, 20]
    assert [len(x) for x, _ in named["validation_data"]] == [30]
    arrays, named = batch_data(TRAIN, {"validation_data": HELD_OUT, "epochs": 3}, 50)
    assert arrays == list(TRAIN)
    assert named == {"validation_data": HELD_OUT, "epochs": 3, "batch_size": 50, "validation_batch_size": 50}
    with pytest.raises(kde.TunerError, match=r"x gives batches .* Give a dataset of single examples: without .batch"):
        batch_data([examples.batch(5)], {}, 50)
    whole = examples.batch(5, drop_remainder=True)
    with pytest.raises(kde.TunerError, match=r"x gives batches \(\(5, 4\), \(5,\)\), which"):
        batch_data([whole], {}, 50, our_model(keras_tuner.HyperParameters()))
    batch_data([examples], {}, 50, our_model(keras_tuner.HyperParameters()))
    with pytest.raises(kde.TunerError, match="x is a generator, which the tuner cannot batch"):
        batch_data([(pair for pair in ())], {}, 50)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size_per_replica": 0}, "batch_size_per_replica must be an integer >= 1, got 0"),
        ({"steps_per_execution": [1, 2.5]}, "steps_per_execution must be an integer >= 1, got 2.5"),
        ({"batch_size_per_replica": [], "learning_rate_scaling": "linear"}, "batch_size_per_replica is empty"),
        ({"batch_size_per_replica": 8, "learning_rate_scaling": []}, "learning_rate_scaling is empty"),
        ({"learning_rate_scaling": "cubic"}, "learning_rate_scaling must be one of none, linear, sqrt, got 'cubic'"),
        ({"learning_rate_scaling": "linear"}, "Give batch_size_per_replica, too"),
        ({"batch_size_per_replica": 8, "warmup_steps": 3}, "Give learning_rate_scaling, too"),
        ({"batch_size_per_replica": 8, "reference_batch_size": 8}, "needs learning_rate_scaling 'linear' or 'sqrt'"),
    ],
)
def test_invalid_coupled_values_are_refused(given: Any, message: str) -> None:
    with pytest.raises(kde.TunerError, match=message):
        kde.tuner.Coupled(**given)


# Reports and logs


def test_a_failure_of_which_there_is_no_record_is_reported_by_its_last_line(tmp_path: pathlib.Path) -> None:
    """As where the process of the trial was killed before it could write one."""
    hp = keras_tuner.HyperParameters()
    hp.Fixed("distribution_strategy", "one_device")
    for number, message in enumerate(("Traceback ...\n  in build\nValueError: no such layer\n\n", None)):
        folder = tmp_path / f"trial_{number}"
        folder.mkdir()
        trial = keras_tuner.engine.trial.Trial(hp, str(number), status="FAILED", message=message)
        trial.save(str(folder / "trial.json"))
    objective = keras_tuner.Objective("val_loss", "min")
    row = build_report(["one_device"], objective, ProjectRecords(tmp_path), None)["one_device"]
    (failures,) = row.failures
    assert (failures.kind, failures.count) == ("user error", 2)
    assert failures.causes == ("ValueError: no such layer", "no cause was recorded")


def test_the_report_prints_and_returns_what_is_known_of_each_strategy(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def judge(hp: Any) -> float:
        if hp.get("x") == 3:
            raise MemoryError("OOM when allocating")
        return float(hp.get("x")) + (10 if hp.get("distribution_strategy") == "mirrored(2)" else 0)

    tuner = judged(keras_tuner.GridSearch, judge)(
        hyperparameters=space(x=[1, 2, 3]), strategies=TWO, directory=tmp_path
    )
    tuner.search(verbose=0)
    report = tuner.strategy_report()
    assert isinstance(report, StrategyReport)
    assert [(r.strategy, r.num_trials, r.num_completed, r.best_score) for r in report] == [
        ("one_device", 3, 2, 1.0),
        ("mirrored(2)", 3, 2, 11.0),
    ]
    assert report["one_device"].failures[0].causes == ("MemoryError: OOM when allocating",)
    assert "mirrored(2)" in capsys.readouterr().out
    assert "1 out of memory: MemoryError: OOM when allocating" in str(report)
    assert "2 of 3" in str(report)
    with pytest.raises(KeyError, match="there are one_device, mirrored"):
        report["two"]
    for trial_id, rate, failure in (("0000", 1.0, None), ("0004", 9.0, Failure("out of memory", "later"))):
        folder = tuner.get_trial_dir(trial_id)
        record = TrialRecord(trial_id, "one_device", examples_per_second=(rate,), failure=failure)
        record.save(folder)
        if failure:
            path = pathlib.Path(folder, "trial.json")
            path.write_text(path.read_text().replace('"FAILED"', '"INVALID"'))  # it is to be tried again
    row = tuner.strategy_report()["one_device"]
    assert row.examples_per_second == (1.0, 1.0, 1.0)
    assert row.failures[0].causes == ("later",)


@pytest.mark.slow
def test_each_trial_logs_its_replicas_hyperparameters_and_results_in_its_own_folder(
    tmp_path: pathlib.Path,
) -> None:
    tuner = searched(tmp_path, _nan, "GridSearch", strategies=TWO, log_dir=tmp_path / "logs", max_trials=2)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["trial_0", "trial_1"]

    def read(name: str) -> Any:
        events = EventAccumulator(str(tmp_path / "logs" / name))
        events.Reload()
        return events

    for trial, strategy, runs, status in (
        ("0", "one_device", ["all", "replica_0", "result", "validation"], 1),
        ("1", "mirrored(2)", ["all", "replica_0", "replica_1", "result", "validation"], 2),
    ):
        folder = tmp_path / "logs" / f"trial_{trial}"
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == runs
        events = read(f"trial_{trial}/result")
        plugin = events.PluginTagToContent("hparams")
        start = plugin_data_pb2.HParamsPluginData.FromString(plugin["_hparams_/session_start_info"]).session_start_info
        assert start.hparams["distribution_strategy"].string_value == strategy
        end = plugin_data_pb2.HParamsPluginData.FromString(plugin["_hparams_/session_end_info"]).session_end_info
        assert end.status == status
        if trial == "0":
            score = tuner.oracle.get_trial(trial).score
            assert events.Scalars("val_accuracy")[0].value == pytest.approx(score)
        loss = read(f"trial_{trial}/all").Scalars("all/loss")
        assert len(loss) >= 1
    trials = _of_hparams_tab(str(tmp_path / "logs"))
    assert [(name, values["distribution_strategy"].string_value) for name, values, _ in trials] == [
        ("0", "one_device"),
        ("1", "mirrored(2)"),
    ]
    assert set(trials[0][2]) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert trials[0][2]["val_accuracy"] == pytest.approx(tuner.oracle.get_trial("0").score)


def _of_hparams_tab(log_dir: str) -> list[tuple[str, Any, dict[str, float]]]:
    """What TensorBoard's tab HParams lists: name, hyperparameters, and metrics of each trial."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(log_dir)
    multiplexer.Reload()
    given = types.SimpleNamespace(data_provider=MultiplexerDataProvider(multiplexer, log_dir))
    asked = RequestContext(), Context(given), ""
    metrics = get_experiment.Handler(*asked, api_pb2.GetExperimentRequest()).run().metric_infos
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=api_pb2.Status.values(),
        slice_size=100,
        col_params=[api_pb2.ColParams(metric=one.name) for one in metrics],
    )
    listed = list_session_groups.Handler(*asked, request).run().session_groups
    return [(one.name, one.hparams, {m.name.tag: m.value for m in one.metric_values}) for one in listed]


def test_logs_that_cannot_be_written_do_not_end_a_search(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    logs = TrialLogs(tmp_path / "file", several=False)
    with pytest.warns(UserWarning, match=r"The results of trial 0 could not be logged to .*The search continues"):
        logs.write("0", {"units": 4}, {"loss": 1.0}, step=0, completed=True)


# Nothing is left behind


def test_settings_that_a_trial_changes_are_restored(tmp_path: pathlib.Path) -> None:
    def build(hp: Any) -> Any:
        policies.append(keras.config.dtype_policy().name)
        if len(policies) > 1:  # in a trial
            keras.config.set_dtype_policy("mixed_bfloat16")
            keras.config.set_epsilon(1e-3)
            tf.config.run_functions_eagerly(True)
        model = our_model(hp)
        if len(policies) > 1:
            keras.config.set_floatx("float16")
            keras.config.set_image_data_format("channels_first")
            tf.config.set_soft_device_placement(not soft)
            tf.config.optimizer.set_jit("autoclustering" if not jit else False)
        return model

    policies: list[str] = []
    epsilon, soft, jit = keras.config.epsilon(), tf.config.get_soft_device_placement(), tf.config.optimizer.get_jit()
    searched(tmp_path, build, strategies="one_device", max_trials=2)
    assert policies == ["float32"] * 3
    assert keras.config.epsilon() == epsilon
    assert keras.config.floatx() == "float32"
    assert keras.config.image_data_format() == "channels_last"
    assert tf.config.get_soft_device_placement() == soft
    assert tf.config.optimizer.get_jit() == jit
    assert not tf.config.functions_run_eagerly()
    assert not tf.distribute.has_strategy()


@pytest.mark.rotating(turns=8)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["one_device", "mirrored(2)"])
def test_memory_is_flat_over_thirty_trials(strategy: str, tmp_path: pathlib.Path) -> None:
    used: list[int] = []

    def build(hp: Any) -> Any:
        gc.collect()
        used.append(psutil.Process().memory_info().rss)
        units = hp.Int("units", 100, 1000)
        return compiled(
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(3, "softmax")])
        )

    tuner = kde.tuner.RandomSearch(
        build, "val_loss", max_trials=36, strategies=strategy, directory=tmp_path, log_dir=tmp_path / "logs"
    )
    tuner.search(X, Y, validation_data=HELD_OUT, **QUICK)
    assert len(used) == 37
    assert used[-1] <= 1.05 * used[-31]


# The package


@pytest.mark.slow
def test_keras_tuner_that_is_missing_is_named_with_its_extra_and_nothing_heavy_is_imported_before() -> None:
    code = (
        "import sys; sys.modules['keras_tuner'] = None\n"
        "import keras_dist_ext as kde; print(kde.tuner.__name__, dir(kde.tuner).count('RandomSearch'))\n"
        "print({'tensorflow', 'keras', 'keras_tuner.src'} & set(sys.modules))\n"
        "try: kde.tuner.RandomSearch\n"
        "except kde.BackendError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    first, second, third = ended.stdout.strip().split("\n")
    assert first == "keras_dist_ext.tuner 1"
    assert second == "set()"
    assert third.startswith("kde.tuner searches with keras-tuner, which cannot be imported here (")
    assert third.endswith("Install it: pip install 'keras_dist_ext[tuner]'.")


@pytest.mark.parametrize("name", kde.tuner.__all__)
def test_every_name_of_the_package_loads(name: str) -> None:
    assert getattr(kde.tuner, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Rndom'; it has .*, RandomSearch, "):
        _ = kde.tuner.Rndom


def test_a_record_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    record = TrialRecord("3", "mirrored", "M", 2, 64, (1.0, 2.0), (3.0,), Failure("scope", "why"), {"x": 1})
    record.save(tmp_path)
    assert TrialRecord.load(tmp_path) == record
    assert json.loads((tmp_path / "strategy.json").read_text())["failure"]["kind"] == "scope"
    assert TrialRecord.load(tmp_path / "other") is None


def test_a_screening_result_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    assert ScreeningResult.load(tmp_path) is None
    result = ScreeningResult(("a", "b"), {"c": "slow"}, {"a": 1.0})
    result.save(tmp_path)
    assert ScreeningResult.load(tmp_path) == result


def test_a_meter_without_steps_has_no_rate() -> None:
    assert math.isnan(Meter().examples_per_second)
    assert Meter(seconds_before=3.0).seconds == 3.0


# What keras-tuner 1.4.8 keeps to itself, and the search touches: see `keras_tuner.py` and `keras_tuner_oracles.py` in
# `_keras`, and `tuner/search.py`
SIGNATURES = {
    "keras_tuner.src.engine.base_tuner": {"BaseTuner._populate_initial_space": "self"},
    "keras_tuner.src.engine.tuner": {
        "Tuner._build_hypermodel": "self hp",
        "Tuner._override_compile_args": "self model",
        "Tuner._try_build": "self hp",
    },
    "keras_tuner.src.engine.oracle": {
        "Oracle._check_consecutive_failures": "self",
        "Oracle._random_values": "self",
    },
    "keras_tuner.src.tuners.bayesian": {"BayesianOptimizationOracle._vectorize_trials": "self"},
    "keras_tuner.src.engine.tuner_utils": {
        "TunerCallback.__init__": "self tuner trial",
        "convert_to_metrics_dict": "results objective",
    },
}


@pytest.mark.parametrize("module", SIGNATURES)
def test_private_names_of_keras_tuner_are_unchanged(module: str) -> None:
    for name, arguments in SIGNATURES[module].items():
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        assert " ".join(inspect.signature(found).parameters) == arguments, name


def test_keras_tuner_calls_the_methods_that_a_search_replaces() -> None:
    oracles = keras_tuner.oracles
    assert "self._random_values()" in inspect.getsource(oracles.RandomSearchOracle.populate_space)
    assert "self._random_values()" in inspect.getsource(oracles.HyperbandOracle._random_trial)
    assert "self._vectorize_trials()" in inspect.getsource(oracles.BayesianOptimizationOracle.populate_space)
    cells = [cell.cell_contents for cell in keras_tuner.Oracle.end_trial.__closure__]
    (end_trial,) = [cell for cell in cells if getattr(cell, "__name__", "") == "end_trial"]
    assert "self._check_consecutive_failures()" in inspect.getsource(end_trial)
