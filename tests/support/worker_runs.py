"""What each of two workers does in tests/workers/test_workers.py: small runs, whose values the tests compare."""

from __future__ import annotations

import contextlib
import pathlib
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

NUM_EXAMPLES = 29
BROADCAST_SIZES = (0, 1, 8, 1001, (8 << 20) + 3)


def run_cases(strategy: Any, folder: pathlib.Path, *names: str) -> dict[str, Any]:
    """Run cases in this worker, and return their values by name."""
    worker = strategy.cluster_resolver.task_id
    cases = {**DATA_CASES, **RUN_CASES}
    return {name: cases[name](strategy, worker, folder) for name in names}


def ids() -> np.ndarray:
    return np.arange(NUM_EXAMPLES, dtype="float32")[:, None]


def counting_model(strategy: Any) -> Any:
    """A model whose metric 'seen' is the number of times that each example, named by its target, was used."""
    import keras

    import keras_dist_ext as kde

    class Seen(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="seen")
            self.counts = self.add_weight(shape=(NUM_EXAMPLES,), initializer="zeros", name="counts")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            one_hot = keras.ops.one_hot(keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32"), NUM_EXAMPLES)
            self.counts.assign_add(keras.ops.sum(one_hot, axis=0))

        def result(self) -> Any:
            return keras.ops.convert_to_tensor(self.counts)

    with strategy.scope():
        keras.utils.set_random_seed(7)
        model = kde.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1e-4), "mse", metrics=[Seen()])
    return model


def seen(strategy: Any, data: Any, **arguments: Any) -> list[list[float]]:
    """How often each example was used, for each of two epochs."""
    import keras

    model = counting_model(strategy)
    epochs: list[list[float]] = []
    last = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epochs.append(np.asarray(logs["seen"]).tolist())
    )
    model.fit(*(data if isinstance(data, tuple) else (data,)), epochs=2, verbose=0, callbacks=[last], **arguments)
    return epochs


def dataset(policy: str | None = None, *, shuffle: bool = True, of: Any = None) -> Any:
    import tensorflow as tf

    rows = ids() if of is None else of
    data = tf.data.Dataset.from_tensor_slices((rows, rows))
    data = (data.shuffle(NUM_EXAMPLES) if shuffle else data).batch(8)
    options = tf.data.Options()
    if policy is not None:
        options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    return data.with_options(options)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, NUM_EXAMPLES, 8):
        yield ids()[start : start + 8], ids()[start : start + 8]


def py_dataset() -> Any:
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            return ids()[8 * i : 8 * i + 8], ids()[8 * i : 8 * i + 8]

    return Batches(workers=2)


def endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield from batches()


Case = Callable[[Any, int, pathlib.Path], Any]
DATA_CASES: dict[str, Case] = {
    "numpy, shuffled": lambda s, w, _: seen(s, (ids(), ids()), batch_size=8),
    "tf.data, shuffled without a seed": lambda s, w, _: seen(s, dataset()),
    "AutoShardPolicy.DATA": lambda s, w, _: seen(s, dataset("DATA")),
    "AutoShardPolicy.FILE": lambda s, w, _: seen(s, dataset("FILE")),
    "AutoShardPolicy.OFF, the same batches": lambda s, w, _: seen(s, dataset("OFF", shuffle=False)),
    "AutoShardPolicy.OFF, 20 and 9 rows": lambda s, w, _: seen(s, dataset("OFF", of=ids()[:20] if w else ids()[20:])),
    "AutoShardPolicy.OFF, 29 and 0 rows": lambda s, w, _: seen(s, dataset("OFF", of=ids() if w else ids()[:0])),
    "Dataset.shard by worker": lambda s, w, _: seen(s, dataset(shuffle=False).unbatch().shard(2, w).batch(4)),
    "generator": lambda s, w, _: seen(s, endless(), steps_per_epoch=4),
    "PyDataset, shuffled, with threads": lambda s, w, _: seen(s, py_dataset()),
    "filter, of unknown length": lambda s, w, _: seen(s, dataset().filter(lambda x, y: True)),
    "distributed dataset": lambda s, w, _: seen(s, s.experimental_distribute_dataset(dataset(shuffle=False))),
}


def stops_from_worker_1(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Worker 1 asks to stop after the third batch; both must end there, after the same number of updates."""
    import keras

    model = counting_model(strategy)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if worker == 1 and batch == 2:
                self.model.stop_training = True

    model.fit(ids(), ids(), batch_size=2, epochs=4, verbose=0, callbacks=[Stop()])
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations)), len(model.history.epoch)


def stops_after_epoch(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    import keras

    model = counting_model(strategy)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if worker == 1 and epoch == 1:
                self.model.stop_training = True

    model.fit(ids(), ids(), batch_size=8, epochs=4, verbose=0, callbacks=[Stop()])
    return model.history.epoch


def writes_from_chief(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Keras' writing callbacks on paths that both workers share."""
    import keras

    model = counting_model(strategy)
    with strategy.scope():
        model.compile("sgd", "mse", metrics=["mae"])  # TensorBoard takes no vectors
    shared = folder / "shared"
    callbacks = [
        keras.callbacks.ModelCheckpoint(shared / "model-{epoch}.keras"),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.TensorBoard(str(shared / "tensorboard")),
        keras.callbacks.BackupAndRestore(str(shared / "backup")),
        keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1),
    ]
    model.fit(ids(), ids(), batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    if not worker:
        with strategy.scope():
            model.save(shared / "by hand.keras")
    model.evaluate(ids(), ids(), verbose=0)  # together, as before
    if worker:
        return []  # the chief may still be removing its backup
    return sorted(p.name for p in shared.rglob("*") if p.is_file())


def restores_from_chief(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """An interrupted run goes on from the chief's backup, with equal weights on both workers."""
    import keras

    backup = folder / f"backup_of_{worker}"  # worker 1 cannot see the chief's

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise RuntimeError("interrupted")

    def fit(callbacks: list[Any]) -> Any:
        model = counting_model(strategy)
        model.fit(
            ids(), ids(), batch_size=8, epochs=4, shuffle=False, verbose=0,
            callbacks=[keras.callbacks.BackupAndRestore(str(backup)), *callbacks],
        )  # fmt: skip
        return model

    with contextlib.suppress(RuntimeError):
        fit([Fail()])
    resumed = fit([])
    whole = counting_model(strategy)
    whole.fit(ids(), ids(), batch_size=8, epochs=4, shuffle=False, verbose=0)
    return resumed.history.epoch, resumed.get_weights(), whole.get_weights()


def predicts_in_order(strategy: Any, worker: int, folder: pathlib.Path) -> Any:

    model = counting_model(strategy)
    model.layers[-1].set_weights([np.ones((1, 1)), np.zeros(1)])
    predicted = model.predict(ids(), batch_size=5, verbose=0).ravel().tolist()
    on_batch = model.predict_on_batch(ids()[:7]).ravel().tolist()
    train_loss = model.train_on_batch(ids()[:7], ids()[:7] + 1, return_dict=True)["loss"]
    model.reset_metrics()  # which Keras does by itself since 3.15
    return predicted, on_batch, train_loss, model.test_on_batch(ids()[:1], ids()[:1], return_dict=True)["loss"]


def accumulates(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Gradients that are left over from an epoch are whole on every worker."""
    import keras

    model = counting_model(strategy)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(1e-4, gradient_accumulation_steps=3), "mse")
    model.fit(ids(), ids(), batch_size=8, epochs=1, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(a).tolist() for a in model.optimizer._accumulated_gradients]


def trained_with_draws(strategy: Any) -> list[list[float]]:
    """The weights after two epochs with noise and batch statistics as on one device; the last batch has one row."""
    import keras

    import keras_dist_ext as kde

    keras.utils.set_random_seed(7)
    with strategy.scope():
        random = [keras.layers.Dropout(0.3), keras.layers.GaussianNoise(0.1), keras.layers.BatchNormalization()]
        model = kde.Sequential([keras.Input((1,)), keras.layers.Dense(8), *random, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), "mse", batch_statistics="global")
    seeds = kde.ReplicaSeeds(42, draws="global")
    model.fit(ids(), ids(), batch_size=7, epochs=2, shuffle=False, verbose=0, callbacks=[seeds])
    return [weight.tolist() for weight in model.get_weights()]


def draws_globally(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Weights that depend on what all workers have drawn."""
    return trained_with_draws(strategy)


def said_while(run: Callable[[], Any], part: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if part in str(warning.message)]


def warns_of_other_data(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """How often each kind of data is warned of; each worker has other values, as after `x[worker::2]`."""
    import tensorflow as tf

    model = counting_model(strategy)
    own = ids()[::-1].copy() if worker else ids()
    files = [f"/scratch/{worker}/{name}" for name in "ab"]
    sliced = tf.data.Dataset.from_tensor_slices

    def read(names: Any) -> Any:
        return sliced(names).map(lambda name: (tf.ones([1]), tf.ones([1]))).batch(2)

    cases: dict[str, Callable[[], Any]] = {
        "arrays": lambda: model.fit(own, own, batch_size=8, verbose=0),
        "tf.data": lambda: model.evaluate(sliced((own, own)).batch(8), verbose=0),
        "files": lambda: model.evaluate(read(files), verbose=0),
        "generator": lambda: model.evaluate(((b, b) for b in [own[:8]]), verbose=0),
        "a batch": lambda: [model.train_on_batch(own[:8], own[:8]) for _ in range(2)],
        "the same": lambda: model.fit(ids(), ids(), batch_size=8, verbose=0),
    }
    return {name: len(said_while(case, "were given data that differs")) for name, case in cases.items()}


def takes_over_values(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """The chief alone sets weights before a run."""
    model = counting_model(strategy)
    if worker == 0:
        model.layers[-1].set_weights([np.full((1, 1), 3.0), np.ones(1)])
    said = said_while(lambda: model.fit(ids(), ids(), batch_size=8, verbose=0), "differs between replica")
    return said, [weight.tolist() for weight in model.get_weights()]


def rates_part(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    import keras

    import keras_dist_ext as kde

    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * (1 + epoch * worker))
    try:
        counting_model(strategy).fit(ids() / 100, ids(), batch_size=8, epochs=3, verbose=0, callbacks=[rates])
    except kde.WorkersError as error:
        return str(error)
    return ""


def every_batch(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Worker 1 alone has a callback that looks at batches."""
    import keras

    seen: list[int] = []
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model = counting_model(strategy)
    model.fit(ids(), ids(), batch_size=2, verbose=0, callbacks=[look] if worker else [])
    return seen


def steps_at_once(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """The most steps of an execution, with a callback that saves after each epoch."""
    import keras

    from keras_dist_ext.training.execution import Execution

    most = 0
    run = Execution.run

    def watched(execution: Any, program: Any) -> Any:
        nonlocal most
        most = max(most, execution.num_steps)
        return run(execution, program)

    Execution.run = watched  # type: ignore[method-assign]
    try:
        save = keras.callbacks.ModelCheckpoint(str(folder / "steps.weights.h5"), save_weights_only=True)
        counting_model(strategy).fit(ids(), ids(), batch_size=2, epochs=3, verbose=0, callbacks=[save])
    finally:
        Execution.run = run  # type: ignore[method-assign]
    return most


def broadcasts(strategy: Any, worker: int, folder: pathlib.Path) -> dict[int, int]:
    """Broadcast bytes of several sizes, the last one in parts; return checksums of what came out, by size."""
    from keras_dist_ext.strategy.workers import workers_of

    workers = workers_of(strategy)
    assert workers is not None
    found: dict[int, int] = {}
    for size in BROADCAST_SIZES:
        mine = np.random.default_rng([size, worker]).bytes(size)
        found[size] = zlib.crc32(workers.broadcast_bytes(mine))
    return found


def total_loss(y: Any, y_pred: Any) -> Any:
    """A sum over examples that no graph tells from a mean."""
    import tensorflow as tf

    return tf.foldl(lambda total, value: total + value, tf.reduce_sum(tf.square(y - y_pred), axis=-1))


def trained_by(loss: Any, lib: Any) -> list[float]:
    """Train a small model by a loss, and return its weights."""
    import keras
    import tensorflow as tf

    x = np.linspace(-1, 1, 14, dtype="float32")[:, None]
    model = lib.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.01), loss)
    model.fit(tf.data.Dataset.from_tensor_slices((x, x * x)).batch(7), shuffle=False, verbose=0)
    return [float(w.ravel()[0]) for w in model.get_weights()]


def trained_in_16_bits(lib: Any, gradient_compression: str | None, **fit: Any) -> tuple[Any, list[np.ndarray]]:
    """Train a model of two layers by Adam on data that its weights, and their gradients, differ in; return it."""
    import keras

    random = np.random.default_rng(0)
    x = random.normal(size=(96, 12)).astype("float32")
    y = np.sin(x @ random.normal(size=(12, 3))).astype("float32")
    keras.utils.set_random_seed(3)
    model = lib.Sequential([keras.layers.Input((12,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
    given = {} if gradient_compression is None else {"gradient_compression": gradient_compression}
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **given)
    model.fit(x, y, batch_size=24, epochs=5, shuffle=False, verbose=0, **fit)
    return model, model.get_weights()


def sums_in_16_bits(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Return what two workers train with gradients in 16 bits and in 32, and what is said of it, also by a save."""
    import keras

    import keras_dist_ext as kde

    with strategy.scope():
        _, whole = trained_in_16_bits(kde, None)
        model, rounded = trained_in_16_bits(kde, "bfloat16")
    path = folder / "model.keras"
    model.save(path)
    loaded = kde.load_model(path, strategy)
    kinds = [m.replica_runtime.compression is not None for m in (model, loaded, kde.adopt(loaded, strategy))]
    return whole, rounded, kinds, keras.saving.load_model(path).get_weights()


def sums_in_packs(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Train with sums of 200 bytes and more, without a guard and with one; return weights and packs."""
    import tensorflow as tf
    from tensorflow.python.distribute import cross_device_utils

    import keras_dist_ext as kde
    from keras_dist_ext._keras.interception import patched

    extended, group = strategy.extended, cross_device_utils.group_by_size
    packs: list[list[list[tuple[int, ...]]]] = []

    def noted(values: Any, bytes_per_pack: int) -> Any:
        grouped = group(values, bytes_per_pack)
        if not tf.executing_eagerly():
            packs.append([[tuple(value.shape) for value in pack] for pack in grouped])
        return grouped

    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=200)  # as `pick_strategy` gives them
    trained = []
    with patched(extended, "_communication_options", options), patched(cross_device_utils, "group_by_size", noted):
        for callbacks in ([], [kde.NonFinite()]):
            packs.clear()
            with strategy.scope():
                _, weights = trained_in_16_bits(kde, None, callbacks=callbacks)
            trained.append((weights, [one for one in packs if any((12, 16) in pack for pack in one)]))
    return trained


def measures_and_checks(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    import tensorflow as tf

    import keras_dist_ext as kde

    weights: list[float] = []

    def train(loss: Any) -> None:
        with strategy.scope():
            weights.extend(trained_by(loss, kde))

    said = said_while(lambda: train(total_loss), "does not train on")
    largest = said_while(lambda: train(lambda y, p: tf.reduce_max(tf.square(y - p))), "does not train on")
    return weights[:2], said, largest


def makes_parts_in_the_step(strategy: Any, worker: int, folder: pathlib.Path) -> Any:
    """Return what models give whose parts their steps make, and what `fit` says of layers that learnt other data."""
    import keras
    import own_steps

    import keras_dist_ext as kde

    results = {name: own_steps.run(name, own_steps.Base(kde, strategy)) for name in own_steps.ON_WORKERS}
    normalize = keras.layers.Normalization()
    normalize.adapt(ids() + worker)
    with strategy.scope():
        net = kde.Sequential([keras.Input((1,)), normalize, keras.layers.Dense(1)])
        net.compile("sgd", "mse")
    try:
        net.fit(ids(), ids(), verbose=0)
    except kde.WorkersError as error:
        return results, str(error)
    return results, ""


def counts_from_five(strategy: Any, worker: int, folder: pathlib.Path) -> list[float]:
    """A sum that each replica holds a part of, as it is made, after training, assigned, loaded and trained again."""
    import keras
    import tensorflow as tf

    import keras_dist_ext as kde
    from keras_dist_ext.training.loop import plain_variables

    class Seen(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            of_sum = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
            self.count = tf.Variable(5, trainable=False, **of_sum)

        def call(self, x: Any) -> Any:
            self.count.assign_add(tf.shape(x)[0])
            return x

    with strategy.scope():
        seen = Seen()
        model = kde.Sequential([keras.Input((1,)), seen, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    found = [seen.count.numpy()]
    model.fit(ids() / 100, ids(), batch_size=8, verbose=0)
    found.append(seen.count.numpy())
    with strategy.scope():
        seen.count.assign(7)
    found.append(seen.count.numpy())
    plain_variables.set_value(seen.count, np.int32(11))
    found.append(seen.count.numpy())
    model.fit(ids() / 100, ids(), batch_size=8, verbose=0)
    return [int(value) for value in [*found, seen.count.numpy()]]


RUN_CASES: dict[str, Case] = {
    "counts from five": counts_from_five,
    "sums in 16 bits": sums_in_16_bits,
    "sums in packs": sums_in_packs,
    "measures and checks": measures_and_checks,
    "warns of other data": warns_of_other_data,
    "takes over values": takes_over_values,
    "rates part": rates_part,
    "every batch": every_batch,
    "steps at once": steps_at_once,
    "stops from worker 1": stops_from_worker_1,
    "stops after an epoch": stops_after_epoch,
    "writes from the chief": writes_from_chief,
    "restores from the chief": restores_from_chief,
    "predicts in order": predicts_in_order,
    "broadcasts bytes": broadcasts,
    "accumulates": accumulates,
    "draws globally": draws_globally,
    "makes parts in the step": makes_parts_in_the_step,
}
