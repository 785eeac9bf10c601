"""What each of two workers does whose replica is taken for a GPU, and which reads its data on another device."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import numpy as np

X = np.random.default_rng(0).normal(size=(29, 5)).astype("float32")
Y = X[:, :2] - X[:, 2:4]
CASES = ("of known length", "of unknown length", "of equal batches")


def trained(library: Any, case: str) -> list[Any]:
    """The history of a model with sample weights, and its weights; a last batch has 5 examples, unless all have 8."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    model = library.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"], weighted_metrics=["mse"])
    with tf.device("/device:CPU:1"):
        data = tf.data.Dataset.from_tensor_slices((X, Y, np.abs(X[:, 0])))
        data = data.batch(8, drop_remainder=case == "of equal batches")
        if case == "of unknown length" and library is not keras:  # of which Keras counts a step too many
            data = data.filter(lambda *_: True)
    history = model.fit(data, epochs=3, validation_data=data, verbose=0).history
    return [*history.values(), *model.get_weights()]


def run_sent_ahead(strategy: Any, folder: Any, case: str) -> tuple[list[Any], int]:
    """Train in this worker; return what comes out, and how often a step was traced on rows that were sent ahead."""
    import keras_dist_ext as kde
    from keras_dist_ext.training import batch_devices, distributed_step
    from keras_dist_ext.training.batch_split import Dealt, split_of

    dealt = []

    def noted(batch: Any, *, of_worker: bool) -> Any:
        dealt.append(isinstance(batch, Dealt))
        return split_of(batch, of_worker=of_worker)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(batch_devices, "_is_gpu", lambda device: device.endswith("CPU:0")))
        patches.enter_context(patch.object(batch_devices, "LEAST_BYTES", 0))
        patches.enter_context(patch.object(distributed_step, "split_of", noted))
        with strategy.scope():
            return trained(kde, case), sum(dealt)
