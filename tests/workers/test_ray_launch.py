"""Launch on Ray, on a real cluster of nodes on this machine: what works here works there, and nothing is left behind.

pip install '.[test,ray]' && python -m pytest -m ray tests/workers/test_ray_launch.py
"""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time

import elastic_runs
import pytest
import ray_runs
from launching import script, wait_until
from ray_nodes import assert_nothing_is_left, token

import keras_dist_ext as kde

pytestmark = ray_runs.MARKS

SLEEPER = """
import os, subprocess, sys, time
print("process", os.getpid(), "of", os.getppid(), "in generation", os.environ["KERAS_DIST_EXT_RESTART"], flush=True)
if os.environ["KERAS_DIST_EXT_RESTART"] == "1":
    sys.exit(0)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(1000)
"""


def test_workers_on_ray_train_what_local_workers_train_to_the_bit(nodes):
    on = kde.RayCluster(nodes.cluster.address, runtime_env=ray_runs.RUNTIME_ENV)
    stream = io.StringIO()
    values = kde.launch(2, ray_runs.train_as_worker, on=on, stream=stream).values
    assert values == kde.launch(2, ray_runs.train_as_worker, stream=stream).values
    assert values[0]["weights"] == pytest.approx(ray_runs.weights_of_one_device(), rel=1e-5)
    assert "[worker 1] " in stream.getvalue()


def test_a_worker_that_fails_ends_all_with_its_exit_code_and_last_lines(nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "import os, sys, time\n"
           "if '\"index\": 1' not in os.environ['TF_CONFIG']: time.sleep(1000)\n"
           "print(sys.argv[1], os.listdir())\nsys.exit(3)\n")  # fmt: skip
    stream = io.StringIO()
    result = kde.launch(2, ["script.py", "an argument"], on=nodes.on, environ=token("fails"), stream=stream)
    assert result.exit_code == 3
    assert stream.getvalue().endswith(
        "launch: worker 1 failed with exit code 3. The launch ended the other process. Its last lines:\n"
        "  [worker 1] an argument ['script.py']\n"
    )
    assert_nothing_is_left("fails", nodes)


@pytest.mark.parametrize("accident", ["worker", "node"])
def test_after_an_accident_all_start_again_where_there_is_room(nodes, accident, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, SLEEPER)
    nodes.have(3 if accident == "node" else 2)
    stream = io.StringIO()

    def strike():
        wait_until(lambda: stream.getvalue().count("generation 0") == 2)
        process, agent = map(int, re.search(r"worker 1. process (\d+) of (\d+)", stream.getvalue()).groups())
        if accident == "worker":
            os.kill(process, signal.SIGKILL)
        else:
            nodes.lose(agent)

    thread = threading.Thread(target=strike)
    thread.start()
    result = kde.launch(2, ["script.py"], on=nodes.on, environ=token(accident), max_restarts=1, stream=stream,
                        pause_seconds=0.1, time_limit=120)  # fmt: skip
    thread.join()
    assert result.exit_code == 0
    assert result.num_restarts == 1
    said = {"worker": "failed with SIGKILL, which the launch did not send", "node": "was lost: its node "}
    assert f"launch: worker 1 {said[accident]}" in stream.getvalue()
    assert_nothing_is_left(accident, nodes)


def test_a_run_that_loses_a_node_and_gets_another_ends_with_the_bits_of_an_uninterrupted_one(nodes, tmp_path):
    nodes.have(3)
    stream, results = io.StringIO(), []
    options = {"threads_per_worker": 1, "time_limit": 240, "stream": stream}

    def run():
        on = kde.RayCluster(nodes.cluster.address, runtime_env=ray_runs.RUNTIME_ENV)
        args = (str(tmp_path / "elastic"), 2, "wait")
        results.append(kde.launch((1, 3), elastic_runs.train, args=args, max_restarts=1, on=on,
                                  environ=token("elastic"), **options))  # fmt: skip

    thread = threading.Thread(target=run)  # Ray adds nodes in the main thread alone
    thread.start()
    wait_until(lambda: "accident of" in stream.getvalue(), 120)
    nodes.lose(int(re.search(r"accident of \d+ of (\d+)", stream.getvalue())[1]))
    wait_until(lambda: "goes on" in stream.getvalue(), 120)
    nodes.add()
    thread.join()
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("launch: ")]
    numbers = [int(line.split()[1]) for line in lines if " of 1 to 3." in line]
    assert numbers[0] == numbers[-1] == 3, stream.getvalue()
    assert len(numbers) > 2, stream.getvalue()
    assert max(numbers[1:-1]) < 3, "without the lost node there are places for two, or for one while the other is freed"
    assert "launch: There are places for more workers: all have saved and ended, and start again." in lines
    (result,) = results
    assert result.num_restarts == len(numbers) - 1
    assert_nothing_is_left("elastic", nodes)
    (reference,) = kde.launch(1, elastic_runs.train, args=(str(tmp_path / "reference"), 2), **options).values
    for worker in result.values:
        elastic_runs.assert_same_bits(worker, reference)


def test_an_agent_that_is_stopped_is_lost_and_another_takes_its_place(nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, SLEEPER)
    nodes.have(3)
    stream = io.StringIO()

    def strike():
        wait_until(lambda: stream.getvalue().count("generation 0") == 2)
        os.kill(int(re.search(r"worker 1. process \d+ of (\d+)", stream.getvalue())[1]), signal.SIGSTOP)

    thread = threading.Thread(target=strike)
    thread.start()
    result = kde.launch(2, ["script.py"], on=nodes.on, environ=token("stopped"), max_restarts=1, stream=stream,
                        pause_seconds=0.1, time_limit=120)  # fmt: skip
    thread.join()
    assert result.exit_code == 0
    assert re.search(r"launch: worker 1 was lost: its node .*, has not answered for 2\d s\.", stream.getvalue())
    assert_nothing_is_left("stopped", nodes)


HANGS = """
import os, time
import keras_dist_ext as kde
def wait_for_nobody():
    time.sleep(1000)
kde.heartbeat(3)
print("begins to wait", flush=True)
wait_for_nobody()
"""


def test_workers_that_hang_are_ended_with_where_they_were(nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, HANGS)
    stream = io.StringIO()
    result = kde.launch(2, ["script.py"], on=nodes.on, environ=token("hang"), timeout=15, time_limit=120, stream=stream)
    assert result.exit_code == 124
    shown = stream.getvalue()
    assert "launch: No step was finished for 15 s, and the launch ended what still ran: worker 0 has finished" in shown
    for worker in (0, 1):
        assert re.search(rf"  worker {worker}:\n(    .*\n)*    .* in wait_for_nobody\n", shown), shown
    assert_nothing_is_left("hang", nodes)


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_when_the_launcher_ends_nothing_is_left(nodes, signum, code, tmp_path):
    script(tmp_path, SLEEPER)
    words = ["--on", "ray", "--address", nodes.cluster.address, "--workers", "2", "script.py"]
    launcher = subprocess.Popen([sys.executable, "-m", "keras_dist_ext", "launch", *words], cwd=tmp_path,
                                stdout=subprocess.PIPE, text=True)  # fmt: skip
    with launcher:
        pids = []
        for line in launcher.stdout:
            pids += re.findall(r"(?:process|child) (\d+)", line)
            if len(pids) == 4:
                break
        time.sleep(2.0)  # the guard looks every second
        launcher.send_signal(signum)
        launcher.stdout.read()
    assert launcher.returncode == code
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert_nothing_is_left("", nodes)


def test_a_cluster_without_room_is_waited_for_until_the_time_is_over(nodes):
    stream = io.StringIO()
    result = kde.launch(9, ["true"], on=nodes.on, time_limit=3, stream=stream)
    assert result.exit_code == 124
    assert result.failure.startswith(
        "The time limit passed before anything could start. Ray has no room for 9 processes of 1 CPU each; all that "
    )
