"""Choose a tf.distribute strategy for the devices at hand, and say why.

    gather_facts(environ) -> Facts -> decide(name, facts) -> Decision -> pick_strategy builds it -> StrategyChoice

Facts and decisions are plain values: what can be checked is checked on them, before TensorFlow starts or connects.
"""

import functools
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from keras_dist_ext.cluster import (
    JOBS,
    TF_CONFIG_EXAMPLE,
    Cluster,
    Resolver,
    close_name,
    cluster_of,
    counted,
    slurm_cluster,
    task_count,
    tf_config_cluster,
)
from keras_dist_ext.errors import ClusterError, StrategyError

__all__ = ["pick_strategy", "StrategyChoice", "list_devices", "gather_facts", "Facts", "decide", "Decision"]

NAMES = ("auto", "one_device", "mirrored", "multi_worker", "tpu", "parameter_server")
TPU_VARIABLES = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "COLAB_TPU_ADDR")
TPU_PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy that is ready to use, what it is called here, and why it was chosen."""

    strategy: tf.distribute.Strategy = field(repr=False)
    name: str  # one of NAMES, never "auto"
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def list_devices() -> tuple[str, ...]:
    """List the logical devices that TensorFlow has, or will have, such as `CPU:0`, without initialising it."""
    count: Counter[str] = Counter()
    names = []
    for physical in tf.config.get_visible_devices():
        for _ in tf.config.get_logical_device_configuration(physical) or [None]:
            names.append(f"{physical.device_type}:{count[physical.device_type]}")
            count[physical.device_type] += 1
    return tuple(names)


def pick_strategy(
    name: str = "auto",
    *,
    devices: Sequence[str] | None = None,
    num_replicas: int | None = None,
    cluster_resolver: Resolver | None = None,
    tpu: str | None = None,
    implementation: str = "auto",
    bytes_per_pack: int = 0,
    timeout_seconds: float | None = None,
    environ: Mapping[str, str] = os.environ,
    device_lister: Callable[[], Sequence[str]] = list_devices,
) -> StrategyChoice:
    """Pick the strategy that is asked for, or the one that fits this process, and say why.

    `"auto"` takes, in this order: the cluster that `cluster_resolver`, TF_CONFIG or a SLURM step of several tasks
    describes; `devices` or `num_replicas`; a TPU; all GPUs; all logical CPU devices. One object is made for a set of
    devices in a process, and handed out again (tensorflow#62790: a second MirroredStrategy reuses collective keys).

        >>> choice = pick_strategy("mirrored", num_replicas=2, environ={})
        >>> choice.strategy.num_replicas_in_sync
        2
        >>> pick_strategy("mirrored", num_replicas=2, environ={}).strategy is choice.strategy
        True
        >>> pick_strategy("miror", environ={})
        Traceback (most recent call last):
        keras_dist_ext.errors.StrategyError: There is no strategy 'miror'; did you mean 'mirrored'? There are ...

    `one_device` is a OneDeviceStrategy. On a CPU, hundreds of models in one process have crashed TensorFlow when their
    datasets went through `experimental_distribute_dataset` of that strategy; ours do not.

    Args:
        name: one of `auto`, `one_device`, `mirrored`, `multi_worker`, `tpu`, `parameter_server`.
        devices: logical devices of this process, such as `["GPU:0", "GPU:1"]`, for `one_device` and `mirrored`.
        num_replicas: the first so many GPUs; without GPUs, so many logical CPU devices, which are made if TensorFlow is
            not initialised yet.
        cluster_resolver: a resolver of TensorFlow's, say KubernetesClusterResolver, to be asked instead of TF_CONFIG
            and SLURM. (SLURM: give each task GPUs of its own, --gpus-per-task.)
        tpu: name or `grpc://` address of a TPU, or `local`; otherwise TPU_NAME and its like are read.
        implementation: of the collectives of `multi_worker`: `auto`, `ring` or `nccl`. With `auto` as the name, this
            and the next two count when several workers train, and the reason says when they do not.
        bytes_per_pack: how much `multi_worker` reduces at a time; 0 leaves it to TensorFlow.
        timeout_seconds: after which a collective of `multi_worker` fails. TensorFlow spends a thread on each collective
            for it, so use it for debugging.
        environ: where TF_CONFIG, SLURM's and the TPU's variables are read.
        device_lister: lists the logical devices of this process.

    Raises:
        StrategyError: the strategy cannot be had here; the message names what there is.
        ClusterError: TF_CONFIG, SLURM or the resolver describes no cluster that could train.
    """
    communication = _check_communication(implementation, bytes_per_pack, timeout_seconds)
    facts = gather_facts(environ, cluster_resolver=cluster_resolver, tpu=tpu, device_lister=device_lister)
    decision = decide(name, facts, devices=devices, num_replicas=num_replicas)
    reason = decision.reason
    if communication != _Communication() and decision.name != "multi_worker":
        if name != "auto":
            raise StrategyError(
                f"implementation, bytes_per_pack and timeout_seconds tune the collectives of 'multi_worker'; {name!r} "
                "takes none of them. Leave them out."
            )
        reason += "; communication options unused"
    return StrategyChoice(_build(decision, facts, communication), decision.name, reason)


@dataclass(frozen=True)
class _Communication:
    implementation: str = "AUTO"
    bytes_per_pack: int = 0
    timeout_seconds: float | None = None


def _check_communication(implementation: str, bytes_per_pack: int, timeout_seconds: float | None) -> _Communication:
    if not isinstance(implementation, str) or implementation.upper() not in ("AUTO", "RING", "NCCL"):
        raise StrategyError(f"implementation is {implementation!r}; there are 'auto', 'ring' and 'nccl'.")
    if not _is_int(bytes_per_pack) or bytes_per_pack < 0:
        raise StrategyError(f"bytes_per_pack is {bytes_per_pack!r}; give a number of bytes, or 0 for TensorFlow's own.")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise StrategyError(f"timeout_seconds is {timeout_seconds!r}; give a positive number of seconds, or None.")
    return _Communication(implementation.upper(), bytes_per_pack, timeout_seconds)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _build(decision: "Decision", facts: "Facts", communication: _Communication) -> tf.distribute.Strategy:
    if decision.name == "one_device":
        _make_cpu_devices(decision.num_cpus_to_make, facts.devices)
        return _one_device(decision.devices[0])
    if decision.name == "mirrored":
        _make_cpu_devices(decision.num_cpus_to_make, facts.devices)
        return _mirrored(decision.devices)
    if decision.name == "tpu":
        assert facts.tpu is not None
        return _tpu(facts.tpu)
    assert facts.cluster is not None
    num_gpus = len(_of_type("GPU", facts.devices))
    if decision.name == "multi_worker":
        return _multi_worker(facts.cluster, num_gpus, communication)
    return _parameter_server(facts.cluster, num_gpus)


def _make_cpu_devices(num_devices: int, existing: Sequence[str]) -> None:
    if not num_devices:
        return
    try:
        tf.config.set_logical_device_configuration(
            tf.config.get_visible_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * num_devices
        )
    except RuntimeError as error:
        raise StrategyError(
            f"num_replicas={num_devices} needs {num_devices} logical CPU devices, but TensorFlow is initialised "
            f"already and has {_listed(existing)}. Call pick_strategy before anything else uses TensorFlow, or ask for "
            f"at most {len(_of_type('CPU', existing))}."
        ) from error


@functools.cache
def _one_device(device: str) -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy(device)


@functools.cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(list(devices))


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
            f"The TPU {tpu!r} cannot be had: {str(error).partition(chr(10))[0]}. Check its name or address (argument "
            f"tpu, or one of {', '.join(TPU_VARIABLES)}), that it runs, and that this TensorFlow is built for TPUs."
        ) from error


@functools.cache
def _multi_worker(cluster: "Cluster", num_gpus: int, communication: _Communication) -> tf.distribute.Strategy:
    if _multi_worker.cache_info().currsize:
        raise StrategyError(
            "This process has joined a cluster already, with other addresses or communication options, and can join "
            "one only. Call pick_strategy with the same arguments as before."
        )
    if communication.implementation == "NCCL" and not num_gpus:
        raise StrategyError("implementation='nccl' needs GPUs, and this worker has none. Use 'ring' or 'auto'.")
    _check_port_is_free(cluster)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(
            _resolver_of(cluster, num_gpus),
            tf.distribute.experimental.CommunicationOptions(
                bytes_per_pack=communication.bytes_per_pack,
                timeout_seconds=communication.timeout_seconds,
                implementation=communication.implementation,
            ),
        )
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise StrategyError(
            "TensorFlow is initialised already, and a worker can join its cluster only before that. Call pick_strategy "
            "before anything else makes a tensor, a variable or a strategy."
        ) from error


@functools.cache
def _parameter_server(cluster: "Cluster", num_gpus: int) -> tf.distribute.Strategy:
    _check_port_is_free(cluster)
    return tf.distribute.ParameterServerStrategy(_resolver_of(cluster, num_gpus))


def _check_port_is_free(cluster: "Cluster") -> None:
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
                f"{cluster.source} gives {cluster.task} the address {address}, but port {port} of this machine cannot "
                f"be had ({error.strerror}). Is another run still alive? End it, or give the cluster another port."
            ) from error


def _resolver_of(cluster: "Cluster", num_gpus: int) -> Resolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(cluster.addresses(job)) for job in JOBS if cluster.addresses(job)}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        num_accelerators={"GPU": num_gpus},
        rpc_layer=cluster.rpc_layer or "grpc",
    )


@dataclass(frozen=True)
class Facts:
    """What a choice depends on."""

    devices: tuple[str, ...]  # logical devices of this process
    cluster: "Cluster | None" = None  # None: this process trains alone
    tpu: str | None = None  # how to reach it: "local", a name, or grpc://host:port
    num_slurm_tasks: int = 0  # tasks of the SLURM allocation, when srun did not start this process; 0: no such thing


def gather_facts(
    environ: Mapping[str, str] = os.environ,
    *,
    cluster_resolver: Resolver | None = None,
    tpu: str | None = None,
    device_lister: Callable[[], Sequence[str]] = list_devices,
) -> Facts:
    """Read what a choice depends on; start and connect nothing.

    Raises:
        ClusterError: TF_CONFIG, SLURM or the resolver describes no cluster that could train.
    """
    devices = tuple(device_lister())
    cluster, num_slurm_tasks = None, 0
    if cluster_resolver is not None:
        cluster = cluster_of(lambda: cluster_resolver, type(cluster_resolver).__name__)
    elif "TF_CONFIG" in environ:
        cluster = tf_config_cluster(environ)
    elif task_count(environ, "SLURM_STEP_NUM_TASKS") > 1:
        cluster = slurm_cluster(environ)
    elif "SLURM_STEP_NUM_TASKS" not in environ and (num_tasks := task_count(environ, "SLURM_NTASKS")) > 1:
        num_slurm_tasks = num_tasks
    return Facts(devices, cluster, tpu or _tpu_of(environ, devices), num_slurm_tasks)


def _tpu_of(environ: Mapping[str, str], devices: Sequence[str]) -> str | None:
    for variable in TPU_VARIABLES:
        if tpu := environ.get(variable):
            return f"grpc://{tpu}" if variable == "COLAB_TPU_ADDR" and "://" not in tpu else tpu
    return "local" if _of_type("TPU", devices) else None


def _of_type(kind: str, devices: Sequence[str]) -> tuple[str, ...]:
    return tuple(device for device in devices if device.startswith(f"{kind}:"))


@dataclass(frozen=True)
class Decision:
    """What is to be built, and why."""

    name: str  # one of NAMES, never "auto"
    reason: str
    devices: tuple[str, ...] = ()  # of one_device and mirrored; the others take what they find
    num_cpus_to_make: int = 0  # logical CPU devices that must be configured first; 0: none


def decide(
    name: str, facts: Facts, *, devices: Sequence[str] | None = None, num_replicas: int | None = None
) -> Decision:
    """Decide which strategy to build, from facts alone; see `pick_strategy`.

        >>> decide("auto", Facts(devices=("CPU:0", "GPU:0", "GPU:1"))).reason
        '2 GPUs, no TF_CONFIG'

    Raises:
        StrategyError: the strategy cannot be had with these facts; the message names what there is.
        ClusterError: the strategy and the cluster do not go together.
    """
    _check_name(name)
    if num_replicas is not None and (not _is_int(num_replicas) or num_replicas < 1):
        raise StrategyError(f"num_replicas is {num_replicas!r}; give a whole number from 1 up.")
    asked = None if devices is None else _check_devices(devices, facts.devices, num_replicas)
    why = "asked for by name"
    if name == "auto":
        name, why = _auto(facts, asked, num_replicas), _describe(facts.cluster)
    if name in ("one_device", "mirrored"):
        return _decide_local(name, facts, why, asked, num_replicas)
    if asked or num_replicas:
        raise StrategyError(
            f"devices and num_replicas choose among the devices of one process; {name!r} ({why}) takes what each "
            "process finds. Leave them out; for more replicas, start more workers."
        )
    if name == "tpu":
        return _decide_tpu(facts, why)
    return _decide_cluster(name, facts.cluster)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise StrategyError(f"name is of type {type(name).__name__}; give a string, one of {', '.join(NAMES)}.")
    if name not in NAMES:
        guess = close_name(name.lower().removesuffix("strategy"), NAMES)
        raise StrategyError(f"There is no strategy {name!r}{guess or '.'} There are {', '.join(NAMES)}.")


def _check_devices(devices: Sequence[str], existing: Sequence[str], num_replicas: int | None) -> tuple[str, ...]:
    if isinstance(devices, str):
        raise StrategyError(f"devices is the string {devices!r}; give a list: devices=[{devices!r}].")
    names = [_canonical(device, existing) for device in devices]
    if not names:
        raise StrategyError(f"devices is empty; name at least one. {_there_are(existing)}")
    if missing := [name for name in names if name not in existing]:
        raise StrategyError(
            f"devices names {', '.join(missing)}, which this process does not have; training there would hang. "
            f"{_there_are(existing)} For logical CPU devices, give num_replicas= instead."
        )
    if doubles := [name for name, count in Counter(names).items() if count > 1]:
        raise StrategyError(f"devices names {', '.join(doubles)} more than once; a device holds one replica.")
    if num_replicas is not None and num_replicas != len(names):
        raise StrategyError(
            f"num_replicas is {num_replicas}, but devices names {len(names)}: {_listed(names)}. Give one of the two."
        )
    return tuple(names)


def _canonical(device: object, existing: Sequence[str]) -> str:
    """Return `GPU:0` for `gpu:0`, `/GPU:0`, `/device:GPU:0`, TensorFlow's full name, or its LogicalDevice."""
    name = str(getattr(device, "name", device))
    match = re.fullmatch(r"(?i)(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:device:)?([a-z_]+):([0-9]+)", name)
    if match is None:
        raise StrategyError(f"{name!r} is not how a device of this process is named. {_there_are(existing)}")
    return f"{match[1].upper()}:{int(match[2])}"


def _there_are(devices: Sequence[str]) -> str:
    return f"TensorFlow has {_listed(devices)}."


def _listed(devices: Sequence[str]) -> str:
    return ", ".join(devices) or "no device"


def _auto(facts: Facts, asked: tuple[str, ...] | None, num_replicas: int | None) -> str:
    cluster = facts.cluster
    if cluster is not None and not cluster.works_alone:
        return "parameter_server" if cluster.ps else "multi_worker"
    if facts.num_slurm_tasks:
        raise ClusterError(
            f"SLURM allocated {facts.num_slurm_tasks} tasks, but srun did not start this process (no "
            "SLURM_STEP_NUM_TASKS), so it would train alone. Start the program with srun, or name the strategy."
        )
    if asked is not None or num_replicas is not None:
        return "one_device" if (num_replicas or len(asked or ())) == 1 else "mirrored"
    if facts.tpu:
        return "tpu"
    return "one_device" if len(_pool(facts.devices)) == 1 else "mirrored"


def _pool(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that take part when none is named: all GPUs, or else all CPU devices."""
    return _of_type("GPU", devices) or _of_type("CPU", devices)


def _describe(cluster: "Cluster | None") -> str:
    if cluster is None:
        return "no TF_CONFIG"
    if cluster.task_type == "evaluator":
        return f"{cluster.source} says {cluster.task}, which works alone"
    return f"{cluster.source} lists {counted(cluster.num_workers, 'worker')}"


def _decide_local(
    name: str, facts: Facts, why: str, asked: tuple[str, ...] | None, num_replicas: int | None
) -> Decision:
    """Decide on a strategy of this process alone."""
    cluster = facts.cluster
    if cluster is not None and not cluster.works_alone:
        if cluster.source != "SLURM":
            raise ClusterError(
                f"{name!r} trains in one process, but {_describe(cluster)}, of which this is {cluster.task}: each "
                f"would train alone, on all the data. Take 'multi_worker' or 'auto', or do without {cluster.source}."
            )
        why += f"; each of SLURM's {cluster.num_workers} tasks trains alone"
    num_asked = num_replicas or len(asked or ())
    if name == "one_device" and num_asked > 1:
        raise StrategyError(f"'one_device' is one replica, not {num_asked}. Take 'mirrored', or name one device.")
    pool = asked or _pool(facts.devices)
    num_wanted = num_asked or (1 if name == "one_device" else len(pool))
    if len(pool) >= num_wanted > 0:
        return Decision(name, f"{_kinds(pool[:num_wanted])}, {why}", pool[:num_wanted])
    if _of_type("GPU", pool):
        raise StrategyError(
            f"num_replicas is {num_wanted}, but there are fewer GPUs. {_there_are(facts.devices)} Ask for at most "
            f"{len(pool)}, or hide the GPUs (CUDA_VISIBLE_DEVICES=-1) to get logical CPU devices."
        )
    made = tuple(f"CPU:{i}" for i in range(num_wanted))
    return Decision(name, f"{_kinds(made)} for num_replicas={num_wanted}, {why}", made, num_wanted)


def _kinds(devices: Sequence[str]) -> str:
    """Return, say, `2 GPUs`, or `1 GPU and 1 CPU device`."""
    count = Counter(device.partition(":")[0] for device in devices)
    return " and ".join(counted(number, "CPU device" if kind == "CPU" else kind) for kind, number in count.items())


def _decide_tpu(facts: Facts, why: str) -> Decision:
    if facts.tpu is None:
        raise StrategyError(
            f"There is no TPU: {_there_are(facts.devices)} None of {', '.join(TPU_VARIABLES)} is set. Give tpu= a name "
            "or a grpc:// address, or take 'auto'."
        )
    return Decision("tpu", f"TPU {facts.tpu}, {why}")


def _decide_cluster(name: str, cluster: "Cluster | None") -> Decision:
    """Decide on a strategy of several processes."""
    if cluster is None:
        raise ClusterError(
            f"{name!r} needs a cluster, but TF_CONFIG is not set and no SLURM step of several tasks runs this process. "
            f"Start it with `keras-dist-ext launch`, give cluster_resolver=, or set TF_CONFIG to, say, "
            f"{TF_CONFIG_EXAMPLE}"
        )
    if cluster.task_type == "evaluator":
        raise ClusterError(f"{_describe(cluster)}; it cannot take part in {name!r}. Take 'auto'.")
    workers = f"{cluster.source} lists {counted(cluster.num_workers, 'worker')}"
    if name == "multi_worker":
        if cluster.ps:
            raise ClusterError(
                f"{workers} and {len(cluster.ps)} ps, which 'multi_worker' has no use for. Take 'parameter_server', or "
                "list only a chief and workers."
            )
        return Decision(name, f"{workers}, this is {cluster.task}")
    if not cluster.ps or not cluster.worker:
        raise ClusterError(
            f"'parameter_server' needs workers and parameter servers; {cluster.source} lists "
            f"{counted(len(cluster.worker), 'worker')} and {len(cluster.ps)} ps. Add what is missing."
        )
    if cluster.task_type not in ("chief", None):
        raise ClusterError(
            f"{cluster.source} says {cluster.task}, which serves; only the chief of 'parameter_server' trains. Run "
            "`tf.distribute.Server(cluster_spec, job_name, task_index).join()` here."
        )
    workers = counted(len(cluster.worker), "worker")
    return Decision(name, f"{cluster.source} lists {workers} and {len(cluster.ps)} ps, this is {cluster.task}")
