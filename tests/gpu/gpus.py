"""Take this machine's GPUs as support/gpu_cards.py shares them out, so that a single card carries several replicas.

`KERAS_DIST_EXT_GPU_SUITE=cpu` puts logical CPU devices in their place, to try the suite's own code without a GPU.
"""

import contextlib
import functools
import json
import os

import gpu_cards
import tensorflow as tf
from strategies import make_devices
from tensorflow.python.eager import context

from keras_dist_ext._keras.interception import patched

__all__ = ["KIND", "cut", "cut_for_worker", "name_of", "names", "plan", "seen_as_whole", "strategy"]

KIND = "CPU" if os.environ.get("KERAS_DIST_EXT_GPU_SUITE") == "cpu" else "GPU"


@functools.cache
def plan() -> gpu_cards.Plan:
    """Share out the cards that there are; the CPU counts as one."""
    memory_mib = os.environ.get("KERAS_DIST_EXT_GPU_SUITE_MIB")
    return gpu_cards.plan_for(
        len(tf.config.list_physical_devices(KIND)),
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
        int(memory_mib) if memory_mib else None,
    )


def cut() -> int:
    """Make four devices or more; return how many there are, 0 without any card.

    Call it before TensorFlow is initialised.
    """
    _cut()
    return sum(plan().cuts)


def cut_for_worker() -> int:
    """Have this worker see one card, with one device; return its number in the cluster."""
    task: int = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    _cut(task)
    return task


def _cut(task: int | None = None) -> None:
    make_devices(hide_gpus=False)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # else a product has 10 bits of mantissa
    if KIND == "GPU":
        gpu_cards.cut(tf.config, tf.config.list_physical_devices(KIND), plan(), task)


def names(num_devices: int) -> list[str]:
    """Name so many devices, of different cards as far as there are."""
    return [f"{KIND}:{device}" for device in plan().devices(num_devices)]


def strategy(num_replicas: int) -> tf.distribute.Strategy:
    """Return the strategy for so many devices; one device is a OneDeviceStrategy."""
    import keras_dist_ext as kde

    kind = "one_device" if num_replicas == 1 else "mirrored"
    with seen_as_whole() if plan().is_cut and plan().sums_by_nccl(num_replicas) else contextlib.nullcontext():
        return kde.pick_strategy(kind, devices=names(num_replicas), environ={}).strategy


def seen_as_whole() -> contextlib.AbstractContextManager[None]:
    """Have TensorFlow choose NCCL for replicas that have a card each, as it does where no card is cut.

    It takes its ring as soon as there are more logical GPUs than cards, whichever a strategy has
    (distribute/mirrored_strategy.py, `_make_collective_ops_with_fallbacks`).
    """
    return patched(context.context(), "list_physical_devices", context.context().list_logical_devices)


def name_of() -> str:
    """Name the cards, as their driver does, and say how they are cut."""
    cards = tf.config.list_physical_devices(KIND)
    details = tf.config.experimental.get_device_details(cards[0]) if cards and KIND == "GPU" else {}
    capability = details.get("compute_capability")
    name = str(details.get("device_name", f"no GPU: {KIND} devices"))
    of_version = f", compute capability {capability[0]}.{capability[1]}" if capability else ""
    cuts = " + ".join(map(str, plan().cuts)) or "no"
    return f"{len(cards)} x {name}{of_version}; {cuts} virtual devices a process, of {plan().memory_mib} MiB"
