"""Four kinds of networks with dropout and BatchNormalization, and 50 steps of each, for tests and benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["EXAMPLES", "NETWORKS", "farthest", "train_network", "train_on_workers"]

EXAMPLES = {"even": (240, 24), "uneven": (209, 23)}
"""By name: how many examples there are, and in a batch: 5 epochs have 50 steps; the last batch of 209 has two."""


def mobile(lib: Any) -> Any:
    """Inverted residual blocks with depthwise convolutions, as in MobileNetV2."""
    import keras

    layers = keras.layers
    inputs = keras.Input((12, 12, 3))
    x = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(8, 3, 2, "same", use_bias=False)(inputs)))
    for _ in range(2):
        block = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(24, 1, use_bias=False)(x)))
        block = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(block)
        block = layers.ReLU(6.0)(layers.BatchNormalization()(block))
        x = layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(8, 1, use_bias=False)(block))])
    return lib.Model(inputs, layers.Dense(4)(layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))))


def residual(lib: Any) -> Any:
    """Residual blocks, as in ResNet."""
    import keras

    layers = keras.layers
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    for stride in (1, 2):
        block = layers.ReLU()(layers.BatchNormalization()(x))
        short = layers.Conv2D(8, 1, stride, use_bias=False)(block)
        block = layers.Conv2D(8, 3, stride, "same", use_bias=False)(block)
        block = layers.SpatialDropout2D(0.2)(layers.ReLU()(layers.BatchNormalization()(block)))
        x = layers.Add()([short, layers.Conv2D(8, 3, padding="same", use_bias=False)(block)])
    x = layers.ReLU()(layers.BatchNormalization()(x))
    return lib.Model(inputs, layers.Dense(4)(layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))))


def transformer(lib: Any) -> Any:
    """An encoder with attention dropout."""
    import keras

    layers = keras.layers
    inputs = keras.Input((10,), dtype="int32")
    x = layers.Dropout(0.1)(layers.Embedding(30, 16)(inputs))
    for _ in range(2):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 8, dropout=0.2)(normal, normal)])
        block = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.2)(layers.Dense(16)(layers.BatchNormalization()(block)))])
    return lib.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def lstm(lib: Any) -> Any:
    """Recurrent layers with dropout of inputs and states, and a mask."""
    import keras

    layers = keras.layers
    inputs = keras.Input((10,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(inputs)
    x = layers.LSTM(12, dropout=0.2, recurrent_dropout=0.2, return_sequences=True)(x)
    x = layers.LSTM(12)(layers.BatchNormalization()(x))
    return lib.Model(inputs, layers.Dense(4)(layers.Dropout(0.3)(layers.BatchNormalization()(x))))


NETWORKS: dict[str, Callable[[Any], Any]] = {
    "MobileNet": mobile,
    "ResNet": residual,
    "Transformer": transformer,
    "LSTM": lstm,
}


def train_network(
    name: str, examples: str, strategy: Any = None, *, optimizer: str = "sgd", moved: bool = False, **arguments: Any
) -> list[Any]:
    """Return the losses of 5 epochs of 10 steps, and the weights after them.

    Args:
        name: of the network.
        examples: "even" or "uneven".
        strategy: of replicas that are to be exact; None is stock Keras on one device.
        optimizer: "sgd", which has momentum, or "adam".
        moved: whether each initial weight is moved by half a unit in its last place, or less.
        arguments: of `compile`.
    """
    import keras

    import keras_dist_ext as kde

    count, batch_size = EXAMPLES[examples]
    rng = np.random.default_rng(0)
    is_text = name in ("Transformer", "LSTM")
    x = rng.integers(0, 30, (count, 10)) if is_text else rng.normal(size=(count, 12, 12, 3)).astype("float32")
    y = (x.reshape(count, -1).sum(1) % 4).astype("int32")
    keras.utils.set_random_seed(42)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = NETWORKS[name](keras if strategy is None else kde)
        rule = keras.optimizers.SGD(0.002, momentum=0.9) if optimizer == "sgd" else keras.optimizers.Adam(0.001)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(rule, loss, **({} if strategy is None else {"exact": True, **arguments}))
    if moved:
        signs = np.random.default_rng(1)
        model.set_weights([w * (1 + np.float32(6e-8) * signs.choice([-1, 1], w.shape)) for w in model.get_weights()])
    history = model.fit(x, y, batch_size=batch_size, epochs=5, verbose=0).history
    return [np.array(history["loss"]), *model.get_weights()]


def train_on_workers(strategy: Any, folder: Path, name: str, examples: str) -> list[Any]:
    """Return what ``train_network`` does, on each worker of a launch."""
    return train_network(name, examples, strategy)


def farthest(ours: list[Any], expected: list[Any]) -> float:
    """Return the largest difference, as a share of the largest number of its tensor."""
    shares = [
        np.abs(np.subtract(one, other)).max() / max(np.abs(other).max(), 1e-3)
        for one, other in zip(ours, expected, strict=True)
    ]
    return float(max(shares))
