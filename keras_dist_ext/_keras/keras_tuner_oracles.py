"""Reach what oracles of keras-tuner 1.4.8 keep to themselves: the space, what they draw, failures, locks, files.

`tests/tuner/test_tuner.py` and `tests/tuner/test_tuner_chief.py` fail when one of these changes.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from keras_dist_ext._keras.keras_tuner import gridsearch, keras_tuner, oracle_module
from keras_dist_ext.aliases import JsonObject, JsonValue
from keras_dist_ext.whole_files import write_whole

__all__ = [
    "REPLACED",
    "REPLACED_OF",
    "count_failures",
    "redraw",
    "learn_from_failures",
    "replace_space",
    "local_oracle",
    "release_lock",
    "save_files_atomically",
    "repair_reloaded",
    "run_again",
]

_Space: TypeAlias = "list[keras_tuner.engine.hyperparameters.HyperParameter]"

REPLACED = ("_check_consecutive_failures", "_save_trial", "save")
"""What the functions below replace of any oracle, and of those of some kinds."""
REPLACED_OF = {
    keras_tuner.oracles.RandomSearchOracle: ("_random_values",),
    keras_tuner.oracles.BayesianOptimizationOracle: ("_random_values", "_vectorize_trials"),
    keras_tuner.oracles.HyperbandOracle: ("_random_values",),
    keras_tuner.oracles.GridSearchOracle: (),
}


def count_failures(oracle: keras_tuner.Oracle, counts: Callable[[keras_tuner.engine.trial.Trial], bool]) -> None:
    """Have an oracle end the search over some failed trials in a row only (engine/oracle.py).

    Args:
        oracle: asks `_check_consecutive_failures` after each trial.
        counts: says of a failed trial whether it counts; one that does not neither adds to a row nor ends it.
    """

    def check() -> None:
        view = copy.copy(oracle)
        view.end_order = [
            trial_id
            for trial_id in oracle.end_order
            if oracle.trials[trial_id].status != "FAILED" or counts(oracle.trials[trial_id])
        ]
        type(oracle)._check_consecutive_failures(view)

    oracle._check_consecutive_failures = check


def redraw(oracle: keras_tuner.Oracle, is_hopeless: Callable[[Mapping[str, JsonValue]], bool]) -> None:
    """Have an oracle draw again when what it has drawn cannot run (engine/oracle.py, tuners/bayesian.py).

    RandomSearch, Hyperband and the first trials of BayesianOptimization draw by `_random_values`, which is asked again
    up to 50 times; a proposal of BayesianOptimization's model is replaced by a random one. GridSearch goes through
    its grid, where a point that cannot run fails at once.

    Args:
        oracle: of a search.
        is_hopeless: whether a trial with these values is known to fail.
    """
    draw = oracle._random_values

    def random_values() -> JsonObject | None:
        values: JsonObject | None = draw()
        for _ in range(_MOST_DRAWS):
            if values is None or not is_hopeless(values):
                break
            values = draw() or values  # None: everything was tried
        return values

    oracle._random_values = random_values
    if isinstance(oracle, keras_tuner.oracles.BayesianOptimizationOracle):
        propose = oracle.populate_space

        def populate_space(trial_id: str) -> JsonObject:
            proposal = propose(trial_id)
            values = proposal.get("values")
            if values is not None and is_hopeless(values):
                values = random_values() or values
            return {**proposal, "values": values}

        oracle.populate_space = populate_space


_MOST_DRAWS = 50


def learn_from_failures(oracle: keras_tuner.Oracle, *, unreached: float) -> None:
    """Show BayesianOptimization's model where trials fail (tuners/bayesian.py, `_vectorize_trials`).

    It leaves failed trials out, and so goes on to propose points next to them. Here they count as worse than the
    worst that has ended, by the whole range of scores.

    Args:
        oracle: nothing happens to other oracles than BayesianOptimization's.
        unreached: a score from which on a trial counts as failed, too.
    """
    if not isinstance(oracle, keras_tuner.oracles.BayesianOptimizationOracle):
        return

    def vectorize() -> object:
        view = copy.copy(oracle)
        sign = -1.0 if oracle.objective.direction == "max" else 1.0
        ended = {i: t for i, t in oracle.trials.items() if t.status == "COMPLETED" and sign * t.score < unreached}
        scores = [sign * trial.score for trial in ended.values()] or [0.0]
        penalty = max(scores) + max(max(scores) - min(scores), 1e-3 * abs(max(scores)), 1e-6)
        view.trials = {}
        for trial_id, trial in oracle.trials.items():
            if trial_id not in ended and trial.status in ("COMPLETED", "FAILED", "INVALID"):
                trial = copy.copy(trial)
                trial.status, trial.score = "COMPLETED", sign * penalty
            view.trials[trial_id] = trial
        return type(oracle)._vectorize_trials(view)

    oracle._vectorize_trials = vectorize


def replace_space(oracle: keras_tuner.Oracle, change: Callable[[_Space], _Space]) -> None:
    """Give an oracle other hyperparameters to search, in another order (engine/hyperparameters/hyperparameters.py).

    Args:
        oracle: of a search that has no trials yet.
        change: takes the list of hyperparameters, and returns another.
    """
    space = keras_tuner.HyperParameters()
    space.merge(change(list(oracle.hyperparameters.space)))
    oracle.hyperparameters = space


def local_oracle(client: keras_tuner.Oracle) -> keras_tuner.Oracle:
    """Return the oracle of this process that a worker's client stands before (distribute/oracle_client.py)."""
    return client._oracle


def release_lock(oracle: keras_tuner.Oracle) -> None:
    """Release the lock that an exception in an oracle's method leaves held by this thread (engine/oracle.py).

    `synchronized` has no `finally`: the next thread that calls the oracle would wait for ever.
    """
    if oracle_module.THREADS[oracle] == threading.current_thread().name:
        oracle_module.THREADS[oracle] = None
        oracle_module.LOCKS[oracle].release()


def save_files_atomically(oracle: keras_tuner.Oracle) -> None:
    """Have an oracle write its files aside and rename them (engine/oracle.py: `save`, `_save_trial`).

    keras-tuner truncates them first, so that a chief which is killed meanwhile leaves a project that cannot be read.
    """
    if "://" in str(oracle._project_dir):  # no file system of this machine: keras-tuner's own way
        return

    def save_trial(trial: keras_tuner.engine.trial.Trial) -> None:
        write(os.path.join(oracle._get_trial_dir(trial.trial_id), "trial.json"), trial.get_state())

    def write(path: str, state: JsonValue) -> None:
        write_whole(path, json.dumps(state))

    oracle.save = lambda: write(oracle._get_oracle_fname(), oracle.get_state())
    oracle._save_trial = save_trial


def repair_reloaded(oracle: keras_tuner.Oracle, *, workers_live: bool) -> None:
    """Put right what a reloaded oracle has lost or takes for lost (engine/oracle.py: `reload`; tuners/gridsearch.py).

    keras-tuner runs every trial again that was under way when the oracle was last saved, though some have ended since;
    forgets those that were begun since; and a reloaded GridSearch does not know what comes next.

    Args:
        oracle: as it was reloaded from its project.
        workers_live: whether the workers go on with what they have under way; else it is run again.
    """
    path = oracle._get_oracle_fname()
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        ongoing = json.load(file)["ongoing_trials"]
    ended, queue = set(oracle.end_order), []
    for trial_id in oracle._retry_queue:
        if trial_id not in ended and trial_id not in queue:
            queue.append(trial_id)
    if workers_live:
        for tuner_id, trial_id in ongoing.items():
            if trial_id in queue and oracle.trials[trial_id].status != "INVALID":
                queue.remove(trial_id)
                oracle.ongoing_trials[tuner_id] = oracle.trials[trial_id]
                oracle.tuner_ids.add(tuner_id)
    lost = sorted(set(oracle.trials) - {*oracle.start_order, *queue})
    oracle.start_order += lost
    oracle._retry_queue = queue + lost
    if isinstance(oracle, keras_tuner.oracles.GridSearchOracle):
        _find_place_in_grid(oracle)


def run_again(oracle: keras_tuner.Oracle, tuner_id: str) -> None:
    """Have the worker that asks next run the trial of another, which is lost (engine/oracle.py: `create_trial`)."""
    trial = oracle.ongoing_trials.pop(tuner_id, None)
    if trial is not None:
        oracle._retry_queue.append(trial.trial_id)
        oracle.save()


def _find_place_in_grid(oracle: keras_tuner.Oracle) -> None:
    values = {trial_id: trial.hyperparameters.values for trial_id, trial in oracle.trials.items()}
    oracle._ordered_ids = gridsearch.LinkedList()
    for trial_id in sorted(values, key=functools.cmp_to_key(lambda a, b: oracle._compare(values[a], values[b]))):
        oracle._ordered_ids.insert(trial_id)
    oracle._populate_next = list(oracle.start_order)
