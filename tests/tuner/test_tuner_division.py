"""Who is who in a search over several processes, and who gets what of the machine."""

import json

import pytest

from keras_dist_ext.errors import ClusterError, LaunchError
from keras_dist_ext.tuner.processes.parallel import Machine, divide, this_machine
from keras_dist_ext.tuner.processes.place import Place, place_of

# Who is who.


def test_a_process_alone_has_no_place():
    assert place_of({}) is None


def test_a_place_survives_the_environment():
    place = Place("tuner3", "127.0.0.1:4000", start=2)
    assert place_of(place.environ()) == place
    assert (place.is_chief, place.is_launched, place.may_overwrite) == (False, True, False)


def test_the_chief_alone_may_empty_the_project_and_only_when_it_first_starts():
    assert [Place("chief", "h:1", start).may_overwrite for start in (0, 1, 2)] == [True, True, False]


def test_the_workers_of_tf_config_run_trials_together():
    cluster = {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    place = place_of({**Place("tuner0", "127.0.0.1:4000").environ(), "TF_CONFIG": config})
    assert place is not None
    assert (place.member, place.num_members) == (1, 2)


def test_half_a_place_is_refused():
    with pytest.raises(LaunchError, match="KERASTUNER_ORACLE_IP is set .127.0.0.1., but not KERASTUNER_TUNER_ID and "):
        place_of({"KERASTUNER_ORACLE_IP": "127.0.0.1"})
    with pytest.raises(ClusterError, match="TF_CONFIG is not JSON"):
        place_of({**Place("tuner0", "127.0.0.1:4000").environ(), "TF_CONFIG": "worker 0"})


# Who gets what.

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
    division = divide(machine, **options)
    assert [[own["CUDA_VISIBLE_DEVICES"] for own in trial] for trial in division.environs] == expected


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
    division = divide(Machine((), cores, int(gigabytes * (1 << 30))), **options)
    assert division.num_trials == num_trials
    assert {own["TF_NUM_INTRAOP_THREADS"] for trial in division.environs for own in trial} == {threads}
    assert {len(trial) for trial in division.environs} == {options.get("workers_per_trial", 1)}


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
        (Machine((), 2, 1 << 33), {"gpus_per_trial": 1}, "gpus_per_trial=1, but there is no GPU here."),
        (FOUR_GPUS, {"trials_in_parallel": 0}, "trials_in_parallel=0 makes no search: give a whole number, 1 or more."),
    ],
)
def test_what_the_machine_does_not_have_is_refused_with_what_it_has(machine, options, message):
    with pytest.raises(LaunchError) as caught:
        divide(machine, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(("listed", "gpus"), [("2,3", ("2", "3")), ("", ()), ("-1", ()), ("0,-1,1", ("0",))])
def test_gpus_are_those_that_the_environment_leaves_visible(listed, gpus):
    assert this_machine({"CUDA_VISIBLE_DEVICES": listed}).gpus == gpus
