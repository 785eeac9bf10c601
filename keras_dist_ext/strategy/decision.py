"""Decide which strategy to build, from the resources at hand, and say why."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from keras_dist_ext import arguments
from keras_dist_ext.cluster.spec import TF_CONFIG_EXAMPLE, Cluster
from keras_dist_ext.errors import ClusterError, StrategyError
from keras_dist_ext.messages import close_name, counted
from keras_dist_ext.strategy.resources import TPU_VARIABLES, Resources, listed, of_type

__all__ = ["canonical_device", "NAMES", "Decision", "decide"]

MOST_DEVICES = 4096  # of a process
NAMES = ("auto", "one_device", "mirrored", "multi_worker", "tpu", "parameter_server")


@dataclass(frozen=True)
class Decision:
    """What is to be built, and why."""

    name: str  # one of NAMES, never "auto"
    reason: str
    devices: tuple[str, ...] = ()  # of one_device and mirrored; the others take what they find
    num_cpus_to_make: int = 0  # logical CPU devices that must be configured first; 0: none


def decide(
    name: str, resources: Resources, *, devices: Sequence[str] | None = None, num_replicas: int | None = None
) -> Decision:
    """Decide which strategy to build, from the resources only; see `pick_strategy`.

        >>> decide("auto", Resources(devices=("CPU:0", "GPU:0", "GPU:1"))).reason
        '2 GPUs, no TF_CONFIG'

    Raises:
        StrategyError: the strategy is not available with these resources; the message lists them.
        ClusterError: the strategy and the cluster do not go together.
    """
    _check_name(name)
    num_replicas = arguments.optional(
        arguments.integer, "num_replicas", num_replicas, least=1, most=MOST_DEVICES, error=StrategyError
    )
    asked = None if devices is None else _check_devices(devices, resources.devices, num_replicas)
    why = "asked for by name"
    if name == "auto":
        name, why = _auto(resources, asked, num_replicas), _describe(resources.cluster)
    if name in ("one_device", "mirrored"):
        return _decide_local(name, resources, why, asked, num_replicas)
    if asked or num_replicas:
        raise StrategyError(
            f"devices and num_replicas choose among the devices of one process; {name!r} ({why}) takes what each "
            "process finds. Leave them out; for more replicas, start more workers."
        )
    if name == "tpu":
        return _decide_tpu(resources, why)
    return _decide_cluster(name, resources.cluster)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise StrategyError(f"name is of type {type(name).__name__}; give a string, one of {', '.join(NAMES)}.")
    if not name:
        raise StrategyError(f"name is empty; give one of {', '.join(NAMES)}.")
    if name not in NAMES:
        guess = close_name(name.lower().removesuffix("strategy"), NAMES)
        raise StrategyError(f"There is no strategy {name!r}{guess or '.'} There are {', '.join(NAMES)}.")


def _check_devices(devices: Sequence[str], existing: Sequence[str], num_replicas: int | None) -> tuple[str, ...]:
    if isinstance(devices, str):
        raise StrategyError(f"devices is the string {devices!r}; give a list: devices=[{devices!r}].")
    if not isinstance(devices, list | tuple):
        raise StrategyError(f"devices is {arguments.shown(devices)}; give a list of names. {_there_are(existing)}")
    names = [canonical_device(device, existing) for device in devices]
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
            f"num_replicas is {num_replicas}, but devices names {len(names)}: {listed(names)}. Give one of the two."
        )
    return tuple(names)


def canonical_device(device: object, existing: Sequence[str]) -> str:
    """Return `GPU:0` for `gpu:0`, `/GPU:0`, `/device:GPU:0`, TensorFlow's full name, or its LogicalDevice."""
    name = str(getattr(device, "name", device))
    match = re.fullmatch(r"(?i)(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:device:)?([a-z_]+):([0-9]+)", name)
    if match is None:
        raise StrategyError(f"{name!r} is not the name of a device. {_there_are(existing)}")
    return f"{match[1].upper()}:{int(match[2])}"


def _there_are(devices: Sequence[str]) -> str:
    return f"TensorFlow has {listed(devices)}."


def _auto(resources: Resources, asked: tuple[str, ...] | None, num_replicas: int | None) -> str:
    cluster = resources.cluster
    if cluster is not None and not cluster.is_independent:
        return "parameter_server" if cluster.ps else "multi_worker"
    if resources.num_slurm_tasks:
        raise ClusterError(
            f"SLURM allocated {resources.num_slurm_tasks} tasks, but srun did not start this process (no "
            "SLURM_STEP_NUM_TASKS), so it would train by itself. Start the program with srun, or name the strategy."
        )
    if asked is not None or num_replicas is not None:
        return "one_device" if (num_replicas or len(asked or ())) == 1 else "mirrored"
    if resources.tpu:
        return "tpu"
    return "one_device" if len(_pool(resources.devices)) == 1 else "mirrored"


def _pool(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that are used when none is named: all GPUs, or else all CPU devices."""
    return of_type("GPU", devices) or of_type("CPU", devices)


def _describe(cluster: Cluster | None) -> str:
    if cluster is None:
        return "no TF_CONFIG"
    if cluster.task_type == "evaluator":
        return f"{cluster.source} says {cluster.task}, which runs by itself"
    return f"{cluster.source} lists {counted(cluster.num_workers, 'worker')}"


def _decide_local(
    name: str, resources: Resources, why: str, asked: tuple[str, ...] | None, num_replicas: int | None
) -> Decision:
    """Decide on a strategy for one process."""
    cluster = resources.cluster
    if cluster is not None and not cluster.is_independent:
        if cluster.source not in ("SLURM", "MPI"):
            raise ClusterError(
                f"{name!r} trains in one process, but {_describe(cluster)}, of which this is {cluster.task}: each "
                "would train by itself, on all the data. Take 'multi_worker' or 'auto', or do without "
                f"{cluster.source}."
            )
        why += f"; each of {cluster.source}'s {cluster.num_workers} tasks trains by itself"
    num_asked = num_replicas or len(asked or ())
    if name == "one_device" and num_asked > 1:
        raise StrategyError(f"'one_device' is one replica, not {num_asked}. Take 'mirrored', or name one device.")
    pool = asked or _pool(resources.devices)
    if not pool:
        raise StrategyError(f"There is nothing to train on: {_there_are(resources.devices)} Make a CPU or GPU visible.")
    num_wanted = num_asked or (1 if name == "one_device" else len(pool))
    if len(pool) >= num_wanted > 0:
        return Decision(name, f"{_kinds(pool[:num_wanted])}, {why}", pool[:num_wanted])
    if of_type("GPU", pool):
        raise StrategyError(
            f"num_replicas is {num_wanted}, but there are fewer GPUs. {_there_are(resources.devices)} Ask for at most "
            f"{len(pool)}, or hide the GPUs (CUDA_VISIBLE_DEVICES=-1) to get logical CPU devices."
        )
    made = tuple(f"CPU:{i}" for i in range(num_wanted))
    return Decision(name, f"{_kinds(made)} for num_replicas={num_wanted}, {why}", made, num_wanted)


def _kinds(devices: Sequence[str]) -> str:
    """Return, say, `2 GPUs`, or `1 GPU and 1 CPU device`."""
    count = Counter(device.partition(":")[0] for device in devices)
    return " and ".join(counted(number, "CPU device" if kind == "CPU" else kind) for kind, number in count.items())


def _decide_tpu(resources: Resources, why: str) -> Decision:
    if resources.tpu is None:
        raise StrategyError(
            f"There is no TPU: {_there_are(resources.devices)} None of {', '.join(TPU_VARIABLES)} is set. Give tpu= a "
            "name or a grpc:// address, or take 'auto'."
        )
    return Decision("tpu", f"TPU {resources.tpu}, {why}")


def _decide_cluster(name: str, cluster: Cluster | None) -> Decision:
    """Decide on a strategy of several processes."""
    if cluster is None:
        raise ClusterError(
            f"{name!r} needs a cluster, but TF_CONFIG is not set, and neither mpirun nor a SLURM step of several tasks "
            "runs this process. Start it with `keras-dist-ext launch`, give cluster_resolver=, or set TF_CONFIG to, "
            f"say, {TF_CONFIG_EXAMPLE}"
        )
    if cluster.task_type == "evaluator":
        raise ClusterError(f"{_describe(cluster)}; it cannot participate in {name!r}. Take 'auto'.")
    workers = f"{cluster.source} lists {counted(cluster.num_workers, 'worker')}"
    if name == "multi_worker":
        if cluster.ps:
            raise ClusterError(
                f"{workers} and {len(cluster.ps)} ps, which 'multi_worker' does not use. Take 'parameter_server', or "
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
