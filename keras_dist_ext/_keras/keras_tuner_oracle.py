"""The one place that touches what keras-tuner's oracles keep to themselves (keras-tuner 1.4.8).

`tests/tuner/test_tuner_chief.py` fails when one of these changes.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from typing import Any

from keras_tuner.src.engine import oracle as oracle_module
from keras_tuner.src.tuners import gridsearch

from keras_dist_ext._keras.keras_tuner import keras_tuner

__all__ = ["go_on", "local_oracle", "release", "save_whole_files"]


def local_oracle(client: Any) -> Any:
    """Return the oracle of this process that a worker's client stands before (distribute/oracle_client.py)."""
    return client._oracle


def release(oracle: Any) -> None:
    """Release the lock that an exception in an oracle's method leaves held by this thread (engine/oracle.py).

    `synchronized` has no `finally`: the next thread that calls the oracle would wait for ever.
    """
    if oracle_module.THREADS[oracle] == threading.current_thread().name:
        oracle_module.THREADS[oracle] = None
        oracle_module.LOCKS[oracle].release()


def save_whole_files(oracle: Any) -> None:
    """Have an oracle write its files aside and rename them (engine/oracle.py: `save`, `_save_trial`).

    keras-tuner truncates them first, so that a chief which is killed meanwhile leaves a project that cannot be read.
    """
    if "://" in str(oracle._project_dir):  # no file system of this machine: keras-tuner's own way
        return

    def save_trial(trial: Any) -> None:
        write(os.path.join(oracle._get_trial_dir(trial.trial_id), "trial.json"), trial.get_state())

    def write(path: str, state: Any) -> None:
        aside = f"{path}.aside"
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(aside, path)

    oracle.save = lambda: write(oracle._get_oracle_fname(), oracle.get_state())
    oracle._save_trial = save_trial


def go_on(oracle: Any, *, workers_live: bool) -> None:
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


def _find_place_in_grid(oracle: Any) -> None:
    values = {trial_id: trial.hyperparameters.values for trial_id, trial in oracle.trials.items()}
    oracle._ordered_ids = gridsearch.LinkedList()
    for trial_id in sorted(values, key=functools.cmp_to_key(lambda a, b: oracle._compare(values[a], values[b]))):
        oracle._ordered_ids.insert(trial_id)
    oracle._populate_next = list(oracle.start_order)
