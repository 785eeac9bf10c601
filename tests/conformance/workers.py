"""What the worker processes of the multi-process tests run, started by `keras_dist_ext.cluster.launch.launch`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_dist_ext as kde
from conformance import feeds, models
from conformance.rows import ROWS
from conformance.run import Outcome, run

__all__ = ["faults_of_several_workers", "faults_of_parameter_servers", "run_row"]


def run_row(strategy: tf.distribute.Strategy, folder: Path, name: str) -> Outcome:
    """Run a row of the table on one of several workers."""
    (row,) = (row for row in ROWS if row.name == name)
    return run(row, kde, strategy)


def symptom(action: Callable[[], Any]) -> str:
    """Say how an action ends: its error, or what it returns."""
    try:
        return f"works: {action()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def faults_of_several_workers() -> dict[str, Any]:
    """Return what stock Keras says in `fit` (fault 1) and behind it (fault 2), and what ours gives."""
    strategy = kde.pick_strategy("multi_worker").strategy
    x, y = feeds.regression(45, 1)

    def trained(model: keras.Model) -> keras.Model:
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model

    class Built(keras.Sequential):
        """Leaves out the pull of a batch that fault 1 is about."""

        def _maybe_symbolic_build(self, *args: Any, **kwargs: Any) -> None:
            pass

    with strategy.scope():
        stock = models.dense(keras)
        built = Built([layers.Input((5,)), layers.Dense(3)])
        keras.utils.set_random_seed(1)
        ours = models.dense(kde)
    found: dict[str, Any] = {"1": symptom(lambda: trained(stock)), "2": symptom(lambda: trained(built))}
    trained(ours)
    found["weights"] = ours.get_weights()
    found["loss"] = ours.evaluate(x, y, batch_size=8, verbose=0)
    found["predictions"] = ours.predict(x, batch_size=8, verbose=0)
    return found


def faults_of_parameter_servers() -> dict[str, Any]:
    """Return what stock `fit` says on a coordinator (fault 17), and the losses of ours."""
    strategy = kde.pick_strategy("parameter_server").strategy
    x, y = feeds.regression(48, 1)

    def trained(library: models.Library) -> list[float]:
        with strategy.scope():
            model = models.sequential(library)
            model.compile(keras.optimizers.SGD(0.05), "mse")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        return [float(loss) for loss in model.fit(data, epochs=10, verbose=0).history["loss"]]

    return {"17": symptom(lambda: trained(keras)), "losses": np.asarray(trained(kde))}
