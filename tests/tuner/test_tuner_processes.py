"""Search in several processes: which die, what happens to their trials, and that the search ends as it should."""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc
import keras_tuner
import light_search
import pytest
import search_runs
from cases import rotating
from launching import environ_with, processes_with, script, wait_until

from keras_dist_ext.cli import main
from keras_dist_ext.cluster.local_host import LocalHost
from keras_dist_ext.cluster.placing import Placing
from keras_dist_ext.cluster.ray_cluster import RayCluster
from keras_dist_ext.cluster.signals import Interrupted
from keras_dist_ext.cluster.tasks import cluster
from keras_dist_ext.errors import LaunchError
from keras_dist_ext.tuner.processes.launch_search import launch_search
from keras_dist_ext.tuner.processes.oracle_server import OracleServer, SearchEnded
from keras_dist_ext.tuner.processes.process_role import ProcessRole
from keras_dist_ext.tuner.processes.screening_lease import ScreeningLease
from keras_dist_ext.tuner.processes.supervisor import Limits, Supervisor
from keras_dist_ext.tuner.processes.worker_group import Output, WorkerGroup
from keras_dist_ext.tuner.screening import ScreeningResult

launch_search_module = importlib.import_module("keras_dist_ext.tuner.processes.launch_search")
pytestmark = [
    pytest.mark.multiworker,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("signals_as_in_a_terminal"),
]


# Searches without TensorFlow in the workers: seconds instead of minutes.

STALL_SECONDS = 5.0  # far more than a worker that works takes for a trial, even if the machine stands still meanwhile


class LightSearch:
    """A real supervisor over light processes, and a real oracle that this process serves.

    The file "removed" in the folder exists once a worker was removed: others may wait for it in their trials.
    """

    def __init__(self, folder, *workers, max_trials=6, max_restarts=1, hang_seconds=None, lease=None, host=LocalHost):
        hyperparameters = keras_tuner.HyperParameters()
        hyperparameters.Int("units", 1, 10**6)
        self.oracle = keras_tuner.oracles.RandomSearchOracle(
            objective=keras_tuner.Objective("score", "max"),
            max_trials=max_trials,
            hyperparameters=hyperparameters,
            max_consecutive_failed_trials=6,  # more than one worker may have in a row
        )
        self.oracle.verbose = 0
        self.oracle._set_project_dir(str(folder), "project")
        self.closed, self.error, self.shown = [], None, io.StringIO()
        self._folder, self._host = folder, host
        with cluster(1, 0) as (task,):
            server = OracleServer(self.oracle, task.address, lambda trial, _: self.closed.append(trial.trial_id), lease)
            serving = threading.Thread(target=self._run_chief, args=(server,))
            serving.start()
            groups = [self._group("chief", task.address, "chief")]
            groups += [self._group(f"tuner {number}", task.address, *words) for number, words in enumerate(workers)]
            limits = Limits(max_restarts, time.monotonic() + 120, hang_seconds)
            supervisor = Supervisor(groups[0], groups[1:], limits, [], self._show_line)
            try:
                self.failure = supervisor.run()
            finally:
                for group in groups:
                    group.end(grace_seconds=0)
                server.abort("the test is over")
                server._check_finished()
                serving.join(30)
        self.deaths = supervisor.deaths

    def _show_line(self, text):
        self.shown.write(text)
        if "was removed" in text:
            (self._folder / "removed").touch()
        if "has no place yet" in text:
            (self._folder / "crowded").touch()

    def _run_chief(self, server):
        try:
            server.run()
        except Exception as error:
            self.error = error

    def _group(self, name, address, *words):
        program = [sys.executable, light_search.__file__, *words]
        role = ProcessRole(name.replace(" ", ""), address)
        return WorkerGroup(name, role, program, [dict(os.environ)], Output(self.shown, None), self._host)

    @property
    def statuses(self):
        return [trial.status for _, trial in sorted(self.oracle.trials.items())]


def test_two_workers_run_the_trials_that_were_asked_for(tmp_path):
    search = LightSearch(tmp_path, ["worker"], ["worker"], max_trials=12)
    assert (search.failure, search.error, search.deaths) == (None, None, [])
    assert search.statuses == ["COMPLETED"] * 12


def test_a_worker_that_is_killed_in_a_trial_gets_it_again_and_nothing_else_is_lost(tmp_path):
    search = LightSearch(tmp_path, ["worker", "die", "2", "1"], ["worker", "die", "2", "1"])
    assert (search.failure, search.error) == (None, None)
    assert search.statuses == ["COMPLETED"] * 6
    (death,) = search.deaths
    assert death.trial_id == "2"
    assert "failed with SIGKILL" in death.cause
    assert "about to die" in death.cause
    assert death.action == "It was restarted, with the same trial."


@pytest.mark.slow
def test_a_trial_that_kills_its_worker_again_ends_as_failed_with_the_reason(tmp_path):
    search = LightSearch(tmp_path, ["worker", "die", "3"], ["worker", "die", "3"])
    assert (search.failure, search.error) == (None, None)
    assert search.statuses == [*["COMPLETED"] * 3, "FAILED", *["COMPLETED"] * 2]
    assert search.closed == ["3"]
    assert search.oracle.trials["3"].message.startswith("The worker died 2 times in this trial, the last time: tuner ")
    assert [death.action for death in search.deaths] == [
        "It was restarted, with the same trial.",
        "Trial 3 ended as failed, and the worker was restarted.",
    ]


@pytest.mark.slow
def test_a_worker_that_always_dies_is_removed_and_the_others_end_the_search(tmp_path):
    waits = ["worker", "wait", str(tmp_path / "removed")]
    search = LightSearch(tmp_path, ["worker", "die"], waits, max_restarts=0)
    assert (search.failure, search.error) == (None, None)
    assert sorted(search.statuses) == ["COMPLETED"] * 3 + ["FAILED"] * 3
    assert {death.name for death in search.deaths} == {"tuner 0"}
    assert search.deaths[-1].action.endswith("ended as failed, like the 2 before it. The worker was removed.")


@pytest.mark.slow
def test_a_worker_that_never_gets_a_trial_is_removed_with_its_reason(tmp_path):
    search = LightSearch(tmp_path, ["crash"], ["worker", "wait", str(tmp_path / "removed")])
    assert (search.failure, search.error) == (None, None)
    assert search.statuses == ["COMPLETED"] * 6
    assert [death.action for death in search.deaths] == ["It was restarted.", "The worker was removed."]
    assert "this machine lacks a library" in search.deaths[-1].cause


@pytest.mark.slow
def test_a_search_without_workers_ends_with_their_reasons(tmp_path):
    search = LightSearch(tmp_path, ["crash"], ["crash"], max_restarts=0)
    assert isinstance(search.error, SearchEnded)
    assert "No worker is left to run the remaining trials." in str(search.error)
    assert str(search.error).count("this machine lacks a library") == 2


@pytest.mark.slow
def test_a_trial_that_hangs_is_ended_and_retried(tmp_path):
    hangs = ["worker", "hang", "1", "1"]
    search = LightSearch(tmp_path, hangs, hangs, hang_seconds=STALL_SECONDS)
    assert (search.failure, search.error) == (None, None)
    assert search.statuses == ["COMPLETED"] * 6
    (death,) = search.deaths
    assert f"No step was finished for {STALL_SECONDS:g} s" in death.cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "max_restarts", "cause", "action"),
    [
        ("hang", 1, f"No step was finished for {STALL_SECONDS:g} s", "It was restarted."),
        ("die", 1, "failed with SIGKILL", "It was restarted."),
        ("die", 0, "failed with SIGKILL", "The worker was removed."),
    ],
)
def test_a_screening_ends_even_if_its_worker_dies_or_hangs(how, max_restarts, cause, action, tmp_path):
    lease = ScreeningLease(tmp_path, lambda _: None, workers_live=False)
    search = LightSearch(
        tmp_path,
        *[["worker", "measure", how, str(tmp_path)]] * 2,
        max_restarts=max_restarts,
        hang_seconds=STALL_SECONDS if how == "hang" else None,
        lease=lease,
    )
    assert (search.failure, search.error) == (None, None)
    assert search.statuses == ["COMPLETED"] * 6
    (death,) = search.deaths
    assert (death.trial_id, death.action) == (None, action)
    assert cause in death.cause


@pytest.mark.slow
def test_a_worker_that_exits_in_a_trial_has_died(tmp_path):
    search = LightSearch(tmp_path, ["worker", "leave", "1", "1"], ["worker", "leave", "1", "1"])
    assert search.statuses == ["COMPLETED"] * 6
    assert [death.cause for death in search.deaths] == [
        f"{search.deaths[0].name} exited with code 0 in the middle of a trial."
    ]


@pytest.mark.rotating
def test_a_worker_that_finds_no_place_again_leaves_its_trial_to_others(tmp_path, monkeypatch):
    places = {"free": 3, "is_one_lost": False}

    class Crowded(LocalHost):
        """As a cluster that loses a node: there are places for the chief and two workers, and later for one fewer."""

        def reserve(self, workers, num_ps):
            while not places["free"]:
                yield "There is no room"
            places["free"] -= 1
            return (yield from super().reserve(workers, num_ps))

        def __exit__(self, *error):
            super().__exit__(*error)
            places["free"] += places["is_one_lost"]
            places["is_one_lost"] = True

    monkeypatch.setattr(Placing, "NOTICE_SECONDS", 0.1)
    search = LightSearch(tmp_path, *[["worker", "one dies", str(tmp_path)]] * 2, host=Crowded)
    assert (search.failure, search.error) == (None, None)
    assert search.statuses == ["COMPLETED"] * 6
    (death,) = search.deaths
    assert death.action == "It was restarted, with the same trial."
    assert search.shown.getvalue().count(f"{death.name} has no place yet. There is no room.") == 1


# Programs that are no search.


def supervise(address, *program):
    """Watch over a chief alone."""
    output = io.StringIO()
    role, command = ProcessRole("chief", address), [sys.executable, *program]
    chief = WorkerGroup("chief", role, command, [dict(os.environ)], Output(output, None), LocalHost)
    try:
        return Supervisor(chief, [], Limits(1, time.monotonic() + 60, None), [], output.write).run()
    finally:
        chief.end(grace_seconds=0)


def test_a_tuner_of_keras_tuner_itself_is_refused_with_what_to_use_instead():
    server = grpc.server(futures.ThreadPoolExecutor(1))  # which does not know our calls either
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        failure = supervise(f"127.0.0.1:{port}", "-c", "import time; time.sleep(60)")
    finally:
        server.stop(0).wait()
    assert failure is not None
    assert "The chief serves keras-tuner's own oracle, which waits forever for a worker that dies." in failure.message
    assert "Search with a tuner of `keras_dist_ext.tuner`" in failure.message


def test_a_program_without_a_search_is_an_error(tmp_path, capfd):
    assert main(["launch", "--tuner", "--workers", "2", script(tmp_path, "print('trains')")]) == 1
    shown = capfd.readouterr().out
    assert "[chief] trains" in shown
    assert "The chief exited without a search: its program must call the tuner's `search`." in shown


def test_a_function_without_a_search_raises(tmp_path):
    shown = io.StringIO()
    with pytest.raises(LaunchError, match="^The chief exited without a search: its program must call the tuner's"):
        launch_search(light_search.is_first, 1, args=(str(tmp_path),), stream=shown)


@pytest.mark.parametrize(("signals", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_comes_while_ray_is_connected_to_ends_the_search(signals, exit_code, monkeypatch):
    @contextlib.contextmanager
    def connecting(on):
        raise Interrupted(signals)
        yield

    monkeypatch.setattr(launch_search_module, "_ray_places", connecting)
    shown = io.StringIO()
    result = launch_search(["true"], 1, on=RayCluster(), stream=shown)
    assert (result.exit_code, result.deaths) == (exit_code, ())
    assert shown.getvalue() == f"launch: {signals.name} ended the launch.\n"


def test_on_ray_the_chief_has_the_address_of_its_node_and_no_other(monkeypatch):
    monkeypatch.setenv("KERASTUNER_ORACLE_IP", "10.0.0.1")
    with pytest.raises(LaunchError, match="^KERASTUNER_ORACLE_IP cannot be set on Ray, where the chief listens on the"):
        launch_search(["true"], 1, on=RayCluster())


def test_a_program_that_fails_before_it_searches_gives_its_traceback_and_exit_code(tmp_path, capfd):
    assert main(["launch", "--tuner", "--workers", "1", script(tmp_path, "raise ValueError('no data')")]) == 1
    assert capfd.readouterr().out.rstrip().endswith("ValueError: no data")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--workers", "auto"],
            "--workers auto, --workers-per-trial and --gpus-per-trial are for a search: add --tuner.",
        ),
        (["--workers", "2", "--tuner", "--ps", "1"], "--ps, --threads and --affinity are not for a search"),
        (["--workers", "2", "--tuner", "--gpus-per-trial", "1"], "this machine has no GPU"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["launch", *words, script(tmp_path, "")]) == 1
    assert message in capsys.readouterr().err


def test_a_process_of_a_search_cannot_launch_another(monkeypatch):
    monkeypatch.setenv("KERASTUNER_TUNER_ID", "tuner0")
    with pytest.raises(LaunchError, match="KERASTUNER_TUNER_ID is already set .tuner0.: this process is part of a"):
        launch_search(["python", "-c", ""], 1)


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_no_process_is_left_when_the_launcher_ends(signum, exit_code, tmp_path):
    token = f"search-{tmp_path}"
    path = script(tmp_path, "import time; print('in search', flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "keras_dist_ext", "launch", "--tuner", "--workers", "2", path]
    launcher = subprocess.Popen(command, env=environ_with(TEST_TOKEN=token), stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    with launcher.stdout:
        while "in search" not in launcher.stdout.readline():
            pass
        launcher.send_signal(signum)
        launcher.stdout.read()
    assert launcher.wait(60) == exit_code
    wait_until(lambda: not processes_with(token))


# Searches as users make them.


def run(folder, num_workers=2, **options):
    """Search over several processes, see that nothing of them is left, and return what came of it."""
    shown, token = io.StringIO(), f"search-{folder}"
    settings = {name: options.pop(name) for name in ("workers_per_trial", "max_restarts") if name in options}
    try:
        result = launch_search(
            search_runs.search,
            num_workers,
            args=(str(folder),),
            kwargs=options,
            time_limit=200,
            environ=environ_with(TEST_TOKEN=token),
            stream=shown,
            **settings,
        )
    finally:
        sys.stdout.write(shown.getvalue())  # pytest shows it where a test fails
        wait_until(lambda: not processes_with(token))
    return result


@pytest.mark.slow
def test_a_search_on_two_workers_survives_the_loss_of_one(tmp_path, temporary):
    result = run(tmp_path, max_trials=5, doom={"who": "worker"})
    found = result.value
    assert {status for status, _, _ in found["trials"].values()} == {"COMPLETED"}
    assert sorted(found["end_order"]) == sorted(found["trials"]) == ["0", "1", "2", "3", "4"]
    assert found["evaluated"] == pytest.approx(found["best_score"], rel=1e-5)
    assert found["weights"] == [f"trial_{name}" for name in sorted(found["trials"])]
    lines = search_runs.log(tmp_path)
    assert {line["tuner"] for line in lines} == {"tuner0", "tuner1"}
    assert {tuple(line["listening"]) for line in lines if line["what"] == "begin"} == {("127.0.0.1",)}
    assert [death.action for death in result.deaths] == ["It was restarted, with the same trial."]
    assert len([line for line in lines if line["what"] == "begin"]) == 6


@pytest.mark.rotating(turns=3)
def test_a_screening_survives_the_worker_that_measures(tmp_path, temporary):
    screening = {"seconds": 0.1, "samples": 3, "rungs": 1}
    result = run(
        tmp_path,
        max_trials=4,
        strategies=["one_device", "mirrored(2)"],
        screening=screening,
        doom={"who": "worker"},
        max_restarts=1,
    )
    assert [status for status, _, _ in result.value["trials"].values()] == ["COMPLETED"] * 4
    (death,) = result.deaths
    assert (death.trial_id, death.action) == (None, "It was restarted.")
    result = ScreeningResult.load(tmp_path / "project")
    assert {*result.survivors, *result.dropped} == {"one_device", "mirrored(2)"}
    assert set(result.examples_per_second) == {"one_device", "mirrored(2)"}
    begun = [line["tuner"] for line in search_runs.log(tmp_path) if line["what"] == "begin"]
    assert begun[0] == begun[1] == death.name.replace(" ", "")  # who died has measured


@pytest.mark.rotating(turns=3)
def test_a_strategy_that_kills_the_worker_that_measures_it_is_dropped(tmp_path, temporary):
    screening = {"seconds": 0.1, "samples": 3, "rungs": 1}
    result = run(
        tmp_path,
        max_trials=3,
        strategies=["one_device", "mirrored(2)"],
        screening=screening,
        doom={"who": "worker", "replicas": 2, "times": 9},
    )
    assert [status for status, _, _ in result.value["trials"].values()] == ["COMPLETED"] * 3
    assert [death.trial_id for death in result.deaths] == [None, None]
    result = ScreeningResult.load(tmp_path / "project")
    assert result.survivors == ("one_device",)
    assert result.dropped["mirrored(2)"].startswith("worker lost: the process died 2 times")


@pytest.mark.rotating(turns=3)
def test_a_trial_that_always_kills_its_worker_fails_with_the_reason_in_the_report(tmp_path, temporary):
    result = run(tmp_path, max_trials=6, max_restarts=1, doom={"who": "worker", "units": 5, "times": 9})
    found = result.value
    failed = {name: trial for name, trial in found["trials"].items() if trial[0] != "COMPLETED"}
    assert len(found["trials"]) == 6
    ((name, (status, message, units)),) = failed.items()
    assert (status, units) == ("FAILED", 5)
    assert "The worker died 2 times in this trial, the last time: tuner " in message
    assert found["failures"][name].startswith("worker lost: The worker died 2 times in this trial")


@pytest.mark.parametrize(
    "kind", rotating(["RandomSearch", "GridSearch", "Hyperband", "BayesianOptimization"], [], slow=["RandomSearch"])
)
def test_a_chief_that_is_killed_continues_its_project(kind, tmp_path, temporary):
    options = {"max_epochs": 3, "factor": 3} if kind == "Hyperband" else {"max_trials": 5}
    result = run(tmp_path, kind=kind, doom={"who": "chief", "units": 5 if kind == "GridSearch" else None}, **options)
    found = result.value
    assert {status for status, _, _ in found["trials"].values()} == {"COMPLETED"}
    assert sorted(found["end_order"]) == sorted(found["trials"])
    assert kind == "Hyperband" or len(found["trials"]) == 5
    assert kind != "GridSearch" or {units for _, _, units in found["trials"].values()} == set(search_runs.UNITS[:5])
    assert [death.name for death in result.deaths] == ["chief"]
    assert result.deaths[0].action == "It was restarted, and continues from what it has saved."
    begun = [line for line in search_runs.log(tmp_path) if line["what"] == "begin"]
    assert len(begun) == len(found["trials"])  # the trials that were under way went on


@pytest.mark.slow
def test_workers_that_run_each_trial_together_agree_and_one_of_them_reports(tmp_path, temporary):
    result = run(tmp_path, 1, workers_per_trial=2, strategies="multi_worker", max_trials=3)
    found = result.value
    assert {status for status, _, _ in found["trials"].values()} == {"COMPLETED"}
    assert len(found["trials"]) == 3
    assert result.deaths == ()
    lines = search_runs.log(tmp_path)
    assert {line["replicas"] for line in lines} == {2}
    begins, ends = (
        [
            [line for line in lines if line["worker_index"] == worker_index and line["what"] == what]
            for worker_index in (0, 1)
        ]
        for what in ("begin", "end")
    )
    assert [line["units"] for line in begins[0]] == [line["units"] for line in begins[1]]
    for last, following in zip(zip(*ends, strict=True), list(zip(*begins, strict=True))[1:], strict=False):
        assert max(line["time"] for line in last) < min(line["time"] for line in following)
    assert found["evaluated"] == pytest.approx(found["best_score"], rel=1e-5)


@pytest.mark.rotating(turns=3)
def test_if_a_worker_dies_its_whole_group_is_restarted(tmp_path, temporary):
    result = run(
        tmp_path, 1, workers_per_trial=2, strategies="multi_worker", max_trials=2, doom={"who": "worker", "times": 1}
    )
    assert {status for status, _, _ in result.value["trials"].values()} == {"COMPLETED"}
    assert len(result.deaths) == 1


@pytest.mark.rotating(turns=3)
def test_workers_without_our_launcher_load_the_best_model_when_the_chief_has_ended(tmp_path):
    code = f"import json, search_runs; print('found', json.dumps(search_runs.search({str(tmp_path)!r}, max_trials=2)))"
    with cluster(1, 0) as (task,):
        ip, port = task.address.split(":")
        address = {"KERASTUNER_ORACLE_IP": ip, "KERASTUNER_ORACLE_PORT": port}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=Path(search_runs.__file__).parent,
                env=environ_with(KERASTUNER_TUNER_ID=name, **address),
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in ("chief", "tuner0")
        ]
        try:
            shown = [process.communicate(timeout=200)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    found = [json.loads(text.rpartition("found ")[2]) for text in shown]
    assert found[0] == found[1]
    assert {status for status, _, _ in found[0]["trials"].values()} == {"COMPLETED"}
    assert found[1]["evaluated"] == pytest.approx(found[1]["best_score"], rel=1e-5)
