"""What a launch on Ray is given is checked before anything starts; `tests/workers/test_ray_launch.py` launches."""

import json
import os
import sys
import types

import pytest

import keras_dist_ext as kde
from keras_dist_ext.cli import main
from keras_dist_ext.cluster import ray_cluster, ray_process
from keras_dist_ext.cluster.host import State
from keras_dist_ext.cluster.ray_agent import Report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": ""}, "address must be a string"),
        ({"cpus_per_worker": 0}, "cpus_per_worker must be a number"),
        ({"gpus_per_worker": -1}, "gpus_per_worker must be a number"),
        ({"runtime_env": ["."]}, "runtime_env must be a dict"),
    ],
)
def test_what_makes_no_cluster_is_refused_by_name(options, message):
    with pytest.raises(kde.LaunchError, match=message):
        kde.RayCluster(**options)


def test_where_to_launch_is_a_cluster_of_ray_or_nothing():
    with pytest.raises(kde.LaunchError, match=r"on must be a kde\.RayCluster, or None for this machine, got 'ray'"):
        kde.launch(1, ["true"], on="ray")


def test_the_cpus_of_this_machine_are_not_divided_on_ray():
    with pytest.raises(kde.LaunchError, match="affinity=True divides the CPUs of this machine"):
        kde.launch(1, ["true"], on=kde.RayCluster(), affinity=True)


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(kde.LaunchError, match=r"needs the package ray .*: pip install 'keras_dist_ext\[ray\]'"):
        kde.launch(1, ["true"], on=kde.RayCluster())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--address", "auto"], "--address, --cpus-per-worker and --gpus-per-worker are for a Ray cluster"),
        (["--gpus-per-worker", "1"], "are for a Ray cluster: add --on ray."),
        (["--on", "ray", "--tuner", "--gpus-per-trial", "1"], "give the GPUs of each worker: --gpus-per-worker"),
        (["--on", "ray", "--tuner", "--address", "ray://10.0.0.1:10001"], "of a Ray client, and the launcher"),
        (["--on", "ray", "--tuner", "--workers", "auto"], "On Ray, trials_in_parallel (--workers) must be a number"),
        (["--on", "ray", "--affinity"], "affinity=True divides the CPUs of this machine"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(words, message, capsys):
    assert main(["launch", "--workers", "2", *words, "true"]) == 1
    assert message in capsys.readouterr().err


def test_an_amount_of_a_resource_is_a_number(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--workers", "2", "--on", "ray", "--gpus-per-worker", "many", "true"])
    assert "'many' must be a number >= 0" in capsys.readouterr().err


def test_a_ray_job_that_has_sent_its_folder_sends_no_other(monkeypatch):
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert ray_cluster._default_environ() == {"working_dir": os.getcwd()}
    for environ, expected in (({}, {"working_dir": os.getcwd()}), ({"working_dir": "gcs://job.zip"}, {})):
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": environ}))
        assert ray_cluster._default_environ() == expected


@pytest.fixture
def running(monkeypatch):
    """A process on a node of a Ray that answers at once."""
    ray = types.ModuleType("ray")
    ray.exceptions = types.ModuleType("ray.exceptions")
    ray.exceptions.RayError = ray.exceptions.RayTaskError = type("RayError", (Exception,), {})
    ray.get = lambda answer: answer
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    process = ray_process.RayProcess(agent=None, node="10.0.0.7", starting="it has started")
    assert process.note_silence(1000.0) == []  # to start may take long
    assert process.take() == []
    return process


def test_a_node_that_is_silent_is_noted_and_then_lost(running):
    running.note_silence(2.0)
    assert running.poll().silent_seconds == 0.0
    running.note_silence(2.0)
    assert running.poll().silent_seconds == 4.0
    assert running.note_silence(17.0) == [b""]  # the end of its output
    assert running.poll().exit_code == -9
    assert running.poll().lost == "its node 10.0.0.7, or Ray's process there, has not answered for 21 s"
    assert running.is_done


def test_a_report_ends_the_silence(running):
    running.note_silence(19.0)
    running._awaited = Report(b"an epoch", is_at_end=False, state=State(), is_stopped=True)
    assert running.take() == [b"an epoch"]
    assert (running.poll().silent_seconds, running.is_stopped, running.is_done) == (0.0, True, False)
