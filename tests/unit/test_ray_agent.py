"""The actor that runs a process on a node of Ray's, here without Ray: it is a host of one real process."""

import os
import sys
import time
import types

import psutil
import pytest
from launching import linux, wait_until

from keras_dist_ext.cluster.ray_agent import Agent
from keras_dist_ext.cluster.worker import pack_call, read_value

pytestmark = [linux, pytest.mark.timeout(60)]


@pytest.fixture
def agent(temporary):
    agent = Agent()
    yield agent
    agent.close()


def python(agent, code, **environ):
    agent.start("worker 0", [sys.executable, "-c", code], environ, sys.executable)


def all_reports(agent):
    """Return the reports until there is nothing more to report."""
    reports = []
    while not reports or not reports[-1].is_at_end or reports[-1].state.exit_code is None:
        reports.append(agent.report(5.0))
    return reports


def printed(reports):
    return b"".join(report.data for report in reports).decode()


def half(number):
    return number / 2


def test_the_launchers_interpreter_becomes_that_of_the_node(agent):
    code = "import os, sys; print(sys.executable, os.environ['MINE'], os.environ['HOME'])"
    agent.start("worker 0", ["/only/there/python", "-c", code], {"MINE": "mine"}, "/only/there/python")
    assert printed(all_reports(agent)) == f"{sys.executable} mine {os.environ['HOME']}\n"


@pytest.mark.slow
def test_another_program_runs_as_it_is_named(agent):
    agent.start("worker 0", ["sh", "-c", "exit 3"], {}, sys.executable)
    assert all_reports(agent)[-1].state[:2] == (3, 3)


def test_what_a_function_returned_is_there_when_it_has_ended(agent):
    agent.start("worker 0", pack_call(half, (3,), {}), {}, sys.executable)
    assert all_reports(agent)[-1].state.exit_code == 0
    assert read_value(agent.call("value")) == 1.5


@pytest.mark.slow
def test_a_report_waits_for_the_first_output_and_no_longer_than_it_may(agent):
    python(agent, "import os, time; time.sleep(0.3); os.write(1, b'a step'); time.sleep(60)")
    assert agent.report(0.0).data == b""
    assert agent.report(30.0)[:2] == (b"a step", False)
    began = time.monotonic()
    assert agent.report(0.1)[:2] == (b"", False)
    assert 0.1 <= time.monotonic() - began < 30.0  # the process runs on for a minute


def test_after_the_last_output_a_report_waits_for_the_end(agent):
    python(agent, "import os, time; os.close(1); os.close(2); time.sleep(0.5); os._exit(0)")
    began = time.monotonic()
    report = agent.report(50.0)
    assert (report.data, report.is_at_end, report.state.exit_code) == (b"", True, 0)
    assert time.monotonic() - began < 30.0


@pytest.mark.slow
def test_a_process_that_prints_no_more_but_runs_on_holds_up_no_report(agent):
    python(agent, "import os, time; os.close(1); os.close(2); time.sleep(60)")
    wait_until(lambda: agent.report(0.05).is_at_end)
    began = time.monotonic()
    assert agent.report(0.1).state.exit_code is None
    assert 0.1 <= time.monotonic() - began < 30.0  # the process runs on for a minute


@pytest.mark.slow
def test_much_output_comes_in_several_reports_that_are_small(agent, monkeypatch):
    python(agent, "print('x' * 500_000)")
    assert printed(all_reports(agent)) == "x" * 500_000 + "\n"
    monkeypatch.setattr(agent, "_is_at_end", False)
    monkeypatch.setattr(agent._host, "read", lambda seconds: [(agent._process, b"x" * 20_000)])  # as fast as it is read
    assert len(agent.report(1.0).data) == 40_000


@pytest.mark.slow
def test_what_a_process_has_started_ends_with_its_agent_though_it_has_left_its_session_and_environment(temporary):
    agent = Agent()
    start = "subprocess.Popen(['sleep', '60'], env={}, start_new_session=True)"
    python(agent, f"import subprocess, time; print({start}.pid, flush=True); time.sleep(60)")
    try:
        child = psutil.Process(int(agent.report(30.0).data))
        agent.foresee_end()
    finally:
        agent.close()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_worker_gets_the_nodes_address_and_a_port_there(agent, monkeypatch):
    util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(util=util))
    ip, port = agent.address()
    assert ip == "10.0.0.7"
    assert 1024 <= port < 65536
