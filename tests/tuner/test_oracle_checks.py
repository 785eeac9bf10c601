"""A method of a tuner or an oracle that keras-tuner no longer calls is an error before a trial trains."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import keras
import keras_tuner
import pytest
from cases import rotating
from tuner_runs import TRAIN, stock_model

import keras_dist_ext as kde
from keras_dist_ext._keras import oracle_checks
from keras_dist_ext._keras.keras_tuner import FatalBackendError, HookedTuner
from keras_dist_ext._keras.oracle_checks import check_oracle

ORACLES: dict[str, dict[str, Any]] = {
    "RandomSearch": {},
    "BayesianOptimization": {},
    "Hyperband": {},
    "GridSearch": {},
}
OF_ALL = ["_check_consecutive_failures", "_save_trial", "save"]
OF_ORACLES = [
    *(("RandomSearch", name) for name in [*OF_ALL, "_random_values"]),
    *(("BayesianOptimization", name) for name in ["_random_values", "_vectorize_trials"]),
    ("Hyperband", "_random_values"),
    *(("GridSearch", name) for name in OF_ALL),
]
OF_TUNERS = ["_populate_initial_space", "_run_and_update_trial", "_try_build", "_override_compile_args"]


def oracle_of(kind: str) -> Any:
    return getattr(keras_tuner.oracles, f"{kind}Oracle")


def silence(monkeypatch: pytest.MonkeyPatch, cls: type, name: str) -> None:
    """Have an oracle call its own method, whatever it is given, as a release does that calls another."""
    original = getattr(cls, name)
    silent = property(lambda oracle: functools.partial(original, oracle), lambda oracle, value: None)
    monkeypatch.setattr(cls, name, silent)
    oracle_checks._check.cache_clear()
    monkeypatch.setattr(oracle_checks, "_check", oracle_checks._check.__wrapped__)


def searched(folder: pathlib.Path, build: Any = stock_model, cls: Any = kde.tuner.RandomSearch, **given: Any) -> Any:
    tuner = cls(build, "loss", max_trials=2, strategies="one_device", directory=folder, project_name="p", **given)
    tuner.search(*TRAIN, epochs=1, batch_size=40, verbose=0)
    return tuner


def test_an_oracle_that_fails_as_it_is_tried_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no space")

    monkeypatch.setattr(oracle_of("RandomSearch"), "populate_space", fails)
    monkeypatch.setattr(oracle_checks, "_check", oracle_checks._check.__wrapped__)
    words = r"no longer calls .*Oracle\._random_values.*; it fails with ValueError\('no space'\)\. Nothing was trained"
    with pytest.raises(FatalBackendError, match=words):
        check_oracle(oracle_of("RandomSearch")("loss"))


@pytest.mark.parametrize("kind", ORACLES)
def test_each_method_of_an_oracle_that_is_replaced_is_called(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    oracle_checks._check.cache_clear()
    check_oracle(oracle_of(kind)("loss"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("kind", "name"), rotating(OF_ORACLES, [("RandomSearch", "_random_values")]))
def test_a_method_of_an_oracle_that_is_silent_is_named_before_the_search(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    silence(monkeypatch, oracle_of(kind), name)
    message = rf"With keras-tuner \d\S+: {kind}Oracle no longer calls .*Oracle\.{name}\b.*'keras-tuner<\d.*"
    with pytest.raises(kde.BackendError, match=message):
        getattr(kde.tuner, kind)(stock_model, "loss", strategies="one_device", directory=tmp_path)


@pytest.mark.parametrize("name", rotating(OF_TUNERS, ["_try_build"]))
def test_a_method_of_a_tuner_that_is_silent_ends_the_search_before_a_step(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    fits: list[Any] = []
    monkeypatch.setattr(kde.Model, "fit", lambda *args, **kwargs: fits.append(args))
    monkeypatch.delattr(HookedTuner, name)
    with pytest.raises(kde.BackendError, match=rf"With keras-tuner \S+: the tuner no longer calls Tuner\.{name} "):
        searched(tmp_path)
    assert fits == []


def test_a_user_s_own_run_trial_builds_models_by_itself(tmp_path: pathlib.Path) -> None:
    class Own(kde.tuner.StrategySearch, keras_tuner.RandomSearch):  # type: ignore[misc]
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            model = self.hypermodel.build(trial.hyperparameters)
            return self.hypermodel.fit(trial.hyperparameters, model, *args, **kwargs)

    tuner = searched(tmp_path, cls=Own)
    assert [trial.status for trial in tuner.oracle.trials.values()] == ["COMPLETED"] * 2


def test_a_search_ends_where_what_is_installed_is_not_what_is_needed(tmp_path: pathlib.Path) -> None:
    trials: list[str] = []

    def build(hp: Any) -> keras.Model:
        if trials:  # not while the space is discovered
            raise kde.BackendError("what Keras has no more")
        return stock_model(hp)

    class Noted(kde.tuner.RandomSearch):
        def on_trial_begin(self, trial: Any) -> None:
            super().on_trial_begin(trial)
            trials.append(trial.trial_id)

    with pytest.raises(kde.BackendError, match="what Keras has no more"):
        searched(tmp_path, build, Noted)
    assert trials == ["0"]
