"""Read the cluster that MPI's `mpirun` starts: it counts processes, and leaves their addresses to them.

On one host the addresses follow from what all processes know. On several, they tell each other through `mpi4py`.
"""

import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from keras_dist_ext.cluster.spec import Cluster, task_count
from keras_dist_ext.errors import ClusterError

__all__ = ["mpi_cluster", "mpi_size"]

_PORTS = range(20000, 30000)  # below those that Linux hands out by itself


@dataclass(frozen=True)
class _Variables:
    """How an MPI tells each process its place."""

    size: str
    rank: str
    local_size: str


_OPEN_MPI = _Variables("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_HYDRA = _Variables("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS")  # of MPICH and Intel MPI; srun sets the first two alone


def mpi_size(environ: Mapping[str, str]) -> int:
    """Return how many processes `mpirun` has started with this one; 0 where it was not started by `mpirun`.

    Raises:
        ClusterError: the variable is no number.
    """
    variables = _variables(environ)
    return 0 if variables is None else task_count(environ, variables.size)


def _variables(environ: Mapping[str, str]) -> _Variables | None:
    return next((v for v in (_OPEN_MPI, _HYDRA) if v.size in environ and v.local_size in environ), None)


def mpi_cluster(environ: Mapping[str, str], tell: Callable[[str], Sequence[str]] | None = None) -> Cluster:
    """Read what `mpirun` tells each of its processes; all of them must call this.

    Args:
        environ: where it is.
        tell: gives this process' address to all, and returns those of all, by rank; by default `mpi4py` does.

    Raises:
        ClusterError: it describes no cluster, or the addresses cannot be known.
    """
    variables = _variables(environ)
    assert variables is not None
    if variables.rank not in environ:
        raise ClusterError(
            f"{variables.size} says that mpirun has started several processes, but {variables.rank}, which tells which "
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
        first = _PORTS[zlib.crc32(_job_of(environ).encode()) % (len(_PORTS) - size)]
        addresses = [f"127.0.0.1:{first + other}" for other in range(size)]
    else:
        addresses = list((tell or _tell_by_mpi4py)(_own_address()))
    return Cluster("MPI", worker=tuple(addresses), task_type="worker", task_index=rank, rpc_layer="grpc")


def _job_of(environ: Mapping[str, str]) -> str:
    """Return what the processes of a job on one host have in common, and other jobs have not."""
    return environ.get("PMIX_NAMESPACE") or str(os.getppid())


def _own_address() -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{socket.gethostname()}:{probe.getsockname()[1]}"


def _tell_by_mpi4py(address: str) -> list[str]:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ClusterError(
            "mpirun started processes on several hosts, and MPI does not tell them each other's addresses. Install "
            "mpi4py, by which they tell them each other, or set TF_CONFIG for each."
        ) from error
    addresses: list[str] = MPI.COMM_WORLD.allgather(address)
    return addresses
