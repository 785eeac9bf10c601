"""The roles of the processes of a search, and the GPUs and cores that each of them gets."""

import json

import pytest

from keras_dist_ext.errors import ClusterError, LaunchError
from keras_dist_ext.tuner.processes.allocation import Machine, allocate, detect_machine
from keras_dist_ext.tuner.processes.process_role import ProcessRole, process_role

# Roles


def test_a_single_process_has_the_default_role():
    role = process_role({})
    assert role == ProcessRole()
    assert (role.is_single, role.is_chief, role.has_oracle, role.may_overwrite) == (True, False, True, True)


def test_a_role_survives_the_environment():
    role = ProcessRole("tuner3", "127.0.0.1:4000", start=2)
    assert process_role(role.environ()) == role
    assert (role.is_chief, role.is_managed, role.may_overwrite) == (False, True, False)


def test_only_the_chief_may_empty_the_project_and_only_at_its_first_start():
    assert [ProcessRole("chief", "h:1", start).may_overwrite for start in (0, 1, 2)] == [True, True, False]


def test_the_workers_of_tf_config_run_trials_together():
    cluster = {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    role = process_role({**ProcessRole("tuner0", "127.0.0.1:4000").environ(), "TF_CONFIG": config})
    assert (role.worker_index, role.num_workers) == (1, 2)


def test_an_evaluator_of_tf_config_runs_no_trials_with_the_workers():
    cluster = {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"], "evaluator": ["127.0.0.1:4003"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    role = process_role({**ProcessRole("tuner0", "127.0.0.1:4000").environ(), "TF_CONFIG": config})
    assert (role.worker_index, role.num_workers) == (0, 1)


def test_an_incomplete_role_is_refused():
    with pytest.raises(LaunchError, match="KERASTUNER_ORACLE_IP is set .127.0.0.1., but not KERASTUNER_TUNER_ID and "):
        process_role({"KERASTUNER_ORACLE_IP": "127.0.0.1"})
    with pytest.raises(ClusterError, match="TF_CONFIG is not JSON"):
        process_role({**ProcessRole("tuner0", "127.0.0.1:4000").environ(), "TF_CONFIG": "worker 0"})


# Machines


@pytest.mark.parametrize(
    ("script", "gpus"), [("echo 0; echo 1", ("0", "1")), ("exit 9", ()), (None, ())], ids=["two", "no driver", "none"]
)
def test_gpus_are_those_that_the_driver_lists_where_no_variable_limits_them(tmp_path, script, gpus):
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    assert detect_machine({"PATH": str(tmp_path)}).gpus == gpus


# Allocation

FOUR_GPUS = Machine(gpus=("0", "1", "2", "3"), num_cores=16, memory_bytes=1 << 36)


@pytest.mark.parametrize(
    ("machine", "options", "expected"),
    [
        (FOUR_GPUS, {}, [["0"], ["1"], ["2"], ["3"]]),
        (FOUR_GPUS, {"gpus_per_trial": 2}, [["0,1"], ["2,3"]]),
        (FOUR_GPUS, {"gpus_per_trial": 3}, [["0,1,2"]]),
        (FOUR_GPUS, {"trials_in_parallel": 2}, [["0"], ["1"]]),
        (FOUR_GPUS, {"workers_per_trial": 2}, [["0", "1"], ["2", "3"]]),
        (FOUR_GPUS, {"workers_per_trial": 2, "gpus_per_trial": 4}, [["0,1", "2,3"]]),
    ],
)
def test_no_two_processes_get_the_same_gpu(machine, options, expected):
    allocation = allocate(machine, **options)
    assert [[own["CUDA_VISIBLE_DEVICES"] for own in trial] for trial in allocation.environs] == expected


@pytest.mark.parametrize(
    ("cores", "gigabytes", "options", "num_trials", "threads"),
    [
        (8, 64, {}, 8, "1"),
        (8, 3, {}, 3, "2"),
        (8, 64, {"trials_in_parallel": 2}, 2, "4"),
        (8, 64, {"trials_in_parallel": 2, "workers_per_trial": 2}, 2, "2"),
        (2, 64, {"trials_in_parallel": 4}, 4, "1"),
        (8, 64, {"workers_per_trial": 3}, 2, "1"),
        (1, 0.1, {}, 1, "1"),
    ],
)
def test_without_gpus_cores_are_divided(cores, gigabytes, options, num_trials, threads):
    allocation = allocate(Machine((), cores, int(gigabytes * (1 << 30))), **options)
    assert allocation.num_trials == num_trials
    assert {own["TF_NUM_INTRAOP_THREADS"] for trial in allocation.environs for own in trial} == {threads}
    assert {len(trial) for trial in allocation.environs} == {options.get("workers_per_trial", 1)}


@pytest.mark.parametrize(
    ("machine", "options", "message"),
    [
        (
            FOUR_GPUS,
            {"trials_in_parallel": 5},
            "This machine has 4 GPUs (0, 1, 2, 3), and 5 trials at once with 1 each",
        ),
        (FOUR_GPUS, {"gpus_per_trial": 5}, "so give gpus_per_trial=4 or less."),
        (FOUR_GPUS, {"gpus_per_trial": 3, "workers_per_trial": 2}, "Give a multiple of 2."),
        (Machine((), 2, 1 << 33), {"gpus_per_trial": 1}, "gpus_per_trial=1, but this machine has no GPU."),
        (
            FOUR_GPUS,
            {"trials_in_parallel": 400, "workers_per_trial": 500},
            "trials_in_parallel=400 and workers_per_trial=500 make 200000 processes, and a machine has ports for 65535",
        ),
        (FOUR_GPUS, {"trials_in_parallel": 0}, "trials_in_parallel must be an integer >= 1, or 'auto', got 0."),
    ],
)
def test_a_request_beyond_the_machine_is_refused_with_what_it_has(machine, options, message):
    with pytest.raises(LaunchError) as caught:
        allocate(machine, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(("listed", "gpus"), [("2,3", ("2", "3")), ("", ()), ("-1", ()), ("0,-1,1", ("0",))])
def test_gpus_are_those_that_the_environment_leaves_visible(listed, gpus):
    assert detect_machine({"CUDA_VISIBLE_DEVICES": listed}).gpus == gpus
