"""Runs that note what each replica draws, for tests/core/test_seeds.py and for the processes that it starts."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np

NUM_FEATURES = 24
Draws = dict[int, list[tuple[Any, ...]]]


def noting_model(strategy: Any, **arguments: Any) -> Any:
    """A model with two dropouts, keras.random without a seed, and tf.random, that notes what its replicas draw."""
    import keras
    import tensorflow as tf

    import keras_dist_ext as kde

    class Noting(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dropout(0.5)
            self.second = keras.layers.Dropout(0.5, seed=3)
            self.head = keras.layers.Dense(1, kernel_initializer="ones")
            self.draws = {}

        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                return self.head(x)
            ones = tf.ones([2, NUM_FEATURES])
            drawn = [
                self.first(ones, training=True),
                self.second(ones, training=True),
                keras.random.uniform((NUM_FEATURES,)),
                tf.random.uniform((NUM_FEATURES,)),
            ]
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            with tf.device("CPU:0"):
                tf.py_function(self.note, [replica, *drawn], [])
            return self.head(x)

        def note(self, replica: Any, *drawn: Any) -> None:
            self.draws.setdefault(int(replica), []).append(tuple(tuple(np.asarray(d).ravel()) for d in drawn))

    with strategy.scope():
        model = Noting()
        # Without the check, which runs steps that run eagerly once more, and what they note.
        model.compile(keras.optimizers.SGD(1e-3), "mse", check=False, **arguments)
    return model


def draws(
    strategy: Any, seed: int | None = 42, *, epochs: int = 2, num_fits: int = 1, model: Any = None, **arguments: Any
) -> Draws:
    """What each replica of this process draws in ``epochs`` epochs of 3 steps each."""
    import keras_dist_ext as kde

    model = model or noting_model(strategy, **arguments)
    x, y = np.ones((24, NUM_FEATURES), "float32"), np.zeros((24, 1), "float32")
    callbacks = [] if seed is None else [kde.ReplicaSeeds(seed)]
    for _ in range(num_fits):
        model.fit(x, y, batch_size=8, epochs=epochs // num_fits, verbose=0, callbacks=callbacks)
    return {replica: list(steps) for replica, steps in model.draws.items()}  # Keras tracks dicts by its own classes


def draws_in_new_process() -> Draws:
    """The draws of two logical devices."""
    import keras_dist_ext as kde

    return draws(kde.pick_strategy("mirrored", num_replicas=2, environ={}).strategy)


def order_of_data(
    kind: str,
    *,
    strategy: Any,
    epochs: int = 2,
    num_fits: int = 1,
    seed: int | None = 42,
    global_seed: int | None = None,
) -> list[Any]:
    """The examples, named by their targets, in the order in which steps met them; a list an epoch."""
    import keras
    import tensorflow as tf

    import keras_dist_ext as kde

    tf.random.set_seed(global_seed)  # tf.data gives it to every shuffle and random op, if it is set
    ids = np.arange(12, dtype="float32")[:, None]

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            return ids[4 * i : 4 * i + 4], ids[4 * i : 4 * i + 4]

    def dataset(*, cached: bool = False) -> Any:
        data = tf.data.Dataset.from_tensor_slices((ids, ids))
        return (data.cache() if cached else data).shuffle(12).batch(4)

    def noisy(x: Any, y: Any) -> Any:
        return x, y + tf.random.uniform(tf.shape(y))

    make: dict[str, Callable[[], Any]] = {
        "numpy": lambda: (ids, ids),
        "tf.data": dataset,
        "tf.data, cached": lambda: dataset(cached=True),
        "tf.data, random map": lambda: tf.data.Dataset.from_tensor_slices((ids, ids)).batch(4).map(noisy),
        "PyDataset": Batches,
        "PyDataset, threads": lambda: Batches(workers=2),
    }
    met: list[list[float]] = []

    class Noting(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(1, kernel_initializer="zeros")

        def call(self, x: Any) -> Any:
            return self.head(x)

        def compute_loss(self, x: Any = None, y: Any = None, *rest: Any, **named: Any) -> Any:
            with tf.device("CPU:0"):
                tf.py_function(lambda y: met[-1].extend(np.asarray(y).ravel().tolist()), [y], [])
            return super().compute_loss(x, y, *rest, **named)

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            met.append([])

    with strategy.scope():
        model = Noting()
        model.compile(keras.optimizers.SGD(0.0), "mse")
    data = make[kind]()
    callbacks = [Epochs()] if seed is None else [Epochs(), kde.ReplicaSeeds(seed)]
    for _ in range(num_fits):
        model.fit(
            *(data if isinstance(data, tuple) else (data,)), epochs=epochs // num_fits, batch_size=4, verbose=0,
            shuffle=True, callbacks=callbacks,
        )  # fmt: skip
    return met


def worker_draws(strategy: Any, folder: pathlib.Path) -> tuple[Draws, tuple[float, float]]:
    """What one of two workers draws, in steps and then outside of them."""
    return draws(strategy), (random.random(), float(np.random.random()))


def worker_draws_otherwise(strategy: Any, folder: pathlib.Path) -> dict[str, Any]:
    """What one of two workers draws by other runs, and of its data."""
    return {
        "by one step an execution": draws(strategy, steps_per_execution=1),
        "orders": {k: order_of_data(k, strategy=strategy) for k in ("numpy", "tf.data", "PyDataset, threads")},
        "weights": [w.tolist() for w in trained_weights(strategy)],
        "restored": restored_draws(strategy),
    }


def trained_weights(strategy: Any, **arguments: Any) -> list[np.ndarray]:
    """The weights of a small network with dropout and noise after some epochs over shuffled data."""
    import keras

    import keras_dist_ext as kde

    random_numbers = np.random.default_rng(0)
    x = random_numbers.normal(size=(64, 12)).astype("float32")
    y = x[:, :1] * 2
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = kde.Sequential(
            [
                keras.Input((12,)),
                keras.layers.Dense(16, "relu"),
                keras.layers.Dropout(0.3),
                keras.layers.GaussianNoise(0.1),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", **arguments)
    model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[kde.ReplicaSeeds(5)])
    return model.get_weights()  # type: ignore[no-any-return]


def restored_draws(strategy: Any) -> Draws:
    """The draws of a run of 4 epochs that was interrupted after two, and went on from BackupAndRestore's files."""
    import tempfile

    import keras

    import keras_dist_ext as kde

    folder = tempfile.mkdtemp()
    x, y = np.ones((24, NUM_FEATURES), "float32"), np.zeros((24, 1), "float32")

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise RuntimeError("interrupted")

    drawn: Draws = {}
    for more in ([Fail()], []):
        model = noting_model(strategy)
        model.build((None, NUM_FEATURES))
        backup = keras.callbacks.BackupAndRestore(folder)
        try:
            model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[kde.ReplicaSeeds(42), backup, *more])
        except RuntimeError:
            assert more
        for replica, steps in model.draws.items():
            drawn.setdefault(replica, []).extend(list(steps))
    return drawn


def deterministic_weights() -> list[np.ndarray]:
    """Weights after a run with TensorFlow's deterministic ops."""
    import keras

    import keras_dist_ext as kde

    strategy = kde.pick_strategy("mirrored", num_replicas=2, environ={}).strategy
    random_numbers = np.random.default_rng(0)
    x = random_numbers.normal(size=(64, 8, 8, 1)).astype("float32")
    y = random_numbers.integers(0, 4, 64)
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = kde.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.SpatialDropout2D(0.2),
                keras.layers.Flatten(),
                keras.layers.Dense(4),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    seeds = kde.ReplicaSeeds(5, enable_op_determinism=True)
    model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[seeds])
    return model.get_weights()  # type: ignore[no-any-return]
