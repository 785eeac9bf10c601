"""What a launch on Ray is given is checked before anything starts; `tests/workers/test_ray_launch.py` launches."""

import sys

import pytest

import keras_dist_ext as kde
from keras_dist_ext.cli import main


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
        (["--on", "ray", "--tuner"], "--on ray is not for a search, which runs on this machine"),
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
