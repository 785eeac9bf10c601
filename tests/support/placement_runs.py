"""A model of three parts, and what each of two workers does with it in tests/core/test_placement.py."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

X = np.random.default_rng(0).normal(size=(21, 6)).astype("float32")  # in batches of 8, 8 and 5
Y = X.sum(axis=1, keepdims=True)
WEIGHTS = np.linspace(0, 2, 21).astype("float32")
FIT: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def place(model: Any, parts: dict[str, Any], **options: Any) -> Any:
    """Logical CPUs share a processor, which `place` says; here it does not matter."""
    import keras_dist_ext as kde

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "one-processor|parts-take-turns|one-device")
        return kde.place(model, parts, **options)


def make(strategy: Any = None, *, optimizer: Any = None, **compile_options: Any) -> Any:
    """Make and compile the model under a strategy."""
    import keras
    import tensorflow as tf
    from keras import layers

    import keras_dist_ext as kde

    keras.utils.set_random_seed(3)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = kde.Sequential(
            [
                keras.Input((6,)),
                keras.Sequential([layers.Dense(16, "tanh", name="wide"), layers.Dense(8, name="code")], name="encoder"),
                keras.Sequential([layers.Dense(16, "relu", name="wide"), layers.Dense(4, name="out")], name="decoder"),
                layers.Dense(1, name="head"),
            ],
            name="net",
        )
        optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, "mse", metrics=["mae"], **compile_options)
    return model


def devices_of(variable: Any) -> list[str]:
    """Return where the copies of a variable are, such as `CPU:1`."""
    copies = getattr(variable.value, "_values", (variable.value,))
    return [copy.device.rpartition("device:")[2] for copy in copies]


def train_in_worker(micro_batches: int) -> Any:
    """Train in one of several workers, each a group of two devices; return weights, the decoder's device, and logs."""
    import tensorflow as tf

    import keras_dist_ext as kde

    (physical,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration() for _ in range(2)])
    model = make(kde.pick_strategy("multi_worker").strategy)
    place(model, {"decoder": "CPU:1"}, micro_batches=micro_batches)
    history = model.fit(X, Y, sample_weight=WEIGHTS, **FIT)
    return model.get_weights(), devices_of(model.get_layer("decoder").weights[0]), history.history
