"""Workers wait for each other over sockets, and mind whatever else comes to their ports; one side is made up here.

`tests/core/test_failures.py` has workers on both sides.
"""

import json
import socket
import struct
import threading
import time

import pytest
from launching import wait_until

import keras_dist_ext as kde
from keras_dist_ext.cluster import rendezvous
from keras_dist_ext.cluster.spec import Cluster
from keras_dist_ext.cluster.tasks import cluster

pytestmark = pytest.mark.timeout(60)
BANNER = b"KDE-RENDEZVOUS 1\n"


@pytest.fixture
def workers():
    """Two workers, whose ports no other process is handed meanwhile."""
    with cluster(2, 0) as tasks:
        addresses = tuple(task.address for task in tasks)
        yield [Cluster("TF_CONFIG", worker=addresses, task_type="worker", task_index=index) for index in (0, 1)]


def port_of(worker):
    return int(worker.worker[worker.task_index].rpartition(":")[2])


class Waiting:
    """A worker that waits for the others, in a thread."""

    def __init__(self, worker):
        self.error = ""
        self._thread = threading.Thread(target=self._wait, args=(worker,), daemon=True)
        self._thread.start()

    def _wait(self, worker):
        try:
            rendezvous.wait_for_workers(worker, 50.0)
        except kde.ClusterError as error:
            self.error = str(error)

    def end(self):
        """Wait for its end, and return its error."""
        self._thread.join(50)
        assert not self._thread.is_alive()
        return self.error

    @property
    def waits(self):
        return self._thread.is_alive()


def accept(first):
    """Take the next connection of another worker, as the first one does."""
    connection, _ = first.accept()
    connection.settimeout(30)
    return connection


def test_a_first_worker_that_closes_the_connection_is_asked_again_until_it_answers(workers):
    """As while the first one starts, and ends once more before all are there."""
    with socket.create_server(("127.0.0.1", port_of(workers[0]))) as first:
        second = Waiting(workers[1])
        accept(first).close()  # without a word
        with accept(first) as connection:
            connection.sendall(BANNER)
            assert connection.recv(1000).endswith(b"\n")  # it has registered
        with accept(first) as connection:
            connection.sendall(BANNER)
            hello = json.loads(connection.recv(1000))
            assert hello["task"] == "worker 1"
            assert second.waits
            connection.sendall(b"\n")
        assert second.end() == ""


def test_a_first_worker_that_refuses_says_why(workers):
    with socket.create_server(("127.0.0.1", port_of(workers[0]))) as first:
        second = Waiting(workers[1])
        with accept(first) as connection:
            connection.sendall(BANNER)
            connection.recv(1000)
            connection.sendall("worker 0 gives up: böse\n".encode())
        assert second.end() == "worker 0 gives up: böse"


def test_a_server_that_says_nothing_at_all_counts_as_the_first_worker(workers, monkeypatch):
    """One without a rendezvous, which waits for its client to begin."""
    monkeypatch.setattr(rendezvous, "_PROBE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", port_of(workers[0]))):
        assert Waiting(workers[1]).end() == ""


def connected_to(worker):
    """Connect to the first worker once its port is open."""
    found = []

    def is_open():
        try:
            found.append(socket.create_connection(("127.0.0.1", port_of(worker)), timeout=30))
        except ConnectionRefusedError:
            return False
        return True

    wait_until(is_open)
    assert found[0].recv(1000) == BANNER
    return found[0]


def hangs_up(connection):
    """Whether the first worker closes a connection; it must be closed here, too."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("dual_stack", [True, False])
def test_strangers_at_the_port_of_the_first_worker_are_not_in_the_way(workers, dual_stack, monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dual_stack and socket.has_ipv6)
    first = Waiting(workers[0])
    other = [connected_to(workers[0]) for _ in range(4)]
    other[0].sendall(b'["worker 1"]\n')  # of another protocol
    other[1].sendall(b"GET / HTTP/1.1\r\nHost: worker-0\r\n\r\n")
    other[1].sendall(b"and more\n")
    other[2].sendall(b"x" * 3000)
    other[2].sendall(b"x" * 3000)  # without an end
    other[3].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other[3].close()  # with a reset
    for _ in range(100):
        try:
            other[2].sendall(b"x")
        except OSError:
            break
        if not first.waits:
            break
        threading.Event().wait(0.01)
    assert hangs_up(other[2]), "a line has an end"
    assert first.waits, "worker 1 is missing"
    second = Waiting(workers[1])
    wait_until(lambda: not second.waits)
    for connection in other:
        connection.close()
    assert (first.end(), second.end()) == ("", "")


def test_a_program_without_a_rendezvous_counts_once_however_much_it_sends(workers):
    """TensorFlow's client, which cannot say which worker it is."""
    with cluster(1, 0) as (third,):
        addresses = (*workers[0].worker, third.address)
        three = [Cluster("TF_CONFIG", worker=addresses, task_type="worker", task_index=index) for index in (0, 1)]
        first = Waiting(three[0])
        with connected_to(three[0]) as client:
            for part in (b"PRI * HTTP/2.0\r\n", b"\r\nSM\r\n\r\n"):
                client.sendall(part)
                time.sleep(0.3)
            assert first.waits, "one of the other two is missing"
            second = Waiting(three[1])
            assert client.recv(1000) == b"\n", "all are released"
        assert (first.end(), second.end()) == ("", "")


def test_what_others_still_send_when_all_are_there_is_read_to_its_end(workers):
    """Else their connections would keep the port of the first worker busy, which TensorFlow's server opens next."""
    first = Waiting(workers[0])
    stranger = connected_to(workers[0])
    second = Waiting(workers[1])
    stranger.sendall(b"one line\n")
    assert stranger.recv(1000) == b"\n", "all are released"
    stranger.sendall(b"more")
    stranger.close()
    assert (first.end(), second.end()) == ("", "")
    socket.create_server(("", port_of(workers[0]))).close()
