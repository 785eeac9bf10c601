"""Read the cluster that TF_CONFIG or a scheduler describes, and refuse what could not train.

What is wrong is found here as plain values, before TensorFlow opens any connection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from keras_dist_ext.errors import ClusterError
from keras_dist_ext.messages import close_name, counted

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = [
    "JOBS",
    "TF_CONFIG_EXAMPLE",
    "Cluster",
    "cluster_of",
    "mpi_cluster",
    "mpi_size",
    "task_count",
    "tf_config_cluster",
]

JOBS = ("chief", "worker", "ps", "evaluator")
TF_CONFIG_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'
)


@dataclass(frozen=True)
class Cluster:
    """Which processes train together, and which one this is; checked, so that TensorFlow will not hang.

    Raises:
        ClusterError: what TensorFlow would meet as a hang, or as an error that does not name the culprit.
    """

    source: str  # where this is from
    chief: tuple[str, ...] = ()  # addresses, host:port
    worker: tuple[str, ...] = ()
    ps: tuple[str, ...] = ()
    evaluator: tuple[str, ...] = ()
    task_type: str | None = None  # None: a coordinator of parameter servers, outside the cluster
    task_index: int = 0
    rpc_layer: str | None = None

    def __post_init__(self) -> None:
        """Check the addresses, then the task."""
        self._check_addresses()
        if len(self.chief) > 1:
            raise ClusterError(f"{self.source} lists {len(self.chief)} chiefs; there can be one. Make them workers.")
        if not self.num_workers:
            raise ClusterError(f"{self.source} lists no worker. List the addresses of the workers: {TF_CONFIG_EXAMPLE}")
        if self.task_type is None:
            if not self.ps:
                raise ClusterError(
                    f"{self.source} does not say which task this process is. Set its task type and index."
                )
        else:
            self._check_task(self.task_type)

    def _check_addresses(self) -> None:
        seen: dict[str, str] = {}
        for job in JOBS:
            for index, address in enumerate(self.addresses(job)):
                _check_address(self.source, f"{job} {index}", address)
                host, _, port = address.lower().rpartition(":")  # names of hosts are the same in capitals
                own = f"{host}:{int(port)}"
                if own in seen:
                    raise ClusterError(
                        f"{self.source} gives {address} to both {seen[own]} and {job} {index}. They would wait for "
                        "each other for up to an hour. Give each task an address of its own."
                    )
                seen[own] = f"{job} {index}"

    def _check_task(self, task_type: str) -> None:
        if task_type not in JOBS:
            raise ClusterError(
                f"{self.source} calls this process a {task_type!r}{_instead_of(task_type)} There are {', '.join(JOBS)}."
            )
        addresses = self.addresses(task_type)
        if not addresses and task_type != "evaluator":  # TensorFlow does not want an evaluator listed
            listed = ", ".join(job for job in JOBS if self.addresses(job))
            raise ClusterError(
                f"{self.source} calls this process {self.task}, but its cluster lists only {listed}. List the "
                f"{task_type} too, or correct the task."
            )
        if not 0 <= self.task_index < max(len(addresses), 1):
            listed = f", counted from 0: {', '.join(addresses)}" if addresses else ""
            raise ClusterError(
                f"{self.source} calls this process {self.task}, but lists {counted(len(addresses), task_type)}"
                f"{listed}. Correct the index, or list the address."
            )

    def addresses(self, job: str) -> tuple[str, ...]:
        """Return the addresses of a job, one of JOBS."""
        return {"chief": self.chief, "worker": self.worker, "ps": self.ps, "evaluator": self.evaluator}[job]

    @property
    def num_workers(self) -> int:
        """How many processes compute gradients: the chief, if any, and the workers."""
        return len(self.chief) + len(self.worker)

    @property
    def is_independent(self) -> bool:
        """Whether this process trains, or evaluates, by itself."""
        return self.task_type == "evaluator" or (self.num_workers == 1 and not self.ps)

    @property
    def task(self) -> str:
        """This process' part, such as `worker 1`."""
        return "the coordinator" if self.task_type is None else f"{self.task_type} {self.task_index}"


def _instead_of(job: str) -> str:
    """Suggest another name for a job, as the end of a sentence."""
    if job == "master":
        return ", which is TensorFlow 1's name of the chief: write 'chief' in 'cluster' and in 'task'."
    return close_name(job, JOBS) or "."


def _check_address(source: str, task: str, address: object) -> None:
    match = re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\]):([^:\s]*)", address) if isinstance(address, str) else None
    if match is None:
        raise ClusterError(f"{source} gives {task} the address {address!r}; {_how_to_write(address)}")
    if match[1].startswith("["):
        try:
            ipaddress.IPv6Address(match[1][1:-1])
        except ValueError as error:
            raise ClusterError(
                f"{source} gives {task} the address {address!r}, which is not an IPv6 address ({error}). Correct it."
            ) from error
    if not re.fullmatch("[0-9]{1,5}", match[2]) or not 1 <= int(match[2]) <= 65535:
        raise ClusterError(
            f"{source} gives {task} the address {address!r}, whose port is not a number from 1 to 65535. Correct it."
        )
    try:
        match[1].encode("idna")
    except UnicodeError as error:
        raise ClusterError(
            f"{source} gives {task} the address {address!r}, whose host is not a valid host name ({error}). Correct it."
        ) from error


def _how_to_write(address: object) -> str:
    """Say how to write an address that is none."""
    text = address if isinstance(address, str) else ""
    if "%" in text:
        return (
            "TensorFlow's gRPC does not connect to an address with a zone (%), so that workers would wait for each "
            "other without end. Write a host name, or an address without a zone, such as '[2001:db8::1]:2222'."
        )
    host, _, port = text.strip("[]").rpartition(":")
    if _is_ipv6(text.strip("[]")) and not (port.isdecimal() and _is_ipv6(host) and not text.startswith("[")):
        return f"write the port too: '[{text.strip('[]')}]:2222'."
    if _is_ipv6(host):
        return f"write an IPv6 address in brackets: '[{host}]:{port}'."
    return "write host:port, such as '10.0.0.1:2222' or '[2001:db8::1]:2222'."


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def cluster_of(make_resolver: Callable[[], tf.distribute.cluster_resolver.ClusterResolver], source: str) -> Cluster:
    """Ask one of TensorFlow's resolvers for the cluster.

    Args:
        make_resolver: makes it; its errors are reported as the source's.
        source: what messages call it.

    Raises:
        ClusterError: it does not describe a cluster, or one that could not train.
    """
    try:
        resolver = make_resolver()
        jobs: dict[str, list[str]] = resolver.cluster_spec().as_dict()  # Slurm's knows its task only after this
    except Exception as error:  # those of Kubernetes' client derive from nothing else
        raise ClusterError(f"{source} does not describe a cluster: {error}. Correct that, or set TF_CONFIG.") from error
    for job in jobs:
        if job not in JOBS:
            raise ClusterError(f"{source} lists a job {job!r}{_instead_of(job)} There are {', '.join(JOBS)}.")
    if resolver.task_type is not None and resolver.task_id is None:
        raise ClusterError(f"{source} calls this process a {resolver.task_type}, but not which one. Set its task id.")
    return Cluster(
        source,
        **{job: tuple(addresses) for job, addresses in jobs.items()},
        task_type=resolver.task_type,
        task_index=resolver.task_id or 0,
        rpc_layer=resolver.rpc_layer,
    )


def tf_config_cluster(environ: Mapping[str, str]) -> Cluster:
    """Read TF_CONFIG.

    Raises:
        ClusterError: it has another shape than TensorFlow takes for granted, or describes what could not train.
    """
    import tensorflow as tf

    _check_tf_config(environ["TF_CONFIG"])
    with _environment(environ, "TF_CONFIG"):
        return cluster_of(tf.distribute.cluster_resolver.TFConfigClusterResolver, "TF_CONFIG")


def _check_tf_config(text: str) -> None:
    """Raise unless the text has the shape that TFConfigClusterResolver takes for granted."""

    def refuse(found: str) -> NoReturn:
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        raise ClusterError(
            f"TF_CONFIG {found}: {shown!r}. Unset it to train in one process, or set it like {TF_CONFIG_EXAMPLE}"
        )

    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(f"is not JSON ({error})" if text.strip() else "is set but empty")
    if not isinstance(config, dict):
        refuse(f"is a JSON {_json_type(config)}, not an object")
    for key in ("cluster", "task"):
        if key not in config:
            refuse(f"lacks {key!r}")
        if not isinstance(config[key], dict):
            refuse(f"has a JSON {_json_type(config[key])}, not an object, as its {key!r}")
    if not any(config["cluster"].values()):
        refuse("has an empty 'cluster'")
    for job, addresses in config["cluster"].items():
        if not isinstance(addresses, list):
            refuse(f"has a JSON {_json_type(addresses)}, not a list, as the addresses of {job!r}")
        for index, address in enumerate(addresses):
            _check_address("TF_CONFIG", f"{job} {index}", address)
    for key in ("type", "index"):
        if key not in config["task"]:
            refuse(f"lacks {key!r} in its 'task'")
    if not re.fullmatch("-?[0-9]+", str(config["task"]["index"])):
        refuse(f"has the task index {config['task']['index']!r}, which is not an integer")
    if not isinstance(config["task"]["type"], str):
        refuse(f"has a JSON {_json_type(config['task']['type'])}, not a string, as the type of its 'task'")
    if not str(config.get("rpc_layer") or "grpc").startswith("grpc"):
        refuse(f"has the rpc_layer {config['rpc_layer']!r}, which is not 'grpc'")


def _json_type(value: object) -> str:
    return {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


@contextlib.contextmanager
def _environment(environ: Mapping[str, str], prefix: str) -> Iterator[None]:
    """Let TensorFlow's resolvers, which know only os.environ, read the variables of `environ`."""
    if environ is os.environ:
        yield
        return
    saved = {key: value for key, value in os.environ.items() if key.startswith(prefix)}
    given = {key: value for key, value in environ.items() if key.startswith(prefix)}
    try:
        _replace(saved, given)
        yield
    finally:
        _replace(given, saved)


def _replace(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    for key in old:
        os.environ.pop(key, None)
    os.environ.update(new)


def task_count(environ: Mapping[str, str], variable: str) -> int:
    """Read a number of tasks; 0 where there is none.

    Raises:
        ClusterError: the variable is not a number.
    """
    text = environ.get(variable, "0")
    if not re.fullmatch("[0-9]{1,9}", text):
        shown = text[:50]
        raise ClusterError(f"{variable} is {shown!r}, which is not a number of tasks. Unset it, or start with srun.")
    return int(text)


# MPI counts processes, and leaves their addresses to them: on one host these follow from what all processes know, and
# on several, processes tell each other through `mpi4py`.


_MPI_PORTS = range(20000, 30000)  # below those that Linux hands out by itself


@dataclass(frozen=True)
class _MpiVariables:
    """How an MPI gives each process its rank."""

    size: str
    rank: str
    local_size: str


_OPEN_MPI = _MpiVariables("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_HYDRA = _MpiVariables("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS")  # MPICH and Intel MPI; srun sets two of them


def mpi_size(environ: Mapping[str, str]) -> int:
    """Return how many processes `mpirun` has started with this one; 0 where it was not started by `mpirun`.

    Raises:
        ClusterError: the variable is not a number.
    """
    variables = _mpi_variables(environ)
    return 0 if variables is None else task_count(environ, variables.size)


def _mpi_variables(environ: Mapping[str, str]) -> _MpiVariables | None:
    return next((v for v in (_OPEN_MPI, _HYDRA) if v.size in environ and v.local_size in environ), None)


def mpi_cluster(environ: Mapping[str, str], exchange: Callable[[str], Sequence[str]] | None = None) -> Cluster:
    """Read what `mpirun` gives each of its processes; all of them must call this.

    Args:
        environ: where it is.
        exchange: gives this process' address to all, and returns those of all, by rank; by default `mpi4py` does.

    Raises:
        ClusterError: it does not describe a cluster, or the addresses are not known.
    """
    variables = _mpi_variables(environ)
    assert variables is not None
    if variables.rank not in environ:
        raise ClusterError(
            f"{variables.size} says that mpirun has started several processes, but {variables.rank}, which says which "
            "one this is, is not set. Start it by mpirun, or set TF_CONFIG."
        )
    size, rank, local_size = (
        task_count(environ, name) for name in (variables.size, variables.rank, variables.local_size)
    )
    if rank >= size:
        raise ClusterError(
            f"MPI calls this process {rank} of {size}, counted from 0. Start it by mpirun, or set TF_CONFIG."
        )
    if local_size == size:
        first = _MPI_PORTS[zlib.crc32(_mpi_job_of(environ).encode()) % (len(_MPI_PORTS) - size)]
        addresses = [f"127.0.0.1:{first + other}" for other in range(size)]
    else:
        addresses = list((exchange or _exchange_by_mpi4py)(_own_address()))
    return Cluster("MPI", worker=tuple(addresses), task_type="worker", task_index=rank, rpc_layer="grpc")


def _mpi_job_of(environ: Mapping[str, str]) -> str:
    """Return what the processes of a job on one host have in common, and other jobs have not."""
    return environ.get("PMIX_NAMESPACE") or str(os.getppid())


def _own_address() -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{socket.gethostname()}:{probe.getsockname()[1]}"


def _exchange_by_mpi4py(address: str) -> list[str]:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ClusterError(
            "mpirun started processes on several hosts, and MPI does not tell them each other's addresses. Install "
            "mpi4py, through which they exchange them, or set TF_CONFIG for each."
        ) from error
    addresses: list[str] = MPI.COMM_WORLD.allgather(address)
    return addresses
