"""Give each replica a group of devices: one of its own, and one for each part of the model.

Letters: R = replicas of this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext.errors import StrategyError
from keras_dist_ext.messages import counted
from keras_dist_ext.strategy.decision import canonical_device
from keras_dist_ext.strategy.resources import list_devices
from keras_dist_ext.strategy.scope import describe_strategy

__all__ = ["devices_of_parts", "home_devices", "processors"]


def home_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Return the own device of each replica of this process, where what is not placed lives: ``[R]``, as `CPU:0`.

    Raises:
        StrategyError: the strategy has no devices of this process, or is a TPU's.
    """
    existing = list_devices()
    if is_default_strategy(strategy):
        return (next((device for device in existing if device.startswith("GPU")), "CPU:0"),)
    if not isinstance(strategy, _KINDS):
        raise StrategyError(
            f"place puts parts of a replica on other devices of its process, and the model lives under "
            f"{describe_strategy(strategy)}, which groups devices in another way. Use it without a strategy, or "
            "under a MirroredStrategy over one device of each group: pick_strategy(devices=['GPU:0', 'GPU:2'])."
        )
    return tuple(device.rpartition("device:")[2] for device in strategy.extended.worker_devices)


_KINDS = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


def devices_of_parts(homes: Sequence[str], wanted: Mapping[str, str | Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the devices of each part, one for each replica.

    Args:
        homes: the replicas' own devices, ``[R]``.
        wanted: for each part a device, or one for each replica.

    Raises:
        StrategyError: a device does not exist, there are not as many as replicas, or two replicas share one.
    """
    existing = list_devices()
    found = {part: _of_part(part, given, homes, existing) for part, given in wanted.items()}
    users: dict[str, tuple[int, str]] = {device: (replica, "its own device") for replica, device in enumerate(homes)}
    for part, devices in found.items():
        for replica, device in enumerate(devices):
            other, use = users.setdefault(device, (replica, f"part {part!r}"))
            if other != replica:
                raise StrategyError(
                    f"{device} is given to part {part!r} of replica {replica}, and to replica {other} as {use}: the "
                    f"two replicas would wait for each other there. {_groups(homes, found)} Give each replica devices "
                    "of its own, and make the strategy over one device of each group."
                )
    return found


def _of_part(part: str, given: str | Sequence[str], homes: Sequence[str], existing: Sequence[str]) -> tuple[str, ...]:
    is_one = isinstance(given, str) or not isinstance(given, Sequence)
    names = tuple(canonical_device(device, existing) for device in ([given] if is_one else given))
    if missing := [name for name in names if name not in existing]:
        raise StrategyError(
            f"Part {part!r} is to live on {', '.join(missing)}, which this process does not have. TensorFlow has "
            f"{', '.join(existing)}. Logical CPU devices are made by tf.config.set_logical_device_configuration, "
            "before TensorFlow starts."
        )
    if len(names) != len(homes):
        raise StrategyError(
            f"Part {part!r} is given {counted(len(names), 'device')} ({', '.join(names) or 'none'}), and the model has "
            f"{counted(len(homes), 'replica')} ({', '.join(homes)}). Give a list with one device for each replica, in "
            "the order of the strategy's."
        )
    return names


def _groups(homes: Sequence[str], found: Mapping[str, Sequence[str]]) -> str:
    groups = [[home, *(devices[replica] for devices in found.values())] for replica, home in enumerate(homes)]
    texts = [f"replica {replica}: {', '.join(dict.fromkeys(group))}" for replica, group in enumerate(groups)]
    return f"Groups are {'; '.join(texts)}."


def processors() -> dict[str, str]:
    """Return for each logical device what carries it, such as `/physical_device:CPU:0`."""
    found = {}
    devices = iter(list_devices())
    for physical in tf.config.get_visible_devices():
        for _ in tf.config.get_logical_device_configuration(physical) or [None]:
            found[next(devices)] = physical.name
    return found
