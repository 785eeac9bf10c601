"""Build the strategy that was decided on: one object for a set of devices or a cluster in a process."""

import functools
import socket
from dataclasses import dataclass

import tensorflow as tf

from keras_dist_ext import arguments, versions
from keras_dist_ext._keras.cluster import is_initialized, set_cluster_timeout
from keras_dist_ext._keras.strategies import make_mirrored
from keras_dist_ext.cluster.rendezvous import (
    WAIT_SECONDS,
    other_tasks,
    set_wait_seconds,
    wait_for_ports,
    wait_for_workers,
)
from keras_dist_ext.cluster.spec import JOBS, Cluster
from keras_dist_ext.errors import ClusterError, StrategyError
from keras_dist_ext.strategy.decision import Decision
from keras_dist_ext.strategy.packs import note_bytes_per_pack
from keras_dist_ext.strategy.resources import TPU_VARIABLES, Resources, listed, of_type

__all__ = ["Communication", "build"]

TPU_PROBE_SECONDS = 5.0
_MOST_BYTES = 2**31 - 1  # of a pack


@dataclass(frozen=True)
class Communication:
    """How the workers of `multi_worker`, and the GPUs of `mirrored`, reduce.

    Raises:
        StrategyError: an option is not what it can be.
    """

    implementation: str = "auto"  # or "ring" or "nccl", in any case
    bytes_per_pack: int = 0  # how much is reduced at a time; 0 leaves it to TensorFlow
    timeout_seconds: float | None = None  # after which a collective fails

    def __post_init__(self) -> None:
        """Check each option."""
        given = self.implementation
        implementation = given.lower() if isinstance(given, str) else given
        arguments.one_of("implementation", implementation, ("auto", "ring", "nccl"), error=StrategyError)
        packed = self.bytes_per_pack
        arguments.integer("bytes_per_pack", packed, least=0, most=_MOST_BYTES, error=StrategyError)
        arguments.optional(arguments.seconds, "timeout_seconds", self.timeout_seconds, error=StrategyError)
        object.__setattr__(self, "implementation", implementation)


def build(
    decision: Decision, resources: Resources, communication: Communication, wait_seconds: float = WAIT_SECONDS
) -> tf.distribute.Strategy:
    """Make the strategy, or hand out the one that was made before for the same devices or cluster.

    Args:
        decision: what to make.
        resources: what it was decided on.
        communication: used by `multi_worker`; of `mirrored`, how much is reduced at a time.
        wait_seconds: for the other tasks of a cluster.

    Raises:
        StrategyError: TensorFlow is initialised already where it must not be, or the TPU is not available.
        ClusterError: the port of this task is taken, or other tasks do not start in time.
    """
    if decision.name == "one_device":
        _make_cpu_devices(decision.num_cpus_to_make, resources.devices)
        return _one_device(decision.devices[0])
    if decision.name == "mirrored":
        _make_cpu_devices(decision.num_cpus_to_make, resources.devices)
        return _mirrored(decision.devices, communication.bytes_per_pack)
    if decision.name == "tpu":
        assert resources.tpu is not None
        return _tpu(resources.tpu)
    assert resources.cluster is not None
    num_gpus = len(of_type("GPU", resources.devices))
    if decision.name == "multi_worker":
        return _multi_worker(resources.cluster, num_gpus, communication, wait_seconds)
    return _parameter_server(resources.cluster, num_gpus, wait_seconds)


def _make_cpu_devices(num_devices: int, existing: tuple[str, ...]) -> None:
    if not num_devices:
        return
    try:
        tf.config.set_logical_device_configuration(
            tf.config.get_visible_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * num_devices
        )
    except RuntimeError as error:
        raise StrategyError(
            f"num_replicas={num_devices} needs {num_devices} logical CPU devices, but TensorFlow is initialised "
            f"already and has {listed(existing)}. Call pick_strategy before anything else uses TensorFlow, or ask for "
            f"at most {len(of_type('CPU', existing))}."
        ) from error


@functools.cache
def _one_device(device: str) -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy(device)


def _mirrored(devices: tuple[str, ...], bytes_per_pack: int) -> tf.distribute.Strategy:
    key = frozenset(devices), bytes_per_pack  # in another order too they are the same
    if key not in _MIRRORED:
        _MIRRORED[key] = make_mirrored(devices)
        note_bytes_per_pack(_MIRRORED[key], bytes_per_pack)
    return _MIRRORED[key]


_MIRRORED: dict[tuple[frozenset[str], int], tf.distribute.Strategy] = {}


@functools.cache
def _tpu(tpu: str) -> tf.distribute.Strategy:
    resolver_class = tf.distribute.cluster_resolver.TPUClusterResolver
    try:
        if tpu != "local":
            for address in resolver_class(tpu).cluster_spec().as_dict()["worker"]:
                host, _, port = address.rpartition(":")
                # TensorFlow would try again for minutes.
                socket.create_connection((host, int(port)), timeout=TPU_PROBE_SECONDS).close()
        return tf.distribute.TPUStrategy(resolver_class.connect(tpu))
    except (OSError, ImportError, RuntimeError, ValueError, tf.errors.OpError) as error:
        raise StrategyError(
            f"The TPU {tpu!r} is not available: {str(error).partition(chr(10))[0]}. Check its name or address "
            f"(argument tpu, or one of {', '.join(TPU_VARIABLES)}), that it runs, and that this TensorFlow is built "
            "for TPUs."
        ) from error


def _multi_worker(
    cluster: Cluster, num_gpus: int, communication: Communication, wait_seconds: float
) -> tf.distribute.Strategy:
    key = (cluster, num_gpus, communication)
    if _JOINED and key not in _JOINED:
        raise StrategyError(
            "This process has joined a cluster already, with other addresses or communication options, and can join "
            "one only. Call pick_strategy with the same arguments as before."
        )
    if not _JOINED:
        _JOINED[key] = _join(cluster, num_gpus, communication, wait_seconds)
    set_wait_seconds(_JOINED[key], wait_seconds)
    return _JOINED[key]


# How this process has joined its cluster, if it has.
_JOINED: dict[tuple[Cluster, int, Communication], tf.distribute.Strategy] = {}


def _join(cluster: Cluster, num_gpus: int, communication: Communication, wait_seconds: float) -> tf.distribute.Strategy:
    if communication.implementation == "nccl" and not num_gpus:
        raise StrategyError("implementation='nccl' needs GPUs, and this worker has none. Use 'ring' or 'auto'.")
    with versions.naming("multi_worker"):  # stands on private Keras: imported for several workers only
        from keras_dist_ext.strategy.workers import workers_of
    _check_port_is_free(cluster)
    _check_not_started()
    wait_for_workers(cluster, wait_seconds)
    set_cluster_timeout({"chief": len(cluster.chief), "worker": len(cluster.worker)}, wait_seconds)
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            _resolver_of(cluster, num_gpus),
            tf.distribute.experimental.CommunicationOptions(
                bytes_per_pack=communication.bytes_per_pack,
                timeout_seconds=communication.timeout_seconds,
                implementation=communication.implementation.upper(),
            ),
        )
    except tf.errors.DeadlineExceededError as error:
        raise ClusterError(
            f"{cluster.task} and the others had found each other, but not all joined within {wait_seconds:g} s. "
            "Look for the first worker that has failed, and start all of them again."
        ) from error
    note_bytes_per_pack(strategy, communication.bytes_per_pack)
    workers_of(strategy)  # from here on they can tell each other where they are
    return strategy


def _check_not_started() -> None:
    """Raise, before others are waited for, where TensorFlow would refuse."""
    if is_initialized():
        raise StrategyError(
            "TensorFlow is initialised already, and a worker can join its cluster only before that. Call pick_strategy "
            "before anything else makes a tensor, a variable or a strategy."
        )


def _parameter_server(cluster: Cluster, num_gpus: int, wait_seconds: float) -> tf.distribute.Strategy:
    key = (cluster, num_gpus)
    if key not in _LED:
        _check_port_is_free(cluster)
        wait_for_ports(cluster, other_tasks(cluster), wait_seconds)
        _LED[key] = tf.distribute.ParameterServerStrategy(_resolver_of(cluster, num_gpus))
    return _LED[key]


_LED: dict[tuple[Cluster, int], tf.distribute.Strategy] = {}  # by this process, the chief


def _check_port_is_free(cluster: Cluster) -> None:
    """Raise when this task's port is taken; TensorFlow would not say which port it was."""
    if cluster.task_type is None:  # a coordinator outside the cluster takes any port
        return
    address = cluster.addresses(cluster.task_type)[cluster.task_index]
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"{cluster.source} gives {cluster.task} the address {address}, but port {port} of this machine is not "
                f"available ({error.strerror}). Is another run still alive? End it, or give the cluster another port."
            ) from error


def _resolver_of(cluster: Cluster, num_gpus: int) -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(cluster.addresses(job)) for job in JOBS if cluster.addresses(job)}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        num_accelerators={"GPU": num_gpus},
        rpc_layer=cluster.rpc_layer or "grpc",
    )
