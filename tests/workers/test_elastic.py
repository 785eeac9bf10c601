"""Launches on as many workers as there are places for: fewer after a failure, more at a checkpoint."""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import elastic_runs
import pytest
from cases import rotating
from launching import Shown, environ_with, processes_with, run, script, wait_until

import keras_dist_ext as kde
from keras_dist_ext.cli import main
from keras_dist_ext.cluster import heartbeat, local_host
from keras_dist_ext.cluster.launch import launch
from keras_dist_ext.cluster.process_group import ProcessGroup

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("signals_as_in_a_terminal")]


# What the workers run. They import this module, so it must not import TensorFlow.


def size():
    return len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])


def index():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def restart():
    return int(os.environ["KERAS_DIST_EXT_RESTART"])


def act(folder, *actions):
    """Do another thing in each attempt; return the number of the last one, and of its workers."""
    if restart() == len(actions):
        return restart(), size()
    name, *arguments = actions[restart()]
    return globals()[name](pathlib.Path(folder, str(restart())), *arguments)


def leave(note, exit_code=0):
    """Leave as `Resume` does: all together, after the first worker was asked to."""
    if index() == 0:
        heartbeat.can_leave(True)
        sys.stdout.write("can leave\n")
        wait_until(heartbeat.is_asked_to_leave)
        note.touch()
    wait_until(note.exists)
    heartbeat.leaves()
    sys.exit(exit_code if index() else 0)


def fail(note):
    if index():
        raise ValueError("an accident")
    time.sleep(60)


def stay(note):
    """Never leave, as where there is no `Resume`, though there are places for more."""
    if index() == 0:
        for step in range(1, 11):
            kde.heartbeat(step)
            time.sleep(0.05)


# Helpers.


@pytest.fixture
def cores(monkeypatch):
    """What decides how many cores there are: a function of what was shown, in a stream that it is given."""
    monkeypatch.setattr(ProcessGroup, "PLACES_SECONDS", 0.05)

    def decide(count):
        shown = Shown(monkeypatch, (), lambda _: None)
        monkeypatch.setattr(local_host, "num_cores", lambda: count(shown.getvalue()))
        return shown

    return decide


def elastic(num_workers, shown, folder, *actions, **options):
    options = {"pause_seconds": 0.01, "grace_seconds": 0.1, **options}
    return run(num_workers, act, args=(str(folder), *actions), stream=shown, **options)


# How many start.


@pytest.mark.parametrize(
    ("num_cores", "threads", "num_workers", "expected"),
    rotating(
        [(3, None, (2, 4), 3), (1, None, (2, 3), 2), (9, None, (1, 2), 2), (7, 3, (1, 4), 2)],
        quick=[(3, None, (2, 4), 3), (7, 3, (1, 4), 2)],
    ),
)
def test_as_many_workers_start_as_there_are_places_for(cores, num_cores, threads, num_workers, expected, tmp_path):
    result, shown = elastic(num_workers, cores(lambda _: num_cores), tmp_path, threads_per_worker=threads)
    assert result.values == ((0, expected),) * expected
    assert shown == f"launch: {expected} workers of {num_workers[0]} to {num_workers[1]}.\n"


@pytest.mark.slow
def test_a_fixed_number_starts_on_any_number_of_cores(cores, tmp_path):
    for num_workers in (2, (2, 2)):
        result, shown = elastic(num_workers, cores(lambda _: 1), tmp_path)
        assert (result.values, shown) == (((0, 2),) * 2, "")


def test_the_command_line_takes_the_least_and_the_most(cores, tmp_path, capfd):
    cores(lambda _: 3)
    path = script(tmp_path, "import json, os\nprint(len(json.loads(os.environ['TF_CONFIG'])['cluster']['worker']))\n")
    assert main(["launch", "--workers", "1:3", "--affinity", "--time-limit", "45", path]) == 0
    out = capfd.readouterr().out
    assert sorted(out.splitlines()) == [*(f"[worker {i}] 3" for i in range(3)), "launch: 3 workers of 1 to 3."]


# Fewer.


@pytest.mark.slow
def test_after_a_failure_as_many_start_again_as_there_are_places_for_then(cores, tmp_path):
    shown = cores(lambda text: 2 if "restart 1" in text else 3)
    result, text = elastic((2, 4), shown, tmp_path, ("fail",), max_restarts=1)
    assert result.values == ((1, 2),) * 2
    assert (result.num_restarts, len(result.workers)) == (1, 2)
    lines = [line for line in text.splitlines() if line.startswith("launch: ")]
    assert lines[0] == "launch: 3 workers of 2 to 4."
    assert lines[1].startswith("launch: worker ")
    assert lines[2:] == ["launch: restart 1 of 1 in 0.01 s.", "launch: 2 workers of 2 to 4."]


class NoRoom:
    """Starts processes for the first workers alone, as a machine does whose memory is used up."""

    def __init__(self, monkeypatch, num_workers):
        self._popen, self._num_workers, self.num_refused = subprocess.Popen, num_workers, 0
        monkeypatch.setattr(local_host.subprocess, "Popen", self._start)

    def _start(self, command, **options):
        task = json.loads((options.get("env") or {}).get("TF_CONFIG", '{"task": {"index": -1}}'))["task"]
        if task["index"] >= self._num_workers:
            self.num_refused += 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._popen(command, **options)


def test_where_the_system_starts_no_more_processes_those_do_that_it_starts(cores, tmp_path, monkeypatch, temporary):
    no_room = NoRoom(monkeypatch, 2)
    result, shown = elastic((1, 4), cores(lambda _: 4), tmp_path, ("stay",), environ=environ_with(TEST_TOKEN="no room"))
    assert result.values == ((1, 2),) * 2
    assert no_room.num_refused == 1, "it is not tried again for more"
    lines = shown.splitlines()
    assert lines[1] == (
        f"launch: worker 2 cannot be started: [Errno {errno.EAGAIN}] Resource temporarily unavailable. The launch "
        "starts again with 2 workers, and no more from here on."
    )
    assert lines[2:] == ["launch: 2 workers of 1 to 2."]
    assert processes_with("no room") == []


@pytest.mark.parametrize("num_workers", rotating([3, (3, 4)], quick=[(3, 4)]))
def test_fewer_than_the_least_are_an_error(cores, num_workers, tmp_path, monkeypatch, temporary):
    NoRoom(monkeypatch, 2)
    with pytest.raises(kde.LaunchError, match="worker 2 cannot be started: .* temporarily unavailable"):
        elastic(num_workers, cores(lambda _: 4), tmp_path, environ=environ_with(TEST_TOKEN="too few"))
    assert processes_with("too few") == []


# More.


def test_when_places_have_come_all_leave_at_a_checkpoint_and_more_start(cores, tmp_path):
    shown = cores(lambda text: 2 + min(1, text.count("can leave")))
    result, text = elastic((1, 3), shown, tmp_path, ("leave",))
    assert result.values == ((1, 3),) * 3
    assert (result.exit_code, result.failure, result.num_restarts) == (0, None, 1)
    assert text == (
        "launch: 2 workers of 1 to 3.\n[worker 0] can leave\nlaunch: There are places for more workers: all have saved "
        "and ended, and start again.\nlaunch: 3 workers of 1 to 3.\n"
    )


@pytest.mark.slow
def test_what_never_saves_goes_on_as_it_is(cores, tmp_path):
    shown = cores(lambda text: 3 if "of 1 to 3" in text else 2)
    result, text = elastic((1, 3), shown, tmp_path, ("stay",))
    assert (result.num_restarts, len(result.workers)) == (0, 2)
    assert text == "launch: 2 workers of 1 to 3.\n"


@pytest.mark.slow
def test_only_failures_count_as_restarts(cores, tmp_path):
    shown = cores(lambda text: 2 + (text.count("can leave") > text.count("launch: restart")))
    result, text = elastic((1, 3), shown, tmp_path, ("leave",), ("fail",), ("leave",), ("fail",), max_restarts=2)
    assert result.values == ((4, 2),) * 2
    assert [line for line in text.splitlines() if "launch: restart" in line] == [
        "launch: restart 1 of 2 in 0.01 s.",
        "launch: restart 2 of 2 in 0.02 s.",
    ]
    with pytest.raises(kde.LaunchError, match="an accident"):
        elastic((1, 3), cores(lambda text: 2 + text.count("can leave")), tmp_path, ("fail",), ("leave",))


@pytest.mark.slow
def test_a_worker_that_fails_while_all_leave_is_a_failure(cores, tmp_path):
    shown = cores(lambda text: 2 + text.count("can leave"))
    with pytest.raises(kde.LaunchError, match="worker 1 failed with exit code 5"):
        elastic((1, 3), shown, tmp_path, ("leave", 5))


@pytest.mark.slow
def test_a_signal_ends_an_elastic_launch_as_any_other(cores, tmp_path, temporary):
    sent = []

    def count(text):
        if "can leave" in text and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return 2 + len(sent)

    shown = cores(count)
    with pytest.raises(KeyboardInterrupt):
        elastic((1, 3), shown, tmp_path, ("leave",), environ=environ_with(TEST_TOKEN="ended"))
    assert "3 workers" not in shown.getvalue()
    assert processes_with("ended") == []


# What is refused.


@pytest.mark.parametrize(
    ("num_workers", "message"),
    [
        ((4, 2), "the most of num_workers must be an integer >= 4, got 2"),
        ((0, 2), "the least of num_workers must be an integer >= 1, got 0"),
        ((2, -1), "the most of num_workers must be an integer >= 2, got -1"),
        ((2, 1 << 70), "the most of num_workers must be an integer from 2 to 65535, got "),
        ((True, 2), "the least of num_workers must be an integer >= 1, got True"),
        ((2, 2.5), r"the most of num_workers must be an integer >= 2, got 2\.5"),
        ((2,), r"num_workers must be a number, or a pair such as \(2, 4\), got \(2,\)"),
        ((), "num_workers must be a number, or a pair"),
        (
            "2:4",
            r"num_workers must be an integer >= 1, or a pair of the least and the most such as \(2, 4\), got '2:4'",
        ),
        (None, "num_workers must be an integer >= 1, or a pair"),
    ],
)
def test_what_are_no_numbers_of_workers_is_refused_before_anything_starts(num_workers, message, temporary):
    with pytest.raises(kde.LaunchError, match=message):
        launch(num_workers, ["true"])


def test_parameter_servers_have_a_fixed_number_of_workers():
    with pytest.raises(kde.LaunchError, match="num_workers is 1 to 2, and num_ps 1: with parameter servers it must be"):
        launch((1, 2), ["true"], num_ps=1)


@pytest.mark.parametrize("text", ["4:2", "0:2", "2:", ":2", ":", "-1:2", "2:99999999", "2:3:4", "2.5:3", "a:b", "1: 2"])
def test_a_wrong_pair_on_the_command_line_is_refused(text, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["launch", f"--workers={text}", "x.py"])
    assert caught.value.code == 2
    assert f"--workers: {text!r} must be two integers from 1 to 65535, the least number of" in capsys.readouterr().err


def test_a_search_has_a_fixed_number_of_workers(capsys):
    assert main(["launch", "--workers", "2:4", "--tuner", "x.py"]) == 1
    assert "--workers 2:4 is not for a search: give one number, or auto." in capsys.readouterr().err


# TensorFlow.


@pytest.mark.multiworker
@pytest.mark.rotating
@pytest.mark.timeout(400)
@pytest.mark.parametrize("save_every", ["epoch", 2])
def test_a_run_on_3_then_2_then_3_workers_ends_with_the_bits_of_an_uninterrupted_one(cores, save_every, tmp_path):
    options = {"threads_per_worker": 1, "time_limit": 380, "environ": environ_with(TF_CPP_MIN_LOG_LEVEL="3")}
    shown = cores(lambda text: 2 if "restart 1" in text and "goes on" not in text else 3)
    result, text = run((1, 3), elastic_runs.train, args=(str(tmp_path / "elastic"), save_every, "kill"), stream=shown,
                       max_restarts=1, pause_seconds=0.01, **options)  # fmt: skip
    (reference,) = run(1, elastic_runs.train, args=(str(tmp_path / "reference"), save_every), **options)[0].values
    assert [line.split()[1] for line in text.splitlines() if "workers of" in line] == ["3", "2", "3"]
    assert result.num_restarts == 2
    for worker in result.values:
        elastic_runs.assert_same_bits(worker, reference)
