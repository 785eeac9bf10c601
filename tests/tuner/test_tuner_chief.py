"""The chief of a search and its workers' oracles, in one process: their calls, and what is saved."""

import json
import os
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import keras_tuner
import numpy as np
import psutil
import pytest
from keras_tuner.engine.trial import Trial, TrialStatus

from keras_dist_ext._keras.keras_tuner_oracles import repair_reloaded, replace_space, save_files_atomically
from keras_dist_ext.cluster.tasks import cluster
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.failures import Failure
from keras_dist_ext.tuner.processes import role_entry
from keras_dist_ext.tuner.processes.channel import Channel, Unreachable
from keras_dist_ext.tuner.processes.oracle_server import OracleServer, SearchEnded
from keras_dist_ext.tuner.processes.process_role import ProcessRole
from keras_dist_ext.tuner.processes.remote_oracle import RemoteOracle
from keras_dist_ext.tuner.processes.screening_lease import ScreeningLease, screen_on_one_worker
from keras_dist_ext.tuner.records import TrialRecord
from keras_dist_ext.tuner.screening import Screening, ScreeningResult

pytestmark = pytest.mark.timeout(60)

OBJECTIVE = keras_tuner.Objective("score", "max")


def oracle_in(folder, kind="RandomSearchOracle", **options):
    hyperparameters = keras_tuner.HyperParameters()
    hyperparameters.Choice("units", [1, 2, 3, 4])
    hyperparameters.Choice("rate", [0.1, 0.2])
    make = getattr(keras_tuner.oracles, kind)
    oracle = make(objective=OBJECTIVE, hyperparameters=hyperparameters, seed=3, **options)
    oracle.verbose = 0
    oracle._set_project_dir(str(folder), "project")
    return oracle


class Served:
    """An oracle that is served while a `with` lasts, and workers' oracles before it."""

    def __init__(self, oracle, lease=None):
        self._screening_lease = lease
        self._port = ExitStack()
        (task,) = self._port.enter_context(cluster(1, 0))  # a port that stays ours, as the launcher keeps it
        self.address = task.address
        self.oracle, self.closed, self.error = oracle, {}, None

    def _run(self):
        try:
            self.server.run()
        except Exception as error:
            self.error = error

    def _close(self, trial, reason):
        self.closed[trial.trial_id] = reason

    def __enter__(self):
        self.server = OracleServer(self.oracle, self.address, self._close, self._screening_lease)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.server.abort("the test is over")
        self.server._check_finished()
        self._port.close()
        self.wait()

    def wait(self):
        self._thread.join(30)
        assert not self._thread.is_alive()

    def worker(self, tuner_id="tuner0", start=1, worker_index=0, num_workers=1):
        remote = RemoteOracle(self.oracle, ProcessRole(tuner_id, self.address, start, worker_index, num_workers))
        remote.POLL_SECONDS = 0.02
        remote._channel = Channel(self.address, retry_seconds=30.0)
        return remote

    def call(self, method, **request):
        channel = Channel(self.address)
        try:
            return channel.call(method, **request)
        finally:
            channel.close()


def complete(worker, trial, score=1.0):
    worker.update_trial(trial.trial_id, {"score": score})
    trial.status = TrialStatus.COMPLETED
    worker.end_trial(trial)


def fail(worker, trial, message, status=TrialStatus.INVALID):
    trial.status, trial.message = status, message
    worker.end_trial(trial)


# Trials.


def test_workers_get_trials_until_there_are_no_more_and_the_chief_ends(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=3)) as served:
        first, second = served.worker("tuner0"), served.worker("tuner1")
        trials = [first.create_trial("tuner0"), second.create_trial("tuner1")]
        assert [trial.trial_id for trial in trials] == ["0", "1"]
        complete(first, trials[0], score=0.5)
        complete(second, trials[1], score=0.75)
        last = first.create_trial("tuner0")
        assert second.create_trial("tuner1").status == TrialStatus.STOPPED
        assert first.remaining_trials() == 0
        assert first.get_best_trials(1)[0].score == 0.75
        complete(first, last)
        assert first.create_trial("tuner0").status == TrialStatus.STOPPED
        served.wait()
    assert served.error is None
    assert [trial.status for trial in served.oracle.trials.values()] == ["COMPLETED"] * 3


def test_hyperparameters_found_by_a_worker_reach_the_chief_with_their_values(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=1)) as served:
        worker = served.worker()
        trial = worker.create_trial("tuner0")
        trial.hyperparameters.Int("layers", 1, 5)
        worker.update_space(trial.hyperparameters)
        assert [hp.name for hp in worker.get_space().space] == ["units", "rate", "layers"]
        complete(worker, trial)
    assert served.oracle.trials["0"].hyperparameters.values == trial.hyperparameters.values


def test_the_message_of_a_failure_reaches_the_chief_and_its_files(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=2)) as served:
        worker = served.worker()
        fail(worker, worker.create_trial("tuner0"), "Traceback: no such layer")
        assert worker.get_trial("0").message == "Traceback: no such layer"
    saved = json.loads((tmp_path / "project" / "trial_0" / "trial.json").read_text())
    assert (saved["status"], saved["message"]) == ("FAILED", "Traceback: no such layer")


def test_an_error_of_keras_tuner_in_the_chief_ends_the_search_without_a_hang(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=8, max_consecutive_failed_trials=2)) as served:
        worker, other = served.worker("tuner0"), served.worker("tuner1")
        other.create_trial("tuner1")
        for number in range(2):
            fail(worker, worker.create_trial("tuner0"), f"failure {number}")
        served.wait()
    assert isinstance(served.error, RuntimeError)
    assert "Number of consecutive failures exceeded the limit of 2.\nfailure 1" in str(served.error)
    assert served.oracle.create_trial("tuner2")  # the lock is free: keras-tuner would wait for ever


def test_metrics_without_the_objective_are_the_workers_error_and_the_chief_continues(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=2)) as served:
        worker = served.worker()
        trial = worker.create_trial("tuner0")
        with pytest.raises(RuntimeError, match="Objective value missing in metrics reported"):
            worker.update_trial(trial.trial_id, {"loss": 1.0})
        complete(worker, trial)
        assert worker.create_trial("tuner0").status == TrialStatus.RUNNING


class Patient(keras_tuner.Oracle):
    """An oracle of the user's own that proposes a trial when the one before has ended."""

    def populate_space(self, trial_id):
        if len(self.trials) >= 2:
            return {"status": TrialStatus.STOPPED, "values": None}
        if self.ongoing_trials:
            return {"status": TrialStatus.IDLE, "values": None}
        return {"status": TrialStatus.RUNNING, "values": {"units": int(trial_id)}}


def own_oracle_in(folder, kind):
    oracle = kind(objective=OBJECTIVE)
    oracle.verbose = 0
    oracle._set_project_dir(str(folder), "project")
    return oracle


def test_a_worker_for_which_there_is_no_trial_yet_asks_until_there_is_one(tmp_path):
    with Served(own_oracle_in(tmp_path, Patient)) as served, ThreadPoolExecutor(1) as threads:
        worker, other = served.worker("tuner0"), served.worker("tuner1")
        trial = worker.create_trial("tuner0")
        waiting = threads.submit(other.create_trial, "tuner1")
        time.sleep(0.1)
        assert not waiting.done()
        complete(worker, trial)
        complete(other, waiting.result(30))
        assert [one.create_trial(one.tuner_id).status for one in (worker, other)] == [TrialStatus.STOPPED] * 2
        served.wait()
    assert served.error is None
    assert served.oracle.end_order == [trial.trial_id for trial in served.oracle.trials.values()]
    assert len(served.oracle.end_order) == 2


def test_an_oracle_that_fails_to_propose_ends_the_search_for_all_with_its_error(tmp_path):
    class Failing(keras_tuner.Oracle):
        def populate_space(self, trial_id):
            raise ZeroDivisionError("a bug in populate_space")

    with Served(own_oracle_in(tmp_path, Failing)) as served:
        assert served.worker("tuner0").create_trial("tuner0").status == TrialStatus.STOPPED
        assert served.server.create_trial("tuner1", 1, 1, 0, 1)["status"] == TrialStatus.STOPPED
        served.wait()
    assert isinstance(served.error, ZeroDivisionError)
    assert str(served.error) == "a bug in populate_space"


def test_numbers_of_numpy_reach_the_chief(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=1)) as served:
        worker = served.worker()
        trial = worker.create_trial("tuner0")
        worker.update_trial(trial.trial_id, {"score": np.float32(0.5)}, step=np.int64(3))
    assert served.oracle.trials["0"].metrics.get_best_value("score") == 0.5


def test_a_workers_oracle_has_what_the_chiefs_has(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=5, tune_new_entries=False, allow_new_entries=False)) as served:
        worker = served.worker()
        assert (worker.max_trials, worker.tune_new_entries, worker.allow_new_entries) == (5, False, False)
        assert worker.objective == OBJECTIVE


# Calls of the supervisor.


def test_a_trial_that_is_ended_as_failed_has_the_reason_and_is_not_retried(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=2, max_retries_per_trial=3)) as served:
        served.worker("tuner0").create_trial("tuner0")
        assert served.call("worker_state", tuner_id="tuner0")["trial_id"] == "0"
        served.call("fail_trial", tuner_id="tuner0", reason="killed twice")
        assert served.call("worker_state", tuner_id="tuner0")["trial_id"] is None
        assert served.worker("tuner0", start=2).create_trial("tuner0").trial_id == "1"
    assert served.closed == {"0": "killed twice"}
    assert (served.oracle.trials["0"].status, served.oracle.trials["0"].message) == ("FAILED", "killed twice")


def test_a_worker_without_a_trial_has_none_to_end_as_failed(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=1)) as served:
        served.call("fail_trial", tuner_id="tuner0", reason="killed twice")
    assert (served.closed, served.oracle.trials) == ({}, {})


def test_a_process_that_another_has_replaced_gets_no_trial(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=4)) as served:
        trial = served.worker(start=2).create_trial("tuner0")
        old = {"start": 1, "trial_number": 2, "worker_index": 0, "num_workers": 1}
        assert served.call("create_trial", tuner_id="tuner0", **old) is None
        assert list(served.oracle.trials) == [trial.trial_id]


def test_a_search_does_not_wait_for_a_removed_worker(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=2)) as served:
        worker, lost = served.worker("tuner0"), served.worker("tuner1")
        mine = worker.create_trial("tuner0")
        lost.create_trial("tuner1")
        complete(worker, mine)
        assert worker.create_trial("tuner0").status == TrialStatus.STOPPED
        served.call("fail_trial", tuner_id="tuner1", reason="gone")
        served.call("remove_worker", tuner_id="tuner1")
        served.wait()
    assert served.error is None


def test_the_trial_of_a_worker_without_a_place_goes_to_the_next_that_asks(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=3)) as served:
        waiting, worker = served.worker("tuner0"), served.worker("tuner1")
        given, mine = waiting.create_trial("tuner0"), worker.create_trial("tuner1")
        served.call("release_trial", tuner_id="tuner0")
        complete(worker, mine)
        assert worker.create_trial("tuner1").trial_id == given.trial_id
        complete(worker, given)
        again = served.worker("tuner0", start=2)  # it has found a place
        complete(again, again.create_trial("tuner0"))
        assert again.create_trial("tuner0").status == TrialStatus.STOPPED
        assert worker.create_trial("tuner1").status == TrialStatus.STOPPED
        served.wait()
    assert served.error is None
    assert sorted(served.oracle.end_order) == ["0", "1", "2"]


def test_a_worker_without_a_place_keeps_its_trial_once_others_have_ended(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=2)) as served:
        waiting, worker = served.worker("tuner0"), served.worker("tuner1")
        given, mine = waiting.create_trial("tuner0"), worker.create_trial("tuner1")
        complete(worker, mine)
        assert worker.create_trial("tuner1").status == TrialStatus.STOPPED
        served.call("release_trial", tuner_id="tuner0")
        again = served.worker("tuner0", start=2)
        trial = again.create_trial("tuner0")
        assert trial.trial_id == given.trial_id
        complete(again, trial)
        assert again.create_trial("tuner0").status == TrialStatus.STOPPED
        served.wait()
    assert sorted(served.oracle.end_order) == ["0", "1"]


def test_a_restarted_worker_gets_its_trial_without_what_it_had_reported(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=3)) as served:
        dead = served.worker(start=1)
        trial = dead.create_trial("tuner0")
        dead.update_trial(trial.trial_id, {"score": 100.0})
        alive = served.worker(start=2)
        again = alive.create_trial("tuner0")
        assert (again.trial_id, again.hyperparameters.values) == (trial.trial_id, trial.hyperparameters.values)
        complete(alive, again, score=2.0)
        assert alive.create_trial("tuner0").trial_id == "1"
    assert served.oracle.trials["0"].score == 2.0


def test_a_reply_that_was_lost_does_not_end_a_trial_twice_or_skip_one(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=4)) as served:
        worker = served.worker()
        trial = worker.create_trial("tuner0")
        worker._trial_number -= 1
        assert worker.create_trial("tuner0").trial_id == trial.trial_id
        complete(worker, trial)
        complete(worker, trial)
        assert worker.create_trial("tuner0").trial_id == "1"
    assert served.oracle.end_order == ["0"]


def test_an_error_outside_of_a_trial_ends_the_search_for_all(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=4)) as served:
        worker, other = served.worker("tuner0"), served.worker("tuner1")
        worker.create_trial("tuner0")
        other.abort("the user's own bug")
        served.wait()
    assert isinstance(served.error, SearchEnded)
    assert str(served.error) == "the user's own bug"


# Screening


def test_one_of_the_workers_measures_and_all_continue_with_the_remaining_strategies(tmp_path):
    oracle = oracle_in(tmp_path, max_trials=3)
    oracle.hyperparameters.Choice("distribution_strategy", ["a", "b"])
    refused = threading.Event()

    class Refusing(ScreeningLease):
        def request(self, tuner_id, *, measures):
            reply = super().request(tuner_id, measures=measures)
            if reply == {"may_measure": False}:
                refused.set()
            return reply

    lease = Refusing(tmp_path, lambda result: replace_space(oracle, result.narrowed), workers_live=False)
    measured, began = [], threading.Event()

    def measure():
        measured.append(1)
        began.set()
        assert refused.wait(30)
        return ScreeningResult(("b",), {"a": "slow"}, {"b": 1.0})

    with Served(oracle, lease) as served, ThreadPoolExecutor(2) as threads:
        first, second = served.worker("tuner0"), served.worker("tuner1")
        measuring = threads.submit(screen_on_one_worker, first, measure)
        assert began.wait(30)
        assert served.call("worker_state", tuner_id="tuner0")["screening_seconds"] > 0.0
        assert served.call("worker_state", tuner_id="tuner1")["screening_seconds"] == 0.0
        waiting = threads.submit(screen_on_one_worker, second, measure)
        for worker in (measuring, waiting):
            worker.result(30)
        trials = [first.create_trial("tuner0"), second.create_trial("tuner1")]
        assert {trial.hyperparameters.get("distribution_strategy") for trial in trials} == {"b"}
        for worker, trial in zip((first, second), trials, strict=True):
            complete(worker, trial)
    assert measured == [1]


def test_a_worker_that_measures_for_long_renews_its_lease_and_no_failure_to_do_so_ends_it(monkeypatch):
    class Oracle:
        def request_screening(self, **request):
            requests.append(request)
            if request["measures"]:
                renewed.set()
            return {"may_measure": True} if not finished else {"result": finished[0]}

        def finish_screening(self, result):
            finished.append(result)

    def measure():
        assert renewed.wait(30)
        return ScreeningResult(("a",), {}, {"a": 1.0})

    monkeypatch.setattr("keras_dist_ext.tuner.processes.screening_lease._RENEW_SECONDS", 0.01)
    requests, finished, renewed = [], [], threading.Event()
    screen_on_one_worker(Oracle(), measure)
    assert requests[0] == {"measures": False}
    assert {"measures": True, "once": True} in requests
    assert finished[0]["survivors"] == ("a",)


def test_a_removed_worker_does_not_measure_anymore(tmp_path):
    lease = ScreeningLease(tmp_path, lambda _: None, workers_live=False)
    with Served(oracle_in(tmp_path, max_trials=1), lease) as served:
        assert served.worker("tuner0").request_screening(measures=False) == {"may_measure": True}
        assert served.worker("tuner1").request_screening(measures=False) == {"may_measure": False}
        served.call("remove_worker", tuner_id="tuner0")
        assert served.worker("tuner1").request_screening(measures=False) == {"may_measure": True}


def test_a_worker_that_asks_for_a_screening_that_the_chief_does_not_have_is_refused(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=1)) as served:
        worker = served.worker()
        with pytest.raises(RuntimeError, match="the chief has none: their programs differ"):
            worker.request_screening(measures=False)
        assert worker.request_screening(measures=True, once=True) is None


# Several workers that run each trial together.


def test_a_group_gets_one_trial_and_the_next_starts_when_all_have_ended_it(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=3)) as served, ThreadPoolExecutor(2) as threads:
        group = [served.worker(worker_index=worker_index, num_workers=2) for worker_index in (0, 1)]
        for number in range(3):
            trials = list(threads.map(lambda worker: worker.create_trial("tuner0"), group))
            assert [trial.trial_id for trial in trials] == [str(number)] * 2
            assert trials[0].hyperparameters.values == trials[1].hyperparameters.values
            early = threads.submit(complete, group[0], trials[0])
            time.sleep(0.3)
            assert not early.done()
            assert served.call("status")["ended"] == number
            complete(group[1], trials[1], score=99.0)
            early.result(30)
        assert [worker.create_trial("tuner0").status for worker in group] == ["STOPPED"] * 2
        served.wait()
    assert [trial.score for trial in served.oracle.trials.values()] == [1.0] * 3  # the first alone reports


def test_hyperparameters_are_reported_by_the_first_of_a_group_alone(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=1)) as served:
        group = [served.worker(worker_index=worker_index, num_workers=2) for worker_index in (0, 1)]
        for name, worker in zip(("mine", "of the other"), group, strict=True):
            found = keras_tuner.HyperParameters()
            found.Int(name, 1, 5)
            worker.update_space(found)
        assert [hp.name for hp in served.oracle.get_space().space] == ["units", "rate", "mine"]


def test_a_trial_that_fails_on_all_of_a_group_has_failed_and_the_group_continues(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=3)) as served, ThreadPoolExecutor(2) as threads:
        group = [served.worker(worker_index=worker_index, num_workers=2) for worker_index in (0, 1)]
        trials = list(threads.map(lambda worker: worker.create_trial("tuner0"), group))
        list(threads.map(fail, group, trials, ["too large, says 0", "too large, says 1"]))
        assert [w.create_trial("tuner0").trial_id for w in group] == ["1", "1"]
    assert (served.oracle.trials["0"].status, served.oracle.trials["0"].message) == ("FAILED", "too large, says 0")


def test_a_worker_that_fails_but_not_its_group_exits_and_its_message_is_kept(tmp_path, monkeypatch, capsys):
    class Exit(Exception):
        pass

    def leave(code):
        raise Exit(code)

    monkeypatch.setattr("os._exit", leave)
    with Served(oracle_in(tmp_path, max_trials=3)) as served:
        group = [served.worker(worker_index=worker_index, num_workers=2) for worker_index in (0, 1)]
        trials = [worker.create_trial("tuner0") for worker in group]
        group[1].GROUP_FAILURE_SECONDS = 0.1
        with pytest.raises(Exit, match=str(os.EX_TEMPFAIL)):
            fail(group[1], trials[1], "no memory here")
        assert served.call("worker_state", tuner_id="tuner0")["message"] == "no memory here"
    assert "Trial 0 has failed here, but not on the other workers that run it" in capsys.readouterr().err


# Where the chief listens.


def test_the_chief_listens_only_on_its_address_and_no_other_process_can_share_its_port(tmp_path):
    with Served(oracle_in(tmp_path, max_trials=1)) as served:
        port = int(served.address.rpartition(":")[2])
        listening = [c for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
        assert [c.laddr.ip.removeprefix("::ffff:") for c in listening] == ["127.0.0.1"]
        with pytest.raises(LaunchError, match=f"The chief of the search cannot listen on 127.0.0.1:{port}"):
            OracleServer(served.oracle, served.address, lambda *_: None)


def test_an_old_grpc_that_says_nothing_of_a_port_it_cannot_open_is_no_chief(tmp_path, monkeypatch):
    old = types.SimpleNamespace(add_generic_rpc_handlers=lambda _: None, add_insecure_port=lambda _: 0)
    monkeypatch.setattr("grpc.server", lambda *_, **__: old)
    with pytest.raises(LaunchError, match=r"cannot listen on 127.0.0.1:1 \(gRPC gives no reason\), so no worker would"):
        OracleServer(oracle_in(tmp_path, max_trials=1), "127.0.0.1:1", lambda *_: None)


def test_a_worker_that_was_started_by_others_waits_until_a_busy_chief_has_ended(tmp_path, monkeypatch):
    """Then it goes on with what the chief has saved."""
    oracle = oracle_in(tmp_path, max_trials=5)
    worker = RemoteOracle(oracle, ProcessRole("tuner0", "127.0.0.1:9"))
    ended = oracle_in(tmp_path, max_trials=5)
    ended.create_trial("tuner0")
    ended.save()
    answers = iter([Unreachable("busy", is_busy=True), {}, Unreachable("gone", is_busy=False)])

    def call(self, method):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Channel, "call", call)
    monkeypatch.setattr(RemoteOracle, "POLL_SECONDS", 0.0)
    assert worker.local() is oracle
    assert list(oracle.trials) == ["0"]
    assert list(answers) == []


def test_a_chief_that_does_not_answer_is_an_error_at_the_first_attempt_that_ends_too_late(monkeypatch):
    pauses = []
    now = iter([50.0, 50.0, 50.9, 50.9, 51.0])  # the call begins; an attempt of 0.9 s, and one of 0.1
    clock = types.SimpleNamespace(monotonic=lambda: next(now), sleep=pauses.append)
    monkeypatch.setattr("keras_dist_ext.tuner.processes.channel.time", clock)
    with pytest.raises(Unreachable, match="has not answered for 1 s .[A-Z_]+.: it has ended or was killed"):
        Channel("127.0.0.1:9", retry_seconds=1.0).call("status")
    assert len(pauses) == 1
    assert list(now) == []


def test_a_worker_waits_for_a_restarted_chief(tmp_path):
    served = Served(oracle_in(tmp_path, max_trials=1))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(served.worker().create_trial, "tuner0")
        time.sleep(1.0)
        assert not waiting.done()
        with served:
            assert waiting.result(40).trial_id == "0"


# Projects that a chief reloads.


def killed_chief(folder, kind, *ended, **options):
    """Return the oracle of a chief that is started again, after one that had ended some trials and had two begun."""
    oracle = oracle_in(folder, kind, **options)
    save_files_atomically(oracle)
    for trial_id in ended:
        trial = oracle.create_trial("tuner0")
        assert int(trial.trial_id) == int(trial_id)
        oracle.update_trial(trial.trial_id, {"score": 1.0})
        oracle.end_trial(Trial.from_state({**trial.get_state(), "status": "COMPLETED"}))
    oracle.create_trial("tuner0")
    oracle.create_trial("tuner1")
    reloaded = oracle_in(folder, kind, **options)
    reloaded.reload()
    return reloaded


def test_running_trials_continue_if_the_workers_are_alive(tmp_path):
    oracle = killed_chief(tmp_path, "RandomSearchOracle", "0", max_trials=5)
    repair_reloaded(oracle, workers_live=True)
    assert {name: trial.trial_id for name, trial in oracle.ongoing_trials.items()} == {"tuner0": "1", "tuner1": "2"}
    assert oracle._retry_queue == []
    with Served(oracle) as served:
        worker = served.worker("tuner1")
        worker._trial_number = 7  # it asks on as if nothing had been
        complete(worker, oracle.trials["2"], score=5.0)
        assert worker.get_trial("2").score == 5.0
        assert worker.create_trial("tuner1").trial_id == "3"


def test_running_trials_are_run_again_if_the_workers_are_not_alive(tmp_path):
    oracle = killed_chief(tmp_path, "RandomSearchOracle", "0", max_trials=3)
    repair_reloaded(oracle, workers_live=False)
    assert sorted(oracle.create_trial(f"tuner{i}").trial_id for i in range(2)) == ["1", "2"]
    assert oracle.create_trial("tuner2").status == TrialStatus.STOPPED


def test_a_trial_that_had_ended_is_not_run_again(tmp_path):
    oracle = oracle_in(tmp_path, max_trials=2)
    trial = oracle.create_trial("tuner0")
    oracle.update_trial("0", {"score": 1.0})
    oracle.end_trial(Trial.from_state({**trial.get_state(), "status": "COMPLETED"}))  # saved while it counts as ongoing
    reloaded = oracle_in(tmp_path, max_trials=2)
    reloaded.reload()
    assert reloaded._retry_queue == ["0"]  # what keras-tuner would do
    repair_reloaded(reloaded, workers_live=False)
    assert reloaded._retry_queue == []


def test_a_trial_that_started_after_the_last_save_is_not_forgotten(tmp_path):
    oracle = oracle_in(tmp_path, max_trials=3)
    oracle.create_trial("tuner0")
    before = (tmp_path / "project" / "oracle.json").read_text()
    oracle.create_trial("tuner1")
    (tmp_path / "project" / "oracle.json").write_text(before)  # killed between the two files
    reloaded = oracle_in(tmp_path, max_trials=3)
    reloaded.reload()
    repair_reloaded(reloaded, workers_live=True)
    assert reloaded._retry_queue == ["1"]
    assert list(reloaded.ongoing_trials) == ["tuner0"]


def test_a_reloaded_grid_search_visits_every_point_once(tmp_path):
    oracle = killed_chief(tmp_path, "GridSearchOracle", "0", "1")
    repair_reloaded(oracle, workers_live=False)
    for _ in range(100):
        trial = oracle.create_trial("tuner0")
        if trial.status == TrialStatus.STOPPED:
            break
        oracle.update_trial(trial.trial_id, {"score": 1.0})
        oracle.end_trial(Trial.from_state({**trial.get_state(), "status": "COMPLETED"}))
    points = sorted(tuple(trial.hyperparameters.values.values()) for trial in oracle.trials.values())
    assert points == [(units, rate) for units in (1, 2, 3, 4) for rate in (0.1, 0.2)]


def test_files_are_complete_even_if_writing_fails_in_the_middle(tmp_path):
    oracle = oracle_in(tmp_path, max_trials=3)
    save_files_atomically(oracle)
    oracle.create_trial("tuner0")
    before = (tmp_path / "project" / "oracle.json").read_text()
    oracle.seed = object()  # JSON has got half way when it comes to this
    with pytest.raises(TypeError):
        oracle.save()
    assert (tmp_path / "project" / "oracle.json").read_text() == before


# How processes enter a search.


class Tuner:
    """What is needed of a tuner."""

    def __init__(self, folder, oracle, screening=None):
        self.oracle, self.project_dir, self.screening = oracle, str(folder), screening
        self.num_saves = 0

    def get_trial_dir(self, trial_id):
        folder = os.path.join(self.project_dir, f"trial_{trial_id}")
        os.makedirs(folder, exist_ok=True)
        return folder

    def save(self):
        self.num_saves += 1


def test_a_chief_serves_a_search_with_its_screening_and_records_why_a_trial_has_lost_its_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(role_entry, "_has_searched", False)
    oracle = oracle_in(tmp_path, max_trials=2)
    oracle.hyperparameters.Choice("distribution_strategy", ["a", "b"])
    tuner = Tuner(tmp_path, oracle, Screening())
    with cluster(1, 0) as (task,), ThreadPoolExecutor(1) as threads:
        role = ProcessRole("chief", task.address, start=1)
        ended = threads.submit(role_entry.run_search, tuner, role, None, verbose=0)
        worker = RemoteOracle(oracle, ProcessRole("tuner0", task.address, start=1))
        screen_on_one_worker(worker, lambda: ScreeningResult(("b",), {"a": "slow"}, {"b": 1.0}))
        trial = worker.create_trial("tuner0")
        assert trial.hyperparameters.get("distribution_strategy") == "b"
        worker._channel.call("fail_trial", tuner_id="tuner0", reason="killed twice\nTraceback")
        worker.abort("the test is over")
        with pytest.raises(SearchEnded, match="the test is over"):
            ended.result(30)
    record = TrialRecord.load(tuner.get_trial_dir(trial.trial_id))
    assert record.failure == Failure("worker lost", "killed twice")
    assert (record.strategy, record.values) == ("b", trial.hyperparameters.values)
    assert tuner.num_saves == 1


def test_a_second_search_of_a_program_is_refused_where_its_workers_have_exited(tmp_path, monkeypatch):
    monkeypatch.setattr(role_entry, "_has_searched", True)
    tuner = Tuner(tmp_path, oracle_in(tmp_path, max_trials=2))
    with pytest.raises(LaunchError, match="This program starts a second search, but its workers have exited after the"):
        role_entry.run_search(tuner, ProcessRole("chief", "127.0.0.1:9", start=1), None)


@pytest.mark.parametrize("start", [0, 1])
def test_an_error_outside_of_a_trial_is_the_workers_and_our_launchers_search_ends_with_it(start, monkeypatch):
    def run(x, **options):
        assert (x, options) == (1, {"epochs": 2})
        raise ZeroDivisionError("a bug in the user's tuner")

    def abort(reason):
        reasons.append(reason)
        raise LaunchError("the chief has ended, too")

    reasons = []
    tuner = Tuner("", types.SimpleNamespace(abort=abort))
    role = ProcessRole("tuner0", "127.0.0.1:9", start=start)
    with pytest.raises(ZeroDivisionError):
        role_entry.run_search(tuner, role, run, 1, epochs=2)
    assert len(reasons) == start
    if start:
        assert reasons[0].startswith("tuner0 raised an error outside of a trial:\nTraceback (most recent call last):\n")
        assert reasons[0].rstrip().endswith("ZeroDivisionError: a bug in the user's tuner")


def test_a_worker_of_our_launcher_exits_after_its_search_and_another_goes_on_with_what_the_chief_has_saved():
    tuner = Tuner("", types.SimpleNamespace(local=lambda: "what the chief has saved"))
    with pytest.raises(SystemExit) as caught:
        role_entry.run_search(tuner, ProcessRole("tuner0", "127.0.0.1:9", start=1), lambda: None)
    assert caught.value.code == 0
    role_entry.run_search(tuner, ProcessRole("tuner0", "127.0.0.1:9"), lambda: None)
    assert tuner.oracle == "what the chief has saved"
