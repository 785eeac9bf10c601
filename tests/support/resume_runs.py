"""Runs that tests/core/test_resume.py interrupts: small, but with all that a run can depend on.

    python tests/support/resume_runs.py CASE FOLDER [--kill-at BATCH] [--devices N] ...

A run writes what it has ended with to FOLDER/ended.npz, or dies before by SIGKILL.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

NUM_EXAMPLES, BATCH, EPOCHS = 44, 8, 3  # 6 batches an epoch, the last of 4 rows
X = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 4)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")


class Crash(Exception):
    """Stands for whatever ends a process."""


# Data: what fit is given


def tf_data(*stages: Callable[[Any], Any]) -> Any:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y))
    for stage in stages:
        data = stage(data)
    return data


def noisy(x: Any, y: Any) -> Any:
    import tensorflow as tf

    return x + tf.random.normal([4], stddev=0.1), y


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    order = np.random.default_rng(5).permutation(NUM_EXAMPLES)
    for begin in range(0, NUM_EXAMPLES, BATCH):
        yield X[order[begin : begin + BATCH]], Y[order[begin : begin + BATCH]]


class Endless:
    """Batches for ever, from any place on."""

    def __init__(self) -> None:
        self.number = 0

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.random.default_rng(self.number).permutation(NUM_EXAMPLES)[:BATCH]
        self.number += 1
        return X[rows], Y[rows]

    def seek(self, batch: int) -> None:
        self.number = batch


def py_dataset(**options: Any) -> Any:
    import keras

    class Batches(keras.utils.PyDataset):
        """Chooses its rows anew at the end of each epoch."""

        def __init__(self) -> None:
            super().__init__(**options)
            self.random = np.random.default_rng(3)
            self.order = np.arange(NUM_EXAMPLES)
            self.asked: list[int] = []

        def __len__(self) -> int:
            return -(-NUM_EXAMPLES // BATCH)

        def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
            self.asked.append(number)
            rows = self.order[number * BATCH : (number + 1) * BATCH]
            return X[rows], Y[rows]

        def on_epoch_end(self) -> None:
            self.random.shuffle(self.order)

    return Batches()


def from_generator() -> Any:
    import tensorflow as tf

    specs = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(batches, output_signature=specs)


Given = dict[str, Any]
DATA: dict[str, Callable[[], Given]] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays by batch": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": "batch"},
    "shuffled": lambda: {"x": tf_data(lambda d: d.shuffle(NUM_EXAMPLES), lambda d: d.batch(BATCH))},
    "shuffled by a seed": lambda: {"x": tf_data(lambda d: d.shuffle(20, seed=7), lambda d: d.batch(BATCH))},
    "plain": lambda: {
        "x": tf_data(lambda d: d.map(lambda x, y: (2.0 * x, y)).batch(BATCH).repeat().prefetch(2)),
        "steps_per_epoch": 5,
    },
    "noisy": lambda: {"x": tf_data(lambda d: d.map(noisy), lambda d: d.shuffle(20), lambda d: d.batch(BATCH))},
    "cached, then shuffled by a seed": lambda: {
        "x": tf_data(lambda d: d.cache(), lambda d: d.shuffle(20, seed=7), lambda d: d.batch(BATCH))
    },
    "shuffled, then cached": lambda: {
        "x": tf_data(lambda d: d.shuffle(20), lambda d: d.cache(), lambda d: d.shuffle(9), lambda d: d.batch(BATCH))
    },
    "endless": lambda: {
        "x": tf_data(lambda d: d.shuffle(20).batch(BATCH).repeat()),
        "steps_per_epoch": 5,
    },
    "longer than an epoch": lambda: {
        "x": tf_data(lambda d: d.shuffle(20, seed=7).batch(4)),  # 11 batches
        "steps_per_epoch": 5,
    },
    "of unknown length": lambda: {
        "x": tf_data(lambda d: d.filter(lambda x, y: x[0] > -1.5).shuffle(20).batch(BATCH)),
    },
    "from_generator": lambda: {"x": from_generator()},
    "PyDataset": lambda: {"x": py_dataset()},
    "PyDataset with threads": lambda: {"x": py_dataset(workers=2)},
    "seekable": lambda: {"x": Endless(), "steps_per_epoch": 5},
}


# Models and callbacks


def build(strategy: Any, options: dict[str, Any]) -> Any:
    import keras

    import keras_dist_ext as kde

    optimizers = {
        "adam": lambda: keras.optimizers.Adam(0.05),
        "accumulating": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=4),
        "averaging": lambda: keras.optimizers.SGD(
            0.05, momentum=0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=None
        ),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.05), initial_scale=2.0**13, dynamic_growth_steps=3
        ),
    }
    keras.utils.set_random_seed(options.get("seed", 1))
    with strategy.scope():
        model = kde.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, "relu"),
                *([keras.layers.BatchNormalization()] if options.get("normalizes", True) else []),
                keras.layers.Dropout(options.get("dropout", 0.3)),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )
        compiled = {name: options[name] for name in ("virtual_replicas", "steps_per_execution") if name in options}
        model.compile(
            optimizers[options.get("optimizer", "adam")](), "binary_crossentropy", metrics=["mae", "AUC"], **compiled
        )
    return model


def counting_callback() -> Any:
    import keras_dist_ext as kde

    class Count(kde.RunCallback):
        """Keeps many kinds of state."""

        supports_multi_step = True

        def __init__(self) -> None:
            super().__init__()
            self.by_epoch: collections.Counter[int] = collections.Counter()
            self.last = collections.deque(maxlen=3)  # type: ignore[var-annotated]
            self.seen: set[int] = set()
            self.pair: Any = None
            self.weights = np.zeros(3)
            self.drawn: list[float] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.by_epoch[epoch] += 1
            self.last.append(logs["loss"])
            self.seen.add(epoch)
            self.pair = (epoch, np.float32(logs["loss"]), {epoch: None})
            self.weights[epoch % 3] += logs["val_loss"]
            self.drawn.append(float(np.random.random()))

    return Count()


def crash_at(batch: int, kill: bool) -> Any:
    import keras
    from launching import wait_for_saves

    count = itertools.count(1)

    class CrashAt(keras.callbacks.Callback):
        """Ends the process after so many batches of its own: a resumed run must not take over the count."""

        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            if next(count) == batch:
                if kill:
                    wait_for_saves()  # or there might be none yet; test_chaos.py is about the middle of one
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Crash

    return CrashAt()


def run(
    strategy: Any,
    folder: Any,
    *,
    data: str = "arrays",
    crash_after: int | None = None,
    kill: bool = False,
    save_every: Any = 2,
    epochs: int = EPOCHS,
    more: Any = (),
    model: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return all that the run has ended with, by name."""
    import keras

    import keras_dist_ext as kde

    model = build(strategy, options) if model is None else model
    early = keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate * 0.9))
    count = counting_callback()
    resume = [] if folder is None else [kde.Resume(folder, save_every, **options.get("resume", {}))]
    callbacks = [
        *resume,
        *([kde.ReplicaSeeds(options["replica_seeds"])] if "replica_seeds" in options else []),
        early,
        plateau,
        decay,
        count,
        *more,
        *([] if crash_after is None else [crash_at(crash_after, kill)]),
    ]
    given = DATA[data]()
    validation = tf_data(lambda d: d.shuffle(20, seed=9).batch(11))
    history = model.fit(**given, epochs=epochs, verbose=0, callbacks=callbacks, validation_data=validation)
    return {**ended(model), **learned(early, plateau, count, history), "resumed": _resumed(resume)}


def _resumed(resume: list[Any]) -> Any:
    position = resume[0].resumed_from if resume else None
    return None if position is None else (position.epoch, position.step)


def ended(model: Any) -> dict[str, Any]:
    """What a model holds at the end."""
    import keras

    from keras_dist_ext.strategy.scope import optimizers

    values: dict[str, Any] = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    for name, optimizer in optimizers(model):
        for i, variable in enumerate(optimizer.variables):
            values[f"{name} {i}"] = keras.ops.convert_to_numpy(variable)
    values["seeds"] = {**model.replica_seeds.state(), "num_passes": model.replica_seeds.num_passes}
    return values


def learned(early: Any, plateau: Any, count: Any, history: Any) -> dict[str, Any]:
    """What callbacks know at the end."""
    return {
        "history": history.history,
        "epochs": history.epoch,
        "early": (early.wait, early.best, early.best_epoch),
        "best weights": [w.tolist() for w in early.best_weights],
        "plateau": (plateau.best, plateau.wait, plateau.cooldown_counter, abs(plateau.min_delta)),
        "count": repr((sorted(count.by_epoch.items()), list(count.last), count.seen, count.pair, count.weights)),
        "kinds": [type(v).__name__ for v in (count.by_epoch, count.last, count.seen, count.pair, count.pair[1])],
        "drawn": count.drawn,
    }


# Workers


OF_WORKERS: dict[str, Any] = {
    "data": "shuffled", "optimizer": "accumulating", "replica_seeds": 3, "resume": {"on_preemption": True}
}  # fmt: skip


def crash_and_resume(strategy: Any, folder: pathlib.Path) -> dict[str, Any]:
    """What each of two workers does: a run, and one that crashes on both and goes on."""
    here = folder / str(strategy.cluster_resolver.task_id)  # the workers share no directory
    values: dict[str, Any] = {"reference": run(strategy, here / "reference", **OF_WORKERS)}
    with contextlib.suppress(Crash):
        run(strategy, here / "crashed", crash_after=10, **OF_WORKERS)
    values["num_saves"] = len(list((here / "crashed").glob("*.kde")))
    values["resumed"] = run(strategy, here / "crashed", **OF_WORKERS)
    return values


def be_asked_to_end(strategy: Any, folder: pathlib.Path) -> dict[str, Any]:
    """What each of two workers does: a run, and one that worker 1 is asked to end, and that goes on."""
    import keras

    worker = strategy.cluster_resolver.task_id
    here = folder / str(worker)

    class Ask(keras.callbacks.Callback):
        num_batches = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.num_batches += 1
            if self.num_batches == 9 and worker == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    values: dict[str, Any] = {"reference": run(strategy, here / "reference", **OF_WORKERS)}
    try:
        run(strategy, here / "asked", save_every="1h", more=[Ask()], **OF_WORKERS)
    except SystemExit as ended:
        values["code"] = ended.code
    values["asked"] = run(strategy, here / "asked", save_every="1h", **OF_WORKERS)
    return values


def lose_worker_1(folder: str, options: dict[str, Any]) -> None:
    """Train until worker 1 is killed."""
    import keras
    from launching import wait_for_saves

    import keras_dist_ext as kde

    strategy = kde.pick_strategy("multi_worker").strategy
    worker = strategy.cluster_resolver.task_id
    waits = keras.callbacks.LambdaCallback(on_train_batch_end=wait_for_saves)
    crashes = {"crash_after": 11, "kill": True} if worker == 1 else {"crash_after": 1000}
    run(strategy, pathlib.Path(folder) / f"saves_{worker}", more=[waits], **crashes, **options)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """See that two runs have ended with the same bits."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for name in one:
        if name == "resumed":
            continue
        if isinstance(one[name], np.ndarray):
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
        else:
            assert one[name] == other[name], f"{name}: {one[name]} and {other[name]}"


def main() -> None:
    """Run in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--without-resume", action="store_true")
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()
    import tensorflow as tf

    import keras_dist_ext as kde

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    strategy = kde.pick_strategy(
        "mirrored" if arguments.devices > 1 else "one_device",
        devices=[f"CPU:{i}" for i in range(arguments.devices)],
        environ={},
    ).strategy
    values = run(strategy, None if arguments.without_resume else arguments.folder / "saves", **arguments.options)
    rest = {name: value for name, value in values.items() if not isinstance(value, np.ndarray)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    np.savez(arguments.folder / "ended.npz", rest=json.dumps(rest), **arrays)


def read_ended(folder: pathlib.Path) -> dict[str, Any]:
    """Return what a process has ended with."""
    with np.load(folder / "ended.npz") as file:
        return {**json.loads(str(file["rest"])), **{name: file[name] for name in file.files if name != "rest"}}


if __name__ == "__main__":
    sys.exit(main())
