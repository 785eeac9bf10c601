"""Take a process' part in a search over several: the chief proposes trials, workers run them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from keras_dist_ext._keras.keras_tuner import local_oracle, repair_reloaded, replace_space, save_files_atomically
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.failures import Failure
from keras_dist_ext.tuner.processes.chief import OracleServer
from keras_dist_ext.tuner.processes.measuring import Turnstile
from keras_dist_ext.tuner.processes.place import Place, place_of
from keras_dist_ext.tuner.processes.remote_oracle import RemoteOracle
from keras_dist_ext.tuner.records import TrialRecord
from keras_dist_ext.tuner.strategies import HYPERPARAMETER

__all__ = ["connect", "go_on_alone", "search_in_part"]


def connect(tuner: Any) -> None:
    """Have a tuner that was just made ask the chief, where it is a worker's.

    Raises:
        LaunchError: keras-tuner's variables are not all set.
    """
    place = place_of()
    if place is not None and not place.is_chief:
        tuner.oracle = RemoteOracle(local_oracle(tuner.oracle), place)


def go_on_alone(tuner: Any) -> None:
    """Put right what a tuner that was reloaded has lost, where it searches in one process."""
    repair_reloaded(tuner.oracle, workers_live=False)


def search_in_part(tuner: Any, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run a tuner's search, or this process' part of it.

    What follows in the program runs in the chief alone when our launcher has started the processes: workers end here.
    When something else has, they wait for the chief's end, and go on with what it has saved.

    Args:
        tuner: whose search it is.
        run: keras-tuner's own search.
        *args: its arguments.
        **kwargs: its arguments.

    Raises:
        LaunchError: the chief cannot listen, or a worker's own error has ended the search.
        SystemExit: this process is a worker, and is done.
    """
    place = place_of()
    if place is None:
        run(*args, **kwargs)
    elif place.is_chief:
        _serve(tuner, place, kwargs.get("verbose", tuner.oracle.verbose))
    else:
        _work(tuner, place, run, *args, **kwargs)


def _serve(tuner: Any, place: Place, verbose: Any) -> None:
    global _has_served
    if _has_served and place.is_launched:
        raise LaunchError(
            "This program searches a second time, but its workers have ended with the first search. Make each search a "
            "program of its own, and launch them one after the other."
        )
    _has_served = True
    oracle = tuner.oracle
    oracle.verbose = verbose
    save_files_atomically(oracle)
    repair_reloaded(oracle, workers_live=place.start > 1)
    server = OracleServer(
        oracle,
        place.address,
        lambda trial, reason: _record_death(tuner, trial, reason),
        None if tuner.first_pass is None else _turnstile(tuner, place),
    )
    tuner.save()
    server.run()


_has_served = False


def _turnstile(tuner: Any, place: Place) -> Turnstile:
    return Turnstile(
        tuner.project_dir,
        lambda outcome: replace_space(tuner.oracle, outcome.narrowed),
        workers_live=place.start > 1,
    )


def _record_death(tuner: Any, trial: Any, reason: str) -> None:
    """Write down what its worker cannot any more."""
    folder = tuner.get_trial_dir(trial.trial_id)
    values = trial.hyperparameters.values
    record = TrialRecord.load(folder) or TrialRecord(trial.trial_id, str(values.get(HYPERPARAMETER, "")), values=values)
    replace(record, failure=Failure("worker lost", reason.splitlines()[0])).save(folder)


def _work(tuner: Any, place: Place, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    try:
        run(*args, **kwargs)
    except Exception:  # keras-tuner lets pass what is no trial's fault
        if place.is_launched:
            with suppress(LaunchError):
                tuner.oracle.abort(f"{place.tuner_id} met an error that is no trial's:\n{traceback.format_exc()}")
        raise
    if place.is_launched:
        sys.exit(0)
    tuner.oracle = tuner.oracle.local()
