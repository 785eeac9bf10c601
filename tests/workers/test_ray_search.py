"""Search on Ray, on a real cluster of nodes on this machine: all trials end, whichever node is lost.

pip install '.[test,ray]' && python -m pytest -m ray tests/workers/test_ray_search.py
"""

import io
import re
import sys
import threading
from pathlib import Path

import psutil
import pytest
import ray_runs
import search_runs
from launching import wait_until
from ray_nodes import assert_nothing_is_left, token

import keras_dist_ext as kde

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
        loses(int(re.search(r"accident of \d+ of (\d+)", stream.getvalue())[1]))
        thread.join()
    finally:
        sys.stdout.write(stream.getvalue())  # pytest shows it where a test fails
    (result,) = results
    return result, stream.getvalue()


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
