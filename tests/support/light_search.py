"""Workers and a chief's stand-in for searches without TensorFlow: real processes, real calls, no training.

python light_search.py worker [ACT ...]     asks for trials, and acts in each, or says that it has run it
python light_search.py chief                ends when the search does
python light_search.py search FOLDER N      is a search of N trials, in which one waits for the end of its node
"""

import os
import signal
import sys
import time
from pathlib import Path

from keras_dist_ext.tuner.processes.channel import Channel, Unreachable
from keras_dist_ext.tuner.processes.process_role import process_role


def worker(*acts: str) -> None:
    role = process_role()
    assert role is not None
    channel = Channel(role.address, retry_seconds=60.0)
    if acts[:1] == ("measure",):
        measure(channel, role.tuner_id, *acts[1:])
    for trial_number in range(1, 1000):
        request = {
            "tuner_id": role.tuner_id,
            "start": role.start,
            "trial_number": trial_number,
            "worker_index": 0,
            "num_workers": 1,
        }
        while (trial := channel.call("create_trial", **request)) is None:
            time.sleep(0.02)
        if trial["status"] == "STOPPED":
            return
        act(trial, role.start, *acts)
        channel.call("update_trial", trial_id=trial["trial_id"], metrics={"score": 1.0}, step=0)
        done = {**trial, "status": "COMPLETED"}
        channel.call("end_trial", **request, trial=done)


def measure(channel: Channel, tuner_id: str, how: str, folder: str) -> None:
    """Screen, or wait for the result; the first to begin will "hang" or "die"."""
    asking = {"tuner_id": tuner_id, "measures": False}
    while "result" not in (reply := channel.call("request_screening", **asking)):
        if reply["may_measure"]:
            begun = Path(folder, "begun")
            if not begun.exists():
                begun.touch()
                if how == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(200)
            result = {"survivors": ["a"], "dropped": {}, "examples_per_second": {}}
            channel.call("finish_screening", result=result)
        time.sleep(0.02)


def act(trial: dict, start: int, what: str = "work", *args: str) -> None:
    """Do in a trial what a test asks for: "work", or WHAT [TRIAL_ID [START]] in this trial, at this start."""
    wanted = [trial["trial_id"], str(start)][: len(args)] == list(args)
    if what == "die" and wanted:
        sys.stdout.write("about to die\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "hang" and wanted:
        time.sleep(200)
    elif what == "one dies":
        if is_first(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        act(trial, start, "wait", str(Path(args[0], "crowded")))
    elif what == "lose":
        if is_first(args[0]):
            sys.stdout.write(f"accident of {os.getpid()} of {os.getppid()}\n")
            time.sleep(200)
        time.sleep(0.05)
    elif what == "leave" and wanted:
        sys.exit(0)
    elif what == "wait":
        while not Path(args[0]).exists():
            time.sleep(0.02)
    else:
        time.sleep(0.05)


def search(folder: str, max_trials: str) -> None:
    """Be the chief, with an oracle of its own, or a worker."""
    role = process_role()
    assert role is not None
    if not role.is_chief:
        return worker("lose", folder)
    import keras_tuner

    from keras_dist_ext.tuner.processes.oracle_server import OracleServer

    hyperparameters = keras_tuner.HyperParameters()
    hyperparameters.Int("units", 1, 10**6)
    oracle = keras_tuner.oracles.RandomSearchOracle(
        objective=keras_tuner.Objective("score", "max"), max_trials=int(max_trials), hyperparameters=hyperparameters
    )
    oracle.verbose = 0
    oracle._set_project_dir(folder, "project")
    sys.stdout.write(f"listens on {role.address}\n")
    OracleServer(oracle, role.address, lambda *_: None).run()
    sys.stdout.write(f"ended {sorted(trial.status for trial in oracle.trials.values())}\n")
    return None


def is_first(folder: str) -> bool:
    """Whether nobody has asked before."""
    try:
        Path(folder, "accident").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def chief() -> None:
    role = process_role()
    assert role is not None
    channel = Channel(role.address)
    while True:
        try:
            channel.call("status")
        except Unreachable as error:
            if not error.is_busy:
                return
        time.sleep(0.05)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "crash":
        sys.exit("this machine lacks a library")
    {"worker": worker, "chief": chief, "search": search}[what](*rest)
