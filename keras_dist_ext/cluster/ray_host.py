"""Run processes on the nodes of a Ray cluster: each in an actor, in a bundle of one placement group."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from keras_dist_ext import arguments
from keras_dist_ext.cluster import worker
from keras_dist_ext.cluster.failure import Failure, NotPlaced
from keras_dist_ext.cluster.host import Host, State, ValueLost, WaitForPlaces
from keras_dist_ext.cluster.ray_agent import Agent, Report
from keras_dist_ext.cluster.signals import interrupting_signals
from keras_dist_ext.cluster.tasks import Task, kinds, tasks_at
from keras_dist_ext.errors import LaunchError

__all__ = ["RayCluster", "pack_for_ray", "ray_hosts"]


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster on which `launch` runs its processes: ``kde.launch(4, ["train.py"], on=kde.RayCluster())``.

    Each process has the resources of one bundle of a placement group, which Ray spreads over nodes. Needs the extra
    ``ray`` here, and this package with all that the program imports on each node.

    Args:
        address: of the cluster, as `ray.init` takes it: "auto" finds the one that this machine is a node of.
        cpus_per_worker: of the resources that Ray counts.
        gpus_per_worker: Ray shows a worker its own alone. Parameter servers and their chief get none.
        runtime_env: as `ray.init` takes it. By default the current directory is sent to the nodes: ``{"working_dir":
            "."}``. Where this process is connected to Ray already, or of a Ray job with a ``working_dir``, that holds.

    Raises:
        LaunchError: an argument makes no cluster.
    """

    address: str = "auto"
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.address, str) or not self.address:
            arguments.refuse("address", self.address, "a string such as 'auto' or '10.0.0.1:6379'", LaunchError)
        for name, least in (("cpus_per_worker", 0.001), ("gpus_per_worker", 0.0)):
            arguments.number(
                name, getattr(self, name), least=least, most=float(arguments.MOST), wanted="a number", error=LaunchError
            )
        if self.runtime_env is not None:
            arguments.mapping("runtime_env", self.runtime_env, wanted="a dict, or None", error=LaunchError)


@contextmanager
def ray_hosts(cluster: RayCluster) -> Iterator[Callable[[WaitForPlaces], Host]]:
    """Connect this process to the cluster, unless it is, and yield what makes hosts there.

    Raises:
        LaunchError: there is no Ray here, or no such cluster.
    """
    _check_installed()
    import ray

    was_connected = ray.is_initialized()
    given = {"address": cluster.address != "auto", "runtime_env": cluster.runtime_env is not None}
    for name, is_given in given.items():
        if was_connected and is_given:
            raise LaunchError(
                f"This process is connected to Ray already, so {name} has no effect: give it to `ray.init`."
            )
    try:
        if not was_connected:
            _connect(cluster)
        yield lambda wait: RayHost(cluster, wait)
    finally:
        if not was_connected:
            ray.shutdown()


def _connect(cluster: RayCluster) -> None:
    import ray

    environ = _default_environ() if cluster.runtime_env is None else dict(cluster.runtime_env)
    try:
        with interrupting_signals():  # Ray sets a handler of its own, too
            ray.init(cluster.address, runtime_env=environ, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # of many kinds; and what it says may be long
        if isinstance(error, ConnectionError) or "connect to GCS" in str(error):
            raise LaunchError(
                f"There is no Ray cluster at address {cluster.address!r}: {error}\nStart one by `ray start --head`, "
                "and on each other machine `ray start --address=HEAD:6379`, or give the address of one."
            ) from error
        sent = "which is the current folder" if cluster.runtime_env is None else "of RayCluster"
        raise LaunchError(
            f"The Ray cluster at address {cluster.address!r} cannot be used with runtime_env={environ!r}, {sent}: "
            f"{error}"
        ) from error


def _default_environ() -> dict[str, Any]:
    """Send the current folder, unless this process is of a Ray job that has sent one: Ray refuses two."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    return {} if (job.get("runtime_env") or {}).get("working_dir") else {"working_dir": os.getcwd()}


def _bundles(cluster: RayCluster, num_workers: int, num_ps: int) -> list[dict[str, float]]:
    """Return the resources of each process."""
    cpus = {"CPU": cluster.cpus_per_worker}
    gpus = {"GPU": cluster.gpus_per_worker} if cluster.gpus_per_worker else {}
    return [cpus | (gpus if kind == "worker" else {}) for kind in kinds(num_workers, num_ps)]


def pack_for_ray(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call as Ray does: what is defined in a script travels with it, modules are imported there.

    Raises:
        LaunchError: there is no Ray here.
        ValueError: it cannot be pickled.
    """
    _check_installed()
    from ray import cloudpickle

    call = worker.pickled_call(cloudpickle.dumps, function, args, kwargs, advice="Pass it plain values.")
    return worker.packed(call)


def _check_installed() -> None:
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise LaunchError(
            "Launching on Ray needs the package ray here and on each node: pip install 'keras_dist_ext[ray]'."
        ) from error


class RayHost:
    """Runs processes on nodes of Ray; see `Host`.

    Args:
        cluster: what each gets.
        wait: see `WaitForPlaces`.
    """

    CLOSE_SECONDS = 15.0  # for all processes to be ended, with all that they have started
    MOST_SECONDS = 1.0  # between two reads: where more have passed, this process itself was held, as by Ctrl-Z

    def __init__(self, cluster: RayCluster, wait: WaitForPlaces):
        self._cluster, self._wait = cluster, wait
        self._group: Any = None
        self._agents: list[Any] = []
        self._nodes: list[str] = []
        self._processes: list[RayProcess] = []
        self._calls: dict[bytes, Any] = {}  # those that all nodes fetch
        self._noted = time.monotonic()

    def __enter__(self) -> "RayHost":
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray.exceptions import RayError

        lost = [process.agent for process in self._processes if process.is_lost]
        with suppress(RayError):
            prepared = self._agents if self._nodes else []
            closing = [agent.close.remote() for agent in prepared if agent not in lost]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=self.CLOSE_SECONDS)
        for agent in self._agents:
            with suppress(RayError):
                ray.kill(agent)
        if self._group is not None:
            with suppress(RayError):
                ray.util.remove_placement_group(self._group)

    def reserve(self, num_workers: int, num_ps: int) -> list[Task]:
        """Give each task a place and an address, when there is room for all."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = _bundles(self._cluster, num_workers, num_ps)
        self._group = ray.util.placement_group(bundles, strategy="SPREAD")
        self._wait_for(
            lambda: self._group.wait(0.1),
            f"Ray has no room for {len(bundles)} processes of {_resources(bundles[-num_ps - 1])} each; all that it has "
            f"is {_resources(ray.cluster_resources())}",
        )
        kind = ray.remote(Agent)
        self._agents = [
            kind.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=2,  # one reports, and others come between
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
            ).remote()
            for number, bundle in enumerate(bundles)
        ]
        asked = [agent.address.remote() for agent in self._agents]
        self._wait_for(
            lambda: len(ray.wait(asked, num_returns=len(asked), timeout=0.1)[0]) == len(asked),
            "Ray prepares its nodes",
        )
        try:
            addresses = ray.get(asked)
        except RayError as error:
            text = f"Ray could not prepare a node: {error}\nEach node needs Ray and keras_dist_ext, as they are here."
            raise NotPlaced(Failure(1, text)) from error
        self._nodes = [host for host, _ in addresses]
        return tasks_at([f"{host}:{port}" for host, port in addresses], num_workers, num_ps)

    def _wait_for(self, has_come: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        while not has_come():
            self._wait(time.monotonic() - began, what)

    def start(
        self, name: str, work: Sequence[str] | bytes | None, environ: Mapping[str, str], cpus: Sequence[int]
    ) -> "RayProcess":
        """Begin to start a process in the next bundle."""
        import ray

        del cpus
        if isinstance(work, bytes) and work not in self._calls:
            self._calls[work] = ray.put(work)
        sent = self._calls[work] if isinstance(work, bytes) else work
        number = len(self._processes)
        agent = self._agents[number]
        process = RayProcess(agent, self._nodes[number], agent.start.remote(name, sent, environ, sys.executable))
        self._processes.append(process)
        return process

    def read(self, seconds: float) -> list[tuple["RayProcess", bytes]]:
        """Return what processes have printed."""
        import ray

        pending = {process.awaited(): process for process in self._processes if not process.is_done}
        if not pending:
            time.sleep(seconds)
            return []
        ray.wait(list(pending), num_returns=1, timeout=seconds)
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        now = time.monotonic()
        passed, self._noted = min(now - self._noted, self.MOST_SECONDS), now
        found: list[tuple[RayProcess, bytes]] = []
        for ref, process in pending.items():
            found += [(process, data) for data in (process.take() if ref in ready else process.note_silence(passed))]
        return found

    def foresee_end(self) -> None:
        """See what all processes have started."""
        for process in self._processes:
            if not process.is_lost:
                process.agent.foresee_end.remote()


class RayProcess:
    """One process, on a node of Ray; see `HostedProcess`.

    Args:
        agent: runs it.
        node: its address.
        starting: the agent's answer when it has started it.
    """

    REPORT_SECONDS = 0.25  # that the agent waits for something to report
    ANSWER_SECONDS = 5.0  # for other calls
    VALUE_SECONDS = 600.0  # for what a function returned, which may be large
    NOTED_SECONDS = 3.0  # of silence of the agent, which other processes may fail of before it is lost
    LOST_SECONDS = 20.0  # of its silence

    def __init__(self, agent: Any, node: str, starting: Any):
        self.agent, self._node = agent, node
        self.is_lost = False
        self._is_starting, self._is_at_end = True, False
        self._awaited: Any = starting  # afterwards a report
        self._silence = 0.0  # seconds since the report was asked for
        self._state, self._is_stopped = State(), False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to report."""
        return self._is_at_end and self._state.exit_code is not None

    def awaited(self) -> Any:
        """Ask for the next report, unless an answer is due."""
        if self._awaited is None:
            self._awaited, self._silence = self.agent.report.remote(self.REPORT_SECONDS), 0.0
        return self._awaited

    def take(self) -> list[bytes]:
        """Take the answer that has come, and return what is printed in it; nothing at the end of the output.

        Raises:
            LaunchError: it cannot be started.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        ref, self._awaited = self._awaited, None
        was_starting, self._is_starting = self._is_starting, False
        try:
            report: Report = ray.get(ref)
        except RayTaskError as error:
            if was_starting:
                raise LaunchError(str(error.cause)) from error
            return self._lose(f"or Ray's process there, has failed ({_text(error)})")
        except RayError as error:
            return self._lose(f"or Ray's process there, has died ({_text(error)})")
        if was_starting:
            return []
        self._state, self._is_stopped = report.state, report.is_stopped
        return [report.data] * bool(report.data) + self._end(report.is_at_end)

    def _end(self, is_at_end: bool) -> list[bytes]:
        was_at_end, self._is_at_end = self._is_at_end, is_at_end
        return [b""] * (is_at_end and not was_at_end)

    def note_silence(self, seconds: float) -> list[bytes]:
        """Note that there was no report for some more seconds; after too many, take it for dead."""
        if self._is_starting:
            return []  # which may take long, as where the call is large
        self._silence += seconds
        if self._silence > self.LOST_SECONDS:
            return self._lose(f"or Ray's process there, has not answered for {self._silence:.0f} s")
        if self._silence > self.NOTED_SECONDS:
            self._state = self._state._replace(silent_seconds=self._silence)
        return []

    def _lose(self, why: str) -> list[bytes]:
        self.is_lost = True
        if self._state.exit_code is None:
            code = -signal.SIGKILL
            self._state = State(code, code, self._state.heartbeat, f"its node {self._node}, {why}")
        return self._end(True)

    def poll(self) -> State:
        """Return its state, of the last report."""
        return self._state

    def _call(self, method: str, *args: Any, otherwise: Any = None) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        if self.is_lost or self._is_starting or self._state.silent_seconds:
            return otherwise  # at once: those that answer need us
        try:
            return ray.get(self.agent.call.remote(method, *args), timeout=self.ANSWER_SECONDS)
        except GetTimeoutError:
            self._state = self._state._replace(silent_seconds=self.ANSWER_SECONDS)  # until the next report
            return otherwise
        except RayError:
            return otherwise

    @property
    def is_stopped(self) -> bool:
        """Whether it was held by a signal, at the last report."""
        return self._is_stopped

    def cpu_seconds(self) -> float:
        """Return how much of the CPU it has used."""
        return float(self._call("cpu_seconds", otherwise=0.0))

    def ask(self, signum: int) -> None:
        """Ask it to end."""
        self.send(signum, "ask")

    def send(self, signum: int, how: str = "send") -> None:
        """Send a signal to all of its session."""
        if self._is_starting and self._state.exit_code is None:  # its agent ends it, if it ever starts
            self._state, self._is_at_end = State(-signum, -signum), True
        self._call(how, signum)

    def ask_for_stacks(self) -> bool:
        """Have it write its stacks."""
        return bool(self._call("ask_for_stacks", otherwise=False))

    def stacks(self) -> str:
        """Return those that it has written so far."""
        return str(self._call("stacks", otherwise=""))

    def value(self) -> bytes:
        """Return what its function returned, pickled."""
        import ray
        from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

        if self.is_lost:
            raise ValueLost(f"node {self._node}, or Ray's process there, was lost after the function had returned")
        try:
            return bytes(ray.get(self.agent.call.remote("value"), timeout=self.VALUE_SECONDS))
        except RayTaskError as error:
            raise error.cause from error
        except GetTimeoutError as error:
            raise ValueLost(f"node {self._node} has not sent it within {self.VALUE_SECONDS:g} s") from error
        except (ObjectLostError, RayActorError) as error:
            raise ValueLost(f"node {self._node}, or Ray's process there, has died ({_text(error)})") from error


def _text(error: Exception) -> str:
    """Name an error of Ray's, and what it was caused by in our own code."""
    cause = getattr(error, "cause", None)
    return f"{type(error).__name__}: {cause}" if cause else type(error).__name__


def _resources(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts[name]:g} {name}" for name in ("CPU", "GPU") if amounts.get(name)) or "no CPU"
