"""What a worker reports to its launcher, who reports for it, and what is said of workers that make no progress."""

import os
import signal
import subprocess
import sys
import types

import keras
import pytest

from keras_dist_ext.cluster import hang_report, heartbeat
from keras_dist_ext.cluster.heartbeat import Activity, Heartbeat, HeartbeatReader, make_heartbeat_file
from keras_dist_ext.errors import LaunchError


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """The launcher's end of this process' heartbeat, which has not begun."""
    path = tmp_path / "worker-0.heartbeat"
    make_heartbeat_file(path)
    before, hook = signal.getsignal(signal.SIGUSR1), sys.excepthook
    monkeypatch.setenv(heartbeat.HEARTBEAT_FILE, str(path))
    monkeypatch.setattr(heartbeat, "_writer", None)
    monkeypatch.setattr(heartbeat, "_stacks", None)
    reader = HeartbeatReader(path)
    yield reader
    reader.close()
    sys.excepthook = hook
    heartbeat.faulthandler.unregister(signal.SIGUSR1)
    if heartbeat._stacks is not None:
        heartbeat._stacks.close()
    if heartbeat._writer is not None:
        heartbeat._writer._memory.close()
    signal.signal(signal.SIGUSR1, before)


def written_by(reader, pid):
    writer = heartbeat.HeartbeatWriter(reader.path)
    writer.write(pid=pid)
    writer._memory.close()


# Who reports.


def test_without_a_launcher_nothing_is_reported_and_nothing_fails(monkeypatch):
    monkeypatch.setattr(heartbeat, "_writer", None)
    monkeypatch.delenv(heartbeat.HEARTBEAT_FILE, raising=False)
    heartbeat.begin()
    heartbeat.steps_begin("train", 1, 1)
    heartbeat.steps_end(1)
    heartbeat.can_leave(True)
    heartbeat.leaves()
    assert heartbeat._writer is None
    assert not heartbeat.is_asked_to_leave()


def test_a_child_of_the_worker_does_not_report_as_long_as_the_worker_lives(reader):
    written_by(reader, os.getppid())
    heartbeat.begin()
    heartbeat.steps_begin("train", 3, 1)
    assert reader.read() == Heartbeat(pid=os.getppid())


def test_a_child_of_another_user_lives_too(reader, monkeypatch):
    def kill(pid, signum):
        raise PermissionError

    written_by(reader, os.getppid())
    monkeypatch.setattr(os, "kill", kill)
    heartbeat.begin()
    assert reader.read().pid == os.getppid()


def test_whoever_comes_after_a_process_that_has_ended_reports_in_its_place(reader):
    ended = subprocess.Popen(["true"])
    ended.wait()
    written_by(reader, ended.pid)
    heartbeat.begin()
    heartbeat.steps_begin("train", 3, 1)
    assert reader.read()[:2] == (os.getpid(), 1)
    assert reader.read().activity == Activity.STEPS


def test_a_signal_that_the_user_handles_asks_for_no_stacks(reader):
    signal.signal(signal.SIGUSR1, lambda *_: None)
    heartbeat.begin()
    assert reader.read()[:2] == (os.getpid(), 0)
    assert not heartbeat.stacks_path(reader.path).exists()


def test_a_loop_may_count_its_steps_by_a_variable(reader):
    heartbeat.begin()
    heartbeat.heartbeat(keras.Variable(7, dtype="int64", trainable=False))
    assert (reader.read().finished, reader.read().activity) == (7, Activity.BETWEEN)
    with pytest.raises(LaunchError, match=r"step must be an integer >= 0, got .*7\.0"):
        heartbeat.heartbeat(keras.Variable(7.0, trainable=False))


@pytest.mark.parametrize(("error", "activity"), [(ValueError, Activity.FAILED), (KeyboardInterrupt, Activity.STARTS)])
def test_an_exception_that_nobody_caught_is_reported_but_for_ctrl_c(reader, error, activity, monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: printed.append(args))
    heartbeat.begin()
    sys.excepthook(error, error("no data"), None)
    assert [kind for kind, *_ in printed] == [error]
    assert reader.read().activity == activity


# Workers that make no progress.


def process(name, *, cpu=0.0, exit_code=None, is_stopped=False, **reported):
    """A process that uses this much CPU between two looks, and writes no stacks."""
    used = iter([1.0, 1.0 + cpu])
    hosted = types.SimpleNamespace(cpu_seconds=lambda: next(used), ask_for_stacks=lambda: False, stacks=lambda: "")
    return types.SimpleNamespace(
        name=name, hosted=hosted, heartbeat=Heartbeat(**reported), exit_code=exit_code, is_stopped=is_stopped
    )


def described(*processes):
    return hang_report.describe(processes)[0]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(hang_report, "_LOOK_SECONDS", 0.0)


STEPS = {"activity": Activity.STEPS}


@pytest.mark.parametrize(
    ("reported", "text"),
    [
        ({"exit_code": 3, "finished": 7}, "ended with exit code 3 after step 7"),
        ({"exit_code": -9}, "ended with SIGKILL"),
        ({"exit_code": -77}, "ended with signal 77"),
        ({"is_stopped": True}, "is stopped, as by SIGSTOP, before its first step"),
        ({"waits": 1, "finished": 4}, "waits in an all-reduce at step 5"),
        ({**STEPS, "first": 5, "last": 5, "cpu": 9.0}, "computes in step 5"),
        ({**STEPS, "first": 5, "last": 8, "cpu": 9.0}, "computes in steps 5 to 8"),
        ({**STEPS, "first": 5, "last": 5}, "waits in step 5, for others or for data"),
        ({**STEPS, "kind": 1, "finished": 4}, "waits in an evaluation or a prediction after step 4"),
        ({**STEPS, "kind": 2, "cpu": 9.0}, "computes in an evaluation or a prediction"),
        ({"activity": Activity.BETWEEN, "finished": 4}, "has finished step 4 and begun no other"),
        ({"activity": Activity.NO_MORE_DATA, "finished": 4}, "finished its data at step 4"),
        ({"activity": Activity.LEFT}, "has left fit"),
        ({}, "has not made a step yet"),
    ],
)
def test_what_a_worker_does_is_said_in_words(reported, text):
    assert described(process("worker 0", **reported)) == f"worker 0 {text}"


def test_a_worker_that_is_idle_in_a_step_which_another_has_not_reached_waits_for_it():
    assert described(
        process("worker 0", **STEPS, first=5, last=5),
        process("worker 1", **STEPS, first=4, last=4, cpu=9.0),
    ) == ("worker 0 waits in an all-reduce at step 5, worker 1 computes in step 4")
    assert described(
        process("worker 0", **STEPS, first=5, last=6), process("worker 1", activity=Activity.LEFT, finished=4)
    ) == ("worker 0 waits in an all-reduce at steps 5 to 6, worker 1 has left fit after step 4")
