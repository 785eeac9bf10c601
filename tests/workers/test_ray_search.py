"""Search on Ray, on a real cluster of nodes on this machine: all trials end, whichever node is lost.

pip install '.[test,ray]' && python -m pytest -m ray tests/workers/test_ray_search.py
"""

import io
import re
import sys
import threading
from pathlib import Path

import light_search
import psutil
import pytest
import ray_runs
import search_runs
from launching import wait_until
from ray_nodes import assert_nothing_is_left, token

import keras_dist_ext as kde
from keras_dist_ext.cluster.placing import Placing

pytestmark = ray_runs.MARKS


def search(work, num_workers, loses, **options):
    """Search on Ray in a thread, since Ray adds nodes in the main thread alone, and act once a trial waits for it."""
    stream, results = io.StringIO(), []

    def run():
        results.append(kde.tuner.launch_search(work, num_workers, time_limit=200, stream=stream, **options))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: "accident of" in stream.getvalue() or not thread.is_alive(), 120)
        if loses is not None:
            loses(int(re.search(r"accident of \d+ of (\d+)", stream.getvalue())[1]))
        thread.join()
    finally:
        sys.stdout.write(stream.getvalue())  # pytest shows it where a test fails
    (result,) = results
    return result, stream.getvalue()


def test_a_search_of_more_workers_than_there_is_room_for_loses_a_node_and_ends(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(Placing, "NOTICE_SECONDS", 1.0)
    monkeypatch.chdir(tmp_path)  # which is sent to the nodes
    nodes.have(3)
    command = [sys.executable, light_search.__file__, "search", str(tmp_path), "40"]
    result, shown = search(command, 3, nodes.lose, on=nodes.on, environ=token("crowded"))
    assert (result.exit_code, result.failure) == (0, None)
    assert f"[chief] ended {['COMPLETED'] * 40}" in shown
    missing = "has no place yet. Ray has no room for 1 process of 1 CPU; all that it has is 3 CPU.\n"
    assert re.search(rf"launch: tuner \d {missing}", shown)
    (death,) = result.deaths
    assert " was lost: its node " in death.cause
    assert death.action == "It was restarted, with the same trial."
    assert result.allocation == "3 trials at once, as far as Ray has room, each on 1 CPU"
    assert not re.search(r"listens on (127|0)\.", shown)
    assert_nothing_is_left("crowded", nodes)


def test_a_search_whose_chief_finds_no_place_says_so_when_the_time_is_over(nodes):
    nodes.have(0)
    stream = io.StringIO()
    result = kde.tuner.launch_search(["true"], 1, on=nodes.on, time_limit=3, stream=stream)
    assert result.exit_code == 124
    assert result.failure == (
        "The time limit passed before anything could start. Ray has no room for 1 process of 1 CPU; all that it has is "
        "no CPU."
    )


@pytest.mark.parametrize(
    "victim",
    [pytest.param("worker", marks=ray_runs.at_length(0)), pytest.param("chief", marks=ray_runs.at_length(1))],
)
def test_a_search_that_loses_a_node_ends_with_all_trials(nodes, victim, tmp_path):
    nodes.have(3)
    on = kde.RayCluster(nodes.cluster.address, runtime_env=ray_runs.RUNTIME_ENV)
    options = {"doom": {"who": "node"}, "max_trials": 4}

    def lose(agent):
        is_chief = victim == "chief"
        nodes.lose(psutil.Process(int(Path(tmp_path, "chief.pid").read_text())).ppid() if is_chief else agent)

    result, _ = search(search_runs.search, 2, lose, args=(str(tmp_path),), kwargs=options, on=on, environ=token(victim))
    found = result.value
    assert {status for status, _, _ in found["trials"].values()} == {"COMPLETED"}
    assert sorted(found["end_order"]) == sorted(found["trials"]) == ["0", "1", "2", "3"]
    assert found["evaluated"] == pytest.approx(found["best_score"], rel=1e-5)
    lost = [death for death in result.deaths if " was lost" in death.cause]
    assert [death.name == "chief" for death in lost] == [victim == "chief"]
    addresses = {address for line in search_runs.log(tmp_path) for address in line["listening"] or ()}
    assert addresses
    assert not addresses & {"127.0.0.1", "0.0.0.0", "::"}, "the chief listens on the address of its node"
    assert_nothing_is_left(victim, nodes)


@pytest.mark.parametrize("loses", [False, pytest.param(True, marks=ray_runs.at_length(12))])
def test_trials_of_two_workers_share_a_placement_group_and_start_again_together(nodes, loses, tmp_path, monkeypatch):
    import ray

    groups, plain = [], ray.util.placement_group

    def placement_group(bundles, **options):
        groups.append(len(bundles))
        return plain(bundles, **options)

    monkeypatch.setattr(ray.util, "placement_group", placement_group)
    nodes.have(4)
    on = kde.RayCluster(nodes.cluster.address, runtime_env=ray_runs.RUNTIME_ENV)
    options = {"strategies": "multi_worker", "max_trials": 2, "doom": {"who": "node"} if loses else {}}
    name = f"trials of two, {loses}"
    given = {"args": (str(tmp_path),), "kwargs": options, "on": on, "environ": token(name), "workers_per_trial": 2}
    result, _ = search(search_runs.search, 1, nodes.lose if loses else None, **given)
    found = result.value
    assert {status for status, _, _ in found["trials"].values()} == {"COMPLETED"}
    assert len(found["trials"]) == 2
    assert result.allocation == "1 trial at once, as far as Ray has room, each by 2 workers of 1 CPU"
    assert found["evaluated"] == pytest.approx(found["best_score"], rel=1e-5)
    lines = search_runs.log(tmp_path)
    assert {line["replicas"] for line in lines} == {2}
    assert {line["worker_index"] for line in lines if line["what"] == "end"} == {0, 1}
    assert len([death for death in result.deaths if " was lost" in death.cause]) == loses
    assert sorted(set(groups)) == [1, 2], "the chief's, and those of a trial"
    assert_nothing_is_left(name, nodes)
