"""Runs that a callback ends at any place, and what became of them: calls of callbacks, history, weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCH = 4
X = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
Y = X[:, :1]

Place = tuple[str, int | None, str]
"""A method of callbacks, the number of the epoch or batch (None: whichever), and the attribute that is set there."""

TRAINING: list[Place] = [
    ("on_train_begin", None, "stop_training"),
    ("on_epoch_begin", 1, "stop_training"),
    ("on_train_batch_begin", 2, "stop_training"),
    ("on_train_batch_end", 0, "stop_training"),
    ("on_train_batch_end", 5, "stop_training"),
    ("on_test_begin", None, "stop_training"),
    ("on_test_batch_end", 1, "stop_training"),
    ("on_epoch_end", 1, "stop_training"),
    ("on_test_begin", None, "stop_evaluating"),
    ("on_test_batch_end", 1, "stop_evaluating"),
]
ALONE: list[Place] = [
    ("on_test_begin", None, "stop_evaluating"),
    ("on_test_batch_end", 2, "stop_evaluating"),
    ("on_predict_begin", None, "stop_predicting"),
    ("on_predict_batch_end", 2, "stop_predicting"),
    ("on_test_batch_end", 2, "stop_training"),
]


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """The rows, a batch an item."""

    def __len__(self) -> int:
        return -(-len(X) // BATCH)

    def __getitem__(self, number: int) -> Any:
        rows = slice(number * BATCH, number * BATCH + BATCH)
        return X[rows], Y[rows]


def pipeline() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH, "validation_data": (X, Y)},
    "tf.data": lambda: {"x": pipeline(), "validation_data": pipeline()},
    "endless": lambda: {
        "x": pipeline().repeat(),
        "steps_per_epoch": 6,
        "validation_data": pipeline().repeat(),
        "validation_steps": 4,
    },
    "PyDataset": lambda: {"x": Batches(), "validation_data": Batches()},
    "every other epoch": lambda: {"x": X, "y": Y, "batch_size": BATCH, "validation_data": (X, Y), "validation_freq": 2},
}


class Calls(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes each call with the names of its logs and what the attribute says, and sets that at one place.

    Args:
        place: where.
        asks: whether it does so in this process.
    """

    def __init__(self, place: Place, *, asks: bool = True) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._place, self._asks = place, asks

    def note(self, name: str, number: int | None, logs: Any) -> None:
        method, at, attribute = self._place
        if self._asks and name == method and at in (None, number):
            setattr(self.model, attribute, True)
        seen = bool(getattr(self.model, attribute)) if self._asks else None
        self.calls.append((name, number, sorted(logs) if logs else None, seen))


def _noting(name: str) -> Callable[..., None]:
    if "batch" in name or "epoch" in name:
        return lambda self, number, logs=None: self.note(name, number, logs)
    return lambda self, logs=None: self.note(name, None, logs)


for _kind in ("train", "test", "predict"):
    for _when in ("begin", "batch_begin", "batch_end", "end"):
        setattr(Calls, f"on_{_kind}_{_when}", _noting(f"on_{_kind}_{_when}"))
Calls.on_epoch_begin, Calls.on_epoch_end = _noting("on_epoch_begin"), _noting("on_epoch_end")


def make(library: Any, strategy: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = library.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], **options)
    return model


def make_loop(strategy: Any) -> Any:
    """The same training by a loop of one's own."""
    import keras_dist_ext as kde

    keras.utils.set_random_seed(3)
    with strategy.scope():
        net = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.05)

        def losses(batch: Any) -> tuple[Any, dict[str, Any]]:
            x, y = batch
            errors = net(x) - y
            loss = tf.reduce_mean(errors**2)
            return loss, {"loss": loss, "mae": tf.reduce_mean(tf.abs(errors))}

        def step(replica: Any, batch: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss, values = losses(batch)
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply(gradients, net.trainable_variables)
            return values

        return kde.TrainLoop(
            step,
            parts={"net": net, "sgd": optimizer},
            reduce={"loss": "mean", "mae": "mean"},
            test=lambda replica, batch: losses(batch)[1],
            predict=lambda batch: net(batch),
        )


def stopped(model: Any, data: str, places: Sequence[Place], *, asks: bool = True) -> Iterator[dict[str, Any]]:
    """Train from the same weights again and again, stopped at each of the places; yield what each came to."""
    begin = model.get_weights()
    for place in places:
        model.set_weights(begin)
        before, calls = int(model.optimizer.iterations), Calls(place, asks=asks)
        history = model.fit(**DATA[data](), epochs=4, shuffle=False, verbose=0, callbacks=[calls])
        yield {
            "calls": calls.calls,
            "history": history.history,
            "epochs": history.epoch,
            "steps": int(model.optimizer.iterations) - before,
            "stops": bool(model.stop_training),
            "weights": model.get_weights(),
        }
    model.set_weights(begin)


def stopped_alone(model: Any, places: Sequence[Place], *, asks: bool = True) -> Iterator[dict[str, Any]]:
    """Evaluate or predict, stopped at each of the places."""
    for place in places:
        calls = Calls(place, asks=asks)
        options = {"batch_size": BATCH, "verbose": 0, "callbacks": [calls]}
        if "predict" in place[0]:
            yield {"calls": calls.calls, "values": model.predict(X, **options).tolist()}
        else:
            yield {"calls": calls.calls, "values": model.evaluate(X, Y, **options)}


def all_stops(model: Any, data: str, *, asks: bool = True) -> list[dict[str, Any]]:
    return [*stopped(model, data, TRAINING, asks=asks), *stopped_alone(model, ALONE, asks=asks)]


def stops_of_worker_1(strategy: Any, folder: Any, data: str, *, by_loop: bool = False) -> list[dict[str, Any]]:
    """Only worker 1 asks."""
    import keras_dist_ext as kde

    model = make_loop(strategy) if by_loop else make(kde, strategy)
    return all_stops(model, data, asks=strategy.cluster_resolver.task_id == 1)


def stops_of_a_loop(strategy: Any, folder: Any, data: str) -> list[dict[str, Any]]:
    """Only worker 1 asks, in a loop of one's own."""
    return stops_of_worker_1(strategy, folder, data, by_loop=True)
