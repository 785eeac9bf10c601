"""Connect to Ray, and lose what is there, with a made-up Ray; `tests/workers/test_ray_launch.py` has a real one."""

import io
import os
import signal
import sys
import time
import types

import pytest

import keras_dist_ext as kde
from keras_dist_ext.cluster.host import State, ValueLost
from keras_dist_ext.cluster.process_group import ProcessGroup
from keras_dist_ext.cluster.ray_agent import Report
from keras_dist_ext.cluster.ray_cluster import connected
from keras_dist_ext.cluster.ray_process import RayProcess

ERRORS = ("RayError", "RayTaskError", "GetTimeoutError", "ObjectLostError", "RayActorError")


@pytest.fixture
def ray(monkeypatch):
    """A Ray that this process is not connected to, and whose `init` is up to the test."""
    made_up = types.ModuleType("ray")
    made_up.exceptions = types.ModuleType("ray.exceptions")
    for name in ERRORS:
        base = made_up.exceptions.RayError if name != "RayError" else Exception
        setattr(made_up.exceptions, name, type(name, (base,), {}))
    made_up.is_initialized = lambda: False
    made_up.ends = []
    made_up.shutdown = lambda: made_up.ends.append("shutdown")
    monkeypatch.setitem(sys.modules, "ray", made_up)
    monkeypatch.setitem(sys.modules, "ray.exceptions", made_up.exceptions)
    return made_up


def failing(error):
    def init(address, **options):
        raise error

    return init


# Connecting.


@pytest.mark.parametrize(
    "error", [ConnectionError("nobody listens"), RuntimeError("Failed to connect to GCS at 10.0.0.1:6379")]
)
def test_an_address_without_a_cluster_is_refused_with_how_to_start_one(ray, error):
    ray.init = failing(error)
    with pytest.raises(kde.LaunchError) as caught:
        kde.launch(1, ["true"], on=kde.RayCluster("10.0.0.1:6379"))
    assert str(caught.value) == (
        f"There is no Ray cluster at address '10.0.0.1:6379': {error}\nStart one by `ray start --head`, and on each "
        "other machine `ray start --address=HEAD:6379`, or give the address of one."
    )
    assert ray.ends == ["shutdown"], "nothing of a connection is left"


@pytest.mark.parametrize(("given", "sent"), [(None, "which is the current folder"), ({"pip": ["x"]}, "of RayCluster")])
def test_an_environment_that_cannot_be_made_is_named(ray, given, sent):
    ray.init = failing(ValueError("too large"))
    with pytest.raises(kde.LaunchError) as caught:
        kde.launch(1, ["true"], on=kde.RayCluster(runtime_env=given))
    environ = {"working_dir": os.getcwd()} if given is None else given
    assert str(caught.value) == (
        f"The Ray cluster at address 'auto' cannot be used with runtime_env={environ!r}, {sent}: too large"
    )


@pytest.mark.parametrize(("option", "name"), [({"address": "10.0.0.1:6379"}, "address"), ({"runtime_env": {}}, "run")])
def test_what_has_no_effect_on_a_connection_that_there_is_is_refused(ray, option, name):
    ray.is_initialized = lambda: True
    with pytest.raises(kde.LaunchError, match=f"connected to Ray already, so {name}.* has no effect: give it to"):
        kde.launch(1, ["true"], on=kde.RayCluster(**option))
    assert ray.ends == [], "the connection is the caller's"


def test_a_connection_that_there_is_is_used_and_kept(ray):
    ray.is_initialized = lambda: True
    ray.init = failing(AssertionError("it is connected already"))
    with connected(kde.RayCluster()):
        pass
    assert ray.ends == []


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("signals_as_in_a_terminal")
def test_ctrl_c_ends_a_connection_that_is_being_made(ray):
    def init(address, **options):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(50)

    ray.init = init
    with pytest.raises(KeyboardInterrupt):
        kde.launch(1, ["true"], on=kde.RayCluster())
    assert ray.ends == ["shutdown"]


# Calls.


def process(ray, answer, *, has_started=True):
    """Return a process that has started, and whose agent answers so to a call; an exception is raised."""

    def get(ref, timeout=None):
        if isinstance(ref, Exception):
            raise ref
        return ref

    ray.get = get

    def call(*request):
        ray.calls.append(request)
        return answer

    ray.calls = []
    agent = types.SimpleNamespace(call=types.SimpleNamespace(remote=call))
    found = RayProcess(agent, "10.0.0.7", "it has started")
    if has_started:
        found.take()
    return found


def test_a_process_that_cannot_be_started_is_an_error_of_the_launch(ray):
    found = process(ray, None, has_started=False)
    found._awaited = ray.exceptions.RayTaskError()
    found._awaited.cause = kde.LaunchError("worker 0 cannot be started: no such file")
    with pytest.raises(kde.LaunchError, match="^worker 0 cannot be started: no such file$"):
        found.take()


def test_a_process_whose_agent_fails_later_is_lost_with_what_failed(ray):
    found = process(ray, None)
    found._awaited = ray.exceptions.RayTaskError()
    found._awaited.cause = OSError("no more files")
    assert found.take() == [b""]
    assert found.poll().lost == ("its node 10.0.0.7, or Ray's process there, has failed (RayTaskError: no more files)")
    assert found.poll().exit_code == -signal.SIGKILL


def test_a_process_that_is_lost_after_its_end_keeps_its_exit_code(ray):
    found = process(ray, None)
    found._awaited = Report(b"", is_at_end=True, state=State(exit_code=0), is_stopped=False)
    assert found.take() == [b""]
    assert found.note_silence(100.0) == [], "its output has ended before"
    assert (found.poll().exit_code, found.poll().lost) == (0, "")


def test_a_node_that_does_not_answer_a_call_is_not_asked_again_before_its_next_report(ray):
    found = process(ray, ray.exceptions.GetTimeoutError())
    assert found.ask_to_leave() is False
    assert found.poll().silent_seconds == found.ANSWER_SECONDS
    assert (found.cpu_seconds(), found.ask_for_stacks(), found.stacks()) == (0.0, False, "")
    assert ray.calls == [("ask_to_leave",)]
    found._awaited = Report(b"", is_at_end=False, state=State(), is_stopped=False)
    found.take()
    found.stacks()
    assert ray.calls == [("ask_to_leave",), ("stacks",)]


def test_a_call_that_fails_is_answered_as_if_there_were_nothing(ray):
    found = process(ray, ray.exceptions.RayError())
    assert (found.cpu_seconds(), found.stacks(), found.poll().silent_seconds) == (0.0, "", 0.0)


def test_a_process_that_was_not_started_yet_is_ended_by_a_signal_at_once(ray):
    found = process(ray, None, has_started=False)
    found.send(signal.SIGTERM)
    assert found.poll()[:2] == (-signal.SIGTERM, -signal.SIGTERM)
    assert found.is_done
    assert ray.calls == [], "its agent ends with the launch"


# Values.


def test_what_a_function_returned_arrives(ray):
    assert process(ray, b"pickled").value() == b"pickled"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GetTimeoutError", "node 10.0.0.7 has not sent it within 600 s"),
        ("ObjectLostError", r"node 10.0.0.7, or Ray's process there, has died \(ObjectLostError\)"),
        ("RayActorError", r"node 10.0.0.7, or Ray's process there, has died \(RayActorError\)"),
    ],
)
def test_a_value_that_does_not_arrive_is_lost_with_the_reason(ray, name, message):
    with pytest.raises(ValueLost, match=message):
        process(ray, getattr(ray.exceptions, name)()).value()


def test_a_value_is_lost_with_its_node(ray):
    found = process(ray, b"pickled")
    found._awaited = ray.exceptions.RayError()
    assert found.take() == [b""]
    with pytest.raises(ValueLost, match="node 10.0.0.7, .* was lost after the function had returned"):
        found.value()


def test_an_error_of_the_agent_is_its_cause(ray):
    error = ray.exceptions.RayTaskError()
    error.cause = FileNotFoundError("no value")
    with pytest.raises(FileNotFoundError, match="no value"):
        process(ray, error).value()


# Colours.


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Ended:
    def poll(self):
        return State(exit_code=0)


class OneProcess:
    """A host of a process that has ended."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, name, work, environ, cpus):
        return Ended()


@pytest.mark.parametrize(("here", "there"), [("", None), (None, "1"), (None, None)])
def test_names_have_no_colour_where_no_color_is_set_here_or_for_the_workers(monkeypatch, here, there):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if here is not None:
        monkeypatch.setenv("NO_COLOR", here)
    stream = Terminal()
    with ProcessGroup(OneProcess(), stream, None) as group:
        group.start("worker 0", ["true"], {} if there is None else {"NO_COLOR": there})
        (started,) = group.processes
        started.take(b"a line\n")
    is_plain = here is not None or there is not None
    assert stream.getvalue() == ("[worker 0] a line\n" if is_plain else "\x1b[31m[worker 0]\x1b[0m a line\n")
