"""What the suite for GPUs runs in processes of its own."""

import contextlib
import hashlib
import os
import pickle
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(61, 8)).astype("float32")
Y = (X @ np.linspace(-1, 1, 16).reshape(8, 2)).astype("float32")
WORDS = RANDOM.integers(0, 5, size=(61, 12)).astype("int32")  # of 5 words: every batch has each many times


def embedding(library: Any, optimizer: Any) -> Any:
    """A model whose embedding gets sparse gradients with many duplicates; call it in scope."""
    import keras

    model = library.Sequential(
        [
            keras.Input((12,), dtype="int32"),
            keras.layers.Embedding(7, 64),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def copies_differ(model: Any) -> list[str]:
    """Name the variables whose copies are not equal on all replicas, bit for bit."""
    found = []
    for variable in [*model.variables, *model.optimizer.variables]:
        copies = [copy.numpy() for copy in getattr(variable.value, "values", [variable.value])]
        if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
            apart = max(np.abs(copy.astype("float64") - copies[0]).max() for copy in copies)
            found.append(f"{variable.path} ({apart:.1e})")
    return found


def xla_of(row: Any) -> contextlib.AbstractContextManager[None]:
    """Leave it to our rule whether XLA compiles quick rows; have it compile no others, which would take long."""
    from keras_dist_ext._keras.interception import patched
    from keras_dist_ext.training import xla_rule

    return contextlib.nullcontext() if row.quick else patched(xla_rule, "_pays", lambda *_: False)


def sends_of(row: Any) -> contextlib.AbstractContextManager[None]:
    """Have the small batches of half the rows sent to GPUs ahead, as large ones are."""
    from keras_dist_ext._keras.interception import patched
    from keras_dist_ext.training import batch_devices

    is_sent = hashlib.sha256(row.name.encode()).digest()[1] % 2
    return patched(batch_devices, "LEAST_BYTES", 0) if is_sent else contextlib.nullcontext()


def rows(names: Sequence[str], folder: str, implementation: str) -> None:
    """Run rows of the conformance table in a worker that has one GPU for itself."""
    import gpus

    task = gpus.cut_for_worker()
    from conformance.rows import ROWS
    from conformance.run import run

    import keras_dist_ext as kde

    strategy = kde.pick_strategy("multi_worker", implementation=implementation).strategy
    for index, row in enumerate(row for row in ROWS if row.name in names):
        try:
            with xla_of(row), sends_of(row):
                outcome: Any = run(row, kde, strategy)
        except Exception:
            outcome = traceback.format_exc()
        path = Path(folder, f"{index}-worker{task}")
        path.with_suffix(".part").write_bytes(pickle.dumps((row.name, task, outcome)))
        os.replace(path.with_suffix(".part"), path.with_suffix(".pkl"))


def digests_of_workers(folder: str, implementation: str) -> None:
    """Train an embedding in a worker, and leave a digest of its weights."""
    import gpus

    task = gpus.cut_for_worker()
    import keras

    import keras_dist_ext as kde

    strategy = kde.pick_strategy("multi_worker", implementation=implementation).strategy
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = embedding(kde, keras.optimizers.Adam(0.01))
    model.fit(WORDS, Y, batch_size=16, epochs=5, verbose=0)
    digest = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.get_weights())).hexdigest()
    Path(folder, f"{implementation}{task}").write_text(digest)


def virtual(num_gpus: int, folder: str) -> None:
    """Train four virtual replicas on so many GPUs, with deterministic ops, and leave a digest of the weights."""
    import gpus

    gpus.cut()
    import keras

    import keras_dist_ext as kde

    strategy = gpus.strategy(num_gpus)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = kde.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(32, "relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.25),
                keras.layers.Dense(2),
            ]
        )
        model.compile("adam", "mse", virtual_replicas=4)
    seeds = kde.ReplicaSeeds(42, enable_op_determinism=True)
    model.fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=[seeds])
    digest = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.get_weights())).hexdigest()
    Path(folder, f"{num_gpus}").write_text(digest)
