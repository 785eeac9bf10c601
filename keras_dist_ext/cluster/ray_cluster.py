"""A Ray cluster to launch on: what each process gets there, and the connection to it."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from keras_dist_ext import arguments
from keras_dist_ext.aliases import JsonValue, Picklable
from keras_dist_ext.cluster import worker
from keras_dist_ext.cluster.signals import interrupting_signals
from keras_dist_ext.errors import LaunchError

__all__ = ["RayCluster", "connected", "pack_for_ray"]


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster on which `launch` runs its processes: ``kde.launch(4, ["train.py"], on=kde.RayCluster())``.

    Each process has the resources of one bundle of a placement group, which Ray spreads over nodes. Needs the extra
    ``ray`` here, and this package with all that the program imports on each node.

    Args:
        address: of the cluster, as `ray.init` takes it: "auto" finds the one that this machine is a node of.
        cpus_per_worker: of the resources that Ray counts.
        gpus_per_worker: Ray shows a worker its own alone. Parameter servers and chiefs get none.
        runtime_env: as `ray.init` takes it. By default the current directory is sent to the nodes: ``{"working_dir":
            "."}``. Where this process is connected to Ray already, or of a Ray job with a ``working_dir``, that holds.

    Raises:
        LaunchError: an argument makes no cluster.
    """

    address: str = "auto"
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    runtime_env: Mapping[str, JsonValue] | None = None

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
def connected(cluster: RayCluster) -> Iterator[None]:
    """Connect this process to the cluster, unless it is connected to Ray already.

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
        yield
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


def _default_environ() -> dict[str, JsonValue]:
    """Send the current folder, unless this process is of a Ray job that has sent one: Ray refuses two."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    return {} if (job.get("runtime_env") or {}).get("working_dir") else {"working_dir": os.getcwd()}


def pack_for_ray(
    function: Callable[..., Picklable], args: Sequence[Picklable], kwargs: Mapping[str, Picklable]
) -> bytes:
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
