"""Runs for V virtual replicas that tests/test_virtual.py makes on several numbers of devices, and in two workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

RANDOM = np.random.default_rng(0)
NUM_EXAMPLES = 21  # in batches of 8, 8 and 5: virtual replicas have 1 or 2 rows of the last
X = RANDOM.normal(size=(NUM_EXAMPLES, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WEIGHTS = np.linspace(0, 2, NUM_EXAMPLES).astype("float32")
WORDS = RANDOM.integers(0, 7, size=(NUM_EXAMPLES, 4))
IMAGES = RANDOM.normal(size=(NUM_EXAMPLES, 8, 8, 3)).astype("float32")
FIT: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def build(
    strategy: Any,
    virtual_replicas: Any,
    layers: Callable[[], list[Any]],
    *,
    inputs: tuple[int, ...] = (6,),
    dtype: str = "float32",
    optimizer: Callable[[], Any] | None = None,
    cls: Any = None,
    **arguments: Any,
) -> Any:
    """Build and compile in scope; callables among the arguments make what must be made there."""
    import keras

    import keras_dist_ext as kde

    keras.utils.set_random_seed(3)
    with strategy.scope():
        net = (cls or kde.Sequential)([keras.Input(inputs, dtype=dtype), *layers(), keras.layers.Dense(1)], name="net")
        # Not below 0.01: else Adam makes a step of rounding errors, where a gradient is zero but for them.
        made = {"optimizer": optimizer() if optimizer else keras.optimizers.Adam(0.02, epsilon=0.01), "loss": "mse"}
        made |= {k: v() if callable(v) else v for k, v in arguments.items()}
        net.compile(**made, virtual_replicas=virtual_replicas)
    return net


def values(net: Any) -> dict[str, Any]:
    """What a run has come to: weights, moving statistics, slots and counters."""
    return {f"{i} {v.path}": np.asarray(v) for i, v in enumerate([*net.weights, *net.optimizer.variables])}


def randomized() -> list[Any]:
    from keras import layers

    return [layers.Dense(8, activation="tanh"), layers.BatchNormalization(), layers.Dropout(0.3)]


def deep() -> list[Any]:
    from keras import layers

    return [
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.SpatialDropout2D(0.2),
        layers.Reshape((36, 4)),
        layers.LSTM(4, recurrent_dropout=0.2),
        layers.Dropout(0.3),
    ]


def weighted_loss() -> Any:
    import keras

    return keras.losses.MeanSquaredError("mean_with_sample_weight")


# Two workers

WORKER_CASES: dict[str, dict[str, Any]] = {
    "batch normalization and dropout": {"layers": randomized},
    "convolution and LSTM": {"layers": deep, "inputs": (8, 8, 3)},
    "a loss by sample weights": {"layers": randomized, "loss": weighted_loss, "weighted": True},
    "sparse gradients": {"layers": lambda: _embedded(), "inputs": (4,), "dtype": "int32"},
    "accumulation": {"layers": randomized, "optimizer": lambda: _accumulating()},
}


def _embedded() -> list[Any]:
    from keras import layers

    return [layers.Embedding(7, 3), layers.Flatten()]


def _accumulating() -> Any:
    import keras

    return keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)


def run_worker_cases(strategy: Any, reduction: str, num_virtual: int = 4) -> dict[str, Any]:
    """Run each case, and return what it has come to."""
    from keras_dist_ext.virtual import VirtualReplicas

    results: dict[str, Any] = {}
    for name, case in WORKER_CASES.items():
        case = dict(case)
        fit = {**FIT, "sample_weight": WEIGHTS if case.pop("weighted", False) else None}
        x = {(6,): X, (4,): WORDS, (8, 8, 3): IMAGES}[case.get("inputs", (6,))]
        net = build(strategy, VirtualReplicas(num_virtual, reduction), **case)
        history = net.fit(x, Y, **fit).history
        results[name] = {**values(net), "loss": np.array(history["loss"])}
    return results


def run_in_worker() -> dict[str, Any]:
    """What each of two workers does."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return {reduction: run_worker_cases(strategy, reduction) for reduction in ("ordered", "fast")}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
