"""Train one row of the table on one device or under a strategy, and say where two outcomes differ."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from conformance.feeds import Feed, Serve
from conformance.models import Build, Library

Outcome = dict[str, Any]
"""What can be seen from outside: weights, optimizer.iterations, History, results and predictions; plain values only."""

SEED = 20
# Every kind of strategy of tests/strategies.py, and two worker processes.
IN_PROCESS = ("mirrored3", "mirrored2", "mirrored4", "one_device", "default")
WORKERS = "workers2"
ROUNDING = 1e-5


class Recorder(keras.callbacks.Callback):
    """Keep the logs of every batch, as a user's own callback would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.train: list[tuple[int, dict[str, Any]]] = []
        self.test: list[tuple[int, dict[str, Any]]] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.train.append((batch, plain(logs or {})))

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.test.append((batch, plain(logs or {})))


def fit_evaluate_predict(model: keras.Model, feed: Feed) -> Outcome:
    """Do what most users do."""
    history = model.fit(**feed.fit, verbose=0)
    outcome = {"history": history.history, "epochs": history.epoch, **state(model), **feed.seen()}
    if feed.evaluate is not None:
        outcome["evaluate"] = model.evaluate(**feed.evaluate, verbose=0, return_dict=True)
        outcome["evaluate in order"] = list(outcome["evaluate"].values())
    if feed.predict is not None:
        outcome["predict"] = model.predict(**feed.predict, verbose=0)
    return plain(outcome)


def fit_only(model: keras.Model, feed: Feed) -> Outcome:
    """Train, for rows about training alone."""
    history = model.fit(**feed.fit, verbose=0)
    return plain({"history": history.history, **state(model), **feed.seen()})


def fit_with_batch_logs(model: keras.Model, feed: Feed) -> Outcome:
    """Look at the logs of every batch while training and evaluating."""
    recorder = Recorder()
    outcome = fit_evaluate_predict(
        model,
        Feed(
            fit={**feed.fit, "callbacks": [recorder]},
            evaluate={**(feed.evaluate or {}), "callbacks": [recorder]},
            predict=feed.predict,
            seen=feed.seen,
        ),
    )
    outcome |= {"train logs": [logs for _, logs in recorder.train], "test logs": [logs for _, logs in recorder.test]}
    # With more, Keras numbers the last execution by the batch at which it would end if the data were long enough.
    if model.steps_per_execution == 1:
        outcome["numbers"] = [number for number, _ in (*recorder.train, *recorder.test)]
    return outcome


def state(model: keras.Model) -> Outcome:
    """Read weights, and how many updates the optimizer believes it made."""
    found: Outcome = {"weights": {index: weight.numpy() for index, weight in enumerate(model.weights)}}
    if getattr(model, "optimizer", None) is not None:
        found["iterations"] = int(model.optimizer.iterations.numpy())
        found["learning rate"] = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        if hasattr(model.optimizer, "dynamic_scale"):
            found["loss scale"] = float(model.optimizer.dynamic_scale.numpy())
    return found


def plain(value: Any) -> Any:
    """Turn tensors into arrays, so that an outcome can be pickled and sent to another process."""
    return keras.tree.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, value)


@dataclass(frozen=True, eq=False)
class Row:
    """One behaviour: N replicas do with it what one device does."""

    name: str
    build: Build
    compile: Callable[[], dict[str, Any]]
    serve: Serve
    on_one_device: Mapping[str, Any] = field(default_factory=dict)
    """What one device does differently, where Keras itself miscounts; the reason is beside the row."""
    act: Callable[[keras.Model, Feed], Outcome] = fit_evaluate_predict
    """What is done with the model, and what is looked at."""
    tolerance: float = ROUNDING
    """Largest difference, relative to the largest absolute value of the tensor, in float32 rounding after tens of
    steps. More has its reason beside the row."""
    under: tuple[str, ...] = (*IN_PROCESS, WORKERS)
    quick: bool = False
    """Whether the quick run has this row."""
    warns: str | None = None
    """The start of a warning of ours that the row may cause."""

    def __str__(self) -> str:
        return self.name


def run_on_one_device(row: Row) -> Outcome:
    """Run a row as the definition of right does: stock Keras, without a strategy."""
    return run(replace(row, **row.on_one_device), keras, None)


def run(row: Row, library: Library, strategy: tf.distribute.Strategy | None) -> Outcome:
    """Build, compile and use the row's model with equal initial weights; `None` is one device, without strategy."""
    keras.utils.clear_session()  # names count from the start, and the graphs of the last row are freed
    keras.utils.set_random_seed(SEED)
    scope = strategy.scope() if strategy is not None else contextlib.nullcontext()
    with warnings_of(row):
        with scope:
            model = row.build(library)
            model.compile(**row.compile())
        outcome = row.act(model, row.serve(strategy))
    for weight in model.trainable_weights:
        copies = [copy.numpy() for copy in getattr(weight.value, "values", [weight.value])]
        if not all(np.array_equal(copies[0], copy, equal_nan=True) for copy in copies):
            outcome[f"copies of {weight.path} that replicas disagree on"] = copies
    return outcome


@contextlib.contextmanager
def warnings_of(row: Row) -> Iterator[None]:
    """Let the row's own warning pass; pytest makes errors of all others."""
    with warnings.catch_warnings():
        if row.warns is not None:
            warnings.filterwarnings("ignore", message=row.warns)
        yield


def differences(expected: Any, found: Any, tolerance: float, where: str = "") -> list[str]:
    """Say in which leaves two outcomes differ; the order of keys counts."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if list(expected) != list(found):
            return [f"{where}: has {list(found)}, one device has {list(expected)}"]
        return [
            line for key in expected for line in differences(expected[key], found[key], tolerance, f"{where}/{key}")
        ]
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(expected) != len(found):
            return [f"{where}: has {len(found)} values, one device has {len(expected)}: {found} for {expected}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for i, (one, other) in pairs for line in differences(one, other, tolerance, f"{where}/{i}")]
    one, other = np.asarray(expected), np.asarray(found)
    if one.shape != other.shape or one.dtype.kind != other.dtype.kind:
        return [f"{where}: is {other.dtype}{other.shape}, on one device {one.dtype}{one.shape}"]
    if one.dtype.kind not in "fV":  # V: bfloat16
        return [] if np.array_equal(one, other) else [f"{where}: is {other}, on one device {one}"]
    one, other = one.astype("float64"), other.astype("float64")
    if not np.isfinite(one).all():
        return [f"{where}: one device itself is not finite, the row shows nothing: {one}"]
    # A tensor whose gradient is zero, as attention's key bias, holds rounding alone: 1e-9, next to weights of about 1.
    scale = max(np.abs(one).max(initial=0.0), 1e-3)
    worst = np.abs(one - other).max(initial=0.0) / scale
    return [] if worst <= tolerance else [f"{where}: off by {worst:.1e} of {scale:.3g}: is {other}, one device {one}"]
