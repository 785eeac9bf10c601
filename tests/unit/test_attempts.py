"""Start the processes of a launch again and again, on a host that is made up: no process runs."""

import contextlib
import io
import pickle
import signal
import time
import types

import pytest

import keras_dist_ext as kde
from keras_dist_ext.cluster.attempts import Attempt, run_attempts
from keras_dist_ext.cluster.host import NotStarted, State, ValueLost
from keras_dist_ext.cluster.placing import Placing
from keras_dist_ext.cluster.tasks import tasks_at
from keras_dist_ext.cluster.worker_count import WorkerCount
from keras_dist_ext.errors import LaunchError


class Hosted:
    """A process that has ended with an exit code, and whose function has returned something."""

    def __init__(self, exit_code, value):
        self._exit_code, self._value = exit_code, value
        self.is_stopped = False

    def poll(self):
        return State(self._exit_code, self._exit_code or None)

    def value(self):
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class MadeUp(contextlib.nullcontext):
    """A host.

    Args:
        exit_code: of its processes.
        value: what their function returned, pickled, or an error.
        looks: what it misses for a place, look by look.
        most: processes that it starts.
    """

    def __init__(self, exit_code=0, value=b"", looks=(), most=9):
        super().__init__()
        self._exit_code, self._value, self._looks, self._most = exit_code, value, looks, most
        self.environs = []

    def reserve(self, workers, num_ps):
        yield from self._looks
        return tasks_at([f"127.0.0.1:{1000 + i}" for i in range(workers.most + num_ps)], workers.most, num_ps)

    def start(self, name, work, environ, cpus):
        if len(self.environs) == self._most:
            raise NotStarted(f"{name} cannot be started: no more processes")
        self.environs.append(environ)
        return Hosted(self._exit_code, self._value)

    def read(self, seconds):
        return []

    def foresee_end(self):
        pass


def attempt(notices=None, program=b"a call", workers=(1, 1), deadline=None):
    options = {"grace_seconds": 0.0, "log_dir": None, "stream": None, "notices": notices or io.StringIO()}
    count = WorkerCount(*workers)
    return Attempt(program, count, 0, {}, affinity=False, deadline=deadline, hang_seconds=None, **options)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("keras_dist_ext.cluster.process_group.ProcessGroup.DRAIN_SECONDS", 0.0)
    monkeypatch.setattr("keras_dist_ext.cluster.process_group.ProcessGroup.SETTLE_SECONDS", 0.0)


# Places.


def test_a_signal_ends_the_wait_for_a_place():
    signals = []

    def looks():
        yield "There is no room"
        signals.append(signal.SIGTERM)
        yield "There is no room"

    outcome = attempt().run(lambda: MadeUp(looks=looks()), 0, signals)
    assert (outcome.failure.exit_code, outcome.failure.reason) == (143, "SIGTERM ended the launch.")
    assert outcome.runs == ()


@pytest.mark.parametrize(
    ("seconds", "hint"), [(None, " It waits on; --time-limit or time_limit ends that."), (60.0, "")]
)
def test_what_is_missing_for_a_place_is_said_once_and_what_would_end_the_wait(seconds, hint, monkeypatch):
    monkeypatch.setattr(Placing, "NOTICE_SECONDS", -1.0)
    notices = io.StringIO()
    deadline = None if seconds is None else time.monotonic() + seconds
    host = MadeUp(value=pickle.dumps(7), looks=["There is no room for 1 process"] * 3)
    outcome = attempt(notices, deadline=deadline).run(lambda: host, 0, [])
    assert [run.value for run in outcome.runs] == [7]
    assert notices.getvalue() == f"launch: There is no room for 1 process.{hint}\n"


# Values.


def test_a_value_that_is_lost_with_its_node_is_a_failure_after_which_all_start_again():
    hosts = [MadeUp(value=ValueLost("node 10.0.0.7 has died")), MadeUp(value=pickle.dumps(7))]
    notices, left = io.StringIO(), iter(hosts)
    outcome, restart = run_attempts(attempt(notices), lambda: next(left), 1, 0.0, [])
    assert ([run.value for run in outcome.runs], outcome.failure, restart) == ([7], None, 1)
    assert notices.getvalue() == (
        "launch: What the function returned on worker 0 was lost: node 10.0.0.7 has died.\n"
        "launch: restart 1 of 1 in 0 s.\n"
    )


def test_a_value_that_cannot_be_read_here_is_an_error_that_says_what_to_return():
    host = MadeUp(value=b"cnot_here\nThing\n.")  # a class of a module that only the worker has
    with pytest.raises(LaunchError) as caught:
        attempt().run(lambda: host, 0, [])
    assert str(caught.value) == (
        'What the function returned on worker 0 cannot be read here (ModuleNotFoundError("No module named '
        "'not_here'\")). Return numbers, strings, arrays, lists or dicts of them."
    )


# How often all start.


def test_all_start_again_as_often_as_they_may_and_each_start_has_its_number():
    hosts = []

    def make_host():
        hosts.append(MadeUp(exit_code=3))
        return hosts[-1]

    outcome, restart = run_attempts(attempt(program=["false"]), make_host, 2, 0.0, [])
    assert (outcome.failure.exit_code, restart) == (3, 2)
    assert [host.environs[0]["KERAS_DIST_EXT_RESTART"] for host in hosts] == ["0", "1", "2"]


def test_a_start_with_fewer_workers_counts_as_a_start_and_not_as_a_failure():
    hosts = [MadeUp(most=2), MadeUp(exit_code=3), MadeUp()]
    notices, left = io.StringIO(), iter(hosts)
    outcome, restart = run_attempts(attempt(notices, ["true"], (1, 3)), lambda: next(left), 1, 0.0, [])
    assert (outcome.failure, restart) == (None, 2)
    assert [len(host.environs) for host in hosts] == [2, 2, 2]
    assert hosts[2].environs[0]["KERAS_DIST_EXT_RESTART"] == "2"
    assert "The launch starts again with 2 workers, and no more from here on." in notices.getvalue()


def test_fewer_workers_than_are_wanted_at_least_are_an_error():
    with pytest.raises(kde.LaunchError, match="worker 1 cannot be started: no more processes"):
        attempt(program=["true"], workers=(2, 3)).run(lambda: MadeUp(most=1), 0, [])


def test_a_signal_in_the_pause_before_a_restart_ends_the_launch():
    signals = []

    late = types.SimpleNamespace(write=lambda text: signals.append(signal.SIGINT), flush=lambda: None)
    outcome, restart = run_attempts(attempt(late, ["false"]), lambda: MadeUp(exit_code=3), 5, 60.0, signals)
    assert (outcome.failure.reason, restart) == ("SIGINT ended the launch.", 0)
