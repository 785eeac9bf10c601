"""Cut the GPUs of this machine into virtual ones, so that a single card carries several replicas.

`KERAS_DIST_EXT_GPU_SUITE=cpu` puts logical CPU devices in their place, to try the suite's own code without a GPU.
"""

import os

import tensorflow as tf
from strategies import make_devices

__all__ = ["KIND", "NUM_GPUS", "cut", "name_of", "names", "strategy"]

NUM_GPUS = 4


def _share_mib(num_processes: int) -> int:
    """Divide a card of 78 GiB among processes with `NUM_GPUS` each, and up to ten workers that they start with one.

    Each takes about 0.9 GiB more for CUDA and its libraries.
    """
    of_process = (74 * 1024 - 10 * 1600) // num_processes
    return min(1536, (of_process - 900) // NUM_GPUS)


MEMORY_MIB = int(
    os.environ.get("KERAS_DIST_EXT_GPU_SUITE_MIB") or _share_mib(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
)
"""Of a virtual GPU, in MiB."""
KIND = "CPU" if os.environ.get("KERAS_DIST_EXT_GPU_SUITE") == "cpu" else "GPU"


def cut(num_devices: int = NUM_GPUS) -> int:
    """Make virtual GPUs of the first card, unless there are several; return how many devices there are, 0 without any.

    Call it before TensorFlow is initialised.
    """
    make_devices(hide_gpus=False)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # else a product has 10 bits of mantissa
    cards = tf.config.list_physical_devices(KIND)
    if len(cards) > 1 or not cards:
        return len(cards)
    if KIND == "CPU":
        return num_devices
    virtual = [tf.config.LogicalDeviceConfiguration(memory_limit=MEMORY_MIB) for _ in range(num_devices)]
    tf.config.set_logical_device_configuration(cards[0], virtual)
    return num_devices


def names(num_devices: int) -> list[str]:
    """Name the first so many devices."""
    return [f"{KIND}:{i}" for i in range(num_devices)]


def strategy(num_replicas: int) -> tf.distribute.Strategy:
    """Return the strategy for so many devices; one device is a OneDeviceStrategy."""
    import keras_dist_ext as kde

    kind = "one_device" if num_replicas == 1 else "mirrored"
    return kde.pick_strategy(kind, devices=names(num_replicas), environ={}).strategy


def name_of() -> str:
    """Name the card, as its driver does."""
    cards = tf.config.list_physical_devices(KIND)
    details = tf.config.experimental.get_device_details(cards[0]) if cards and KIND == "GPU" else {}
    capability = details.get("compute_capability")
    name = str(details.get("device_name", f"no GPU: {KIND} devices"))
    return f"{len(cards)} x {name}" + (f", compute capability {capability[0]}.{capability[1]}" if capability else "")
