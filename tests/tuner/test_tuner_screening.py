"""The screening of strategies before a search: what is measured, what crashes, and one worker that does it for all."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import keras_tuner
import pytest
from tuner_runs import HELD_OUT, TRAIN, X, Y, our_model

import keras_dist_ext as kde
from keras_dist_ext.tuner.benchmark_log import BenchmarkLog
from keras_dist_ext.tuner.coupled import CoupledValues
from keras_dist_ext.tuner.model_benchmark import ModelBenchmark
from keras_dist_ext.tuner.processes.process_role import ProcessRole
from keras_dist_ext.tuner.processes.screening_lease import ScreeningLease
from keras_dist_ext.tuner.screening import Screening, ScreeningResult, screen_strategies
from keras_dist_ext.tuner.search_screening import check_screening, default_of_strategy, screen_once

pytestmark = pytest.mark.filterwarnings("ignore:strategies. 'mirrored.9.' cannot be made here")
SCREENING = Screening(seconds=0.05, samples=3, rungs=1)
RESULT = {"survivors": ["a"], "dropped": {"b": "slow"}, "examples_per_second": {"a": 2.0, "b": 1.0}}


def tuner_in(folder: pathlib.Path, build: Any = our_model, **given: Any) -> Any:
    arguments = {"strategies": ["one_device", "mirrored(9)"], "max_trials": 1, "screening": SCREENING, **given}
    return kde.tuner.RandomSearch(build, "val_loss", directory=folder, project_name="p", **arguments)


class Fixed:
    """Trains nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, seconds: float) -> float:
        return {"fast": 100.0, "slow": 10.0}[self.name]


class Killed(BaseException):
    """Ends a process, as far as the log can tell."""


def test_search_may_be_given_its_epochs_by_position(tmp_path: pathlib.Path) -> None:
    tuner = tuner_in(tmp_path)
    tuner.search(X, Y, 40, 1, verbose=0, validation_data=HELD_OUT)
    assert ScreeningResult.load(tuner.project_dir).survivors == ("one_device",)
    assert [trial.status for trial in tuner.oracle.trials.values()] == ["COMPLETED"]


def test_a_fit_that_cannot_be_measured_is_an_error(tmp_path: pathlib.Path) -> None:
    class Own(keras_tuner.HyperModel):
        def build(self, hp: Any) -> Any:
            return our_model(hp)

        def fit(self, hp: Any, model: Any, x: Any, y: Any, **kwargs: Any) -> Any:
            return model.fit(x, y, epochs=1, verbose=0)  # without the callbacks

    tuner = tuner_in(tmp_path, Own(), strategies=["one_device", "mirrored(2)"])
    with pytest.raises(kde.TunerError, match="could not measure how fast 'sequential.*' trains: .*passes its call"):
        tuner.search(*TRAIN, validation_data=HELD_OUT)


def test_a_benchmark_trains_without_validation_until_it_is_stopped(tmp_path: pathlib.Path) -> None:
    def fit(hp: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        assert args == TRAIN
        assert (kwargs["epochs"], kwargs["batch_size"], len(kwargs["callbacks"])) == (10**9, 40, 2)
        assert not [name for name in kwargs if name.startswith("validation_") or name == "initial_epoch"]
        seen.append(model)

    seen: list[Any] = []
    hp = keras_tuner.HyperParameters()
    model = our_model(hp)
    given = {"validation_data": HELD_OUT, "batch_size": 40, "epochs": 3, "initial_epoch": 1, "callbacks": [1, 2, 3]}
    benchmark = ModelBenchmark(model, fit, hp, CoupledValues(), TRAIN, given, has_own_fit=False)
    with pytest.raises(kde.TunerError, match="could not measure"):
        benchmark.run(1.0)
    assert seen == [model]


def test_the_result_holds_even_if_the_process_ended_before_the_space_was_saved(tmp_path: pathlib.Path) -> None:
    tuner = tuner_in(tmp_path)
    tuner.save()
    ScreeningResult(("one_device",), {"mirrored(9)": "slow"}).save(tuner.project_dir)
    (left,) = [hp for hp in tuner_in(tmp_path).oracle.get_space().space if hp.name == "distribution_strategy"]
    assert isinstance(left, keras_tuner.engine.hyperparameters.Fixed)
    assert left.value == "one_device"


def test_a_project_that_has_trials_is_too_late(tmp_path: pathlib.Path) -> None:
    tuner = tuner_in(tmp_path, screening=None)
    tuner.oracle.create_trial("tuner0")
    tuner.save()
    late = tuner_in(tmp_path)
    with pytest.raises(kde.TunerError, match="before the first trial, and the project in .* already has 1 trial"):
        late.search(*TRAIN)


def test_a_strategy_that_kills_its_process_twice_is_dropped(tmp_path: pathlib.Path) -> None:
    def start(name: str) -> Fixed:
        if name == "crashing":
            raise Killed
        return Fixed(name)

    def killed(log: BenchmarkLog) -> None:
        log._write("crashing")  # what is on the disk when nothing more is written

    names = ["fast", "crashing", "slow"]
    for _ in range(2):
        log = BenchmarkLog(tmp_path)
        assert log.crashing == {}
        with pytest.raises(Killed):
            screen_strategies(SCREENING, names, start, log)
        killed(log)
    result = screen_strategies(SCREENING, names, start, BenchmarkLog(tmp_path))
    assert result.survivors == ("fast",)
    assert result.dropped["crashing"] == ("worker lost: the process died 2 times while it trained under this strategy")
    assert set(result.dropped) == {"crashing", "slow"}


def test_an_exception_in_a_benchmark_is_not_a_crash(tmp_path: pathlib.Path) -> None:
    def start(name: str) -> Fixed:
        raise KeyError(name)

    for _ in range(3):
        with pytest.raises(KeyError):
            screen_strategies(SCREENING, ["a"], start, BenchmarkLog(tmp_path))
    assert json.loads((tmp_path / "screening_log.json").read_text()) == {"running": None, "crashes": {}}


def test_a_strategy_that_cannot_train_on_is_dropped_and_the_one_that_is_left_is_measured_to_the_end() -> None:
    class Filling(Fixed):
        def run(self, seconds: float) -> float:
            ran.append(self.name)
            if self.name == "slow" and len(ran) > 3:
                raise MemoryError("OOM when allocating")
            return super().run(seconds)

    ran: list[str] = []
    result = screen_strategies(Screening(seconds=0.05, samples=3, rungs=2), ["fast", "slow"], Filling)
    assert result == ScreeningResult(
        ("fast",), {"slow": "out of memory: MemoryError: OOM when allocating"}, {"fast": 100.0}
    )
    assert ran == ["fast", "slow", "slow", "fast", "fast"] or ran.count("fast") == 3


def test_workers_that_run_each_trial_together_do_not_screen(tmp_path: pathlib.Path) -> None:
    role = ProcessRole("tuner0", "127.0.0.1:4000", worker_index=1, num_workers=2)
    with pytest.raises(kde.TunerError, match="measures strategies in one process, and 2 processes run each trial of"):
        check_screening(keras_tuner.oracles.RandomSearchOracle(), tmp_path, role)


def test_a_worker_screens_where_the_chief_lets_it_and_reports_the_result(tmp_path: pathlib.Path) -> None:
    class Oracle:
        def request_screening(self, *, measures: bool, once: bool = False) -> Any:
            return {"result": results[0]} if results else {"may_measure": True}

        def finish_screening(self, result: Any) -> None:
            results.append(result)

    results: list[Any] = []
    role = ProcessRole("tuner0", "127.0.0.1:4000", start=1)
    screen_once(SCREENING, ["fast", "slow"], Fixed, Oracle(), tmp_path, role)
    assert [result["survivors"] for result in results] == [("fast",)]
    assert ScreeningResult.load(tmp_path) is None, "the chief saves it"


@pytest.mark.parametrize("name", ["one_device", "mirrored(2)"])
def test_the_defaults_of_a_strategy_are_those_of_its_own_hyperparameters(name: str, tmp_path: pathlib.Path) -> None:
    """Also where a name stands for another one under each strategy."""
    hp = keras_tuner.HyperParameters()
    hp.Choice("distribution_strategy", ["one_device", "mirrored(2)"])
    hp.Int("units", 1, 9)
    least = {"one_device": 100, "mirrored(2)": 2000}
    for strategy in least:
        with hp.conditional_scope("distribution_strategy", [strategy]):
            hp.Int("examples", least[strategy], 9000)
            hp.Boolean(f"only under {strategy}")
    hp.values["units"] = 5  # as a user may give it
    oracle = keras_tuner.oracles.RandomSearchOracle(objective="val_loss", hyperparameters=hp)
    oracle._set_project_dir(str(tmp_path), "project")
    assert default_of_strategy(oracle, name).values == {
        "distribution_strategy": name,
        "units": 5,
        "examples": least[name],
        f"only under {name}": False,
    }


# One worker measures for all


def test_one_worker_measures_and_the_others_wait_for_the_result(tmp_path: pathlib.Path) -> None:
    results: list[ScreeningResult] = []
    lease = ScreeningLease(tmp_path, results.append, workers_live=False)
    assert lease.request("tuner0", measures=False) == {"may_measure": True}
    assert lease.request("tuner1", measures=False) == {"may_measure": False}
    assert lease.request("tuner0", measures=False) == {"may_measure": True}  # it was restarted
    lease.finish(RESULT)
    lease.finish({**RESULT, "survivors": ["b"]})  # of one that had stopped renewing its lease
    assert lease.request("tuner1", measures=False)["result"]["survivors"] == ("a",)
    assert results == [ScreeningResult.load(tmp_path)] == [ScreeningResult.of(RESULT)]
    again = ScreeningLease(tmp_path, results.append, workers_live=True)
    assert "result" in again.request("tuner1", measures=False)


def test_another_worker_measures_when_the_first_is_removed_or_stops_renewing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("keras_dist_ext.tuner.processes.screening_lease.time.monotonic", lambda: now[0])
    lease = ScreeningLease(tmp_path, lambda _: None, workers_live=False)
    lease.request("tuner0", measures=False)
    now[0] = 29.0
    assert lease.request("tuner0", measures=True) == {"may_measure": True}
    assert lease.elapsed_seconds("tuner0") == 29.0
    now[0] = 58.0
    assert lease.request("tuner1", measures=False) == {"may_measure": False}
    now[0] = 60.0
    assert lease.request("tuner1", measures=False) == {"may_measure": True}
    assert lease.request("tuner0", measures=True) == {"may_measure": False}
    assert (lease.elapsed_seconds("tuner0"), lease.elapsed_seconds("tuner1")) == (0.0, 0.0)
    lease.release("tuner0")
    assert lease.request("tuner2", measures=False) == {"may_measure": False}
    lease.release("tuner1")
    assert lease.request("tuner2", measures=False) == {"may_measure": True}


def test_a_restarted_chief_waits_for_the_holder_to_renew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("keras_dist_ext.tuner.processes.screening_lease.time.monotonic", lambda: now[0])
    lease = ScreeningLease(tmp_path, lambda _: None, workers_live=True)
    assert lease.request("tuner1", measures=False) == {"may_measure": False}
    assert lease.request("tuner0", measures=True) == {"may_measure": True}
    now[0] = 29.0
    assert lease.request("tuner1", measures=False) == {"may_measure": False}
    expired = ScreeningLease(tmp_path, lambda _: None, workers_live=True)
    now[0] = 60.0
    assert expired.request("tuner1", measures=False) == {"may_measure": True}
