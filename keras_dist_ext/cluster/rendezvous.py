"""Wait for the workers of a cluster before TensorFlow connects them, and name those that are missing.

What TensorFlow does by itself is not enough, measured with a limit of 8 s (``set_cluster_timeout``): the first worker
of TensorFlow 2.16.2 waits on for up to an hour, and the others' error names nobody; TensorFlow 2.21.0 names workers
that are missing, unless it is the first one. Neither lets Python hear of Ctrl-C meanwhile, and workers that were given
different clusters are connected without a word.

So the first worker opens its port for a moment; the others connect there and say which task they are, of which cluster;
and once all have, it releases them and closes the port, for TensorFlow's server to open it again. The others open
theirs meanwhile, and the first one connects to each: TensorFlow must reach them by these addresses. A port at which
TensorFlow's server answers already, that of a program without a rendezvous, counts as that worker.

    the first: "KDE-RENDEZVOUS 1"    another: {"task": "worker 1", "cluster": ...}    the first: nothing, or the error
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import selectors
import socket
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from keras_dist_ext import arguments
from keras_dist_ext.cluster.spec import JOBS, Cluster
from keras_dist_ext.errors import ClusterError, StrategyError

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = [
    "WAIT_SECONDS",
    "wait_for_ports",
    "checked_wait_seconds",
    "set_wait_seconds",
    "wait_for_workers",
    "other_tasks",
    "wait_seconds_of",
]

WAIT_SECONDS = 600.0  # TensorFlow's own is an hour
_LONGEST = 366 * 24 * 3600.0  # TensorFlow counts in milliseconds
_NOTICE_SECONDS = 30.0
_PROBE_SECONDS = 2.0
_SLACK_SECONDS = 10.0  # for the first worker to say which are missing
_BANNER = b"KDE-RENDEZVOUS 1\n"
_MOST_BYTES = 4096  # of a line


def checked_wait_seconds(wait_seconds: object) -> float:
    """Return how long to wait for other tasks.

    Raises:
        StrategyError: it is no positive number.
    """
    wanted = "a number of seconds"
    return arguments.number("wait_seconds", wait_seconds, above=0.0, most=_LONGEST, wanted=wanted, error=StrategyError)


def set_wait_seconds(strategy: tf.distribute.Strategy, wait_seconds: float) -> None:
    """Keep how long the workers of a strategy wait for each other where they begin something together."""
    _WAITS[strategy] = wait_seconds


def wait_seconds_of(strategy: tf.distribute.Strategy) -> float:
    """Return what was kept for a strategy."""
    return _WAITS.get(strategy, WAIT_SECONDS)


_WAITS: weakref.WeakKeyDictionary[tf.distribute.Strategy, float] = weakref.WeakKeyDictionary()


def other_tasks(cluster: Cluster) -> list[str]:
    """Return the other tasks that participate."""
    return [task for task in _addresses(cluster) if task != cluster.task]


def _addresses(cluster: Cluster) -> dict[str, str]:
    jobs = [job for job in JOBS if job != "evaluator"]
    return {f"{job} {index}": address for job in jobs for index, address in enumerate(cluster.addresses(job))}


class _WaitLimit:
    """How long to wait, with one warning that it takes long."""

    def __init__(self, cluster: Cluster, seconds: float, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._seconds = seconds
        self._clock = clock
        self._begin = clock()
        self._is_noticed = False

    def check(self, missing: dict[str, str], *, more_seconds: float = 0.0) -> None:
        """Raise when the time is over.

        Args:
            missing: tasks with their addresses, and what is known of them.
            more_seconds: to wait for.
        """
        waited = self._clock() - self._begin - more_seconds
        listed = ", ".join(f"{task} ({why})" for task, why in missing.items())
        if waited >= self._seconds:
            raise ClusterError(
                f"{self._cluster.task} has waited {self._seconds:g} s for {listed}. Start the program there, with the "
                f"same cluster as here; or correct the addresses in {self._cluster.source}, or what keeps their ports "
                "closed. Where tasks need longer to start, give pick_strategy(wait_seconds=...)."
            )
        if waited >= _NOTICE_SECONDS and not self._is_noticed:
            self._is_noticed = True
            warnings.warn(
                f"{self._cluster.task} waits for {listed}, for {waited:.0f} s so far. It gives up after "
                f"{self._seconds:g} s.",
                stacklevel=2,
            )


def wait_for_ports(
    cluster: Cluster, tasks: Sequence[str], wait_seconds: float, *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Wait until the ports of some tasks are open.

    Args:
        cluster: has their addresses.
        tasks: such as "worker 1".
        wait_seconds: for all of them.
        clock: seconds that only go forward.

    Raises:
        ClusterError: they have not opened in time; names them.
    """
    limit = _WaitLimit(cluster, wait_seconds, clock)
    addresses = _addresses(cluster)
    while True:
        closed: dict[str, str] = {}
        for task in tasks:
            try:
                _connect(addresses[task]).close()
            except OSError as error:
                closed[task] = f"{addresses[task]}: {_cause(error)}"
        if not closed:
            return
        limit.check(closed)
        time.sleep(0.2)


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS)


def _cause(error: OSError) -> str:
    return error.strerror or str(error) or "no answer"


def wait_for_workers(cluster: Cluster, wait_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Return once all workers of the cluster are up.

    Args:
        cluster: of workers only, whose port on this machine is free.
        wait_seconds: for all of them.
        clock: seconds that only go forward.

    Raises:
        ClusterError: some do not connect in time, or belong to another cluster; the same on all that have connected.
    """
    if not other_tasks(cluster):
        return
    limit = _WaitLimit(cluster, wait_seconds, clock)
    first = "chief 0" if cluster.chief else "worker 0"
    if cluster.task == first:
        _lead(cluster, limit)
    else:
        _join(cluster, _addresses(cluster)[first], first, limit)


def _digest(cluster: Cluster) -> str:
    return hashlib.sha256(json.dumps([list(cluster.addresses(job)) for job in JOBS]).encode()).hexdigest()[:16]


# The others


def _join(cluster: Cluster, address: str, first: str, limit: _WaitLimit) -> None:
    """Register with the first worker, and wait for its answer."""
    with _listener(cluster):  # for the first one to probe
        _register(cluster, address, first, limit)


def _register(cluster: Cluster, address: str, first: str, limit: _WaitLimit) -> None:
    hello = json.dumps({"task": cluster.task, "cluster": _digest(cluster)}).encode() + b"\n"
    why = "no answer"
    while True:
        try:
            with _connect(address) as connection:
                banner = _line(connection, len(_BANNER))
                if banner not in (b"", _BANNER):
                    return  # TensorFlow's server, of a program without a rendezvous
                if banner:
                    connection.sendall(hello)
                    answer = _answer(connection, limit, {first: f"{address}: it is up, and waits for others"})
                    if answer == b"\n":
                        return
                    if answer:
                        raise ClusterError(answer.decode(errors="replace").strip())
                why = "it has closed the connection"
        except OSError as error:
            why = _cause(error)
        limit.check({first: f"{address}: {why}"})
        time.sleep(0.2)


def _line(connection: socket.socket, most: int) -> bytes:
    """Receive up to the end of a line, or so many bytes; less where the other side closes, "?" where it is silent."""
    data = b""
    while len(data) < most and not data.endswith(b"\n"):
        try:
            received = connection.recv(1)
        except TimeoutError:
            return data or b"?"
        if not received:
            break
        data += received
    return data


def _answer(connection: socket.socket, limit: _WaitLimit, waits_for: dict[str, str]) -> bytes:
    """Wait for the line that releases this worker; empty where the connection is closed before."""
    connection.settimeout(0.5)
    while True:
        limit.check(waits_for, more_seconds=_SLACK_SECONDS)
        with contextlib.suppress(TimeoutError):
            if not connection.recv(1, socket.MSG_PEEK):
                return b""
            return _line(connection, _MOST_BYTES)


# The first


def _lead(cluster: Cluster, limit: _WaitLimit) -> None:
    """Wait until all others have registered and can be reached, and release them."""
    addresses = {task: address for task, address in _addresses(cluster).items() if task != cluster.task}
    registered: dict[str, socket.socket] = {}
    reached: set[str] = set()
    num_other_clients = 0  # TensorFlow's clients, of programs without a rendezvous
    with contextlib.ExitStack() as stack:
        connections = stack.enter_context(_Connections(_listener(cluster)))
        while True:
            for connection, line in connections.lines():
                if line.startswith(b"PRI "):  # how HTTP/2 begins, and with it gRPC
                    num_other_clients += 1
                    continue
                try:
                    hello = json.loads(line)
                    task, digest = str(hello["task"]), str(hello["cluster"])
                except (ValueError, LookupError, TypeError):
                    continue  # a stranger
                if task not in addresses or digest != _digest(cluster):
                    connections.refuse_all(
                        f"{task} has connected to {cluster.task}, but with another cluster. {cluster.source} must be "
                        "the same on all tasks, except for the task itself."
                    )
                registered[task] = connection
            registered = {task: connection for task, connection in registered.items() if connections.has(connection)}
            missing: dict[str, str] = {}
            for task, address in addresses.items():
                if task not in registered:
                    missing[task] = address
                elif task not in reached and (why := _probe(address)):
                    missing[task] = why
                else:
                    reached.add(task)
            if len(missing) <= num_other_clients:
                connections.release_all()
                return
            try:
                limit.check(missing)
            except ClusterError as error:
                connections.refuse_all(str(error), error)


def _probe(address: str) -> str:
    """Say why a worker that has registered cannot be reached; empty where it can."""
    try:
        _connect(address).close()
    except OSError as error:
        return f"{address}: it has connected, but cannot be reached there: {_cause(error)}"
    return ""


def _listener(cluster: Cluster) -> socket.socket:
    """Open the port of this task.

    Raises:
        ClusterError: another process has done so.
    """
    address = _addresses(cluster)[cluster.task]
    listener = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind(("", int(address.rpartition(":")[2])))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ClusterError(
            f"{cluster.source} gives {cluster.task} the address {address}, but its port cannot be opened here "
            f"({_cause(error)}). Does another process of this machine have the same task? Give each a task of its own."
        ) from error
    return listener


class _Connections:
    """The connections to a port, and the first line of each."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._received: dict[socket.socket, bytes] = {}

    def __enter__(self) -> _Connections:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._received):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def has(self, connection: socket.socket) -> bool:
        """Whether a connection is still open."""
        return connection in self._received

    def lines(self) -> Iterator[tuple[socket.socket, bytes]]:
        """Wait a moment, and yield lines that have arrived."""
        for key, _ in self._selector.select(timeout=0.2):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                connection, _ = self._listener.accept()
                connection.settimeout(_PROBE_SECONDS)
                self._received[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ)
                with contextlib.suppress(OSError):
                    connection.sendall(_BANNER)
                continue
            try:
                data = connection.recv(_MOST_BYTES)
            except OSError:
                data = b""
            before = self._received[connection]
            if not data or len(before) > _MOST_BYTES:
                self._drop(connection)
                continue
            self._received[connection] = before + data
            if b"\n" in data and b"\n" not in before:
                yield connection, self._received[connection].partition(b"\n")[0]

    def release_all(self) -> None:
        """Release all workers."""
        self._send(b"\n")

    def refuse_all(self, message: str, error: ClusterError | None = None) -> None:
        """Send an error to all workers, and raise it.

        Raises:
            ClusterError: always.
        """
        self._send(message.encode() + b"\n")
        raise error or ClusterError(message)

    def _send(self, line: bytes) -> None:
        """Send a line, and let them hang up first: so no port here is kept busy by a connection that was closed."""
        for connection in self._received:
            with contextlib.suppress(OSError):
                connection.sendall(line)
        for connection in self._received:
            with contextlib.suppress(OSError):
                while connection.recv(_MOST_BYTES):
                    pass

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._received.pop(connection)
        connection.close()
