"""A run whose number of workers changes, for tests/workers/test_elastic.py."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from typing import Any

NUM_EXAMPLES, BATCH, EPOCHS = 70, 12, 6  # 6 batches an epoch, the last of 10 rows
VIRTUAL_REPLICAS = 6  # on 1, 2 or 3 workers


def train(directory: str, save_every: str | int, accident: str = "") -> dict[str, Any]:
    """Train to the end on this worker; return what the run ended with.

    With an accident the last worker meets it in the first attempt, and in the second one training waits for places to
    come.

    Args:
        directory: for checkpoints.
        save_every: see ``Resume``.
        accident: "kill"; "wait": until somebody else ends it; or none.
    """
    import keras
    import numpy as np

    import keras_dist_ext as kde
    from keras_dist_ext.cluster import heartbeat

    strategy = kde.pick_strategy("multi_worker").strategy
    resolver = strategy.cluster_resolver
    is_last = resolver.task_id + 1 == len(resolver.cluster_spec().job_tasks("worker"))
    restart = int(os.environ["KERAS_DIST_EXT_RESTART"])
    numbers = itertools.count(1)  # of this attempt; what a callback counts, a resumed run takes over

    class Accidents(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            number = next(numbers)
            if restart == 0 and is_last and number == 10:
                sys.stdout.write(f"accident of {os.getpid()} of {os.getppid()}\n")
                if accident == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(120)
            if restart == 1 and resolver.task_id == 0 and number == 3:
                sys.stdout.write("goes on\n")
                deadline = time.monotonic() + 120
                while not heartbeat.is_asked_to_leave() and time.monotonic() < deadline:
                    time.sleep(0.01)

    keras.utils.set_random_seed(7)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
        model = kde.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", virtual_replicas=VIRTUAL_REPLICAS)
    x = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 4)).astype("float32")
    callbacks = [kde.Resume(directory, save_every), *([Accidents()] if accident else [])]
    history = model.fit(x, x.sum(axis=1), batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    variables = [*model.weights, *model.optimizer.variables]
    return {"losses": history.history["loss"], "weights": [np.asarray(variable) for variable in variables]}


def assert_same_bits(run: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two runs have come to the same weights, bit for bit; losses are added up in another order."""
    import numpy as np

    np.testing.assert_allclose(run["losses"], other["losses"], rtol=1e-6)
    for weight, others in zip(run["weights"], other["weights"], strict=True):
        np.testing.assert_array_equal(weight, others)
