"""Workers and a chief's stand-in for searches without TensorFlow: real processes, real calls, no training.

python light_search.py worker [ACT ...]     asks for trials, and acts in each, or says that it has run it
python light_search.py chief                ends when the search does
"""

import os
import signal
import sys
import time
from pathlib import Path

from keras_dist_ext.tuner.processes.channel import Channel, Unreachable
from keras_dist_ext.tuner.processes.place import place_of


def worker(*acts: str) -> None:
    place = place_of()
    assert place is not None
    channel = Channel(place.address, patience_seconds=60.0)
    if acts[:1] == ("measure",):
        measure(channel, place.tuner_id, *acts[1:])
    for turn in range(1, 1000):
        request = {"tuner_id": place.tuner_id, "start": place.start, "turn": turn, "member": 0, "num_members": 1}
        while (trial := channel.call("create_trial", **request)) is None:
            time.sleep(0.02)
        if trial["status"] == "STOPPED":
            return
        act(trial, place.start, *acts)
        channel.call("update_trial", trial_id=trial["trial_id"], metrics={"score": 1.0}, step=0)
        done = {**trial, "status": "COMPLETED"}
        channel.call("end_trial", **request, trial=done)


def measure(channel: Channel, tuner_id: str, how: str, folder: str) -> None:
    """Make the first pass, or wait for it; who is the first to begin it will "hang" or "die"."""
    asking = {"tuner_id": tuner_id, "measures": False}
    while "outcome" not in (reply := channel.call("ask_first_pass", **asking)):
        if reply["may_measure"]:
            begun = Path(folder, "begun")
            if not begun.exists():
                begun.touch()
                if how == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(200)
            outcome = {"survivors": ["a"], "dropped": {}, "examples_per_second": {}}
            channel.call("end_first_pass", outcome=outcome)
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
    elif what == "leave" and wanted:
        sys.exit(0)
    elif what == "wait":
        while not Path(args[0]).exists():
            time.sleep(0.02)
    else:
        time.sleep(0.05)


def chief() -> None:
    place = place_of()
    assert place is not None
    channel = Channel(place.address)
    while True:
        try:
            channel.call("status")
        except Unreachable as error:
            if not error.is_busy:
                return
        time.sleep(0.05)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "crash":
        sys.exit("this machine lacks a library")
    {"worker": worker, "chief": chief}[role](*rest)
