"""Hand out one strategy object per kind, over four logical CPU devices of this process.

Importing costs nothing: TensorFlow is loaded when the devices are made.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["Strategies", "make_devices", "selects_gpus", "strategies"]

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

NUM_DEVICES = 4


@functools.cache
def make_devices(*, hide_gpus: bool = True) -> None:
    """Divide the CPU into logical devices, before anything initialises TensorFlow: afterwards their number is fixed.

    Args:
        hide_gpus: tests without the marker `gpu` are about CPU devices, also where there are GPUs.
    """
    if hide_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # of this process and of those that it starts
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES)


def selects_gpus(marker_expression: str) -> bool:
    """Say whether this is a run of the suite for GPUs: ``-m gpu``."""
    return re.search(r"(?<!not )\bgpu\b", marker_expression) is not None


class Strategies:
    """Hand out one strategy object per kind, the same for the whole process (tensorflow#62790)."""

    KINDS = ("one_device", "default", "mirrored2", "mirrored3", "mirrored4")

    def get(self, kind: str) -> tf.distribute.Strategy:
        """Return the strategy of a kind: one of `KINDS`."""
        import tensorflow as tf

        from keras_dist_ext.strategy.pick import pick_strategy

        make_devices()
        if kind == "default":
            return tf.distribute.get_strategy()
        if kind == "one_device":
            return pick_strategy("one_device", devices=["CPU:0"], environ={}).strategy
        if kind in self.KINDS:
            devices = [f"CPU:{i}" for i in range(int(kind.removeprefix("mirrored")))]
            return pick_strategy("mirrored", devices=devices, environ={}).strategy
        raise ValueError(f"no strategy {kind!r}; there are {', '.join(self.KINDS)}")


strategies = Strategies()
