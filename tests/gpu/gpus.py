"""Cut the GPUs of this machine into virtual ones, so that a single card carries several replicas.

`KERAS_DIST_EXT_GPU_SUITE=cpu` puts logical CPU devices in their place, to try the suite's own code without a GPU.
"""

import os

import tensorflow as tf
from strategies import make_devices

__all__ = ["KIND", "NUM_GPUS", "cut", "name_of", "names", "strategy"]

NUM_GPUS = 4
MEMORY_MIB = int(os.environ.get("KERAS_DIST_EXT_GPU_SUITE_MIB", "1536"))
"""Of a virtual GPU, in MiB: 8 processes with 4 each have to fit into a card beside what CUDA takes for itself."""
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
