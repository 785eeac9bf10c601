"""Launches that go on: after failures and hangs all start again, and asked to end they save first."""

import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import restart_runs
import worker_runs
from launching import ROOT, Shown, environ_with, linux, processes_with, run, script, wait_until

import keras_dist_ext as kde
from keras_dist_ext.cluster.cores import fair_shares, usable_cpus
from keras_dist_ext.cluster.launch import WorkerFailed, launch

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("signals_as_in_a_terminal")]


# What the workers run. They import this module, so it must not import TensorFlow.


def index():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def restart():
    return int(os.environ["KERAS_DIST_EXT_RESTART"])


def act(*actions):
    """Let worker 1 do another thing in each attempt, while worker 0 waits for it; return what there was."""
    number = restart()
    if number == len(actions):
        return number, json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    if index() == 0:
        time.sleep(120)
    name, *arguments = actions[number]
    return globals()[name](*arguments)


def fail(message="no such file"):
    raise ValueError(message)


def kill_self(signum):
    os.kill(os.getpid(), signum)


def stop_self():
    sys.stdout.write(f"process {os.getpid()} stops\n")
    os.kill(os.getpid(), signal.SIGSTOP)


def run_out_of_memory():
    """Ask for more than there may be, as where a limit is set."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
    return bytes(1 << 30)


def step_and_fail(num_steps):
    for step in range(1, num_steps + 1):
        kde.heartbeat(step)
    fail()


def step_and_hang(num_steps):
    for step in range(1, num_steps + 1):
        kde.heartbeat(step)
    if index() == 1:
        wait_in_vain()
    sys.stdout.write("hangs\n")
    time.sleep(120)


def wait_in_vain():
    sys.stdout.write("hangs\n")
    threading.Event().wait(120)


def step_when_told(num_steps, folder):
    """Make steps, each when the launcher has let time pass since the one before."""
    for step in range(1, num_steps + 1):
        kde.heartbeat(step)
        sys.stdout.write(f"step {step}\n")
        while not pathlib.Path(folder, str(step)).exists():
            time.sleep(0.01)
    return num_steps


def fail_when_the_other_dies(note):
    """Let worker 1 be killed, and worker 0 fail at once, as TensorFlow's collectives do."""
    path = pathlib.Path(note)
    if index() == 1:
        path.write_text(str(os.getpid()))
        kill_self(signal.SIGKILL)
    while not path.exists() or not path.read_text():
        time.sleep(0.001)
    status = pathlib.Path(f"/proc/{path.read_text()}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.0001)
    fail("connection reset by peer")


def own_cpus():
    return sorted(os.sched_getaffinity(0))


# Restarts.


def test_all_start_again_after_a_failure_on_other_ports(tmp_path, temporary):
    actions = [("fail",), ("kill_self", signal.SIGKILL)]
    result, shown = run(
        2, act, args=actions, max_restarts=3, pause_seconds=0.01, grace_seconds=0.1, log_dir=tmp_path / "logs",
        environ=environ_with(TEST_TOKEN="again"),
    )  # fmt: skip
    (number, addresses), (_, same) = result.values
    assert (number, result.num_restarts, result.exit_code, addresses) == (2, 2, 0, same)
    assert "launch: worker 1 failed with exit code 1. The launch ended the other process. Its last lines" in shown
    assert "[worker 1] ValueError: no such file\nlaunch: restart 1 of 3 in 0.01 s.\n" in shown
    assert "launch: worker 1 failed with SIGKILL, which the launch did not send; often it means that memory" in shown
    assert "launch: restart 2 of 3 in 0.02 s.\n" in shown
    assert result.workers[1].log.read_text().count("ValueError: no such file") == 1, "the log keeps all attempts"
    assert processes_with("again") == []


@pytest.mark.slow
def test_when_restarts_are_used_up_the_last_failure_is_raised():
    with pytest.raises(WorkerFailed, match="worker 1 failed with exit code 1") as caught:
        run(2, act, args=[("fail", "first"), ("fail", "second")], max_restarts=1, pause_seconds=0.01, grace_seconds=0.1)
    assert caught.value.last_lines[-1] == "ValueError: second"


@pytest.mark.slow
@linux
def test_a_worker_without_memory_fails_as_any_other():
    result, shown = run(2, act, args=[("run_out_of_memory",)], max_restarts=1, pause_seconds=0.01, grace_seconds=0.1)
    assert result.num_restarts == 1
    assert "[worker 1] MemoryError\nlaunch: restart 1 of 1" in shown


@pytest.mark.slow
def test_the_exit_code_of_a_command_is_that_of_its_last_attempt(tmp_path):
    path = script(
        tmp_path,
        "import os\n"
        "restart = int(os.environ['KERAS_DIST_EXT_RESTART'])\n"
        "print('attempt', restart)\n"
        "raise SystemExit([3, 4, 0][restart])\n",
    )
    result, shown = run(1, [path], max_restarts=1, pause_seconds=0.01)
    assert (result.exit_code, result.num_restarts) == (4, 1)
    assert shown.endswith("launch: worker 0 failed with exit code 4. Its last lines:\n  [worker 0] attempt 1\n")
    result, _ = run(1, [path], max_restarts=5, pause_seconds=0.01)
    assert (result.exit_code, result.num_restarts, result.failure) == (0, 2, None)


@pytest.mark.slow
def test_pauses_grow_until_steps_are_made():
    actions = [("fail",), ("fail",), ("step_and_fail", 2), ("fail",)]
    _, shown = run(2, act, args=actions, max_restarts=4, pause_seconds=0.01, grace_seconds=0.1)
    assert re.findall(r"restart \d of 4 in (.*) s\.", shown) == ["0.01", "0.02", "0.01", "0.08"]
    assert "worker 1 failed with exit code 1 after step 2. The launch" in shown


@pytest.mark.slow
def test_the_time_limit_is_for_all_attempts_together(monkeypatch):
    def react(shown):
        shown.ahead = 300.0 * (("ValueError" in shown.getvalue()) + ("hangs" in shown.getvalue()))

    shown = Shown(monkeypatch, ("cluster.launch", "cluster.attempts", "cluster.process_group"), react)
    with pytest.raises(kde.LaunchError, match="The time limit passed"):
        run(2, act, args=[("fail",), ("wait_in_vain",)], max_restarts=9, time_limit=500, grace_seconds=0.1,
            pause_seconds=0.01, stream=shown)  # fmt: skip
    assert shown.ahead == 600.0


def test_a_signal_ends_a_pause_too(tmp_path):
    stream = io.StringIO()

    def send():
        wait_until(lambda: "restart 1 of 3" in stream.getvalue())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(1, [script(tmp_path, "raise SystemExit(1)")], max_restarts=3, pause_seconds=30, stream=stream)
    thread.join()
    assert "restart 2" not in stream.getvalue()


# Failures and hangs.


@pytest.mark.slow
def test_an_uncaught_exception_ends_the_others_though_its_process_lives_on(tmp_path):
    path = script(
        tmp_path,
        "import os, threading, time\n"
        "import keras_dist_ext\n"
        "if '\"index\": 1' in os.environ['TF_CONFIG']:\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n"  # as TensorFlow's may: it waits for the others
        "    raise ValueError('no more data')\n"
        "time.sleep(60)\n",
    )
    result, shown = run(2, [path], grace_seconds=0.5, environ=environ_with(PYTHONPATH=str(ROOT)))
    assert result.exit_code == 1
    assert shown.endswith("  [worker 1] ValueError: no more data\n")


@pytest.mark.slow
@linux
def test_of_one_that_is_killed_and_one_that_fails_with_it_the_killed_one_is_the_cause(tmp_path):
    with pytest.raises(WorkerFailed, match="worker 1 failed with SIGKILL"):
        run(2, fail_when_the_other_dies, args=(str(tmp_path / "pid"),), grace_seconds=0.1)


def in_haste_while_hanging(monkeypatch, num_workers):
    """Return a stream and clock of processes: it hurries from when so many have said that they hang, to a restart."""

    def react(shown):
        text = shown.getvalue().rpartition("launch: restart")[2]
        shown.haste = 100.0 if text.count("] hangs\n") == num_workers else 0.0

    return Shown(monkeypatch, ("cluster.process",), react)


def test_a_worker_that_finishes_no_step_hangs_and_shows_where(monkeypatch, temporary):
    shown = in_haste_while_hanging(monkeypatch, 2)
    with pytest.raises(kde.LaunchError) as caught:
        run(2, step_and_hang, args=(3,), timeout=1000, grace_seconds=0.5, environ=environ_with(TEST_TOKEN="hang"),
            stream=shown)  # fmt: skip
    text = str(caught.value)
    assert text.startswith(
        "No step was finished for 1000 s, and the launch ended what still ran: worker 0 has finished step 3 and begun "
        "no other, worker 1 has finished step 3 and begun no other.\n  worker 0, silent for "
    )
    _, of_worker_0, of_worker_1 = re.split(r"\n  worker \d:\n", text)
    assert re.search(r'test_restarts\.py", line \d+, in step_and_hang$', of_worker_0)
    assert "in wait_in_vain" not in of_worker_0
    assert re.search(r'in step_and_hang\n.*test_restarts\.py", line \d+, in wait_in_vain\n', of_worker_1)
    assert processes_with("hang") == []


def test_a_worker_that_finishes_a_step_now_and_then_does_not_hang(monkeypatch, tmp_path):
    def react(shown):
        step = round(shown.ahead / 400.0) + 1
        if shown.getvalue().count(f"] step {step}\n") == 2:
            shown.ahead += 400.0
            (tmp_path / str(step)).touch()

    shown = Shown(monkeypatch, ("cluster.process",), react)
    assert run(2, step_when_told, args=(6, str(tmp_path)), timeout=1000, stream=shown)[0].values == (6, 6)
    assert shown.ahead == 2400.0


@pytest.mark.slow
def test_after_a_hang_all_start_again(monkeypatch):
    stream = in_haste_while_hanging(monkeypatch, 1)
    result, shown = run(2, act, args=[("wait_in_vain",)], timeout=1000, max_restarts=1, pause_seconds=0.01,
                        grace_seconds=0.1, stream=stream)  # fmt: skip
    assert result.num_restarts == 1
    assert "worker 0 has not made a step yet, worker 1 has not made a step yet.\n" in shown


@linux
def test_a_worker_that_is_stopped_is_said_to_be(monkeypatch):
    def react(shown):
        found = re.search(r"process (\d+) stops\n", shown.getvalue())
        if found:
            wait_until(lambda: psutil.Process(int(found[1])).status() == psutil.STATUS_STOPPED)
            shown.haste = 100.0

    shown = Shown(monkeypatch, ("cluster.process",), react)
    with pytest.raises(kde.LaunchError) as caught:
        run(2, act, args=[("stop_self",)], timeout=1000, grace_seconds=0.1, stream=shown)
    assert "worker 0 has not made a step yet, worker 1 is stopped, as by SIGSTOP, before its first step.\n" in str(
        caught.value
    )
    assert "\n  worker 1: no stack; it is stopped, or runs no code of this package\n" in str(caught.value)


def test_a_program_without_this_package_is_not_harmed_by_being_asked():
    result, shown = run(1, ["sleep", "60"], timeout=0.5, grace_seconds=20)
    assert result.exit_code == 124
    assert result.workers[0].exit_code == -signal.SIGTERM
    assert (
        "worker 0 has not made a step yet.\n  worker 0 printed nothing\nWhere they were:\n  worker 0: no stack" in shown
    )


# CPUs.


def test_cpus_are_cut_evenly():
    for num_processes in range(1, 9):
        shares = fair_shares(range(6), num_processes)
        assert len(shares) == num_processes
        assert {cpu for share in shares for cpu in share} == set(range(6))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@linux
def test_each_worker_is_tied_to_its_share_of_the_cpus():
    values = run(2, own_cpus, affinity=True)[0].values
    assert [set(share) for share in values] == [set(share) for share in fair_shares(usable_cpus(), 2)]
    assert run(1, own_cpus)[0].values == (own_cpus(),)


def test_affinity_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with pytest.raises(kde.LaunchError, match="affinity=True pins processes to CPUs, which only Linux supports"):
        launch(2, ["sleep", "1"], affinity=True)


# Asked to end.


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_save_and_end_well_make_a_launch_that_ended_well(signum, tmp_path, temporary):
    """What a worker has started, such as processes that load its data, lives until it has saved."""
    path = script(
        tmp_path,
        "import os, pathlib, signal, subprocess, sys, time\n"
        "import keras_dist_ext\n"
        "loader = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
        "asked = []\n"
        f"signal.signal({int(signum)}, lambda *_: asked.append(1))\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "pathlib.Path(folder, f'ready-{os.getpid()}').touch()\n"
        "while not asked: time.sleep(0.05)\n"
        "time.sleep(0.3)\n"
        "pathlib.Path(folder, f'saved-{loader.poll()}-{os.getpid()}').touch()\n",
    )
    environ = environ_with(TEST_TOKEN="asked", PYTHONPATH=str(ROOT), TMPDIR=str(temporary))
    with subprocess.Popen(
        [sys.executable, "-m", "keras_dist_ext", "launch", "--workers", "2", path],
        env=environ, stdout=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        launcher.send_signal(signum)
        shown, _ = launcher.communicate(timeout=45)
    name = signal.Signals(signum).name
    assert shown == f"launch: {name} ended the launch; all workers have ended well, with exit code 0.\n"
    assert launcher.returncode == 0
    assert len(list(tmp_path.glob("saved-None-*"))) == 2
    wait_until(lambda: not processes_with("asked"))


# TensorFlow.


@pytest.fixture(scope="module")
def asked_to_end(tmp_path_factory):
    """A run on two workers that is asked to end in its second epoch; what was shown, and its folder."""
    folder = tmp_path_factory.mktemp("asked")
    command = [sys.executable, "-m", "keras_dist_ext", "launch", "--workers", "2", "--grace", "30"]
    environ = environ_with(PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="3", TEST_TOKEN="preempted")
    with subprocess.Popen(
        [*command, str(ROOT / "tests/support/restart_runs.py"), str(folder), "--slowly"],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as launcher:  # fmt: skip
        wait_until(lambda: (folder / "epoch 1").exists() or launcher.poll() is not None, 120)
        launcher.send_signal(signal.SIGTERM)
        shown, _ = launcher.communicate(timeout=60)
    return launcher.returncode, shown, folder


@pytest.mark.multiworker
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_two_workers_that_are_asked_to_end_save_and_the_launch_ends_well(asked_to_end):
    code, shown, folder = asked_to_end
    assert code == 0, shown
    assert shown.endswith("launch: SIGTERM ended the launch; all workers have ended well, with exit code 0.\n")
    assert len(list((folder / "saves").glob("*.kde"))) >= 1
    assert not (folder / "epoch 9").exists()
    assert processes_with("preempted") == []


@pytest.mark.multiworker
@pytest.mark.slow
@pytest.mark.timeout(620)
def test_two_workers_go_on_after_an_exception_a_kill_and_two_hangs(tmp_path, temporary):
    """Worker 1 raises, is killed, hangs in a callback, and is stopped; the fifth attempt comes to the end."""
    environ = environ_with(TF_CPP_MIN_LOG_LEVEL="3", TEST_TOKEN="accidents")
    command = [
        str(ROOT / "tests/support/restart_runs.py"),
        str(tmp_path),
        "--accidents",
        "fail",
        "kill",
        "hang",
        "stop",
    ]
    result, shown = run(
        2, command, max_restarts=4, timeout=45, pause_seconds=0.1, time_limit=600, environ=environ,
        log_dir=tmp_path / "logs",
    )  # fmt: skip
    assert result.exit_code == 0, shown
    assert result.num_restarts == 4
    raised, killed, hung, stopped, _ = re.split(r"launch: restart \d of 4 in .*\n", shown)
    assert "launch: worker 1 failed with exit code 1 after step " in raised
    assert raised.endswith("[worker 1] ValueError: an accident\n")
    assert "launch: worker 1 failed with SIGKILL after step " in killed
    assert re.search(
        r"ended what still ran: worker 0 waits in an all-reduce at step (\d+), "
        r"worker 1 has finished step \d+ and begun no other\.",
        hung,
    ), hung
    assert re.search(r'restart_runs\.py", line \d+, in hang\n', hung)
    assert re.search(r"launch: worker 1 was stopped, as by SIGSTOP after step \d+, for 5 s, so that the oth", stopped)
    assert processes_with("accidents") == []
    assert restart_runs.read_ended(tmp_path) == [[1.0] * worker_runs.NUM_EXAMPLES] * restart_runs.EPOCHS
