"""What a process of a launch does before the user's code runs, and what the guard does after it; in this process."""

import json
import os
import signal
import subprocess
import sys
import types

import psutil
import pytest
from launching import linux, run

import keras_dist_ext as kde
from keras_dist_ext.cluster import heartbeat, worker


@pytest.fixture
def signals():
    """Put back what a process of a launch does with signals."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGUSR1, *GUARDED)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


GUARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Became(BaseException):
    """This process would now be another program."""


def main(monkeypatch, mode, *args, **settings):
    """Do what a command line says, but for dying with the process that has started this one."""
    monkeypatch.setattr(worker, "_die_with", lambda launcher: None)
    given = {"launcher": os.getpid(), "owns_process": False, "heartbeat_file": "", "cpus": [], **settings}
    monkeypatch.setattr(sys, "argv", ["-c", mode, json.dumps(given), *args])
    worker.main()


# Commands.


@pytest.mark.usefixtures("signals")
def test_a_command_replaces_the_process_and_finds_its_own_heartbeat(monkeypatch):
    def become(program, words):
        seen.append((program, words, os.environ.get(heartbeat.HEARTBEAT_FILE), signal.getsignal(signal.SIGUSR1)))
        raise Became

    seen = []
    monkeypatch.setattr(os, "execvp", become)
    monkeypatch.setenv(heartbeat.HEARTBEAT_FILE, "of an outer launch")
    with pytest.raises(Became):
        main(monkeypatch, "exec", "python", "train.py", heartbeat_file="mine")
    assert seen == [("python", ["python", "train.py"], "mine", signal.SIG_IGN)]


@pytest.mark.usefixtures("signals")
def test_a_command_that_is_none_is_named():
    with pytest.raises(SystemExit, match="^cannot start 'no-such-command': .*No such file or directory"):
        worker._exec(["no-such-command", "--now"])


def test_a_process_whose_launcher_has_ended_meanwhile_ends_at_once(monkeypatch):
    def become(code):
        raise Became(code)

    monkeypatch.setattr(sys, "platform", "darwin")  # where the kernel does not see to it
    monkeypatch.setattr(os, "_exit", become)
    worker._die_with(os.getppid())
    with pytest.raises(Became, match="^1$"):
        worker._die_with(os.getpid())


# Servers.


def test_a_server_serves_its_task_and_lets_the_coordinator_see_that_a_peer_is_dead(monkeypatch):
    import tensorflow as tf

    class Server:
        def __init__(self, cluster, task_type, task_id, protocol):
            served.append((cluster.as_dict(), task_type, task_id, protocol, os.environ["GRPC_FAIL_FAST"]))

        def join(self):
            raise Became

    served = []
    cluster = {"chief": ["127.0.0.1:1111"], "ps": ["127.0.0.1:2222", "127.0.0.1:3333"]}
    monkeypatch.setattr(tf.distribute, "Server", Server)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 1}}))
    monkeypatch.setenv("GRPC_FAIL_FAST", "set, so that it is put back")
    monkeypatch.delenv("GRPC_FAIL_FAST")
    monkeypatch.setenv(heartbeat.HEARTBEAT_FILE, "of an outer launch")
    with pytest.raises(Became):
        main(monkeypatch, "serve")
    assert served == [(cluster, "ps", 1, "grpc", "use_caller")]
    assert heartbeat.HEARTBEAT_FILE not in os.environ


# Functions.


def test_a_function_of_an_interactive_session_is_refused(monkeypatch):
    def typed():
        pass

    session = types.ModuleType("__main__")
    session.typed, typed.__module__, typed.__qualname__ = typed, "__main__", "typed"
    monkeypatch.setitem(sys.modules, "__main__", session)
    with pytest.raises(kde.LaunchError, match="'typed' or its arguments come from an interactive session, .* Put them"):
        kde.launch(1, typed)


@pytest.mark.timeout(60)
def test_a_module_that_cannot_import_what_it_needs_fails_with_that_name(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import only_in_the_launcher\n\ndef work():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "only_in_the_launcher", types.ModuleType("only_in_the_launcher"))
    import needs_more

    monkeypatch.setitem(sys.modules, "needs_more", needs_more)
    with pytest.raises(kde.LaunchError, match="ModuleNotFoundError: No module named 'only_in_the_launcher'"):
        run(1, needs_more.work)


# The guard.


class Unkillable:
    """A process that is there whenever the guard looks, and ends by itself before it is killed."""

    def __init__(self):
        self.num_kills = 0

    def kill(self):
        self.num_kills += 1
        raise psutil.NoSuchProcess(0)


@pytest.mark.usefixtures("signals")
def test_the_guard_gives_up_on_processes_that_are_always_there_and_removes_the_folder(tmp_path, monkeypatch):
    stuck, folder, (reads, writes) = Unkillable(), tmp_path / "folder", os.pipe()
    folder.mkdir()
    (folder / "call").touch()
    os.close(writes)  # the launcher has ended
    monkeypatch.setattr(worker, "_members", lambda *_: iter([stuck]))
    monkeypatch.setattr(psutil, "wait_procs", lambda processes, timeout: ([], processes))
    with os.fdopen(reads) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        main(monkeypatch, "guard", "an id", str(folder))
    assert stuck.num_kills == 20
    assert not folder.exists()
    assert [signal.getsignal(signum) for signum in GUARDED] == [signal.SIG_IGN] * 3


def test_a_descendant_that_has_ended_before_it_is_noted_is_none(monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(worker, "_children", lambda pid: [ended.pid] if pid == os.getpid() else [])
    descendants = {}
    worker._note_descendants({os.getpid()}, descendants)
    assert descendants == {}


def test_a_descendant_that_ends_while_it_is_looked_at_is_no_member():
    class Ending:
        def is_running(self):
            return True

        def status(self):
            raise psutil.NoSuchProcess(1)

    assert list(worker._members("no such id", set(), {2**22 + 1: Ending()})) == []


@linux
def test_children_are_found_elsewhere_than_on_linux_too(monkeypatch):
    child = subprocess.Popen(["sleep", "60"])
    try:
        monkeypatch.setattr(sys, "platform", "darwin")
        assert child.pid in worker._children(os.getpid())
        assert worker._children(child.pid) == []
    finally:
        child.kill()
        child.wait()
    assert worker._children(child.pid) == []
