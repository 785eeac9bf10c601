"""Launch real processes: what they get, what they give back, and that nothing of them is left."""

import contextlib
import errno
import importlib.util
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import ROOT, Shown, environ_with, linux, processes_with, run, script, wait_until
from silent_host import SilentHost

import keras_dist_ext as kde
from keras_dist_ext.cli import main
from keras_dist_ext.cluster import command, cores, orphans, tasks
from keras_dist_ext.cluster.host import State
from keras_dist_ext.cluster.launch import WorkerFailed, launch
from keras_dist_ext.cluster.local_host import LocalHost, LocalProcess
from keras_dist_ext.cluster.orphans import children_of
from keras_dist_ext.cluster.process_group import ProcessGroup
from keras_dist_ext.cluster.signals import Interrupted, interrupting_signals

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("signals_as_in_a_terminal")]


# What the workers run. They import this module, so it must not import TensorFlow.


class Answer:
    def __init__(self, text):
        self.text = text


def index():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def answer(greeting, name="nobody"):
    return Answer(f"{greeting} {name} from {index()}")


def environment():
    return dict(os.environ)


def say(text, times=1):
    for _ in range(times):
        sys.stdout.write(text)


def say_and_return(text, times):
    say(text, times)
    return times


def say_bytes(*chunks):
    for chunk in chunks:
        os.write(1, chunk)
        time.sleep(0.1)


def leave(code):
    sys.exit(code)


def return_without_pickle():
    return threading.Lock()


def worker_1(action, *args):
    """Let worker 1 act while worker 0 ignores every polite request to end."""
    if index() == 1:
        globals()[action](*args)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("waiting for worker 1\n")
        time.sleep(120)


def fail(message):
    try:
        {}["the cause"]
    except KeyError as error:
        raise ValueError(message) from error


def fail_and_hang(message):
    threading.Thread(target=time.sleep, args=(120,)).start()
    fail(message)


def kill_self(signum):
    os.kill(os.getpid(), signum)


def exit_silently():
    os._exit(0)


def spawn_children():
    """Start a child that stays in the session and one that leaves it, both holding the output open."""
    sleep = [sys.executable, "-c", "import time; time.sleep(120)"]
    return subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid


def listen_on_own_port():
    """Listen as TensorFlow's server does, then try as a program that was not given the port."""
    config = json.loads(os.environ["TF_CONFIG"])
    port = int(config["cluster"]["worker"][config["task"]["index"]].rpartition(":")[2])
    with socket.socket() as stranger:
        try:
            stranger.bind(("", port))
        except OSError:
            taken = True
        else:
            taken = False
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("::", port))
        server.listen()
    return port, taken


def all_reduce():
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def total():
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(float(index() + 1)))
        )

    return float(total()), strategy.num_replicas_in_sync


def raise_between_collectives():
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def total():
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))

    for step in range(1_000_000):
        total()
        if index() == 1 and step == 3:
            raise ValueError("no more data on this worker")


def count_with_parameter_servers():
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    @tf.function
    def count():
        counter.assign_add(1.0)

    for _ in range(10):
        coordinator.schedule(count)
    coordinator.join()
    return float(counter.read_value()), counter.device


# Functions.


def test_a_function_runs_on_every_worker_and_its_values_come_back_in_order(temporary):
    result, _ = run(3, answer, args=("hello",), kwargs={"name": "Ada"})
    assert [value.text for value in result.values] == [f"hello Ada from {i}" for i in range(3)]
    assert all(type(value) is Answer for value in result.values)
    assert [worker.name for worker in result.workers] == ["worker 0", "worker 1", "worker 2"]
    assert result.exit_code == 0
    assert result.failure is None
    assert 0 < result.workers[0].seconds <= result.seconds


def test_the_package_offers_launch_as_a_function():
    assert kde.launch is launch


def test_workers_get_one_cluster_and_a_task_each():
    values = run(3, environment)[0].values
    configs = [json.loads(value["TF_CONFIG"]) for value in values]
    addresses = configs[0]["cluster"]["worker"]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": i} for i in range(3)]
    assert all(config["cluster"] == {"worker": addresses} for config in configs)
    assert len({address.removeprefix("127.0.0.1:") for address in addresses}) == 3
    assert all(1024 <= int(address.removeprefix("127.0.0.1:")) < 65536 for address in addresses)


@linux
def test_ports_are_kept_for_the_workers_until_the_end():
    ports = []
    for port, taken in run(2, listen_on_own_port)[0].values:
        assert taken, "another program could have taken the port"
        ports.append(port)
    for port in ports:
        with socket.socket() as free_again:
            free_again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free_again.bind(("", port))
            free_again.listen()


def test_environment_and_threads_are_what_was_asked_for():
    environ = environ_with(OMP_NUM_THREADS="7", TEST_WORD="mine")
    (given,) = run(1, environment, environ=environ, threads_per_worker=2)[0].values
    names = ("TEST_WORD", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    assert [given[name] for name in names] == ["mine", "2", "2", "2"]
    (left_alone,) = run(1, environment, environ=environ)[0].values
    assert left_alone["OMP_NUM_THREADS"] == "7"
    assert left_alone.get("TF_NUM_INTRAOP_THREADS") == os.environ.get("TF_NUM_INTRAOP_THREADS")


def test_functions_and_classes_of_a_script_come_back_as_its_own(tmp_path):
    path = script(
        tmp_path,
        "import sys\n"
        "from keras_dist_ext import launch\n"
        "class Mine:\n"
        "    def __init__(self, x): self.x = x\n"
        "def double(mine): return Mine(2 * mine.x)\n"
        "if __name__ == '__main__':\n"
        "    values = launch(2, double, args=(Mine(21),)).values\n"
        "    print([type(value) is Mine and value.x for value in values], sys.argv[1:])\n",
    )
    environ = environ_with(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, path, "a"], env=environ, capture_output=True, text=True, timeout=45)
    assert done.stdout == "[42, 42] ['a']\n", done.stderr


def test_a_function_whose_module_only_this_process_can_import_is_found_by_its_file(tmp_path, monkeypatch):
    path = tmp_path / "far away.py"
    path.write_text("class Thing:\n    size = 3\n\ndef make():\n    return Thing\n")
    spec = importlib.util.spec_from_file_location("far_away", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "far_away", module)
    spec.loader.exec_module(module)
    assert run(1, module.make)[0].values == (module.Thing,)


def test_a_module_of_the_same_name_elsewhere_is_not_mistaken(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text("def who():\n    return 'mine'\n")
    spec = importlib.util.spec_from_file_location("colorsys", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "colorsys", module)  # the standard library has one too
    spec.loader.exec_module(module)
    assert run(1, module.who)[0].values == ("mine",)


def test_a_function_that_no_other_process_can_find_is_refused_before_anything_starts(temporary):
    with pytest.raises(kde.LaunchError, match="<lambda>' or its arguments cannot be pickled .* at the top level"):
        run(2, lambda: 1)
    with pytest.raises(kde.LaunchError, match="'say' or its arguments cannot be pickled"):
        run(2, say, args=(threading.Lock(),))


def test_a_value_that_cannot_be_pickled_is_a_failure_that_says_what_to_return():
    with pytest.raises(WorkerFailed, match=r"'return_without_pickle' returned a lock .* Return numbers, strings"):
        run(1, return_without_pickle)


def test_sys_exit_counts_as_it_does_in_a_script():
    assert run(2, leave, args=(0,))[0].values == (None, None)
    with pytest.raises(WorkerFailed) as caught:
        run(1, leave, args=(3,))
    assert caught.value.exit_code == 3
    with pytest.raises(WorkerFailed, match="out of data") as caught:
        run(1, leave, args=("out of data",))
    assert caught.value.exit_code == 1


def test_a_launch_from_another_thread_works():
    values = []
    thread = threading.Thread(target=lambda: values.extend(run(2, answer, args=("hi",))[0].values))
    thread.start()
    thread.join(45)
    assert [value.text for value in values] == ["hi nobody from 0", "hi nobody from 1"]


# Failures.


@pytest.mark.parametrize("action", ["fail", "fail_and_hang"])
def test_an_exception_ends_the_others_and_arrives_with_its_traceback(action, temporary):
    with pytest.raises(WorkerFailed) as caught:  # within the time limit
        run(2, worker_1, args=(action, "böse 7"), grace_seconds=0.5, environ=environ_with(TEST_TOKEN=action))
    error = caught.value
    assert (error.worker, error.exit_code, error.signal_name) == ("worker 1", 1, None)
    assert "KeyError: 'the cause'" in error.last_lines
    assert error.last_lines[-1] == "ValueError: böse 7"
    assert str(error).startswith(
        "worker 1 failed with exit code 1. The launch ended the other process. Its last lines:\n  [worker 1] Traceback"
    )
    assert str(error).endswith("\n  [worker 1] ValueError: böse 7")
    assert processes_with(action) == []


def test_a_worker_that_is_killed_is_named_with_its_signal():
    with pytest.raises(WorkerFailed, match=r"worker 1 failed with SIGKILL, .* memory ran out") as caught:
        run(2, worker_1, args=("kill_self", signal.SIGKILL), grace_seconds=0.2)
    assert (caught.value.exit_code, caught.value.signal_name) == (-9, "SIGKILL")
    with pytest.raises(WorkerFailed, match="worker 1 failed with SIGSEGV") as caught:
        run(2, worker_1, args=("kill_self", signal.SIGSEGV), grace_seconds=0.2)
    assert any("worker_1" in line for line in caught.value.last_lines), "Python shows where it was"


def test_a_worker_that_ends_without_returning_is_a_failure():
    with pytest.raises(WorkerFailed, match="worker 1 ended before its function returned. The launch ended"):
        run(2, worker_1, args=("exit_silently",), grace_seconds=0.2)


def test_a_command_that_fails_gives_its_exit_code_and_shows_its_traceback_last(tmp_path):
    path = script(
        tmp_path,
        "import os, sys, time\n"
        "if '\"index\": 1' in os.environ['TF_CONFIG']:\n"
        "    print('starting')\n"
        "    raise ValueError('no such file')\n"
        "time.sleep(120)\n",
    )
    result, shown = run(3, [path])
    assert result.exit_code == 1
    assert [worker.exit_code for worker in result.workers] == [-15, 1, -15]
    assert [worker.ended_by_launch for worker in result.workers] == [True, False, True]
    assert shown.endswith(f"launch: {result.failure}\n")
    assert "worker 1 failed with exit code 1. The launch ended the other 2 processes." in result.failure
    assert result.failure.splitlines()[1] == "  [worker 1] Traceback (most recent call last):"
    assert result.failure.splitlines()[-1] == "  [worker 1] ValueError: no such file"


def test_a_command_ended_by_a_signal_gives_what_a_shell_would(tmp_path):
    path = script(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert run(1, [path])[0].exit_code == 137
    assert run(1, [sys.executable, "-c", "raise SystemExit(7)"])[0].exit_code == 7


@linux
def test_a_worker_that_is_stopped_when_the_others_have_ended_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(ProcessGroup, "STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(ProcessGroup, "LOOK_SECONDS", 0.05)
    text = (
        "import os, signal\nif '\"index\": 1' in os.environ['TF_CONFIG']:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    result, shown = run(2, [script(tmp_path, text)])
    assert result.exit_code == 124
    assert "launch: worker 1 was stopped, as by SIGSTOP, for 0.2 s" in shown.replace("\n", " ")


def test_the_time_limit_ends_all_and_says_what_each_was_doing(monkeypatch, temporary):
    def react(shown):
        if "] waiting for worker 1\n" in shown.getvalue() and "] step 1\n" in shown.getvalue():
            shown.ahead = 1000.0

    with pytest.raises(kde.LaunchError) as caught:
        run(2, worker_1, args=("say_bytes", *[b"step 1\nstep 2"] * 500), time_limit=900, grace_seconds=0.2,
            stream=Shown(monkeypatch, ("cluster.process_group",), react))  # fmt: skip
    assert re.match(
        r"The time limit passed, and the launch ended what still ran:\n"
        r"  worker 0, silent for \d+\.\d s, last printed: waiting for worker 1\n"
        r"  worker 1, silent for \d+\.\d s, last printed: step 2\n"
        r"Give more time if they were busy\.",
        str(caught.value),
    )


def test_the_time_limit_of_a_command_is_exit_code_124(tmp_path):
    result, shown = run(1, [script(tmp_path, "import time; time.sleep(120)")], time_limit=0.5)
    assert result.exit_code == 124
    assert "  worker 0 printed nothing\n" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers must be an integer >= 1, or a pair .*, got 0"),
        ({"num_workers": 2.0}, r"num_workers must be an integer >= 1, or a pair .*, got 2\.0"),
        ({"num_ps": -1}, "num_ps must be an integer >= 0, got -1"),
        ({"threads_per_worker": 0}, "threads_per_worker must be an integer >= 1, got 0"),
        ({"max_restarts": -1}, "max_restarts must be an integer >= 0, got -1"),
        ({"timeout": 0}, "timeout must be a number of seconds > 0, or None, got 0"),
        ({"time_limit": -1}, "time_limit must be a number of seconds > 0, or None, got -1"),
        ({"timeout": 10**400}, r"timeout must be a number of seconds > 0 and <= 1e\+09, or None, got 1000"),
        ({"timeout": "60"}, "timeout must be a number of seconds > 0, or None, got '60'"),
        ({"grace_seconds": -1}, "grace_seconds must be a number of seconds >= 0, got -1"),
        ({"pause_seconds": "1"}, "pause_seconds must be a number of seconds >= 0, got '1'"),
        ({"environ": {"A": 1}}, "environ has 'A': 1, but takes strings only"),
        ({"work": ["-m"]}, r"\['-m'\] is missing the name of a module: give \['-m', NAME\]"),
        ({"work": ["-m", "no.such.module"]}, "There is no module 'no.such.module'"),
        (
            {"work": "train.py --epochs 3"},
            "work must be a function, .* a list of strings .*, got 'train.py --epochs 3'",
        ),
        ({"work": []}, r"work must be a function, .* a list of strings .*, got \[\]"),
        ({"work": 5}, "work must be a function, .* a list of strings .*, got 5"),
        ({"work": ["nowhere.py"]}, r"There is no script 'nowhere.py' \(looked in /.*no worker could start"),
        ({"work": ["no-such-program"]}, "'no-such-program' is not a program on PATH"),
        ({"work": [str(ROOT / "setup.cfg")]}, "The file .* is not executable, or not under that name"),
        ({"work": [sys.executable, "x" * 200_000]}, r"worker 0 cannot be started: .*Argument list too long"),
        ({"work": [sys.executable, "a\0b"]}, "worker 0 cannot be started: embedded null byte"),
        (
            {"environ": {"TF_CONFIG": '{"cluster": {}}', "KERAS_DIST_EXT_LAUNCH": "1"}},
            "is itself a worker of a launch.* put its own call of launch under `if __name__ == '__main__':`",
        ),
        ({"args": (1,)}, "args and kwargs are for a function"),
        (
            {"work": say, "kwargs": {1: 2}},
            r"kwargs must be a dict of what the function is called with, by name, got {1",
        ),
        ({"environ": {"TF_CONFIG": '{"cluster": {}}'}}, "TF_CONFIG is already set .* something else starts"),
    ],
)
def test_what_makes_no_launch_is_refused_with_the_reason(options, message, temporary):
    with pytest.raises(kde.LaunchError, match=message):
        launch(**{"num_workers": 2, "work": [sys.executable, "-c", ""], **options})


def test_windows_is_referred_to_its_linux(monkeypatch):
    monkeypatch.setattr(command, "os", types.SimpleNamespace(name="nt", environ={}))
    with pytest.raises(kde.LaunchError, match="of Linux and macOS; on Windows, use it in WSL"):
        command.environment(None)


@linux
def test_too_many_processes_for_the_open_files_are_refused():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        with pytest.raises(
            kde.LaunchError, match=r"500 processes need a port each, and this one could get \d+ .*ulimit"
        ):
            launch(500, [sys.executable, "-c", ""])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Output.


def test_every_line_shows_its_worker_and_is_kept_untouched_in_a_file(tmp_path):
    result, shown = run(2, say, args=("grün ✓\nno newline 🎈",), log_dir=tmp_path / "deep" / "logs")
    for name in ("worker 0", "worker 1"):
        assert f"[{name}] grün ✓\n" in shown
        assert f"[{name}] no newline 🎈\n" in shown
    assert len(shown.splitlines()) == 4
    assert [worker.log for worker in result.workers] == [tmp_path / "deep/logs" / f"worker-{i}.log" for i in (0, 1)]
    assert result.workers[1].log.read_text(encoding="utf-8") == "grün ✓\nno newline 🎈"
    assert result.workers[1].last_lines == ("grün ✓", "no newline 🎈")


def test_characters_cut_by_a_pipe_are_whole_and_bytes_that_are_none_do_no_harm():
    _, shown = run(1, say_bytes, args=(b"gr\xc3", b"\xbcn\n", b"\xff bad\n", b"\xe2\x9c"))
    assert shown == "[worker 0] grün\n[worker 0] \N{REPLACEMENT CHARACTER} bad\n[worker 0] \N{REPLACEMENT CHARACTER}\n"


def test_of_a_progress_bar_the_last_state_is_shown():
    assert run(1, say, args=("1/3\r2/3\r3/3\r\ndone",))[1] == "[worker 0] 3/3\n[worker 0] done\n"


def test_a_stream_that_cannot_take_a_character_gets_its_escape():
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as stream:
        launch(1, [sys.executable, "-c", "raise SystemExit('grün')"], stream=stream, time_limit=45)
        assert raw.getvalue().startswith(b"[worker 0] gr\\xfcn\nlaunch: worker 0 failed")
        assert raw.getvalue().endswith(b" [worker 0] gr\\xfcn\n")


def test_quiet_shows_nothing_but_the_failure(tmp_path):
    assert run(2, say, args=("hello\n",), quiet=True)[1] == ""
    _, shown = run(1, [script(tmp_path, "raise SystemExit('lost')")], quiet=True)
    assert shown == "launch: worker 0 failed with exit code 1. Its last lines:\n  [worker 0] lost\n"


def test_names_are_coloured_on_a_terminal_alone():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    launch(2, say, args=("hi\n",), stream=terminal, time_limit=45, environ=environ_with(TERM="xterm"))
    assert "\x1b[31m[worker 0]\x1b[0m hi\n" in terminal.getvalue()
    assert "\x1b[32m[worker 1]\x1b[0m hi\n" in terminal.getvalue()
    plain = Terminal()
    launch(1, say, args=("hi\n",), stream=plain, time_limit=45, environ=environ_with(NO_COLOR="1"))
    assert plain.getvalue() == "[worker 0] hi\n"


def test_a_flood_of_output_arrives_whole(tmp_path):
    line = "x" * 99 + "\n"
    result, shown = run(2, say, args=(line, 50_000), log_dir=tmp_path)
    assert result.exit_code == 0
    assert [worker.log.stat().st_size for worker in result.workers] == [5_000_000] * 2
    assert len(shown) == 2 * 50_000 * len(f"[worker 0] {line}")


def test_a_line_without_end_is_shown_in_pieces():
    _, shown = run(1, say, args=("ü" * 300_000,))
    assert shown.count("ü") == 300_000
    assert 1 < len(shown.splitlines()) < 10


def test_of_an_endless_last_line_a_failure_shows_the_beginning():
    result, shown = run(1, [sys.executable, "-c", "import sys; sys.stdout.write('x' * 1_000_000); sys.exit(3)"])
    assert shown.count("x") > 1_000_000, "all of it is shown as it comes"
    assert re.search(r"Its last lines:\n  \[worker 0\] x{4000}\.\.\. \(\d+ characters more\)\n", result.failure)
    assert len(result.failure) < 100_000


def test_a_log_that_cannot_be_written_is_an_error_and_ends_all(tmp_path, temporary):
    (tmp_path / "file").touch()
    with pytest.raises(kde.LaunchError, match=r"log_dir='.*/file' cannot be made"):
        run(1, say, args=("hi",), log_dir=tmp_path / "file")
    (tmp_path / "worker-0.log").mkdir()
    with pytest.raises(kde.LaunchError, match=r"The log .*worker-0\.log cannot be written: Is a directory"):
        run(1, say, args=("hi",), log_dir=tmp_path)


@linux
def test_a_disk_that_fills_up_under_a_log_is_told_and_the_workers_continue(tmp_path, temporary, capsys):
    (tmp_path / "worker-1.log").symlink_to("/dev/full")
    result, shown = run(2, say_and_return, args=("hello\n", 500), log_dir=tmp_path)
    assert result.values == (500, 500)
    assert shown.count("[worker 1] hello") == 500
    assert (tmp_path / "worker-0.log").read_text() == "hello\n" * 500
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("launch:")]
    assert re.search(r"The log .*worker-1\.log cannot be written \(No space left on device\)\. The workers conti", said)


@linux
def test_a_disk_that_fills_up_under_the_output_is_told_and_the_workers_continue(tmp_path):
    path = script(tmp_path, f"print('hello ' * 9999); open({str(tmp_path / 'ended')!r}, 'a').write('x')")
    with open("/dev/full", "w") as full:
        ended = launch_command("--workers", "2", path, stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "ended").read_text() == "xx"
    assert ended.stderr.count("launch: The output cannot be shown (No space left on device). The workers continue") == 1
    assert "Exception ignored" not in ended.stderr


def launch_command(*arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "keras_dist_ext", "launch", *arguments]
    return subprocess.run(command, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}, **options)


def test_a_working_directory_that_was_removed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    with pytest.raises(kde.LaunchError, match=r"The working directory was removed \(No such file.*\), and the process"):
        run(1, ["printenv", "HOME"])


@pytest.mark.parametrize("place", ["folder", "call", "heartbeat"])
def test_a_temporary_folder_without_room_is_an_error(place, temporary, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "folder":
        monkeypatch.setattr(Path, "mkdir", full)
    elif place == "call":
        monkeypatch.setattr(Path, "write_bytes", full)
    else:
        monkeypatch.setattr("keras_dist_ext.cluster.local_host.make_heartbeat_file", full)
    with pytest.raises(kde.LaunchError, match=r"cannot write one in .*: No space left on device\. Make room there"):
        run(1, say, args=("hi",))


def test_a_machine_without_a_temporary_folder_is_an_error(monkeypatch):
    def none_usable():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none_usable)
    with pytest.raises(kde.LaunchError, match=r"workers, and cannot write one: No usable temporary directory found in"):
        run(1, say, args=("hi",))


# The end of the launcher, and of what workers leave behind.


def test_there_is_no_folder_before_there_is_who_removes_it(temporary, monkeypatch):
    start, seen = subprocess.Popen, []

    def popen(*args, **options):
        seen.append(list(temporary.iterdir()))
        return start(*args, **options)

    monkeypatch.setattr("keras_dist_ext.cluster.local_host.subprocess.Popen", popen)
    run(1, say, args=("hi",))
    assert seen[0] == []
    assert len(seen[1]) == 1, "the worker's"


def test_what_a_worker_has_started_ends_with_the_launch_and_does_not_hold_it_up():
    result, _ = run(1, spawn_children, environ=environ_with(TEST_TOKEN="children"))
    assert result.exit_code == 0  # and not that of the time limit
    assert not any(psutil.pid_exists(pid) for pid in result.values[0]) or processes_with("children") == []


def start_hidden(how):
    """Start a process in a session of its own and with an empty environment."""
    code = f"import os, sys, time  # hidden {how}\n"
    if how == "daemon":  # whose parent ends
        code += "if os.fork(): sys.exit()\nos.setsid()\n"
    child = subprocess.Popen([sys.executable, "-c", f"{code}time.sleep(120)"], env={}, start_new_session=True)
    if how == "daemon":
        child.wait()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "launcher killed":
        time.sleep(2.5)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


def hidden(how):
    return [p for p in psutil.process_iter(["cmdline"]) if f"# hidden {how}\n" in "".join(p.info["cmdline"] or [])]


@linux
@pytest.mark.parametrize("how", ["quick", *(pytest.param(how, marks=pytest.mark.slow) for how in ("daemon", "killed"))])
def test_a_child_in_a_session_of_its_own_with_an_empty_environment_ends_with_the_launch(how, temporary, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever the tests have running beside
    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with contextlib.suppress(kde.LaunchError):
            run(1, start_hidden, args=(how,))
        assert hidden(how) == []
        assert mine.poll() is None
        assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    finally:
        mine.kill()
        mine.wait()


@linux
def test_launches_at_the_same_time_end_and_bury_no_processes_of_each_other(temporary, monkeypatch):
    """As those of a search, whose processes start and end by themselves."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with contextlib.ExitStack() as stack:
        first, other = LocalHost(), LocalHost()
        with first:
            stack.enter_context(other)
            process = other.start("late", ["sh", "-c", "sleep 1; exit 3"], dict(os.environ), [])
            ended = other.start("early", ["sh", "-c", "exit 4"], dict(os.environ), [])
            wait_until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
            first._buried = 0.0
            first.read(0.0)
        assert ended.poll().exit_code == 4
        hidden_child = [sys.executable, "-c", "# hidden late\nimport time; time.sleep(120)"]
        start = f"import subprocess; subprocess.Popen({hidden_child!r}, env={{}}, start_new_session=True)"
        other.start("parent", [sys.executable, "-c", start], dict(os.environ), [])
        wait_until(lambda: hidden("late"))
        wait_until(lambda: process.poll().exit_code is not None)
        assert process.poll().exit_code == 3
    assert hidden("late") == []


@linux
@pytest.mark.slow
def test_a_hidden_child_ends_when_the_launcher_is_killed(tmp_path, temporary):
    path = script(tmp_path, "import test_launch; test_launch.start_hidden('launcher killed')")
    environ = environ_with(PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]), TMPDIR=str(tmp_path / "temporary"))
    command = [sys.executable, "-m", "keras_dist_ext", "launch", "--workers", "1", path]
    assert subprocess.run(command, env=environ, timeout=60, capture_output=True).returncode == -signal.SIGKILL
    wait_until(lambda: not hidden("launcher killed") and not list(temporary.iterdir()))


def start_launcher(tmp_path, token, *options, ignore="") -> subprocess.Popen:
    """Start the command line with two workers that each have two children, and wait until all are there.

    Workers may ignore signals, but for a file "asked-1234" that each leaves of them.
    """
    path = script(
        tmp_path,
        "import os, pathlib, signal, subprocess, sys, time\n"
        f"asked = pathlib.Path({str(tmp_path)!r}, f'asked-{{os.getpid()}}')\n"
        f"for name in {ignore.split()!r}: signal.signal(getattr(signal, name), lambda *_: asked.touch())\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(120)']\n"
        "subprocess.Popen(sleep); subprocess.Popen(sleep, start_new_session=True)\n"
        "time.sleep(120)\n",
    )
    environ = environ_with(TEST_TOKEN=token, PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path / "temporary"))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "keras_dist_ext", "launch", "--workers", "2", *options, path],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: len(processes_with(token)) == 8)  # launcher, guard, 2 workers, 4 children
    return launcher


@pytest.mark.parametrize(
    ("signum", "exit_code"),
    [
        (signal.SIGTERM, -15),
        *(pytest.param(*end, marks=pytest.mark.slow) for end in [(signal.SIGINT, 130), (signal.SIGHUP, -1)]),
        (signal.SIGKILL, -9),
    ],
)
def test_no_process_and_no_file_is_left_when_the_launcher_ends(signum, exit_code, tmp_path, temporary):
    token = f"launcher {signum}"
    with start_launcher(tmp_path, token) as launcher:
        launcher.send_signal(signum)
        assert launcher.wait(40) == exit_code
    wait_until(lambda: not processes_with(token))
    wait_until(lambda: not list(temporary.iterdir()))


@linux
def test_workers_die_with_a_launcher_that_takes_its_guard_along(tmp_path, temporary):
    with start_launcher(tmp_path, "with guard") as launcher:
        guards = [process for process in processes_with("with guard") if "guard" in process.cmdline()]
        assert len(guards) == 1
        guards[0].kill()
        launcher.kill()
    try:
        wait_until(lambda: len(processes_with("with guard")) == 4)  # only the children of the workers
        assert not any("script.py" in " ".join(process.cmdline()) for process in processes_with("with guard"))
    finally:
        for process in processes_with("with guard"):
            process.kill()
        for path in temporary.iterdir():
            shutil.rmtree(path)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_workers_that_ignore_the_first(tmp_path, temporary):
    with start_launcher(tmp_path, "twice", "--grace", "100", ignore="SIGINT") as launcher:
        launcher.send_signal(signal.SIGINT)
        wait_until(lambda: len(list(tmp_path.glob("asked-*"))) == 2)  # so soon after the first, two would be one
        time.sleep(0.5)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(40) == 130
    assert processes_with("twice") == []


def test_workers_may_save_and_end_well_when_a_signal_comes(tmp_path, monkeypatch):
    """A handler of the user's own gets the signal when all workers have had theirs and are gone."""
    path = script(
        tmp_path,
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'saved').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'ready').touch()\n"
        "time.sleep(120)\n",
    )

    def send():
        wait_until((tmp_path / "ready").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append((tmp_path / "saved").exists()))
    try:
        thread = threading.Thread(target=send)
        thread.start()
        result, shown = run(1, [path])
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [True]
    assert result.exit_code == 0
    assert result.workers[0].exit_code == 0
    assert shown.endswith("launch: SIGTERM ended the launch; all workers have ended well, with exit code 0.\n")


# The command line.


def test_everything_after_the_script_is_its_own(tmp_path, capfd):
    path = script(tmp_path, "import sys; print(sys.argv[1:])")
    words = ["--workers", "9", "-h", "--", "--ps=1", "ü"]
    assert main(["launch", "--workers", "1", "--time-limit", "45", path, *words]) == 0
    assert capfd.readouterr().out == f"[worker 0] {words}\n"


def test_a_module_runs_as_python_runs_it(tmp_path, capfd, monkeypatch):
    (tmp_path / "a package").mkdir()
    (tmp_path / "a package" / "train_it.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path / "a package")
    assert main(["launch", "--workers", "1", "--time-limit", "45", "-m", "train_it", "-m", "--workers", "9"]) == 0
    assert capfd.readouterr().out == "[worker 0] __main__ ['-m', '--workers', '9']\n"
    result, shown = run(1, ["-m", "train_it", "x"])
    assert (result.exit_code, shown) == (0, "[worker 0] __main__ ['x']\n")


def test_the_command_line_returns_the_code_of_the_first_failure(tmp_path, capfd):
    assert main(["launch", "--workers", "1", "--log-dir", str(tmp_path), script(tmp_path, "raise SystemExit(5)")]) == 5
    assert capfd.readouterr().out == "launch: worker 0 failed with exit code 5. It printed nothing.\n"
    assert (tmp_path / "worker-0.log").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: COMMAND"),
        (["lunch"], "invalid choice: 'lunch'"),
        (["launch", "script.py"], "required: --workers"),
        (["launch", "--workers", "2"], "required: SCRIPT.py\n"),
        (["launch", "--workers", "none", "x.py"], "argument --workers: 'none' must be an integer >= 1"),
        (["launch", "--workers", "2", "--ps", "-1", "x.py"], "argument --ps"),
        (["launch", "--workers", "2", "--timeout", "soon", "x.py"], "'soon' must be a number of seconds > 0"),
        (["launch", "--work", "2", "x.py"], "required: --workers"),
        (["launch", "--workers", "99999999999", "x.py"], "--workers: '99999999999' must be an integer from 1 to 65535"),
        (["launch", "--workers", "9" * 5000, "x.py"], "must be an integer from 1 to 65535"),
        (["launch", "--workers", "2", "--log-dir", "", "x.py"], "argument --log-dir: '' must be a path"),
        (["launch", "--workers", "2", "--time-limit", "1e300", "x.py"], "a number of seconds > 0 and <= 1e+09"),
        (["doctor", "--json", "", "x.py"], "argument --json: '' must be a path"),
        (["demo", "--log-dir", ""], "argument --log-dir: '' must be a path"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_without_a_traceback(capsys):
    assert main(["launch", "--workers", "2", "nowhere.py"]) == 1
    assert capsys.readouterr().err.startswith("keras-dist-ext: There is no script 'nowhere.py' (looked in ")


def test_a_reader_that_goes_away_ends_the_launch(tmp_path):
    path = script(tmp_path, "while True: print('again')")
    with subprocess.Popen(
        [sys.executable, "-m", "keras_dist_ext", "launch", "--workers", "2", path],
        env=environ_with(PYTHONPATH=str(ROOT), TEST_TOKEN="reader"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout.readline().endswith(b"] again\n")
        launcher.stdout.close()
        assert launcher.wait(40) == 128 + signal.SIGPIPE
        assert launcher.stderr.read() == b""
    assert processes_with("reader") == []


def test_devices_says_what_would_be_chosen_and_waits_for_nobody(capsys, monkeypatch):
    assert main(["devices"]) == 0
    shown = capsys.readouterr().out
    assert "physical  CPU:0\n" in shown
    assert "logical   CPU:3\n" in shown
    assert "pick_strategy() would choose mirrored: 4 " in shown
    config = {"cluster": {"worker": ["localhost:1111", "localhost:2222"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert main(["devices"]) == 0
    assert "pick_strategy() would choose multi_worker: " in capsys.readouterr().out
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main(["devices"]) == 1
    assert "TF_CONFIG" in capsys.readouterr().err


def test_importing_launch_and_the_command_line_imports_no_tensorflow():
    code = (
        "import sys, keras_dist_ext.cluster.launch, keras_dist_ext.cli, keras_dist_ext.__main__\n"
        "print([name for name in ('tensorflow', 'keras', 'numpy', 'psutil') if name in sys.modules])"
    )
    environ = environ_with(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=45)
    assert done.stdout == "[]\n", done.stderr


@pytest.fixture
def planned(monkeypatch):
    """What the command line has a script planned with; planning prints a word."""
    pytest.importorskip("tensorflow")
    from keras_dist_ext.diagnosis.plan import planned_script

    def plan_script(script, args, **options):
        print("planned")  # noqa: T201 - as planning does, whatever the output is
        calls.append((script, args, options))

    calls = []
    monkeypatch.setattr(planned_script, "plan_script", plan_script)
    return calls


def test_a_plan_gets_what_the_command_line_says(planned, capsys):
    words = ["--replicas", "2,4", "--devices", "shared", "--network", "nvlink", "--steps", "9", "--json", "plan.json"]
    assert main(["plan", *words, "--log-dir", "logs", "train.py", "--epochs", "3"]) == 0
    assert capsys.readouterr().out == "planned\n"
    ((script, args, options),) = planned
    assert (script, args) == ("train.py", ["--epochs", "3"])
    assert tuple(options.pop("replicas")) == (2, 4)
    assert {name: str(value) for name, value in options.items()} == {
        "devices": "shared",
        "network": "nvlink",
        "num_steps": "9",
        "json": "plan.json",
        "log_dir": "logs",
    }


@linux
def test_output_that_is_lost_at_the_end_fails_nothing(planned, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "train.py"]) == 0
        full.write("to nowhere, from here on")
    monkeypatch.setattr(sys, "stdout", None)  # as a program has it that was started without one
    assert main(["plan", "train.py"]) == 0
    assert len(planned) == 2


# What the system does not do.


def test_cpus_of_which_the_kernel_tells_nothing_are_taken_in_order(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {10**6 + 1, 10**6}, raising=False)
    assert cores.usable_cpus() == [10**6, 10**6 + 1]


@linux
def test_where_ports_cannot_be_kept_they_are_chosen(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with tasks.cluster(2, 0) as chosen, contextlib.ExitStack() as stack:
        for task in chosen:
            stack.enter_context(socket.socket()).bind(("", int(task.address.rpartition(":")[2])))


@linux
def test_a_process_that_may_not_take_in_orphans_leaves_them_to_the_guard(monkeypatch):
    libc = types.SimpleNamespace(prctl=lambda option, *_: -1 if option == orphans._PR_SET_CHILD_SUBREAPER else 0)
    monkeypatch.setattr("ctypes.CDLL", lambda _: libc)
    taken = orphans.Orphans(owns_process=True)
    assert not taken.are_taken_in
    taken.end()
    assert orphans._shared.num_taking == 0


def test_a_process_that_has_ended_meanwhile_does_nothing():
    process = LocalProcess(["true"], {}, None, None)
    process._popen.wait()  # it is seen at the next look
    try:
        assert not process.is_stopped
        assert process.cpu_seconds() == 0.0
    finally:
        process.close()


def test_a_server_reports_nothing_and_leaves_nothing():
    process = LocalProcess(["true"], {}, None, None)
    try:
        assert (process.ask_for_stacks(), process.stacks(), process.ask_to_leave()) == (False, "", False)
        with pytest.raises(FileNotFoundError):
            process.value()
    finally:
        process.close()


class Stuck(SilentHost):
    """A process that is stuck in the kernel, so that no signal ends it, and its host."""

    poll = staticmethod(State)

    def __init__(self):
        super().__init__(self)
        self.signals = []
        self.ask = self.send = self.signals.append


def test_a_process_that_nothing_ends_does_not_hold_up_the_launch(monkeypatch):
    monkeypatch.setattr(ProcessGroup, "KILL_SECONDS", 0.05)
    monkeypatch.setattr(ProcessGroup, "DRAIN_SECONDS", 0.0)
    host = Stuck()
    with ProcessGroup(host, None, None) as group:
        group.start("worker 0", ["sleep"], {})
        assert group.end([], 0.0) == group.processes
    assert host.signals[0] == signal.SIGTERM
    assert set(host.signals[1:]) == {signal.SIGKILL}


def test_a_signal_that_nobody_collects_ends_what_may_take_long():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(Interrupted) as caught, interrupting_signals():
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.signum == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


# TensorFlow.


@pytest.mark.slow
@pytest.mark.multiworker
@pytest.mark.timeout(150)
def test_two_workers_all_reduce(temporary):
    environ = environ_with(TF_CPP_MIN_LOG_LEVEL="3")
    result, _ = run(2, all_reduce, threads_per_worker=1, time_limit=120, environ=environ)
    assert result.values == ((3.0, 2), (3.0, 2))


@pytest.mark.slow
@pytest.mark.multiworker
@pytest.mark.timeout(150)
def test_the_worker_that_fails_is_named_and_not_those_that_wait_for_it(temporary):
    with pytest.raises(WorkerFailed) as caught:
        run(2, raise_between_collectives, time_limit=120, environ=environ_with(TF_CPP_MIN_LOG_LEVEL="3"))
    assert caught.value.worker == "worker 1"
    assert "ValueError: no more data on this worker" in caught.value.last_lines


@pytest.mark.multiworker
@pytest.mark.timeout(150)
@pytest.mark.slow
def test_a_chief_trains_on_servers_that_end_with_it(temporary):
    environ = environ_with(TF_CPP_MIN_LOG_LEVEL="3", TEST_TOKEN="servers")
    result, _ = run(2, count_with_parameter_servers, num_ps=1, time_limit=120, environ=environ)
    assert result.values == ((10.0, "/job:ps/replica:0/task:0/device:CPU:0"),)
    assert [run.name for run in result.workers] == ["chief 0", "worker 0", "worker 1", "ps 0"]
    assert [run.served for run in result.workers] == [False, True, True, True]
    assert processes_with("servers") == []


@linux
def test_a_process_that_ends_while_its_children_are_read_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def glob(path: Path, pattern: str) -> Iterator[Path]:
        yield from sorted(path.iterdir())[:1]
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "glob", glob)
    assert children_of(os.getpid()) == []
