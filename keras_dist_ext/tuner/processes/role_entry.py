"""Enter a search in the role of this process: the chief proposes trials, workers run them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext._keras.keras_tuner_oracles import (
    local_oracle,
    repair_reloaded,
    replace_space,
    save_files_atomically,
)
from keras_dist_ext.aliases import FitArgument
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.failures import Failure
from keras_dist_ext.tuner.processes.oracle_server import OracleServer
from keras_dist_ext.tuner.processes.process_role import ProcessRole
from keras_dist_ext.tuner.processes.remote_oracle import RemoteOracle
from keras_dist_ext.tuner.processes.screening_lease import ScreeningLease
from keras_dist_ext.tuner.records import TrialRecord
from keras_dist_ext.tuner.screening import Screening
from keras_dist_ext.tuner.strategies import HYPERPARAMETER

__all__ = ["connect_to_chief", "restore_oracle", "run_search"]


class Search(Protocol):
    """What is needed of a tuner."""

    oracle: keras_tuner.Oracle  # or a RemoteOracle
    project_dir: str
    screening: Screening | None

    def get_trial_dir(self, trial_id: str) -> str:
        """Return the folder of a trial."""

    def save(self) -> None:
        """Save the tuner to the project."""


def connect_to_chief(tuner: Search, role: ProcessRole) -> None:
    """Let the tuner of a worker ask the chief; keras-tuner has just given it a client of its own."""
    if not role.has_oracle:
        tuner.oracle = RemoteOracle(local_oracle(tuner.oracle), role)


def restore_oracle(tuner: Search) -> None:
    """Restore what a reloaded tuner has lost, in a search of one process."""
    repair_reloaded(tuner.oracle, workers_live=False)


def run_search(
    tuner: Search, role: ProcessRole, run: Callable[..., None], *args: FitArgument, **kwargs: FitArgument
) -> None:
    """Run a tuner's search in the role of this process.

    Under our launcher, workers exit here, so only the chief runs the rest of the program. Otherwise workers wait until
    the chief has ended, and continue with what it has saved.

    Args:
        tuner: whose search it is.
        role: of this process.
        run: keras-tuner's own search.
        *args: its arguments.
        **kwargs: its arguments.

    Raises:
        LaunchError: the chief cannot listen, or an error on a worker has ended the search.
        SystemExit: this process is a worker, and the search has ended.
    """
    if role.is_single:
        run(*args, **kwargs)
    elif role.is_chief:
        _run_chief(tuner, role, kwargs.get("verbose", tuner.oracle.verbose))
    else:
        _run_worker(tuner, role, run, *args, **kwargs)


def _run_chief(tuner: Search, role: ProcessRole, verbose: int) -> None:
    global _has_searched
    if _has_searched and role.is_managed:
        raise LaunchError(
            "This program starts a second search, but its workers have exited after the first. Write a program for "
            "each search, and launch one after the other."
        )
    _has_searched = True
    oracle = tuner.oracle
    oracle.verbose = verbose
    save_files_atomically(oracle)
    repair_reloaded(oracle, workers_live=role.start > 1)
    server = OracleServer(
        oracle,
        role.address,
        lambda trial, reason: _record_death(tuner, trial, reason),
        None if tuner.screening is None else _screening_lease(tuner, role),
    )
    tuner.save()
    server.run()


_has_searched = False


def _screening_lease(tuner: Search, role: ProcessRole) -> ScreeningLease:
    return ScreeningLease(
        tuner.project_dir,
        lambda result: replace_space(tuner.oracle, result.narrowed),
        workers_live=role.start > 1,
    )


def _record_death(tuner: Search, trial: keras_tuner.engine.trial.Trial, reason: str) -> None:
    """Record the failure of a trial whose worker has died."""
    folder = tuner.get_trial_dir(trial.trial_id)
    values = trial.hyperparameters.values
    record = TrialRecord.load(folder) or TrialRecord(trial.trial_id, str(values.get(HYPERPARAMETER, "")), values=values)
    replace(record, failure=Failure("worker lost", reason.splitlines()[0])).save(folder)


def _run_worker(
    tuner: Search, role: ProcessRole, run: Callable[..., None], *args: FitArgument, **kwargs: FitArgument
) -> None:
    try:
        run(*args, **kwargs)
    except Exception:  # keras-tuner re-raises errors that no trial has caused
        if role.is_managed:
            with suppress(LaunchError):
                tuner.oracle.abort(f"{role.tuner_id} raised an error outside of a trial:\n{traceback.format_exc()}")
        raise
    if role.is_managed:
        sys.exit(0)
    tuner.oracle = tuner.oracle.local()
