"""The supervisor of a search, over made-up processes and a made-up chief: what it does, in which order."""

import time
import types

import pytest
from silent_host import SilentHost

from keras_dist_ext.cluster.failure import Failure, NotPlaced
from keras_dist_ext.cluster.host import State
from keras_dist_ext.cluster.process_group import ProcessGroup
from keras_dist_ext.cluster.tasks import tasks_at
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.processes import supervisor as module
from keras_dist_ext.tuner.processes.channel import Unreachable
from keras_dist_ext.tuner.processes.process_role import ProcessRole
from keras_dist_ext.tuner.processes.supervisor import Limits, Supervisor
from keras_dist_ext.tuner.processes.worker_group import Output, WorkerGroup

pytestmark = pytest.mark.timeout(60)


class Group:
    """Processes that share a tuner id; the test says how they fare, by `script`: a step for each look at them."""

    waits_for = ""
    failed = None

    def __init__(self, name, log, address="chief:1"):
        self.name, self.role, self._log = name, ProcessRole(name.replace(" ", ""), address), log
        self.address, self.num_starts = address, 0
        self.script = iter(())
        self.processes = []
        self.is_active = self.has_exited = self.has_failed = self.was_killed = False

    def begin(self):
        self.num_starts += 1
        self.is_active = True
        self._log.append(f"{self.name} begins{f' for {self.role.address}' if self.name != 'chief' else ''}")

    def end(self, signals=(), grace_seconds=3.0):
        failure = Failure(137, f"{self.name} failed with SIGKILL.") if self.has_failed else None
        self._log.append(f"{self.name} ends")
        self.is_active = self.has_exited = self.has_failed = self.was_killed = False
        return failure

    def die(self):
        self.has_failed = self.was_killed = True

    def exit(self):
        self.has_exited = True

    def pump(self):
        next(self.script, lambda: None)()

    def missing_place(self):
        return ""


class Search:
    """A search: its groups, what happened to them in `log`, and what the chief answers."""

    def __init__(self, monkeypatch, num_workers=1, address="chief:1", max_restarts=1, deadline=None):
        self.log, self.asked = [], []
        self.answers = {"status": {}, "remove_worker": None, "worker_state": self.state()}
        search = self

        class Channel:
            def __init__(self, address):
                self.address = address
                search.log.append(f"connects to {address}")

            def call(self, method, **request):
                answer = search.answers[method]
                answer = answer() if callable(answer) else answer
                search.asked.append((method, *request.values()))
                if isinstance(answer, Exception):
                    raise answer
                return answer

            def close(self):
                search.log.append(f"leaves {self.address}")

        monkeypatch.setattr(module, "Channel", Channel)
        monkeypatch.setattr(Supervisor, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(Supervisor, "STATUS_SECONDS", 0.0)
        self.chief = Group("chief", self.log, address)
        self.workers = [Group(f"tuner {number}", self.log, address) for number in range(num_workers)]
        limits = Limits(max_restarts, deadline, None)
        self.supervisor = Supervisor(self.chief, self.workers, limits, [], lambda text: None)

    @staticmethod
    def state(**changed):
        idle = {"trial_id": None, "trial_seconds": 0.0, "screening_seconds": 0.0, "num_ended": 0, "message": None}
        return {**idle, "is_finished": False, **changed}

    def run(self):
        return self.supervisor.run()


def nothing():
    pass


def test_a_chief_that_comes_to_a_new_address_takes_its_workers_along(monkeypatch):
    """On Ray, where it may get the place of one of them: all end first."""
    search = Search(monkeypatch, 2, address="")
    chief, (lost, healthy) = search.chief, search.workers

    def move(address):
        chief.address = address

    def lose_node():
        chief.die()
        lost.die()

    search.answers["worker_state"] = search.state(trial_id="4")
    chief.script = iter([lambda: move("a:1"), nothing, lose_node, lambda: move("b:2"), nothing, nothing, chief.exit])
    assert search.run() is None
    assert search.log == [
        "chief begins",
        "connects to a:1",
        "tuner 0 begins for a:1",
        "tuner 1 begins for a:1",
        "chief ends",
        "tuner 0 ends",
        "tuner 1 ends",
        "chief begins",
        "leaves a:1",
        "connects to b:2",
        "tuner 1 begins for b:2",
        "tuner 0 begins for b:2",
        "leaves b:2",
    ]
    assert [(death.name, death.trial_id, death.action) for death in search.supervisor.deaths] == [
        ("chief", None, "It was restarted, and continues from what it has saved."),
        ("tuner 0", "4", "It was restarted, with the same trial."),
    ]
    assert healthy.role.address == "b:2"


def test_a_worker_that_has_exited_before_the_chief_was_killed_starts_again(monkeypatch):
    """The chief may have forgotten, since its last save, that there are no more trials."""
    search = Search(monkeypatch)
    (worker,) = search.workers

    def kill_chief_as_worker_exits():
        worker.exit()
        search.chief.die()

    search.chief.script = iter([nothing, nothing, kill_chief_as_worker_exits, nothing, nothing, search.chief.exit])
    assert search.run() is None
    assert search.log[2:-1] == [
        "tuner 0 begins for chief:1",
        "chief ends",
        "chief begins",
        "tuner 0 ends",
        "tuner 0 begins for chief:1",
    ]
    assert [death.name for death in search.supervisor.deaths] == ["chief"]


def test_a_worker_that_dies_when_the_search_has_finished_is_left_alone(monkeypatch):
    search = Search(monkeypatch)
    search.answers["worker_state"] = search.state(is_finished=True)
    search.answers["abort"] = None
    search.chief.script = iter([nothing, nothing, search.workers[0].die, nothing, search.chief.exit])
    assert search.run() is None
    assert search.supervisor.deaths == []
    assert search.log.count("tuner 0 begins for chief:1") == 1


@pytest.mark.parametrize(
    ("is_busy", "is_killed", "begins"),
    [(True, False, ["chief", "tuner 0", "tuner 0"]), (False, False, ["chief", "tuner 0"]),
     (False, True, ["chief", "tuner 0", "chief", "tuner 0"])],
)  # fmt: skip
def test_a_chief_that_does_not_answer_is_busy_has_no_more_trials_or_was_killed(is_busy, is_killed, begins, monkeypatch):
    """A busy one is asked again of a worker that died, one that was killed is restarted, and one that is done not."""
    search = Search(monkeypatch)
    answers = iter([Unreachable("no answer", is_busy=is_busy)])

    def state():
        if is_killed and not search.supervisor.deaths:
            search.chief.script = iter([search.chief.die, *[nothing] * 3, search.chief.exit])
        return next(answers, search.state())

    search.answers["worker_state"] = state
    search.chief.script = iter([nothing, nothing, search.workers[0].die, *[nothing] * 4, search.chief.exit])
    assert search.run() is None
    assert [line.partition(" begins")[0] for line in search.log if " begins" in line] == begins


def test_the_time_limit_says_what_each_process_was_doing(monkeypatch):
    search = Search(monkeypatch, deadline=time.monotonic() + 3600)
    group = search.workers[0]
    group.processes = [types.SimpleNamespace(doing="tuner 0, silent for 2.0 s, last printed: epoch 3")]
    search.chief.processes = [types.SimpleNamespace(doing="chief printed nothing")]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=time.sleep)
    ahead = [0.0]
    monkeypatch.setattr(module, "time", clock)
    search.chief.script = iter([nothing, nothing, lambda: ahead.__setitem__(0, 4000.0)])
    failure = search.run()
    assert failure is not None
    assert (failure.exit_code, failure.is_final) == (124, True)
    assert failure.message.startswith(
        "The time limit passed, and the launch ended what still ran:\n  chief printed nothing\n"
        "  tuner 0, silent for 2.0 s, last printed: epoch 3\n"
    )


def test_the_time_limit_without_a_place_for_the_chief_says_what_it_waits_for(monkeypatch):
    search = Search(monkeypatch, deadline=time.monotonic() - 1.0)
    search.chief.waits_for = "Ray has no room for 1 process of 1 CPU"
    failure = search.run()
    assert failure is not None
    assert (failure.exit_code, failure.reason) == (
        124,
        "The time limit passed before anything could start. Ray has no room for 1 process of 1 CPU.",
    )


@pytest.mark.parametrize("answer", [None, Unreachable("no answer", is_busy=True)])
def test_a_worker_that_finds_no_place_says_so_and_leaves_its_trial_to_others(answer, monkeypatch):
    shown = []
    search = Search(monkeypatch, 2)
    search.supervisor._show_line = shown.append
    search.answers["release_trial"] = answer
    missing = ["Ray has no room"]
    search.workers[1].missing_place = lambda: missing.pop() if missing and search.workers[1].is_active else ""
    early = ["Ray has no room for it"]
    search.chief.missing_place = lambda: early.pop() if early else ""
    search.chief.script = iter([nothing] * 5 + [search.chief.exit])
    assert search.run() is None
    assert shown == ["chief has no place yet. Ray has no room for it.", "tuner 1 has no place yet. Ray has no room."]
    assert [request for request in search.asked if request[0] == "release_trial"] == [("release_trial", "tuner1")]


def test_what_a_worker_said_before_it_died_goes_with_the_cause(monkeypatch):
    search = Search(monkeypatch)
    search.answers["worker_state"] = search.state(trial_id="4", message="ValueError: of one of its group")
    search.chief.script = iter([nothing, nothing, search.workers[0].die, nothing, search.chief.exit])
    assert search.run() is None
    assert [death.cause for death in search.supervisor.deaths] == [
        "tuner 0 failed with SIGKILL.\nValueError: of one of its group"
    ]


# The processes of a worker.


class Host(SilentHost):
    """A host and its process, which has ended and returned this, pickled; or one with a place that is none."""

    def __init__(self, value=b"", failure=None):
        super().__init__()
        self._value, self._failure = value, failure

    def reserve(self, workers, num_ps):
        yield "Ray prepares its nodes"
        if self._failure is not None:
            raise NotPlaced(self._failure)
        return tasks_at(["10.0.0.7:1"], 1, 0)

    def poll(self):
        return State(0)

    def value(self):
        return self._value


def group_on(host):
    return WorkerGroup("tuner 0", ProcessRole("tuner0", "chief:1"), b"a call", [{}], Output(None, None), lambda: host)


def test_workers_whose_place_is_none_have_failed_by_no_fault_of_theirs():
    failure = Failure(1, "Ray could not prepare a node: no space left")
    group = group_on(Host(failure=failure))
    group.begin()
    assert (group.is_active, group.has_failed, group.waits_for) == (True, False, "Ray prepares its nodes")
    group.pump()
    assert (group.has_failed, group.was_killed, group.failed, group.waits_for) == (True, True, None, "")
    assert group.end() is failure
    assert (group.is_active, group.has_failed) == (False, False)


def test_what_a_program_returned_and_cannot_be_read_here_is_an_error_that_says_what_to_return(monkeypatch):
    monkeypatch.setattr(ProcessGroup, "DRAIN_SECONDS", 0.0)
    group = group_on(Host(value=b"cnot_here\nThing\n."))  # a class of a module that only the chief has
    group.begin()
    group.pump()
    with pytest.raises(LaunchError, match=r"in the tuner 0 cannot be read here \(ModuleNotFound.* Return numbers, str"):
        group.value()
    group.end(grace_seconds=0.0)
