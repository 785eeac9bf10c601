"""Choose a tf.distribute strategy for the devices at hand, and say why.

    find_resources(environ) -> Resources -> decide(name, resources) -> Decision -> build(decision) -> StrategyChoice

Resources and decisions are plain values: what can be checked is checked on them, before TensorFlow starts or connects.
"""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext.cluster.rendezvous import WAIT_SECONDS, checked_wait_seconds
from keras_dist_ext.errors import StrategyError
from keras_dist_ext.strategy.builders import Communication, build
from keras_dist_ext.strategy.decision import Decision, decide
from keras_dist_ext.strategy.resources import find_resources, list_devices, of_type

__all__ = ["pick_strategy", "reason_for", "StrategyChoice"]


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy that is ready to use, what it is called here, and why it was chosen."""

    strategy: tf.distribute.Strategy = field(repr=False)  # enter its `scope()` to build a model
    name: str  # as `pick_strategy` takes it, never "auto"
    reason: str  # one line, with what was found: "2 GPUs, no TF_CONFIG"

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def pick_strategy(
    name: str = "auto",
    *,
    devices: Sequence[str] | None = None,
    num_replicas: int | None = None,
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
    tpu: str | None = None,
    implementation: str = "auto",
    bytes_per_pack: int = 0,
    timeout_seconds: float | None = None,
    wait_seconds: float = WAIT_SECONDS,
    environ: Mapping[str, str] = os.environ,
    device_lister: Callable[[], Sequence[str]] = list_devices,
) -> StrategyChoice:
    """Pick the strategy that is asked for, or the one that fits this process, and say why.

    `"auto"` takes, in this order: the cluster that `cluster_resolver`, TF_CONFIG, MPI's `mpirun` or a SLURM step of
    several tasks describes; `devices` or `num_replicas`; a TPU; all GPUs; all logical CPU devices. One object is made
    for a set of devices and a `bytes_per_pack` in a process, and handed out again.

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
        cluster_resolver: a resolver of TensorFlow's, say KubernetesClusterResolver, to be asked instead of TF_CONFIG,
            MPI and SLURM. (SLURM: give each task GPUs of its own, --gpus-per-task.)
        tpu: name or `grpc://` address of a TPU, or `local`; otherwise TPU_NAME and its like are read. An error where
            another strategy is asked for, or comes first.
        implementation: of the collectives of `multi_worker`: `auto`, `ring` or `nccl`. With `auto` as the name, this
            and the next two count where the strategy that is chosen takes them, and the reason says if they do not.
        bytes_per_pack: how much `multi_worker`, or `mirrored` on GPUs, reduces at a time; 0 leaves it to TensorFlow,
            which makes one sum of all.
        timeout_seconds: after which a collective of `multi_worker` fails. TensorFlow spends a thread on each collective
            for it, so use it for debugging.
        wait_seconds: how long the tasks of a cluster wait for each other, here and where they begin a run together.
        environ: where TF_CONFIG, and the variables of MPI, SLURM and the TPU are read.
        device_lister: lists the logical devices of this process.

    Raises:
        StrategyError: the strategy is not available here; the message names what is.
        ClusterError: TF_CONFIG, SLURM or the resolver does not describe a cluster that could train.
    """
    communication = Communication(implementation, bytes_per_pack, timeout_seconds)
    wait_seconds = checked_wait_seconds(wait_seconds)
    arguments.optional(arguments.text, "tpu", tpu, wanted="the name of a TPU", error=StrategyError)
    arguments.mapping("environ", environ, wanted="a dict of strings such as os.environ", error=StrategyError)
    arguments.function("device_lister", device_lister, error=StrategyError)
    if cluster_resolver is not None and not hasattr(cluster_resolver, "cluster_spec"):
        arguments.refuse("cluster_resolver", cluster_resolver, "one of TensorFlow's cluster resolvers", StrategyError)
    resources = find_resources(environ, cluster_resolver=cluster_resolver, tpu=tpu, device_lister=device_lister)
    decision = decide(name, resources, devices=devices, num_replicas=num_replicas)
    reason = decision.reason
    if tpu is not None and decision.name != "tpu":
        raise StrategyError(
            f"tpu={tpu!r} was given, but {decision.name!r} ({reason}) uses none. Leave it out, or take 'tpu'."
        )
    taken = _taken(communication, decision)
    if communication != taken:
        if name != "auto":
            raise StrategyError(
                "implementation, bytes_per_pack and timeout_seconds tune the collectives of 'multi_worker', and "
                f"bytes_per_pack those of 'mirrored' on several GPUs; {name!r} ({reason}) takes "
                f"{'nothing but bytes_per_pack' if _takes_packs(decision) else 'none of them'}. Leave them out."
            )
        reason += "; communication options unused"
        communication = taken
    strategy = build(decision, resources, communication, wait_seconds)
    if isinstance(strategy, tf.distribute.Strategy):
        _REASONS[strategy] = reason
    return StrategyChoice(strategy, decision.name, reason)


def _taken(communication: Communication, decision: Decision) -> Communication:
    """Return what a strategy takes of communication options, the others as they are where nothing is asked for."""
    if decision.name == "multi_worker":
        return communication
    return Communication(bytes_per_pack=communication.bytes_per_pack if _takes_packs(decision) else 0)


def _takes_packs(decision: Decision) -> bool:
    """Whether several GPUs of this process are to sum."""
    num_gpus = len(of_type("GPU", decision.devices))
    return decision.name == "mirrored" and num_gpus == len(decision.devices) > 1


def reason_for(strategy: tf.distribute.Strategy) -> str | None:
    """Return why `pick_strategy` chose a strategy, the last time it did; None for one that was made otherwise."""
    return _REASONS.get(strategy)


_REASONS: weakref.WeakKeyDictionary[tf.distribute.Strategy, str] = weakref.WeakKeyDictionary()
