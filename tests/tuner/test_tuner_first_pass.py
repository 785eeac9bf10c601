"""Before a search strategies race: what is measured, what kills its process, and one worker that does it for all."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import keras_tuner
import pytest
from tuner_runs import HELD_OUT, TRAIN, X, Y, our_model

import keras_dist_ext as kde
from keras_dist_ext.tuner.coupled import CoupledValues
from keras_dist_ext.tuner.first_pass import FirstPass, ModelRacer, Outcome, RaceDiary, race
from keras_dist_ext.tuner.processes.measuring import Turnstile

RULES = FirstPass(seconds=0.05, samples=3, rungs=1)
OUTCOME = {"survivors": ["a"], "dropped": {"b": "slow"}, "examples_per_second": {"a": 2.0, "b": 1.0}}


def tuner_in(folder: pathlib.Path, build: Any = our_model, **given: Any) -> Any:
    arguments = {"strategies": ["one_device", "mirrored(9)"], "max_trials": 1, "first_pass": RULES, **given}
    return kde.tuner.RandomSearch(build, "val_loss", directory=folder, project_name="p", **arguments)


class Fixed:
    """Trains nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, seconds: float) -> float:
        return {"fast": 100.0, "slow": 10.0}[self.name]


class Killed(BaseException):
    """Ends a process, as far as the diary can tell."""


def test_search_may_be_given_its_epochs_by_position(tmp_path: pathlib.Path) -> None:
    tuner = tuner_in(tmp_path)
    tuner.search(X, Y, 40, 1, verbose=0, validation_data=HELD_OUT)
    assert Outcome.load(tuner.project_dir).survivors == ("one_device",)
    assert [trial.status for trial in tuner.oracle.trials.values()] == ["COMPLETED"]


def test_a_fit_that_cannot_be_measured_says_so(tmp_path: pathlib.Path) -> None:
    class Own(keras_tuner.HyperModel):
        def build(self, hp: Any) -> Any:
            return our_model(hp)

        def fit(self, hp: Any, model: Any, x: Any, y: Any, **kwargs: Any) -> Any:
            return model.fit(x, y, epochs=1, verbose=0)  # without the callbacks

    tuner = tuner_in(tmp_path, Own(), strategies=["one_device", "mirrored(2)"])
    with pytest.raises(kde.TunerError, match="could not measure how fast 'sequential.*' trains: .*gives its callbacks"):
        tuner.search(*TRAIN, validation_data=HELD_OUT)


def test_what_races_trains_alone_for_as_long_as_it_is_told(tmp_path: pathlib.Path) -> None:
    def fit(hp: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        assert args == TRAIN
        assert (kwargs["epochs"], kwargs["batch_size"], len(kwargs["callbacks"])) == (10**9, 40, 2)
        assert not [name for name in kwargs if name.startswith("validation_") or name == "initial_epoch"]
        seen.append(model)

    seen: list[Any] = []
    hp = keras_tuner.HyperParameters()
    model = our_model(hp)
    given = {"validation_data": HELD_OUT, "batch_size": 40, "epochs": 3, "initial_epoch": 1, "callbacks": [1, 2, 3]}
    racer = ModelRacer(model, fit, hp, CoupledValues(), TRAIN, given, is_own_fit=False)
    with pytest.raises(kde.TunerError, match="could not measure"):
        racer.run(1.0)
    assert seen == [model]


def test_what_came_out_holds_also_where_the_process_ended_before_its_space_was_saved(tmp_path: pathlib.Path) -> None:
    tuner = tuner_in(tmp_path)
    tuner.save()
    Outcome(("one_device",), {"mirrored(9)": "slow"}).save(tuner.project_dir)
    (left,) = [hp for hp in tuner_in(tmp_path).oracle.get_space().space if hp.name == "distribution_strategy"]
    assert isinstance(left, keras_tuner.engine.hyperparameters.Fixed)
    assert left.value == "one_device"


def test_a_project_that_has_trials_is_too_late(tmp_path: pathlib.Path) -> None:
    tuner = tuner_in(tmp_path, first_pass=None)
    tuner.oracle.create_trial("tuner0")
    tuner.save()
    late = tuner_in(tmp_path)
    with pytest.raises(kde.TunerError, match="before the first trial, and the project in .* has 1 trial already"):
        late.search(*TRAIN)


def test_a_strategy_that_kills_its_process_twice_is_dropped(tmp_path: pathlib.Path) -> None:
    def start(name: str) -> Fixed:
        if name == "deadly":
            raise Killed
        return Fixed(name)

    def killed(diary: RaceDiary) -> None:
        diary._write("deadly")  # what is on the disk when nothing more is written

    names = ["fast", "deadly", "slow"]
    for _ in range(2):
        diary = RaceDiary(tmp_path)
        assert diary.deadly == {}
        with pytest.raises(Killed):
            race(RULES, names, start, diary)
        killed(diary)
    outcome = race(RULES, names, start, RaceDiary(tmp_path))
    assert outcome.survivors == ("fast",)
    assert outcome.dropped["deadly"] == ("worker lost: the process died 2 times while it trained under this strategy")
    assert set(outcome.dropped) == {"deadly", "slow"}


def test_an_exception_in_a_race_is_no_death(tmp_path: pathlib.Path) -> None:
    def start(name: str) -> Fixed:
        raise KeyError(name)

    for _ in range(3):
        with pytest.raises(KeyError):
            race(RULES, ["a"], start, RaceDiary(tmp_path))
    assert json.loads((tmp_path / "first_pass_race.json").read_text()) == {"under_way": None, "deaths": {}}


# One worker measures for all


def test_one_worker_measures_and_the_others_wait_for_what_comes_out(tmp_path: pathlib.Path) -> None:
    heard: list[Outcome] = []
    turnstile = Turnstile(tmp_path, heard.append, workers_live=False)
    assert turnstile.ask("tuner0", measures=False) == {"may_measure": True}
    assert turnstile.ask("tuner1", measures=False) == {"may_measure": False}
    assert turnstile.ask("tuner0", measures=False) == {"may_measure": True}  # it was started again
    turnstile.end(OUTCOME)
    turnstile.end({**OUTCOME, "survivors": ["b"]})  # of one that had fallen silent
    assert turnstile.ask("tuner1", measures=False)["outcome"]["survivors"] == ("a",)
    assert heard == [Outcome.load(tmp_path)] == [Outcome.of(OUTCOME)]
    again = Turnstile(tmp_path, heard.append, workers_live=True)
    assert "outcome" in again.ask("tuner1", measures=False)


def test_another_worker_measures_when_the_first_is_given_up_or_falls_silent(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("keras_dist_ext.tuner.processes.measuring.time.monotonic", lambda: now[0])
    turnstile = Turnstile(tmp_path, lambda _: None, workers_live=False)
    turnstile.ask("tuner0", measures=False)
    now[0] = 29.0
    assert turnstile.ask("tuner0", measures=True) == {"may_measure": True}
    assert turnstile.seconds_of("tuner0") == 29.0
    now[0] = 58.0
    assert turnstile.ask("tuner1", measures=False) == {"may_measure": False}
    now[0] = 60.0
    assert turnstile.ask("tuner1", measures=False) == {"may_measure": True}
    assert turnstile.ask("tuner0", measures=True) == {"may_measure": False}
    assert (turnstile.seconds_of("tuner0"), turnstile.seconds_of("tuner1")) == (0.0, 0.0)
    turnstile.release("tuner0")
    assert turnstile.ask("tuner2", measures=False) == {"may_measure": False}
    turnstile.release("tuner1")
    assert turnstile.ask("tuner2", measures=False) == {"may_measure": True}


def test_a_chief_that_is_started_again_waits_for_a_word_of_who_measures(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("keras_dist_ext.tuner.processes.measuring.time.monotonic", lambda: now[0])
    turnstile = Turnstile(tmp_path, lambda _: None, workers_live=True)
    assert turnstile.ask("tuner1", measures=False) == {"may_measure": False}
    assert turnstile.ask("tuner0", measures=True) == {"may_measure": True}
    now[0] = 29.0
    assert turnstile.ask("tuner1", measures=False) == {"may_measure": False}
    silent = Turnstile(tmp_path, lambda _: None, workers_live=True)
    now[0] = 60.0
    assert silent.ask("tuner1", measures=False) == {"may_measure": True}
