"""What workers do to see that what is saved is whole. As a script: saves until it is killed."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).random((16, 8), dtype="float32")


def make(strategy: Any, units: int = 100) -> Any:
    """A model that has made a step."""
    keras.utils.set_random_seed(1)
    import keras_dist_ext as kde

    with strategy.scope():
        model = kde.Sequential([keras.Input((8,)), *(keras.layers.Dense(units) for _ in range(3))])
        model.compile("adam", keras.losses.MeanSquaredError())
    model.fit(X, np.zeros([16, units]), batch_size=8, verbose=0)
    return model


def _keras(model: Any, path: str, strategy: Any) -> Any:
    model.save(f"{path}.keras")
    return keras.models.load_model(f"{path}.keras").get_weights()


def _kde(model: Any, path: str, strategy: Any) -> Any:
    import keras_dist_ext as kde

    model.save(f"{path}.ours.keras")
    return kde.load_model(f"{path}.ours.keras", strategy=strategy).get_weights()


def _function(model: Any, path: str, strategy: Any) -> Any:
    keras.saving.save_model(model, f"{path}.function.keras")
    return keras.models.load_model(f"{path}.function.keras").get_weights()


def _folder(model: Any, path: str, strategy: Any) -> Any:
    model.save(f"{path}.folder", zipped=False)
    return keras.models.load_model(f"{path}.folder").get_weights()


def _h5(model: Any, path: str, strategy: Any) -> Any:
    model.save(f"{path}.h5")
    return keras.models.load_model(f"{path}.h5").get_weights()


def _weights(model: Any, path: str, strategy: Any) -> Any:
    model.save_weights(f"{path}.weights.h5")
    model.load_weights(f"{path}.weights.h5")
    return model.get_weights()


def _shards(model: Any, path: str, strategy: Any) -> Any:
    model.save_weights(f"{path}.weights.json", max_shard_size=0.0002)
    model.load_weights(f"{path}.weights.json")
    return model.get_weights()


def _export(model: Any, path: str, strategy: Any) -> Any:
    model.export(f"{path}.exported", verbose=False)
    found = tf.saved_model.load(f"{path}.exported")
    np.testing.assert_allclose(found.serve(X), model(X), rtol=1e-5)
    return model.get_weights()


def _checkpoint(model: Any, path: str, strategy: Any) -> Any:
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.restore(checkpoint.save(f"{path}.checkpoint/a")).expect_partial()
    return model.get_weights()


def _manager(model: Any, path: str, strategy: Any) -> Any:
    checkpoint = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(checkpoint, f"{path}.managed", 2)
    manager.save()
    checkpoint.restore(manager.latest_checkpoint).expect_partial()
    return model.get_weights()


def _module(model: Any, path: str, strategy: Any) -> Any:
    with strategy.scope():
        module = tf.Module()
        module.weights = [tf.Variable(value) for value in model.get_weights()]
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(module=module), f"{path}.module", 2)
    manager.save()
    manager.restore_or_initialize()
    return [np.asarray(tf.convert_to_tensor(variable)) for variable in module.weights]


def _saved_model(model: Any, path: str, strategy: Any) -> Any:
    tf.saved_model.save(model, f"{path}.saved")
    found = tf.saved_model.load(f"{path}.saved")
    (values,) = found.signatures["serving_default"](tf.constant(X)).values()
    np.testing.assert_allclose(values, model(X), rtol=1e-5)
    return model.get_weights()


def _archive(model: Any, path: str, strategy: Any) -> Any:
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, [tf.TensorSpec([None, 8])])
    archive.write_out(f"{path}.archive", verbose=False)
    found = tf.saved_model.load(f"{path}.archive")
    np.testing.assert_allclose(found.serve(X), model(X), rtol=1e-5)
    return model.get_weights()


WAYS: dict[str, Callable[[Any, str, Any], Any]] = {
    "keras": _keras,
    "kde": _kde,
    "function": _function,
    "folder": _folder,
    "h5": _h5,
    "weights": _weights,
    "shards": _shards,
    "export": _export,
    "checkpoint": _checkpoint,
    "manager": _manager,
    "module": _module,
    "saved_model": _saved_model,
    "archive": _archive,
}


def save_everywhere(strategy: Any, folder: pathlib.Path) -> dict[str, Any]:
    """Save to shared paths and read them at once, on both workers; then on one alone, and then on the other."""
    from keras_dist_ext.strategy.workers import workers_of

    workers = workers_of(strategy)
    assert workers is not None
    model = make(strategy)
    before = model.get_weights()
    found: dict[str, Any] = {}
    (folder / "asked").mkdir(exist_ok=True)

    def save(name: str, path: pathlib.Path) -> str:
        try:
            weights = WAYS[name](model, str(path), strategy)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "equal" if all(np.array_equal(a, b) for a, b in zip(before, weights, strict=True)) else "other weights"

    for name in WAYS:
        workers.sum([])
        found[name] = [save(name, folder / "all") for _ in range(3)]
    for worker in range(2):
        workers.sum([])
        if workers.index == worker:
            alone = [name for name in WAYS if name not in ("kde", "module")]
            found["alone"] = {name: save(name, folder / f"alone{worker}") for name in alone}
    workers.sum([])
    if workers.is_chief:
        model.save(folder / "by the chief.keras")  # and the other comes to `load_model` before it is there
    import keras_dist_ext as kde

    loaded = kde.load_model(folder / "by the chief.keras", strategy=strategy).get_weights()
    found["by the chief"] = all(np.array_equal(a, b) for a, b in zip(before, loaded, strict=True))
    ways = (("a.keras", model.save, keras.models.load_model), ("a.weights.h5", model.save_weights, model.load_weights))
    for name, write, read in ways:
        for time in ("first", "again"):
            workers.sum([])
            try:
                write(folder / "asked" / name, overwrite=False)
                read(folder / "asked" / name)
                found[f"{time} {name}"] = "whole"
            except Exception as error:
                found[f"{time} {name}"] = f"{type(error).__name__}: {error}"
    workers.sum([])
    found["left"] = sorted(path.name for path in folder.iterdir() if path.name.endswith(".tmp"))
    return found


if __name__ == "__main__":
    where = pathlib.Path(sys.argv[1])
    saved = make(tf.distribute.get_strategy())
    saved.save(where / "model.keras")
    saved.save_weights(where / "model.weights.h5")
    saved.export(where / "exported", verbose=False)
    (where / "begun").touch()
    while os.getppid() != 1:
        saved.save(where / "model.keras")
        saved.save_weights(where / "model.weights.h5")
        saved.export(where / "exported", verbose=False)
