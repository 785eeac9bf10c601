"""Small runs that tests/core/test_failures.py breaks: a row that is NaN, and workers that are not alike."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

NUM_BATCHES, BATCH = 8, 8
X = np.random.default_rng(0).normal(size=(NUM_BATCHES * BATCH, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True).astype("float32")


def with_nan(batches: tuple[int, ...], row: int = BATCH - 1) -> tuple[np.ndarray, np.ndarray]:
    """The data with NaN in a row of some batches: by default in the last, which is the last replica's."""
    x = X.copy()
    for batch in batches:
        x[batch * BATCH + row, 0] = np.nan
    return x, Y


def without(batches: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The data without some batches."""
    keep = [row for row in range(len(X)) if row // BATCH not in batches]
    return X[keep], Y[keep]


def make(strategy: Any, optimizer: Callable[[], Any] | None = None, **options: Any) -> Any:
    """A model that keeps state wherever a model can."""
    import keras

    import keras_dist_ext as kde

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = kde.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(3, "tanh"),
                keras.layers.BatchNormalization(synchronized=options.pop("synchronized", False)),
                keras.layers.Dense(1),
            ]
        )
        made = keras.optimizers.Adam(0.01) if optimizer is None else optimizer()
        model.compile(made, "mse", metrics=["mae"], **options)
    return model


def fit(model: Any, data: Any, *callbacks: Any, epochs: int = 1, **options: Any) -> dict[str, Any]:
    """Train in the order of the data; return what has become of the model, and the history."""
    history = model.fit(
        *data, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **options
    )
    return {"history": history.history, "epochs": history.epoch, **state(model)}


def state(model: Any) -> dict[str, Any]:
    """All that a step may change, of each replica of this worker."""
    from keras_dist_ext._keras.variables import components
    from keras_dist_ext.strategy.scope import optimizers

    variables = [*model.weights, *(v for _, optimizer in optimizers(model) for v in optimizer.variables)]
    return {f"{i}": np.stack([np.asarray(c) for c in components(v)]) for i, v in enumerate(variables)}


# Two workers


def guarded(strategy: Any, folder: pathlib.Path, steps_per_execution: int) -> dict[str, Any]:
    """On each worker: the same run by each action, NaN in worker 1's part of one batch."""
    import warnings

    import keras_dist_ext as kde

    found: dict[str, Any] = {}
    options = {"steps_per_execution": steps_per_execution}
    found["reference"] = fit(make(strategy, **options), without((5,)))
    for action in ("skip", "stop", "raise"):
        model, callback = make(strategy, **options), kde.NonFinite(action)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found[action] = fit(model, with_nan((5,)), callback)
            except kde.NonFiniteError as error:
                found[action] = {"error": str(error), **state(model)}
        found[action]["said"] = [str(w.message) for w in caught if "not finite" in str(w.message)]
        found[action]["left_out"] = callback.left_out
    found["before"] = fit(make(strategy, **options), (X[: 5 * BATCH], Y[: 5 * BATCH]))
    return found


def refused(strategy: Any, folder: pathlib.Path) -> dict[str, str]:
    """On each worker: runs in which worker 1 does something else, and the error of each."""
    import keras
    import tensorflow as tf

    import keras_dist_ext as kde

    index: int = strategy.cluster_resolver.task_id
    rows = slice(0, (NUM_BATCHES - index) * BATCH)
    cases: dict[str, Callable[[], Any]] = {
        "optimizer": lambda: fit(
            make(strategy, lambda: [keras.optimizers.Adam, keras.optimizers.SGD][index](0.1)), (X, Y)
        ),
        "momentum": lambda: fit(make(strategy, lambda: keras.optimizers.SGD(0.1, momentum=[0.5, 0.9][index])), (X, Y)),
        "epochs": lambda: fit(make(strategy), (X, Y), epochs=1 + index),
        "callbacks": lambda: fit(make(strategy), (X, Y), *[kde.NonFinite()][index:]),
        "length": lambda: fit(make(strategy), (X[rows], Y[rows])),
        "parts of a batch": lambda: make(strategy).fit(
            tf.data.Dataset.from_tensor_slices((X, Y, Y[:, 0])[: 2 + index]).batch(BATCH), verbose=0
        ),
        "nothing": lambda: fit(make(strategy), (X, Y)),
    }
    errors = {}
    for name, case in cases.items():
        errors[name] = ""
        try:
            case()
        except kde.WorkersError as error:
            errors[name] = str(error)
    return errors


def parted(case: str, folder: str) -> str:
    """On each worker: the error of a run in which the workers go different ways."""
    import time

    import keras
    import tensorflow as tf

    import keras_dist_ext as kde

    strategy = kde.pick_strategy(wait_seconds=20).strategy
    index: int = strategy.cluster_resolver.task_id
    model = make(strategy)
    rows = slice(0, (NUM_BATCHES - index) * BATCH)

    class Alone(keras.callbacks.Callback):
        """Evaluates on one worker."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if index == 0:
                self.model.evaluate(X, Y, verbose=0)

    is_told = pathlib.Path(folder, "told")
    try:
        if case == "another length, not known before":
            data = tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).batch(BATCH).filter(lambda x, y: True)
            model.fit(data, epochs=2, verbose=0)
        elif case == "one evaluates alone":
            fit(model, (X, Y), Alone(), epochs=2)
        elif case == "one predicts alone" and index == 0:
            model.predict(X, verbose=0)
        elif case == "one builds alone":
            if index == 0:
                make(strategy)
            fit(model, (X, Y))
        elif case == "the loss of one fails":

            def loss(y: Any, y_pred: Any) -> Any:
                if index == 1:
                    raise ArithmeticError("only here")
                return tf.reduce_mean(tf.square(y - y_pred))

            model.compile("sgd", loss)
            model.fit(X, Y, verbose=0)
        elif case == "one does not train" and index == 0:
            fit(model, (X, Y))
        elif case == "one does not train":
            while not is_told.exists():
                time.sleep(0.1)
    except kde.WorkersError as error:
        is_told.touch()
        return str(error)
    except ArithmeticError as error:
        while not is_told.exists():  # as a program that goes on does
            time.sleep(0.1)
        return str(error)
    return ""


def late(how: float | str, wait_seconds: float) -> str:
    """Worker 1 joins the cluster so many seconds late, or when a file says that worker 0 waits no longer."""
    import time

    import keras_dist_ext as kde
    from keras_dist_ext.strategy.resources import find_resources

    cluster = find_resources(os.environ, cluster_resolver=None, tpu=None, device_lister=lambda: ["CPU:0"]).cluster
    assert cluster is not None
    if cluster.task == "worker 1" and isinstance(how, str):
        while not pathlib.Path(how).exists():
            time.sleep(0.1)
    elif cluster.task == "worker 1":
        time.sleep(how)
    try:
        kde.pick_strategy(wait_seconds=wait_seconds)
    except kde.ClusterError as error:
        if isinstance(how, str):
            pathlib.Path(how).touch()
        return str(error)
    return ""


def lost_before_it_joins(lost: int, wait_seconds: float) -> str:
    """One worker finds the others, and leaves before TensorFlow connects it."""
    import time

    import keras_dist_ext as kde
    from keras_dist_ext.strategy import builders

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    begin = time.monotonic()
    if index == lost:
        wait_for_workers = builders.wait_for_workers

        def wait_and_leave(*arguments: Any) -> None:
            wait_for_workers(*arguments)
            raise kde.ClusterError("it has found the others, and leaves")

        builders.wait_for_workers = wait_and_leave
    text = ""
    try:
        kde.pick_strategy(wait_seconds=wait_seconds)
    except kde.ClusterError as error:
        text = str(error)
    return f"after {time.monotonic() - begin:.1f} s: {text}"
